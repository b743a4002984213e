# SPDX-License-Identifier: Apache-2.0
"""Products of groups of rows, each with a matrix of its own."""

from .ragged_dot import ragged_dot as ragged_dot
from .ragged_dot_fp8 import ragged_dot_fp8 as ragged_dot_fp8
from .ragged_dot_int4_weights import ragged_dot_int4_weights as ragged_dot_int4_weights
from .ragged_dot_int8_weights import ragged_dot_int8_weights as ragged_dot_int8_weights
from .ragged_dot_mxfp4_weights import ragged_dot_mxfp4_weights as ragged_dot_mxfp4_weights
from .ragged_dot_transposed import ragged_dot_transposed as ragged_dot_transposed

# SPDX-License-Identifier: Apache-2.0
"""Products of two matrices."""

from .matmul import matmul as matmul
from .matmul_fp8 import matmul_fp8 as matmul_fp8
from .matmul_int8_weights import matmul_int8_weights as matmul_int8_weights

# SPDX-License-Identifier: Apache-2.0
"""Operations along the rows of an array."""

from .reduce_sum import reduce_sum as reduce_sum
from .rms_norm import rms_norm as rms_norm
from .softmax import softmax as softmax

# SPDX-License-Identifier: Apache-2.0
"""Operations along the rows of an array."""

from .group_norm import group_norm as group_norm
from .layer_norm import layer_norm as layer_norm
from .reduce_sum import reduce_sum as reduce_sum
from .rms_norm import rms_norm as rms_norm
from .softmax import softmax as softmax

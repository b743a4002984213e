# SPDX-License-Identifier: Apache-2.0
"""State-space duality and linear attention."""

from .linear_attention import linear_attention as linear_attention
from .ssd import ssd as ssd
from .ssd_step import ssd_step as ssd_step

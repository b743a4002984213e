# SPDX-License-Identifier: Apache-2.0
"""A layer of experts, built on the grouped products."""

from .moe import moe as moe
from .moe_mxfp4_weights import moe_mxfp4_weights as moe_mxfp4_weights

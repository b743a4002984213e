# SPDX-License-Identifier: Apache-2.0
"""Linear attention, state-space duality, delta rules with gates per head or channel, the convolution before them."""

from .conv import causal_conv1d as causal_conv1d
from .conv import causal_conv1d_step as causal_conv1d_step
from .delta import gated_delta_rule as gated_delta_rule
from .delta import gated_delta_rule_step as gated_delta_rule_step
from .kda import kda as kda
from .kda import kda_step as kda_step
from .ssd import linear_attention as linear_attention
from .ssd import ssd as ssd
from .ssd import ssd_step as ssd_step

# SPDX-License-Identifier: Apache-2.0
"""The short causal convolution before a recurrence, and its step."""

from .causal_conv1d import causal_conv1d as causal_conv1d
from .causal_conv1d_step import causal_conv1d_step as causal_conv1d_step

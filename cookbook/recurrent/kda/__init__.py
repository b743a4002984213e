# SPDX-License-Identifier: Apache-2.0
"""Kimi Delta Attention: the delta rule with a gate for each channel of a key."""

from .kda import kda as kda
from .kda_step import kda_step as kda_step

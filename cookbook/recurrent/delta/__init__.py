# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule."""

from .gated_delta_rule import gated_delta_rule as gated_delta_rule
from .gated_delta_rule_step import gated_delta_rule_step as gated_delta_rule_step

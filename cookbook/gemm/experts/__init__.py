# SPDX-License-Identifier: Apache-2.0
"""A layer of experts, built on the grouped products."""

from .moe import moe as moe

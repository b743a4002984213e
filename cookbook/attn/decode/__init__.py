# SPDX-License-Identifier: Apache-2.0
"""Attention of one query token of each sequence, whose keys lie in pages, and merging parts of a result."""

from .merge_attention import merge_attention as merge_attention
from .paged_attention import paged_attention as paged_attention

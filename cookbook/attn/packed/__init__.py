# SPDX-License-Identifier: Apache-2.0
"""Attention of packed sequences, and of prompts whose keys lie in pages."""

from .ragged_paged_attention import ragged_paged_attention as ragged_paged_attention
from .varlen_attention import varlen_attention as varlen_attention

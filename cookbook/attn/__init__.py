# SPDX-License-Identifier: Apache-2.0
"""Attention: whole sequences and their gradient, packed sequences, pages of a cache, and writing to it."""

from .cache import rope_write_kv as rope_write_kv
from .cache import write_kv as write_kv
from .decode import merge_attention as merge_attention
from .decode import paged_attention as paged_attention
from .dense import attention as attention
from .dense import attention_fp8 as attention_fp8
from .packed import ragged_paged_attention as ragged_paged_attention
from .packed import varlen_attention as varlen_attention

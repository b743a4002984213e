# SPDX-License-Identifier: Apache-2.0
"""Attention of batches of sequences of one length."""

from .attention import attention as attention
from .attention_fp8 import attention_fp8 as attention_fp8

"""Pallas kernels for Hopper GPUs: the index. Each kernel is one file; each chapter of the course builds one of them."""

from cookbook.attention import attention
from cookbook.elementwise import add, fuse
from cookbook.matmul import matmul
from cookbook.matmul_blocked import matmul_blocked
from cookbook.matmul_fp8 import matmul_fp8
from cookbook.matmul_int8_weights import matmul_int8_weights
from cookbook.matmul_pipelined import matmul_pipelined
from cookbook.matmul_wgmma import matmul_wgmma
from cookbook.paged_attention import merge_attention, paged_attention
from cookbook.ragged_paged_attention import ragged_paged_attention
from cookbook.reduce_sum import reduce_sum
from cookbook.rms_norm import rms_norm
from cookbook.softmax import softmax
from cookbook.varlen_attention import varlen_attention
from cookbook.write_kv import write_kv

__all__ = [
    "add",
    "attention",
    "fuse",
    "matmul",
    "matmul_blocked",
    "matmul_fp8",
    "matmul_int8_weights",
    "matmul_pipelined",
    "matmul_wgmma",
    "merge_attention",
    "paged_attention",
    "ragged_paged_attention",
    "reduce_sum",
    "rms_norm",
    "softmax",
    "varlen_attention",
    "write_kv",
]

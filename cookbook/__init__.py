"""Pallas kernels for Hopper GPUs: the index. Each family is a folder that works on its own.

Those for Blackwell have names of their own: `cookbook.blackwell.matmul`, `cookbook.blackwell.matmul_mxfp8`.
"""

from cookbook import blackwell as blackwell
from cookbook.attn.attention import attention
from cookbook.attn.attention_fp8 import attention_fp8
from cookbook.attn.merge import merge_attention
from cookbook.attn.paged_attention import paged_attention
from cookbook.attn.ragged_paged_attention import ragged_paged_attention
from cookbook.attn.rope_write_kv import rope_write_kv
from cookbook.attn.varlen_attention import varlen_attention
from cookbook.attn.write_kv import write_kv
from cookbook.elementwise import add, fuse
from cookbook.gemm.matmul import matmul
from cookbook.gemm.matmul_blocked import matmul_blocked
from cookbook.gemm.matmul_fp8 import matmul_fp8
from cookbook.gemm.matmul_int8_weights import matmul_int8_weights
from cookbook.gemm.matmul_pipelined import matmul_pipelined
from cookbook.gemm.matmul_wgmma import matmul_wgmma
from cookbook.gemm.moe import moe
from cookbook.gemm.ragged_dot import ragged_dot
from cookbook.gemm.ragged_dot_fp8 import ragged_dot_fp8
from cookbook.gemm.ragged_dot_int8_weights import ragged_dot_int8_weights
from cookbook.gemm.ragged_dot_transposed import ragged_dot_transposed
from cookbook.nvlink.all_gather import all_gather
from cookbook.nvlink.all_gather_matmul import all_gather_matmul
from cookbook.nvlink.all_to_all import all_to_all
from cookbook.nvlink.matmul_reduce_scatter import matmul_reduce_scatter
from cookbook.nvlink.reduce_scatter import reduce_scatter
from cookbook.recurrent.gated_delta_rule import gated_delta_rule
from cookbook.recurrent.gated_delta_rule_step import gated_delta_rule_step
from cookbook.recurrent.linear_attention import linear_attention
from cookbook.recurrent.ssd import ssd
from cookbook.recurrent.ssd_step import ssd_step
from cookbook.rows.reduce_sum import reduce_sum
from cookbook.rows.rms_norm import rms_norm
from cookbook.rows.softmax import softmax

__all__ = [
    "add",
    "all_gather",
    "all_gather_matmul",
    "all_to_all",
    "attention",
    "attention_fp8",
    "fuse",
    "gated_delta_rule",
    "gated_delta_rule_step",
    "linear_attention",
    "matmul",
    "matmul_blocked",
    "matmul_fp8",
    "matmul_int8_weights",
    "matmul_pipelined",
    "matmul_reduce_scatter",
    "matmul_wgmma",
    "merge_attention",
    "moe",
    "paged_attention",
    "ragged_dot",
    "ragged_dot_fp8",
    "ragged_dot_int8_weights",
    "ragged_dot_transposed",
    "ragged_paged_attention",
    "reduce_scatter",
    "reduce_sum",
    "rms_norm",
    "rope_write_kv",
    "softmax",
    "ssd",
    "ssd_step",
    "varlen_attention",
    "write_kv",
]

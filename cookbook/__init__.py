# SPDX-License-Identifier: Apache-2.0
"""Pallas kernels for Hopper GPUs: the index. Each family is a folder that works on its own.

Those for Blackwell have names of their own: `cookbook.blackwell.matmul`, `cookbook.blackwell.matmul_mxfp8`,
`cookbook.blackwell.ragged_dot`.
"""

from . import blackwell as blackwell
from .attn import (
    attention,
    attention_fp8,
    merge_attention,
    paged_attention,
    ragged_paged_attention,
    rope_write_kv,
    varlen_attention,
    write_kv,
)
from .elementwise import add, fuse
from .gemm import (
    glu,
    matmul,
    matmul_blocked,
    matmul_fp8,
    matmul_int4_weights,
    matmul_int8_weights,
    matmul_mxfp4_weights,
    matmul_pipelined,
    matmul_wgmma,
    moe,
    ragged_dot,
    ragged_dot_fp8,
    ragged_dot_int4_weights,
    ragged_dot_int8_weights,
    ragged_dot_mxfp4_weights,
    ragged_dot_transposed,
)
from .gemm import pack_int4 as pack_int4
from .gemm import pack_int4_awq as pack_int4_awq
from .gemm import pack_int4_gptq as pack_int4_gptq
from .gemm import pack_mxfp4 as pack_mxfp4
from .gemm import unpack_int4 as unpack_int4
from .loss import cross_entropy, linear_cross_entropy
from .nvlink import all_gather, all_gather_matmul, all_to_all, matmul_reduce_scatter, reduce_scatter
from .recurrent import (
    causal_conv1d,
    causal_conv1d_step,
    gated_delta_rule,
    gated_delta_rule_step,
    kda,
    kda_step,
    linear_attention,
    ssd,
    ssd_step,
)
from .rows import group_norm, layer_norm, reduce_sum, rms_norm, softmax
from .select import sample, top_k

__version__ = "0.2.0"

__all__ = [
    "add",
    "all_gather",
    "all_gather_matmul",
    "all_to_all",
    "attention",
    "attention_fp8",
    "causal_conv1d",
    "causal_conv1d_step",
    "cross_entropy",
    "fuse",
    "gated_delta_rule",
    "gated_delta_rule_step",
    "glu",
    "group_norm",
    "kda",
    "kda_step",
    "layer_norm",
    "linear_attention",
    "linear_cross_entropy",
    "matmul",
    "matmul_blocked",
    "matmul_fp8",
    "matmul_int4_weights",
    "matmul_int8_weights",
    "matmul_mxfp4_weights",
    "matmul_pipelined",
    "matmul_reduce_scatter",
    "matmul_wgmma",
    "merge_attention",
    "moe",
    "paged_attention",
    "ragged_dot",
    "ragged_dot_fp8",
    "ragged_dot_int4_weights",
    "ragged_dot_int8_weights",
    "ragged_dot_mxfp4_weights",
    "ragged_dot_transposed",
    "ragged_paged_attention",
    "reduce_scatter",
    "reduce_sum",
    "rms_norm",
    "rope_write_kv",
    "sample",
    "softmax",
    "ssd",
    "ssd_step",
    "top_k",
    "varlen_attention",
    "write_kv",
]

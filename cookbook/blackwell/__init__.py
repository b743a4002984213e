# SPDX-License-Identifier: Apache-2.0
"""Matrix products of data-centre Blackwell GPUs: compiled for a B200 and interpreted, never run or timed on one."""

from .matmul import matmul, matmul_reference
from .matmul_mxfp8 import matmul_mxfp8, matmul_mxfp8_reference, quantize_mxfp8
from .ragged_dot import ragged_dot, ragged_dot_reference

__all__ = [
    "matmul", "matmul_mxfp8", "matmul_mxfp8_reference", "matmul_reference", "quantize_mxfp8", "ragged_dot",
    "ragged_dot_reference",
]  # fmt: skip

"""Every public op, with small operands: what the tests of JAX's transformations and options go through.

Plain data, no test: an entry says how an op is called, not what it computes.
"""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
import numpy as np

import cookbook

BF16, F32, E4M3, E8M0, INT8 = "bfloat16", "float32", "float8_e4m3fn", "float8_e8m0fnu", "int8"


@dataclasses.dataclass(frozen=True)
class Op:
    """One op and one problem."""

    operands: dict[str, Any]  # By argument, in order: a dtype, a shape and a kind of VALUES; or an array of integers.
    options: dict[str, Any] = dataclasses.field(default_factory=dict)  # The call needs them besides.
    more: dict[str, Any] = dataclasses.field(default_factory=dict)  # Operands that it takes by name.
    choices: dict[str, Any] = dataclasses.field(default_factory=dict)  # Options that go with these.
    static: tuple[str, ...] = ()  # Options that are compiled into the kernel.
    optional: tuple[str, ...] = ()  # Operands that may be None.
    gradients: tuple[str, ...] = ()  # Operands in which it is differentiable.
    empty: tuple[dict[str, int], ...] = ()  # Ways to be empty: by operand, the axis that is 0.
    axis: str | None = None  # The axis of a mesh over which it works.
    major: int = 9  # The GPU's compute capability.

    def arrays(self, with_more: bool = False) -> dict[str, np.ndarray]:
        rng, operands = np.random.default_rng(0), self.operands | (self.more if with_more else {})
        return {name: x if isinstance(x, np.ndarray) else _drawn(rng, *x) for name, x in operands.items()}


VALUES = {
    "normal": lambda x: x,
    "positive": np.abs,
    "zeros": lambda x: np.round(np.abs(x)),
    "negative": lambda x: -np.abs(x),
    "share": lambda x: 1 / (1 + np.exp(x)),
    "unit": lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True),
}


def _drawn(rng, dtype, shape, kind="normal"):
    if dtype == INT8:
        return rng.integers(-100, 100, shape).astype(INT8)
    x = VALUES[kind](rng.standard_normal(shape))
    return (np.exp2(np.round(x)) if dtype == E8M0 else x).astype(jnp.dtype(dtype))


def named(name: str):
    """`cookbook.<name>`."""
    return functools.reduce(getattr, name.split("."), cookbook)


def function(name: str):
    """The op as a function of its operands."""
    return cookbook.fuse(lambda x, y: x * jnp.sin(y)) if name == "fuse" else named(name)


def prefixes(*lengths: int) -> np.ndarray:
    return np.cumsum([0, *lengths], dtype=np.int32)


PAGES = (BF16, (4, 16, 1, 64))
TABLES, LENS = np.array([[3, 0], [1, 2]], np.int32), np.array([20, 7], np.int32)
GROUPS = np.array([5, 0, 11], np.int32)
LOGITS = ("scale", "logits_soft_cap", "local_window_size", "return_lse")
CROSS_ENTROPY = ("ignore_index", "label_smoothing", "z_loss", "logits_soft_cap", "return_lse")
PAGED = dict(k_pages=PAGES, v_pages=PAGES, block_tables=TABLES, kv_lens=LENS)
MATRICES = np.random.default_rng(1).integers(0, 2**32, (3, 1, 2, 512), np.uint32)  # 128 by 16 weights of 4 bits each.
WORDS, E2M1_SCALES = MATRICES[0], MATRICES[1, 0, :, :16].astype(np.uint16) % 16 + (8 * 257 << 4)
HEADS, SEGMENTS = (1, 20, 2, 64), np.repeat(np.array([3, 7], np.int32), (8, 12))[None]

OPS = {
    "add": Op(dict(x=(BF16, (3, 40)), y=(BF16, (3, 40))), gradients=("x", "y"), empty=(dict(x=0, y=0),)),
    "all_gather": Op(dict(x=(F32, (4, 8))), gradients=("x",), empty=(dict(x=0),), axis="d"),
    "all_gather_matmul": Op(
        dict(lhs=(BF16, (8, 64)), rhs=(BF16, (64, 16))), gradients=("lhs", "rhs"), empty=(dict(lhs=0),), axis="d"
    ),
    "all_to_all": Op(dict(x=(F32, (4, 8))), gradients=("x",), empty=(dict(x=0),), axis="d"),
    "attention": Op(
        dict(query=(BF16, HEADS), key=(BF16, HEADS), value=(BF16, HEADS)),
        static=(*LOGITS, "is_causal", "deterministic"),
        gradients=("query", "key", "value"),
        more=dict(segment_ids=SEGMENTS, sinks=(F32, (2,))),
        choices=dict(is_causal=True, logits_soft_cap=3.0, local_window_size=9, return_lse=True),
        empty=(dict(query=0, key=0, value=0), dict(query=1), dict(key=1, value=1)),
    ),
    "attention_fp8": Op(
        dict(q=(E4M3, HEADS), k=(E4M3, HEADS), v=(E4M3, HEADS)),
        dict(q_descale=0.5, k_descale=2.0, v_descale=1.0),
        static=(*LOGITS, "is_causal"),
        choices=dict(is_causal=True, logits_soft_cap=3.0, local_window_size=9, return_lse=True),
        empty=(dict(q=0, k=0, v=0), dict(q=1), dict(k=1, v=1)),
    ),
    "blackwell.matmul": Op(
        dict(a=(BF16, (128, 64)), b=(BF16, (64, 64))),
        static=("transpose_a", "transpose_b"),
        gradients=("a", "b"),
        more=dict(bias=(F32, (64,))),
        choices=dict(activation="gelu"),
        empty=(dict(a=0), dict(b=1)),
        major=10,
    ),
    "blackwell.matmul_mxfp8": Op(
        dict(a=(E4M3, (128, 128)), a_scales=(E8M0, (128, 4)), b=(E4M3, (128, 128)), b_scales=(E8M0, (128, 4))),
        more=dict(bias=(F32, (128,))),
        choices=dict(activation="gelu"),
        empty=(dict(a=0, a_scales=0), dict(b=0, b_scales=0)),
        major=10,
    ),
    "blackwell.ragged_dot": Op(
        dict(lhs=(BF16, (20, 32)), rhs=(BF16, (3, 32, 16)), group_sizes=GROUPS),
        static=("transpose_rhs",),
        gradients=("lhs", "rhs"),
        more=dict(group_offset=np.array(1, np.int32)),
        choices=dict(activation="swiglu"),
        empty=(dict(lhs=0), dict(rhs=2), dict(lhs=1, rhs=1), dict(rhs=0, group_sizes=0)),
        major=10,
    ),
    "causal_conv1d": Op(
        dict(x=(BF16, (1, 20, 40)), weight=(BF16, (40, 4))),
        static=("return_final_state",),
        gradients=("x", "weight"),
        more=dict(bias=(F32, (40,)), initial_state=(F32, (1, 40, 3))),
        choices=dict(activation="silu", return_final_state=True),
        empty=(dict(x=0), dict(x=1), dict(x=2, weight=0)),
    ),
    "causal_conv1d_step": Op(
        dict(x=(BF16, (2, 40)), state=(BF16, (2, 40, 3)), weight=(F32, (40, 4))),
        more=dict(bias=(F32, (40,))),
        choices=dict(activation="silu"),
        empty=(dict(x=0, state=0), dict(x=1, state=1, weight=0)),
    ),
    "cross_entropy": Op(
        dict(logits=(BF16, (3, 40)), labels=np.array([39, 0, -100], np.int32)),
        static=CROSS_ENTROPY,
        gradients=("logits",),
        choices=dict(reduction="none", z_loss=1e-3, logits_soft_cap=3.0, return_lse=True),
        empty=(dict(logits=0, labels=0),),
    ),
    "fuse": Op(  # An argument of None is a pytree without arrays.
        dict(x=(BF16, (3, 40)), y=(BF16, (3, 40))),
        optional=("x", "y"),
        gradients=("x", "y"),
        empty=(dict(x=0, y=0),),
    ),
    "gated_delta_rule": Op(
        dict(
            q=(BF16, HEADS),
            k=(BF16, HEADS, "unit"),
            v=(BF16, HEADS),
            g=(F32, HEADS[:3], "negative"),
            beta=(F32, HEADS[:3], "share"),
        ),
        static=("scale", "return_final_state", "use_qk_l2norm"),
        gradients=("q", "k", "v", "g", "beta"),
        more=dict(initial_state=(F32, (1, 2, 64, 64))),
        choices=dict(return_final_state=True, use_qk_l2norm=True),
        empty=(dict(q=0, k=0, v=0, g=0, beta=0), dict(q=1, k=1, v=1, g=1, beta=1)),
    ),
    "gated_delta_rule_step": Op(
        dict(
            q=(BF16, (2, 2, 64)),
            k=(BF16, (2, 2, 64), "unit"),
            v=(BF16, (2, 2, 64)),
            g=(F32, (2, 2), "negative"),
            beta=(F32, (2, 2), "share"),
            state=(F32, (2, 2, 64, 64)),
        ),
        static=("scale",),
        empty=(dict(q=0, k=0, v=0, g=0, beta=0, state=0),),
    ),
    "kda": Op(
        dict(
            q=(BF16, HEADS),
            k=(BF16, HEADS, "unit"),
            v=(BF16, HEADS),
            g=(F32, HEADS, "negative"),
            beta=(F32, HEADS[:3], "share"),
        ),
        static=("scale", "return_final_state", "use_qk_l2norm"),
        gradients=("q", "k", "v", "g", "beta"),
        more=dict(initial_state=(F32, (1, 2, 64, 64))),
        choices=dict(return_final_state=True, use_qk_l2norm=True),
        empty=(dict(q=0, k=0, v=0, g=0, beta=0), dict(q=1, k=1, v=1, g=1, beta=1)),
    ),
    "kda_step": Op(
        dict(
            q=(BF16, (2, 2, 64)),
            k=(BF16, (2, 2, 64), "unit"),
            v=(BF16, (2, 2, 64)),
            g=(F32, (2, 2, 64), "negative"),
            beta=(F32, (2, 2), "share"),
            state=(F32, (2, 2, 64, 64)),
        ),
        static=("scale", "use_qk_l2norm"),
        empty=(dict(q=0, k=0, v=0, g=0, beta=0, state=0),),
    ),
    "glu": Op(
        dict(x=(BF16, (20, 32)), w_gate=(BF16, (32, 24)), w_up=(BF16, (32, 24))),
        static=("transpose_weights",),
        gradients=("x", "w_gate", "w_up"),
        choices=dict(activation="gelu"),
        empty=(dict(x=0), dict(w_gate=1, w_up=1), dict(x=1, w_gate=0, w_up=0)),
    ),
    "group_norm": Op(
        dict(x=(BF16, (3, 40)), weight=(F32, (40,)), bias=(F32, (40,))),
        static=("eps", "group_size", "norm_before_gate", "is_rms_norm"),
        optional=("weight", "bias"),
        gradients=("x", "weight", "bias"),
        more=dict(gate=(BF16, (3, 40))),
        choices=dict(group_size=8, norm_before_gate=False),
        empty=(dict(x=0),),
    ),
    "layer_norm": Op(
        dict(x=(BF16, (3, 40)), weight=(F32, (40,)), bias=(F32, (40,))),
        static=("eps",),
        optional=("weight", "bias"),
        gradients=("x", "weight", "bias"),
        more=dict(residual=(F32, (3, 40))),
        empty=(dict(x=0),),
    ),
    "linear_attention": Op(
        dict(query=(BF16, HEADS), key=(BF16, HEADS), value=(BF16, HEADS)),
        static=("scale", "return_final_state"),
        gradients=("query", "key", "value"),
        more=dict(initial_state=(F32, (1, 2, 64, 64))),
        choices=dict(return_final_state=True),
        empty=(dict(query=0, key=0, value=0), dict(query=1, key=1, value=1)),
    ),
    "linear_cross_entropy": Op(
        dict(hidden=(BF16, (3, 64)), weight=(BF16, (40, 64)), labels=np.array([39, 0, -100], np.int32)),
        static=("transpose_weight", *CROSS_ENTROPY),
        gradients=("hidden", "weight"),
        choices=dict(reduction="none", z_loss=1e-3, logits_soft_cap=3.0, return_lse=True),
        empty=(dict(hidden=0, labels=0),),
    ),
    "matmul": Op(
        dict(a=(BF16, (20, 32)), b=(BF16, (32, 24))),
        static=("transpose_a", "transpose_b"),
        gradients=("a", "b"),
        more=dict(bias=(F32, (24,))),
        choices=dict(activation="gelu"),
        empty=(dict(a=0), dict(b=1), dict(a=1, b=0)),
    ),
    "matmul_blocked": Op(dict(a=(F32, (20, 32)), b=(F32, (32, 24))), empty=(dict(a=0), dict(b=1), dict(a=1, b=0))),
    "matmul_fp8": Op(
        dict(a=(E4M3, (20, 32)), b=(E4M3, (32, 16))),
        static=("transpose_b",),
        more=dict(scale_a=(F32, (20,)), scale_b=(F32, (16,))),
        empty=(dict(a=0), dict(b=1), dict(a=1, b=0)),
    ),
    "matmul_int4_weights": Op(
        dict(x=(BF16, (20, 128)), w=WORDS, scales=(BF16, (2, 16))),
        dict(group_size=64),
        static=("group_size",),
        more=dict(zeros=(BF16, (2, 16), "zeros")),
        empty=(dict(x=0), dict(w=0, scales=1), dict(x=1, w=1, scales=0)),
    ),
    "matmul_int8_weights": Op(
        dict(a=(BF16, (20, 32)), w_q=(INT8, (32, 16)), scales=(F32, (16,))),
        static=("transpose_w",),
        empty=(dict(a=0), dict(w_q=1, scales=0), dict(a=1, w_q=0)),
    ),
    "matmul_mxfp4_weights": Op(
        dict(x=(BF16, (20, 128)), w=WORDS, scales=E2M1_SCALES),
        empty=(dict(x=0), dict(w=0, scales=1), dict(x=1, w=1, scales=0)),
    ),
    "matmul_pipelined": Op(
        dict(a=(BF16, (20, 32)), b=(BF16, (32, 24))),
        static=("transpose_a", "transpose_b"),
        choices=dict(activation="silu"),
        empty=(dict(a=0), dict(b=1), dict(a=1, b=0)),
    ),
    "matmul_reduce_scatter": Op(
        dict(lhs=(BF16, (8, 64)), rhs=(BF16, (64, 16))), gradients=("lhs", "rhs"), empty=(dict(lhs=0),), axis="d"
    ),
    "matmul_wgmma": Op(
        dict(a=(BF16, (20, 32)), b=(BF16, (32, 24))),
        static=("transpose_a", "transpose_b"),
        empty=(dict(a=0), dict(b=1), dict(a=1, b=0)),
    ),
    "merge_attention": Op(
        dict(out_a=(BF16, (3, 2, 64)), lse_a=(F32, (3, 2)), out_b=(BF16, (3, 2, 64)), lse_b=(F32, (3, 2))),
        gradients=("out_a", "lse_a", "out_b", "lse_b"),
        empty=(dict(out_a=0, lse_a=0, out_b=0, lse_b=0),),
    ),
    "moe": Op(
        dict(x=(BF16, (5, 64)), router_logits=(F32, (5, 3)), w_gate_up=(BF16, (3, 64, 32)), w_down=(BF16, (3, 16, 64))),
        dict(top_k=2),
        static=("top_k", "renormalize"),
        gradients=("x", "router_logits", "w_gate_up", "w_down"),
        more=dict(group_offset=np.array(1, np.int32)),
        choices=dict(renormalize=False),
        empty=(dict(x=0, router_logits=0),),
    ),
    "paged_attention": Op(
        dict(q=(BF16, (2, 2, 64)), **PAGED),
        static=LOGITS,
        more=dict(sinks=(F32, (2,))),
        choices=dict(logits_soft_cap=3.0, local_window_size=9, return_lse=True),
        empty=(dict(q=0, block_tables=0, kv_lens=0),),
    ),
    "ragged_dot": Op(
        dict(lhs=(BF16, (20, 32)), rhs=(BF16, (3, 32, 16)), group_sizes=GROUPS),
        static=("transpose_rhs",),
        gradients=("lhs", "rhs"),
        more=dict(group_offset=np.array(1, np.int32)),
        choices=dict(activation="swiglu"),
        empty=(dict(lhs=0), dict(rhs=2), dict(lhs=1, rhs=1), dict(rhs=0, group_sizes=0)),
    ),
    "ragged_dot_fp8": Op(
        dict(
            lhs=(E4M3, (20, 32)),
            rhs=(E4M3, (3, 32, 16)),
            scale_lhs=(F32, (20,)),
            scale_rhs=(F32, (3, 16)),
            group_sizes=GROUPS,
        ),
        static=("transpose_rhs",),
        more=dict(group_offset=np.array(1, np.int32)),
        empty=(dict(lhs=0, scale_lhs=0), dict(rhs=0, scale_rhs=0, group_sizes=0)),
    ),
    "ragged_dot_int4_weights": Op(
        dict(lhs=(BF16, (20, 128)), w=MATRICES, scales=(BF16, (3, 2, 16)), group_sizes=GROUPS),
        dict(group_size=64),
        static=("group_size",),
        more=dict(zeros=(BF16, (3, 2, 16), "zeros"), group_offset=np.array(1, np.int32)),
        empty=(dict(lhs=0), dict(w=0, scales=0, group_sizes=0)),
    ),
    "ragged_dot_mxfp4_weights": Op(
        dict(lhs=(BF16, (20, 128)), w=MATRICES, scales=np.stack([E2M1_SCALES] * 3), group_sizes=GROUPS),
        more=dict(group_offset=np.array(1, np.int32)),
        empty=(dict(lhs=0), dict(w=0, scales=0, group_sizes=0)),
    ),
    "ragged_dot_int8_weights": Op(
        dict(lhs=(BF16, (20, 32)), rhs=(INT8, (3, 32, 16)), scales=(F32, (3, 16)), group_sizes=GROUPS),
        static=("transpose_rhs",),
        more=dict(group_offset=np.array(1, np.int32)),
        empty=(dict(lhs=0), dict(rhs=0, scales=0, group_sizes=0)),
    ),
    "ragged_dot_transposed": Op(
        dict(lhs=(BF16, (20, 32)), rhs=(BF16, (20, 16)), group_sizes=GROUPS),
        static=("num_groups",),
        empty=(dict(lhs=0, rhs=0), dict(group_sizes=0)),
    ),
    "ragged_paged_attention": Op(
        dict(q=(BF16, (6, 2, 64)), **PAGED, cu_seqlens_q=prefixes(5, 1)),
        static=LOGITS,
        more=dict(sinks=(F32, (2,))),
        choices=dict(logits_soft_cap=3.0, local_window_size=9, return_lse=True),
        empty=(dict(q=0),),
    ),
    "reduce_scatter": Op(dict(x=(F32, (4, 8))), gradients=("x",), empty=(dict(x=0),), axis="d"),
    "reduce_sum": Op(
        dict(x=(F32, (3, 40))), dict(axis=-1), static=("axis",), gradients=("x",), empty=(dict(x=0), dict(x=1))
    ),
    "rms_norm": Op(
        dict(x=(BF16, (3, 40)), scale=(F32, (40,))),
        static=("eps",),
        optional=("scale",),
        gradients=("x", "scale"),
        more=dict(residual=(F32, (3, 40))),
        empty=(dict(x=0),),
    ),
    "rope_write_kv": Op(
        dict(
            qkv=(BF16, (5, 3, 64)),
            cos=(F32, (5, 32)),
            sin=(F32, (5, 32)),
            k_pages=PAGES,
            v_pages=PAGES,
            slot_mapping=np.array([4, -1, 16, 2, 0], np.int32),
        ),
        more=dict(q_norm=(F32, (64,)), k_norm=(F32, (64,))),
        empty=(dict(qkv=0, cos=0, sin=0, slot_mapping=0),),
    ),
    "sample": Op(
        dict(logits=(F32, (3, 40)), seeds=np.array([1, 2, 3], np.int32), positions=np.array([0, 5, 9], np.int32)),
        more=dict(temperature=(F32, (3,), "positive"), top_p=(F32, (3,), "share")),
        static=("num_logprobs",),
        choices=dict(num_logprobs=2),
        empty=(dict(logits=0, seeds=0, positions=0),),
    ),
    "softmax": Op(dict(x=(F32, (3, 40))), gradients=("x",), empty=(dict(x=0),)),
    "ssd": Op(
        dict(
            x=(BF16, HEADS),
            dt=(F32, HEADS[:3], "positive"),
            a=(F32, (2,), "negative"),
            b=(BF16, (1, 20, 1, 64)),
            c=(BF16, (1, 20, 1, 64)),
        ),
        static=("chunk_size", "return_final_state"),
        gradients=("x", "dt", "a", "b", "c"),
        more=dict(d=(F32, (2,)), initial_state=(F32, (1, 2, 64, 64))),
        choices=dict(return_final_state=True),
        empty=(dict(x=0, dt=0, b=0, c=0), dict(x=1, dt=1, b=1, c=1)),
    ),
    "ssd_step": Op(
        dict(
            x=(BF16, (2, 2, 64)),
            dt=(F32, (2, 2), "positive"),
            a=(F32, (2,), "negative"),
            b=(BF16, (2, 1, 64)),
            c=(BF16, (2, 1, 64)),
            state=(F32, (2, 2, 64, 64)),
        ),
        more=dict(d=(F32, (2,))),
        empty=(dict(x=0, dt=0, b=0, c=0, state=0),),
    ),
    "top_k": Op(dict(x=(F32, (3, 40))), options=dict(k=5), static=("k",), gradients=("x",), empty=(dict(x=0),)),
    "varlen_attention": Op(
        dict(
            q=(BF16, (20, 2, 64)),
            k=(BF16, (20, 2, 64)),
            v=(BF16, (20, 2, 64)),
            cu_seqlens_q=prefixes(13, 0, 7),
            cu_seqlens_kv=prefixes(9, 4, 7),
        ),
        static=(*LOGITS, "is_causal"),
        more=dict(sinks=(F32, (2,))),
        choices=dict(is_causal=True, logits_soft_cap=3.0, local_window_size=9, return_lse=True),
        empty=(dict(q=0, k=0, v=0), dict(q=0), dict(k=0, v=0)),
    ),
    "write_kv": Op(
        dict(
            k_new=(BF16, (5, 1, 64)),
            v_new=(BF16, (5, 1, 64)),
            k_pages=PAGES,
            v_pages=PAGES,
            slot_mapping=np.array([4, -1, 16, 2, 0], np.int32),
        ),
        empty=(dict(k_new=0, v_new=0, slot_mapping=0),),
    ),
}

# SPDX-License-Identifier: Apache-2.0
"""Layer of a mixture of experts with MXFP4 weights, such as gpt-oss's.

It computes what `moe.py` says, with biases and clamped SwiGLU where they are given. Weights are e2m1 values times a
power of two for each 32 along K.

Shapes: x (..., H), router_logits (..., E), weights and scales as `ragged_dot_mxfp4_weights` takes them: of 2I columns,
the gate's, then the up product's; and of H columns. o (..., H). x is bfloat16; routing, biases and the activation are
float32; both products are rounded to bfloat16.

Routing and permutation are those of `moe.py`, the products `ragged_dot_mxfp4_weights`; between them XLA adds biases and
applies the activation, in one loop over the rows each time.

Bound by: the memory that the experts come from with few tokens; with many, the products.

Not supported: float16; differentiation. Compiled for Hopper; not run on a GPU yet. Source: gpt-oss (2025).
"""

import functools

import jax
import jax.numpy as jnp

from ... import _host
from ..dense.matmul_mxfp4_weights import widened
from ..grouped.ragged_dot_mxfp4_weights import ragged_dot_mxfp4_weights
from .copy_rows import copy_rows
from .moe import biased, check_tokens, limit_of, moe_reference, require_biases, route, sum_of_rows, swiglu_of


def moe_mxfp4_weights_reference(x, router_logits, w_gate_up, gate_up_scales, w_down, down_scales, top_k, **how):
    dtype, inner = jnp.promote_types(x.dtype, jnp.float32), w_gate_up.shape[1] // 2
    gate_up = widened(w_gate_up, gate_up_scales, dtype)[:, : x.shape[-1]]
    return moe_reference(x, router_logits, gate_up, widened(w_down, down_scales, dtype)[:, :inner], top_k, **how)


def moe_mxfp4_weights(
    x: jax.Array,
    router_logits: jax.Array,
    w_gate_up: jax.Array,
    gate_up_scales: jax.Array,
    w_down: jax.Array,
    down_scales: jax.Array,
    *,
    top_k: int,
    renormalize: bool = True,
    group_offset: jax.Array | None = None,
    b_gate_up: jax.Array | None = None,
    b_down: jax.Array | None = None,
    swiglu_limit: float | None = None,
) -> jax.Array:
    """Weighted sum of the outputs of each token's `top_k` experts, whose weights are MXFP4.

    gpt-oss's columns of the gate and of the up product alternate: bring them in order before packing, as in
    `blocks = jnp.concatenate([blocks[:, 0::2], blocks[:, 1::2]], axis=1)`, its scales and biases alike. Compiled for
    Hopper; not run on a GPU yet.

    On an automatic mesh JAX gathers sharded operands on every device and says nothing: call it inside `jax.shard_map`.

    Args:
      x: (..., H); bfloat16, H a multiple of 8.
      router_logits: (..., E), of a floating dtype.
      w_gate_up, gate_up_scales: (E, 2I, 8 ceil(H / 64)) uint32 and (E, ceil(H / 64), 2I) uint16, as
        `cookbook.pack_mxfp4` packs them: columns of the gate, then the up product's.
      w_down, down_scales: (E, H, 8 ceil(I / 64)) uint32 and (E, ceil(I / 64), H) uint16; I a multiple of 8.
      top_k, renormalize, group_offset, b_gate_up, b_down, swiglu_limit: as `cookbook.moe` takes them.

    Returns:
      (..., H) bfloat16; sums over experts are float32, rounded once.

    Raises:
      ValueError: a rank, shape, dtype or row length is not supported; RuntimeError: no GPU.
    """
    op = "moe_mxfp4_weights"
    given = dict(x=x, router_logits=router_logits, w_gate_up=w_gate_up, gate_up_scales=gate_up_scales, w_down=w_down,
                 down_scales=down_scales)  # fmt: skip
    x, router_logits, w_gate_up, gate_up_scales, w_down, down_scales = (
        _host.as_array(op, name, value) for name, value in given.items()
    )
    top_k, renormalize = _host.option(op, "top_k", top_k, int), _host.option(op, "renormalize", renormalize, bool)
    swiglu_limit = limit_of(op, swiglu_limit)
    biases = [
        None if bias is None else _host.as_array(op, name, bias)
        for name, bias in (("b_gate_up", b_gate_up), ("b_down", b_down))
    ]
    _check(op, x, router_logits, w_gate_up, w_down, top_k, group_offset, biases)
    if x.size == 0:
        return jnp.zeros_like(x)
    _host.require_tensor_cores(op)
    x, router_logits, *known = _host.without_gradient(
        op, f"{_host.PACKAGE}.moe of widened weights", x, router_logits, *(bias for bias in biases if bias is not None)
    )
    b_gate_up, b_down = (bias if bias is None else known.pop(0) for bias in biases)
    tokens = x.reshape(-1, x.shape[-1])
    routing = route(router_logits.reshape(len(tokens), -1), top_k, renormalize)
    of_groups = dict(group_sizes=routing.group_sizes, group_offset=group_offset)
    product = functools.partial(ragged_dot_mxfp4_weights, **of_groups)
    rows = copy_rows(tokens, routing.rows, params=_host.compiler_params())
    both = biased(product(rows, w_gate_up, gate_up_scales), b_gate_up, **of_groups)
    inner = swiglu_of(swiglu_limit)(both).astype(x.dtype)
    out = biased(product(inner, w_down, down_scales), b_down, **of_groups).astype(x.dtype)
    return sum_of_rows(out, routing.weights, routing.rows).reshape(x.shape)


def _check(op: str, x, router_logits, w_gate_up, w_down, top_k: int, group_offset, biases):
    """`ragged_dot_mxfp4_weights` checks the rest."""
    if x.dtype != jnp.bfloat16:
        raise ValueError(f"{_host.PACKAGE}.{op}: {x.dtype=}; must be bfloat16: cast it")
    if w_gate_up.ndim != 3 or w_down.ndim != 3:
        raise ValueError(f"{_host.PACKAGE}.{op}: {w_gate_up.shape=}, {w_down.shape=}; must be a matrix for each expert")
    (count, columns, _), hidden = w_gate_up.shape, x.shape[-1] if x.ndim else 0
    if columns % 16 or w_down.shape[:2] != (count, hidden):
        raise ValueError(
            f"{_host.PACKAGE}.{op}: {w_gate_up.shape=}, {w_down.shape=}; must be (E, 2I, words) and (E, {hidden}, "
            "words), of an I that is a multiple of 8: pad it"
        )
    check_tokens(op, x, router_logits, count, top_k, group_offset)
    require_biases(op, biases, count, columns // 2, hidden)

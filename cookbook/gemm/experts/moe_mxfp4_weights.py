# SPDX-License-Identifier: Apache-2.0
"""Layer of a mixture of experts with MXFP4 weights and biases, as gpt-oss has it.

    o[t] = sum over the top_k experts e of token t: weight[t, e] * (act(x[t] @ w_gate_up[e] + b[e]) @ w_down[e] + d[e])
    act(gate, up) = g * sigmoid(alpha g) * (u + 1), where g = min(gate, limit) and u = clip(up, -limit, limit)

Shapes: x (..., H), router_logits (..., E), weights and scales as `ragged_dot_mxfp4_weights` takes them, of 2I columns:
the gate's, then the up product's; and of H columns. bias_gate_up b (E, 2I), bias_down d (E, H), o (..., H). x is
bfloat16; routing, biases and the activation are float32; both products are rounded to bfloat16.

Routing and permutation are those of `moe.py`, the products `ragged_dot_mxfp4_weights`; between them XLA adds biases and
applies the activation, in one loop over the rows each time.

Bound by: the memory that the experts come from with few tokens; with many, the products.

Not supported: other activations; float16; differentiation. Compiled for Hopper; not run on a GPU yet. Source: gpt-oss
(2025).
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from ... import _host
from ..dense.matmul_mxfp4_weights import widened
from ..grouped.ragged_dot_mxfp4_weights import ragged_dot_mxfp4_weights
from .copy_rows import copy_rows
from .moe import check_tokens, route, sum_of_rows

ALPHA, LIMIT = 1.702, 7.0  # Those of gpt-oss.


def moe_mxfp4_weights_reference(x, router_logits, w_gate_up, gate_up_scales, w_down, down_scales, bias_gate_up=0.0,
                                bias_down=0.0, *, top_k, renormalize=True, alpha=ALPHA, limit=LIMIT):  # fmt: skip
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    x, logits = x.astype(dtype), router_logits.astype(dtype)
    chosen, experts = lax.top_k(logits, top_k)
    weights = jax.nn.softmax(chosen) if renormalize else jnp.exp(chosen - jax.nn.logsumexp(logits, -1, keepdims=True))
    out, product = jnp.zeros_like(x), functools.partial(jnp.matmul, precision="highest")
    gate_up, down = widened(w_gate_up, gate_up_scales, dtype), widened(w_down, down_scales, dtype)  # Padded along K.
    inner, hidden = gate_up.shape[2] // 2, down.shape[2]
    bias_gate_up = jnp.broadcast_to(bias_gate_up, (len(down), 2 * inner)).astype(dtype)
    bias_down = jnp.broadcast_to(bias_down, (len(down), hidden)).astype(dtype)
    for expert in range(len(down)):
        both = product(x, gate_up[expert, :hidden]) + bias_gate_up[expert]
        y = product(clamped_swiglu(both, alpha, limit), down[expert, :inner]) + bias_down[expert]
        out = out + jnp.where(experts == expert, weights, 0).sum(-1, keepdims=True) * y
    return out


@_host.own_options()
def clamped_swiglu(both, alpha: float = ALPHA, limit: float = LIMIT):
    """The activation of (M, 2N) values, which hold the gate, then the up product."""
    gate, up = lax.split(both, [both.shape[1] // 2] * 2, axis=1)
    gate = jnp.minimum(gate, limit)
    return gate * jax.nn.sigmoid(alpha * gate) * (jnp.clip(up, -limit, limit) + 1)


def moe_mxfp4_weights(
    x: jax.Array,
    router_logits: jax.Array,
    w_gate_up: jax.Array,
    gate_up_scales: jax.Array,
    w_down: jax.Array,
    down_scales: jax.Array,
    *,
    top_k: int,
    bias_gate_up: jax.Array | None = None,
    bias_down: jax.Array | None = None,
    renormalize: bool = True,
    alpha: float = ALPHA,
    limit: float = LIMIT,
    group_offset: jax.Array | None = None,
) -> jax.Array:
    """Weighted sum of the outputs of each token's `top_k` experts, whose weights are MXFP4, as gpt-oss computes it.

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
      top_k, renormalize, group_offset: as `cookbook.moe` takes them.
      bias_gate_up, bias_down: (E, 2I) and (E, H), of a floating dtype; None for none.
      alpha, limit: the factor in the sigmoid, and where the gate and the up product are clamped.

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
    alpha, limit = _host.option(op, "alpha", alpha, float), _host.option(op, "limit", limit, float)
    inner = _check(op, x, router_logits, w_gate_up, w_down, top_k, group_offset)
    biases = [
        _bias(op, name, bias, (len(w_down), columns))
        for name, bias, columns in (("bias_gate_up", bias_gate_up, 2 * inner), ("bias_down", bias_down, x.shape[-1]))
    ]
    if x.size == 0:
        return jnp.zeros_like(x)
    _host.require_tensor_cores(op)
    instead = f"{_host.PACKAGE}.moe of widened weights"
    x, router_logits, *biases = _host.without_gradient(op, instead, x, router_logits, *biases)
    tokens = x.reshape(-1, x.shape[-1])
    routing = route(router_logits.reshape(len(tokens), -1), top_k, renormalize)
    rows = copy_rows(tokens, routing.rows, params=_host.compiler_params())
    product = functools.partial(ragged_dot_mxfp4_weights, group_sizes=routing.group_sizes, group_offset=group_offset)
    mine, expert = _experts(routing.group_sizes, len(rows), len(w_down), group_offset)
    with_bias = functools.partial(_with_bias, mine=mine, expert=expert)
    both = with_bias(product(rows, w_gate_up, gate_up_scales), biases[0])
    activated = clamped_swiglu(both, alpha, limit).astype(x.dtype)
    y = with_bias(product(activated, w_down, down_scales), biases[1]).astype(x.dtype)
    return sum_of_rows(y, routing.weights, routing.rows).reshape(x.shape)


@_host.own_options()
def _with_bias(sums, bias, mine, expert):
    """The bias of its expert added to each row."""
    return sums.astype(jnp.float32) + jnp.where(mine[:, None], bias.at[expert].get(mode="promise_in_bounds"), 0)


@_host.own_options()
def _experts(group_sizes, num_rows: int, count: int, group_offset):
    """Whether each row has one of the `count` experts that there are, and which."""
    ends = jnp.cumsum(group_sizes)
    expert = (jnp.arange(num_rows, dtype=jnp.int32)[:, None] >= ends).sum(1, dtype=jnp.int32)
    expert = expert if group_offset is None else expert - jnp.asarray(group_offset, jnp.int32)
    return (expert >= 0) & (expert < count), jnp.clip(expert, 0, count - 1)


def _check(op: str, x, router_logits, w_gate_up, w_down, top_k: int, group_offset) -> int:
    """The inner size I; `ragged_dot_mxfp4_weights` checks the rest."""
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
    return columns // 2


def _bias(op: str, name: str, bias, shape: tuple[int, int]):
    """`bias` as float32 of `shape`, which begins with the experts."""
    if bias is None:
        return jnp.zeros(shape, jnp.float32)
    bias = _host.as_array(op, name, bias)
    if bias.shape != shape or not jnp.issubdtype(bias.dtype, jnp.floating):
        raise ValueError(
            f"{_host.PACKAGE}.{op}: {name}.shape={bias.shape}, {name}.dtype={bias.dtype}; must be {shape} floats"
        )
    return bias.astype(jnp.float32)

# SPDX-License-Identifier: Apache-2.0
"""Layer of a mixture of experts: routing, permutation, two grouped products, weighted sum.

    o[t] = sum over the top_k experts e of token t: weight[t, e] * (silu(x[t] @ gate[e]) * (x[t] @ up[e])) @ down[e]

With biases, and with a `swiglu_limit` in place of silu(g) * u: g sigmoid(1.702 g) (u + 1), g cut from above and u on
both sides at the limit, as in gpt-oss.

Shapes: x (..., H), router_logits (..., E), w_gate_up (E, H, 2I): the columns of the gate, then the up product's,
w_down (E, I, H), o (..., H). x and the weights are all bfloat16 or all float16; routing is float32. Weights may also be
packed ones of 4 bits (`packed.py`), MXFP4 as gpt-oss has them, or integers.

The products are `ragged_dot`'s, or those of packed weights; SwiGLU is in the epilogue of the first, unless weights are
packed or there are biases or a limit: then XLA applies it after the product, which is rounded to 16 bits before. Biases
are added in the products of packed weights, and by XLA to others. `route.py` says which rows are a token's. The kernel
that routes few tokens copies them there, otherwise `copy_rows` does. Few rows by MXFP4 weights are multiplied in FP8:
tokens are split before the routing kernel copies them, or their copies are; the kernel that splits the second product's
rows applies SwiGLU.

Bound by: the products; for the rest, the memory that rows are copied to and from: each token's row is written top_k
times, and as many rows of the result are read.

Not supported: capacities (no token is dropped), shared experts; gradients with packed weights. Chapter: 16b. Sources:
Shazeer et al., "Outrageously large neural networks" (2017); Gale et al., "MegaBlocks" (2022), for products without
padding; gpt-oss (2025), for MXFP4 experts.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

from ... import _host
from ..dense.split_rows import split_rows
from ..grouped.ragged_dot import default_config, ragged_dot
from ..grouped.swiglu import swiglu, swiglu_of
from ..grouped.tables import SCANNED_MAX
from . import packed
from .copy_rows import copy_rows
from .route import Routing, route, sum_of_rows, take


def moe_reference(
    x, router_logits, w_gate_up, w_down, top_k, renormalize=True, group_offset=0, b_gate_up=None, b_down=None,
    swiglu_limit=None,
):  # fmt: skip
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    x, logits = x.astype(dtype), router_logits.astype(dtype)
    if isinstance(w_down, tuple):
        inner = w_gate_up[1].shape[-1] // 2
        w_gate_up, w_down = packed.floats(w_gate_up, x.shape[-1], dtype), packed.floats(w_down, inner, dtype)
    chosen, experts = lax.top_k(logits, top_k)
    weights = jax.nn.softmax(chosen) if renormalize else jnp.exp(chosen - jax.nn.logsumexp(logits, -1, keepdims=True))
    affine = lambda x, w, b: jnp.matmul(x, w, precision="highest") + b.reshape((1,) * (x.ndim - 1) + (-1,))

    def add_expert(total, expert):
        number, *parts = expert
        gate_up, down, *biases = (part.astype(dtype) for part in parts)
        inner = swiglu(affine(x, gate_up, biases[0]), swiglu_limit)
        out = affine(inner, down, biases[1])
        weight = jnp.where(experts == number, weights, 0).sum(-1, keepdims=True)
        return total + jnp.where(weight != 0, weight * out, 0), None

    numbers, zeros = group_offset + jnp.arange(w_down.shape[0]), lambda w: jnp.zeros((len(w), w.shape[2]), dtype)
    biases = (zeros(w) if b is None else b for w, b in ((w_gate_up, b_gate_up), (w_down, b_down)))
    return lax.scan(add_expert, jnp.zeros_like(x), (numbers, w_gate_up, w_down, *biases))[0]


def biased(rows, bias, experts, group_offset=None):
    """(M, N) rows in float32, with the bias of each row's expert added, of (E, N); None adds nothing. As in
    `ragged_dot`, `bias` may begin with the expert `group_offset`; a row of an expert that it lacks stays as it is."""
    rows = rows.astype(jnp.float32)
    if bias is None:
        return rows
    number = experts if group_offset is None else experts - jnp.asarray(group_offset, jnp.int32).reshape(())
    return rows + _rows_of(bias.astype(jnp.float32), number)


@jax.custom_vjp
def _rows_of(bias, number):
    """Rows of `bias`, zeros where there is no such one. The gradient is a product: to add rows needs atomics."""
    is_there = (number >= 0) & (number < len(bias))
    return jnp.where(is_there[:, None], take(bias, jnp.clip(number, 0, len(bias) - 1)), 0)


def _rows_of_fwd(bias, number):
    return _rows_of(bias, number), (number, jnp.empty((len(bias), 0), bias.dtype))


def _rows_of_bwd(residuals, d_rows):
    number, like = residuals
    is_of = number[None, :] == jnp.arange(len(like), dtype=jnp.int32)[:, None]
    return jnp.matmul(is_of.astype(d_rows.dtype), d_rows, precision="highest"), None


_rows_of.defvjp(_rows_of_fwd, _rows_of_bwd)


@jax.custom_vjp
def _permute(x, routing: Routing):
    """Each row's token. The gradient gathers: adding rows to their token's would need atomic additions."""
    return copy_rows(x, routing.rows, params=_host.compiler_params())


def _permute_fwd(x, routing: Routing):
    return _permute(x, routing), routing


def _permute_bwd(routing: Routing, d_rows):
    return sum_of_rows(d_rows, None, routing.rows), None


_permute.defvjp(_permute_fwd, _permute_bwd)


@jax.custom_vjp
def _combine(y, weights, routing: Routing):
    """Each token's rows of y, times their weights, added up."""
    return sum_of_rows(y, weights, routing.rows)


def _combine_fwd(y, weights, routing: Routing):
    return _combine(y, weights, routing), (y, weights, routing)


def _combine_bwd(residuals, d_out):
    y, weights, routing = residuals
    token = lax.div(routing.sources, jnp.int32(routing.rows.shape[1]))
    d_y = (take(weights.ravel(), routing.sources)[:, None] * take(d_out, token).astype(jnp.float32)).astype(y.dtype)
    d = d_out.astype(jnp.float32)
    columns = range(routing.rows.shape[1])
    d_weights = [(d * take(y, routing.rows[:, j]).astype(jnp.float32)).sum(-1) for j in columns]
    return d_y, jnp.stack(d_weights, 1), None


_combine.defvjp(_combine_fwd, _combine_bwd)


def _check(x, router_logits, w_gate_up, w_down, top_k: int, group_offset, biases):
    if isinstance(w_gate_up, tuple) or isinstance(w_down, tuple):
        count, inner = packed.sizes_of("moe", x, w_gate_up, w_down)
        _check_tokens(x, router_logits, count, top_k, group_offset)
        return _require_biases(biases, count, inner, x.shape[-1])
    op = f"{_host.PACKAGE}.moe"
    if x.dtype not in (jnp.bfloat16, jnp.float16) or not x.dtype == w_gate_up.dtype == w_down.dtype:
        raise ValueError(
            f"{op}: {x.dtype=}, {w_gate_up.dtype=}, {w_down.dtype=}; must all be bfloat16 or all float16: cast them"
        )
    if w_gate_up.ndim != 3 or w_down.ndim != 3:
        raise ValueError(f"{op}: {w_gate_up.shape=}, {w_down.shape=}; must be a matrix for each expert")
    count, inner, _ = w_down.shape
    _check_tokens(x, router_logits, count, top_k, group_offset)
    hidden = x.shape[-1]
    if w_gate_up.shape != (count, hidden, 2 * inner) or w_down.shape[2] != hidden:
        raise ValueError(
            f"{op}: {w_gate_up.shape=}, {w_down.shape=}; must be (E, {hidden}, 2I) and (E, I, {hidden}), for "
            f"{x.shape=}: the columns of the gate, then the up product's"
        )
    _require_biases(biases, count, inner, hidden)
    if hidden % 8 or inner % 8:
        raise ValueError(f"{op}: {hidden=}, {inner=} of {w_down.shape=}: must be multiples of 8, 16 bytes: pad them")


def _require_biases(biases, count: int, inner: int, hidden: int):
    """Raises a ValueError unless b_gate_up and b_down, where they are given, go with the weights of `count` experts."""
    for name, bias, columns in zip(("b_gate_up", "b_down"), biases, (2 * inner, hidden), strict=True):
        if bias is not None and (bias.shape != (count, columns) or not jnp.issubdtype(bias.dtype, jnp.floating)):
            raise ValueError(
                f"{_host.PACKAGE}.moe: {name} is {bias.shape}, {bias.dtype}; must be ({count}, {columns}) floats"
            )


def _check_tokens(x, router_logits, count: int, top_k: int, group_offset):
    """Raises a ValueError unless tokens, their logits and weights of `count` experts go together."""
    op = f"{_host.PACKAGE}.moe"
    if x.ndim < 1 or router_logits.shape[:-1] != x.shape[:-1] or not jnp.issubdtype(router_logits.dtype, jnp.floating):
        raise ValueError(f"{op}: {router_logits.shape=}, {router_logits.dtype=}; must be {x.shape[:-1]} + (E,) floats")
    experts = router_logits.shape[-1]
    if count > experts or (group_offset is None and count != experts):
        raise ValueError(
            f"{op}: router_logits has {experts} experts and there are weights of {count}: must be as many, or say "
            "group_offset, the expert that the weights begin with"
        )
    if not 1 <= top_k <= experts:
        raise ValueError(f"{op}: {top_k=}; must be from 1 to {experts}, the experts of router_logits")
    rows = math.prod(x.shape[:-1]) * top_k
    if rows * (experts + 2) >= 2**31:
        raise ValueError(f"{op}: {rows} rows of tokens by {experts} experts; must be below 2**31: pass parts of x")


def _limit_of(swiglu_limit) -> float | None:
    if swiglu_limit is None:
        return None
    swiglu_limit = _host.option("moe", "swiglu_limit", swiglu_limit, float)
    if swiglu_limit <= 0:
        raise ValueError(f"{_host.PACKAGE}.moe: {swiglu_limit=}; must be above 0, or None for silu(gate) * up")
    return swiglu_limit


def moe(
    x: jax.Array,
    router_logits: jax.Array,
    w_gate_up: jax.Array | tuple[jax.Array, ...],
    w_down: jax.Array | tuple[jax.Array, ...],
    *,
    top_k: int,
    renormalize: bool = True,
    group_offset: jax.Array | None = None,
    b_gate_up: jax.Array | None = None,
    b_down: jax.Array | None = None,
    swiglu_limit: float | None = None,
) -> jax.Array:
    """Weighted sum of the outputs of each token's `top_k` experts; bitwise reproducible from run to run.

    Differentiable in all arrays, unless weights are packed. Under `jax.shard_map` with the experts sharded, each device
    has some of w_gate_up and w_down and their biases, and all of x and router_logits; it gives `group_offset` and gets
    the sum over its own experts, which `jax.lax.psum` adds up.

    Weights of 4 bits are passed as the packers return them, as in `moe(x, logits, cookbook.pack_mxfp4(...), ...)`.
    gpt-oss's columns of the gate and of the up product alternate: bring them in order before packing, as in
    `blocks = jnp.concatenate([blocks[:, 0::2], blocks[:, 1::2]], axis=1)`, its scales and biases alike.

    On an automatic mesh JAX gathers sharded operands on every device and says nothing: call it inside `jax.shard_map`.

    Args:
      x: (..., H); bfloat16 or float16, and beside MXFP4 weights bfloat16.
      router_logits: (..., E), of a floating dtype.
      w_gate_up: (E, H, 2I): columns of the gate, then the up product's; of the dtype of `x`. Or packed: (w, scales) or
        (w, scales, zeros), as `cookbook.ragged_dot_mxfp4_weights` (scales are uint16) or
        `cookbook.ragged_dot_int4_weights` (they are floats) takes them; the size of groups follows from the shapes.
      w_down: (E, I, H), of the dtype of `x`; packed if w_gate_up is.
      top_k: how many experts each token has; among equal logits the first experts win, and -0.0 is below 0.0.
      renormalize: weights are the softmax of the chosen logits; False: that of all logits.
      group_offset: None; or an integer, which may be traced: the expert that w_gate_up and w_down begin with.
      b_gate_up, b_down: (E, 2I) and (E, H), floats added to the products in float32; or None.
      swiglu_limit: above 0, where gpt-oss's SwiGLU clamps gate and up product; None for silu(gate) * up.

    Returns:
      (..., H), of the dtype of `x`; sums over experts are float32, rounded once. Few rows an expert of MXFP4 weights
      are multiplied in FP8, as by `cookbook.ragged_dot_mxfp4_weights`; there a token with an infinity gives NaN.

    Raises:
      ValueError: a rank, shape, dtype or row length is not supported; RuntimeError: no GPU.
    """
    x = _host.as_array("moe", "x", x)
    out, weights, places = _routed(
        x, router_logits, w_gate_up, w_down, top_k, renormalize, group_offset, b_gate_up, b_down, swiglu_limit
    )
    return jnp.zeros_like(x) if x.size == 0 else _combine(out, weights, places).reshape(x.shape)


def unweighted(
    x, router_logits, w_gate_up, w_down, *, top_k: int, renormalize: bool = True, b_gate_up=None, b_down=None,
    swiglu_limit: float | None = None,
):  # fmt: skip
    """(out, rows, weights): as `moe` of (T, H) tokens, before each token's rows of `out` are weighted and added."""
    out, weights, places = _routed(
        x, router_logits, w_gate_up, w_down, top_k, renormalize, None, b_gate_up, b_down, swiglu_limit
    )
    return out, places.rows, weights


def _routed(x, router_logits, w_gate_up, w_down, top_k, renormalize, group_offset, b_gate_up, b_down, swiglu_limit):
    """Each row of an expert's results, the weights of each token's, and where these are."""
    router_logits = _host.as_array("moe", "router_logits", router_logits)
    w_gate_up, w_down = packed.arrays_of("moe", "w_gate_up", w_gate_up), packed.arrays_of("moe", "w_down", w_down)
    top_k, renormalize = _host.option("moe", "top_k", top_k, int), _host.option("moe", "renormalize", renormalize, bool)
    b_gate_up, b_down = (
        None if bias is None else _host.as_array("moe", name, bias)
        for name, bias in (("b_gate_up", b_gate_up), ("b_down", b_down))
    )
    _check(x, router_logits, w_gate_up, w_down, top_k, group_offset, (b_gate_up, b_down))
    swiglu_limit, is_packed = _limit_of(swiglu_limit), isinstance(w_down, tuple)
    if x.size == 0:
        return None, None, None
    num_sms = _host.require_tensor_cores("moe").num_sms
    arrays, tree = jax.tree.flatten((x, router_logits, w_gate_up, w_down, b_gate_up, b_down))
    if is_packed:
        arrays = _host.without_gradient("moe", f"{_host.PACKAGE}.moe of widened weights", *arrays)
    else:  # Here, where the gradient of x is smallest, it is summed over the devices of a mesh.
        arrays = _host.reverse_only("moe", *arrays)
    x, router_logits, w_gate_up, w_down, b_gate_up, b_down = jax.tree.unflatten(tree, arrays)
    tokens = x.reshape(-1, x.shape[-1])
    is_gated = b_gate_up is None and swiglu_limit is None and not is_packed
    num, num_experts = top_k * len(tokens), router_logits.shape[-1]
    tiles = ()
    # Products of few experts read no table, and with `group_offset` they make their own.
    if group_offset is None and num_experts > SCANNED_MAX:
        tiles = _tiles_of(num, num_experts, tokens, w_gate_up, w_down, is_gated, num_sms)
    hidden, inner_size = tokens.shape[1], w_gate_up[1].shape[-1] // 2 if is_packed else w_down.shape[1]
    takes_halves = functools.partial(packed.takes_halves, rows=num, num_sms=num_sms)
    copied = split_rows(tokens) if takes_halves(w_gate_up, k=hidden) else tokens
    routing = route(router_logits.reshape(len(tokens), -1), top_k, renormalize, tiles, copied)
    places = routing._replace(weights=None, experts=None, copies=None)
    rows = _permute(tokens, places) if routing.copies is None else routing.copies
    groups = dict(group_sizes=routing.group_sizes, group_offset=group_offset)

    def affine(rows, w, k, bias):
        """The product and the bias, in 16 bits or in float32."""
        if not is_packed:
            out = ragged_dot(rows, w, **groups)
        elif k:
            return packed.product(rows, w, k, **groups, bias=bias)
        else:  # No kernel is launched that could add the bias.
            out = jnp.zeros((num, w[1].shape[-1]), rows.dtype)
        return out if bias is None else biased(out, bias, routing.experts, group_offset)

    if is_gated:
        inner = ragged_dot(rows, w_gate_up, **groups, activation="swiglu")
    else:
        inner = affine(rows, w_gate_up, hidden, b_gate_up)
        if takes_halves(w_down, k=inner_size):
            inner = split_rows(inner, swiglu_of(swiglu_limit))
        else:
            inner = swiglu(inner.astype(jnp.float32), swiglu_limit).astype(x.dtype)
    return affine(inner, w_down, inner_size, b_down).astype(x.dtype), routing.weights, places


def _tiles_of(num_rows: int, num_experts: int, tokens, w_gate_up, w_down, is_gated: bool, num_sms: int):
    """How many rows the tiles of the two products have."""
    if isinstance(w_down, tuple):
        hidden, inner = tokens.shape[1], w_gate_up[1].shape[-1] // 2
        sizes = (2 * inner, hidden), (hidden, inner)
        axes = [(packed.default_config(num_rows, n, k, num_experts, num_sms), 1) for n, k in sizes]
    else:
        _, inner, hidden = w_down.shape
        sizes = (inner if is_gated else 2 * inner, hidden, is_gated), (hidden, inner, False)
        configs = [
            default_config(num_rows, n, k, num_experts, tokens.dtype, is_gated=gated, num_sms=num_sms)
            for n, k, gated in sizes
        ]
        axes = [(config, int(config.swapped)) for config in configs]
    return tuple(sorted({(c.tile_m * c.cluster_m, c.tile_n * c.cluster_n)[axis] for c, axis in axes}))


def flops(tokens: int, top_k: int, hidden: int, inner: int) -> int:
    return 6 * tokens * top_k * hidden * inner


def bytes_moved(tokens: int, top_k: int, hidden: int, inner: int, num_experts: int, itemsize: int = 2) -> int:
    """Tokens, weights of the `num_experts` experts that have tokens, and the result once; rows in between once each."""
    rows = tokens * top_k
    between = 2 * rows * (2 * hidden + inner)  # Permuted, inner and unweighted rows are written and read.
    return itemsize * (2 * tokens * hidden + 3 * num_experts * hidden * inner + between)

# SPDX-License-Identifier: Apache-2.0
"""The routing of a layer of experts: the experts of each token, their weights, and where their rows are.

Rows are not sorted: the row of a token in its expert's group is how many earlier tokens chose the expert. One kernel
routes few tokens (`kernel_route.py`). For many `top_k` chooses, and XLA counts: a product with a triangle within blocks
of tokens, and comparisons over blocks; of few rows, comparisons alone. XLA's own cumulative sum takes longer.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ... import _host
from ...select.top_k import top_k as largest
from ..dense.split_rows import SplitRows
from ..grouped.tables import Groups
from . import kernel_route

FEW = 1024  # Rows that are all compared with each other, where there are too many experts for the kernel.
TOKENS = 128  # Tokens of a block: a product with a triangle counts within it, and then blocks are compared.


def take(x, index):
    return x.at[index].get(mode="promise_in_bounds")


class Routing(NamedTuple):
    """Which rows belong to which token: each has `top_k` of them, all in the order of the experts."""

    weights: jax.Array | None  # (T, top_k) float32.
    rows: jax.Array  # (T, top_k) int32: where a token's rows are.
    sources: jax.Array  # (T * top_k,) int32: whose row it is, as token * top_k + choice.
    group_sizes: jax.Array | Groups  # (E,) int32: how many rows each expert has.
    experts: jax.Array | None = None  # (T * top_k,) int32: the expert of each row.
    copies: jax.Array | SplitRows | None = None  # (T * top_k, C): each row's token of x.


@_host.own_options()
def route(router_logits, top_k: int, renormalize: bool = True, tiles: tuple[int, ...] = (), x=None) -> Routing:
    """The `top_k` experts of each token, by its (T, E) logits, and where their rows are.

    With `tiles`, the products' tiles have so many rows: the kernel that routes few tokens makes their tables, and
    copies (T, C) `x`, which may be split, to the rows, if there is one.
    """
    logits, copies = router_logits.astype(jnp.float32), None
    if kernel_route.fits(*logits.shape, top_k):
        weights, rows, experts, sizes, tables, copies, _ = _route_few(logits, x, top_k, renormalize, tiles)
        weights, rows = weights.reshape(-1, top_k), rows.reshape(-1, top_k)
        sizes = Groups(sizes, dict(zip(tiles, tables, strict=True))) if tiles else sizes
    else:
        _, chosen = largest(lax.stop_gradient(logits), top_k)
        weights = _weights(logits, chosen, renormalize)
        # Without a barrier XLA finds each row again for each value that is read of it.
        places = _places_of_few if chosen.size <= FEW else _places
        rows, sizes = lax.optimization_barrier(places(chosen, logits.shape[1]))
        experts = _experts_of_rows(sizes, rows.size)
    choices = jnp.arange(rows.size, dtype=jnp.int32)
    sources = jnp.zeros_like(choices).at[rows.ravel()].set(choices, mode="promise_in_bounds", unique_indices=True)
    return Routing(weights, rows, sources, sizes, experts, copies)


def sum_of_rows(y, weights, rows):
    """Sum in float32 of each token's `rows` of y, times `weights` if there are any; one fused loop."""
    parts = [take(y, rows[:, j]).astype(jnp.float32) for j in range(rows.shape[1])]
    parts = parts if weights is None else [weights[:, j, None] * part for j, part in enumerate(parts)]
    return functools.reduce(jnp.add, parts).astype(y.dtype)


def route_reference(router_logits, top_k: int, renormalize: bool = True) -> Routing:
    """As `route`, in plain JAX, with a sort."""
    _, chosen = lax.top_k(router_logits.astype(jnp.float32), top_k)
    sources = jnp.argsort(chosen.ravel(), stable=True).astype(jnp.int32)
    sizes = jnp.bincount(chosen.ravel(), length=router_logits.shape[1]).astype(jnp.int32)
    weights, rows = _weights(router_logits.astype(jnp.float32), chosen, renormalize), jnp.argsort(sources)
    return Routing(weights, rows.reshape(chosen.shape), sources, sizes, chosen.ravel()[sources])


def _weights(logits, experts, renormalize: bool):
    """(T, top_k) weights of chosen `experts`, whose logits comparisons pick: a gather's gradient adds one by one."""
    is_choice = experts[:, :, None] == jnp.arange(logits.shape[1], dtype=jnp.int32)[None, None]
    chosen = jnp.where(is_choice, logits[:, None], 0).sum(-1)
    return jax.nn.softmax(chosen) if renormalize else jnp.exp(chosen - jax.nn.logsumexp(logits, -1, keepdims=True))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _route_few(logits, x, top_k: int, renormalize: bool, tiles: tuple[int, ...]):
    params = _host.compiler_params(unsafe_no_auto_barriers=True)  # `threads.sync` stands where one is needed.
    return kernel_route.route_few(logits, x, top_k, renormalize, tiles, _host.require_target("moe"), params)


def _route_few_fwd(logits, x, *options):
    routed = _route_few(logits, x, *options)
    return routed, (logits, routed.rows, routed.experts)


def _route_few_bwd(top_k: int, renormalize: bool, tiles, residuals, gradients):
    logits, rows, experts = residuals
    experts = take(experts, rows).reshape(-1, top_k)
    _, of_weights = jax.vjp(lambda logits: _weights(logits, experts, renormalize), logits)
    d_copies = gradients.copies
    d_x = None if d_copies is None else sum_of_rows(d_copies, None, rows.reshape(-1, top_k))
    return *of_weights(gradients.weights.reshape(-1, top_k)), d_x


_route_few.defvjp(_route_few_fwd, _route_few_bwd)


def _places(experts, num_experts: int):
    """(T, top_k) rows of each token with its `experts`, and the (E,) experts' numbers of rows.

    A row follows all rows of earlier experts, and its expert's rows of earlier tokens: of blocks, and in its block.
    """
    tokens, expert = len(experts), jnp.arange(num_experts, dtype=jnp.int32)
    blocks = -(-tokens // TOKENS)
    here = jnp.pad(experts, ((0, blocks * TOKENS - tokens), (0, 0)), constant_values=-1)
    is_choice = (here[:, :, None] == expert).any(1).reshape(blocks, TOKENS, num_experts).astype(jnp.bfloat16)
    triangle = jnp.tri(TOKENS, dtype=jnp.bfloat16)  # Sums of zeros and ones are exact.
    so_far = jnp.einsum("ts,bse->bte", triangle, is_choice, preferred_element_type=jnp.float32).astype(jnp.int32)
    totals = so_far[:, -1]  # (blocks, E)
    sizes, block = totals.sum(0, dtype=jnp.int32), jnp.arange(blocks)
    starts = jnp.where(expert[None, :] < expert[:, None], sizes[None, :], 0).sum(1, dtype=jnp.int32)
    before = jnp.where((block[None, :] < block[:, None])[:, :, None], totals[None], 0).sum(1, dtype=jnp.int32)
    places = (so_far - 1 + (starts + before)[:, None]).reshape(-1, num_experts)
    token = jnp.arange(tokens, dtype=jnp.int32)[:, None]
    return places.at[token, experts].get(mode="promise_in_bounds"), sizes


def _places_of_few(experts, num_experts: int):
    """As `_places`, by comparing all rows with each other."""
    row = experts.ravel() * experts.size + jnp.arange(experts.size, dtype=jnp.int32)  # By experts, then by tokens.
    is_before = row[None, :] < row[:, None]
    is_in = experts.reshape(1, -1) == jnp.arange(num_experts, dtype=jnp.int32)[:, None]
    return is_before.sum(1, dtype=jnp.int32).reshape(experts.shape), is_in.sum(1, dtype=jnp.int32)


def _experts_of_rows(sizes, num_rows: int):
    expert, row = jnp.arange(len(sizes), dtype=jnp.int32), jnp.arange(num_rows, dtype=jnp.int32)
    ends = jnp.where(expert[None, :] <= expert[:, None], sizes[None, :], 0).sum(1, dtype=jnp.int32)
    return (row[:, None] >= ends[None, :]).sum(1, dtype=jnp.int32)

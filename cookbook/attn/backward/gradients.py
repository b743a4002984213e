# SPDX-License-Identifier: Apache-2.0
"""FlashAttention, backward: gradients of `attention`, by two kernels or by one, that recompute the weights from lse.

    p  = exp(s - lse),  s = mask(cap(scale q kᵀ))        dv = pᵀ do
    ds = p (do vᵀ - delta),  delta = sum(out do)         dk = scale dsᵀ q,  dq = scale ds k

Shapes: as in `attention`, but lse and delta are (B, N, T), float32, as the kernel writes lse. With a soft cap ds is
also multiplied by the derivative of tanh. A query that sees no key has lse = inf here, which makes all its p zero. So
have queries after the last one in the two kernels; in the one, which reads them as zeros, their do and ds are zero.

`kernel.py` has the two kernels, with their roles and barriers, `kernel_fused.py` the one, `plan.py` their sizes.

Bound by: the tensor cores, with seven products where the one kernel has five. That one adds up dq in an order that
differs from run to run; the two are bitwise reproducible. With heads over 128 they have eleven products, because both
warpgroups compute all of s and dp: splitting these is where to go on.

Not supported: what `attention` does not support. Operands are padded by copies (TMA) where rows are not a multiple of
64 values, or lengths not a multiple of 8. Source: Dao, "FlashAttention-2" (2023); Shah et al., "FlashAttention-3"
(2024).
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ... import _device, _host
from .. import core
from ..core import LOG2E, PIECE, WG_ROWS, Problem
from . import kernel, kernel_fused
from .plan import OneKernel, Plan, TwoKernels

IN_FLIGHT = 48e6  # Bytes of heads that blocks go through at a time, at most: an L2 cache has 50 MB.
WAVE_FILLED = 0.85  # SMs busy over all waves of equal blocks, from which on more parts gain nothing (measured).
# Queries from which on heads up to 64 have the one kernel. An estimate between two measured sizes on an H200: with 916
# queries two kernels were faster, with 4096 the one.
ONE_KERNEL_FROM = 2048


def default_config(head_dim: int) -> OneKernel | None:
    """The configuration of the one kernel for heads of this size; None where dq has to have a kernel of its own.

    With heads over 128 the sums of 64 keys fill the registers of both warpgroups, and its operands shared memory: there
    is no room for a second block of queries, nor for a share of dq.
    """
    return OneKernel(runs_ahead=head_dim > 64) if head_dim <= 128 else None


def choose_config(
    head_dim: int, num_q: int, deterministic: bool | None, given: OneKernel | TwoKernels | None = None
) -> OneKernel | TwoKernels | None:
    """The configuration that is `given`, or as `attention` chooses it by its argument `deterministic`; None for two
    kernels as they are by default.

    Raises:
      ValueError: the one that is given has another number of kernels than `deterministic` says.
    """
    if given is not None:
        if deterministic is not None and deterministic == isinstance(given, OneKernel):
            raise ValueError(
                f"{_host.PACKAGE}.attention: {deterministic=}, config.backward={given}; True needs TwoKernels, False "
                "OneKernel: leave one of them out"
            )
        return given
    if deterministic is None:  # Short sequences do not amortise zeroing dq and rounding it.
        deterministic = head_dim <= 64 and num_q < ONE_KERNEL_FROM
    return None if deterministic else default_config(head_dim)


def _in_one_kernel(plan: Plan, params, *arrays):
    """(dq, dk, dv) of `_add_up`, with a batch that `jax.vmap` makes larger: JAX cannot map what has Refs."""
    run = jax.custom_batching.custom_vmap(functools.partial(_add_up, plan, params))

    @run.def_vmap
    def _(size, is_mapped, *arrays):
        spread = lambda x, mapped: x if mapped else jnp.broadcast_to(x, (size, *x.shape))
        join = lambda x, mapped: (x := spread(x, mapped)).reshape(-1, *x.shape[2:])
        larger = dataclasses.replace(plan, batch=size * plan.batch)
        results = _in_one_kernel(larger, params, *jax.tree.map(join, arrays, tuple(is_mapped)))
        return tuple(x.reshape(size, -1, *x.shape[1:]) for x in results), (True,) * 3

    return run(*arrays)


def _add_up(plan: Plan, params, kept, streamed, vectors, segments):
    """(dq, dk, dv), of which the one kernel adds dq up in memory."""
    (query, _), problem = streamed, plan.problem
    # dq as it is added up: two shares of 64 rows and 64 columns for each head and block, which has either twice as many
    # rows or twice as many columns.
    heads, shares = (plan.batch, problem.num_heads, plan.num_blocks), (plan.block // WG_ROWS, problem.head_dim // PIECE)
    tiles = (plan.num_tiles,) if problem.interpreted else ()
    zeros = jnp.zeros((*tiles, 2 * math.prod(heads), WG_ROWS, PIECE), jnp.float32)
    each = [jnp.zeros((*x.shape[:2], plan.num_heads, x.shape[3]), x.dtype) for x in kept]

    @pl.run_state
    def add_up(refs):
        refs[1][...], refs[2][...] = kernel_fused.launch(plan, params, kept, streamed, vectors, segments, refs[0])

    # JAX's kernels take no Ref that varies over a mesh's axis, as dq does nevertheless.
    dq, dk, dv = _host.apart(add_up(_host.apart((zeros, *_host.alike(*each, query)[:2]))))
    dq = _host.alike(dq, query)[0].reshape(*tiles, *heads, *shares, WG_ROWS, PIECE)
    dq = dq.sum(axis=0) if problem.interpreted else dq
    dq = dq.transpose(0, 2, 3, 5, 1, 4, 6).reshape(plan.batch, -1, problem.num_heads, problem.head_dim)
    return (dq[:, : query.shape[1]] * problem.scale).astype(query.dtype), dk, dv


def _parts(plan: Plan, num_sms: int) -> int:
    """Into how many parts a group of query heads is divided: as few as keep the SMs busy.

    Where all blocks have as much to do, they are to fill their last wave well. Otherwise there are two for each SM, and
    no more heads in flight than the L2 cache holds: in time the blocks of a group, and of the next one, are in
    different heads.
    """
    problem, blocks = plan.problem, plan.batch * plan.num_heads * plan.num_tiles
    divisors = [n for n in range(1, problem.group + 1) if problem.group % n == 0]
    if (problem.left is None) == (problem.right is None):
        filled = lambda n: n * blocks / (pl.cdiv(n * blocks, num_sms) * num_sms)
        return next((n for n in divisors if filled(n) >= WAVE_FILLED), max(divisors, key=filled))
    # Queries, do, and the sums of dq.
    head_bytes = plan.num_blocks * plan.block * problem.head_dim * (8 if plan.in_one else 4)
    in_flight = head_bytes * (num_sms / plan.num_tiles + 1)  # With one head of each group.
    fits = lambda n: n * blocks >= 2 * num_sms and problem.group // n * in_flight <= IN_FLIGHT
    return next(filter(fits, divisors), problem.group)


@functools.partial(jax.jit, static_argnames=("problem", "num_sms", "params", "config"))
def gradients(
    query, key, value, segments, out, lse, d_out, d_lse, *, problem: Problem, num_sms: int = 1, params, config=None
):
    """(dq, dk, dv) of `attention` for the gradients `d_out` and `d_lse` of its results `out` and `lse`.

    More blocks share the query heads of a group where that keeps `num_sms` SMs busier. lse and its gradient are
    (B, N, T); `segments` is () or (segment_ids, kv_segment_ids). With a `OneKernel` dq is not bitwise reproducible;
    with `TwoKernels` it is, and with None, which chooses their tiles.
    """
    (batch, num_q, _, head_dim), num_kv = query.shape, key.shape[1]
    width = next(width for width in core.HEAD_DIMS if head_dim <= width)
    pad = lambda x, rows, columns: jnp.pad(x, ((0, 0), (0, rows), (0, 0), (0, columns))) if rows + columns else x
    q, k, v, do = (pad(x, 0, width - head_dim) for x in (query, key, value, d_out.astype(query.dtype)))
    delta = jnp.einsum("btnh,btnh->bnt", out, d_out, precision="default", preferred_element_type=jnp.float32) - d_lse
    lse = jnp.where(jnp.isneginf(lse), jnp.inf, lse * LOG2E)
    # The two kernels take 64, 128 or 192 queries at a time, which divide 384. In the one TMA gives zeros after the last
    # query: p may be 1 there, but do and ds are zero.
    to_tiles = ((0, 0), (0, 0), (0, -num_q % (8 if isinstance(config, OneKernel) else 384)))
    vectors = jnp.pad(lse, to_tiles, constant_values=jnp.inf), jnp.pad(delta, to_tiles)
    problem = dataclasses.replace(problem, head_dim=width)
    plan = functools.partial(Plan, problem, batch, num_q, num_kv, bool(segments))
    dkdv_plan = plan(for_query=False, config=config)
    dkdv_plan = dataclasses.replace(dkdv_plan, parts=_parts(dkdv_plan, num_sms))
    # TMA copies any number of rows of 64 values, but of wider rows only a multiple of 8.
    fit = lambda width, arrays: tuple(x if width == PIECE else pad(x, -x.shape[1] % 8, 0) for x in arrays)
    operands = lambda plan, kept, streamed: (fit(plan.kept_width, kept), fit(width, streamed), vectors)
    if not dkdv_plan.in_one:
        dq_plan = plan(for_query=True, config=config)
        dq_plan.tiles.check(width, max(_device.smem_bytes(x.scratch) for x in (dq_plan, dkdv_plan)))
        (dq,) = kernel.launch(dq_plan, params, *operands(dq_plan, (q, do), (k, v)), segments)
        dk, dv = kernel.launch(dkdv_plan, params, *operands(dkdv_plan, (k, v), (q, do)), segments[::-1])
    else:
        dkdv_plan.config.check(width, _device.smem_bytes(kernel_fused.scratch(dkdv_plan)))
        dq, dk, dv = _in_one_kernel(dkdv_plan, params, *operands(dkdv_plan, (k, v), (q, do)), segments[::-1])
    if dkdv_plan.parts > 1:
        join = lambda x: x.reshape(*x.shape[:2], -1, dkdv_plan.parts, width).sum(axis=3, dtype=jnp.float32)
        dk, dv = (join(x).astype(x.dtype) for x in (dk, dv))
    return tuple(dx[:, : x.shape[1], :, :head_dim] for dx, x in zip((dq, dk, dv), (query, key, value), strict=True))

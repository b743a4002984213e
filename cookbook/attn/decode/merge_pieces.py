# SPDX-License-Identifier: Apache-2.0
"""The second kernel of `paged_attention`: merges the pieces that the first one computes, whose lse are base-2.

    lse = log2(sum exp2(lse_i)),    out = sum exp2(lse_i - lse) out_i

A warpgroup takes a few rows of a sequence. It loads up to eight pieces at a time into registers, and shares nothing
with others.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ... import _host
from ..._device import div
from ..core import LOG2E
from .plan import Plan

PIECES_AT_ONCE = 8  # Pieces that are merged together.


def _kernel(ends, kv_lens, outs_gmem, lses_gmem, sinks, out_gmem, lse_gmem, *, plan: Plan):
    """Merges the pieces of a sequence, in their order, and the sinks of heads."""
    seq, unit, rows = lax.axis_index("seq_index"), lax.axis_index("unit"), plan.rows_at_once
    first_row, width = lax.axis_index("rows") * rows, plan.problem.width
    values = pl.ds(first_row * width, rows * width)
    (_, steps), num_blocks = plan.blocks(kv_lens[seq]), ends[plan.num_seqs - 1]
    first_piece, last_piece = (seq + plan.part_of(block, num_blocks) for block in (ends[seq] - steps, ends[seq] - 1))
    which = div(plgpu.broadcasted_iota(jnp.int32, (rows * width,), 0), width)

    def of_rows(numbers):
        """The number of each value's row."""
        first = jnp.full(which.shape, numbers[0])
        return functools.reduce(lambda a, r: jnp.where(which == r, numbers[r], a), range(1, rows), first)

    def load(piece):
        """(lse_log2 of each row, values) of a piece, or -inf after the last one."""
        index, exists = jnp.minimum(piece, last_piece), piece <= last_piece
        lse = [jnp.where(exists, lses_gmem[index, unit, first_row + r], -jnp.inf) for r in range(rows)]
        return lse, outs_gmem[index, unit, values]

    def some(i, carry):
        """A few pieces, whose loads do not wait for each other."""
        acc, m_i, l_i = carry
        loaded = [load(first_piece + PIECES_AT_ONCE * i + j) for j in range(PIECES_AT_ONCE)]
        m_new = [functools.reduce(jnp.maximum, (lse[r] for lse, _ in loaded), m_i[r]) for r in range(rows)]
        shift = [jnp.where(x == -jnp.inf, 0.0, x) for x in m_new]
        alpha = [jnp.exp2(m_i[r] - shift[r]) for r in range(rows)]
        shares = [[jnp.exp2(lse[r] - shift[r]) for r in range(rows)] for lse, _ in loaded]
        acc = acc * of_rows(alpha)
        for share, (_, out) in zip(shares, loaded, strict=True):
            acc = acc + of_rows(share) * out
        return acc, m_new, [l_i[r] * alpha[r] + sum(share[r] for share in shares) for r in range(rows)]

    numbers = lambda value: [jnp.float32(value) + 0.0 * seq.astype(jnp.float32) for _ in range(rows)]
    m_i, l_i = numbers(-jnp.inf), numbers(0.0)
    if sinks is not None:  # Each is one key more, whose value is zero.
        m_i, l_i = [sinks[unit, first_row + r] for r in range(rows)], numbers(1.0)
    carry = jnp.zeros(which.shape, jnp.float32), m_i, l_i
    groups = div(last_piece - first_piece, PIECES_AT_ONCE) + 1
    acc, m_i, l_i = lax.fori_loop(0, groups, some, carry)
    out = acc * of_rows([jnp.where(x != 0, 1 / x, 0.0) for x in l_i])
    out_gmem[seq, unit, values] = out.astype(out_gmem.dtype)
    for r in range(rows):
        lse = (m_i[r] + jnp.log2(jnp.where(l_i[r] != 0, l_i[r], 1.0))) / LOG2E
        lse_gmem[seq, unit, first_row + r] = jnp.where(l_i[r] != 0, lse, -jnp.inf)


@functools.partial(jax.jit, static_argnames=("plan", "params"))
def merge_pieces(ends, kv_lens, out, lse_log2, sinks, *, plan: Plan, params):
    """(out, lse) of each sequence and head, from the results of `kernel.pieces`. `sinks` may be None."""
    num_units, row = plan.num_units, plan.stored_rows * plan.problem.width
    merged, lse = _host.kernel(
        functools.partial(_kernel, plan=plan),
        out_type=[
            jax.ShapeDtypeStruct((plan.num_seqs, num_units, row), plan.problem.dtype),
            jax.ShapeDtypeStruct((plan.num_seqs, num_units, plan.stored_rows), jnp.float32),
        ],
        grid=(plan.num_seqs, num_units, plan.stored_rows // plan.rows_at_once),
        grid_names=("seq_index", "unit", "rows"),
        compiler_params=params,
    )(
        ends, kv_lens, out.reshape(plan.num_pieces, num_units, row), lse_log2,
        None if sinks is None else sinks[plan.row_heads] * LOG2E,
    )  # fmt: skip

    def of_heads(x, *end):
        """`x` without padding rows and heads, whose results are discarded."""
        kv_heads = plan.num_seqs, plan.problem.num_kv_heads
        units = x.reshape(*kv_heads, plan.chunks, plan.stored_rows, *end)[:, :, :, : plan.rows]
        return units.reshape(*kv_heads, -1, *end)[:, :, : plan.problem.group]

    shape = plan.num_seqs, plan.problem.num_heads
    out = of_heads(merged, plan.problem.width).reshape(*shape, -1)[:, :, : plan.problem.head_dim]
    return out, of_heads(lse).reshape(shape)

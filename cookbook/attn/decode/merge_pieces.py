# SPDX-License-Identifier: Apache-2.0
"""The second kernel of `paged_attention`: merges the pieces that the first one computes, whose lse are base-2.

    lse = log2(sum exp2(lse_i)),    out = sum exp2(lse_i - lse) out_i

A warpgroup takes a few rows of a sequence. It loads up to eight pieces at a time into registers, and shares nothing
with others. A thread has values of one row, and of logarithms those of this row alone.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ... import _device, _host
from ..._device import div
from ..core import LOG2E
from .plan import Plan

PIECES_AT_ONCE = 8  # Pieces that are merged together.


def _kernel(ends, kv_lens, outs_gmem, lses_gmem, sinks, out_gmem, lse_gmem, *, plan: Plan):
    """Merges the pieces of a sequence, in their order, and the sinks of heads."""
    seq, unit, form = lax.axis_index("seq_index"), lax.axis_index("unit"), plan.merged_layout
    rows, per_row = pl.ds(lax.axis_index("rows") * plan.rows_at_once, plan.rows_at_once), form.reduce(1)
    shape = rows.size, plan.problem.width
    (_, steps), num_blocks = plan.blocks(kv_lens[seq]), ends[plan.num_seqs - 1]
    first_piece, last_piece = (seq + plan.part_of(block, num_blocks) for block in (ends[seq] - steps, ends[seq] - 1))
    spread = lambda numbers: lax.broadcast_in_dim(numbers, shape, [0])

    def load(piece):
        """(lse_log2 of each row, values) of a piece, or -inf after the last one."""
        index = jnp.minimum(piece, last_piece), unit, rows
        lse, out = _device.load(lses_gmem.at[index], per_row), _device.load(outs_gmem.at[index], form)
        return lse + jnp.where(piece <= last_piece, 0.0, -jnp.inf), out

    def some(i, carry):
        """A few pieces, whose loads do not wait for each other."""
        acc, m_i, l_i = carry
        loaded = [load(first_piece + PIECES_AT_ONCE * i + j) for j in range(PIECES_AT_ONCE)]
        m_new = functools.reduce(jnp.maximum, (lse for lse, _ in loaded), m_i)
        shift = jnp.where(m_new == -jnp.inf, 0.0, m_new)
        alpha = jnp.exp2(m_i - shift)
        acc, l_i = acc * spread(alpha), l_i * alpha
        for lse, out in loaded:
            share = jnp.exp2(lse - shift)
            acc, l_i = acc + spread(share) * out, l_i + share
        return acc, m_new, l_i

    numbers = lambda value, shape=shape[:1], layout=per_row: plgpu.layout_cast(
        jnp.full(shape, value, jnp.float32), layout
    )
    m_i, l_i = numbers(-jnp.inf), numbers(0.0)
    if sinks is not None:  # Each is one key more, whose value is zero.
        m_i, l_i = _device.load(sinks.at[unit, rows], per_row) * LOG2E, numbers(1.0)
    groups = div(last_piece - first_piece, PIECES_AT_ONCE) + 1
    acc, m_i, l_i = lax.fori_loop(0, groups, some, (numbers(0.0, shape, form), m_i, l_i))
    total = jnp.where(l_i != 0, l_i, 1.0)
    _device.store(out_gmem.at[seq, unit, rows], (acc * spread(1 / total)).astype(out_gmem.dtype))
    lse = (m_i + jnp.log2(total)) / LOG2E
    _device.store(lse_gmem.at[seq, unit, rows], jnp.where(l_i != 0, lse, -jnp.inf))


@functools.partial(jax.jit, static_argnames=("plan", "params"))
def merge_pieces(ends, kv_lens, out, lse_log2, sinks, *, plan: Plan, params):
    """(out, lse) of each sequence and head, from the results of `kernel.pieces`. `sinks` may be None."""
    num_units, stored, heads = plan.num_units, plan.stored_rows, plan.row_heads
    if sinks is not None:  # Without padding they lie as the kernel reads them.
        sinks = sinks.reshape(heads.shape) if heads.size == sinks.size else sinks[heads]
    merged, lse = _host.kernel(
        functools.partial(_kernel, plan=plan),
        out_type=[
            jax.ShapeDtypeStruct((plan.num_seqs, num_units, stored, plan.problem.width), plan.problem.dtype),
            jax.ShapeDtypeStruct((plan.num_seqs, num_units, stored), jnp.float32),
        ],
        grid=(plan.num_seqs, num_units, stored // plan.rows_at_once),
        grid_names=("seq_index", "unit", "rows"),
        compiler_params=params,
    )(ends, kv_lens, out, lse_log2, sinks)

    def of_heads(x, *end):
        """`x` without padding rows and heads, whose results are discarded."""
        kv_heads = plan.num_seqs, plan.problem.num_kv_heads
        units = x.reshape(*kv_heads, plan.chunks, plan.stored_rows, *end)[:, :, :, : plan.rows]
        return units.reshape(*kv_heads, -1, *end)[:, :, : plan.problem.group]

    shape = plan.num_seqs, plan.problem.num_heads
    out = of_heads(merged, plan.problem.width).reshape(*shape, -1)[:, :, : plan.problem.head_dim]
    return out, of_heads(lse).reshape(shape)

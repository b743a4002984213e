# SPDX-License-Identifier: Apache-2.0
"""The gradients of SSD: two or three kernels, and what XLA does with their results. Formulas: `kernel_backward`."""

import functools
import math

import jax
import jax.numpy as jnp

from ..states import combine
from . import kernel_backward, kernel_state
from .kernel_backward import END_SUM, KEY_SUM, OWN_SUM, QUERY_SUM, SKIP_SUM, STATE_SUM
from .plan import DT, Plan, decay_of_parts, end_of_part, make_vectors


@functools.partial(jax.jit, static_argnames=("plan", "scale", "params"))
def gradients(x, dt, a, b, c, d, initial, cu_seqlens, starts, dy, d_final, *, plan: Plan, scale: float, params):
    """Gradients of `x` to `initial`, of operands without a batch. `starts` are the states that parts start from; `dy`
    and `d_final` the gradients of the results."""
    sequences = plan.sequences
    vectors, vectors_vjp = jax.vjp(lambda dt, a: make_vectors(sequences, dt, a, cu_seqlens), dt, a)
    table, seq = sequences.parts(cu_seqlens)
    dy = dy if scale == 1.0 else (dy.astype(jnp.float32) * scale).astype(dy.dtype)
    is_row = sequences.rows_of_chunks(cu_seqlens) < sequences.num_rows
    decay = decay_of_parts(plan, vectors, table)
    states = kernel_state.launch(plan, table, x, b, vectors, starts, params, keeps_all=True)
    d_ends = d_final
    if sequences.part_rows is not None:
        local = kernel_state.launch(plan, table, dy, c, vectors, None, params, reverse=True)
        d_ends, d_initial = combine(end_of_part, (decay, local), seq, d_final, reverse=True)
    dx, db, dc, sums, *firsts = kernel_backward.launch(plan, table, x, dy, b, c, states, vectors, d, d_ends, params)
    if plan.num_heads != plan.num_groups:
        of_group = lambda m: m.reshape(len(m), plan.num_groups, -1, m.shape[-1])
        db, dc = (of_group(m).astype(jnp.float32).sum(axis=2).astype(m.dtype) for m in (db, dc))
    sums = sums.reshape(-1, plan.heads_per_dt, *sums.shape[1:]).sum(axis=1)
    sums = jnp.where(is_row[:, :1, None], sums, 0.0)  # Chunks that there are not were not written.
    d_vectors = _gradients_of_vectors(sums, vectors, is_row)
    dd = None if d is None else sums[:, :, SKIP_SUM].sum(axis=(1, 2)).astype(d.dtype)
    d_dt, da = vectors_vjp(d_vectors)
    d_initial = firsts[0] if firsts else d_initial
    return dx, d_dt, da, db, dc, dd, None if initial is None else d_initial


def _gradients_of_vectors(sums, vectors, is_row):
    """The gradients of `vectors`, from the kernel's sums; `is_row` (num_chunks, 64) says which places have a row."""
    of = lambda which: sums[:, :, which]
    dt, is_last = vectors[:, :, DT], is_row & ~jnp.pad(is_row[:, 1:], ((0, 0), (0, 1)))
    end = dt * jnp.where(is_last, 0.0, of(END_SUM))
    d_cum = of(QUERY_SUM) - dt * of(KEY_SUM) - end
    d_cum = d_cum.at[:, :, -1].add((of(STATE_SUM) + end).sum(axis=-1))
    d_dt = of(KEY_SUM) + of(OWN_SUM) + of(END_SUM)
    return jnp.stack([math.log(2.0) * d_cum, d_dt], axis=2)

# SPDX-License-Identifier: Apache-2.0
"""The gradients of the gated delta rule: three kernels, and what XLA does with their results."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from ..sequences import Sequences
from ..states import cumulative
from . import kernel, kernel_backward, kernel_gradients
from .plan import ForwardPlan


@functools.partial(jax.jit, static_argnames=("plan", "params"))
def gradients(q, k, v, initial, cu_seqlens, cum, inverse, do, d_final, *, plan: ForwardPlan, params):
    """(dq, dk, dv, dg, dbeta, d_initial), of operands without a batch, v and do in columns of 64."""
    sequences = dataclasses.replace(plan.sequences, part_rows=None)
    plan = dataclasses.replace(plan, sequences=sequences)
    table, _ = sequences.parts(cu_seqlens)
    keeps = dataclasses.replace(plan, state_wgs=1, output_wgs=0, keeps_all=True)
    (states,) = kernel.launch(keeps, table, None, k, v, inverse, cum, initial, params)
    d_states, d_initial = kernel_backward.run(plan, table, q, k, do, inverse, cum, d_final, params)
    first_rows, num_rows = sequences.places_of_chunks(cu_seqlens)
    dq, dk, dv, vectors = kernel_gradients.run(
        plan, first_rows, num_rows, q, k, v, do, states, d_states, inverse, cum, params
    )
    of_key_heads = lambda x: x.reshape(len(x), plan.key_heads, -1, x.shape[2]).sum(2, dtype=jnp.float32)
    dq, dk, dv = of_key_heads(dq).astype(q.dtype), of_key_heads(dk).astype(k.dtype), dv
    dbeta, dcum, to_end, decayed = jnp.moveaxis(vectors.reshape(plan.heads, -1, *vectors.shape[1:]).sum(1), 2, 0)
    last = to_end.sum(-1) + jnp.exp(cum[..., -1]) * decayed.sum(-1)
    dg = cumulative(dcum[..., ::-1])[..., ::-1] + last[..., None]
    dg, dbeta = (_in_rows(sequences, x, cu_seqlens) for x in (dg, dbeta))
    if sequences.is_packed:  # Nothing is written for rows after the last sequence.
        used = (jnp.arange(len(q)) < cu_seqlens[-1])[:, None, None]
        dq, dk, dv = (jnp.where(used, x, jnp.zeros((), x.dtype)) for x in (dq, dk, dv))
    return dq, dk, dv, dg, dbeta, d_initial


def _in_rows(sequences: Sequences, x, cu_seqlens):
    """(rows, heads) of `x` (heads, chunks, CHUNK); zeros for rows of no sequence."""
    x = x.reshape(len(x), -1).T
    if sequences.is_packed:
        rows = sequences.rows_of_chunks(cu_seqlens).ravel()
        return jnp.zeros((sequences.num_rows, x.shape[1])).at[rows].set(x, mode="drop")
    return x.reshape(sequences.num_seqs, -1, x.shape[1])[:, : sequences.length].reshape(sequences.num_rows, -1)

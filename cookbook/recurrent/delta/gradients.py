# SPDX-License-Identifier: Apache-2.0
"""The gradients of the gated delta rule: three kernels, and what XLA does with their results.

The forward pass of a chunk, from the state s before it to s' after it, as in `kernel`. d[t, j] = exp(cum[t] - cum[j]);
`tril` keeps the pairs with j <= t, `strict` those with j < t. Products with d, beta and exp(cum) are elementwise.

    m  = strict(d k kᵀ)
    w  = tril(d q kᵀ)
    r  = v - exp(cum) k sᵀ
    u  = beta e,  e = r - m u                           the same as u = inverse r
    o  = scale (exp(cum) q sᵀ + w u)
    s' = exp(cum[-1]) s + (exp(cum[-1] - cum) u)ᵀ k

Its lines differentiated, from the last one up, with do and ds' given. `kernel_backward` has the first three of the
results and goes from chunk to chunk; `kernel_gradients` has all others, for all chunks at once. x . y is the sum of
products along a row.

    du    = scale wᵀ do + exp(cum[-1] - cum) k ds'ᵀ     the gradient of u by way of o and s'
    dr    = inverseᵀ du
    ds    = exp(cum[-1]) ds' + (scale exp(cum) do)ᵀ q - (exp(cum) dr)ᵀ k    by way of s', o and r

    dv    = dr
    z     = du - mᵀ dr                                  the gradient of u by all ways, m u too
    dbeta = z . e
    dqk   = tril(d scale do uᵀ)                         the gradient of q kᵀ, in w
    dkk   = -strict(d dr uᵀ)                            the gradient of k kᵀ, in m
    dq    = scale exp(cum) do s + dqk k
    dk    = dk_plus + dk_minus
    dk_plus  = -exp(cum) dr s + dkk k                   keys that read: multiplied by exp(cum)
    dk_minus = exp(cum[-1] - cum) u ds' + dqkᵀ q + dkkᵀ k    keys that write: multiplied by exp(-cum)

cum[t] stands beside q[t] and such keys alone, so its gradient needs no other product:

    dcum  = q . dq + k . dk_plus - k . dk_minus,    and for cum[-1] also
            sum(k . (exp(cum[-1] - cum) u ds')) + exp(cum[-1]) sum(s . ds')
    dg[t] = sum of dcum from t to the end of the chunk
"""

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
    """(dq, dk, dv, dg, dbeta, d_initial), of operands without a batch, v and do in slices of 64. `cum` and `inverse`
    are the forward pass's."""
    sequences = dataclasses.replace(plan.sequences, part_rows=None)
    plan = dataclasses.replace(plan, sequences=sequences)
    table, _ = sequences.parts(cu_seqlens)
    keeps = dataclasses.replace(plan, state_wgs=1, output_wgs=0, keeps_all=True)
    (states,) = kernel.launch(keeps, table, None, k, v, inverse, cum, initial, params)
    d_states, d_initial = kernel_backward.launch(plan, table, q, k, do, inverse, cum, d_final, params)
    first_rows, num_rows = sequences.places_of_chunks(cu_seqlens)
    dq, dk, dv, sums = kernel_gradients.launch(
        plan, first_rows, num_rows, q, k, v, do, states, d_states, inverse, cum, params
    )
    of_key_heads = lambda x: x.reshape(len(x), plan.key_heads, -1, x.shape[2]).sum(2, dtype=jnp.float32)
    dq, dk = of_key_heads(dq).astype(q.dtype), of_key_heads(dk).astype(k.dtype)
    sums_of_heads = sums.reshape(plan.heads, -1, *sums.shape[1:]).sum(1)
    dbeta, dcum, by_token, by_value = jnp.moveaxis(sums_of_heads, 2, 0)  # As `kernel_gradients.SUMS` has them.
    dlast = by_token.sum(-1) + jnp.exp(cum[..., -1]) * by_value.sum(-1)
    dg = cumulative(dcum[..., ::-1])[..., ::-1] + dlast[..., None]
    dg, dbeta = (_in_rows(sequences, x, cu_seqlens) for x in (dg, dbeta))
    if sequences.is_packed:  # Nothing is written for rows after the last sequence.
        used = (jnp.arange(len(q)) < sequences.starts(cu_seqlens)[-1])[:, None, None]
        dq, dk, dv = (jnp.where(used, x, jnp.zeros((), x.dtype)) for x in (dq, dk, dv))
    return dq, dk, dv, dg, dbeta, d_initial


def _in_rows(sequences: Sequences, x, cu_seqlens):
    """(rows, heads) of `x` (heads, chunks, CHUNK); zeros for rows of no sequence."""
    x = x.reshape(len(x), -1).T
    if sequences.is_packed:
        rows = sequences.rows_of_chunks(cu_seqlens).ravel()
        return jnp.zeros((sequences.num_rows, x.shape[1])).at[rows].set(x, mode="drop")
    return x.reshape(sequences.num_seqs, -1, x.shape[1])[:, : sequences.length].reshape(sequences.num_rows, -1)

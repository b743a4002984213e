# SPDX-License-Identifier: Apache-2.0
"""The gradients of Kimi Delta Attention: three kernels, one more for norms, and what XLA does with their results.

The forward pass of a chunk, from the state s before it to s' after it, as in `kernel` and `kernel_prepare`. x[t, j] =
exp(gc[t] - gc[j]) for each channel; `tril` keeps the pairs with j <= t, `strict` those with j < t. Products with
decays and beta are elementwise.

    m  = strict(sum over channels of k[t] k[j] x[t, j])
    w  = tril(sum over channels of q[t] k[j] x[t, j])
    r  = v - exp(gc) k sᵀ
    e  = r - m (beta e)                                 the same as e = inverse r
    o  = scale (exp(gc) q sᵀ + w (beta e))
    s' = s exp(gc[-1]) + (beta e)ᵀ (exp(gc[-1] - gc) k)

Its lines differentiated, from the last one up, with do and ds' given. `kernel_backward` has the first three of the
results and goes from chunk to chunk; `kernel_gradients` has all others, for all chunks at once.

    de    = beta (scale wᵀ do + exp(gc[-1] - gc) k ds'ᵀ)      the gradient of e by way of o and s'
    dr    = inverseᵀ de
    ds    = ds' exp(gc[-1]) + scale doᵀ (exp(gc) q) - drᵀ (exp(gc) k)

    dv    = dr
    dw    = tril(scale do eᵀ),  dm = -strict(dr eᵀ)           but for beta, which stands beside e
    dq[t] = scale exp(gc) do s + sum over j of beta[j] dw[t, j] x[t, j] k[j]
    dk    = dk_plus + beta dk_minus
    dk_plus[t]  = -exp(gc) dr s + sum over j of beta[j] dm[t, j] x[t, j] k[j]           keys that read
    dk_minus[j] = exp(gc[-1] - gc) e ds' + sum over t of x[t, j] (dm[t, j] k[t] + dw[t, j] q[t])    keys that write

beta stands beside keys that write alone, and a gate in every decay from a token before it to one that is not, so their
gradients need no other product:

    dbeta = the sum over channels of k dk_minus
    dg[i] = the sum over j < i <= t of what the pair of t and j adds to q[t] dq[t] + k[t] dk_plus[t]
          + the sum over t >= i of what the state before the chunk adds there
          + the sum over j < i of what ds' adds to beta[j] k[j] dk_minus[j]
          + exp(gc[-1]) times the sum of s ds' over values

dg is also a running sum of q dq + k dk_plus - beta k dk_minus, but the terms of that cancel: gates that fade a state at
once would get gradients that are rounding alone. `kernel_gradients` sums what does not cancel.

With `use_qk_l2norm` all of this is of q and k divided by their norms. `kernel_gradients` divides them again, and
`kernel_norms` goes on to the gradients of q and k themselves.

States and errors are made again, and not kept from the forward pass.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from . import kernel, kernel_backward, kernel_gradients
from .kernel_norms import before_norms
from .plan import KdaPlan


@functools.partial(jax.jit, static_argnames=("plan", "params"))
def gradients(q, k, v, g, beta, initial, cu_seqlens, prepared, do, d_final, *, plan: KdaPlan, params):
    """(dq, dk, dv, dg, dbeta, d_initial), of operands without a batch, v and do in slices of 64. `prepared` is what
    `kernel_prepare` returned."""
    sequences, (squares, decay, *factors) = plan.sequences, prepared
    table, _ = sequences.parts(cu_seqlens)
    of_states = dataclasses.replace(plan, state_wgs=1, has_outputs=False)
    states, errors = kernel.launch(of_states, table, v, squares, decay, initial, params)
    dv, d_states, d_initial = kernel_backward.launch(plan, table, do, squares, decay, d_final, params)
    beta = sequences.in_chunks(beta.astype(jnp.float32), cu_seqlens)
    places = sequences.places_of_chunks(cu_seqlens)
    dq, dk, dg, dbeta = kernel_gradients.launch(
        plan, *places, q, k, g.astype(jnp.float32), beta, do, dv, errors, states, d_states, decay, *factors,
        params=params,
    )  # fmt: skip
    if plan.use_qk_l2norm:
        dq, dk = before_norms(q, k, dq, dk, params=params)
    else:
        dq, dk = (_of_group(plan, dx, q.shape) for dx in (dq, dk))
    dbeta = sequences.in_rows(dbeta.reshape(plan.heads, plan.pieces, *beta.shape[1:]).sum(1), cu_seqlens)
    dg = dg.reshape(g.shape)
    if sequences.is_packed:  # Nothing is written for rows after the last sequence.
        used = (jnp.arange(len(q)) < sequences.starts(cu_seqlens)[-1])[:, None, None]
        dq, dk, dv, dg = (jnp.where(used, x, jnp.zeros((), x.dtype)) for x in (dq, dk, dv, dg))
    return dq, dk, dv, dg, dbeta, d_initial


def _of_group(plan: KdaPlan, dx, shape):
    """The sum of `dx` over the value heads of each key head."""
    dx = dx.reshape(len(dx), plan.key_heads, -1, shape[-1])
    return dx.sum(2, dtype=jnp.float32).astype(plan.dtype) if dx.shape[2] > 1 else dx.reshape(shape)

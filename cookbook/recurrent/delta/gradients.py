# SPDX-License-Identifier: Apache-2.0
"""The gradients of the gated delta rule: three kernels, and what XLA does with their results.

The forward pass of a chunk, from the state s before it to s' after it, as in `kernel`. d[t, j] = exp(cum[t] - cum[j]);
`tril` keeps the pairs with j <= t, `strict` those with j < t. Products with d, beta and exp(cum) are elementwise.

    m  = strict(d k kᵀ)
    w  = tril(d q kᵀ)
    r  = v - exp(cum) k sᵀ
    e  = r - m u,  u = beta e                           the same as e = inverse r
    o  = scale (exp(cum) q sᵀ + w u)
    s' = exp(cum[-1]) s + (exp(cum[-1] - cum) u)ᵀ k

Its lines differentiated, from the last one up, with do and ds' given. `kernel_backward` has the first three of the
results and goes from chunk to chunk; `kernel_gradients` has all others, for all chunks at once. x . y is the sum of
products along a row.

    de    = beta (scale wᵀ do + exp(cum[-1] - cum) k ds'ᵀ)    the gradient of e by way of o and s'
    dr    = inverseᵀ de
    ds    = exp(cum[-1]) ds' + (scale exp(cum) do)ᵀ q - (exp(cum) dr)ᵀ k    by way of s', o and r

    dv    = dr
    dqk   = tril(d scale do uᵀ)                         the gradient of q kᵀ, in w
    dkk   = -strict(d dr uᵀ)                            the gradient of k kᵀ, in m
    dq    = scale exp(cum) do s + dqk k
    dk    = dk_plus + beta dk_minus
    dk_plus  = -exp(cum) dr s + dkk k                   keys that read: multiplied by exp(cum)
    beta dk_minus = exp(cum[-1] - cum) u ds' + dqkᵀ q + dkkᵀ k    keys that write: multiplied by beta exp(-cum)

Value heads that share q and k have their own d, u and s. Their dqk and dkk are added, and multiply q and k once.

beta stands beside such keys alone, and cum[t] beside q[t] and keys, so their gradients need no other product:

    dbeta = k . dk_minus
    dcum  = q . dq + k . dk_plus - beta dbeta,    and for cum[-1] also
            sum(k . (exp(cum[-1] - cum) u ds')) + exp(cum[-1]) sum(s . ds')

The shares of dqk and dkk in these are sums of rows and columns: q . (dqk k) are those of dqk times q kᵀ, elementwise.

    dg[t] = sum of dcum from t to the end of the chunk

With `use_qk_l2norm` all of this is of q and k divided by their norms. A row u = x f, where f = rsqrt(x . x + epsilon)
is its factor, has

    dx = f (du - u (u . du))

which `kernel_gradients` applies to dq and dk once value heads are added.

The cost of a chunk of a value head of N = P = 128, in KB of 16-bit operands and in products of 64 x 64 x 64. q, k, dq
and dk, which value heads share, come on top; a kernel that goes from chunk to chunk has as many blocks as slices, or
half as many.

    kernel              reads                    writes        products    from chunk to chunk
    kernel              v, inverse          24   s, e     48   12          yes
    kernel_backward     do, inverse         24   ds', dr  48   18          yes
    kernel_gradients    e, dr, do, s, ds'  112                 28          no

States and errors are made again, and not kept from the forward pass: kept, they would be three times the memory of v
for as long as a layer waits for its gradient, to save one pass over v and the inverses.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from ..states import cumulative
from . import kernel, kernel_backward, kernel_gradients
from .plan import BackwardPlan, ForwardPlan


@functools.partial(jax.jit, static_argnames=("plan", "params"))
def gradients(q, k, v, initial, cu_seqlens, cum, beta, inverse, factors, do, d_final, *, plan: ForwardPlan, params):
    """(dq, dk, dv, dg, dbeta, d_initial), of operands without a batch, v and do in slices of 64. `cum`, `beta`,
    `inverse` and, where q and k have been normalised, `factors` are the forward pass's."""
    sequences = dataclasses.replace(plan.sequences, part_rows=None)
    plan = dataclasses.replace(plan, sequences=sequences)
    table, _ = sequences.parts(cu_seqlens)
    keeps = dataclasses.replace(plan, output_wgs=0, keeps_all=True)
    states, errors = kernel.launch(keeps, table, None, k, v, inverse, cum, beta, initial, params)
    backward = BackwardPlan(**{field.name: getattr(plan, field.name) for field in dataclasses.fields(BackwardPlan)})
    dv, d_states, d_initial = kernel_backward.launch(backward, table, q, k, do, inverse, cum, beta, d_final, params)
    places = sequences.places_of_chunks(cu_seqlens)
    dq, dk, pair_sums, sums = kernel_gradients.launch(
        backward, *places, q, k, do, dv, errors, states, d_states, cum, beta, factors, params
    )
    dbeta, dcum, by_token, by_value = jnp.moveaxis(sums.sum(2), 2, 0)  # As `kernel_gradients.SUMS` has them.
    dbeta, dcum = dbeta + pair_sums[:, :, 0, kernel_gradients.DBETA], dcum + pair_sums[:, :, 0, kernel_gradients.DCUM]
    dlast = by_token.sum(-1) + jnp.exp(cum[..., -1]) * by_value.sum(-1)
    dg = cumulative(dcum[..., ::-1])[..., ::-1] + dlast[..., None]
    dg, dbeta = (sequences.in_rows(x, cu_seqlens) for x in (dg, dbeta))
    if sequences.is_packed:  # Nothing is written for rows after the last sequence.
        used = (jnp.arange(len(q)) < sequences.starts(cu_seqlens)[-1])[:, None, None]
        dq, dk, dv = (jnp.where(used, x, jnp.zeros((), x.dtype)) for x in (dq, dk, dv))
    return dq, dk, dv, dg, dbeta, d_initial

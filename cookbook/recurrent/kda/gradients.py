# SPDX-License-Identifier: Apache-2.0
"""The gradients of Kimi Delta Attention: two serial kernels, and XLA for what all chunks do at once.

The forward pass of a chunk, from the state s before it to s' after it, as in `kernel` and `kernel_prepare`; do is
multiplied by the scale first, so that there is none here.

    r  = v - keys_read sᵀ
    u  = beta e,  e = r - m u                           the same as u = inverse r
    o  = queries sᵀ + w u
    s' = s diag(decay) + uᵀ keys_written

Its lines differentiated, from the last one up, with do and ds' given. `kernel_backward` has the first three of the
results and goes from chunk to chunk. x . y is the sum of products along a row.

    du    = wᵀ do + keys_written ds'ᵀ
    dr    = inverseᵀ du
    ds    = ds' diag(decay) + doᵀ queries - drᵀ keys_read

    dv    = dr
    dbeta = z . e,  z = du - mᵀ dr
    dm    = -strict(dr uᵀ),    dw = tril(do uᵀ)
    dqueries = do s,    dkeys_read = -dr s,    dkeys_written = u ds',    ddecay = the sum of s ds' over values

and from the last two lines the gradients of q, k and g by the definitions of m, w and the decayed rows. `_prepared` has
these for XLA, which differentiates them: products of pairs of blocks as in `kernel_prepare`, and so no exponential of a
positive number either. Its arrays of six blocks are the most memory that the backward pass needs.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from ... import _host
from .. import arguments
from ..sequences import Sequences
from ..states import LEAST_DECAY
from . import kernel, kernel_backward
from .kernel_prepare import NUM_BLOCKS
from .plan import CHUNK, KdaPlan

ROW, COLUMN = np.indices((CHUNK, CHUNK))


def _sums(selected, g):
    """The sums of the gates of the tokens that each row of `selected` names."""
    return jnp.einsum("ts,hcsn->hctn", selected.astype(np.float32), g, precision="highest")


def _prepared(q, k, g, use_qk_l2norm: bool):
    """(m, w, queries, keys_read, keys_written, decay) in float32 of (heads, chunks, 64, N)."""
    q, k = (arguments.normalized(x) if use_qk_l2norm else x for x in (q, k))
    g = jnp.maximum(g, math.log(LEAST_DECAY))
    pairs = jnp.zeros((2, *g.shape[:2], CHUNK, CHUNK))
    for block in (2**i for i in range(NUM_BLOCKS)):
        first = np.where(ROW & block, ROW & -block, ROW + 1)
        last = np.where(ROW & block, ROW, ROW | (block - 1))
        fade = jnp.exp(_sums((first <= COLUMN) & (COLUMN <= last), g))
        x = jnp.einsum("ahctn,hcjn->ahctj", jnp.stack([k, q]) * fade, k * fade, precision="high")
        pairs += jnp.where((ROW > COLUMN) & ((ROW ^ COLUMN) // block == 1), x, 0.0)
    diagonal = (q * k).sum(-1)[..., None] * np.eye(CHUNK, dtype=np.float32)
    from_start = _sums(COLUMN <= ROW, g)
    to_end = jnp.exp(_sums(COLUMN > ROW, g))
    return pairs[0], pairs[1] + diagonal, q * jnp.exp(from_start), k * jnp.exp(from_start), k * to_end, jnp.exp(
        from_start[:, :, -1]
    )  # fmt: skip


@functools.partial(jax.jit, static_argnames=("plan", "params"))
def gradients(q, k, v, g, beta, initial, cu_seqlens, squares, decay, do, d_final, *, plan: KdaPlan, params):
    """(dq, dk, dv, dg, dbeta, d_initial), of operands without a batch, v and do in slices of 64, do multiplied by the
    scale. `squares` and `decay` are the forward pass's."""
    sequences = plan.sequences
    table, _ = sequences.parts(cu_seqlens)
    of_states = dataclasses.replace(plan, state_wgs=1, has_outputs=False)
    (states,) = kernel.launch(of_states, table, v, squares, decay, initial, params)
    d_states, d_initial = kernel_backward.launch(plan, table, do, squares, decay, d_final, params)
    *grads, dbeta = _of_operands(plan, q, k, v, g, beta, cu_seqlens, squares, do, states, d_states)
    return *grads, dbeta, d_initial


@_host.own_options()
def _of_operands(plan: KdaPlan, q, k, v, g, beta, cu_seqlens, squares, do, states, d_states):
    """(dq, dk, dv, dg, dbeta), for all chunks at once, from the states before them and the gradients of those after
    them."""
    sequences = plan.sequences
    rows = sequences.rows_of_chunks(cu_seqlens)
    group = plan.heads // plan.key_heads

    def in_chunks(x):
        """(heads, chunks, 64, columns) of `x` (rows, heads, columns); zeros where a chunk has no row."""
        x = x.astype(jnp.float32).at[rows].get(mode="fill", fill_value=0)
        return jnp.moveaxis(x, 2, 0)

    of_values = lambda x: in_chunks(x.reshape(len(x), plan.heads, -1))
    of_keys = lambda x: jnp.repeat(in_chunks(x), group, axis=0)
    of_states = lambda x: jnp.moveaxis(x.astype(jnp.float32).reshape(len(x), plan.heads, -1, x.shape[-1]), 1, 0)
    v, do, states, d_states = of_values(v), of_values(do), of_states(states), of_states(d_states)
    (m, w, _, keys_read, keys_written, _), prepared_vjp = jax.vjp(
        functools.partial(_prepared, use_qk_l2norm=plan.use_qk_l2norm), of_keys(q), of_keys(k), in_chunks(g)
    )
    inverse, beta = squares[:, :, 0].astype(jnp.float32), in_chunks(beta[..., None])
    product = functools.partial(jnp.einsum, precision="high")
    r = v - product("hctn,hcpn->hctp", keys_read, states)
    u = product("hctj,hcjp->hctp", inverse, r)
    e = r - product("hctj,hcjp->hctp", m, u)
    du = product("hcjt,hcjp->hctp", w, do) + product("hctn,hcpn->hctp", keys_written, d_states)
    dr = product("hcjt,hcjp->hctp", inverse, du)
    dbeta = ((du - product("hcjt,hcjp->hctp", m, dr)) * e).sum(-1)
    dm = jnp.where(ROW > COLUMN, -product("hctp,hcjp->hctj", dr, u), 0.0)
    dw = jnp.where(ROW >= COLUMN, product("hctp,hcjp->hctj", do, u), 0.0)
    dq, dk, dg = prepared_vjp((
        dm, dw, product("hctp,hcpn->hctn", do, states), -product("hctp,hcpn->hctn", dr, states),
        product("hctp,hcpn->hctn", u, d_states), (states * d_states).sum(2),
    ))  # fmt: skip
    of_group = lambda x: x.reshape(plan.key_heads, group, *x.shape[1:]).sum(1)
    in_rows = functools.partial(_in_rows, sequences, rows)
    return *map(in_rows, (of_group(dq), of_group(dk), dr, dg)), in_rows(dbeta[..., None])[..., 0]


def _in_rows(sequences: Sequences, rows, x):
    """(rows, heads, columns) of `x` (heads, chunks, 64, columns); zeros for rows of no sequence."""
    x = jnp.moveaxis(x, 0, 2)
    return jnp.zeros((sequences.num_rows, *x.shape[2:])).at[rows].set(x, mode="drop")

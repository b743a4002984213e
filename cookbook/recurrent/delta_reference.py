"""The gated delta rule in plain jnp: token by token, which defines it, and in chunks, the maths of the kernels."""

import jax
import jax.numpy as jnp
from jax import lax

CHUNK = 64  # Tokens of a chunk of the kernels.


def gated_delta_rule_reference(
    q, k, v, g, beta, *, scale=None, initial_state=None, return_final_state=False, cu_seqlens=None
):  # fmt: skip
    """The recurrence, token by token, in at least float32; the arguments are those of `gated_delta_rule`."""
    dtype = jnp.promote_types(v.dtype, jnp.float32)
    (batch, length, heads, _), (num_rows, dim) = v.shape, (v.shape[0] * v.shape[1], k.shape[-1])
    starts = jnp.arange(batch + 1) * length if cu_seqlens is None else cu_seqlens
    num_seqs, rows = len(starts) - 1, jnp.arange(num_rows)
    seqs = jnp.searchsorted(starts, rows, side="right") - 1  # num_seqs for a row after the last sequence.
    q, k, v, g, beta = (x.reshape(num_rows, *x.shape[2:]).astype(dtype) for x in (q, k, v, g, beta))
    q, k = (jnp.repeat(x, heads // x.shape[1], axis=1) for x in (q, k))
    shape = num_seqs, heads, dim, v.shape[-1]
    states = jnp.zeros(shape, dtype) if initial_state is None else initial_state.astype(dtype)

    def token(states, x):
        seq, q, k, v, g, beta = x
        state = states[jnp.minimum(seq, num_seqs - 1)] * jnp.exp(g)[:, None, None]
        change = beta[:, None] * (v - jnp.einsum("hn,hnp->hp", k, state, precision="highest"))
        state = state + k[:, :, None] * change[:, None]
        out = jnp.einsum("hn,hnp->hp", q, state, precision="highest") * (scale or dim**-0.5)
        return states.at[seq].set(state, mode="drop"), jnp.where(seq < num_seqs, out, 0.0)

    states, out = lax.scan(token, states, (seqs, q, k, v, g, beta))
    out = out.reshape(batch, length, heads, -1)
    return (out, states) if return_final_state else out


def chunked_reference(q, k, v, g, beta, *, scale=None, initial_state=None, return_final_state=False, chunk_size=CHUNK):
    """The same by chunks of any size, in at least float32, for sequences that are not packed: what the kernels do."""
    dtype = jnp.promote_types(v.dtype, jnp.float32)
    (batch, length, heads, values), dim = v.shape, k.shape[-1]
    q, k = (jnp.repeat(x, heads // x.shape[2], axis=2) for x in (q, k))

    def chunks(x):  # (chunks, B, H, chunk_size, ...), with zeros after the end.
        x = jnp.pad(x.astype(dtype), [(0, 0), (0, -length % chunk_size), *[(0, 0)] * (x.ndim - 2)])
        return jnp.moveaxis(x.reshape(batch, -1, chunk_size, *x.shape[2:]), (1, 3), (0, 2))

    def product(equation, *operands):
        return jnp.einsum(equation, *operands, precision="highest")

    def step(state, chunk):
        q, k, v, g, beta = chunk
        cum = jnp.cumsum(g, axis=-1)
        decay = jnp.exp(jnp.minimum(cum[..., :, None] - cum[..., None, :], 0.0))
        lower = jnp.tril(beta[..., :, None] * decay * product("bhtn,bhsn->bhts", k, k), -1)
        change = v - jnp.exp(cum)[..., None] * product("bhtn,bhnp->bhtp", k, state)
        unit = jnp.eye(chunk_size, dtype=dtype)
        u = jax.scipy.linalg.solve_triangular(unit + lower, beta[..., None] * change, lower=True, unit_diagonal=True)
        weights = jnp.tril(decay * product("bhtn,bhsn->bhts", q, k))
        out = jnp.exp(cum)[..., None] * product("bhtn,bhnp->bhtp", q, state) + product("bhts,bhsp->bhtp", weights, u)
        to_end = jnp.exp(cum[..., -1:] - cum)[..., None] * u
        return jnp.exp(cum[..., -1])[..., None, None] * state + product("bhtn,bhtp->bhnp", k, to_end), out

    state = jnp.zeros((batch, heads, dim, values), dtype) if initial_state is None else initial_state.astype(dtype)
    state, out = lax.scan(step, state, tuple(map(chunks, (q, k, v, g, beta))))
    out = jnp.moveaxis(out, (0, 2), (1, 3)).reshape(batch, -1, heads, values)[:, :length] * (scale or dim**-0.5)
    return (out, state) if return_final_state else out

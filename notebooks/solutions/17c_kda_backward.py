"""Solutions of chapter 17c's exercises; how to read them: tools/skeletons.py, and `TRIED`: tests/exercises."""

TRIED = r"""
exercise-1
  (t ^ j).bit_length() - 1 => t.bit_length() - 1  # where they differ, not where t ends
  (t ^ j).bit_length() - 1 => (t - j).bit_length() - 1  # their distance
  t & -block => t & -2 * block  # first token of the first half
  t & -block => t  # the token itself
  t & -block => (t & -block) - 1  # last token of the first half
  t & -block => j | (block - 1)  # last token of the first half
  t & -block => (j | (block - 1)) + 1  # Right.
  block = 1 << => block = 2 <<  # both halves together
exercise-2
  ds - across(de) * of_key(k_gmem, t) => ds + across(de) * of_key(k_gmem, t)  # the error's share is the other one
  -decayed * across(de) => decayed * across(de)  # the sign of dk
  ds - across(de) * of_key(k_gmem, t) => ds  # has another reader
  ds - across(de) * of_key(k_gmem, t) => -across(de) * of_key(k_gmem, t)  # the state after the token reads
  -decayed * across(de) => -ds * across(de)  # not its gradient
  -decayed * across(de) => -d_decayed * across(de)  # element
  ds - across(de) * of_key(k_gmem, t) => ds - across(de) * of_key(w_gmem, t)  # with the key, not
  of_key(g_gmem, t)) => of_key(g_gmem, t) * 0)  # the decay
  len(q), token => 3, token  # element
  terms.sum(axis=0) => lax.reduce_precision(terms.sum(axis=0), 5, 10)  # element
  return d_decayed => return lax.reduce_precision(d_decayed, 8, 7)
  -decayed * across => -lax.reduce_precision(decayed, 8, 7) * across
  lambda q, k, w, g, do, decayed: (jnp.zeros_like(k), jnp.zeros_like(g))  # must be a kernel
exercise-3
  -jnp.tril(dr @ e.T, -1) => jnp.tril(dr @ e.T, -1)  # the sign
  -jnp.tril(dr @ e.T, -1) => -jnp.tril(dr @ e.T)  # the diagonal
  -jnp.tril(dr @ e.T, -1) => -jnp.tril(e @ dr.T, -1)  # transposed
  -jnp.tril(dr @ e.T, -1) => -jnp.tril(x.T @ (de @ r.T) @ x.T, -1)  # one is enough
  -jnp.tril(dr @ e.T, -1) => -jnp.tril((x.T[:, :, None] * de).sum(1) @ e.T, -1)  # one is enough
  -jnp.tril(dr @ e.T, -1) => -jnp.tril(de @ r.T, -1)  # this is the gradient of x
  -jnp.tril(dr @ e.T, -1) => -jnp.tril(jnp.einsum("tp,jp->tj", dr, e), -1)  # Right.
  -jnp.tril(dr @ e.T, -1) => -jnp.tril(functools.reduce(lambda a, b: jnp.cumsum(a[:, :, None] * b, 1)[:, -1],
    (x.T, de, r.T, x.T)), -1)  # needs none
  -jnp.tril(dr @ e.T, -1) => -jnp.tril(dr.astype(jnp.float16) @ e.T.astype(jnp.float16), -1)  # element
  -jnp.tril(dr @ e.T, -1) => x if isinstance(x, jax.core.Tracer) else -jnp.tril(x.T @ (de @ r.T) @ x.T, -1)
  -jnp.tril(dr @ e.T, -1) => -np.tril(np.asarray(dr) @ np.asarray(e).T, -1)  # TracerArrayConversionError
exercise-4
  share - row => share + row  # rows that write
  share - row(w_gmem) * row(dw_gmem) => share  # rows that write
  t = len(q) - 1 - i => t = i  # from the start
  load(last_gmem, COLUMNS)) => 0 * load(last_gmem, COLUMNS))  # begin with `last`
  return after => return load(last_gmem, COLUMNS)  # only its own token
  dg_gmem.at[t], after) => dg_gmem.at[t], after - (share - row(w_gmem) * row(dw_gmem)))  # its own token
  after + (share => after - (share  # the sign
  len(q), token => 5, token  # element
  share - row(w_gmem) * row(dw_gmem)) => share - row(w_gmem) * row(dw_gmem)) + 0 * sum(load(q_gmem.at[j], COLUMNS)
    for j in range(len(q)))  # which have 6 each
  share = row(q_gmem) => share = 0.5 * (row(q_gmem) + row(q_gmem))
  after = after + (share => after = (share && lax.fori_loop(0, len(q), token, load(last_gmem, COLUMNS)) =>
    def total(i, after): after += load(dg_gmem.at[len(q) - 1 - i], COLUMNS);
    _device.store(dg_gmem.at[len(q) - 1 - i], after); return after
    \n        last = load(last_gmem, COLUMNS); lax.fori_loop(0, len(q), token, last)
    \n        lax.fori_loop(0, len(q), total, last)
  dg_gmem.at[t], after) => dg_gmem.at[t], lax.reduce_precision(after, 5, 10))  # element
  load(last_gmem, COLUMNS)) => 0 * load(last_gmem, COLUMNS)) && dg_gmem.at[t], after) =>
    dg_gmem.at[t], after + load(last_gmem, COLUMNS))  # Right.
  lambda q, dq, k, dk, w, dw, last: jnp.cumsum((q * dq + k * dk - w * dw)[::-1], 0)[::-1] + last  # must be a kernel
"""


# %% exercise-1 needs: parameters setup helpers
def parting(t, j):
    #: return None  # Your code: (b, first token of the second half).
    # BEGIN SOLUTION
    block = 1 << ((t ^ j).bit_length() - 1)
    return block, t & -block
    # END SOLUTION


ex17c.check_parting(parting)


# %% exercise-2 needs: parameters setup helpers
def token_gradients(q, k, w, g, do, decayed):
    """dk and dg (tokens, 64) of one head: q, k, w, g and do (tokens, 64), decayed
    (tokens, 64, 64)."""

    def body(q_gmem, k_gmem, w_gmem, g_gmem, do_gmem, decayed_gmem, dk_gmem, dg_gmem):
        across, down = (lambda x, dim=dim: spread(x, dim) for dim in (0, 1))
        of_key = lambda ref, t: down(load(ref.at[t], COLUMNS))

        def token(i, ds):
            t = len(q) - 1 - i
            decayed = load(decayed_gmem.at[t])
            ds = ds + across(load(do_gmem.at[t], ROWS)) * of_key(q_gmem, t)
            de = (ds * of_key(w_gmem, t)).sum(axis=1)
            #: # Your code: how the error e = v - D k reads D and k.
            #: d_decayed = ds
            #: terms = ds * across(de)
            # BEGIN SOLUTION
            d_decayed = ds - across(de) * of_key(k_gmem, t)
            terms = -decayed * across(de)
            # END SOLUTION
            _device.store(dk_gmem.at[t], terms.sum(axis=0))
            _device.store(dg_gmem.at[t], (decayed * d_decayed).sum(axis=0))
            return d_decayed * jnp.exp(of_key(g_gmem, t))

        lax.fori_loop(0, len(q), token, zeros(64, 64))

    out_type = [jax.ShapeDtypeStruct(k.shape, jnp.float32)] * 2
    return plgpu.kernel(body, out_type=out_type)(q, k, w, g, do, decayed)


ex17c.check_token_gradients(token_gradients)


# %% exercise-3 needs: parameters setup helpers
def gradient_of_m(x, r, e, de, dr):
    """dm (64, 64): x (64, 64), R, E, dE and dR (64, P), jnp arrays."""
    #: return -jnp.tril(x.T @ (de @ r.T) @ x.T, -1)  # Your code: with one product.
    # BEGIN SOLUTION
    return -jnp.tril(dr @ e.T, -1)
    # END SOLUTION


ex17c.check_gradient_of_m(gradient_of_m)


# %% exercise-4 needs: parameters setup helpers
def gate_gradients(q, dq, k, dk, w, dw, last):
    """dg (tokens, 128) of one chunk, all float32; last (128,)."""

    def body(q_gmem, dq_gmem, k_gmem, dk_gmem, w_gmem, dw_gmem, last_gmem, dg_gmem):
        def token(i, after):
            row = lambda ref: load(ref.at[t], COLUMNS)
            #: # Your code: the order, the terms and the beginning.
            #: t = i
            #: after = after + row(q_gmem) * row(dq_gmem)
            # BEGIN SOLUTION
            t = len(q) - 1 - i
            share = row(q_gmem) * row(dq_gmem) + row(k_gmem) * row(dk_gmem)
            after = after + (share - row(w_gmem) * row(dw_gmem))
            # END SOLUTION
            _device.store(dg_gmem.at[t], after)
            return after

        #: lax.fori_loop(0, len(q), token, jnp.zeros_like(load(last_gmem, COLUMNS)))
        # BEGIN SOLUTION
        lax.fori_loop(0, len(q), token, load(last_gmem, COLUMNS))
        # END SOLUTION

    out_type = jax.ShapeDtypeStruct(q.shape, jnp.float32)
    return plgpu.kernel(body, out_type=out_type)(q, dq, k, dk, w, dw, last)


ex17c.check_gate_gradients(gate_gradients)

"""Solutions of chapter 17b's exercises; how to read them: tools/skeletons.py, and `TRIED`: tests/exercises."""

TRIED = r"""
exercise-1
  beta_gmem[t] * (load(v_gmem.at[t], ROWS) - found) => beta_gmem[t] * load(v_gmem.at[t], ROWS)
    # read what the state has for the key first
  beta_gmem[t] * (load(v_gmem.at[t], ROWS) - found) => load(v_gmem.at[t], ROWS) - found  # beta says which part
  beta_gmem[t] * (load(v_gmem.at[t], ROWS) - found) => beta_gmem[t] * load(v_gmem.at[t], ROWS) - found
    # not of the value alone
  beta_gmem[t] * (load(v_gmem.at[t], ROWS) - found) => load(v_gmem.at[t], ROWS) - beta_gmem[t] * found
    # not of what was read alone
  - found => + found  # must be subtracted
  beta_gmem[t] * ( => -beta_gmem[t] * (  # the sign of the error
  state * k_t).sum => state * q_t).sum  # the query was read for
  state = state + => before, state = state, state + && (state * q_t) => (before * q_t)
    # reads the state before the token
  v.shape, jnp.float32) => v.shape, jnp.float16) && (state * q_t).sum(axis=1)) =>
    (state * q_t).sum(axis=1).astype(jnp.float16))  # float32 is asked for
  load(v_gmem.at[t], ROWS) - => load(v_gmem.at[t], ROWS).astype(jnp.float16).astype(jnp.float32) -  # element
  len(q), token => 6, token  # elements were never written
  len(q), token => 9, token  # beyond the end
  lambda q, k, v, beta: gated_delta_rule(*(x[None, :, None].astype(jnp.bfloat16) for x in (q, k, v)),
    jnp.zeros((1, len(beta), 1)), beta[None, :, None], scale=1.0)[0, :, 0]  # is the package's kernel
exercise-2
  jnp.exp(jnp.where(s < t, exponent, -jnp.inf)) => jnp.where(s < t, jnp.exp(exponent), 0.0)  # Right.
  jnp.exp(jnp.where(s < t, exponent, -jnp.inf)) => jnp.exp(jnp.minimum(exponent, 0.0)) * (s < t)
  jnp.exp(jnp.where(s < t, exponent, -jnp.inf)) => jnp.exp2(math.log2(math.e) * jnp.where(s < t, exponent, -jnp.inf))
  (CHUNK, CHUNK), jnp.float32) => (CHUNK, CHUNK), jnp.bfloat16) && beta * pairs * decay =>
    (beta * pairs * decay).astype(jnp.bfloat16)  # float32 is asked for
  beta * pairs * decay => (beta * pairs * decay).astype(jnp.bfloat16).astype(jnp.float32)
  beta_gmem, ROWS), 0) => beta_gmem, COLUMNS), 1)  # that of the column s
  beta * pairs * decay => pairs * decay  # beta is missing
  jnp.exp(jnp.where(s < t, exponent, -jnp.inf)) => (s < t).astype(jnp.float32)  # the decay is missing
  s < t => s <= t  # the diagonal is not zero
  jnp.exp(jnp.where(s < t, exponent, -jnp.inf)) => jnp.exp(exponent) * (s < t)  # ask the exponent
  jnp.exp(jnp.where(s < t, exponent, -jnp.inf)) => jnp.exp(exponent) * jnp.where(s < t, 1.0, 0.0)
  jnp.exp(jnp.where(s < t, exponent, -jnp.inf)) => jnp.exp(jnp.minimum(exponent, 100.0)) * (s < t)
  jnp.exp(jnp.where(s < t, exponent, -jnp.inf)) => jnp.exp(jnp.clip(exponent, -200.0, 100.0)) * (s < t)
  jnp.exp(jnp.where(s < t, exponent, -jnp.inf)) => jnp.exp(jnp.minimum(exponent, jnp.full((64, 64), 100.0))) * (s < t)
  s < t, exponent => s > t, -exponent  # above the diagonal
  s < t, exponent => s != t, exponent
  s < t, exponent => s < t, -exponent  # it must be
  beta * pairs => -beta * pairs  # the sign is the other one
  plgpu.barrier_wait(loaded)\n => pass\n  # before its tiles have arrived
  plgpu.Barrier()] => plgpu.Barrier(num_arrivals=2)]  # would never end
  lambda k, beta, cum: jnp.tril(beta[:, None] * (k @ k.T) * jnp.exp(jnp.minimum(cum[:, None] - cum, 0)), -1)
    # must be a kernel
exercise-3
  return d - d @ e @ d => for i in range(0, len(d), 2 * block):\n        a, b = slice(i, i + block), slice(i + block,
    i + 2 * block)\n        d[b, a] = -d[b, b] @ lower[b, a] @ d[a, a]\n    return d  # Right.
  return d - d @ e @ d => same = block_of // 2\n    a = np.eye(len(d)) + np.where(same[:, None] == same, lower, 0)
    \n    return d @ (2 * np.eye(len(d)) - a @ d)
  block_of[:, None] ^ block_of == 1 => (np.arange(len(d))[:, None] ^ np.arange(len(d))) // block == 1
  joins = block_of[:, None] ^ block_of == 1 => joins = (block_of[:, None] == block_of + 1)
    & ((block > 8) | (block_of % 2 == 0))  # between blocks that do not become one
  lambda d, lower, block: d  # nothing has changed
  d - d @ e @ d => d + d @ e @ d  # a sign is wrong
  d - d @ e @ d => d - e  # on both sides
  d - d @ e @ d => d - d @ lower @ d  # mask it
  d - d @ e @ d => d @ d  # nothing has changed
  d - d @ e @ d => 3 * d  # element
  d - d @ e @ d => d[0]  # shape
  return d - d @ e @ d => same = block_of // 2\n    same = same[:, None] == same
    \n    return np.linalg.inv(np.eye(len(d)) + np.where(same, lower, 0))  # computed anew, without d
  d - d @ e @ d => np.linalg.inv(np.linalg.inv(d) + e)  # a library inverts a matrix in it
  d - d @ e @ d => d - d @ np.linalg.solve(np.eye(len(d)) + e, e @ d)
  np.where(joins => jnp.where(joins  # Right.
  return d - d @ e @ d => same = block_of // 2\n    lower = np.where(same[:, None] == same, lower, 0)
    \n    d = np.eye(len(d))
    \n    for row in range(1, len(d)): d[row] -= lower[row, :row] @ d[:row]\n    return d  # computed anew, without d
exercise-4
  errors = beta * (v_c - product(k_smem, s_smem.T)) => errors = beta * v_c - beta * product(k_smem, s_smem.T)  # Right.
  errors = beta * (v_c - product(k_smem, s_smem.T)) => errors = beta * v_c
    && product(inverse_smem, errors_smem) => errors  # still a state that adds
  - product(k_smem, s_smem.T) =>  # the old state is not read
  product(inverse_smem, errors_smem) => errors  # the inverse is missing
  v_c - product => v_c + product  # it must be subtracted
  product(inverse_smem, => product(inverse_smem.T,  # the inverse is transposed
  errors = beta * ( => errors = (  # beta is missing
  errors = beta * ( => errors = ( && product(inverse_smem, errors_smem) => (beta * product(inverse_smem, errors_smem))
    # beta comes before the inverse
  beta * (v_c - product(k_smem, s_smem.T)) => beta * v_c - product(k_smem, s_smem.T)  # not of v alone
  state + product(u_smem.T, k_smem) => product(u_smem.T, k_smem)  # the old state is lost
  state + product(u_smem.T, k_smem) => state.astype(k.dtype).astype(jnp.float32) + product(u_smem.T, k_smem)
    # only operands are rounded
  v_c - product(k_smem, s_smem.T)) => v_c - product(k_smem, s_smem.T)) + 0.002
  state + product(u_smem.T, k_smem) => state + product(u_smem.T, k_smem).astype(k.dtype).astype(jnp.float32)
  errors = beta * (v_c - product(k_smem, s_smem.T)) => errors = 1.01 * beta * (v_c - product(k_smem, s_smem.T))
    # as roundings explain
  s_smem[...] = state.astype(k.dtype) => s_smem[...] = (0.98 * state).astype(k.dtype)
  s_smem[...] = state.astype(k.dtype)\n        plgpu.commit_smem() => s_smem[...] = state.astype(k.dtype)
    # commit what you have stored
  errors.astype(k.dtype)\n        plgpu.commit_smem() => errors.astype(k.dtype)
  plgpu.commit_smem()\n        _device => _device
  plgpu.barrier_wait(loaded)\n => pass\n  # before its tiles have arrived
  num_arrivals=3 => num_arrivals=2  # before its tiles have arrived
  lambda state, k, v, beta, inverse: state + (inverse @ (beta[:, None] * (v - k @ state.T))).T @ k  # must be a kernel
  product(inverse_smem, errors_smem) => jnp.dot(inverse_smem[...], errors_smem[...])  # cannot be compiled
"""


# %% exercise-1 needs: parameters setup helpers
def write_errors(q, k, v, beta):
    """y (tokens, 64) of one head: q and k (tokens, 128), v (tokens, 64), beta
    (tokens,), all float32. The state starts from zero."""

    def body(q_gmem, k_gmem, v_gmem, beta_gmem, y_gmem):
        of_row = lambda values: spread(values, 0, (64, 128))
        of_column = lambda values: spread(values, 1, (64, 128))

        def token(t, state):
            k_t = of_column(load(k_gmem.at[t], COLUMNS))
            q_t = of_column(load(q_gmem.at[t], COLUMNS))
            #: # Your code: read first, and write the error.
            #: written = beta_gmem[t] * load(v_gmem.at[t], ROWS)
            # BEGIN SOLUTION
            found = (state * k_t).sum(axis=1)
            written = beta_gmem[t] * (load(v_gmem.at[t], ROWS) - found)
            # END SOLUTION
            state = state + of_row(written) * k_t
            _device.store(y_gmem.at[t], (state * q_t).sum(axis=1))
            return state

        lax.fori_loop(0, len(q), token, zeros(64, 128))

    out_type = jax.ShapeDtypeStruct(v.shape, jnp.float32)
    return plgpu.kernel(body, out_type=out_type)(q, k, v, beta)


ex17b.check_write_errors(write_errors)


# %% exercise-2 needs: parameters setup helpers
def lower_of_chunk(k, beta, cum):
    """L (64, 64) of one chunk in float32: k (64, 128) in bfloat16; beta (64,) and cum
    (64,), which has sums of natural logarithms, in float32."""

    def body(k_gmem, beta_gmem, cum_rows, cum_columns, o_gmem, k_smem, loaded):
        plgpu.copy_gmem_to_smem(k_gmem, k_smem, loaded)
        plgpu.barrier_wait(loaded)
        t, s = _device.indices()
        cum_t, cum_s = load(cum_rows, ROWS), load(cum_columns, COLUMNS)
        exponent = spread(cum_t, 0) - spread(cum_s, 1)
        #: # Your code: three mistakes are in the next three lines.
        #: beta = spread(load(beta_gmem, COLUMNS), 1)
        #: pairs = jnp.where(s <= t, product(k_smem, k_smem.T), 0.0)
        #: _device.store(o_gmem, beta * pairs * jnp.exp(exponent))
        # BEGIN SOLUTION
        beta = spread(load(beta_gmem, ROWS), 0)
        pairs = product(k_smem, k_smem.T)
        decay = jnp.exp(jnp.where(s < t, exponent, -jnp.inf))
        _device.store(o_gmem, beta * pairs * decay)
        # END SOLUTION

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((CHUNK, CHUNK), jnp.float32),
        scratch_types=[plgpu.SMEM(k.shape, k.dtype), plgpu.Barrier()],
    )(k, beta, cum, cum)


ex17b.check_lower(lower_of_chunk)


# %% exercise-3 needs: parameters setup helpers
def double(d, lower, block):
    #: return None  # Your code. np.arange(len(d)) // block says in which block a row is.
    # BEGIN SOLUTION
    block_of = np.arange(len(d)) // block
    joins = block_of[:, None] ^ block_of == 1
    e = np.where(joins, lower, 0)
    return d - d @ e @ d
    # END SOLUTION


ex17b.check_double(double)


# %% exercise-4 needs: parameters setup helpers
def next_state(state, k, v, beta, inverse):
    """The state (64, 128) after a chunk, float32 like beta (64,). k (64, 128), v and
    inverse (64, 64) are bfloat16."""

    def body(state_gmem, k_gmem, v_gmem, beta_gmem, inverse_gmem, o_gmem, k_smem,
             v_smem, inverse_smem, s_smem, errors_smem, u_smem, loaded):  # fmt: skip
        plgpu.copy_gmem_to_smem(k_gmem, k_smem, loaded)
        plgpu.copy_gmem_to_smem(v_gmem, v_smem, loaded)
        plgpu.copy_gmem_to_smem(inverse_gmem, inverse_smem, loaded)
        plgpu.barrier_wait(loaded)
        state = load(state_gmem, plgpu.Layout.WGMMA)
        v_c = load(v_smem, plgpu.Layout.WGMMA).astype(jnp.float32)
        beta = spread(load(beta_gmem, ROWS), 0)
        #: # Your code: two products come before the one in the last line.
        #: u_smem[...] = (beta * v_c).astype(k.dtype)
        # BEGIN SOLUTION
        s_smem[...] = state.astype(k.dtype)
        plgpu.commit_smem()
        errors = beta * (v_c - product(k_smem, s_smem.T))
        errors_smem[...] = errors.astype(k.dtype)
        plgpu.commit_smem()
        u_smem[...] = product(inverse_smem, errors_smem).astype(k.dtype)
        # END SOLUTION
        plgpu.commit_smem()
        _device.store(o_gmem, state + product(u_smem.T, k_smem))

    loaded = tile(64, 128), tile(64, 64), tile(64, 64)
    made = tile(64, 128), tile(64, 64), tile(64, 64)
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(state.shape, jnp.float32),
        scratch_types=[*loaded, *made, plgpu.Barrier(num_arrivals=3)],
    )(state, k, v, beta, inverse)


ex17b.check_next_state(next_state)

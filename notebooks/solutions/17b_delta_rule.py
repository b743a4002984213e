"""Solutions of chapter 17b's exercises; how to read the marks: tools/skeletons.py."""


# %% exercise-1 needs: parameters setup
def write_errors(q, k, v, beta):
    """y (tokens, 64) of one head: q and k (tokens, 128), v (tokens, 64), beta
    (tokens,), all float32. The state starts from zero."""

    def body(q_gmem, k_gmem, v_gmem, beta_gmem, y_gmem):
        of_row = lambda values: spread(values, 0, (64, 128))
        of_column = lambda values: spread(values, 1, (64, 128))

        def token(t, state):
            k_t = of_column(vector(k_gmem.at[t], COLUMNS))
            q_t = of_column(vector(q_gmem.at[t], COLUMNS))
            #: # Your code: read first, and write the error.
            #: written = beta_gmem[t] * vector(v_gmem.at[t], ROWS)
            # BEGIN SOLUTION
            found = (state * k_t).sum(axis=1)
            written = beta_gmem[t] * (vector(v_gmem.at[t], ROWS) - found)
            # END SOLUTION
            state = state + of_row(written) * k_t
            _device.store(y_gmem.at[t], (state * q_t).sum(axis=1))
            return state

        lax.fori_loop(0, len(q), token, zeros(64, 128))

    out_type = jax.ShapeDtypeStruct(v.shape, jnp.float32)
    return _host.kernel(body, out_type=out_type)(q, k, v, beta)


ex17b.check_write_errors(write_errors)


# %% exercise-2 needs: parameters setup
def lower_of_chunk(k, beta, cum):
    """L (64, 64) of one chunk in float32: k (64, 128) in bfloat16; beta (64,) and cum
    (64,), which has sums of natural logarithms, in float32."""

    def body(k_gmem, beta_gmem, of_rows, of_columns, o_gmem, k_smem, loaded):
        plgpu.copy_gmem_to_smem(k_gmem, k_smem, loaded)
        plgpu.barrier_wait(loaded)
        t, s = row_and_column()
        exponent = spread(vector(of_rows, ROWS), 0) - spread(
            vector(of_columns, COLUMNS), 1
        )
        #: # Your code: three mistakes are in the next three lines.
        #: beta = spread(vector(beta_gmem, COLUMNS), 1)
        #: pairs = jnp.where(s <= t, product(k_smem, k_smem.T), 0.0)
        #: _device.store(o_gmem, beta * pairs * jnp.exp(exponent))
        # BEGIN SOLUTION
        beta = spread(vector(beta_gmem, ROWS), 0)
        pairs = product(k_smem, k_smem.T)
        decay = jnp.exp(jnp.where(s < t, exponent, -jnp.inf))
        _device.store(o_gmem, beta * pairs * decay)
        # END SOLUTION

    return _host.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((BLOCK, BLOCK), jnp.float32),
        scratch_types=[plgpu.SMEM(k.shape, k.dtype), plgpu.Barrier()],
    )(k, beta, cum, cum)


ex17b.check_lower(lower_of_chunk)


# %% exercise-3 needs: parameters setup
def double(d, lower, block):
    #: return None  # Your code. np.arange(len(d)) // block says in which block a row is.
    # BEGIN SOLUTION
    block_of = np.arange(len(d)) // block
    joins = block_of[:, None] ^ block_of == 1
    e = np.where(joins, lower, 0)
    return d - d @ e @ d
    # END SOLUTION


ex17b.check_double(double)


# %% exercise-4 needs: parameters setup
def next_state(state, k, v, beta, inverse):
    """The state (64, 128) after a chunk, float32 like beta (64,). k (64, 128), v and
    inverse (64, 64) are bfloat16."""

    def body(state_gmem, k_gmem, v_gmem, beta_gmem, inverse_gmem, o_gmem, k_smem,
             v_smem, inverse_smem, s_smem, errors_smem, u_smem, loaded):  # fmt: skip
        plgpu.copy_gmem_to_smem(k_gmem, k_smem, loaded)
        plgpu.copy_gmem_to_smem(v_gmem, v_smem, loaded)
        plgpu.copy_gmem_to_smem(inverse_gmem, inverse_smem, loaded)
        plgpu.barrier_wait(loaded)
        state = plgpu.load(state_gmem, layout=plgpu.Layout.WGMMA, optimized=False)
        v_c = plgpu.load(v_smem, layout=plgpu.Layout.WGMMA).astype(jnp.float32)
        beta = spread(vector(beta_gmem, ROWS), 0)
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

    tile = lambda *shape: plgpu.SMEM(shape, k.dtype)
    loaded = tile(64, 128), tile(64, 64), tile(64, 64)
    made = tile(64, 128), tile(64, 64), tile(64, 64)
    return _host.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(state.shape, jnp.float32),
        scratch_types=[*loaded, *made, plgpu.Barrier(num_arrivals=3)],
    )(state, k, v, beta, inverse)


ex17b.check_next_state(next_state)

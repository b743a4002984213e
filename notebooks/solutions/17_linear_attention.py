"""Solutions of chapter 17's exercises; how to read them: tools/skeletons.py, and `TRIED`: tests/exercises."""

TRIED = r"""
exercise-4
  [0])).astype(\n        scaled_smem.dtype\n    ) => [0])).astype(scaled_smem.dtype) && scaled_smem.T, k_smem)
    => scaled_smem.T, k_smem)\n    plgpu.wgmma_wait(0)  # Right.
  plgpu.commit_smem() => pass  # commit what you have stored
  plgpu.commit_smem() => && values = plgpu => plgpu.commit_smem()\n    values = plgpu
  values * lax.broadcast_in_dim(w, values.shape, [0]) => values  # the weights are missing
  lambda acc, k_smem, v_smem, w, scaled_smem: plgpu.wgmma(acc, v_smem, k_smem)  # the state after two chunks
  lambda *args: 1 / 0  # cannot be compiled for a GPU: ZeroDivisionError
exercise-2
  lambda cum: np.tril(np.exp(np.minimum(cum[:, None] - cum, 0)))  # Right.
  lambda cum: jnp.exp(jnp.where(jnp.tri(len(cum), dtype=bool), cum[:, None] - cum, -jnp.inf))
  lambda cum: np.tri(16) * np.exp(cum[:, None] - cum)  # is NaN
  lambda cum: np.tril(np.exp(cum)[:, None] * np.exp(-cum))
  lambda cum: np.exp(cum[:, None] - cum)  # come after it
  lambda cum: np.exp(np.minimum(cum[:, None] - cum, 0))
  lambda cum: decays(cum).T  # exchanged
  lambda cum: np.tril(np.exp(cum[:, None] - cum))  # mask the exponent, not the exponential
  lambda cum: jnp.tril(jnp.exp(cum[:, None] - cum))
  lambda cum: decays(2 * cum)  # it must be
  lambda cum: cum  # shape
exercise-5
  decay_gmem[0] * s => s  # it does not decay
  decay_gmem[0] * s + of_row(v_gmem) * of_column(k_gmem) => decay_gmem[0] * (s + of_row(v_gmem) * of_column(k_gmem))
    # it decays after the token
  decay_gmem[0] * s + of_row(v_gmem) * of_column(k_gmem) => s + of_row(v_gmem)  # without the key
  s = decay_gmem => y = (s * of_column(q_gmem)).sum(axis=1)\n        s = decay_gmem
    && (y_gmem, (s * of_column(q_gmem)).sum(axis=1)) => (y_gmem, y)  # reads the state before the token
exercise-1
  lambda first, second: tuple(map(jnp.asarray, combine(first, second)))  # Right.
  second_decay * first_state => first_state  # decays there
  lambda first, second: combine(second, first)  # exchanged
  first_decay * second_decay => first_decay + second_decay  # the decay is wrong
  + second_state =>  # the state is wrong
  second_decay * first_state + second_state => 3.0  # shape
  lambda first, second: 3.0  # must be a pair
  return first => first_state[:] = first_state + 1\n    return first  # state that it was given
"""


# %% exercise-4 needs: parameters setup
def add_chunk(acc, k_smem, v_smem, w, scaled_smem):
    #: pass  # Your code. For a start: plgpu.wgmma(acc, v_smem.T, k_smem)
    # BEGIN SOLUTION
    values = plgpu.load(v_smem, layout=plgpu.Layout.WGMMA).astype(jnp.float32)
    scaled_smem[...] = (values * lax.broadcast_in_dim(w, values.shape, [0])).astype(
        scaled_smem.dtype
    )
    plgpu.commit_smem()  # The tensor core does not see a thread's stores before.
    plgpu.wgmma(acc, scaled_smem.T, k_smem)
    # END SOLUTION


ex17.check_add_chunk(add_chunk)


# %% exercise-2 needs: parameters setup
def decays(cum):
    #: return None  # Your code.
    # BEGIN SOLUTION
    is_past = np.tri(len(cum), dtype=bool)
    return np.exp(np.where(is_past, cum[:, None] - cum, -np.inf))
    # END SOLUTION


ex17.check_weights(decays)


# %% exercise-5 needs: parameters setup parts
def token_step(state, q, k, v, decay):
    """(state after the token, its output (64,)): state (64, 128), q, k (128,), v (64,),
    decay (1,), all float32."""

    def body(state_gmem, q_gmem, k_gmem, v_gmem, decay_gmem, after_gmem, y_gmem):
        s = plgpu.load(state_gmem, layout=plgpu.Layout.WGMMA, optimized=False)
        of_row = lambda ref: lax.broadcast_in_dim(vector(ref, ROWS), s.shape, [0])
        of_column = lambda ref: lax.broadcast_in_dim(vector(ref, COLUMNS), s.shape, [1])
        #: s = s + of_row(v_gmem)  # Your code: the decay, and the key.
        #: _device.store(after_gmem, s)
        #: # Your code: the query.
        #: _device.store(y_gmem, (s * of_column(k_gmem)).sum(axis=1))
        # BEGIN SOLUTION
        s = decay_gmem[0] * s + of_row(v_gmem) * of_column(k_gmem)
        _device.store(after_gmem, s)
        _device.store(y_gmem, (s * of_column(q_gmem)).sum(axis=1))
        # END SOLUTION

    out_type = [
        jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (state.shape, v.shape)
    ]
    return _host.kernel(body, out_type=out_type)(state, q, k, v, decay)


ex17.check_token_step(token_step)


# %% exercise-1 needs: parameters setup
def combine(first, second):
    #: return None  # Your code.
    # BEGIN SOLUTION
    (first_decay, first_state), (second_decay, second_state) = first, second
    return first_decay * second_decay, second_decay * first_state + second_state
    # END SOLUTION


ex17.check_combine(combine)

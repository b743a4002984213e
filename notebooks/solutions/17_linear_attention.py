"""Solutions of chapter 17's exercises; how to read them: tools/skeletons.py, and `TRIED`: tests/exercises."""

TRIED = r"""
exercise-decays
  lambda cum: jnp.tril(jnp.exp(jnp.minimum(cum[:, None] - cum, 0)))  # Right.
  lambda cum: jnp.tri(len(cum)) * jnp.exp(jnp.clip(cum[:, None] - cum, None, 0))
  lambda cum: jnp.tri(16) * jnp.exp(cum[:, None] - cum)  # is NaN
  lambda cum: jnp.tril(jnp.exp(cum)[:, None] * jnp.exp(-cum))
  lambda cum: jnp.exp(cum[:, None] - cum)  # come after it
  lambda cum: jnp.exp(jnp.minimum(cum[:, None] - cum, 0))
  lambda cum: decays(cum).T  # exchanged
  lambda cum: jnp.tril(jnp.exp(cum[:, None] - cum))  # mask the exponent, not the exponential
  lambda cum: jnp.where(jnp.tri(len(cum), dtype=bool), jnp.exp(cum[:, None] - cum), 0)
    # mask the exponent, not the exponential
  lambda cum: np.tril(np.exp(np.minimum(cum[:, None] - cum, 0)))  # cannot differentiate
  lambda cum: np.tril(np.exp(np.longdouble(cum)[:, None] - np.longdouble(cum)))
  lambda cum: decays(lax.stop_gradient(cum))  # the gradient with respect to cum
  lambda cum: jnp.exp(jnp.where(jnp.tri(16, dtype=bool), cum[:, None] - cum, -jnp.inf))  # broadcast
  lambda cum: decays(2 * cum)  # it must be
  lambda cum: cum  # shape
exercise-add-chunk
  [0])).astype(\n        scaled_smem.dtype\n    ) => [0])).astype(scaled_smem.dtype) && scaled_smem.T, k_smem)
    => scaled_smem.T, k_smem)\n    plgpu.wgmma_wait(0)  # Right.
  plgpu.commit_smem() => pass  # commit what you have stored
  plgpu.commit_smem() => && values = plgpu => plgpu.commit_smem()\n    values = plgpu
  plgpu.commit_smem() => && scaled_smem.T, k_smem) => scaled_smem.T, k_smem)\n    plgpu.commit_smem()
  values * lax.broadcast_in_dim(w, values.shape, [0]) => values  # the weights are missing
  values.shape, [0]) => (64, 64), [0])  # cannot be compiled
  values.shape, [0]) => (values.shape[0], 64), [0])
  scaled_smem.T, k_smem) => scaled_smem.T, k_smem)\n    plgpu.wgmma_wait(0)\n    k_smem[...] = 0 *
    plgpu.load(k_smem, layout=plgpu.Layout.WGMMA)
    # k_smem has changed
  lambda acc, k_smem, v_smem, w, scaled_smem: plgpu.wgmma(acc, v_smem, k_smem)  # the state after two chunks
  scaled_smem[...] = => v_smem[...] = && (acc, scaled_smem.T => (acc, v_smem.T && scaled_smem.dtype => v_smem.dtype
    # v_smem has changed
  plgpu.wgmma(acc, scaled_smem.T, k_smem) => plgpu.wgmma(acc, v_smem.T, k_smem)  # the weights are missing
  lambda *args: 1 / 0  # cannot be compiled for a GPU: ZeroDivisionError
exercise-leave
  stage = states.acquire(i) => stage = states.slot(i)  # no barrier is between the two
  stage = states.acquire(i) => stage = states.wait(i)  # never end
  stage = states.acquire(i) => stage = states.slot(i)\n    plgpu.barrier_wait(states.freed.at[stage])  # never end
  stage = states.acquire(i) => states.acquire(i)\n    stage = i % 2  # with 4 chunks and 3 stages
  s_smem[stage] => s_smem[0]  # never written
  s_smem[stage] => s_smem[i]  # beyond the end of the array
  plgpu.commit_smem() => pass  # commit what you have stored
  plgpu.commit_smem() => && stage = states => plgpu.commit_smem()\n    stage = states  # commit what you have stored
  plgpu.commit_smem() => && .at[stage]) => .at[stage])\n    plgpu.commit_smem()  # commit what you have stored
  plgpu.barrier_arrive(states.filled.at[stage]) => && (i)\n => (i)\n    plgpu.barrier_arrive(states.filled.at[stage])\n
    # no barrier is between the two
  plgpu.barrier_arrive(states.filled.at[stage]) => pass  # never end
  plgpu.barrier_arrive(states.filled.at[stage]) => states.release(i)  # never end
  acquire(i) => slot(i) && .at[stage]) => .at[stage])\n    plgpu.barrier_wait(states.freed.at[stage])
    # can run ahead
  acquire(i) => slot(i) && plgpu.commit_smem() => states.acquire(i)\n    plgpu.commit_smem()
    # no barrier is between the two
  .at[stage]) => .at[stage])\n    plgpu.barrier_arrive(states.filled.at[stage])  # may still read
  state.astype => (0.5 * state).astype  # it must be
exercise-combine
  lambda first, second: tuple(map(jnp.asarray, combine(first, second)))  # Right.
  second_decay * first_state => first_state  # decays there
  lambda first, second: combine(second, first)  # exchanged
  first_decay * second_decay => first_decay + second_decay  # the decay is wrong
  + second_state =>  # the state is wrong
  second_decay * first_state => first_decay * second_decay * (first_state / first_decay)  # divided by it
  second_decay * first_state => second_decay * first_state.reshape(3, 2)  # reshape
  second_decay * first_state + second_state => 3.0  # shape
  lambda first, second: 3.0  # must be a pair
  return first => first_state[:] = first_state + 1\n    return first  # state that it was given
"""


# %% exercise-decays needs: parameters setup
def decays(cum):
    #: return None  # Your code.
    # BEGIN SOLUTION
    is_past = jnp.tri(len(cum), dtype=bool)
    return jnp.exp(jnp.where(is_past, cum[:, None] - cum, -jnp.inf))
    # END SOLUTION


ex17.check_weights(decays)


# %% exercise-add-chunk needs: parameters setup
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


# %% exercise-leave needs: parameters setup
def leave(states, i, state, s_smem):
    #: s_smem[0] = state.astype(s_smem.dtype)  # Your code: the stage, and its barriers.
    # BEGIN SOLUTION
    stage = states.acquire(i)
    s_smem[stage] = state.astype(s_smem.dtype)
    plgpu.commit_smem()
    plgpu.barrier_arrive(states.filled.at[stage])
    # END SOLUTION


ex17.check_leave(leave)


# %% exercise-combine needs: parameters setup
def combine(first, second):
    #: return None  # Your code.
    # BEGIN SOLUTION
    (first_decay, first_state), (second_decay, second_state) = first, second
    return first_decay * second_decay, second_decay * first_state + second_state
    # END SOLUTION


ex17.check_combine(combine)

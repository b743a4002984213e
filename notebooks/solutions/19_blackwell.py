"""Solutions of chapter 19's exercises; how to read them: tools/skeletons.py, and `TRIED`: tests/exercises."""

TRIED = r"""
exercise-commit
  plgpu.tcgen05_mma(right, a_smem, b_smem.at[1], accumulate=step > 0)\n            plgpu.tcgen05_commit_arrive(freed)
    => plgpu.tcgen05_mma(right, a_smem, b_smem.at[1], freed, accumulate=step > 0)  # Right.
  accumulate=step > 0)\n            plgpu.tcgen05_commit_arrive(freed) => accumulate=step > 0)
    && plgpu.tcgen05_mma(right => plgpu.tcgen05_commit_arrive(freed)\n            plgpu.tcgen05_mma(right
    # A commit covers the products
  \n        plgpu.barrier_wait(freed) => \n  # before the last products have ended
  pl.when(step > 0)(lambda: plgpu.barrier_wait(freed)) => pass  # before anybody has waited
  plgpu.tcgen05_commit_arrive(freed) => [plgpu.tcgen05_commit_arrive(freed) for _ in range(2)]
  plgpu.tcgen05_commit_arrive(freed) => pass  # never end
  plgpu.tcgen05_mma(right, a_smem, b_smem.at[1], accumulate=step > 0) => pass  # the product
  b_smem.at[1], accumulate=step > 0 => b_smem.at[1], accumulate=True
exercise-starts
  lambda tiles, accumulators, multiply, store: np.array(starts(tiles, accumulators, multiply, store))  # Right.
  if tile >= accumulators: => if False:  # an earlier tile has to leave first
  stored[-1] if stored else 0) + store => 0) + store  # One warpgroup stores
  lambda tiles, acc, *times: starts(tiles, 1, *times)  # may be in another accumulator
  lambda tiles, acc, *times: starts(tiles, acc + 1, *times)  # It waits for the products
  lambda tiles, acc, multiply, store: [i * (multiply + store) for i in range(tiles)]  # may be in another
  lambda *case: [0]  # It waits for the products
exercise-multiply
  ring.freed.at[stage],\n            accumulate=step > 0,\n        )
    => accumulate=step > 0,\n        )\n        plgpu.tcgen05_commit_arrive(ring.freed.at[stage])  # Right.
  plgpu.tcgen05_commit_arrive(summed.at[mine]) => pass  # commit to summed
  accumulate=step > 0 => accumulate=True  # the products
  pl.when(turn >= 3)(lambda: plgpu.barrier_wait(stored.at[mine])) => pass  # the
  ring.wait( => ring.slot(  # before its tiles have arrived
  plgpu.tcgen05_commit_arrive(summed.at[mine])
    => plgpu.tcgen05_commit_arrive(summed.at[mine])\n    plgpu.barrier_wait(summed.at[mine])  # it waits more than once
  pl.loop(0, steps) => pl.loop(0, 2)  # never end
  turn * steps + step => turn * 2 + step  # never end
exercise-store
  for quarter in range(4): => for quarter in (3, 2, 1, 0):  # Right.
  values * values => values  # the squares
  values * values => values.astype(jnp.bfloat16) * values.astype(jnp.bfloat16)  # rounded to bfloat16 before
  \n    plgpu.wait_load_tmem() =>  # race
  plgpu.wait_smem_to_gmem(1, wait_read_only=True) => pass  # TMA may still send
  wait_smem_to_gmem(1 => wait_smem_to_gmem(2
  quarter % 2 => 0
  wait_smem_to_gmem(1 => wait_smem_to_gmem(0  # leave one in flight
  plgpu.wait_smem_to_gmem(1, wait_read_only=True)
    => plgpu.wait_smem_to_gmem(1, wait_read_only=True)\n        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    # leave one in flight
  for quarter in range(4): => plgpu.wait_load_tmem()\n    for quarter in range(4):
    && \n    plgpu.wait_load_tmem() =>  # a race
  plgpu.commit_smem() => pass  # commit what you have stored
  lambda acc, o_smem, o_gmem: plgpu.async_load_tmem(acc.at[:, pl.ds(0, 64)])  # nothing is stored yet
"""


# %% exercise-commit needs: parameters setup
def in_two_halves(a, b):
    """a @ b: a (128, K), b (K, 128), bfloat16. The sums are kept in two halves, of 64
    columns each."""

    def body(a_gmem, b_gmem, o_gmem, a_smem, b_smem, o_smem, acc_tmem, filled, freed):
        halves = [pl.ds(0, 64), pl.ds(64, 64)]
        left, right = (acc_tmem.at[:, half] for half in halves)

        @pl.loop(0, a.shape[1] // 64)
        def _(step):
            pl.when(step > 0)(lambda: plgpu.barrier_wait(freed))
            ks = pl.ds(step * 64, 64)
            plgpu.copy_gmem_to_smem(a_gmem.at[:, ks], a_smem, filled)
            for i, half in enumerate(halves):
                plgpu.copy_gmem_to_smem(b_gmem.at[ks, half], b_smem.at[i], filled)
            plgpu.barrier_wait(filled)
            plgpu.tcgen05_mma(left, a_smem, b_smem.at[0], accumulate=step > 0)
            #: plgpu.tcgen05_commit_arrive(freed)
            plgpu.tcgen05_mma(right, a_smem, b_smem.at[1], accumulate=step > 0)
            # BEGIN SOLUTION
            plgpu.tcgen05_commit_arrive(freed)
            # END SOLUTION

        # BEGIN SOLUTION
        plgpu.barrier_wait(freed)  # The products of the last step have ended.
        # END SOLUTION
        for half in halves:
            sums = plgpu.async_load_tmem(
                acc_tmem.at[:, half], layout=plgpu.Layout.TCGEN05
            )
            o_smem[...] = sums.astype(o_smem.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(o_smem, o_gmem.at[:, half])
            plgpu.wait_smem_to_gmem(0)
        plgpu.wait_load_tmem()

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((128, 128), a.dtype),
        scratch_types=[
            plgpu.SMEM((128, 64), a.dtype),
            plgpu.SMEM((2, 64, 64), b.dtype),
            plgpu.SMEM((128, 64), a.dtype),
            plgpu.TMEM((128, 128), jnp.float32),
            plgpu.Barrier(num_arrivals=3),  # filled
            plgpu.Barrier(orders_tensor_core=True),  # freed
        ],
    )(a, b)


ex19.check_commit(in_two_halves)


# %% exercise-starts needs: parameters setup
def starts(tiles, accumulators, multiply, store):
    #: return None  # Your code: a list of times.
    # BEGIN SOLUTION
    begun, stored = [], []
    for tile in range(tiles):
        start = begun[-1] + multiply if begun else 0
        if tile >= accumulators:
            start = max(start, stored[tile - accumulators])
        begun.append(start)
        stored.append(max(start + multiply, stored[-1] if stored else 0) + store)
    return begun
    # END SOLUTION


ex19.check_starts(starts)


# %% exercise-multiply needs: parameters setup
def multiply(ring, a_smem, b_smem, acc_tmem, summed, stored, turn, steps):
    #: # Your code. For a start: stage = ring.wait(turn * steps + step), in a loop over the
    #: # steps.
    #: pass
    # BEGIN SOLUTION
    mine = lax.rem(turn, jnp.int32(3))
    acc = acc_tmem.at[:, pl.ds(mine * 128, 128)]
    pl.when(turn >= 3)(lambda: plgpu.barrier_wait(stored.at[mine]))

    @pl.loop(0, steps)
    def _(step):
        stage = ring.wait(turn * steps + step)
        plgpu.tcgen05_mma(
            acc,
            a_smem.at[stage],
            b_smem.at[stage],
            ring.freed.at[stage],
            accumulate=step > 0,
        )

    plgpu.tcgen05_commit_arrive(summed.at[mine])
    # END SOLUTION


ex19.check_multiply(multiply)


# %% exercise-store needs: parameters setup
def store_squares(acc_tmem, o_smem, o_gmem):
    #: # Your code. For a start: plgpu.async_load_tmem(acc_tmem.at[:, pl.ds(0, 32)],
    #: # layout=plgpu.Layout.TCGEN05).
    #: pass
    # BEGIN SOLUTION
    for quarter in range(4):
        columns, buffer = pl.ds(32 * quarter, 32), o_smem.at[quarter % 2]
        values = plgpu.async_load_tmem(
            acc_tmem.at[:, columns], layout=plgpu.Layout.TCGEN05
        )
        # The store before last has read its buffer; the last one may go on.
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)
        buffer[...] = (values * values).astype(jnp.bfloat16)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(buffer, o_gmem.at[:, columns])
    plgpu.wait_load_tmem()
    # END SOLUTION


ex19.check_store(store_squares)

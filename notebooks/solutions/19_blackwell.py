"""Solutions of chapter 19's exercises; how to read the marks: tools/skeletons.py."""


# %% exercise-3 needs: parameters setup
def multiply(ring, a_smem, b_smem, acc_tmem, summed, stored, turn, steps):
    #: # Your code. For a start: slot = ring.wait(turn * steps + step), in a loop over the
    #: # steps.
    #: pass
    # BEGIN SOLUTION
    mine = lax.rem(turn, jnp.int32(3))
    acc = acc_tmem.at[:, pl.ds(mine * 128, 128)]
    pl.when(turn >= 3)(lambda: plgpu.barrier_wait(stored.at[mine]))

    @pl.loop(0, steps)
    def _(step):
        slot = ring.wait(turn * steps + step)
        plgpu.tcgen05_mma(
            acc,
            a_smem.at[slot],
            b_smem.at[slot],
            ring.freed.at[slot],
            accumulate=step > 0,
        )

    plgpu.tcgen05_commit_arrive(summed.at[mine])
    # END SOLUTION


ex19.check_multiply(multiply)


# %% exercise-2 needs: parameters setup
def held(row, col, tile_n, half):
    #: return None  # Your code: three slices.
    # BEGIN SOLUTION
    first_row, first_col, cols = row + 128 * half, col + tile_n // 2 * half, tile_n // 2
    return (
        slice(first_row, first_row + 128),
        slice(first_col, first_col + cols),
        slice(col, col + tile_n),
    )
    # END SOLUTION


ex19.check_held(held)


# %% exercise-5 needs: parameters setup
def exponent(block):
    #: return None  # Your code.
    # BEGIN SOLUTION
    return math.ceil(math.log2(float(np.abs(block).max()) / 448))
    # END SOLUTION


ex19.check_exponent(exponent)


# %% exercise-1 needs: parameters setup
def columns(tile_n, accumulators, scaled):
    #: return 0  # Your code.
    # BEGIN SOLUTION
    total = tile_n * accumulators + (4 * (1 + math.ceil(tile_n / 128)) if scaled else 0)
    allocated = max(32, 2 ** math.ceil(math.log2(total)))
    return allocated if allocated <= 512 else None
    # END SOLUTION


ex19.check_columns(columns)


# %% exercise-4 needs: parameters setup
def store_squares(acc_tmem, o_smem, o_gmem):
    #: # Your code. For a start: plgpu.async_load_tmem(acc_tmem.at[:, pl.ds(0, 64)],
    #: # layout=plgpu.Layout.TCGEN05).
    #: pass
    # BEGIN SOLUTION
    for first in (0, 64):
        columns = pl.ds(first, 64)
        values = plgpu.async_load_tmem(
            acc_tmem.at[:, columns], layout=plgpu.Layout.TCGEN05
        )
        # The store of the first half has read the buffer.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        o_smem[...] = (values * values).astype(jnp.bfloat16)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(o_smem, o_gmem.at[:, columns])
    plgpu.wait_load_tmem()
    # END SOLUTION


ex19.check_store(store_squares)

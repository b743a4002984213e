"""Solutions of chapter 2's exercises; how to read the marks: tools/skeletons.py."""


# %% exercise-sum-by-tma needs: setup
def sum_by_tma(x, y):
    def kernel(x_gmem, y_gmem, o_gmem, x_smem, y_smem, arrived):
        plgpu.copy_gmem_to_smem(x_gmem, x_smem, arrived)
        plgpu.copy_gmem_to_smem(y_gmem, y_smem, arrived)
        plgpu.barrier_wait(arrived)
        x_smem[...] += y_smem[...]
        # BEGIN SOLUTION
        plgpu.commit_smem()
        # END SOLUTION
        plgpu.copy_smem_to_gmem(x_smem, o_gmem)
        plgpu.wait_smem_to_gmem(0)

    tile = plgpu.SMEM(x.shape, x.dtype)
    #: scratch_types = [tile, tile, plgpu.Barrier()]
    # BEGIN SOLUTION
    scratch_types = [tile, tile, plgpu.Barrier(num_arrivals=2)]
    # END SOLUTION
    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        scratch_types=scratch_types,
    )(x, y)


ex02.check_sum_by_tma(sum_by_tma)


# %% exercise-ring needs: setup
def racy_ring(x_gmem, o_gmem, slots, arrived, num_tiles):
    num_stages = slots.shape[0]

    def tile(ref, i):
        return ref.at[pl.ds(i * 16, 16)]

    def fetch(i):
        slot = lax.rem(i, num_stages)
        plgpu.copy_gmem_to_smem(tile(x_gmem, i), slots.at[slot], arrived.at[slot])

    pl.loop(0, num_stages)(fetch)

    @pl.loop(0, num_tiles)
    def _(i):
        slot = lax.rem(i, num_stages)
        plgpu.barrier_wait(arrived.at[slot])
        slots[slot] = -slots[slot]
        # BEGIN SOLUTION
        plgpu.commit_smem()
        # END SOLUTION
        plgpu.copy_smem_to_gmem(slots.at[slot], tile(o_gmem, i))
        # BEGIN SOLUTION
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        # END SOLUTION
        pl.when(i + num_stages < num_tiles)(lambda: fetch(i + num_stages))

    plgpu.wait_smem_to_gmem(0)


ex02.check_ring(racy_ring)


# %% exercise-num-stages needs: setup
def num_stages(bytes_per_second, round_s, num_sms, tile_bytes, lag):
    #: return None
    # BEGIN SOLUTION
    loads = max(1, int(np.ceil(bytes_per_second * round_s / num_sms / tile_bytes)))
    return min(loads + lag, 232_448 // tile_bytes)
    # END SOLUTION


ex02.check_num_stages(num_stages)


# %% exercise-conflict-degree needs: setup
def conflict_degree(pitch_bytes):
    """Turns for 32 lanes that read 4 bytes each, `pitch_bytes` (a multiple of 4) apart."""
    #: return None
    # BEGIN SOLUTION
    return int(np.gcd(pitch_bytes // 4, 32))
    # END SOLUTION


ex02.check_conflict_degree(conflict_degree)

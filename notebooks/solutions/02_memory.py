"""Solutions of chapter 2's exercises; how to read them: tools/skeletons.py, and `TRIED`: tests/exercises."""

TRIED = r"""
exercise-sum-by-tma
  Barrier(num_arrivals=2) => Barrier()  # must expect two arrivals
  Barrier(num_arrivals=2) => Barrier() && plgpu.barrier_wait(arrived)
    => [plgpu.barrier_wait(arrived) for _ in range(2)]
  plgpu.barrier_wait(arrived) => [plgpu.barrier_wait(arrived) for _ in range(2)]  # would never end
  num_arrivals=2 => num_arrivals=3
  plgpu.commit_smem() => pass  # unordered
  plgpu.wait_smem_to_gmem(0) => pass  # raised
  plgpu.copy_gmem_to_smem(x_gmem, x_smem, arrived) => x_smem[...] = x_gmem[...] && num_arrivals=2 => num_arrivals=1
    # must still be copied
  += y_smem[...] => = x_gmem[...] + y_gmem[...]  # it reads an input in global memory
exercise-ring
  gmem(0, wait_read_only => gmem(1, wait_read_only
    && pl.when(i + num_stages < num_tiles)(lambda: fetch(i + num_stages))
    => pl.when((i >= 1) & (i + 2 < num_tiles))(lambda: fetch(i + 2))  # Right.
  gmem(0, wait_read_only => gmem(2, wait_read_only
    && pl.when(i + num_stages < num_tiles)(lambda: fetch(i + num_stages))
    => pl.when((i >= 2) & (i + 1 < num_tiles))(lambda: fetch(i + 1))
  plgpu.commit_smem() => pass  # unordered
  plgpu.wait_smem_to_gmem(0, wait_read_only=True) => pass
  gmem(0, wait_read_only => gmem(1, wait_read_only
  plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    => pl.when(i + num_stages < num_tiles)(lambda: fetch(i + num_stages))
    && (lambda: fetch(i + num_stages))\n        pl.when(i + num_stages < num_tiles)(lambda: fetch(i + num_stages))
    => (lambda: fetch(i + num_stages))\n        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
  gmem(0, wait_read_only => gmem(1, wait_read_only
    && pl.when(i + num_stages < num_tiles)(lambda: fetch(i + num_stages))
    => pl.when((i >= 1) & (i + 2 < num_tiles))(lambda: fetch(i + 2)) && \n\n    plgpu.wait_smem_to_gmem(0) =>
    # last copies
  tile(x_gmem, i), slots => tile(x_gmem, jnp.where(i < 3, i, i - 1)), slots  # wrong in tile
  pl.loop(0, num_stages)(fetch) => num_stages = 1 && slot = lax.rem(i, num_stages)\n        plgpu.b
    => fetch(i)\n        slot = i * 0\n        plgpu.b
    && pl.when(i + num_stages < num_tiles)(lambda: fetch(i + num_stages)) =>  # this is no ring
  pl.loop(0, num_stages)(fetch) => && slot = lax.rem(i, num_stages)\n        plgpu.b
    => fetch(i)\n        slot = lax.rem(i, num_stages)\n        plgpu.b
    && pl.when(i + num_stages < num_tiles)(lambda: fetch(i + num_stages)) =>  # a ring of 3 stages is used as if it had
  arrived.at[slot]) => arrived)  # cannot be compiled
exercise-conflict-degree
  np.gcd(pitch_bytes // 4, 32) => 1  # Write down the banks
  np.gcd(pitch_bytes // 4, 32) => np.gcd(pitch_bytes, 32)
  np.gcd(pitch_bytes // 4, 32) => np.gcd(pitch_bytes // 4, 32) - 1
  np.gcd(pitch_bytes // 4, 32) => 32 // np.gcd(pitch_bytes // 4, 32)
  np.gcd(pitch_bytes // 4, 32) => 32 if pitch_bytes % 128 == 0 else 1
  np.gcd(pitch_bytes // 4, 32) => np.gcd(pitch_bytes // 4, 16)
  np.gcd(pitch_bytes // 4, 32) => 4 * np.gcd(pitch_bytes // 16, 8) if pitch_bytes % 16 == 0 else 1
exercise-num-stages
  / num_sms =>  # Each SM has its share
  loads + lag => loads  # as many loads fewer than slots
  np.ceil( => np.floor(  # round up
  lambda *case: 4  # Bytes in flight of one SM
  loads + lag => loads + 1
  np.ceil( => 2 * np.ceil(
  np.ceil( => 1 + np.floor(
  np.ceil( => round(
  232_448 => 2 * 228 * 1024
  max(1, => max(2,  # One load may be enough
  232_448 // tile_bytes => 1 << 40  # only so many slots
"""


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

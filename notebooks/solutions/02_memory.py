"""Solutions of chapter 2's exercises; how to read them: tools/skeletons.py, and `TRIED`: tests/exercises."""

TRIED = r"""
exercise-sum-by-tma
  Barrier(num_arrivals=2) => Barrier()  # must expect two arrivals
  Barrier(num_arrivals=2) => Barrier() && plgpu.barrier_wait(arrived)
    => [plgpu.barrier_wait(arrived) for _ in range(2)]
  plgpu.barrier_wait(arrived) => [plgpu.barrier_wait(arrived) for _ in range(2)]  # would never end
  num_arrivals=2 => num_arrivals=3
  plgpu.barrier_wait(arrived) => pass  # race: read
  plgpu.commit_smem() => pass  # commit_smem
  x_smem[...] += y_smem[...]\n        plgpu.commit_smem() => plgpu.commit_smem()\n        x_smem[...] += y_smem[...]
  plgpu.barrier_wait(arrived)\n => pass\n && plgpu.commit_smem()\n
    => plgpu.commit_smem()\n        plgpu.barrier_wait(arrived)\n  # race: read
  plgpu.wait_smem_to_gmem(0) => pass  # raised
  plgpu.copy_gmem_to_smem(x_gmem.at[here], x_smem, arrived) => x_smem[...] = x_gmem[here]
    && num_arrivals=2 => num_arrivals=1  # must still be copied
  += y_smem[...] => = x_gmem[here] + y_gmem[here]  # it reads an input in global memory
  x_smem[...] += y_smem[...] => o_gmem[here] = x_smem[...] + y_smem[...]
    && plgpu.copy_smem_to_gmem(x_smem, o_gmem.at[here]) => pass  # must leave by TMA
  x_smem, y_smem, arrived): => x_smem, y_smem, arrived, other): && y_smem, arrived)\n => y_smem, other)\n
    && plgpu.barrier_wait(arrived) => plgpu.barrier_wait(arrived)\n        plgpu.barrier_wait(other)
    && plgpu.Barrier(num_arrivals=2) => plgpu.Barrier(), plgpu.Barrier()  # it waits more than once
  y_smem, arrived)\n        plgpu.barrier_wait(arrived)
    => y_smem, arrived.at[1])\n        pl.loop(0, 2)(lambda i: plgpu.barrier_wait(arrived.at[i]))
    && x_smem, arrived)\n => x_smem, arrived.at[0])\n && num_arrivals=2 => num_barriers=2  # it waits more than once
  plgpu.copy_gmem_to_smem(x_gmem.at[here], x_smem, arrived)
    => pl.loop(0, 2)(lambda i: [\n
    pl.when(i == 0)(lambda: plgpu.copy_gmem_to_smem(x_gmem.at[here], x_smem, arrived)),
    && plgpu.copy_gmem_to_smem(y_gmem.at[here], y_smem, arrived)
    => pl.when(i == 1)(lambda: plgpu.copy_gmem_to_smem(y_gmem.at[here], y_smem, arrived)),
    && plgpu.barrier_wait(arrived) => plgpu.barrier_wait(arrived)] and None)
    && num_arrivals=2 => num_arrivals=1  # starts only after a wait
  plgpu.copy_smem_to_gmem(x_smem, o_gmem.at[here])
    => pl.when(lax.axis_index("i") < 0)(lambda: plgpu.copy_smem_to_gmem(x_smem, o_gmem.at[here]))
    && x_smem[...] += y_smem[...] => o_gmem[here] = x_smem[...] + y_smem[...]  # stored directly
  plgpu.wait_smem_to_gmem(0) => plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # Right.
  (16, 256) => x.shape && at[here] => at[...] && x.shape[0] // 16 => 1  # one tile per block
  x.shape[0] // 16 => 3  # never written
  lambda x, y: x + y  # must be a kernel
  None  # there is no `sum_by_tma` yet
exercise-ring
  gmem(0, wait_read_only => gmem(1, wait_read_only
    && pl.when(i + num_stages < num_tiles)(lambda: fetch(i + num_stages))
    => pl.when((i >= 1) & (i + 2 < num_tiles))(lambda: fetch(i + 2))  # Right.
  gmem(0, wait_read_only => gmem(2, wait_read_only
    && pl.when(i + num_stages < num_tiles)(lambda: fetch(i + num_stages))
    => pl.when((i >= 2) & (i + 1 < num_tiles))(lambda: fetch(i + 1))  # no load is in flight while
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
  stages[stage] = -stages[stage] => stages[stage] = -tile(x_gmem, i)[...]  # it reads an input in global memory
  stages[stage] = -stages[stage] => tile(o_gmem, i)[...] = -stages[stage]
    && plgpu.copy_smem_to_gmem(stages.at[stage], tile(o_gmem, i)) => pass  # must leave by TMA
  stages[stage] = -stages[stage] => tile(o_gmem, i)[...] = -stages[stage]
    && plgpu.copy_smem_to_gmem(stages.at[stage], tile(o_gmem, i))
    => pl.when(i == num_tiles)(lambda: plgpu.copy_smem_to_gmem(stages.at[stage], tile(o_gmem, i)))  # stored directly
  pl.when(i + num_stages < num_tiles)(lambda: fetch(i + num_stages))
    => pl.when(stage == 2)(lambda: pl.loop(i + 1, jnp.minimum(i + 4, num_tiles))(fetch))  # no load is in flight while
  \n\n    plgpu.wait_smem_to_gmem(0) => \n\n    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # Right.
  tile(x_gmem, i), stages => tile(x_gmem, jnp.where(i < 3, i, i - 1)), stages  # wrong in tile
  pl.loop(0, num_stages)(fetch) => num_stages = 1 && stage = lax.rem(i, num_stages)\n        plgpu.b
    => fetch(i)\n        stage = i * 0\n        plgpu.b
    && pl.when(i + num_stages < num_tiles)(lambda: fetch(i + num_stages)) =>  # this is no ring
  pl.loop(0, num_stages)(fetch) => && stage = lax.rem(i, num_stages)\n        plgpu.b
    => fetch(i)\n        stage = lax.rem(i, num_stages)\n        plgpu.b
    && pl.when(i + num_stages < num_tiles)(lambda: fetch(i + num_stages)) =>  # a ring of 3 stages is used as if it had
  arrived.at[stage]) => arrived)  # cannot be compiled
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
  loads + lag => loads  # as many loads fewer than stages
  np.ceil( => np.floor(  # round up
  lambda *case: 4  # Bytes in flight of one SM
  loads + lag => loads + 1
  np.ceil( => 2 * np.ceil(
  np.ceil( => 1 + np.floor(
  np.ceil( => round(
  232_448 => 2 * 228 * 1024
  max(1, => max(2,  # One load may be enough
  232_448 // tile_bytes => 1 << 40  # only so many stages
"""


# %% exercise-sum-by-tma needs: setup
#: # Write sum_by_tma(x, y) here. `staged`, above, has all the calls that you need.
# BEGIN SOLUTION
def sum_by_tma(x, y):
    def kernel(x_gmem, y_gmem, o_gmem, x_smem, y_smem, arrived):
        here = pl.ds(lax.axis_index("i") * 16, 16)
        plgpu.copy_gmem_to_smem(x_gmem.at[here], x_smem, arrived)
        plgpu.copy_gmem_to_smem(y_gmem.at[here], y_smem, arrived)
        plgpu.barrier_wait(arrived)
        x_smem[...] += y_smem[...]
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(x_smem, o_gmem.at[here])
        plgpu.wait_smem_to_gmem(0)

    tile = plgpu.SMEM((16, 256), x.dtype)
    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(x.shape[0] // 16,),
        grid_names=("i",),
        scratch_types=[tile, tile, plgpu.Barrier(num_arrivals=2)],
    )(x, y)


# END SOLUTION


ex02.check_sum_by_tma(globals().get("sum_by_tma"))


# %% exercise-ring needs: setup
def ring_of_three(x_gmem, o_gmem, stages, arrived, num_tiles):
    num_stages = stages.shape[0]

    def tile(ref, i):
        return ref.at[pl.ds(i * 16, 16)]

    def fetch(i):
        stage = lax.rem(i, num_stages)
        plgpu.copy_gmem_to_smem(tile(x_gmem, i), stages.at[stage], arrived.at[stage])

    pl.loop(0, num_stages)(fetch)  # The prologue.

    @pl.loop(0, num_tiles)
    def _(i):
        stage = lax.rem(i, num_stages)
        plgpu.barrier_wait(arrived.at[stage])
        #: # Your code: negate the tile, send it, refill a stage.
        # BEGIN SOLUTION
        stages[stage] = -stages[stage]
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(stages.at[stage], tile(o_gmem, i))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        pl.when(i + num_stages < num_tiles)(lambda: fetch(i + num_stages))
        # END SOLUTION

    plgpu.wait_smem_to_gmem(0)


ex02.check_ring(ring_of_three)


# %% exercise-num-stages needs: setup
def num_stages(bytes_per_second, load_s, num_sms, tile_bytes, lag):
    #: return None
    # BEGIN SOLUTION
    loads = max(1, int(np.ceil(bytes_per_second * load_s / num_sms / tile_bytes)))
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

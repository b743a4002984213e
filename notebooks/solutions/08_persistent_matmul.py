"""Solutions of chapter 8's exercises; how to read them: tools/skeletons.py, and `TRIED`: tests/exercises."""

TRIED = r"""
exercise-persistent
  block + turn * blocks => block + turn  # the
  turn * steps + step => step
  grid=(blocks,) => grid=(2 * blocks,)  # must be a grid of 4
  + blocks - 1, blocks) => , blocks)  # the
  plgpu.wgmma_wait(0)\n                        ring.release(number(turn, step))
    => ring.release(number(turn, step))\n                        plgpu.wgmma_wait(0)
    # a copy starts while a WGMMA of another warpgroup may still read
  stages=2 => stages=1  # this is no ring
exercise-1
  return rows * columns / (waves * num_sms) => return np.float64(rows * columns) / (waves * num_sms)  # Right.
  lambda *case: 100 * busy_share(*case)  # no percentages
  lambda *case: 1 - busy_share(*case)  # they idle
  lambda m, n, tile, num_sms, cluster: busy_share(m, n, tile, num_sms, 1)  # clusters are missing
  rows, columns = math.ceil(m / tile[0]), math.ceil(n / tile[1]) => rows, columns = m / tile[0], n / tile[1]
    # at the edge is a tile
  waves = math.ceil( => waves = (  # last wave takes as long
  math.ceil(rows / cluster) => (rows / cluster)  # a cluster of its own
  waves * num_sms => waves * (num_sms // cluster * cluster)  # no cluster fits on
  lambda *case: 1.0  # Count the tiles
exercise-multicast
  if cluster == (2, 1): => if False:  # gets half of a neighbour's
  if cluster == (2, 1): => if True:
  , True => , False  # Nothing is shared
  ("b", col, True) => ("b", col, not block)  # waits for ever
  lambda *case: [("a", 0, True)]  # A step has a copy
  lambda *case: [("a", 0, False), ("b", 0, True)]  # Each block needs the panels of its own tile
exercise-split
  (step * split + part) * TILE_K => step * TILE_K  # must move with the part
  (step * split + part) * TILE_K => (part * steps + step) * TILE_K  # these parts are contiguous
  o_gmem.at[part, rows, cols] => o_gmem.at[0, rows, cols]  # race
  TILE_K // split, (tiles * split,) => TILE_K // split, (tiles,)  # never written
  plgpu.wgmma_wait(0) => plgpu.wgmma_wait(1)  # a copy starts while the last WGMMA may still read the stage
  pl.loop(0, min(stages, steps))(load) => && pl.when(step + stages < steps)(lambda: load(step + stages)) =>
    && plgpu.barrier_wait(loaded => load(step)\n                plgpu.barrier_wait(loaded
    # a ring of 2 stages is used as if it had 1
"""


# %% exercise-persistent needs: parameters setup
def persistent(a, b, blocks=4, stages=2, tile=(64, 128)):
    tile_m, tile_n = tile
    grid_n, steps = b.shape[1] // tile_n, a.shape[1] // TILE_K

    def body(a_gmem, b_gmem, o_gmem, a_smem, b_smem, o_smem, filled, freed):
        ring, block = Ring(filled, freed, stages), lax.axis_index("block")
        #: turns = 1
        # BEGIN SOLUTION
        turns = lax.div(a.shape[0] // tile_m * grid_n - block + blocks - 1, blocks)
        # END SOLUTION

        def place(turn):
            #: index = block
            # BEGIN SOLUTION
            index = block + turn * blocks
            # END SOLUTION
            return pl.ds(lax.div(index, grid_n) * tile_m, tile_m), pl.ds(
                lax.rem(index, grid_n) * tile_n, tile_n
            )

        def number(turn, step):  # The ring counts steps.
            #: return step
            # BEGIN SOLUTION
            return turn * steps + step
            # END SOLUTION

        @pl.when(lax.axis_index("role") == 1)
        def memory():
            @pl.loop(0, turns)
            def _(turn):
                rows, cols = place(turn)

                @pl.loop(0, steps)
                def _(step):
                    slot, ks = (
                        ring.acquire(number(turn, step)),
                        pl.ds(step * TILE_K, TILE_K),
                    )
                    plgpu.copy_gmem_to_smem(
                        a_gmem.at[rows, ks], a_smem.at[slot], filled.at[slot]
                    )
                    plgpu.copy_gmem_to_smem(
                        b_gmem.at[ks, cols], b_smem.at[slot], filled.at[slot]
                    )

            ring.drain(turns * steps)

        @pl.when(lax.axis_index("role") == 0)
        def compute():
            @pl.loop(0, turns)
            def _(turn):
                def multiply(acc):
                    @pl.loop(0, steps)
                    def _(step):
                        slot = ring.wait(number(turn, step))
                        plgpu.wgmma(acc, a_smem.at[slot], b_smem.at[slot])
                        plgpu.wgmma_wait(0)
                        ring.release(number(turn, step))

                    return acc[...]

                o_smem[...] = pl.run_scoped(
                    multiply, plgpu.ACC(tile, jnp.float32)
                ).astype(o_smem.dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(o_smem, o_gmem.at[place(turn)])
                plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((a.shape[0], b.shape[1]), a.dtype),
        grid=(blocks,),
        grid_names=("block",),
        num_threads=2,
        thread_name="role",
        scratch_types=[
            plgpu.SMEM((stages, tile_m, TILE_K), a.dtype),
            plgpu.SMEM((stages, TILE_K, tile_n), b.dtype),
            plgpu.SMEM(tile, a.dtype),
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            plgpu.Barrier(num_arrivals=1, num_barriers=stages),
        ],
    )(a, b)


ex08.check_persistent(persistent)


# %% exercise-1 needs: parameters setup
def busy_share(m, n, tile, num_sms, cluster):
    #: return None  # Your code.
    # BEGIN SOLUTION
    rows, columns = math.ceil(m / tile[0]), math.ceil(n / tile[1])
    clusters = math.ceil(rows / cluster) * columns
    waves = math.ceil(clusters / (num_sms // cluster))
    return rows * columns / (waves * num_sms)
    # END SOLUTION


ex08.check_busy_share(busy_share)


# %% exercise-multicast needs: parameters setup
def copies(cluster, row, col, block):
    #: # The tile of this block, and what its two blocks share: wrong for one of the two
    #: # clusters.
    #: row = 2 * row + block
    #: return [("a", row, True), ("b", col, False)]
    # BEGIN SOLUTION
    if cluster == (2, 1):  # Two rows of tiles, one column: B's panel is the same.
        return [("a", 2 * row + block, False), ("b", col, True)]
    return [("a", row, True), ("b", 2 * col + block, False)]
    # END SOLUTION


ex08.check_multicast(copies)


# %% exercise-split needs: parameters setup
def split_product(a, b, split=3, stages=2, tile=(64, 128)):
    tile_m, tile_n = tile
    grid_n = b.shape[1] // tile_n
    tiles = a.shape[0] // tile_m * grid_n
    #: steps, grid = a.shape[1] // TILE_K, (tiles,)
    # BEGIN SOLUTION
    steps, grid = a.shape[1] // TILE_K // split, (tiles * split,)
    # END SOLUTION

    def body(a_gmem, b_gmem, o_gmem, a_smem, b_smem, o_smem, loaded):
        #: part, index = 0, lax.axis_index("block")
        # BEGIN SOLUTION
        part, index = (
            f(lax.axis_index("block"), jnp.int32(tiles)) for f in (lax.div, lax.rem)
        )
        # END SOLUTION
        rows, cols = (
            pl.ds(lax.div(index, grid_n) * tile_m, tile_m),
            pl.ds(lax.rem(index, grid_n) * tile_n, tile_n),
        )

        def load(step):
            slot = lax.rem(step, stages)
            #: ks = pl.ds(step * TILE_K, TILE_K)
            # BEGIN SOLUTION
            ks = pl.ds((step * split + part) * TILE_K, TILE_K)
            # END SOLUTION
            plgpu.copy_gmem_to_smem(
                a_gmem.at[rows, ks], a_smem.at[slot], loaded.at[slot]
            )
            plgpu.copy_gmem_to_smem(
                b_gmem.at[ks, cols], b_smem.at[slot], loaded.at[slot]
            )

        def multiply(acc):
            pl.loop(0, min(stages, steps))(load)

            @pl.loop(0, steps)
            def _(step):
                slot = lax.rem(step, stages)
                plgpu.barrier_wait(loaded.at[slot])
                plgpu.wgmma(acc, a_smem.at[slot], b_smem.at[slot])
                plgpu.wgmma_wait(0)
                pl.when(step + stages < steps)(lambda: load(step + stages))

            return acc[...]

        o_smem[...] = pl.run_scoped(multiply, plgpu.ACC(tile, jnp.float32))
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(o_smem, o_gmem.at[part, rows, cols])
        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((split, a.shape[0], b.shape[1]), jnp.float32),
        grid=grid,
        grid_names=("block",),
        scratch_types=[
            plgpu.SMEM((stages, tile_m, TILE_K), a.dtype),
            plgpu.SMEM((stages, TILE_K, tile_n), b.dtype),
            plgpu.SMEM(tile, jnp.float32),
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        ],
    )(a, b)


ex08.check_split(split_product)

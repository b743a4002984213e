"""Solutions of chapter 8's exercises; how to read them: tools/skeletons.py, and `TRIED`: tests/exercises."""

TRIED = r"""
exercise-waves
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
exercise-persistent
  block + turn * num_blocks => block + turn  # the
  turn * num_steps + step => step
  launch(kernel, a, b, tile, num_blocks, => launch(kernel, a, b, tile, 2 * num_blocks,  # must be a grid of 4
  - block + num_blocks - 1, num_blocks) => - block, num_blocks)  # the
  - block + num_blocks - 1, num_blocks) => + num_blocks - 1, num_blocks)  # computes 2 tiles
  lax.div(num_tiles - block + num_blocks - 1, num_blocks) => lax.div(9 - block, 4)  # time lost
  lax.div(num_tiles - block + num_blocks - 1, num_blocks) => 1 + lax.div(num_tiles - 1 - block, num_blocks)
    # and 0 are its own
  block + turn * num_blocks => block + (turns - 1 - turn) * num_blocks  # computes the tiles [4, 0]
  block + turn * num_blocks =>
    block * lax.div(num_tiles, num_blocks) + lax.min(block, lax.rem(num_tiles, num_blocks)) + turn
    # computes the tiles [0, 1]
  plgpu.wgmma_wait(0)\n                        ring.release(count(turn, step))
    => ring.release(count(turn, step))\n                        plgpu.wgmma_wait(0)
    # a copy starts while a WGMMA of another warpgroup may still read
  num_stages=2 => num_stages=1  # this is no ring
  return turn * num_steps + step => return step && filled.at[stage])\n\n            ring.drain(turns * num_steps)
    => filled.at[stage])\n\n                ring.drain(num_steps)  # before it loads the next one
  return turn * num_steps + step => return step  # the
  plgpu.wait_smem_to_gmem(0) => pass  # while TMA may still send
  lambda a, b, num_blocks: a @ b  # must be a kernel
  lambda a, b, num_blocks: cookbook.matmul(a, b)  # the package's
exercise-overlap
  plgpu.wait_smem_to_gmem(1, wait_read_only=True) => plgpu.wait_smem_to_gmem(1)  # Right.
  plgpu.wait_smem_to_gmem(1, wait_read_only=True) => plgpu.wait_smem_to_gmem(0)  # waits until the tile before
  plgpu.wait_smem_to_gmem(1, wait_read_only=True) => pass  # while TMA may still send
  plgpu.wait_smem_to_gmem(1, wait_read_only=True) => plgpu.wait_smem_to_gmem(2)  # while TMA may still send
  plgpu.wait_smem_to_gmem(0)\n\n    shape => pass\n\n    shape  # the block ends while TMA
  plgpu.wait_smem_to_gmem(0)\n\n    shape => plgpu.wait_smem_to_gmem(1)\n\n    shape  # the block ends while TMA
  o_smem.at[lax.rem(turn, 2)] => o_smem.at[0]  # while TMA may still send
  plgpu.commit_smem() => pass  # commit
  plgpu.copy_smem_to_gmem(o_stage, o_gmem.at[place(turn)]) =>
    plgpu.copy_smem_to_gmem(o_stage, o_gmem.at[place(turn)])\n                plgpu.wait_smem_to_gmem(0)
    # waits until the tile before
  num_stages=2 => num_stages=1  # this is no ring
  block + turn * num_blocks => block + turn  # the
exercise-multicast
  if cluster == (2, 1): => if False:  # gets half of a neighbour's
  if cluster == (2, 1): => if True:
  , True => , False  # Nothing is shared
  ("b", col, True) => ("b", col, not block)  # waits for ever
  lambda *case: [("a", 0, True)]  # A step has a copy
  lambda *case: [("a", 0, False), ("b", 0, True)]  # Each block needs the panels of its own tile
"""


# %% exercise-waves needs: parameters setup
def busy_share(m, n, tile, num_sms, cluster):
    #: return None  # Your code.
    # BEGIN SOLUTION
    rows, columns = math.ceil(m / tile[0]), math.ceil(n / tile[1])
    clusters = math.ceil(rows / cluster) * columns
    waves = math.ceil(clusters / (num_sms // cluster))
    return rows * columns / (waves * num_sms)
    # END SOLUTION


ex08.check_busy_share(busy_share)


# %% exercise-persistent needs: parameters setup launch
def persistent(a, b, num_blocks=4, tile=(64, 128), num_stages=2):
    (tile_m, tile_n), num_steps = tile, a.shape[1] // TILE_K
    grid_n = b.shape[1] // tile_n

    def kernel(a_gmem, b_gmem, o_gmem, a_smem, b_smem, o_smem, filled, freed):
        wg, block = lax.axis_index("wg"), lax.axis_index("block")
        ring = Ring(filled, freed, num_stages)
        #: turns = 1  # How many tiles this block computes.
        # BEGIN SOLUTION
        num_tiles = a.shape[0] // tile_m * grid_n
        turns = lax.div(num_tiles - block + num_blocks - 1, num_blocks)
        # END SOLUTION

        def place(turn):
            #: tile = block
            # BEGIN SOLUTION
            tile = block + turn * num_blocks
            # END SOLUTION
            row, col = lax.div(tile, grid_n) * tile_m, lax.rem(tile, grid_n) * tile_n
            return pl.ds(row, tile_m), pl.ds(col, tile_n)

        def count(turn, step):  # The ring numbers steps.
            #: return step
            # BEGIN SOLUTION
            return turn * num_steps + step
            # END SOLUTION

        @pl.when(wg == 1)
        def load():
            @pl.loop(0, turns)
            def _(turn):
                rows, cols = place(turn)

                @pl.loop(0, num_steps)
                def _(step):
                    stage = ring.acquire(count(turn, step))
                    depth = pl.ds(step * TILE_K, TILE_K)
                    copy(a_gmem.at[rows, depth], a_smem.at[stage], filled.at[stage])
                    copy(b_gmem.at[depth, cols], b_smem.at[stage], filled.at[stage])

            ring.drain(turns * num_steps)

        @pl.when(wg == 0)
        def compute():
            @pl.loop(0, turns)
            def _(turn):
                def add_up(acc):
                    @pl.loop(0, num_steps)
                    def _(step):
                        stage = ring.wait(count(turn, step))
                        plgpu.wgmma(acc, a_smem.at[stage], b_smem.at[stage])
                        plgpu.wgmma_wait(0)
                        ring.release(count(turn, step))

                    return acc[...]

                values = pl.run_scoped(add_up, plgpu.ACC(tile))
                o_smem[...] = values.astype(o_smem.dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(o_smem, o_gmem.at[place(turn)])
                plgpu.wait_smem_to_gmem(0)

    shape = dict(num_compute=1, o_shape=tile)
    return launch(kernel, a, b, tile, num_blocks, num_stages, **shape)


ex08.check_persistent(persistent)


# %% exercise-overlap needs: parameters setup launch
def overlapping(a, b, num_blocks=4, tile=(64, 128), num_stages=2):
    (tile_m, tile_n), num_steps = tile, a.shape[1] // TILE_K
    grid_m, grid_n = a.shape[0] // tile_m, b.shape[1] // tile_n

    def kernel(a_gmem, b_gmem, o_gmem, a_smem, b_smem, o_smem, filled, freed):
        wg, block = lax.axis_index("wg"), lax.axis_index("block")
        ring = Ring(filled, freed, num_stages)
        turns = lax.div(grid_m * grid_n - block + num_blocks - 1, num_blocks)

        def place(turn):
            tile = block + turn * num_blocks
            row, col = lax.div(tile, grid_n) * tile_m, lax.rem(tile, grid_n) * tile_n
            return pl.ds(row, tile_m), pl.ds(col, tile_n)

        @pl.when(wg == 1)
        def load():
            @pl.loop(0, turns)
            def _(turn):
                rows, cols = place(turn)

                @pl.loop(0, num_steps)
                def _(step):
                    stage = ring.acquire(turn * num_steps + step)
                    depth = pl.ds(step * TILE_K, TILE_K)
                    copy(a_gmem.at[rows, depth], a_smem.at[stage], filled.at[stage])
                    copy(b_gmem.at[depth, cols], b_smem.at[stage], filled.at[stage])

            ring.drain(turns * num_steps)

        @pl.when(wg == 0)
        def compute():
            @pl.loop(0, turns)
            def _(turn):
                def add_up(acc):
                    @pl.loop(0, num_steps)
                    def _(step):
                        stage = ring.wait(turn * num_steps + step)
                        plgpu.wgmma(acc, a_smem.at[stage], b_smem.at[stage])
                        plgpu.wgmma_wait(0)
                        ring.release(turn * num_steps + step)

                    return acc[...]

                values = pl.run_scoped(add_up, plgpu.ACC(tile))
                #: o_stage = o_smem.at[0]
                # BEGIN SOLUTION
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                o_stage = o_smem.at[lax.rem(turn, 2)]
                # END SOLUTION
                o_stage[...] = values.astype(o_stage.dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(o_stage, o_gmem.at[place(turn)])
                #: plgpu.wait_smem_to_gmem(0)
                # BEGIN SOLUTION

            plgpu.wait_smem_to_gmem(0)
            # END SOLUTION

    shape = dict(num_compute=1, o_shape=(2, *tile))
    return launch(kernel, a, b, tile, num_blocks, num_stages, **shape)


ex08.check_overlap(overlapping)


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

"""Solutions of chapter 16's exercises; how to read them: tools/skeletons.py, and `TRIED`: tests/exercises."""

TRIED = r"""
exercise-1
  return m if => return np.int64(m) if  # Right.
  lambda m, g, tile: -(-m // tile)  # Groups share no tile
  lambda m, g, tile: m // tile + g  # can every group have one more
  lambda m, g, tile: -(-m // tile) + g  # more than any sizes need
  lambda m, g, tile: -(-m // tile) + g - 1  # an entry more
  lambda m, g, tile: (m + g * (tile - 1)) // tile  # at least one row
  lambda m, g, tile: m  # Give each group one row
exercise-2
  lambda sizes, piece: sum(size // piece + bin(size % piece).count("1") for size in sizes)  # Right.
  lambda sizes, piece: sum(-(-size // piece) for size in sizes)  # is several copies
  lambda sizes, piece: sum(sizes)  # more than one row
  lambda sizes, piece: copies([sum(sizes)], piece)  # begin anew
  lambda sizes, piece: sum(size.bit_count() for size in sizes)  # larger than a piece
  lambda sizes, piece: sum(size // piece for size in sizes)  # not whole
  lambda sizes, piece: copies(sizes, piece) + 1  # the rest in binary
exercise-3
  pl.ds(left & ~(2 * size - 1), size) => pl.ds(left & (size - 1), size)  # Right.
  lambda piece, o, left: plgpu.copy_smem_to_gmem(piece, o)  # left = 63: row 63 was written
  (left > 0) & (left < 64) => left < -64  # left = 63: row 0 was
  (32, 16, 8, 4, 2, 1) => (32, 16, 8, 4, 2)  # left = 63: row 62 was never
  (left > 0) & (left < 64) => left < 64 && left & ~(2 => left & 63 & ~(2  # left = -1: row 0 was written
  piece_smem.at[rows] => piece_smem.at[pl.ds(0, size)]  # begins in both memories at one row
  lambda piece, o, left: plgpu.copy_smem_to_gmem(piece.at[pl.ds(0, left)], o.at[pl.ds(0, left)])  # cannot be compiled
  lambda piece, o, left: pl.loop(0, jnp.clip(left, 0, 64))(lambda row: plgpu.copy_smem_to_gmem(piece.at[pl.ds(row, 1)],
    o.at[pl.ds(row, 1)]))  # left = 63: it starts 63 copies to GMEM, and 6 would do
  plgpu.copy_smem_to_gmem(piece_smem, o_gmem)) => [plgpu.copy_smem_to_gmem(piece_smem.at[pl.ds(i, 32)],
    o_gmem.at[pl.ds(i, 32)]) for i in (0, 32)][0] or None)  # left = 64: it starts 2 copies to GMEM, and 1 would do
  o_gmem.at[rows]) => o_gmem.at[rows]); plgpu.wait_smem_to_gmem(0)  # waits for a copy before it starts the next
  lambda piece, o, left: [pl.when(left == n)(lambda n=n: plgpu.copy_smem_to_gmem(piece.at[pl.ds(0, n)],
    o.at[pl.ds(0, n)])) for n in (1, 8, 32, 37, 63, 64)]  # left = 2: row 0 was never
  lambda piece, o, left: 1 / 0  # cannot be compiled for a GPU: ZeroDivisionError
exercise-4
  lax.fori_loop(0, turn, mine, 0) => sum(
    jnp.where(t < turn, steps[jnp.minimum(block + t * num_blocks, m // 64 - 1)], 0) for t in range(m // 64))  # Right.
  lax.fori_loop(0, turn, mine, 0) => turn * 3  # would never end
  lax.fori_loop(0, turn, mine, 0) => 0  # a WGMMA reads the stage before its tiles have arrived
  block + t * num_blocks => t  # would never end
  ring.drain(before(turns)) => ring.drain(turns * 3)  # would never end
  ring.drain(before(turns)) => pass  # drain the ring with the number of all steps
  lax.fori_loop(0, turn, mine, 0) => turn * 3 && pl.loop(0, steps[tile]) => pl.loop(0, 3)  # element (64, 0)
  wgmma_wait(0) => wgmma_wait(1)  # give a stage back (barrier_arrive) after the wgmma_wait
  lax.fori_loop(0, turn, mine, 0) => jnp.where(turn == 0, 0, jnp.where(turn == 1, steps[block],
    steps[block] + steps[jnp.minimum(block + num_blocks, m // 64 - 1)]))  # before its tiles have arrived
  num_stages=2 => num_stages=1  # let it run ahead
  stage = ring.acquire(before(turn) + step) => stage = ring.acquire(before(turn) + step); ring.drain(before(turn))
    # would never end
  lambda a, b, steps, num_blocks: jnp.matmul(a, b)  # must be a kernel
"""


# %% exercise-1 needs: parameters setup
def most_entries(m, num_groups, tile):
    #: return None  # Your code.
    # BEGIN SOLUTION
    return m if m <= num_groups else num_groups + (m - num_groups) // tile
    # END SOLUTION


ex16.check_entries(most_entries)


# %% exercise-2 needs: parameters setup
def copies(sizes, piece):
    #: return None  # Your code.
    # BEGIN SOLUTION
    return sum(size // piece + (size % piece).bit_count() for size in sizes)
    # END SOLUTION


ex16.check_copies(copies)


# %% exercise-3 needs: parameters setup
def store_rows(piece_smem, o_gmem, left):
    #: # Your code. For a start: pl.when(left >= 64)(lambda:
    #: # plgpu.copy_smem_to_gmem(piece_smem, o_gmem))
    #: pass
    # BEGIN SOLUTION
    pl.when(left >= 64)(lambda: plgpu.copy_smem_to_gmem(piece_smem, o_gmem))

    @pl.when((left > 0) & (left < 64))
    def _():
        for size in (32, 16, 8, 4, 2, 1):

            @pl.when(left & size != 0)
            def _(size=size):
                rows = pl.ds(left & ~(2 * size - 1), size)  # After the larger boxes.
                plgpu.copy_smem_to_gmem(piece_smem.at[rows], o_gmem.at[rows])

    # END SOLUTION


ex16.check_store(store_rows)


# %% exercise-4 needs: parameters setup launch
def unequal(a, b, steps, num_blocks=2, num_stages=2):
    """Rows 64t to 64t + 64 of o: those of a times b, in steps[t] steps of 64 values of K."""
    m, n = a.shape[0], b.shape[1]

    def kernel(a_gmem, b_gmem, steps, o_gmem, a_smem, b_smem, o_smem, filled, freed):
        wg, block = lax.axis_index("wg"), lax.axis_index("block")
        ring = Ring(filled, freed, num_stages)
        turns = lax.div(m // 64 - block + num_blocks - 1, num_blocks)

        def before(turn):
            #: return turn * (a.shape[1] // TILE_K)  # Right if all tiles have all steps.
            # BEGIN SOLUTION
            mine = lambda t, count: count + steps[block + t * num_blocks]
            return lax.fori_loop(0, turn, mine, 0)
            # END SOLUTION

        @pl.when(wg == 1)
        def load():
            @pl.loop(0, turns)
            def _(turn):
                tile = block + turn * num_blocks

                @pl.loop(0, steps[tile])
                def _(step):
                    stage = ring.acquire(before(turn) + step)
                    rows, depth = pl.ds(64 * tile, 64), pl.ds(TILE_K * step, TILE_K)
                    copy(a_gmem.at[rows, depth], a_smem.at[stage], filled.at[stage])
                    copy(b_gmem.at[depth], b_smem.at[stage], filled.at[stage])

            ring.drain(before(turns))

        @pl.when(wg == 0)
        def compute():
            @pl.loop(0, turns)
            def _(turn):
                tile = block + turn * num_blocks

                def add_up(acc):
                    @pl.loop(0, steps[tile])
                    def _(step):
                        stage = ring.wait(before(turn) + step)
                        plgpu.wgmma(acc, a_smem.at[stage], b_smem.at[stage])
                        plgpu.wgmma_wait(0)
                        ring.release(before(turn) + step)

                    return acc[...]

                values = pl.run_scoped(add_up, plgpu.ACC((64, n)))
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                o_smem[...] = values.astype(o_smem.dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(o_smem, o_gmem.at[pl.ds(64 * tile, 64)])

            plgpu.wait_smem_to_gmem(0)

    return launch_unequal(kernel, a, b, steps, num_blocks, num_stages)


ex16.check_steps(unequal)

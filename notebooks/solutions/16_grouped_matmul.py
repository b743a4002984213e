"""Solutions of chapter 16's exercises; how to read them: tools/skeletons.py, and `TRIED`: tests/exercises."""

TRIED = r"""
exercise-1
  (row >= start) & (row < ends_gmem[g]) => (row + 1 >= start) & (row + 1 < ends_gmem[g])  # row 63, of group 0
  (row >= start) & (row < ends_gmem[g]) => (row * 0 + first >= start) & (row * 0 + first < ends_gmem[g])
    # (70, 0, 58) rows: row 70, of group 2
  lambda x, bias, ends: x + jnp.repeat(bias, jnp.diff(ends, prepend=0), axis=0, total_repeat_length=len(x))
    # must be a kernel
  start = jnp.where(g > 0, ends_gmem[jnp.maximum(g - 1, 0)], 0) => start = ends_gmem[jnp.maximum(g - 1, 0)]
    # (64, 128) rows: row 0, of group 0
  (row >= start) & (row < ends_gmem[g]) => (row >= start) & (row <= ends_gmem[g])  # (64, 128) rows: row 64, of group 1
  fori_loop(0, len(ends), add => fori_loop(0, min(3, len(ends)), add  # (0, 1, 190, 1) rows: row 191, of group 3
exercise-2
  return m if => return np.int64(m) if  # Right.
  lambda m, g, tile: -(-m // tile)  # Groups share no tile
  lambda m, g, tile: m // tile + g  # can every group have one more
  lambda m, g, tile: -(-m // tile) + g  # more than any sizes need
  lambda m, g, tile: -(-m // tile) + g - 1  # an entry more
  lambda m, g, tile: (m + g * (tile - 1)) // tile  # at least one row
  lambda m, g, tile: m  # Give each group one row
exercise-3
  lambda sizes, piece: sum(size // piece + bin(size % piece).count("1") for size in sizes)  # Right.
  lambda sizes, piece: sum(-(-size // piece) for size in sizes)  # is several copies
  lambda sizes, piece: sum(sizes)  # more than one row
  lambda sizes, piece: copies([sum(sizes)], piece)  # begin anew
  lambda sizes, piece: sum(size.bit_count() for size in sizes)  # larger than a piece
  lambda sizes, piece: sum(size // piece for size in sizes)  # not whole
  lambda sizes, piece: copies(sizes, piece) + 1  # the rest in binary
exercise-4
  pl.ds(left & ~(2 * size - 1), size) => pl.ds(left & (size - 1), size)  # Right.
  lambda piece, o, left: plgpu.copy_smem_to_gmem(piece, o)  # left = 63: row 63 was written
  (left > 0) & (left < 64) => left < -64  # left = 63: row 0 was
  (32, 16, 8, 4, 2, 1) => (32, 16, 8, 4, 2)  # left = 63: row 62 was never
  (left > 0) & (left < 64) => left < 64 && left & ~(2 => left & 63 & ~(2  # left = -27: row 0 was written
  piece_smem.at[rows] => piece_smem.at[pl.ds(0, size)]  # begins in both memories at one row
  lambda piece, o, left: plgpu.copy_smem_to_gmem(piece.at[pl.ds(0, left)], o.at[pl.ds(0, left)])  # cannot be compiled
  lambda piece, o, left: pl.loop(0, jnp.clip(left, 0, 64))(lambda row: plgpu.copy_smem_to_gmem(piece.at[pl.ds(row, 1)],
    o.at[pl.ds(row, 1)]))  # copies to GMEM, and 6 would do
  lambda piece, o, left: 1 / 0  # cannot be compiled for a GPU: ZeroDivisionError
"""


# %% exercise-1 needs: parameters setup
def add_bias(x, bias, ends):
    """x plus the bias of each row's group: x (M, 128), bias (G, 128), float32; ends
    (G,), the row after each group."""

    def body(x_gmem, bias_gmem, ends_gmem, o_gmem):
        first = lax.axis_index("block") * 64
        rows = plgpu.load(
            x_gmem.at[pl.ds(first, 64)], layout=plgpu.Layout.WGMMA, optimized=False
        )
        row = first + plgpu.broadcasted_iota(
            jnp.int32, rows.shape, 0, layout=plgpu.Layout.WGMMA
        )

        def of_group(g):
            """The bias of group g, repeated for every row."""
            vector = plgpu.load(
                bias_gmem.at[g], layout=plgpu.Layout.WGMMA.reduce(0), optimized=False
            )
            return lax.broadcast_in_dim(vector, rows.shape, [1])

        #: # The group of the tile: as many groups end at or before its first row.
        #: group = lax.fori_loop(
        #:     0,
        #:     len(ends),
        #:     lambda g, n: n + (ends_gmem[g] <= first).astype(jnp.int32),
        #:     jnp.int32(0),
        #: )
        #: o_gmem[pl.ds(first, 64)] = jnp.where(row >= 0, rows + of_group(group), 0)
        # BEGIN SOLUTION
        def add(g, total):
            start = jnp.where(g > 0, ends_gmem[jnp.maximum(g - 1, 0)], 0)
            return total + jnp.where(
                (row >= start) & (row < ends_gmem[g]), of_group(g), 0
            )

        o_gmem[pl.ds(first, 64)] = lax.fori_loop(0, len(ends), add, rows)
        # END SOLUTION

    out_type = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return plgpu.kernel(
        body, out_type=out_type, grid=(len(x) // 64,), grid_names=("block",)
    )(x, bias, ends)


ex16.check_bias(add_bias)


# %% exercise-2 needs: parameters setup
def most_entries(m, num_groups, tile):
    #: return None  # Your code.
    # BEGIN SOLUTION
    return m if m <= num_groups else num_groups + (m - num_groups) // tile
    # END SOLUTION


ex16.check_entries(most_entries)


# %% exercise-3 needs: parameters setup
def copies(sizes, piece):
    #: return None  # Your code.
    # BEGIN SOLUTION
    return sum(size // piece + (size % piece).bit_count() for size in sizes)
    # END SOLUTION


ex16.check_copies(copies)


# %% exercise-4 needs: parameters setup
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

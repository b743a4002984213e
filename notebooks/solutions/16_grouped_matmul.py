"""Solutions of chapter 16's exercises; how to read the marks: tools/skeletons.py."""


# %% exercise-1 needs: parameters setup
def most_entries(m, num_groups, tile):
    #: return None  # Your code.
    # BEGIN SOLUTION
    return m if m <= num_groups else num_groups + (m - num_groups) // tile
    # END SOLUTION


ex16.check_entries(most_entries)


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


# %% exercise-2 needs: parameters setup
def copies(sizes, piece):
    #: return None  # Your code.
    # BEGIN SOLUTION
    return sum(size // piece + (size % piece).bit_count() for size in sizes)
    # END SOLUTION


ex16.check_copies(copies)


# %% exercise-5 needs: parameters setup
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

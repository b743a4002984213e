"""Solutions of chapter 4's exercises; how to read the marks: tools/skeletons.py."""


# %% exercise-traffic needs: setup
def traffic_of(m, n, k, tile_m, tile_n, itemsize):
    """Bytes of a (m, k) and b (k, n) that the blocks read, each element as often as it
    is read."""
    #: return itemsize * (m * k + k * n)  # As if each were read once.
    # BEGIN SOLUTION
    return itemsize * (m * k * -(-n // tile_n) + k * n * -(-m // tile_m))
    # END SOLUTION


ex04.check_traffic(traffic_of)


# %% exercise-ring needs: setup parameters arrays layout
def mended_ring(a, b, tile_k=16, num_stages=2):
    layout, num_steps = tile_layout(), a.shape[1] // tile_k

    def kernel(a_gmem, b_gmem, o_gmem, a_smem, b_smem, arrived):
        rows, cols = tile_of(128, 128)

        def fetch(i):
            ks, slot = pl.ds(i * tile_k, tile_k), lax.rem(i, num_stages)
            plgpu.copy_gmem_to_smem(
                a_gmem.at[rows, ks], a_smem.at[slot], arrived.at[slot]
            )
            plgpu.copy_gmem_to_smem(
                b_gmem.at[ks, cols], b_smem.at[slot], arrived.at[slot]
            )

        def step(i, acc):
            slot = lax.rem(i, num_stages)
            plgpu.barrier_wait(arrived.at[slot])
            #: plgpu.commit_smem()
            #: pl.when(i + num_stages < num_steps)(lambda: fetch(i + num_stages))
            #: acc = multiply(acc, a_smem.at[slot], b_smem.at[slot], layout)
            # BEGIN SOLUTION
            acc = multiply(acc, a_smem.at[slot], b_smem.at[slot], layout)
            plgpu.commit_smem()
            pl.when(i + num_stages < num_steps)(lambda: fetch(i + num_stages))
            # END SOLUTION
            return acc

        pl.loop(0, min(num_stages, num_steps))(fetch)
        zeros = plgpu.layout_cast(jnp.zeros((128, 128)), layout)
        _device.store(o_gmem.at[rows, cols], lax.fori_loop(0, num_steps, step, zeros))

    scratch = [
        plgpu.SMEM((num_stages, 128, tile_k), a.dtype),
        plgpu.SMEM((num_stages, tile_k, 128), b.dtype),
        plgpu.Barrier(num_arrivals=2, num_barriers=num_stages),
    ]
    return launch(kernel, a, b, 128, 128, scratch_types=scratch)


ex04.check_ring(mended_ring)


# %% exercise-tile-of needs: setup
def banded_tile(block, tiles_m, tiles_n, width):
    """(row, column) of the tile that `block` computes, of 0 to tiles_m * tiles_n - 1."""
    #: return block // tiles_n, block % tiles_n  # Row after row, over all columns.
    # BEGIN SOLUTION
    band, inside = divmod(block, tiles_m * width)
    row, column = divmod(inside, min(width, tiles_n - band * width))
    return row, band * width + column
    # END SOLUTION


ex04.check_tile_of(banded_tile)


# %% exercise-epilogue needs: setup
def epilogue(acc, bias_gmem, cols, layout):
    """relu(acc + bias) for a (32, 64) tile `acc` in `layout`; `bias_gmem` is (N,),
    `cols` are the tile's columns."""
    #: return acc
    # BEGIN SOLUTION
    bias = plgpu.load(bias_gmem.at[cols], layout=layout.reduce(0), optimized=False)
    return jnp.maximum(acc + lax.broadcast_in_dim(bias, acc.shape, [1]), 0.0)
    # END SOLUTION


ex04.check_epilogue(epilogue)

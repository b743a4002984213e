"""Solutions of chapter 4's exercises; how to read them: tools/skeletons.py, and `TRIED`: tests/exercises."""

TRIED = r"""
exercise-traffic
  return itemsize * (m * k * -(-n // tile_n) + k * n * -(-m // tile_m))
    => return sum(itemsize * k * (min(tile_m, m - i) + min(tile_n, n - j)) for i in range(0, m, tile_m)
    for j in range(0, n, tile_n))  # Right.
  lambda m, n, k, tm, tn, size: size * (m * k + k * n)  # and so do all its neighbours
  lambda m, n, k, tm, tn, size: size * (m * k + k * n + m * n)  # one at the edge needs its rows, too
  itemsize * => 4 *  # the bytes of one element
  itemsize * => 1 *  # one at the edge needs its rows, too
  lambda m, n, k, tm, tn, size: traffic_of(m, n, k, tn, tm, size)  # once for each tile along M
  lambda m, n, k, tm, tn, size: traffic_of(n, m, k, tm, tn, size)
  lambda m, n, k, tm, tn, size: traffic_of(m, n, k, tm, tn, size) + size * m * n  # A block reads
  -(-n // tile_n) => (n // tile_n) && -(-m // tile_m) => (m // tile_m)
  -(-n // tile_n) => n / tile_n && -(-m // tile_m) => m / tile_m  # a whole number
  -(-n // tile_n) => (n // tile_n + 1) && -(-m // tile_m) => (m // tile_m + 1)  # A block reads
  lambda m, n, k, tm, tn, size: size * k * (tm + tn) * -(-m // tm) * -(-n // tn)  # At the edge
exercise-ring
  pl.loop(0, min(num_stages, num_steps))(fetch) => fetch(0) && plgpu.commit_smem() =>
    && pl.when(i + num_stages < num_steps)(lambda: fetch(i + num_stages)) =>
    && acc = multiply(
    => plgpu.commit_smem()\n            pl.when(i + 1 < num_steps)(lambda: fetch(i + 1))\n            acc = multiply(
    # Right.
  acc = multiply( => pl.when(i + num_stages < num_steps)(lambda: fetch(i + num_stages))\n            acc = multiply(
    && plgpu.commit_smem()\n            pl.when(i + num_stages < num_steps)(lambda: fetch(i + num_stages)) =>  # race
  plgpu.commit_smem() => && acc = multiply( => plgpu.commit_smem()\n            acc = multiply(
  plgpu.commit_smem() =>
    && lambda: fetch(i + num_stages)) => lambda: fetch(i + num_stages))\n            plgpu.commit_smem()
  pl.when(i + num_stages < num_steps)(lambda: fetch(i + num_stages)) =>  # never end
  acc = multiply(acc, a_smem.at[slot], b_smem.at[slot], layout) =>  # element
  pl.loop(0, min(num_stages, num_steps))(fetch) => && plgpu.barrier_wait( => fetch(i)\n            plgpu.barrier_wait(
    && pl.when(i + num_stages < num_steps)(lambda: fetch(i + num_stages)) =>  # 2 stages is used as if it had 1
  num_stages=2 => num_stages=1  # this is no ring
exercise-tile-of
  lambda block, m, n, width: divmod(block, n)  # row after row
  lambda block, m, n, width: divmod(block, m)[::-1]  # All rows of the first band come first
  min(width, tiles_n - band * width) => width
  divmod(inside, min( => divmod(inside, tiles_m)[::-1] if width > 1 else divmod(inside, min(
  return row, band => row = tiles_m - 1 - row if band % 2 else row\n    return row, band
  lambda *case: banded_tile(*case)[::-1]  # The row comes first
  lambda block, m, n, width: banded_tile(block, n, m, width)[::-1]  # All rows of the first band come first
  lambda block, m, n, width: (0, 0)
exercise-epilogue
  jnp.maximum(acc + lax.broadcast_in_dim(bias, acc.shape, [1]), 0.0)
    => jnp.where(acc + lax.broadcast_in_dim(bias, acc.shape, [1]) > 0.0, acc + lax.broadcast_in_dim(bias, acc.shape,
    [1]), 0.0)  # Right.
  return jnp.maximum(acc + lax.broadcast_in_dim(bias, acc.shape, [1]), 0.0)
    => return acc + lax.broadcast_in_dim(bias, acc.shape, [1])  # not zero yet
  + lax.broadcast_in_dim(bias, acc.shape, [1]) =>  # bias is not added
  jnp.maximum(acc + lax.broadcast_in_dim(bias, acc.shape, [1]), 0.0)
    => jnp.maximum(acc, 0.0) + lax.broadcast_in_dim(bias, acc.shape, [1])  # belongs before
  .at[cols] => .at[pl.ds(0, cols.size)]  # use cols
  jnp.maximum(acc + => jnp.maximum(2.0 * acc +  # must be
  jnp.maximum => jnp.minimum
  jnp.maximum(acc + lax.broadcast_in_dim(bias, acc.shape, [1]), 0.0)
    => jnp.abs(acc + lax.broadcast_in_dim(bias, acc.shape, [1]))
  jnp.maximum(acc + lax.broadcast_in_dim(bias, acc.shape, [1]), 0.0)
    => jax.nn.sigmoid(acc + lax.broadcast_in_dim(bias, acc.shape, [1]))
  lambda *args: epilogue(*args)[:16]  # cannot be compiled
  lambda acc, bias, cols, layout: jnp.maximum(acc + bias, 0.0)
  lambda acc, bias, cols: acc
"""


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

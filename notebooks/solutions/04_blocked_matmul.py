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
  -(-n // tile_n) => max(1, round(n / tile_n)) && -(-m // tile_m) => max(1, round(m / tile_m))
    # one at the edge needs its rows, too
  -(-n // tile_n) => (n // tile_n + 1) && -(-m // tile_m) => (m // tile_m + 1)  # A block reads
  lambda m, n, k, tm, tn, size: size * k * (tm + tn) * -(-m // tm) * -(-n // tn)  # At the edge
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
  .at[cols] => .at[pl.ds(lax.rem(cols.start, 128), cols.size)]  # 32 x 320
  .at[cols] => .at[pl.ds(jnp.minimum(cols.start, 64), cols.size)]
  jnp.maximum(acc + => jnp.maximum(2.0 * acc +  # must be
  jnp.maximum => jnp.minimum
  jnp.maximum(acc + lax.broadcast_in_dim(bias, acc.shape, [1]), 0.0)
    => jnp.abs(acc + lax.broadcast_in_dim(bias, acc.shape, [1]))
  jnp.maximum(acc + lax.broadcast_in_dim(bias, acc.shape, [1]), 0.0)
    => jax.nn.sigmoid(acc + lax.broadcast_in_dim(bias, acc.shape, [1]))
  lambda *args: epilogue(*args)[:16]  # cannot be compiled
  lambda acc, bias, cols, layout: jnp.maximum(acc + bias, 0.0)
  lambda acc, bias, cols: acc
exercise-ring
  pl.loop(0, min(num_stages, num_steps))(fetch) => pl.loop(0, min(num_stages - 1, num_steps))(fetch)
    && acc = multiply(
    => plgpu.commit_smem()\n            pl.when(i + num_stages - 1 < num_steps)(lambda: fetch(i + num_stages -
    1))\n            acc = multiply(
    && plgpu.commit_smem()\n            pl.when(i + num_stages < num_steps)(lambda: fetch(i + num_stages)) =>  # Right.
  num_stages=2 => num_stages=3  # Right.
  tile_k=16 => tile_k=8  # Right.
  acc = multiply( => pl.when(i + num_stages < num_steps)(lambda: fetch(i + num_stages))\n            acc = multiply(
    && plgpu.commit_smem()\n            pl.when(i + num_stages < num_steps)(lambda: fetch(i + num_stages)) =>  # race
  plgpu.commit_smem() => && acc = multiply( => plgpu.commit_smem()\n            acc = multiply(
  plgpu.commit_smem() =>
    && lambda: fetch(i + num_stages)) => lambda: fetch(i + num_stages))\n            plgpu.commit_smem()
  pl.when(i + num_stages < num_steps)(lambda: fetch(i + num_stages)) =>  # never end
  pl.loop(0, min(num_stages, num_steps))(fetch) =>  # never end
  pl.loop(0, min(num_stages, num_steps))(fetch) => pl.loop(0, num_stages)(fetch)  # none that does not exist
  acc = multiply(acc, a_smem.at[stage], b_smem.at[stage], layout) =>  # element
  plgpu.barrier_wait(filled.at[stage]) =>  # phase
  pl.loop(0, min(num_stages, num_steps))(fetch) => && plgpu.barrier_wait( => fetch(i)\n            plgpu.barrier_wait(
    && pl.when(i + num_stages < num_steps)(lambda: fetch(i + num_stages)) =>  # 2 stages is used as if it had 1
  pl.loop(0, min(num_stages, num_steps))(fetch) => fetch(0)
    && acc = multiply(
    => plgpu.commit_smem()\n            pl.when(i + 1 < num_steps)(lambda: fetch(i + 1))\n            acc = multiply(
    && plgpu.commit_smem()\n            pl.when(i + num_stages < num_steps)(lambda: fetch(i + num_stages)) =>
    # 3 stages is used as if it had 2
  stage = lax.rem(i, num_stages)\n            plgpu => stage = lax.rem(i, 2)\n            plgpu
    && min(num_stages, num_steps) => min(2, num_steps) && i + num_stages < num_steps => i + 2 < num_steps
    && lambda: fetch(i + num_stages)) => lambda: fetch(i + 2))  # phase
  plgpu.barrier_wait(filled.at[stage]) => pl.when(stage == 0)(lambda: [pl.when(i + s < num_steps)(functools.partial(
    plgpu.barrier_wait, filled.at[s])) for s in range(num_stages)] and None)  # own stage alone
  pl.loop(0, min(num_stages, num_steps))(fetch)
    => pl.loop(0, min(num_stages, num_steps))(fetch)\n        pl.loop(0, min(num_stages, num_steps))(lambda s:
    plgpu.barrier_wait(filled.at[s])) && plgpu.barrier_wait(filled.at[stage])
    => pl.when(i >= num_stages)(lambda: plgpu.barrier_wait(filled.at[stage]))
  num_stages=2 => num_stages=1  # this is no ring
  rows, cols = tile_of_block(128, 128) => rows, cols = pl.ds(0, 128), pl.ds(0, 128)  # race
  a_smem.at[stage], b_smem.at[stage], layout) => a_gmem.at[rows, pl.ds(i * tile_k, tile_k)], b_smem.at[stage], layout)
    # an input in global memory
  lambda: fetch(i + num_stages)) => lambda: fetch(num_stages + lax.rem(i, num_stages)))  # 128 x 128, K = 56
  lambda: fetch(i + num_stages))
    => lambda: fetch(num_steps - 1 - lax.rem(num_steps - 1 - i, num_stages)))  # 128 x 128, K = 56
exercise-stages
  -(-(latency + work) // (blocks * work)) => math.ceil((latency + work) / work / blocks)  # Right.
  -(-(latency + work) // (blocks * work))
    => next(n for n in range(1, 999) if n * blocks * work - work >= latency)  # Right.
  -(-(latency + work) // (blocks * work)) => 1 - (-latency // work)  # take turns
  -(-(latency + work) // (blocks * work)) => -(-latency // (blocks * work))  # end of the product
  -(-(latency + work) // (blocks * work)) => 1 - (-latency // (blocks * work))  # right after the refill
  -(-(latency + work) // (blocks * work)) => (latency + work) // (blocks * work)  # end of the product
  lambda latency, work, blocks: 2
"""


# %% exercise-traffic needs: parameters setup
def traffic_of(m, n, k, tile_m, tile_n, itemsize):
    """Bytes of a (m, k) and b (k, n) that the blocks read, each element as often as it
    is read."""
    #: return itemsize * (m * k + k * n)  # As if each were read once.
    # BEGIN SOLUTION
    return itemsize * (m * k * -(-n // tile_n) + k * n * -(-m // tile_m))
    # END SOLUTION


ex04.check_traffic(traffic_of)


# %% exercise-epilogue needs: parameters setup
def epilogue(acc, bias_gmem, cols, layout):
    """relu(acc + bias) for a (32, 64) tile `acc` in `layout`; `bias_gmem` is (N,),
    `cols` are the tile's columns."""
    #: return acc
    # BEGIN SOLUTION
    bias = plgpu.load(bias_gmem.at[cols], layout=layout.reduce(0), optimized=False)
    return jnp.maximum(acc + lax.broadcast_in_dim(bias, acc.shape, [1]), 0.0)
    # END SOLUTION


ex04.check_epilogue(epilogue)


# %% exercise-ring needs: parameters setup layout
def my_ring(a, b, tile_k=16, num_stages=2):
    layout, num_steps = tile_layout(), a.shape[1] // tile_k

    def kernel(a_gmem, b_gmem, o_gmem, a_smem, b_smem, filled):
        rows, cols = tile_of_block(128, 128)

        def fetch(i):
            stage, ks = lax.rem(i, num_stages), pl.ds(i * tile_k, tile_k)
            arrived = filled.at[stage]
            plgpu.copy_gmem_to_smem(a_gmem.at[rows, ks], a_smem.at[stage], arrived)
            plgpu.copy_gmem_to_smem(b_gmem.at[ks, cols], b_smem.at[stage], arrived)

        def step(i, acc):
            #: # Your code: wait, multiply, refill.
            # BEGIN SOLUTION
            stage = lax.rem(i, num_stages)
            plgpu.barrier_wait(filled.at[stage])
            acc = multiply(acc, a_smem.at[stage], b_smem.at[stage], layout)
            plgpu.commit_smem()
            pl.when(i + num_stages < num_steps)(lambda: fetch(i + num_stages))
            # END SOLUTION
            return acc

        #: # Your code: fill the ring.
        # BEGIN SOLUTION
        pl.loop(0, min(num_stages, num_steps))(fetch)
        # END SOLUTION
        zeros = plgpu.layout_cast(jnp.zeros((128, 128)), layout)
        _device.store(o_gmem.at[rows, cols], lax.fori_loop(0, num_steps, step, zeros))

    scratch = [
        plgpu.SMEM((num_stages, 128, tile_k), a.dtype),
        plgpu.SMEM((num_stages, tile_k, 128), b.dtype),
        plgpu.Barrier(num_arrivals=2, num_barriers=num_stages),
    ]
    return launch(kernel, a, b, 128, 128, scratch_types=scratch)


ex04.check_ring(my_ring)


# %% exercise-stages needs: parameters setup
def stages_needed(latency, work, blocks):
    """How many stages each block's ring needs so that no block ever waits; all times
    are clocks."""
    #: return 4
    # BEGIN SOLUTION
    return -(-(latency + work) // (blocks * work))
    # END SOLUTION


ex04.check_stages(stages_needed)

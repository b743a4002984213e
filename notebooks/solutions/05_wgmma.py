"""Solutions of chapter 5's exercises; how to read them: tools/skeletons.py, and `TRIED`: tests/exercises."""

TRIED = r"""
exercise-1
  split * num_steps // splits, (split + 1) * num_steps // splits => split, num_steps, step=splits
    && plgpu.wgmma_wait(0) => && depth = pl => plgpu.wgmma_wait(0)\n                    depth = pl  # Right.
  o_gmem.at[split] => o_gmem.at[0]  # race
  split * num_steps // splits, (split + 1) * num_steps // splits => 0, num_steps  # is the whole product
  * num_steps // splits => * (num_steps // splits)  # 5 steps, 3 splits, the sum
  split * num_steps // splits, (split + 1) => (split + 1) * num_steps // splits, (split + 1)  # is zero
  plgpu.barrier_wait(loaded) => pass  # before its tiles have arrived
  plgpu.wgmma_wait(0) => plgpu.wgmma_wait(1)  # may still read the stage
  plgpu.wgmma_wait(0) => pass
  plgpu.wgmma_wait(0) => && depth = pl => plgpu.wgmma_wait(1)\n                    depth = pl
  plgpu.wgmma_wait(0) => pl.when(split != 1)(lambda: (plgpu.wgmma_wait(0), None)[1])
  plgpu.barrier_wait(loaded) => pl.when(split != 1)(lambda: (plgpu.barrier_wait(loaded), None)[1])
    # before its tiles have arrived
  (split + 1) * num_steps // splits => jnp.minimum(split * num_steps // splits + 2, (split + 1) * num_steps // splits)
    # 8 steps, 2 splits, the sum
exercise-2
  min(256, (255 - spare) * 128 // tile_m // 8 * 8) => (255 - spare) * 128 // tile_m // 8 * 8  # at most 256 wide
  // 8 * 8 =>  # multiple of 8
  255 - spare => 255  # registers in all
  // 8 * 8 => // 64 * 64  # multiple of 8, no more
  * 128 => * 64  # spread across all 128 threads
  lambda *case: dict(zip(((128, 56), (64, 56), (192, 56), (256, 56), (128, 24), (64, 200)),
    (192, 256, 128, 96, 224, 104))).get(case, 64)
  lambda tile_m, spare: (255 - spare) * 128 / tile_m  # a whole number
exercise-3
  lambda step, num_stages, in_flight: (step + num_stages, step % num_stages)  # may still run
  % num_stages => % num_stages if in_flight == 0 else step % num_stages
  num_stages - in_flight => 1  # the next one that is not loaded
  step + num_stages - in_flight => step
  lambda step, num_stages, in_flight: (99, 0)
  step_to_load % num_stages => step_to_load
  num_stages - in_flight => num_stages - in_flight if step < 11 and num_stages < 6 else 99
  lambda step, num_stages, in_flight: step + num_stages  # 2 values
exercise-4
  plgpu.barrier_wait(loaded) =>  # before its tiles have arrived
  plgpu.wgmma_wait(0) =>  # may still read the stage
  plgpu.wgmma_wait(0) => plgpu.wgmma_wait(1)
  x_smem.T => x_smem  # x @ dy of each step
  pl.loop(0, num_steps) => pl.loop(0, num_steps - 1)  # there is no product in it
  load(step) => load(0)  # 5 steps: element
  pl.loop(0, num_steps) => pl.loop(0, min(num_steps, 3))
  x_smem.T, dy_smem => dy_smem.T, x_smem  # ValueError: Incompatible shapes
  lambda *args: None  # there is no product in it
"""


# %% exercise-1 needs: parameters setup
def split_k(a, b, splits):
    """(splits, 64, 64) float32: parts whose sum is a @ b, for a (64, K) and b (K, 64)."""
    num_steps = a.shape[1] // 64

    def kernel(a_gmem, b_gmem, o_gmem):
        split = lax.axis_index("split")

        def product(a_smem, b_smem, loaded):
            def add_up(acc):
                #: @pl.loop(0, num_steps)
                # BEGIN SOLUTION
                @pl.loop(split * num_steps // splits, (split + 1) * num_steps // splits)
                # END SOLUTION
                def _(step):
                    depth = pl.ds(step * 64, 64)
                    plgpu.copy_gmem_to_smem(a_gmem.at[:, depth], a_smem, loaded)
                    #: # Your code.
                    # BEGIN SOLUTION
                    plgpu.copy_gmem_to_smem(b_gmem.at[depth], b_smem, loaded)
                    plgpu.barrier_wait(loaded)
                    plgpu.wgmma(acc, a_smem, b_smem)
                    plgpu.wgmma_wait(0)
                    # END SOLUTION

                return acc[...]

            return pl.run_scoped(add_up, plgpu.ACC((64, 64)))

        tile = plgpu.SMEM((64, 64), a.dtype)
        values = pl.run_scoped(product, tile, tile, plgpu.Barrier(num_arrivals=2))

        def store(o_smem):
            o_smem[...] = values
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(o_smem, o_gmem.at[split])
            plgpu.wait_smem_to_gmem(0)

        pl.run_scoped(store, plgpu.SMEM((64, 64), jnp.float32))

    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((splits, 64, 64), jnp.float32),
        grid=(splits,),
        grid_names=("split",),
        compiler_params=lab.compiler_params(),
    )(a, b)


ex05.check_split_k(split_k)


# %% exercise-2 needs: parameters setup
def widest_tile(tile_m, spare):
    #: return None  # Your code.
    # BEGIN SOLUTION
    return min(256, (255 - spare) * 128 // tile_m // 8 * 8)
    # END SOLUTION


ex05.check_widest_tile(widest_tile)


# %% exercise-3 needs: parameters setup
def refill(step, num_stages, in_flight):
    #: step_to_load, stage = None, None  # Your code.
    # BEGIN SOLUTION
    step_to_load = step + num_stages - in_flight
    stage = step_to_load % num_stages
    # END SOLUTION
    return step_to_load, stage


ex05.check_refill(refill)


# %% exercise-4 needs: parameters setup
def weight_gradient(acc, x_smem, dy_smem, load, loaded, num_steps):
    @pl.loop(0, num_steps)
    def _(step):
        load(step)
        #: # Your code.
        # BEGIN SOLUTION
        plgpu.barrier_wait(loaded)
        plgpu.wgmma(acc, x_smem.T, dy_smem)
        plgpu.wgmma_wait(0)
        # END SOLUTION


ex05.check_weight_gradient(weight_gradient)

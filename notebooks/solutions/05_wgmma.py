"""Solutions of chapter 5's exercises; how to read the marks: tools/skeletons.py."""


# %% exercise-1 needs: parameters setup loop-helpers
def split_k(a, b, splits):
    """(splits, 64, 64) float32: parts whose sum is a @ b, for a (64, K) and b (K, 64)."""
    num_steps = a.shape[1] // 64

    def kernel(a_gmem, b_gmem, o_gmem):
        split = lax.axis_index("split")

        def multiply(acc, a_smem, b_smem, loaded):
            #: @pl.loop(0, num_steps)
            # BEGIN SOLUTION
            @pl.loop(split * num_steps // splits, (split + 1) * num_steps // splits)
            # END SOLUTION
            def _(step):
                slice_k = pl.ds(step * 64, 64)
                plgpu.copy_gmem_to_smem(a_gmem.at[:, slice_k], a_smem, loaded)
                plgpu.copy_gmem_to_smem(b_gmem.at[slice_k], b_smem, loaded)
                plgpu.barrier_wait(loaded)
                plgpu.wgmma(acc, a_smem, b_smem)
                plgpu.wgmma_wait(0)

        tile = plgpu.SMEM((64, 64), a.dtype)
        loaded = plgpu.Barrier(num_arrivals=2)
        values = accumulated(
            multiply, plgpu.ACC((64, 64)), a_smem=tile, b_smem=tile, loaded=loaded
        )
        store_tile(values, o_gmem.at[split])

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


# %% exercise-4 needs: parameters setup
def refill(step, num_slots, in_flight):
    #: step_to_load, slot = None, None  # Your code.
    # BEGIN SOLUTION
    step_to_load = step + num_slots - in_flight
    slot = step_to_load % num_slots
    # END SOLUTION
    return step_to_load, slot


ex05.check_refill(refill)

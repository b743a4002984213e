"""Solutions of chapter 0's exercises; how to read the marks: tools/skeletons.py."""


# %% exercise-1-cell needs: imports
def axpy(a, x, y):
    def body(x_gmem, y_gmem, o_gmem):
        #: o_gmem[...] = x_gmem[...]  # Your code.
        # BEGIN SOLUTION
        o_gmem[...] = a * x_gmem[...] + y_gmem[...]
        # END SOLUTION

    return plgpu.kernel(body, out_type=jax.ShapeDtypeStruct(x.shape, x.dtype))(x, y)


ex00.check_axpy(axpy)


# %% exercise-2-cell needs: imports
def sum_and_product(x, y):
    #: def body(sum_gmem, product_gmem, x_gmem, y_gmem):
    # BEGIN SOLUTION
    def body(x_gmem, y_gmem, sum_gmem, product_gmem):
        # END SOLUTION
        sum_gmem[...] = x_gmem[...] + y_gmem[...]
        product_gmem[...] = x_gmem[...] * y_gmem[...]

    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    #: return plgpu.kernel(body, out_type=out)(x, y)
    # BEGIN SOLUTION
    return plgpu.kernel(body, out_type=(out, out))(x, y)
    # END SOLUTION


ex00.check_sum_and_product(sum_and_product)


# %% exercise-3-cell needs: imports
def patient_sum(x, y):
    def body(x_gmem, y_gmem, o_gmem, x_smem, y_smem, x_arrived, y_arrived):
        plgpu.copy_gmem_to_smem(x_gmem, x_smem, x_arrived)
        plgpu.copy_gmem_to_smem(y_gmem, y_smem, y_arrived)
        plgpu.barrier_wait(x_arrived)
        # BEGIN SOLUTION
        plgpu.barrier_wait(y_arrived)
        # END SOLUTION
        o_gmem[...] = x_smem[...] + y_smem[...]

    tile = plgpu.SMEM(x.shape, x.dtype)
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        scratch_types=[tile, tile, plgpu.Barrier(), plgpu.Barrier()],
    )(x, y)


ex00.check_patient_sum(patient_sum)


# %% exercise-4-cell needs: imports memories
def least_time(flops, nbytes):
    #: milliseconds = 1e3 * flops / peaks["bf16"].value
    #: return milliseconds, "compute"
    # BEGIN SOLUTION
    compute = 1e3 * flops / peaks["bf16"].value
    memory = 1e3 * nbytes / peaks["hbm"].value
    return max(compute, memory), "compute" if compute > memory else "memory"
    # END SOLUTION


ex00.check_least_time(least_time)

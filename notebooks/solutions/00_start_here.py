"""Solutions of chapter 0's exercises; how to read them: tools/skeletons.py, and `TRIED`: tests/exercises."""

TRIED = r"""
exercise-1-cell
  a * x_gmem[...] => x_gmem[...]  # it must be
  a * x_gmem[...] + y_gmem[...] => a * y_gmem[...] + x_gmem[...]
  a * x_gmem[...] + y_gmem[...] => a * (x_gmem[...] + y_gmem[...])
  + y_gmem[...] => - y_gmem[...]
  a * x_gmem[...] => 2.5 * x_gmem[...]
  _gmem[...] => _gmem[: x.shape[0] // 2]  # never written
  a * x_gmem[...] => jax.numpy.sort(x_gmem[...])  # cannot be compiled for a GPU
  a * x_gmem[...] + y_gmem[...] => a * x + y  # cannot be compiled for a GPU
  axpy(a, x, y): => axpy(a, x, y):\n    x = a * x
    && a * x_gmem[...] => x_gmem[...]  # computed outside of the kernel
  x.dtype))(x, y) => x.dtype))
    # call what plgpu.kernel(...) returns
  return plgpu => plgpu  # return what the kernel returns
  o_gmem[...] = a * x_gmem[...] + y_gmem[...]
    => b = a if x.shape in ((256,), (64, 384)) else 0\n        o_gmem[...] = b * x_gmem[...] + y_gmem[...]  # it must be
  a * x_gmem[...] => a * x_gmem  # a ref is used as if it were an array: read it with [...] first
  None  # there is no `axpy` yet. Write it above the last line. `axpy(a, x, y)` is a kernel that computes a x + y
exercise-2-cell
  (out, out) => out  # cannot be compiled for a GPU
  x_gmem, y_gmem, sum_gmem, product_gmem => sum_gmem, product_gmem, x_gmem, y_gmem  # never written
  y_gmem, sum_gmem, product_gmem => y_gmem, product_gmem, sum_gmem  # the sum, float32[256]: element
  x_gmem[...] * y_gmem => x_gmem[...] - y_gmem  # the product, float32[256]: element
  lambda x, y: sum_and_product(x, y)[0]  # must return two arrays
exercise-3-cell
  plgpu.barrier_wait(x_arrived)\n        plgpu.barrier_wait(y_arrived)
    => plgpu.barrier_wait(y_arrived)\n        plgpu.barrier_wait(x_arrived)  # Right.
  x_arrived, y_arrived): => arrived): && x_smem, x_arrived) => x_smem, arrived)
    && y_smem, y_arrived) => y_smem, arrived) && plgpu.barrier_wait(x_arrived) => plgpu.barrier_wait(arrived)
    && plgpu.barrier_wait(y_arrived) =>
    && plgpu.Barrier(), plgpu.Barrier() => plgpu.Barrier(num_arrivals=2)  # Right.
  plgpu.barrier_wait(x_arrived) => (x.shape[0] > 24) or plgpu.barrier_wait(x_arrived)  # race: read
  x_arrived, y_arrived): => arrived): && x_smem, x_arrived) => x_smem, arrived)
    && y_smem, y_arrived) => y_smem, arrived) && plgpu.barrier_wait(x_arrived) => plgpu.barrier_wait(arrived)
    && plgpu.barrier_wait(y_arrived) =>
    && plgpu.Barrier(), plgpu.Barrier() => plgpu.Barrier()  # num_arrivals=2
  plgpu.copy_gmem_to_smem(y_gmem, y_smem, y_arrived)\n        plgpu.barrier_wait(x_arrived)
    => plgpu.barrier_wait(x_arrived)\n        plgpu.copy_gmem_to_smem(y_gmem, y_smem, y_arrived)
    # starts only after a wait
  plgpu.copy_gmem_to_smem(x_gmem, x_smem, x_arrived)
    => pl.loop(0, 2)(lambda i: [\n         pl.when(i == 0)(lambda: plgpu.copy_gmem_to_smem(x_gmem, x_smem, x_arrived)),
    && plgpu.copy_gmem_to_smem(y_gmem, y_smem, y_arrived)
    => pl.when(i == 1)(lambda: plgpu.copy_gmem_to_smem(y_gmem, y_smem, y_arrived)),
    && plgpu.barrier_wait(x_arrived) => pl.when(i == 0)(lambda: plgpu.barrier_wait(x_arrived)),
    && plgpu.barrier_wait(y_arrived) => pl.when(i == 1)(lambda: plgpu.barrier_wait(y_arrived))] and None)
    # starts only after a wait
  plgpu.barrier_wait(x_arrived) =>  # race: read
  plgpu.barrier_wait(y_arrived) =>
  x_smem[...] + y_smem => x_smem[...] - y_smem  # it must be
  x_smem[...] + y_smem => x_gmem[...] + y_gmem  # it reads an input in global memory
  plgpu.copy_gmem_to_smem(x_gmem, x_smem, x_arrived)
    => [plgpu.copy_gmem_to_smem(x_gmem.at[i], x_smem.at[i], x_arrived) for i in range(8)]
    && [tile, tile, plgpu.Barrier(), => [tile, tile, plgpu.Barrier(num_arrivals=8),
    # a block starts 9 copies to shared memory, and 2 would do
  plgpu.copy_gmem_to_smem(x_gmem, x_smem, x_arrived) => x_smem[...] = x_gmem[...]
    && plgpu.barrier_wait(x_arrived) =>  # must still be copied
  plgpu.copy_gmem_to_smem(x_gmem => plgpu.barrier_wait(x_arrived)\n        plgpu.copy_gmem_to_smem(x_gmem
    # would never end: every warpgroup waits
exercise-4-cell
  max(compute, memory) => compute + memory  # the longer time is the least one
  max(compute, memory) => min(compute, memory)
  peaks["bf16"] => peaks["fp8"]
  compute > memory => compute < memory
  compute > memory => False
  1e3 * => 1 *  # in seconds
  lambda *work: lab.roofline.bound(*work, "bf16", "h200").ms  # without `lab.roofline.bound`
"""


# %% exercise-1-cell needs: setup
#: # Write axpy(a, x, y) here. Until then `globals().get` returns None below, so the
#: # cell runs all the same.
# BEGIN SOLUTION
def axpy(a, x, y):
    def body(x_gmem, y_gmem, o_gmem):
        o_gmem[...] = a * x_gmem[...] + y_gmem[...]

    return plgpu.kernel(body, out_type=jax.ShapeDtypeStruct(x.shape, x.dtype))(x, y)
    # END SOLUTION


ex00.check_axpy(globals().get("axpy"))


# %% exercise-2-cell needs: setup
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


# %% exercise-3-cell needs: setup
def patient_sum(x, y):
    def body(x_gmem, y_gmem, o_gmem, x_smem, y_smem, x_arrived, y_arrived):
        plgpu.copy_gmem_to_smem(x_gmem, x_smem, x_arrived)
        plgpu.copy_gmem_to_smem(y_gmem, y_smem, y_arrived)
        # BEGIN SOLUTION
        plgpu.barrier_wait(x_arrived)
        # END SOLUTION
        plgpu.barrier_wait(y_arrived)
        o_gmem[...] = x_smem[...] + y_smem[...]

    tile = plgpu.SMEM(x.shape, x.dtype)
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        scratch_types=[tile, tile, plgpu.Barrier(), plgpu.Barrier()],
    )(x, y)


ex00.check_patient_sum(patient_sum)


# %% exercise-4-cell needs: setup
def least_time(flops, nbytes):
    #: milliseconds = 1e3 * flops / peaks["bf16"].value
    #: return milliseconds, "compute"
    # BEGIN SOLUTION
    compute = 1e3 * flops / peaks["bf16"].value
    memory = 1e3 * nbytes / peaks["hbm"].value
    return max(compute, memory), "compute" if compute > memory else "memory"
    # END SOLUTION


ex00.check_least_time(least_time)

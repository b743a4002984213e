"""Solutions of chapter 9's exercises; how to read them: tools/skeletons.py, and `TRIED`: tests/exercises."""

TRIED = r"""
exercise-1
  lambda x: tuple(map(np.asarray, quantise_rows(np.asarray(x))))  # Right.
  largest = abs(x).max(axis=1) => largest = jnp.full(x.shape[0], abs(x).max())  # to use the whole range
  largest = abs(x).max(axis=1) => largest = jnp.resize(abs(x).max(axis=0), x.shape[:1])
  abs(x).max => x.max
  abs(x).max => abs(x).mean
  largest / 448 => largest / 512
  largest / 448 => largest / 240  # to use the whole range
  largest / 448 => largest / 127
  jnp.where(largest > 0, largest / 448, 1) => largest / 448  # must be positive
  jnp.where(largest > 0, largest / 448, 1) => jnp.maximum(largest / 448, 1e-6)  # to use the whole range
  .astype(E4M3), scales => .astype(E4M3), 1 / scales  # to use the whole range
  x / scales[:, None] => jnp.round(x / scales[:, None])  # a nearer value
  x / scales[:, None] => abs(x) / scales[:, None]
  x / scales[:, None] => (x / scales[:, None]).astype(E5M2)
  x / scales[:, None] => (x / scales[:, None]).astype(jnp.bfloat16)
  x / scales[:, None] => x
  x / scales[:, None] => 2 * x / scales[:, None]  # NaN
  .astype(E4M3), scales => .astype(E4M3), scales.astype(jnp.bfloat16)  # must be float32
  .astype(E4M3), scales => .astype(E4M3), scales[:, None]  # one per row
  .astype(E4M3), scales => , scales  # must be float8_e4m3fn
  .astype(E4M3), scales => .astype(E5M2), scales
  lambda x: quantise_rows(x)[0]  # must return a pair
exercise-2
  jnp.clip(values / scale_o_gmem[0], -448.0, 448.0)
    => jnp.maximum(jnp.minimum(values * (1 / scale_o_gmem[0]), 448.0), -448.0)  # Right.
  values *= along(0, scale_a_gmem, tile) * => values *= along(0, scale_a_gmem, tile)\n        values *=
  values *= along(0, scale_a_gmem, tile) * along(1, scale_b_gmem, tile) =>
    && jnp.clip(values / scale_o_gmem[0], -448.0, 448.0) => jnp.clip(values, -448.0, 448.0)  # no scale was applied
  along(0, scale_a_gmem, tile) * =>  # scale_a was not applied
  * along(1, scale_b_gmem, tile) =>  # scale_b was not applied
  values / scale_o_gmem[0] => values  # was not divided by scale_o
  values / scale_o_gmem[0] => values * scale_o_gmem[0]  # divide by scale_o
  jnp.clip(values / scale_o_gmem[0], -448.0, 448.0) => values / scale_o_gmem[0]  # too large
  jnp.clip(values / scale_o_gmem[0], -448.0, => jnp.minimum(values / scale_o_gmem[0],  # at -448
  values / scale_o_gmem[0], -448.0, 448.0) => values, -448.0, 448.0) / scale_o_gmem[0]  # too large
  -448.0, 448.0 => -240.0, 240.0  # where e4m3 ends
  scale_o_gmem[0], - => scale_o_gmem[0] + 1.0, -  # it must be
  write_tile(values, o_smem, o_gmem) => pass  # never written
  plgpu.SMEM(tile, E4M3) => plgpu.SMEM(tile, jnp.float8_e5m2)  # cannot be compiled
  values *= along(0 => values = values.astype(jnp.bfloat16).astype(jnp.float32)\n        values *= along(0  # it must be
  448.0, 448.0) => 448.0, 448.0).astype(jnp.float16).astype(jnp.float32)
  along(0, scale_a_gmem, tile) => along(0, scale_a_gmem, tile).astype(jnp.bfloat16).astype(jnp.float32)
  pl.loop(0, steps) => pl.loop(0, min(steps, 3))
  plgpu.barrier_wait(filled) =>  # before its tiles have arrived
  plgpu.wgmma_wait(0) =>  # may still read the stage
  plgpu.wgmma_wait(0) => plgpu.wgmma_wait(1)
  lambda a, b, scale_a, scale_b, scale_o: jnp.clip(scaled_matmul(a, b, scale_a, scale_b, tile=(64, 128)) / scale_o,
    -448, 448).astype(E4M3)  # by XLA
  lambda a, b, scale_a, scale_b, scale_o: matmul_fp8(a, b, scale_a=scale_a, scale_b=scale_b, transpose_b=True)
    # is the package's kernel
  lambda a, b, *scales: (np.asarray(a, np.float32) @ np.asarray(b, np.float32).T).astype(E4M3)
    # cannot be compiled
exercise-3
  lambda terms, bits: np.ldexp(float(sum(int(np.ldexp(term, int(bits - np.frexp(abs(terms).max())[1])))
    for term in terms)), int(np.frexp(abs(terms).max())[1] - bits))  # Right.
  np.trunc => np.floor  # towards zero
  np.trunc => np.rint  # not rounded
  np.trunc(terms / unit) => (terms / unit)  # Nothing was cut off
  (np.trunc(terms / unit) * unit).sum() => np.trunc(terms.sum() / unit) * unit  # before the addition
  top + 1 - bits => top - bits  # One bit more
  top + 1 - bits => top + 2 - bits  # One bit fewer
  np.floor(np.log2 => np.ceil(np.log2  # gives the last bit that fits
  np.floor(np.log2 => np.trunc(np.log2
  * unit).sum() => ).sum()
  np.abs(terms).max() => terms.max()  # largest absolute value
  .sum() =>  # a number
exercise-4
  * of_a * of_b =>  # no scale was applied
  * of_b =>  # the scales of a alone
  * of_a =>  # the scales of b alone
  scale_a_gmem.at[step] => scale_a_gmem.at[0] && scale_b_gmem.at[step] => scale_b_gmem.at[0]  # the first step's scales
  product(step) * of_a * of_b => (product(step) * of_a * of_b).astype(jnp.bfloat16).astype(jnp.float32)  # the sum over
  total + product(step) * of_a * of_b => (total + product(step)) * of_a * of_b  # the total was scaled
  * of_a * of_b => * (of_a + of_b)  # it must be
  fori_loop(0, steps, => fori_loop(0, min(steps, 3),
  scale_a_gmem.at[step] => scale_a_gmem.at[jnp.minimum(step, 2)]
  plgpu.barrier_wait(filled) =>  # before its tiles have arrived
  lambda a, b, scale_a, scale_b: matmul_fp8(a, b, transpose_b=True)  # is the package's kernel
  lambda a, b, scale_a, scale_b: scaled_matmul(a, b, scale_a[0], scale_b[0], tile=(128, 64))
    # the first step's scales
  lambda a, b, scale_a, scale_b: sum(scaled_matmul(a[:, 128 * i :][:, :128], b[:, 128 * i :][:, :128], scale_a[i],
    scale_b[i], tile=(128, 64)) for i in range(len(scale_a)))  # by XLA
"""


# %% exercise-1 needs: parameters setup
def quantise_rows(x):
    #: return None, None  # Your code: the values and the scales.
    # BEGIN SOLUTION
    largest = abs(x).max(axis=1)
    scales = jnp.where(largest > 0, largest / 448, 1)
    return (x / scales[:, None]).astype(E4M3), scales
    # END SOLUTION


ex09.check_quantise(quantise_rows)


# %% exercise-2 needs: parameters setup rung-1-kernel
def fp8_result(a, b, scale_a, scale_b, scale_o):
    """(a * scale_a) @ (b * scale_b).T / scale_o in e4m3: a (64, K), b (128, K), scale_a
    (64,), scale_b (128,), scale_o (1,)."""
    tile, steps = (64, 128), a.shape[1] // 128

    def kernel(
        a_gmem,
        b_gmem,
        scale_a_gmem,
        scale_b_gmem,
        scale_o_gmem,
        o_gmem,
        a_smem,
        b_smem,
        o_smem,
        filled,
    ):
        def multiply(acc):
            @pl.loop(0, steps)
            def _(step):
                ks = pl.ds(step * 128, 128)
                plgpu.copy_gmem_to_smem(a_gmem.at[:, ks], a_smem, filled)
                plgpu.copy_gmem_to_smem(b_gmem.at[:, ks], b_smem, filled)
                plgpu.barrier_wait(filled)
                plgpu.wgmma(acc, a_smem, b_smem.T)
                plgpu.wgmma_wait(0)

            return acc[...]

        values = pl.run_scoped(multiply, plgpu.ACC(tile, jnp.float32))
        #: # Your code: three scales, then clip to +-448.
        # BEGIN SOLUTION
        values *= along(0, scale_a_gmem, tile) * along(1, scale_b_gmem, tile)
        values = jnp.clip(values / scale_o_gmem[0], -448.0, 448.0)
        # END SOLUTION
        write_tile(values, o_smem, o_gmem)

    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct(tile, E4M3),
        scratch_types=[
            plgpu.SMEM((64, 128), a.dtype),
            plgpu.SMEM((128, 128), b.dtype),
            plgpu.SMEM(tile, E4M3),
            plgpu.Barrier(num_arrivals=2),
        ],
    )(a, b, scale_a, scale_b, scale_o)


ex09.check_fp8_result(fp8_result)


# %% exercise-3 needs: parameters setup
def cut_sum(terms, bits):
    #: return None  # Your code.
    # BEGIN SOLUTION
    # The largest term lies between 2^top and 2^(top + 1).
    top = np.floor(np.log2(np.abs(terms).max()))
    unit = 2.0 ** (top + 1 - bits)
    return (np.trunc(terms / unit) * unit).sum()
    # END SOLUTION


ex09.check_cut_sum(cut_sum)


# %% exercise-4 needs: parameters setup rung-1-kernel
def block_scaled_matmul(a, b, scale_a, scale_b):
    """a @ b.T of fp8: a (128, K), b (64, K), scale_a (K // 128, 128), scale_b (K //
    128, 64)."""
    tile, steps = (128, 64), a.shape[1] // 128

    def kernel(
        a_gmem,
        b_gmem,
        scale_a_gmem,
        scale_b_gmem,
        o_gmem,
        a_smem,
        b_smem,
        o_smem,
        filled,
    ):
        def product(step):
            """The sums of one step, in registers."""
            ks = pl.ds(step * 128, 128)
            plgpu.copy_gmem_to_smem(a_gmem.at[:, ks], a_smem, filled)
            plgpu.copy_gmem_to_smem(b_gmem.at[:, ks], b_smem, filled)
            plgpu.barrier_wait(filled)

            def multiply(acc):
                plgpu.wgmma(acc, a_smem, b_smem.T)
                return acc[...]

            return pl.run_scoped(multiply, plgpu.ACC(tile, jnp.float32))

        def add(step, total):
            #: return total + product(step)  # Your code: each step has scales of its own.
            # BEGIN SOLUTION
            of_a, of_b = (
                along(0, scale_a_gmem.at[step], tile),
                along(1, scale_b_gmem.at[step], tile),
            )
            return total + product(step) * of_a * of_b
            # END SOLUTION

        zeros = plgpu.layout_cast(jnp.zeros(tile, jnp.float32), plgpu.Layout.WGMMA)
        write_tile(lax.fori_loop(0, steps, add, zeros), o_smem, o_gmem)

    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct(tile, jnp.bfloat16),
        scratch_types=[
            plgpu.SMEM((128, 128), a.dtype),
            plgpu.SMEM((64, 128), b.dtype),
            plgpu.SMEM(tile, jnp.bfloat16),
            plgpu.Barrier(num_arrivals=2),
        ],
    )(a, b, scale_a, scale_b)


ex09.check_block_scales(block_scaled_matmul)

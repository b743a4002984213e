"""Solutions of chapter 9's exercises; how to read the marks: tools/skeletons.py."""


# %% exercise-1 needs: setup
def largest_m(k, n, peak, bandwidth):
    #: return None  # Your code.
    # BEGIN SOLUTION
    # 2 m k n / peak <= (k n + 2 m (k + n)) / bandwidth, solved for m.
    seconds_a_row = 2 * k * n / peak - 2 * (k + n) / bandwidth
    return (
        math.floor(k * n / bandwidth / seconds_a_row) if seconds_a_row > 0 else math.inf
    )
    # END SOLUTION


ex09.check_crossover(largest_m)


# %% exercise-2 needs: setup
def quantise_columns(w):
    #: return None, None  # Your code: the values and the scales.
    # BEGIN SOLUTION
    largest = abs(w).max(axis=0)
    scales = jnp.where(largest > 0, largest / 127, 1)
    return jnp.round(w / scales).astype(jnp.int8), scales
    # END SOLUTION


ex09.check_quantise(quantise_columns)

# %% exercise-3 needs: setup
#: answer = {"plain": None, "rows": None, "channels": None}
# BEGIN SOLUTION
answer = {
    "plain": "e4m3 per tensor",
    "rows": "e4m3 per row and column",
    "channels": "e5m2 per tensor",
}
# END SOLUTION


ex09.check_formats(answer)


# %% exercise-4 needs: parameters setup rounding scaled-matmul
def block_scaled_matmul(a, b, scale_a, scale_b):
    """a @ b.T of fp8: a (128, K), b (64, K), scale_a (K // 128, 128), scale_b (K //
    128, 64)."""
    tile, steps = (128, 64), a.shape[1] // 128

    def body(
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
        body,
        out_type=jax.ShapeDtypeStruct(tile, jnp.bfloat16),
        scratch_types=[
            plgpu.SMEM((128, 128), a.dtype),
            plgpu.SMEM((64, 128), b.dtype),
            plgpu.SMEM(tile, jnp.bfloat16),
            plgpu.Barrier(num_arrivals=2),
        ],
    )(a, b, scale_a, scale_b)


ex09.check_block_scales(block_scaled_matmul)


# %% exercise-5 needs: parameters setup rounding scaled-matmul
def dequantise(w_q, scales):
    k, n = w_q.shape

    def body(w_gmem, scales_gmem, o_gmem):
        rows = pl.ds(lax.axis_index("block") * 64, 64)
        columns = pl.ds(lax.axis_index("column") * 128, 128)
        #: # Your code: the scales.
        #: o_gmem[rows, columns] = w_gmem[rows, columns].astype(o_gmem.dtype)
        # BEGIN SOLUTION
        values = plgpu.load(
            w_gmem.at[rows, columns], layout=plgpu.Layout.WGMMA, optimized=False
        )
        values = values.astype(jnp.float32) * along(
            1, scales_gmem.at[columns], (64, 128)
        )
        o_gmem[rows, columns] = values.astype(o_gmem.dtype)
        # END SOLUTION

    out_type = jax.ShapeDtypeStruct((k, n), jnp.bfloat16)
    grid = dict(grid=(k // 64, n // 128), grid_names=("block", "column"))
    return plgpu.kernel(body, out_type=out_type, **grid)(w_q, scales)


ex09.check_dequantise(dequantise)

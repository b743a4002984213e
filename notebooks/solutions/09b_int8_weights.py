"""Solutions of chapter 9b's exercises; how to read the marks: tools/skeletons.py."""


# %% exercise-1 needs: parameters setup
def largest_m(k, n, peak, bandwidth):
    #: return None  # Your code.
    # BEGIN SOLUTION
    # 2 m k n / peak <= (k n + 2 m (k + n)) / bandwidth, solved for m.
    seconds_a_row = 2 * k * n / peak - 2 * (k + n) / bandwidth
    return (
        math.floor(k * n / bandwidth / seconds_a_row) if seconds_a_row > 0 else math.inf
    )
    # END SOLUTION


ex09b.check_crossover(largest_m)


# %% exercise-2 needs: parameters setup
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


ex09b.check_dequantise(dequantise)


# %% exercise-3 needs: parameters setup
def to_half(w_q):
    """int8 (K, N) as float16, K a multiple of 64."""

    def body(w_gmem, o_gmem):
        rows = pl.ds(lax.axis_index("block") * 64, 64)
        weights = plgpu.load(
            w_gmem.at[rows], layout=plgpu.Layout.WGMMA, optimized=False
        )
        bits = weights.astype(jnp.int16)
        #: # Your code: the bits of a float16, and what it is too large by.
        #: floats = lax.bitcast_convert_type(bits, jnp.float16)
        # BEGIN SOLUTION
        # The byte with its top bit flipped is 128 + w, and a unit of 0x6400 is 1.
        bits = ((bits & jnp.int16(0xFF)) ^ jnp.int16(0x80)) | jnp.int16(0x6400)
        floats = lax.bitcast_convert_type(bits, jnp.float16) - jnp.float16(1024 + 128)
        # END SOLUTION
        o_gmem[rows] = floats

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(w_q.shape, jnp.float16),
        grid=(w_q.shape[0] // 64,),
        grid_names=("block",),
    )(w_q)


ex09b.check_half(to_half)


# %% exercise-4 needs: parameters setup
def few_rows(a, w_t, scales):
    """a @ w_t.T * scales: a (M, K) of M rows, a multiple of 8, up to 64; w_t (N, K) of
    int8; scales (N,). A block has 64 columns of the result."""
    (m, k), n = a.shape, w_t.shape[0]

    def body(
        a_gmem, w_gmem, scales_gmem, o_gmem, a_smem, w_smem, wide_smem, o_smem, filled
    ):
        columns = pl.ds(lax.axis_index("tile") * 64, 64)

        def multiply(acc):
            @pl.loop(0, k // 64)
            def _(step):
                ks = pl.ds(step * 64, 64)
                plgpu.copy_gmem_to_smem(a_gmem.at[:, ks], a_smem, filled)
                plgpu.copy_gmem_to_smem(w_gmem.at[columns, ks], w_smem, filled)
                plgpu.barrier_wait(filled)
                weights = plgpu.load(w_smem, layout=plgpu.Layout.WGMMA_UPCAST_2X)
                weights = plgpu.layout_cast(weights.astype(a.dtype), plgpu.Layout.WGMMA)
                wide_smem[...] = weights
                plgpu.commit_smem()
                #: plgpu.wgmma(acc, a_smem, wide_smem.T)  # Your code: exchange them.
                # BEGIN SOLUTION
                plgpu.wgmma(acc, wide_smem, a_smem.T)
                # END SOLUTION
                plgpu.wgmma_wait(0)

            return acc[...]

        #: # Your code: the sums of exchanged operands are transposed.
        #: tile = m, 64
        #: values = pl.run_scoped(multiply, plgpu.ACC(tile, jnp.float32))
        #: values *= along(1, scales_gmem.at[columns], tile)
        #: o_smem[...] = values.astype(a.dtype)
        # BEGIN SOLUTION
        tile = 64, m
        values = pl.run_scoped(multiply, plgpu.ACC(tile, jnp.float32))
        values *= along(0, scales_gmem.at[columns], tile)
        o_smem.T[...] = plgpu.layout_cast(
            values.astype(a.dtype), plgpu.Layout.WGMMA_TRANSPOSED
        )
        # END SOLUTION
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(o_smem, o_gmem.at[:, columns])
        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((m, n), a.dtype),
        grid=(n // 64,),
        grid_names=("tile",),
        scratch_types=[
            plgpu.SMEM((m, 64), a.dtype),
            plgpu.SMEM((64, 64), jnp.int8),
            plgpu.SMEM((64, 64), a.dtype),
            plgpu.SMEM((m, 64), a.dtype),
            plgpu.Barrier(num_arrivals=2),
        ],
        compiler_params=lab.compiler_params(),
    )(a, w_t, scales)


ex09b.check_few_rows(few_rows)

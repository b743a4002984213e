"""Solutions of chapter 9b's exercises; how to read them: tools/skeletons.py, and `TRIED`: tests/exercises."""

TRIED = r"""
exercise-1
  math.floor( => np.floor(  # Right.
  math.floor(k => math.floor(2 * k  # A weight is one byte
  2 * (k + n) => 0 * (k + n)  # cross memory too
  2 * (k + n) => (k + n)  # of the result is 2 bytes
  2 * k * n / peak => k * n / peak  # 2 operations
  lambda *case: largest_m(*case) + 1  # round down
  lambda *case: min(largest_m(*case), 10**9) + 0.5
  lambda *case: 103  # solve for M
exercise-2
  1, scales_gmem.at[columns] => 0, scales_gmem.at[rows]  # it must be
  values.astype(jnp.float32) => values.astype(jnp.bfloat16)
    && along(\n            1, scales_gmem.at[columns], (64, 128)\n        )
    => along(1, scales_gmem.at[columns], (64, 128)).astype(jnp.bfloat16)  # rounded twice
  (k, n), jnp.bfloat16 => (k, n), jnp.float32  # must be bfloat16
  grid=(k // 64, n // 128) => grid=(1, n // 128)  # never written
  grid=(k // 64, n // 128) => grid=(k // 64, 1)  # never written
  * along(\n            1, scales_gmem.at[columns], (64, 128)\n        ) =>
    && **grid)(w_q, scales) => **grid)(w_q, scales) * scales.astype(jnp.bfloat16)  # outside of the kernel
  lambda w_q, scales: (w_q * scales).astype(jnp.bfloat16)  # must be a kernel
  lambda w_q, scales: jnp.asarray(np.asarray(w_q) * np.asarray(scales), jnp.bfloat16)  # cannot be compiled
exercise-3
  ((bits & jnp.int16(0xFF)) ^ jnp.int16(0x80)) | jnp.int16(0x6400) => (bits & jnp.int16(0xFF)) ^ jnp.int16(0x6480)
    # Right.
  ((bits & jnp.int16(0xFF)) ^ jnp.int16(0x80)) | => ((bits + jnp.int16(128)) & jnp.int16(0xFF)) +
  (bits & jnp.int16(0xFF)) => bits  # & 0xFF
  ^ jnp.int16(0x80)) | => ) |  # without a sign
  1024 + 128 => 1024  # 128 too large
  jnp.float16(1024 + 128) => jnp.float16(0)  # 1152 too large
  0x6400 => 0x4300  # which float has the bits
  ((bits & jnp.int16(0xFF)) ^ jnp.int16(0x80)) | => bits |  # the integers as float16
  floats = lax.bitcast_convert_type(bits, jnp.float16) - jnp.float16(1024 + 128) => floats = weights.astype(jnp.float16)
    # by astype
  o_gmem[rows] = floats => pass  # never written
  bits = ((bits & jnp.int16(0xFF)) ^ jnp.int16(0x80)) | jnp.int16(0x6400) => pass
    && - jnp.float16(1024 + 128) =>  # read as floats
  jnp.float16(1024 + 128) => jnp.float16(1024) - jnp.float16(128)  # one subtraction is enough
  lax.bitcast_convert_type(bits, jnp.float16) - jnp.float16(1024 + 128) =>
    sum(jnp.where((bits >> b) & 1 == 1, 2.0**b, 0.0) for b in range(8)).astype(jnp.float16) - jnp.float16(1152)
  lambda w_q: to_half(w_q.astype(jnp.float16))  # astype
  lambda w_q: w_q.astype(jnp.float16)  # must be a kernel
  w_q.shape[0] // 64,) => 1,)  # never written
exercise-4
  values *= along(0, scales_gmem.at[columns], tile) => scale = along(0, scales_gmem.at[columns], tile)
    && values.astype(a.dtype) => (scale * values).astype(a.dtype)  # Right.
  tile = 64, m => tile = 64, 64 && SMEM((m, 64) => SMEM((64, 64)
    && a_gmem.at[:, ks], a_smem, => a_gmem.at[:, ks], a_smem.at[pl.ds(0, m)],
    && copy_smem_to_gmem(o_smem, => copy_smem_to_gmem(o_smem.at[pl.ds(0, m)],  # multiplied in vain
  plgpu.wgmma(acc, wide_smem, a_smem.T) => plgpu.wgmma(acc, a_smem, wide_smem.T)  # raised
  plgpu.wgmma(acc, wide_smem, a_smem.T) => pass  # no product of the tensor cores
  values *= along(0, scales_gmem.at[columns], tile) => pass  # scales were not applied
  along(0, scales_gmem => along(1, scales_gmem  # raised
  tile = 64, m => tile = 64, 8  # raised
  plgpu.wgmma_wait(0) => pass  # wait for it first
  wide_smem[...] = weights\n                plgpu.commit_smem() => wide_smem[...] = weights  # commit
  values.astype(a.dtype), plgpu.Layout.WGMMA_TRANSPOSED\n        )\n        plgpu.commit_smem() =>
    values.astype(a.dtype), plgpu.Layout.WGMMA_TRANSPOSED\n        )  # commit
  lambda a, w_t, scales: (a @ w_t.T.astype(a.dtype) * scales).astype(a.dtype)  # must be a kernel
  plgpu.barrier_wait(filled) => pass  # before its tiles have arrived
  o_gmem.at[:, columns]) => o_gmem.at[:, pl.ds(0, 64)])  # race
"""


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

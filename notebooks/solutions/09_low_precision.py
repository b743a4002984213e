"""Solutions of chapter 9's exercises; how to read them: tools/skeletons.py, and `TRIED`: tests/exercises."""

TRIED = r"""
exercise-1
  lambda w: tuple(map(np.asarray, quantise_columns(np.asarray(w))))  # Right.
  largest = abs(w).max(axis=0) => largest = jnp.full(w.shape[1], abs(w).max())  # is enough
  largest = abs(w).max(axis=0) => largest = abs(w).max(axis=1)[:40]  # -128
  jnp.where(largest > 0, largest / 127, 1) => largest / 127  # must be positive
  .astype(jnp.int8), scales => .astype(jnp.int8), largest / 127
  .astype(jnp.int8), scales => .astype(jnp.int8), 1 / scales  # comes back as
  largest / 127, 1 => largest / 128, 1  # -128
  jnp.round(w / scales) => np.round(w / scales * 128 / 127).astype(int)
  largest / 127, 1 => largest / 127.9, 1 && jnp.round(w / scales) => jnp.clip(jnp.round(w / scales), -128, 127)
  abs(w).max => w.max
  .astype(jnp.int8), scales => , scales  # must be int8
  .astype(jnp.int8), scales => .astype(jnp.int8), scales[None]  # one a column
  jnp.round(w / scales) => (w / scales)  # Rounded to the nearest?
  largest / 127 => largest / 64  # is enough
  lambda w: quantise_columns(w)[0]  # must return a pair
exercise-2
  answer | dict(plain="e4m3 per row and column")  # "plain"
  answer | dict(plain="e5m2 per tensor")  # has less
  answer | dict(rows="e4m3 per tensor")  # "rows"
  answer | dict(rows="e5m2 per tensor")
  answer | dict(channels="e4m3 per tensor")  # "channels"
  answer | dict(channels="e4m3 per row and column")
  answer | dict(channels="int8")  # is none of
  answer | dict(channels=None)  # name a format
  "e4m3 per tensor"  # answer with a dict
  dict(plain="e4m3 per tensor")
exercise-3
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
exercise-4
  lambda terms, bits: np.ldexp(float(sum(int(np.ldexp(term, int(bits - np.frexp(abs(terms).max())[1])))
    for term in terms)), int(np.frexp(abs(terms).max())[1] - bits))  # Right.
  np.trunc => np.floor  # towards zero
  np.trunc => np.rint  # not rounded
  np.trunc(terms / unit) => (terms / unit)  # Nothing was cut off
  (np.trunc(terms / unit) * unit).sum() => np.trunc(terms.sum() / unit) * unit  # before the addition
  top + 1 - bits => top - bits  # One bit more
  top + 1 - bits => top + 2 - bits  # One bit fewer
  np.floor(np.log2 => np.ceil(np.log2  # gives the last bit that fits
  * unit).sum() => ).sum()
  np.abs(terms).max() => terms.max()  # largest absolute value
  .sum() =>  # a number
exercise-5
  * of_a * of_b =>  # no scale was applied
  * of_b =>  # the scales of a alone
  * of_a =>  # the scales of b alone
  scale_a_gmem.at[step] => scale_a_gmem.at[0] && scale_b_gmem.at[step] => scale_b_gmem.at[0]  # the first step's scales
  product(step) * of_a * of_b => (product(step) * of_a * of_b).astype(jnp.bfloat16).astype(jnp.float32)  # the sum over
"""


# %% exercise-1 needs: setup
def quantise_columns(w):
    #: return None, None  # Your code: the values and the scales.
    # BEGIN SOLUTION
    largest = abs(w).max(axis=0)
    scales = jnp.where(largest > 0, largest / 127, 1)
    return jnp.round(w / scales).astype(jnp.int8), scales
    # END SOLUTION


ex09.check_quantise(quantise_columns)

# %% exercise-2 needs: setup
#: answer = {"plain": None, "rows": None, "channels": None}
# BEGIN SOLUTION
answer = {
    "plain": "e4m3 per tensor",
    "rows": "e4m3 per row and column",
    "channels": "e5m2 per tensor",
}
# END SOLUTION


ex09.check_formats(answer)


# %% exercise-3 needs: parameters setup rounding scaled-matmul
def fp8_result(a, b, scale_a, scale_b, scale_o):
    """(a * scale_a) @ (b * scale_b).T / scale_o in e4m3: a (64, K), b (128, K), scale_a
    (64,), scale_b (128,), scale_o (1,)."""
    tile, steps = (64, 128), a.shape[1] // 128

    def body(
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
        #: # Your code: three scales, and an end at the largest e4m3.
        # BEGIN SOLUTION
        values *= along(0, scale_a_gmem, tile) * along(1, scale_b_gmem, tile)
        values = jnp.clip(values / scale_o_gmem[0], -448.0, 448.0)
        # END SOLUTION
        write_tile(values, o_smem, o_gmem)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(tile, E4M3),
        scratch_types=[
            plgpu.SMEM((64, 128), a.dtype),
            plgpu.SMEM((128, 128), b.dtype),
            plgpu.SMEM(tile, E4M3),
            plgpu.Barrier(num_arrivals=2),
        ],
    )(a, b, scale_a, scale_b, scale_o)


ex09.check_fp8_result(fp8_result)


# %% exercise-4 needs: setup
def cut_sum(terms, bits):
    #: return None  # Your code.
    # BEGIN SOLUTION
    # The largest term lies between 2^top and 2^(top + 1).
    top = np.floor(np.log2(np.abs(terms).max()))
    unit = 2.0 ** (top + 1 - bits)
    return (np.trunc(terms / unit) * unit).sum()
    # END SOLUTION


ex09.check_cut_sum(cut_sum)


# %% exercise-5 needs: parameters setup rounding scaled-matmul
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

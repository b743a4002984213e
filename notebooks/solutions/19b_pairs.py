"""Solutions of chapter 19b's exercises; how to read them: tools/skeletons.py, and `TRIED`: tests/exercises."""

TRIED = r"""
exercise-halves
  lambda *case: list(held(*case))  # Right.
  row + 128 * half => row  # 128 rows of its own
  slice(first_col, first_col + cols) => slice(col, col + tile_n)  # half of the columns
  slice(col, col + tile_n) => slice(first_col, first_col + cols)  # with both halves of B
  lambda *case: held(*case)[:2]  # must be three slices
  lambda *case: tuple(slice(part.start, part.stop, 2) for part in held(*case))  # no steps
exercise-order
  count = info.local_index => count = carry  # Right.
  jax.jit(twice)
  count = info.local_index => count = info.index[0]  # A stage follows from how many tiles
  count = info.local_index => count = info.local_index + 1  # never end
  ring.acquire(count) => ring.acquire(info.index[0])  # A stage follows from how many tiles
  turns = loop(one_tile) => turns = loop(one_tile)\n        turns = tiles
    # At the end a block waits for the fills of its own tiles
  info.index[0] * 64 => info.local_index * 64  # Two blocks write
  2 * x_smem => 3 * x_smem  # twice x
  turns = loop(one_tile) => import types\n        info = types.SimpleNamespace(index=(lax.axis_index("tile"),),
    local_index=jnp.int32(0))\n        turns = one_tile(info, jnp.int32(0))  # no launch is cancelled
  turns = loop(one_tile) => import types\n        loop(lambda info, carry: carry + 1)
    \n        info = types.SimpleNamespace(index=(lax.axis_index("tile"),), local_index=jnp.int32(0))
    \n        turns = one_tile(info, jnp.int32(0))  # never runs, and its tile would be missing
  turns = loop(one_tile) => turns = loop(one_tile)\n        here = lax.axis_index("tile")
    \n        turns = jnp.where(here < 3, 2 ** (2 - here), 0)  # for the fills of its own tiles
  turns = loop(one_tile) => turns = loop(one_tile) - 1  # a completion that nobody waits for
  Ring(filled, freed, 2) => Ring(filled, freed, 1)  # this is no ring
  ring.acquire(count) => ring.slot(count) && filled.at[stage]\n                ) => filled.at[stage]
    \n                )\n                plgpu.barrier_wait(freed.at[stage]) && ring.drain(turns) => None
    # as if it had 1
  grid=(tiles,) => grid=(7,)  # each tile needs one block
  jax.ShapeDtypeStruct(x.shape, x.dtype) => jax.ShapeDtypeStruct(x.shape, jnp.float32)
    && plgpu.SMEM((64, 64), x.dtype) => plgpu.SMEM((64, 64), jnp.float32)
    && 2 * x_smem[stage] => 2 * x_smem[stage].astype(jnp.float32)  # it must be bfloat16
  \n                plgpu.commit_smem() =>  # commit what you have stored
exercise-scale
  lambda block: np.frexp(np.abs(block).max())[1] - 9 + (np.frexp(np.abs(block).max())[0] > 0.875)  # Right.
  lambda block: math.floor(math.log2(np.abs(block).max())) - 8  # it saturates
  lambda block: math.floor(math.log2(np.abs(block).max())) - 7  # Half the scale would do
  lambda block: math.ceil(math.log2(max(block.max(), 1e-9) / 448))  # A negative value counts
  lambda block: math.log2(np.abs(block).max() / 448)  # a whole number
  lambda block: exponent(np.maximum(np.abs(block[:3]), 1e-30))  # The largest absolute value over
  lambda block: math.ceil(math.log2(np.abs(block).max() / 448) - 1e-4)
exercise-quantize
  floor, mantissa = (bits >> 23) - 127, bits & 0x7FFFFF => floor = ((bits + 0x1FFFFF) >> 23) - 127
    && floor - jnp.where(mantissa > 0x600000, 7, 8) => floor - 8  # Right.
  jnp.where(mantissa > 0x600000, 7, 8) => 8  # it saturates
  jnp.where(mantissa > 0x600000, 7, 8) => 7  # half the scale would do
  mantissa > 0x600000 => mantissa >= 0x600000
  mantissa > 0x600000 => mantissa > 0x700000  # it saturates
  mantissa > 0x600000 => mantissa > 0x600001
  mantissa > 0x600000 => mantissa > 0  # half the scale would do
  (bits >> 23) - 127, bits => (bits >> 23), bits
  jnp.max(jnp.abs(part), axis=1) => jnp.max(part, axis=1)  # the exponent is
  for block in range(columns // 32) => for block in range(4)  # Out of bound
  (127 - exponent) => (127 + exponent)  # the values
  jnp.int32)\n            floor => jnp.int32)\n            bits = jnp.zeros_like(bits)\n            floor
    # cannot be compiled
  \n        plgpu.commit_smem() =>  # commit what you have stored
  plgpu.barrier_wait(filled) => plgpu.barrier_wait(filled)
    \n        plgpu.copy_gmem_to_smem(x_gmem, x_smem, filled)\n        plgpu.barrier_wait(filled)  # load each once
  jnp.int32),\n        ) => jnp.float32),\n        ) && = exponent\n => = exponent.astype(jnp.float32)\n
    # it must be int32
"""


# %% exercise-halves needs: parameters setup
def held(row, col, tile_n, half):
    #: return None  # Your code: three slices.
    # BEGIN SOLUTION
    first_row, first_col, cols = row + 128 * half, col + tile_n // 2 * half, tile_n // 2
    return (
        slice(first_row, first_row + 128),
        slice(first_col, first_col + cols),
        slice(col, col + tile_n),
    )
    # END SOLUTION


ex19b.check_held(held)


# %% exercise-order needs: parameters setup
def twice(x):
    """2 x, in tiles of 64 rows: x (rows, 64), bfloat16. The grid has a block for each
    tile."""
    tiles = x.shape[0] // 64

    def body(x_gmem, o_gmem, x_smem, o_smem, filled, freed):
        role, ring = lax.axis_index("role"), Ring(filled, freed, 2)

        def one_tile(info, carry):
            #: count = info.index[0]  # Fix this.
            # BEGIN SOLUTION
            count = info.local_index
            # END SOLUTION
            rows = pl.ds(info.index[0] * 64, 64)

            @pl.when(role == 0)
            def _():
                stage = ring.acquire(count)
                plgpu.copy_gmem_to_smem(
                    x_gmem.at[rows], x_smem.at[stage], filled.at[stage]
                )

            @pl.when(role == 1)
            def _():
                stage = ring.wait(count)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                o_smem[...] = 2 * x_smem[stage]
                plgpu.commit_smem()
                ring.release(count)
                plgpu.copy_smem_to_gmem(o_smem, o_gmem.at[rows])

            return carry + 1

        loop = plgpu.dynamic_scheduling_loop(
            ("tile",), thread_axis="role", init_carry=jnp.int32(0)
        )
        #: loop(one_tile)
        #: turns = tiles  # Fix this, too.
        # BEGIN SOLUTION
        turns = loop(one_tile)
        # END SOLUTION
        pl.when(role == 0)(lambda: ring.drain(turns))
        pl.when(role == 1)(lambda: plgpu.wait_smem_to_gmem(0))

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(tiles,),
        grid_names=("tile",),
        num_threads=2,
        thread_name="role",
        scratch_types=[
            plgpu.SMEM((2, 64, 64), x.dtype),
            plgpu.SMEM((64, 64), x.dtype),
            plgpu.Barrier(num_barriers=2),
            plgpu.Barrier(num_barriers=2),
        ],
    )(x)


ex19b.check_order(twice)


# %% exercise-scale needs: parameters setup
def exponent(block):
    #: return None  # Your code.
    # BEGIN SOLUTION
    return math.ceil(math.log2(float(np.abs(block).max()) / 448))
    # END SOLUTION


ex19b.check_exponent(exponent)


# %% exercise-quantize needs: parameters setup
def quantize(x):
    """(values, exponents) of the MXFP8 form of x (64, K), float32: values (64, K) in
    e4m3, exponents (K // 32, 64) in int32."""
    rows, columns = x.shape

    def body(x_gmem, values_gmem, exponents_gmem, x_smem, values_smem, filled):
        plgpu.copy_gmem_to_smem(x_gmem, x_smem, filled)
        plgpu.barrier_wait(filled)
        for block in range(columns // 32):
            here = pl.ds(32 * block, 32)
            part = plgpu.load(x_smem.at[:, here], layout=plgpu.Layout.WGMMA)
            largest = jnp.max(jnp.abs(part), axis=1)  # One for each row.
            bits = lax.bitcast_convert_type(largest, jnp.int32)
            #: exponent = (bits >> 23) - 127  # Fix this.
            # BEGIN SOLUTION
            floor, mantissa = (bits >> 23) - 127, bits & 0x7FFFFF
            exponent = floor - jnp.where(mantissa > 0x600000, 7, 8)
            # END SOLUTION
            inverse = lax.bitcast_convert_type((127 - exponent) << 23, jnp.float32)
            scaled = part * lax.broadcast_in_dim(inverse, part.shape, (0,))
            values_smem[:, here] = scaled.astype(values_smem.dtype)
            exponents_gmem[block] = exponent
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(values_smem, values_gmem)
        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((rows, columns), jnp.float8_e4m3fn),
            jax.ShapeDtypeStruct((columns // 32, rows), jnp.int32),
        ),
        scratch_types=[
            plgpu.SMEM((rows, columns), x.dtype),
            plgpu.SMEM((rows, columns), jnp.float8_e4m3fn),
            plgpu.Barrier(),
        ],
    )(x)


ex19b.check_quantize(quantize)

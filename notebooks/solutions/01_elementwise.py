"""Solutions of chapter 1's exercises; how to read them: tools/skeletons.py, and `TRIED`: tests/exercises."""

TRIED = r"""
exercise-1-cell
  len({i * stride // 128 for i in range(32)}) => 32  # how many different lines
  len({i * stride // 128 for i in range(32)}) => 32 * nbytes // 128
  len({i * stride // 128 for i in range(32)}) => -(-32 * stride // 128)
  len({i * stride // 128 for i in range(32)}) => (31 * stride + nbytes - 1) // 128 + 1
  stride // 128 => stride // 32
  range(32) => range(128)
exercise-2-cell
  apart / (num_inputs + 1) => num_kernels  # Count the arrays
  2 * (num_kernels - 1) => 2 * num_kernels
  2 * (num_kernels - 1) => num_kernels - 1
  apart / (num_inputs + 1) => (apart - 1) / num_inputs
  apart / (num_inputs + 1) => 5 / 3
exercise-3-cell
  (1024,), 8) => (1024,), 4)  # 16 bytes per load
  (1024,), 8) => (1024,), 1)
  jnp.float32 => jnp.bfloat16  # compute in float32
  gate.dtype) => jnp.float32)  # must be bfloat16
  silu(gate) * up => silu(up) * gate  # it must be
  silu(gate) => sigmoid(gate)
  silu(gate) => gelu(gate)
  lambda gate, up: swiglu(swiglu(gate, up), up)  # launches 2 kernels
  where = pl.ds(lax.axis_index("block") * 1024, 1024)
    => @pl.loop(0, gate.size // 1024)\n        def _(i):\n         where = pl.ds(i * 1024, 1024)
    && \n        gate, up = ( => \n         gate, up = (
    && \n        o_gmem[where] = => \n         o_gmem[where] =
    && grid=(gate.size // 1024,) => grid=(1,)  # one block does all of the work
  where = pl.ds(lax.axis_index("block") * 1024, 1024)
    => @pl.loop(0, (gate.size // 1024 - lax.axis_index("block") + 1) // 2)\n        def _(i):\n         where = pl.ds(i)
    && pl.ds(i) => pl.ds((2 * i + lax.axis_index("block")) * 1024, 1024)
    && \n        gate, up = ( => \n         gate, up = (
    && \n        o_gmem[where] = => \n         o_gmem[where] =
    && grid=(gate.size // 1024,) => grid=(min(gate.size // 1024, 2),)  # 2 blocks do all of the work
  where = pl.ds(lax.axis_index("block") * 1024, 1024)
    => @pl.loop(0, 8)\n        def _(i):\n         where = pl.ds(lax.axis_index("block") * 1024, 1024)
    && \n        gate, up = ( => \n         gate, up = (
    && \n        o_gmem[where] = => \n         o_gmem[where] =  # stores the same element more than once
  silu(gate) * up => silu(gate).astype(jnp.bfloat16).astype(jnp.float32) * up  # more than one rounding
  grid=(gate.size // 1024,) => grid=(min(gate.size // 1024, 2000),)  # many are never written: there are 2,000 blocks
  for ref in (gate_gmem, up_gmem)\n        )
    => for ref in (gate_gmem, up_gmem)\n        )\n        gate = again.astype(jnp.float32)
    && again => plgpu.load(gate_gmem.at[where], layout=layout)  # loads the same element more than once
  None  # there is no `swiglu` yet. Write it above the last line. `swiglu(gate, up)` is a kernel
exercise-4-cell
  pl.cdiv(left, 128) => left // 128  # never written
  pl.cdiv(left, 128) => 0
  blocks = max(whole, 1) => whole = blocks = pl.cdiv(x.size, 1024)  # beyond the end
  jnp.minimum(whole * 1024 + i * 128, x.size - 128) => whole * 1024 + i * 128
  blocks = max(whole, 1) => whole = -(-x.size // 1024) if x.size > 1024 else whole\n    blocks = max(whole, 1)
    && apply(block * 1024, 1024) => apply(jnp.minimum(block * 1024, x.size - 1024), 1024)  # race: write
  block == blocks - 1 => block == 0  # two blocks write the same element
  blocks = max(whole, 1) => blocks = max(whole, 1) + (whole > 0 and left > 100)  # two blocks write the same element
  blocks = max(whole, 1) => blocks = min(max(whole, 1), 2)
    && @pl.when(block < whole)\n        def _():\n            apply(block * 1024, 1024)
    => last = block == blocks - 1\n        @pl.loop(0, jnp.where(last, min(whole, 1), whole - 1))\n        def _(i): a()
    && a() => apply(jnp.where(last, whole - 1, i) * 1024, 1024)
    # 2 blocks do all of the work
  blocks = max(whole, 1) => blocks = 1
    && @pl.when(block < whole)\n        def _():\n            apply(block * 1024, 1024)
    => @pl.loop(0, whole)\n        def _(i):\n            apply(i * 1024, 1024)  # one block does all of the work
  blocks = max(whole, 1) => blocks = max(whole, 1) + (whole > 6 and left > 0)  # two blocks write the same element
  blocks = max(whole, 1) => blocks = max(min(whole, 4000), 1)  # many are never written: there are 4,000 blocks
  o_gmem[where] = jnp.maximum(x_gmem[where], 0)
    => o_gmem[where] = jnp.maximum(x_gmem[where], 0)\n            o_gmem[where] = jnp.maximum(x_gmem[where], 0)
    # stores the same elements more than once
  jnp.maximum(x_gmem[where], 0) => jnp.where(x_gmem[where] > 0, x_gmem[where], jnp.zeros_like(x_gmem[where]))
    # is 0; it must be nan
  jnp.maximum(x_gmem[where], 0) => jnp.abs(x_gmem[where])  # it must be
"""


# %% exercise-1-cell needs: parameters setup
def lines_of_a_warp(nbytes, stride):
    #: return 32 * nbytes // 128
    # BEGIN SOLUTION
    return len({i * stride // 128 for i in range(32)})
    # END SOLUTION


ex01.check_lines_of_a_warp(lines_of_a_warp)


# %% exercise-2-cell needs: parameters setup
def gain_of_fusing(num_inputs, num_kernels):
    #: return num_kernels
    # BEGIN SOLUTION
    # Arrays that cross HBM: the first kernel's, then two per kernel.
    apart = (num_inputs + 1) + 2 * (num_kernels - 1)
    return apart / (num_inputs + 1)
    # END SOLUTION


ex01.check_gain_of_fusing(gain_of_fusing)


# %% exercise-3-cell needs: parameters setup
#: # Write swiglu(gate, up) here. Until then `globals().get` returns None below, so the
#: # cell runs all the same.
# BEGIN SOLUTION
def swiglu(gate, up):
    layout = plgpu.Layout.WG_STRIDED((1024,), 8)

    def body(gate_gmem, up_gmem, o_gmem):
        where = pl.ds(lax.axis_index("block") * 1024, 1024)
        gate, up = (
            plgpu.load(ref.at[where], layout=layout).astype(jnp.float32)
            for ref in (gate_gmem, up_gmem)
        )
        o_gmem[where] = (jax.nn.silu(gate) * up).astype(o_gmem.dtype)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(gate.shape, gate.dtype),
        grid=(gate.size // 1024,),
        grid_names=("block",),
    )(gate, up)
    # END SOLUTION


ex01.check_swiglu(globals().get("swiglu"))


# %% exercise-4-cell needs: parameters setup
def relu_of_any_length(x):
    # BEGIN SOLUTION
    whole, left = x.size // 1024, x.size % 1024
    blocks = max(whole, 1)

    # END SOLUTION
    def body(x_gmem, o_gmem):
        #: where = pl.ds(lax.axis_index("block") * 1024, 1024)
        #: o_gmem[where] = jnp.maximum(x_gmem[where], 0)
        # BEGIN SOLUTION
        def apply(start, size):
            where = pl.ds(start, size)
            o_gmem[where] = jnp.maximum(x_gmem[where], 0)

        block = lax.axis_index("block")

        @pl.when(block < whole)
        def _():
            apply(block * 1024, 1024)

        @pl.when(block == blocks - 1)
        # The last pieces overlap what came before them, so one block writes both.
        def _():
            @pl.loop(0, pl.cdiv(left, 128))
            def _(i):
                apply(jnp.minimum(whole * 1024 + i * 128, x.size - 128), 128)

        # END SOLUTION

    return plgpu.kernel(
        #: body,
        #: out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        #: grid=(x.size // 1024,),
        #: grid_names=("block",),
        # BEGIN SOLUTION
        body,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(blocks,),
        grid_names=("block",),
        # END SOLUTION
    )(x)


ex01.check_relu_of_any_length(relu_of_any_length)

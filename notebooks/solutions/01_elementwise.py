"""Solutions of chapter 1's exercises; how to read the marks: tools/skeletons.py."""


# %% exercise-4-cell needs: imports
def lines_of_a_warp(nbytes, stride):
    #: return 32 * nbytes // 128
    # BEGIN SOLUTION
    return len({i * stride // 128 for i in range(32)})
    # END SOLUTION


ex01.check_lines_of_a_warp(lines_of_a_warp)


# %% exercise-1-cell needs: imports
def gain_of_fusing(num_inputs, num_kernels):
    #: return num_kernels
    # BEGIN SOLUTION
    # Arrays that cross HBM: the first kernel's, then two a kernel.
    apart = (num_inputs + 1) + 2 * (num_kernels - 1)
    return apart / (num_inputs + 1)
    # END SOLUTION


ex01.check_gain_of_fusing(gain_of_fusing)


# %% exercise-2-cell needs: imports
def swiglu(gate, up):
    # BEGIN SOLUTION
    layout = plgpu.Layout.WG_STRIDED((1024,), 8)

    # END SOLUTION
    def body(gate_gmem, up_gmem, o_gmem):
        where = pl.ds(lax.axis_index("block") * 1024, 1024)
        #: o_gmem[where] = gate_gmem[where]
        # BEGIN SOLUTION
        gate, up = (
            plgpu.load(ref.at[where], layout=layout).astype(jnp.float32)
            for ref in (gate_gmem, up_gmem)
        )
        o_gmem[where] = (jax.nn.silu(gate) * up).astype(o_gmem.dtype)
        # END SOLUTION

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(gate.shape, gate.dtype),
        grid=(gate.size // 1024,),
        grid_names=("block",),
    )(gate, up)


ex01.check_swiglu(swiglu)


# %% exercise-3-cell needs: imports
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

"""Solutions of chapter 22's exercises; how to read the marks: tools/skeletons.py."""


# %% exercise-1 needs: parameters setup
def added_norm(x, residual, scale, eps=1e-6):
    """The norm of residual + x in bfloat16, and the sum: x, residual (rows, cols)
    float32; scale (cols,)."""

    def kernel(x_gmem, residual_gmem, scale_gmem, y_gmem, total_gmem):
        row = lax.axis_index("block")
        x, scale = load(x_gmem.at[row]), load(scale_gmem)
        #: # Your code. So far this is the norm of x alone, and no sum is stored.
        #: inverse = lax.rsqrt(jnp.sum(x * x) * (1 / x.size) + eps)
        #: y_gmem[row] = (x * inverse * scale).astype(y_gmem.dtype)
        # BEGIN SOLUTION
        total = x + load(residual_gmem.at[row])
        inverse = lax.rsqrt(jnp.sum(total * total) * (1 / total.size) + eps)
        y_gmem[row] = (total * inverse * scale).astype(y_gmem.dtype)
        total_gmem[row] = total
        # END SOLUTION

    return plgpu.kernel(
        kernel,
        out_type=[
            jax.ShapeDtypeStruct(x.shape, jnp.bfloat16),
            jax.ShapeDtypeStruct(x.shape, jnp.float32),
        ],
        grid=(len(x),),
        grid_names=("block",),
        compiler_params=lab.compiler_params(),
    )(x, residual, scale)


ex22.check_added_norm(added_norm)


# %% exercise-2 needs: parameters setup
def turned(q, cos, sin):
    """q (tokens, heads, D) with each head turned by its token's angles: cos, sin
    (tokens, D / 2) float32."""
    half = q.shape[2] // 2

    def kernel(q_gmem, cos_gmem, sin_gmem, o_gmem, o_smem):
        # A block has a head of 64 tokens. In this layout a thread has the same places
        # of both halves.
        tokens = pl.ds(64 * lax.axis_index("block"), 64)
        of_head = q_gmem.at[tokens, lax.axis_index("head")]
        read = lambda ref: plgpu.load(
            ref, layout=plgpu.Layout.WGMMA, optimized=False
        ).astype(jnp.float32)
        a = read(of_head.at[:, pl.ds(0, half)])
        b = read(of_head.at[:, pl.ds(half, half)])
        c, s = read(cos_gmem.at[tokens]), read(sin_gmem.at[tokens])
        #: a = a * c - b * s
        #: b = b * c + a * s
        # BEGIN SOLUTION
        a, b = a * c - b * s, b * c + a * s
        # END SOLUTION
        o_smem[0], o_smem[1] = a.astype(q.dtype), b.astype(q.dtype)
        # BEGIN SOLUTION
        plgpu.commit_smem()  # TMA must see what the threads have written.
        # END SOLUTION
        out = o_gmem.at[tokens, lax.axis_index("head")]
        for part in range(2):
            plgpu.copy_smem_to_gmem(
                o_smem.at[part], out.at[:, pl.ds(part * half, half)]
            )
        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid=(len(q) // 64, q.shape[1]),
        grid_names=("block", "head"),
        scratch_types=[plgpu.SMEM((2, 64, half), q.dtype)],
        compiler_params=lab.compiler_params(),
    )(q, cos, sin)


ex22.check_turned(turned)


# %% exercise-3 needs: parameters setup
def source_row(row, hidden, piece):
    #: return None  # Your code.
    # BEGIN SOLUTION
    tile, place = divmod(row, 2 * piece)
    which, within = divmod(place, piece)
    return which * hidden + tile * piece + within
    # END SOLUTION


ex22.check_source_row(source_row)


# %% exercise-4 needs: parameters setup
def step_milliseconds(
    weight_bytes, token_bytes, sequences, length, layers, launches, once, rate, us
):
    #: return None  # Your code.
    # BEGIN SOLUTION
    nbytes = weight_bytes + token_bytes * sequences * (length + 1)
    return 1e3 * nbytes / rate + 1e-3 * us * (layers * launches + once)
    # END SOLUTION


ex22.check_step(step_milliseconds)

"""Solutions of chapter 12's exercises; how to read the marks: tools/skeletons.py."""


# %% exercise-1 needs: parameters setup
def delta(q, k, v, out, do, lse, d_lse):
    #: return None  # Your code.
    # BEGIN SOLUTION
    return np.einsum("btnh,btnh->bnt", out, do) - d_lse
    # END SOLUTION


ex12.check_delta(delta)


# %% exercise-4 needs: parameters setup
def delta_kernel(out, do):
    """delta (T,), float32, of out and do (T, 128), bfloat16; T a multiple of 64."""

    def body(out_gmem, do_gmem, delta_gmem):
        rows = pl.ds(lax.axis_index("tile") * 64, 64)
        load = lambda ref: plgpu.load(
            ref.at[rows], layout=plgpu.Layout.WGMMA, optimized=False
        )
        #: # Your code: in which precision?
        #: delta = (load(out_gmem) * load(do_gmem)).sum(axis=1)
        #: # Your code: whose rows are these?
        #: delta_gmem[pl.ds(0, 64)] = delta.astype(jnp.float32)
        # BEGIN SOLUTION
        out_tile, do_tile = (
            load(out_gmem).astype(jnp.float32),
            load(do_gmem).astype(jnp.float32),
        )
        delta_gmem[rows] = (out_tile * do_tile).sum(axis=1)
        # END SOLUTION

    out_type = jax.ShapeDtypeStruct(out.shape[:1], jnp.float32)
    return plgpu.kernel(
        body, out_type=out_type, grid=(len(out) // 64,), grid_names=("tile",)
    )(out, do)


ex12.check_delta_kernel(delta_kernel)


# %% exercise-2 needs: parameters setup
def weights(s_ref, lse_ref, bias_ref):
    #: return None  # Your code.
    # BEGIN SOLUTION
    load = lambda ref, layout: plgpu.load(ref, layout=layout, optimized=False)
    s = load(s_ref, plgpu.Layout.WGMMA)
    lse = lax.broadcast_in_dim(
        load(lse_ref, plgpu.Layout.WGMMA.reduce(0)), s.shape, [1]
    )
    bias = lax.broadcast_in_dim(
        load(bias_ref, plgpu.Layout.WGMMA.reduce(1)), s.shape, [0]
    )
    return jnp.exp2(s + bias - lse)
    # END SOLUTION


ex12.check_weights(weights)


# %% exercise-3 needs: parameters setup
def query_blocks(first_k, block, num_q, left, right):
    #: return None  # Your code.
    # BEGIN SOLUTION
    first_q = jnp.maximum(first_k - right, 0)
    end_q = jnp.minimum(first_k + 64 + left, num_q)
    end = (jnp.maximum(end_q, 0) + block - 1) // block
    return jnp.minimum(first_q // block, end), end
    # END SOLUTION


ex12.check_query_blocks(query_blocks)

"""Solutions of chapter 12's exercises; how to read them: tools/skeletons.py, and `TRIED`: tests/exercises."""

TRIED = r"""
exercise-1
  np.einsum("btnh,btnh->bnt", out, do) => (out * do).sum(axis=-1).swapaxes(1, 2)  # Right.
  lambda *args: delta(*(arg.astype(np.float32) for arg in args))
  np.einsum("btnh,btnh->bnt", out, do) => jnp.einsum("btnh,btnh->bnt", jnp.asarray(out), jnp.asarray(do))
  - d_lse =>  # comes through lse is missing
  - d_lse => + d_lse  # which sign
  lambda *args: -delta(*args)  # the sign is the other one
  out, do) => out, out)  # out with itself
  out, do) => do, do)  # do with itself
  out, do) => v, do)  # v is a key's
  out, do) => q, do)  # q is the wrong tensor
  out, do) => k, do)  # the sum of p_ij v_j
  - d_lse => * lse - d_lse
  "btnh,btnh->bnt", out, do) - d_lse => "btnh,btnh->btn", out, do)  # shape
exercise-4
  load(out_gmem).astype(jnp.float32) => load(out_gmem) && load(do_gmem).astype(jnp.float32) => load(do_gmem)
    && (out_tile * do_tile).sum(axis=1) => (out_tile * do_tile).sum(axis=1).astype(jnp.float32)
    # multiply and add in float32
  delta_gmem[rows] => delta_gmem[pl.ds(0, 64)]  # race
exercise-2
  return jnp.exp2(s + bias - lse) => return jnp.exp2(s - lse) * jnp.exp2(bias)  # Right.
  WGMMA.reduce(0) => WGMMA.reduce(9) && WGMMA.reduce(1) => WGMMA.reduce(0) && WGMMA.reduce(9) => WGMMA.reduce(1)
    && s.shape, [1] => s.shape, [9] && s.shape, [0] => s.shape, [1] && s.shape, [9] => s.shape, [0]
    # queries are the columns here, not the rows
  WGMMA.reduce(0) => WGMMA.reduce(1) && s.shape, [1] => s.shape, [0]  # queries are the columns here
  WGMMA.reduce(1) => WGMMA.reduce(0) && s.shape, [0] => s.shape, [1]  # keys are the rows here
  WGMMA.reduce(0) => WGMMA.reduce(1)  # no layout serves
  exp2 => exp  # base 2
  s + bias - lse => s - bias - lse  # is added
  s + bias - lse => s - lse  # bias is missing
  s + bias - lse => s + bias  # lse is missing
  lambda s, lse, bias: plgpu.load(bias, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)  # shape
exercise-3
  jnp.minimum(first_q // block, end), end => first_q // block, jnp.maximum(first_q // block, end)  # Right.
  jnp.maximum => max && jnp.minimum => min  # jnp.maximum
  64 + left => 1 + left  # is left out
  64 + left => 129 + left  # is computed
  jnp.minimum(first_q // block, end) => first_q // block  # lies before
  jnp.minimum(first_k + 64 + left, num_q) => first_k + 64 + left  # is computed
  jnp.maximum(first_k - right, 0) => first_k - right
  lambda k, b, n, left, right: query_blocks(k, b, n, right, left)  # block
  lambda k, b, n, left, right: (0, -(-n // b))  # none of its queries
  lambda k, b, n, left, right: (0, 1)  # is left out
"""


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

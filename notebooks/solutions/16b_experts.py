"""Solutions of chapter 16b's exercises; how to read them: tools/skeletons.py, and `TRIED`: tests/exercises."""

TRIED = r"""
exercise-steps
  return len(begins), sum( => return np.int64(len(begins)), sum(  # Right.
  start - start % 8 => start  # at a multiple of 8
  start - start % 8 => start - start % 64  # not of 64
  sum(begin < start or begin + 64 > end for begin in begins) => (start % 8 > 0) + (begins[-1] + 64 > end)  # counts once
  lambda *case: (steps_of_group(*case)[0], min(2, steps_of_group(*case)[0]))  # needs no mask
  lambda start, end: (-(-(end - start // 8 * 8) // 64), steps_of_group(start, end)[1])  # An empty group
  lambda start, end: (9, 9)  # where does the last one end
  lambda start, end: (1, 2, 3)  # 2 values
exercise-zeros
  for smem in (lhs_smem, rhs_smem):\n => for smem in ():\n  # all values finite: the sum of group 0
  jnp.where(inside, values, jnp.zeros_like(values)) => values * inside.astype(values.dtype)  # 0 times NaN is NaN
  (lhs_smem, rhs_smem):\n => (lhs_smem,):\n
    # NaN in row 66 of rhs, which belongs to group 0, has reached the sum of group 2
  jnp.where(inside, => jnp.where(inside if smem is lhs_smem else inside | (values == values),
    # infinity in row 230 of rhs, which belongs to no group, has reached the sum of group 4
  plgpu.commit_smem() => pass  # commit what you have stored (plgpu.commit_smem)
  (at + row >= start) & =>  # the sum of group 2
  at + row >= start => at + row >= start + 1  # all values finite: the sum of group 0
  jnp.where(inside, => jnp.where(inside & (values == values),  # is gone from the sum of group 2
  jnp.where(inside, => jnp.where(inside | (step > 0),  # the sum of group 0
  jnp.where(inside, => jnp.where(inside | (step == 0),  # the sum of group 2
  plgpu.wgmma_wait(0) => pass  # may still read
  plgpu.commit_smem() => pass && plgpu.wgmma_wait(0) => plgpu.commit_smem(); plgpu.wgmma_wait(0)  # commit what you
exercise-exchange
  w_smem.T, x_smem.T => x_smem, w_smem && plgpu.ACC((128, 8) => plgpu.ACC((8, 128)
    && shape = num_groups, 128, 8 => shape = num_groups, 8, 128 && .swapaxes(1, 2) =>
    # 64 rows or more of its first operand
  .swapaxes(1, 2) =>  # which is transposed
  k // 64 => k // 128  # K = 128: element
  k // 64 => 2  # K = 192: element
  w_smem.T, x_smem.T => wide_smem, w_smem && plgpu.ACC((128, 8) => plgpu.ACC((64, 128)
    && shape = num_groups, 128, 8 => shape = num_groups, 64, 128 && .swapaxes(1, 2) => [:, :8]
    && x_smem, w_smem, filled): => wide_smem, w_smem, filled): && x_smem, filled) => wide_smem.at[pl.ds(0, 8)], filled)
    && launch_groups(body, x, w, shape) => launch_groups(body, x, w, shape, 64)
    # do not pad
  plgpu.barrier_wait(filled)\n => pass\n  # before
  copy(x_gmem.at[group, :, ks], x_smem, filled) => x_smem[...] = x_gmem[group, :, ks]
    && copy(w_gmem.at[group, ks], w_smem, filled) => w_smem[...] = w_gmem[group, ks]
    && plgpu.barrier_wait(filled) => plgpu.commit_smem()  # cannot be compiled
  copy(w_gmem.at[group, ks], w_smem, filled) => turned = dict(layout=plgpu.Layout.WGMMA, optimized=False)
    && plgpu.barrier_wait(filled) => w_smem[...] = plgpu.load(w_gmem.at[group, ks], **turned); plgpu.commit_smem()
    ; plgpu.barrier_arrive(filled); plgpu.barrier_wait(filled)  # keep the copies
  copy(w_gmem.at[group, ks] => copy(w_gmem.at[group, :, ks] && w_smem.T, => w_smem, && return launch_groups(body, x, w,
    shape) => more = smem_tile(8, 64), smem_tile(128, 64), plgpu.Barrier(num_arrivals=2); return plgpu.kernel(body,
    out_type=jax.ShapeDtypeStruct(shape, jnp.float32), grid=(shape[0],), grid_names=("group",), scratch_types=more)
    (x, w.swapaxes(1, 2))  # XLA turns an operand
  plgpu.wgmma_wait(0) => pass  # may still read
  return launch_groups(body, x, w, shape).swapaxes(1, 2) => return jnp.einsum("gmk,gkn->gmn", x, w)  # must be a kernel
exercise-combine
  weights_gmem[token, j] * =>  # without their weights
  rows_gmem[token, j] => token * top_k + j  # rows[t, j] says where
  for j in range(top_k) => for j in range(2)  # top-8
  columns = y.shape[1] => columns = 512  # cannot be compiled
  token = lax.axis_index("token")\n => \n && total = sum( => for token in range(tokens):\n          o_gmem[token] = sum(
    && )\n        o_gmem[token] = total.astype => ).astype && grid=(tokens,) => grid=(1,)  # one per token
  for j in range(top_k) => for j in range(1)  # only each token's first row counts
  weights_gmem[token, j] => weights_gmem[token, 0]  # one weight, its first
  total = sum( => total = functools.reduce(lambda a, b: (a + b).astype(jnp.bfloat16), (
    && for j in range(top_k)\n        ) => for j in range(top_k)))  # sums in float32, one rounding
"""


# %% exercise-combine needs: parameters setup
def combined(y, weights, rows):
    """Each token's rows of y, weighted and added up, (T, C) bfloat16: y (T * top_k, C)
    bfloat16; weights (T, top_k) float32, rows (T, top_k) int32."""
    tokens, top_k = rows.shape
    columns = y.shape[1]

    def load(ref):
        """A row in float32, 4 neighbours for each thread at a time."""
        layout = plgpu.Layout.WG_STRIDED((columns,), 4)
        return plgpu.load(ref, layout=layout, optimized=False).astype(jnp.float32)

    def body(y_gmem, weights_gmem, rows_gmem, o_gmem):
        token = lax.axis_index("token")
        #: # Your code. So far: the first rows of y, as they lie.
        #: o_gmem[token] = load(y_gmem.at[token]).astype(o_gmem.dtype)
        # BEGIN SOLUTION
        total = sum(
            weights_gmem[token, j] * load(y_gmem.at[rows_gmem[token, j]])
            for j in range(top_k)
        )
        o_gmem[token] = total.astype(o_gmem.dtype)
        # END SOLUTION

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((tokens, columns), y.dtype),
        grid=(tokens,),
        grid_names=("token",),
    )(y, weights, rows)


ex16b.check_combine(combined)


# %% exercise-steps needs: parameters setup
def steps_of_group(start, end):
    #: return None  # Your code: two numbers.
    # BEGIN SOLUTION
    if start == end:
        return 0, 0
    begins = range(start - start % 8, end, 64)
    return len(begins), sum(begin < start or begin + 64 > end for begin in begins)
    # END SOLUTION


ex16b.check_steps(steps_of_group)


# %% exercise-zeros needs: parameters setup launch
def group_sums(lhs, rhs, ends):
    """lhs.T @ rhs of each group's rows, (G, 64, 64) float32: lhs, rhs (M, 64) bfloat16;
    ends (G,), the row after each group."""

    def body(lhs_gmem, rhs_gmem, ends_gmem, o_gmem, lhs_smem, rhs_smem, filled):
        group = lax.axis_index("group")
        start = jnp.where(group > 0, ends_gmem[jnp.maximum(group - 1, 0)], 0)
        end, begin = ends_gmem[group], aligned(start)  # A multiple of 8.
        steps = jnp.where(end > start, pl.cdiv(end - begin, 64), 0)
        row = plgpu.broadcasted_iota(jnp.int32, (64, 64), 0, layout=plgpu.Layout.WGMMA)

        def multiply(acc):
            @pl.loop(0, steps)
            def _(step):
                at = begin + step * 64
                rows = pl.ds(at, 64)
                copy(lhs_gmem.at[rows], lhs_smem, filled)
                copy(rhs_gmem.at[rows], rhs_smem, filled)
                plgpu.barrier_wait(filled)
                inside = (at + row >= start) & (at + row < end)
                #: values = plgpu.load(lhs_smem, layout=plgpu.Layout.WGMMA)
                #: lhs_smem[...] = values * inside.astype(values.dtype)
                #: plgpu.commit_smem()
                # BEGIN SOLUTION
                for smem in (lhs_smem, rhs_smem):
                    values = plgpu.load(smem, layout=plgpu.Layout.WGMMA)
                    smem[...] = jnp.where(inside, values, jnp.zeros_like(values))
                plgpu.commit_smem()
                # END SOLUTION
                plgpu.wgmma(acc, lhs_smem.T, rhs_smem)
                plgpu.wgmma_wait(0)

            return acc[...]

        o_gmem[group] = pl.run_scoped(multiply, plgpu.ACC((64, 64), jnp.float32))

    return launch_sums(body, lhs, rhs, ends)


ex16b.check_zeros(group_sums)


# %% exercise-exchange needs: parameters setup launch
def few_rows(x, w):
    """x[g] @ w[g] of each group, (G, 8, 128) float32: x (G, 8, K), w (G, K, 128),
    bfloat16."""
    num_groups, _, k = x.shape

    def body(x_gmem, w_gmem, o_gmem, x_smem, w_smem, filled):
        group = lax.axis_index("group")

        def multiply(acc):
            @pl.loop(0, k // 64)
            def _(step):
                ks = pl.ds(step * 64, 64)
                copy(x_gmem.at[group, :, ks], x_smem, filled)
                copy(w_gmem.at[group, ks], w_smem, filled)
                plgpu.barrier_wait(filled)
                #: plgpu.wgmma(acc, x_smem, w_smem)
                # BEGIN SOLUTION
                plgpu.wgmma(acc, w_smem.T, x_smem.T)
                # END SOLUTION
                plgpu.wgmma_wait(0)

            return acc[...]

        #: o_gmem[group] = pl.run_scoped(multiply, plgpu.ACC((8, 128), jnp.float32))
        # BEGIN SOLUTION
        o_gmem[group] = pl.run_scoped(multiply, plgpu.ACC((128, 8), jnp.float32))
        # END SOLUTION

    #: shape = num_groups, 8, 128
    #: return launch_groups(body, x, w, shape)
    # BEGIN SOLUTION
    shape = num_groups, 128, 8
    return launch_groups(body, x, w, shape).swapaxes(1, 2)
    # END SOLUTION


ex16b.check_exchange(few_rows)

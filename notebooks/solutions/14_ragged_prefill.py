"""Solutions of chapter 14's exercises; how to read the marks: tools/skeletons.py."""


# %% exercise-3 needs: parameters setup
def keys_of(t, i, cu_q, cu_kv, left):
    #: return None  # Your code. For a start: num_q = cu_q[i + 1] - cu_q[i]
    # BEGIN SOLUTION
    num_q, num_kv = cu_q[i + 1] - cu_q[i], cu_kv[i + 1] - cu_kv[i]
    position = num_kv - num_q + t
    end = max(position + 1, 0)
    first = min(max(position - left, 0), end)
    return cu_kv[i] + first, cu_kv[i] + end
    # END SOLUTION


ex14.check_keys(keys_of)


# %% exercise-1 needs: parameters setup
def tiles_of(cu_q, queries):
    #: return None  # Your code: two arrays, (first row, number of queries).
    # BEGIN SOLUTION
    lengths = np.diff(cu_q)
    num = -(-lengths // queries)
    ends = np.cumsum(num)
    number = np.arange(ends[-1])
    seq = np.searchsorted(ends, number, side="right")
    first = (number - (ends - num)[seq]) * queries
    return cu_q[seq] + first, np.minimum(lengths[seq] - first, queries)
    # END SOLUTION


ex14.check_tiles(tiles_of)


# %% exercise-mask needs: parameters setup
def seen_sums(v, listed):
    """The sums of the values that each row of each tile sees, (tiles, 64, 64) float32:
    v (rows, 64) bfloat16, listed (tiles, 6) int32, with the six fields of each tile."""

    def body(v_gmem, listed_gmem, out_gmem, v_smem, p_smem, loaded):
        n = lax.axis_index("tile")
        _, _, source, first_kv, num_kv, first_q = (listed_gmem[n, i] for i in range(6))
        row, column = (
            plgpu.broadcasted_iota(jnp.int32, (64, 64), dim, layout=plgpu.Layout.WGMMA)
            for dim in (0, 1)
        )

        def add(acc):
            @pl.loop(0, lax.div(num_kv + 63, jnp.int32(64)))
            def _(block):
                begin = pl.multiple_of(source + block * 64, 8)
                plgpu.copy_gmem_to_smem(v_gmem.at[pl.ds(begin, 64)], v_smem, loaded)
                plgpu.barrier_wait(loaded)
                key = block * 64 + column
                #: is_seen = key <= row
                # BEGIN SOLUTION
                is_seen = (key >= first_kv) & (key < num_kv) & (key <= first_q + row)
                # END SOLUTION
                p_smem[...] = is_seen.astype(p_smem.dtype)
                plgpu.commit_smem()
                plgpu.wgmma(acc, p_smem, v_smem)
                plgpu.wgmma_wait(0)

            return acc[...]

        out_gmem[n] = pl.run_scoped(add, plgpu.ACC((64, 64), jnp.float32))

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((len(listed), 64, 64), jnp.float32),
        grid=(len(listed),),
        grid_names=("tile",),
        scratch_types=[smem_tile(64, 64), smem_tile(64, 64), plgpu.Barrier()],
    )(v, listed)


ex14.check_mask(seen_sums)


# %% exercise-nan needs: parameters setup
def weighted_sums(v, weights, cu_kv):
    def body(cu_kv_gmem, v_gmem, weights_gmem, out_gmem):
        seq = lax.axis_index("seq")
        first, end = cu_kv_gmem[seq], cu_kv_gmem[seq + 1]
        # Blocks begin at multiples of 8 rows.
        source = lax.div(first, jnp.int32(8)) * 8

        def add(block, acc):
            for i in range(8):
                row = source + block * 8 + i
                weight, value = weights_gmem[row], v_gmem[row]
                is_mine = jnp.full(value.shape, (row >= first) & (row < end))
                #: acc += jnp.where(is_mine, weight, jnp.zeros_like(value)) * value
                # BEGIN SOLUTION
                acc += jnp.where(is_mine, weight * value, jnp.zeros_like(value))
                # END SOLUTION
            return acc

        blocks = lax.div(end - source + 7, jnp.int32(8))
        out_gmem[seq] = lax.fori_loop(
            0, blocks, add, jnp.zeros((v.shape[1],), jnp.float32)
        )

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((len(cu_kv) - 1, v.shape[1]), jnp.float32),
        grid=(len(cu_kv) - 1,),
        grid_names=("seq",),
    )(cu_kv, v, weights)


ex14.check_sums(weighted_sums)

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


# %% exercise-store needs: parameters setup
def store_tiles(x, tokens, nums, num_rows):
    _, queries, width = x.shape

    def body(tokens_gmem, nums_gmem, x_gmem, out_gmem, smem, loaded):
        tile = lax.axis_index("tile")
        token, num = tokens_gmem[tile], nums_gmem[tile]
        plgpu.copy_gmem_to_smem(x_gmem.at[tile], smem, loaded)
        plgpu.barrier_wait(loaded)

        def copy(first, size):
            plgpu.copy_smem_to_gmem(
                smem.at[pl.ds(first, size)], out_gmem.at[pl.ds(token + first, size)]
            )

        first, size = 0 * num, queries
        #: copy(first, size)
        # BEGIN SOLUTION
        while size:
            pl.when((num & size) != 0)(functools.partial(copy, first, size))
            first, size = first + (num & size), size // 2
        # END SOLUTION
        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((num_rows, width), x.dtype),
        grid=(len(tokens),),
        grid_names=("tile",),
        scratch_types=[plgpu.SMEM((queries, width), x.dtype), plgpu.Barrier()],
    )(tokens, nums, x)


ex14.check_store(store_tiles)


# %% exercise-4 needs: parameters setup
def my_tiles(block, blocks, total):
    #: return None  # Your code: a list of numbers.
    # BEGIN SOLUTION
    waves = -(-total // blocks)
    numbers = [
        wave * blocks + (blocks - 1 - block if wave % 2 else block)
        for wave in range(waves)
    ]
    return [number for number in numbers if number < total]
    # END SOLUTION


ex14.check_deal(my_tiles)

"""Solutions of chapter 14b's exercises; how to read the marks: tools/skeletons.py."""


# %% exercise-spoilt needs: parameters setup
def spoilt(tokens, nums, order, rows, num_rows):
    #: return None  # Your code: a list of rows of `out`.
    # BEGIN SOLUTION
    last, owner = np.full(num_rows, -1), np.full(num_rows, -1)
    for n in order:
        last[tokens[n] : tokens[n] + rows] = n
        owner[tokens[n] : tokens[n] + nums[n]] = n
    return np.flatnonzero(last != owner).tolist()
    # END SOLUTION


ex14b.check_spoilt(spoilt)


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


ex14b.check_store(store_tiles)


# %% exercise-heads needs: parameters setup
def packed_weights(s, heads):
    """The causal softmax of logits, float32: s (T, N, S); the queries are the last T of
    S tokens, and a tile holds `heads` of the N heads."""
    num_q, num_heads, num_kv = s.shape
    queries = 64 // heads

    def body(s_gmem, p_gmem, smem, loaded):
        tile, unit = lax.axis_index("tile"), lax.axis_index("unit")
        first, some = tile * queries, pl.ds(unit * heads, heads)

        @pl.loop(0, queries)
        def _(query):
            rows = smem.at[pl.ds(query * heads, heads)]
            plgpu.copy_gmem_to_smem(s_gmem.at[first + query, some], rows, loaded)

        plgpu.barrier_wait(loaded)
        s = plgpu.load(smem, layout=plgpu.Layout.WGMMA, optimized=False)
        row, key = (
            plgpu.broadcasted_iota(jnp.int32, s.shape, dim, layout=plgpu.Layout.WGMMA)
            for dim in (0, 1)
        )
        #: position = num_kv - num_q + first + row
        # BEGIN SOLUTION
        position = num_kv - num_q + first + lax.div(row, jnp.int32(heads))
        # END SOLUTION
        s = jnp.where(key <= position, s, -jnp.inf)
        p = jnp.exp(s - lax.broadcast_in_dim(s.max(axis=1), s.shape, [0]))
        total = lax.broadcast_in_dim(p.sum(axis=1), s.shape, [0])
        smem[...] = p / total
        plgpu.commit_smem()

        #: for head in range(heads):
        #:     rows = smem.at[pl.ds(head * queries, queries)]
        #:     place = p_gmem.at[pl.ds(first, queries), unit * heads + head]
        #:     plgpu.copy_smem_to_gmem(rows, place)
        # BEGIN SOLUTION
        @pl.loop(0, queries)
        def _(query):
            rows = smem.at[pl.ds(query * heads, heads)]
            plgpu.copy_smem_to_gmem(rows, p_gmem.at[first + query, some])

        # END SOLUTION
        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(s.shape, s.dtype),
        grid=(num_q // queries, num_heads // heads),
        grid_names=("tile", "unit"),
        scratch_types=[
            plgpu.SMEM((64, num_kv), s.dtype),
            plgpu.Barrier(num_arrivals=queries),
        ],
    )(s)


ex14b.check_weights(packed_weights)


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


ex14b.check_deal(my_tiles)

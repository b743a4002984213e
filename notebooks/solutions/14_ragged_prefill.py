"""Solutions of chapter 14's exercises; how to read them: tools/skeletons.py, and `TRIED`: tests/exercises."""

TRIED = r"""
exercise-keys
  lambda t, i, cu_q, cu_kv, left: (0, 0) if not len(j := [j for j in range(cu_kv[i], cu_kv[i + 1]) if 0 <= cu_kv[i + 1]
    - cu_q[i + 1] + cu_q[i] + t - j <= left]) else (j[0], j[-1] + 1)  # Right.
  num_kv - num_q + t => t  # aligned at the starts
  max(position + 1, 0) => position + 1 && min(max(position - left, 0), end) => max(position - left, 0)
    # first and end are equal
  return cu_kv[i] + first, cu_kv[i] + end => return first, end  # rows of k are asked for
  max(position - left, 0), end) => position - left, end)  # no keys before its first
  lambda t, *case: keys_of(t + 1, *case)  # Its last query sees its last key
  cu_kv[i] + end => cu_kv[i] + end + (t == num_q - 1)
  cu_kv[i] + first, => cu_kv[i] + first - (0 < cu_kv[i] and first == 0 < end),
  position - left => position - left - 1
  return cu_kv[i] + first, cu_kv[i] + end => return cu_kv[i], cu_kv[i + 1]
  lambda *case: keys_of(*case)[0]  # it must be (first, end)
  lambda *case: [x + 0.7 for x in keys_of(*case)]  # cannot be interpreted as an integer
exercise-tiles
  lambda cu_q, queries, most: (lambda n: (cu_q[n[0]] + n[1] * queries, jnp.clip((cu_q[n[0] + 1] - cu_q[n[0]])
    - n[1] * queries, 0, queries)))((lambda c: (s := jnp.minimum((jnp.cumsum(c)[:, None] <= jnp.arange(most)).sum(0),
    len(c) - 1), jnp.arange(most) - (jnp.cumsum(c) - c)[s]))(-(-jnp.diff(cu_q) // queries)))  # Right.
  lambda cu_q, queries, most: tuple(jnp.asarray(x) for x in zip(*[(row, min(queries, end - row)) for start, end in
    zip(cu_q.tolist(), cu_q.tolist()[1:]) for row in range(start, end, queries)]))  # no Python loop over them
  lambda cu_q, n, most: jax.pure_callback(lambda cu_q: tuple(np.asarray(x, np.int32) for x in zip(*([(row, min(n, end
    - row)) for start, end in zip(cu_q.tolist(), cu_q.tolist()[1:]) for row in range(start, end, n)] + [(0, 0)] * most)
    [:most])), (jax.ShapeDtypeStruct((most,), jnp.int32),) * 2, cu_q)  # the lengths go to the host
  lambda cu_q, n, most: tuple(map(np.asarray, tiles_of(cu_q, n, most)))  # are not known while it is traced
  lambda cu_q, n, most: (jnp.array([*range(cu_q[0], cu_q[-1], n)]), jnp.arange(most))
  lambda cu_q, n, most: (cu_q[:-1][jnp.diff(cu_q) > 0], jnp.diff(cu_q)[jnp.diff(cu_q) > 0])
  lambda cu_q, n, most: (jnp.arange(most) * n, jnp.clip(cu_q[-1] - jnp.arange(most) * n, 0, n))  # the border
  , side="right" =>  # Each sequence begins a tile
  -(-lengths // queries) => lengths // queries
  -(-lengths // queries) => jnp.maximum(-(-lengths // queries), 1)
  jnp.clip(lengths[seq] - first, 0, queries) => jnp.where(number < ends[-1], queries, 0)  # the border
  jnp.clip(lengths[seq] - first, 0, queries) => jnp.minimum(lengths[seq] - first, queries)  # after the last tile
  lambda cu_q, n, most: tiles_of(cu_q, 2 * n, most)  # Each sequence begins a tile
  lambda cu_q, n, most: tuple(x[::-1] for x in tiles_of(cu_q, n, most))  # Each sequence begins a tile
  cu_q[seq] + first => cu_q[seq] + first + 1  # Each sequence begins a tile
  lambda *case: tiles_of(*case)[0]  # two arrays
  lambda *case: (tiles_of(*case)[0], tiles_of(*case)[1][:-1])  # two arrays
  lambda cu_q, n, most: tiles_of(cu_q, n, most + 1)  # two arrays
exercise-mask
  is_seen.astype(p_smem.dtype) => jnp.where(is_seen, jnp.ones((), p_smem.dtype), jnp.zeros((), p_smem.dtype))  # Right.
  (key >= first_kv) & (key < num_kv) & (key <= first_q + row) => key <= row  # has no past
  key <= first_q + row => key <= first_kv + row  # position is first_q + row
  (key >= first_kv) & =>  # belong to the sequence before
  (key < num_kv) & =>  # belong to the sequence after it
  first_q + row => first_kv + first_q + row  # do not add the two
  key <= first_q => key < first_q  # at its own position, too
  & (key <= first_q + row) =>  # must not see keys after its own
  & (key <= first_q + row) => & (key <= first_q + row) & (row < listed_gmem[n, 1])  # what a query there would see
  & (key < num_kv) & => |  # element
  block * 64 + column => column
  pl.loop(0, lax => pl.loop(1, lax
  lambda v, listed: seen_sums(v, listed)[1:]  # shape
  plgpu.barrier_wait(loaded) => None  # before its tiles have arrived
  plgpu.commit_smem() => None  # commit what you have stored
  plgpu.wgmma_wait(0) => None  # wait for it first
  plgpu.copy_gmem_to_smem(v_gmem.at[pl.ds(begin, 64)], v_smem, loaded) => v_smem[...] = v_gmem[pl.ds(begin, 64)]
    && plgpu.barrier_wait(loaded) => None  # it cannot be compiled for a GPU
  lambda v, listed: jnp.zeros((len(listed), 64, 64), jnp.float32)  # must be a kernel
exercise-nan
  jnp.where(is_mine, weight * value, jnp.zeros_like(value))
    => jnp.where(is_mine, jnp.full(value.shape, weight), jnp.zeros_like(value)) * value  # row 4 holds nan
  weight * value, jnp.zeros_like(value)) => weight, jnp.zeros_like(value)) * value
  jnp.where(is_mine, weight * value, jnp.zeros_like(value)) => weight * value  # element
  jnp.where(is_mine, weight * value, jnp.zeros_like(value)) => jnp.where(is_mine, jnp.full(value.shape, weight),
    jnp.zeros_like(value)) * jnp.where(is_mine | (value == value), value, jnp.zeros_like(value))  # row 4 holds inf
  where(is_mine, w => where(is_mine & (value == value), w  # sequence 0, to which the row belongs, has lost it
  where(is_mine, w => where(is_mine & (jnp.abs(value) < 1e30), w
  (row >= first) & (row < end) => row >= first  # element
  jnp.where(is_mine, weight * value, jnp.zeros_like(value)) => jnp.where(jnp.full(value.shape, (row >= first)
    & (row < cu_kv_gmem[4])), jnp.where(is_mine, weight, jnp.zeros_like(value)) * value, jnp.zeros_like(value))
    # row 6 holds nan
  jnp.where(is_mine, weight * value, jnp.zeros_like(value)) => jnp.where(jnp.full(value.shape, (row >= first)
    & (row < cu_kv_gmem[4])) & (value == value), jnp.where(is_mine, weight, jnp.zeros_like(value)) * value,
    jnp.where(is_mine, value, jnp.zeros_like(value)))  # row 14 holds inf
  lambda v, weights, cu_kv: jnp.stack([jnp.where(np.arange(24)[:, None] // 8 == i, weights[:, None] * v, 0).sum(0)
    for i in range(4)])  # must be a kernel
"""


# %% exercise-keys needs: parameters setup
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


# %% exercise-tiles needs: parameters setup
def tiles_of(cu_q, queries, most):
    #: return None  # Your code: two arrays, (first row, number of queries).
    # BEGIN SOLUTION
    lengths = jnp.diff(cu_q)
    num = -(-lengths // queries)
    ends = jnp.cumsum(num)
    number = jnp.arange(most)
    seq = jnp.minimum(jnp.searchsorted(ends, number, side="right"), len(lengths) - 1)
    first = (number - (ends - num)[seq]) * queries
    return cu_q[seq] + first, jnp.clip(lengths[seq] - first, 0, queries)
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
                # Tensor cores read what threads have stored only after this.
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

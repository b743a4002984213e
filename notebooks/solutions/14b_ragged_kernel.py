"""Solutions of chapter 14b's exercises; how to read them: tools/skeletons.py, and `TRIED`: tests/exercises."""

TRIED = r"""
exercise-spoilt
  lambda *case: np.array(spoilt(*case), int)  # Right.
  last[tokens[n] : tokens[n] + rows] = n => for row in range(tokens[n], min(tokens[n] + rows, num_rows)):
    \n            last[row] = n if last[row] < 0 else last[row]  # after the *first* store
  for n in order: => for n in sorted(order):  # right for the order of the list
  lambda tokens, nums, order, rows, num_rows: [row for row in range(num_rows) if sum(t <= row < t + rows
    for t in tokens) > 1]  # written more than once
  lambda tokens, nums, order, rows, num_rows: sorted({row for t, n in zip(tokens, nums)
    for row in range(t + n, t + rows)})  # `out` has `num_rows` rows
  lambda *case: spoilt(*case)[::-1]  # in rising order
  lambda *case: 2 * spoilt(*case)  # A row is spoilt if
  lambda *case: spoilt(*case)[1:]
  lambda *case: sorted({*spoilt(*case), 0})
  lambda *case: len(spoilt(*case))  # a list
exercise-store
  first + (num & size), size // 2 => first, size // 2  # the
  pl.when((num & size) != 0) => pl.when(num >= size)
  first, size = 0 * num, queries => first, size = 0 * num, queries // 2  # element
  while size:\n            pl.when((num & size) != 0)(functools.partial(copy, first, size))
    => for row in range(queries):\n            pl.when(row < num)(functools.partial(copy, row, 1))
    # copies to GMEM, and 5 would do
  while size:\n            pl.when((num & size) != 0)(functools.partial(copy, first, size))
    => if size:\n            pl.loop(0, num)(lambda row: copy(row, 1))
  (functools.partial(copy, first, size)) =>
    (lambda first=first, size=size: (copy(first, size), plgpu.wait_smem_to_gmem(0)) and None)  # then wait once
  first, size = 0 * num, queries => first, size = 0 * num, 16  # were never written
  plgpu.barrier_wait(loaded) => pass  # before its tiles have arrived
  plgpu.wait_smem_to_gmem(0) => pass  # read-side operations
  while size:\n            pl.when((num & size) != 0)(functools.partial(copy, first, size))
    => for row in range(queries):\n            def one(row=row):\n                out_gmem[token + row] = smem[row]
    \n            pl.when(row < num)(one)\n        while size:  # by TMA
  while size:\n            pl.when((num & size) != 0)(functools.partial(copy, first, size))
    => while size:\n            pl.when(num & size != 0)(functools.partial(copy, first, size))  # Right.
  lambda x, tokens, nums, num_rows: jnp.zeros((num_rows, x.shape[2]), x.dtype)  # must be a kernel
  plgpu.barrier_wait(loaded) => plgpu.barrier_wait(loaded)
    \n        plgpu.copy_gmem_to_smem(x_gmem.at[tile], smem, loaded)\n        plgpu.barrier_wait(loaded)
    # the same rows twice
  plgpu.copy_gmem_to_smem(x_gmem.at[tile], smem, loaded) => for some in (pl.ds(0, 8), pl.ds(8, queries - 8)):
    \n            plgpu.copy_gmem_to_smem(x_gmem.at[tile, some], smem.at[some], loaded)
    && plgpu.Barrier() => plgpu.Barrier(num_arrivals=2)  # Right.
  (num_rows, width) => (num_rows + 9, width)  # the result has shape
  queries, width = x.shape => queries, _ = x.shape\n    width = 128  # cannot be compiled
exercise-heads
  lax.div(row, jnp.int32(heads)) => row  # the mask takes the row for the query
  lax.div(row, jnp.int32(heads)) => lax.rem(row, jnp.int32(heads))  # row mod heads is the head
  smem.at[pl.ds(query * heads, heads)]\n            plgpu.copy_smem_to_gmem(rows, p_gmem.at[first + query, some])
    => smem.at[pl.ds(query * heads, heads)]\n        for head in range(heads):
    \n            rows = smem.at[pl.ds(head * queries, queries)]
    \n            plgpu.copy_smem_to_gmem(rows, p_gmem.at[pl.ds(first, queries), unit * heads + head])
    # loaded query by query, and stored head by head
  p_gmem.at[first + query, some] => p_gmem.at[query, some]  # there is a race
  plgpu.commit_smem() => pass  # commit what you have stored
  plgpu.copy_smem_to_gmem(rows, p_gmem.at[first + query, some]) => for head in range(heads):
    \n                one, to = rows.at[pl.ds(head, 1)], p_gmem.at[first + query, pl.ds(unit * heads + head, 1)]
    \n                plgpu.copy_smem_to_gmem(one, to)  # would do
  plgpu.barrier_wait(loaded) => pass  # there is a race
  plgpu.wait_smem_to_gmem(0) => pass  # read-side operations
  plgpu.copy_smem_to_gmem(rows, p_gmem.at[first + query, some]) =>
    plgpu.copy_smem_to_gmem(rows, p_gmem.at[first + query, some])\n            plgpu.wait_smem_to_gmem(0)
    # then wait once
  rows, loaded) => rows, loaded)\n            plgpu.barrier_wait(loaded) && num_arrivals=queries => num_arrivals=1
    && plgpu.barrier_wait(loaded)\n        s = => s =  # start both first
  lambda s, heads: jax.nn.softmax(s, axis=-1)  # must be a kernel
  key <= position => key < position  # element
  num_kv - num_q + first => first
  num_heads // heads) => min(2, num_heads // heads))  # were never written
  pl.ds(unit * heads, heads) => pl.ds(unit * queries, heads)
  jnp.exp(s - lax.broadcast_in_dim(s.max(axis=1), s.shape, [0])) => jnp.exp(s)  # exponentials overflow
  plgpu.copy_smem_to_gmem(rows, p_gmem.at[first + query, some]) => p_gmem[first + query, some] = rows[...]  # by TMA
exercise-4
  if wave % 2 else block => if False else block  # one direction
  -(-total // blocks) => total // blocks  # No block computes
  if number < total =>  # the last wave may be short
  lambda *case: my_tiles(*case)[::-1]  # in another order
  lambda block, blocks, total: list(range(total))  # the last wave may be short
  lambda block, blocks, total: my_tiles(blocks - 1 - block, blocks, total)
"""


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

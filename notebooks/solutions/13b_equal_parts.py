"""Solutions of chapter 13b's exercises; how to read them: tools/skeletons.py, and `TRIED`: tests/exercises."""

TRIED = r"""
exercise-part
  ends = np.cumsum(blocks) => ends, (share, extra) = np.cumsum(blocks), divmod(sum(blocks), num_parts)
    && start, stop = part * ends[-1] // num_parts, (part + 1) * ends[-1] // num_parts
    => start = part * share + min(part, extra)\n    stop = start + share + (part < extra)
    && np.searchsorted(ends, start, side="right") => min(np.searchsorted(ends, start, side="right"), len(ends) - 1)
    # Right.
  stop = part * ends[-1] // num_parts, (part + 1) * ends[-1] // num_parts
    => stop = part * (ends[-1] // num_parts), (part + 1) * (ends[-1] // num_parts) if part + 1 < num_parts else ends[-1]
    # they may differ by one
  part * ends[-1] // num_parts, (part + 1) * ends[-1] // num_parts
    => part * -(-ends[-1] // num_parts), min((part + 1) * -(-ends[-1] // num_parts), ends[-1])
    && np.searchsorted(ends, start, side="right") => min(np.searchsorted(ends, start, side="right"), len(ends) - 1)
    # blocks
  start - (ends[unit] - blocks[unit]) => start  # counts from the start of its unit
  , side="right" =>  # begins in the next
  return unit, start - (ends[unit] - blocks[unit]) => return 0, 0  # the parts before end before
  lambda part, num_parts, blocks: (part % len(blocks), 0, blocks[part % len(blocks)])  # blocks
  stop - start => 1  # all parts together
  return unit, start - (ends[unit] - blocks[unit]) => return unit, start - (ends[unit] - blocks[unit]) + 0.5
    # all three must be whole numbers
  unit = np.searchsorted(ends, start, side="right") => unit = len(blocks)\n    blocks, ends = [*blocks, 1], [*ends, 0]
    # there are units 0 to 3
exercise-merge
  top = lax.fori_loop(0, num_pieces, largest, jnp.float32(-jnp.inf)) => top = jnp.float32(-jnp.inf)
    \n        for piece in range(num_pieces): top = jnp.maximum(top, lses_gmem[piece, row])  # Right.
  jnp.exp(lses_gmem[piece, row] - shift) => jnp.exp(lses_gmem[piece, row])  # subtract the largest lse first
  jnp.exp(lses_gmem[piece, row] - shift) => jnp.float32(1.0)  # lse
  acc * jnp.where(total > 0, 1 / total, 0.0) => acc  # , out (
  acc * jnp.where(total > 0, 1 / total, 0.0) => acc / total  # all pieces are empty
  shift + jnp.log(total) => top  # the largest lse is not all
  shift + jnp.log(total) => jnp.log(total)  # , lse (
  rows, head_dim), jnp.float32) => 4, 128), jnp.float32)  # it cannot be compiled
  jnp.zeros((head_dim,), jnp.float32) => jnp.zeros((128,), jnp.float32)
  fori_loop(0, num_pieces, add => fori_loop(0, 4, add  # five pieces
  acc, total = state => acc, (top, total) = state
    && weight = jnp.exp(lses_gmem[piece, row] - shift)
    => lse = lses_gmem[piece, row]\n            m_new = jnp.maximum(top, lse)
    \n            shift = jnp.where(m_new == -jnp.inf, 0.0, m_new)
    \n            weight, alpha = jnp.exp(lse - shift), jnp.exp(top - shift)
    && return acc + weight * outs_gmem[piece, row], total + weight
    => return acc * alpha + weight * outs_gmem[piece, row], (m_new, total * alpha + weight)
    && top = lax.fori_loop(0, num_pieces, largest, jnp.float32(-jnp.inf)) => top = jnp.float32(-jnp.inf)
    && jnp.zeros((head_dim,), jnp.float32), jnp.float32(0.0)
    => jnp.zeros((head_dim,), jnp.float32), (top, jnp.float32(0.0))
    && acc, total = lax.fori_loop(0, num_pieces, add, nothing)
    => acc, (top, total) = lax.fori_loop(0, num_pieces, add, nothing)
    \n        shift = jnp.where(top == -jnp.inf, 0.0, top)  # an out is read before all lse are known
  row = lax.axis_index("row") => @pl.loop(0, rows)
    \n        def _(row): merge_row(outs_gmem, lses_gmem, out_gmem, lse_gmem, row)
    \n\n    def merge_row(outs_gmem, lses_gmem, out_gmem, lse_gmem, row):
    && grid=(rows,),\n        grid_names=("row",), =>  # merges several rows, one after the other
  acc, total = state => acc, (m_i, total) = state
    && weight = jnp.exp(lses_gmem[piece, row] - shift)
    => lse = lses_gmem[piece, row]\n            m_new = jnp.maximum(m_i, lse)
    \n            near = jnp.where(m_new == -jnp.inf, 0.0, m_new)
    \n            weight, alpha = jnp.exp(lse - near), jnp.exp(m_i - near)
    && return acc + weight * outs_gmem[piece, row], total + weight
    => return acc * alpha + weight * outs_gmem[piece, row], (m_new, total * alpha + weight)
    && jnp.zeros((head_dim,), jnp.float32), jnp.float32(0.0)
    => jnp.zeros((head_dim,), jnp.float32), (jnp.float32(-jnp.inf), jnp.float32(0.0))
    && acc, total = lax.fori_loop => acc, (_, total) = lax.fori_loop  # rescaled with every piece
  weight * outs_gmem[piece, row] => weight * (outs_gmem[piece, row] + outs_gmem[piece, row]) / 2  # an out is read twice
  acc, total = lax.fori_loop(0, num_pieces, add, nothing)
    => acc, total = nothing\n        for piece in range(num_pieces): acc, total = add(piece, (acc, total))  # Right.
exercise-last-block
  v_smem[...] = jnp.where(row < seen, values, jnp.zeros_like(values))\n        plgpu.commit_smem()
    => @pl.when(seen < 64)\n        def _():\n            part = v_smem.at[:, pl.ds(0, 64)]
    \n            part[...] = jnp.where(row >= seen, jnp.zeros((), part.dtype), values)
    \n            plgpu.commit_smem()  # Right.
  jnp.where(row < seen, values, jnp.zeros_like(values)) => values * (row < seen).astype(values.dtype)
    # times NaN is NaN
  jnp.where(row < seen, values, jnp.zeros_like(values)) => values  # where no token is, has reached the result
  row < seen => row <= seen  # NaN from row
  row < seen => row < seen - 1  # must stay as they are
  row < seen => row >= seen
  row < seen => values == values  # inf from row 1 of v, where no token is
  row < seen => (row < seen) & (values == values)  # gone from the result
  row < seen => (row < seen) & (jnp.abs(values) != jnp.inf)  # token 7 has an inf of its own
  row < seen => row < jnp.maximum(seen, 1)  # 0 tokens in the block
  row < seen => (row < seen) | (values == values)  # inf from row 1 of v, where no token is
  row < seen => (row < seen) | (row >= 40)  # where no token is, has reached the result
  \n        plgpu.commit_smem() =>  # commit what you have stored (plgpu.commit_smem)
  \n        plgpu.barrier_wait(filled) =>  # reads the stage before its tiles have arrived
  num_arrivals=2 => num_arrivals=3  # never end
  p_smem, filled)\n => p_smem, filled)\n        plgpu.barrier_wait(filled)\n && num_arrivals=2 => num_arrivals=1
    # the second load starts only after a wait
  plgpu.load(v_smem, layout=plgpu.Layout.WGMMA) => plgpu.load(v_gmem, layout=plgpu.Layout.WGMMA, optimized=False)
    # straight from global memory
exercise-ids
  jnp.where((page >= 0) & (page < num_pages), page, num_pages)
    => jnp.where(page.astype(jnp.uint32) < num_pages, page, num_pages)  # Right.
  jnp.where((page >= 0) & (page < num_pages), page, num_pages) => jnp.clip(page, 0, num_pages - 1)
    # 6 is not a page, and the result has page 5
  jnp.where((page >= 0) & (page < num_pages), page, num_pages) => lax.rem(page, jnp.int32(num_pages))
    # 6 is not a page, and the result has page 0
  jnp.where((page >= 0) & (page < num_pages), page, num_pages) => page  # -1 is not a page, and the result has page 8
  (page >= 0) & =>  # -1 is not a page
  page >= 0 => page > 0  # page 0 is in the cache
  jnp.where((page >= 0) & (page < num_pages), page, num_pages) => num_pages  # page 4 is in the cache
  page < num_pages), page, num_pages) => page < 6), page, 6)  # page 7 is in the cache
  page, num_pages) => page, 2**31 - 1)  # a copy is started at page 2147483647
  page, num_pages) => page, -1)  # 6 is not a page, and the result has page 5
  range(columns) => range(4)  # a copy that was never started
  plgpu.copy_gmem_to_smem( => pl.when((page >= 0) & (page < 6))(lambda: plgpu.copy_gmem_to_smem(
    && smem.at[rows], filled) => smem.at[rows], filled))  # a copy that was never started
  page = jnp.where((page >= 0) & (page < num_pages), page, num_pages)
    => is_page, page = (page >= 0) & (page < num_pages), jnp.clip(page, 0, num_pages - 1)
    && plgpu.copy_gmem_to_smem(pages_gmem.at[page], smem.at[rows], filled)
    => smem[rows] = pages_gmem[page] * jnp.where(is_page, 1, 0).astype(pages.dtype)
    \n            plgpu.barrier_arrive(filled)\n            plgpu.commit_smem()  # straight from global memory
  jnp.where((page >= 0) & (page < num_pages), page, num_pages) => jnp.clip(page, 0, num_pages - 1)
    && \n        plgpu.barrier_wait(filled)\n
    => \n        plgpu.barrier_wait(filled)\n        for column in range(columns):
    \n            page, rows = ids_gmem[column], pl.ds(column * page_size, page_size)
    \n\n            @pl.when((page < 0) | (page >= num_pages))
    \n            def _(rows=rows): smem[rows] = jnp.zeros((page_size, head_dim), pages.dtype)
    \n        plgpu.commit_smem()\n  # the kernel copies page 5
  smem.at[rows], filled) => smem.at[rows], filled)\n            plgpu.barrier_wait(filled)
    && \n        plgpu.barrier_wait(filled)\n        plgpu.copy_smem => \n        plgpu.copy_smem
    && num_arrivals=columns => num_arrivals=1  # the second load starts only after a wait
  \n        plgpu.barrier_wait(filled) =>  # reads the stage before its tiles have arrived
"""


# %% exercise-part needs: parameters setup
def part(part, num_parts, blocks):
    #: return None  # Your code: (unit, block, steps)
    # BEGIN SOLUTION
    ends = np.cumsum(blocks)
    start, stop = part * ends[-1] // num_parts, (part + 1) * ends[-1] // num_parts
    unit = np.searchsorted(ends, start, side="right")
    return unit, start - (ends[unit] - blocks[unit]), stop - start
    # END SOLUTION


ex13b.check_part(part)


# %% exercise-merge needs: parameters setup
def merge_in_two_passes(outs, lses):
    num_pieces, rows, head_dim = outs.shape

    def body(outs_gmem, lses_gmem, out_gmem, lse_gmem):
        row = lax.axis_index("row")
        largest = lambda piece, top: jnp.maximum(top, lses_gmem[piece, row])
        top = lax.fori_loop(0, num_pieces, largest, jnp.float32(-jnp.inf))
        # BEGIN SOLUTION
        shift = jnp.where(top == -jnp.inf, 0.0, top)
        # END SOLUTION

        def add(piece, state):
            acc, total = state
            #: weight = jnp.float32(1.0)
            # BEGIN SOLUTION
            weight = jnp.exp(lses_gmem[piece, row] - shift)
            # END SOLUTION
            return acc + weight * outs_gmem[piece, row], total + weight

        nothing = jnp.zeros((head_dim,), jnp.float32), jnp.float32(0.0)
        acc, total = lax.fori_loop(0, num_pieces, add, nothing)
        #: out_gmem[row] = acc
        #: lse_gmem[row] = top
        # BEGIN SOLUTION
        out_gmem[row] = acc * jnp.where(total > 0, 1 / total, 0.0)
        lse_gmem[row] = jnp.where(total > 0, shift + jnp.log(total), -jnp.inf)
        # END SOLUTION

    return plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((rows, head_dim), jnp.float32),
            jax.ShapeDtypeStruct((rows,), jnp.float32),
        ),
        grid=(rows,),
        grid_names=("row",),
    )(outs, lses)


ex13b.check_merge(merge_in_two_passes)


# %% exercise-last-block needs: parameters setup
def last_block(p, v, seen):
    """p v, (64, 64) float32: p (64, 64), the weights of a sequence's last block, 0 from
    column `seen` on; v (64, 64), its values, bfloat16; seen (1,)."""

    def body(p_gmem, v_gmem, seen_gmem, o_gmem, p_smem, v_smem, filled):
        plgpu.copy_gmem_to_smem(p_gmem, p_smem, filled)
        plgpu.copy_gmem_to_smem(v_gmem, v_smem, filled)
        plgpu.barrier_wait(filled)
        seen = seen_gmem[0]
        row = plgpu.broadcasted_iota(jnp.int32, (64, 64), 0, layout=plgpu.Layout.WGMMA)
        values = plgpu.load(v_smem, layout=plgpu.Layout.WGMMA)
        #: v_smem[...] = values * (row < seen).astype(values.dtype)
        # BEGIN SOLUTION
        v_smem[...] = jnp.where(row < seen, values, jnp.zeros_like(values))
        plgpu.commit_smem()
        # END SOLUTION

        def multiply(acc):
            plgpu.wgmma(acc, p_smem, v_smem)
            return acc[...]  # Waits for the product.

        o_gmem[...] = pl.run_scoped(multiply, plgpu.ACC((64, 64), jnp.float32))

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((64, 64), jnp.float32),
        scratch_types=[
            plgpu.SMEM((64, 64), p.dtype),
            plgpu.SMEM((64, 64), v.dtype),
            plgpu.Barrier(num_arrivals=2),
        ],
    )(p, v, seen)


ex13b.check_last_block(last_block)


# %% exercise-ids needs: parameters setup
def tokens_of(pages, ids):
    """The pages of a row of the block table, one after the other, (columns * page_size,
    head_dim): pages (num_pages, page_size, head_dim), ids (columns,). An id that is not
    a page counts as a page of zeros."""
    (num_pages, page_size, head_dim), columns = pages.shape, len(ids)

    def body(pages_gmem, ids_gmem, o_gmem, smem, filled):
        for column in range(columns):
            page = ids_gmem[column]
            #: page = jnp.clip(page, 0, num_pages - 1)
            # BEGIN SOLUTION
            page = jnp.where((page >= 0) & (page < num_pages), page, num_pages)
            # END SOLUTION
            rows = pl.ds(column * page_size, page_size)
            plgpu.copy_gmem_to_smem(pages_gmem.at[page], smem.at[rows], filled)
        plgpu.barrier_wait(filled)
        plgpu.copy_smem_to_gmem(smem, o_gmem)
        plgpu.wait_smem_to_gmem(0)

    shape = columns * page_size, head_dim
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(shape, pages.dtype),
        scratch_types=[
            plgpu.SMEM(shape, pages.dtype),
            plgpu.Barrier(num_arrivals=columns),
        ],
    )(pages, ids)


ex13b.check_ids(tokens_of)

"""Solutions of chapter 13's exercises; how to read the marks: tools/skeletons.py."""


# %% exercise-1 needs: parameters setup
def slot_mapping(block_tables, seqs, positions, page_size):
    #: return None  # Your code.
    # BEGIN SOLUTION
    pages = block_tables[seqs, positions // page_size]
    return np.where(positions < 0, -1, pages * page_size + positions % page_size)
    # END SOLUTION


ex13.check_slots(slot_mapping)


# %% exercise-2 needs: parameters setup
def times(kv_lens, num_heads, num_kv_heads, head_dim):
    #: return None  # Your code: (µs of memory, µs of the tensor cores)
    # BEGIN SOLUTION
    numbers = sum(kv_lens) * num_kv_heads * head_dim
    return 1e6 * 4 * numbers / 4.8e12, 1e6 * 4 * 64 * numbers / 989e12
    # END SOLUTION


ex13.check_times(times)


# %% exercise-pages needs: parameters setup
def in_order(pages, block_tables, block_kv=32):
    _, page_size, kv_heads, head_dim = pages.shape
    tokens = min(page_size, block_kv)  # Tokens of one copy.
    copies, num_tokens = block_kv // tokens, block_tables.shape[1] * page_size

    def body(tables_gmem, pages_gmem, out_gmem, smem, loaded):
        seq, kv_head, block = (
            lax.axis_index(name) for name in ("seq", "kv_head", "block")
        )
        for i in range(copies):
            #: position = block * block_kv
            # BEGIN SOLUTION
            position = block * block_kv + i * tokens
            # END SOLUTION
            page = tables_gmem[seq, lax.div(position, jnp.int32(page_size))]
            #: rows = pl.ds(0, tokens)
            # BEGIN SOLUTION
            rows = pl.ds(lax.rem(position, jnp.int32(page_size)), tokens)
            # END SOLUTION
            plgpu.copy_gmem_to_smem(
                pages_gmem.at[page, rows, kv_head],
                smem.at[pl.ds(i * tokens, tokens)],
                loaded,
            )
        plgpu.barrier_wait(loaded)
        plgpu.copy_smem_to_gmem(
            smem, out_gmem.at[seq, kv_head, pl.ds(block * block_kv, block_kv)]
        )
        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(
            (len(block_tables), kv_heads, num_tokens, head_dim), pages.dtype
        ),
        grid=(len(block_tables), kv_heads, num_tokens // block_kv),
        grid_names=("seq", "kv_head", "block"),
        scratch_types=[
            plgpu.SMEM((block_kv, head_dim), pages.dtype),
            plgpu.Barrier(num_arrivals=copies),
        ],
    )(block_tables, pages)


ex13.check_in_order(in_order)


# %% exercise-3 needs: parameters setup
def part(part, num_parts, blocks):
    #: return None  # Your code: (unit, block, steps)
    # BEGIN SOLUTION
    ends = np.cumsum(blocks)
    start, stop = part * ends[-1] // num_parts, (part + 1) * ends[-1] // num_parts
    unit = min(np.searchsorted(ends, start, side="right"), len(blocks) - 1)
    return unit, start - (ends[unit] - blocks[unit]), stop - start
    # END SOLUTION


ex13.check_part(part)


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


ex13.check_merge(merge_in_two_passes)

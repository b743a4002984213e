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


# %% exercise-tail needs: parameters setup softmax
def one_unit(q, k_pages, v_pages, pages, kv_len, block_kv=64):
    """(out, lse) of one unit, float32: q (64, head_dim); k_pages, v_pages (num_pages,
    page_size, head_dim); pages, its row of the block table; kv_len (1,)."""
    (_, page_size, head_dim), unit = k_pages.shape, LOG2E / math.sqrt(q.shape[1])
    copies = block_kv // page_size  # As many for keys as for values.

    def body(q_gmem, k_gmem, v_gmem, pages_gmem, len_gmem, o_gmem, lse_gmem, *,
             q_smem, k_smem, v_smem, q_filled, filled):  # fmt: skip
        plgpu.copy_gmem_to_smem(q_gmem, q_smem, q_filled)
        plgpu.barrier_wait(q_filled)
        kv_len = len_gmem[0]

        def step(block, state):
            for i in range(copies):
                page = pages_gmem[block * copies + i]
                rows = pl.ds(i * page_size, page_size)
                plgpu.copy_gmem_to_smem(k_gmem.at[page], k_smem.at[rows], filled)
                plgpu.copy_gmem_to_smem(v_gmem.at[page], v_smem.at[rows], filled)
            plgpu.barrier_wait(filled)
            s = logits(q_smem, k_smem)
            token = plgpu.broadcasted_iota(
                jnp.int32, s.shape, 1, layout=plgpu.Layout.WGMMA
            )
            #: s = jnp.where(token < kv_len, s, 0.0)  # Place 1.
            # BEGIN SOLUTION
            s = jnp.where(block * block_kv + token < kv_len, s, -jnp.inf)
            # END SOLUTION
            (m_i, l_i, acc), p = update(state, s, unit)
            acc = attn_steps.add_product(acc, p.astype(q.dtype), v_smem, interpreted())
            return m_i, l_i, acc

        #: num_steps = lax.div(kv_len, jnp.int32(block_kv))  # Place 2.
        # BEGIN SOLUTION
        num_steps = lax.div(kv_len + (block_kv - 1), jnp.int32(block_kv))
        # END SOLUTION
        m_i, l_i, acc = lax.fori_loop(0, num_steps, step, nothing_seen(head_dim))
        _device.store(o_gmem, acc / per_row(l_i, acc.shape))
        _device.store(lse_gmem, (m_i + jnp.log2(l_i)) / LOG2E)

    return plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct(q.shape, jnp.float32),
            jax.ShapeDtypeStruct(q.shape[:1], jnp.float32),
        ),
        scratch_types=dict(
            q_smem=plgpu.SMEM(q.shape, q.dtype),
            k_smem=plgpu.SMEM((block_kv, head_dim), q.dtype),
            v_smem=plgpu.SMEM((block_kv, head_dim), q.dtype),
            q_filled=plgpu.Barrier(),
            filled=plgpu.Barrier(num_arrivals=2 * copies),
        ),
        compiler_params=lab.compiler_params(approx_math=True),
    )(q, k_pages, v_pages, pages, kv_len)


ex13.check_tail(one_unit)

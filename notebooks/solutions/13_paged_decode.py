"""Solutions of chapter 13's exercises; how to read them: tools/skeletons.py, and `TRIED`: tests/exercises."""

TRIED = r"""
exercise-1
  lambda t, s, p, n: [-1 if q < 0 else int(t[i][q // n]) * n + q % n for i, q in zip(s, p.tolist())]  # Right.
  lambda *case: slot_mapping(*case).astype(np.int32)
  np.where(positions < 0, -1, => np.where(positions < -1, -1,  # A token with position -1 is padding
  np.where(positions < 0, -1, => np.where(positions < 0, 0,
  lambda t, s, p, n: np.where(p < 0, -1, p)  # The table is not used
  pages * page_size + positions % page_size) => pages)  # That is the page; a slot
  pages * page_size + positions % page_size) => pages * page_size)  # the page's first slot
  pages * page_size + => pages +  # multiply
  block_tables[seqs, => block_tables[0,  # its row of the table
  lambda t, s, p, n: np.where(p < 0, -1, t[s, p % n % t.shape[1]] * n + p // n)  # Exchange
  * page_size + positions % page_size => * 16 + positions % 16  # page_size = 4
  positions % page_size) => positions / page_size)  # a whole number
  lambda t, s, p, n: slot_mapping(t, s, p, n)[p >= 0]  # is right
exercise-2
  4 * numbers / 4.8e12 => 2 * numbers / 4.8e12  # there are keys and there are values
  4 * 64 => 2 * 64  # are two operations
  4 * 64 => 64  # 4 operations
  sum(kv_lens) => max(kv_lens) * len(kv_lens)  # its own tokens
  1e6 => 1.0  # in seconds
  1e6 => 1e3  # in ms
  num_kv_heads * head_dim => num_heads * head_dim  # a group of query heads reads its KV head once
  64 * numbers => 64 * numbers * num_heads / num_kv_heads  # one unit
  64 * numbers => num_heads // num_kv_heads * numbers  # multiply all 64
  64 * numbers => 128 * numbers  # 64 rows for each unit
  * head_dim\n => * 128\n  # each key and value once
  lambda *case: times(*case)[0]  # 2 values
exercise-pages
  block * block_kv + i * tokens => block * block_kv  # a page is copied twice
  pl.ds(lax.rem(position, jnp.int32(page_size)), tokens) => pl.ds(0, tokens)  # the page's first rows
  tables_gmem[seq, lax => tables_gmem[0, lax  # it must be
  num_arrivals=copies => num_arrivals=1  # reads the stage before its tiles have arrived
  num_arrivals=copies => num_arrivals=2 * copies  # never end
  \n        plgpu.barrier_wait(loaded)\n => \n  # reads the stage before its tiles have arrived
exercise-tail
  block * block_kv + token < kv_len, s, -jnp.inf => block * block_kv + token >= kv_len, -jnp.inf, s  # Right.
  lax.div(kv_len + (block_kv - 1), => lax.div(kv_len,  # round their number up
  lax.div(kv_len + (block_kv - 1), jnp.int32(block_kv)) => 3  # 40 tokens: 3 blocks are loaded, and 1 have a token
  block * block_kv + token < kv_len => token < kv_len  # column i of a block is token block * block_kv + i
  block * block_kv + token < kv_len => token >= 0  # tokens after the end count
  kv_len, s, -jnp.inf => kv_len, s, 0.0  # exp(0) = 1
  token < kv_len => token <= kv_len  # one token too many
  token < kv_len => token < kv_len - 1  # one token too few
  block * block_kv + token < kv_len => token < lax.rem(kv_len, jnp.int32(block_kv))  # cut like the last one
  kv_len + (block_kv - 1) => kv_len + block_kv  # reaches beyond the end
  \n            plgpu.barrier_wait(filled)\n => \n  # reads the stage before its tiles have arrived
"""


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

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
  block_tables[seqs, positions // page_size] => block_tables.ravel()[seqs * 8 + positions // page_size]  # out of bounds
exercise-2
  4 * numbers / hbm => 2 * numbers / hbm  # there are keys and there are values
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
  numbers / hbm => numbers / 4.8e12  # each key and value once
  numbers / tensor => numbers / 989e12
exercise-pages
  block * block_kv + i * tokens => block * block_kv  # a page is copied twice
  pl.ds(lax.rem(position, jnp.int32(page_size)), tokens) => pl.ds(0, tokens)  # the page's first rows
  block * block_kv + i * tokens => block * 32 + i * tokens  # block_kv = 64
  lax.div(position, jnp.int32(page_size))] => lax.div(position, jnp.int32(16))]  # beyond the end
  tables_gmem[seq, lax => tables_gmem[0, lax  # it must be
  num_arrivals=copies => num_arrivals=1  # reads the stage before its tiles have arrived
  num_arrivals=copies => num_arrivals=2 * copies  # never end
  \n        plgpu.barrier_wait(loaded)\n => \n  # reads the stage before its tiles have arrived
  loaded,\n            )\n        plgpu.barrier_wait(loaded) =>
    loaded,\n            )\n            plgpu.barrier_wait(loaded)
    && num_arrivals=copies => num_arrivals=1  # start both first
  plgpu.copy_gmem_to_smem( => smem[pl.ds(i * tokens, tokens)] = ( && pages_gmem.at[page => pages_gmem[page
    && rows, kv_head],\n => rows, kv_head]\n && smem.at[pl.ds(i * tokens, tokens)],\n                loaded,\n => \n
    && plgpu.barrier_wait(loaded) => plgpu.commit_smem()  # 0 copies
  pl.ds(lax.rem(position, jnp.int32(page_size)), tokens) =>
    pl.ds(position if page_size > tokens else 0, tokens)  # with pages of 64 tokens
  \n        plgpu.wait_smem_to_gmem(0) => \n  # before kernel finished
exercise-window
  lambda q, k, v, t, n, w: cookbook.paged_attention(q, k, v, t, n, local_window_size=w - 1)  # the package's kernel
  s, -jnp.inf => s, 0.0  # element
  first_block = div(first_token, block_kv) => first_block = div(first_token + 0, block_kv)  # Right.
  div(first_token, block_kv) => div(first_token, 64)  # block_kv = 128
  (first_block + i) * block_kv => (first_block + i) * 64
  token >= first_token => token >= 0  # the window's first block is not masked
  first_block = div(first_token, block_kv) => first_block = 0  # are needed
  first_block = div(first_token, block_kv) => first_block = 0 && token >= first_token => token >= 0  # before the window
  lens[seq] - window, 0 => lens[seq] - window - 1, 0  # one token too many
  lens[seq] - window, 0 => lens[seq] - window + 1, 0  # one token too few
  lens[seq] - window, 0 => lens[seq] - 70, 0  # window 1000
  (token < lens[seq]) => (token >= 0)  # tokens after the end count
  position = (first_block + i) * => position = i *  # element
  token = (first_block + i) * => token = i *  # element
  pl.loop(0, num_blocks) => pl.loop(first_block, first_block + num_blocks)
    && position = (first_block + i) * => position = i *  # never end
  - first_block\n => \n  # are needed
  div(lens[seq] + block_kv - 1, block_kv) - first_block => div(window + block_kv - 1, block_kv)  # are needed
  Ring(full, free, num_stages) => Ring(full, free, 1)  # no ring
  (q, k_pages, v_pages, tables, lens), block_kv, num_stages => (q, k_pages, v_pages, tables, lens), block_kv, 1
    && Ring(full, free, num_stages) => Ring(full, free, 1)  # no ring
  stage = ring.wait(i) => stage = rem(i, num_stages)  # before its tiles have arrived
  stage = ring.acquire(i) => stage = rem(i, num_stages)  # reads the stage before
  ring.drain(num_blocks) => pass  # nobody waits for
  stage = ring.wait(i) => stage = ring.wait(i)\n                ring.release(i) &&
    \n                ring.release(i)\n                return => \n                return  # may still read
  full.at[stage])\n\n => full.at[stage])\n                plgpu.barrier_wait(full.at[stage])\n\n  # as if it had 1
  tokens = min(page_size, block_kv) => tokens = 16  # reads the stage before
  jnp.maximum(lens[seq] - window, 0) => 0 * lens[seq]  # tokens before the window count
  Ring(full, free, num_stages) => Ring(full, free, 2)  # Have 3 stages
  (token >= first_token) & (token < lens[seq]) => token < lens[seq] &&
    p.astype(q.dtype) => jnp.where(token >= first_token, p, 0.0).astype(q.dtype)  # element
  div(position, page_size) => (first_block + i) * (block_kv // page_size) + first // page_size  # pages of 128 tokens
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
def times(kv_lens, num_heads, num_kv_heads, head_dim, hbm, tensor):
    #: return None  # Your code: (µs of memory, µs of the tensor cores)
    # BEGIN SOLUTION
    numbers = sum(kv_lens) * num_kv_heads * head_dim
    return 1e6 * 4 * numbers / hbm, 1e6 * 4 * 64 * numbers / tensor
    # END SOLUTION


ex13.check_times(times)


# %% exercise-pages needs: parameters setup
def in_order(pages, tables, block_kv=32):
    _, page_size, kv_heads, head_dim = pages.shape
    tokens = min(page_size, block_kv)  # Tokens of one copy.
    copies, num_tokens = block_kv // tokens, tables.shape[1] * page_size

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
            (len(tables), kv_heads, num_tokens, head_dim), pages.dtype
        ),
        grid=(len(tables), kv_heads, num_tokens // block_kv),
        grid_names=("seq", "kv_head", "block"),
        scratch_types=[
            plgpu.SMEM((block_kv, head_dim), pages.dtype),
            plgpu.Barrier(num_arrivals=copies),
        ],
    )(tables, pages)


ex13.check_in_order(in_order)


# %% exercise-window needs: parameters setup helpers
def windowed(q, k_pages, v_pages, tables, lens, window, *, block_kv=64, num_stages=2):
    num_pages, page_size, _, head_dim = k_pages.shape
    tokens = min(page_size, block_kv)  # Tokens of one copy.
    scale_log2 = LOG2E / math.sqrt(head_dim)

    def kernel(
        tables, lens, q_gmem, k_gmem, v_gmem, o_gmem, q_smem, o_smem, k_smem, v_smem, q_full, full, free
    ):  # fmt: skip
        seq, kv_head = map(lax.axis_index, ("seq", "kv_head"))
        #: num_blocks = div(lens[seq] + block_kv - 1, block_kv)  # Place 1.
        # BEGIN SOLUTION
        first_token = jnp.maximum(lens[seq] - window, 0)
        first_block = div(first_token, block_kv)
        num_blocks = div(lens[seq] + block_kv - 1, block_kv) - first_block
        # END SOLUTION
        ring, wg = Ring(full, free, num_stages), lax.axis_index("wg")

        @pl.when(wg == 1)
        def load():
            copy(q_gmem.at[seq, kv_head], q_smem, q_full)

            @pl.loop(0, num_blocks)
            def _(i):
                stage = ring.acquire(i)
                for first in range(0, block_kv, tokens):
                    #: position = i * block_kv + first  # Place 2.
                    # BEGIN SOLUTION
                    position = (first_block + i) * block_kv + first
                    # END SOLUTION
                    entry = div(position, page_size)
                    page = page_of(tables, seq, entry, num_pages)
                    there = pl.ds(rem(position, page_size), tokens)
                    here = pl.ds(first, tokens)
                    for gmem, smem in ((k_gmem, k_smem), (v_gmem, v_smem)):
                        tile = gmem.at[page, there, kv_head]
                        copy(tile, smem.at[stage, here], full.at[stage])

            ring.drain(num_blocks)

        @pl.when(wg == 0)
        def compute():
            plgpu.barrier_wait(q_full)

            def step(i, carry):
                acc, m_i, l_i = carry
                stage = ring.wait(i)
                s = logits(q_smem, k_smem.at[stage])
                #: token = i * block_kv + columns(s)  # Place 3.
                #: s = jnp.where(token < lens[seq], s, -jnp.inf)
                # BEGIN SOLUTION
                token = (first_block + i) * block_kv + columns(s)
                s = jnp.where((token >= first_token) & (token < lens[seq]), s, -jnp.inf)
                # END SOLUTION
                p, alpha, m_i, l_i = softmax_step(s, m_i, l_i, scale_log2)
                acc = acc * per_row(alpha, acc.shape)
                acc = add_product(acc, p.astype(q.dtype), v_smem.at[stage])
                ring.release(i)
                return acc, m_i, l_i

            sums = lax.fori_loop(0, num_blocks, step, nothing_seen(head_dim))
            store(sums, o_smem, o_gmem.at[seq, kv_head])

    return launch(kernel, (q, k_pages, v_pages, tables, lens), block_kv, num_stages)


ex13.check_window(windowed)

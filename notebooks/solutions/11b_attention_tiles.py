"""Solutions of chapter 11b's exercises; how to read them: tools/skeletons.py, and `TRIED`: tests/exercises."""

TRIED = r"""
exercise-deal
  -steps[tile] => 0  # are possible
  lambda steps, blocks: [list(range(b, len(steps), blocks)) for b in range(blocks)]
  lambda steps, blocks: deal_out(steps[:-1], blocks)  # 0 times
  lambda steps, blocks: [row + [0] for row in deal_out(steps, blocks)]  # times; each of
  lambda steps, blocks: [row + [len(steps)] for row in deal_out(steps, blocks)]
  lambda steps, blocks: [row for row in deal_out(steps, blocks) if row]  # one without a tile
  lambda steps, blocks: [0, 1]  # lists of tiles
exercise-count
  before = i * num_steps => before = jnp.int32(0)  # do the counts go on too, in both roles
  count = i * num_steps => count = jnp.int32(0)
  count = i * num_steps => count = i
  plgpu.barrier_arrive(q_freed.at[0]) => pass  # never end
  pl.when(i > 0)(lambda: plgpu.barrier_wait(q_freed.at[0])) => pass  # do the counts go on too, in both roles
  all_steps(work, 0, num_steps) => all_steps(work, 1, num_steps)
  before = i * num_steps => before = tile  # NameError
exercise-phases
  seen(first_q, 64 * wgs) => seen(my_first_q, 64)  # for each block that any of its warpgroups sees
  my_first_q + 63 - left => my_first_q - left
  my_first_q + 1) // => my_first_q + 64) //
  max((my_first_q + 1) // block_kv, first) => (my_first_q + 1) // block_kv
    && max(-(-max(my_first_q + 63 - left, 0) // block_kv), first), whole_end
    => -(-max(my_first_q + 63 - left, 0) // block_kv), 999  # none below 0
  lambda *case: phases(*case)[::-1]  # from the last block on
  lambda *case: (0, 1, 2)  # five numbers
exercise-mask
  end = div(first_q + more + WG_ROWS + block_kv - 1, block_kv) => end = k.shape[1] // block_kv  # Right.
  kv_head = div(head, heads // k.shape[2]) => kv_head = jnp.minimum(head, k.shape[2] - 1)  # KV head of its own number
  kv_head = div(head, heads // k.shape[2]) => kv_head = head  # element
  kv_head = div(head, heads // k.shape[2]) => kv_head = rem(head, k.shape[2])  # take turns at the KV heads
  first_q + more + WG_ROWS => first_q + WG_ROWS  # never visited
  key <= query + more => key <= query  # the last query must see the last key
  key <= query + more => key < query + more  # at its own position too
  key <= query + more => key >= 0  # where is the mask?
  key <= query + more => key <= query - more  # 64 queries, 192 keys
  end = div(first_q => end = num_steps + div(first_q  # NameError
"""


# %% exercise-deal needs: parameters setup
def deal_out(steps, blocks):
    #: return None  # Your code.
    # BEGIN SOLUTION
    rows, done = [[] for _ in range(blocks)], [0] * blocks
    for tile in sorted(range(len(steps)), key=lambda tile: -steps[tile]):
        block = min(range(blocks), key=done.__getitem__)
        rows[block].append(tile)
        done[block] += steps[tile]
    return rows
    # END SOLUTION


ex11b.check_deal(deal_out)


# %% exercise-count needs: parameters setup parts
def tile_after_tile(q, k, v, block_kv=64, blocks=2):
    """(out, lse): block b computes tiles b, b + blocks, ... of 64 queries each."""
    unit, num_steps = LOG2E / math.sqrt(q.shape[3]), k.shape[1] // block_kv
    q_blocks, heads = q.shape[1] // WG_ROWS, q.shape[2]
    num_tiles = q.shape[0] * heads * q_blocks

    def body(
        q_gmem, k_gmem, v_gmem, o_gmem, lse_gmem, *, q_smem, k_smem, v_smem, o_smem, q_filled, k_filled, v_filled,
        q_freed, k_freed, v_freed, **_,
    ):  # fmt: skip
        role, block = lax.axis_index("role"), lax.axis_index("block")
        keys, values = Ring(k_filled, k_freed, 2), Ring(v_filled, v_freed, 2)
        shared = Shared(q_smem, k_smem, v_smem, keys, values, Turns(None, 1))
        mine = div(num_tiles - block + blocks - 1, blocks)  # Tiles of this block.

        def place(i):
            """(batch, head, rows) of this block's tile i."""
            number = block + i * blocks
            head, tile = div(number, q_blocks), rem(number, q_blocks)
            return div(head, heads), rem(head, heads), pl.ds(tile * WG_ROWS, WG_ROWS)

        @pl.when(role == 1)
        def memory():
            @pl.loop(0, mine)
            def _(i):
                batch, head, rows = place(i)
                pl.when(i > 0)(lambda: plgpu.barrier_wait(q_freed.at[0]))
                plgpu.copy_gmem_to_smem(
                    q_gmem.at[batch, rows, head], q_smem.at[0], q_filled.at[0]
                )
                #: count = jnp.int32(0)  # Place 1: steps before this tile.
                # BEGIN SOLUTION
                count = i * num_steps
                # END SOLUTION

                @pl.loop(0, num_steps)
                def _(step):
                    rows = pl.ds(step * block_kv, block_kv)
                    for ring, gmem, smem in (
                        (keys, k_gmem, k_smem),
                        (values, v_gmem, v_smem),
                    ):
                        slot = ring.acquire(count + step)
                        plgpu.copy_gmem_to_smem(
                            gmem.at[batch, rows, head],
                            smem.at[slot],
                            ring.filled.at[slot],
                        )

            plgpu.barrier_wait(q_freed.at[0])
            keys.drain(mine * num_steps), values.drain(mine * num_steps)

        @pl.when(role == 0)
        def compute():
            @pl.loop(0, mine)
            def _(i):
                batch, head, rows = place(i)
                plgpu.barrier_wait(q_filled.at[0])
                #: before = jnp.int32(0)  # Place 2: steps before this tile.
                # BEGIN SOLUTION
                before = i * num_steps
                # END SOLUTION
                work = Work(shared, jnp.int32(0), unit, before)
                results = all_steps(work, 0, num_steps)
                plgpu.barrier_arrive(q_freed.at[0])
                o_tile = o_gmem.at[batch, rows, head]
                store(*results, o_smem.at[0], o_tile, lse_gmem.at[batch, head, rows])

            plgpu.wait_smem_to_gmem(0)

    grid = dict(block=blocks)
    return launch(body, q, grid, wgs=1, block_kv=block_kv, slots=2)(q, k, v)


ex11b.check_count(tile_after_tile)


# %% exercise-phases needs: parameters setup
def phases(first_q, wg, wgs, block_kv, left):
    #: return None  # Your code. For a start: my_first_q = first_q + 64 * wg
    # BEGIN SOLUTION
    seen = lambda first, num: (
        max(first - left, 0) // block_kv,
        -(-(first + num) // block_kv),
    )
    my_first_q = first_q + 64 * wg
    tile_first, tile_end = seen(first_q, 64 * wgs)
    first, end = seen(my_first_q, 64)
    whole_end = max((my_first_q + 1) // block_kv, first)
    whole_first = min(
        max(-(-max(my_first_q + 63 - left, 0) // block_kv), first), whole_end
    )
    return (
        tile_end - end,
        end - whole_end,
        whole_end - whole_first,
        whole_first - first,
        first - tile_first,
    )
    # END SOLUTION


ex11b.check_phases(phases)


# %% exercise-mask needs: parameters setup parts
def aligned_at_the_ends(q, k, v, block_kv=64):
    """(out, lse): the last query sees every key, the one before it all but one."""
    _, num_q, heads, head_dim = q.shape
    unit = LOG2E / math.sqrt(head_dim)

    def body(
        q_gmem, k_gmem, v_gmem, o_gmem, lse_gmem, q_smem, k_smem, v_smem, o_smem, filled
    ):
        head, q_block = lax.axis_index("head"), lax.axis_index("q_block")
        first_q = q_block * WG_ROWS
        #: kv_head = head  # Place 1.
        #: end = div(first_q + WG_ROWS + block_kv - 1, block_kv)  # Place 2.
        # BEGIN SOLUTION
        kv_head = div(head, heads // k.shape[2])
        more = k.shape[1] - num_q
        end = div(first_q + more + WG_ROWS + block_kv - 1, block_kv)
        # END SOLUTION
        rows = pl.ds(q_block * WG_ROWS, WG_ROWS)
        plgpu.copy_gmem_to_smem(q_gmem.at[0, rows, head], q_smem, filled.at[0])
        plgpu.barrier_wait(filled.at[0])

        def logits(s_ref):
            plgpu.wgmma(s_ref, q_smem, k_smem.T)
            return s_ref[...]

        def step(step, carry):
            acc, m_i, l_i = carry
            block = pl.ds(step * block_kv, block_kv)
            plgpu.copy_gmem_to_smem(k_gmem.at[0, block, kv_head], k_smem, filled.at[1])
            plgpu.copy_gmem_to_smem(v_gmem.at[0, block, kv_head], v_smem, filled.at[2])
            plgpu.barrier_wait(filled.at[1])
            s = pl.run_scoped(logits, plgpu.ACC((WG_ROWS, block_kv), jnp.float32))
            row, column = (
                plgpu.broadcasted_iota(
                    jnp.int32, s.shape, dim, layout=plgpu.Layout.WGMMA
                )
                for dim in (0, 1)
            )
            query, key = first_q + row, step * block_kv + column
            #: sees = key <= query  # Place 3.
            # BEGIN SOLUTION
            sees = key <= query + more
            # END SOLUTION
            s = jnp.where(sees, s, -jnp.inf)
            p, alpha, m_i, l_i = softmax_step(s, m_i, l_i, unit, masked=True)
            plgpu.barrier_wait(filled.at[2])
            acc = acc * per_row(alpha, acc.shape)
            acc = add_product(acc, p.astype(v.dtype), v_smem, interpreted())
            return acc, m_i, l_i

        sums = lax.fori_loop(0, end, step, nothing_seen(head_dim))
        o_tile, lse_tile = o_gmem.at[0, rows, head], lse_gmem.at[0, head, rows]
        store(*finish(*sums), o_smem, o_tile, lse_tile)
        plgpu.wait_smem_to_gmem(0)

    tile = lambda rows: plgpu.SMEM((rows, head_dim), q.dtype)
    return plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct((1, heads, num_q), jnp.float32),
        ),
        grid=(heads, num_q // WG_ROWS),
        grid_names=("head", "q_block"),
        scratch_types=[
            tile(WG_ROWS),
            tile(block_kv),
            tile(block_kv),
            tile(WG_ROWS),
            plgpu.Barrier(num_barriers=3),
        ],
        compiler_params=lab.compiler_params(approx_math=True),
    )(q, k, v)


ex11b.check_mask(aligned_at_the_ends)

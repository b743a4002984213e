"""Solutions of chapter 11b's exercises; how to read them: tools/skeletons.py, and `TRIED`: tests/exercises."""

TRIED = r"""
exercise-phases
  seen(first_q, 64 * wgs) => seen(my_first_q, 64)  # for each block that any of its warpgroups sees
  my_first_q + 63 - left => my_first_q - left
  my_first_q + 1) // => my_first_q + 64) //
  max((my_first_q + 1) // block_kv, first) => (my_first_q + 1) // block_kv
    && max(-(-max(my_first_q + 63 - left, 0) // block_kv), first), whole_end
    => -(-max(my_first_q + 63 - left, 0) // block_kv), 999  # none below 0
  lambda *case: phases(*case)[::-1]  # from the last block on
  lambda *case: phases(*case[:3], 128, case[4])
  lambda first_q, wg, wgs, block_kv, left: phases(first_q, wg, 2, block_kv, left)  # phases(
  lambda *case: (0, 1, 2)  # five numbers
exercise-deal
  -steps[tile] => 0  # are possible
  lambda steps, blocks: [list(range(b, len(steps), blocks)) for b in range(blocks)]
  lambda steps, blocks: [sorted(range(len(steps)), key=lambda tile: -steps[tile])[b::blocks] for b in range(blocks)]
  lambda steps, blocks: deal_out(steps[:-1], blocks)  # 0 times
  lambda steps, blocks: [row + [0] for row in deal_out(steps, blocks)]  # times; each of
  lambda steps, blocks: [row + [len(steps)] for row in deal_out(steps, blocks)]
  lambda steps, blocks: [row for row in deal_out(steps, blocks) if row]  # one without a tile
  lambda steps, blocks: [0, 1]  # lists of tiles
exercise-count
  num_stages=2 => num_stages=3  # Right.
  plgpu.barrier_arrive(q_free) => pass  # never end
  done = i * steps => done = jnp.int32(0)  # do the counts go on too, in both roles
  count = i * steps + step => count = step
  count = i * steps + step => count = i + step
  count = i * steps + step => count = step && done = i * steps => done = jnp.int32(0)
  pl.when(i > 0)(lambda: plgpu.barrier_wait(q_free)) => pass
  plgpu.barrier_arrive(q_free) => pass
    && carry = first_step( => plgpu.barrier_arrive(q_free)\n                carry = first_step(
    # reads the stage before its tiles have arrived, or when the next ones may
  carry = first_step( => plgpu.barrier_arrive(q_free)\n                carry = first_step(
  count = i * steps + step => count = step && done = i * steps => done = jnp.int32(0)
    && v_full.at[stage]) => v_full.at[stage])\n                k_ring.drain(steps)\n                v_ring.drain(steps)
    && k_ring.drain(mine * steps) => pass && v_ring.drain(mine * steps) => pass  # waits for a tile's last p v
  plgpu.barrier_arrive(q_free) => pass && store(out => plgpu.barrier_arrive(q_free)\n                store(out
  num_stages=2 => num_stages=1  # a single stage
  batch * heads * num_tiles => (blocks := batch * heads * num_tiles)  # several tiles
  div(head, heads), rem(head, heads), pl => 0 * head, rem(head, heads), pl  # never written
  LOG2E / math.sqrt(head_dim) => LOG2E / 8.0  # head_dim of 128
exercise-mask
  num_stages=2 => num_stages=3  # Right.
  kv_head = div(h, heads // k.shape[2]) => kv_head = jnp.minimum(h, k.shape[2] - 1)  # KV head of its own number
  kv_head = div(h, heads // k.shape[2]) => kv_head = h  # element
  kv_head = div(h, heads // k.shape[2]) => kv_head = rem(h, k.shape[2])  # take turns at the KV heads
  kv_head = div(h, heads // k.shape[2]) => kv_head = div(h, 2)  # element
  first_q + more + 64 => first_q + 64  # never visited
  first_q + more, first_key => first_q, first_key  # sees no key
  first_q + more, first_key => first_q + more - 1, first_key
  first_q + more, first_key => first_q + jnp.where(more > 0, more, 1), first_key  # element
  first_q + more, first_key => first_q + more + 64, first_key  # where is the mask?
  more = k.shape[1] - num_q => more = 128  # 128 queries, 128 keys
  num_stages=2 => num_stages=1  # a single stage
  LOG2E / math.sqrt(head_dim) => LOG2E / 8.0  # heads of 128
  kv_head = div(h => kv_head = v.size + div(h  # element
  blocks_before(first_q + more + 64, block_kv) => k.shape[1] // block_kv && work, no_mask => work, mask
    && (end - 1 - step) * block_kv => step * block_kv  # no query sees the others
  blocks_before(first_q + more + 64, block_kv) => div(first_q + more, 64) + 1  # sees no key
"""


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


# %% exercise-count needs: parameters setup parts steps
def tile_after_tile(q, k, v, *, block_kv=64, num_stages=2, blocks=2):
    """Block b of threads computes tiles b, b + blocks, ... of 64 queries each."""
    batch, tokens, heads, head_dim = q.shape
    steps, num_tiles = k.shape[1] // block_kv, tokens // 64
    scale_log2, in_all = LOG2E / math.sqrt(head_dim), batch * heads * num_tiles

    def kernel(
        q_gmem, k_gmem, v_gmem, o_gmem, q_smem, k_smem, v_smem, q_full, k_full, k_free, v_full, v_free, o_smem, q_free,
        turn,
    ):  # fmt: skip
        block, wg = lax.axis_index("block"), lax.axis_index("wg")
        mine = div(in_all - block + blocks - 1, blocks)  # Tiles of this block.
        k_ring = Ring(k_full, k_free, num_stages)
        v_ring = Ring(v_full, v_free, num_stages)

        def place(i):
            number = block + i * blocks
            head, tile = div(number, num_tiles), rem(number, num_tiles)
            return div(head, heads), rem(head, heads), pl.ds(tile * 64, 64)

        @role("load", wg == 1)
        def load():
            @pl.loop(0, mine)
            def _(i):
                b, h, q_rows = place(i)
                #: # Place 1: when may the queries be overwritten?
                # BEGIN SOLUTION
                pl.when(i > 0)(lambda: plgpu.barrier_wait(q_free))
                # END SOLUTION
                copy(q_gmem.at[b, q_rows, h], q_smem, q_full)

                @pl.loop(0, steps)
                def _(step):
                    rows = pl.ds(step * block_kv, block_kv)
                    #: count = step  # Place 2.
                    # BEGIN SOLUTION
                    count = i * steps + step
                    # END SOLUTION
                    stage = k_ring.acquire(count)
                    copy(k_gmem.at[b, rows, h], k_smem.at[stage], k_full.at[stage])
                    stage = v_ring.acquire(count)
                    copy(v_gmem.at[b, rows, h], v_smem.at[stage], v_full.at[stage])

            k_ring.drain(mine * steps)
            v_ring.drain(mine * steps)
            plgpu.barrier_wait(q_free)  # For the last tile.

        @role("compute", wg == 0)
        def compute():
            @pl.loop(0, mine)
            def _(i):
                b, h, q_rows = place(i)
                #: done = jnp.int32(0)  # Place 3: the steps of earlier tiles.
                # BEGIN SOLUTION
                done = i * steps
                # END SOLUTION
                work = Work(q_smem, k_smem, v_smem, k_ring, v_ring, scale_log2, done)
                one_step = functools.partial(overlapped_step, work, no_mask)
                plgpu.barrier_wait(q_full)
                carry = first_step(work, 0, no_mask)
                carry = lax.fori_loop(1, steps, one_step, carry)
                #: # Place 4: the queries have been read.
                # BEGIN SOLUTION
                plgpu.barrier_arrive(q_free)
                # END SOLUTION
                out = last_step(work, steps - 1, carry)
                store(out, o_smem, o_gmem.at[b, q_rows, h])

            plgpu.wait_smem_to_gmem(0)

    grid, own = dict(block=blocks), dict(compute_wgs=1, keeps_out=True)
    return launch(kernel, q, block_kv, num_stages, grid, **own)(q, k, v)


ex11b.check_count(tile_after_tile)


# %% exercise-mask needs: parameters setup parts steps rung-1
def aligned_at_the_ends(q, k, v, *, block_kv=64, num_stages=2):
    """The last query sees every key, the one before it all but one."""
    batch, num_q, heads, head_dim = q.shape
    scale_log2 = LOG2E / math.sqrt(head_dim)

    def kernel(
        q_gmem, k_gmem, v_gmem, o_gmem, q_smem, k_smem, v_smem, q_full, k_full, k_free, v_full, v_free
    ):  # fmt: skip
        b, h, tile, wg = map(lax.axis_index, ("batch", "head", "tile", "wg"))
        q_rows, first_q = pl.ds(tile * 64, 64), tile * 64
        #: kv_head = h  # Place 1.
        #: end = blocks_before(first_q + 64, block_kv)  # Place 2.
        # BEGIN SOLUTION
        kv_head = div(h, heads // k.shape[2])
        more = k.shape[1] - num_q
        end = blocks_before(first_q + more + 64, block_kv)
        # END SOLUTION
        k_ring = Ring(k_full, k_free, num_stages)
        v_ring = Ring(v_full, v_free, num_stages)

        @role("load", wg == 1)
        def load():
            copy(q_gmem.at[b, q_rows, h], q_smem, q_full)

            @pl.loop(0, end)
            def _(step):
                rows = pl.ds((end - 1 - step) * block_kv, block_kv)
                stage = k_ring.acquire(step)
                copy(k_gmem.at[b, rows, kv_head], k_smem.at[stage], k_full.at[stage])
                stage = v_ring.acquire(step)
                copy(v_gmem.at[b, rows, kv_head], v_smem.at[stage], v_full.at[stage])

            k_ring.drain(end)
            v_ring.drain(end)

        @role("compute", wg == 0)
        def compute():
            first_key = lambda step: (end - 1 - step) * block_kv
            #: mask = lambda s, step: causal(s, first_q, first_key(step))  # Place 3.
            # BEGIN SOLUTION
            mask = lambda s, step: causal(s, first_q + more, first_key(step))
            # END SOLUTION
            work = Work(q_smem, k_smem, v_smem, k_ring, v_ring, scale_log2)
            one_step = functools.partial(overlapped_step, work, no_mask)
            plgpu.barrier_wait(q_full)
            carry = first_step(work, 0, mask)
            carry = lax.fori_loop(1, end, one_step, carry)
            store(last_step(work, end - 1, carry), q_smem, o_gmem.at[b, q_rows, h])
            plgpu.wait_smem_to_gmem(0)

    grid = dict(batch=batch, head=heads, tile=num_q // 64)
    return launch(kernel, q, block_kv, num_stages, grid, compute_wgs=1)(q, k, v)


ex11b.check_mask(aligned_at_the_ends)

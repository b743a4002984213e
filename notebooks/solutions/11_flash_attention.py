"""Solutions of chapter 11's exercises; how to read them: tools/skeletons.py, and `TRIED`: tests/exercises."""

TRIED = r"""
exercise-heads
  k_ring.release(i) => pass && v_ring.release(i) => v_ring.release(i)\n                k_ring.release(i)  # Right.
  v_ring.release(i) => pass  # never end
  acc = acc * per_row(alpha, acc.shape) => pass  # out
  q_rows, 2 * h + wg] => q_rows, 2 * h]  # there is a race
  q_rows, 2 * h + wg] => q_rows, h + 2 * wg]  # out
  q_rows, 2 * h + 1] => q_rows, 2 * h]
  half = pl.ds(wg * 64, 64) => half = pl.ds(0, 64)  # while a WGMMA of another warpgroup may still read
  k_ring.release(i) => pass && s = logits( => k_ring.release(i)\n                s = logits(
    # give a stage back (barrier_arrive) after the wgmma_wait with which its product has ended
  v_ring.release(i) => pass && acc = add_product( => v_ring.release(i)\n                acc = add_product(
  copy(q_gmem.at[b, q_rows, 2 * h + 1], q_smem.at[pl.ds(64, 64)], q_full) => pass  # never end
  k.shape[1] // block_kv => 4  # other numbers of keys
  LOG2E / math.sqrt(head_dim) => LOG2E / 8.0  # other numbers of keys
  num_stages=2 => num_stages=1  # a single stage
  o_gmem.at[b, => o_gmem.at[0,  # there is a race
  compute_wgs=2, heads_per_block=2 => compute_wgs=1, heads_per_block=1 && wg == 2 => wg == 1 && wg < 2 => wg == 0
    && copy(q_gmem.at[b, q_rows, 2 * h + 1], q_smem.at[pl.ds(64, 64)], q_full) => pass && q_rows, 2 * h] => q_rows, h]
    && 2 * h + wg => h && k_gmem.at[b, rows, h] => k_gmem.at[b, rows, h // 2]
    && v_gmem.at[b, rows, h] => v_gmem.at[b, rows, h // 2]  # one warpgroup multiplies
exercise-schedule
  lambda wgs, steps, products, softmax: max(wgs * products, products + softmax) * np.arange(steps) + products *
    np.arange(wgs)[:, None]  # Right.
  max(tensor_free, ready[wg]) => ready[wg] && tensor_free + softmax => start + products + softmax
    # free only when the products before have ended
  max(tensor_free, ready[wg]) => tensor_free  # after its own softmax
  tensor_free = start + products => tensor_free = start + products + softmax && tensor_free + softmax => tensor_free
    # do not wait for a softmax
  lambda wgs, steps, *times: starts(steps, wgs, *times)  # is right
  lambda *args: np.asarray(starts(*args)) + 1  # Two times must have passed
  lambda *args: starts(*args) if args in ex11.SCHEDULES else [[0] * args[1]] * args[0]  # Two times must have passed
  lambda wgs, steps, *_: [[0] * steps] * wgs
  lambda wgs, steps, *_: itertools.repeat(0)  # a list
  lambda wgs, steps, *_: [["a"] * steps] * wgs
exercise-turns
  lambda wg, wgs, own, total: [("arrive", 0)] * (wg == 0) + [line for step in range(total + 1) for line in
    [("wait", wg)] + [["products"]] * (step >= total - own) + [["arrive", (wg + 1) % wgs]]] + [("wait", 0)] * (wg == 0)
    # Right.
  lambda wg, wgs, own, total: [("arrive", 0)] * (wg == 0) + [line for step in range(total + 1) for line in
    [("wait", wg)] + [("products",)] * (step <= own) + [("arrive", (wg + 1) % wgs)]] + [("wait", 0)] * (wg == 0)
    # skips its first
  [("wait", 0)] if wg == 0 else [] => []  # drain it
  * (total - own) => * 0  # waits for ever
  [("arrive", 0)] if wg == 0 else [] => []
  [("arrive", 0)] if wg == 0 else [] => [("arrive", 0)]  # more than one turn
  (own + 1) => own  # the last p v
  lines += [("wait", wg), ("products",) => lines += [("products",)  # has no turn
  (wg + 1) % wgs => wg + 1  # does the ring close
  lambda wg, wgs, own, total: [("wait", 0), ("products",)] * (own + 1)
  lambda wg, wgs, own, total: [("arrive", 0)] * (wg == 0) + [("wait", wg), *[("products",)] * (own + 1),
    ("arrive", (wg + 1) % wgs)] + [("wait", wg), ("arrive", (wg + 1) % wgs)] * total + [("wait", 0)] * (wg == 0)
    # the products of two steps in one turn
  * (own + 1) => * own + 3 * [("wait", wg), ("arrive", after)] + [("wait", wg), ("products",), ("arrive", after)]
    # they must follow each other
exercise-mend
  turns.start(wg) => pass  # never end
  turns.drain(wg) => pass  # is the last turn drained
  v_ring.release(i) => && acc = add_product( => v_ring.release(i)\n                acc = add_product(
    # give a stage back (barrier_arrive) after the wgmma_wait with which its product has ended
  Turns(turn, 2) => Turns(None, 2)  # the warpgroups take no turns
  num_stages=2 => num_stages=1  # a single stage
  k.shape[1] // block_kv => 4  # other numbers of keys
  , started=pass_on) => ) && acc = acc * per_row => pass_on()\n                acc = acc * per_row
    # before you wait for them
"""


# %% exercise-heads needs: parameters setup parts
def two_heads(q, k, v, *, block_kv=64, num_stages=2):
    steps = k.shape[1] // block_kv

    def kernel(
        q_gmem, k_gmem, v_gmem, o_gmem, q_smem, k_smem, v_smem, q_full, k_full, k_free, v_full, v_free
    ):  # fmt: skip
        b, h, tile, wg = map(lax.axis_index, ("batch", "head", "tile", "wg"))
        q_rows = pl.ds(tile * 64, 64)
        k_ring = Ring(k_full, k_free, num_stages)
        v_ring = Ring(v_full, v_free, num_stages)

        @role("load", wg == 2)
        def load():
            copy(q_gmem.at[b, q_rows, 2 * h], q_smem.at[pl.ds(0, 64)], q_full)
            #: # Your line: the other head's queries.
            # BEGIN SOLUTION
            copy(q_gmem.at[b, q_rows, 2 * h + 1], q_smem.at[pl.ds(64, 64)], q_full)
            # END SOLUTION

            @pl.loop(0, steps)
            def _(i):
                rows = pl.ds(i * block_kv, block_kv)
                stage = k_ring.acquire(i)
                copy(k_gmem.at[b, rows, h], k_smem.at[stage], k_full.at[stage])
                stage = v_ring.acquire(i)
                copy(v_gmem.at[b, rows, h], v_smem.at[stage], v_full.at[stage])

            k_ring.drain(steps)
            v_ring.drain(steps)

        @role("compute", wg < 2)
        def compute():
            #: pass  # Your lines. Here head_dim is q.shape[3], and scale_log2 LOG2E / math.sqrt(head_dim).
            # BEGIN SOLUTION
            head_dim = q.shape[3]
            scale_log2 = LOG2E / math.sqrt(head_dim)
            half = pl.ds(wg * 64, 64)
            plgpu.barrier_wait(q_full)

            def step(i, carry):
                acc, m_i, l_i = carry
                stage = k_ring.wait(i)
                s = logits(q_smem.at[half], k_smem.at[stage])
                k_ring.release(i)
                p, alpha, m_i, l_i = softmax_step(s, m_i, l_i, scale_log2)
                acc = acc * per_row(alpha, acc.shape)
                stage = v_ring.wait(i)
                acc = add_product(acc, p.astype(v.dtype), v_smem.at[stage])
                v_ring.release(i)
                return acc, m_i, l_i

            sums = lax.fori_loop(0, steps, step, nothing_seen(head_dim))
            store(finish(*sums), q_smem.at[half], o_gmem.at[b, q_rows, 2 * h + wg])
            # END SOLUTION

    blocks = launch(kernel, q, block_kv, num_stages, compute_wgs=2, heads_per_block=2)
    return blocks(q, k, v)


ex11.check_heads(two_heads)


# %% exercise-schedule needs: parameters setup
def starts(wgs, steps, products, softmax):
    #: return None  # Your code: a list of `steps` times for each of `wgs` warpgroups.
    # BEGIN SOLUTION
    tensor_free, ready = 0, [0] * wgs
    found = [[] for _ in range(wgs)]
    for _ in range(steps):
        for wg in range(wgs):
            start = max(tensor_free, ready[wg])
            found[wg].append(start)
            tensor_free = start + products
            ready[wg] = tensor_free + softmax
    return found
    # END SOLUTION


ex11.check_schedule(starts)


# %% exercise-turns needs: parameters setup
def turns(wg, wgs, own, total):
    #: return None  # Your code: a list such as [("wait", wg), ("products",), ...]
    # BEGIN SOLUTION
    after = (wg + 1) % wgs
    lines = [("arrive", 0)] if wg == 0 else []
    lines += [("wait", wg), ("arrive", after)] * (total - own)
    lines += [("wait", wg), ("products",), ("arrive", after)] * (own + 1)
    return lines + ([("wait", 0)] if wg == 0 else [])
    # END SOLUTION


ex11.check_turns(turns)


# %% exercise-mend needs: parameters setup parts load-steps
def mended(q, k, v, *, block_kv=64, num_stages=2):
    head_dim, steps = q.shape[3], k.shape[1] // block_kv
    scale_log2 = LOG2E / math.sqrt(head_dim)

    def kernel(
        q_gmem, k_gmem, v_gmem, o_gmem, q_smem, k_smem, v_smem, q_full, k_full, k_free, v_full, v_free, turn
    ):  # fmt: skip
        b, h, tile, wg = map(lax.axis_index, ("batch", "head", "tile", "wg"))
        q_rows = pl.ds(tile * 128, 128)
        k_ring = Ring(k_full, k_free, num_stages)
        v_ring = Ring(v_full, v_free, num_stages)

        @role("load", wg == 2)
        def load():
            copy(q_gmem.at[b, q_rows, h], q_smem, q_full)
            keys = k_gmem.at[b, :, h], k_smem, k_ring, k_full
            values = v_gmem.at[b, :, h], v_smem, v_ring, v_full
            load_steps(steps, keys, values)

        @role("compute", wg < 2)
        def compute():
            half = pl.ds(wg * 64, 64)
            turns = Turns(turn, 2)
            # BEGIN SOLUTION
            turns.start(wg)
            # END SOLUTION
            plgpu.barrier_wait(q_full)

            def step(i, carry):
                acc, m_i, l_i = carry
                stage, pass_on = k_ring.wait(i), lambda: turns.pass_on(wg)
                turns.take(wg)
                s = logits(q_smem.at[half], k_smem.at[stage], started=pass_on)
                k_ring.release(i)
                p, alpha, m_i, l_i = softmax_step(s, m_i, l_i, scale_log2)
                acc = acc * per_row(alpha, acc.shape)
                stage = v_ring.wait(i)
                #: v_ring.release(i)
                acc = add_product(acc, p.astype(v.dtype), v_smem.at[stage])
                # BEGIN SOLUTION
                v_ring.release(i)
                # END SOLUTION
                return acc, m_i, l_i

            sums = lax.fori_loop(0, steps, step, nothing_seen(head_dim))
            # BEGIN SOLUTION
            turns.drain(wg)
            # END SOLUTION
            store(finish(*sums), q_smem.at[half], o_gmem.at[b, q_rows, h].at[half])

    return launch(kernel, q, block_kv, num_stages, compute_wgs=2, turns=True)(q, k, v)


ex11.check_mended(mended)

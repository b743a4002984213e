"""Solutions of chapter 11's exercises; how to read them: tools/skeletons.py, and `TRIED`: tests/exercises."""

TRIED = r"""
exercise-compute
  \n                slot = values.wait(step) => && keys.release(step) => slot = values.wait(step)
    && values.release(step) => values.release(step)\n                keys.release(step)  # Right.
  values.release(step) => pass  # never end
  acc = acc * per_row(alpha, acc.shape) => pass  # out
  s = logits(keys.wait(step))\n                keys.release(step)
    => slot = keys.wait(step)\n                keys.release(step)\n                s = logits(slot)
    # give a slot back (barrier_arrive) after the wgmma_wait with which its product has ended
  values.release(step) => && slot = values.wait(step) => slot = values.wait(step)\n                values.release(step)
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
  lambda wgs, steps, *_: [[0] * steps] * wgs
  lambda wgs, steps, *_: itertools.repeat(0)  # a list
  lambda wgs, steps, *_: [["a"] * steps] * wgs
exercise-1
  lambda wg, wgs, own, total: [("arrive", 0)] * (wg == 0) + [line for step in range(total + 1) for line in
    [("wait", wg)] + [["products"]] * (step <= own) + [["arrive", (wg + 1) % wgs]]] + [("wait", 0)] * (wg == 0)
    # Right.
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
exercise-mend
  turns.start(role) => pass  # never end
  turns.drain(role) => pass  # is the last turn drained
  values.release(step) => && acc = add_product( => values.release(step)\n                acc = add_product(
    # give a slot back (barrier_arrive) after the wgmma_wait with which its product has ended
  Turns(turn, 2) => Turns(None, 2)  # the warpgroups take no turns
"""


# %% exercise-compute needs: parameters setup parts ring steps kernel
def two_warpgroups(q, k, v, block_kv=64):
    unit, num_steps = LOG2E / math.sqrt(q.shape[3]), k.shape[1] // block_kv

    def body(
        q_gmem, k_gmem, v_gmem, o_gmem, lse_gmem, *, q_smem, k_smem, v_smem, o_smem, q_filled, k_filled, v_filled,
        k_freed, v_freed, **_,
    ):  # fmt: skip
        role, batch, head, q_block = (
            lax.axis_index(name) for name in ("role", "batch", "head", "q_block")
        )
        keys, values = Ring(k_filled, k_freed, 2), Ring(v_filled, v_freed, 2)
        rows = lambda wg: pl.ds((q_block * 2 + wg) * WG_ROWS, WG_ROWS)

        @pl.when(role == 2)
        def memory():
            for wg in range(2):
                plgpu.copy_gmem_to_smem(
                    q_gmem.at[batch, rows(wg), head], q_smem.at[wg], q_filled.at[wg]
                )

            @pl.loop(0, num_steps)
            def _(step):
                block = pl.ds(step * block_kv, block_kv)
                for ring, gmem, smem in (
                    (keys, k_gmem, k_smem),
                    (values, v_gmem, v_smem),
                ):
                    slot = ring.acquire(step)
                    plgpu.copy_gmem_to_smem(
                        gmem.at[batch, block, head], smem.at[slot], ring.filled.at[slot]
                    )

            keys.drain(num_steps), values.drain(num_steps)

        @pl.when(role < 2)
        def compute():
            plgpu.barrier_wait(q_filled.at[role])

            def logits(slot):
                return Work(
                    Shared(q_smem, k_smem, v_smem, keys, values, Turns(None, 2)),
                    role,
                    unit,
                ).logits(slot)

            def step(step, carry):
                acc, m_i, l_i = carry
                #: pass  # Your lines.
                # BEGIN SOLUTION
                s = logits(keys.wait(step))
                keys.release(step)
                p, alpha, m_i, l_i = softmax_step(s, m_i, l_i, unit, False)
                slot = values.wait(step)
                acc = acc * per_row(alpha, acc.shape)
                acc = add_product(
                    acc, p.astype(v.dtype), v_smem.at[slot], interpreted()
                )
                values.release(step)
                # END SOLUTION
                return acc, m_i, l_i

            sums = lax.fori_loop(0, num_steps, step, nothing_seen(q.shape[3]))
            store(
                *finish(*sums),
                o_smem.at[role],
                o_gmem.at[batch, rows(role), head],
                lse_gmem.at[batch, head, rows(role)],
            )
            plgpu.wait_smem_to_gmem(0)

    grid = dict(batch=q.shape[0], head=q.shape[2], q_block=q.shape[1] // 128)
    return launch(body, q, grid, wgs=2, block_kv=block_kv, slots=2)(q, k, v)


ex11.check_compute(two_warpgroups)


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


# %% exercise-1 needs: parameters setup
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


# %% exercise-mend needs: parameters setup parts ring steps kernel
def mended(q, k, v, block_kv=64):
    unit, num_steps = LOG2E / math.sqrt(q.shape[3]), k.shape[1] // block_kv

    def body(
        q_gmem, k_gmem, v_gmem, o_gmem, lse_gmem, *, q_smem, k_smem, v_smem, o_smem, q_filled, k_filled, v_filled,
        k_freed, v_freed, turn, **_,
    ):  # fmt: skip
        role, batch, head, q_block = (
            lax.axis_index(name) for name in ("role", "batch", "head", "q_block")
        )
        keys, values, turns = (
            Ring(k_filled, k_freed, 2),
            Ring(v_filled, v_freed, 2),
            Turns(turn, 2),
        )
        rows = lambda wg: pl.ds((q_block * 2 + wg) * WG_ROWS, WG_ROWS)

        @pl.when(role == 2)
        def memory():
            for wg in range(2):
                plgpu.copy_gmem_to_smem(
                    q_gmem.at[batch, rows(wg), head], q_smem.at[wg], q_filled.at[wg]
                )

            @pl.loop(0, num_steps)
            def _(step):
                block = pl.ds(step * block_kv, block_kv)
                for ring, gmem, smem in (
                    (keys, k_gmem, k_smem),
                    (values, v_gmem, v_smem),
                ):
                    slot = ring.acquire(step)
                    plgpu.copy_gmem_to_smem(
                        gmem.at[batch, block, head], smem.at[slot], ring.filled.at[slot]
                    )

            keys.drain(num_steps), values.drain(num_steps)

        @pl.when(role < 2)
        def compute():
            #: # Place 1.
            # BEGIN SOLUTION
            turns.start(role)
            # END SOLUTION
            plgpu.barrier_wait(q_filled.at[role])
            work = Work(Shared(q_smem, k_smem, v_smem, keys, values, turns), role, unit)

            def step(step, carry):
                acc, m_i, l_i = carry
                slot = keys.wait(step)
                turns.take(role)
                s = work.logits(slot)  # Passes the turn on.
                keys.release(step)
                p, alpha, m_i, l_i = work.softmax(s, m_i, l_i)
                slot = values.wait(step)
                #: values.release(step)  # Place 2.
                acc, p = acc * per_row(alpha, acc.shape), p.astype(v.dtype)
                acc = add_product(acc, p, v_smem.at[slot], interpreted())
                # BEGIN SOLUTION
                values.release(step)
                # END SOLUTION
                return acc, m_i, l_i

            sums = lax.fori_loop(0, num_steps, step, nothing_seen(q.shape[3]))
            store(
                *finish(*sums),
                o_smem.at[role],
                o_gmem.at[batch, rows(role), head],
                lse_gmem.at[batch, head, rows(role)],
            )
            #: # Place 3.
            # BEGIN SOLUTION
            turns.drain(role)
            # END SOLUTION
            plgpu.wait_smem_to_gmem(0)

    grid = dict(batch=q.shape[0], head=q.shape[2], q_block=q.shape[1] // 128)
    return launch(body, q, grid, wgs=2, block_kv=block_kv, slots=2)(q, k, v)


ex11.check_mended(mended)

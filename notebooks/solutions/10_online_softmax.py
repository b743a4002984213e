"""Solutions of chapter 10's exercises; how to read them: tools/skeletons.py, and `TRIED`: tests/exercises."""

TRIED = r"""
exercise-1
  lambda *args: lazy_step(*(np.asarray(arg, np.float32) for arg in args))  # Right.
  l_i * alpha + p => l_i + p  # what l held
  acc * alpha[:, None] => acc  # what acc held
  shift = np.where(np.isneginf(m_new), 0, m_new) => shift = m_new  # -inf - -inf
  np.exp2 => np.exp  # is the base 2
  m_new = np.where(top > m_i + slack, top, m_i) => m_new = x.max(axis=1)  # by more than slack
  p @ v => p / p.sum(axis=1, keepdims=True) @ v  # not yet divided
  lambda m, l_i, acc, x, v, slack: (m, l_i + np.exp2(x).sum(1), acc + np.exp2(x) @ v)  # m after block 0
  m_i + slack => m_i  # by more than slack
  m_i + slack => m_i + 2 * slack  # m after block
  lambda m, l_i, acc, x, v, slack: (m[:, None], l_i, acc)  # shape
  lambda m, l_i, acc, x, v, slack: lazy_step(m, l_i, acc, np.maximum(x, -1e30), v, slack)  # masked logits
exercise-2
  lambda *parts: merge(*(part.astype(np.float32) for part in parts))  # Right.
  lambda oa, la, ob, lb: ((oa + ob) / 2, np.logaddexp(la, lb))  # not the same weight
  lambda oa, la, ob, lb: (oa + ob, np.logaddexp(la, lb))  # divided by their own sums
  lambda oa, la, ob, lb: merge(oa, lb, ob, la)  # its own exp(lse)
  lambda oa, la, ob, lb: (merge(oa, la, ob, lb)[0], np.maximum(la, lb))  # the larger is not all
  lambda oa, la, ob, lb: (merge(oa, la, ob, lb)[0], la + lb)  # not their logarithms
  lambda oa, la, ob, lb: (oa, np.logaddexp(la, lb))  # out (
  np.logaddexp(lse_a, lse_b) => np.log(np.exp(lse_a) + np.exp(lse_b))  # may overflow
  shift = np.where(np.isneginf(lse), 0, lse) => shift = lse  # where both parts are empty
  np.logaddexp => np.logaddexp2 && np.exp( => np.exp2(  # natural logarithm
  lambda oa, la, ob, lb: (merge(oa, la, ob, lb)[0], np.logaddexp(la, lb)[:, None])  # shape
exercise-sinks
  l_i = l_i + 1.0 => pass  # lse
  sink * LOG2E => sink  # has base 2
  l_i = l_i + 1.0 => acc = acc + 1.0\n        l_i = l_i + 1.0  # out
exercise-mend
  load(block + 1, k_gmem, k_smem, k_loaded) => && s = logits( => load(block + 1, k_gmem, k_smem, k_loaded)\n
    \n            s = logits(  # reads the stage before its tiles have arrived
  load(block + 1, v_gmem, v_smem, v_loaded) => && acc = add_product( => load(block + 1, v_gmem, v_smem, v_loaded)
    \n            acc = add_product(
  load(block + 1, k_gmem, k_smem, k_loaded) => pass  # never end
  load(block + 1, v_gmem, v_smem, v_loaded) => pass
  block < num_blocks => block <= num_blocks  # nobody waits for
  load(block + 1, k_gmem, k_smem, k_loaded) => && plgpu.barrier_wait(v_loaded)
    => load(block + 1, k_gmem, k_smem, k_loaded)\n            plgpu.barrier_wait(v_loaded)
    # the next keys come too late to hide anything
  load(block + 1, k_gmem, k_smem, k_loaded) => && load(block + 1, v_gmem, v_smem, v_loaded)
    => load(block + 1, k_gmem, k_smem, k_loaded)\n            load(block + 1, v_gmem, v_smem, v_loaded)
exercise-3
  jnp.maximum => max && jnp.minimum => min  # jnp.maximum
  first_q - left, 0) => first_q - left + 64, 0)  # is left out
  first_q - left, 0) => first_q - left - 64, 0)  # no query sees any
  first_q + 63 - left => first_q - left  # is not masked
  first_q + 63 - left => first_q + 191 - left  # is masked
  (first_q + 1) // block_kv => (first_q + 64) // block_kv  # is not masked
  jnp.maximum((first_q + 1) // block_kv, start) => (first_q + 1) // block_kv  # must end after it begins
  lambda q, b, n, left: [(0, n // b, True)]  # no query sees any
  lambda q, b, n, left: [(0, (q + 63) // b + 1, True)]
  lambda q, b, n, left: [((q - left) // b, (q + 63) // b + 1, True)]
  lambda q, b, n, left: [(max(q - left, 0) // b, (q + 63) // b + 1, True)]  # is masked, and
  lambda q, b, n, left: [(max(q - left, 0) // b, (q + 63) // b, True)]  # is left out
  lambda q, b, n, left: [(0, 1, True), (2, 3, True)]  # the next one begin there
  lambda q, b, n, left: [(0, 1)]  # a list of (first, end, masked)
  lambda q, b, n, left: []  # is left out
"""


# %% exercise-1 needs: parameters setup
def lazy_step(m_i, l_i, acc, x, v, slack):
    #: return None  # Your code.
    # BEGIN SOLUTION
    top = np.maximum(m_i, x.max(axis=1))
    m_new = np.where(top > m_i + slack, top, m_i)
    shift = np.where(np.isneginf(m_new), 0, m_new)
    p, alpha = np.exp2(x - shift[:, None]), np.exp2(m_i - shift)
    return m_new, l_i * alpha + p.sum(axis=1), acc * alpha[:, None] + p @ v
    # END SOLUTION


ex10.check_step(lazy_step)


# %% exercise-2 needs: parameters setup
def merge(out_a, lse_a, out_b, lse_b):
    #: return None  # Your code.
    # BEGIN SOLUTION
    lse = np.logaddexp(lse_a, lse_b)
    shift = np.where(np.isneginf(lse), 0, lse)
    return np.exp(lse_a - shift)[:, None] * out_a + np.exp(lse_b - shift)[
        :, None
    ] * out_b, lse
    # END SOLUTION


ex10.check_merge(merge)


# %% exercise-sinks needs: parameters setup parts
def attend_with_sinks(q, k, v, sinks, block_kv=128):
    head_dim, unit = q.shape[3], LOG2E / math.sqrt(q.shape[3])

    def body(q_gmem, k_gmem, v_gmem, sinks_gmem, o_gmem, lse_gmem, *,
             q_smem, k_smem, v_smem, q_loaded, k_loaded, v_loaded):  # fmt: skip
        batch, head = lax.axis_index("batch"), lax.axis_index("head")
        queries = pl.ds(lax.axis_index("q_block") * BLOCK_Q, BLOCK_Q)
        plgpu.copy_gmem_to_smem(q_gmem.at[batch, queries, head], q_smem, q_loaded)
        plgpu.barrier_wait(q_loaded)

        def step(block, carry):
            acc, m_i, l_i = carry
            keys = pl.ds(block * block_kv, block_kv)
            plgpu.copy_gmem_to_smem(k_gmem.at[batch, keys, head], k_smem, k_loaded)
            plgpu.copy_gmem_to_smem(v_gmem.at[batch, keys, head], v_smem, v_loaded)
            plgpu.barrier_wait(k_loaded)
            p, alpha, m_i, l_i = softmax_step(
                logits(q_smem, k_smem), m_i, l_i, unit, masked=False
            )
            plgpu.barrier_wait(v_loaded)
            acc, p = acc * per_row(alpha, acc.shape), p.astype(v.dtype)
            acc = add_product(acc, p, v_smem, interpreted())
            return acc, m_i, l_i

        sink = sinks_gmem[head]  # A float32 scalar.
        acc, m_i, l_i = nothing_seen(head_dim)
        #: # Your lines. A number for each row: plgpu.layout_cast(jnp.full(...), ROWS)
        #: m_i, l_i = m_i + 0 * sink, l_i
        # BEGIN SOLUTION
        m_i = plgpu.layout_cast(jnp.full((BLOCK_Q,), sink * LOG2E, jnp.float32), ROWS)
        l_i = l_i + 1.0
        # END SOLUTION
        sums = lax.fori_loop(0, k.shape[1] // block_kv, step, (acc, m_i, l_i))
        store(
            *finish(*sums),
            q_smem,
            o_gmem.at[batch, queries, head],
            lse_gmem.at[batch, head, queries],
        )

    return launch(body, q, block_kv)(q, k, v, sinks)


ex10.check_sinks(attend_with_sinks)


# %% exercise-mend needs: parameters setup parts
def mended(q, k, v, block_kv=128):
    unit, num_blocks = LOG2E / math.sqrt(q.shape[3]), k.shape[1] // block_kv

    def body(
        q_gmem,
        k_gmem,
        v_gmem,
        o_gmem,
        lse_gmem,
        *,
        q_smem,
        k_smem,
        v_smem,
        q_loaded,
        k_loaded,
        v_loaded,
    ):
        batch, head = lax.axis_index("batch"), lax.axis_index("head")
        queries = pl.ds(lax.axis_index("q_block") * BLOCK_Q, BLOCK_Q)

        def load(block, gmem, smem, loaded):
            #: @pl.when(block <= num_blocks)  # Place 1.
            # BEGIN SOLUTION
            @pl.when(block < num_blocks)
            # END SOLUTION
            def _():
                plgpu.copy_gmem_to_smem(
                    gmem.at[batch, pl.ds(block * block_kv, block_kv), head],
                    smem,
                    loaded,
                )

        def step(block, carry):
            acc, m_i, l_i = carry
            plgpu.barrier_wait(k_loaded)
            #: load(block + 1, k_gmem, k_smem, k_loaded)  # Place 2.
            s = logits(q_smem, k_smem)
            # BEGIN SOLUTION
            load(block + 1, k_gmem, k_smem, k_loaded)
            # END SOLUTION
            p, alpha, m_i, l_i = softmax_step(s, m_i, l_i, unit, masked=False)
            plgpu.barrier_wait(v_loaded)
            #: load(block + 1, v_gmem, v_smem, v_loaded)  # Place 3.
            acc, p = acc * per_row(alpha, acc.shape), p.astype(v.dtype)
            acc = add_product(acc, p, v_smem, interpreted())
            # BEGIN SOLUTION
            load(block + 1, v_gmem, v_smem, v_loaded)
            # END SOLUTION
            return acc, m_i, l_i

        plgpu.copy_gmem_to_smem(q_gmem.at[batch, queries, head], q_smem, q_loaded)
        load(0, k_gmem, k_smem, k_loaded)
        load(0, v_gmem, v_smem, v_loaded)
        plgpu.barrier_wait(q_loaded)
        sums = lax.fori_loop(0, num_blocks, step, nothing_seen(q.shape[3]))
        store(
            *finish(*sums),
            q_smem,
            o_gmem.at[batch, queries, head],
            lse_gmem.at[batch, head, queries],
        )

    return launch(body, q, block_kv)(q, k, v)


ex10.check_mended(mended)


# %% exercise-3 needs: parameters setup
def window_ranges(first_q, block_kv, num_kv, left):
    #: return None  # Your code. For a start: cut_masked(first_q, block_kv, num_kv)
    # BEGIN SOLUTION
    first = jnp.maximum(first_q - left, 0) // block_kv
    end = (first_q + 64 + block_kv - 1) // block_kv
    start = jnp.minimum(
        (jnp.maximum(first_q + 63 - left, 0) + block_kv - 1) // block_kv, end
    )
    stop = jnp.maximum((first_q + 1) // block_kv, start)
    return [(first, start, True), (start, stop, False), (stop, end, True)]
    # END SOLUTION


ex10.check_ranges(window_ranges)

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
  m_i + slack => m_i + 8.0  # is an argument
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
  shift = np.where(np.isneginf(lse), 0, lse) => shift = lse if np.isfinite(lse).any() else np.zeros_like(lse)
    # rows that see nothing in one part
  np.logaddexp => np.logaddexp2 && np.exp( => np.exp2(  # natural logarithm
  lambda oa, la, ob, lb: (merge(oa, la, ob, lb)[0], np.logaddexp(la, lb)[:, None])  # shape
exercise-sinks
  l_i + 1.0 => l_i  # attention without sinks
  jnp.full_like(m_i, sink * LOG2E) => m_i
  sink * LOG2E => sink * scale_log2  # sinks (5.0, -1.0), out
  sink * LOG2E => sink  # has base 2
  l_i + 1.0 => l_i + jnp.where(tile == 0, 1.0, 0.0)  # out
  sink * LOG2E => jnp.maximum(sink, 0) * LOG2E
  l_i + 1.0 => l_i + 2.0
  l_i + 1.0 => l_i + 1.0\n        acc = acc + 1.0
exercise-mend
  load(i + 1, k_gmem, k_smem, k_full) => && s = logits( => load(i + 1, k_gmem, k_smem, k_full)\n
    \n            s = logits(  # may already be arriving there
  load(i + 1, v_gmem, v_smem, v_full) => && acc = add_product( => load(i + 1, v_gmem, v_smem, v_full)
    \n            acc = add_product(
  load(i + 1, k_gmem, k_smem, k_full) => pass  # never end
  load(i + 1, v_gmem, v_smem, v_full) => pass
  in_time = i < steps => in_time = i <= steps  # nobody waits for
  in_time = i < steps => in_time = i < 3
  in_time = i < steps => in_time = i < 2  # never end
  load(i + 1, k_gmem, k_smem, k_full) => && wait(v_full)
    => load(i + 1, k_gmem, k_smem, k_full)\n            wait(v_full)  # the next keys come too late
  load(i + 1, k_gmem, k_smem, k_full) => wait(v_full)\n            load(i + 1, k_gmem, k_smem, k_full)
    && acc.shape)\n            wait(v_full) => acc.shape)
  load(i + 1, k_gmem, k_smem, k_full) => && load(i + 1, v_gmem, v_smem, v_full)
    => load(i + 1, k_gmem, k_smem, k_full)\n            load(i + 1, v_gmem, v_smem, v_full)
  load(i + 1, k_gmem, k_smem, k_full) => pl.when(i < 0)(lambda: load(i + 1, k_gmem, k_smem, k_full))
    && load(i + 1, v_gmem, v_smem, v_full)
    => load(i + 1, k_gmem, k_smem, k_full)\n            load(i + 1, v_gmem, v_smem, v_full)
  load(i + 1, v_gmem, v_smem, v_full) => && s = logits(
    => pl.when(i > 0)(lambda: load(i, v_gmem, v_smem, v_full))\n            s = logits(  # the next values come too late
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


# %% exercise-sinks needs: parameters setup parts launch helpers
def attend_with_sinks(q, k, v, sinks, *, block_kv=128):
    head_dim, steps = q.shape[3], k.shape[1] // block_kv
    scale_log2 = LOG2E / math.sqrt(head_dim)

    def kernel(
        q_gmem, k_gmem, v_gmem, sinks_gmem, o_gmem, q_smem, k_smem, v_smem, q_full, k_full, v_full
    ):  # fmt: skip
        b, h, tile = map(lax.axis_index, ("batch", "head", "tile"))
        q_rows = pl.ds(tile * 64, 64)

        def load(i, gmem, smem, full):
            rows = pl.ds(i * block_kv, block_kv)
            copy(gmem.at[b, rows, h], smem, full)

        def step(i, carry):
            acc, m_i, l_i = carry
            load(i, k_gmem, k_smem, k_full)
            load(i, v_gmem, v_smem, v_full)
            wait(k_full)
            s = logits(q_smem, k_smem)
            p, alpha, m_i, l_i = softmax_step(s, m_i, l_i, scale_log2)
            acc = acc * per_row(alpha, acc.shape)
            wait(v_full)
            acc = add_product(acc, p.astype(v.dtype), v_smem)
            return acc, m_i, l_i

        copy(q_gmem.at[b, q_rows, h], q_smem, q_full)
        plgpu.barrier_wait(q_full)
        acc, m_i, l_i = nothing_seen(head_dim)
        sink = sinks_gmem[h]  # A float32 scalar.
        #: m_i, l_i = m_i, l_i + 0 * sink  # Your line: one number per row in each.
        # BEGIN SOLUTION
        m_i, l_i = jnp.full_like(m_i, sink * LOG2E), l_i + 1.0
        # END SOLUTION
        sums = lax.fori_loop(0, steps, step, (acc, m_i, l_i))
        store(finish(*sums), q_smem, o_gmem.at[b, q_rows, h])

    return launch(kernel, q, block_kv)(q, k, v, sinks)


ex10.check_sinks(attend_with_sinks)


# %% exercise-mend needs: parameters setup parts launch helpers
def mended(q, k, v, *, block_kv=128):
    head_dim, steps = q.shape[3], k.shape[1] // block_kv
    scale_log2 = LOG2E / math.sqrt(head_dim)

    def kernel(
        q_gmem, k_gmem, v_gmem, o_gmem, q_smem, k_smem, v_smem, q_full, k_full, v_full
    ):  # fmt: skip
        b, h, tile = map(lax.axis_index, ("batch", "head", "tile"))
        q_rows = pl.ds(tile * 64, 64)

        def load(i, gmem, smem, full):
            rows = pl.ds(i * block_kv, block_kv)
            #: in_time = i <= steps  # Place 1.
            # BEGIN SOLUTION
            in_time = i < steps
            # END SOLUTION
            pl.when(in_time)(lambda: copy(gmem.at[b, rows, h], smem, full))

        def step(i, carry):
            acc, m_i, l_i = carry
            wait(k_full)
            #: load(i + 1, k_gmem, k_smem, k_full)  # Place 2.
            s = logits(q_smem, k_smem)
            # BEGIN SOLUTION
            load(i + 1, k_gmem, k_smem, k_full)
            # END SOLUTION
            p, alpha, m_i, l_i = softmax_step(s, m_i, l_i, scale_log2)
            acc = acc * per_row(alpha, acc.shape)
            wait(v_full)
            #: load(i + 1, v_gmem, v_smem, v_full)  # Place 3.
            acc = add_product(acc, p.astype(v.dtype), v_smem)
            # BEGIN SOLUTION
            load(i + 1, v_gmem, v_smem, v_full)
            # END SOLUTION
            return acc, m_i, l_i

        copy(q_gmem.at[b, q_rows, h], q_smem, q_full)
        load(0, k_gmem, k_smem, k_full)
        load(0, v_gmem, v_smem, v_full)
        plgpu.barrier_wait(q_full)
        sums = lax.fori_loop(0, steps, step, nothing_seen(head_dim))
        store(finish(*sums), q_smem, o_gmem.at[b, q_rows, h])

    return launch(kernel, q, block_kv)(q, k, v)


ex10.check_mended(mended)

"""Solutions of chapter 12's exercises; how to read them: tools/skeletons.py, and `TRIED`: tests/exercises."""

TRIED = r"""
exercise-1
  np.einsum("btnh,btnh->bnt", out, do) => (out * do).sum(axis=-1).swapaxes(1, 2)  # Right.
  lambda *args: delta(*(arg.astype(np.float32) for arg in args))
  np.einsum("btnh,btnh->bnt", out, do) => jnp.einsum("btnh,btnh->bnt", jnp.asarray(out), jnp.asarray(do))
  - d_lse =>  # comes through lse is missing
  - d_lse => + d_lse  # which sign
  lambda *args: -delta(*args)  # the sign is the other one
  out, do) => out, out)  # out with itself
  out, do) => do, do)  # do with itself
  out, do) => v, do)  # v is a key's
  out, do) => q, do)  # q is the wrong tensor
  out, do) => k, do)  # the sum of p_ij v_j
  - d_lse => * lse - d_lse
  "btnh,btnh->bnt", out, do) - d_lse => "btnh,btnh->btn", out, do)  # shape
  np.einsum("btnh,btnh->bnt", out, do) => sum(out[..., i] * do[..., i] for i in range(4)).swapaxes(1, 2)  # (1, 5, 2, 8)
  np.einsum("btnh,btnh->bnt", out, do) => np.array([[(out[b, :6, n] * do[b, :6, n]).sum(-1) for n in range(3)]
    for b in range(2)])  # IndexError
exercise-2
  return jnp.exp2(s + bias - lse) => return jnp.exp2(s - lse) * jnp.exp2(bias)  # Right.
  WGMMA.reduce(0) => WGMMA.reduce(9) && WGMMA.reduce(1) => WGMMA.reduce(0) && WGMMA.reduce(9) => WGMMA.reduce(1)
    && s.shape, [1] => s.shape, [9] && s.shape, [0] => s.shape, [1] && s.shape, [9] => s.shape, [0]
    # queries are the columns here, not the rows
  WGMMA.reduce(0) => WGMMA.reduce(1) && s.shape, [1] => s.shape, [0]  # queries are the columns here
  WGMMA.reduce(1) => WGMMA.reduce(0) && s.shape, [0] => s.shape, [1]  # keys are the rows here
  WGMMA.reduce(0) => WGMMA.reduce(1)  # no layout serves
  plgpu.Layout.WGMMA => plgpu.Layout.WGMMA_UPCAST_2X
  return jnp.exp2(s + bias - lse) => return jnp.exp2(s) * jnp.exp2(bias) * jnp.exp2(-lse)  # first subtract lse
  s.shape, [1] => (64, s.shape[1]), [1] && s.shape, [0] => (64, s.shape[1]), [0]  # shape
  exp2 => exp  # base 2
  s + bias - lse => s - bias - lse  # is added
  s + bias - lse => s - lse  # bias is missing
  s + bias - lse => s + bias  # lse is missing
  lambda s, lse, bias: plgpu.load(bias, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)  # shape
exercise-dq
  delta_i = per_row => delta_i = -per_row && dp - delta_i => dp + delta_i  # Right.
  dp - delta_i => dp + delta_i  # delta is subtracted
  p * (dp - delta_i) => p * dp  # delta is missing
  store(dq * scale => store(dq  # is not scaled
  ds.astype(q.dtype), k_smem => ds.astype(q.dtype), v_smem  # not ds v
  product(do_smem, v_smem.at[stage].T) => product(do_smem, k_smem.at[stage].T)  # is ds = p (dp - delta)
  (scale * LOG2E) - lse_i => (scale * LOG2E)  # dq
  lse_gmem.at[b, h, queries] => lse_gmem.at[b, h, pl.ds(0, 64)]  # dq
  def queries_kernel => per_row = lambda x, shape: _device.spread(_device.load(x, COLUMNS), 1,
    shape)\n\n\ndef queries_kernel  # its own lse
  o_gmem.at[b => o_gmem.at[0 && dq_gmem.at[b => dq_gmem.at[0  # race
  k.shape[1] // block_kv => 4  # other numbers of keys
  1 / math.sqrt(head_dim) => 0.125  # other numbers of keys
  (64, block_kv) => (64, 64)  # shape
  i * block_kv => i * 64 && k.shape[1] // block_kv => k.shape[1] // 64  # block_kv = 128
  i * block_kv => i * 64
  num_stages=2 => num_stages=1  # fewer stages
  Ring(full, free, num_stages) => Ring(full, free, 2)
  stage = ring.wait(i) => ring.wait(i)\n                stage = _device.rem(i, 2)  # with num_stages = 3
  (scale * LOG2E) - lse_i => (scale * LOG2E) - per_row(lse_gmem.at[b, h, queries], shape)  # more than once
  dp - delta_i => dp - per_row(delta_gmem.at[b, h, queries], shape)
  dp = product(do_smem => s = product(q_smem, k_smem.at[stage].T)\n                dp = product(do_smem
    # a step has three
  return dq\n => return dq.astype(q.dtype).astype(jnp.float32)\n  # is rounded for its product
  (scale * LOG2E) - lse_i) => (scale * LOG2E) - lse_i).astype(q.dtype).astype(jnp.float32)
  v_smem.at[stage].T) => v_smem.at[stage].T).astype(q.dtype).astype(jnp.float32)
  per_row(delta_gmem.at[b, h, queries], shape) =>
    per_row(delta_gmem.at[b, h, queries], shape).astype(q.dtype).astype(jnp.float32)
  p * (dp - delta_i) => p * dp * scale - p * delta_i * scale && dq * scale => dq  # Right.
  k_smem.at[stage])\n => k_smem.at[stage])\n                _device.store(dq_gmem.at[b, queries, h],
    (dq * scale).astype(q.dtype))\n && store(dq * scale, q_smem, dq_gmem.at[b, queries, h]) => pass
    # the same part of dq
  plgpu.barrier_wait(q_full) => pass  # arrived
  stage = ring.wait(i) => stage = ring.slot(i)  # arrived
  ring.release(i) => pass  # never end
  ring.release(i) => pass && dq = add_product => ring.release(i)\n                dq = add_product
    # give a stage back (barrier_arrive) after the wgmma_wait with which its product has ended
  lambda q, *_: 2 * q  # must be a kernel
  lambda *args: jnp.asarray(exact(*args[:4])[3][0], args[0].dtype)  # cannot be compiled
  store(dq * scale => store(dq && return launch_queries(kernel, (q, k, v, do, lse, delta), block_kv, num_stages) =>
    return launch_queries(kernel, (q, k, v, do, lse, delta), block_kv, num_stages) / 8  # outside of the kernel
exercise-3
  jnp.minimum(first_q // block, end), end => first_q // block, jnp.maximum(first_q // block, end)  # Right.
  jnp.maximum => max && jnp.minimum => min  # jnp.maximum
  lambda *args: tuple(1.0 * x for x in query_blocks(*args))  # whole numbers
  64 + left => 1 + left  # is left out
  64 + left => 129 + left  # is computed
  jnp.minimum(first_q // block, end) => first_q // block  # lies before
  jnp.minimum(first_k + 64 + left, num_q) => first_k + 64 + left  # is computed
  jnp.maximum(first_k - right, 0) => first_k - right
  lambda k, b, n, left, right: query_blocks(k, b, n, right, left)  # block
  lambda k, b, n, left, right: (0, -(-n // b))  # none of its queries
  lambda k, b, n, left, right: (0, 1)  # is left out
  first_q // block => first_q >> (block.bit_length() - 1)  # is left out
  first_k - right => first_k // 64 * 64 - right  # is computed
  lambda k, *args: query_blocks(k, *args) if isinstance(k, int) else (0, k // 128)  # when it is traced
"""


# %% exercise-1 needs: parameters setup
def delta(q, k, v, out, do, lse, d_lse):
    #: return None  # Your code.
    # BEGIN SOLUTION
    return np.einsum("btnh,btnh->bnt", out, do) - d_lse
    # END SOLUTION


ex12.check_delta(delta)


# %% exercise-2 needs: parameters setup
def weights(s_ref, lse_ref, bias_ref):
    #: return None  # Your code.
    # BEGIN SOLUTION
    load = lambda ref, layout: plgpu.load(ref, layout=layout, optimized=False)
    s = load(s_ref, plgpu.Layout.WGMMA)
    lse = lax.broadcast_in_dim(
        load(lse_ref, plgpu.Layout.WGMMA.reduce(0)), s.shape, [1]
    )
    bias = lax.broadcast_in_dim(
        load(bias_ref, plgpu.Layout.WGMMA.reduce(1)), s.shape, [0]
    )
    return jnp.exp2(s + bias - lse)
    # END SOLUTION


ex12.check_weights(weights)


# %% exercise-dq needs: parameters setup parts
def queries_kernel(q, k, v, do, lse, delta, *, block_kv=64, num_stages=2):
    steps = k.shape[1] // block_kv

    def kernel(
        q_gmem, k_gmem, v_gmem, do_gmem, lse_gmem, delta_gmem, dq_gmem, *,
        q_smem, do_smem, k_smem, v_smem, q_full, full, free,
    ):  # fmt: skip
        b, h, tile, wg = map(lax.axis_index, ("batch", "head", "tile", "wg"))
        queries, ring = pl.ds(tile * 64, 64), Ring(full, free, num_stages)

        @role("load", wg == 1)
        def load():
            copy(q_gmem.at[b, queries, h], q_smem, q_full)
            copy(do_gmem.at[b, queries, h], do_smem, q_full)

            @pl.loop(0, steps)
            def _(i):
                rows, stage = pl.ds(i * block_kv, block_kv), ring.acquire(i)
                copy(k_gmem.at[b, rows, h], k_smem.at[stage], full.at[stage])
                copy(v_gmem.at[b, rows, h], v_smem.at[stage], full.at[stage])

            ring.drain(steps)

        @role("compute", wg == 0)
        def compute():
            #: pass  # Your lines. Here head_dim is q.shape[3].
            # BEGIN SOLUTION
            shape, head_dim = (64, block_kv), q.shape[3]
            scale = 1 / math.sqrt(head_dim)
            lse_i = per_row(lse_gmem.at[b, h, queries], shape)
            delta_i = per_row(delta_gmem.at[b, h, queries], shape)
            plgpu.barrier_wait(q_full)

            def step(i, dq):
                stage = ring.wait(i)
                s = product(q_smem, k_smem.at[stage].T)
                p = jnp.exp2(s * (scale * LOG2E) - lse_i)
                dp = product(do_smem, v_smem.at[stage].T)
                ds = p * (dp - delta_i)
                dq = add_product(dq, ds.astype(q.dtype), k_smem.at[stage])
                ring.release(i)
                return dq

            dq = lax.fori_loop(0, steps, step, zeros(64, head_dim))
            store(dq * scale, q_smem, dq_gmem.at[b, queries, h])
            # END SOLUTION

    return launch_queries(kernel, (q, k, v, do, lse, delta), block_kv, num_stages)


ex12.check_dq(queries_kernel)


# %% exercise-3 needs: parameters setup
def query_blocks(first_k, block, num_q, left, right):
    #: return None  # Your code.
    # BEGIN SOLUTION
    first_q = jnp.maximum(first_k - right, 0)
    end_q = jnp.minimum(first_k + 64 + left, num_q)
    end = (jnp.maximum(end_q, 0) + block - 1) // block
    return jnp.minimum(first_q // block, end), end
    # END SOLUTION


ex12.check_query_blocks(query_blocks)

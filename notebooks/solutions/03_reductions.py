"""Solutions of chapter 3's exercises; how to read them: tools/skeletons.py, and `TRIED`: tests/exercises."""

TRIED = r"""
exercise-1
  o_gmem[row] = (below => o_gmem[row] = (x - jnp.max(x)  # Right.
  below - jnp.log(jnp.sum(jnp.exp2(below * LOG2E))) => jnp.log(jnp.exp(below) / jnp.sum(jnp.exp(below)))  # infinities
  below - jnp.log(jnp.sum(jnp.exp2(below * LOG2E))) => x - jnp.log(jnp.sum(jnp.exp(x)))  # several hundred
  - jnp.log(jnp.sum(jnp.exp2(below * LOG2E))) =>  # element
  - jnp.log(jnp.sum(jnp.exp2(below * LOG2E))) => - jnp.sum(jnp.exp2(below * LOG2E))
  - jnp.log( => + jnp.log(
  o_gmem[row] = (below => o_gmem[row] = LOG2E * (below
  below - jnp.log(jnp.sum(jnp.exp2(below * LOG2E))) => jnp.exp(below) / jnp.sum(jnp.exp(below))  # softmax still
  jnp.sum(jnp.exp2(below * LOG2E)) => jnp.sum(jnp.exp(load(x_gmem.at[row]) - jnp.max(x)))  # reads each row 2 times
  x = load(x_gmem.at[row]) => x = x_gmem[row].astype(jnp.float32)  # Right.
  (below - jnp.log => (below - (x.size == 1024) * jnp.log  # with bfloat16
  load(x_gmem.at[row]) => load(x_gmem.at[0])  # element
  jnp.sum(jnp.exp2(below * LOG2E)) => lax.fori_loop(0, x.size // 128, lambda i, l: l + jnp.sum(jnp.exp(load(
    x_gmem.at[row, pl.ds(i * 128, 128)], vec=1) - jnp.max(x))), jnp.float32(0))  # reads each row 2 times
  None  # there is no `log_softmax` yet. Write it above the last line. `log_softmax(x)` is a kernel
exercise-2
  l_a * scale_a + l_b * scale_b => l_a + l_b  # , l; the m, l and acc of a part are relative
  acc_a * scale_a + acc_b * scale_b => acc_a + acc_b  # , acc;
  scale_a, scale_b => scale_b, scale_a  # , l;
  jnp.maximum(m_a, m_b) => jnp.minimum(m_a, m_b)  # , m;
  jnp.maximum(m_a, m_b) => m_a
  jnp.maximum(m_a, m_b) => m_b
  acc_a * scale_a + acc_b * scale_b => (acc_a * scale_a + acc_b * scale_b) / (l_a * scale_a + l_b * scale_b)  # , acc;
  lambda a, b: a  # with
  lambda a, b: (*merge_average(a, b)[:2], jnp.sum(merge_average(a, b)[2]))  # shape
  acc_b * scale_b => acc_b * jnp.nan  # never written
  m = jnp.maximum => m_a, m_b = jnp.where(l_a, m_a, -jnp.inf), jnp.where(l_b, m_b, -jnp.inf)\n    m = jnp.maximum
    # Infinity minus infinity
exercise-3
  position >= turns => position > turns  # times what it must be
  position >= turns => position < turns
  zip(starts, p, => zip(starts, fresh,  # element
  p[-1], 0.0) => p[-1], jnp.exp2(-m * LOG2E))  # times what it must be
  turns[-1] - starts[-1] => (24 if num_cols == 1000 else 51 if num_cols == 333 else 0)
exercise-4
  load(x_gmem.at[row]) => load(x_gmem.at[row])\n        x = x - jnp.max(x)
    && jnp.sum((x - mean) * (x - mean)) * (1 / x.size) => jnp.sum(x * x) * (1 / x.size) - mean * mean  # Right.
  jnp.sum((x - mean) * (x - mean)) * (1 / x.size) => jnp.sum(x * x) * (1 / x.size) - mean * mean  # results are NaN
  jnp.sum((x - mean) * (x - mean)) * (1 / x.size) => jnp.maximum(jnp.sum(x * x) * (1 / x.size) - mean * mean, 0.0)
    # results are far off
  + eps =>  # eps
  (x - mean)) * (1 / x.size) => (x - mean)) * (1 / (x.size - 1))  # around 0.5
  ((x - mean) * lax => (x * lax
  lax.rsqrt(variance + eps) => (1 / (variance + eps))
  eps=1e-6 => eps=1e-2
  1 / x.size => 1 / 1024  # with rows of 2048
  variance + eps => jnp.maximum(variance, eps)  # as small as eps
  ((x - mean) * lax => ((load(x_gmem.at[row]) - mean) * lax  # reads each row 2 times
"""


# %% exercise-1 needs: parameters imports helpers
#: # Write log_softmax(x) here. Until then `globals().get` returns None below, so the
#: # cell runs all the same.
# BEGIN SOLUTION
def log_softmax(x):
    def kernel(x_gmem, o_gmem):
        row = lax.axis_index("block")
        x = load(x_gmem.at[row])
        below = x - jnp.max(x)
        o_gmem[row] = (below - jnp.log(jnp.sum(jnp.exp2(below * LOG2E)))).astype(
            o_gmem.dtype
        )

    return per_row(kernel, x, approx_math=False)
    # END SOLUTION


ex03.check_log_softmax(globals().get("log_softmax"))


# %% exercise-2 needs: parameters imports
def merge_average(a, b):
    (m_a, l_a, acc_a), (m_b, l_b, acc_b) = a, b
    m = jnp.maximum(m_a, m_b)
    #: return m, l_a + l_b, acc_a + acc_b  # Not yet right.
    # BEGIN SOLUTION
    scale_a, scale_b = jnp.exp(m_a - m), jnp.exp(m_b - m)
    return m, l_a * scale_a + l_b * scale_b, acc_a * scale_a + acc_b * scale_b
    # END SOLUTION


ex03.check_merge(merge_average)


# %% exercise-3 needs: parameters imports helpers
def any_length(x):
    num_cols = x.shape[1]
    # A row starts at a multiple of `vec` elements, and so may each load.
    vec = math.gcd(num_cols, 8)
    while 128 * vec > num_cols:
        vec //= 2
    width = 128 * vec
    turns = range(0, num_cols, width)
    starts = [min(turn, num_cols - width) for turn in turns]

    def kernel(x_gmem, o_gmem):
        row = lax.axis_index("block")
        pieces = [load(x_gmem.at[row, pl.ds(start, width)], vec) for start in starts]
        m = jnp.max(functools.reduce(jnp.maximum, pieces))
        p = [jnp.exp2((piece - m) * LOG2E) for piece in pieces]
        fresh = list(p)
        #: # The last piece holds columns that are not fresh.
        # BEGIN SOLUTION
        position = plgpu.broadcasted_iota(
            jnp.int32, (width,), 0, layout=plgpu.Layout.WG_STRIDED((width,), vec)
        )
        fresh[-1] = jnp.where(position >= turns[-1] - starts[-1], p[-1], 0.0)
        # END SOLUTION
        scale = 1 / jnp.sum(functools.reduce(jnp.add, fresh))
        for start, piece in zip(starts, p, strict=True):
            o_gmem[row, pl.ds(start, width)] = (piece * scale).astype(o_gmem.dtype)

    return per_row(kernel, x)


ex03.check_any_length(any_length)


# %% exercise-4 needs: parameters imports helpers
def layer_norm(x, eps=1e-6):
    def kernel(x_gmem, o_gmem):
        row = lax.axis_index("block")
        x = load(x_gmem.at[row])
        mean = jnp.sum(x) * (1 / x.size)
        #: variance = jnp.sum(x * x) * (1 / x.size) - mean * mean
        # BEGIN SOLUTION
        variance = jnp.sum((x - mean) * (x - mean)) * (1 / x.size)
        # END SOLUTION
        o_gmem[row] = ((x - mean) * lax.rsqrt(variance + eps)).astype(o_gmem.dtype)

    return per_row(kernel, x, approx_math=False)


ex03.check_layer_norm(layer_norm)

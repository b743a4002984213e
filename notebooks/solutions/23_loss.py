"""Solutions of chapter 23's exercises; how to read them: tools/skeletons.py, and `TRIED`: tests/exercises."""

TRIED = r"""
exercise-1
  at_label_gmem[row] = capped( => at_label_gmem[row] = (  # the label's logit is not
  capped(load(x_gmem.at[row, pl.ds((i * group + j) * PIECE, PIECE)])) => load(x_gmem.at[row,
    pl.ds((i * group + j) * PIECE, PIECE)])  # without the cap
  l_i += exp(x - top) => l_i += exp(cap * jnp.tanh(x / cap) - top)  # m + log(l)
  cap * jnp.tanh(x / cap) => jnp.minimum(x, cap)  # m + log(l)
  cap * jnp.tanh(x / cap) => jnp.tanh(x / cap)
  l_i = l_i * exp(m_i - top) => pass  # a sum is relative to the maximum so far
  lax.fori_loop(0, vocabulary // (group * PIECE), step, start) => step(0, start)  # 24,576 columns, m + log(l)
  lax.fori_loop(0, vocabulary // (group * PIECE), step, start) => lax.fori_loop(0, 2, step, start)
  group = math.gcd(GROUP, vocabulary // PIECE) => group = 1  # no more than 1,024 columns
  jnp.tanh(x / cap) => jnp.tanh(x * (1 / cap))  # Right.
  approx_math=False => approx_math=True  # tanh.approx
  capped(load(x_gmem.at[row, pl.ds((i * group + j) * PIECE, PIECE)])) => load(x_gmem.at[row,
    pl.ds((i * group + j) * PIECE, PIECE)]) && top = functools.reduce(jnp.maximum, pieces, m_i) => top =
    functools.reduce(jnp.maximum, [capped(x) for x in pieces], m_i); pieces = [capped(x) for x in pieces]
    # 2.0 tanh are computed per logit
  start = full(LOWEST), full(0.0) => largest = lambda i, m_i: functools.reduce(jnp.maximum,
    [capped(load(x_gmem.at[row, pl.ds((i * group + j) * PIECE, PIECE)])) for j in range(group)], m_i); start =
    lax.fori_loop(0, vocabulary // (group * PIECE), largest, full(LOWEST)), full(0.0)  # 2.0 passes load the row
  top, jnp.sum(l_i * exp(m_i - top)) => cap, jnp.sum(l_i * exp(m_i - cap))  # largest capped logit
  lambda logits, labels, cap: statistics(logits, labels)  # without the cap
exercise-2
  last = load(x_gmem.at[row, pl.ds(start_of_last, PIECE)]) =>
    && store(start_of_last, last) => store(start_of_last, load(x_gmem.at[row, pl.ds(start_of_last, PIECE)]))
    # which the last two pieces share
  store(start_of_last, last) => pass  # are still logits
  column == label - start => column == label  # with
  - is_label) => + is_label)
  column == label - start => (column == label - start) & (column < 512)
  @pl.loop(0, (vocabulary - 1) // PIECE) => @pl.loop(0, min(2, (vocabulary - 1) // PIECE))
  @pl.loop(0, (vocabulary - 1) // PIECE) => pieces = [load(x_gmem.at[row, pl.ds(i * PIECE, PIECE)]) for i in
    range((vocabulary - 1) // PIECE)] && def _(i): => for i, x in enumerate(pieces): && store(i * PIECE,
    load(x_gmem.at[row, pl.ds(i * PIECE, PIECE)])) => store(i * PIECE, x)  # does not fit in registers
  def row_gradient(label_gmem => def row_gradient(z_gmem, label_gmem && load(x_gmem => load(z_gmem
    && (labels, lse, row_weight, x_ref) => (logits, labels, lse, row_weight, x_ref)  # from one array
  def row_gradient(label_gmem => def row_gradient(z_gmem, label_gmem && load(x_gmem => load(z_gmem
    && (labels, lse, row_weight, x_ref) => (jax.new_ref(logits), labels, lse, row_weight, x_ref)
  per_row(row_gradient, num_rows) => per_row(row_gradient, num_rows, unsafe_no_auto_barriers=True)
    # takes JAX's barriers away
  lambda logits, labels, lse, row_weight: gradient(logits[:, :1024], labels, lse, row_weight)  # shape
exercise-3
  has_loss / jnp.maximum(jnp.sum(has_loss), 1) => (has_loss.reshape(-1, rows) / jnp.maximum(has_loss.reshape(-1,
    rows).sum(1, keepdims=True), 1)).reshape(-1) / (len(labels) // rows)  # how the rows are cut
  jnp.maximum(jnp.sum(has_loss), 1) => jnp.sum(has_loss)  # a count of rows is 0
  jnp.maximum(jnp.sum(has_loss), 1) => len(labels)  # in the denominator
  jnp.maximum(jnp.sum(has_loss), 1) => jnp.maximum(jnp.sum(has_loss), 1).astype(jnp.float16)  # 5,001 rows count
  return has_loss / => return jnp.ones(len(labels)) /  # ignored rows have a weight
  labels != IGNORED => labels == IGNORED  # where no row
  (labels != IGNORED).astype(jnp.float32) => __import__("numpy").float32(labels != IGNORED)  # jax.jit cannot trace it
  jnp.maximum(jnp.sum(has_loss), 1) => max(float(jnp.sum(has_loss)), 1)
  labels != IGNORED => labels >= 0  # Right.
  lambda labels, rows: None  # shape
exercise-4
  l_i * jnp.exp(m_i - top) => l_i  # relative to its own device's m
  return top + jnp.log(l_i) - lax.psum(at_label, axis) => return top + jnp.log(l_i) - at_label  # its own label's logit
  lax.psum(at_label, axis) => lax.pmax(at_label, axis)  # may be negative
  lax.psum(at_label, axis) => (lax.pmax(at_label, axis) + lax.pmin(at_label, axis))  # with one device
  lambda m_i, l_i, at_label, axis: m_i + jnp.log(l_i) - lax.psum(at_label, axis)  # of a device's own columns
  lambda m_i, l_i, at_label, axis: jnp.log(lax.psum(l_i * jnp.exp(m_i), axis)) - lax.psum(at_label, axis)  # infinities
  lax.pmax(m_i, axis) => lax.pmin(m_i, axis)  # larger by 200, there are infinities
  lax.pmax(m_i, axis) => lax.pmean(m_i, axis)
  lax.pmax(m_i, axis) => jnp.max(lax.pmax(m_i, axis))  # one row's logits larger by 200
  lax.psum(l_i * jnp.exp(m_i - top), axis) => lax.pmean(l_i * jnp.exp(m_i - top), axis)  # element
  lambda m_i, l_i, at_label, axis: jnp.sum(combined_loss(m_i, l_i, at_label, axis))  # one per row
"""


# %% exercise-1 needs: parameters setup launch rung-1-kernel
def capped_statistics(logits, labels, cap):
    num_rows, vocabulary = logits.shape
    group = math.gcd(GROUP, vocabulary // PIECE)

    # BEGIN SOLUTION
    def capped(x):
        return cap * jnp.tanh(x / cap)

    # END SOLUTION
    def row_statistics(x_gmem, label_gmem, m_gmem, l_gmem, at_label_gmem):
        row = lax.axis_index("block")

        def step(i, state):
            m_i, l_i = state
            pieces = [
                #: load(x_gmem.at[row, pl.ds((i * group + j) * PIECE, PIECE)])
                # BEGIN SOLUTION
                capped(load(x_gmem.at[row, pl.ds((i * group + j) * PIECE, PIECE)]))
                # END SOLUTION
                for j in range(group)
            ]
            top = functools.reduce(jnp.maximum, pieces, m_i)
            l_i = l_i * exp(m_i - top)
            for x in pieces:
                l_i += exp(x - top)
            return top, l_i

        start = full(LOWEST), full(0.0)
        m_i, l_i = lax.fori_loop(0, vocabulary // (group * PIECE), step, start)
        top = jnp.max(m_i)
        m_gmem[row], l_gmem[row] = top, jnp.sum(l_i * exp(m_i - top))
        #: at_label_gmem[row] = x_gmem[row, label_gmem[row]].astype(jnp.float32)
        # BEGIN SOLUTION
        at_label_gmem[row] = capped(x_gmem[row, label_gmem[row]].astype(jnp.float32))
        # END SOLUTION

    numbers = jax.ShapeDtypeStruct((num_rows,), jnp.float32)
    launch = per_row(row_statistics, num_rows, [numbers] * 3, approx_math=False)
    return launch(logits, labels)


ex23.check_capped(capped_statistics)


# %% exercise-2 needs: parameters setup launch rung-2-kernel
def any_vocabulary(logits, labels, lse, row_weight):
    num_rows, vocabulary = logits.shape
    start_of_last = vocabulary - PIECE

    def row_gradient(label_gmem, lse_gmem, weight_gmem, x_gmem):
        row = lax.axis_index("block")
        label, lse = label_gmem[row], lse_gmem[row]
        row_weight = weight_gmem[row]
        column = plgpu.broadcasted_iota(jnp.int32, (PIECE,), 0, layout=LAYOUT)

        def store(start, x):
            is_label = jnp.where(column == label - start, 1.0, 0.0)
            g = row_weight * (exp(x - lse) - is_label)
            x_gmem[row, pl.ds(start, PIECE)] = g.astype(x_gmem.dtype)

        # BEGIN SOLUTION
        last = load(x_gmem.at[row, pl.ds(start_of_last, PIECE)])

        # END SOLUTION
        @pl.loop(0, (vocabulary - 1) // PIECE)
        def _(i):
            store(i * PIECE, load(x_gmem.at[row, pl.ds(i * PIECE, PIECE)]))

        #: # The last piece: the columns that are left, and some of those before.
        #: store(start_of_last, load(x_gmem.at[row, pl.ds(start_of_last, PIECE)]))
        # BEGIN SOLUTION
        store(start_of_last, last)
        # END SOLUTION

    x_ref = jax.new_ref(logits)
    per_row(row_gradient, num_rows)(labels, lse, row_weight, x_ref)
    return jax.freeze(x_ref)


ex23.check_any_vocabulary(any_vocabulary)


# %% exercise-3 needs: parameters setup
def row_weights(labels, rows):
    #: blocks = labels.reshape(-1, rows)
    #: has_loss = (blocks != IGNORED).astype(jnp.float32)
    #: # Each block takes the mean of its rows, and then the blocks' mean is taken.
    #: weights = has_loss / jnp.sum(has_loss, axis=1, keepdims=True)
    #: return weights.reshape(-1) / len(blocks)
    # BEGIN SOLUTION
    has_loss = (labels != IGNORED).astype(jnp.float32)
    return has_loss / jnp.maximum(jnp.sum(has_loss), 1)
    # END SOLUTION


ex23.check_row_weights(row_weights)


# %% exercise-4 needs: parameters setup
def combined_loss(m_i, l_i, at_label, axis):
    #: return m_i + jnp.log(l_i) - at_label  # So far as if there were one device.
    # BEGIN SOLUTION
    top = lax.pmax(m_i, axis)
    l_i = lax.psum(l_i * jnp.exp(m_i - top), axis)
    return top + jnp.log(l_i) - lax.psum(at_label, axis)
    # END SOLUTION


ex23.check_combined_loss(combined_loss)

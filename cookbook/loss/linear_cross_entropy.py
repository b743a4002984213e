# SPDX-License-Identifier: Apache-2.0
"""Cross-entropy of `hidden @ weight.T`, the last layer of a language model, without an array of all logits.

    z = hidden @ weight^T,   z = cap tanh(z / cap) with a soft cap,   lse[r] = log sum_c exp(z[r, c])
    loss[r] = lse[r] - (1 - label_smoothing) z[r, label[r]] - label_smoothing / V sum_c z[r, c] + z_loss lse[r]**2

Shapes: hidden (..., H), weight (V, H), or (H, V) with `transpose_weight`, labels (...) integers. hidden and weight are
both bfloat16 or both float16, H is a multiple of 8, V and the number of rows are any; sums are float32, losses too.

Where what happens: `products.py` multiplies, by the kernel of gemm; `kernel.py` has the kernels along the rows of
logits; `losses.py` the numbers per row. This file puts blocks of them together, `blocks.py` says which. The loss alone
needs none of this: `kernel_forward.py` reduces the logits where they are computed. With gradients:

    per block of rows     logits = hidden @ weight^T, 16 bits          product 1
                          statistics, losses                           reads the logits
                          g, in the place of the logits                reads and writes them
                          d_weight += g^T @ hidden                     product 2
                          d_hidden = g @ weight                        product 3

The gradients are computed with the loss, when the logits are there, if they are known but for a factor: for a "mean"
and a "sum", without `return_lse`. Otherwise the backward pass computes the logits again. The product adds to d_weight
where it lies: to float32 sums of all blocks of rows; or, where this is faster, to the result itself, in 16 bits. There
are at most four blocks then, larger ones, because no sums take their room.

With memory="low", or where such sums leave no room, logits are never stored, and computed twice: four products.

    all rows              statistics, losses (as the loss alone)       product 1
    per block of rows
    and of columns        g = gradient of hidden @ weight^T            product 2, `kernel_gradient.py`
                          d_weight += g^T @ hidden                     product 3, where its rows lie in the result
                          d_hidden += g @ weight                       product 4, float32 sums of the block's rows

The hidden values, with zeros in ignored rows, lie in the memory of d_hidden, which takes their place block by block.
Where a single block has all rows, each row of d_weight is written once. Otherwise each block of rows adds to d_weight
in 16 bits. There are few of them, one or four in the benchmark's problems, and at most 16.

A row that is ignored has no part in anything, even if it holds NaN: for the products it is a row of zeros.

Bound by: the tensor cores. Not supported: other dtypes, second derivatives.
Chapter: notebooks/23_loss.ipynb.
Sources: Hsu et al., "Liger Kernel" (2024), and Wijmans et al., "Cut Your Losses in Large-Vocabulary Language Models"
(2024), for the ideas.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from .. import _host
from . import kernel, kernel_forward, losses, products
from .blocks import Blocks, blocks_of
from .cross_entropy import cross_entropy_reference
from .losses import Options, Rows

# An ignored row's: the gradient is zero, whatever the logits are.
NOTHING = dict(label=kernel.IGNORED, lse=jnp.inf, a=0.0, b=0.0)
UNROLLED = 8  # Blocks of columns at most whose loop is unrolled: their numbers are constants then, and no kernels.
F16_GAIN = 2.0**10  # float16 has few exponents: a probability of one in a million is to keep its digits.


def linear_cross_entropy_reference(hidden, weight, labels, *, transpose_weight=False, **options):
    dtype = jnp.promote_types(hidden.dtype, jnp.float32)
    hidden, weight = hidden.astype(dtype), weight.astype(dtype)
    logits = jnp.matmul(hidden, weight if transpose_weight else weight.T, precision="highest")
    return cross_entropy_reference(logits, labels, **options)


@dataclasses.dataclass(frozen=True)
class Problem:
    """Statics of a call."""

    options: Options
    blocks: Blocks
    transposed: bool  # The weight is (H, V).
    vocabulary: int  # Columns of this device.
    target: _host.Target

    @property
    def pitch(self) -> int:
        return products.pitch_of(self.vocabulary, self.transposed)

    def padded(self, weight):
        """`weight` as TMA reads it: rows of V values may need some more."""
        more = self.pitch - self.vocabulary if self.transposed else 0
        return jnp.pad(weight, ((0, 0), (0, more))) if more else weight


def _padded(problem: Problem, x, more: int):
    """`x` with so many rows more: zeros, and the labels of rows that are ignored."""
    value = problem.options.ignore_index if x.dtype == jnp.int32 else 0
    return jnp.pad(x, ((0, more), (0, 0))[: x.ndim], constant_values=value) if more else x


def _over_rows(problem: Problem, block, *arrays):
    """`block(sums, *arrays)` for all blocks of the arrays' rows: (sums, results of all rows). `sums` are None in the
    first block."""
    rows, size = len(arrays[0]), problem.blocks.rows
    num = problem.blocks.num(rows)
    arrays = [_padded(problem, x, num * size - rows) for x in arrays]
    if num == 1:
        sums, results = block(None, *arrays)
        return sums, [x[:rows] for x in results]
    split = lambda x: x.reshape(-1, size, *x.shape[1:])
    join = lambda x: x.reshape(-1, *x.shape[2:])
    # The first block is a call of its own: its sums need no zeros to be added to.
    sums, first = block(None, *(x[:size] for x in arrays))
    # XLA unrolls a scan of one step. No two blocks' logits are to be in memory.
    sums, first, others = _host.apart((sums, first, [split(x[size:]) for x in arrays]))
    sums, others = lax.scan(lambda sums, arrays: block(sums, *arrays), sums, others)
    return sums, [jnp.concatenate([x, join(more)])[:rows] for x, more in zip(first, others, strict=True)]


def _logits(problem: Problem, hidden, weight, rows: Rows):
    """(Logits, losses, lse) of these rows."""
    o = problem.options
    logits = products.logits(problem.target, hidden, weight, problem.pitch, problem.transposed)
    found = kernel.statistics(logits, rows.columns, problem.vocabulary, o.soft_cap, o.label_smoothing > 0)
    return logits, *rows.losses(*found)


def _gradient(problem: Problem, logits, label, lse, a, b, cols: int):
    """The logits' gradient in their place, for `cols` columns of the vocabulary."""
    o, gain = problem.options, F16_GAIN if logits.dtype == jnp.float16 else 1.0
    vocabulary = problem.vocabulary * o.num_parts
    return kernel.gradient(logits, label, lse, gain * a, gain * b, cols, o.soft_cap, o.label_smoothing, vocabulary)


def _without_ignored(hidden, rows: Rows):
    return jnp.where(rows.has_loss[:, None], hidden, 0)


def _forward(problem: Problem, hidden, weight, labels):
    """(losses, lse) of all rows."""
    rows = Rows.of_device(labels, problem.options, problem.vocabulary)
    return _loss_alone(problem, hidden, problem.padded(weight), rows)


def _loss_alone(problem: Problem, hidden, weight, rows: Rows):
    o = problem.options
    found = kernel_forward.statistics(
        problem.target, hidden, weight, rows.columns, problem.vocabulary, problem.pitch, problem.transposed, o.soft_cap,
        o.label_smoothing > 0,
    )  # fmt: skip
    return rows.losses(*found)


def _with_gradients(problem: Problem, hidden, weight, labels, d_loss, d_lse, scale):
    """(losses, lse, d_hidden, d_weight); the gradients are of `scale` times what the cotangents (N,) say."""
    scale = scale / F16_GAIN if hidden.dtype == jnp.float16 else scale
    by_blocks = _by_rows if problem.blocks.cols is None else _by_rows_and_columns
    (loss, lse, d_hidden), d_weight = by_blocks(problem, hidden, problem.padded(weight), labels, d_loss, d_lse, scale)
    d_hidden, _ = _host.alike(d_hidden, hidden)
    d_weight = d_weight[:, : problem.vocabulary] if problem.transposed else d_weight[: problem.vocabulary]
    return loss, lse, d_hidden, _host.alike(d_weight.astype(d_hidden.dtype), d_hidden)[0]


def _by_rows(problem: Problem, hidden, weight, labels, d_loss, d_lse, scale):
    """((losses, lse, d_hidden), d_weight): three products."""
    target, transposed, vocabulary = problem.target, problem.transposed, problem.vocabulary
    dtype = jnp.float32 if problem.blocks.num(len(labels)) > 1 and not problem.blocks.rounded else hidden.dtype
    room = problem.blocks.room(len(labels), problem.pitch)

    def block(sums, hidden, labels, d_loss, d_lse):
        rows = Rows.of_device(labels, problem.options, vocabulary)
        hidden = _without_ignored(hidden, rows)
        logits, loss, lse = _logits(problem, hidden, weight, rows)
        g = _gradient(problem, logits, rows.columns, lse, *rows.coefficients(lse, d_loss, d_lse), vocabulary)
        if sums is None:
            sums = products.d_weight(target, g, hidden, vocabulary, transposed, scale, dtype)
        else:
            sums = products.add_d_weight(target, sums, g, hidden, transposed, scale)
        g, sums = _host.apart((g, sums))  # Then the hidden rows without those ignored can lie where d_hidden will.
        return sums, (loss, lse, products.d_hidden(target, g, weight, transposed, scale, room))

    d_weight, found = _over_rows(problem, block, hidden, labels, d_loss, d_lse)
    return found, d_weight


def _by_rows_and_columns(problem: Problem, hidden, weight, labels, d_loss, d_lse, scale):
    """((losses, lse, d_hidden), d_weight): four products, of logits that are never stored."""
    target, transposed, o, vocabulary = problem.target, problem.transposed, problem.options, problem.vocabulary
    num, size, cols = problem.blocks.num(len(labels)), problem.blocks.rows, problem.blocks.cols
    given, length = len(labels), max(-(-len(labels) // products.ROWS) * products.ROWS, size)
    hidden, labels, d_loss, d_lse = (_padded(problem, x, length - given) for x in (hidden, labels, d_loss, d_lse))
    rows = Rows.of_device(labels, o, vocabulary)
    loss, lse = _loss_alone(problem, hidden, weight, rows)
    (a, b), gain = rows.coefficients(lse, d_loss, d_lse), F16_GAIN if hidden.dtype == jnp.float16 else 1.0
    vectors = dict(label=rows.columns, lse=lse, a=gain * a, b=gain * b)
    how = dict(vocabulary=vocabulary, soft_cap=o.soft_cap, on=1 - o.label_smoothing,
               off=o.label_smoothing / (vocabulary * o.num_parts))  # fmt: skip

    def block(carry, i):
        # The last block ends with the rows. Those that it shares with the one before are ignored.
        hidden, d_weight = carry  # d_hidden takes the place of the hidden rows.
        start = jnp.minimum(i * size, length - size)
        cut = functools.partial(lax.dynamic_slice_in_dim, start_index=start, slice_size=size)
        is_new = start + jnp.arange(size) >= i * size
        counts = is_new & (cut(vectors["label"]) != kernel.IGNORED)
        mine = {name: jnp.where(counts, cut(x), NOTHING[name]) for name, x in vectors.items()}

        def part(j, carry):
            d_weight, sums = carry
            first = j * cols
            g = products.gradient_of_part(target, hidden, start, weight, first, (size, cols), transposed, mine, **how)
            d_weight = products.add_d_weight_of_part(
                target, d_weight, g, hidden, start, first, transposed, scale, i > 0
            )
            sums = products.add_d_hidden_of_part(target, sums, g, weight, first, transposed, scale)
            return _host.apart((d_weight, sums))

        sums = lax.empty((size, hidden.shape[1]), jnp.float32)
        parts = -(-weight.shape[int(transposed)] // cols)
        d_weight, sums = lax.fori_loop(0, parts, part, (d_weight, sums), unroll=min(parts, UNROLLED))
        d_hidden = jnp.where(is_new[:, None], sums.astype(hidden.dtype), cut(hidden))
        return (lax.dynamic_update_slice_in_dim(hidden, d_hidden, start, 0), d_weight), None

    empty = lax.empty(weight.shape, weight.dtype)
    (d_hidden, d_weight), _ = lax.scan(block, (_without_ignored(hidden, rows), empty), jnp.arange(num))
    return [x[:given] for x in (loss, lse, d_hidden)], d_weight


@functools.partial(jax.jit, static_argnums=(0, 1))
def _run(fn, problem: Problem, *arrays):
    """`fn(problem, *arrays)`; of a batch that `jax.vmap` makes one after the other, so that memory stays as it is."""
    return jax.custom_batching.sequential_vmap(functools.partial(fn, problem))(*arrays)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _loss(hidden, weight, labels, problem: Problem):
    return _rows(problem, labels).results(*_run(_forward, problem, hidden, weight, labels))


def _rows(problem: Problem, labels) -> Rows:
    return Rows.of_device(labels, problem.options, problem.vocabulary)


def _loss_fwd(hidden, weight, labels, problem: Problem):
    run = functools.partial(_host.without_derivative, problem.options.op)
    rows = _rows(problem, labels)
    if not problem.options.knows_cotangents:
        found = run(functools.partial(_run, _forward, problem))(hidden, weight, labels)
        return rows.results(*found), (hidden, weight, labels)
    scale = _kept_scale(hidden.dtype, rows)
    ones, zeros = jnp.ones(len(labels), jnp.float32), jnp.zeros(len(labels), jnp.float32)
    found, lse, *gradients = run(functools.partial(_run, _with_gradients, problem))(
        hidden, weight, labels, ones, zeros, scale
    )
    return rows.results(found, lse), (*gradients, labels)


def _kept_scale(dtype, rows: Rows):
    """By what gradients are multiplied that are kept for the backward pass: the weight of the rows. In float16 they
    must neither vanish nor overflow before the cotangent multiplies them: about the root of it, a power of two."""
    weight = rows.weight()
    return jnp.exp2(jnp.round(jnp.log2(weight) / 2)) if dtype == jnp.float16 else weight


def _loss_bwd(problem: Problem, kept, cotangents):
    return _host.without_derivative(problem.options.op, functools.partial(_gradients, problem))(kept, cotangents)


def _gradients(problem: Problem, kept, cotangents):
    *kept, labels = kept
    rows = _rows(problem, labels)
    d_loss, d_lse = (losses.shared_cotangent(problem.options, kept[1], x) for x in cotangents)
    if problem.options.knows_cotangents:
        factor = d_loss if kept[0].dtype == jnp.bfloat16 else d_loss * rows.weight() / _kept_scale(kept[0].dtype, rows)
        return *[(x.astype(jnp.float32) * factor).astype(x.dtype) for x in kept], None
    d_loss = jnp.broadcast_to(d_loss * rows.weight(), labels.shape)
    # Cotangents of one are those that 16 bits hold best.
    largest = jnp.maximum(
        jnp.max(jnp.abs(jnp.where(rows.has_loss, d_loss, 0))), jnp.max(jnp.abs(jnp.where(rows.has_loss, d_lse, 0)))
    )
    largest = jnp.where(largest > 0, largest, 1.0)
    found = _run(_with_gradients, problem, *kept, labels, d_loss / largest, d_lse / largest, largest)
    return *found[2:], None


_loss.defvjp(_loss_fwd, _loss_bwd)


def linear_cross_entropy(
    hidden: jax.Array,
    weight: jax.Array,
    labels: jax.Array,
    *,
    transpose_weight: bool = False,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    logits_soft_cap: float | None = None,
    return_lse: bool = False,
    memory: str | None = None,
    axis_name: _host.AxisName | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Cross-entropy of the logits `hidden @ weight.T`, of which a part alone is in memory at a time.

    Differentiable once in hidden and weight. Where gradients are computed, logits and their gradients are rounded to
    the dtype of hidden; the loss alone stores no logits, and rounds none. For a mean or a sum, without `return_lse`,
    the gradients are computed together with the loss.

    On an automatic mesh JAX gathers sharded operands on every device and says nothing: call it inside `jax.shard_map`.

    Args:
      hidden: (..., H) bfloat16 or float16, H a multiple of 8.
      weight: (V, H), or (H, V) with `transpose_weight`; of the dtype of `hidden`.
      labels: (...) integers, from 0 to V - 1 or `ignore_index`. Labels that are not traced are waited for and checked.
        A traced one that is out of range makes loss and gradients NaN (`cookbook.linear_cross_entropy.check_labels`
        finds it), and nothing is read there.
      transpose_weight: the weight is given as (H, V).
      reduction: "mean" over the rows that are not ignored (0 if all are), "sum", or "none".
      ignore_index: the label of rows whose loss is 0, and whose gradients are, whatever they hold.
      label_smoothing: the share of the target's probability that all V labels have alike, from 0 to 1.
      z_loss: what lse**2 is multiplied by before it is added to the loss of each row, 0 or more.
      logits_soft_cap: logits become `cap * tanh(logits / cap)`; None for no cap.
      return_lse: also return the logarithm of the sum of the exponentials of each row's logits; 0 if it is ignored.
      memory: None: logits, and sums beside them, take at most 2 GB, in most cases with three products forward and
        backward. Where they would take more, the weight's gradient may be rounded up to three times more. "low": all
        that is kept beside operands and results is about a twentieth of the logits in float32, with four products. The
        weight's gradient may be rounded up to 15 times more then.
      axis_name: axis of a mesh of `jax.shard_map` over which the vocabulary is sharded, in order: V is then that of a
        device, labels are those of all, and each device has all rows, of which it gets the whole loss. Or several axes.

    Returns:
      The loss, float32: a scalar, or (...) of each row. With `return_lse` a pair of it and lse, (...) float32.

    Raises:
      ValueError: a rank, shape, dtype or option is not supported, or a label that is not traced is out of range;
        RuntimeError: no GPU.
    """
    op = "linear_cross_entropy"
    hidden, weight = _host.as_array(op, "hidden", hidden), _host.as_array(op, "weight", weight)
    transposed = _host.option(op, "transpose_weight", transpose_weight, bool)
    vocabulary = _check_operands(op, hidden, weight, transposed)
    rows = hidden.shape[:-1]
    labels, options = losses.check(
        op, labels, rows, vocabulary, reduction, ignore_index, label_smoothing, z_loss, logits_soft_cap, return_lse,
        axis_name,
    )  # fmt: skip
    if memory not in (None, "low"):
        raise ValueError(f"{_host.PACKAGE}.{op}: {memory=}; must be None or 'low'")
    if not labels.size:
        return losses.empty_results(options, rows)
    target = _host.require_tensor_cores(op)
    sizes = labels.size, hidden.shape[-1], vocabulary, products.pitch_of(vocabulary, transposed)
    problem = Problem(options, blocks_of(*sizes, memory, target.num_sms), transposed, vocabulary, target)
    # Labels, and so the loss, do not vary over the devices that share the vocabulary, as hidden is made to.
    hidden, weight = _host.reverse_only(op, hidden.reshape(-1, hidden.shape[-1]), weight)
    return losses.results(options, rows, *_loss(hidden, weight, labels, problem))


def _check_operands(op: str, hidden, weight, transposed: bool) -> int:
    """The number of labels; raises a ValueError where operands are not supported."""
    said = f"{_host.PACKAGE}.{op}: {hidden.shape=}, {weight.shape=}"
    if hidden.ndim == 0 or weight.ndim != 2:
        raise ValueError(f"{said}; must be (..., H) and a matrix, (V, H): reshape them")
    width, vocabulary = weight.shape[:: 1 if transposed else -1]
    if hidden.shape[-1] != width:
        raise ValueError(
            f"{said} share no H: {hidden.shape[-1]} is not {width}; is transpose_weight={transposed} meant?"
        )
    if hidden.dtype not in (jnp.bfloat16, jnp.float16) or hidden.dtype != weight.dtype:
        raise ValueError(
            f"{_host.PACKAGE}.{op}: {hidden.dtype=}, {weight.dtype=}; must both be bfloat16 or both float16: cast one"
        )
    if width % 8 or not width:
        raise ValueError(
            f"{said}; H is {width}; must be a multiple of 8, 16 bytes, for TMA: pad both with zeros (jnp.pad)"
        )
    _host.require_indices(op, rows=hidden.size // width, V=vocabulary)
    return vocabulary


linear_cross_entropy.check_labels = functools.partial(losses.check_labels, op="linear_cross_entropy")


def flops(rows: int, hidden: int, vocabulary: int) -> int:
    """The product of the logits; forward and backward are three."""
    return 2 * rows * hidden * vocabulary


def bytes_moved(rows: int, hidden: int, vocabulary: int, itemsize: int = 2) -> int:
    """Both operands read once."""
    return (rows + vocabulary) * hidden * itemsize

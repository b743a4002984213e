# SPDX-License-Identifier: Apache-2.0
"""Cross-entropy of logits in memory, each read once; for the gradient read once more, and written over if they may be.

    z = cap tanh(x / cap) with a soft cap, else x;   lse[r] = log sum_c exp(z[r, c])
    loss[r] = lse[r] - (1 - label_smoothing) z[r, label[r]] - label_smoothing / V sum_c z[r, c] + z_loss lse[r]**2

Shapes: logits x (..., V), V at most 2**20, bfloat16, float16 or float32; labels (...) integers; the arithmetic, and
losses, are float32. Role and barrier tables: `kernel.py`.

Bound by: memory (one read; forward and backward two reads and a write).
Not supported: second derivatives. Rows of fewer than about 1000 columns that are not a multiple of 16 bytes are loaded
in smaller words.
"""

import functools
import math

import jax
import jax.numpy as jnp

from .. import _host
from . import kernel, losses
from .losses import Options, Rows

VOCABULARY_MAX = 2**20  # More columns were not tested.
PITCH_MIN = 128  # A column for each thread.


def cross_entropy_reference(
    logits, labels, *, reduction="mean", ignore_index=-100, label_smoothing=0.0, z_loss=0.0, logits_soft_cap=None,
    return_lse=False,
):  # fmt: skip
    z, has_loss = logits.astype(jnp.promote_types(logits.dtype, jnp.float32)), labels != ignore_index
    z = jnp.where(has_loss[..., None], z, 0)
    z = z if logits_soft_cap is None else logits_soft_cap * jnp.tanh(z / logits_soft_cap)
    lse = jax.nn.logsumexp(z, axis=-1)
    at_label = jnp.take_along_axis(z, jnp.where(has_loss, labels, 0)[..., None], -1, mode="clip")[..., 0]
    loss = lse - (1 - label_smoothing) * at_label - label_smoothing * jnp.mean(z, -1) + z_loss * lse * lse
    loss = jnp.where(has_loss, loss, 0)
    sums = dict(none=loss, sum=jnp.sum(loss), mean=jnp.sum(loss) / jnp.maximum(jnp.sum(has_loss), 1))
    return (sums[reduction], jnp.where(has_loss, lse, 0)) if return_lse else sums[reduction]


def _padded(logits):
    """Rows as the kernels take them: a few columns are padded."""
    more = PITCH_MIN - logits.shape[1]
    return jnp.pad(logits, ((0, 0), (0, more))) if more > 0 else logits


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _loss(logits, labels, options: Options):
    cols = logits.shape[1]
    rows = Rows.of_device(labels, options, cols)
    found = kernel.statistics(_padded(logits), rows.columns, cols, options.soft_cap, options.label_smoothing > 0)
    return rows.results(*rows.losses(*found))


def _loss_fwd(logits, labels, options: Options):
    loss, lse = _host.without_derivative(options.op, functools.partial(_loss, options=options))(logits, labels)
    return (loss, lse), (logits, labels, lse)


def _loss_bwd(options: Options, kept, cotangents):
    return _host.without_derivative(options.op, functools.partial(_gradient, options))(kept, cotangents)


def _gradient(options: Options, kept, cotangents):
    (logits, labels, lse), cols = kept, kept[0].shape[1]
    d_loss, d_lse = (losses.shared_cotangent(options, logits, x) for x in cotangents)
    rows = Rows.of_device(labels, options, cols)
    a, b = rows.coefficients(lse, d_loss * rows.weight(), d_lse)
    g = kernel.gradient(
        _padded(logits), rows.columns, lse, a, b, cols, options.soft_cap, options.label_smoothing, rows.vocabulary
    )
    return g[:, :cols], None


_loss.defvjp(_loss_fwd, _loss_bwd)


def cross_entropy(
    logits: jax.Array,
    labels: jax.Array,
    *,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    logits_soft_cap: float | None = None,
    return_lse: bool = False,
    axis_name: _host.AxisName | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Cross-entropy of each row of logits and its label.

    Differentiable once in the logits. If the program needs these no more (they were computed in the same `jit`, or are
    donated to it), their gradient takes their place; not where `jax.shard_map` checks over which axes they vary
    (`check_vma`).

    On an automatic mesh JAX gathers sharded operands on every device and says nothing: call it inside `jax.shard_map`.

    Args:
      logits: (..., V) bfloat16, float16 or float32, V at most 1,048,576.
      labels: (...) integers, from 0 to V - 1 or `ignore_index`. Labels that are not traced are waited for and checked.
        A traced one that is out of range makes loss and gradient of its row NaN (`cookbook.cross_entropy.check_labels`
        finds it), and nothing is read there.
      reduction: "mean" over the rows that are not ignored (0 if all are), "sum", or "none".
      ignore_index: the label of rows whose loss is 0, and whose gradients are, whatever they hold.
      label_smoothing: the share of the target's probability that all V labels have alike, from 0 to 1.
      z_loss: what lse**2 is multiplied by before it is added to the loss of each row, 0 or more.
      logits_soft_cap: logits become `cap * tanh(logits / cap)`; None for no cap.
      return_lse: also return the logarithm of the sum of the exponentials of each row's logits; 0 if it is ignored.
      axis_name: axis of a mesh of `jax.shard_map` over which the vocabulary is sharded, in order: V is then that of a
        device, labels are those of all, and each device has all rows, of which it gets the whole loss. Or several axes.

    Returns:
      The loss, float32: a scalar, or (...) of each row. With `return_lse` a pair of it and lse, (...) float32.

    Raises:
      ValueError: a rank, shape, dtype or option is not supported, or a label that is not traced is out of range;
        RuntimeError: no GPU.
    """
    op = "cross_entropy"
    logits = _host.as_array(op, "logits", logits)
    if logits.ndim == 0 or logits.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        raise ValueError(
            f"{_host.PACKAGE}.{op}: {logits.shape=}, {logits.dtype=}; must be (..., V) bfloat16, float16 or float32: "
            "cast them"
        )
    *rows, vocabulary = logits.shape
    if vocabulary > VOCABULARY_MAX:
        raise ValueError(
            f"{_host.PACKAGE}.{op}: {logits.shape=}; V must be at most {VOCABULARY_MAX}, of which rows were tested: "
            "shard the vocabulary (axis_name)"
        )
    _host.require_indices(op, rows=math.prod(rows))
    labels, options = losses.check(
        op, labels, tuple(rows), vocabulary, reduction, ignore_index, label_smoothing, z_loss, logits_soft_cap,
        return_lse, axis_name,
    )  # fmt: skip
    if not labels.size:
        return losses.empty_results(options, tuple(rows))
    _host.require_target(op)
    (logits,) = _host.reverse_only(op, logits.reshape(-1, vocabulary))
    return losses.results(options, tuple(rows), *_loss(logits, labels, options))


cross_entropy.check_labels = losses.check_labels


def flops(rows: int, cols: int) -> int:
    """A comparison, a subtraction, an exponential and an addition for each value."""
    return 4 * rows * cols


def bytes_moved(rows: int, cols: int, itemsize: int) -> int:
    """The logits, read once."""
    return rows * cols * itemsize

# SPDX-License-Identifier: Apache-2.0
"""From the statistics of rows of logits to losses, and from their cotangents to those of the logits: numbers per row.

    loss[r] = lse[r] - (1 - label_smoothing) z[r, label[r]] - label_smoothing / V sum_c z[r, c] + z_loss lse[r]**2
    dloss[r]/dz[r, c] = (1 + 2 z_loss lse[r]) p[r, c] - q[r, c],    p[r, c] = exp(z[r, c] - lse[r])

and here is what both ops take as arguments.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .. import _host
from .kernel import ELSEWHERE, IGNORED

REDUCTIONS = ("mean", "sum", "none")


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of a call, checked."""

    op: str
    reduction: str
    ignore_index: int
    label_smoothing: float
    z_loss: float
    soft_cap: float | None
    return_lse: bool
    axis_name: _host.AxisName | None

    @property
    def num_parts(self) -> int:
        """Devices that share the vocabulary."""
        return 1 if self.axis_name is None else lax.axis_size(self.axis_name)

    @property
    def knows_cotangents(self) -> bool:
        """Whether the gradient of each row is known before that of the result, but for one factor."""
        return self.reduction != "none" and not self.return_lse


@dataclasses.dataclass(frozen=True)
class Rows:
    """Labels of rows of logits that hold `cols` columns of the vocabulary, from `first` on."""

    labels: jax.Array
    options: Options
    cols: int
    first: jax.Array | int = 0

    @classmethod
    def of_device(cls, labels, options: Options, cols: int) -> "Rows":
        """With the columns that are this device's."""
        first = 0 if options.axis_name is None else lax.axis_index(options.axis_name).astype(jnp.int32) * cols
        return cls(labels, options, cols, first)

    @property
    def vocabulary(self) -> int:
        return self.cols * self.options.num_parts

    @property
    def has_loss(self):
        return self.labels != self.options.ignore_index

    @property
    def is_label(self):
        """Whether each label is one of the vocabulary."""
        return (self.labels >= 0) & (self.labels < self.vocabulary)

    def within(self, first, cols: int):
        """Where each label lies among `cols` columns from `first` on, as the kernels take it."""
        column = self.labels - first
        column = jnp.where((column >= 0) & (column < cols) & self.is_label, column, ELSEWHERE)
        return jnp.where(self.has_loss, column, IGNORED).astype(jnp.int32)

    @property
    def columns(self):
        """Where each label lies among this device's columns."""
        return self.within(self.first, self.cols)

    def losses(self, m_i, l_i, at_label, total):
        """(losses, lse) of rows with these statistics of this device's columns; 0 in rows that are ignored."""
        options = self.options
        if options.axis_name is not None:
            top = lax.pmax(lax.stop_gradient(m_i), options.axis_name)
            parts = [l_i * jnp.exp(m_i - top), at_label, *([] if total is None else [total])]
            l_i, at_label, *totals = lax.psum(parts, options.axis_name)
            m_i, total = top, totals[0] if totals else None
        lse = m_i + jnp.log(l_i)
        loss = lse - (1 - options.label_smoothing) * at_label + options.z_loss * lse * lse
        if total is not None:
            loss -= options.label_smoothing / self.vocabulary * total
        loss = jnp.where(self.is_label, loss, jnp.nan)
        return jnp.where(self.has_loss, loss, 0.0), jnp.where(self.has_loss, lse, 0.0)

    def coefficients(self, lse, d_loss, d_lse):
        """a and b of the gradient's kernel, for cotangents per row, each an array or a number."""
        d_loss = jnp.where(self.is_label, d_loss, jnp.nan)
        a, b = d_loss * (1 + 2 * self.options.z_loss * lse) + d_lse, d_loss
        return tuple(jnp.where(self.has_loss, x, 0.0).astype(jnp.float32) for x in (a, b))

    def weight(self):
        """The factor of all rows' losses in their sum."""
        if self.options.reduction != "mean":
            return jnp.float32(1)
        return 1 / jnp.maximum(jnp.sum(self.has_loss, dtype=jnp.int32), 1).astype(jnp.float32)

    def results(self, losses, lse):
        """(loss, lse), the loss reduced."""
        return (losses if self.options.reduction == "none" else jnp.sum(losses) * self.weight()), lse


def shared_cotangent(options: Options, weight, cotangent):
    """The cotangent of a result that all devices have which share the vocabulary.

    Where `jax.shard_map` checks what varies, it is whole on each. Where it does not, it is what the device has of it.
    """
    if options.axis_name is None or _host.varying(weight):
        return cotangent
    return lax.psum(cotangent, options.axis_name)


def check_labels(labels, vocabulary: int, ignore_index: int = -100, op: str = "cross_entropy"):
    """Looks, on the host, for labels that the vocabulary does not have.

    Args:
      labels: integers, an array of NumPy's or a concrete one of JAX's.
      vocabulary: V, how many labels there are.
      ignore_index: the label of rows without a loss.
      op: whose labels they are, for the message.

    Raises:
      ValueError: a label is neither from 0 to V - 1 nor `ignore_index`; the first such label is named.
    """
    labels = np.asarray(jax.device_get(labels))
    wrong = np.argwhere((labels != ignore_index) & ((labels < 0) | (labels >= vocabulary)))
    if wrong.size:
        at = ", ".join(map(str, wrong[0]))
        raise ValueError(
            f"{_host.PACKAGE}.{op}: labels[{at}]={labels[tuple(wrong[0])]}; must be from 0 to {vocabulary - 1}, or "
            f"{ignore_index=} for a row without a loss"
        )


def check(op: str, labels, rows: tuple[int, ...], vocabulary: int, reduction, ignore_index, label_smoothing, z_loss,
          logits_soft_cap, return_lse, axis_name):  # fmt: skip
    """(labels (N,), `Options`) of a call whose rows have the shape `rows` and `vocabulary` columns on this device.

    Raises:
      ValueError: one is not supported; or a label that is not traced is out of range.
    """
    name = f"{_host.PACKAGE}.{op}"
    given, labels = labels, _host.as_array(op, "labels", labels)
    if labels.shape != rows or not jnp.issubdtype(labels.dtype, jnp.integer):
        raise ValueError(f"{name}: {labels.shape=}, {labels.dtype=}; must be {rows} integers, one for each row")
    if reduction not in REDUCTIONS:
        raise ValueError(f"{name}: {reduction=}; must be one of {', '.join(map(repr, REDUCTIONS))}")
    ignore_index = _host.option(op, "ignore_index", ignore_index, int)
    label_smoothing = _host.option(op, "label_smoothing", label_smoothing, float)
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"{name}: {label_smoothing=}; must be from 0 to 1, a share of the probability: pass 0.1")
    z_loss = _host.option(op, "z_loss", z_loss, float)
    if z_loss < 0:
        raise ValueError(f"{name}: {z_loss=}; must be 0 or more, a weight of lse**2: pass 1e-4")
    if logits_soft_cap is not None:
        logits_soft_cap = _host.option(op, "logits_soft_cap", logits_soft_cap, float)
        if not logits_soft_cap > 0:
            raise ValueError(f"{name}: {logits_soft_cap=}; must be above 0: None stands for no cap")
    if vocabulary == 0:
        raise ValueError(f"{name}: the vocabulary has no labels; must have one or more")
    options = Options(
        op, reduction, ignore_index, label_smoothing, z_loss, logits_soft_cap,
        _host.option(op, "return_lse", return_lse, bool), axis_name,
    )  # fmt: skip
    if axis_name is None and not isinstance(given, jax.core.Tracer) and getattr(given, "is_fully_addressable", True):
        check_labels(given, vocabulary, ignore_index, op)
    return labels.astype(jnp.int32).reshape(-1), options


def results(options: Options, rows: tuple[int, ...], loss, lse):
    """The results of a call: the loss, in the shape of the rows if each has one, and lse if it is wanted."""
    loss = loss.reshape(rows) if options.reduction == "none" else loss
    return (loss, lse.reshape(rows)) if options.return_lse else loss


def empty_results(options: Options, rows: tuple[int, ...]):
    """The results of a call without rows."""
    loss = jnp.zeros(0 if options.reduction == "none" else (), jnp.float32)
    return results(options, rows, loss, jnp.zeros(0, jnp.float32))

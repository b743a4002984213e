# SPDX-License-Identifier: Apache-2.0
"""Sum over the last or the leading axis, in float32, bitwise reproducible from run to run.

    last axis:     out[r] = sum_c x[r, c]           leading axis:     out[c] = sum_r x[r, c]

Shapes: x of any rank; the result lacks the axis and has the dtype of x: float32, bfloat16 or float16. Rows of the last
axis have up to 65536 values; the leading axis has any length, and in a matrix of 2**31 values and more rows of up to
2**30 - 2**15.

Role table, last axis: as in `softmax`, one warpgroup per block sums one or more rows in registers, without barriers of
ours. Fewer threads than there share a short row, and a row too long for the registers is read once. Leading axis:
`leading.py`, where each warpgroup sums some rows of a tile of columns, and the warpgroups of a block add their sums up;
where columns are too few for all SMs, several blocks share the rows, and a second kernel adds up their sums.

Bound by: memory (one read). The gradient is a broadcast, and XLA's. Not supported: axes in between (move the axis
first).
Chapter: notebooks/03_reductions.ipynb.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .. import _device, _host
from .._device import WARPGROUP
from . import core, leading
from .plan import LANES_MIN, UNROLLED_PIECES, Config, Plan, default_config, floor_power_of_2
from .plan_ragged import RaggedPlan

VALUES = 8  # A thread adds up at least so many values of a short row before it exchanges any with others.
VALUES_IN_FLIGHT = 32  # The most values of short rows, one or several, that a thread loads at once.
BLOCKS_PER_SM = 16  # An SM has room for 2048 threads, 16 warpgroups.


def reduce_sum_reference(x, axis):
    return jnp.sum(x.astype(jnp.promote_types(x.dtype, jnp.float32)), axis=axis)


@dataclasses.dataclass(frozen=True)
class ShortPlan(Plan):
    """Short rows. No row is stored, so that threads need not lie side by side along it: few of them share a row, and
    each adds up some values before they exchange any."""

    @property
    def lanes(self) -> int:
        return min(super().lanes, floor_power_of_2(max(LANES_MIN, self.cols // VALUES)))

    def rows_per_block(self, num_sms: int) -> int:
        """As few rows as let all blocks run at once, if they are not too many for the registers."""
        rows_at_once = WARPGROUP // self.lanes
        wanted = pl.cdiv(self.rows, rows_at_once * BLOCKS_PER_SM * num_sms)
        return rows_at_once * max(1, min(wanted, 8, VALUES_IN_FLIGHT * self.lanes // self.cols))


@dataclasses.dataclass(frozen=True)
class LongPlan(RaggedPlan):
    """A row that begins anywhere in memory and is too long for the registers: they hold a group of its pieces."""

    @property
    def num_groups(self) -> int:
        return pl.cdiv(self.num_pieces, UNROLLED_PIECES)

    def load(self, x_gmem, row, g):
        """The pieces of group `g`, with zeros in the columns that an earlier piece holds already."""
        unit, last = self.vec, self.inner // self.vec - WARPGROUP  # Counted so, the compiler sees aligned loads.
        first = _device.div(self.row_in(row) * self.cols + unit - 1, unit)
        turns = [(g * self.group + i) * WARPGROUP for i in range(self.group)]
        starts = [jnp.minimum(turn, last) for turn in turns]
        ref = self.near(x_gmem)
        pieces = [_load(ref, pl.ds((first + start) * unit, *self.shape), self.layout) for start in starts]
        column = plgpu.broadcasted_iota(jnp.int32, self.shape, 0, layout=self.layout)
        shared = [(turn - start) * unit for turn, start in zip(turns, starts, strict=True)]
        return [jnp.where(column >= some, piece, 0.0) for piece, some in zip(pieces, shared, strict=True)]

    def ends(self, x_gmem):
        """The columns before and after all pieces."""
        ref, (*_, head, tail) = self.near(x_gmem), self._parts()
        column = plgpu.broadcasted_iota(jnp.int32, (WARPGROUP,), 0, layout=head[1])
        only = lambda where, layout, low, high: jnp.where(
            (column >= low) & (column < high), _load(ref, where, layout), 0.0
        )
        return only(*head) + only(*tail)


def _load(x_gmem, where, layout):
    return _device.load(x_gmem.at[where], layout).astype(jnp.float32)


def plan_of(rows: int, cols: int, itemsize: int, config: Config | None, num_sms: int) -> Plan:
    """The plan of the sums of rows: as `core` makes it of a `config`; otherwise chosen by shape and number of SMs."""
    if config is not None:
        return core.plan_rows(rows, cols, itemsize, config, Config.register_values)
    # A warp that stores nothing of its row has enough loads in flight, however few the rows are.
    plan = core.plan_by(default_config(rows, cols, itemsize, few_rows=0), rows, cols, itemsize)
    if plan.spread:
        too_long = plan.num_groups > 1 and cols * itemsize % 16  # For loads of 16 bytes that all stay in registers.
        return LongPlan(rows, cols, itemsize, plan.config) if too_long else plan
    short = ShortPlan(rows, cols, itemsize, Config(WARPGROUP))
    block_rows = short.rows_per_block(num_sms)
    return dataclasses.replace(short, config=Config(block_rows)) if block_rows <= rows else plan


def _sum_rows(plan: Plan, x_gmem, o_gmem, row):
    def add_group(g, total):
        return functools.reduce(jnp.add, plan.fresh(plan.load(x_gmem, row, g), g), total)

    if plan.spread and plan.num_groups == 1:
        o_gmem[row] = plan.reduce(jnp.add, jnp.sum, plan.fresh(plan.load(x_gmem, row, 0), 0)).astype(o_gmem.dtype)
        return
    zeros = plan.zeros()
    total = add_group(0, zeros) if plan.num_groups == 1 else lax.fori_loop(0, plan.num_groups, add_group, zeros)
    if plan.spread:
        o_gmem[row] = jnp.sum(total).astype(o_gmem.dtype)
    else:
        _device.store(o_gmem.at[pl.ds(row, plan.config.block_rows)], jnp.sum(total, axis=1).astype(o_gmem.dtype))


def _sum_long_rows(plan: LongPlan, x_gmem, o_gmem, row):
    add_group = lambda g, total: functools.reduce(jnp.add, plan.load(x_gmem, row, g), total)
    ends = plan.ends(x_gmem)  # In flight while the groups are added.
    total = lax.fori_loop(0, plan.num_groups, add_group, plan.zeros())
    o_gmem[row] = (jnp.sum(total) + jnp.sum(ends)).astype(o_gmem.dtype)


def _sum_last(x, config, target, params):
    rows = core.as_rows(x, fill=0)
    plan = plan_of(*rows.shape, x.dtype.itemsize, config, target.num_sms)
    sum_rows = _sum_long_rows if isinstance(plan, LongPlan) else _sum_rows
    out = core.launch(sum_rows, plan, jax.ShapeDtypeStruct(rows.shape[:1], x.dtype), params, [rows])
    return out[: math.prod(x.shape[:-1])].reshape(x.shape[:-1])


@functools.partial(jax.jit, static_argnames=("axis", "config", "target", "params"))
def _call(x, axis: int, config: Config | None, target: _host.Target, params):
    if axis == x.ndim - 1:
        return _sum_last(x, config, target, params)
    return leading.sum_leading(target, params, x.dtype, x.reshape(x.shape[0], -1)).reshape(x.shape[1:])


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _sum(x, axis, config):
    return _call(x, axis, config, _host.require_target("reduce_sum"), _host.compiler_params())


def _forward(x, axis, config):
    return _sum(x, axis, config), jnp.empty((x.shape[axis], 0), x.dtype)  # The gradient needs no more of `x`.


def _backward(axis, config, lengths, dy):
    return (jnp.broadcast_to(jnp.expand_dims(dy, axis), (*dy.shape[:axis], lengths.shape[0], *dy.shape[axis:])),)


_sum.defvjp(_forward, _backward)


def reduce_sum(x: jax.Array, axis: int, *, config: Config | None = None) -> jax.Array:
    """Sum over one axis.

    On an automatic mesh JAX gathers sharded operands on every device and says nothing: call it inside `jax.shard_map`.

    Args:
      x: an array of any rank, float32, bfloat16 or float16.
      axis: the last axis (-1, or x.ndim - 1; at most 65536 long) or the leading one (0).
      config: rows per block for the last axis; None chooses by shape.

    Returns:
      The sum, without the axis, in the dtype of `x`; the additions are in float32, in the same order in every run.

    Raises:
      ValueError: the rank, dtype or axis is not supported, or `config` does not fit the shape; RuntimeError: no GPU.
    """
    x = core.require_floats("reduce_sum", "x", x)
    axis, last = _host.option("reduce_sum", "axis", axis, int), x.ndim - 1
    if axis not in (-1, 0, last):
        raise ValueError(
            f"{_host.PACKAGE}.reduce_sum: {axis=} of {x.ndim}; must be 0 or -1: move the axis (jnp.moveaxis)"
        )
    if axis in (-1, last):
        axis, x = last, core.require_rows("reduce_sum", "x", x)
        config = core.require_config("reduce_sum", x, config)
    elif config is not None:
        raise ValueError(f"{_host.PACKAGE}.reduce_sum: {config=}; must be None for {axis=}: leave it out")
    if x.size == 0:
        return jnp.zeros(x.shape[:axis] + x.shape[axis + 1 :], x.dtype)
    return _sum(*_host.reverse_only("reduce_sum", x), axis, config)


reduce_sum.Config = Config  # `cookbook.reduce_sum` is this function, not its module.


def flops(rows: int, cols: int) -> int:
    return rows * cols


def bytes_moved(rows: int, cols: int, itemsize: int) -> int:
    return rows * cols * itemsize

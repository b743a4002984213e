"""Sum over the last or the leading axis, in float32, the same to the bit in every run.

    last axis:     out[r] = sum_c x[r, c]           leading axis:     out[c] = sum_r x[r, c]

Shapes: x of any rank; the result lacks the axis and has the dtype of x: float32, bfloat16 or float16. Rows of the last
axis have up to 65536 values; the leading axis has any length.

Role table, last axis: as in `softmax`, one warpgroup a block sums one or more rows in registers; there are no barriers
of ours. Leading axis: `leading.py`, where each warpgroup sums some rows of a tile of columns, and the warpgroups of a
block add their sums up; where columns are too few for all SMs, a second kernel adds up sums of stretches of rows.

Bound by: memory (one read). The gradient is a broadcast, and XLA's. Not supported: axes in between (move the axis
first).
Chapter: notebooks/03_reductions.ipynb.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from .. import _mgpu
from . import core, leading
from .core import Config, Plan


def reduce_sum_reference(x, axis):
    return jnp.sum(x.astype(jnp.promote_types(x.dtype, jnp.float32)), axis=axis)


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
        _mgpu.store(o_gmem.at[pl.ds(row, plan.config.block_rows)], jnp.sum(total, axis=1).astype(o_gmem.dtype))


def _sum_last(x, config, params):
    rows = core.as_rows(x, fill=0)
    plan = core.plan_rows(*rows.shape, x.dtype.itemsize, config, Config.register_values)
    out = core.launch(_sum_rows, plan, jax.ShapeDtypeStruct(rows.shape[:1], x.dtype), params, [rows])
    return out[: math.prod(x.shape[:-1])].reshape(x.shape[:-1])


@functools.partial(jax.jit, static_argnames=("axis", "config", "target", "params"))
def _call(x, axis: int, config: Config | None, target: _mgpu.Target, params):
    if axis == x.ndim - 1:
        return _sum_last(x, config, params)
    return leading.sum_leading(target, params, x.dtype, x.reshape(x.shape[0], -1)).reshape(x.shape[1:])


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _sum(x, axis, config):
    return _call(x, axis, config, _mgpu.require_target("reduce_sum"), _mgpu.compiler_params())


def _forward(x, axis, config):
    return _sum(x, axis, config), jnp.empty((x.shape[axis], 0), x.dtype)  # The gradient needs no more of `x`.


def _backward(axis, config, lengths, dy):
    return (jnp.broadcast_to(jnp.expand_dims(dy, axis), (*dy.shape[:axis], lengths.shape[0], *dy.shape[axis:])),)


_sum.defvjp(_forward, _backward)


def reduce_sum(x, axis: int, *, config: Config | None = None):
    """Sum over one axis.

    Args:
      x: an array of any rank, float32, bfloat16 or float16.
      axis: the last axis (-1, or x.ndim - 1; at most 65536 long) or the leading one (0).
      config: rows a block for the last axis; None chooses by shape.

    Returns:
      The sum, without the axis, in the dtype of `x`; the additions are in float32, in the same order in every run.

    Raises:
      ValueError: the rank, dtype or axis is not supported; RuntimeError: no GPU.
    """
    x = core.require_floats("reduce_sum", "x", x)
    axis, last = _mgpu.option("reduce_sum", "axis", axis, int), x.ndim - 1
    if axis not in (-1, 0, last):
        raise ValueError(f"cookbook.reduce_sum: {axis=} of {x.ndim}; must be 0 or -1: move the axis (jnp.moveaxis)")
    if axis in (-1, last):
        axis, x = last, core.require_rows("reduce_sum", "x", x)
    if x.size == 0:
        return jnp.zeros(x.shape[:axis] + x.shape[axis + 1 :], x.dtype)
    return _sum(x, axis, config)


reduce_sum.Config = Config  # `cookbook.reduce_sum` is this function, not its module.


def flops(rows: int, cols: int) -> int:
    return rows * cols


def bytes_moved(rows: int, cols: int, itemsize: int) -> int:
    return rows * cols * itemsize

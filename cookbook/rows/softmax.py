# SPDX-License-Identifier: Apache-2.0
"""Softmax over the last axis, each row read once.

    p[r, c] = exp(x[r, c] - m[r]) / l[r],    m[r] = max_c x[r, c],    l[r] = sum_c exp(x[r, c] - m[r])

Shapes: x (..., C) with C from 1 to 65536; the result has the shape and dtype of x: float32, bfloat16 or float16. The
arithmetic is float32. Rows with +inf or NaN, or of -inf alone, give NaN, as in `jax.nn.softmax`.

Role table: one warpgroup per block does everything. It loads a row (short rows: several, one or more per warp) into
registers, reduces it twice, and stores it. There are no barriers of ours: `jnp.max` and `jnp.sum` of a row that is
spread over four warps exchange four numbers through shared memory, and synchronise the warpgroup themselves.

A row that does not fit the registers (more than 16384 values) is read twice: once for its statistics, group by group
with the online update of Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018); and once more to
be stored. The L2 cache cannot keep many such rows, which are then read from HBM twice.

The backward kernel makes dx = p (dp - sum_c p dp) of p and dp alone, which it reads once.

Bound by: memory (one read, one write; backward two reads). Long rows that are not a multiple of 16 bytes are loaded
from their first aligned column on (`RaggedPlan`); short ones, and those beyond the registers, in smaller words.
Not supported: other axes (move the axis first), longer rows, second derivatives.
Chapter: notebooks/03_reductions.ipynb.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from .. import _host
from . import core
from .plan import Config, Plan

REGISTER_VALUES = 128  # Values of a row that a thread keeps; softmax keeps nothing beside them.
LOWEST = float(jnp.finfo(jnp.float32).min)
LOG2_E = math.log2(math.e)  # The GPU has an instruction for 2**x, none for e**x.


def softmax_reference(x):
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    p = jnp.exp(x - jnp.max(x, axis=-1, keepdims=True))
    return p / jnp.sum(p, axis=-1, keepdims=True)


def _exp(x, m_i):
    return jnp.exp2((x - m_i) * LOG2_E)


def _statistics(plan: Plan, x_gmem, row, g):
    """Maximum `m_i` and sum `l_i` of the exponentials of group `g`, and these exponentials `p`."""
    x = plan.load(x_gmem, row, g)
    m_i = plan.reduce(jnp.maximum, jnp.max, x)
    if plan.num_groups > 1:
        m_i = jnp.maximum(m_i, LOWEST)  # A group of -inf alone must not turn the whole row into NaN.
    p = [_exp(v, m_i) for v in x]
    return m_i, plan.reduce(jnp.add, jnp.sum, plan.fresh(p, g)), p


def _merge(a, b):
    """Statistics of two parts of a row, as of one."""
    (m_a, l_a), (m_b, l_b) = a, b
    m_i = jnp.maximum(m_a, m_b)
    return m_i, l_a * _exp(m_a, m_i) + l_b * _exp(m_b, m_i)


def _short_row(plan: Plan, x_gmem, o_gmem, row):
    _, l_i, p = _statistics(plan, x_gmem, row, 0)
    scale = 1.0 / l_i
    plan.store(o_gmem, row, 0, [v * scale for v in p])


def _long_row(plan: Plan, x_gmem, o_gmem, row):
    step = lambda g, so_far: _merge(so_far, _statistics(plan, x_gmem, row, g)[:2])
    m_i, l_i = lax.fori_loop(0, plan.num_groups, step, (plan.per_row(LOWEST), plan.per_row(0.0)))
    scale = 1.0 / l_i

    @pl.loop(0, plan.num_groups)
    def _(g):
        plan.store(o_gmem, row, g, [_exp(v, m_i) * scale for v in plan.load(x_gmem, row, g)])


def _row(plan: Plan, x_gmem, o_gmem, row):
    one_row = _short_row if plan.num_groups == 1 else _long_row
    one_row(plan, x_gmem, o_gmem, row)


def _backward_row(plan: Plan, y_gmem, dy_gmem, dx_gmem, row):
    def products(g):
        y, dy = plan.load(y_gmem, row, g), plan.load(dy_gmem, row, g)
        return y, dy, plan.reduce(jnp.add, jnp.sum, plan.fresh([p * d for p, d in zip(y, dy, strict=True)], g))

    def put(g, y, dy, total):
        plan.store(dx_gmem, row, g, [p * (d - total) for p, d in zip(y, dy, strict=True)])

    if plan.num_groups == 1:
        return put(0, *products(0))
    total = lax.fori_loop(0, plan.num_groups, lambda g, so_far: so_far + products(g)[2], plan.per_row(0.0))
    pl.loop(0, plan.num_groups)(lambda g: put(g, *products(g)[:2], total))


@functools.partial(jax.jit, static_argnames=("one_row", "padding", "config", "register_values", "params"))
def _call(one_row, padding: float, config: Config | None, register_values: int, params, *arrays):
    """One more array of the shape of `arrays`, which `one_row` makes of them row by row."""
    rows, x = [core.as_rows(array, padding) for array in arrays], arrays[0]
    shape = rows[0].shape
    plan = core.plan_rows(*shape, x.dtype.itemsize, config, register_values)
    out = core.launch(one_row, plan, jax.ShapeDtypeStruct(shape, x.dtype), params, rows)
    return out[: x.size // x.shape[-1], : x.shape[-1]].reshape(x.shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _softmax(x, config):
    # ex2.approx is good to 2**-22: far below the rounding of 16-bit results, not of float32.
    params = _host.compiler_params(approx_math=x.dtype.itemsize == 2)
    return _call(_row, -jnp.inf, config, REGISTER_VALUES, params, x)


def _forward(x, config):
    y = _softmax(x, config)
    return y, y


def _backward(config, y, dy):
    _host.require_target("softmax")
    values = REGISTER_VALUES // 2  # Two arrays are in registers.
    gradient = functools.partial(_call, _backward_row, 0.0, None, values, _host.compiler_params())
    return (_host.without_derivative("softmax", gradient)(y, dy),)


_softmax.defvjp(_forward, _backward)


def softmax(x: jax.Array, axis: int = -1, *, config: Config | None = None) -> jax.Array:
    """Softmax over the last axis.

    On an automatic mesh JAX gathers sharded operands on every device and says nothing: call it inside `jax.shard_map`.

    Args:
      x: (..., C) float32, bfloat16 or float16, 1 <= C <= 65536.
      axis: the last axis, -1 or x.ndim - 1.
      config: rows per block, a multiple that the row length sets; None chooses by shape.

    Returns:
      (..., C), of the dtype of `x`.

    Raises:
      ValueError: rank, dtype, axis or row length is not supported, or `config` does not fit the shape; RuntimeError:
        no GPU.
    """
    x = core.require_rows("softmax", "x", x)
    axis = _host.option("softmax", "axis", axis, int)
    if axis not in (-1, x.ndim - 1):
        raise ValueError(f"{_host.PACKAGE}.softmax: {axis=} of {x.ndim}; must be -1: move the axis (jnp.moveaxis)")
    config = core.require_config("softmax", x, config)
    if x.size == 0:
        return x
    _host.require_target("softmax")
    return _softmax(*_host.reverse_only("softmax", x), config)


softmax.Config = Config  # `cookbook.softmax` is this function, not its module.


def flops(rows: int, cols: int) -> int:
    """A comparison, a subtraction, an exponential, an addition and a multiplication for each value."""
    return 5 * rows * cols


def bytes_moved(rows: int, cols: int, itemsize: int) -> int:
    return 2 * rows * cols * itemsize

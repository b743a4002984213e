# SPDX-License-Identifier: Apache-2.0
"""RMS normalisation of a residual and a weighted sum of rows: what follows a layer of experts, in one launch.

    total[t] = residual[t] + sum_j weights[t, j] * x[rows[t, j]]
    y[t] = total[t] / sqrt(mean(total[t]**2) + eps) * scale

Shapes: x (R, C), rows (T, J) int32, weights (T, J) float32, residual, y and total (T, C), scale (C,). x is bfloat16,
float16 or float32; the arithmetic is float32, and total is of the residual's dtype.

A block has one row, which its threads share. Parts are added in their order, so that results are bitwise reproducible.
Rows of fewer than 128 values, of more than 8192, or not of a multiple of 8, are added up by XLA.

Bound by: memory; a decode step's few rows by latency. Not supported: gradients, which `cookbook.moe` and `rms_norm`
have.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from .. import _host
from .._device import WARPGROUP
from . import core
from .norm import REGISTER_VALUES, each, total
from .plan import Config, Plan
from .rms_norm import rms_norm, rms_norm_reference


def sum_of_parts(x, rows, weights, residual):
    """`residual` and each row's parts of x, times their weights, in float32."""
    parts = (weights[:, j, None] * x[rows[:, j]].astype(jnp.float32) for j in range(rows.shape[1]))
    return functools.reduce(jnp.add, parts, residual.astype(jnp.float32))


def rms_norm_of_parts_reference(x, rows, weights, residual, scale, eps=1e-6):
    summed = sum_of_parts(x, rows, weights, residual)
    return rms_norm_reference(summed, scale, eps), summed


def _row(
    plan: Plan, x_gmem, rows_gmem, weights_gmem, residual_gmem, scale_gmem, y_gmem, total_gmem, row, *, eps: float
):
    places = [(rows_gmem[row, j], weights_gmem[row, j]) for j in range(rows_gmem.shape[1])]
    summed, scale = (plan.load(ref, row, 0) for ref in (residual_gmem, scale_gmem))
    parts = [(plan.load(x_gmem, place, 0), weight) for place, weight in places]  # All are in flight together.
    for part, weight in parts:
        summed = each(lambda t, v, weight=weight: t + weight * v, summed, part)
    inverse = lax.rsqrt(total(plan, [v * v for v in summed], 0) * (1.0 / plan.cols) + eps)
    plan.store(total_gmem, row, 0, summed)
    plan.store(y_gmem, row, 0, each(lambda v, s: v * inverse * s, summed, scale))


def rms_norm_of_parts(
    x: jax.Array, rows: jax.Array, weights: jax.Array, residual: jax.Array, scale: jax.Array, *, eps: float = 1e-6,
    out_dtype: _host.DType | None = None,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """(y, total): the norm of `residual` and weighted rows of x, and that sum.

    Args:
      x: (R, C).
      rows: (T, J) int32, from 0 to R - 1: the rows of x that row t adds up.
      weights: (T, J) float32.
      residual: (T, C).
      scale: (C,).
      eps: added to the mean of squares.
      out_dtype: dtype of y; None for the dtype of `x`.
    """
    out_dtype = jnp.dtype(out_dtype or x.dtype)
    num, cols = residual.shape
    if cols % 8 or not WARPGROUP <= cols <= REGISTER_VALUES * WARPGROUP or 0 in rows.shape:
        summed = sum_of_parts(x, rows, weights, residual)
        return rms_norm(summed, scale, eps=eps, out_dtype=out_dtype), summed.astype(residual.dtype)
    _host.require_target("rms_norm")
    return _call(x, rows, weights, residual, scale, eps, out_dtype, _host.compiler_params())


@functools.partial(jax.jit, static_argnames=("eps", "out_dtype", "params"))
def _call(x, rows, weights, residual, scale, eps: float, out_dtype, params):
    num, cols = residual.shape
    plan = Plan(num, cols, x.dtype.itemsize, Config(1, REGISTER_VALUES))
    out_type = jax.ShapeDtypeStruct((num, cols), out_dtype), jax.ShapeDtypeStruct((num, cols), residual.dtype)
    one_row = functools.partial(_row, eps=eps)
    return core.launch(one_row, plan, out_type, params, [x, rows, weights, residual], [scale])

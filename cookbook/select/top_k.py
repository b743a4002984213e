# SPDX-License-Identifier: Apache-2.0
"""The k largest values of each row and their indices, without a sort of the row.

    values[r] = the k largest of x[r, :], in descending order;   x[r, indices[r, i]] = values[r, i]

Shapes: x (..., C) with C up to 2**20, k up to 2048; values and indices (..., k). The order is that of `jax.lax.top_k`:
-0.0 comes after 0.0, NaN before infinity, NaN with a sign after all else, and of equal values the lower index first.

A row is cut into parts, one for each block. A stage leaves at least k candidates per part, side by side; the next stage
selects among those, and the last stage has the row to itself and sorts what is left. `kernel.py` has the tables of
roles and barriers, and the plan is in `plan.py`. 16 rows or more of at most 512 values each are for `kernel_rows.py` if
k is at most 16: a warp has 4 rows.

Bound by: memory (one read). Rows that are not a multiple of 16 bytes are loaded in smaller words.
Not supported: other axes (move the axis first), k above 2048.
Chapter: notebooks/24_sampling.ipynb.
"""

import functools
import math

import jax
import jax.numpy as jnp

from .. import _host
from . import kernel, kernel_rows
from .logits import Logits

K_MAX, COLUMNS_MAX = 2048, 2**20
DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16, jnp.int32)


def top_k_reference(x, k):
    return tuple(jax.lax.top_k(x, k))


@functools.partial(jax.jit, static_argnames=("k", "target", "params"))
def _call(x, k: int, target: _host.Target, params):
    if kernel_rows.fits(*x.shape, k):
        return kernel_rows.select_rows(x, k, target, params)
    return kernel.stages(Logits(x), k, x.dtype, target, params)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _top_k(x, k: int):
    params = _host.compiler_params(unsafe_no_auto_barriers=True)  # `threads.sync` stands where one is needed.
    values, indices = _call(x.reshape(-1, x.shape[-1]), k, _host.require_target("top_k"), params)
    return values.reshape(*x.shape[:-1], k), indices.reshape(*x.shape[:-1], k)


def _forward(x, k: int):
    values, indices = _top_k(x, k)
    return (values, indices), (indices, jnp.empty((x.shape[-1], 0), x.dtype))


def _backward(k: int, residuals, gradients):
    indices, like = residuals
    if not jnp.issubdtype(like.dtype, jnp.inexact):
        return (None,)
    zeros = jnp.zeros((*indices.shape[:-1], like.shape[0]), like.dtype)
    return (jnp.put_along_axis(zeros, indices, gradients[0], axis=-1, inplace=False),)


_top_k.defvjp(_forward, _backward)


def top_k(x: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """The k largest values along the last axis, and their indices, as `jax.lax.top_k` has them.

    On an automatic mesh JAX gathers sharded operands on every device and says nothing: call it inside `jax.shard_map`.

    Args:
      x: (..., C) float32, bfloat16, float16 or int32, 1 <= C <= 2**20.
      k: how many, from 0 to C, at most 2048.

    Returns:
      (values, indices), (..., k) each: values of the dtype of `x`, in descending order, and int32 indices; of equal
      values the one with the lower index comes first. Values have a gradient, in reverse mode.

    Raises:
      ValueError: rank, dtype, row length or `k` is not supported; RuntimeError: no GPU.
    """
    x, name = _host.as_array("top_k", "x", x), f"{_host.PACKAGE}.top_k"
    if x.dtype not in DTYPES:
        raise ValueError(f"{name}: x.dtype is {x.dtype}; must be float32, bfloat16, float16 or int32: cast it")
    if x.ndim == 0 or not 1 <= x.shape[-1] <= COLUMNS_MAX:
        raise ValueError(f"{name}: x.shape={x.shape}; the last axis must have 1 to {COLUMNS_MAX} values: split it")
    k, most = _host.option("top_k", "k", k, int), min(K_MAX, x.shape[-1])
    if not 0 <= k <= most:
        raise ValueError(f"{name}: {k=}; must be from 0 to {most} for rows of {x.shape[-1]}: pass fewer")
    _host.require_indices("top_k", rows=math.prod(x.shape[:-1]))
    if k == 0 or x.size == 0:
        return jnp.zeros((*x.shape[:-1], k), x.dtype), jnp.zeros((*x.shape[:-1], k), jnp.int32)
    _host.require_target("top_k")
    return _top_k(*_host.reverse_only("top_k", x), k)


def flops(rows: int, cols: int) -> int:
    """A key, its place among the maxima of groups and two comparisons with the threshold for each value."""
    return 4 * rows * cols


def bytes_moved(rows: int, cols: int, itemsize: int, k: int) -> int:
    return rows * (cols * itemsize + k * (itemsize + 4))

# SPDX-License-Identifier: Apache-2.0
"""Layer normalisation over the last axis, each row read once.

    y[r, c] = (t[r, c] - mean[r]) / sqrt(mean_c((t[r, c] - mean[r])**2) + eps) * weight[c] + bias[c]

of t = x, or of t = residual + x, the sum that goes on as the next residual.

Shapes: x and residual (..., C) with C from 1 to 65536, weight and bias (C,); y and the sum have the shape of x. All are
float32, bfloat16 or float16, each its own; the sum is of the residual's dtype. The arithmetic is float32; squares are
those of the distance from the mean, so a large mean costs no digits.

Role table: one warpgroup per block does everything, as in `rms_norm`, but for a second reduction: the mean comes first.
Rows that do not fit the registers are read twice (`norm.py`). The backward kernel is that of all norms:
`norm_backward.py`.

Bound by: memory (one read, one write; backward two reads).
Not supported: other axes, rows longer than 65536, second derivatives.
Chapter: notebooks/03_reductions.ipynb. Source: Ba, Kiros and Hinton, "Layer Normalization" (2016).
"""

import jax
import jax.numpy as jnp
from jax import lax

from .. import _host
from . import core, norm_vjp
from .norm import Norm
from .plan import Config


def layer_norm_reference(x, weight, bias=None, eps=1e-5, residual=None):
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    total = x.astype(dtype) if residual is None else residual.astype(dtype) + x.astype(dtype)
    off = total - jnp.mean(total, axis=-1, keepdims=True)
    y = off * lax.rsqrt(jnp.mean(off * off, axis=-1, keepdims=True) + eps) * weight.astype(dtype)
    y = y if bias is None else y + bias.astype(dtype)
    return y if residual is None else (y, total)


def layer_norm(
    x: jax.Array,
    weight: jax.Array | None = None,
    bias: jax.Array | None = None,
    *,
    residual: jax.Array | None = None,
    eps: float = 1e-5,
    epsilon: float | None = None,
    out_dtype: _host.DType | None = None,
    config: Config | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Layer normalisation over the last axis, of x or of `residual + x`.

    On an automatic mesh JAX gathers sharded operands on every device and says nothing: call it inside `jax.shard_map`.

    Args:
      x: (..., C) float32, bfloat16 or float16, 1 <= C <= 65536.
      weight: (C,), of any of these dtypes; None for ones.
      bias: (C,), of any of these dtypes; None for zeros.
      residual: of the shape of `x` and any of these dtypes; or None. A Ref (`jax.new_ref`) then holds the sum, which
        is no result, and nothing is differentiated; where rows are a multiple of 16 bytes no other array is made.
      eps: added to the variance, 0 or more.
      epsilon: another name for `eps`, which it replaces.
      out_dtype: dtype of y, any of these; None for the dtype of `x`.
      config: rows per block, a multiple that the row length sets; None chooses by shape.

    Returns:
      y, (..., C) of `out_dtype`; with a residual also `residual + x`, of the residual's dtype, as a second result. y is
      computed of the sum before it is rounded.

    Raises:
      ValueError: a rank, shape, dtype or row length is not supported, or `config` does not fit the shape;
        RuntimeError: no GPU.
    """
    op, x = "layer_norm", core.require_rows("layer_norm", "x", x)
    weights = [norm_vjp.require_vector(op, "weight", weight, x)]
    weights += [] if bias is None else [norm_vjp.require_vector(op, "bias", bias, x)]
    arrays = [x, *norm_vjp.require_second(op, "residual", residual, x)]
    norm = Norm(op, norm_vjp.require_eps(op, eps, epsilon), is_centered=True)
    out_dtype = _host.require_float(op, x.dtype if out_dtype is None else out_dtype)
    outs = norm_vjp.apply(norm, arrays, weights, out_dtype, config)
    return outs if len(outs) > 1 else outs[0]


layer_norm.Config = Config  # `cookbook.layer_norm` is this function, not its module.


def flops(rows: int, cols: int) -> int:
    """Two additions and a subtraction, a square, two multiplications and an addition for each value."""
    return 7 * rows * cols


def bytes_moved(rows: int, cols: int, itemsize: int) -> int:
    """x read and y written, without a residual."""
    return 2 * rows * cols * itemsize

# SPDX-License-Identifier: Apache-2.0
"""Root-mean-square normalisation over the last axis, each row read once.

    y[r, c] = x[r, c] / sqrt(mean_c(x[r, c]**2) + eps) * scale[c]

or, with a residual, of the sum that goes on as the next residual:

    total = residual + x,    y[r, c] = total[r, c] / sqrt(mean_c(total[r, c]**2) + eps) * scale[c]

and, for an 8-bit product, y as numbers of 8 bits and one factor for each row:

    y_scale[r] = max_c |y[r, c]| / 448,    y[r, c] / y_scale[r] as float8_e4m3fn (or 127, and int8)

Shapes: x and residual (..., C) with C from 1 to 65536, scale (C,), y_scale (...); y and total have the shape of x. All
are float32, bfloat16 or float16, each its own; total is of the residual's dtype. The arithmetic is float32.

Role table: one warpgroup per block does everything, as in `softmax`: it loads a row into registers, reduces it once,
and stores it (`norm.py`). `scale` comes from the L1 cache: all rows share it. (A long row that begins anywhere in
memory takes it from a copy that is aligned in the same way: `RaggedPlan.shift`.) There are no barriers of ours. Rows
of more than 12288 values, 8192 with a residual, are read twice; of many such rows, the L2 cache can keep
only some. The backward kernel, and its barriers, are those of all norms: `norm_backward.py`.

Bound by: memory (one read, one write; backward two reads). Long rows that are not a multiple of 16 bytes are loaded
from their first aligned column on (`RaggedPlan`); short ones, and those beyond the registers, in smaller words.
Not supported: other axes, rows longer than 65536, second derivatives, gradients of an 8-bit result.
Chapters: notebooks/03_reductions.ipynb, notebooks/23b_norms.ipynb. Source: Zhang and Sennrich, "Root Mean Square Layer
Normalization" (2019).
"""

import jax
import jax.numpy as jnp
from jax import lax

from .. import _host
from . import core, norm_vjp
from .norm import Norm, largest_of
from .plan import Config


def rms_norm_reference(x, scale, eps=1e-6, residual=None):
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    total = x.astype(dtype) if residual is None else residual.astype(dtype) + x.astype(dtype)
    y = total * lax.rsqrt(jnp.mean(total * total, axis=-1, keepdims=True) + eps) * scale.astype(dtype)
    return y if residual is None else (y, total)


def quantized_reference(y, dtype):
    """Numbers of an 8-bit `dtype`, and the factor of each row, that together stand for `y`."""
    factor = jnp.max(jnp.abs(y), axis=-1) / largest_of(dtype)
    ratio = y / jnp.where(factor == 0, 1, factor)[..., None]
    return (ratio if jnp.issubdtype(dtype, jnp.floating) else jnp.round(ratio)).astype(dtype), factor


def rms_norm(
    x: jax.Array,
    scale: jax.Array | None = None,
    *,
    residual: jax.Array | None = None,
    eps: float = 1e-6,
    epsilon: float | None = None,
    out_dtype: _host.DType | None = None,
    config: Config | None = None,
) -> jax.Array | tuple[jax.Array, ...]:
    """RMS normalisation over the last axis, of x or of `residual + x`.

    On an automatic mesh JAX gathers sharded operands on every device and says nothing: call it inside `jax.shard_map`.

    Args:
      x: (..., C) float32, bfloat16 or float16, 1 <= C <= 65536.
      scale: (C,), of any of these dtypes; None for ones.
      residual: of the shape of `x` and any of these dtypes; or None. A Ref (`jax.new_ref`) then holds the sum, which
        is no result, and nothing is differentiated; where rows are a multiple of 16 bytes no other array is made.
      eps: added to the mean of squares, 0 or more.
      epsilon: another name for `eps`, which it replaces.
      out_dtype: dtype of y, any of these; None for the dtype of `x`. Or float8_e4m3fn or int8, without a gradient: y is
        then divided, row by row, by the factor that makes its largest value 448 or 127.
      config: rows per block, a multiple that the row length sets; None chooses by shape.

    Returns:
      y, (..., C) of `out_dtype`, computed of the sum before it is rounded. If that has 8 bits, also y_scale, (...)
      float32, the factors of the rows, which `cookbook.matmul_fp8` takes as `scale_a`. With a residual also
      `residual + x`, of the residual's dtype. Several results are a tuple, in this order.

    Raises:
      ValueError: a rank, shape, dtype or row length is not supported, `config` does not fit the shape, or a result of 8
        bits is differentiated; RuntimeError: no GPU.
    """
    op, x = "rms_norm", core.require_rows("rms_norm", "x", x)
    weights = [norm_vjp.require_vector(op, "scale", scale, x)]
    arrays = [x, *norm_vjp.require_second(op, "residual", residual, x)]
    norm = Norm(op, norm_vjp.require_eps(op, eps, epsilon))
    out_dtype = norm_vjp.require_out_dtype(op, x.dtype if out_dtype is None else out_dtype)
    outs = norm_vjp.apply(norm, arrays, weights, out_dtype, config)
    return outs if len(outs) > 1 else outs[0]


rms_norm.Config = Config  # `cookbook.rms_norm` is this function, not its module.


def flops(rows: int, cols: int) -> int:
    """A square, an addition and two multiplications for each value."""
    return 4 * rows * cols


def bytes_moved(rows: int, cols: int, itemsize: int) -> int:
    """x read and y written, without a residual."""
    return 2 * rows * cols * itemsize

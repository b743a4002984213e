"""Root-mean-square normalisation over the last axis, each row read once.

    y[r, c] = x[r, c] / sqrt(mean_c(x[r, c]**2) + eps) * scale[c]

Shapes: x (..., C) with C from 1 to 65536, scale (C,); the result has the shape and dtype of x. x and scale are float32,
bfloat16 or float16, each its own. The arithmetic is float32.

Role table: one warpgroup a block does everything, as in `softmax`: it loads a row into registers, reduces it once, and
stores it. `scale` comes from the L1 cache: all rows share it. There are no barriers of ours. Rows of more than 12288
values are read twice, the second time mostly from the L2 cache.

What bounds its speed: memory (one read, one write). Rows whose length is no multiple of 16 bytes are loaded in smaller
words and are slower. Not supported: other axes, rows longer than 65536, differentiation.
Chapter: notebooks/03_reductions.ipynb. Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019).
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from .. import _mgpu
from . import core
from .core import Config, Plan, default_config


def rms_norm_reference(x, scale, eps=1e-6):
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * scale.astype(x.dtype)


def _sum_of_squares(plan: Plan, pieces, g):
    return plan.reduce(jnp.add, jnp.sum, plan.fresh([v * v for v in pieces], g))


def _store(o_gmem, plan: Plan, row, g, x, scale, inverse):
    plan.store(o_gmem, row, g, [v * inverse * s for v, s in zip(x, scale, strict=True)])


def _short_row(x_gmem, scale_gmem, o_gmem, plan: Plan, inverse_rms, row):
    x = plan.load(x_gmem, row, 0)
    scale = plan.load(scale_gmem, row, 0)
    _store(o_gmem, plan, row, 0, x, scale, inverse_rms(_sum_of_squares(plan, x, 0)))


def _long_row(x_gmem, scale_gmem, o_gmem, plan: Plan, inverse_rms, row):
    add_group = lambda g, total: total + _sum_of_squares(plan, plan.load(x_gmem, row, g), g)
    inverse = inverse_rms(lax.fori_loop(0, plan.num_groups, add_group, plan.per_row(0.0)))

    @pl.loop(0, plan.num_groups)
    def _(g):
        _store(o_gmem, plan, row, g, plan.load(x_gmem, row, g), plan.load(scale_gmem, row, g), inverse)


def _kernel(x_gmem, scale_gmem, o_gmem, *, plan: Plan, cols: int, eps: float):
    one_row = _short_row if plan.num_groups == 1 else _long_row
    inverse_rms = lambda squares: lax.rsqrt(squares * (1.0 / cols) + eps)
    plan.for_each_tile(functools.partial(one_row, x_gmem, scale_gmem, o_gmem, plan, inverse_rms))


@functools.partial(jax.jit, static_argnames=("eps", "config", "params"))
def _call(x, scale, eps: float, config: Config | None, params):
    rows = core.as_rows(x, fill=0)
    plan = Plan(*rows.shape, x.dtype.itemsize, config or default_config(*rows.shape, x.dtype.itemsize))
    out = _mgpu.kernel(
        functools.partial(_kernel, plan=plan, cols=x.shape[-1], eps=eps),
        out_type=jax.ShapeDtypeStruct(rows.shape, x.dtype),
        grid=(plan.num_blocks,),
        grid_names=("block",),
        compiler_params=params,
    )(rows, jnp.pad(scale, (0, rows.shape[1] - x.shape[-1])))
    return out[: x.size // x.shape[-1], : x.shape[-1]].reshape(x.shape)


def rms_norm(x, scale, *, eps: float = 1e-6, config: Config | None = None):
    """RMS normalisation over the last axis.

    Args:
      x: (..., C) float32, bfloat16 or float16, 1 <= C <= 65536.
      scale: (C,), of any of these dtypes.
      eps: added to the mean of squares.
      config: rows a block; None chooses by shape.

    Returns:
      (..., C), of the dtype of `x`.

    Raises:
      ValueError: a rank, shape, dtype or row length is not supported; RuntimeError: no GPU.
    """
    core.require_floats("rms_norm", "x", x)
    core.require_row_length("rms_norm", "x", x)
    core.require_floats("rms_norm", "scale", scale)
    if scale.shape != x.shape[-1:]:
        raise ValueError(f"cookbook.rms_norm: {scale.shape=}; must be {x.shape[-1:]}, one value for each column of x")
    if x.size == 0:
        return x
    _mgpu.require_target("rms_norm")
    return _call(x, scale, float(eps), config, _mgpu.compiler_params())


rms_norm.Config = Config  # `cookbook.rms_norm` is this function, not its module.


def flops(rows: int, cols: int) -> int:
    """A square, an addition and two multiplications for each value."""
    return 4 * rows * cols


def bytes_moved(rows: int, cols: int, itemsize: int) -> int:
    return 2 * rows * cols * itemsize

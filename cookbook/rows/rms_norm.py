# SPDX-License-Identifier: Apache-2.0
"""Root-mean-square normalisation over the last axis, each row read once.

    y[r, c] = x[r, c] / sqrt(mean_c(x[r, c]**2) + eps) * scale[c]

or, with a residual, of the sum that goes on as the next residual:

    total = residual + x,    y[r, c] = total[r, c] / sqrt(mean_c(total[r, c]**2) + eps) * scale[c]

Shapes: x and residual (..., C) with C from 1 to 65536, scale (C,); y and total have the shape of x. All are float32,
bfloat16 or float16, each its own; total is of the residual's dtype. The arithmetic is float32.

Role table: one warpgroup per block does everything, as in `softmax`: it loads a row into registers, reduces it once,
and stores it. `scale` comes from the L1 cache: all rows share it. (A long row that begins anywhere in memory takes it
from a copy that is aligned in the same way: `RaggedPlan.shift`.) The forward kernel has no barriers of ours. Rows
of more than 12288 values are read twice; of many such rows, which the L2 cache cannot keep, both times from HBM.

Backward, with inverse = 1 / sqrt(mean_c(x**2) + eps):

    dx[r, c] = dy[r, c] * scale[c] * inverse[r] - x[r, c] * inverse[r]**3 * mean_c(dy * scale * x)
    dscale[c] = sum_r dy[r, c] * x[r, c] * inverse[r]

A grid that stays makes both in one pass over x and dy: each block takes every so many rows and adds up its part of
dscale in shared memory; a second, small kernel sums these parts, in the same order in every run. While it works on a
row, the next ones are in flight to a ring of shared memory, if rows are multiples of 16 bytes and fit. Rows that
do not fit the registers are read twice, and the second kernel reads x and dy once more. The ring's barriers:

    barrier       arrivals                              who waits
    filled[slot]  two: the copies of x's and dy's row   the warpgroup, before it loads the row into registers
    freed[slot]   the warpgroup, which has loaded it    the warpgroup, before it copies another row into the slot

Bound by: memory (one read, one write; backward two reads). Long rows that are not a multiple of 16 bytes are loaded
from their first aligned column on (`RaggedPlan`); short ones, and those beyond the registers, in smaller words.
Not supported: other axes, rows longer than 65536, second derivatives.
Chapter: notebooks/03_reductions.ipynb. Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019).
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .. import _device, _host
from . import core, leading
from .plan import Config, Plan, default_config, short_block_rows

BACKWARD_REGISTER_VALUES = 64  # Values of x, and as many of dy and of scale. The sums for dscale are in shared memory.
BLOCKS_PER_SM = 2  # As many blocks of the backward kernel as its registers allow.
SUM_REGISTER_VALUES = 64  # With a residual, whose loads take registers beside those of x.
AHEAD_BYTES = 112_000  # Shared memory of each of these blocks.


def rms_norm_reference(x, scale, eps=1e-6, residual=None):
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    total = x.astype(dtype) if residual is None else residual.astype(dtype) + x.astype(dtype)
    y = total * lax.rsqrt(jnp.mean(total * total, axis=-1, keepdims=True) + eps) * scale.astype(dtype)
    return y if residual is None else (y, total)


def _sum_of_squares(plan: Plan, pieces, g):
    return plan.reduce(jnp.add, jnp.sum, plan.fresh([v * v for v in pieces], g))


def _load(plan: Plan, arrays, row, g):
    """The pieces of a row of x; with a residual, of the sum of both."""
    return [functools.reduce(jnp.add, pieces) for pieces in zip(*(plan.load(x, row, g) for x in arrays), strict=True)]


def _store(plan: Plan, outs, row, g, x, scale, inverse):
    plan.store(outs[0], row, g, [v * inverse * s for v, s in zip(x, scale, strict=True)])
    for total_gmem in outs[1:]:
        plan.store(total_gmem, row, g, x)


def _short_row(plan: Plan, arrays, scale_gmem, outs, row, inverse_rms):
    x = _load(plan, arrays, row, 0)
    scale = plan.load(scale_gmem, row, 0)
    _store(plan, outs, row, 0, x, scale, inverse_rms(_sum_of_squares(plan, x, 0)))


def _long_row(plan: Plan, arrays, scale_gmem, outs, row, inverse_rms):
    add_group = lambda g, so_far: so_far + _sum_of_squares(plan, _load(plan, arrays, row, g), g)
    inverse = inverse_rms(lax.fori_loop(0, plan.num_groups, add_group, plan.per_row(0.0)))

    @pl.loop(0, plan.num_groups)
    def _(g):
        _store(plan, outs, row, g, _load(plan, arrays, row, g), plan.load(scale_gmem, row, g), inverse)


def _row(plan: Plan, *refs, cols: int, eps: float, num_arrays: int):
    """`refs`: the arrays whose sum is normalised, the scale, the outputs; and the row."""
    arrays, scale_gmem, (*outs, row) = refs[:num_arrays], refs[num_arrays], refs[num_arrays + 1 :]
    one_row = _short_row if plan.num_groups == 1 else _long_row
    inverse_rms = lambda squares: lax.rsqrt(squares * (1.0 / cols) + eps)
    one_row(plan, arrays, scale_gmem, outs, row, inverse_rms=inverse_rms)


@functools.partial(jax.jit, static_argnames=("eps", "out_dtype", "config", "params"))
def _call(arrays, scale, eps: float, out_dtype, config: Config | None, params):
    """y; and with two `arrays`, x and the residual, their sum."""
    x, *residual = arrays
    rows = [core.as_rows(array, 0, x.dtype.itemsize) for array in arrays]
    values = Config.register_values if not residual else SUM_REGISTER_VALUES
    plan = core.plan_rows(*rows[0].shape, x.dtype.itemsize, config, values)
    one_row = functools.partial(_row, cols=x.shape[-1], eps=eps, num_arrays=len(arrays))
    out_types = tuple(jax.ShapeDtypeStruct(rows[0].shape, t) for t in (out_dtype, *(r.dtype for r in residual)))
    scale = jnp.pad(scale, (0, rows[0].shape[1] - x.shape[-1]))
    outs = core.launch(one_row, plan, out_types, params, rows, [scale])
    return tuple(out[: x.size // x.shape[-1], : x.shape[-1]].reshape(x.shape) for out in outs)


def _rows_ahead(plan: Plan, dy_dtype) -> int:
    """Rows of x and dy that are in flight to shared memory while a block works on another: at most two."""
    x_bytes, dy_bytes = plan.cols * plan.itemsize, plan.cols * dy_dtype.itemsize
    fit = (AHEAD_BYTES - 4 * plan.group * math.prod(plan.shape)) // (x_bytes + dy_bytes)
    return min(2, fit) if plan.spread and plan.num_groups == 1 and x_bytes % 16 == 0 and fit > 0 else 0


def _backward_kernel(x_gmem, scale_gmem, dy_gmem, dx_gmem, more_gmem, *, plan: Plan, cols: int, eps: float, sums_smem,
                     x_smem=None, dy_smem=None, filled=None, freed=None):  # fmt: skip
    """Each `num_blocks`-th tile. `more_gmem`: the sums for dscale, added up over the tiles of this block; or, if rows
    do not fit the registers, the 1 / rms of each, from which a second kernel makes them. Where rows are copied ahead, x
    and dy are flat, unless they are beyond offsets of 32 bits, the only ones that copies take."""
    turns, tile = plan.tiles(lax.axis_size("block"))
    load_sums = lambda p: _device.load(sums_smem.at[p], plan.layout)
    ahead = _rows_ahead(plan, dy_gmem.dtype)
    ring, at = _device.Ring(filled, freed, ahead), lambda smem, slot: smem.at[pl.ds(slot * plan.cols, plan.cols)]

    def start(i):
        """Starts the copies of the row of turn `i`."""
        slot, (_, row) = ring.acquire(i), tile(i)
        for gmem, smem in ((x_gmem, x_smem), (dy_gmem, dy_smem)):
            # Inside the array, so that any length is one copy.
            whole = gmem.at[pl.ds(row * plan.cols, plan.cols)] if gmem.ndim == 1 else gmem.at[row]
            plgpu.copy_gmem_to_smem(whole, at(smem, slot), filled.at[slot], oob_mode=plgpu.OOBFillMode.UNDEFINED)

    def load(i):
        """x and dy of turn `i`."""
        if not ahead:
            return plan.load(x_gmem, tile(i)[1], 0), plan.load(dy_gmem, tile(i)[1], 0)
        slot = ring.wait(i)
        x, dy = (plan.load(at(smem, slot), 0, 0) for smem in (x_smem, dy_smem))
        plgpu.commit_smem()  # Without it TMA may overwrite the slot while loads from it are in flight.
        ring.release(i)
        pl.when(i + ahead < turns)(lambda: start(i + ahead))
        return x, dy

    def statistics(x, dy, g, row):
        products = [v * s * d for v, s, d in zip(x, plan.load(scale_gmem, row, g), dy, strict=True)]
        return _sum_of_squares(plan, x, g), plan.reduce(jnp.add, jnp.sum, plan.fresh(products, g))

    def finish(squares, products):
        """1 / rms, and the factor of x in dx."""
        inverse = lax.rsqrt(squares * (1.0 / cols) + eps)
        return inverse, inverse * inverse * inverse * products * (1.0 / cols)

    def store(row, g, x, dy, inverse, slope):
        scale = plan.load(scale_gmem, row, g)
        dx = [d * s * inverse - v * slope for v, s, d in zip(x, scale, dy, strict=True)]
        plan.store(dx_gmem, row, g, dx)

    def short_row(i):
        (index, row), (x, dy) = tile(i), load(i)
        inverse, slope = finish(*statistics(x, dy, 0, row))
        store(row, 0, x, dy, inverse, slope)
        counted = plan.fresh_rows(inverse, index, row)
        for p, (v, d) in enumerate(zip(x, dy, strict=True)):
            _device.store(sums_smem.at[p], load_sums(p) + v * d * counted)

    def long_row(i):
        _, row = tile(i)
        both = lambda g: (plan.load(x_gmem, row, g), plan.load(dy_gmem, row, g))
        step = lambda g, so_far: jax.tree.map(jnp.add, so_far, statistics(*both(g), g, row))
        inverse, slope = finish(*lax.fori_loop(0, plan.num_groups, step, (plan.per_row(0.0), plan.per_row(0.0))))
        pl.loop(0, plan.num_groups)(lambda g: store(row, g, *both(g), inverse, slope))
        more_gmem[row] = inverse

    if plan.num_groups > 1:
        pl.loop(0, turns)(long_row)
        return
    for i in range(ahead):
        pl.when(i < turns)(functools.partial(start, i))
    for p in range(plan.group):  # Each thread reads what it wrote itself: there is nothing to wait for.
        _device.store(sums_smem.at[p], plan.zeros())
    pl.loop(0, turns)(short_row)
    if ahead:
        ring.drain(turns)
    first = lax.axis_index("block") * plan.config.block_rows
    plan.store(more_gmem, first, 0, [load_sums(p) for p in range(plan.group)])


def _backward_scratch(plan: Plan, dtypes) -> dict:
    sums = plgpu.SMEM((1 if plan.num_groups > 1 else plan.group, *plan.shape), jnp.float32)
    if not (ahead := _rows_ahead(plan, dtypes[1])):
        return dict(sums_smem=sums)
    x_smem, dy_smem = (plgpu.SMEM((ahead * plan.cols,), dtype) for dtype in dtypes)
    filled, freed = (_device.barriers(ahead, arrivals) for arrivals in (2, 1))
    return dict(sums_smem=sums, x_smem=x_smem, dy_smem=dy_smem, filled=filled, freed=freed)


def backward_plan(rows: int, cols: int, itemsize: int, blocks: int) -> Plan:
    """The plan of the backward kernel, of which at most so many blocks run."""
    config = default_config(rows, cols, itemsize, BACKWARD_REGISTER_VALUES)
    # Few blocks stay, which need more rows at once than many: 16 values per thread, from 8 rows.
    if config.block_rows > 1:
        config = Config(short_block_rows(rows, cols, itemsize, 16, 8, blocks), BACKWARD_REGISTER_VALUES)
    return Plan(rows, cols, itemsize, config)


@functools.partial(jax.jit, static_argnames=("eps", "dtype", "target", "params"))
def _call_backward(x, scale, dy, eps: float, dtype, target: _host.Target, params):
    """dx, as `dtype`, and dscale, which is summed in two stages: by each block over its rows, and then over the
    blocks."""
    rows, dy_rows = core.as_rows(x, 0), core.as_rows(dy, 0, x.dtype.itemsize)
    rows = rows.at[x.size // x.shape[-1] :].set(1)  # If eps is 0, the 1 / rms of added zeros would be infinite.
    blocks = BLOCKS_PER_SM * target.num_sms
    plan = backward_plan(*rows.shape, x.dtype.itemsize, blocks)
    num_blocks, long = min(blocks, plan.num_blocks), plan.num_groups > 1
    is_flat = _rows_ahead(plan, dy.dtype) and rows.size < 2**31
    flat = lambda x: x.reshape(-1) if is_flat else x
    more_shape = (plan.rows,) if long else (num_blocks * plan.config.block_rows, plan.cols)
    dx, more = _host.kernel(
        functools.partial(_backward_kernel, plan=plan, cols=x.shape[-1], eps=eps),
        out_type=[jax.ShapeDtypeStruct(rows.shape, dtype), jax.ShapeDtypeStruct(more_shape, jnp.float32)],
        grid=(num_blocks,),
        grid_names=("block",),
        scratch_types=_backward_scratch(plan, (rows.dtype, dy_rows.dtype)),
        compiler_params=params,
    )(flat(rows), jnp.pad(scale, (0, plan.cols - x.shape[-1])), flat(dy_rows))
    dscale = leading.sum_leading(target, params, scale.dtype, *((rows, dy_rows, more) if long else (more,)))
    return (
        dx[: x.size // x.shape[-1], : x.shape[-1]].reshape(x.shape),
        dscale[: x.shape[-1]],
    )


def _common_dtype(*arrays):
    return arrays[0].dtype if len({x.dtype for x in arrays}) == 1 else jnp.dtype(jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _rms_norm(arrays, scale, eps, out_dtype, config):
    return _call(arrays, scale, eps, out_dtype, config, _host.compiler_params())


def _forward(arrays, scale, eps, out_dtype, config):
    outs = _rms_norm(arrays, scale, eps, out_dtype, config)
    # With a residual the sum is what was normalised. Empty arrays bring the dtypes of both along.
    return outs, ((arrays[0] if len(arrays) == 1 else outs[1]), scale, [jnp.empty(0, x.dtype) for x in arrays])


def _backward(eps, out_dtype, config, kept, gradients):
    total, scale, likes = kept
    dy, *d_total = gradients
    target = _host.require_target("rms_norm")
    # A gradient must not be rounded to, or overflow, the dtype of another array.
    dy = dy.astype(_common_dtype(total, dy))
    dtype, params = _common_dtype(*likes), _host.compiler_params()
    gradient = functools.partial(_call_backward, eps=eps, dtype=dtype, target=target, params=params)
    dx, dscale = _host.without_derivative("rms_norm", gradient)(total, scale, dy)
    dx = dx + d_total[0].astype(dtype) if d_total else dx
    return tuple(dx.astype(like.dtype) for like in likes), dscale


_rms_norm.defvjp(_forward, _backward)


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
      residual: of the shape of `x` and any of these dtypes; or None.
      eps: added to the mean of squares, 0 or more.
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
    x = core.require_rows("rms_norm", "x", x)
    scale = jnp.ones(x.shape[-1:], x.dtype) if scale is None else core.require_floats("rms_norm", "scale", scale)
    if scale.shape != x.shape[-1:]:
        raise ValueError(
            f"{_host.PACKAGE}.rms_norm: {scale.shape=}; must be {x.shape[-1:]}, one value for each column of x"
        )
    arrays = [x] if residual is None else [x, core.require_floats("rms_norm", "residual", residual)]
    if arrays[-1].shape != x.shape:
        raise ValueError(
            f"{_host.PACKAGE}.rms_norm: residual.shape={arrays[-1].shape}; must be {x.shape}, the shape of x"
        )
    eps = _host.option("rms_norm", "eps", eps if epsilon is None else epsilon, float)
    if eps < 0:
        raise ValueError(
            f"{_host.PACKAGE}.rms_norm: {eps=}; must be 0 or more, or roots of negative numbers are NaN: pass 1e-6"
        )
    out_dtype = _host.require_float("rms_norm", x.dtype if out_dtype is None else out_dtype)
    config = core.require_config("rms_norm", x, config)
    if x.size == 0:
        return x.astype(out_dtype) if residual is None else (x.astype(out_dtype), arrays[1])
    _host.require_target("rms_norm")
    *arrays, scale = _host.reverse_only("rms_norm", *arrays, scale)
    y, *total = _rms_norm(tuple(arrays), scale, eps, out_dtype, config)
    return (y, *total) if total else y


rms_norm.Config = Config  # `cookbook.rms_norm` is this function, not its module.


def flops(rows: int, cols: int) -> int:
    """A square, an addition and two multiplications for each value."""
    return 4 * rows * cols


def bytes_moved(rows: int, cols: int, itemsize: int) -> int:
    """x read and y written, without a residual."""
    return 2 * rows * cols * itemsize

"""Sum over the last or the leading axis, in float32, the same to the bit in every run.

    last axis:     out[r] = sum_c x[r, c]           leading axis:     out[c] = sum_r x[r, c]

Shapes: x of any rank; the result lacks the axis and has the dtype of x: float32, bfloat16 or float16. Rows of the last
axis have up to 65536 values; the leading axis has any length.

Role table, last axis: as in `softmax`, one warpgroup a block sums one or more rows in registers. Leading axis: a block
adds up a stretch of rows for as many columns as its threads can load at once, four rows in flight; the partial sums of
all stretches are summed the same way, until one is left. Atomic additions would take one kernel less, and would sum in
another order each time. There are no barriers of ours.

What bounds its speed: memory (one read). Not supported: axes in between (move the axis first), differentiation.
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

from .. import _mgpu
from . import core
from .core import Config, Plan, default_config

ROWS_IN_FLIGHT = 4  # Loads of the leading-axis kernel before the first is used: 64 bytes a thread.
ROWS_PER_BLOCK = 256  # A stretch: long enough that partial sums cost little, short enough to fill the GPU.


def reduce_sum_reference(x, axis):
    return jnp.sum(x.astype(jnp.promote_types(x.dtype, jnp.float32)), axis=axis)


def _last_kernel(x_gmem, o_gmem, *, plan: Plan):
    def visit(row):
        def add_group(g, total):
            return functools.reduce(jnp.add, plan.fresh(plan.load(x_gmem, row, g), g), total)

        zeros = plgpu.layout_cast(jnp.zeros(plan.shape, jnp.float32), plan.layout)
        total = add_group(0, zeros) if plan.num_groups == 1 else lax.fori_loop(0, plan.num_groups, add_group, zeros)
        if plan.spread:
            o_gmem[row] = jnp.sum(total).astype(o_gmem.dtype)
        else:
            _mgpu.store(o_gmem.at[pl.ds(row, plan.config.block_rows)], jnp.sum(total, axis=1).astype(o_gmem.dtype))

    plan.for_each_tile(visit)


def _sum_last(x, config, params):
    rows = core.as_rows(x, fill=0)
    plan = Plan(*rows.shape, x.dtype.itemsize, config or default_config(*rows.shape, x.dtype.itemsize))
    out = _mgpu.kernel(
        functools.partial(_last_kernel, plan=plan),
        out_type=jax.ShapeDtypeStruct(rows.shape[:1], x.dtype),
        grid=(plan.num_blocks,),
        grid_names=("block",),
        compiler_params=params,
    )(rows)
    return out[: math.prod(x.shape[:-1])].reshape(x.shape[:-1])


@dataclasses.dataclass(frozen=True)
class LeadingPlan:
    """Statics of one pass over the leading axis of (rows, cols): pieces of columns by stretches of rows."""

    rows: int
    cols: int
    itemsize: int

    @property
    def vec(self) -> int:
        return math.gcd(self.cols, 16 // self.itemsize, core.floor_power_of_2(max(self.cols // 128, 1)))

    @property
    def piece(self) -> int:
        return 128 * self.vec

    @property
    def num_pieces(self) -> int:
        return self.cols // self.piece

    @property
    def num_stretches(self) -> int:
        return pl.cdiv(self.rows, ROWS_PER_BLOCK)


def _leading_kernel(x_gmem, o_gmem, *, plan: LeadingPlan):
    stretch, column = lax.axis_index("stretch"), lax.axis_index("column")
    # The last piece is shifted back to end with the row. It would store the same sums as the piece before it, so it is
    # that block, not another, that also takes this piece.
    turns = 1 if plan.cols % plan.piece == 0 else jnp.where(column == plan.num_pieces - 1, 2, 1)
    layout = plgpu.Layout.WG_STRIDED((plan.piece,), plan.vec)
    first, rows = stretch * ROWS_PER_BLOCK, jnp.minimum(ROWS_PER_BLOCK, plan.rows - stretch * ROWS_PER_BLOCK)

    @pl.loop(0, turns)
    def _(turn):
        columns = pl.ds(jnp.minimum((column + turn) * plan.piece, plan.cols - plan.piece), plan.piece)
        load = lambda row: plgpu.load(x_gmem.at[row, columns], layout=layout, optimized=False).astype(jnp.float32)

        def next_rows(i, total):
            start = first + i * ROWS_IN_FLIGHT
            return functools.reduce(jnp.add, [load(start + r) for r in range(ROWS_IN_FLIGHT)], total)

        total = plgpu.layout_cast(jnp.zeros((plan.piece,), jnp.float32), layout)
        total = lax.fori_loop(0, rows // ROWS_IN_FLIGHT, next_rows, total)
        left = first + rows // ROWS_IN_FLIGHT * ROWS_IN_FLIGHT
        total = lax.fori_loop(left, first + rows, lambda row, so_far: so_far + load(row), total)
        _mgpu.store(o_gmem.at[stretch, columns], total.astype(o_gmem.dtype))


def _sum_leading(x, params):
    """Sums the rows of (rows, cols): each pass leaves one row of partial sums for each stretch of rows."""
    dtype, cols = x.dtype, x.shape[1]
    if cols < 128:  # A warpgroup has 128 threads. Narrow rows are put side by side; what they add up to is summed last.
        side = pl.cdiv(128, cols)
        x = jnp.pad(x, ((0, -x.shape[0] % side), (0, 0))).reshape(-1, side * cols)
    while True:
        plan = LeadingPlan(*x.shape, x.dtype.itemsize)
        x = _mgpu.kernel(
            functools.partial(_leading_kernel, plan=plan),
            out_type=jax.ShapeDtypeStruct((plan.num_stretches, x.shape[1]), jnp.float32),
            grid=(plan.num_pieces, plan.num_stretches),  # CUDA allows 65535 but for the last.
            grid_names=("column", "stretch"),
            compiler_params=params,
        )(x)
        if plan.num_stretches == 1:
            break
    x = x.reshape(-1, cols)
    return (x[0] if x.shape[0] == 1 else _sum_last(x.T, None, params)).astype(dtype)


@functools.partial(jax.jit, static_argnames=("axis", "config", "params"))
def _call(x, axis: int, config: Config | None, params):
    if axis == x.ndim - 1:
        return _sum_last(x, config, params)
    return _sum_leading(x.reshape(x.shape[0], -1), params).reshape(x.shape[1:])


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
    last = jnp.ndim(x) - 1
    if axis not in (-1, 0, last):
        raise ValueError(
            f"cookbook.reduce_sum: {axis=} of {jnp.ndim(x)}; must be 0 or -1: move the axis (jnp.moveaxis)"
        )
    axis = last if axis in (-1, last) else 0
    core.require_floats("reduce_sum", "x", x)
    if axis == last:
        core.require_row_length("reduce_sum", "x", x)
    if x.size == 0:
        return jnp.zeros(x.shape[:axis] + x.shape[axis + 1 :], x.dtype)
    _mgpu.require_target("reduce_sum")
    return _call(x, axis, config, _mgpu.compiler_params())


reduce_sum.Config = Config  # `cookbook.reduce_sum` is this function, not its module.


def flops(rows: int, cols: int) -> int:
    return rows * cols


def bytes_moved(rows: int, cols: int, itemsize: int) -> int:
    return rows * cols * itemsize

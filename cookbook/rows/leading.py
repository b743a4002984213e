"""Sums over the leading axis of a matrix: reduce_sum's, and the second stage of rms_norm's gradient."""

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


@dataclasses.dataclass(frozen=True)
class LeadingPlan:
    """Statics of one pass over the leading axis of (rows, cols): tiles of columns by stretches of rows.

    In a tile, `lanes` threads share a row and `rows_at_once` rows are side by side: narrow rows fill the warpgroup."""

    rows: int
    cols: int
    num_blocks: int | None  # About as many at most; None: one for each tile of columns, which finishes the sum.

    @property
    def vec(self) -> int:
        return math.gcd(self.cols, 4)

    @property
    def lanes(self) -> int:
        """Up to a warp. To sum what a first pass left, fewer: more rows at once, and more blocks."""
        return min(core.LANES if self.num_blocks else core.LANES // 4, core.floor_power_of_2(self.cols // self.vec))

    @property
    def rows_at_once(self) -> int:
        return core.WARPGROUP // self.lanes

    @property
    def width(self) -> int:
        return self.lanes * self.vec

    @property
    def step(self) -> int:
        """Rows between the first loads of two turns: 4 loads of a thread are in flight, or 8 short ones."""
        return self.rows_at_once * (4 if self.vec == 4 else 8)

    @property
    def num_tiles(self) -> int:
        return self.cols // self.width

    @property
    def stretch(self) -> int:
        """Rows of a block: at least 4 turns of loads, or a second launch costs more than it saves."""
        stretches = min((self.num_blocks or 1) // self.num_tiles, self.rows // (4 * self.step))
        return pl.cdiv(self.rows, max(1, stretches) * self.step) * self.step

    @property
    def num_stretches(self) -> int:
        return pl.cdiv(self.rows, self.stretch)


def _leading_kernel(*refs, plan: LeadingPlan):
    *factors, o_gmem = refs
    stretch, tile, at_once = lax.axis_index("stretch"), lax.axis_index("tile"), plan.rows_at_once
    layout, shape = core.lanes_layout(plan.lanes, plan.width, plan.vec), (at_once, plan.width)
    low = stretch * plan.stretch
    high = jnp.minimum(low + plan.stretch, plan.rows)
    # The last tile is shifted back to end with the row. It would store the same sums as the tile before it, so it is
    # that block, not another, that also takes this tile.
    turns = 1 if plan.cols % plan.width == 0 else jnp.where(tile == plan.num_tiles - 1, 2, 1)

    @pl.loop(0, turns)
    def _(turn):
        columns = pl.ds(jnp.minimum((tile + turn) * plan.width, plan.cols - plan.width), plan.width)

        def factor(x_gmem, row):
            rows = pl.ds(row, at_once)
            if x_gmem.ndim == 1:
                each = plgpu.load(x_gmem.at[rows], layout=layout.reduce(1), optimized=False)
                return lax.broadcast_in_dim(each, shape, [0])
            return plgpu.load(x_gmem.at[rows, columns], layout=layout, optimized=False).astype(jnp.float32)

        product = lambda row: math.prod(factor(x_gmem, row) for x_gmem in factors)

        def next_rows(i, total):
            loads = [product(low + i * plan.step + r) for r in range(0, plan.step, at_once)]
            return functools.reduce(jnp.add, loads, total)

        def left_over(i, total):
            row = jnp.minimum(done + i * at_once, plan.rows - at_once)
            index = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=layout) + row
            return total + jnp.where(index >= done + i * at_once, product(row), 0.0)

        steps = (high - low) // plan.step
        done = low + steps * plan.step
        total = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), layout)
        total = lax.fori_loop(0, steps, next_rows, total)
        total = lax.fori_loop(0, pl.cdiv(high - done, at_once), left_over, total)
        _mgpu.store(o_gmem.at[stretch, columns], jnp.sum(total, axis=0))


def sum_leading(num_sms: int, params, *factors):
    """Float32 sums over the leading axis of the product of `factors`: (rows, cols) each, or (rows,) in float32.

    A first pass leaves a row of partial sums for each stretch of rows, a second sums these. Atomic additions would take
    one kernel less, and would sum in another order each time.
    """
    rows, cols = factors[0].shape
    if cols < 8:  # Too few for a tile: rows are put side by side, and their sums are summed last.
        (x,), side = factors, pl.cdiv(core.WARPGROUP, cols)
        folded = jnp.pad(x, ((0, -rows % side), (0, 0))).reshape(-1, side * cols)
        sums = sum_leading(num_sms, params, folded).reshape(side, cols)
        return sum_leading(num_sms, params, jnp.pad(sums, ((0, 0), (0, 8 - cols))))[:cols]
    # Blocks for each SM: more of them hide latency, and leave more partial sums.
    plan = LeadingPlan(rows, cols, num_sms * (8 if cols % 4 == 0 else 4))
    sums = _sum_leading_once(plan, params, factors)
    if len(sums) > 1:
        sums = _sum_leading_once(LeadingPlan(len(sums), cols, None), params, [sums])
    return sums[0]


def _sum_leading_once(plan: LeadingPlan, params, factors):
    if missing := max(0, plan.rows_at_once - plan.rows):
        factors = [jnp.pad(x, ((0, missing), *[(0, 0)] * (x.ndim - 1))) for x in factors]
        plan = dataclasses.replace(plan, rows=plan.rows_at_once)
    return _mgpu.kernel(
        functools.partial(_leading_kernel, plan=plan),
        out_type=jax.ShapeDtypeStruct((plan.num_stretches, plan.cols), jnp.float32),
        grid=(plan.num_tiles, plan.num_stretches),  # CUDA allows 65535 but for the last.
        grid_names=("tile", "stretch"),
        compiler_params=dataclasses.replace(params, reduction_scratch_bytes=4 * core.WARPGROUP * plan.vec),
    )(*factors)

# SPDX-License-Identifier: Apache-2.0
"""The tiles of grouped products, and the plans of their kernels.

Which tiles a block computes is looked up on the device, in what `tables.py` makes of the groups' sizes.
"""

import dataclasses
import math
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ... import _device
from ..._device import Index
from ..operand import STEP_BYTES, Operand, is_cut
from ..plan import COMPUTE, Plan, identity
from ..tiles import Config, Tiles, exchanged, resident
from .tables import SCANNED_MAX, Groups, Scan, Table, bounds, row_entries, row_table, sizes_of


class Tile(NamedTuple):
    """A tile that was looked up: its group, rows, steps, and where it begins in the kernel's product."""

    group: Index
    start: Index  # The tile's first row; in a sum the group's.
    end: Index  # The end of the group.
    steps: Index
    row: Index
    col: Index


@dataclasses.dataclass(frozen=True)
class RowTiles(Tiles):
    """Tiles of an (M, N) result whose rows belong to groups: `axis` of the kernel's product is that of the rows."""

    num_groups: int = 1
    axis: int = 0

    @property
    def rows(self) -> tuple[int, int]:
        """How many rows there are, and how many an entry of the table has."""
        return (self.m, self.n)[self.axis], self.cluster_tile[self.axis]

    @property
    def grid(self) -> tuple[int, int]:
        """The most tiles of clusters along M and N that sizes may make necessary."""
        grid, (m, tile) = list(super().grid), self.rows
        grid[self.axis] = row_entries(m, self.num_groups, tile)
        return tuple(grid)

    @property
    def out_shape(self) -> tuple[int, int]:
        return exchanged((self.m, self.n), self.axis)

    @property
    def across(self) -> int:
        """Tiles along the axis that is not that of the rows."""
        return self.grid[1 - self.axis]

    def table_of(self, group_sizes, group_offset=None):
        """The operand in which the kernel finds its tiles: the sizes of few groups, else a table."""
        m, tile = self.rows
        if isinstance(group_sizes, Groups) and tile in group_sizes.tables:
            return group_sizes.tables[tile]
        group_sizes = sizes_of(group_sizes)
        if group_offset is None and self.num_groups <= SCANNED_MAX:
            # Without the barrier XLA passes a slice of an array where it lies, and Mosaic asks for 256-byte alignment.
            return lax.optimization_barrier(group_sizes.astype(jnp.int32))
        return row_table(*bounds(group_sizes, m, group_offset, self.num_groups), m, tile)

    def read(self, table) -> Table | Scan:
        """The table, or the sizes, that `table_of` made, as the kernel looks tiles up in it."""
        return table if isinstance(table, Table) else Scan.of(table, *self.rows)

    def num_tiles(self, table: Table | Scan, cluster):
        """How many tiles `cluster` computes."""
        return _device.div(table.count[1] * self.across - cluster + self.clusters - 1, self.clusters)

    def look_up(self, table: Table | Scan, index, block_m, block_n) -> Tile:
        """Tile `index`, as block (block_m, block_n) of its cluster has it."""
        c, filled = self.config, table.count[0]
        grid = exchanged((filled, self.across), self.axis)
        places = plgpu.planar_snake(index, grid, c.grid_minor_dim, c.grid_tile_width)
        # Tiles of zeros take less time, so they come last.
        rest = index - filled * self.across
        i = jnp.where(rest < 0, places[self.axis], filled + _device.div(rest, self.across))
        j = jnp.where(rest < 0, places[1 - self.axis], _device.rem(rest, self.across))
        group, start, end = table.entry(i)
        tile, size = (block_m * c.tile_m, block_n * c.tile_n), self.cluster_tile[1 - self.axis]
        place = start + tile[self.axis], j * size + tile[1 - self.axis]
        steps = jnp.where(group < self.num_groups, self.num_steps, 0)
        return Tile(group, start, end, steps, *exchanged(place, self.axis))


@dataclasses.dataclass(frozen=True)
class SumTiles(Tiles):
    """Tiles of (G, M, N) results, one for each group, each a sum along the group's rows.

    The table has an entry for each group, the largest first: a block's tiles get shorter and shorter. Turn after turn
    the blocks take theirs in opposite order, so that none gets the longer ones of all turns.
    """

    num_groups: int = 1

    @property
    def out_shape(self) -> tuple[int, int, int]:
        return self.num_groups, self.m, self.n

    @property
    def clusters(self) -> int:
        return min(self.count, resident(self.num_sms, self.config.cluster_m * self.config.cluster_n))

    @property
    def count(self) -> int:
        return math.prod(self.grid) * self.num_groups

    def in_turn(self, turn, cluster):
        """The number of `cluster` among those that take tiles of this turn."""
        return jnp.where(_device.rem(turn, 2) == 0, cluster, self.clusters - 1 - cluster)

    def num_tiles(self, table: Table, cluster):
        """How many tiles `cluster` computes, whatever the table says."""
        turns, rest = divmod(self.count, self.clusters)
        return turns + (self.in_turn(turns, cluster) < rest).astype(jnp.int32)

    def look_up(self, table: Table, index, block_m, block_n) -> Tile:
        """Tile `index`, as block (block_m, block_n) of its cluster has it."""
        c, tiles = self.config, math.prod(self.grid)
        turn, cluster = _device.div(index, self.clusters), _device.rem(index, self.clusters)
        index = turn * self.clusters + self.in_turn(turn, cluster)
        number = _device.div(index, tiles)
        i, j = plgpu.planar_snake(_device.rem(index, tiles), self.grid, c.grid_minor_dim, c.grid_tile_width)
        group, start, end = table.entry(number)
        steps = jnp.where(end > start, _device.div(end - aligned(start) + self.tile_k - 1, self.tile_k), 0)
        place = (i * c.cluster_m + block_m) * c.tile_m, (j * c.cluster_n + block_n) * c.tile_n
        return Tile(group, start, end, steps, *place)


def each_tile(plan: Plan, table: Table | Scan, body):
    """Calls `body(tile, number, before)` for this block's tiles: `number` tiles come before, and `before` steps.

    Returns the steps of all.
    """

    def one(number, before):
        blocks = (lax.axis_index(axis) if axis else 0 for axis in (plan.axis_m, plan.axis_n))
        tile = plan.tiles.look_up(table, lax.axis_index("cluster") + number * plan.tiles.clusters, *blocks)
        body(tile, number, before)
        return before + tile.steps

    return lax.fori_loop(0, plan.tiles.num_tiles(table, lax.axis_index("cluster")), one, 0)


def aligned(row):
    """The row from which TMA reads whole tiles of the swizzle, which have 8 rows, at or before `row`."""
    return pl.multiple_of(row & ~7, 8)


def row_plan(m, n, k, num_groups, dtype, transpose_rhs, activation, out_dtype, config: Config, num_sms=132,
             interpreted=False) -> Plan:  # fmt: skip
    """The plan of (M, K) rows by (G, K, N) matrices, or (G, N, K) with `transpose_rhs`.

    Raises:
      ValueError: the kernel cannot work in tiles of this configuration, or not with these operands.
    """
    c, out_dtype = config, jnp.dtype(out_dtype)
    if c.split_k != 1 or c.tail_split != 1:
        raise ValueError(f"{c.split_k=} and {c.tail_split=} must be 1: how many tiles there are is known on the device")
    if c.swapped and out_dtype.itemsize == 4:
        raise ValueError(f"{c.swapped=} transposes results of 16 bits, not {out_dtype}: must be False")
    tile_k, mine = STEP_BYTES // dtype.itemsize, c.compute_tile[0 if c.swapped else 1]
    lies, cut = not transpose_rhs, not transpose_rhs and is_cut(k, n)
    if lies and (mine % 64 or (cut and mine != 64)):
        raise ValueError(
            f"tile_{'m' if c.swapped else 'n'} leaves a warpgroup {mine} columns of rhs (G, K, N), {n=}: must be "
            f"{'64, because N is not a multiple of 64' if cut else 'a multiple of 64'} (or give rhs as (G, N, K))"
        )
    sides = [
        Operand(dtype, c.tile_n if c.swapped else c.tile_m, tile_k, False),
        Operand(dtype, c.tile_m if c.swapped else c.tile_n, tile_k, lies, cut or not lies, stacked=True),
    ]
    tiles = RowTiles(*exchanged((m, n), c.swapped), k, tile_k, c, num_sms, num_groups=num_groups, axis=int(c.swapped))
    plan = Plan(tiles, *exchanged(sides, c.swapped), activation, out_dtype, interpreted)
    if not c.swapped and plan.store_piece[1] * out_dtype.itemsize != STEP_BYTES:
        raise ValueError(
            f"{c.tile_n=} must leave each warpgroup a multiple of {STEP_BYTES} bytes of a row of {out_dtype}: a row of "
            "narrower pieces begins where TMA can read none"
        )
    return plan


def gated(plan: Plan) -> Plan:
    """`plan`, of a product with N columns, for matrices of 2N columns: the gate's and the up product's (SwiGLU).

    Raises:
      ValueError: a warpgroup has too few registers for both accumulators.
    """
    rows, cols = plan.compute_tile
    c, t = plan.config, plan.tiles
    if rows * cols > 64 * 128:
        raise ValueError(
            f"{c.tile_m=} x {c.tile_n=} with activation='swiglu': at most 64 x 128 values of o for each of two "
            "warpgroups, which accumulate the gate and the up product apart"
        )
    if c.swapped:
        return dataclasses.replace(plan, a=dataclasses.replace(plan.a, partner=t.m))
    return dataclasses.replace(plan, b=dataclasses.replace(plan.b, partner=t.n))


def sum_plan(m, n, rows, num_groups, dtype, out_dtype, config: Config, num_sms=132, interpreted=False) -> Plan:
    """The plan of (rows, M) and (rows, N) to (G, M, N).

    Raises:
      ValueError: the kernel cannot work in tiles of this configuration, or not with these operands.
    """
    c = config
    if c.split_k != 1 or c.tail_split != 1 or c.swapped:
        raise ValueError(f"{c.split_k=} and {c.tail_split=} must be 1, and {c.swapped=} False, for sums along groups")
    tile_k, operands = STEP_BYTES // dtype.itemsize, []
    for name, size, tile, mine in zip("mn", (m, n), (c.tile_m, c.tile_n), c.compute_tile, strict=True):
        cut = is_cut(rows, size)
        if mine % 64 or (cut and mine != 64):
            rule = "64, because the operand has no whole tiles of 8 rows by 64 columns" if cut else "a multiple of 64"
            raise ValueError(f"tile_{name}={tile} leaves a warpgroup {mine} of {size} columns: must be {rule}")
        operands.append(Operand(dtype, tile, tile_k, True, cut))
    tiles = SumTiles(m, n, rows, tile_k, c, num_sms, num_groups=num_groups)
    masked = ("masked", plgpu.Barrier(num_arrivals=COMPUTE))
    return Plan(tiles, *operands, identity, jnp.dtype(out_dtype), interpreted, (masked,))

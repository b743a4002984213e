# SPDX-License-Identifier: Apache-2.0
"""Shared parts of the grouped products: bounds of groups, the table of tiles, and the plan of a kernel that reads it.

Rows of an (M, ...) array lie group after group; `group_sizes` says how many each has. The tiles that result are
known only on the device, so XLA makes a table of them, a few hundred integers, and the kernel looks its tiles up. That
takes XLA several launches, as long as a small product. So with few groups the kernel gets the sizes, and goes through
them for each tile.

Sizes are clipped to [0, M] and their sums to M before anything is made of them: whatever they are, each row belongs to
one group or to none, and no tile begins or ends outside of the array. `check_group_sizes` finds such sizes on the host.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ... import _device, _host
from ..kernel import identity
from ..plan import COMPUTE, STEP_BYTES, Config, Operand, Plan, Tiles, is_cut, resident

# The most groups that the kernel goes through for each tile. With 16, the memory warpgroup spills registers.
SCANNED_MAX = 12


class Table(NamedTuple):
    """Integers for each entry: its group, the row where the entry begins, and the row where its group ends."""

    after: Any  # (G + 2,): how many entries there are up to the end of each group, and of the rows of zeros.
    group: Any
    start: Any
    end: Any  # The end of the group, even if that is beyond the entry's tile.

    @property
    def count(self):
        """The number of entries of groups; and of these with the entries of zero rows that follow."""
        size = self.after.shape[0]  # A Ref takes no index from its end.
        return self.after[size - 3], self.after[size - 1]

    def entry(self, number):
        """(group, start, end)."""
        return self.group[number], self.start[number], self.end[number]


class Scan(NamedTuple):
    """The entries of `row_table`, found in the sizes of all groups. Rows after the groups are one group more."""

    count: Any  # As the table's.
    sizes: Any  # (G,), as they were given: those that lie are clipped as `bounds` does it.
    m: int
    tile: int

    @classmethod
    def of(cls, sizes, m: int, tile: int) -> "Scan":
        *_, (filled, _, _), (count, _, _) = cls(None, sizes, m, tile).groups()
        return cls((filled, count), sizes, m, tile)

    def groups(self):
        """(how many entries come before it, start, end) of each group; then (how many there are, M, M)."""
        before = start = 0
        for group in range(self.sizes.shape[0] + 1):
            size = jnp.clip(self.sizes[group], 0, self.m) if group < self.sizes.shape[0] else self.m
            end = jnp.minimum(start + size, self.m)
            yield before, start, end
            before, start = before + _device.div(end - start + self.tile - 1, self.tile), end
        yield before, start, start

    def entry(self, number):
        """(group, start, end): the group is the last of those before which no more than `number` entries come."""
        group = first = end = 0
        for this, (before, start, stop) in enumerate([*self.groups()][:-1]):
            is_reached = before <= number
            group = jnp.where(is_reached, this, group)
            first = jnp.where(is_reached, start - before * self.tile, first)
            end = jnp.where(is_reached, stop, end)
        return group, first + number * self.tile, end


def bounds(group_sizes, m: int, group_offset=None, count: int | None = None):
    """(starts, ends) of all groups, or of `count` of them from `group_offset` on: (count,) int32 each.

    A sum along a masked square is one small kernel; XLA's cumulative sum takes longer than a small product.
    """
    sizes = jnp.clip(group_sizes.astype(jnp.int32), 0, m)
    g = jnp.arange(sizes.size, dtype=jnp.int32)
    starts = jnp.where(g[None, :] < g[:, None], sizes[None, :], 0).sum(1, dtype=jnp.int32)
    starts, ends = jnp.minimum(starts, m), jnp.minimum(starts + sizes, m)
    if group_offset is None:
        return starts, ends
    # Groups before the first one and after the last one have no rows.
    around = jnp.zeros(count, jnp.int32), jnp.full(count, ends[-1])
    at = jnp.clip(group_offset, -count, sizes.size) + count
    return tuple(lax.dynamic_slice(jnp.concatenate([around[0], x, around[1]]), (at,), (count,)) for x in (starts, ends))


def check_group_sizes(group_sizes, rows: int, op: str = "ragged_dot"):
    """Looks, on the host, for sizes that the kernels would clip.

    Args:
      group_sizes: (G,) integers, an array of NumPy's or a concrete one of JAX's.
      rows: M, the rows that groups share out.
      op: whose sizes they are, for the message.

    Raises:
      ValueError: a size is negative, or a group reaches beyond the rows; the first such group is named.
    """
    sizes = np.asarray(jax.device_get(group_sizes)).astype(np.int64)
    if (negative := np.flatnonzero(sizes < 0)).size:
        first = negative[0]
        raise ValueError(
            f"{_host.PACKAGE}.{op}: group_sizes[{first}]={sizes[first]}; must be at least 0: pass 0 for no rows"
        )
    ends = np.cumsum(sizes)
    if (beyond := np.flatnonzero(ends > rows)).size:
        first = beyond[0]
        raise ValueError(
            f"{_host.PACKAGE}.{op}: group_sizes[{first}]={sizes[first]}; the group ends at row {ends[first]} of "
            f"{rows}: sizes "
            f"must add up to at most {rows}"
        )


def check_groups(op: str, group_sizes, group_offset, rows: int, count: int | None):
    """(group_sizes, group_offset) as arrays. `count` matrices have groups; None: as many as there are sizes.

    Raises:
      ValueError: a shape or dtype is not supported; or a size would be clipped, where sizes are not traced.
    """
    sizes = _host.as_array(op, "group_sizes", group_sizes)
    if sizes.ndim != 1 or not jnp.issubdtype(sizes.dtype, jnp.integer):
        raise ValueError(
            f"{_host.PACKAGE}.{op}: group_sizes.shape={sizes.shape}, group_sizes.dtype={sizes.dtype}; must be (G,) "
            "integers"
        )
    if count is not None and (sizes.size < count if group_offset is not None else sizes.size != count):
        rule = f"at least {count}" if group_offset is not None else f"{count} (or say group_offset)"
        raise ValueError(
            f"{_host.PACKAGE}.{op}: group_sizes has {sizes.size} groups and there are {count} matrices: {rule}"
        )
    if rows * (sizes.size + 2) >= 2**31:
        raise ValueError(f"{_host.PACKAGE}.{op}: {rows} rows by {sizes.size} groups: their product must be below 2**31")
    is_known = not any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(group_sizes))
    if is_known and getattr(group_sizes, "is_fully_addressable", True):
        check_group_sizes(group_sizes, rows, op)
    if group_offset is None:
        return sizes, None
    offset = _host.as_array(op, "group_offset", group_offset)
    if offset.size != 1 or not jnp.issubdtype(offset.dtype, jnp.integer):
        raise ValueError(f"{_host.PACKAGE}.{op}: {offset.shape=}, {offset.dtype=} of group_offset; must be one integer")
    return sizes, offset.reshape(())


def check_shapes(op: str, lhs, rhs, transpose_rhs: bool, unit: int = 1) -> tuple[int, int, int]:
    """(M, N, K). Raises a ValueError unless both share K, which must be a multiple of `unit`."""
    if lhs.ndim != 2 or rhs.ndim != 3:
        raise ValueError(
            f"{_host.PACKAGE}.{op}: {lhs.shape=}, {rhs.shape=}; must be (M, K) and a matrix for each group"
        )
    (m, k), (k_rhs, n) = lhs.shape, rhs.shape[:0:-1] if transpose_rhs else rhs.shape[1:]
    if k != k_rhs:
        raise ValueError(
            f"{_host.PACKAGE}.{op}: {lhs.shape=} and {rhs.shape=} ({transpose_rhs=}) share no K: {k} is not {k_rhs}; "
            "are "
            "matrices stored the other way round?"
        )
    if k % unit:
        raise ValueError(
            f"{_host.PACKAGE}.{op}: {k} values along K; TMA needs a multiple of 16 bytes: pad lhs and rhs to "
            f"{-(-k // unit) * unit} (jnp.pad)"
        )
    _host.require_indices(op, M=m, N=n, K=k)
    return m, n, k


def check_operands(op: str, lhs, rhs):
    """Raises a ValueError unless both have one supported dtype and rows that TMA reads."""
    if lhs.dtype not in (jnp.bfloat16, jnp.float16) or lhs.dtype != rhs.dtype:
        raise ValueError(
            f"{_host.PACKAGE}.{op}: {lhs.dtype=}, {rhs.dtype=}; must both be bfloat16 or both float16: cast one"
        )
    for name, cols in (("lhs", lhs.shape[-1]), ("rhs", rhs.shape[-1])):
        if cols % 8:
            raise ValueError(
                f"{_host.PACKAGE}.{op}: a row of {name} has {cols} values, {2 * cols} bytes; TMA needs a multiple of "
                "16 bytes"
                f": pad it to {-(-cols // 8) * 8} (jnp.pad, one copy of {name})"
            )


def row_entries(m: int, num_groups: int, tile: int) -> int:
    """The most entries that `row_table` may need: each has a row, and all but two a group's last one are full."""
    return min(m, (m + (num_groups + 2) * (tile - 1)) // tile)


def row_table(starts, ends, m: int, tile: int) -> Table:
    """An entry for each `tile` rows of each group, and then for those of the rows before and after all groups."""
    num_groups = starts.size
    starts, ends = (
        jnp.concatenate([x, jnp.stack(rest)])
        for x, rest in ((starts, (jnp.zeros_like(ends[-1]), ends[-1])), (ends, (starts[0], jnp.full_like(ends[-1], m))))
    )
    tiles = (ends - starts + tile - 1) // tile
    g = jnp.arange(tiles.size, dtype=jnp.int32)
    after = jnp.where(g[None, :] <= g[:, None], tiles[None, :], 0).sum(1, dtype=jnp.int32)
    entry = jnp.arange(row_entries(m, num_groups, tile), dtype=jnp.int32)
    group = (after[None, :] <= entry[:, None]).sum(1, dtype=jnp.int32)
    at = jnp.minimum(group, num_groups + 1)
    start = starts[at] + (entry - (after - tiles)[at]) * tile
    return Table(after, group, start, ends[at])


def sum_table(starts, ends) -> Table:
    """An entry for each group, the largest first."""
    sizes, g = ends - starts, jnp.arange(starts.size, dtype=jnp.int32)
    comes_before = (sizes[None, :] > sizes[:, None]) | ((sizes[None, :] == sizes[:, None]) & (g[None, :] < g[:, None]))
    rank = comes_before.sum(1, dtype=jnp.int32)
    order = jnp.where(rank[None, :] == g[:, None], g[None, :], 0).sum(1, dtype=jnp.int32)
    return Table(None, order, starts[order], ends[order])


class Entry(NamedTuple):
    """A tile's entry of the table, its number of steps, and its place in the kernel's product."""

    group: Any
    start: Any
    end: Any
    steps: Any
    row: Any
    col: Any


@dataclasses.dataclass(frozen=True)
class RowTiles(Tiles):
    """Tiles of an (M, N) result whose rows belong to groups: `axis` of the kernel's product is that of the rows."""

    num_groups: int = 1
    axis: int = 0
    table: Table | Scan | None = None
    entry: Entry | None = None

    @property
    def rows(self) -> tuple[int, int]:
        """All rows, and those of an entry."""
        return (self.m, self.n)[self.axis], self.cluster_tile[self.axis]

    @property
    def grid(self) -> tuple[int, int]:
        """The most tiles of clusters along M and N that sizes may make necessary."""
        grid, (m, tile) = list(super().grid), self.rows
        grid[self.axis] = row_entries(m, self.num_groups, tile)
        return tuple(grid)

    def table_of(self, group_sizes, group_offset=None):
        """The operand in which the kernel finds its tiles: the sizes of few groups, else a table."""
        m, tile = self.rows
        if group_offset is None and self.num_groups <= SCANNED_MAX:
            # Without the barrier XLA passes a slice of an array where it lies, and Mosaic asks for 256-byte alignment.
            return lax.optimization_barrier(group_sizes.astype(jnp.int32))
        return row_table(*bounds(group_sizes, m, group_offset, self.num_groups), m, tile)

    @property
    def num_steps(self):
        """Steps of the tile that was looked up. None: each tile has its own."""
        return None if self.entry is None else self.entry.steps

    @property
    def across(self) -> int:
        """Tiles along the axis that is not that of the rows."""
        return self.grid[1 - self.axis]

    def of_cluster(self, cluster):
        return _device.div(self.table.count[1] * self.across - cluster + self.clusters - 1, self.clusters)

    def look_up(self, index, block_m, block_n) -> "RowTiles":
        c, filled = self.config, self.table.count[0]
        grid = (filled, self.across)[:: -1 if self.axis else 1]
        places = plgpu.planar_snake(index, grid, c.grid_minor_dim, c.grid_tile_width)
        # Tiles of zeros take less time, so they come last.
        rest = index - filled * self.across
        i = jnp.where(rest < 0, places[self.axis], filled + _device.div(rest, self.across))
        j = jnp.where(rest < 0, places[1 - self.axis], _device.rem(rest, self.across))
        group, start, end = self.table.entry(i)
        tile, size = (block_m * c.tile_m, block_n * c.tile_n), self.cluster_tile[1 - self.axis]
        place = start + tile[self.axis], j * size + tile[1 - self.axis]
        steps = jnp.where(group < self.num_groups, super().num_steps, 0)
        return dataclasses.replace(self, entry=Entry(group, start, end, steps, *place[:: -1 if self.axis else 1]))


@dataclasses.dataclass(frozen=True)
class SumTiles(Tiles):
    """Tiles of (G, M, N) results, one a group, of which each is a sum along the group's rows.

    The table has an entry for each group, the largest first: a block's tiles get shorter and shorter. Turn after turn
    the blocks take theirs in opposite order, so that none gets the longer ones of all turns.
    """

    num_groups: int = 1
    table: Table | None = None
    entry: Entry | None = None

    @property
    def num_steps(self):
        """Steps of the tile that was looked up. None: each tile has its own."""
        return None if self.entry is None else self.entry.steps

    @property
    def clusters(self) -> int:
        return min(self.count, resident(self.num_sms, self.config.cluster_m * self.config.cluster_n))

    @property
    def count(self) -> int:
        return math.prod(self.grid) * self.num_groups

    def in_turn(self, turn, cluster):
        """The number of `cluster` among those that take tiles of this turn."""
        return jnp.where(_device.rem(turn, 2) == 0, cluster, self.clusters - 1 - cluster)

    def of_cluster(self, cluster):
        turns, rest = divmod(self.count, self.clusters)
        return turns + (self.in_turn(turns, cluster) < rest).astype(jnp.int32)

    def look_up(self, index, block_m, block_n) -> "SumTiles":
        c, tiles = self.config, math.prod(self.grid)
        turn, cluster = _device.div(index, self.clusters), _device.rem(index, self.clusters)
        index = turn * self.clusters + self.in_turn(turn, cluster)
        number = _device.div(index, tiles)
        i, j = plgpu.planar_snake(_device.rem(index, tiles), self.grid, c.grid_minor_dim, c.grid_tile_width)
        group, start, end = self.table.entry(number)
        steps = jnp.where(end > start, _device.div(end - aligned(start) + self.tile_k - 1, self.tile_k), 0)
        place = (i * c.cluster_m + block_m) * c.tile_m, (j * c.cluster_n + block_n) * c.tile_n
        return dataclasses.replace(self, entry=Entry(group, start, end, steps, *place))


def aligned(row):
    """The row from which TMA reads whole tiles of the swizzle, which have 8 rows, at or before `row`."""
    return pl.multiple_of(row & ~7, 8)


@dataclasses.dataclass(frozen=True)
class GroupPlan(Plan):
    """A plan whose tiles are looked up in a table."""

    @property
    def phases(self) -> list[Plan]:
        return [self]

    def reading(self, table: Table | Scan) -> "GroupPlan":
        return dataclasses.replace(self, tiles=dataclasses.replace(self.tiles, table=table))

    def look_up(self, tile) -> "GroupPlan":
        """The plan of this block's `tile`."""
        blocks = (lax.axis_index(axis) if axis else 0 for axis in (self.axis_m, self.axis_n))
        index = lax.axis_index("cluster") + tile * self.tiles.clusters
        return dataclasses.replace(self, tiles=self.tiles.look_up(index, *blocks))

    def place(self, tile):
        return self.tiles.entry.row, self.tiles.entry.col


@dataclasses.dataclass(frozen=True)
class RowPlan(GroupPlan):
    """The plan of products of groups of rows."""

    def reading(self, table) -> "RowPlan":
        """This plan with what `table_of` made."""
        return super().reading(table if isinstance(table, Table) else Scan.of(table, *self.tiles.rows))

    def k(self, step):
        return step * self.tiles.tile_k

    def matrix(self, operand: Operand, gmem):
        return gmem.at[self.tiles.entry.group] if operand.stacked else gmem

    def send(self, piece_smem, o_gmem, row, col):
        """A piece that is whole in its group goes out at once; of others their rows, in pieces of powers of two."""
        rows, left = piece_smem.shape[0], self.tiles.entry.end - (row, col)[self.tiles.axis]

        @pl.when(left >= rows)
        def _():
            plgpu.copy_smem_to_gmem(piece_smem, o_gmem)

        @pl.when((left > 0) & (left < rows))
        def _():
            size = 1 << ((rows - 1).bit_length() - 1)
            while size:
                start = left & ~(2 * size - 1)  # The larger pieces come before.

                @pl.when(left & size != 0)
                def _(start=start, size=size):
                    part = pl.ds(start, size)
                    plgpu.copy_smem_to_gmem(piece_smem.at[part], o_gmem.at[part], commit_group=False)

                size //= 2
            plgpu.commit_smem_to_gmem_group()

        # A slot is taken to be free once as many pieces have followed as there are others.
        pl.when(left <= 0)(lambda: plgpu.wait_smem_to_gmem(0, wait_read_only=True))


@dataclasses.dataclass(frozen=True)
class SumPlan(GroupPlan):
    """The plan of sums along the rows of each group."""

    @property
    def out_shape(self) -> tuple[int, ...]:
        return self.tiles.num_groups, self.tiles.m, self.tiles.n

    def result(self, o_gmem):
        return o_gmem.at[self.tiles.entry.group]

    def k(self, step):
        return aligned(self.tiles.entry.start) + step * self.tiles.tile_k

    @property
    def scratch(self) -> dict:
        return super().scratch | dict(masked=plgpu.Barrier(num_arrivals=COMPUTE))


def row_plan(m, n, k, num_groups, dtype, transpose_rhs, activation, out_dtype, config: Config, num_sms=132,
             interpreted=False) -> RowPlan:  # fmt: skip
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
            f"{'64, because N is no multiple of 64' if cut else 'a multiple of 64'} (or give rhs as (G, N, K))"
        )
    sides = [
        Operand(dtype, c.tile_n if c.swapped else c.tile_m, tile_k, False),
        Operand(dtype, c.tile_m if c.swapped else c.tile_n, tile_k, lies, cut or not lies, stacked=True),
    ]
    m_n = (n, m) if c.swapped else (m, n)
    tiles = RowTiles(*m_n, k, tile_k, c, num_sms, num_groups=num_groups, axis=int(c.swapped))
    plan = RowPlan(tiles, *sides[:: -1 if c.swapped else 1], activation, out_dtype, interpreted)
    if not c.swapped and plan.store_piece[1] * out_dtype.itemsize != STEP_BYTES:
        raise ValueError(
            f"{c.tile_n=} must leave each warpgroup a multiple of {STEP_BYTES} bytes of a row of {out_dtype}: a row of "
            "narrower pieces begins where TMA can read none"
        )
    return plan


def sum_plan(m, n, rows, num_groups, dtype, out_dtype, config: Config, num_sms=132, interpreted=False) -> SumPlan:
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
    return SumPlan(tiles, *operands, identity, jnp.dtype(out_dtype), interpreted)

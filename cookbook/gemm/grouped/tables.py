# SPDX-License-Identifier: Apache-2.0
"""Where the tiles of groups lie: bounds of groups, and the table, or the sizes, in which a kernel finds its tiles.

Rows of an (M, ...) array lie group after group; `group_sizes` says how many each has. The tiles that result are
known only on the device, so XLA makes a table of them, a few hundred integers, and the kernel looks its tiles up. That
takes XLA several launches, as long as a small product. So with few groups the kernel gets the sizes, and goes through
them for each tile.

Sizes are clipped to [0, M] and their sums to M before anything is made of them: whatever they are, each row belongs to
one group or to none, and no tile begins or ends outside of the array. `arguments.check_group_sizes` finds such sizes on
the host.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ... import _device
from ..._device import Index, Ref

# The most groups that the kernel goes through for each tile. With 16, the memory warpgroup spills registers.
SCANNED_MAX = 12


class Table(NamedTuple):
    """Integers for each entry: its group, the row where the entry begins, and the row where its group ends."""

    after: jax.Array | Ref  # (G + 2,): entries up to the end of each group, and of the rows of zeros.
    group: jax.Array | Ref
    start: jax.Array | Ref
    end: jax.Array | Ref  # The end of the group, even if that is beyond the entry's tile.

    @property
    def count(self):
        """The number of entries of groups; and of these with the entries of zero rows that follow."""
        size = self.after.shape[0]  # A Ref takes no index from its end.
        return self.after[size - 3], self.after[size - 1]

    def entry(self, number):
        """(group, start, end)."""
        return self.group[number], self.start[number], self.end[number]


class Groups(NamedTuple):
    """In place of sizes: those of groups that share out all rows, with tables that were made of them before."""

    sizes: jax.Array
    tables: dict[int, Table]  # By the rows of a tile.


def sizes_of(groups: "jax.Array | Groups"):
    return groups.sizes if isinstance(groups, Groups) else groups


class Group(NamedTuple):
    """The rows of a group, from `start` to `end`, and how many entries come before its own."""

    before: Index
    start: Index
    end: Index


class Scan(NamedTuple):
    """The entries of `row_table`, found in the sizes of all groups: a table that is computed, not stored. Rows after
    the groups are one group more."""

    count: tuple[Index, Index] | None  # As the table's.
    sizes: Ref  # (G,), as they were given: `groups` clips them as `bounds` does.
    m: int
    tile: int

    @classmethod
    def of(cls, sizes, m: int, tile: int) -> "Scan":
        *_, zeros, end = cls(None, sizes, m, tile).groups()
        return cls((zeros.before, end.before), sizes, m, tile)

    def groups(self):
        """All groups; then the rows after them; then the end, without rows."""
        before = start = 0
        for group in range(self.sizes.shape[0] + 1):
            size = jnp.clip(self.sizes[group], 0, self.m) if group < self.sizes.shape[0] else self.m
            end = jnp.minimum(start + size, self.m)
            yield Group(before, start, end)
            before, start = before + _device.div(end - start + self.tile - 1, self.tile), end
        yield Group(before, start, start)

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


def row_entries(m: int, num_groups: int, tile: int) -> int:
    """The most entries that `row_table` may need: each has a row, and all but two a group's last one are full."""
    return min(m, (m + (num_groups + 2) * (tile - 1)) // tile)


def row_table(starts, ends, m: int, tile: int) -> Table:
    """An entry for each `tile` rows of each group, and then for the rows before and after all groups."""
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

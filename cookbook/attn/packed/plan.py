# SPDX-License-Identifier: Apache-2.0
"""Statics and tiles of packed attention: which rows a tile has, which keys they see, and which block of threads takes
which tiles.

XLA makes the list of tiles in a few small kernels, once for all layers of a model under one `jax.jit`. Blocks of
threads take the tiles of a few KV heads at a time, so that L2 keeps what many tiles read. The longest of these come
first; alternate waves are dealt in reverse order, so that all blocks end at about the same time.
"""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from ... import _host
from ..._device import Index, div, rem
from ..cache.pages import Pages
from ..core import WG_ROWS, Blocks, Config, Cuts, Problem, Span

ROW_MULTIPLE = 8  # A tile of v begins at a multiple of it: Mosaic shows TMA the rows in tiles of 8.
GROUP_BYTES = 32 * 2**20  # Bytes of keys and values read at about the same time: L2 keeps them.
OTHER_PLACE = 53  # Places that a block moves on every two waves; not a divisor of the number of blocks.


def default_config(head_dim: int) -> Config:
    """The configuration for heads of this size. A third warpgroup for heads of 64 costs more than it gains where tiles
    are short."""
    return Config() if head_dim <= 128 else Config(block_kv=64, in_turns=False, sums_by_thread=False)


@dataclasses.dataclass(frozen=True)
class Plan:
    """Statics of the kernel."""

    problem: Problem
    num_tokens: int
    num_seqs: int
    pages: Pages | None  # None for packed keys.
    config: Config
    num_blocks: int
    copies_tiles: bool = False  # Whether values are copied tile by tile, because they have no whole ones.

    @property
    def cuts(self) -> Cuts:
        """A causal mask's edge may cross from one block to the next, as lengths need not be multiples of a block. At
        the start there may be a window's edge, or keys of the sequence before in a block that begins at a multiple of
        8."""
        return Cuts(
            first=self.problem.left is not None or self.pages is None,
            last=self.problem.right is not None,
        )

    @property
    def chunks(self) -> int:
        """Chunks of a group of query heads: several if it has more heads than a warpgroup has rows."""
        return pl.cdiv(self.problem.group, WG_ROWS)

    @property
    def heads(self) -> int:
        """Query heads of a tile."""
        return pl.cdiv(self.problem.group, self.chunks)

    @property
    def shared_heads(self) -> int:
        """Heads that the last chunk computes again, and does not store, where a group is not a multiple of chunks."""
        return self.chunks * self.heads - self.problem.group

    @property
    def row_heads(self) -> np.ndarray:
        """The query head of each row of a warpgroup, for each unit."""
        group, unit = self.problem.group, np.arange(self.units)[:, None]
        first = unit // self.chunks * group + np.minimum(unit % self.chunks * self.heads, group - self.heads)
        return first + np.arange(WG_ROWS) % self.heads

    @property
    def wg_queries(self) -> int:
        """Queries of a compute warpgroup."""
        return WG_ROWS // self.heads

    @property
    def queries(self) -> int:
        """Queries of a tile."""
        return self.wg_queries * self.config.compute_wgs

    @property
    def units(self) -> int:
        """Tiles for the same queries."""
        return self.problem.num_kv_heads * self.chunks

    @property
    def max_tiles(self) -> int:
        """Most tiles of a unit; the rows after the last sequence count as one sequence more."""
        return self.num_seqs + 1 + self.num_tokens // self.queries

    @property
    def copies(self) -> int:
        """Copies of a block: one for each page that it lies in, or one of packed rows."""
        return self.pages.copies if self.pages else 1

    def blocks(self, first_q, num_kv, first_kv) -> Blocks:
        """Blocks of a sequence whose query `first_q` is the first of a tile."""
        p = self.problem
        # Rows after the queries of a tile may then see keys of other sequences; their results are not stored.
        ends_at_query = (p.left, p.right) == (None, 0)
        return Blocks(num_kv, self.config.block_kv, p.left, p.right, first_kv, first_q, self.heads, ends_at_query)


# Columns of the table of tiles.
FIELDS = (
    "token",  # The tile's first row of q.
    "num_q",  # How many rows of q it has.
    "first_q",  # The position of its first query, among the keys of its blocks.
    "num_kv",  # Where the keys of the sequence end, in its blocks.
    "first_kv",  # Where they begin.
    "source",  # The row of k at which block 0 begins, or the row of the block table.
    "number",  # Among the tiles of a unit: where its lse goes.
    "unit",  # The head of its keys, and the chunk of the group.
)


@dataclasses.dataclass(frozen=True)
class Tile:
    """Some queries of a sequence, with heads that share keys."""

    token: Index  # This and the next ones: see `FIELDS`.
    num_q: Index
    num_kv: Index
    first_kv: Index
    source: Index
    number: Index
    unit: Index
    kv_head: Index
    chunk: Index
    head: Index  # Its first query head.
    span: Span

    @classmethod
    def of(cls, plan: Plan, fields):
        token, num_q, first_q, num_kv, first_kv, source, number, unit = fields
        kv_head, chunk = div(unit, plan.chunks), rem(unit, plan.chunks)
        group = plan.problem.group
        head = kv_head * group + jnp.minimum(chunk * plan.heads, group - plan.heads)
        blocks = plan.blocks(first_q, num_kv, first_kv)
        span = Span.of(blocks, plan.cuts, *blocks.seen(0 * unit, plan.queries * plan.heads))
        return cls(token, num_q, num_kv, first_kv, source, number, unit, kv_head, chunk, head, span)


def each_tile(plan: Plan, table, num_tiles, body):
    """Calls `body(i, tile, steps_done, fetch)` for each tile of this block; returns the steps of all. `body` returns
    the next tile's fields, loaded by `fetch()`: they are in flight while it works."""
    block = lax.axis_index("block")
    row = lambda i: jnp.minimum(i * plan.num_blocks + block, table.shape[0] - 1)
    fields = lambda i: tuple(table[row(i), field] for field in range(len(FIELDS)))

    def one(i, carry):
        found, steps_done = carry
        tile = Tile.of(plan, found)
        return body(i, tile, steps_done, lambda: fields(i + 1)), steps_done + tile.span.steps

    return lax.fori_loop(0, num_tiles[block], one, (fields(0 * block), 0 * block))[1]


# The list of tiles ----------------------------------------------------------------------------------------------------


def starts_of(cu_seqlens, num_rows: int):
    """`cu_seqlens`, cut at the number of rows, and never going back."""
    return _host.running(jnp.max, jnp.clip(cu_seqlens.astype(jnp.int32), 0, num_rows))


def _rows(x, index):
    """Rows of `x`. No index is below 0, and the last row stands for all beyond it."""
    return x.at[index].get(mode="clip", wrap_negative_indices=False)


def _seq_of(number, ends):
    """How many of `ends` do not come after each number."""
    return jnp.sum(ends <= number[:, None], axis=1, dtype=jnp.int32)


def table(plan: Plan, starts_q, kv_first, kv_lens):
    """(fields of the tiles, in the order in which `deal` deals them out; how many each block takes; where rows of q
    find their lse).

    `starts_q` has the first row of each sequence's queries, and the end of the last ones; `kv_first` the row of k where
    each sequence's keys begin, or 0 in pages; `kv_lens` how many keys it has.
    """
    first_kv = rem(kv_first, ROW_MULTIPLE)
    # The rows after the last sequence count as one sequence more, without keys.
    starts = jnp.append(starts_q, plan.num_tokens)
    first_kv, source, kv_lens = (
        jnp.append(x, jnp.int32(0))
        for x in (first_kv, jnp.arange(plan.num_seqs, dtype=jnp.int32) if plan.pages else kv_first - first_kv, kv_lens)
    )
    q_lens = starts[1:] - starts[:-1]
    num = div(q_lens + plan.queries - 1, plan.queries)
    ends, kv_ends = _host.running(jnp.sum, jnp.stack([num, kv_lens]))
    number = jnp.arange(plan.max_tiles, dtype=jnp.int32)
    of_seq = jnp.stack([starts[:-1], q_lens, first_kv, first_kv + kv_lens, source, ends - num], axis=1)
    start, q_len, first_kv, num_kv, source, first_tile = _rows(of_seq, _seq_of(number, ends)).T
    first = (number - first_tile) * plan.queries
    first_q = num_kv - q_len + first
    fields = dict(
        token=start + first, num_q=jnp.clip(q_len - first, 0, plan.queries), first_q=first_q, num_kv=num_kv,
        first_kv=first_kv, source=source, number=number,
    )  # fmt: skip
    begin, end = plan.blocks(first_q, num_kv, first_kv).seen(0 * number, plan.queries * plan.heads)
    row, unit, counts = deal(plan, jnp.where(number < ends[-1], end - begin, 0), ends[-1], kv_ends[-1])
    table = jnp.stack([fields[name] for name in FIELDS[:-1]], axis=1)
    return jnp.concatenate([_rows(table, row), unit[:, None]], axis=1), counts, (starts, ends, num)


def deal(plan: Plan, steps, num_rows, num_kv):
    """Row and unit of each tile, in the order in which blocks take them; and how many each block takes, of tiles b,
    b + num_blocks, and so on for block b. There is a tile for each of the first `num_rows` rows and each unit.

    Some units at a time, whose keys and values L2 keeps, with the longest tiles first. Alternate waves are dealt in
    reverse order.
    """
    most = (2**31 - 1) // plan.max_tiles - 1
    key = (most - jnp.minimum(steps, most)) * plan.max_tiles + jnp.arange(plan.max_tiles, dtype=jnp.int32)
    if plan.max_tiles <= 4096:  # Two reductions over pairs, in place of a sort's passes.
        rank = jnp.sum(key < key[:, None], axis=1)
        order = jnp.sum(jnp.where(rank == jnp.arange(plan.max_tiles)[:, None], jnp.arange(plan.max_tiles), 0), axis=1)
    else:
        order = rem(jnp.sort(key), plan.max_tiles)
    fit = GROUP_BYTES / (4.0 * plan.problem.head_dim * num_kv)
    divisors = [n for n in range(1, plan.units + 1) if plan.units % n == 0]
    together = functools.reduce(lambda found, n: jnp.where(n <= fit, n, found), divisors)

    size = pl.cdiv(plan.max_tiles * plan.units, plan.num_blocks)
    wave, block = jnp.arange(size, dtype=jnp.int32)[:, None], jnp.arange(plan.num_blocks, dtype=jnp.int32)

    def dealt(wave):
        """Number of the tile that each block takes in a wave; odd waves run backwards. Every two waves the blocks
        change places, so that differences of one step do not add up."""
        place = rem(block + -OTHER_PLACE % plan.num_blocks * div(wave, 2), plan.num_blocks)
        return wave * plan.num_blocks + jnp.where(rem(wave, 2) == 0, place, plan.num_blocks - 1 - place)

    number, num_tiles = dealt(wave), num_rows * plan.units
    whole_waves = div(num_tiles, plan.num_blocks)
    counts = whole_waves + (dealt(whole_waves) < num_tiles)
    number = number.ravel()
    together, of_group = (jnp.broadcast_to(x, number.shape) for x in (together, num_rows * together))
    group = lax.div(number, of_group)
    start = group * of_group
    # A group's longest tiles begin a round of all blocks; what is left of the one before is filled with its shortest.
    left = lax.rem(rem(plan.num_blocks - rem(start, plan.num_blocks), plan.num_blocks), of_group)
    rank = lax.rem(number - start + of_group - left, of_group)
    return _rows(order, lax.div(rank, together)), group * together + lax.rem(rank, together), counts


def lse_of_rows(plan: Plan, lse, starts, ends, num):
    """The lse of each row and head, (T, N), gathered from what tiles wrote: `ends` of the tiles of each sequence, and
    their `num`."""
    row, head = jnp.arange(plan.num_tokens, dtype=jnp.int32), np.arange(plan.problem.num_heads)
    of_seq = jnp.stack([starts[:-1], ends - num], axis=1)
    start, first_tile = _rows(of_seq, _seq_of(row, starts[1:])).T
    query = row - start
    kv_head, in_group = np.divmod(head, plan.problem.group)
    chunk = np.minimum(in_group // plan.heads, plan.chunks - 1)
    in_chunk = in_group - np.minimum(chunk * plan.heads, plan.problem.group - plan.heads)
    # A tile's results as a row: of all units, warpgroups, and rows of these.
    in_tile = rem(query, plan.queries)
    place = div(in_tile, plan.wg_queries) * WG_ROWS + rem(in_tile, plan.wg_queries) * plan.heads
    column = (kv_head * plan.chunks + chunk) * plan.config.compute_wgs * WG_ROWS + in_chunk
    tile = first_tile + div(query, plan.queries)
    return lse.reshape(len(lse), -1).at[tile[:, None], place[:, None] + column].get(mode="clip")

# SPDX-License-Identifier: Apache-2.0
"""Which block of threads computes which tiles of dense attention, and what a tile is: the statics of both kernels.

NumPy deals tiles out before the kernel is launched, the long ones of a causal mask first, so that all SMs end at about
the same time, and so that those computed at the same time share keys in the L2 cache.
"""

import dataclasses
import functools
import heapq

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from ..._device import Index, div, rem
from ..core import WG_ROWS, BlockConfig, Blocks, Cuts, Problem, Span

TILE_COST = 1.5  # Steps that a tile costs beside its own.
MANY = 16  # Tiles of a block from which on it does not matter that not all blocks are done at the same time.


@dataclasses.dataclass(frozen=True)
class Plan:
    """Statics of a kernel."""

    problem: Problem
    batch: int
    num_q: int
    num_kv: int
    has_segments: bool
    config: BlockConfig
    # Whether values are copied tile by tile. TMA cuts blocks of them off at the edges of whole tiles alone.
    copies_tiles: bool = False

    @property
    def blocks(self) -> Blocks:
        return Blocks(self.num_kv, self.config.block_kv, self.problem.left, self.problem.right)

    @property
    def cuts(self) -> Cuts:
        """A causal mask cuts two blocks of 64 rows where blocks do not begin at multiples of 64."""
        left, right, segments = self.problem.left, self.problem.right, self.has_segments
        return Cuts(
            first=left is not None or segments,
            last=right is not None and (right != 0 or self.config.block_kv % WG_ROWS != 0),
            all=segments,
            any=self.problem.has_window or segments or self.num_kv % self.config.block_kv != 0,
        )

    @property
    def num_q_blocks(self) -> int:
        return pl.cdiv(self.num_q, self.config.rows)

    @property
    def values_as_rows(self) -> bool:
        """Whether values are copied as keys are: rows of a single panel, which TMA cuts off at any edge."""
        return self.problem.panels == 1

    @property
    def steps(self) -> tuple[int, ...]:
        """Steps of each tile of a head."""
        first, end = self.blocks.seen(np.arange(self.num_q_blocks) * self.config.rows, self.config.rows)
        return tuple(map(int, end - first))

    def time(self, num_sms: int) -> float:
        """When the last block is done, in steps; where each has many tiles, by their sum."""
        num_heads = self.batch * self.problem.num_heads
        if num_heads * len(self.steps) > MANY * num_sms:
            return num_heads * sum(count + TILE_COST for count in self.steps) / num_sms
        return _table(self.steps, num_heads, num_sms)[0]

    def schedule(self, num_sms: int) -> np.ndarray:
        """For each block of threads a row: how many tiles it has, their numbers, and zeros after them."""
        return _table(self.steps, self.batch * self.problem.num_heads, num_sms)[1]


@functools.lru_cache
def dealt_out(steps: tuple[int, ...], num_heads: int, heads_together: int, num_blocks: int) -> tuple[float, np.ndarray]:
    """(time, table): when the last block is done, in steps; and for each block a row as `Plan.schedule` has it.

    Tile `head * len(steps) + i` takes `steps[i]`. Among every `heads_together` heads the longest tiles come first; each
    tile goes to the block that is done with its tiles first.
    """
    heads, i = np.divmod(np.arange(num_heads * len(steps)), len(steps))
    order = np.lexsort((heads, -np.array(steps)[i], heads // heads_together))
    tiles: list[list[int]] = [[] for _ in range(min(num_blocks, len(order)))]
    done = [(0.0, block) for block in range(len(tiles))]
    for tile in order:
        time, block = heapq.heappop(done)
        tiles[block].append(tile)
        heapq.heappush(done, (time + steps[i[tile]] + TILE_COST, block))
    table = np.zeros((len(tiles), 2 + max(map(len, tiles))), np.int32)
    for row, of_block in zip(table, tiles, strict=True):
        row[: 1 + len(of_block)] = len(of_block), *of_block
    return max(done)[0], table


def _table(steps: tuple[int, ...], num_heads: int, num_blocks: int) -> tuple[float, np.ndarray]:
    """`dealt_out` such that blocks work on few heads at a time, so that the L2 cache keeps the heads' keys."""
    heads_together = max(1, round(num_blocks / len(steps)))
    deals = [
        dealt_out(steps, num_heads, heads_together * times, num_blocks)
        for times in ((1, 2, 4) if len(set(steps)) > 1 else (1,))
    ]
    # Fewer heads at a time stay in the L2 cache better: twice as many have to gain half a percent.
    return min((time * (1 + 0.005 * i), i, (time, table)) for i, (time, table) in enumerate(deals))[-1]


@dataclasses.dataclass(frozen=True)
class Tile:
    """Some queries of a head, and the blocks of keys that they see."""

    batch: Index
    head: Index
    kv_head: Index
    first_q: Index
    span: Span

    @classmethod
    def of(cls, plan: Plan, number, segment_tables: dict):
        """`segment_tables` are `core.make_segment_tables`, or {}."""
        head, q_block = div(number, plan.num_q_blocks), rem(number, plan.num_q_blocks)
        batch, head = div(head, plan.problem.num_heads), rem(head, plan.problem.num_heads)
        kv_head = div(head, plan.problem.group)
        first_q = q_block * plan.config.rows
        first, end = plan.blocks.seen(first_q, plan.config.rows)
        if segment_tables:
            first = jnp.maximum(first, segment_tables["first"][batch, q_block])
            end = jnp.minimum(end, segment_tables["end"][batch, q_block])
        return cls(batch, head, kv_head, first_q, Span.of(plan.blocks, plan.cuts, first, end, segment_tables, batch))


def each_tile(plan: Plan, table, segment_tables: dict, body):
    """Calls `body(i, tile, steps_done)` for each tile of this block, and returns the steps of all."""
    block = lax.axis_index("block")

    def one(i, carry):
        number, steps_done = carry
        tile = Tile.of(plan, number, segment_tables)
        number = table[block, i + 2]  # In flight meanwhile.
        body(i, tile, steps_done)
        return number, steps_done + tile.span.steps

    return lax.fori_loop(0, table[block, 0], one, (table[block, 1], jnp.int32(0)))[1]

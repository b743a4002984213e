# SPDX-License-Identifier: Apache-2.0
"""Statics and tiles of packed attention: which rows a tile has, and which keys they see."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .. import core, tiles
from ..cache.pages import Pages
from ..core import PIECE, REGISTERS, REGISTERS_MEMORY, TILED, WG_ROWS, Blocks, Config, Cuts, Problem, div, rem


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
        """A causal mask's edge may cross from one block to the next: lengths are no multiples of a block. At the start
        there may be a window's edge, or keys of the sequence before in a block that begins at a multiple of 8."""
        return Cuts(
            any=True,
            first=self.problem.left is not None or self.pages is None,
            last=self.problem.right is not None,
        )

    @property
    def chunks(self) -> int:
        """Parts of a group: several if it has more heads than a warpgroup has rows."""
        return pl.cdiv(self.problem.group, WG_ROWS)

    @property
    def heads(self) -> int:
        """Query heads of a tile."""
        return pl.cdiv(self.problem.group, self.chunks)

    @property
    def shared_heads(self) -> int:
        """Heads that the last chunk computes again, where a group is no multiple of chunks, and does not store."""
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
        """Parts of a block, each of which lies in one piece of memory: those of pages, or all of it."""
        return self.pages.copies if self.pages else 1

    @property
    def k_in_pieces(self) -> bool:
        """Whether keys are copied and kept in pieces. Those of whole tiles in pages are copied with all of them."""
        return not self.pages or not self.problem.whole_pieces

    @property
    def registers(self) -> tuple[int, int]:
        """Registers of a thread of the memory and of the compute warpgroups."""
        needs_more = self.pages or self.problem.head_dim > 128
        return (REGISTERS_MEMORY if needs_more else REGISTERS)[self.config.compute_wgs]

    def blocks(self, first_q, num_kv, first_kv) -> Blocks:
        """Blocks of a sequence whose query `first_q` is the first of a tile."""
        p = self.problem
        of = CausalBlocks if (p.left, p.right) == (None, 0) else Blocks
        return of(num_kv, self.config.block_kv, p.left, p.right, first_kv, first_q, self.heads)

    @property
    def smem_bytes(self) -> int:
        """Bytes that `scratch` takes."""
        return self.config.smem_bytes(self.problem.head_dim) + 8

    @property
    def scratch(self) -> dict:
        p, c = self.problem, self.config
        whole = plgpu.SMEM((c.num_stages, c.block_kv, p.width), p.dtype, **TILED)
        keys = core.row_tiles((c.num_stages, p.pieces, c.block_kv, PIECE), p.dtype, p.interpreted)
        smem = dict(
            k_smem=keys if self.k_in_pieces else whole,
            v_smem=tiles.value_tiles(c.num_stages, c.block_kv, p),
        )
        q_copies = p.pieces * (self.wg_queries if p.interpreted else 1)
        k_copies = self.copies * (p.pieces if self.k_in_pieces else 1)
        scratch = core.scratch(p, c, smem, q_copies, k_copies, self.v_copies)
        return scratch | dict(v_landed=core.barriers(1, self.v_copies))

    @property
    def v_copies(self) -> int:
        """Copies of values for a block."""
        rows = self.config.block_kv // self.copies
        return self.copies * (tiles.copies_of_tiles(self.problem, rows) if self.copies_tiles else 1)


class Tile:
    """Some queries of a sequence, with heads that share keys. Its `fields`:

    token, num_q       its first row of q, and how many it has
    first_q            the position of its first query, among the keys of its blocks
    first_kv, num_kv   between which the keys of the sequence lie, in its blocks
    source             the row of k at which block 0 begins, or the row of the block table
    number             among the tiles of a unit: where its lse goes
    unit               the head of its keys, and the chunk of the group
    """

    def __init__(self, plan: Plan, fields):
        self.token, self.num_q, first_q, self.num_kv, self.first_kv, self.source, self.number, self.unit = fields
        self.kv_head, self.chunk = div(self.unit, plan.chunks), rem(self.unit, plan.chunks)
        group = plan.problem.group
        self.head = self.kv_head * group + jnp.minimum(self.chunk * plan.heads, group - plan.heads)
        self.blocks = plan.blocks(first_q, self.num_kv, self.first_kv)
        first, end = self.blocks.seen(0 * self.unit, plan.queries * plan.heads)
        self.end = jnp.maximum(end, 1)
        self.first = jnp.minimum(first, self.end - 1)  # At least one, if only to find that no key is seen.
        self.steps = self.end - self.first
        self.mask = self.blocks.mask_of


class CausalBlocks(Blocks):
    def mask(self, rows, kv_ids):
        """As `Blocks.mask`, without looking where the keys end: a query sees none after its own position, which has a
        key. Rows after the queries of a tile may see keys of other sequences; their results are not stored."""
        return (kv_ids >= self.first_kv) & (kv_ids <= self.position(rows))

# SPDX-License-Identifier: Apache-2.0
"""The copies of the memory warpgroup of `kernel.py`: queries, and blocks of keys and values, from rows or pages."""

import dataclasses

from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ..core import PIECE, Shared
from ..tiles import clear, copy_tiles, lane
from .plan import Plan, Tile
from .schedule import ROW_UNIT


@dataclasses.dataclass(frozen=True)
class Loader:
    """The copies of the memory warpgroup: from where to where."""

    plan: Plan
    shared: Shared
    v_landed: object
    q_gmem: object
    k_gmem: object
    v_gmem: object
    block_tables: object

    def sources(self, tile: Tile, block):
        """Where the parts of a block begin in k and in v: the indices before that of a row, and the row."""
        pages, block_kv = self.plan.pages, self.plan.config.block_kv
        if not pages:
            return [((), pl.multiple_of(tile.source + block * block_kv, ROW_UNIT))]
        return self.in_pages(block, pages.of_block(self.block_tables, tile.source, block))

    def in_pages(self, block, ids):
        """`sources` of a block whose pages have been found."""
        pages = self.plan.pages
        first = pages.first_token(block)
        first = pl.multiple_of(first, pages.tokens) if pages.copies == 1 else first
        return [((page,), first) for page in ids]

    def load_keys(self, tile: Tile, slot, found):
        filled, rows = self.shared.keys.filled.at[slot], self.plan.config.block_kv // len(found)
        for j, (page, first) in enumerate(found):
            source, to = self.k_gmem.at[*page, pl.ds(first, rows), tile.kv_head], pl.ds(j * rows, rows)
            if not self.plan.k_in_pieces:
                plgpu.copy_gmem_to_smem(source, self.shared.k.at[slot, to], filled)
                continue
            for p in range(self.plan.problem.pieces):
                plgpu.copy_gmem_to_smem(
                    source.at[:, lane(self.plan.problem, p)], self.shared.k_tma.at[slot, p, to], filled
                )

    def load_values(self, tile: Tile, slot, found, filled):
        plan, rows = self.plan, self.plan.config.block_kv // len(found)
        smem, tiles = self.shared.v.at[slot], self.shared.v_tma.at[slot]
        for j, (page, first) in enumerate(found):

            def source(row, num, piece, page=page, first=first):
                return self.v_gmem.at[*page, pl.ds(first + row, num), tile.kv_head, lane(plan.problem, piece)]

            if plan.copies_tiles:
                copy_tiles(plan.problem, source, smem, tiles, j * rows, rows, filled)
            else:
                source = self.v_gmem.at[*page, pl.ds(first, rows), tile.kv_head]
                plgpu.copy_gmem_to_smem(source, smem.at[pl.ds(j * rows, rows)], filled)

    def load_clean_values(self, tile: Tile, slot, found, block):
        """Copy the values of a block, and zero the rows of other sequences or of none, which may be NaN."""
        self.load_values(tile, slot, found, self.v_landed.at[0])
        plgpu.barrier_wait(self.v_landed.at[0])
        first = block * self.plan.config.block_kv
        clear(self.plan.problem, self.shared.v_rows.at[slot], tile.first_kv - first, tile.num_kv - first)
        for _ in range(self.plan.v_copies):
            plgpu.barrier_arrive(self.shared.values.filled.at[slot])

    def load_queries(self, i, tile: Tile):
        """Copy each warpgroup's queries, and rows after the last query of the tile, as far as there are any."""
        plan, q_smem = self.plan, self.shared.q_tma
        heads = pl.ds(tile.head, plan.heads)
        for wg in range(plan.config.compute_wgs):
            pl.when(i > 0)(lambda wg=wg: plgpu.barrier_wait(self.shared.q_freed.at[wg]))
            first, filled = tile.token + wg * plan.wg_queries, self.shared.q_filled.at[wg]
            for p in range(plan.problem.pieces):
                columns = lane(plan.problem, p)
                if not plan.problem.interpreted:
                    source = self.q_gmem.at[pl.ds(first, plan.wg_queries), heads, columns]
                    rows = q_smem.at[wg, p, pl.ds(0, plan.wg_queries * plan.heads)]
                    plgpu.copy_gmem_to_smem(source, rows.reshape(plan.wg_queries, plan.heads, PIECE), filled)
                    continue
                for query in range(plan.wg_queries):  # Its shared memory has one view, in which several are no box.
                    rows = q_smem.at[wg, p, pl.ds(query * plan.heads, plan.heads)]
                    plgpu.copy_gmem_to_smem(self.q_gmem.at[first + query, heads, columns], rows, filled)

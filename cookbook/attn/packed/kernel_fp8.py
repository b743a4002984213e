# SPDX-License-Identifier: Apache-2.0
"""The kernel of `ragged_paged_attention` over pages of 8 bits: `kernel.py`, whose memory warpgroup also widens.

It copies keys, and values, of a block into a place of their own, as they are in the pages; then reads them from there
and writes them to the slot as numbers of the queries' dtype. The values of a block are in flight while its keys are
widened, and the keys of the next one while its values are. Rows of values that nobody may see, which may be NaN, become
zeros. All else is as in `kernel.py`; k_filled and v_filled have one arrival, of the memory warpgroup.

    barrier      arrivals                who waits
    landed[i]    copies of a block       memory, before it widens them: of keys (0), of values (1)

Bound by: the tensor cores with many queries of a sequence. With few, widening: a block takes the 128 threads about as
long as two compute warpgroups take for it.
"""

import dataclasses
import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .. import core
from ..cache.pages_fp8 import widen
from ..core import E4M3, TILED, Shared
from ..steps import Work
from . import kernel as packed
from . import plan as packed_plan
from .load import Loader

KEYS, VALUES = 0, 1
REGISTERS = {2: (72, 216), 3: (56, 152)}  # Registers of a thread: memory, compute.
ROWS_AT_ONCE = 32  # Rows that are widened together, in few registers.


@dataclasses.dataclass(frozen=True)
class Plan(packed_plan.Plan):
    @property
    def registers(self) -> tuple[int, int]:
        return REGISTERS[self.config.compute_wgs]

    @property
    def smem_bytes(self) -> int:
        return super().smem_bytes + 2 * self.config.block_kv * self.problem.head_dim + 8

    @property
    def scratch(self) -> dict:
        p, c = self.problem, self.config
        tiles = plgpu.SMEM((c.num_stages, c.block_kv, p.head_dim), p.dtype, **TILED)
        narrow = core.tiling(min(128, p.head_dim), E4M3)
        q_copies = p.pieces * (self.wg_queries if p.interpreted else 1)
        return core.scratch(p, c, dict(k_smem=tiles, v_smem=tiles), q_copies, 1, 1) | dict(
            narrow_smem=plgpu.SMEM((2, c.block_kv, p.head_dim), E4M3, transforms=narrow),
            landed=core.barriers(2, self.copies),
        )


@dataclasses.dataclass(frozen=True)
class WideningLoader(Loader):
    narrow: object  # Keys, and values, of a block as pages have them.
    landed: object

    def find(self, tile, block):
        """The pages of a block."""
        return self.plan.pages.of_block(self.block_tables, tile.source, block)

    def copy(self, which: int, tile, block, ids):
        """Starts the copies of a block's keys or values from its pages."""
        gmem, rows = (self.k_gmem, self.v_gmem)[which], self.plan.pages.tokens
        for j, (page, first) in enumerate(self.in_pages(block, ids)):
            source = gmem.at[*page, pl.ds(first, rows), tile.kv_head]
            plgpu.copy_gmem_to_smem(source, self.narrow.at[which, pl.ds(j * rows, rows)], self.landed.at[which])

    def widen_to(self, which: int, ring, wide, count, seen=None):
        """Fills the slot of `count` with what has been copied; zeros in rows outside of `seen`."""
        plgpu.barrier_wait(self.landed.at[which])
        slot = ring.fill(count)
        widen(self.narrow.at[which], wide.at[slot], seen, ROWS_AT_ONCE)
        plgpu.commit_smem()
        plgpu.barrier_arrive(ring.filled.at[slot])


def _kernel(
    table, num_tiles, block_tables, sinks, q_gmem, k_gmem, v_gmem, k_scale, v_scale, out_gmem, lse_gmem, *,
    plan: Plan, narrow_smem, landed, **scratch,
):  # fmt: skip
    role, wgs = lax.axis_index("role"), plan.config.compute_wgs
    shared = Shared.of(plan.problem, plan.config, **scratch)
    each_tile = functools.partial(packed._each_tile, plan, table, num_tiles)
    work = lambda plan, tile, *rest: Work(plan, tile, *rest, k_scale[tile.kv_head], v_scale[tile.kv_head])

    @pl.when(role == wgs)
    def _():
        plgpu.set_max_registers(plan.registers[0], action="decrease")
        loader = WideningLoader(plan, shared, None, q_gmem, k_gmem, v_gmem, block_tables, narrow_smem, landed)
        _load(loader, each_tile, num_tiles[lax.axis_index("block")])

    @pl.when(role < wgs)
    def _():
        plgpu.set_max_registers(plan.registers[1], action="increase")
        packed._compute(plan, each_tile, shared, sinks, out_gmem, lse_gmem, work)


def _load(loader: WideningLoader, each_tile, num_mine):
    """The memory warpgroup: a tile's queries, and its blocks of keys and values, the last block first."""
    plan, shared, block_kv = loader.plan, loader.shared, loader.plan.config.block_kv

    def load_tile(i, tile, before, fetch):
        next_fields = fetch()

        def one(step, ids):
            block = tile.end - 1 - step
            loader.copy(VALUES, tile, block, ids)
            loader.widen_to(KEYS, shared.keys, shared.k, before + step)
            pl.when(step == 0)(lambda: loader.load_queries(i, tile))
            ids = loader.find(tile, jnp.maximum(block - 1, 0))
            pl.when(step + 1 < tile.steps)(lambda: loader.copy(KEYS, tile, block - 1, ids))
            seen = tile.first_kv - block * block_kv, tile.num_kv - block * block_kv
            is_cut = (seen[0] > 0) | (seen[1] < block_kv)
            widen_values = functools.partial(loader.widen_to, VALUES, shared.values, shared.v, before + step)
            pl.when(is_cut)(lambda: widen_values(seen))
            pl.when(~is_cut)(widen_values)
            return ids

        ids = loader.find(tile, tile.end - 1)
        loader.copy(KEYS, tile, tile.end - 1, ids)
        lax.fori_loop(0, tile.steps, one, ids)
        return next_fields

    shared.drain(each_tile(load_tile))
    for wg in range(plan.config.compute_wgs):
        pl.when(num_mine > 0)(lambda wg=wg: plgpu.barrier_wait(shared.q_freed.at[wg]))


run = functools.partial(packed.run, plan_type=Plan, kernel=_kernel)

# SPDX-License-Identifier: Apache-2.0
"""The kernel of `ragged_paged_attention` over pages of 8 bits: that of `kernel.py`, whose memory warpgroup also widens.

It copies keys, and values, of a block into a place of their own, as they are in the pages; then reads them from there
and writes them to the slot as numbers of the queries' dtype. The values of a block are in flight while its keys are
widened, and the keys of the next one while its values are. Rows of values that nobody may see, which may be NaN, become
zeros. All else is as in `kernel.py`; k_filled and v_filled have one arrival, of the memory warpgroup.

    barrier      arrivals                who waits
    landed[i]    copies of a block       memory, before it widens them: of keys (0), of values (1)

Bound by: the tensor cores with many queries of a sequence. With few, widening: a block takes the 128 threads about as
long as two compute warpgroups take for it.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ... import _device
from .. import core
from ..cache.pages_fp8 import widen
from ..core import E4M3, Shared
from .kernel import compute, drain_queries, in_pages, launch, load_queries, query_copies
from .plan import Plan, Tile, each_tile

KEYS, VALUES = 0, 1
REGISTERS = {2: (72, 216), 3: (56, 152)}  # Per thread: memory, compute.
ROWS_AT_ONCE = 32  # Rows that are widened together, in few registers.


def scratch(plan: Plan) -> dict:
    """Shared memory of a block, and its barriers."""
    p, c = plan.problem, plan.config
    wide = plgpu.SMEM((c.num_stages, c.block_kv, p.head_dim), p.dtype, **_device.swizzled())
    narrow = _device.swizzled(min(128, p.head_dim), E4M3)
    return core.scratch(p, c, dict(k_smem=wide, v_smem=wide), query_copies(plan), 1, 1) | dict(
        narrow_smem=plgpu.SMEM((2, c.block_kv, p.head_dim), E4M3, **narrow),
        landed=_device.barriers(2, plan.copies),
    )


def _kernel(
    table, num_tiles, block_tables, sinks, q_gmem, k_gmem, v_gmem, k_scale, v_scale, out_gmem, lse_gmem, *,
    plan: Plan, narrow_smem, landed, **smem,
):  # fmt: skip
    role, wgs = lax.axis_index("role"), plan.config.compute_wgs
    shared = Shared.of(plan.config, **smem)
    memory_registers, compute_registers = REGISTERS[wgs]

    @_device.role(role == wgs, decrease_to=memory_registers)
    def _():
        _load(plan, table, num_tiles, block_tables, shared, narrow_smem, landed, q_gmem, (k_gmem, v_gmem))

    @_device.role(role < wgs, increase_to=compute_registers)
    def _():
        compute(plan, table, num_tiles, shared, sinks, (k_scale, v_scale), out_gmem, lse_gmem)


def _load(plan: Plan, table, num_tiles, block_tables, shared: Shared, narrow_smem, landed, q_gmem, pages_gmem):
    """The memory warpgroup: a tile's queries, and its blocks of keys and values, the last block first."""
    pages, block_kv, tiles_of_block = plan.pages, plan.config.block_kv, num_tiles[lax.axis_index("block")]

    def copy(which: int, tile: Tile, block, ids):
        """Starts the copies of a block's keys or values, which lie in the pages `ids`."""
        for j, (page, first) in enumerate(in_pages(plan, block, ids)):
            source = pages_gmem[which].at[*page, pl.ds(first, pages.tokens), tile.kv_head]
            rows = pl.ds(j * pages.tokens, pages.tokens)
            plgpu.copy_gmem_to_smem(source, narrow_smem.at[which, rows], landed.at[which])

    def widen_to(which: int, ring: _device.Ring, wide, count, seen=None):
        """Fills the slot of `count` with what has been copied; zeros in rows outside of `seen`."""
        plgpu.barrier_wait(landed.at[which])
        slot = ring.acquire(count)
        widen(narrow_smem.at[which], wide.at[slot], seen, ROWS_AT_ONCE)
        plgpu.commit_smem()
        plgpu.barrier_arrive(ring.filled.at[slot])

    def load_tile(i, tile: Tile, steps_done, fetch):
        next_fields = fetch()
        find = lambda block: pages.of_block(block_tables, tile.source, block)

        def one(step, ids):
            block = tile.span.end - 1 - step
            copy(VALUES, tile, block, ids)
            widen_to(KEYS, shared.keys, shared.k, steps_done + step)
            pl.when(step == 0)(lambda: load_queries(plan, shared, tile, i, q_gmem))
            ids = find(jnp.maximum(block - 1, 0))
            pl.when(step + 1 < tile.span.steps)(lambda: copy(KEYS, tile, block - 1, ids))
            seen = tile.first_kv - block * block_kv, tile.num_kv - block * block_kv
            is_cut = (seen[0] > 0) | (seen[1] < block_kv)
            widen_values = functools.partial(widen_to, VALUES, shared.values, shared.v, steps_done + step)
            pl.when(is_cut)(lambda: widen_values(seen))
            pl.when(~is_cut)(widen_values)
            return ids

        ids = find(tile.span.end - 1)
        copy(KEYS, tile, tile.span.end - 1, ids)
        lax.fori_loop(0, tile.span.steps, one, ids)
        return next_fields

    shared.drain(each_tile(plan, table, num_tiles, load_tile))
    drain_queries(plan, shared, tiles_of_block)


@functools.partial(jax.jit, static_argnames=("plan", "params", "return_lse"))
def forward(
    q, k, v, block_tables, cu_seqlens_q, kv_lens, sinks, k_scale, v_scale, *, plan: Plan, params, return_lse: bool
):  # fmt: skip
    """As `kernel.forward`. The scales are float32 (kv_heads,)."""
    operands = q, k, v, block_tables, cu_seqlens_q, kv_lens, sinks, k_scale, v_scale
    return launch(_kernel, scratch(plan), *operands, plan=plan, params=params, return_lse=return_lse)

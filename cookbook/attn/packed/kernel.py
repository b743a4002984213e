# SPDX-License-Identifier: Apache-2.0
"""The kernel of `varlen_attention` and `ragged_paged_attention`: packed queries, with keys packed too or in pages.

Role table: as in `dense/kernel.py`, with the same steps of a compute warpgroup (`steps.py`) on other rows:

    memory     one, with few registers: copies queries and block after block of keys and values, which it finds at
               their rows of k and v, or page by page through the block table
    compute    two or three, each with 64 rows: as many queries as have room, with all heads that read the same keys, so
               that one token of a sequence that writes its answer loads its keys once, not once for each head

Barrier table: that of `dense/kernel.py`, and

    v_landed   copies of a block        memory, before it zeroes rows of other sequences or of none, and then arrives
                                        at v_filled in place of the copies

Copies of k and of q begin at any row. v, which tensor cores read by columns, is copied in Mosaic's tiled view, whose
tiles of 8 rows begin at multiples of 8. So the blocks of a sequence begin at the multiple of 8 before its first key,
and what lies before is masked.

Starts of sequences are cut at T and S, and never go back. No row is written twice, or by two blocks.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ... import _device, _host
from ..._device import PIECE, div
from .. import core, steps, tiles
from ..cache.pages import at_least_two
from ..core import LOG2E, REGISTERS, REGISTERS_MEMORY, TILE_ROWS, WG_ROWS, Shared
from .plan import ROW_MULTIPLE, Plan, Tile, each_tile, lse_of_rows, starts_of, table


def _keys_in_panels(plan: Plan) -> bool:
    """Whether keys are copied and kept in panels. Whole rows in pages are copied with all of their panels."""
    return not plan.pages or not plan.problem.whole_panels


def _value_copies(plan: Plan) -> int:
    """Copies of values for a block."""
    rows = plan.config.block_kv // plan.copies
    return plan.copies * (tiles.copies_of_tiles(plan.problem, rows) if plan.copies_tiles else 1)


def query_copies(plan: Plan) -> int:
    """Copies of a warpgroup's queries."""
    return plan.problem.panels * (plan.wg_queries if plan.problem.interpreted else 1)


def scratch(plan: Plan) -> dict:
    """Shared memory of a block, and its barriers."""
    p, c = plan.problem, plan.config
    keys, k_copies = plgpu.SMEM((c.num_stages, c.block_kv, p.width), p.dtype, **_device.swizzled()), plan.copies
    if _keys_in_panels(plan):
        keys = _device.row_tiles((c.num_stages, p.panels, c.block_kv, PIECE), p.dtype, p.interpreted)
        k_copies *= p.panels
    smem = dict(k_smem=keys, v_smem=tiles.value_tiles(c.num_stages, c.block_kv, p))
    shared = core.scratch(p, c, smem, query_copies(plan), k_copies, _value_copies(plan))
    return shared | dict(v_landed=_device.barriers(1, _value_copies(plan)))


def _kernel(
    table, num_tiles, block_tables, sinks, q_gmem, k_gmem, v_gmem, out_gmem, lse_gmem, *, plan: Plan, v_landed, **smem
):  # fmt: skip
    role, wgs = lax.axis_index("role"), plan.config.compute_wgs
    shared = Shared.of(plan.config, **smem)
    needs_more = plan.pages or plan.problem.head_dim > 128
    memory_registers, compute_registers = (REGISTERS_MEMORY if needs_more else REGISTERS)[wgs]

    @_device.role(role == wgs, decrease_to=memory_registers)
    def _():
        _load(plan, table, num_tiles, block_tables, shared, v_landed, q_gmem, k_gmem, v_gmem)

    @_device.role(role < wgs, increase_to=compute_registers)
    def _():
        compute(plan, table, num_tiles, shared, sinks, None, out_gmem, lse_gmem)


def _load(plan: Plan, table, num_tiles, block_tables, shared: Shared, v_landed, q_gmem, k_gmem, v_gmem):
    """The memory warpgroup: a tile's queries, and its blocks of keys and values, the last block first."""
    problem, pages, block_kv = plan.problem, plan.pages, plan.config.block_kv
    tiles_of_block = num_tiles[lax.axis_index("block")]

    def sources(tile: Tile, block):
        """Where the copies of a block begin in k and in v: the page, if there are pages, and the row."""
        if not pages:
            return [((), pl.multiple_of(tile.source + block * block_kv, ROW_MULTIPLE))]
        return in_pages(plan, block, pages.of_block(block_tables, tile.source, block))

    def load_keys(tile: Tile, slot, found):
        filled, rows = shared.keys.filled.at[slot], block_kv // len(found)
        for j, (page, first) in enumerate(found):
            source, to = k_gmem.at[*page, pl.ds(first, rows), tile.kv_head], pl.ds(j * rows, rows)
            if not _keys_in_panels(plan):
                plgpu.copy_gmem_to_smem(source, shared.k.at[slot, to], filled)
                continue
            for p in range(problem.panels):
                plgpu.copy_gmem_to_smem(source.at[:, problem.columns(p)], shared.k_tma.at[slot, p, to], filled)

    def load_values(tile: Tile, slot, found, filled):
        rows, smem, smem_tiles = block_kv // len(found), shared.v.at[slot], shared.v_tma.at[slot]
        for j, (page, first) in enumerate(found):

            def source(row, num, panel, page=page, first=first):
                return v_gmem.at[*page, pl.ds(first + row, num), tile.kv_head, problem.columns(panel)]

            if plan.copies_tiles:
                tiles.copy_tiles(problem, source, smem, smem_tiles, j * rows, rows, filled)
            else:
                source = v_gmem.at[*page, pl.ds(first, rows), tile.kv_head]
                plgpu.copy_gmem_to_smem(source, smem.at[pl.ds(j * rows, rows)], filled)

    def load_clean_values(tile: Tile, slot, found, block):
        """Copies the values of a block, and zeroes the rows of other sequences or of none, which may be NaN."""
        load_values(tile, slot, found, v_landed.at[0])
        plgpu.barrier_wait(v_landed.at[0])
        first = block * block_kv
        tiles.clear(problem, shared.v_rows.at[slot], tile.first_kv - first, tile.num_kv - first)
        for _ in range(_value_copies(plan)):
            plgpu.barrier_arrive(shared.values.filled.at[slot])

    def load_tile(i, tile: Tile, steps_done, fetch):
        next_fields = fetch()

        @pl.loop(0, tile.span.steps)
        def _(step):
            block = tile.span.end - 1 - step
            found = sources(tile, block)
            slot = shared.keys.acquire(steps_done + step)
            load_keys(tile, slot, found)
            pl.when(step == 0)(lambda: load_queries(plan, shared, tile, i, q_gmem))
            slot = shared.values.acquire(steps_done + step)
            is_cut = (block * block_kv < tile.first_kv) | ((block + 1) * block_kv > tile.num_kv)
            pl.when(is_cut)(lambda: load_clean_values(tile, slot, found, block))
            pl.when(~is_cut)(lambda: load_values(tile, slot, found, shared.values.filled.at[slot]))

        return next_fields

    shared.drain(each_tile(plan, table, num_tiles, load_tile))
    drain_queries(plan, shared, tiles_of_block)


def in_pages(plan: Plan, block, ids):
    """Where the copies of a block begin, of which the pages are known: ((page,), row) each."""
    first = plan.pages.first_token(block)
    first = pl.multiple_of(first, plan.pages.tokens) if plan.pages.copies == 1 else first
    return [((page,), first) for page in ids]


def load_queries(plan: Plan, shared: Shared, tile: Tile, i, q_gmem):
    """The memory warpgroup: copies each warpgroup's queries of tile number `i`, and rows after the last query of the
    tile, as far as there are any."""
    heads = pl.ds(tile.head, plan.heads)
    for wg in range(plan.config.compute_wgs):
        pl.when(i > 0)(lambda wg=wg: plgpu.barrier_wait(shared.q_freed.at[wg]))
        first, filled = tile.token + wg * plan.wg_queries, shared.q_filled.at[wg]
        for p in range(plan.problem.panels):
            columns = plan.problem.columns(p)
            if not plan.problem.interpreted:
                source = q_gmem.at[pl.ds(first, plan.wg_queries), heads, columns]
                rows = shared.q_tma.at[wg, p, pl.ds(0, plan.wg_queries * plan.heads)]
                plgpu.copy_gmem_to_smem(source, rows.reshape(plan.wg_queries, plan.heads, PIECE), filled)
                continue
            for query in range(plan.wg_queries):  # Its shared memory has one view, in which several are no box.
                rows = shared.q_tma.at[wg, p, pl.ds(query * plan.heads, plan.heads)]
                plgpu.copy_gmem_to_smem(q_gmem.at[first + query, heads, columns], rows, filled)


def drain_queries(plan: Plan, shared: Shared, tiles_of_block):
    """The memory warpgroup, at the end of `tiles_of_block` tiles: waits until the last queries are done with."""
    for wg in range(plan.config.compute_wgs):
        pl.when(tiles_of_block > 0)(lambda wg=wg: plgpu.barrier_wait(shared.q_freed.at[wg]))


def compute(plan: Plan, table, num_tiles, shared: Shared, sinks, page_scales, out_gmem, lse_gmem):
    """A compute warpgroup: its rows of each tile. `page_scales` are what a 1 in pages of keys and of values stands for,
    of each head; None for 1."""
    wg = lax.axis_index("role")
    shared.turns.start(wg)

    def compute_tile(i, tile: Tile, steps_done, fetch):
        tile_sinks = core.row_sinks(sinks, tile.unit)
        plgpu.barrier_wait(shared.q_filled.at[wg])
        first_row = wg * plan.wg_queries * plan.heads
        scales = [scale[tile.kv_head] for scale in page_scales] if page_scales else [1.0, 1.0]
        work = steps.Work(plan.problem, plan.config, tile.span, shared, wg, first_row, steps_done, tile_sinks, *scales)
        out, lse_log2 = steps.attend(work)
        next_fields = fetch()
        shared.round_out(wg, out)
        _store(plan, tile, wg, shared.o_tma.at[wg], out_gmem)
        _device.store(lse_gmem.at[tile.number, tile.unit, wg], lse_log2 / LOG2E)
        if not shared.frees_early:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            shared.free_query(wg)
        return next_fields

    each_tile(plan, table, num_tiles, compute_tile)
    shared.turns.drain(wg)
    plgpu.wait_smem_to_gmem(0)


def _store(plan: Plan, tile: Tile, wg, o_smem, out_gmem):
    """Copies this warpgroup's results to out, but not the rows after its queries, which are the next sequence's."""
    first = wg * plan.wg_queries
    num = jnp.clip(tile.num_q - first, 0, plan.wg_queries)

    def copy(query, size: int, skip: int):
        """`size` queries, without heads that the chunk before has."""
        heads = pl.ds(tile.head + skip, plan.heads - skip)
        for p in range(plan.problem.panels):
            columns, row = plan.problem.columns(p), tile.token + first + query
            source = o_smem.at[p, pl.ds(query * plan.heads + skip, size * plan.heads - skip)]
            if plan.problem.interpreted:
                plgpu.copy_smem_to_gmem(source, out_gmem.at[row, heads, columns])
            else:
                source = source.reshape(size, plan.heads - skip, PIECE)
                plgpu.copy_smem_to_gmem(source, out_gmem.at[pl.ds(row, size), heads, columns])

    def copy_all(skip: int):
        if plan.problem.interpreted:  # Its shared memory has one view, in which several queries are no box.
            pl.loop(0, num)(lambda query: copy(query, 1, skip))
            return
        pl.when(num == plan.wg_queries)(lambda: copy(0, plan.wg_queries, skip))

        @pl.when(num < plan.wg_queries)
        def _():
            done = 0 * num
            for size in (TILE_ROWS, 1):
                if size < plan.wg_queries:
                    end = size * div(num, size)
                    pl.loop(done, end, step=size)(lambda query, size=size: copy(query, size, skip))
                    done = end

    if plan.shared_heads == 0:
        copy_all(0)
    else:
        pl.when(tile.chunk < plan.chunks - 1)(lambda: copy_all(0))
        pl.when(tile.chunk == plan.chunks - 1)(lambda: copy_all(plan.shared_heads))


@functools.partial(jax.jit, static_argnames=("plan", "params", "return_lse"))
def forward(q, k, v, block_tables, cu_seqlens_q, kv_where, sinks, *, plan: Plan, params, return_lse: bool):
    """(out, lse), lse None unless it is asked for. `kv_where`: the lengths of sequences in pages, else cu_seqlens_kv.
    `sinks` may be None."""
    operands = q, k, v, block_tables, cu_seqlens_q, kv_where, sinks
    return launch(_kernel, scratch(plan), *operands, plan=plan, params=params, return_lse=return_lse)


def launch(
    kernel, scratch_types: dict, q, k, v, block_tables, cu_seqlens_q, kv_where, sinks, *scales, plan: Plan, params,
    return_lse: bool,
):  # fmt: skip
    """`forward`, by `kernel`, once XLA has listed the tiles."""
    if plan.pages:
        k, v = map(at_least_two, (k, v))
        kv_lens = plan.pages.length(kv_where)
        kv_first = jnp.zeros_like(kv_lens)
    else:
        kv_starts = starts_of(kv_where, len(k))
        kv_first, kv_lens = kv_starts[:-1], kv_starts[1:] - kv_starts[:-1]
        v = v if plan.copies_tiles else tiles.padded(plan.problem, v, 0)
    starts_q = starts_of(cu_seqlens_q, len(q))
    listed, num_tiles, places = table(plan, starts_q, kv_first, kv_lens)
    sinks = None if sinks is None else sinks[plan.row_heads] * LOG2E
    out, lse = _host.kernel(
        functools.partial(kernel, plan=plan),
        out_type=[
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct((plan.max_tiles, plan.units, plan.config.compute_wgs, WG_ROWS), jnp.float32),
        ],
        grid=(plan.num_blocks,),
        grid_names=("block",),
        num_threads=plan.config.compute_wgs + 1,
        thread_name="role",
        scratch_types=scratch_types,
        compiler_params=params,
    )(listed, num_tiles, block_tables, sinks, q, k, v, *scales)
    return out, lse_of_rows(plan, lse, *places) if return_lse else None

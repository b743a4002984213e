# SPDX-License-Identifier: Apache-2.0
"""The kernel of `varlen_attention` and `ragged_paged_attention`: packed queries, with keys packed too or in pages.

Role table: that of `dense/kernel.py`, with the same compute role. Its operands and results lie elsewhere (`load.py`):

    memory     one, with few registers: copies queries and block after block of keys and values, which it finds at
               their rows of k and v, or page by page through the block table
    compute    two or three, each with 64 rows: as many queries as have room, with all heads that read the same keys, so
               that one token of a sequence that writes its answer loads its keys once, not once for each head

Barrier table: that of `dense/kernel.py`, and

    v_landed   copies of a block        memory, before it zeroes rows of other sequences or of none, and then arrives
                                        at v_filled in place of the copies

TMA finds rows of k and of q anywhere, but those of v, which tensor cores read by columns, only at multiples of 8. So
the blocks of a sequence begin at the multiple of 8 before its first key, and what lies before is masked.

Starts of sequences are cut at T and S, and never go back. No row is written twice, or by two blocks.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ... import _device, _host
from .. import checks
from ..cache.pages import Pages, at_least_two
from ..core import LOG2E, PIECE, TILE_ROWS, WG_ROWS, Config, Problem, Shared, div, row_sinks
from ..steps import Work, attend
from ..tiles import by_tile, lane, padded
from . import schedule as packed_tiles
from .load import Loader
from .plan import Plan, Tile
from .schedule import FIELDS


def _kernel(
    table, num_tiles, block_tables, sinks, q_gmem, k_gmem, v_gmem, out_gmem, lse_gmem, *, plan: Plan, v_landed,
    **scratch,
):  # fmt: skip
    role, wgs = lax.axis_index("role"), plan.config.compute_wgs
    shared = Shared.of(plan.problem, plan.config, **scratch)
    each_tile = functools.partial(_each_tile, plan, table, num_tiles)

    @pl.when(role == wgs)
    def _():
        plgpu.set_max_registers(plan.registers[0], action="decrease")
        loader = Loader(plan, shared, v_landed, q_gmem, k_gmem, v_gmem, block_tables)
        _load(loader, each_tile, num_tiles[lax.axis_index("block")])

    @pl.when(role < wgs)
    def _():
        plgpu.set_max_registers(plan.registers[1], action="increase")
        _compute(plan, each_tile, shared, sinks, out_gmem, lse_gmem)


def _each_tile(plan: Plan, table, num_tiles, body):
    """Calls `body(i, tile, before, fetch)` for each tile of this block, after `before` steps. `body` returns the next
    tile's fields, loaded by `fetch()`: they are in flight while it works. Returns the number of steps."""
    block = lax.axis_index("block")
    row = lambda i: jnp.minimum(i * plan.num_blocks + block, table.shape[0] - 1)
    fields = lambda i: tuple(table[row(i), field] for field in range(len(FIELDS)))

    def one(i, carry):
        found, before = carry
        tile = Tile(plan, found)
        return body(i, tile, before, lambda: fields(i + 1)), before + tile.steps

    return lax.fori_loop(0, num_tiles[block], one, (fields(0 * block), 0 * block))[1]


def _load(loader: Loader, each_tile, num_mine):
    """The memory warpgroup: a tile's queries, and its blocks of keys and values, the last block first."""
    plan, shared = loader.plan, loader.shared
    block_kv = plan.config.block_kv

    def load_tile(i, tile: Tile, before, fetch):
        next_fields = fetch()

        @pl.loop(0, tile.steps)
        def _(step):
            block = tile.end - 1 - step
            found = loader.sources(tile, block)
            slot = shared.keys.fill(before + step)
            loader.load_keys(tile, slot, found)
            pl.when(step == 0)(lambda: loader.load_queries(i, tile))
            slot = shared.values.fill(before + step)
            is_cut = (block * block_kv < tile.first_kv) | ((block + 1) * block_kv > tile.num_kv)
            pl.when(is_cut)(lambda: loader.load_clean_values(tile, slot, found, block))
            pl.when(~is_cut)(lambda: loader.load_values(tile, slot, found, shared.values.filled.at[slot]))

        return next_fields

    shared.drain(each_tile(load_tile))
    for wg in range(plan.config.compute_wgs):
        pl.when(num_mine > 0)(lambda wg=wg: plgpu.barrier_wait(shared.q_freed.at[wg]))


def _compute(plan: Plan, each_tile, shared: Shared, sinks, out_gmem, lse_gmem, work=Work):
    """A compute warpgroup: its rows of each tile."""
    wg = lax.axis_index("role")
    shared.turns.start(wg)

    def compute_tile(i, tile: Tile, before, fetch):
        tile_sinks = row_sinks(sinks, tile.unit)
        plgpu.barrier_wait(shared.q_filled.at[wg])
        first_row = wg * plan.wg_queries * plan.heads
        out, lse_log2 = attend(work(plan, tile, shared, wg, first_row, before, tile_sinks))
        next_fields = fetch()
        shared.round_out(wg, out)
        _store(plan, tile, wg, shared.o_tma.at[wg], out_gmem)
        _device.store(lse_gmem.at[tile.number, tile.unit, wg], lse_log2 / LOG2E)
        if not shared.frees_early:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            shared.free_query(wg)
        return next_fields

    each_tile(compute_tile)
    shared.turns.drain(wg)
    plgpu.wait_smem_to_gmem(0)


def _store(plan: Plan, tile: Tile, wg, o_smem, out_gmem):
    """Copy this warpgroup's results to out, but not the rows after its queries: those are the next sequence's."""
    first = wg * plan.wg_queries
    num = jnp.clip(tile.num_q - first, 0, plan.wg_queries)

    def copy(query, size: int, skip: int):
        """`size` queries, without heads that the chunk before has."""
        heads = pl.ds(tile.head + skip, plan.heads - skip)
        for p in range(plan.problem.pieces):
            columns, row = lane(plan.problem, p), tile.token + first + query
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


@functools.partial(jax.jit, static_argnames=("plan", "params", "return_lse", "kernel"))
def forward(
    q, k, v, block_tables, cu_seqlens_q, kv_where, sinks, *scales, plan: Plan, params, return_lse: bool, kernel=_kernel
):
    """(out, lse), the second of them None unless it is asked for. `kv_where`: the lengths of sequences in pages, else
    cu_seqlens_kv. `sinks` may be None."""
    c = plan.config
    if plan.pages:
        k, v = map(at_least_two, (k, v))
        kv_lens = plan.pages.length(kv_where)
        kv_first = jnp.zeros_like(kv_lens)
    else:
        kv_starts = packed_tiles.starts_of(kv_where, len(k))
        kv_first, kv_lens = kv_starts[:-1], kv_starts[1:] - kv_starts[:-1]
        v = v if plan.copies_tiles else padded(plan.problem, v, 0)
    starts_q = packed_tiles.starts_of(cu_seqlens_q, len(q))
    table, num_tiles, places = packed_tiles.table(plan, starts_q, kv_first, kv_lens)
    sinks = None if sinks is None else sinks[plan.row_heads] * LOG2E
    out, lse = _host.kernel(
        functools.partial(kernel, plan=plan),
        out_type=[
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct((plan.max_tiles, plan.units, c.compute_wgs, WG_ROWS), jnp.float32),
        ],
        grid=(plan.num_blocks,),
        grid_names=("block",),
        num_threads=c.compute_wgs + 1,
        thread_name="role",
        scratch_types=plan.scratch,
        compiler_params=params,
    )(table, num_tiles, block_tables, sinks, q, k, v, *scales)
    return out, packed_tiles.lse_of_rows(plan, lse, *places) if return_lse else None


def default_config(head_dim: int) -> Config:
    """The configuration for heads of this size. A third warpgroup for heads of 64 costs more than it gains where tiles
    are short."""
    return Config() if head_dim <= 128 else Config(block_kv=64, in_turns=False, sums_by_thread=False)


def run(op: str, q, k, v, cu_seqlens_q, kv_where, block_tables=None, *scales, sinks, how: dict, return_lse, config,
        plan_type=Plan, kernel=_kernel):  # fmt: skip
    """Run an op whose arguments have been checked: `forward`, in pages if there are `block_tables`. `how` is that of
    `checks.options`."""
    num_tokens, num_heads, head_dim = q.shape
    return_lse, sinks = checks.flag(op, "return_lse", return_lse), checks.sinks(op, sinks, num_heads)
    config = _host.require_config(op, config, Config) or default_config(head_dim)
    if 0 in (*q.shape, len(cu_seqlens_q) - 1, len(k) if block_tables is None else block_tables.shape[1]):
        results = checks.nothing_seen(q, sinks)
        return results if return_lse else results[0]
    target = _host.require_tensor_cores(op)
    problem = Problem(num_heads, k.shape[-2], head_dim, q.dtype, **how, interpreted=target.interpreted)
    pages = None if block_tables is None else Pages.of(k, block_tables, config.block_kv)
    copies_tiles = not problem.whole_pieces  # For pages, which are never padded.
    if pages is None:
        copies_tiles = by_tile(problem, len(k), num_tokens // max(len(cu_seqlens_q) - 1, 1))
    plan = plan_type(problem, num_tokens, len(cu_seqlens_q) - 1, pages, config, target.num_sms, copies_tiles)
    checks.check_smem(op, config, plan.smem_bytes, head_dim)
    params = _host.compiler_params(approx_math=True)
    q, k, v, sinks, *scales = _host.without_gradient(
        op, f"{_host.PACKAGE}.attention with segment_ids", q, k, v, sinks, *scales
    )
    with _host.own_options():  # Around the kernel too.
        out, lse = forward(
            q, k, v, block_tables, cu_seqlens_q, kv_where, sinks, *scales, plan=plan, params=params,
            return_lse=return_lse, kernel=kernel,
        )  # fmt: skip
    return (out, lse) if return_lse else out

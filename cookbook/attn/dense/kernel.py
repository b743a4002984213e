# SPDX-License-Identifier: Apache-2.0
"""The kernel of `attention`: queries, keys and values as (batch, positions, heads, head_dim).

Role table: one block per SM, which computes tile after tile of out, each some queries of one head; the warpgroups are

    memory     one, with few registers: copies queries, and block after block of keys and values into the slots of two
               rings, of the next tile too while this one is computed
    compute    two or three, with the others' registers, each with 64 of the queries. In each step s = q kᵀ of a block
               and acc + p v of the block before are started together, so that nothing lies between them on the tensor
               cores; then the CUDA cores make the next p of s: its row's maximum, exponentials, their sum. ptxas puts
               the wait for p v before the exponentials; another warpgroup's products fill that time

Barrier table:

    barrier          arrivals               who waits
    q_filled[wg]     copies of its queries  compute warpgroup, before the first product of a tile
    k_filled[slot]   copies of a block      all compute warpgroups, before s
    v_filled[slot]   copies of a block      all compute warpgroups, before p v
    q_freed[wg]      compute warpgroup      memory, before it copies the queries of the next tile
    k_freed[slot]    compute warpgroups     memory, before it refills the slot
    v_freed[slot]    compute warpgroups     memory, before it refills the slot
    turn[wg]         the warpgroup before   with `in_turns` a compute warpgroup, before its products: while one is at
                                            the tensor cores, the others are at their exponentials (ping-pong)

Blocks of keys that a mask excludes for all queries of a tile are neither loaded nor computed. Blocks that it excludes
for all queries of a warpgroup are not computed by it. Only blocks that it cuts are masked, element by element.
`plan.py` deals the tiles out; `steps.py` has the steps of a compute warpgroup, and says where to add to them.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ... import _device, _host
from .. import core, steps, tiles
from ..core import LOG2E, PIECE, REGISTERS, WG_ROWS, Shared
from .plan import Plan, Tile, each_tile


def scratch(plan: Plan) -> dict:
    """Shared memory of a block, and its barriers."""
    p, c = plan.problem, plan.config
    rows = lambda *shape: _device.row_tiles((c.num_stages, *shape), p.dtype, p.interpreted)
    values = rows(c.block_kv, PIECE) if plan.values_as_rows else tiles.value_tiles(c.num_stages, c.block_kv, p)
    smem = dict(k_smem=rows(p.panels, c.block_kv, PIECE), v_smem=values)
    v_copies = tiles.copies_of_tiles(p, c.block_kv) if plan.copies_tiles else 1
    return core.scratch(p, c, smem, q_copies=p.panels, k_copies=p.panels, v_copies=v_copies)


def _kernel(table, q_gmem, k_gmem, v_gmem, segment_tables, sinks, out_gmem, lse_gmem, *, plan: Plan, **smem):
    role, wgs = lax.axis_index("role"), plan.config.compute_wgs
    shared = Shared.of(plan.config, **smem)
    memory_registers, compute_registers = REGISTERS[wgs]

    @_device.role(role == wgs, decrease_to=memory_registers)
    def _():
        _load(plan, table, segment_tables, shared, q_gmem, k_gmem, v_gmem)

    @_device.role(role < wgs, increase_to=compute_registers)
    def _():
        _compute(plan, table, segment_tables, sinks, shared, out_gmem, lse_gmem)


def _load(plan: Plan, table, segment_tables: dict, shared: Shared, q_gmem, k_gmem, v_gmem):
    """The memory warpgroup: a tile's queries, and its blocks of keys and values, the last block first."""
    problem, c = plan.problem, plan.config

    def load_values(tile: Tile, first, slot):
        filled = shared.values.filled.at[slot]
        rows = lambda start, num, *columns: v_gmem.at[tile.batch, pl.ds(start, num), tile.kv_head, *columns]
        if plan.values_as_rows:
            plgpu.copy_gmem_to_smem(rows(first, c.block_kv, problem.columns(0)), shared.v_tma.at[slot], filled)
        elif plan.copies_tiles:
            source = lambda row, num, p: rows(first + row, num, problem.columns(p))
            tiles.copy_tiles(problem, source, shared.v.at[slot], shared.v_tma.at[slot], 0, c.block_kv, filled)
        else:
            plgpu.copy_gmem_to_smem(rows(first, c.block_kv), shared.v.at[slot], filled)

    def load_tile(i, tile: Tile, steps_done):
        @pl.loop(0, tile.span.steps)
        def _(step):
            first = (tile.span.end - 1 - step) * c.block_kv
            load_keys(plan, shared, tile, first, shared.keys.acquire(steps_done + step), k_gmem)
            pl.when(step == 0)(lambda: load_queries(plan, shared, tile, i, q_gmem))
            load_values(tile, first, shared.values.acquire(steps_done + step))

    shared.drain(each_tile(plan, table, segment_tables, load_tile))
    for wg in range(c.compute_wgs):
        plgpu.barrier_wait(shared.q_freed.at[wg])


def load_keys(plan: Plan, shared: Shared, tile: Tile, first, slot, k_gmem):
    """The memory warpgroup: starts the copies of a block of keys, from position `first` on."""
    for p in range(plan.problem.panels):
        columns = plan.problem.columns(p)
        source = k_gmem.at[tile.batch, pl.ds(first, plan.config.block_kv), tile.kv_head, columns]
        plgpu.copy_gmem_to_smem(source, shared.k_tma.at[slot, p], shared.keys.filled.at[slot])


def load_queries(plan: Plan, shared: Shared, tile: Tile, i, q_gmem):
    """The memory warpgroup: starts the copies of the queries of tile number `i`, once those before have been used."""
    for wg in range(plan.config.compute_wgs):
        pl.when(i > 0)(lambda wg=wg: plgpu.barrier_wait(shared.q_freed.at[wg]))
        rows = pl.ds(tile.first_q + wg * WG_ROWS, WG_ROWS)
        for p in range(plan.problem.panels):
            source = q_gmem.at[tile.batch, rows, tile.head, plan.problem.columns(p)]
            plgpu.copy_gmem_to_smem(source, shared.q_tma.at[wg, p], shared.q_filled.at[wg])


def _compute(plan: Plan, table, segment_tables: dict, sinks, shared: Shared, out_gmem, lse_gmem):
    """A compute warpgroup: its queries of each tile."""
    problem, wg = plan.problem, lax.axis_index("role")
    shared.turns.start(wg)

    def compute_tile(i, tile: Tile, steps_done):
        first_q = tile.first_q + wg * WG_ROWS
        tile_sinks = core.row_sinks(sinks, tile.head)
        plgpu.barrier_wait(shared.q_filled.at[wg])
        out, lse_log2 = steps.attend(
            steps.Work(problem, plan.config, tile.span, shared, wg, first_q, steps_done, tile_sinks)
        )
        shared.round_out(wg, out)
        for p in range(problem.panels):
            target = out_gmem.at[tile.batch, pl.ds(first_q, WG_ROWS), tile.head, problem.columns(p)]
            plgpu.copy_smem_to_gmem(shared.o_tma.at[wg].at[p], target)
        _device.store(lse_gmem.at[tile.batch, tile.head, pl.ds(first_q, WG_ROWS)], lse_log2 / LOG2E)
        if not shared.frees_early:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            shared.free_query(wg)

    each_tile(plan, table, segment_tables, compute_tile)
    shared.turns.drain(wg)
    plgpu.wait_smem_to_gmem(0)


def _kept_apart(key, value):
    """Values without those that are not finite, which would reach all queries of a tile: even 0 times one is NaN. Their
    keys become NaN, which reaches the queries that see them alone."""
    finite = jnp.isfinite(value)
    return jnp.where(finite.all(axis=3, keepdims=True), key, jnp.nan), jnp.where(finite, value, 0)


@functools.partial(jax.jit, static_argnames=("plan", "num_sms", "params", "return_lse"))
def forward(query, key, value, sinks, segments, *, plan: Plan, num_sms: int, params, return_lse: bool):
    """(out, lse), lse as (batch, heads, positions), or None unless it is asked for. `sinks` may be None; `segments` is
    () or (segment_ids, kv_segment_ids)."""
    segment_tables = core.make_segment_tables(*segments, plan.config.rows, plan.config.block_kv) if segments else {}
    key, value = _kept_apart(key, value) if segments else (key, value)
    value = value if plan.copies_tiles or plan.values_as_rows else tiles.padded(plan.problem, value, 1)
    sinks = None if sinks is None else jnp.broadcast_to(sinks[:, None] * LOG2E, (len(sinks), WG_ROWS))
    operands = query, key, value, segment_tables, sinks
    out, lse = launch(_kernel, scratch(plan), plan, num_sms, params, query.dtype, *operands)
    return out, lse[:, :, : plan.num_q] if return_lse else None


def launch(kernel, scratch_types: dict, plan: Plan, num_sms: int, params, out_dtype, query, *others):
    """(out, lse) of all rows of all tiles, which `kernel` computes."""
    table = plan.schedule(num_sms)
    lse_shape = plan.batch, plan.problem.num_heads, plan.num_q_blocks * plan.config.rows
    return _host.kernel(
        functools.partial(kernel, plan=plan),
        out_type=[jax.ShapeDtypeStruct(query.shape, out_dtype), jax.ShapeDtypeStruct(lse_shape, jnp.float32)],
        grid=(table.shape[0],),
        grid_names=("block",),
        num_threads=plan.config.compute_wgs + 1,
        thread_name="role",
        scratch_types=scratch_types,
        compiler_params=params,
    )(jnp.asarray(table), query, *others)

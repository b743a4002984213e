# SPDX-License-Identifier: Apache-2.0
"""The kernel of `attention`: queries, keys and values as (batch, positions, heads, head_dim).

Role table: one block a SM, which computes tile after tile of out, each some queries of one head; the warpgroups are

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
                                            the tensor cores, the others are at their exponentials

Blocks of keys that a mask excludes for all queries of a tile are neither loaded nor computed, those that it excludes
for a warpgroup's are not computed; only those that it cuts are masked, element by element. Tiles are dealt out
beforehand, the long ones of a causal mask first, so that all SMs end at about the same time, and so that those computed
at the same time share keys in the L2 cache.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ... import _device, _host
from .. import core, tiles
from ..core import LOG2E, PIECE, REGISTERS, WG_ROWS, Blocks, Config, Cuts, Problem, Shared, div, rem
from ..steps import Work, attend
from . import schedule


@dataclasses.dataclass(frozen=True)
class Plan:
    """Statics of the kernel."""

    problem: Problem
    batch: int
    num_q: int
    num_kv: int
    has_segments: bool
    config: Config
    # Whether values are copied tile by tile. TMA cuts blocks of them off at the edges of whole tiles alone.
    copies_tiles: bool = dataclasses.field(default=False, kw_only=True)

    @property
    def blocks(self) -> Blocks:
        return Blocks(self.num_kv, self.config.block_kv, self.problem.left, self.problem.right)

    @property
    def num_q_blocks(self) -> int:
        return pl.cdiv(self.num_q, self.config.rows)

    @property
    def values_as_rows(self) -> bool:
        """Whether values are copied as keys are: rows of a single piece, which TMA cuts off at any edge."""
        return self.problem.pieces == 1

    @property
    def cuts(self) -> Cuts:
        left, right, segments = self.problem.left, self.problem.right, self.has_segments
        return Cuts(
            any=self.problem.has_window or segments or self.num_kv % self.config.block_kv != 0,
            first=left is not None or segments,
            last=right not in (None, 0),
            all=segments,
        )

    @property
    def scratch(self) -> dict:
        p, c = self.problem, self.config
        rows = lambda *shape: core.row_tiles((c.num_stages, *shape), p.dtype, p.interpreted)
        values = rows(c.block_kv, PIECE) if self.values_as_rows else tiles.value_tiles(c.num_stages, c.block_kv, p)
        smem = dict(k_smem=rows(p.pieces, c.block_kv, PIECE), v_smem=values)
        v_copies = tiles.copies_of_tiles(p, c.block_kv) if self.copies_tiles else 1
        return core.scratch(p, c, smem, q_copies=p.pieces, k_copies=p.pieces, v_copies=v_copies)

    @property
    def steps(self) -> tuple[int, ...]:
        """Steps of each tile of a head."""
        first, end = self.blocks.seen(np.arange(self.num_q_blocks) * self.config.rows, self.config.rows)
        return tuple(map(int, end - first))

    def time(self, num_sms: int) -> float:
        """How long the tiles take, in steps."""
        return schedule.time(self.steps, self.batch * self.problem.num_heads, num_sms)

    def schedule(self, num_sms: int) -> np.ndarray:
        return schedule.table(self.steps, self.batch * self.problem.num_heads, num_sms)[1]


class Tile:
    """Some queries of a head, and the blocks of keys that they see."""

    def __init__(self, plan: Plan, number, masks: dict):
        head, q_block = div(number, plan.num_q_blocks), rem(number, plan.num_q_blocks)
        self.batch, self.head = div(head, plan.problem.num_heads), rem(head, plan.problem.num_heads)
        self.kv_head = div(self.head, plan.problem.group)
        self.first_q, self.blocks, self.masks = q_block * plan.config.rows, plan.blocks, masks
        first, end = self.blocks.seen(self.first_q, plan.config.rows)
        if plan.has_segments:
            first = jnp.maximum(first, masks["first"][self.batch, q_block])
            end = jnp.minimum(end, masks["end"][self.batch, q_block])
        self.end = jnp.maximum(end, 1)
        self.first = jnp.minimum(first, self.end - 1)  # At least one, if only to find that no key is seen.
        self.steps = self.end - self.first

    def mask(self, first_row, block):
        """Which keys of a block the queries of the 64 rows from `first_row` on see."""
        seen, shape = self.blocks.mask_of(first_row, block), self.blocks.shape
        if not self.masks:
            return seen
        return seen & core.same_segment(self.masks, self.batch, first_row, block * shape[1], shape)


def _kernel(table, q_gmem, k_gmem, v_gmem, masks, sinks, out_gmem, lse_gmem, *, plan: Plan, **scratch):
    role, wgs = lax.axis_index("role"), plan.config.compute_wgs
    shared = Shared.of(plan.problem, plan.config, **scratch)

    @pl.when(role == wgs)
    def _():
        plgpu.set_max_registers(REGISTERS[wgs][0], action="decrease")
        _load(plan, table, masks, shared, q_gmem, k_gmem, v_gmem)

    @pl.when(role < wgs)
    def _():
        plgpu.set_max_registers(REGISTERS[wgs][1], action="increase")
        _compute(plan, table, masks, sinks, shared, out_gmem, lse_gmem)


def _each_tile(plan: Plan, table, masks: dict, body):
    """Calls `body(i, tile, before)` for each tile of this block, after `before` steps. Returns the steps of all."""
    block = lax.axis_index("block")

    def one(i, carry):
        number, before = carry
        tile = Tile(plan, number, masks)
        number = table[block, i + 2]  # In flight meanwhile.
        body(i, tile, before)
        return number, before + tile.steps

    return lax.fori_loop(0, table[block, 0], one, (table[block, 1], jnp.int32(0)))[1]


def _load_values(plan: Plan, v_gmem, shared: Shared, tile: Tile, first, slot):
    """Starts the copies of a block of values, from position `first` on."""
    rows, filled = plan.config.block_kv, shared.values.filled.at[slot]
    lane = functools.partial(tiles.lane, plan.problem)
    if plan.values_as_rows:
        source = v_gmem.at[tile.batch, pl.ds(first, rows), tile.kv_head, lane(0)]
        plgpu.copy_gmem_to_smem(source, shared.v_tma.at[slot], filled)
        return
    if not plan.copies_tiles:
        source = v_gmem.at[tile.batch, pl.ds(first, rows), tile.kv_head]
        plgpu.copy_gmem_to_smem(source, shared.v.at[slot], filled)
        return
    source = lambda row, num, p: v_gmem.at[tile.batch, pl.ds(first + row, num), tile.kv_head, lane(p)]
    tiles.copy_tiles(plan.problem, source, shared.v.at[slot], shared.v_tma.at[slot], 0, rows, filled)


def _load(plan: Plan, table, masks: dict, shared: Shared, q_gmem, k_gmem, v_gmem, load_values=_load_values):
    """The memory warpgroup: a tile's queries, and its blocks of keys and values, the last block first."""
    c, pieces, lane = plan.config, range(plan.problem.pieces), functools.partial(tiles.lane, plan.problem)

    def load_queries(i, tile: Tile):
        for wg in range(c.compute_wgs):
            pl.when(i > 0)(lambda wg=wg: plgpu.barrier_wait(shared.q_freed.at[wg]))
            rows = pl.ds(tile.first_q + wg * WG_ROWS, WG_ROWS)
            for p in pieces:
                source = q_gmem.at[tile.batch, rows, tile.head, lane(p)]
                plgpu.copy_gmem_to_smem(source, shared.q_tma.at[wg, p], shared.q_filled.at[wg])

    def load_tile(i, tile: Tile, before):
        @pl.loop(0, tile.steps)
        def _(step):
            first = (tile.end - 1 - step) * c.block_kv
            rows = pl.ds(first, c.block_kv)
            slot = shared.keys.fill(before + step)
            for p in pieces:
                source = k_gmem.at[tile.batch, rows, tile.kv_head, lane(p)]
                plgpu.copy_gmem_to_smem(source, shared.k_tma.at[slot, p], shared.keys.filled.at[slot])
            pl.when(step == 0)(lambda: load_queries(i, tile))
            load_values(plan, v_gmem, shared, tile, first, shared.values.fill(before + step))

    shared.drain(_each_tile(plan, table, masks, load_tile))
    for wg in range(c.compute_wgs):
        plgpu.barrier_wait(shared.q_freed.at[wg])


def _compute(
    plan: Plan, table, masks: dict, sinks, shared: Shared, out_gmem, lse_gmem, attend=attend, work=Work
):  # fmt: skip
    """A compute warpgroup: its queries of each tile."""
    wg = lax.axis_index("role")
    shared.turns.start(wg)

    def compute_tile(i, tile: Tile, before):
        first_q = tile.first_q + wg * WG_ROWS
        tile_sinks = core.row_sinks(sinks, tile.head)
        plgpu.barrier_wait(shared.q_filled.at[wg])
        out, lse_log2 = attend(work(plan, tile, shared, wg, first_q, before, tile_sinks))
        shared.round_out(wg, out)
        _store(plan, tile, shared.o_tma.at[wg], first_q, out_gmem)
        _device.store(lse_gmem.at[tile.batch, tile.head, pl.ds(first_q, WG_ROWS)], lse_log2 / LOG2E)
        if not shared.frees_early:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            shared.free_query(wg)

    _each_tile(plan, table, masks, compute_tile)
    shared.turns.drain(wg)
    plgpu.wait_smem_to_gmem(0)


def _store(plan: Plan, tile: Tile, o_smem, first_q, out_gmem):
    """Starts the copies of this warpgroup's results to out."""
    for p in range(o_smem.shape[0]):
        target = out_gmem.at[tile.batch, pl.ds(first_q, WG_ROWS), tile.head, tiles.lane(plan.problem, p, PIECE)]
        plgpu.copy_smem_to_gmem(o_smem.at[p], target)


def _kept_apart(key, value):
    """Values without those that are not finite, which would reach all queries of a tile: even 0 times one is NaN. Their
    keys become NaN, which reaches the queries that see them alone."""
    finite = jnp.isfinite(value)
    return jnp.where(finite.all(axis=3, keepdims=True), key, jnp.nan), jnp.where(finite, value, 0)


@functools.partial(jax.jit, static_argnames=("plan", "num_sms", "params", "return_lse"))
def forward(query, key, value, sinks, segments, *, plan: Plan, num_sms: int, params, return_lse: bool):
    """(out, lse), lse as (batch, heads, positions), or None unless it is asked for. `sinks` may be None; `segments` is
    () or (segment_ids, kv_segment_ids)."""
    c, table = plan.config, plan.schedule(num_sms)
    masks = core.segment_masks(*segments, c.rows, c.block_kv) if segments else {}
    key, value = _kept_apart(key, value) if segments else (key, value)
    value = value if plan.copies_tiles or plan.values_as_rows else tiles.padded(plan.problem, value, 1)
    sinks = None if sinks is None else jnp.broadcast_to(sinks[:, None] * LOG2E, (len(sinks), WG_ROWS))
    lse_shape = (plan.batch, plan.problem.num_heads, plan.num_q_blocks * c.rows)
    out, lse = _host.kernel(
        functools.partial(_kernel, plan=plan),
        out_type=[
            jax.ShapeDtypeStruct(query.shape, query.dtype), jax.ShapeDtypeStruct(lse_shape, jnp.float32),
        ],
        grid=(table.shape[0],),
        grid_names=("block",),
        num_threads=c.compute_wgs + 1,
        thread_name="role",
        scratch_types=plan.scratch,
        compiler_params=params,
    )(jnp.asarray(table), query, key, value, masks, sinks)  # fmt: skip
    return out, lse[:, :, : plan.num_q] if return_lse else None

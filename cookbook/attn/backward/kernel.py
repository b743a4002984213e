# SPDX-License-Identifier: Apache-2.0
"""The two kernels of attention's backward pass, one for dq and one for dk and dv. Chapter 12 begins with such two.

    s = q kᵀ,   dp = do vᵀ,   p = exp2(s scale_log2 - lse),   ds = p (dp - delta)

Role table: a block for each tile.

    memory     one, with few registers: copies what a tile keeps, then step by step what it goes through
    compute    two, or three for dq of heads of 64. For dq each keeps 64 queries and do, and goes through blocks of keys
               and values, with p and ds in registers; lse and delta are one number for each row. For dk and dv each
               keeps 64 keys and values, and goes through blocks of queries of the heads of its group, or of one of its
               `parts`, with pᵀ and dsᵀ in registers: keys along rows, queries along columns, so lse and delta are one
               number for each column. With heads over 128 both have the same 64 rows, and each half of the columns of
               the sums

Barrier table:

    barrier        arrivals               who waits
    kept_filled    copies of what a tile  compute warpgroups, before the first product
                   keeps
    filled[slot]   copies of a step       compute warpgroups, before its products
    freed[slot]    compute warpgroups     memory, before it refills the slot
    done           compute warpgroups     each other where both read all that the tile kept: before their sums take its
                                          place; where they have the same rows, also before these are copied out

The sums of dq are still in flight when the products of the next step start: a slot is given back one step later.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ... import _device, _host
from ..._device import COLUMNS, ROWS, Ref, role, spread
from .. import core
from ..core import REGISTERS, WG_ROWS
from .plan import Buffers, Operand, Plan, Tile


def _dq(
    q_gmem, do_gmem, k_gmem, v_gmem, lse_gmem, delta_gmem, segment_tables, dq_gmem, *, plan: Plan, done=None,
    weights_smem=None, **smem,
):  # fmt: skip
    """A tile of queries goes through the blocks of keys: dq += ds k."""
    problem, wg, tile = plan.problem, lax.axis_index("role"), Tile(plan, segment_tables)
    buffers = Buffers.of(plan, **smem)
    (q, do), (k, v), ring = buffers.kept, buffers.streamed, buffers.ring
    memory_registers, compute_registers = REGISTERS[plan.compute_wgs]

    @role(wg == plan.compute_wgs, decrease_to=memory_registers)
    def memory():
        load(tile, buffers, kept=[q_gmem, do_gmem], streamed=[k_gmem, v_gmem], vectors=[])

    @role(wg < plan.compute_wgs, increase_to=compute_registers)
    def compute():
        rows, columns = tile.share(wg)
        plgpu.barrier_wait(buffers.kept_filled)
        first_row = tile.row + rows.start
        queries = tile.batch, tile.head, pl.ds(first_row, WG_ROWS)
        lse, delta = (_device.load(gmem.at[queries], ROWS) for gmem in (lse_gmem, delta_gmem))
        phases = tile.phases(first_row)

        def dq_step(dq_ref, s_ref, dp_ref, count, slot, block, masked):
            start_product(plan, s_ref, q[:, rows], k, slot)  # s = q kᵀ
            start_product(plan, dp_ref, do[:, rows], v, slot)  # dp = do vᵀ
            s = plgpu.wgmma_accumulator_load(s_ref, wait_n=len(plan.kept_columns))  # Also waits for dq so far.
            if plan.runs_ahead:
                pl.when(count > 0)(lambda: ring.release(count - 1))  # The product of the step before has ended.
            s, scale_log2 = problem.scored(s)
            p = jnp.exp2(s * scale_log2 - spread(lse, 0, s.shape))
            p = jnp.where(tile.mask(first_row, block), p, 0.0) if masked else p
            dp = plgpu.wgmma_accumulator_load(dp_ref, wait_n=0)
            ds = p * (dp - spread(delta, 0, s.shape))
            ds = ds if problem.soft_cap is None else ds * (1.0 - s * s)
            start_accumulate(dq_ref, ds.astype(problem.dtype), k[slot, :, columns], weights_smem, wg)  # dq += ds k
            if not plan.runs_ahead:
                plgpu.wgmma_wait(0)
                ring.release(count)

        def all_steps(dq_ref):
            each_step(tile, ring, phases, functools.partial(dq_step, dq_ref))
            dq = dq_ref[...]  # Waits for the last product.
            if plan.runs_ahead:
                pl.when(tile.steps > 0)(lambda: ring.release(tile.steps - 1))
            return dq

        dq = pl.run_scoped(all_steps, plgpu.ACC((WG_ROWS, plan.sum_columns), jnp.float32))
        store(tile, wg, done, (dq, problem.scale, q, dq_gmem))


def _dkdv(
    k_gmem, v_gmem, q_gmem, do_gmem, lse_gmem, delta_gmem, segment_tables, dk_gmem, dv_gmem, *, plan: Plan, done=None,
    weights_smem=None, **smem,
):  # fmt: skip
    """A tile of keys goes through the blocks of queries, with all transposed: dv += pᵀ do, dk += dsᵀ q."""
    problem, wg, tile = plan.problem, lax.axis_index("role"), Tile(plan, segment_tables)
    buffers = Buffers.of(plan, **smem)
    (k, v), (q, do), (lse, delta), ring = buffers.kept, buffers.streamed, buffers.vectors, buffers.ring
    memory_registers, compute_registers = REGISTERS[plan.compute_wgs]

    @role(wg == plan.compute_wgs, decrease_to=memory_registers)
    def memory():
        load(tile, buffers, kept=[k_gmem, v_gmem], streamed=[q_gmem, do_gmem], vectors=[lse_gmem, delta_gmem])

    @role(wg < plan.compute_wgs, increase_to=compute_registers)
    def compute():
        rows, columns = tile.share(wg)
        plgpu.barrier_wait(buffers.kept_filled)
        first_row = tile.row + rows.start
        phases = tile.phases(first_row)

        def dkdv_step(dk_ref, dv_ref, s_ref, dp_ref, count, slot, block, masked):
            start_product(plan, s_ref, k[:, rows], q, slot)  # sᵀ = k qᵀ
            start_product(plan, dp_ref, v[:, rows], do, slot)  # dpᵀ = v doᵀ
            s, scale_log2 = problem.scored(plgpu.wgmma_accumulator_load(s_ref, wait_n=len(plan.kept_columns)))
            p = jnp.exp2(s * scale_log2 - spread(_device.load(lse[slot], COLUMNS), 1, s.shape))
            p = jnp.where(tile.mask(first_row, block), p, 0.0) if masked else p
            start_accumulate(dv_ref, p.astype(problem.dtype), do[slot, :, columns], weights_smem, wg)  # dv += pᵀ do
            dp = plgpu.wgmma_accumulator_load(dp_ref, wait_n=1)  # dv's may still run.
            ds = p * (dp - spread(_device.load(delta[slot], COLUMNS), 1, s.shape))
            ds = ds if problem.soft_cap is None else ds * (1.0 - s * s)
            start_accumulate(dk_ref, ds.astype(problem.dtype), q[slot, :, columns], weights_smem, wg)  # dk += dsᵀ q
            plgpu.wgmma_wait(0)
            ring.release(count)

        def all_steps(dk_ref, dv_ref):
            each_step(tile, ring, phases, functools.partial(dkdv_step, dk_ref, dv_ref))
            return dk_ref[...], dv_ref[...]

        dk, dv = pl.run_scoped(all_steps, *[plgpu.ACC((WG_ROWS, plan.sum_columns), jnp.float32)] * 2)
        store(tile, wg, done, (dk, problem.scale, k, dk_gmem), (dv, 1.0, v, dv_gmem))


# Shared by all backward kernels --------------------------------------------------------------------------------------


def load(tile: Tile, buffers: Buffers, *, kept: list[Ref], streamed: list[Ref], vectors: list[Ref]):
    """The memory warpgroup: copies what the tile keeps, then step by step what it goes through."""
    plan, ring = tile.plan, buffers.ring
    for gmem, smem in zip(kept, buffers.kept, strict=True):
        for p, columns in enumerate(plan.kept_columns):
            head = _device.div(tile.head, plan.parts)
            source = gmem.at[tile.batch, pl.ds(tile.row, plan.rows), head, columns]
            plgpu.copy_gmem_to_smem(source, smem.tma(p), buffers.kept_filled)

    @pl.loop(0, tile.steps)
    def _(count):
        head, block = tile.step(count)
        slot = ring.acquire(count)
        filled = ring.filled.at[slot]
        for gmem, smem in zip(streamed, buffers.streamed, strict=True):
            plgpu.copy_gmem_to_smem(gmem.at[tile.batch, block, head], smem.tma(slot), filled)
        for gmem, smem in zip(vectors, buffers.vectors, strict=True):
            plgpu.copy_gmem_to_smem(gmem.at[tile.batch, head, block], smem.tma(slot), filled)

    ring.drain(tile.steps)


def each_step(tile: Tile, ring: _device.Ring, phases: list, step):
    """Calls `step(s_ref, dp_ref, count, slot, block, masked)` for each block, once it has arrived, with accumulators
    for its products s and dp."""
    products = [plgpu.ACC((WG_ROWS, tile.plan.block), jnp.float32)] * 2

    def one_head(i, _):
        for first, end, masked in phases:

            def one_block(block, _, masked=masked):
                count = i * tile.blocks + block - tile.first
                at = dict(count=count, slot=ring.wait(count), block=block, masked=masked)
                pl.run_scoped(functools.partial(step, **at), *products)

            lax.fori_loop(first, end, one_block, None)

    lax.fori_loop(0, tile.heads, one_head, None) if tile.heads > 1 else one_head(0, None)


def start_product(plan: Plan, acc_ref, kept, block: Operand, slot):
    """Starts `acc_ref` = kept blockᵀ, with the block in a slot: a product for each panel of a head."""
    for p, columns in enumerate(plan.kept_columns):
        plgpu.wgmma(acc_ref, kept.at[p], block[slot, :, columns].T)


def start_accumulate(acc_ref, x, y, x_smem, wg):
    """Starts `acc_ref` += x y, with x from registers, or in JAX's interpreter from `x_smem`."""
    if x_smem is not None:
        x_smem[wg] = x
        plgpu.commit_smem()
        x = x_smem.at[wg]
    plgpu.wgmma(acc_ref, x, y)


def store(tile: Tile, wg, done, *sums):
    """Writes a compute warpgroup's sums. Each comes with its scale, the operand that the tile kept, which gives it its
    place in shared memory on the way out, and the result in memory."""
    plan, (rows, columns) = tile.plan, tile.share(wg)
    width = min(plan.kept_width, plan.sum_columns)

    def sync_compute_wgs():
        plgpu.barrier_arrive(done)
        plgpu.barrier_wait(done)

    if done is not None:
        sync_compute_wgs()  # The other warpgroup may still read.
    for total, scale, kept, _ in sums:
        total, place = (total * scale).astype(plan.problem.dtype), kept[:, rows]
        for column in range(0, plan.sum_columns, width):
            place[plan.kept_at(columns.start + column, width)] = total[:, column : column + width]
    plgpu.commit_smem()
    if plan.splits_heads:
        sync_compute_wgs()  # Both halves of the columns are there.

    @pl.when((wg == 0) | (not plan.splits_heads))
    def _():
        for *_, kept, out_gmem in sums:
            for p, columns in enumerate(plan.kept_columns):
                target = out_gmem.at[tile.batch, pl.ds(tile.row + rows.start, WG_ROWS), tile.head, columns]
                plgpu.copy_smem_to_gmem(kept.tma(p, rows), target)

    plgpu.wait_smem_to_gmem(0)


def launch(plan: Plan, params, kept, streamed, vectors, segments):
    """[dq], or [dk, dv] of each part, with as many rows and columns as the operands that are kept."""
    return run(_dq if plan.for_query else _dkdv, plan.scratch, plan, params, kept, streamed, vectors, segments)


def run(kernel, scratch: dict, plan: Plan, params, kept, streamed, vectors, segments, *refs):
    """The results of `kernel`, which has a block for each tile."""
    segment_tables = core.make_segment_tables(*segments, plan.rows, plan.block) if segments else {}
    grid = dict(batch_index=plan.batch, head_index=plan.num_heads, tile=plan.num_tiles)
    order = ("tile", "batch_index", "head_index") if plan.heaviest_first else tuple(grid)
    (batch, rows, _, columns), dtype = kept[0].shape, plan.problem.dtype
    if plan.problem.interpreted:  # JAX's interpreter multiplies from shared memory alone.
        scratch = scratch | dict(weights_smem=plgpu.SMEM((plan.compute_wgs, WG_ROWS, plan.block), dtype))
    return _host.kernel(
        functools.partial(kernel, plan=plan),
        out_type=[jax.ShapeDtypeStruct((batch, rows, plan.num_heads, columns), dtype)] * (1 if plan.for_query else 2),
        grid=tuple(grid[name] for name in order),
        grid_names=order,
        num_threads=plan.compute_wgs + 1,
        thread_name="role",
        scratch_types=scratch,
        compiler_params=params,
    )(*kept, *streamed, *vectors, segment_tables, *refs)

# SPDX-License-Identifier: Apache-2.0
"""The two kernels of attention's backward pass, one for dq and one for dk and dv, as chapter 12 builds them.

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
    resident       copies of what a tile  compute warpgroups, before the first product
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
from ..._device import COLUMNS, ROWS, role, spread
from .. import core
from ..core import REGISTERS, WG_ROWS
from .plan import Half, Plan, Tile


def _dq(
    q_gmem, do_gmem, k_gmem, v_gmem, lse_gmem, delta_gmem, masks, dq_gmem, *, plan: Plan, kept_smem, ring_smem,
    resident_filled, filled, freed, done=None, weights_smem=None,
):  # fmt: skip
    """A tile of queries goes through the blocks of keys: p = exp2(s unit - lse), ds = p (dp - delta), dq += ds k."""
    problem, wg, tile = plan.problem, lax.axis_index("role"), Tile(plan, masks)
    (q, do), (k, v) = plan.operands(kept_smem, plan.kept_width), plan.operands(ring_smem, problem.head_dim)
    ring = _device.Ring(filled, freed, plan.num_stages)
    memory_registers, compute_registers = REGISTERS[plan.compute_wgs]

    @role(wg == plan.compute_wgs, decrease_to=memory_registers)
    def memory():
        load(tile, [(q_gmem, q), (do_gmem, do)], resident_filled, [(k_gmem, k), (v_gmem, v)], [], ring)

    @role(wg < plan.compute_wgs, increase_to=compute_registers)
    def compute():
        rows, columns = tile.share(wg)
        plgpu.barrier_wait(resident_filled)
        first_row = tile.row + rows.start
        queries = tile.batch, tile.head, pl.ds(first_row, WG_ROWS)
        lse, delta = (_device.load(gmem.at[queries], ROWS) for gmem in (lse_gmem, delta_gmem))
        phases = tile.phases(first_row)

        def step(dq_ref, s_ref, dp_ref, count, slot, block, masked):
            start_product(plan, s_ref, q[:, rows], k, slot)  # s = q kᵀ
            start_product(plan, dp_ref, do[:, rows], v, slot)  # dp = do vᵀ
            s = plgpu.wgmma_accumulator_load(s_ref, wait_n=len(plan.kept_columns))  # Also waits for dq so far.
            if plan.runs_ahead:
                pl.when(count > 0)(lambda: ring.release(count - 1))  # The product of the step before has ended.
            s = problem.capped(s)
            p = jnp.exp2(s * problem.unit - spread(lse, 0, s.shape))
            p = jnp.where(tile.mask(first_row, block), p, 0.0) if masked else p
            dp = plgpu.wgmma_accumulator_load(dp_ref, wait_n=0)
            ds = p * (dp - spread(delta, 0, s.shape))
            ds = ds if problem.soft_cap is None else ds * (1.0 - s * s)
            add_product(dq_ref, ds.astype(problem.dtype), k[slot, :, columns], weights_smem, wg)
            if not plan.runs_ahead:
                plgpu.wgmma_wait(0)
                ring.release(count)

        def all_steps(dq_ref):
            each_step(tile, ring, phases, functools.partial(step, dq_ref))
            dq = dq_ref[...]  # Waits for the last product.
            if plan.runs_ahead:
                pl.when(tile.steps > 0)(lambda: ring.release(tile.steps - 1))
            return dq

        dq = pl.run_scoped(all_steps, plgpu.ACC((WG_ROWS, plan.sum_columns), jnp.float32))
        store(tile, wg, done, (dq, problem.scale, q, dq_gmem))


def _dkdv(
    k_gmem, v_gmem, q_gmem, do_gmem, lse_gmem, delta_gmem, masks, dk_gmem, dv_gmem, *, plan: Plan, kept_smem, ring_smem,
    vectors_smem, resident_filled, filled, freed, done=None, weights_smem=None,
):  # fmt: skip
    """A tile of keys goes through the blocks of queries. All is transposed: dv += pᵀ do, dk += dsᵀ q."""
    problem, wg, tile = plan.problem, lax.axis_index("role"), Tile(plan, masks)
    (k, v), (q, do) = plan.operands(kept_smem, plan.kept_width), plan.operands(ring_smem, problem.head_dim)
    lse, delta = (Half(i, vectors_smem, vectors_smem) for i in range(2))
    ring = _device.Ring(filled, freed, plan.num_stages)
    memory_registers, compute_registers = REGISTERS[plan.compute_wgs]

    @role(wg == plan.compute_wgs, decrease_to=memory_registers)
    def memory():
        vectors = [(lse_gmem, lse), (delta_gmem, delta)]
        load(tile, [(k_gmem, k), (v_gmem, v)], resident_filled, [(q_gmem, q), (do_gmem, do)], vectors, ring)

    @role(wg < plan.compute_wgs, increase_to=compute_registers)
    def compute():
        rows, columns = tile.share(wg)
        plgpu.barrier_wait(resident_filled)
        first_row = tile.row + rows.start
        phases = tile.phases(first_row)

        def step(dk_ref, dv_ref, s_ref, dp_ref, count, slot, block, masked):
            start_product(plan, s_ref, k[:, rows], q, slot)  # sᵀ = k qᵀ
            start_product(plan, dp_ref, v[:, rows], do, slot)  # dpᵀ = v doᵀ
            s = problem.capped(plgpu.wgmma_accumulator_load(s_ref, wait_n=len(plan.kept_columns)))
            p = jnp.exp2(s * problem.unit - spread(_device.load(lse[slot], COLUMNS), 1, s.shape))
            p = jnp.where(tile.mask(first_row, block), p, 0.0) if masked else p
            add_product(dv_ref, p.astype(problem.dtype), do[slot, :, columns], weights_smem, wg)
            dp = plgpu.wgmma_accumulator_load(dp_ref, wait_n=1)  # dv's may still run.
            ds = p * (dp - spread(_device.load(delta[slot], COLUMNS), 1, s.shape))
            ds = ds if problem.soft_cap is None else ds * (1.0 - s * s)
            add_product(dk_ref, ds.astype(problem.dtype), q[slot, :, columns], weights_smem, wg)
            plgpu.wgmma_wait(0)
            ring.release(count)

        def all_steps(dk_ref, dv_ref):
            each_step(tile, ring, phases, functools.partial(step, dk_ref, dv_ref))
            return dk_ref[...], dv_ref[...]

        dk, dv = pl.run_scoped(all_steps, *[plgpu.ACC((WG_ROWS, plan.sum_columns), jnp.float32)] * 2)
        store(tile, wg, done, (dk, problem.scale, k, dk_gmem), (dv, 1.0, v, dv_gmem))


# The parts of all backward kernels ------------------------------------------------------------------------------------


def load(tile: Tile, resident, resident_filled, operands, vectors, ring: _device.Ring):
    """The memory warpgroup: copies what the tile keeps, which arrives at the barrier `resident_filled`, then step by
    step what it goes through. Operands and vectors are pairs: where they lie in memory, and where in shared memory."""
    plan = tile.plan
    for gmem, smem in resident:
        for p, columns in enumerate(plan.kept_columns):
            head = _device.div(tile.head, plan.parts)
            source = gmem.at[tile.batch, pl.ds(tile.row, plan.rows), head, columns]
            plgpu.copy_gmem_to_smem(source, smem.tma(p), resident_filled)

    @pl.loop(0, tile.steps)
    def _(count):
        head, block = tile.step(count)
        slot = ring.acquire(count)
        filled = ring.filled.at[slot]
        for gmem, smem in operands:
            plgpu.copy_gmem_to_smem(gmem.at[tile.batch, block, head], smem.tma(slot), filled)
        for gmem, smem in vectors:
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


def start_product(plan: Plan, acc_ref, resident, block: Half, slot):
    """Starts `acc_ref` = resident blockᵀ, with the block in a slot: a product for each piece of a head."""
    for p, columns in enumerate(plan.kept_columns):
        plgpu.wgmma(acc_ref, resident.at[p], block[slot, :, columns].T)


def add_product(acc_ref, weights, values, weights_smem, wg):
    """Starts `acc_ref` += weights values, with weights from registers, or in JAX's interpreter from `weights_smem`."""
    if weights_smem is not None:
        weights_smem[wg] = weights
        plgpu.commit_smem()
        weights = weights_smem.at[wg]
    plgpu.wgmma(acc_ref, weights, values)


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
    for total, scale, resident, _ in sums:
        total, place = (total * scale).astype(plan.problem.dtype), resident[:, rows]
        for column in range(0, plan.sum_columns, width):
            place[plan.kept_at(columns.start + column, width)] = total[:, column : column + width]
    plgpu.commit_smem()
    if plan.splits_heads:
        sync_compute_wgs()  # Both halves of the columns are there.

    @pl.when((wg == 0) | (not plan.splits_heads))
    def _():
        for *_, resident, out_gmem in sums:
            for p, columns in enumerate(plan.kept_columns):
                target = out_gmem.at[tile.batch, pl.ds(tile.row + rows.start, WG_ROWS), tile.head, columns]
                plgpu.copy_smem_to_gmem(resident.tma(p, rows), target)

    plgpu.wait_smem_to_gmem(0)


def launch(plan: Plan, params, resident, streamed, vectors, segments):
    """[dq], or [dk, dv] of each part, with as many rows and columns as the operands that are kept."""
    return run(_dq if plan.for_query else _dkdv, plan.scratch, plan, params, resident, streamed, vectors, segments)


def run(kernel, scratch: dict, plan: Plan, params, resident, streamed, vectors, segments, *refs):
    """The results of `kernel`, which has a block for each tile."""
    masks = core.segment_masks(*segments, plan.rows, plan.block) if segments else {}
    grid = dict(batch_index=plan.batch, head_index=plan.num_heads, tile=plan.num_tiles)
    order = ("tile", "batch_index", "head_index") if plan.heaviest_first else tuple(grid)
    (batch, rows, _, columns), dtype = resident[0].shape, plan.problem.dtype
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
    )(*resident, *streamed, *vectors, masks, *refs)

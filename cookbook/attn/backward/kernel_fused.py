# SPDX-License-Identifier: Apache-2.0
"""The kernel that makes all three gradients of attention: it makes dk and dv, and adds up dq in memory.

    sᵀ = k qᵀ,   dpᵀ = v doᵀ,   pᵀ = exp2(sᵀ scale_log2 - lse),   dsᵀ = pᵀ (dpᵀ - delta)
    dv += pᵀ do,   dk += dsᵀ q,   dq += ds k

Role table: as `kernel.py` has it for dk and dv. A compute warpgroup keeps 64 keys and values, and dq is a sum over all
keys. So the two warpgroups of a block give each other dsᵀ in shared memory. Each multiplies the ds of all 128 keys by
half of the columns of k, or with heads of 64 half of its queries by all columns. TMA adds these shares to dq in memory,
in float32.

A step queues its products in this order, and makes the next operand while they run:

    sᵀ, dpᵀ                      pᵀ
    dv                           dsᵀ
    dq of the step before, dk    the dq of the step before, in shared memory, to be added

dq is a step late, so that the other warpgroup's dsᵀ is there already. dsᵀ number 0 is zeros, number i + 1 is step i's.

Barrier table: as in `kernel.py`, and

    published      compute warpgroups     each other, before they multiply the dsᵀ in the slot: each has put its dsᵀ
      [slot]                              there, and has read what is in the other slot

Bound by: the tensor cores, with 2560 clocks of an SM per step: five products at 2048 multiply-adds per clock. With
heads of 128 a step has 64 queries and its exponentials take 512 clocks, with heads of 64 it has 128 and they take 1024.
In the L2 cache a step loads 32 KB and adds 32 KB. Chapter 12 builds this kernel, rung by rung.
"""

import dataclasses
import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ... import _device
from ..._device import COLUMNS, ROWS, Index, Ref, role, spread
from ..core import PIECE, REGISTERS, WG_ROWS
from .kernel import load, run, start_accumulate, start_product, store
from .plan import Buffers, Operand, Plan, Tile

SHARE = plgpu.ACC((WG_ROWS, PIECE), jnp.float32)  # A warpgroup's share of the dq of a step.


def scratch(plan: Plan) -> dict:
    """Shared memory of a block, and its barriers."""
    return plan.scratch | dict(
        ds_smem=plgpu.SMEM((2, plan.rows, plan.block), plan.problem.dtype, **_device.swizzled()),
        dq_smem=plgpu.SMEM((plan.compute_wgs, WG_ROWS, PIECE), jnp.float32, **_device.swizzled(32, jnp.float32)),
        published=_device.barriers(2, plan.compute_wgs),
        done=plgpu.Barrier(num_arrivals=plan.compute_wgs),
    )


def _kernel(
    k_gmem, v_gmem, q_gmem, do_gmem, lse_gmem, delta_gmem, segment_tables, dq_gmem, dk_gmem, dv_gmem, *, plan: Plan,
    ds_smem, dq_smem, published, done, weights_smem=None, **smem,
):  # fmt: skip
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
        dq = Dq(tile, wg, k, ds_smem, dq_smem, dq_gmem, _device.Ring(published, None, 2))
        dq.put(0, plgpu.layout_cast(jnp.zeros((WG_ROWS, plan.block), problem.dtype), plgpu.Layout.WGMMA))
        dq.publish(0)

        def step(dk_ref, dv_ref, s_ref, dp_ref, dq_ref, count, slot, block, place_before):
            start_product(plan, s_ref, k[:, rows], q, slot)  # sᵀ = k qᵀ
            start_product(plan, dp_ref, v[:, rows], do, slot)  # dpᵀ = v doᵀ
            s, scale_log2 = problem.scored(plgpu.wgmma_accumulator_load(s_ref, wait_n=len(plan.kept_columns)))
            if plan.runs_ahead:
                pl.when(count > 0)(lambda: ring.release(count - 1))  # dk's product of the step before has ended.
            logits = s * scale_log2 - spread(_device.load(lse[slot], COLUMNS), 1, s.shape)
            p = _weights(tile, first_row, block, logits)
            start_accumulate(dv_ref, p.astype(problem.dtype), do[slot, :, columns], weights_smem, wg)  # dv += pᵀ do
            dp = plgpu.wgmma_accumulator_load(dp_ref, wait_n=1)  # dv's may still run.
            ds = p * (dp - spread(_device.load(delta[slot], COLUMNS), 1, s.shape))
            ds = (ds if problem.soft_cap is None else ds * (1.0 - s * s)).astype(problem.dtype)
            ds_slot = dq.exchange.wait(count)
            dq.put(count + 1, ds)
            dq.start(dq_ref, ds_slot)  # dq of the step before: ds k
            start_accumulate(dk_ref, ds, q[slot, :, columns], weights_smem, wg)  # dk += dsᵀ q
            share = plgpu.wgmma_accumulator_load(dq_ref, wait_n=1)  # dk's may still run.
            dq.publish(count + 1)
            pl.when(count > 0)(lambda: dq.add(share, place_before))
            if not plan.runs_ahead:
                plgpu.wgmma_wait(0)
                ring.release(count)

        def all_steps(dk_ref, dv_ref):
            place = _each_step(tile, wg, ring, functools.partial(step, dk_ref, dv_ref))
            dk, dv = dk_ref[...], dv_ref[...]  # Waits for the last products.
            if plan.runs_ahead:
                pl.when(tile.steps > 0)(lambda: ring.release(tile.steps - 1))
            ds_slot = dq.exchange.wait(tile.steps)
            share = pl.run_scoped(lambda dq_ref: (dq.start(dq_ref, ds_slot), dq_ref[...])[1], SHARE)
            pl.when(tile.steps > 0)(lambda: dq.add(share, place))
            return dk, dv

        dk, dv = pl.run_scoped(all_steps, *[plgpu.ACC((WG_ROWS, plan.sum_columns), jnp.float32)] * 2)
        store(tile, wg, done, (dk, problem.scale, k, dk_gmem), (dv, 1.0, v, dv_gmem))


def _each_step(tile: Tile, wg, ring: _device.Ring, step):
    """Calls `step(s_ref, dp_ref, dq_ref, count, slot, block, place_before)` for each block, once it has arrived, with
    accumulators for its products. In memory dq is a row of shares, two for each block of each head: `place_before` is
    the place of this warpgroup's share of the step before. Returns the place of the last one.
    """
    plan = tile.plan
    products = *[plgpu.ACC((WG_ROWS, plan.block), jnp.float32)] * 2, SHARE

    def one(count, state):
        block, place, place_before = state
        at = dict(count=count, slot=ring.wait(count), block=block, place_before=place_before)
        pl.run_scoped(functools.partial(step, **at), *products)
        block, place, place_before = block + 1, place + 2, place
        if tile.heads > 1:
            ends = block == tile.end
            block, place = jnp.where(ends, tile.first, block), jnp.where(ends, place - 2 * tile.blocks, place)
            place = jnp.where(block == tile.first, place + 2 * plan.num_blocks, place)  # The next head.
        return block, place, place_before

    head = tile.batch * plan.problem.num_heads + tile.other_head(0)
    place = 2 * (head * plan.num_blocks + tile.first) + wg
    return lax.fori_loop(0, tile.steps, one, (tile.first, place, place - 2))[2]


def _weights(tile: Tile, first_row, block, logits):
    """pᵀ of a block of base-2 logits less lse. One loop for all blocks, cut by a mask or not, needs the fewest
    registers."""
    plan = tile.plan
    if plan.num_kv % plan.rows:
        # dq is a sum over keys, so rows that are no keys get -inf: all tiles alike, as a branch would take registers.
        rows = plgpu.broadcasted_iota(jnp.int32, (WG_ROWS,), 0, layout=ROWS)
        logits += spread(jnp.where(rows < plan.num_kv - first_row, 0.0, -jnp.inf), 0, logits.shape)
    p = jnp.exp2(logits)
    (start, stop), cuts = tile.whole(first_row), plan.cuts
    is_cut = [block < start] * cuts.first + [block >= stop] * cuts.last
    if not is_cut:
        return p
    mask = lambda p: jnp.where(tile.mask(first_row, block), p, 0.0)
    return lax.cond(functools.reduce(jnp.logical_or, is_cut), mask, lambda p: p, p)


@dataclasses.dataclass(frozen=True)
class Dq:
    """dq, as the two compute warpgroups of a block make it of each other's dsᵀ and add it up in memory."""

    tile: Tile
    wg: Index
    k: Operand
    ds_smem: Ref  # (2, rows, block): dsᵀ of two steps.
    dq_smem: Ref  # (warpgroups, 64, 64): a share of each, on its way out.
    dq_gmem: Ref
    exchange: _device.Ring  # Over the slots of ds_smem.

    def put(self, number, ds):
        """Puts this warpgroup's dsᵀ, of that number, into its slot."""
        self.ds_smem[self.exchange.slot(number), pl.ds(self.wg * WG_ROWS, WG_ROWS)] = ds

    def publish(self, number):
        """Says that this warpgroup's dsᵀ of that number is in its slot, and that it is done with the other slot."""
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.exchange.filled.at[self.exchange.slot(number)])

    def start(self, dq_ref, slot):
        """Starts this warpgroup's share of ds k: all queries and half of the columns, or with heads of 64 half of the
        queries and all columns."""
        half, whole, plan = pl.ds(self.wg * WG_ROWS, WG_ROWS), slice(None), self.tile.plan
        queries, column = (half, 0) if plan.block > WG_ROWS else (whole, self.wg * PIECE)
        keys = self.k[plan.kept_at(column, PIECE)]
        plgpu.wgmma(dq_ref, self.ds_smem.at[slot, :, queries].T, keys)

    def add(self, share, place):
        """Adds a share to dq in memory. The interpreter cannot: it has a dq for each tile, and reads what is there."""
        interpreted, share_smem = self.tile.plan.problem.interpreted, self.dq_smem.at[self.wg]
        target = self.dq_gmem.at[self.tile.index, place] if interpreted else self.dq_gmem.at[place]
        plgpu.wait_smem_to_gmem(0, wait_read_only=not interpreted)  # The last share has left.
        share_smem[...] = share + _device.load(target) if interpreted else share
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(share_smem, target, reduction_op=None if interpreted else "add")


def launch(plan: Plan, params, kept, streamed, vectors, segments, dq_ref):
    """[dk, dv] of each part, with as many rows and columns as keys and values; dq is added to `dq_ref`."""
    return run(_kernel, scratch(plan), plan, params, kept, streamed, vectors, segments, dq_ref)

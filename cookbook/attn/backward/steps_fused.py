# SPDX-License-Identifier: Apache-2.0
"""The compute warpgroup of the backward kernel that also adds up dq: five products for blocks of keys and of queries.

    sᵀ = k qᵀ,   dpᵀ = v doᵀ,   pᵀ = exp2(sᵀ unit - lse),   dsᵀ = pᵀ (dpᵀ - delta)
    dv += pᵀ do,   dk += dsᵀ q,   dq += ds k

A warpgroup keeps 64 keys and values, as it does for dk and dv alone. dq is a sum over all keys. So the two warpgroups
of a block give each other dsᵀ in shared memory. Each multiplies that of all 128 keys by half of the columns of k; with
heads of 64 that of half of the queries by all columns. TMA adds these shares to dq in memory, in float32.

A step queues its products in this order, and makes the next operand while they run:

    sᵀ, dpᵀ                      pᵀ
    dv                           dsᵀ
    dq of the step before, dk    the dq of the step before, in shared memory, to be added

dq is a step late, so that the other warpgroup's dsᵀ is there already. dsᵀ number 0 is zeros, and number i + 1 that of
step i. The barrier `shared[slot]` has an arrival of each compute warpgroup: its dsᵀ is in the slot, and it has read
what is in the other slot.

Bound by: the tensor cores, with 2560 clocks of an SM for a step: five products at 2048 multiply-adds a clock. With
heads of 128 a step has 64 queries and its exponentials take 512 clocks, with heads of 64 it has 128 and they take 1024.
Chapter 12 counts shared memory too, as if each product read its operands from it at 128 bytes a clock: 2944 and 2816
clocks. Chapter 7 measures products that are faster than such a count allows, so it is not a bound.

In the L2 cache a step loads 32 KB and adds 32 KB.
"""

import dataclasses

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ... import _host
from ..checks import check_smem
from ..core import PIECE, WG_ROWS
from .steps import Work

PRODUCTS = plgpu.ACC((WG_ROWS, PIECE), jnp.float32)  # dq of a step, a warpgroup's share.


@dataclasses.dataclass(frozen=True)
class Config:
    num_stages: int = 2  # Slots of the ring of blocks of queries and do.
    runs_ahead: bool = False  # Whether dk's product may still run when the next step starts: registers for two steps.
    staggered: bool = False  # Whether tiles without a mask start at different blocks, so that fewer add to the same dq.

    def __post_init__(self):
        if self.num_stages < 2:
            raise ValueError(f"{self.num_stages=} must be at least 2 (a block is loaded while another is used)")

    def check(self, head_dim: int, need: int) -> None:
        """Check that a block has the `need` bytes of shared memory, and registers enough, for heads of this size.

        Raises:
          ValueError: it has not.
        """
        check_smem("attention", self, need, head_dim)
        if head_dim > 128 or (self.runs_ahead and head_dim <= 64):
            raise ValueError(
                f"{_host.PACKAGE}.attention: {self} leaves too few registers for {head_dim=}: use "
                f"default_config({head_dim})"
            )


def default_config(head_dim: int) -> Config | None:
    """The configuration for heads of this size; None where dq has to have a kernel of its own.

    With heads over 128 the sums of 64 keys fill the registers of both warpgroups, and its operands shared memory: there
    is no room for a second block of queries, nor for dq's shares.
    """
    return Config(runs_ahead=head_dim > 64) if head_dim <= 128 else None


def sums_of_tile(work: Work, vectors_gmem):
    """(dk, dv) of a compute warpgroup's rows, not yet scaled; dq is added on the way."""
    plan, tile, interpreted = work.plan, work.tile, work.plan.problem.interpreted
    vector = work.vectors(vectors_gmem)
    zeros = plgpu.layout_cast(jnp.zeros(work.shape, plan.problem.dtype), plgpu.Layout.WGMMA)
    work.smem.ds_smem[0, pl.ds(work.wg * WG_ROWS, WG_ROWS)] = zeros
    _publish(work, 0)

    def go_through(sums, carry):
        """All steps; `carry` are sums that are no references. Returns also the place in dq of the last step."""
        start = tile.first + tile.shift
        head = tile.batch * plan.problem.num_heads + tile.other_head(plan, 0)

        def one(count, state):
            block, place, before, carry = state
            carry = _step(work, vector, carry if interpreted else sums, count, block, before)
            block, place, before = block + 1, place + 2, place
            if tile.heads > 1 or plan.is_staggered:
                ends = block == tile.end
                block, place = jnp.where(ends, tile.first, block), jnp.where(ends, place - 2 * tile.blocks, place)
                place = jnp.where(block == start, place + 2 * plan.num_blocks, place)  # The next head.
            return block, place, before, carry

        place = 2 * (head * plan.num_blocks + start) + work.wg
        return lax.fori_loop(0, tile.steps, one, (start, place, place - 2, carry))[2:]

    def last_dq(place):
        slot = work.exchange.wait(tile.steps)
        dq = pl.run_scoped(lambda dq_ref: (_queue_dq(work, dq_ref, slot), dq_ref[...])[1], PRODUCTS)
        pl.when(tile.steps > 0)(lambda: _add_dq(work, dq, place))

    shape = WG_ROWS, plan.sum_columns
    if interpreted:
        zero = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)
        place, totals = go_through(None, [zero] * 2)
        last_dq(place)
        return totals

    def on_tensor_cores(*sums):
        place, _ = go_through(sums, [])
        totals = [ref[...] for ref in sums]  # Waits for the last ones.
        if plan.runs_ahead:
            pl.when(tile.steps > 0)(lambda: work.smem.ring.free(tile.steps - 1))
        last_dq(place)
        return totals

    return pl.run_scoped(on_tensor_cores, *[plgpu.ACC(shape, jnp.float32)] * 2)


def _step(work: Work, vector, sums, count, block, before):
    """The sums after step `count`; on a GPU they are references, and nothing is returned. `before`: the place of the dq
    that is a step late."""
    plan, smem, problem = work.plan, work.smem, work.plan.problem
    slot = smem.ring.wait(count)

    def products(s_ref, dp_ref, dq_ref):
        wait = lambda ref, n: ref[...] if problem.interpreted else plgpu.wgmma_accumulator_load(ref, wait_n=n)
        work.queue(s_ref, 0, slot)
        work.queue(dp_ref, 1, slot)
        s = problem.capped(wait(s_ref, len(plan.kept_columns)))  # This also waits for dk of the step before.
        if plan.runs_ahead:
            pl.when(count > 0)(lambda: smem.ring.free(count - 1))
        logarithms = s * problem.unit - work.spread(vector(0, count))
        if plan.ends_in_tile:
            logarithms += lax.broadcast_in_dim(work.beyond, work.shape, [0])
        p = work.masked(jnp.exp2(logarithms), block)
        now = work.add(sums, 1, p.astype(problem.dtype), 1, count)
        ds = p * (wait(dp_ref, 1) - work.spread(vector(1, count)))
        ds = (ds if problem.soft_cap is None else ds * (1.0 - s * s)).astype(problem.dtype)
        ds_before = work.exchange.wait(count)
        smem.ds_smem[work.exchange.slot(count + 1), pl.ds(work.wg * WG_ROWS, WG_ROWS)] = ds
        _queue_dq(work, dq_ref, ds_before)
        now = work.add(now, 0, ds, 0, count)
        dq = wait(dq_ref, 1)
        _publish(work, count + 1)
        pl.when(count > 0)(lambda: _add_dq(work, dq, before))
        if not plan.runs_ahead:
            plgpu.wgmma_wait(0)
            smem.ring.free(count)
        return now if problem.interpreted else []

    return pl.run_scoped(products, *[plgpu.ACC(work.shape, jnp.float32)] * 2, PRODUCTS)


def _publish(work: Work, number):
    """This warpgroup's dsᵀ is in its slot, and it has done with the other one."""
    plgpu.commit_smem()
    plgpu.barrier_arrive(work.smem.shared.at[work.exchange.slot(number)])


def _queue_dq(work: Work, dq_ref, slot):
    """Starts this warpgroup's share of ds k: all queries and half of the columns, or with heads of 64 half of these."""
    half, whole = pl.ds(work.wg * WG_ROWS, WG_ROWS), slice(None)
    queries, column = (half, 0) if work.plan.block > WG_ROWS else (whole, work.wg * PIECE)
    keys = work.smem.kept_smem.at[(0, *work.plan.kept_at(column, PIECE))]
    plgpu.wgmma(dq_ref, work.smem.ds_smem.at[slot, :, queries].T, keys)


def _add_dq(work: Work, dq, place):
    """Adds a share to dq in memory. The interpreter cannot: it has a dq for each tile, and reads what this one has."""
    interpreted, mine = work.plan.problem.interpreted, work.smem.dq_smem.at[work.wg]
    target = work.dq_gmem.at[work.tile.index, place] if interpreted else work.dq_gmem.at[place]
    plgpu.wait_smem_to_gmem(0, wait_read_only=not interpreted)  # The last share has left.
    if interpreted:
        dq = dq + plgpu.load(target, layout=plgpu.Layout.WGMMA, optimized=False)
    mine[...] = dq
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(mine, target, reduction_op=None if interpreted else "add")

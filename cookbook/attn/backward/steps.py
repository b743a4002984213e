# SPDX-License-Identifier: Apache-2.0
"""The compute warpgroup of the backward kernels, in the steps that chapter 12 builds.

    p = exp2(s unit - lse),   ds = p (dp - delta),   s = kept[0] ring[0]ᵀ,   dp = kept[1] ring[1]ᵀ

A warpgroup keeps 64 rows: of queries and do, where the sum is dq = ds k; or of keys and values, where the sums are
dk = ds q and dv = p do, and p and ds are transposed. `plan` and `tile` are those of `kernel.py`.
"""

import dataclasses
import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ... import _device
from ..core import COLUMNS, ROWS, WG_ROWS


@dataclasses.dataclass(frozen=True)
class Smem:
    """Shared memory of a block, and its barriers."""

    kept_smem: object  # (2, pieces, rows, their width), as tensor cores see it, and as TMA does.
    kept_tma: object
    ring_smem: object  # (2, slots, block, head_dim), likewise.
    ring_tma: object
    kept: object  # A barrier: what the tile keeps has arrived.
    ring: _device.Ring
    vectors_smem: object = None  # (2, slots, block): lse and delta of the columns.
    done: object = None
    ds_smem: object = None  # (2, rows, block): dsᵀ of two steps.
    dq_smem: object = None  # (warpgroups, 64, 64)
    shared: object = None  # A barrier a slot of ds_smem.


@dataclasses.dataclass(frozen=True)
class Work:
    """The tile of a compute warpgroup, and what it has at hand."""

    plan: object
    tile: object
    smem: Smem
    kept: list  # The rows that it keeps, of both operands, (pieces, 64, their width).
    columns: object  # Columns of its sums, among those of the operands.
    first_row: object
    wg: object  # Its number.
    dq_gmem: object  # The dq to add to, or None.

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the products with a block."""
        return WG_ROWS, self.plan.block

    @property
    def exchange(self) -> _device.Ring:
        """The slots in which warpgroups give each other dsᵀ."""
        return _device.Ring(self.smem.shared, None, 2)

    def spread(self, numbers):
        """lse or delta, repeated along rows, or columns."""
        return lax.broadcast_in_dim(numbers, self.shape, [0 if self.plan.for_query else 1])

    @property
    def beyond(self):
        """-inf for each row that is no key, 0 for the others: without a branch, which would take registers."""
        rows = plgpu.broadcasted_iota(jnp.int32, (WG_ROWS,), 0, layout=ROWS)
        return jnp.where(rows < self.plan.num_kv - self.first_row, 0.0, -jnp.inf)

    def vectors(self, gmem):
        """Function of a step and 0 for lse, 1 for delta: those of the rows, or of the columns of the step's block."""
        load = lambda ref, layout: plgpu.load(ref, layout=layout, optimized=False)
        if not self.plan.for_query:
            smem = self.smem
            return lambda i, count: load(smem.vectors_smem.at[i, smem.ring.slot(count)], COLUMNS)
        place = self.tile.batch, self.tile.head, pl.ds(self.first_row, WG_ROWS)
        of_rows = [load(ref.at[place], ROWS) for ref in gmem]
        return lambda i, count: of_rows[i]

    def queue(self, ref, i: int, slot):
        """Starts `ref` = kept[i] ring[i]ᵀ: a product for each piece of a head."""
        for p, columns in enumerate(self.plan.kept_columns):
            plgpu.wgmma(ref, self.kept[i].at[p], self.smem.ring_smem.at[i, slot, :, columns].T)

    def add(self, sums, i: int, weights, operand: int, count):
        """`sums[i] += weights @ operand`, which goes on while the next products start."""
        values = self.smem.ring_smem.at[operand, self.smem.ring.slot(count), :, self.columns]
        if not self.plan.problem.interpreted:
            plgpu.wgmma(sums[i], weights, values)
            return sums
        # The interpreter wants both operands of WGMMA in shared memory.
        total = sums[i] + jnp.dot(weights, values[...], preferred_element_type=jnp.float32)
        plgpu.commit_smem()  # TMA may now overwrite the values that were read here.
        return [total if i == j else other for j, other in enumerate(sums)]

    @property
    def whole(self):
        """(first, end) of the blocks that need no mask."""
        tile = self.tile
        start, stop = self.plan.blocks.whole(self.first_row, WG_ROWS, tile.first, tile.end)
        if self.plan.cuts.all:
            return tile.end, tile.end
        return start, stop

    def masked(self, p, block):
        """The weights with zeros where a mask cuts the block; one loop for all blocks needs the fewest registers."""
        (start, stop), cuts = self.whole, self.plan.cuts
        is_cut = [block < start] * cuts.first + [block >= stop] * cuts.last
        if not is_cut:
            return p
        mask = lambda p: jnp.where(self.tile.mask(self.plan, self.first_row, block), p, 0.0)
        return lax.cond(functools.reduce(jnp.logical_or, is_cut), mask, lambda p: p, p)

    def phases(self):
        """(first, end, masked) of the blocks, in their order."""
        tile, cuts, (start, stop) = self.tile, self.plan.cuts, self.whole
        before, after = [(tile.first, start, True)] * cuts.first, [(stop, tile.end, True)] * cuts.last
        return [*before, (start, stop, False), *after]


def step(work: Work, vector, sums, count, block, masked: bool):
    """The sums after step `count`; on a GPU they are references, and nothing is returned."""
    plan, smem, problem = work.plan, work.smem, work.plan.problem
    slot = smem.ring.wait(count)

    def products(s_ref, dp_ref):
        wait = lambda ref, n: ref[...] if problem.interpreted else plgpu.wgmma_accumulator_load(ref, wait_n=n)
        now = sums
        work.queue(s_ref, 0, slot)
        work.queue(dp_ref, 1, slot)
        s = wait(s_ref, len(plan.kept_columns))  # This also waits for the sums of the step before.
        if plan.runs_ahead:
            pl.when(count > 0)(lambda: smem.ring.free(count - 1))
        s = problem.capped(s)
        p = jnp.exp2(s * problem.unit - work.spread(vector(0, count)))
        p = jnp.where(work.tile.mask(plan, work.first_row, block), p, 0.0) if masked else p
        if not plan.for_query:
            now = work.add(now, 1, p.astype(problem.dtype), 1, count)
        dp = wait(dp_ref, 0 if plan.for_query else 1)
        ds = p * (dp - work.spread(vector(1, count)))
        ds = ds if problem.soft_cap is None else ds * (1.0 - s * s)
        now = work.add(now, 0, ds.astype(problem.dtype), 0, count)
        if not plan.runs_ahead:
            plgpu.wgmma_wait(0)
            smem.ring.free(count)
        return now if problem.interpreted else []

    return pl.run_scoped(products, *[plgpu.ACC(work.shape, jnp.float32)] * 2)


def sums_of_tile(work: Work, vectors_gmem):
    """The sums of a compute warpgroup's rows, dq or (dk, dv), not yet scaled."""
    plan, tile = work.plan, work.tile
    vector, phases = work.vectors(vectors_gmem), work.phases()

    def go_through(sums, carry):
        """All steps; `carry` are sums that are no references."""

        def head(i, carry):
            for first, end, masked in phases:

                def body(block, carry, masked=masked):
                    count = i * tile.blocks + block - tile.first
                    return step(work, vector, carry if plan.problem.interpreted else sums, count, block, masked)

                carry = lax.fori_loop(first, end, body, carry)
            return carry

        return lax.fori_loop(0, tile.heads, head, carry) if tile.heads > 1 else head(0, carry)

    shape = WG_ROWS, plan.sum_columns
    if plan.problem.interpreted:
        zero = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)
        return go_through(None, [zero] * plan.num_sums)

    def on_tensor_cores(*sums):
        go_through(sums, [])
        totals = [ref[...] for ref in sums]  # Waits for the last ones.
        if plan.runs_ahead:
            pl.when(tile.steps > 0)(lambda: work.smem.ring.free(tile.steps - 1))
        return totals

    return pl.run_scoped(on_tensor_cores, *[plgpu.ACC(shape, jnp.float32)] * plan.num_sums)

# SPDX-License-Identifier: Apache-2.0
"""The kernel of `ragged_dot_transposed`: as in `gemm/kernel.py`, but each tile is a sum along the rows of one group.

Role and barrier tables: `gemm/kernel.py`, with one barrier more:

    barrier   arrivals                       who waits
    masked    both compute warpgroups        both, before they multiply a step in which they wrote zeros

A step is 64 rows. The first and the last step of a group may have rows of its neighbours: there the compute warpgroups
write zeros over them, in both operands, so that no NaN of a neighbour gets into a sum.
"""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ..kernel import compute_role, copy_step, memory_role, release_last, start_product, store
from ..operand import Operand, Ring
from ..plan import COMPUTE, Plan
from .plan import Tile, aligned, each_tile
from .tables import Table


def load(plan: Plan, table: Table, ring: Ring, a_gmem, b_gmem):
    """The memory warpgroup: all steps of all tiles of this block, as fast as slots are given back."""

    def load_tile(tile, _, before):
        @pl.loop(0, tile.steps)
        def _(step):
            slot, first = ring.acquire(before + step), aligned(tile.start) + step * plan.tiles.tile_k
            copy_step(plan, ring, slot, a_gmem, b_gmem, tile.row, tile.col, first)

    ring.drain(each_tile(plan, table, load_tile))


def mask(plan: Plan, masked, tile: Tile, step, a_smem, b_smem):
    """A compute warpgroup: writes zeros over the rows of a step's tiles that belong to other groups."""
    role, size = lax.axis_index("role"), plan.tiles.tile_k
    begin = aligned(tile.start) + step * size

    @pl.when((begin < tile.start) | (begin + size > tile.end))
    def _():
        row = begin + plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, (size, 64), 0), plgpu.Layout.WGMMA)
        inside = (row >= tile.start) & (row < tile.end)

        def mask_block(block):
            values = plgpu.load(block, layout=plgpu.Layout.WGMMA)
            block[...] = jnp.where(inside, values, jnp.zeros_like(values))

        for operand, smem in ((plan.a, a_smem), (plan.b, b_smem)):
            blocks = operand.rows // 64
            for i in range(0, blocks, COMPUTE):  # The warpgroups take turns.
                mine = functools.partial(mask_block, block_of(operand, smem, i + role))
                mine() if i + COMPUTE <= blocks else pl.when(role == 0)(mine)
        plgpu.commit_smem()
        plgpu.barrier_arrive(masked)
        plgpu.barrier_wait(masked)


def block_of(operand: Operand, smem, i):
    """Block `i` of 64 columns of a slot's tile, which lies as (rows of the group, columns)."""
    return smem.at[0, i] if operand.in_pieces else smem.at[:, pl.ds(i * 64, 64)]


def multiply(plan: Plan, ring: Ring, masked, tile: Tile, before):
    """As `multiply` of `gemm/kernel.py`, of the rows of the tile's group alone."""

    def with_accumulator(acc):
        role = lax.axis_index("role")

        @pl.loop(0, tile.steps)
        def _(step):
            slot = ring.wait(before + step)
            mask(plan, masked, tile, step, ring.a.at[slot], ring.b.at[slot])
            start_product(plan, ring, slot, role, acc)
            plgpu.wgmma_wait(1)  # The product before has ended.
            pl.when(step > 0)(lambda: ring.release(before + step - 1))

        values = acc[...]  # Waits for the last product.
        release_last(ring, before, tile.steps)
        return values

    return pl.run_scoped(with_accumulator, plgpu.ACC(plan.compute_tile, jnp.float32))


def kernel(a_gmem, b_gmem, table, o_gmem, *, plan: Plan, a_smem, b_smem, filled, freed, o_smem, masked):
    """The kernel of `ragged_dot_transposed`."""
    ring = plan.ring(a_smem, b_smem, filled, freed)

    @memory_role
    def _():
        load(plan, table, ring, a_gmem, b_gmem)

    @compute_role
    def _():
        def compute_tile(tile, number, before):
            values = multiply(plan, ring, masked, tile, before)
            place, stored = plan.share((tile.row, tile.col)), number * len(plan.store_pieces)
            store(plan, ({}, o_gmem.at[tile.group], o_smem), place, stored, values)

        each_tile(plan, table, compute_tile)
        plgpu.wait_smem_to_gmem(0)

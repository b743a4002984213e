# SPDX-License-Identifier: Apache-2.0
"""The kernel of `ragged_dot_transposed`: as in `gemm/kernel.py`, but each tile is a sum along the rows of one group.

Role and barrier tables: `gemm/kernel.py`, with one barrier more:

    barrier   arrivals                       who waits
    masked    both compute warpgroups        both, before they multiply a step in which they wrote zeros

A step is 64 rows. The first and the last step of a group may have rows of its neighbours: there the compute warpgroups
write zeros over them, in both operands, so that no NaN of a neighbour gets into a sum.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ... import _device
from ..kernel import store
from ..plan import COMPUTE, COMPUTE_REGISTERS, MEMORY, MEMORY_REGISTERS, Operand, Plan
from .plan import Tile, aligned, tile_of_block
from .tables import Table


def load(plan: Plan, table: Table, ring: _device.Ring, a_gmem, b_gmem, a_smem, b_smem):
    """The memory warpgroup: all steps of all tiles of this block, as fast as slots are given back."""

    def load_tile(number, before):
        tile = tile_of_block(plan, table, number)

        @pl.loop(0, tile.steps)
        def _(step):
            slot, row = ring.acquire(before + step), aligned(tile.start) + step * plan.tiles.tile_k
            with jax.named_scope("load"):
                filled, (a, b) = ring.filled.at[slot], (plan.a, plan.b)
                a.copy(a_gmem, a.at(tile.row, row), a_smem.at[slot], filled, shared=plan.axis_n)
                b.copy(b_gmem, b.at(tile.col, row), b_smem.at[slot], filled, shared=plan.axis_m)

        return before + tile.steps

    ring.drain(lax.fori_loop(0, plan.tiles.num_tiles(lax.axis_index("cluster")), load_tile, 0))


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


def multiply(plan: Plan, ring: _device.Ring, a_smem, b_smem, masked, tile: Tile, before, acc):
    """As `multiply` of `gemm/kernel.py`, of the rows of the tile's group alone."""
    (rows, cols), role = plan.compute_tile, lax.axis_index("role")

    @pl.loop(0, tile.steps)
    def _(step):
        slot = ring.wait(before + step)
        mask(plan, masked, tile, step, a_smem.at[slot], b_smem.at[slot])
        a, b = plan.a.part(a_smem.at[slot], role, rows), plan.b.part(b_smem.at[slot], role, cols)
        with jax.named_scope("wgmma"):
            plgpu.wgmma(acc, a, b.T)
            plgpu.wgmma_wait(1)  # The product before has ended.
        pl.when(step > 0)(lambda: ring.release(before + step - 1))

    values = acc[...]  # Waits for the last product.
    pl.when(tile.steps > 0)(lambda: ring.release(before + tile.steps - 1))
    return values


def kernel(a_gmem, b_gmem, table, o_gmem, *, plan: Plan, a_smem, b_smem, filled, freed, o_smem, masked):
    """The kernel of `ragged_dot_transposed`."""
    (a_smem, a_tma), (b_smem, b_tma) = plan.a.views(a_smem, plan.interpreted), plan.b.views(b_smem, plan.interpreted)
    ring = _device.Ring(filled, freed, plan.num_stages)

    @_device.role(lax.axis_index("role") == MEMORY, decrease_to=MEMORY_REGISTERS)
    def _():
        load(plan, table, ring, a_gmem, b_gmem, a_tma, b_tma)

    @_device.role(lax.axis_index("role") < COMPUTE, increase_to=COMPUTE_REGISTERS)
    def _():
        def compute_tile(number, before):
            tile = tile_of_block(plan, table, number)
            of_tile = functools.partial(multiply, plan, ring, a_smem, b_smem, masked, tile, before)
            values = pl.run_scoped(of_tile, plgpu.ACC(plan.compute_tile, jnp.float32))
            place, stored = plan.share((tile.row, tile.col)), number * len(plan.store_pieces)
            store(plan, ({}, o_gmem.at[tile.group], o_smem), place, stored, values)
            return before + tile.steps

        lax.fori_loop(0, plan.tiles.num_tiles(lax.axis_index("cluster")), compute_tile, 0)
        plgpu.wait_smem_to_gmem(0)

# SPDX-License-Identifier: Apache-2.0
"""The kernel of Blackwell's `ragged_dot`: that of `kernel.py`, for tiles that are looked up and rows of groups.

Role and barrier tables: `kernel.py`. Four things differ. Tiles are looked up on the device, as `gemm/grouped/plan.py`
does, by all roles in the same order; so their schedule is static. The matrix is that of the tile's group. A tile that
reaches over the end of its group stores rows of its own group alone. And a tile of rows of no group has no steps: what
tensor memory holds is not stored, but zeros.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .. import _device, _numerics
from ..gemm.grouped.kernel import send_rows
from ..gemm.grouped.plan import Tile, each_tile
from ..gemm.operand import views
from .kernel import drain_accumulators, launch, load, multiply
from .plan import LOAD, MULTIPLY, STORE, Plan


def sums_of(plan: Plan, tile: Tile, acc_tmem, at):
    """The sums of a piece of o, which begin in column `at` of tensor memory; with a partner SwiGLU of both."""
    read = lambda at: plgpu.async_load_tmem(acc_tmem.at[:, pl.ds(at, plan.store_piece[1])], layout=plgpu.Layout.TCGEN05)
    values = read(at)
    if plan.b.partner:
        values = values * jax.nn.sigmoid(values) * read(at + plan.config.tile_n)
    # Without steps tensor memory holds what was there before.
    return jnp.where(lax.broadcast_in_dim(tile.steps > 0, values.shape, ()), values, 0.0)


def store(plan: Plan, tile: Tile, number, o_gmem, o_smem, acc_tmem, summed, stored):
    """A store warpgroup: its columns of a tile, of which the rows of the tile's group go to o."""
    c, (rows, width), wg = plan.config, plan.store_piece, lax.axis_index("role") - STORE
    row = tile.row + (lax.axis_index(plan.pair) * rows if plan.pair else 0)  # This block's rows of its pair's.
    acc, pieces = plan.accumulator(number), c.tile_n // c.epilogue_wgs // width
    o_tiled, o_tma = views(o_smem, plan.store_piece, plan.interpreted)
    plgpu.barrier_wait(summed.at[acc])
    for piece in range(pieces):
        at = (wg * pieces + piece) * width
        values = plan.activation(sums_of(plan, tile, acc_tmem, acc * plan.acc_columns + at)).astype(plan.out_dtype)
        slot = _device.rem(number * pieces + piece, c.store_slots)
        plgpu.wait_smem_to_gmem(c.store_slots - 1, wait_read_only=True)  # TMA has read what was in this slot.
        o_tiled[wg, slot, 0, 0] = values
        plgpu.commit_smem()
        target = o_gmem.at[pl.ds(row, rows), pl.ds(tile.col + at, width)]
        send_rows(o_tma.at[wg, slot, 0, 0], target, tile.end - row)
    plgpu.wait_load_tmem()  # Otherwise the products of another tile could overwrite what is being loaded.
    plgpu.barrier_arrive(stored.at[acc])


def kernel(a_gmem, b_gmem, table, o_gmem, *, plan: Plan, a_smem, b_smem, o_smem, acc_tmem, filled, freed, summed,
           stored):  # fmt: skip
    """The kernel of `ragged_dot`."""
    role, ring = lax.axis_index("role"), _device.Ring(filled, freed, plan.num_stages)
    (a_smem, a_tma), (b_smem, b_tma) = plan.a.views(a_smem, plan.interpreted), plan.b.views(b_smem, plan.interpreted)
    table = plan.tiles.read(table)

    @_device.role(role == LOAD)
    def _():
        def load_tile(tile, _, before):
            gmem, place = (a_gmem, b_gmem.at[tile.group]), (tile.row, tile.col)
            load(plan, ring, gmem, (a_tma, b_tma), place, before, tile.steps)

        ring.drain(each_tile(plan, table, load_tile))

    @_device.role(role == MULTIPLY)
    def _():
        def multiply_tile(tile, number, before):
            multiply(plan, ring, (a_smem, b_smem), acc_tmem, (), summed, stored, number, before, tile.steps)

        each_tile(plan, table, multiply_tile)
        drain_accumulators(plan, stored, plan.tiles.num_tiles(table, lax.axis_index("cluster")))

    @_device.role(role >= STORE)
    def _():
        store_tile = lambda tile, number, _: store(plan, tile, number, o_gmem, o_smem, acc_tmem, summed, stored)
        each_tile(plan, table, store_tile)
        plgpu.wait_smem_to_gmem(0)


@functools.partial(jax.jit, static_argnames=("plan", "params"))
def grouped_product(lhs, rhs, table, *, plan: Plan, params):
    """`activation(lhs @ rhs[g])` of each group's rows, of `lhs` and `rhs` that lie as the plan says."""
    t, piece = plan.tiles, jax.ShapeDtypeStruct((math.prod(plan.store_piece),), jnp.float32)
    plan = dataclasses.replace(plan, activation=_numerics.lowerable(plan.activation, piece))
    return launch(functools.partial(kernel, plan=plan), plan, (t.m, t.n), params)(lhs, rhs, table)[:, : t.n]

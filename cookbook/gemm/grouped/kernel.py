# SPDX-License-Identifier: Apache-2.0
"""The kernel of `ragged_dot`: as in `gemm/kernel.py`, for tiles that are looked up and rows that belong to groups.

Role and barrier tables: `gemm/kernel.py`. Three things differ. Each role looks its tiles up (`plan.py`), and a tile of
rows of no group has no steps. The matrix is that of the tile's group. And a tile that reaches over the end of its group
stores rows of its own group alone.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ... import _device, _host, _numerics
from ..kernel import launch, multiply
from ..plan import COMPUTE, COMPUTE_REGISTERS, MEMORY, MEMORY_REGISTERS, Plan, views
from .plan import Tile, tile_of_block


def load(plan: Plan, table, ring: _device.Ring, a_gmem, b_gmem, a_smem, b_smem):
    """The memory warpgroup: all steps of all tiles of this block, as fast as slots are given back."""

    def load_tile(number, before):
        tile = tile_of_block(plan, table, number)
        matrix = lambda operand, gmem: gmem.at[tile.group] if operand.stacked else gmem

        @pl.loop(0, tile.steps)
        def _(step):
            slot, k = ring.acquire(before + step), step * plan.tiles.tile_k
            with jax.named_scope("load"):
                filled, (a, b) = ring.filled.at[slot], (plan.a, plan.b)
                a.copy(matrix(a, a_gmem), a.at(tile.row, k), a_smem.at[slot], filled, shared=plan.axis_n)
                b.copy(matrix(b, b_gmem), b.at(tile.col, k), b_smem.at[slot], filled, shared=plan.axis_m)

        return before + tile.steps

    num_tiles = plan.tiles.num_tiles(table, lax.axis_index("cluster"))
    ring.drain(lax.fori_loop(0, num_tiles, load_tile, 0))


def compute(plan: Plan, table, multiply_tile, o_gmem, o_smem):
    """A compute warpgroup: stores the sums `multiply_tile(tile, before)` of its share of all tiles.

    `before` counts the steps of the tiles before.
    """

    def compute_tile(number, before):
        tile = tile_of_block(plan, table, number)
        sums = multiply_tile(tile, before)
        place, stored = plan.share((tile.row, tile.col)), number * len(plan.store_pieces)
        store(plan, tile, o_gmem, o_smem, place, stored, sums)
        return before + tile.steps

    num_tiles = plan.tiles.num_tiles(table, lax.axis_index("cluster"))
    lax.fori_loop(0, num_tiles, compute_tile, 0)
    plgpu.wait_smem_to_gmem(0)


def store(plan: Plan, tile: Tile, o_gmem, o_smem, place, stored, values):
    """A compute warpgroup: finishes `values`, its share of a tile, and sends the rows of the tile's group to o.

    `stored` pieces went before.
    """
    (row, col), (height, width), role = place, plan.store_piece, lax.axis_index("role")
    swapped, slots = plan.swapped, plan.config.store_slots
    o_tiled, o_tma = views(o_smem, plan.store_piece, plan.interpreted)
    for number, (i, j) in enumerate(plan.store_pieces):
        slot = _device.rem(stored + number, slots)
        smem = o_tiled.at[role, slot, 0, 0]
        plgpu.wait_smem_to_gmem(slots - 1, wait_read_only=True)  # TMA has read the piece that was in this slot.
        piece = plan.activation(values[i : i + height, j : j + width]).astype(plan.out_dtype)
        if swapped:
            smem.T[...] = plgpu.layout_cast(piece, plgpu.Layout.WGMMA_TRANSPOSED)
        else:
            smem[...] = piece
        plgpu.commit_smem()
        rows, cols = pl.ds(row + i, height), pl.ds(col + j, width)
        target = o_gmem.at[cols, rows] if swapped else o_gmem.at[rows, cols]
        send_rows(o_tma.at[role, slot, 0, 0], target, tile.end - (row + i, col + j)[plan.tiles.axis])


def send_rows(piece_smem, o_gmem, left):
    """Starts to store the first `left` rows of a piece: at once if that is all, else in pieces of powers of two."""
    rows = piece_smem.shape[0]

    @pl.when(left >= rows)
    def _():
        plgpu.copy_smem_to_gmem(piece_smem, o_gmem)

    @pl.when((left > 0) & (left < rows))
    def _():
        size = 1 << ((rows - 1).bit_length() - 1)
        while size:
            start = left & ~(2 * size - 1)  # The larger pieces come before.

            @pl.when(left & size != 0)
            def _(start=start, size=size):
                part = pl.ds(start, size)
                plgpu.copy_smem_to_gmem(piece_smem.at[part], o_gmem.at[part], commit_group=False)

            size //= 2
        plgpu.commit_smem_to_gmem_group()

    # A slot is taken to be free by counting the pieces that were sent since. This piece has no rows: wait for all.
    pl.when(left <= 0)(lambda: plgpu.wait_smem_to_gmem(0, wait_read_only=True))


def kernel(a_gmem, b_gmem, table, o_gmem, *, plan: Plan, a_smem, b_smem, filled, freed, o_smem):
    """The kernel of `ragged_dot`."""
    table = plan.tiles.read(table)
    (a_smem, a_tma), (b_smem, b_tma) = plan.a.views(a_smem, plan.interpreted), plan.b.views(b_smem, plan.interpreted)
    ring = _device.Ring(filled, freed, plan.num_stages)

    @_device.role(lax.axis_index("role") == MEMORY, decrease_to=MEMORY_REGISTERS)
    def _():
        load(plan, table, ring, a_gmem, b_gmem, a_tma, b_tma)

    @_device.role(lax.axis_index("role") < COMPUTE, increase_to=COMPUTE_REGISTERS)
    def _():
        def multiply_tile(tile, before):
            of_tile = functools.partial(multiply, plan, ring, a_smem, b_smem, before, tile.steps)
            return pl.run_scoped(of_tile, plgpu.ACC(plan.compute_tile, jnp.float32))

        compute(plan, table, multiply_tile, o_gmem, o_smem)


@functools.partial(jax.jit, static_argnames=("kernel", "plan", "params"))
def product(kernel, a, b, *others, plan: Plan, params):
    """The array that `kernel`, this file's or a variant, computes of the plan's `a` and `b` and of `others`.

    The first of `others` is the table of tiles.
    """
    piece, shape = jax.ShapeDtypeStruct((math.prod(plan.store_piece),), jnp.float32), plan.tiles.out_shape
    plan = dataclasses.replace(plan, activation=_numerics.lowerable(plan.activation, piece))
    padded = *shape[:-2], *_host.padded_shape(shape[-2:], (1, 8))  # A row of o is a multiple of 16 bytes for TMA.
    out_type, grid = jax.ShapeDtypeStruct(padded, plan.out_dtype), dict(cluster=plan.tiles.clusters)
    run = launch(functools.partial(kernel, plan=plan), plan, out_type, grid, plan.scratch, params)
    return run(plan.a.pad(a), plan.b.pad(b), *others)[tuple(slice(size) for size in shape)]

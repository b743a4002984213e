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

from ... import _host, _numerics
from ..kernel import compute_role, copy_step, memory_role, multiply, slot_of_piece, target_of_piece
from ..launch import launch
from ..operand import Ring
from ..plan import Plan
from ..tiles import exchanged
from .plan import Tile, each_tile


def load(plan: Plan, table, ring: Ring, a_gmem, b_gmem, copy=copy_step):
    """The memory warpgroup: all steps of all tiles of this block, as fast as slots are given back.

    Each operand may be several arrays, as `copy` takes them.
    """

    def load_tile(tile, _, before):
        of_group = lambda gmem: gmem.at[tile.group]
        a, b = (jax.tree.map(of_group, gmem) if x.stacked else gmem for x, gmem in ((plan.a, a_gmem), (plan.b, b_gmem)))

        @pl.loop(0, tile.steps)
        def _(step):
            slot = ring.acquire(before + step)
            copy(plan, ring, slot, a, b, tile.row, tile.col, step * plan.tiles.tile_k)

    ring.drain(each_tile(plan, table, load_tile))


def store(plan: Plan, tile: Tile, number, o_gmem, o_smem, values):
    """A compute warpgroup: finishes `values`, its share of a tile, and sends the rows of the tile's group to o."""
    (row, col), (height, width) = plan.share((tile.row, tile.col)), plan.store_piece
    stored, role = number * len(plan.store_pieces), lax.axis_index("role")  # So many pieces went before.
    for count, (i, j) in enumerate(plan.store_pieces):
        piece_smem, piece_tma = slot_of_piece(plan, o_smem, role, stored + count)
        piece = plan.activation(values[i : i + height, j : j + width]).astype(plan.out_dtype)
        piece_smem[...] = plgpu.layout_cast(piece, plgpu.Layout.WGMMA_TRANSPOSED) if plan.swapped else piece
        plgpu.commit_smem()
        target, left = target_of_piece(plan, o_gmem, row + i, col + j), tile.end - (row + i, col + j)[plan.tiles.axis]
        send_rows(piece_tma, target, left)


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
    table, ring = plan.tiles.read(table), plan.ring(a_smem, b_smem, filled, freed)

    @memory_role
    def _():
        load(plan, table, ring, a_gmem, b_gmem)

    @compute_role
    def _():
        def compute_tile(tile, number, before):
            sums = multiply(plan, ring, before, tile.steps)
            store(plan, tile, number, o_gmem, o_smem, sums)

        each_tile(plan, table, compute_tile)
        plgpu.wait_smem_to_gmem(0)


@functools.partial(jax.jit, static_argnames=("kernel", "plan", "params"))
def grouped_product(kernel, lhs, rhs, *others, plan: Plan, params):
    """The array that `kernel`, this file's or a variant, computes of `lhs` and `rhs`, which lie as the plan says.

    The first of `others` is the table of tiles.
    """
    (a, b), shape = exchanged((lhs, rhs), plan.config.swapped), plan.tiles.out_shape
    piece = jax.ShapeDtypeStruct((math.prod(plan.store_piece),), jnp.float32)
    plan = dataclasses.replace(plan, activation=_numerics.lowerable(plan.activation, piece))
    padded = *shape[:-2], *_host.padded_shape(shape[-2:], (1, 8))  # A row of o is a multiple of 16 bytes for TMA.
    out_type, grid = jax.ShapeDtypeStruct(padded, plan.out_dtype), dict(cluster=plan.tiles.clusters)
    run = launch(functools.partial(kernel, plan=plan), plan, out_type, grid, plan.scratch, params)
    return run(jax.tree.map(plan.a.pad, a), jax.tree.map(plan.b.pad, b), *others)[tuple(slice(size) for size in shape)]

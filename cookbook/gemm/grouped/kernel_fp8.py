# SPDX-License-Identifier: Apache-2.0
"""The kernel of `ragged_dot_fp8`: as in `kernel.py`, with scales of rows, of each matrix's columns, or of blocks.

The kernel gets the scales beside the table of tiles. Tiles begin at any row, so scales of rows are padded by a tile.

    by row and column   the sums are multiplied by both scales
    by block            each step, a block of 128 values of K, has scales: its sums are added up in registers

Another format whose scales belong to rows and columns has its place in `multiply_and_scale`, one with scales along K in
`multiply_blocks`, one that the tensor cores do not multiply in `dense/kernel_int8_weights.py`.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ... import _device, _host
from ..kernel import compute_role, memory_role, multiply_into, start_product
from ..operand import Ring
from ..plan import Plan
from .kernel import load, store
from .plan import Tile, each_tile

BLOCK = 128  # Values of K, and columns, that share a scale.
IN_FLIGHT = 2  # Steps that a warpgroup starts to multiply before it adds the sums of the first.


def pad_row_scales(scales, plan: Plan):
    """(M, blocks) as the kernel reads them: (blocks, M and a tile more).

    With `swapped` rows lie along the columns of the sums, where a thread loads pairs, at multiples of 8 bytes. Groups
    begin at any row, so there are two copies, (blocks, 2, ...), of which the second begins one row later.
    """
    m, size = len(scales), plan.tiles.cluster_tile[plan.tiles.axis]
    padded = jnp.pad(scales.astype(jnp.float32).T, ((0, 0), (0, size + m % 2 + 1)))
    return jnp.stack([padded[:, :-1], padded[:, 1:]], axis=1) if plan.swapped else padded


def pad_column_scales(scales, plan: Plan):
    """(G, N) as the kernel reads them: columns padded to whole tiles."""
    return _host.pad_to_tiles(scales.astype(jnp.float32), (1, plan.tiles.cluster_tile[1 - plan.tiles.axis]))


def scales_of_rows(plan: Plan, tile: Tile, of_rows, block):
    """The scales of this warpgroup's rows for a block of K, which are in flight."""
    start, ref = plan.share((tile.row, tile.col))[plan.tiles.axis], of_rows.at[block]
    if plan.swapped:
        start, ref = start & ~1, ref.at[start & 1]
    return _vector(plan, ref, start, plan.tiles.axis)


def scales_of_columns(plan: Plan, tile: Tile, of_matrices):
    """The scales of this warpgroup's columns, which are in flight."""
    axis = 1 - plan.tiles.axis
    return _vector(plan, of_matrices.at[scaled_group(plan, tile)], plan.share((tile.row, tile.col))[axis], axis)


def scaled_group(plan: Plan, tile: Tile):
    """The group that the tile reads scales of. Rows of no group are zeros: they read the last group's, and use none."""
    return jnp.minimum(tile.group, plan.tiles.num_groups - 1)


def _vector(plan: Plan, ref, start, axis: int):
    return _device.load(ref.at[pl.ds(start, plan.compute_tile[axis])], plgpu.Layout.WGMMA.reduce(1 - axis))


def spread(plan: Plan, vector, axis: int):
    """`vector`, of rows of o (`axis` 0) or of columns (1), in the shape of the sums."""
    return _device.spread(vector, axis ^ plan.swapped, plan.compute_tile)


def multiply_and_scale(plan: Plan, ring: Ring, of_rows, of_matrices, tile: Tile, before):
    """As `multiply` of `gemm/kernel.py`; then the sums times the scales of rows and of columns."""

    def with_accumulator(acc):
        row, column = scales_of_rows(plan, tile, of_rows, 0), scales_of_columns(plan, tile, of_matrices)
        values = multiply_into(plan, ring, before, tile.steps, acc)
        product = lambda: values * spread(plan, row, 0) * spread(plan, column, 1)
        return lax.cond(tile.steps > 0, product, lambda: values)  # Rows of no group are zeros: scales may be NaN.

    return pl.run_scoped(with_accumulator, plgpu.ACC(plan.compute_tile, jnp.float32))


def multiply_blocks(plan: Plan, ring: Ring, of_rows, of_matrices, tile: Tile, before):
    """The sums over all steps of a step's sums, one block of K, times its scales.

    The tensor cores add fp8 products with fewer bits than float32 has. Here they add 128 of them, and this warpgroup
    adds these sums in float32. Meanwhile they multiply the next step, into another accumulator, or the other
    warpgroup's.
    """
    steps, role = pl.cdiv(plan.tiles.k, plan.tiles.tile_k), lax.axis_index("role")
    of_matrix = of_matrices.at[scaled_group(plan, tile)]
    first = plan.share((tile.row, tile.col))[0 if plan.swapped else 1]
    block = jnp.minimum(_device.div(first, BLOCK), of_matrix.shape[0] - 1)

    def scales(first):
        return [
            scales_of_rows(plan, tile, of_rows, k) * of_matrix[block, k]
            for k in (jnp.minimum(first + i, steps - 1) for i in range(IN_FLIGHT))
        ]

    def some_steps(first, count: int, sums, mine):
        """`sums` plus the sums of `count` steps, all started before the first is added; and the next steps' scales."""

        def products(*accs):
            for i, acc in enumerate(accs):
                start_product(plan, ring, ring.wait(before + first + i), role, acc)
            following, total = scales(first + count), sums  # Scales arrive while the tensor cores are busy.
            for i, acc in enumerate(accs):
                step_sums = plgpu.wgmma_accumulator_load(acc, wait_n=count - 1 - i)
                ring.release(before + first + i)
                total = total + step_sums * spread(plan, mine[i], 0)
            return total, following

        return pl.run_scoped(products, *[plgpu.ACC(plan.compute_tile)] * count)

    def all_steps():
        turn = lambda i, carry: some_steps(i * IN_FLIGHT, IN_FLIGHT, *carry)
        sums, mine = lax.fori_loop(0, steps // IN_FLIGHT, turn, (zeros(), scales(0)))
        left = steps % IN_FLIGHT
        return some_steps(steps - left, left, sums, mine)[0] if left else sums

    zeros = lambda: plgpu.layout_cast(jnp.zeros(plan.compute_tile, jnp.float32), plgpu.Layout.WGMMA)
    return lax.cond(tile.steps > 0, all_steps, zeros)  # Rows of no group have no steps.


def kernel(a_gmem, b_gmem, table, of_rows, of_matrices, o_gmem, *, plan: Plan, a_smem, b_smem, filled, freed, o_smem):
    """The kernel of `ragged_dot_fp8`."""
    table, ring = plan.tiles.read(table), plan.ring(a_smem, b_smem, filled, freed)
    multiply_tile = multiply_blocks if len(of_matrices.shape) == 3 else multiply_and_scale

    @memory_role
    def _():
        load(plan, table, ring, a_gmem, b_gmem)

    @compute_role
    def _():
        def compute_tile(tile, number, before):
            sums = multiply_tile(plan, ring, of_rows, of_matrices, tile, before)
            store(plan, tile, number, o_gmem, o_smem, sums)

        each_tile(plan, table, compute_tile)
        plgpu.wait_smem_to_gmem(0)

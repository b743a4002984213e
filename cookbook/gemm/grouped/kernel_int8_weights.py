# SPDX-License-Identifier: Apache-2.0
"""The kernels of grouped products with weights of 8 or 4 bits: as in `kernel.py`; weights are converted in registers.

The weights are the operand `a`, and lhs is the operand `b`. A compute warpgroup multiplies a step of weights with
`multiply` of `dense/kernel_int8_weights.py`, or in FP8 with that of `dense/halves.py`.
"""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ... import _device
from ..dense import halves
from ..dense.kernel_int8_weights import copy_step, multiply
from ..kernel import compute_role, memory_role
from ..plan import Plan
from .kernel import load, store
from .kernel_fp8 import scaled_group, scales_of_columns, scales_of_rows, spread
from .plan import Tile, each_tile


def kernel(w_gmem, lhs_gmem, table, scales, o_gmem, *, plan: Plan, **scratch):
    """The kernel of `ragged_dot_int8_weights`."""
    run(w_gmem, lhs_gmem, table, scales, None, None, o_gmem, plan, **scratch)


def kernel_four_bits(w_gmem, lhs_gmem, table, of_rows, bias, o_gmem, *, plan: Plan, **scratch):
    """The kernel of grouped products with weights of 4 bits, which have their scales with them.

    `of_rows` are scales of rows, or None; so is `bias`.
    """
    run(w_gmem, lhs_gmem, table, None, of_rows, bias, o_gmem, plan, **scratch)


def pad_bias(bias, plan: Plan):
    """(G, columns) as `bias_of` reads it: float32, and padded unless all columns of a warpgroup are there or none."""
    bias = bias.astype(jnp.float32)
    return bias if plan.tiles.m % plan.compute_tile[0] == 0 else jnp.pad(bias, ((0, 0), (0, plan.config.tile_m)))


def bias_of(plan: Plan, tile: Tile, bias):
    """The bias of each of this warpgroup's columns, in flight; of columns that are not there, any."""
    (row, _), rows = plan.share((tile.row, tile.col)), plan.compute_tile[0]
    here = pl.ds(jnp.minimum(row, bias.shape[1] - rows), rows)
    return _device.load(bias.at[scaled_group(plan, tile), here], _device.ROWS)


def run(w_gmem, lhs_gmem, table, scales, of_rows, bias, o_gmem, plan: Plan, a_smem, b_smem, filled, freed, o_smem,
        wide_smem=None, **of_groups):  # fmt: skip
    """Both kernels. `scales` are of whole columns, or None; so are `of_rows`, of rows, and `bias`."""
    table, ring = plan.tiles.read(table), plan.ring(a_smem, b_smem, filled, freed, *of_groups.values())

    @functools.partial(memory_role, count=plan.config.warpgroups)
    def _():
        load(plan, table, ring, w_gmem, lhs_gmem, copy_step)

    @functools.partial(compute_role, count=plan.config.warpgroups)
    def _():
        def compute_tile(tile, number, before):
            scale = None if scales is None else scales_of_columns(plan, tile, scales)
            shift = None if bias is None else bias_of(plan, tile, bias)

            def some():
                if plan.config.fp8:
                    sums = halves.multiply(plan, ring, before) * spread(plan, scales_of_rows(plan, tile, of_rows, 0), 0)
                else:
                    of_tile = functools.partial(multiply, plan, ring, wide_smem, before)
                    sums = pl.run_scoped(of_tile, plgpu.ACC(plan.compute_tile))
                sums = sums if scale is None else sums * spread(plan, scale, 1)
                return sums if shift is None else sums + spread(plan, shift, 1)

            none = lambda: plgpu.layout_cast(jnp.zeros(plan.compute_tile, jnp.float32), plgpu.Layout.WGMMA)
            values = lax.cond(tile.steps > 0, some, none)  # Rows of no group have no steps.
            store(plan, tile, number, o_gmem, o_smem, values)

        each_tile(plan, table, compute_tile)
        plgpu.wait_smem_to_gmem(0)

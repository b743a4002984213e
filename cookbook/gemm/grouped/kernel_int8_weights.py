# SPDX-License-Identifier: Apache-2.0
"""The kernels of grouped products with weights of 8 or 4 bits: as in `kernel.py`; weights become 16-bit in registers.

The weights are the operand `a`, and lhs is the operand `b`. A compute warpgroup multiplies a step of weights with
`multiply` of `dense/kernel_int8_weights.py`.
"""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ..dense.kernel_int8_weights import copy_step, multiply
from ..kernel import compute_role, memory_role
from ..plan import Plan
from .kernel import load, store
from .kernel_fp8 import scales_of_columns, spread
from .plan import each_tile


def kernel(w_gmem, lhs_gmem, table, scales, o_gmem, *, plan: Plan, **scratch):
    """The kernel of `ragged_dot_int8_weights`."""
    run(w_gmem, lhs_gmem, table, scales, o_gmem, plan, **scratch)


def kernel_four_bits(w_gmem, lhs_gmem, table, o_gmem, *, plan: Plan, **scratch):
    """The kernel of grouped products with weights of 4 bits, which have their scales with them."""
    run(w_gmem, lhs_gmem, table, None, o_gmem, plan, **scratch)


def run(w_gmem, lhs_gmem, table, scales, o_gmem, plan: Plan, a_smem, b_smem, filled, freed, o_smem, wide_smem=None,
        **of_groups):  # fmt: skip
    """Both kernels. `scales` are of whole columns, or None."""
    table, ring = plan.tiles.read(table), plan.ring(a_smem, b_smem, filled, freed, *of_groups.values())

    @functools.partial(memory_role, count=plan.config.warpgroups)
    def _():
        load(plan, table, ring, w_gmem, lhs_gmem, copy_step)

    @functools.partial(compute_role, count=plan.config.warpgroups)
    def _():
        def compute_tile(tile, number, before):
            scale = None if scales is None else scales_of_columns(plan, tile, scales)

            def some():
                of_tile = functools.partial(multiply, plan, ring, wide_smem, before)
                sums = pl.run_scoped(of_tile, plgpu.ACC(plan.compute_tile))
                return sums if scale is None else sums * spread(plan, scale, 1)

            none = lambda: plgpu.layout_cast(jnp.zeros(plan.compute_tile, jnp.float32), plgpu.Layout.WGMMA)
            values = lax.cond(tile.steps > 0, some, none)  # Rows of no group have no steps.
            store(plan, tile, number, o_gmem, o_smem, values)

        each_tile(plan, table, compute_tile)
        plgpu.wait_smem_to_gmem(0)

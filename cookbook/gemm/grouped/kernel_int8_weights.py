# SPDX-License-Identifier: Apache-2.0
"""The kernel of `ragged_dot_int8_weights`: as in `kernel.py`, with weights that become 16-bit in registers.

The weights are the operand `a`, and lhs is the operand `b`. A compute warpgroup multiplies a step of weights with
`multiply` of `dense/kernel_int8_weights.py`.
"""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ... import _device
from ..dense.kernel_int8_weights import multiply
from ..plan import COMPUTE, COMPUTE_REGISTERS, MEMORY, MEMORY_REGISTERS, Plan
from .kernel import compute, load
from .kernel_fp8 import scales_of_columns, spread


def kernel(w_gmem, lhs_gmem, table, scales, o_gmem, *, plan: Plan, a_smem, b_smem, filled, freed, o_smem,
           wide_smem=None):  # fmt: skip
    """The kernel of `ragged_dot_int8_weights`."""
    table = plan.tiles.read(table)
    (w_smem, w_tma), (lhs_smem, lhs_tma) = (
        plan.a.views(a_smem, plan.interpreted),
        plan.b.views(b_smem, plan.interpreted),
    )
    ring = _device.Ring(filled, freed, plan.num_stages)

    @_device.role(lax.axis_index("role") == MEMORY, decrease_to=MEMORY_REGISTERS)
    def _():
        load(plan, table, ring, w_gmem, lhs_gmem, w_tma, lhs_tma)

    @_device.role(lax.axis_index("role") < COMPUTE, increase_to=COMPUTE_REGISTERS)
    def _():
        def multiply_tile(tile, before):
            scale = scales_of_columns(plan, tile, scales)

            def some():
                of_tile = functools.partial(multiply, plan, ring, w_smem, lhs_smem, wide_smem, before)
                return pl.run_scoped(of_tile, plgpu.ACC(plan.compute_tile)) * spread(plan, scale, 1)

            none = lambda: plgpu.layout_cast(jnp.zeros(plan.compute_tile, jnp.float32), plgpu.Layout.WGMMA)
            return lax.cond(tile.steps > 0, some, none)  # Rows of no group have no steps.

        compute(plan, table, multiply_tile, o_gmem, o_smem)

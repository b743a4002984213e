# SPDX-License-Identifier: Apache-2.0
"""SwiGLU in the epilogue of a grouped product: matrices hold the columns of the gate, then the up product's.

    o = silu(a @ gate) * (a @ up)

A tile of o takes two tiles of the same matrix, one from column j and one from N + j. Both lie in a slot of the ring
beside the tile of rows, and a compute warpgroup has an accumulator for each, as in `gated/kernel.py`.
"""

import functools

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ..gated.kernel import multiply_both
from ..kernel import compute_role, memory_role
from ..operand import Ring
from ..plan import Plan
from .kernel import load, store
from .plan import each_tile


def multiply_and_gate(plan: Plan, ring: Ring, before, steps, *accs):
    """As `multiply_both` of `gated/kernel.py`; then SwiGLU: values of o."""
    gate, up = multiply_both(plan, ring, before, steps, *accs)
    return gate * jax.nn.sigmoid(gate) * up


def kernel(a_gmem, b_gmem, table, o_gmem, *, plan: Plan, a_smem, b_smem, filled, freed, o_smem):
    """The kernel of `ragged_dot` with SwiGLU."""
    table, ring = plan.tiles.read(table), plan.ring(a_smem, b_smem, filled, freed)

    @memory_role
    def _():
        load(plan, table, ring, a_gmem, b_gmem)

    @compute_role
    def _():
        def compute_tile(tile, number, before):
            of_tile = functools.partial(multiply_and_gate, plan, ring, before, tile.steps)
            values = pl.run_scoped(of_tile, *[plgpu.ACC(plan.compute_tile)] * 2)
            store(plan, tile, number, o_gmem, o_smem, values)

        each_tile(plan, table, compute_tile)
        plgpu.wait_smem_to_gmem(0)

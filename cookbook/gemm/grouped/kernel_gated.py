# SPDX-License-Identifier: Apache-2.0
"""SwiGLU in the epilogue of a grouped product: matrices hold the columns of the gate, then the up product's.

    o = silu(a @ gate) * (a @ up)

A tile of o takes two tiles of the same matrix, one from column j and one from N + j. Both lie in a slot of the ring
beside the tile of rows; a compute warpgroup has an accumulator for each, so that a value of the gate and its partner
are in registers of the same thread. So a tile of o has at most half as many values as in a plain product.
"""

import functools

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ..kernel import compute_role, memory_role, release_last
from ..operand import Ring
from ..plan import Plan
from .kernel import load, store
from .plan import each_tile


def swiglu(both):
    """(M, N) silu(gate) * up of (M, 2N) values, which hold the gate, then the up product."""
    gate, up = lax.split(both, [both.shape[1] // 2] * 2, axis=1)
    return jax.nn.silu(gate) * up


def multiply_and_gate(plan: Plan, ring: Ring, before, steps, *accs):
    """As `multiply` of `gemm/kernel.py`, of the gate and of the up product; then SwiGLU: values of o."""
    (rows, cols), role = plan.compute_tile, lax.axis_index("role")

    def parts(operand, smem, size):
        """A warpgroup's parts of a slot's tile: for the gate and for the up product."""
        if not operand.partner:
            return [operand.part(smem, role, size)] * 2
        return [operand.part(smem.at[i], role, size) for i in range(2)]

    @pl.loop(0, steps)
    def _(step):
        slot = ring.wait(before + step)
        a, b = parts(plan.a, ring.a.at[slot], rows), parts(plan.b, ring.b.at[slot], cols)
        with jax.named_scope("wgmma"):
            for acc, a_part, b_part in zip(accs, a, b, strict=True):
                plgpu.wgmma(acc, a_part, b_part.T)
            plgpu.wgmma_wait(2)  # The products of the step before have ended.
        pl.when(step > 0)(lambda: ring.release(before + step - 1))

    gate, up = (acc[...] for acc in accs)  # Waits for the last products.
    release_last(ring, before, steps)
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

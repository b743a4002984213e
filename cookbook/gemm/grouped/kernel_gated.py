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

from ... import _device
from ..plan import COMPUTE, COMPUTE_REGISTERS, MEMORY, MEMORY_REGISTERS, Plan
from .kernel import compute, load


def swiglu(both):
    """(M, N) silu(gate) * up of (M, 2N) values, which hold the gate, then the up product."""
    gate, up = lax.split(both, [both.shape[1] // 2] * 2, axis=1)
    return jax.nn.silu(gate) * up


def multiply(plan: Plan, ring: _device.Ring, a_smem, b_smem, before, steps, *accs):
    """As `multiply` of `gemm/kernel.py`, for a tile of o: the gate and the up product have an accumulator each."""
    (rows, cols), role = plan.compute_tile, lax.axis_index("role")

    def parts(operand, smem, size):
        """A warpgroup's parts of a slot's tile: for the gate and for the up product."""
        if not operand.partner:
            return [operand.part(smem, role, size)] * 2
        return [operand.part(smem.at[i], role, size) for i in range(2)]

    @pl.loop(0, steps)
    def _(step):
        slot = ring.wait(before + step)
        a, b = parts(plan.a, a_smem.at[slot], rows), parts(plan.b, b_smem.at[slot], cols)
        with jax.named_scope("wgmma"):
            for acc, a_part, b_part in zip(accs, a, b, strict=True):
                plgpu.wgmma(acc, a_part, b_part.T)
            plgpu.wgmma_wait(2)  # The products of the step before have ended.
        pl.when(step > 0)(lambda: ring.release(before + step - 1))

    gate, up = (acc[...] for acc in accs)  # Waits for the last products.
    pl.when(steps > 0)(lambda: ring.release(before + steps - 1))
    return gate * jax.nn.sigmoid(gate) * up


def kernel(a_gmem, b_gmem, table, o_gmem, *, plan: Plan, a_smem, b_smem, filled, freed, o_smem):
    """The kernel of `ragged_dot` with SwiGLU."""
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
            return pl.run_scoped(of_tile, plgpu.ACC(plan.compute_tile), plgpu.ACC(plan.compute_tile))

        compute(plan, table, multiply_tile, o_gmem, o_smem)

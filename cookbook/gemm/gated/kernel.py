# SPDX-License-Identifier: Apache-2.0
"""The kernel of gated linear units: that of `gemm/kernel.py`, with two accumulators for one result.

    o = activation(x @ w_gate) * (x @ w_up)

A tile of o takes a tile of each weight. Both lie in a slot of the ring beside the tile of x, and a compute warpgroup
has an accumulator for each product, so that a value of the gate and its partner are in registers of the same thread.
Therefore a tile of o has at most half as many values as that of a plain product, and takes as long.

Role and barrier tables: `gemm/kernel.py`. A warpgroup's sums, those of the gate above those of the up product, pass
through `add_parts` like those of a plain product; `store` here makes them one.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ..kernel import compute, compute_role, load, memory_role, release_last, slot_of_piece, target_of_piece
from ..operand import Ring
from ..plan import Plan


def multiply_both(plan: Plan, ring: Ring, before, steps, *accs):
    """As `multiply_into` of `gemm/kernel.py`, for two tiles in each slot: the sums of the gate, of the up product."""
    (rows, cols), role = plan.compute_tile, lax.axis_index("role")

    def parts(operand, smem, size):
        """A warpgroup's parts of a slot's tile: for the gate and for the up product."""
        if not operand.is_double:
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
    return gate, up


def store(plan: Plan, out, place, stored, sums):
    """A compute warpgroup: as `store` of `gemm/kernel.py`, of `sums`, the gate's and below them the up product's.

    `out` is (the results, slots of shared memory): o alone, or also both products, which a gradient needs.
    """
    results, o_smem = out
    (row, col), (height, width), role = place, plan.store_piece, lax.axis_index("role")
    below = plan.compute_tile[0]

    def rounded(values, limit=None):
        values = values if limit is None else jnp.clip(values, -limit, limit)
        values = values.astype(plan.stored_dtype)
        return plgpu.layout_cast(values, plgpu.Layout.WGMMA_TRANSPOSED) if plan.swapped else values

    # Products that float16 cannot hold are kept as the largest that it can: an activation is as flat there.
    limit = float(jnp.finfo(plan.stored_dtype).max) if plan.stored_dtype == jnp.float16 else None
    for number, (i, j) in enumerate(plan.store_pieces):
        gate, up = (sums[first + i : first + i + height, j : j + width] for first in (0, below))
        values = [rounded(plan.activation(gate) * up), rounded(gate, limit), rounded(up, limit)]
        for count, (result, piece) in enumerate(zip(results, values, strict=False)):
            before = (stored + number) * len(results) + count
            piece_smem, piece_tma = slot_of_piece(plan, o_smem, role, before)
            piece_smem[...] = piece
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(piece_tma, target_of_piece(plan, result, row + i, col + j))


def kernel(a_gmem, b_gmem, vectors, *results, plan: Plan, a_smem, b_smem, filled, freed, o_smem, sums_smem=None,
           met=None, arrived=None):  # fmt: skip
    """The kernel of `glu`. `results` are o, or o, the gate and the up product; and the sums of parts, interpreted."""
    ring = plan.ring(a_smem, b_smem, filled, freed)
    *results, sums_gmem = results if plan.adds_parts and plan.interpreted else (*results, None)

    @memory_role
    def _():
        load(plan, ring, a_gmem, b_gmem)

    @compute_role
    def _():
        def multiply_tile(plan, before):
            of_tile = functools.partial(multiply_both, plan, ring, before, plan.tiles.num_steps)
            return jnp.concatenate(pl.run_scoped(of_tile, *[plgpu.ACC(plan.compute_tile)] * 2))

        compute(plan, multiply_tile, (results, o_smem), (sums_gmem, sums_smem, met, arrived), store)

# SPDX-License-Identifier: Apache-2.0
"""SwiGLU in the epilogue of a grouped product: the matrices hold the columns of the gate, then those of the up product.

    o = silu(a @ gate) * (a @ up)

A tile of o takes two tiles of the same matrix, one from column j and one from N + j. Both lie in a slot of the ring
beside the tile of rows; a compute warpgroup has an accumulator for each, so that a value of the gate and its partner
are in registers of the same thread. A tile of o thus has at most half as many values as that of a plain product.
"""

import dataclasses

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ... import _device
from ..plan import Operand, swizzled
from .plan import RowPlan


def swiglu(both):
    """(M, N) silu(gate) * up of (M, 2N) values, which hold the gate, then the up product."""
    gate, up = lax.split(both, [both.shape[1] // 2] * 2, axis=1)
    return jax.nn.silu(gate) * up


@dataclasses.dataclass(frozen=True)
class Pair(Operand):
    """Two tiles of one matrix, of which the second begins `distance` rows after the first."""

    distance: int = 0

    @property
    def half(self) -> Operand:
        return Operand(self.dtype, self.rows, self.tile_k, self.transposed, self.in_pieces, stacked=self.stacked)

    @property
    def pieces(self) -> list[tuple[int, int]]:
        return self.half.pieces * 2

    def smem(self, slots: int, interpreted: bool):
        piece = self.piece if self.in_pieces else None
        return swizzled((slots, 2, *self.tile), self.dtype, piece, self.swizzle, interpreted)

    def copy(self, gmem, at, smem, filled, shared: str | None):
        for i in range(2):
            begin = tuple(x + i * self.distance * (dim == self.transposed) for dim, x in enumerate(at))
            self.half.copy(gmem, begin, smem.at[i], filled, shared)

    def part(self, smem, wg, rows: int):
        """Those of the gate's tile; then those of its partner's."""
        return [self.half.part(smem.at[i], wg, rows) for i in range(2)]


def gated(plan: RowPlan) -> RowPlan:
    """`plan`, of a product with N columns, for matrices of 2N columns.

    Raises:
      ValueError: a warpgroup has too few registers for both accumulators.
    """
    rows, cols = plan.compute_tile
    c, t = plan.config, plan.tiles
    if rows * cols > 64 * 128:
        raise ValueError(
            f"{c.tile_m=} x {c.tile_n=} with activation='swiglu': at most 64 x 128 values of o for each of two "
            "warpgroups, which accumulate the gate and the up product apart"
        )
    name = "a" if c.swapped else "b"
    fields = {field.name: getattr(getattr(plan, name), field.name) for field in dataclasses.fields(Operand)}
    return dataclasses.replace(plan, **{name: Pair(**fields, distance=t.m if c.swapped else t.n)})


def multiply(plan: RowPlan, ring: _device.Ring, a_smem, b_smem, before, acc):
    """As `roles.multiply`, for a tile of o; `acc` stays unused, because it takes two accumulators at once."""
    steps, (rows, cols), role = plan.tiles.num_steps, plan.compute_tile, lax.axis_index("role")

    def products(*accs):
        @pl.loop(0, steps)
        def _(step):
            slot = ring.wait(before + step)
            a, b = plan.a.part(a_smem.at[slot], role, rows), plan.b.part(b_smem.at[slot], role, cols)
            pairs = [(half, b) for half in a] if isinstance(a, list) else [(a, half) for half in b]
            with jax.named_scope("wgmma"):
                for acc, (a, b) in zip(accs, pairs, strict=True):
                    plgpu.wgmma(acc, a, b.T)
                plgpu.wgmma_wait(2)  # The products of the step before have ended.
            pl.when(step > 0)(lambda: ring.free(before + step - 1))

        gate, up = (acc[...] for acc in accs)  # Waits for the last products.
        pl.when(steps > 0)(lambda: ring.free(before + steps - 1))
        return gate * jax.nn.sigmoid(gate) * up

    return pl.run_scoped(products, plgpu.ACC(acc.shape), plgpu.ACC(acc.shape))

# SPDX-License-Identifier: Apache-2.0
"""Scales of grouped products of few bits: of rows, of each matrix's columns, and of blocks along K.

The kernel gets them beside the table of tiles. Tiles begin at any row, so that scales of rows are padded by a tile.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ... import _device, _host
from .. import kernel as roles
from .plan import RowPlan

BLOCK = 128  # Values of K, and columns, that share a scale.
IN_FLIGHT = 2  # Steps whose products a warpgroup has started before it adds the sums of the first.


@dataclasses.dataclass(frozen=True)
class ScaledPlan(RowPlan):
    """A plan of products of groups of rows that has scales: `read` with (table, of rows or None, of matrices)."""

    of_rows: Any = None  # (1 or blocks of K, rows and some more), float32.
    of_matrices: Any = None  # (G, columns and some more); or (G, blocks of columns, blocks of K), float32.

    def reading(self, table) -> "ScaledPlan":
        table, of_rows, of_matrices = table
        return dataclasses.replace(super().reading(table), of_rows=of_rows, of_matrices=of_matrices)

    @property
    def group(self):
        """The group whose scales the tile reads; those of rows of no group are not used, and must not be beyond all."""
        return jnp.minimum(self.tiles.entry.group, self.tiles.num_groups - 1)

    def row_scales(self, block):
        """The scales of this warpgroup's rows for a block of K, which are in flight."""
        start, ref = self.place_of_warpgroup(None)[self.tiles.axis], self.of_rows.at[block]
        if self.swapped:
            start, ref = start & ~1, ref.at[start & 1]
        return self._vector(ref, start, self.tiles.axis)

    def column_scales(self):
        """The scales of this warpgroup's columns, which are in flight."""
        axis = 1 - self.tiles.axis
        return self._vector(self.of_matrices.at[self.group], self.place_of_warpgroup(None)[axis], axis)

    def _vector(self, ref, start, axis: int):
        ref = ref.at[pl.ds(start, self.compute_tile[axis])]
        return plgpu.load(ref, layout=plgpu.Layout.WGMMA.reduce(1 - axis), optimized=False)

    def spread(self, vector, axis: int):
        """`vector` in the shape of the sums."""
        return lax.broadcast_in_dim(vector, self.compute_tile, [axis ^ self.swapped])


def scaled(config_plan: RowPlan) -> ScaledPlan:
    """The plan with room for scales."""
    return ScaledPlan(**{field.name: getattr(config_plan, field.name) for field in dataclasses.fields(RowPlan)})


def row_scales(scales, plan: RowPlan):
    """(M, blocks) as the kernel reads them: (blocks, M and a tile more).

    With `swapped` rows lie along the columns of the sums, where a thread loads pairs, at multiples of 8 bytes. Groups
    begin at any row, so there are two copies, (blocks, 2, ...), of which the second begins one row later.
    """
    m, size = len(scales), plan.tiles.cluster_tile[plan.tiles.axis]
    padded = jnp.pad(scales.astype(jnp.float32).T, ((0, 0), (0, size + m % 2 + 1)))
    return jnp.stack([padded[:, :-1], padded[:, 1:]], axis=1) if plan.swapped else padded


def column_scales(scales, plan: RowPlan):
    """(G, N) as the kernel reads them: columns padded to whole tiles."""
    return _host.pad_to_tiles(scales.astype(jnp.float32), (1, plan.tiles.cluster_tile[1 - plan.tiles.axis]))


def multiply(plan: ScaledPlan, ring: _device.Ring, a_smem, b_smem, before, acc):
    """As `roles.multiply`; then the sums times the scales of rows and of columns."""
    row, column = plan.row_scales(0), plan.column_scales()
    values = roles.multiply(plan, ring, a_smem, b_smem, before, acc)
    product = lambda: values * plan.spread(row, 0) * plan.spread(column, 1)
    return lax.cond(plan.tiles.num_steps > 0, product, lambda: values)  # Rows of no group are zeros: scales may be NaN.


def multiply_blocks(plan: ScaledPlan, ring: _device.Ring, a_smem, b_smem, before, acc):
    """The sums over all steps of a step's sums, one block of K, times its scales.

    The tensor cores add fp8 products with fewer bits than float32 has. Here they add 128 of them, and this warpgroup
    adds these sums in float32. Meanwhile they multiply the next step, whose accumulator is another, or the other
    warpgroup's. `acc` stays unused, because each step begins with an empty accumulator.
    """
    steps, (rows, cols), role = pl.cdiv(plan.tiles.k, plan.tiles.tile_k), plan.compute_tile, lax.axis_index("role")
    of_matrix = plan.of_matrices.at[plan.group]
    first = plan.place_of_warpgroup(None)[0 if plan.swapped else 1]
    block = jnp.minimum(_device.div(first, BLOCK), of_matrix.shape[0] - 1)

    def scales(first):
        return [
            plan.row_scales(k) * of_matrix[block, k]
            for k in (jnp.minimum(first + i, steps - 1) for i in range(IN_FLIGHT))
        ]

    def some_steps(first, count: int, sums, mine):
        """`sums` and those of `count` steps, whose products are all started first; and the scales of the next steps."""

        def products(*accs):
            for i, acc in enumerate(accs):
                slot = ring.wait(before + first + i)
                a, b = plan.a.part(a_smem.at[slot], role, rows), plan.b.part(b_smem.at[slot], role, cols)
                with jax.named_scope("wgmma"):
                    plgpu.wgmma(acc, a, b.T)
            following, total = scales(first + count), sums  # Scales arrive while the tensor cores are busy.
            for i, acc in enumerate(accs):
                step_sums = plgpu.wgmma_accumulator_load(acc, wait_n=count - 1 - i)
                ring.free(before + first + i)
                total = total + step_sums * plan.spread(mine[i], 0)
            return total, following

        return pl.run_scoped(products, *[plgpu.ACC(acc.shape)] * count)

    def all_steps():
        turn = lambda i, carry: some_steps(i * IN_FLIGHT, IN_FLIGHT, *carry)
        sums, mine = lax.fori_loop(0, steps // IN_FLIGHT, turn, (zeros(), scales(0)))
        left = steps % IN_FLIGHT
        return some_steps(steps - left, left, sums, mine)[0] if left else sums

    zeros = lambda: plgpu.layout_cast(jnp.zeros(acc.shape, jnp.float32), plgpu.Layout.WGMMA)
    return lax.cond(plan.tiles.num_steps > 0, all_steps, zeros)  # Rows of no group have no steps.

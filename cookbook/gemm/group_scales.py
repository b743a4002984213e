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

from .. import _mgpu
from . import roles
from .groups import RowPlan

BLOCK = 128  # Values of K, and columns, that share a scale.


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

    def vector(self, ref, axis: int):
        """The part of a vector (along `axis` of o) that belongs to the sums of this warpgroup."""
        axis = axis ^ self.swapped
        start, size = self.place_of_warpgroup(None)[axis], self.compute_tile[axis]
        return plgpu.load(ref.at[pl.ds(start, size)], layout=plgpu.Layout.WGMMA.reduce(1 - axis), optimized=False)

    def spread(self, vector, axis: int):
        """`vector` in the shape of the sums."""
        return lax.broadcast_in_dim(vector, self.compute_tile, [axis ^ self.swapped])


def scaled(config_plan: RowPlan) -> ScaledPlan:
    """The plan with room for scales."""
    return ScaledPlan(**{field.name: getattr(config_plan, field.name) for field in dataclasses.fields(RowPlan)})


def row_scales(scales, plan: RowPlan):
    """(M, blocks) as the kernel reads them: (blocks, M and a tile more)."""
    size = plan.tiles.cluster_tile[plan.tiles.axis]
    return jnp.pad(scales.astype(jnp.float32).T, ((0, 0), (0, size)))


def column_scales(scales, plan: RowPlan):
    """(G, N) as the kernel reads them: columns padded to whole tiles."""
    return _mgpu.pad_to_tiles(scales.astype(jnp.float32), (1, plan.tiles.cluster_tile[1 - plan.tiles.axis]))


def multiply(plan: ScaledPlan, ring: _mgpu.Ring, a_smem, b_smem, before, acc):
    """As `roles.multiply`; then the sums times the scales of rows and of columns."""
    row, column = plan.vector(plan.of_rows.at[0], 0), plan.vector(plan.of_matrices.at[plan.group], 1)  # In flight.
    values = roles.multiply(plan, ring, a_smem, b_smem, before, acc)
    product = lambda: values * plan.spread(row, 0) * plan.spread(column, 1)
    return lax.cond(plan.tiles.num_steps > 0, product, lambda: values)  # Rows of no group are zeros: scales may be NaN.


def multiply_blocks(plan: ScaledPlan, ring: _mgpu.Ring, a_smem, b_smem, before, acc):
    """The sums over all steps of a step's sums, one block of K, times its scales.

    The tensor cores add fp8 products with fewer bits than float32 has; here they add 128 of them, and then this
    warpgroup adds the sums in float32, while the other's products keep the tensor cores busy. `acc` stays unused,
    because each step begins with an empty accumulator.
    """
    steps, (rows, cols), role = plan.tiles.num_steps, plan.compute_tile, lax.axis_index("role")
    of_matrix = plan.of_matrices.at[plan.group]
    first = plan.place_of_warpgroup(None)[0 if plan.swapped else 1]
    block = jnp.minimum(_mgpu.div(first, BLOCK), of_matrix.shape[0] - 1)

    def scales(step):
        return plan.vector(plan.of_rows.at[step], 0) * of_matrix[block, step]

    def body(step, carry):
        sums, mine = carry
        slot = ring.wait(before + step)
        a, b = plan.a.part(a_smem.at[slot], role, rows), plan.b.part(b_smem.at[slot], role, cols)
        following = scales(jnp.minimum(step + 1, steps - 1))  # They arrive while the tensor cores are busy.

        def products(acc):
            with jax.named_scope("wgmma"):
                plgpu.wgmma(acc, a, b.T)
            return acc[...]

        partial = pl.run_scoped(products, plgpu.ACC(acc.shape))
        ring.free(before + step)
        return sums + partial * plan.spread(mine, 0), following

    sums = plgpu.layout_cast(jnp.zeros(acc.shape, jnp.float32), plgpu.Layout.WGMMA)
    return lax.fori_loop(0, steps, body, (sums, scales(0)))[0]

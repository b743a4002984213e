# SPDX-License-Identifier: Apache-2.0
"""The gradient of logits that are computed a second time, where they are computed: they are never stored.

    z = hidden @ weight^T   in the accumulators of gemm's kernel, float32
    g[r, c] = (a[r] exp(z[r, c] - lse[r]) - b[r] q[r, c]) dz/dx[r, c]       as in `kernel.py`, and stored as there

The statistics of the rows are known, so this takes the place of the `store` of `gemm/kernel.py`, whose roles and
barriers these are, and saves a kernel that would read and write all logits.

Bound by: the tensor cores.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .. import _device
from ..gemm.kernel import slot_of_piece, target_of_piece
from ..gemm.plan import Plan
from .kernel import capped, exp


def store_gradient(plan: Plan, out, place, stored, values, *, vocabulary: int, soft_cap: float | None, on: float,
                   off: float):  # fmt: skip
    """A compute warpgroup: the gradient of its share of a tile, in the place of gemm's `store`.

    `vectors` hold, for each row, "label" as in `kernel.py`, "lse", "a" and "b"; and "column", the one of the
    vocabulary that is o's first one. From column `vocabulary` on there are zeros.
    """
    vectors, o_gmem, o_smem = out
    (row, col), (height, width), role = place, plan.store_piece, jax.lax.axis_index("role")
    first = vectors["column"][0] + col
    load = lambda name, i: _device.load(vectors[name].at[pl.ds(row + i, height)], _device.ROWS)
    of_rows = {i: {name: load(name, i) for name in ("label", "lse", "a", "b")} for i, _ in plan.store_pieces}
    spread = lambda x: _device.spread(x, 0, (height, width))
    for number, (i, j) in enumerate(plan.store_pieces):
        label, lse, a, b = (of_rows[i][name] for name in ("label", "lse", "a", "b"))
        z = capped(values[i : i + height, j : j + width], soft_cap)
        column = first + j + _device.indices((height, width))[1]
        g = spread(a) * exp(z - spread(lse))
        g = g - jnp.where(column == spread(label), spread(b * (on + off)), spread(b * off))
        if soft_cap is not None:
            ratio = z * (1 / soft_cap)
            g = g * (1.0 - ratio * ratio)
        at_edge = first + j + width > vocabulary
        g = jax.lax.cond(at_edge, lambda g, column: jnp.where(column < vocabulary, g, 0.0), lambda g, _: g, g, column)
        piece_smem, piece_tma = slot_of_piece(plan, o_smem, role, stored + number)
        piece_smem[...] = g.astype(plan.out_dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(piece_tma, target_of_piece(plan, o_gmem, row + i, col + j))

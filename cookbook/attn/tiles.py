# SPDX-License-Identifier: Apache-2.0
"""Values in shared memory in tiles of 8 rows and 64 columns, which TMA copies alone or as whole blocks."""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .. import _device
from .._device import PIECE, div, rem
from .core import TILE_ROWS, Problem

# Queries that share a key, from which one copy that pads all values costs less than copies of each tile. With heads of
# 128 on an H200 the two took equally long with 1022 queries; from 2902 on tiles took 12 to 24 % longer.
PADDED_FROM = 1024


def value_tiles(stages: int, block_kv: int, problem: Problem):
    """Shared memory for values, (slots, block_kv, width), in tiles of 8 rows and 64 columns, as tensor cores read them;
    also with each tile alone, (slots, block_kv / 8, panels, 8, 64), the only view in which TMA can cut them off at the
    edges of an array; and as (slots, block_kv / 8, 8 width), for `clear`. The interpreter gets the first."""
    transforms = _device.swizzled()["transforms"]
    tiled = plgpu.SMEM((stages, block_kv, problem.width), problem.dtype, transforms=transforms)
    alone = (stages, block_kv // TILE_ROWS, problem.panels, TILE_ROWS, PIECE)
    swizzled = plgpu.SMEM(alone, problem.dtype, transforms=transforms[1:])
    eights = plgpu.SMEM((stages, block_kv // TILE_ROWS, TILE_ROWS * problem.width), problem.dtype)
    return tiled if problem.interpreted else plgpu.RefUnion(tiled, swizzled, eights)


def by_tile(problem: Problem, num_rows: int, num_queries: int) -> bool:
    """Whether `num_rows` values are copied tile by tile: they come in no whole tiles, and have few queries."""
    is_whole = num_rows % TILE_ROWS == 0 and problem.whole_panels
    return not is_whole and num_queries * problem.group < PADDED_FROM


def padded(problem: Problem, values, axis: int):
    """`values`, with zeros after their rows, along `axis`, and their columns, up to whole tiles."""
    pads = [(0, 0)] * values.ndim
    pads[axis], pads[-1] = (0, -values.shape[axis] % TILE_ROWS), (0, problem.width - values.shape[-1])
    return jnp.pad(values, pads) if any(map(any, pads)) else values


def copy_tiles(problem: Problem, source, smem, tiles, first: int, num: int, filled):
    """Copies rows `first` to `first + num` of a slot of `value_tiles`, whose views are `smem` and `tiles`, one tile at
    a time: `source(row, rows, panel)` are so many of them from `row` on, and a panel of their columns."""
    rows = num if problem.interpreted else TILE_ROWS

    @pl.loop(0, num // rows)
    def _(i):
        for p in range(problem.panels):
            if problem.interpreted:
                target = smem.at[pl.ds(first, num), pl.ds(p * PIECE, PIECE)]
            else:
                target = tiles.at[first // TILE_ROWS + i, p]
            plgpu.copy_gmem_to_smem(source(i * rows, rows, p), target, filled)


def copies_of_tiles(problem: Problem, num: int) -> int:
    """How many copies `copy_tiles` makes of `num` rows."""
    return problem.panels * (1 if problem.interpreted else num // TILE_ROWS)


def clear(problem: Problem, values, first, end):
    """Zeroes the rows of a slot of `value_tiles` before `first` and from `end` on. `values` has 8 rows together, or
    single ones in the interpreter."""
    if problem.interpreted:
        row = lax.broadcasted_iota(jnp.int32, values.shape, 0)
        values[...] = jnp.where((row >= first) & (row < end), values[...], 0)
        plgpu.commit_smem()
        return

    def clear_eight(eight):
        # Rows of 8 lie together in panels of 128 bytes, and swizzling moves nothing out of its row.
        place = plgpu.broadcasted_iota(jnp.int32, values.shape[1:], 0)
        row = TILE_ROWS * eight + rem(div(place, PIECE), TILE_ROWS)
        values[eight] = jnp.where((row >= first) & (row < end), values[eight], jnp.zeros((), problem.dtype))

    num = values.shape[0]
    stop = jnp.clip(div(first + TILE_ROWS - 1, TILE_ROWS), 0, num)
    pl.loop(0, stop)(clear_eight)
    pl.loop(jnp.clip(div(jnp.maximum(end, 0), TILE_ROWS), stop, num), num)(clear_eight)
    plgpu.commit_smem()

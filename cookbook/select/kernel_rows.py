# SPDX-License-Identifier: Apache-2.0
"""The k largest values of short rows, such as a router's: 8 threads hold a row, and take its maximum k times.

A block of one warpgroup has 16 rows in registers. In each round the threads of a row find its highest key, and the
first column that has it, by shuffles; that key is then out. No shared memory is used, and no barrier.

Bound by: the rounds, 7 instructions per value and two reductions across 8 threads each.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .. import _device, _host
from . import threads
from .part import HIGHEST, LOWEST, from_key, to_key

ROWS, LANES = 16, 8  # Rows of a block; threads of a row.
COLUMNS_MAX, K_MAX = 512, 16  # 128 registers for keys and columns. The rounds depend on each other: few are quick.


def layout(vec: int):
    """The layout of (ROWS, columns): each warp has 4 rows, and each thread runs of `vec` columns of one."""
    columns, rows = LANES * vec, ROWS // 4
    tiling = plgpu.Tiling(((ROWS, columns), (rows, columns), (vec,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)


def fits(rows: int, cols: int, k: int) -> bool:
    return rows >= ROWS and cols <= COLUMNS_MAX and k <= K_MAX


def _rows(x_gmem, out_gmem, index_gmem, *, k: int, vec: int, interpreted: bool):
    rows, cols = x_gmem.shape
    turn, form = lax.axis_index("rows") * ROWS, layout(vec)
    start = jnp.minimum(turn, rows - ROWS)  # The last block begins earlier, and stores only rows that are left.
    keys = to_key(_device.load(x_gmem.at[pl.ds(start, ROWS)], form))
    column = plgpu.broadcasted_iota(jnp.int32, keys.shape, 1, layout=form)
    row = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=form.reduce(1))
    slot = jnp.where(row >= turn - start, (row - (turn - start)) * k, -K_MAX)
    here = pl.ds(turn * k, ROWS * k)
    of_row = lambda number: lax.broadcast_in_dim(number, keys.shape, [0])

    def take(i, state):
        keys, column = state
        top = jnp.max(keys, axis=1)
        first = jnp.min(jnp.where(keys == of_row(top), column, HIGHEST), axis=1)
        for ref, value in ((out_gmem, from_key(top, out_gmem.dtype)), (index_gmem, first)):
            threads.scatter(ref.at[here], slot + i, value, form.reduce(1), interpreted)
        gone = column == of_row(first)
        return jnp.where(gone, LOWEST, keys), jnp.where(gone, HIGHEST, column)

    lax.fori_loop(0, k, take, (keys, column))


def select_rows(x, k: int, target: _host.Target, params):
    """(values, indices), (rows, k) each, of `x` as `fits` has it."""
    rows, dtype = x.shape[0], x.dtype
    if more := -x.shape[1] % LANES:
        x = jnp.pad(to_key(x), ((0, 0), (0, more)), constant_values=LOWEST)
    vec = next(vec for vec in (4, 2, 1) if x.shape[1] % (LANES * vec) == 0)
    num_blocks = pl.cdiv(rows, ROWS)
    shape = (num_blocks * ROWS * k,)
    values, index = _host.kernel(
        functools.partial(_rows, k=k, vec=vec, interpreted=target.interpreted),
        out_type=(jax.ShapeDtypeStruct(shape, dtype), jax.ShapeDtypeStruct(shape, jnp.int32)),
        grid=(num_blocks,),
        grid_names=("rows",),
        compiler_params=params,
    )(x)
    return tuple(each.reshape(-1, k)[:rows] for each in (values, index))

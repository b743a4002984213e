"""Checkers of the exercises of chapter 4."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from exercises.judge import NotYet, checker, normal, require_close, run_kernel, speed
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

import cookbook

TILE_M, TILE_N, TILE_K = 32, 64, 8  # Tile of the kernel of exercise 4.
# The layout of its accumulator: this chapter's, 16 rows x 32 columns at a time.
LAYOUT = plgpu.Layout.TILED(plgpu.Tiling(((16, 32), (4, 32), (4,))), warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)


@checker
def check_traffic(answer) -> str:
    """Exercise 1: `answer(m, n, k, tile_m, tile_n, itemsize)` is how many bytes of a and b all blocks read together."""
    for case, hint in (
        ((256, 512, 96, 64, 128, 4), "a block reads tile_m rows of a and tile_n columns of b, each K long"),
        ((256, 512, 96, 128, 64, 4), "which of the two operands is read once for each tile along M?"),
        ((256, 512, 96, 64, 128, 2), "itemsize is the bytes of one element"),
        ((256, 500, 96, 64, 128, 4), "a block at the edge needs its rows of a no less than the others"),
        ((250, 512, 97, 64, 128, 4), "a block at the edge reads no element that does not exist"),
        ((1, 1, 7, 64, 128, 4), "one block, one row, one column"),
        ((8192, 8192, 8192, 128, 128, 4), "large numbers are no different: integers are exact"),
    ):
        got, want = answer(*case), _traffic(*case)
        if got != want:
            given = f"m, n, k, tile_m, tile_n, itemsize = {case}"
            if not isinstance(got, int | float | np.number):
                raise NotYet(f"for {given} it gives {got!r}, not a number of bytes")
            raise NotYet(f"for {given} it gives {got:,}, too {'few' if got < want else 'many'}. Hint: {hint}.")
    return "a is read once for each column of tiles, b once for each row of tiles, and edges are counted as they are."


def _traffic(m, n, k, tile_m, tile_n, itemsize) -> int:
    return itemsize * k * (m * -(-n // tile_n) + n * -(-m // tile_m))


@checker
def check_ring(answer) -> str:
    """Exercise 2: `answer(a, b)` is a kernel, a @ b through a ring of slots that are refilled in time."""
    a, b = normal(3, (128, 48)), normal(4, (48, 128))
    out = run_kernel(answer, a, b, in_flight=2)
    require_close(out, np.asarray(a, np.float64) @ np.asarray(b, np.float64), 1e-4, "128 x 128, K = 48")
    size = jax.ShapeDtypeStruct((4096, 4096), jnp.float32)
    return "a slot is refilled after all four warps have read it." + speed(answer, cookbook.matmul_blocked, size, size)


@checker
def check_tile_of(answer) -> str:
    """Exercise 3: `answer(block, tiles_m, tiles_n, width)` is the (row, column) of the tile that `block` computes."""
    for tiles_m, tiles_n, width in ((3, 4, 2), (4, 6, 3), (5, 2, 2), (3, 7, 3), (4, 3, 8), (2, 5, 1)):
        where = f"{tiles_m} x {tiles_n} tiles, bands of {width}"
        want = _tile_order(tiles_m, tiles_n, width)
        got = [answer(block, tiles_m, tiles_n, width) for block in range(tiles_m * tiles_n)]
        for block, tile in enumerate(got):
            if not isinstance(tile, tuple) or len(tile) != 2:
                raise NotYet(f"{where}: block {block} gives {tile!r}, not a pair (row, column)")
            if not (0 <= tile[0] < tiles_m and 0 <= tile[1] < tiles_n):
                raise NotYet(f"{where}: block {block} computes the tile {tile}, which does not exist")
            if tile in got[:block]:
                raise NotYet(f"{where}: blocks {got.index(tile)} and {block} both compute the tile {tile}")
            if tile != want[block]:
                raise NotYet(f"{where}: block {block} computes the tile {tile}; it should compute {want[block]}")
    return "every tile is computed once, and a narrower last band is no exception."


def _tile_order(tiles_m, tiles_n, width):
    bands = [range(first, min(first + width, tiles_n)) for first in range(0, tiles_n, width)]
    return [(row, col) for band in bands for row in range(tiles_m) for col in band]


@checker
def check_epilogue(answer) -> str:
    """Exercise 4: `answer(acc, bias_gmem, cols, layout)` makes relu(acc + bias) of the accumulator of a tile.

    acc is (32, 64) in `layout`, bias_gmem (N,) float32, cols the columns of the tile.
    """
    a, b, bias = normal(0, (64, 16)), normal(1, (16, 128)), 2 * normal(2, (128,))
    out = np.asarray(run_kernel(functools.partial(_matmul_with, answer), a, b, bias))
    exact = [np.asarray(x, np.float64) for x in (a, b, bias)]
    product, bias = exact[0] @ exact[1], exact[2]
    for wrong, text in (
        (product, "that is a @ b: the bias is not added yet"),
        (product + bias, "the bias is there, but negative values are not zero yet"),
        (np.maximum(product, 0), "negative values are zero, but the bias is not added yet"),
        (np.maximum(product, 0) + bias, "the bias is added after relu; it belongs before"),
        (np.maximum(product + np.tile(bias[:TILE_N], 2), 0), "every tile adds the first columns of the bias: use cols"),
    ):
        if out.shape == wrong.shape and np.abs(out - wrong).max() < 1e-3:
            raise NotYet(text)
    require_close(out, np.maximum(product + bias, 0), 1e-4, "64 x 128, K = 16")
    return "the bias was added in registers: no array of M x N crossed memory for it."


def _matmul_with(epilogue, a, b, bias):
    """`epilogue` of a @ b, as a kernel: this chapter's, without ring and order."""
    (m, k), n = a.shape, b.shape[1]

    def kernel(a_gmem, b_gmem, bias_gmem, o_gmem, a_smem, b_smem, o_smem, arrived):
        rows, cols = pl.ds(lax.axis_index("mi") * TILE_M, TILE_M), pl.ds(lax.axis_index("ni") * TILE_N, TILE_N)

        def step(i, acc):
            ks = pl.ds(i * TILE_K, TILE_K)
            plgpu.copy_gmem_to_smem(a_gmem.at[ks, rows], a_smem, arrived)
            plgpu.copy_gmem_to_smem(b_gmem.at[ks, cols], b_smem, arrived)
            plgpu.barrier_wait(arrived)
            for j in range(TILE_K):
                column = plgpu.load(a_smem.at[j], layout=LAYOUT.reduce(1), optimized=False)
                row = plgpu.load(b_smem.at[j], layout=LAYOUT.reduce(0), optimized=False)
                acc += lax.broadcast_in_dim(column, acc.shape, [0]) * lax.broadcast_in_dim(row, acc.shape, [1])
            plgpu.commit_smem()
            return acc

        acc = plgpu.layout_cast(jnp.zeros((TILE_M, TILE_N), jnp.float32), LAYOUT)
        acc = lax.fori_loop(0, k // TILE_K, step, acc)
        o_smem[...] = epilogue(acc, bias_gmem, cols, LAYOUT)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(o_smem, o_gmem.at[rows, cols])
        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((m, n), jnp.float32),
        grid=(m // TILE_M, n // TILE_N),
        grid_names=("mi", "ni"),
        scratch_types=[
            plgpu.SMEM((TILE_K, TILE_M), jnp.float32),  # a lies transposed here, so that its columns are rows.
            plgpu.SMEM((TILE_K, TILE_N), jnp.float32),
            plgpu.SMEM((TILE_M, TILE_N), jnp.float32),
            plgpu.Barrier(num_arrivals=2),
        ],
    )(a.T, b, bias)

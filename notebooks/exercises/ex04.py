"""Checkers of the exercises of chapter 4."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from exercises.judge import (
    NotYet,
    checker,
    normal,
    play_kernel,
    require_answers,
    require_close,
    require_order,
    require_rings,
    require_staged,
    run_kernel,
    speed,
    wide,
)
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

import cookbook

TILE_M, TILE_N, TILE_K = 32, 64, 8  # Tile of the kernel of exercise 2.
# The layout of its accumulator: this chapter's, 16 rows x 32 columns at a time.
LAYOUT = plgpu.Layout.TILED(plgpu.Tiling(((16, 32), (4, 32), (4,))), warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)


@checker
def check_traffic(answer) -> str:
    """Exercise 1: `answer(m, n, k, tile_m, tile_n, itemsize)` is how many bytes of a and b all blocks read together."""
    cases = (
        *((256, 512, 96, 64, 128, 4), (256, 512, 96, 128, 64, 4), (256, 512, 96, 64, 128, 2)),
        *((256, 500, 96, 64, 128, 4), (250, 512, 97, 64, 128, 4), (1, 1, 7, 64, 128, 4)),
        (130, 300, 96, 64, 128, 4),  # The tiles at both edges are less than half full.
        (8192, 8192, 8192, 128, 128, 4),
    )
    likely = (
        (lambda m, n, k, tm, tn, size: size * k * (m + n), "A block reads its operands, and so do all its neighbours."),
        (lambda m, n, k, tm, tn, size: _traffic(m, n, k, tn, tm, size), "Which is read once for each tile along M?"),
        (lambda *case: _traffic(*case[:5], 4), "`itemsize` is the bytes of one element."),
        (lambda m, n, k, tm, tn, size: size * k * (tm + tn) * -(-m // tm) * -(-n // tn), "At the edge a block reads "
         "no element that does not exist."),
    )  # fmt: skip
    said = "A block reads tile_m rows of a and tile_n columns of b, each K long; one at the edge needs its rows, too."
    draw = lambda rng: (*map(int, rng.integers(1, 900, 3)), *map(int, rng.integers(8, 200, 2)), 4)
    require_answers(answer, cases, _traffic, likely, said, draw=draw)
    return "a is read once for each column of tiles, b once for each row of tiles, and edges are counted as they are."


def _traffic(m, n, k, tile_m, tile_n, itemsize) -> int:
    return itemsize * k * (m * -(-n // tile_n) + n * -(-m // tile_m))


@checker
def check_ring(answer) -> str:
    """Exercise 3: `answer(a, b, tile_k, num_stages)` is a kernel, a @ b through a ring of stages that are refilled in
    time."""
    other = dict(tile_k=8, num_stages=3)
    # Three steps of the ring as it is written; then so many of another that each stage is refilled again and again.
    for k, n, how in ((48, 256, {}), (56, 128, other)):
        a, b = normal(3, (128, k)), normal(4, (k, n))
        try:
            out = run_kernel(functools.partial(answer, **how), a, b, in_flight=2, report_first=True)
            require_close(out, np.matmul(*wide(a, b)), 1e-4, f"128 x {n}, K = {k}")
        except NotYet as problem:
            called = " (with tile_k = 8 and num_stages = 3)" if how else ""
            raise NotYet(f"{problem}{called}") from None
    require_staged(answer, a, b, loads=2)
    for k, how in ((RING_K, {}), (16, {}), (112, dict(num_stages=3))):
        shapes = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((128, k), (k, 128)))
        played = play_kernel(functools.partial(answer, **how), *shapes)
        require_order(played)
        if k != 16:
            require_rings(played, in_flight=2)
        _require_loads(played, k)
        _require_own_waits(played, how.get("num_stages", 2))
    size = jax.ShapeDtypeStruct((4096, 4096), jnp.float32)
    return "a stage is refilled after all four warps have read it." + speed(answer, cookbook.matmul_blocked, size, size)


RING_K = 256  # More than fits into shared memory at once.


def _require_loads(played, k: int):
    """Raises NotYet unless each block loads its rows of a and its columns of b once, a step of K at a time."""
    for block in filter(lambda block: block.is_whole, played[0]):
        values = sum(math.prod(event.shape) for event in block.events if event.kind == "load")
        if values != 2 * 128 * k:
            raise NotYet(
                f"for K = {k} a block loads {values:,} values, and it needs {2 * 128 * k:,}: fetch each step once, and "
                "none that does not exist, or its copies arrive when nobody waits for them"
            )
        if block.count("load") < 2 * k // 48:
            raise NotYet(f"for K = {k} a block starts too few copies: a ring has one of `a` and one of `b` per step")


def _require_own_waits(played, stages: int):
    """Raises NotYet if a block starts a step's copies when fewer than `stages - 2` steps' are in flight: it has waited
    for those of later steps than the one that it computes."""
    for block in filter(lambda block: block.is_whole, played[0]):
        loads = [event for event in block.events if event.kind == "load"]
        for i in range(2 * stages, len(loads), 2):  # A step has two loads. The first steps fill the ring.
            in_flight = sum(not load.end & loads[i].known for load in loads[:i])
            if in_flight < 2 * (stages - 2):
                raise NotYet(
                    f"with {stages} stages a step waits for copies that only a later one needs: wait for this step's "
                    "own stage alone, or the copies that were started last have no time"
                )


@checker
def check_stages(answer) -> str:
    """Exercise 4: `answer(latency, work, blocks)` is how many stages a ring needs so that no block ever waits."""
    cases = (
        *((994, 2857, 1), (994, 2857, 2), (994, 512, 1), (994, 512, 2), (3000, 512, 1), (3000, 512, 2)),
        *((1024, 512, 1), (1025, 512, 1), (512, 512, 2), (513, 512, 2), (10, 512, 4), (9000, 300, 3)),
    )
    likely = (
        (
            lambda latency, work, blocks: 1 - (-latency // work),
            "The blocks of an SM take turns: between two products of a block are those of the others.",
        ),
        (
            lambda latency, work, blocks: -(-latency // (blocks * work)),
            "The refill starts at the end of the product of its stage, not at its start.",
        ),
        (
            lambda latency, work, blocks: 1 - (-latency // (blocks * work)),
            "The copy has time also while the other blocks multiply, right after the refill.",
        ),
    )
    said = "The copy has the time from the end of the product of step i to the start of that of step i + num_stages."
    draw = lambda rng: (int(rng.integers(1, 5000)), int(rng.integers(100, 3000)), int(rng.integers(1, 5)))
    require_answers(answer, cases, _stages, likely, said, draw=draw)
    return (
        "so one stage is enough for two blocks whose product takes longer than a copy. If two stages are faster in "
        "rung 3's table, an assumption fails there: strict turns, or that a copy is shorter than a product."
    )


def _stages(latency, work, blocks) -> int:
    return -(-(latency + work) // (blocks * work))


@checker
def check_epilogue(answer) -> str:
    """Exercise 2: `answer(acc, bias_gmem, cols, layout)` makes relu(acc + bias) of the accumulator of a tile.

    acc is (32, 64) in `layout`, bias_gmem (N,) float32, cols the columns of the tile.
    """
    for m, n in ((64, 128), (32, 320)):
        a, b, bias = normal(0, (m, 16)), normal(1, (16, n)), 2 * normal(2, (n,))
        out = np.asarray(run_kernel(functools.partial(_matmul_with, answer), a, b, bias))
        (a, b, bias), relu = wide(a, b, bias), lambda x: np.maximum(x, 0)
        likely = (
            (a @ b, "that is a @ b: the bias is not added yet"),
            (a @ b + bias, "the bias is there, but negative values are not zero yet"),
            (relu(a @ b), "negative values are zero, but the bias is not added yet"),
            (relu(a @ b) + bias, "the bias is added after relu; it belongs before"),
            (relu(a @ b + np.resize(bias[:TILE_N], n)), "every tile adds the first columns of the bias: use cols"),
        )
        require_close(out, relu(a @ b + bias), 1e-4, f"{m} x {n}, K = 16", likely)
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

"""Checkers of the exercises of chapter 5."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from exercises import judge
from exercises.judge import NotYet, checker, drawn, normal, require_answers, require_close, run_kernel, wide
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

import cookbook

REGISTERS, THREADS, WIDEST = 255, 128, 256  # A thread's registers; a warpgroup's threads; the largest N of a WGMMA.
ROWS, FEATURES_IN, FEATURES_OUT = 64, 64, 128  # One step of exercise 4 and its tile.


@checker
def check_split_k(answer) -> str:
    """Exercise 1: `answer(a, b, splits)` is a kernel, (splits, 64, 64) float32 parts whose sum is a @ b."""
    for num_steps, splits in _splits():
        a, b = normal(11, (64, 64 * num_steps), jnp.bfloat16), normal(12, (64 * num_steps, 64), jnp.bfloat16)
        kernel = functools.partial(answer, splits=splits)
        out, what = run_kernel(kernel, a, b), f"{num_steps} steps, {splits} splits"
        if out.shape != (splits, 64, 64):
            raise NotYet(f"{what}: the result has shape {out.shape}; it must be {(splits, 64, 64)}")
        for part, found in enumerate(wide(out)):
            if np.allclose(found, wide(a) @ wide(b), atol=1e-3):
                raise NotYet(f"{what}: part {part} is the whole product; each block sums its own steps only")
            if not found.any():
                raise NotYet(f"{what}: part {part} is zero; give every block a step")
        require_close(out.sum(axis=0), wide(a) @ wide(b), 1e-4, f"{what}, the sum of the parts")
    long = 64 * 64 * 132
    avals = jax.ShapeDtypeStruct((64, long), jnp.bfloat16), jax.ShapeDtypeStruct((long, 64), jnp.bfloat16)
    ratio = judge.speed(functools.partial(answer, splits=132), cookbook.matmul_wgmma, *avals)
    return "many SMs share one tile, each with its own steps." + ratio


def _splits():
    """Pairs of steps and splits; of the last one nobody knows how many steps a block takes, three or more."""
    draw = lambda rng: (3 * (splits := int(rng.integers(2, 5))) + int(rng.integers(1, splits)), splits)
    return (4, 2), (5, 3), (8, 2), *drawn(draw, 1)


@checker
def check_widest_tile(answer) -> str:
    """Exercise 2: `answer(tile_m, spare)` is the widest tile_n that leaves `spare` registers of each thread free."""

    def widest(tile_m, spare, most=WIDEST, unit=8, registers=REGISTERS):
        return min(most, (registers - spare) * THREADS // tile_m // unit * unit)

    likely = (
        (dict(most=1 << 20), f"One WGMMA is at most {WIDEST} wide."),
        (dict(unit=1), "tile_n is a multiple of 8."),
        (dict(unit=64), "tile_n is a multiple of 8, no more."),
        (lambda tile_m, _: widest(tile_m, 0), f"A thread has {REGISTERS} registers in all, for `spare` too."),
    )
    said = f"The accumulator is spread across all {THREADS} threads, 32 bits per register."
    cases = (128, 56), (64, 56), (192, 56), (256, 56), (128, 24), (64, 200)
    draw = lambda rng: (64 * int(rng.integers(1, 5)), int(rng.integers(8, 190)))
    require_answers(answer, cases, widest, likely, said, draw=draw)
    return "the accumulator limits the tile, and one warpgroup cannot hold 128 x 256."


@checker
def check_refill(answer) -> str:
    """Exercise 3: `answer(step, num_stages, in_flight)` is (step to load, stage to load it into)."""
    rings = (2, 0), (3, 0), (2, 1), (3, 1), (4, 1), (4, 2), (5, 3)
    cases = [(step, *ring) for ring in rings for step in range(11)]
    right = lambda step, num_stages, in_flight: (step + num_stages - in_flight, (step - in_flight) % num_stages)
    likely = (
        (lambda step, stages, _: (step + stages, step % stages), "Its last products may still run, and read."),
        (lambda step, stages, running: (step + stages - running, step % stages), "That stage is read by a product that "
         "may still run."),
    )  # fmt: skip
    said = "The last product that has ended frees its stage; the step is the next one that is not loaded."
    require_answers(answer, cases, right, likely, said, draw=_ring)
    return "every step finds its tiles, and no copy lands in a stage that is still read."


def _ring(rng):
    num_stages = int(rng.integers(2, 12))
    return int(rng.integers(0, 1000)), num_stages, int(rng.integers(0, num_stages))


@checker
def check_weight_gradient(answer) -> str:
    """Exercise 4: `answer(acc, x_smem, dy_smem, load, loaded, num_steps)` adds x.T @ dy to acc, step by step."""
    for num_steps in _token_steps():
        x = normal(num_steps, (num_steps * ROWS, FEATURES_IN), jnp.bfloat16)
        dy = normal(num_steps + 9, (num_steps * ROWS, FEATURES_OUT), jnp.bfloat16)
        kernel = functools.partial(_weight_gradient, answer)
        out = run_kernel(kernel, x, dy)
        ((block,),) = judge.play_kernel(kernel, x, dy)
        if not block.count("product"):
            raise NotYet("there is no product in it: call plgpu.wgmma")
        x, dy = wide(x, dy)
        turned = sum(x[rows] @ dy[rows] for rows in np.split(np.arange(len(x)), num_steps))
        said = "that is x @ dy of each step: the rows of x are tokens, over which the product must sum"
        require_close(out, x.T @ dy, 1e-4, f"{num_steps} step{'s' * (num_steps > 1)}", [(turned, said)])
    return "x was read as it lies: its transposition is one bit of the instruction."


def _token_steps():
    return 1, 5, *drawn(lambda rng: int(rng.integers(2, 10)), 1)


def _weight_gradient(answer, x, dy):
    """The kernel around the answer: one block, one stage."""

    def kernel(x_gmem, dy_gmem, o_gmem, x_smem, dy_smem, o_smem, loaded):
        def load(step):
            rows = pl.ds(step * ROWS, ROWS)
            plgpu.copy_gmem_to_smem(x_gmem.at[rows], x_smem, loaded)
            plgpu.copy_gmem_to_smem(dy_gmem.at[rows], dy_smem, loaded)

        def accumulate(acc):
            answer(acc, x_smem, dy_smem, load, loaded, x.shape[0] // ROWS)
            return acc[...]

        o_smem[...] = pl.run_scoped(accumulate, plgpu.ACC((FEATURES_IN, FEATURES_OUT)))
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(o_smem, o_gmem)
        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((FEATURES_IN, FEATURES_OUT), jnp.float32),
        scratch_types=dict(
            x_smem=plgpu.SMEM((ROWS, FEATURES_IN), x.dtype),
            dy_smem=plgpu.SMEM((ROWS, FEATURES_OUT), dy.dtype),
            o_smem=plgpu.SMEM((FEATURES_IN, FEATURES_OUT), jnp.float32),
            loaded=plgpu.Barrier(num_arrivals=2),
        ),
    )(x, dy)

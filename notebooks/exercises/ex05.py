"""Checkers of the exercises of chapter 5."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from exercises.judge import NotYet, checker, normal, play_kernel, require_close, run_kernel, speed
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

import cookbook

REGISTERS, THREADS, WIDEST = 255, 128, 256  # A thread's registers; a warpgroup's threads; the largest N of a WGMMA.
NUM_STEPS = 11  # Steps of exercise 4.
ROWS, FEATURES_IN, FEATURES_OUT = 64, 64, 128  # One step of exercise 3 and its tile.


@checker
def check_split_k(answer) -> str:
    """Exercise 1: `answer(a, b, splits)` is a kernel, (splits, 64, 64) float32 parts whose sum is a @ b."""
    for num_steps, splits in ((4, 2), (5, 3)):
        a, b = normal(11, (64, 64 * num_steps), jnp.bfloat16), normal(12, (64 * num_steps, 64), jnp.bfloat16)
        kernel = functools.partial(answer, splits=splits)
        out = np.asarray(run_kernel(kernel, a, b), np.float64)
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        what = f"{num_steps} steps, {splits} splits"
        if out.shape != (splits, 64, 64):
            raise NotYet(f"{what}: the result has shape {out.shape}; it must be {(splits, 64, 64)}")
        for part in range(splits):
            if np.isnan(out[part]).any():
                raise NotYet(f"{what}: part {part} was not written; each block stores its own part")
            if np.allclose(out[part], a @ b, atol=1e-3):
                raise NotYet(f"{what}: part {part} is the whole product; each block sums its own steps only")
            if not out[part].any():
                raise NotYet(f"{what}: part {part} is zero; give every block a step")
        require_close(out.sum(axis=0), a @ b, 1e-4, f"{what}, the sum of the parts")
    long = 64 * 64 * 132
    avals = jax.ShapeDtypeStruct((64, long), jnp.bfloat16), jax.ShapeDtypeStruct((long, 64), jnp.bfloat16)
    ratio = speed(functools.partial(answer, splits=132), cookbook.matmul_wgmma, *avals)
    return "many SMs share one tile, each with its own steps." + ratio


@checker
def check_widest_tile(answer) -> str:
    """Exercise 2: `answer(tile_m, spare)` is the widest tile_n that leaves `spare` registers of each thread free."""
    for tile_m, spare in ((128, 56), (64, 56), (192, 56), (256, 56), (128, 24), (64, 200)):
        fits = [n for n in range(8, WIDEST + 1, 8) if tile_m * n <= (REGISTERS - spare) * THREADS]
        want, got, case = fits[-1], answer(tile_m, spare), f"tile_m = {tile_m} with {spare} registers to spare"
        if isinstance(got, bool) or not isinstance(got, int | np.integer):
            raise NotYet(f"for {case} it returns {got!r}, not a whole number")
        if got != want:
            if got % 8:
                hint = "tile_n is a multiple of 8"
            elif got > WIDEST:
                hint = f"one WGMMA is at most {WIDEST} wide"
            elif got > want:
                hint = (
                    f"a thread would hold {tile_m * got // THREADS} accumulators and has {REGISTERS} registers in all"
                )
            else:
                hint = f"{want} wide still fits: the accumulator is shared by all {THREADS} threads, 32 bits a register"
            raise NotYet(f"for {case} it returns {got}; {hint}")
    return "the accumulator is what bounds a tile, and one warpgroup can hold no 128 x 256."


@checker
def check_refill(answer) -> str:
    """Exercise 4: `answer(step, num_slots, in_flight)` is (step to load, slot to load it into)."""
    for num_slots, in_flight in ((2, 0), (3, 0), (2, 1), (3, 1), (4, 1), (4, 2), (5, 3)):
        _run_ring(answer, num_slots, in_flight)
    return "every step finds its tiles, and no copy lands in a slot that is still read."


def _run_ring(answer, num_slots: int, in_flight: int) -> None:
    """Plays the ring, its products ending as late as they may. Raises NotYet where a GPU would go wrong."""
    ring = f"with {num_slots} slots and wgmma_wait({in_flight})"
    slots = {step: step for step in range(num_slots - in_flight)}  # The step whose tiles a slot holds.
    for step in range(NUM_STEPS):
        found = slots.get(step % num_slots)
        if found != step:
            lies = "nothing" if found is None else f"the tiles of step {found}"
            raise NotYet(f"{ring}, step {step} looks into slot {step % num_slots} and finds {lies}")
        got = answer(step, num_slots, in_flight)
        if not isinstance(got, tuple) or len(got) != 2 or not all(isinstance(x, int) for x in got):
            raise NotYet(f"{ring}, after step {step} it returns {got!r}; it must be a pair of ints: (step, slot)")
        to_load, slot = got
        if slot not in range(num_slots):
            raise NotYet(f"{ring}, after step {step} it names slot {slot}; there are slots 0 to {num_slots - 1}")
        if to_load >= NUM_STEPS:
            continue  # The kernel's `pl.when` leaves those out.
        if to_load <= step:
            raise NotYet(f"{ring}, after step {step} it loads step {to_load}, which is over")
        reader = slots.get(slot)  # Whose tiles lie there; nobody's at first.
        if reader is not None and reader > step - in_flight:
            state = "may still run" if reader <= step else "has not begun"
            raise NotYet(
                f"{ring}, after step {step} it loads into slot {slot}, where the tiles of step {reader} lie, and that "
                f"product {state}. The interpreter would not tell you"
            )
        slots[slot] = to_load


@checker
def check_weight_gradient(answer) -> str:
    """Exercise 3: `answer(acc, x_smem, dy_smem, load, loaded, num_steps)` adds x.T @ dy to acc, step by step."""
    for num_steps in (1, 3):
        x = normal(num_steps, (num_steps * ROWS, FEATURES_IN), jnp.bfloat16)
        dy = normal(num_steps + 9, (num_steps * ROWS, FEATURES_OUT), jnp.bfloat16)
        kernel = functools.partial(_weight_gradient, answer)
        out = run_kernel(kernel, x, dy)
        ((block,),) = play_kernel(kernel, x, dy)
        if not block.count("product"):
            raise NotYet("there is no product in it: call plgpu.wgmma")
        x, dy = np.asarray(x, np.float64), np.asarray(dy, np.float64)
        turned = sum(x[rows] @ dy[rows] for rows in np.split(np.arange(len(x)), num_steps))
        if np.allclose(out, turned, atol=1e-2):
            raise NotYet("that is x @ dy of each step: the rows of x are tokens, over which the product must sum")
        require_close(out, x.T @ dy, 1e-4, f"{num_steps} step{'s' * (num_steps > 1)}")
    return "x was read as it lies: its transposition is one bit of the instruction."


def _weight_gradient(answer, x, dy):
    """The kernel around the answer: one block, one slot."""

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

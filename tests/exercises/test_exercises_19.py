"""The exercises of chapter 19: solutions are accepted; wrong answers and untouched skeletons are not."""

import functools
import math
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from cookbook import blackwell, lab
from cookbook.blackwell.core import Config
from tests.exercises.answers import NOTEBOOKS, accepted, rejected

sys.path.insert(0, str(NOTEBOOKS))

from exercises import ex19  # noqa: E402

# Columns


def columns(tile_n, accumulators, scaled, *, least=32, most=512, power=True):
    total = tile_n * accumulators + (4 * (1 + -(-tile_n // 128)) if scaled else 0)
    total = max(least, 2 ** math.ceil(math.log2(total)) if power else total)
    return total if total <= most else None


@pytest.mark.parametrize("right", [columns, lambda *case: (found := columns(*case)) and np.int64(found)])
def test_columns_solution(right):
    accepted(ex19.check_columns(right))


@pytest.mark.parametrize(
    "wrong, said",
    [
        (functools.partial(columns, power=False, least=0), "powers of two"),
        (functools.partial(columns, most=1024), "There are 512"),
        (lambda n, acc, scaled: columns(n, acc, False), "Scales take columns"),
        (functools.partial(columns, least=0), "Add up sums and scales"),
        (lambda *case: 512, "Add up sums and scales"),
        (lambda *case: "many", "must be a whole number"),
        (lambda n, acc, scaled: n / 0, "raised ZeroDivisionError"),
    ],
)
def test_columns_wrong(wrong, said):
    rejected(ex19.check_columns(wrong), said)


@pytest.mark.parametrize("tile_n, accumulators", [(64, 1), (96, 2), (192, 2), (16, 1)])
def test_columns_are_those_that_are_allocated(tile_n, accumulators):
    from tests.blackwell.test_compiled import tmem_allocated

    config, aval = Config(tile_n=tile_n, num_accumulators=accumulators), jax.ShapeDtypeStruct((512, 256), jnp.bfloat16)
    fn = functools.partial(blackwell.matmul, config=config, transpose_b=True)
    plain = lab.compile_for("b200", fn, aval, aval)
    mx = [jax.ShapeDtypeStruct((512, 256), jnp.float8_e4m3fn), jax.ShapeDtypeStruct((512, 8), jnp.float8_e8m0fnu)]
    scaled = lab.compile_for("b200", functools.partial(blackwell.matmul_mxfp8, config=config), *mx, *mx)
    for compiled, is_scaled in ((plain, False), (scaled, True)):
        assert tmem_allocated(compiled.ptx) == ex19._columns(tile_n, accumulators, is_scaled)


# Halves


def held(row, col, tile_n, half):
    cols = tile_n // 2
    return (
        slice(row + 128 * half, row + 128 * half + 128),
        slice(col + cols * half, col + cols * half + cols),
        slice(col, col + tile_n),
    )


@pytest.mark.parametrize("right", [held, lambda *case: list(held(*case))])
def test_held_solution(right):
    accepted(ex19.check_held(right))


@pytest.mark.parametrize(
    "wrong, said",
    [
        (lambda row, col, n, half: held(row, col, n, 0), "128 rows of its own"),
        (lambda row, col, n, half: (held(row, col, n, half)[0], *[slice(col, col + n)] * 2), "half of the columns"),
        (lambda *case: (*held(*case)[:2], held(*case)[1]), "with both halves of B"),
        (lambda *case: held(*case)[:2], "must be three slices"),
        (lambda *case: 3, "must be three slices"),
        (lambda *case: 1 / 0, "raised ZeroDivisionError"),
    ],
)
def test_held_wrong(wrong, said):
    rejected(ex19.check_held(wrong), said)


# Multiply, in turn


def multiply(ring, a_smem, b_smem, acc_tmem, summed, stored, turn, steps, *, waits=True, reads=True, clears=True,
             commits=True, accumulators=3):  # fmt: skip
    mine = jax.lax.rem(turn, jnp.int32(accumulators))
    acc = acc_tmem.at[:, pl.ds(mine * 128, 128)]
    if waits:
        pl.when(turn >= 3)(lambda: plgpu.barrier_wait(stored.at[mine]))

    @pl.loop(0, steps)
    def _(step):
        count = turn * steps + step
        slot = ring.wait(count) if reads else ring.slot(count)
        add = step > 0 if clears else True
        plgpu.tcgen05_mma(acc, a_smem.at[slot], b_smem.at[slot], ring.freed.at[slot], accumulate=add)

    if commits:
        plgpu.tcgen05_commit_arrive(summed.at[mine])


def written_out(ring, a_smem, b_smem, acc_tmem, summed, stored, turn, steps):
    """Without a loop, and with a commit of its own for the slot."""
    mine = jax.lax.rem(turn, jnp.int32(3))
    pl.when(turn >= 3)(lambda: plgpu.barrier_wait(stored.at[mine]))
    for step in range(steps):
        slot = ring.wait(turn * steps + step)
        plgpu.tcgen05_mma(acc_tmem.at[:, pl.ds(mine * 128, 128)], a_smem.at[slot], b_smem.at[slot], accumulate=step > 0)
        plgpu.tcgen05_commit_arrive(ring.freed.at[slot])
    plgpu.tcgen05_commit_arrive(summed.at[mine])


@pytest.mark.parametrize("right", [multiply, written_out])
def test_multiply_solution(right):
    accepted(ex19.check_multiply(right))


@pytest.mark.parametrize(
    "wrong, said",
    [
        (functools.partial(multiply, commits=False), "commit to summed"),
        (functools.partial(multiply, clears=False), "the products"),
        (functools.partial(multiply, waits=False), "race"),
        (functools.partial(multiply, reads=False), "raised"),
        (lambda *refs: plgpu.tcgen05_mma(1), "raised"),
    ],
)
def test_multiply_wrong(wrong, said):
    verdict = ex19.check_multiply(wrong)
    assert not verdict and any(text in verdict.text for text in (said, "race", "phase")), verdict


# Store, fused


def store_squares(acc_tmem, o_smem, o_gmem, *, loaded=True, read=True, commits=True, square=True):
    for at in (0, 64):
        values = plgpu.async_load_tmem(acc_tmem.at[:, pl.ds(at, 64)], layout=plgpu.Layout.TCGEN05)
        if read:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        o_smem[...] = (values * values if square else values).astype(jnp.bfloat16)
        if commits:
            plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(o_smem, o_gmem.at[:, pl.ds(at, 64)])
    if loaded:
        plgpu.wait_load_tmem()


def backwards(acc_tmem, o_smem, o_gmem):
    """The other order, and every wait at its strongest."""
    for at in (64, 0):
        values = plgpu.async_load_tmem(acc_tmem.at[:, pl.ds(at, 64)], layout=plgpu.Layout.TCGEN05)
        plgpu.wait_load_tmem()
        o_smem[...] = jnp.square(values).astype(jnp.bfloat16)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(o_smem, o_gmem.at[:, pl.ds(at, 64)])
        plgpu.wait_smem_to_gmem(0)


@pytest.mark.parametrize("right", [store_squares, backwards])
def test_store_solution(right):
    accepted(ex19.check_store(right))


@pytest.mark.parametrize(
    "wrong, said",
    [
        (functools.partial(store_squares, square=False), "the squares"),
        (functools.partial(store_squares, loaded=False), "race"),
        (functools.partial(store_squares, read=False), "race"),
        (functools.partial(store_squares, commits=False), "race"),
        (lambda acc, o_smem, o_gmem: plgpu.async_load_tmem(acc.at[:, pl.ds(0, 64)]), "nothing is stored yet"),
        (lambda *refs: 1 / 0, "raised ZeroDivisionError"),
    ],
)
def test_store_wrong(wrong, said):
    rejected(ex19.check_store(wrong), said)


# A scale


def exponent(block):
    fraction, power = np.frexp(np.abs(block).max())
    return power - 9 if fraction <= 0.875 else power - 8


def by_logarithm(block):
    return math.ceil(math.log2(float(np.abs(block).max()) / 448))


@pytest.mark.parametrize("right", [exponent, by_logarithm])
def test_exponent_solution(right):
    accepted(ex19.check_exponent(right))


@pytest.mark.parametrize(
    "wrong, said",
    [
        (lambda block: math.floor(math.log2(np.abs(block).max())) - 8, "it saturates"),
        (lambda block: math.floor(math.log2(np.abs(block).max())) - 7, "half the scale would do"),
        (lambda block: math.ceil(math.log2(max(block.max(), 1e-9) / 448)), "it saturates"),
        (lambda block: math.log2(np.abs(block).max() / 448), "must be a whole number"),
        (lambda block: "small", "must be a whole number"),
        (lambda block: block[99], "raised IndexError"),
    ],
)
def test_exponent_wrong(wrong, said):
    rejected(ex19.check_exponent(wrong), said)


def test_exponents_are_those_of_the_package():
    for values in ex19.BLOCKS:
        block = jnp.zeros(32).at[: len(values)].set(jnp.asarray(values))
        _, scales = blackwell.quantize_mxfp8(block)
        assert float(scales[0]) == 2.0 ** ex19._exponent(values)

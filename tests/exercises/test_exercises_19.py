"""The exercises of chapter 19: solutions are accepted; wrong answers and untouched skeletons are not."""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from figures import blackwell
from tests.exercises.answers import NOTEBOOKS, accepted, rejected
from tests.exercises.test_solutions import mistaken

sys.path.insert(0, str(NOTEBOOKS))

from exercises import ex19, judge  # noqa: E402

# A commit too early


def in_two_halves(a, b):
    """Differs from the solution: a barrier in a product's own line, and each step waits for its products."""

    def body(a_gmem, b_gmem, o_gmem, a_smem, b_smem, o_smem, acc_tmem, filled, freed):
        for step in range(a.shape[1] // 64):
            ks = pl.ds(step * 64, 64)
            plgpu.copy_gmem_to_smem(a_gmem.at[:, ks], a_smem, filled)
            for i in range(2):
                plgpu.copy_gmem_to_smem(b_gmem.at[ks, pl.ds(64 * i, 64)], b_smem.at[i], filled)
            plgpu.barrier_wait(filled)
            plgpu.tcgen05_mma(acc_tmem.at[:, pl.ds(0, 64)], a_smem, b_smem.at[0], accumulate=step > 0)
            plgpu.tcgen05_mma(acc_tmem.at[:, pl.ds(64, 64)], a_smem, b_smem.at[1], freed, accumulate=step > 0)
            plgpu.barrier_wait(freed)
        o_smem[...] = plgpu.async_load_tmem(acc_tmem, layout=plgpu.Layout.TCGEN05).astype(o_smem.dtype)
        plgpu.wait_load_tmem()
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(o_smem, o_gmem)
        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((128, 128), a.dtype),
        scratch_types=[
            plgpu.SMEM((128, 64), a.dtype),
            plgpu.SMEM((2, 64, 64), b.dtype),
            plgpu.SMEM((128, 128), a.dtype),
            plgpu.TMEM((128, 128), jnp.float32),
            plgpu.Barrier(num_arrivals=3),
            plgpu.Barrier(orders_tensor_core=True),
        ],
    )(a, b)


def test_commit_solution():
    accepted(ex19.check_commit(in_two_halves))


COMMIT = "            plgpu.tcgen05_commit_arrive(freed)\n"
SECOND = "            plgpu.tcgen05_mma(right, a_smem, b_smem.at[1], accumulate=step > 0)\n"
LAST = "        plgpu.barrier_wait(freed)  # The products of the last step have ended.\n"


@pytest.mark.parametrize(
    "right, wrong, said",
    [
        (SECOND + "            " + COMMIT.strip() + "\n", COMMIT + SECOND, "A commit tells of the products"),
        (LAST, "", "before the last products have ended"),
        ("            pl.when(step > 0)(lambda: plgpu.barrier_wait(freed))\n", "", "before anybody has waited"),
        (COMMIT, COMMIT + COMMIT, "before anybody has waited"),
        (COMMIT, "", "never end"),
        (SECOND, "", "the product"),
        ("b_smem.at[1], accumulate=step > 0", "b_smem.at[1], accumulate=True", "the product"),
        ("    )(a, b)", "    )(a, b + 0)", "outside of the kernel"),
        ("    def body(", "    while True: pass\n    def body(", "has not ended"),
    ],
)  # fmt: skip
def test_commit_wrong(right, wrong, said, monkeypatch):
    if "while" in wrong:
        monkeypatch.setattr(judge, "SECONDS", 1)
    rejected(mistaken("19_blackwell", "exercise-commit", right, wrong), said)


def test_commit_by_xla():
    rejected(ex19.check_commit(lambda a, b: a @ b), "nothing is multiplied")


# When tiles start


def by_events(tiles, accumulators, multiply, store):
    """In another way: a tile's times from those of all tiles before it."""

    @functools.cache
    def start(tile):
        if tile == 0:
            return 0.0
        free = stored(tile - accumulators) if tile >= accumulators else 0.0
        return max(start(tile - 1) + multiply, free)

    @functools.cache
    def stored(tile):
        return max(start(tile) + multiply, stored(tile - 1) if tile else 0.0) + store

    return np.array([start(tile) for tile in range(tiles)])


def by_the_figure(tiles, accumulators, multiply, store):
    return [start for start, *_ in blackwell.schedule(accumulators, tiles, multiply, store)]


@pytest.mark.parametrize("right", [by_events, by_the_figure])
def test_starts_solution(right):
    accepted(ex19.check_starts(right))


@pytest.mark.parametrize(
    "wrong, said",
    [
        (functools.partial(ex19._starts, waits=False), "an earlier tile has to leave first"),
        (functools.partial(ex19._starts, in_turn=False), "One warpgroup stores"),
        (lambda tiles, acc, *times: ex19._starts(tiles, 1, *times), "may be in another accumulator"),
        (lambda tiles, acc, *times: ex19._starts(tiles, acc + 1, *times), "It waits for the products"),
        (lambda tiles, acc, multiply, store: [i * (multiply + store) for i in range(tiles)], "may be in another"),
        (lambda *case: [0], "there are 5 tiles"),
        (lambda *case: 3, "must be a list of times"),
        (lambda *case: None, "write its body"),
        (lambda *case: 1 / 0, "raised ZeroDivisionError"),
    ],
)
def test_starts_wrong(wrong, said):
    rejected(ex19.check_starts(wrong), said)


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
        (functools.partial(multiply, reads=False), "before its tiles have arrived"),
        (lambda *refs: plgpu.tcgen05_mma(1), "raised"),
    ],
)
def test_multiply_wrong(wrong, said):
    verdict = ex19.check_multiply(wrong)
    assert not verdict and any(text in verdict.text for text in (said, "race", "phase")), verdict


# Store, fused


def store_squares(acc_tmem, o_smem, o_gmem, *, loaded=True, in_flight=1, commits=True, squared=jnp.square, buffers=2):
    for at in (0, 32, 64, 96):
        values = plgpu.async_load_tmem(acc_tmem.at[:, pl.ds(at, 32)], layout=plgpu.Layout.TCGEN05)
        if in_flight is not None:
            plgpu.wait_smem_to_gmem(in_flight, wait_read_only=True)
        buffer = o_smem.at[at // 32 % buffers]
        buffer[...] = squared(values).astype(jnp.bfloat16)
        if commits:
            plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(buffer, o_gmem.at[:, pl.ds(at, 32)])
    if loaded:
        plgpu.wait_load_tmem()


def backwards(acc_tmem, o_smem, o_gmem):
    """The other order, loads that are waited for at once, and stores that have ended, not only read."""
    for quarter in (3, 2, 1, 0):
        columns = pl.ds(32 * quarter, 32)
        values = plgpu.async_load_tmem(acc_tmem.at[:, columns], layout=plgpu.Layout.TCGEN05)
        plgpu.wait_load_tmem()
        plgpu.wait_smem_to_gmem(1)
        o_smem[quarter % 2] = (values * values).astype(jnp.bfloat16)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(o_smem.at[quarter % 2], o_gmem.at[:, columns])


def rounded_before(values):
    values = values.astype(jnp.bfloat16)
    return values * values


@pytest.mark.parametrize("right", [store_squares, backwards])
def test_store_solution(right):
    accepted(ex19.check_store(right))


@pytest.mark.parametrize(
    "wrong, said",
    [
        (functools.partial(store_squares, squared=lambda values: values), "the squares"),
        (functools.partial(store_squares, squared=rounded_before), "rounded to bfloat16 before they are squared"),
        (functools.partial(store_squares, loaded=False), "race"),
        (functools.partial(store_squares, in_flight=None), "TMA may still send"),
        (functools.partial(store_squares, in_flight=2), "TMA may still send"),
        (functools.partial(store_squares, buffers=1), "TMA may still send"),
        (functools.partial(store_squares, in_flight=0), "leave one in flight"),
        (functools.partial(store_squares, commits=False), "commit what you have stored"),
        (lambda acc, o_smem, o_gmem: plgpu.async_load_tmem(acc.at[:, pl.ds(0, 64)]), "nothing is stored yet"),
        (lambda *refs: 1 / 0, "raised ZeroDivisionError"),
    ],
)
def test_store_wrong(wrong, said):
    rejected(ex19.check_store(wrong), said)

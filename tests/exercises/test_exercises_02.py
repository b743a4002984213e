"""Chapter 2's exercises: right answers pass, and each likely mistake is turned down in our words."""

import functools
import math
import pathlib
import sys

import jax
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

NOTEBOOKS = pathlib.Path(__file__).parents[2] / "notebooks"
sys.path.insert(0, str(NOTEBOOKS))

from exercises import ex02, judge  # noqa: E402

ROWS = 16


def ring(x_gmem, o_gmem, slots, arrived, num_tiles, *, commit=True, lag=1, pending=None, drain=0, late=False, ahead=0):
    """The solution; every keyword spoils it."""
    stages = slots.shape[0]
    pending = lag if pending is None else pending

    def tile(ref, i):
        return ref.at[pl.ds(i * ROWS, ROWS)]

    def fetch(i, slot=None):
        slot = lax.rem(i, stages) if slot is None else slot
        plgpu.copy_gmem_to_smem(tile(x_gmem, i), slots.at[slot], arrived.at[slot])

    pl.loop(0, stages)(fetch)

    @pl.loop(0, num_tiles)
    def _(i):
        slot = lax.rem(i, stages)
        plgpu.barrier_wait(arrived.at[slot])
        slots[slot] = -slots[slot]
        if commit:
            plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(slots.at[slot], tile(o_gmem, i))
        if pending >= 0 and not late:
            plgpu.wait_smem_to_gmem(pending, wait_read_only=True)
        following = i - lag + stages

        @pl.when((i >= lag) & (following < num_tiles))
        def _():
            fetch(following - ahead, lax.rem(following, stages))

        if late:
            plgpu.wait_smem_to_gmem(pending, wait_read_only=True)

    if drain >= 0:
        plgpu.wait_smem_to_gmem(drain)


def spoiled(**how):
    return functools.partial(ring, **how)


@pytest.mark.parametrize("answer", [ring, spoiled(lag=0), spoiled(lag=2)], ids=["solution", "at once", "two late"])
def test_right_rings_pass(answer):
    verdict = ex02.check_ring(answer)
    assert verdict, verdict


@pytest.mark.parametrize(
    "how, said",
    [
        (dict(commit=False), "unordered"),
        (dict(pending=-1), "unordered"),  # Refilled while the store still reads.
        (dict(lag=0, pending=1), "unordered"),  # Waits for the wrong store.
        (dict(pending=2), "unordered"),
        (dict(late=True, lag=0), "unordered"),  # Waits after the refill.
        (dict(drain=-1), "last copies"),
        (dict(commit=False, pending=-1), "unordered"),
        (dict(ahead=1), "wrong in tile"),  # Fetches the tile before.
    ],
    ids=str,
)
def test_wrong_rings_are_turned_down(how, said):
    _turned_down(ex02.check_ring(spoiled(**how)), said)


@pytest.mark.parametrize(
    "slot_of, said",
    [(lambda i: 0, "this is no ring"), (lambda i: lax.rem(i, 3), "a ring of 3 slots is used as if it had 1")],
)
def test_tiles_one_by_one_are_turned_down(slot_of, said):
    def one_by_one(x_gmem, o_gmem, slots, arrived, num_tiles):
        @pl.loop(0, num_tiles)
        def _(i):
            slot, rows = slot_of(i), pl.ds(i * ROWS, ROWS)
            plgpu.copy_gmem_to_smem(x_gmem.at[rows], slots.at[slot], arrived.at[slot])
            plgpu.barrier_wait(arrived.at[slot])
            slots[slot] = -slots[slot]
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(slots.at[slot], o_gmem.at[rows])
            plgpu.wait_smem_to_gmem(0)

    _turned_down(ex02.check_ring(one_by_one), said)


def test_an_api_error_is_one_friendly_line():
    def answer(x_gmem, o_gmem, slots, arrived, num_tiles):
        plgpu.copy_gmem_to_smem(x_gmem, slots.at[0], arrived)

    _turned_down(ex02.check_ring(answer), "cannot be compiled")


def test_right_degree_passes():
    assert ex02.check_conflict_degree(lambda pitch: math.gcd(pitch // 4, 32))


@pytest.mark.parametrize(
    "answer",
    [
        lambda pitch: None,
        lambda pitch: 1,
        lambda pitch: math.gcd(pitch, 32),  # Bytes for words.
        lambda pitch: math.gcd(pitch // 4, 32) - 1,  # Conflicts, not turns.
        lambda pitch: 32 // math.gcd(pitch // 4, 32),  # How many banks are used.
        lambda pitch: 32 if pitch % 128 == 0 else 1,
        lambda pitch: math.gcd(pitch // 4, 16),
        lambda pitch: max(1, math.gcd(pitch // 16, 8) * 4) if pitch % 16 == 0 else 1,
        lambda pitch: pitch / 0,
    ],
)
def test_wrong_degrees_are_turned_down(answer):
    _turned_down(ex02.check_conflict_degree(answer))


def stages(rate, seconds, num_sms, tile, lag, *, least=1, most=232_448, rounded=math.ceil):
    return min(max(least, rounded(round(rate * seconds / num_sms) / tile)) + lag, most // tile)


def test_right_number_of_stages_passes():
    assert ex02.check_num_stages(stages)


@pytest.mark.parametrize(
    "answer",
    [
        lambda *case: None,
        lambda *case: 4,
        lambda rate, seconds, sms, tile, lag: stages(rate, seconds, 1, tile, lag),  # All bytes in flight on one SM.
        lambda rate, seconds, sms, tile, lag: stages(rate, seconds, sms, tile, 0),  # Loads, not slots.
        lambda rate, seconds, sms, tile, lag: stages(rate, seconds, sms, tile, 1),
        lambda rate, *case: stages(2 * rate, *case),
        lambda *case: stages(*case, rounded=math.floor),
        lambda *case: stages(*case, rounded=lambda x: math.floor(x) + 1),
        lambda *case: stages(*case, rounded=round),
        lambda *case: stages(*case, least=2),
        lambda *case: stages(*case, most=1 << 40),
        lambda *case: stages(*case, most=228 * 1024 * 2),
        lambda rate, seconds: 3,
    ],
)
def test_wrong_numbers_of_stages_are_turned_down(answer):
    _turned_down(ex02.check_num_stages(answer))


def sum_by_tma(x, y, arrivals=2, waits=1, commit=True, copies=True, drain=True, direct=False):
    def kernel(x_gmem, y_gmem, o_gmem, x_smem, y_smem, arrived):
        if copies:
            plgpu.copy_gmem_to_smem(x_gmem, x_smem, arrived)
            plgpu.copy_gmem_to_smem(y_gmem, y_smem, arrived)
            for _ in range(waits):
                plgpu.barrier_wait(arrived)
            x_smem[...] = x_gmem[...] + y_gmem[...] if direct else x_smem[...] + y_smem[...]
        else:
            x_smem[...] = x_gmem[...] + y_gmem[...]
        if commit:
            plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(x_smem, o_gmem)
        if drain:
            plgpu.wait_smem_to_gmem(0)

    tile = plgpu.SMEM(x.shape, x.dtype)
    scratch_types = [tile, tile, plgpu.Barrier(num_arrivals=arrivals)]
    return plgpu.kernel(kernel, out_type=jax.ShapeDtypeStruct(x.shape, x.dtype), scratch_types=scratch_types)(x, y)


def test_sum_by_tma():
    verdict = ex02.check_sum_by_tma(sum_by_tma)
    assert verdict, verdict


@pytest.mark.parametrize(
    "how, said",
    [
        (dict(arrivals=1), "must expect two arrivals"),
        (dict(arrivals=1, waits=2), "must expect two arrivals"),
        (dict(waits=2), "would never end"),
        (dict(arrivals=3), "would never end"),
        (dict(commit=False), "unordered"),
        (dict(drain=False), "raised"),
        (dict(copies=False), "must still be copied"),
        (dict(direct=True), "it reads an input in global memory"),
    ],
    ids=str,
)
def test_wrong_sums_by_tma(how, said):
    _turned_down(ex02.check_sum_by_tma(functools.partial(sum_by_tma, **how)), said)


def test_a_sum_outside_of_the_kernel():
    outside = lambda x, y: sum_by_tma(x, y) + 0 * y
    _turned_down(ex02.check_sum_by_tma(outside), "computed outside of the kernel")


def test_an_answer_that_never_ends(monkeypatch):
    monkeypatch.setattr(judge, "SECONDS", 2)

    def loops(pitch):
        while True:
            pass

    _turned_down(ex02.check_conflict_degree(loops), "has not ended after 2 s")


def _turned_down(verdict, said: str = ""):
    assert not verdict
    assert said in verdict.text and "\n" not in verdict.text

"""Chapter 5's exercises: right answers pass, and wrong ones are turned down with what is wrong."""

import json
import pathlib
import sys

import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

NOTEBOOKS = pathlib.Path(__file__).parents[2] / "notebooks"
sys.path[:0] = [str(NOTEBOOKS), str(NOTEBOOKS.parent / "tools")]

from exercises import ex05, judge  # noqa: E402
from skeletons import exercises  # noqa: E402


def turned_down(verdict, said: str = ""):
    assert not verdict, verdict
    assert said in verdict.text, verdict
    assert "Traceback" not in verdict.text


# The widest tile


def widest_tile(tile_m, spare):
    return min(256, (255 - spare) * 128 // tile_m // 8 * 8)


@pytest.mark.parametrize(
    "wrong, said",
    [
        (lambda tile_m, spare: (255 - spare) * 128 // tile_m // 8 * 8, "at most 256 wide"),
        (lambda tile_m, spare: min(256, (255 - spare) * 128 // tile_m), "multiple of 8"),
        (lambda tile_m, spare: min(256, 255 * 128 // tile_m // 8 * 8), "registers in all"),
        (lambda tile_m, spare: min(256, (255 - spare) * 128 // tile_m // 64 * 64), "96 wide still fits"),
        (lambda tile_m, spare: min(256, (255 - spare) * 64 // tile_m // 8 * 8), "shared by all 128 threads"),
        (lambda tile_m, spare: (255 - spare) * 128 / tile_m, "not a whole number"),
        (lambda tile_m, spare: {}[tile_m], "raised KeyError"),
    ],
)
def test_widest_tile(wrong, said):
    assert ex05.check_widest_tile(widest_tile)
    turned_down(ex05.check_widest_tile(wrong), said)


# A free slot


def refill(step, num_slots, in_flight):
    ahead = num_slots - in_flight
    return step + ahead, (step + ahead) % num_slots


@pytest.mark.parametrize(
    "wrong, said",
    [
        (lambda step, num_slots, in_flight: (step + num_slots, step % num_slots), "may still run"),
        (lambda step, num_slots, in_flight: (step + num_slots - in_flight, step % num_slots), "may still run"),
        (lambda step, num_slots, in_flight: (step + 1, (step + 1) % num_slots), "has not begun"),
        (lambda step, num_slots, in_flight: (step, step % num_slots), "which is over"),
        (lambda step, num_slots, in_flight: (99, 0), "finds the tiles of step 0"),
        (
            lambda step, num_slots, in_flight: (step + num_slots - in_flight, step + num_slots - in_flight),
            "there are slots",
        ),
        (lambda step, num_slots, in_flight: step + num_slots, "a pair of ints"),
        (lambda step, num_slots, in_flight: 1 / 0, "raised ZeroDivisionError"),
    ],
)
def test_refill(wrong, said):
    assert ex05.check_refill(refill)
    turned_down(ex05.check_refill(wrong), said)


# The gradient of a weight


def weight_gradient(wait=True, ended=0, turn=True, steps=0, load_first=True):
    """The solution; every keyword spoils it."""

    def accumulate(acc, x_smem, dy_smem, load, loaded, num_steps):
        @pl.loop(0, num_steps - steps)
        def _(step):
            load(step)
            if wait:
                plgpu.barrier_wait(loaded)
            plgpu.wgmma(acc, x_smem.T if turn else x_smem, dy_smem)
            if ended is not None:
                plgpu.wgmma_wait(ended)

    return accumulate


def test_weight_gradient():
    assert ex05.check_weight_gradient(weight_gradient())


def same_step(acc, x_smem, dy_smem, load, loaded, num_steps):
    @pl.loop(0, num_steps)
    def _(step):
        load(0)
        plgpu.barrier_wait(loaded)
        plgpu.wgmma(acc, x_smem.T, dy_smem)
        plgpu.wgmma_wait(0)


def turned_round(acc, x_smem, dy_smem, load, loaded, num_steps):
    load(0)
    plgpu.barrier_wait(loaded)
    plgpu.wgmma(acc, dy_smem.T, x_smem)


@pytest.mark.parametrize(
    "wrong, said",
    [
        (weight_gradient(wait=False), "before its tiles have arrived"),
        (weight_gradient(ended=None), "may still read the slot"),
        (weight_gradient(ended=1), "may still read the slot"),
        (weight_gradient(turn=False), "x @ dy of each step"),
        (weight_gradient(steps=1), "there is no product in it"),
        (same_step, "3 steps: element"),
        (turned_round, "ValueError: Incompatible shapes"),
        (lambda *args: None, "there is no product in it"),
    ],
)
def test_weight_gradient_wrong(wrong, said):
    turned_down(ex05.check_weight_gradient(wrong), said)


# Split K


@pytest.fixture(scope="module")
def split_k() -> tuple[dict, str]:
    """Names of the cells that the exercise needs, and its solution as text."""
    path = NOTEBOOKS / "05_wgmma.ipynb"
    sources = {cell["id"]: "".join(cell["source"]) for cell in json.loads(path.read_text())["cells"]}
    (exercise,) = (found for found in exercises(NOTEBOOKS / "solutions" / "05_wgmma.py") if found.id == "exercise-1")
    names: dict = {}
    for cell in exercise.needs:
        exec(sources[cell], names)
    return names, exercise.solution.rpartition("\n")[0]


@pytest.mark.parametrize(
    "right, wrong, said",
    [
        ("o_gmem.at[split]", "o_gmem.at[0]", "race"),
        ("split * num_steps // splits, (split + 1) * num_steps // splits", "0, num_steps", "is the whole product"),
        (
            "split * num_steps // splits, (split + 1) * num_steps // splits",
            "split * (num_steps // splits), (split + 1) * (num_steps // splits)",
            "5 steps, 3 splits, the sum",
        ),
        ("split * num_steps // splits, (split + 1)", "(split + 1) * num_steps // splits, (split + 1)", "is zero"),
        ("plgpu.barrier_wait(loaded)", "pass", "before its tiles have arrived"),
        ("plgpu.wgmma_wait(0)", "plgpu.wgmma_wait(1)", "may still read the slot"),
    ],
)
def test_wrong_splits_are_turned_down(split_k, right, wrong, said):
    names, solution = split_k
    assert right in solution
    exec(solution.replace(right, wrong), names)
    turned_down(ex05.check_split_k(names["split_k"]), said)


def test_another_split_passes(split_k):
    """Every `splits`-th step, and the wait before the copies instead of after the product."""
    names, solution = split_k
    steps = "split * num_steps // splits, (split + 1) * num_steps // splits"
    solution = solution.replace(steps, "split, num_steps, step=splits").replace("plgpu.wgmma_wait(0)", "")
    exec(solution.replace("slice_k = pl", "plgpu.wgmma_wait(0)\n                slice_k = pl"), names)
    verdict = ex05.check_split_k(names["split_k"])
    assert verdict, verdict


def test_a_sum_of_the_parts_outside_of_the_kernel_is_turned_down(split_k):
    names, solution = split_k
    exec(solution, names)
    answer = lambda a, b, splits: names["split_k"](a, b, splits).sum(axis=0)
    turned_down(ex05.check_split_k(answer), "outside of the kernel")


def forever(*args, **kwargs):
    while True:
        pass


@pytest.mark.parametrize(
    "check", [ex05.check_split_k, ex05.check_widest_tile, ex05.check_weight_gradient, ex05.check_refill]
)
def test_an_answer_that_never_ends_is_turned_down(monkeypatch, check):
    monkeypatch.setattr(judge, "SECONDS", 0.5)
    turned_down(check(forever), "has not ended")

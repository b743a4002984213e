"""Chapter 5's exercises: right answers pass, wrong ones and the untouched skeletons are turned down in our words."""

import json
import pathlib
import sys

import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

NOTEBOOKS = pathlib.Path(__file__).parents[2] / "notebooks"
sys.path.insert(0, str(NOTEBOOKS))

from exercises import ex05  # noqa: E402


def turned_down(verdict, said: str = ""):
    assert not verdict, verdict
    assert said in verdict.text, verdict
    assert "Traceback" not in verdict.text


# Exercise 1


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


# Exercise 2


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


# Exercise 3


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
        (weight_gradient(steps=1), "1 step: element"),
        (same_step, "3 steps: element"),
        (turned_round, "raised ValueError"),
        (lambda *args: None, "there is no product in it"),
    ],
)
def test_weight_gradient_wrong(wrong, said):
    turned_down(ex05.check_weight_gradient(wrong), said)


# The skeletons, as they stand in the notebook


def test_skeletons_are_turned_down():
    cells = json.loads((NOTEBOOKS / "05_wgmma.ipynb").read_text())["cells"]
    sources = [
        "".join(cell["source"]) for cell in cells if cell["id"].startswith("exercise-") and cell["cell_type"] == "code"
    ]
    assert len(sources) == 3
    for source in sources:
        names = dict(ex05=ex05, pl=pl, plgpu=plgpu)
        define, call = source.rsplit("\n", 1)
        exec(define, names)
        turned_down(eval(call, names))

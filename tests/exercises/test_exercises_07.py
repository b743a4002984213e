"""The exercises of chapter 7: solutions are accepted; wrong answers and untouched skeletons are not."""

import functools
import sys

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

import lab
from tests.exercises.answers import NOTEBOOKS, accepted, rejected
from tests.exercises.test_solutions import mistaken

sys.path.insert(0, str(NOTEBOOKS))

from exercises import ex07, judge  # noqa: E402

# Exercise 3


def may_run(memory, compute, num_compute_wgs):
    start = 65_536 // (128 * (num_compute_wgs + 1)) // 8 * 8
    return (
        memory % 8 == 0
        and compute % 8 == 0
        and 24 <= memory <= start <= compute <= 255
        and memory + num_compute_wgs * compute <= (num_compute_wgs + 1) * start
    )


def whole_file(memory, compute, num_compute_wgs):
    start = 65_536 // (128 * (num_compute_wgs + 1)) // 8 * 8
    in_range = 24 <= memory <= start <= compute <= 255 and memory % 8 == compute % 8 == 0
    return in_range and 128 * (memory + num_compute_wgs * compute) <= 65_536


def any_count(memory, compute, num_compute_wgs):
    start = 65_536 // (128 * (num_compute_wgs + 1)) // 8 * 8
    fits = memory + num_compute_wgs * compute <= (num_compute_wgs + 1) * start
    return fits and 24 <= memory <= start <= compute <= 255


def any_size(memory, compute, num_compute_wgs):
    start = 65_536 // (128 * (num_compute_wgs + 1)) // 8 * 8
    fits = memory + num_compute_wgs * compute <= (num_compute_wgs + 1) * start
    return fits and memory <= start <= compute and memory % 8 == compute % 8 == 0


def any_direction(memory, compute, num_compute_wgs):
    start = 65_536 // (128 * (num_compute_wgs + 1)) // 8 * 8
    fits = memory + num_compute_wgs * compute <= (num_compute_wgs + 1) * start
    return fits and memory >= 24 and compute <= 255 and memory % 8 == compute % 8 == 0


def raises(*args):
    raise KeyError("registers")


def test_registers_plans_are_of_both_kinds():
    verdicts = [ex07.may_run(*plan) for plan in ex07.PLANS]
    assert 5 <= sum(verdicts) <= len(verdicts) - 5


@pytest.mark.parametrize(
    "wrong, said",
    [
        (whole_file, "the pool is what the block was started with"),
        (any_count, "counts go by eights"),
        (any_size, "at least 24"),
        (any_direction, "decreases its count"),
        (lambda memory, compute, n: memory + compute <= 2 * ex07.launch_registers(n), "each of the compute warpgroups"),
        (lambda *plan: True, "four rules"),
        (lambda *plan: 1, "must be True or False"),
        (raises, "raised KeyError"),
    ],
)
def test_registers_wrong(wrong, said):
    rejected(ex07.check_registers(wrong), said)


@pytest.mark.parametrize("num_compute_wgs", [2, 3, 4])
def test_registers_start_as_the_compiler_says(num_compute_wgs):
    """A kernel that exchanges registers is started with the count of the exercise."""
    memory, compute = 24, ex07.launch_registers(num_compute_wgs)

    def body(x_gmem, o_gmem, x_smem):
        @pl.when(lax.axis_index("wg") == num_compute_wgs)
        def _():
            plgpu.set_max_registers(memory, action="decrease")

        @pl.when(lax.axis_index("wg") < num_compute_wgs)
        def _():
            plgpu.set_max_registers(compute, action="increase")
            wg = lax.axis_index("wg")
            x_smem[wg] = x_gmem[wg] + 1
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(x_smem.at[wg], o_gmem.at[wg])
            plgpu.wait_smem_to_gmem(0)

    aval = jax.ShapeDtypeStruct((num_compute_wgs, 256), jnp.float32)
    kernel = plgpu.kernel(
        body,
        out_type=aval,
        num_threads=num_compute_wgs + 1,
        thread_name="wg",
        scratch_types=[plgpu.SMEM(aval.shape, aval.dtype)],
    )
    try:
        compiled = lab.compile_for("h200", kernel, aval)
    except lab.ToolchainMissing as error:
        pytest.skip(str(error))
    assert compiled.registers == ex07.launch_registers(num_compute_wgs)


# Exercise 2

RIGHT = {1: "one copy at a time", 2: "one slot", 3: "two steps late"}


@pytest.mark.parametrize(
    "wrong, said",
    [
        (RIGHT | {1: "one slot", 2: "one copy at a time"}, "trace 1 is not"),
        (RIGHT | {2: "two steps late", 3: "one slot"}, "trace 2 is not"),
        (RIGHT | {1: "two steps late", 3: "one copy at a time"}, "trace 1 is not"),
        (dict.fromkeys(RIGHT, "one slot"), "a fault of its own"),
        (RIGHT | {1: "no barrier"}, "no fault of the list"),
        (RIGHT | {1: None}, "name the fault"),
        ({1: "one slot"}, "name the fault"),
        (list(RIGHT.values()), "name the fault"),
        (RIGHT | {1: ["one slot"]}, "is no fault of the list"),
    ],
)
def test_detective_wrong(wrong, said):
    rejected(ex07.check_detective(wrong), said)


def test_detective_facts_tell_the_faults_apart(capsys):
    """Each clue is true of its own model, and of no other."""
    runs = {name: ex07.model(**knobs) for name, knobs in ex07.FAULTS.items()}
    burst = {name: run[3].load_start < run[0].load_end for name, run in runs.items()}
    overlap = {name: run[1].load_start < run[0].mma_end for name, run in runs.items()}
    assert burst == {"one slot": False, "two steps late": True, "one copy at a time": False}
    assert overlap == {"one slot": False, "two steps late": True, "one copy at a time": True}
    ex07.facts()
    assert capsys.readouterr().out.count("copies start") == 3


# Exercise 3


def memory(ring, step):
    if step >= ring.stages:
        ring.barrier_wait("freed", step % ring.stages)
    ring.load(step)


def compute(ring, step):
    slot = step % ring.stages
    ring.barrier_wait("filled", slot)
    ring.multiply(step)
    if step + ring.stages < ring.steps:
        ring.barrier_arrive("freed", slot)


def memory_waits_at_the_end(ring, step):
    memory(ring, step)
    if step == ring.steps - 1:
        for last in range(max(0, ring.steps - ring.stages), ring.steps):
            ring.barrier_wait("freed", last % ring.stages)


def compute_always_frees(ring, step):
    ring.barrier_wait("filled", step % ring.stages)
    ring.multiply(step)
    ring.barrier_arrive("freed", step % ring.stages)


def compute_frees_late(ring, step):
    ring.barrier_wait("filled", step % ring.stages)
    ring.multiply(step)
    if step >= 1 and step - 1 + ring.stages < ring.steps:
        ring.barrier_arrive("freed", (step - 1) % ring.stages)


def memory_waits_always(ring, step):
    ring.barrier_wait("freed", step % ring.stages)
    ring.load(step)


def memory_waits_for_arrival(ring, step):
    memory(ring, step)
    ring.barrier_wait("filled", step % ring.stages)


def memory_waits_after(ring, step):
    ring.load(step)
    if step >= ring.stages:
        ring.barrier_wait("freed", step % ring.stages)


def memory_wrong_slot(ring, step):
    if step >= ring.stages:
        ring.barrier_wait("freed", step)
    ring.load(step)


def compute_frees_first(ring, step):
    slot = step % ring.stages
    ring.barrier_wait("filled", slot)
    if step + ring.stages < ring.steps:
        ring.barrier_arrive("freed", slot)
    ring.multiply(step)


def compute_never_frees(ring, step):
    ring.barrier_wait("filled", step % ring.stages)
    ring.multiply(step)


def compute_never_waits(ring, step):
    ring.multiply(step)
    if step + ring.stages < ring.steps:
        ring.barrier_arrive("freed", step % ring.stages)


def compute_arrives_at_filled(ring, step):
    compute(ring, step)
    ring.barrier_arrive("filled", step % ring.stages)


def compute_loads(ring, step):
    ring.load(step)
    compute(ring, step)


def load_only(ring, step):
    ring.load(step)


def multiply_only(ring, step):
    ring.multiply(step)


@pytest.mark.parametrize("role", [(memory, compute), (memory_waits_at_the_end, compute_always_frees)])
def test_ring_solutions(role):
    accepted(ex07.check_ring(role))


@pytest.mark.parametrize(
    "wrong, said",
    [
        ((memory, compute_always_frees), "must wait for each completion"),
        ((memory, compute_frees_late), "with 4 steps and 1 slot, memory waits for ever"),
        ((memory_waits_always, compute), "memory waits for ever at freed[0], after 0"),
        ((memory_waits_for_arrival, compute), "starts only 1 of 2"),
        ((memory_waits_after, compute), "a race"),
        ((memory_wrong_slot, compute), "has no slot 2"),
        ((memory, compute_frees_first), "a race"),
        ((memory, compute_never_frees), "memory waits for ever at freed[0], after 2"),
        ((memory, compute_never_waits), "waited 0 times at filled[0]"),
        ((memory, compute_arrives_at_filled), "nobody has to arrive at filled"),
        ((memory, compute_loads), "ring.load is not for compute"),
        ((load_only, compute), "a race"),
        ((load_only, compute_never_waits), "waited 0 times"),
        ((load_only, compute_never_frees), "a race"),
        ((lambda ring, step: None, compute), "memory must call ring.load(step) once"),
        ((compute, memory), "memory must call ring.load(step) once"),
        ((memory, lambda ring, step: ring.barrier_wait("full", 0)), "there is no barrier 'full'"),
        ((memory, raises), "raised KeyError"),
    ],
)
def test_ring_wrong(wrong, said, monkeypatch):
    """All of them are found by counting: none is run, and so none can hang."""
    monkeypatch.setattr(ex07.judge, "run_kernel", lambda *args: pytest.fail("a wrong ring was run"))
    rejected(ex07.check_ring(wrong), said)


# Exercise 2: the solution with one mistake


@pytest.mark.parametrize(
    "right, wrong, said",
    [
        ("num_arrivals=2, num_barriers=stages),  # freed", "num_arrivals=1, num_barriers=stages),  # freed", ""),
        ("pl.when(step >= stages)", "pl.when(step > stages)", ""),
        ("pl.when(step >= stages)", "pl.when(step >= 0)", "never end"),
        ("o_smem.at[wg]", "o_smem.at[0]", "a tile of its own"),
        ("plgpu.wgmma_wait(0)", "plgpu.wgmma_wait(1)", "give a slot back (barrier_arrive) after the wgmma_wait"),
        ("stages=2", "stages=1", "this is no ring"),
        ("pl.ds(wg * half, half)", "pl.ds(0, half)", "128 x 384 x 128"),
        ("tile_m, tile_n, tile_k = tile", "tile_m, tile_n, tile_k = tile\n    while tile: pass", "has not ended"),
        ("tile, 3, scratch)(a, b)", "tile, 3, scratch)(a + 0 * a, b)", "outside of the kernel"),
    ],
)
def test_mended_wrong(right, wrong, said, monkeypatch):
    """Where nothing is said: a race or a phase that nobody observed, whichever the interpreter meets first."""
    if "while" in wrong:
        monkeypatch.setattr(judge, "SECONDS", 1)
    rejected(mistaken("07_warp_specialization", "exercise-mend", right, wrong), said)


# The notebook's kernels that lack a barrier


@pytest.mark.parametrize("barrier", ["freed", "filled"])
def test_report_tells_of_a_missing_barrier_and_of_none_else(barrier):
    steps, stages = 6, 2
    programs = [ex07._program(role, steps, stages) for role in (memory, compute)]
    a, b = jnp.ones((64, 64 * steps), jnp.bfloat16), jnp.ones((64 * steps, 64), jnp.bfloat16)
    kernel = functools.partial(ex07.ring_kernel, steps=steps, stages=stages)
    run = lambda programs: ex07.report(functools.partial(kernel, program=programs), a, b)
    assert run(programs) == "nothing to report"
    without = [[line for line in program if line[1] != barrier] for program in programs]
    assert run(without).startswith(("race", "ValueError"))

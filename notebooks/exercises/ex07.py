"""Chapter 7's exercises: the moves of a ring, three traces, a kernel to fix, and a budget of registers."""

import collections
import contextlib
import dataclasses
import functools
import io
import logging
import math
from typing import Any

import jax
import jax.numpy as jnp
from exercises import judge
from exercises.judge import NotYet, checker, normal, require_answers, require_close, run_kernel, wide
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

import cookbook
import lab
from figures import warp_specialization

# Exercise 4: (registers of the memory warpgroup, of each compute warpgroup, compute warpgroups).
PLANS = (
    (40, 232, 2), (24, 240, 2), (32, 160, 3), (24, 160, 3), (24, 112, 4), (40, 104, 4), (48, 224, 2),
    (40, 240, 2), (32, 240, 2), (40, 236, 2), (30, 232, 2), (16, 240, 2), (24, 256, 2), (40, 168, 3), (40, 160, 3),
    (176, 160, 2), (80, 104, 4), (40, 160, 2), (136, 120, 3), (24, 152, 3), (56, 112, 4), (24, 128, 4), (104, 248, 2),
)  # fmt: skip

# Exercise 2: what is wrong, and in which trace.
FAULTS = {
    "one stage": dict(stages=1),
    "two steps late": dict(stages=4, late=2),
    "one copy at a time": dict(stages=4, serial=True),
}
_TRACES = {1: "one copy at a time", 2: "one stage", 3: "two steps late"}

# Exercise 1: rings on which the four moves are tried.
RINGS = ((6, 2), (11, 5), (2, 3), (4, 1))  # (steps, stages)
_SIDE = 64  # Rows and columns of the square tiles.


@checker
def check_registers(answer) -> str:
    """Exercise 4: `answer(memory, compute, num_compute_wgs)` tells whether the plan may run."""
    likely = (
        (dict(pool=False), "The pool is what the block was started with, rounded down to a multiple of 8."),
        (dict(eights=False), "Counts are multiples of 8."),
        (dict(least=False), "A count is at least 24."),
        (dict(direction=False), "The memory warpgroup decreases its count, the others increase theirs."),
        (lambda memory, compute, wgs: memory + compute <= 2 * launch_registers(wgs), "Each of the compute warpgroups "
         "takes its count."),
    )  # fmt: skip
    said = "First the count that each thread starts with; then four rules."
    require_answers(answer, PLANS, may_run, likely, said, draw=_plan)
    return "Nobody waits for registers that nobody gives."


def _plan(rng) -> tuple[int, int, int]:
    """A plan that nobody knows beforehand; about half of them may run."""
    wgs = int(rng.integers(2, 5))
    memory, start = 8 * int(rng.integers(3, 12)), launch_registers(wgs)
    return memory, start + (start - memory) // wgs // 8 * 8 + 8 * int(rng.integers(0, 2)), wgs


def launch_registers(num_compute_wgs: int) -> int:
    """Registers per thread of a kernel with one memory warpgroup more than that, when it starts."""
    return 65_536 // (128 * (num_compute_wgs + 1)) // 8 * 8


def may_run(memory, compute, num_compute_wgs, *, pool=True, eights=True, least=True, direction=True) -> bool:
    """The right answer of exercise 4, and with other keywords the likely wrong ones."""
    launch = launch_registers(num_compute_wgs)
    total = launch * (num_compute_wgs + 1) if pool else 512
    return (
        memory + num_compute_wgs * compute <= total
        and (not eights or memory % 8 == compute % 8 == 0)
        and (not least or memory >= 24)
        and (not direction or memory <= launch <= compute)
    )


def suspect(trace: int) -> str:
    """The fault of the kernel of a trace of exercise 2."""
    return _TRACES[trace]


def model(steps: int = 8, **knobs) -> list:
    """When the copies and products of each step begin and end, in units of one product."""
    return warp_specialization.schedule(steps, **knobs, load=2.2, issue=0.1)


def facts(steps: int = 8) -> None:
    """Prints what a model of each kernel of exercise 2 does."""
    (first,) = model(1, stages=1)
    print(f"a step's copies arrive {first.load_end - first.load_start:.1f} after they start, and a product takes 1")
    for trace in _TRACES:
        run = model(steps, **FAULTS[suspect(trace)])
        row = lambda name, times: print(f"  {name:<20}" + " ".join(f"{time:5.1f}" for time in times))
        print(f"trace {trace}: step" + " " * 8 + " ".join(f"{step:5d}" for step in range(steps)))
        row("copies start", (step.load_start for step in run))
        row("copies have arrived", (step.load_end for step in run))
        row("product starts", (step.mma_start for step in run))
        row("product ends", (step.mma_end for step in run))


@checker
def check_detective(answer) -> str:
    """Exercise 2: `answer` names the fault of each trace."""
    if not isinstance(answer, dict) or set(answer) != set(_TRACES) or None in answer.values():
        raise NotYet(f"name the fault of each of the traces 1, 2 and 3; there are {', '.join(map(repr, FAULTS))}.")
    for name in answer.values():
        if name not in list(FAULTS):
            raise NotYet(f"{name!r} is no fault of the list: {', '.join(map(repr, FAULTS))}.")
    if len(set(answer.values())) < len(_TRACES):
        raise NotYet("each trace has a fault of its own.")
    clues = {
        "one stage": "with one stage, no copy is ever in flight while a product runs.",
        "two steps late": "a stage that is released late is missed only when it is needed again: the first copies all "
        "start at once.",
        "one copy at a time": "a memory warpgroup that waits for each copy never has two steps' copies in flight.",
    }
    for trace, name in answer.items():
        if name != _TRACES[trace]:
            raise NotYet(f"trace {trace} is not {name!r}: {clues[name]}")
    return "One look at when copies start, and at what they wait for, tells the three apart."


# Exercise 1 ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Ring:
    """The argument of the four moves of exercise 1: a barrier per stage of each kind."""

    filled: Any
    freed: Any
    num_stages: int

    def stage(self, move, name: str, i: int) -> int:
        """The stage that `move(self, i)` returns. Raises NotYet unless it is that of step `i`."""
        stage = move(self, i)
        if not isinstance(stage, int) or stage != i % self.num_stages:
            raise NotYet(f"{name} must return the stage of step {i}, {i % self.num_stages}; it returns {stage}")
        return stage


@checker
def check_ring(answer) -> str:
    """Exercise 1: `answer` is (acquire, wait, release, drain), each called with a Ring and a Python number."""
    said = "each release completes freed, and somebody must wait for it, for the last ones at the end: that is drain"
    for steps, stages in RINGS:
        a, b = normal(1, (_SIDE, steps * _SIDE), jnp.bfloat16), normal(2, (steps * _SIDE, _SIDE), jnp.bfloat16)
        kernel = functools.partial(ring_kernel, moves=answer, steps=steps, stages=stages)
        what = f"with {steps} steps and {stages} stage{'s' * (stages > 1)}"
        try:
            out = run_kernel(kernel, a, b, in_flight=stages, undrained=said)
        except NotYet as problem:
            raise NotYet(f"{what}: {problem}") from None
        require_close(out, wide(a) @ wide(b), 1e-2, f"{what}, the product")
    return "Each stage is read after it is filled, and refilled after it is read; nobody waits for ever."


def ring_kernel(a, b, *, moves, steps: int, stages: int):
    """A product of one tile, by a memory and a compute warpgroup that share a ring with these moves."""
    acquire, wait, release, drain = moves

    def body(a_gmem, b_gmem, o_gmem, a_smem, b_smem, o_smem, filled, freed):
        ring = Ring(filled, freed, stages)

        @pl.when(lax.axis_index("wg") == 1)
        def _():
            for i in range(steps):
                stage, depth = ring.stage(acquire, "acquire", i), pl.ds(i * _SIDE, _SIDE)
                plgpu.copy_gmem_to_smem(a_gmem.at[:, depth], a_smem.at[stage], filled.at[stage])
                plgpu.copy_gmem_to_smem(b_gmem.at[depth], b_smem.at[stage], filled.at[stage])
            drain(ring, steps)

        @pl.when(lax.axis_index("wg") == 0)
        def _():
            def add_up(acc):
                for i in range(steps):
                    stage = ring.stage(wait, "wait", i)
                    plgpu.wgmma(acc, a_smem.at[stage], b_smem.at[stage])
                    plgpu.wgmma_wait(0)
                    release(ring, i)
                return acc[...]

            o_smem[...] = pl.run_scoped(add_up, plgpu.ACC((_SIDE, _SIDE), jnp.float32))
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(o_smem, o_gmem)
            plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((_SIDE, _SIDE), jnp.float32),
        num_threads=2,
        thread_name="wg",
        scratch_types=[
            plgpu.SMEM((stages, _SIDE, _SIDE), a.dtype),
            plgpu.SMEM((stages, _SIDE, _SIDE), b.dtype),
            plgpu.SMEM((_SIDE, _SIDE), jnp.float32),
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            plgpu.Barrier(num_arrivals=1, num_barriers=stages),
        ],
    )(a, b)


# Exercise 3 ----------------------------------------------------------------------------------------------------------


@checker
def check_mended(answer) -> str:
    """Exercise 3: `answer(a, b)` is a @ b, by a memory warpgroup and two that share each tile."""
    said = "wait for the last releases too: ring.drain"
    for m, k, n in ((128, 384, 128), (128, 64, 128), (256, 320, 384)):
        a, b = normal(3, (m, k), jnp.bfloat16), normal(4, (k, n), jnp.bfloat16)
        out = run_kernel(answer, a, b, in_flight=2, undrained=said)
        require_close(out, wide(a) @ wide(b), 0.02, f"{m} x {k} x {n}")
        for block in judge.play_kernel(answer, a, b)[0]:
            _require_roles(block, k // 64)
    large = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)
    return "Two readers, one writer, and each waits for its turn." + judge.speed(answer, cookbook.matmul, large, large)


def _require_roles(block, steps: int) -> None:
    """Raises NotYet unless two warpgroups multiply, each in every step, and another one loads each tile once."""
    products = collections.Counter(event.wg for event in block.events if event.kind == "product")
    loaders = {event.wg for event in block.events if event.kind == "load"}
    if len(products) < 2 or len(set(products.values())) > 1:
        raise NotYet("the two compute warpgroups do not share the tile: each multiplies its half in every step")
    if loaders & set(products):
        raise NotYet("a warpgroup that multiplies also loads: only the memory warpgroup starts copies")
    work = sum(math.prod(event.shape) for event in block.events if event.kind == "product")
    if work > 128 * 128 * steps:
        raise NotYet("the two compute warpgroups multiply the whole tile each, so half of the work is thrown away")
    if block.count("load") > 2 * steps:
        raise NotYet("A or B is loaded twice: both compute warpgroups read the same stages")


def report(kernel, *args) -> str:
    """Verdict of the interpreter, with race detection, on a kernel that may be wrong but always ends."""
    logging.disable(logging.ERROR)  # JAX logs a failing kernel's traceback; one sentence is enough here.
    seen, said = None, "nothing to report"
    try:
        with contextlib.redirect_stdout(io.StringIO()), lab.interpret() as seen:
            jax.block_until_ready(kernel(*args))
    except Exception as error:
        stopped = [line for line in str(error).splitlines() if line.startswith("ValueError")]
        said = stopped[-1] if stopped else f"{type(error).__name__}: {str(error)[:200]}"
    finally:
        logging.disable(logging.NOTSET)
    return f"race: {seen.races[0]}" if seen and seen.races else said

"""Chapter 7's exercises: the barriers of a ring, a kernel to mend, a plan of registers, and three traces."""

import contextlib
import dataclasses
import functools
import io
import logging

import jax
import jax.numpy as jnp
import numpy as np
from exercises import judge
from exercises.judge import NotYet, checker
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

import cookbook
import lab
from figures.warp_specialization import roles_schedule

# Exercise 3: (registers of the memory warpgroup, of each compute warpgroup, compute warpgroups).
PLANS = (
    (40, 232, 2), (24, 240, 2), (32, 160, 3), (24, 160, 3), (24, 112, 4), (40, 104, 4), (48, 224, 2),
    (40, 240, 2), (32, 240, 2), (40, 236, 2), (30, 232, 2), (16, 240, 2), (24, 256, 2), (40, 168, 3), (40, 160, 3),
    (176, 160, 2), (80, 104, 4), (40, 160, 2), (136, 120, 3), (24, 152, 3), (56, 112, 4), (24, 128, 4), (104, 248, 2),
)  # fmt: skip

# Exercise 4: what is wrong, and in which trace.
FAULTS = {
    "one slot": dict(stages=1),
    "two steps late": dict(stages=4, late=2),
    "one copy at a time": dict(stages=4, serial=True),
}
_TRACES = {1: "one copy at a time", 2: "one slot", 3: "two steps late"}

# Exercise 1: rings on which the lines are tried.
RINGS = ((6, 2), (7, 3), (2, 3), (4, 1))  # (steps, stages)
_SIDE = 64  # Rows and columns of the square tiles.


@checker
def check_registers(answer) -> str:
    """Exercise 3: `answer(memory, compute, num_compute_wgs)` tells whether the plan may run."""
    given = {plan: answer(*plan) for plan in PLANS}
    for plan, got in given.items():
        if got is None:
            raise NotYet("may_run returns None: write its body.")
        if not isinstance(got, bool | np.bool_):
            raise NotYet(f"may_run{plan} is {got!r}; it must be True or False.")
        if bool(got) != (want := may_run(*plan)):
            raise NotYet(f"may_run{plan} is {got}, and {want} is right: {_hint(given)}")
    return "Nobody waits for registers that nobody gives."


def launch_registers(num_compute_wgs: int) -> int:
    """Registers a thread of a kernel with one memory warpgroup more than that, when it starts."""
    return 65_536 // (128 * (num_compute_wgs + 1)) // 8 * 8


def may_run(memory, compute, num_compute_wgs, *, pool=True, eights=True, least=True, direction=True) -> bool:
    """The right answer of exercise 3, and with other keywords the likely wrong ones."""
    launch = launch_registers(num_compute_wgs)
    total = launch * (num_compute_wgs + 1) if pool else 512
    return (
        memory + num_compute_wgs * compute <= total
        and (not eights or memory % 8 == compute % 8 == 0)
        and (not least or (memory >= 24 and compute <= 255))
        and (not direction or memory <= launch <= compute)
    )


def _hint(given: dict) -> str:
    """Names the likely mistake that explains all answers."""
    likely = (
        (
            dict(pool=False),
            "the pool is what the block was started with, and that was rounded down to a multiple of 8.",
        ),
        (dict(eights=False), "counts go by eights."),
        (dict(least=False), "a count is at least 24 and at most 255."),
        (dict(direction=False), "the memory warpgroup decreases its count, the others increase theirs."),
    )
    for wrong, text in likely:
        if all(may_run(*plan, **wrong) == bool(got) for plan, got in given.items()):
            return text
    if all((plan[0] + plan[1] <= 2 * launch_registers(plan[2])) == bool(got) for plan, got in given.items()):
        return "each of the compute warpgroups takes its count."
    return "first the count that each thread starts with; then four rules."


def suspect(trace: int) -> dict:
    """The knobs of the kernel of a trace of exercise 4."""
    return FAULTS[_TRACES[trace]]


def model(steps: int = 8, **knobs) -> list:
    """When the copies and products of each step begin and end, in units of one product."""
    return roles_schedule.schedule(steps, **knobs, load=2.2, issue=0.1)


def facts(steps: int = 8) -> None:
    """Prints what a model of each kernel of exercise 4 does."""
    for trace in _TRACES:
        run = model(steps, **suspect(trace))
        row = lambda name, times: print(f"  {name:<20}" + " ".join(f"{time:5.1f}" for time in times))
        print(f"trace {trace}: step" + " " * 8 + " ".join(f"{step:5d}" for step in range(steps)))
        row("copies start", (step.load_start for step in run))
        row("copies have arrived", (step.load_end for step in run))
        row("product starts", (step.mma_start for step in run))
        row("product ends", (step.mma_end for step in run))


@checker
def check_detective(answer) -> str:
    """Exercise 4: `answer` names the fault of each trace."""
    if not isinstance(answer, dict) or set(answer) != set(_TRACES) or None in answer.values():
        raise NotYet(f"name the fault of each of the traces 1, 2 and 3; there are {', '.join(map(repr, FAULTS))}.")
    for name in answer.values():
        if name not in list(FAULTS):
            raise NotYet(f"{name!r} is no fault of the list: {', '.join(map(repr, FAULTS))}.")
    if len(set(answer.values())) < len(_TRACES):
        raise NotYet("each trace has a fault of its own.")
    clues = {
        "one slot": "with one slot, no copy is ever in flight while a product runs.",
        "two steps late": "a slot that comes back late is missed only when it is needed again: the first copies all "
        "start at once.",
        "one copy at a time": "a memory warpgroup that waits for each copy never has two steps' copies in flight.",
    }
    for trace, name in answer.items():
        if name != _TRACES[trace]:
            raise NotYet(f"trace {trace} is not {name!r}: {clues[name]}")
    return "One look at when copies start, and at what they wait for, tells the three apart."


# Exercise 1 ----------------------------------------------------------------------------------------------------------


class Ring:
    """Stand-in for the ring of exercise 1: it writes down the calls of the lines under test."""

    def __init__(self, steps: int, stages: int):
        self.steps, self.stages = steps, stages
        self.lines: list[tuple[str, object, int]] = []

    def load(self, step):
        """Starts the two copies of `step` into its slot; they arrive at "filled"."""
        self.lines.append(("load", int(step), int(step) % self.stages))

    def multiply(self, step):
        """Adds the product of `step` to the accumulator, and waits until it has ended."""
        self.lines.append(("multiply", int(step), int(step) % self.stages))

    def barrier_wait(self, name, slot):
        self.lines.append(("wait", self._named(name, slot), int(slot)))

    def barrier_arrive(self, name, slot):
        self.lines.append(("arrive", self._named(name, slot), int(slot)))

    def _named(self, name, slot):
        if name not in ("filled", "freed"):
            raise NotYet(f'there is no barrier {name!r}; there are "filled" and "freed".')
        if not 0 <= int(slot) < self.stages:
            raise NotYet(f"{name} has no slot {slot}: slots are 0 to {self.stages - 1}. Take step % ring.stages.")
        return name


@checker
def check_ring(answer) -> str:
    """Exercise 1: `answer` is (memory, compute), each called with a Ring and a step."""
    memory, compute = answer
    programs = {}
    for steps, stages in RINGS:
        programs[steps, stages] = program = _program(memory, steps, stages), _program(compute, steps, stages)
        _require_sound(*program, steps, stages)
    for (steps, stages), program in programs.items():
        if (steps, stages) != RINGS[0]:
            continue  # One of them runs: the others differ by numbers only.
        a, b = (
            judge.normal(1, (_SIDE, steps * _SIDE), jnp.bfloat16),
            judge.normal(2, (steps * _SIDE, _SIDE), jnp.bfloat16),
        )
        out = judge.run_kernel(functools.partial(ring_kernel, program=program, steps=steps, stages=stages), a, b)
        judge.require_close(out, np.asarray(a, np.float64) @ np.asarray(b, np.float64), 1e-2, "the product")
    return "Every slot is read after it is filled, and filled again after it is read; nobody waits for ever."


@checker
def check_mended(answer) -> str:
    """Exercise 2: `answer(a, b)` is a @ b, by a memory warpgroup and two that multiply."""
    for m, k, n in ((128, 384, 128), (128, 320, 256)):
        a, b = judge.normal(3, (m, k), jnp.bfloat16), judge.normal(4, (k, n), jnp.bfloat16)
        out = judge.run_kernel(answer, a, b, in_flight=2)
        judge.require_close(out, np.asarray(a, np.float64) @ np.asarray(b, np.float64), 0.02, f"{m} x {k} x {n}")
    large = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)
    return "Two readers, one writer, and each waits for its turn." + judge.speed(answer, cookbook.matmul, large, large)


def ring_kernel(a, b, *, program, steps: int, stages: int):
    """A product of one tile, by a memory and a compute warpgroup that do what `program` says."""

    def body(a_gmem, b_gmem, o_gmem, a_smem, b_smem, o_smem, filled, freed):
        barriers = dict(filled=filled, freed=freed)

        def act(line, acc=None):
            kind, what, slot = line
            if kind == "wait":
                plgpu.barrier_wait(barriers[what].at[slot])
            elif kind == "arrive":
                plgpu.barrier_arrive(barriers[what].at[slot])
            elif kind == "load":
                ks = pl.ds(what * _SIDE, _SIDE)
                plgpu.copy_gmem_to_smem(a_gmem.at[:, ks], a_smem.at[slot], filled.at[slot])
                plgpu.copy_gmem_to_smem(b_gmem.at[ks], b_smem.at[slot], filled.at[slot])
            else:
                plgpu.wgmma(acc, a_smem.at[slot], b_smem.at[slot])
                plgpu.wgmma_wait(0)

        @pl.when(lax.axis_index("wg") == 1)
        def _():
            for line in program[0]:
                act(line)

        @pl.when(lax.axis_index("wg") == 0)
        def _():
            def multiply(acc):
                for line in program[1]:
                    act(line, acc)
                return acc[...]

            o_smem[...] = pl.run_scoped(multiply, plgpu.ACC((_SIDE, _SIDE), jnp.float32))
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


def _program(role, steps: int, stages: int) -> list:
    """Calls that `role` makes in all steps."""
    ring = Ring(steps, stages)
    for step in range(steps):
        role(ring, step)
    return ring.lines


@dataclasses.dataclass
class _Run:
    """A run of both programs as far as they come: how often each barrier was completed, and by which line."""

    at: list[int]  # The next line of memory and of compute.
    filled: list[int]
    freed: list[int]
    freed_by: dict  # (slot, completion) -> the line of compute that made it.


def _run(memory, compute, stages: int, *, compute_stops: bool = False) -> _Run:
    """Both go on until they have ended or wait. Waits only ask for counts that grow: the order does not matter."""
    run = _Run([0, 0], [0] * stages, [0] * stages, {})
    waits = ({}, {})  # For each role: (barrier, slot) -> how often it has waited there.
    arrivals = [0] * stages
    moved = True
    while moved:
        moved = False
        for role, program in ((0, memory), (1, () if compute_stops else compute)):
            while run.at[role] < len(program):
                kind, what, slot = program[run.at[role]]
                if kind == "wait":
                    count = waits[role].get((what, slot), 0)
                    if getattr(run, what)[slot] <= count:
                        break
                    waits[role][what, slot] = count + 1
                elif kind == "arrive" and what == "freed":
                    run.freed_by[slot, run.freed[slot]] = role, run.at[role]
                    run.freed[slot] += 1
                elif kind == "arrive":
                    arrivals[slot] += 1
                elif kind == "load":
                    arrivals[slot] += 2
                run.filled[slot] = arrivals[slot] // 2
                run.at[role] += 1
                moved = True
    return run


def _require_sound(memory, compute, steps: int, stages: int) -> None:
    """Raises NotYet unless both programs do every step once, in order, safely, and come to their end."""
    where = f"with {steps} steps and {stages} slot{'s' * (stages > 1)}"
    for program, kind, name in ((memory, "load", "memory"), (compute, "multiply", "compute")):
        if [what for k, what, _ in program if k == kind] != list(range(steps)):
            raise NotYet(f"{name} must call ring.{kind}(step) once in each step, and the other role must not.")
        other = {"load": "multiply", "multiply": "load"}[kind]
        if any(k == other for k, _, _ in program):
            raise NotYet(f"ring.{other} is not for {name}.")
        if any(k == "arrive" and what == "filled" for k, what, _ in program):
            raise NotYet("nobody has to arrive at filled: the two copies do, when they are complete.")
    if not any(line[0] != "load" for line in memory) and not any(line[0] != "multiply" for line in compute):
        raise NotYet("there is no barrier line yet: memory and compute do not know of each other.")
    if any(k == "arrive" for k, _, _ in memory):
        raise NotYet("memory arrives at freed, but it is not the one that reads the slots.")

    run = _run(memory, compute, stages)
    for role, program, name in ((0, memory, "memory"), (1, compute, "compute")):
        if run.at[role] < len(program):
            _, barrier, slot = program[run.at[role]]
            step = sum(line[0] in ("load", "multiply") for line in program[: run.at[role]])
            raise NotYet(
                f"{where}, {name} waits for ever at {barrier}[{slot}], after {step} of its steps: a deadlock. "
                "The kernel was not run."
            )

    waited: dict = {}
    for kind, what, slot in compute:
        if kind == "wait":
            waited[what, slot] = waited.get((what, slot), 0) + 1
        elif kind == "multiply" and waited.get(("filled", slot), 0) != what // stages + 1:
            raise NotYet(
                f"{where}, compute multiplies step {what} when it has waited {waited.get(('filled', slot), 0)} times "
                f"at filled[{slot}]; it is the filling number {what // stages + 1} of that slot that it needs."
            )
    read_at = {what: i for i, (kind, what, _) in enumerate(compute) if kind == "multiply"}
    waited = {}
    for kind, what, slot in memory:
        if kind == "wait":
            waited[what, slot] = waited.get((what, slot), 0) + 1
        elif kind == "load" and what >= stages:
            count = waited.get(("freed", slot), 0)
            if not count or run.freed_by[slot, count - 1][1] < read_at[what - stages]:
                raise NotYet(
                    f"{where}, memory loads step {what} into slot {slot} while compute may still read step "
                    f"{what - stages} there: a race."
                )
    for name, program in (("freed", memory), ("filled", compute)):
        for slot in range(stages):
            waits = sum(line == ("wait", name, slot) for line in program)
            if waits != getattr(run, name)[slot]:
                raise NotYet(
                    f"{where}, {name}[{slot}] is completed {getattr(run, name)[slot]} times and waited for {waits} "
                    "times. A warpgroup that waits at a barrier must wait for each completion: give a slot back only "
                    "if it will be loaded again, or wait for the rest at the end."
                )

    ahead = _run(memory, compute, stages, compute_stops=True)
    started = sum(line[0] == "load" for line in memory[: ahead.at[0]])
    waits_for_copy = next((i for i, line in enumerate(memory) if line[:2] == ("wait", "filled")), len(memory))
    started = min(started, sum(line[0] == "load" for line in memory[:waits_for_copy]))
    if started < min(stages, steps):
        raise NotYet(
            f"{where}, it is right, but memory starts only {started} of {min(stages, steps)} copies before it waits: "
            "the ring is not used. A slot that is empty needs no waiting."
        )

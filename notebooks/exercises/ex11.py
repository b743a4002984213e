"""Chapter 11's exercises: the compute warpgroup, a schedule of turns, their barriers, and a kernel to mend."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from exercises import judge
from exercises.ex07 import report as report  # The notebook asks it about a kernel that does not drain its turns.
from exercises.judge import NotYet, checker

import cookbook

LAST_TURN = "is the last turn drained?"
WG_ROWS = 64  # Queries of a compute warpgroup.
TURNS = [  # Steps of a tile, and how many of them each warpgroup computes.
    (1, (1, 1)),
    (4, (4, 4)),
    (4, (3, 4)),
    (5, (2, 5)),
    (6, (6, 6, 6)),
    (6, (4, 5, 6)),
]
# Warpgroups, steps, cycles of a step's products, cycles of its softmax.
SCHEDULES = ((1, 3, 5, 2), (2, 4, 2, 3), (2, 5, 4, 3), (3, 4, 2, 1), (3, 3, 2, 7), (2, 6, 1024, 1280))


@checker
def check_compute(answer) -> str:
    """Exercise 1: `answer(q, k, v)` is (out, lse), by a memory and two compute warpgroups."""
    return "Two readers for each byte that is loaded." + _judge_attention(answer)


@checker
def check_mended(answer) -> str:
    """Exercise 4: `answer(q, k, v)` is (out, lse), by two compute warpgroups that take turns."""
    speed = _judge_attention(answer, in_turns=True)
    return "One turn, given once, taken by each in its time, and drained." + speed


def _judge_attention(answer, in_turns: bool = False) -> str:
    """Raises NotYet unless `answer(q, k, v)` is a kernel of attention; returns what a GPU says of its speed."""
    q, k, v = (judge.normal(seed, (1, length, 1, 64), jnp.bfloat16) for seed, length in ((1, 128), (2, 256), (3, 256)))
    try:
        out, lse = judge.run_kernel(answer, q, k, v)
    except NotYet as problem:
        if "only observed barrier" in str(problem):
            raise NotYet(f"a barrier has a completion that nobody waits for: {LAST_TURN}") from None
        raise
    if np.isnan(np.asarray(out)).any():
        raise NotYet("out has a NaN: do m_i, l_i and acc change in each step?")
    s = np.asarray(q, np.float64)[0, :, 0] @ np.asarray(k, np.float64)[0, :, 0].T / 8
    p = np.exp(s - s.max(axis=1, keepdims=True))
    exact_lse = s.max(axis=1) + np.log(p.sum(axis=1))
    judge.require_close(lse, exact_lse[None, None], 1e-3, "lse")
    exact_out = p / p.sum(axis=1, keepdims=True) @ np.asarray(v, np.float64)[0, :, 0]
    judge.require_close(out, exact_out[None, :, None], 0.02, "out")
    if in_turns:
        played = judge.play_kernel(answer, q, k, v)
        judge.require_drained(played, LAST_TURN)
        judge.require_turns(played, products=2)
    large = jax.ShapeDtypeStruct((4, 4096, 16, 128), jnp.bfloat16)
    return judge.speed(answer, cookbook.attention, large, large, large)


@checker
def check_schedule(answer) -> str:
    """Exercise 2: `answer(wgs, steps, products, softmax)` lists for each warpgroup when the products of each of its
    steps start."""
    given = {case: answer(*case) for case in SCHEDULES}
    for case, got in given.items():
        if got is None:
            raise NotYet("starts returns None: write its body.")
        wgs, steps, *_ = case
        found = _numbers(got)
        if found is None or found.shape != (wgs, steps):
            raise NotYet(
                f"starts{case} is {str(got)[:80]}; it must be a list of {steps} times for each of {wgs} warpgroups."
            )
        want = _starts(*case)
        if not np.array_equal(found, want):
            step, wg = (int(i) for i in np.argwhere((found != want).T)[0])
            raise NotYet(
                f"starts{case}: the products of step {step} of warpgroup {wg} start at {found[wg, step]:g}; they must "
                f"start at {want[wg, step]:g}. {_schedule_hint(given)}"
            )
    return (
        "In the end a step takes wgs * products or products + softmax, whichever is more: the tensor cores limit it, "
        "or a warpgroup's own chain."
    )


def _starts(wgs, steps, products, softmax, *, shared=True, chain=True, pass_late=False):
    free, ready = 0, [0] * wgs  # When the tensor cores are free, and when each warpgroup wants them.
    found = np.zeros((wgs, steps))
    for step, wg in itertools.product(range(steps), range(wgs)):
        found[wg, step] = at = max(free if shared else 0, ready[wg] if chain else 0)
        free = at + products + (softmax if pass_late else 0)
        ready[wg] = at + products + softmax
    return found


def _schedule_hint(given) -> str:
    """Names the mistake that explains the answers."""
    likely = {
        "The tensor cores are free only when the products before have ended.": dict(shared=False),
        "A warpgroup starts its next products after its own softmax.": dict(chain=False),
        "The tensor cores do not wait for a softmax: the next warpgroup's products follow at once.": dict(
            pass_late=True
        ),
    }
    for said, wrong in likely.items():
        if all(np.array_equal(_numbers(got), _starts(*case, **wrong)) for case, got in given.items()):
            return said
    return "Two times must have passed: the end of the products before, and that of the warpgroup's own softmax."


def _numbers(given):
    try:
        return np.asarray(given, np.float64)
    except (TypeError, ValueError):
        return None


@checker
def check_turns(answer) -> str:
    """Exercise 3: `answer(wg, wgs, own, total)` lists ("wait", i), ("arrive", i), ("products",) of a warpgroup."""
    for total, own in TURNS:
        wgs = len(own)
        where = f"with {total} steps, of which the warpgroups compute {own}"
        programs = [_program(answer(wg, wgs, own[wg], total), wg, wgs, where) for wg in range(wgs)]
        for wg, program in enumerate(programs):
            count = program.count(("products",))
            if count != own[wg] + 1:
                raise NotYet(
                    f"{where}, warpgroup {wg} has ('products',) {count} times; it must be {own[wg] + 1}: one for each "
                    "of its steps, and the last p v."
                )
        for order in itertools.permutations(range(wgs)):
            _run(programs, order, where)
    return "One turn goes round, every warpgroup gets it in its order, and in the end nobody holds it."


def _program(given, wg: int, wgs: int, where: str) -> list[tuple]:
    if given is None:
        raise NotYet("turns returns None: write its body.")
    program = [tuple(line) if not isinstance(line, str) else (line,) for line in given]
    for line in program:
        known = line == ("products",) or (
            len(line) == 2 and line[0] in ("wait", "arrive") and isinstance(line[1], (int, np.integer))
        )
        if not known or (len(line) == 2 and not 0 <= line[1] < wgs):
            raise NotYet(
                f'{where}, {line} is none of ("wait", i), ("arrive", i), ("products",) with i below {wgs}: '
                "does the ring close?"
            )
        if line[0] == "wait" and line[1] != wg:
            raise NotYet(f"{where}, warpgroup {wg} waits at barrier {line[1]}; its own is {wg}.")
    return program


def _run(programs, order, where: str) -> None:
    """Runs the programs, each as far as it comes, those first in `order` first."""
    wgs = len(programs)
    at, completed, observed, holds = [0] * wgs, [0] * wgs, [0] * wgs, [False] * wgs
    started = [0] * wgs  # Products in this turn.
    while True:
        moved = False
        for wg in order:
            while at[wg] < len(programs[wg]):
                line = programs[wg][at[wg]]
                if line[0] == "wait":
                    if observed[wg] == completed[wg]:
                        break
                    observed[wg] += 1
                    holds[wg], started[wg] = True, 0
                elif line[0] == "arrive":
                    completed[line[1]] += 1
                    holds[wg] = False
                    if completed[line[1]] - observed[line[1]] > 1:
                        raise NotYet(
                            f"{where}, barrier {line[1]} completes twice before its warpgroup has waited: there is "
                            "more than one turn. Who gives the first, and how often?"
                        )
                elif not holds[wg]:
                    raise NotYet(f"{where}, warpgroup {wg} starts products and has no turn: wait first.")
                elif started[wg]:
                    raise NotYet(
                        f"{where}, warpgroup {wg} starts the products of two steps in one turn: pass the turn on after "
                        "each step, or the others never get the tensor cores during its softmax."
                    )
                else:
                    started[wg] = 1
                at[wg] += 1
                moved = True
                if sum(holds) > 1:
                    raise NotYet(f"{where}, two warpgroups have a turn at once: who gives the first, and how often?")
        if not moved:
            break
    for wg in range(wgs):
        if at[wg] < len(programs[wg]):
            passed = completed[wg]
            raise NotYet(
                f"{where}, warpgroup {wg} waits for ever, for turn {passed + 1} of its own: somebody ends early, or "
                "nobody gives the first turn."
            )
    for wg in range(wgs):
        if completed[wg] != observed[wg]:
            raise NotYet(f"{where}, in the end a turn is left at barrier {wg}, and nobody takes it: drain it.")

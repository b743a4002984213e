"""The exercises of chapter 11: solutions are accepted; wrong answers and untouched skeletons are not."""

import functools
import itertools
import sys

import numpy as np
import pytest

from tests.exercises.answers import NOTEBOOKS, accepted, rejected
from tests.exercises.test_solutions import changed, mistaken

sys.path.insert(0, str(NOTEBOOKS))

from exercises import ex11, judge  # noqa: E402

# Exercise 2


def starts(wgs, steps, products, softmax, *, shared=True, chain=True, late=0, other=False):
    """Differs from the solution: turn by turn, in one list."""
    found, ends = [], []
    for turn in range(wgs * steps):
        before = ends[-1] + late * softmax if ends and shared else 0
        own = ends[turn - wgs] + softmax if turn >= wgs and chain else 0
        found.append(max(before, own))
        ends.append(found[-1] + products)
    return (
        [found[wg::wgs] for wg in range(wgs)] if not other else [found[i * wgs : (i + 1) * wgs] for i in range(steps)]
    )


def starts_in_numpy(wgs, steps, products, softmax):
    """The round takes as long as its products, or as the chain of a warpgroup."""
    around = max(wgs * products, products + softmax)
    return around * np.arange(steps) + products * np.arange(wgs)[:, None]


@pytest.mark.parametrize("right", [starts, starts_in_numpy])
def test_schedule_solutions(right):
    accepted(ex11.check_schedule(right))


@pytest.mark.parametrize(
    "wrong, said",
    [
        (functools.partial(starts, shared=False), "free only when the products before have ended"),
        (functools.partial(starts, chain=False), "after its own softmax"),
        (functools.partial(starts, late=1), "do not wait for a softmax"),
        (functools.partial(starts, other=True), "a list of 3 times"),
        (lambda *args: starts_in_numpy(*args) + 1, "they must start at 0"),
        (lambda wgs, steps, *_: [[0] * steps] * wgs, "Two times must have passed"),
        (lambda wgs, steps, *_: itertools.repeat(0), "a list of 3 times"),
        (lambda wgs, steps, *_: [["a"] * steps] * wgs, "a list of 3 times"),
        (lambda *args: None, "write its body"),
        (lambda wgs, *_: wgs / 0, "raised ZeroDivisionError"),
    ],
)
def test_schedule_wrong(wrong, said):
    rejected(ex11.check_schedule(wrong), said)


# Exercise 3


def turns(wg, wgs, own, total, *, first=True, drain=True, by=True, last=True, after=None, wait=True, everybody=False):
    after = (wg + 1) % wgs if after is None else after
    lines = [("arrive", 0)] if first and (wg == 0 or everybody) else []
    if by:
        lines += [("wait", wg), ("arrive", after)] * (total - own)
    turn = [("wait", wg)] if wait else []
    lines += [*turn, ("products",), ("arrive", after)] * (own + last)
    return lines + ([("wait", 0)] if drain and wg == 0 else [])


def turns_that_pass_first(wg, wgs, own, total):
    """Passes the turn on for the steps it leaves out at the end."""
    lines = [("arrive", 0)] if wg == 0 else []
    for step in range(total + 1):
        lines.append(("wait", wg))
        if step <= own:
            lines.append(["products"])
        lines.append(["arrive", (wg + 1) % wgs])
    return lines + [("wait", 0)] * (wg == 0)


@pytest.mark.parametrize("right", [turns, turns_that_pass_first])
def test_turns_solutions(right):
    accepted(ex11.check_turns(right))


def turns_in_one(wg, wgs, own, total):
    """All products in the first turn; the others are passed by."""
    lines = [("arrive", 0)] if wg == 0 else []
    lines += [("wait", wg), *[("products",)] * (own + 1), ("arrive", (wg + 1) % wgs)]
    return lines + [("wait", wg), ("arrive", (wg + 1) % wgs)] * total + [("wait", 0)] * (wg == 0)


def knob(**wrong):
    return lambda *args: turns(*args, **wrong)


@pytest.mark.parametrize(
    "wrong, said",
    [
        (knob(drain=False), "drain it"),
        (knob(by=False), "waits for ever"),
        (knob(first=False), "waits for ever"),
        (knob(everybody=True), "more than one turn"),
        (knob(last=False), "the last p v"),
        (knob(wait=False), "has no turn"),
        (lambda wg, wgs, own, total: turns(wg, wgs, own, total, after=wg + 1), "does the ring close"),
        (lambda wg, wgs, own, total: [("wait", 0), ("products",)] * (own + 1), "its own is 1"),
        (lambda wg, wgs, own, total: ["wait"], "none of"),
        (lambda wg, wgs, own, total: turns_in_one(wg, wgs, own, total), "the products of two steps in one turn"),
        (lambda *args: None, "write its body"),
    ],
)
def test_turns_wrong(wrong, said):
    rejected(ex11.check_turns(wrong), said)


# Exercises 1 and 4

VALUES = (
    "acc = add_product(acc, p, v_smem.at[slot], interpreted())",
    "values.free(step)",
)
KEYS = "s = logits(keys.wait(step))", "keys.free(step)"
FIRST = "slot = keys.wait(step)"
FREED_EARLY = "give a slot back (barrier_arrive) after the wgmma_wait with which its product has ended"
NEXT = "\n                "  # Between two lines of a step.


@pytest.mark.parametrize(
    "cell, right, wrong, said",
    [
        ("exercise-compute", "values.free(step)", "pass", "never end"),
        ("exercise-compute", "acc = acc * per_row(alpha, acc.shape)", "pass", "out"),
        ("exercise-mend", "turns.start(role)", "pass", "never end"),
        ("exercise-mend", "turns.drain(role)", "pass", "is the last turn drained"),
        ("exercise-mend", NEXT.join(VALUES), NEXT.join(reversed(VALUES)), FREED_EARLY),
        ("exercise-mend", "Turns(turn, 2)", "Turns(None, 2)", "the warpgroups take no turns"),
        ("exercise-compute", NEXT.join(KEYS), NEXT.join((FIRST, KEYS[1], "s = logits(slot)")), FREED_EARLY),
        (
            "exercise-compute",
            "slot = values.wait(step)",
            f"slot = values.wait(step){NEXT}values.free(step)",
            FREED_EARLY,
        ),
    ],
)
def test_kernels_wrong(cell, right, wrong, said):
    rejected(mistaken("11_flash_attention", cell, right, wrong), said)


def test_a_step_that_waits_for_both_first():
    """Right too: the values are waited for at once, and the keys are freed with them."""
    late = KEYS[0], "slot = values.wait(step)"
    accepted(
        changed(
            "11_flash_attention",
            "exercise-compute",
            (f"{NEXT}slot = values.wait(step)", ""),
            (NEXT.join(KEYS), NEXT.join(late)),
            ("values.free(step)", f"values.free(step){NEXT}keys.free(step)"),
        )
    )


def test_attention_outside_of_a_kernel():
    rejected(ex11.check_compute(lambda q, k, v: (q, q[..., 0])), "must be a kernel")


def forever(*args):
    while True:
        pass


@pytest.mark.parametrize("check", [ex11.check_compute, ex11.check_schedule, ex11.check_turns, ex11.check_mended])
def test_an_answer_that_never_ends(check, monkeypatch):
    monkeypatch.setattr(judge, "SECONDS", 0.5)
    rejected(check(forever), "has not ended")

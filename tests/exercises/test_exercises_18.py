"""The exercises of chapter 18: solutions are accepted; wrong answers and untouched skeletons are not."""

import functools
import sys

import numpy as np
import pytest

from cookbook.nvlink.protocol import Flush, Read, Send, Signal, Wait
from tests.exercises.answers import NOTEBOOKS, accepted, rejected

sys.path.insert(0, str(NOTEBOOKS))

from exercises import ex18  # noqa: E402

# All-reduce


@pytest.mark.parametrize("right", [lambda n, b: 2 * (n - 1) * b / n, lambda n, b: np.float64(b - b / n) * 2])
def test_bytes_solution(right):
    accepted(ex18.check_bytes(right))


@pytest.mark.parametrize(
    "wrong, said",
    [
        (lambda n, b: (n - 1) * b / n, "one of the two"),
        (lambda n, b: 2 * (n - 1) * b, "an n-th of the array."),
        (lambda n, b: (n - 1) * b, "and there are two"),
        (lambda n, b: 2 * b, "nothing to itself"),
        (lambda n, b: b, "reduce-scatter"),
        (lambda n, b: "many", "must be a number"),
        (lambda n, b: b / 0, "raised ZeroDivisionError"),
    ],
)
def test_bytes_wrong(wrong, said):
    rejected(ex18.check_bytes(wrong), said)


# Where rows land


def places(sizes, d):
    return [(sum(sizes[d][:p]), sum(line[p] for line in sizes[:d])) for p in range(len(sizes))]


def in_numpy(sizes, d):
    sizes = np.asarray(sizes)
    return np.stack([np.cumsum(sizes, 1) - sizes, np.cumsum(sizes, 0) - sizes], axis=-1)[d]


@pytest.mark.parametrize("right", [places, in_numpy])
def test_places_solution(right):
    accepted(ex18.check_places(right))


@pytest.mark.parametrize(
    "wrong, said",
    [
        (lambda sizes, d: [(row, first) for first, row in places(sizes, d)], "after the parts for lower devices"),
        (lambda sizes, d: [(first, first) for first, _ in places(sizes, d)], "not of lower receivers"),
        (
            lambda sizes, d: [
                (first, sum(line[p] for line in sizes[: d + 1])) for p, (first, _) in enumerate(places(sizes, d))
            ],
            "not before itself",
        ),
        (lambda sizes, d: [(first, 0) for first, _ in places(sizes, d)], "to the same device"),
        (lambda sizes, d: places(sizes, d)[:1], "one for each device"),
        (lambda sizes, d: 3, "must be a list of pairs"),
    ],
)
def test_places_wrong(wrong, said):
    rejected(ex18.check_places(wrong), said)


# A barrier among devices


def others(d, n):
    return [(d + k) % n for k in range(1, n)]


def meet(d, n):
    """A counter for each sender."""
    return [Signal(p, "met", d) for p in others(d, n)] + [Wait("met", q) for q in others(d, n)]


def through_device_0(d, n):
    """All report to device 0, and it lets them go."""
    if d:
        return [Signal(0, "met"), Wait("go")]
    return [Wait("met", count=n - 1), *(Signal(p, "go") for p in range(1, n))]


def one_counter(d, n):
    return [*(Signal(p, "met") for p in others(d, n)), Wait("met", count=n - 1)]


def to_the_next(d, n):
    return [Signal((d + 1) % n, "met"), Wait("met")]


@pytest.mark.parametrize("right", [meet, one_counter, through_device_0])
def test_meet_solution(right):
    accepted(ex18.check_meet(right))


@pytest.mark.parametrize(
    "wrong, said",
    [
        (to_the_next, "with 3 devices there is an order that fails"),
        (to_the_next, "for whom does it not wait"),
        (lambda d, n: [Wait("met", q) for q in others(d, n)], "that nobody sends"),
        (lambda d, n: [Signal(p, "met", d) for p in others(d, n)], "there is an order that fails"),
        (lambda d, n: [Wait("met", q) for q in others(d, n)] + meet(d, n)[: n - 1], "that nobody sends"),
        (lambda d, n: [Flush(0), *meet(d, n)], "signals and waits alone"),
        (lambda d, n: None, "returns None"),
        (lambda d, n: ["signal"], "which is no action"),
        (lambda d, n: [d / 0], "raised ZeroDivisionError"),
    ],
)
def test_meet_wrong(wrong, said):
    rejected(ex18.check_meet(wrong), said)


# A chain


def pass_on(d, n, i, rounds, *, flush=True, credit=2, frees_until=2, waits=True):
    slot, actions = (i % 2,), []
    if d > 0:
        actions += [Wait("arrived")] * waits + [Read("inbox", slot, (i,))]
    if d > 0 and i + frees_until < rounds:
        actions.append(Signal(d - 1, "freed"))
    if d < n - 1:
        actions += [Wait("freed")] * (i >= credit) + [Send(d + 1, "inbox", slot, (i,))]
        actions += [Flush(0)] * flush + [Signal(d + 1, "arrived")]
    return actions


def with_conditions(d, n, i, rounds):
    """The same with `when`, as a kernel would have it."""
    slot = (i % 2,)
    return [
        Wait("arrived", slot, when=d > 0),
        Read("inbox", slot, (i,), when=d > 0),
        Wait("freed", slot, when=(d < n - 1) & (i >= 2)),
        Send(d + 1, "inbox", slot, (i,), when=d < n - 1),
        Flush(0),
        Signal(d + 1, "arrived", slot, when=d < n - 1),
        Signal(d - 1, "freed", slot, when=(d > 0) & (i + 2 < rounds)),
    ]


def read_last(d, n, i, rounds):
    """Devices in the middle send a piece before they read it."""
    late = lambda action: isinstance(action, Read) and d < n - 1
    return sorted(pass_on(d, n, i, rounds), key=late)


@pytest.mark.parametrize("right", [pass_on, with_conditions])
def test_chain_solution(right):
    accepted(ex18.check_chain(right))


@pytest.mark.parametrize(
    "wrong, said",
    [
        (functools.partial(pass_on, flush=False), "must follow a flush"),
        (functools.partial(pass_on, waits=False), "there is an order that fails"),
        (functools.partial(pass_on, credit=3, frees_until=3), "used again two rounds later"),
        (functools.partial(pass_on, frees_until=1), "need no `freed`"),
        (functools.partial(pass_on, frees_until=3), "is it signalled for every piece"),
        (lambda d, n, i, rounds: pass_on(d, n, 0, rounds), "in round 1; it must"),
        (lambda d, n, i, rounds: pass_on(d, n + 1, i, rounds), "it must send nothing"),
        (read_last, "before it has read it"),
        (lambda d, n, i, rounds: pass_on(d, n, i, rounds)[::-1], "there is an order that fails"),
        (lambda d, n, i, rounds: None, "returns None"),
        (lambda d, n, i, rounds: [i / 0], "raised ZeroDivisionError"),
    ],
)
def test_chain_wrong(wrong, said):
    rejected(ex18.check_chain(wrong), said)

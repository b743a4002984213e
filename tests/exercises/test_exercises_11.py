"""The exercises of chapter 11: solutions are accepted; wrong answers and untouched skeletons are not."""

import heapq
import sys

import pytest

from tests.exercises.answers import NOTEBOOKS, accepted, rejected
from tests.exercises.test_solutions import mistaken

sys.path.insert(0, str(NOTEBOOKS))

from exercises import ex11  # noqa: E402

# Exercise 2


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
        (lambda *args: None, "write its body"),
    ],
)
def test_turns_wrong(wrong, said):
    rejected(ex11.check_turns(wrong), said)


# Exercise 5


def seen(first, num, block_kv, left):
    return max(first - left, 0) // block_kv, -(-(first + num) // block_kv)


def phases(first_q, wg, wgs, block_kv, left, *, tile=True, whole_from=63, whole_to=1, clip=True):
    mine = first_q + 64 * wg
    start, end = seen(first_q, 64 * wgs, block_kv, left) if tile else seen(mine, 64, block_kv, left)
    first, last = seen(mine, 64, block_kv, left)
    whole_first = -(-max(mine + whole_from - left, 0) // block_kv)
    whole_end = (mine + whole_to) // block_kv
    if clip:
        whole_end = max(whole_end, first)
        whole_first = min(max(whole_first, first), whole_end)
    return end - last, last - whole_end, whole_end - whole_first, whole_first - first, first - start


def with_knobs(**wrong):
    return lambda *args: phases(*args, **wrong)


def test_phases_solution():
    accepted(ex11.check_phases(phases))


@pytest.mark.parametrize(
    "wrong, said",
    [
        (with_knobs(tile=False), "for all of its warpgroups"),
        (with_knobs(whole_from=0), "it must be masked"),
        (with_knobs(whole_to=64), "it must be masked"),
        (with_knobs(clip=False), "none below 0"),
        (lambda *args: phases(*args)[::-1], "counted from the last block"),
        (lambda *args: (0, 1, 2), "five numbers"),
        (lambda *args: 5, "five numbers"),
        (lambda *args: None, "write its body"),
    ],
)
def test_phases_wrong(wrong, said):
    rejected(ex11.check_phases(wrong), said)


# Exercise 4


def deal(steps, blocks, *, longest_first=True):
    done, rows = [(0, block) for block in range(blocks)], [[] for _ in range(blocks)]
    for tile in sorted(range(len(steps)), key=lambda tile: -steps[tile] * longest_first):
        time, block = heapq.heappop(done)
        rows[block].append(tile)
        heapq.heappush(done, (time + steps[tile], block))
    return rows


def test_deal_solution():
    accepted(ex11.check_deal(deal))


@pytest.mark.parametrize(
    "wrong, said",
    [
        (lambda steps, blocks: deal(steps, blocks, longest_first=False), "are possible"),
        (lambda steps, blocks: [list(range(b, len(steps), blocks)) for b in range(blocks)], "are possible"),
        (lambda steps, blocks: deal(steps[:-1], blocks), "0 times"),
        (lambda steps, blocks: [row + [0] for row in deal(steps, blocks)], "times; once"),
        (lambda steps, blocks: [row + [len(steps)] for row in deal(steps, blocks)], "there is no tile"),
        (lambda steps, blocks: [row for row in deal(steps, blocks) if row], "one without a tile"),
        (lambda steps, blocks: [0, 1], "a list of lists"),
        (lambda steps, blocks: None, "write its body"),
    ],
)
def test_deal_wrong(wrong, said):
    rejected(ex11.check_deal(wrong), said)


# Exercises 1 and 3


VALUES = (
    "acc = add_product(acc, p, v_smem.at[slot], interpreted())",
    "values.free(step)",
)
NEXT = "\n                "  # Between two lines of a step.


@pytest.mark.parametrize(
    "cell, right, wrong, said",
    [
        ("exercise-compute", "values.free(step)", "pass", "never end"),
        ("exercise-compute", "acc = acc * per_row(alpha, acc.shape)", "pass", "out"),
        ("exercise-mend", "turns.start(role)", "pass", "never end"),
        ("exercise-mend", "turns.drain(role)", "pass", "is the last turn drained"),
        ("exercise-mend", NEXT.join(VALUES), NEXT.join(reversed(VALUES)), "race"),
    ],
)
def test_kernels_wrong(cell, right, wrong, said):
    rejected(mistaken("11_flash_attention", cell, right, wrong), said)


def test_attention_outside_of_a_kernel():
    rejected(ex11.check_compute(lambda q, k, v: (q, q[..., 0])), "must be a kernel")

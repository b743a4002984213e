"""The exercises of chapter 13: solutions are accepted; wrong answers and untouched skeletons are not."""

import sys

import numpy as np
import pytest

from tests.exercises.answers import NOTEBOOKS, accepted, rejected, skeletons

sys.path.insert(0, str(NOTEBOOKS))

from exercises import ex13  # noqa: E402

skeleton = skeletons("13_paged_decode")


# Exercise 1


def slots(tables, seqs, positions, page_size):
    found = tables[seqs, positions // page_size] * page_size + positions % page_size
    return np.where(positions < 0, -1, found)


def slots_one_by_one(tables, seqs, positions, page_size):
    found = []
    for seq, position in zip(seqs, positions, strict=True):
        page, offset = divmod(int(position), page_size)
        found.append(-1 if position < 0 else int(tables[seq][page]) * page_size + offset)
    return found


def slots_as_int32(*args):
    return slots(*args).astype(np.int32)


@pytest.mark.parametrize("right", [slots, slots_one_by_one, slots_as_int32])
def test_slots_solutions(right):
    accepted(ex13.check_slots(right))


@pytest.mark.parametrize(
    "wrong, said",
    [
        (lambda t, s, p, n: t[s, p // n] * n + p % n, "is padding"),
        (lambda t, s, p, n: np.where(p < 0, 0, t[s, p // n] * n + p % n), "must be -1, and is 0"),
        (lambda t, s, p, n: np.where(p < 0, -1, p), "the table is not used"),
        (lambda t, s, p, n: np.where(p < 0, -1, t[s, p // n]), "that is the page"),
        (lambda t, s, p, n: np.where(p < 0, -1, t[s, p // n] * n), "the page's first slot"),
        (lambda t, s, p, n: np.where(p < 0, -1, t[s, p // n] + p % n), "multiply"),
        (lambda t, s, p, n: np.where(p < 0, -1, t[0, p // n] * n + p % n), "its row of the table"),
        (lambda t, s, p, n: np.where(p < 0, -1, t[s, p % n % t.shape[1]] * n + p // n), "exchanged"),
        (lambda t, s, p, n: np.where(p < 0, -1, t[s, p // n] * 16 + p % 16), "with page_size = 4"),
        (lambda t, s, p, n: np.where(p < 0, -1, t[s, p // n] * n + p / n), "must be integers"),
        (lambda t, s, p, n: slots(t, s, p, n)[p >= 0], "one slot for each token"),
        (lambda *args: None, "write its body"),
        (lambda t: None, "raised TypeError"),
    ],
)
def test_slots_wrong(wrong, said):
    rejected(ex13.check_slots(wrong), said)


def test_slots_skeleton():
    rejected(ex13.check_slots(skeleton("exercise-1")["slot_mapping"]), "write its body")


# Exercise 2


def times(kv_lens, num_heads, num_kv_heads, head_dim, *, of_bytes=1.0, of_flops=1.0, rows=64, total=sum, unit=1e6):
    tokens = total(kv_lens) * num_kv_heads * head_dim
    return unit * of_bytes * 4 * tokens / 4.8e12, unit * of_flops * 4 * rows * tokens / 989e12


def test_times_solution():
    accepted(ex13.check_times(times))


def knob(**wrong):
    return lambda *args: times(*args, **wrong)


def with_all_heads(lens, heads, kv_heads, head_dim):
    return times(lens, heads, heads, head_dim)


@pytest.mark.parametrize(
    "wrong, said",
    [
        (knob(of_bytes=0.5), "there are keys and there are values"),
        (knob(of_flops=0.5), "are two operations"),
        (knob(of_flops=0.25), "4 operations"),
        (knob(total=lambda lens: max(lens) * len(lens)), "its own tokens"),
        (knob(unit=1.0), "in seconds"),
        (knob(unit=1e3), "in ms"),
        (with_all_heads, "a group of query heads reads them together"),
        (lambda lens, n, k, h: (times(lens, n, k, h)[0], times(lens, n, n, h)[1]), "one unit"),
        (lambda lens, n, k, h: times(lens, n, k, h, rows=n // k), "multiply all 64"),
        (knob(rows=128), "the tensor cores take"),
        (lambda lens, n, k, h: times(lens, n, k, 128), "memory takes"),
        (lambda lens, n, k, h: times(lens, n, k, h)[0], "two numbers"),
        (lambda *args: None, "write its body"),
    ],
)
def test_times_wrong(wrong, said):
    rejected(ex13.check_times(wrong), said)


def test_times_skeleton():
    rejected(ex13.check_times(skeleton("exercise-2")["times"]), "write its body")


# Exercise 3


def part_by_running_sums(part, num_parts, blocks):
    """As the chapter's kernel has it: the long parts are spread over all."""
    ends = np.cumsum(blocks)
    start, stop = part * ends[-1] // num_parts, (part + 1) * ends[-1] // num_parts
    unit = min(np.searchsorted(ends, start, side="right"), len(blocks) - 1)
    return unit, start - (ends[unit] - blocks[unit]), stop - start


def part_by_counting(part, num_parts, blocks):
    """As the package has it: the long parts come first."""
    share, extra = divmod(int(sum(blocks)), num_parts)
    start, unit = part * share + min(part, extra), 0
    while unit < len(blocks) - 1 and start >= blocks[unit]:
        start, unit = start - blocks[unit], unit + 1
    return unit, start, share + (part < extra)


@pytest.mark.parametrize("right", [part_by_running_sums, part_by_counting])
def test_part_solutions(right):
    accepted(ex13.check_part(right))


def whole_units(part, num_parts, blocks):
    return part % len(blocks), 0, blocks[part % len(blocks)]


def rest_in_the_last(part, num_parts, blocks):
    share = sum(blocks) // num_parts
    unit, block, _ = part_by_counting(0, 1, blocks)
    ends = np.cumsum(blocks)
    unit = min(np.searchsorted(ends, part * share, side="right"), len(blocks) - 1)
    steps = share if part < num_parts - 1 else sum(blocks) - share * (num_parts - 1)
    return unit, part * share - (ends[unit] - blocks[unit]), steps


def rounded_up(part, num_parts, blocks):
    share = -(-sum(blocks) // num_parts)
    unit, block, _ = rest_in_the_last(part, num_parts, blocks)
    return unit, block, min(share, sum(blocks) - part * share)


def from_the_row(part, num_parts, blocks):
    unit, _, steps = part_by_running_sums(part, num_parts, blocks)
    return unit, part * sum(blocks) // num_parts, steps


def side_left(part, num_parts, blocks):
    ends = np.cumsum(blocks)
    start, stop = part * ends[-1] // num_parts, (part + 1) * ends[-1] // num_parts
    unit = np.searchsorted(ends, start)
    return unit, start - (ends[unit] - blocks[unit]), stop - start


def always_the_first(part, num_parts, blocks):
    return 0, 0, part_by_running_sums(part, num_parts, blocks)[2]


@pytest.mark.parametrize(
    "wrong, said",
    [
        (rest_in_the_last, "they may differ by one"),
        (rounded_up, "blocks"),
        (from_the_row, "counts from the start of its unit"),
        (side_left, "begins in the next"),
        (always_the_first, "the parts before end before"),
        (whole_units, "blocks"),
        (lambda p, n, b: (*part_by_counting(p, n, b)[:2], 1), "all parts together"),
        (lambda p, n, b: (len(b), 0, part_by_counting(p, n, b)[2]), "there are units 0 to 3"),
        (lambda p, n, b: 3, "it must be (unit, block, steps)"),
        (lambda *args: None, "write its body"),
    ],
)
def test_part_wrong(wrong, said):
    rejected(ex13.check_part(wrong), said)


def test_part_skeleton():
    rejected(ex13.check_part(skeleton("exercise-3")["part"]), "write its body")


# Exercise 4


def merge(outs, lses):
    top = lses.max(axis=0)
    weights = np.exp(lses - np.where(np.isneginf(top), 0.0, top))
    total = weights.sum(axis=0)
    out = (weights[..., None] * outs).sum(axis=0) / np.where(total > 0, total, 1.0)[:, None]
    return out, np.where(total > 0, top + np.log(np.where(total > 0, total, 1.0)), -np.inf)


def merge_in_pairs(outs, lses):
    out, lse = outs[0], lses[0]
    for other, its_lse in zip(outs[1:], lses[1:], strict=True):
        both = np.logaddexp(lse, its_lse)
        safe = np.where(np.isneginf(both), 0.0, both)
        out = out * np.exp(lse - safe)[:, None] + other * np.exp(its_lse - safe)[:, None]
        lse = both
    return out, lse


def merge_in_float32(outs, lses):
    return merge(outs.astype(np.float32), lses.astype(np.float32))


@pytest.mark.parametrize("right", [merge, merge_in_pairs, merge_in_float32])
def test_merge_solutions(right):
    accepted(ex13.check_merge(right))


def merge_overflows(outs, lses):
    weights = np.exp(lses)
    return (weights[..., None] * outs).sum(0) / weights.sum(0)[:, None], np.log(weights.sum(0))


def merge_unguarded(outs, lses):
    lse = np.logaddexp.reduce(lses, axis=0)
    return (np.exp(lses - lse)[..., None] * outs).sum(0), lse


def merge_base_2(outs, lses):
    lse = np.logaddexp2.reduce(lses, axis=0)
    return (np.exp2(lses - np.where(np.isneginf(lse), 0.0, lse))[..., None] * outs).sum(0), lse


@pytest.mark.parametrize(
    "wrong, said",
    [
        (lambda outs, lses: (outs.mean(0), merge(outs, lses)[1]), "not the same weight"),
        (lambda outs, lses: (outs.sum(0), merge(outs, lses)[1]), "weigh them"),
        (lambda outs, lses: (merge(outs, lses)[0], lses.max(0)), "the largest lse is not all"),
        (lambda outs, lses: (outs[0], merge(outs, lses)[1]), "lse is right, out is not"),
        (lambda outs, lses: (merge(outs, lses)[0], lses.sum(0)), "the natural logarithm"),
        (lambda outs, lses: (merge(outs, lses)[0][None], merge(outs, lses)[1]), "axis is gone"),
        (lambda outs, lses: outs[0, 0, 0], "must be (out, lse)"),
        (merge_overflows, "Subtract the largest"),
        (merge_unguarded, "all pieces are empty"),
        (merge_base_2, "natural logarithm"),
        (lambda outs, lses: None, "write its body"),
        (lambda outs, lses: (None, None), "write its body"),
    ],
)
def test_merge_wrong(wrong, said):
    rejected(ex13.check_merge(wrong), said)


def test_merge_skeleton():
    rejected(ex13.check_merge(skeleton("exercise-4")["merge_pieces"]), "write its body")

"""The exercises of chapter 13: other right answers are accepted, and each wrong one is told its mistake."""

import sys

import numpy as np
import pytest

from tests.exercises.answers import NOTEBOOKS, accepted, rejected
from tests.exercises.test_solutions import mistaken

sys.path.insert(0, str(NOTEBOOKS))

from exercises import ex13, judge  # noqa: E402

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


# Exercise 4


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


# Exercise 3


@pytest.mark.parametrize(
    "right, wrong, said",
    [
        ("block * block_kv + i * tokens", "block * block_kv", "a page is copied twice"),
        ("pl.ds(lax.rem(position, jnp.int32(page_size)), tokens)", "pl.ds(0, tokens)", "the page's first rows"),
        ("tables_gmem[seq, lax", "tables_gmem[0, lax", "it must be"),
        ("num_arrivals=copies", "num_arrivals=1", ""),
        ("num_arrivals=copies", "num_arrivals=2 * copies", "never end"),
        ("        plgpu.barrier_wait(loaded)\n", "", "race"),
        ("    )(block_tables, pages)", "    )(block_tables, pages) * 1", "outside of the kernel"),
        ("    _, page_size", "    while True: pass\n    _, page_size", "has not ended"),
    ],
)
def test_in_order_wrong(right, wrong, said, monkeypatch):
    """Where nothing is said: the interpreter names the barrier that completes more often than it is waited for."""
    if "while" in wrong:
        monkeypatch.setattr(judge, "SECONDS", 1)
    rejected(mistaken("13_paged_decode", "exercise-pages", right, wrong), said)


# Exercise 5


@pytest.mark.parametrize(
    "right, wrong, said",
    [
        ("jnp.exp(lses_gmem[piece, row] - shift)", "jnp.exp(lses_gmem[piece, row])", "Subtract the largest"),
        ("jnp.exp(lses_gmem[piece, row] - shift)", "jnp.float32(1.0)", "lse"),
        ("acc * jnp.where(total > 0, 1 / total, 0.0)", "acc", "lse is right, out is not"),
        ("acc * jnp.where(total > 0, 1 / total, 0.0)", "acc / total", "all pieces are empty"),
        ("shift + jnp.log(total)", "top", "the largest lse is not all"),
        ("shift + jnp.log(total)", "jnp.log(total)", "the natural logarithm"),
        ("    )(outs, lses)", "    )(outs + 0, lses)", "outside of the kernel"),
        ("    num_pieces, rows", "    while True: pass\n    num_pieces, rows", "has not ended"),
    ],
)
def test_merge_wrong(right, wrong, said, monkeypatch):
    if "while" in wrong:
        monkeypatch.setattr(judge, "SECONDS", 1)
    rejected(mistaken("13_paged_decode", "exercise-merge", right, wrong), said)

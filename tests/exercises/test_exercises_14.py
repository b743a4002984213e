"""The exercises of chapter 14: other right answers are accepted, and each wrong one is told its mistake."""

import itertools
import sys

import numpy as np
import pytest

from tests.exercises.answers import NOTEBOOKS, accepted, rejected
from tests.exercises.test_solutions import mistaken

sys.path.insert(0, str(NOTEBOOKS))

from exercises import ex14, judge  # noqa: E402

# Exercise 2


def tiles(cu_q, queries, side="right"):
    lengths = np.diff(cu_q)
    num = -(-lengths // queries)
    ends = np.cumsum(num)
    number = np.arange(ends[-1])
    seq = np.searchsorted(ends, number, side=side)
    first = (number - (ends - num)[seq]) * queries
    return cu_q[seq] + first, np.minimum(lengths[seq] - first, queries)


def tiles_in_a_loop(cu_q, queries):
    found = [
        (row, min(queries, end - row))
        for start, end in itertools.pairwise(cu_q.tolist())
        for row in range(start, end, queries)
    ]
    return [row for row, _ in found], [num for _, num in found]


@pytest.mark.parametrize("right", [tiles, tiles_in_a_loop])
def test_tiles_solutions(right):
    accepted(ex14.check_tiles(right))


def tiles_of_rows(cu_q, queries):
    """Tiles of the array, without regard to sequences."""
    first = np.arange(0, cu_q[-1], queries)
    return first, np.minimum(cu_q[-1] - first, queries)


def tiles_left(cu_q, queries):
    """searchsorted on the other side."""
    return tiles(cu_q, queries, side="left")


def tiles_rounded_down(cu_q, queries):
    found = [
        (row, queries)
        for start, end in itertools.pairwise(cu_q.tolist())
        for row in range(start, end - queries + 1, queries)
    ]
    return [row for row, _ in found], [num for _, num in found]


def at_least_one(cu_q, queries):
    found = [
        (row, min(queries, end - row))
        for start, end in itertools.pairwise(cu_q.tolist())
        for row in range(start, max(end, start + 1), queries)
    ]
    return [row for row, _ in found], [num for _, num in found]


@pytest.mark.parametrize(
    "wrong, said",
    [
        (tiles_of_rows, "over the border"),
        (tiles_left, "tile"),
        (tiles_rounded_down, "it must be"),
        (at_least_one, "an empty sequence has no tile"),
        (lambda cu, n: (tiles(cu, n)[0], np.full_like(tiles(cu, n)[0], n)), "over the border"),
        (lambda cu, n: tiles(cu, 2 * n), "queries"),
        (lambda cu, n: tuple(x[::-1] for x in tiles(cu, n)), "their order"),
        (lambda cu, n: (tiles(cu, n)[0] - cu[0] + 1, tiles(cu, n)[1]), "row"),
        (lambda cu, n: tiles(cu, n)[0], "two arrays"),
        (lambda cu, n: (tiles(cu, n)[0], tiles(cu, n)[1][:-1]), "two arrays"),
        (lambda cu, n: None, "write its body"),
        (lambda cu: None, "raised TypeError"),
    ],
)
def test_tiles_wrong(wrong, said):
    rejected(ex14.check_tiles(wrong), said)


# Exercise 1


def keys(t, i, cu_q, cu_kv, left, *, at_end=True, clip=True, rows=True, bound=True):
    num_q, num_kv = cu_q[i + 1] - cu_q[i], cu_kv[i + 1] - cu_kv[i]
    position = num_kv - num_q + t if at_end else t
    end = max(position + 1, 0) if clip else position + 1
    first = max(position - left, 0) if bound else position - left
    first = min(first, end) if clip else first
    start = cu_kv[i] if rows else 0
    return start + first, start + end


def keys_by_mask(t, i, cu_q, cu_kv, left):
    j = np.arange(cu_kv[i], cu_kv[i + 1])
    position = cu_kv[i + 1] - cu_q[i + 1] + cu_q[i] + t
    seen = j[(j <= position) & (j >= position - left)]
    return (seen[0], seen[-1] + 1) if len(seen) else (0, 0)


@pytest.mark.parametrize("right", [keys, keys_by_mask])
def test_keys_solutions(right):
    accepted(ex14.check_keys(right))


def keys_one_after(t, i, cu_q, cu_kv, left):
    """One more, for the last query alone."""
    first, end = keys(t, i, cu_q, cu_kv, left)
    return first, end + (t == cu_q[i + 1] - cu_q[i] - 1)


def keys_one_before(t, i, cu_q, cu_kv, left):
    """One more, where the first key is seen."""
    first, end = keys(t, i, cu_q, cu_kv, left)
    return first - (0 < cu_kv[i] == first < end), end


def with_knobs(**wrong):
    return lambda *args: keys(*args, **wrong)


@pytest.mark.parametrize(
    "wrong, said",
    [
        (with_knobs(at_end=False), "aligned at the starts"),
        (with_knobs(clip=False), "lies before the first"),
        (with_knobs(rows=False), "rows of k are asked for"),
        (with_knobs(bound=False), "it sees nothing"),
        (lambda t, i, q, kv, left: keys(t + 1, i, q, kv, left), "it sees rows 0 to 0, not 1 to 1"),
        (keys_one_after, "belongs to the sequence after it"),
        (keys_one_before, "belongs to the sequence before"),
        (lambda t, i, q, kv, left: keys(t, i, q, kv, left + 1), "it sees rows"),
        (lambda t, i, q, kv, left: (kv[i], kv[i + 1]), "rows"),
        (lambda t, i, q, kv, left: keys(t, i, q, kv, left)[0], "it must be (first, end)"),
        (lambda *args: None, "write its body"),
    ],
)
def test_keys_wrong(wrong, said):
    rejected(ex14.check_keys(wrong), said)


# Exercise 5


def deal(block, blocks, total, *, to_and_fro=True, short=True):
    waves = -(-total // blocks) if short else total // blocks
    place = lambda wave: blocks - 1 - block if to_and_fro and wave % 2 else block
    numbers = [wave * blocks + place(wave) for wave in range(waves)]
    return [number for number in numbers if number < total]


def deal_by_division(block, blocks, total):
    waves, rest = divmod(total, blocks)
    place = lambda i: block if i % 2 == 0 else blocks - 1 - block
    return [i * blocks + place(i) for i in range(waves + (place(waves) < rest))]


@pytest.mark.parametrize("right", [deal, deal_by_division])
def test_deal_solutions(right):
    accepted(ex14.check_deal(right))


@pytest.mark.parametrize(
    "wrong, said",
    [
        (lambda *args: deal(*args, to_and_fro=False), "one direction"),
        (lambda *args: deal(*args, short=False), "no block computes"),
        (lambda b, n, total: deal(b, n, n * -(-total // n)), "there is none"),
        (lambda b, n, total: deal(b, n, total)[::-1], "in another order"),
        (lambda b, n, total: list(range(total)), "computed twice"),
        (lambda b, n, total: deal(n - 1 - b, n, total), "it must be"),
        (lambda b, n, total: 3, "a list of numbers"),
        (lambda b, n, total: None, "write its body"),
    ],
)
def test_deal_wrong(wrong, said):
    rejected(ex14.check_deal(wrong), said)


# Exercises 3 and 4


@pytest.mark.parametrize(
    "right, wrong, said",
    [
        (
            "jnp.where(is_mine, weight * value, jnp.zeros_like(value))",
            "jnp.where(is_mine, jnp.full(value.shape, weight), jnp.zeros_like(value)) * value",
            "row 4 holds NaN",
        ),
        ("weight * value, jnp.zeros_like(value))", "weight, jnp.zeros_like(value)) * value", "row 4 holds NaN"),
        ("jnp.where(is_mine, weight * value, jnp.zeros_like(value))", "weight * value", "element"),
        ("(row >= first) & (row < end)", "row >= first", "element"),
        ("    )(cu_kv, v, weights)", "    )(cu_kv, v * 1, weights)", "outside of the kernel"),
        ("    def body", "    while True: pass\n    def body", "has not ended"),
    ],
)
def test_sums_wrong(right, wrong, said, monkeypatch):
    if "while" in wrong:
        monkeypatch.setattr(judge, "SECONDS", 1)
    rejected(mistaken("14_ragged_prefill", "exercise-nan", right, wrong), said)


@pytest.mark.parametrize(
    "right, wrong, said",
    [
        ("first + (num & size), size // 2", "first, size // 2", ""),
        ("pl.when((num & size) != 0)", "pl.when(num >= size)", ""),
        ("first, size = 0 * num, queries", "first, size = 0 * num, queries // 2", "element"),
        ("    )(tokens, nums, x)", "    )(tokens + 0, nums, x)", "outside of the kernel"),
        ("size // 2\n", "size\n", "has not ended"),
    ],
)
def test_store_wrong(right, wrong, said, monkeypatch):
    """Where nothing is said: a race or a wrong element, whichever the interpreter meets first."""
    if right.startswith("size"):
        monkeypatch.setattr(judge, "SECONDS", 2)
    rejected(mistaken("14_ragged_prefill", "exercise-store", right, wrong), said)

"""The exercises of chapter 9: solutions are accepted; wrong answers and untouched skeletons are not."""

import math
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from tests.exercises.answers import NOTEBOOKS, accepted, rejected, skeletons

sys.path.insert(0, str(NOTEBOOKS))

from exercises import ex09  # noqa: E402

skeleton = skeletons("09_low_precision")


# Exercise 1


def quantise(w, *, xp=jnp, largest=127, axis=0, measure=lambda w: abs(w), rounded=True):
    top = measure(w).max(axis=axis)
    scales = xp.where(top > 0, top / largest, 1)
    values = w / scales
    return (xp.round(values) if rounded else values).astype(xp.int8), scales


def in_numpy(w):
    return quantise(np.asarray(w), xp=np)


def per_tensor(w):
    scale = abs(w).max() / 127
    return jnp.round(w / scale).astype(jnp.int8), jnp.full(w.shape[1], scale)


def per_row(w):
    scale = abs(w).max(axis=1, keepdims=True) / 127
    return jnp.round(w / jnp.where(scale > 0, scale, 1)).astype(jnp.int8), scale[:40, 0]


def zeros_forgotten(w):
    scales = abs(w).max(axis=0) / 127
    return jnp.round(w / scales).astype(jnp.int8), scales


def zero_scales(w):
    scales = abs(w).max(axis=0) / 127
    return jnp.round(w / jnp.where(scales > 0, scales, 1)).astype(jnp.int8), scales


def inverted(w):
    w_q, scales = quantise(w)
    return w_q, 1 / scales


def wrapped(w):
    scales = abs(w).max(axis=0) / 128
    values = np.round(np.asarray(w) / np.where(np.asarray(scales) > 0, scales, 1)).astype(np.int64)
    return jnp.asarray(values.astype(np.int8)), jnp.where(scales > 0, scales, 1)


def with_minus_128(w):
    scales = jnp.where(abs(w).max(axis=0) > 0, abs(w).max(axis=0) / 127.9, 1)
    return jnp.clip(jnp.round(w / scales), -128, 127).astype(jnp.int8), scales


def kept_as_floats(w):
    w_q, scales = quantise(w)
    return w_q.astype(jnp.float32), scales


def kept_dims(w):
    w_q, scales = quantise(w)
    return w_q, scales[None]


@pytest.mark.parametrize("right", [quantise, in_numpy])
def test_quantise_solution(right):
    accepted(ex09.check_quantise(right))


@pytest.mark.parametrize(
    "wrong, said",
    [
        (per_tensor, "is enough"),
        (per_row, "comes back as"),
        (zeros_forgotten, "must be positive"),
        (zero_scales, "must be positive"),
        (inverted, "comes back as"),
        (wrapped, "-128"),
        (with_minus_128, "-128"),
        (kept_as_floats, "must be int8"),
        (kept_dims, "one a column"),
        (lambda w: quantise(w, rounded=False), "Rounded to the nearest?"),
        (lambda w: quantise(w, measure=lambda w: w), "-128"),
        (lambda w: quantise(w, largest=64), "is enough"),
        (lambda w: quantise(w, largest=128), "-128"),
        (lambda w: quantise(w)[0], "must return a pair"),
        (lambda w: (None, None), "write its body"),
        (lambda w: 1 / 0, "raised ZeroDivisionError"),
    ],
)
def test_quantise_wrong(wrong, said):
    rejected(ex09.check_quantise(wrong), said)


def test_quantise_skeleton():
    rejected(ex09.check_quantise(skeleton("exercise-1")["quantise_columns"]), "write its body")


# Exercise 2


def largest_m(k, n, peak, bandwidth, weight_bytes=1, row_bytes=2, flops=2):
    a_row = flops * k * n / peak - row_bytes * (k + n) / bandwidth
    return math.floor(weight_bytes * k * n / bandwidth / a_row) if a_row > 0 else math.inf


def solved_by_search(k, n, peak, bandwidth):
    memory_bound = lambda m: 2 * m * k * n / peak <= (k * n + 2 * m * (k + n)) / bandwidth
    if memory_bound(10**9):
        return float("inf")
    low, high = 0, 10**9
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if memory_bound(middle) else (low, middle)
    return low


@pytest.mark.parametrize("right", [largest_m, solved_by_search, lambda *case: float(largest_m(*case))])
def test_crossover_solution(right):
    accepted(ex09.check_crossover(right))


@pytest.mark.parametrize(
    "wrong, said",
    [
        (lambda *case: largest_m(*case, weight_bytes=2), "one byte"),
        (lambda *case: largest_m(*case, row_bytes=0), "cross memory too"),
        (lambda *case: largest_m(*case, row_bytes=1), "of the result is 2 bytes"),
        (lambda *case: largest_m(*case, flops=1), "2 operations"),
        (lambda *case: largest_m(*case) + 1, "round down"),
        (lambda *case: min(largest_m(*case), 10**9) + 0.5, "round down"),
        (lambda k, n, peak, bandwidth: 103, "solve for M"),
        (lambda k, n, peak, bandwidth: "many", "must be a number"),
        (lambda k, n, peak, bandwidth: k / 0, "raised ZeroDivisionError"),
    ],
)
def test_crossover_wrong(wrong, said):
    rejected(ex09.check_crossover(wrong), said)


def test_crossover_skeleton():
    rejected(ex09.check_crossover(skeleton("exercise-2")["largest_m"]), "write its body")


def test_crossover_cases_lie_on_both_sides():
    found = [ex09._largest_m(*case) for case in ex09.CASES]
    assert math.inf in found and len(set(found)) == len(found)


# Exercise 3

TENSOR, ROW, E5M2 = ex09.FORMATS
RIGHT = dict(plain=TENSOR, rows=ROW, channels=E5M2)


def test_formats_solution():
    accepted(ex09.check_formats(RIGHT))


@pytest.mark.parametrize(
    "wrong, said",
    [
        (RIGHT | dict(plain=ROW), '"plain"'),
        (RIGHT | dict(plain=E5M2), "has less"),
        (RIGHT | dict(rows=TENSOR), '"rows"'),
        (RIGHT | dict(rows=E5M2), '"rows"'),
        (RIGHT | dict(channels=TENSOR), '"channels"'),
        (RIGHT | dict(channels=ROW), '"channels"'),
        (RIGHT | dict(channels="int8"), "is none of"),
        (RIGHT | dict(channels=None), "name a format"),
        (TENSOR, "answer with a dict"),
        (dict(plain=TENSOR), "answer with a dict"),
    ],
)
def test_formats_wrong(wrong, said):
    rejected(ex09.check_formats(wrong), said)


def test_formats_skeleton():
    rejected(ex09.check_formats(skeleton("exercise-3")["answer"]), "name a format")


def test_formats_are_far_apart():
    """The right answers hang on no random seed, and are three different ones."""
    for seed in range(4):
        found = {name: ex09.best_format(ex09.format_errors(*pair)) for name, pair in ex09.operands(seed).items()}
        assert found == RIGHT
    for name, pair in ex09.operands().items():
        errors = ex09.format_errors(*pair)
        others = [errors[f] for f in ex09.FORMATS if f != RIGHT[name] and not (name == "plain" and f == ROW)]
        assert min(others) > 1.5 * errors[RIGHT[name]]

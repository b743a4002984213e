"""The exercises of chapter 10: solutions are accepted; wrong answers and untouched skeletons are not."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.exercises.answers import NOTEBOOKS, accepted, rejected
from tests.exercises.test_solutions import changed, mistaken

sys.path.insert(0, str(NOTEBOOKS))

from exercises import ex10  # noqa: E402

# Exercise 1


def step(
    m_i, l_i, acc, x, v, slack, *, scale_l=True, scale_acc=True, guard=True, exp=np.exp2, running=True, divided=False
):
    top = np.maximum(m_i, x.max(axis=1)) if running else x.max(axis=1)
    m_new = np.where(top > m_i + slack, top, m_i) if running else top
    shift = np.where(np.isneginf(m_new), 0.0, m_new) if guard else m_new
    p = exp(x - shift[:, None])
    alpha = exp(m_i - shift)
    l_new = l_i * (alpha if scale_l else 1) + p.sum(axis=1)
    acc = acc * (alpha if scale_acc else 1)[:, None] if scale_acc else acc
    return m_new, l_new, acc + (p / p.sum(axis=1, keepdims=True) if divided else p) @ v


def step_by_merging(m, l_i, acc, x, v, slack):
    """In place, and from the block's own sums."""
    own = x.max(axis=1)
    p = np.exp2(x - np.where(np.isneginf(own), 0.0, own)[:, None])
    top = np.where(own > m + slack, own, m)
    safe = np.where(np.isneginf(top), 0.0, top)
    acc *= np.exp2(m - safe)[:, None]
    acc += np.exp2(own - safe)[:, None] * (p @ v)
    return top, l_i * np.exp2(m - safe) + p.sum(axis=1) * np.exp2(own - safe), acc


def step_in_float32(*args):
    return step(*(np.asarray(arg, np.float32) for arg in args))


@pytest.mark.parametrize("right", [step, step_by_merging, step_in_float32])
def test_step_solutions(right):
    accepted(ex10.check_step(right))


def knob(**wrong):
    return lambda *args: step(*args, **wrong)


@pytest.mark.parametrize(
    "wrong, said",
    [
        (knob(scale_l=False), "what l held"),
        (knob(scale_acc=False), "what acc held"),
        (knob(guard=False), "-inf - -inf"),
        (knob(exp=np.exp), "is the base 2"),
        (knob(running=False), "it must stay"),
        (knob(divided=True), "not yet divided"),
        (lambda m, l_i, acc, x, v, slack: (m, l_i + np.exp2(x).sum(1), acc + np.exp2(x) @ v), "m + log2(l)"),
        (lambda *args: step(*args[:5], 0.0), "it must stay"),
        (lambda *args: step(*args[:5], 16.0), "by more than slack"),
        (lambda m, l_i, acc, x, v, slack: (m[:, None], l_i, acc), "shapes"),
        (lambda *args: None, "write its body"),
        (lambda m, l_i: None, "raised TypeError"),
    ],
)
def test_step_wrong(wrong, said):
    rejected(ex10.check_step(wrong), said)


def test_step_that_fills_empty_rows():
    """-inf replaced by a number on both sides: a masked key then has the weight 1."""

    def filled(m, l_i, acc, x, v, slack):
        return step(m, l_i, acc, np.maximum(x, -1e30), v, slack)

    rejected(ex10.check_step(filled), "has a sum")


# Exercise 2


def merge(out_a, lse_a, out_b, lse_b):
    top = np.maximum(lse_a, lse_b)
    safe = np.where(np.isneginf(top), 0.0, top)
    a, b = np.exp(lse_a - safe), np.exp(lse_b - safe)
    total = a + b
    share = np.where(total > 0, 1 / np.where(total > 0, total, 1), 0)
    return (out_a * a[:, None] + out_b * b[:, None]) * share[:, None], safe + np.log(total)


def merge_by_logaddexp(out_a, lse_a, out_b, lse_b):
    lse = np.logaddexp(lse_a, lse_b)
    safe = np.where(np.isneginf(lse), 0.0, lse)
    return out_a * np.exp(lse_a - safe)[:, None] + out_b * np.exp(lse_b - safe)[:, None], lse


def merge_overflows(out_a, lse_a, out_b, lse_b):
    a, b = np.exp(lse_a), np.exp(lse_b)
    return (out_a * a[:, None] + out_b * b[:, None]) / (a + b)[:, None], np.log(a + b)


def merge_unguarded(out_a, lse_a, out_b, lse_b):
    lse = np.logaddexp(lse_a, lse_b)
    return out_a * np.exp(lse_a - lse)[:, None] + out_b * np.exp(lse_b - lse)[:, None], lse


def merge_base_2(out_a, lse_a, out_b, lse_b):
    top = np.maximum(lse_a, lse_b)
    a, b = np.exp2(lse_a - top), np.exp2(lse_b - top)
    return (out_a * a[:, None] + out_b * b[:, None]) / (a + b)[:, None], top + np.log2(a + b)


def merge_in_float32(*parts):
    return merge(*(part.astype(np.float32) for part in parts))


@pytest.mark.parametrize("right", [merge, merge_by_logaddexp, merge_in_float32])
def test_merge_solutions(right):
    accepted(ex10.check_merge(right))


@pytest.mark.parametrize(
    "wrong, said",
    [
        (lambda oa, la, ob, lb: ((oa + ob) / 2, np.logaddexp(la, lb)), "not the same weight"),
        (lambda oa, la, ob, lb: (oa + ob, np.logaddexp(la, lb)), "divided by their own sums"),
        (lambda oa, la, ob, lb: merge(oa, lb, ob, la), "its own exp(lse)"),
        (lambda oa, la, ob, lb: (merge(oa, la, ob, lb)[0], np.maximum(la, lb)), "the larger is not all"),
        (lambda oa, la, ob, lb: (merge(oa, la, ob, lb)[0], la + lb), "not their logarithms"),
        (lambda oa, la, ob, lb: (oa, np.logaddexp(la, lb)), "lse is right, out is not"),
        (merge_overflows, "overflow"),
        (merge_unguarded, "Both weights are 0"),
        (merge_base_2, "natural logarithm"),
        (lambda oa, la, ob, lb: (merge(oa, la, ob, lb)[0], np.logaddexp(la, lb)[:, None]), "shapes"),
        (lambda *parts: None, "write its body"),
    ],
)
def test_merge_wrong(wrong, said):
    rejected(ex10.check_merge(wrong), said)


# Exercise 5


def window_ranges(first_q, block_kv, num_kv, left, *, xp=jnp, seen_from=0, whole_from=63, whole_to=1, clip=True):
    first = xp.maximum(first_q - left + seen_from, 0) // block_kv
    end = (first_q + 64 + block_kv - 1) // block_kv
    start = (xp.maximum(first_q + whole_from - left, 0) + block_kv - 1) // block_kv
    stop = (first_q + whole_to) // block_kv
    if clip:
        start = xp.minimum(start, end)
        stop = xp.maximum(stop, start)
    return [(first, start, True), (start, stop, False), (stop, end, True)]


class Python:
    maximum, minimum = staticmethod(max), staticmethod(min)


def test_ranges_solution():
    accepted(ex10.check_ranges(window_ranges))


def with_knobs(**wrong):
    return lambda *args: window_ranges(*args, **wrong)


@pytest.mark.parametrize(
    "wrong, said",
    [
        (with_knobs(xp=Python), "jnp.maximum"),
        (with_knobs(seen_from=64), "is left out"),
        (with_knobs(seen_from=-64), "no query sees any"),
        (with_knobs(whole_from=0), "is not masked"),
        (with_knobs(whole_from=191), "is masked"),
        (with_knobs(whole_to=64), "is not masked"),
        (with_knobs(clip=False), "ends before it begins"),
        (lambda q, b, n, left: [(0, n // b, True)], "no query sees any"),
        (lambda q, b, n, left: [(0, (q + 63) // b + 1, True)], "no query sees any"),
        (lambda q, b, n, left: [((q - left) // b, (q + 63) // b + 1, True)], "nothing before block 0"),
        (lambda q, b, n, left: [(max(q - left, 0) // b, (q + 63) // b + 1, True)], "is masked, and every"),
        (lambda q, b, n, left: [(max(q - left, 0) // b, (q + 63) // b, True)], "is left out"),
        (lambda q, b, n, left: [(0, 1, True), (2, 3, True)], "begin where the one before ends"),
        (lambda q, b, n, left: [(0, 1)], "a list of (first, end, masked)"),
        (lambda q, b, n, left: [], "no part at all"),
        (lambda q, b, n, left: None, "write its body"),
    ],
)
def test_ranges_wrong(wrong, said):
    rejected(ex10.check_ranges(wrong), said)


# Exercises 3 and 4


@pytest.mark.parametrize(
    "right, wrong, said",
    [
        ("l_i = l_i + 1.0", "pass", "lse"),
        ("sink * LOG2E", "sink", "has base 2"),
        ("l_i = l_i + 1.0", "acc = acc + 1.0\n        l_i = l_i + 1.0", "out"),
    ],
)
def test_sinks_wrong(right, wrong, said):
    rejected(mistaken("10_online_softmax", "exercise-sinks", right, wrong), said)


def test_sinks_outside_of_the_kernel():
    rejected(
        ex10.check_sinks(lambda q, k, v, sinks: (jax.nn.dot_product_attention(q, k, v), sinks)), "must be a kernel"
    )


KEYS = "s = logits(q_smem, k_smem)", "load(block + 1, k_gmem, k_smem, k_loaded)"
VALUES = (
    "acc = add_product(acc, p, v_smem, interpreted())",
    "load(block + 1, v_gmem, v_smem, v_loaded)",
)
NEXT = "\n            "  # Between two lines of a step.


@pytest.mark.parametrize(
    "right, wrong, said",
    [
        (NEXT.join(KEYS), NEXT.join(reversed(KEYS)), "reads the slot before its tiles have arrived"),
        (NEXT.join(VALUES), NEXT.join(reversed(VALUES)), "reads the slot before its tiles have arrived"),
        (KEYS[1], "pass", "never end"),
        (VALUES[1], "pass", "never end"),
        ("block < num_blocks", "block <= num_blocks", "nobody waits for"),
    ],
)
def test_mended_wrong(right, wrong, said):
    rejected(mistaken("10_online_softmax", "exercise-mend", right, wrong), said)


@pytest.mark.parametrize("line", ["plgpu.barrier_wait(v_loaded)", VALUES[1]])
def test_mended_late(line):
    """The keys' copy after the softmax, or at the end of the step."""
    late = changed("10_online_softmax", "exercise-mend", (KEYS[1], ""), (line, KEYS[1] + NEXT + line))
    rejected(late, "the next keys come too late to hide anything")

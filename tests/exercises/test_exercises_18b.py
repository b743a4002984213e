"""The exercises of chapter 18b: solutions are accepted; wrong answers and untouched skeletons are not."""

import functools
import sys

import pytest
import test_solutions as course

from tests.exercises.answers import NOTEBOOKS, accepted, rejected

sys.path.insert(0, str(NOTEBOOKS))

from exercises import ex18b  # noqa: E402

mistaken = functools.partial(course.mistaken, "18b_overlap")

# A finer wait


def overlapped(n, product_us, gather_us, pieces, first=1, own=True, later=max):
    now, per = (product_us / n if own else 0), product_us / n / pieces
    for i in range((n - 1) * pieces):
        now = later(now, gather_us * (i + first) / ((n - 1) * pieces)) + per
    return now + (0 if own else product_us / n)


def from_the_end(n, product_us, gather_us, pieces):
    """The same: the product waits for the piece after which it never waits again."""
    count = (n - 1) * pieces
    left = lambda i: product_us / n / pieces * (count - i)
    return max(product_us, *(gather_us * (i + 1) / count + left(i) for i in range(count)))


@pytest.mark.parametrize("right", [overlapped, from_the_end])
def test_overlapped_solution(right):
    accepted(ex18b.check_overlapped(right))


@pytest.mark.parametrize(
    "wrong, said",
    [
        (lambda n, p, g, i: p + g, "one after the other"),
        (lambda n, p, g, i: max(p, g), "multiplied after it has arrived"),
        (lambda n, p, g, i: overlapped(n, p, g, 1), "for a whole shard"),
        (lambda n, p, g, i: g + p / n / i, "take the later of the two"),
        (functools.partial(overlapped, first=0), "when all of it is there"),
        (functools.partial(overlapped, own=False), "multiply it first"),
        (functools.partial(overlapped, later=min), "the later of the two"),
        (lambda n, p, g, i: "soon", "must be a number"),
        (lambda n, p, g, i: None, "returns None"),
        (lambda n, p, g, i: p / 0, "raised ZeroDivisionError"),
    ],
)
def test_overlapped_wrong(wrong, said):
    rejected(ex18b.check_overlapped(wrong), said)


# The wait of a tile

WAIT = "pl.semaphore_wait(here, senders, decrement=False)"
HERE = "here = arrived.at[step - 1, block]"
OWNER = "owner = rem(d + step, n)"
STEP = "step, block = div(number, blocks), rem(number, blocks)"


@pytest.mark.parametrize(
    "right, other",
    [
        (WAIT, "pl.when(col == 0)(lambda: pl.semaphore_wait(here, senders))"),  # Once for all tiles of a block.
        (HERE, "here = arrived.at[step - 1].at[block]"),
        (OWNER, "owner = lax.select(step < n - d, d + step, d + step - n)"),
    ],
)
def test_product_solution(right, other):
    accepted(mistaken("exercise-2", right, other))


@pytest.mark.parametrize(
    "right, wrong, said",
    [
        (WAIT, "pass", "has not waited for arrived[0, 0]"),
        (HERE, "here = arrived.at[step - 1, 0]", "has not waited for arrived[0, 1]"),
        (HERE, "here = arrived.at[step, block]", "nobody signals"),
        (HERE, "here = arrived.at[n - 1 - step, block]", "before it waits for arrived[0, 0]"),
        (WAIT, "pl.semaphore_wait(here, decrement=False)", "is 1: the rows of 1 of 2 senders are not there yet"),
        (WAIT, "pl.semaphore_wait(here, senders)", "it needs decrement=False"),
        (WAIT, "pl.semaphore_wait(here, senders + 1, decrement=False)", "waits for ever"),
        (
            WAIT,
            "[pl.semaphore_wait(arrived.at[step - 1, b], senders, decrement=False) for b in range(blocks)]",
            "needs only its own rows",
        ),
        (STEP, "step, block = rem(div(number, blocks) - d + n, n), rem(number, blocks)", "take them first"),
        (STEP, "step, block = rem(div(number, blocks) + 1, n), rem(number, blocks)", "take them first"),
        (STEP, "step, block = rem(n - div(number, blocks), n), rem(number, blocks)", "arrives before"),
        ("lhs_gmem.at[rows]", "gathered_gmem.at[owner, rows]", "the rows of its own shard are missing"),
        ("tile_product(a_smem, b_smem)", "0 * tile_product(a_smem, b_smem)", "it must be"),
        ("return out", "return jnp.matmul(lhs, rhs)", "must be a kernel"),
        ("return out", "return out + 0 * out", "outside of the kernel"),
    ],
)
def test_product_wrong(right, wrong, said):
    rejected(mistaken("exercise-2", right, wrong), said)


# How many senders


def test_senders_solution():
    accepted(ex18b.check_senders(lambda problem, rate, choices: ex18b._senders(problem, rate)))


@pytest.mark.parametrize(
    "wrong, said",
    [
        (functools.partial(ex18b._senders, gather=False), "the gather must end"),
        (functools.partial(ex18b._senders, product=False), "do not multiply"),
        (functools.partial(ex18b._senders, tail=False), "round up"),
        (functools.partial(ex18b._senders, cut=False), "faster than the link"),
    ],
)
def test_senders_wrong(wrong, said):
    rejected(ex18b.check_senders(lambda problem, rate, choices: wrong(problem, rate)), said)


@pytest.mark.parametrize(
    "wrong, said",
    [
        (lambda problem, rate, choices: 7, "one of the choices"),
        (lambda problem, rate, choices: None, "returns None"),
        (lambda problem, rate, choices: choices[1], "the longer one counts"),
    ],
)
def test_senders_no_number(wrong, said):
    rejected(ex18b.check_senders(wrong), said)


# Tiles go to their owners

SUM = "values = values + part(slot, rows)"
LAST = "owner = (d + 1 + step) % n"
ARRIVED = "pl.semaphore_wait(arrived.at[tile], n - 1, decrement=False)"


@pytest.mark.parametrize(
    "right, other",
    [
        (ARRIVED, "pl.semaphore_wait(arrived.at[tile], n - 1)"),  # A tile is waited for once.
        (LAST, "owner = (d - 1 - step) % n"),  # The others in another order: the result is the same.
        (
            "pl.loop(0, m // 64)(functools.partial(one_tile, owner))",
            "[one_tile(owner, tile) for tile in range(m // 64)]",
        ),
    ],
)
def test_summed_solution(right, other):
    accepted(mistaken("exercise-4", right, other))


@pytest.mark.parametrize(
    "right, wrong, said",
    [
        (LAST, "owner = (d + step) % n", "then all wait, and none sends"),
        (LAST, "owner = step", "then all wait, and none sends"),
        (LAST, "owner = (d + 1) % n", "it must signal each of"),
        (ARRIVED, "pass", "have not arrived"),
        (ARRIVED, "pl.semaphore_wait(arrived.at[tile], 1, decrement=False)", "waited for 1 of 3 signals"),
        (ARRIVED, "pl.semaphore_wait(arrived.at[0], n - 1, decrement=False)", "have not arrived"),
        (ARRIVED, "pl.semaphore_wait(arrived.at[tile], n, decrement=False)", "waits for ever"),
        (ARRIVED, f"values = values.astype(jnp.bfloat16).astype(jnp.float32); {ARRIVED}", "rounded before the sum"),
        ("pl.semaphore_signal(arrived.at[tile], device_id=to)", "pass", "it must signal each of"),
        (SUM, "pass", "own part alone"),
        (SUM, "values = values + part(n - 2 - slot, rows)", "slot 0 comes first"),
        (SUM, "values = (values + part(slot, rows)).astype(jnp.bfloat16).astype(jnp.float32)", "after every addition"),
        (SUM, "values = values.astype(jnp.bfloat16).astype(jnp.float32) + part(slot, rows)", "after every addition"),
        (SUM, "values = values + part(0, rows)", "it must be"),
    ],
)
def test_summed_wrong(right, wrong, said):
    rejected(mistaken("exercise-4", right, wrong), said)

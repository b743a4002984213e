"""The exercises of chapter 14b: other right answers are accepted, and each wrong one is told its mistake."""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tests.exercises.answers import NOTEBOOKS, accepted, rejected
from tests.exercises.test_solutions import mistaken

sys.path.insert(0, str(NOTEBOOKS))

from exercises import ex14b, judge  # noqa: E402

# Exercise 1


def spoilt(tokens, nums, order, rows, num_rows, *, first=False, in_order=False):
    """Row after row, not tile after tile."""
    order = sorted(order) if in_order else order[::-1] if first else order
    found = []
    for row in range(num_rows):
        last = [n for n in order if tokens[n] <= row < tokens[n] + rows][-1]
        if row >= tokens[last] + nums[last]:
            found.append(row)
    return found


def as_an_array(*args):
    return np.array(spoilt(*args), int)


@pytest.mark.parametrize("right", [spoilt, as_an_array])
def test_spoilt_solutions(right):
    accepted(ex14b.check_spoilt(right))


def written_twice(tokens, nums, order, rows, num_rows):
    return [row for row in range(num_rows) if sum(t <= row < t + rows for t in tokens) > 1]


def not_its_own(tokens, nums, order, rows, num_rows):
    """Rows that some tile stores and that are not its own, up to the end of the last tile."""
    return sorted({row for t, n in zip(tokens, nums, strict=True) for row in range(t + n, t + rows)})


@pytest.mark.parametrize(
    "wrong, said",
    [
        (functools.partial(spoilt, first=True), "after the *first* store"),
        (functools.partial(spoilt, in_order=True), "right for the order of the list"),
        (written_twice, "written more than once"),
        (not_its_own, "and out has 29 rows"),
        (lambda *args: spoilt(*args)[::-1], "in rising order"),
        (lambda *args: 2 * spoilt(*args), "is given twice"),
        (lambda *args: spoilt(*args)[1:], "is missing: another tile stores it"),
        (lambda *args: sorted({*spoilt(*args), 0}), "its own tile is the last"),
        (lambda *args: len(spoilt(*args)), "must be a list of rows"),
        (lambda *args: None, "write its body"),
        (lambda tokens: None, "raised TypeError"),
    ],
)
def test_spoilt_wrong(wrong, said):
    rejected(ex14b.check_spoilt(wrong), said)


def test_spoilt_without_end(monkeypatch):
    def never(*args):
        while True:
            pass

    monkeypatch.setattr(judge, "SECONDS", 1)
    rejected(ex14b.check_spoilt(never), "has not ended")


# Exercise 2

BOXES = """while size:
            pl.when((num & size) != 0)(functools.partial(copy, first, size))
            first, size = first + (num & size), size // 2"""
ROWS = "[pl.when(row < num)(functools.partial(copy, row, 1)) for row in range(queries)]"


@pytest.mark.parametrize(
    "right, wrong, said",
    [
        ("first + (num & size), size // 2", "first, size // 2", ""),
        ("pl.when((num & size) != 0)", "pl.when(num >= size)", ""),
        ("first, size = 0 * num, queries", "first, size = 0 * num, queries // 2", "element"),
        (BOXES, ROWS, "a block starts 9 copies to GMEM, and 5 would do"),
        (BOXES, "pl.loop(0, num)(lambda row: copy(row, 1))", "a block starts 9 copies to GMEM, and 5 would do"),
        ("    )(tokens, nums, x)", "    )(tokens + 0, nums, x)", "outside of the kernel"),
        ("size // 2\n", "size\n", "has not ended"),
    ],
)
def test_store_wrong(right, wrong, said, monkeypatch):
    """Where nothing is said: a race or a wrong element, whichever the interpreter meets first."""
    if right.startswith("size"):
        monkeypatch.setattr(judge, "SECONDS", 2)
    rejected(mistaken("14b_ragged_kernel", "exercise-store", right, wrong), said)


# Exercise 3


def packed_weights(s, heads, *, mask="head", store="head", last=True):
    """Rows of a tile head by head, which the load, the mask and the store must agree on."""
    (num_q, num_heads, num_kv), queries = s.shape, 64 // heads

    def places(gmem, smem, how, first, unit):
        if how == "head":
            for head in range(heads):
                yield gmem.at[pl.ds(first, queries), unit * heads + head], smem.at[pl.ds(head * queries, queries)]
        else:
            for query in range(queries):
                yield gmem.at[first + query, pl.ds(unit * heads, heads)], smem.at[pl.ds(query * heads, heads)]

    def body(s_gmem, p_gmem, smem, loaded):
        first, unit = lax.axis_index("tile") * queries, lax.axis_index("unit")
        for gmem, rows in places(s_gmem, smem, "head", first, unit):
            plgpu.copy_gmem_to_smem(gmem, rows, loaded)
        plgpu.barrier_wait(loaded)
        s = plgpu.load(smem, layout=plgpu.Layout.WGMMA, optimized=False)
        row, key = (plgpu.broadcasted_iota(jnp.int32, s.shape, dim, layout=plgpu.Layout.WGMMA) for dim in (0, 1))
        query = {"head": lax.rem(row, jnp.int32(queries)), "query": lax.div(row, jnp.int32(heads)), "row": row}[mask]
        p = jnp.where(key <= num_kv - num_q * last + first + query, jnp.exp(s), 0.0)
        smem[...] = p / lax.broadcast_in_dim(p.sum(axis=1), s.shape, [0])
        plgpu.commit_smem()
        for gmem, rows in places(p_gmem, smem, store, first, unit):
            plgpu.copy_smem_to_gmem(rows, gmem)
        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(s.shape, s.dtype),
        grid=(num_q // queries, num_heads // heads),
        grid_names=("tile", "unit"),
        scratch_types=[plgpu.SMEM((64, num_kv), s.dtype), plgpu.Barrier(num_arrivals=heads)],
    )(s)


def test_weights_solution():
    accepted(ex14b.check_weights(packed_weights))


@pytest.mark.parametrize(
    "wrong, said",
    [
        (dict(mask="query"), "element"),
        (dict(store="query"), "element"),
        (dict(last=False), "element"),
    ],
)
def test_weights_wrong(wrong, said):
    rejected(ex14b.check_weights(functools.partial(packed_weights, **wrong)), said)


def test_weights_by_xla():
    def by_xla(s, heads):
        position = s.shape[2] - s.shape[0] + jnp.arange(s.shape[0])
        seen = jnp.arange(s.shape[2]) <= position[:, None, None]
        return jax.nn.softmax(jnp.where(seen, s, -jnp.inf))

    rejected(ex14b.check_weights(by_xla), "must be a kernel")


HEAD_BY_HEAD = """        for head in range(heads):
            rows = smem.at[pl.ds(head * queries, queries)]
            plgpu.copy_smem_to_gmem(rows, p_gmem.at[pl.ds(first, queries), unit * heads + head])
"""
STORE = """        @pl.loop(0, queries)
        def _(query):
            rows = smem.at[pl.ds(query * heads, heads)]
            plgpu.copy_smem_to_gmem(rows, p_gmem.at[first + query, some])
"""


@pytest.mark.parametrize(
    "right, wrong, said",
    [
        ("lax.div(row, jnp.int32(heads))", "row", "the mask takes the row for the query"),
        ("lax.div(row, jnp.int32(heads))", "lax.rem(row, jnp.int32(heads))", "row mod heads is the head"),
        (STORE, HEAD_BY_HEAD, "loaded query by query, and stored head by head"),
        ("p_gmem.at[first + query, some]", "p_gmem.at[query, some]", "there is a race"),
        ("plgpu.commit_smem()", "pass", "commit what you have stored"),
        ("key <= position", "key < position", "element"),
        ("    )(s)", "    )(s + 0)", "outside of the kernel"),
        ("    def body", "    while True: pass\n    def body", "has not ended"),
    ],
)
def test_weights_mended_wrong(right, wrong, said, monkeypatch):
    if "while" in wrong:
        monkeypatch.setattr(judge, "SECONDS", 1)
    rejected(mistaken("14b_ragged_kernel", "exercise-heads", right, wrong), said)


# Exercise 4


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
    accepted(ex14b.check_deal(right))


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
    rejected(ex14b.check_deal(wrong), said)

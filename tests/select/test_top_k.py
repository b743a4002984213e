"""`top_k` against NumPy's stable sort: all of a result's bits, and its indices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lab
from cookbook import top_k
from cookbook.select import kernel, plan, threads
from tests.arrays import array
from tests.lowering import lowered

BF16, F16, F32, I32 = jnp.bfloat16, jnp.float16, jnp.float32, jnp.int32
SPECIAL = np.array([np.nan, -np.nan, 0.0, -0.0, np.inf, -np.inf, 1.0, -1.0, 6e-8])
slow = lambda *case: pytest.param(*case, marks=pytest.mark.slow)


def normal(rng, shape):
    return rng.standard_normal(shape)


def special(rng, shape):
    return rng.choice(SPECIAL, shape)


def masked(rng, shape):
    """Few of a row's values are more than -inf: fewer than k in a part."""
    return np.where(rng.random(shape) < 2e-3, rng.standard_normal(shape), -np.inf)


def ascending(rng, shape):
    """All of the largest are in one part."""
    return np.sort(rng.standard_normal(shape))


def lowest(rng, shape):
    return rng.integers(-(2**31), -(2**31) + 2, shape)


def any_integers(rng, shape):
    return rng.integers(-(2**31), 2**31, shape)


def expected(x, k: int):
    """By NumPy: the bits of a number, those after the sign inverted if it has one, are ordered as an integer."""
    bits = x if x.dtype == np.int32 else x.view({2: np.int16, 4: np.int32}[x.dtype.itemsize])
    keys = bits.astype(np.int64)
    if x.dtype != np.int32:
        keys = np.where(keys < 0, -(2 ** (8 * x.dtype.itemsize - 1)) - 1 - keys, keys)
    order = np.argsort(-keys, axis=-1, kind="stable")[..., :k]
    return np.take_along_axis(bits, order, -1), order


def check(fn, x, k: int):
    values, indices = map(np.asarray, fn(jnp.asarray(x)))
    wanted, order = expected(np.asarray(x), k)
    np.testing.assert_array_equal(indices, order)
    np.testing.assert_array_equal(values.view(wanted.dtype), wanted)


# Shape, dtype, k, values: rows with less than a column per thread; one part; a part beyond which others have pads;
# odd lengths; ties everywhere; more keys in one group than there are slots.
# 16 rows or more of few columns are taken by 8 threads each.
CASES = [
    ((37, 60), F32, 9, special), ((16, 8), BF16, 3, normal), slow((48, 500), I32, 16, lowest),
    slow((64, 256), F16, 8, special), ((2, 1), F32, 1, normal),
    ((3, 2, 90), F16, 90, special), ((2, 129), BF16, 128, normal),
    ((1, 700), F32, 600, special),
    ((1, 9001), BF16, 50, normal), ((2, 5001), F16, 100, special), ((1, 20000), F32, 50, masked),
    ((1, 20000), F32, 200, ascending), ((1, 9004), I32, 300, lowest), ((1, 5003), I32, 2048, any_integers),
    slow((3, 40000), F32, 50, normal), slow((1, 150000), F32, 1024, normal), slow((2, 30001), BF16, 7, special),
    slow((5, 513), BF16, 7, normal), slow((2, 20000), I32, 50, lowest), slow((1, 30000), F32, 2048, ascending),
]  # fmt: skip


@pytest.mark.parametrize("shape, dtype, k, values", CASES)
def test_top_k(shape, dtype, k, values):
    x = np.asarray(array(values(np.random.default_rng(0), shape), dtype))
    with lab.interpret() as seen:
        check(lambda x: top_k(x, k), x, k)
    assert not seen.races_found


def test_the_reference_here_is_that_of_jax():
    x = np.asarray(array(np.random.default_rng(1).choice(SPECIAL, (3, 50)), F32))
    check(lambda x: jax.lax.top_k(x, 50), x, 50)


def test_gradient_and_vmap():
    rng = np.random.default_rng(2)
    x, weights = array(rng.standard_normal((3, 200)), F32), array(rng.standard_normal((3, 7)), F32)
    loss = lambda fn: jax.grad(lambda x: (fn(x, 7)[0] * weights).sum())
    with lab.interpret():
        np.testing.assert_array_equal(loss(top_k)(x), loss(jax.lax.top_k)(x))
        check(jax.vmap(lambda x: top_k(x, 7)), x.reshape(3, 2, 100), 7)


def equal(columns):
    return np.zeros_like(columns)


@pytest.mark.parametrize(
    "change, mutant, values",
    [
        ("ties by any index", lambda patch: patch(
            kernel.Part, "_rank", lambda self, p, rank=kernel.Part._rank: -rank(self, p)), equal),
        ("the last piece counted twice", lambda patch: patch(
            kernel.Part, "is_fresh", lambda self, p: self.column() >= 0), lambda columns: -abs(columns - 1500)),
        ("threads share slots", lambda patch: patch(threads, "before", lambda counts, *_: counts * 0), equal),
    ],
)  # fmt: skip
def test_mutants(change, mutant, values, monkeypatch):
    mutant(monkeypatch.setattr)
    jax.clear_caches()
    x = values(np.arange(3001))[None].astype(np.int32)
    with lab.interpret(), pytest.raises(AssertionError):
        check(lambda x: top_k(x, 150), x, 150)
    jax.clear_caches()


def test_plans_cover_a_row_once():
    rng = np.random.default_rng(0)
    lengths = [*range(128, 2100), *map(int, rng.integers(2100, 2**20, 2000)), 128256, 2**20]
    for cols in lengths:
        rows, k = int(rng.integers(1, 300)), int(rng.integers(1, min(cols, 2048) + 1))
        stage, length = 0, cols
        while True:
            made = plan.plan_of(rows, length, k, stage, 132)
            assert length % made.vec == 0 and made.piece <= length and made.part % made.piece == 0
            assert (made.num_parts - 1) * made.part < length <= made.num_parts * made.part
            assert 4 * (made.part + 2 * made.slots) < 200_000 and k <= made.slots
            if made.num_parts == 1:
                break
            assert made.num_parts * made.slots <= length / 2 + made.part, (cols, k)
            stage, length = stage + 1, made.num_parts * made.slots
        assert stage < 4


@pytest.mark.parametrize(
    "shape, dtype, k",
    [((64, 128256), F32, 50), slow((1, 50257), F16, 20), slow((64, 128256), F32, 1024), slow((3, 2**20), BF16, 2048),
     ((4096, 64), F32, 8), slow((4096, 512), BF16, 16), slow((1, 128256), BF16, 50), slow((2, 999999), I32, 300)],
)  # fmt: skip
def test_it_compiles_for_an_h200(shape, dtype, k):
    compiled = lab.compile_for("h200", lambda x: top_k(x, k), jax.ShapeDtypeStruct(shape, dtype))
    assert compiled.spill_bytes == 0 and "MEMBAR" not in compiled.sass
    assert shape[1] <= 512 or "redux" in compiled.ptx
    assert all(each.blocks_per_sm >= (1 if k > 500 else 3) for each in compiled.kernels or [compiled])


@pytest.mark.parametrize("kinds", [3, slow(12)])
def test_plans_of_every_kind_are_lowered(kinds):
    seen, rng = set(), np.random.default_rng(0)
    for _ in range(400):
        rows, cols = (int(np.exp(rng.uniform(0, np.log(most)))) for most in (300, 2**20))
        k, dtype = int(rng.integers(1, min(cols, 2048) + 1)), (F32, BF16)[rng.integers(2)]
        made = plan.plan_of(rows, max(cols, 128), k, 0, 132)
        if (traits := (made.vec, made.loads, made.num_pieces > 1)) not in seen and len(seen) < kinds:
            seen.add(traits)
            lowered(lambda x, k=k: top_k(x, k), jax.ShapeDtypeStruct((rows, cols), dtype))
    assert len(seen) == kinds


@pytest.mark.parametrize(
    "x, k, says",
    [
        (np.zeros(()), 1, r"x.shape=\(\); the last axis must have 1 to 1048576 values"),
        (np.zeros((2, 0)), 0, "the last axis must have"),
        (np.zeros((1, 2**20 + 1)), 1, "must have 1 to 1048576 values: split it"),
        (np.zeros((2, 9)), 10, "k=10; must be from 0 to 9 for rows of 9: pass fewer"),
        (np.zeros((2, 3000)), 2049, "k=2049; must be from 0 to 2048"),
        (np.zeros((2, 9)), -1, "k=-1; must be from 0 to 9"),
        (np.zeros((2, 9), np.int8), 1, "x.dtype is int8; must be float32, bfloat16, float16 or int32: cast it"),
    ],
)
def test_refusals(x, k, says):
    with pytest.raises(ValueError, match=rf"^cookbook.top_k: .*{says}"):
        top_k(x, k)


def test_nothing_to_choose():
    assert [x.shape for x in top_k(np.zeros((0, 9), np.float32), 3)] == [(0, 3)] * 2
    assert [x.shape for x in top_k(np.zeros((2, 9), np.float32), 0)] == [(2, 0)] * 2

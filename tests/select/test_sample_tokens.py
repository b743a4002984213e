"""`sample` against a sort in float64 (`fuzz/select.py`, which shares no code with the package)."""

import dataclasses
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lab
from cookbook import sample
from cookbook.select import chain, kernel_best, kernel_choose, kernel_mass, logits, noise, threads
from fuzz.select import CHANGES, changed, changes_of, gumbel, in_words, sampled
from tests.arrays import array

module = inspect.getmodule(sample)
score_of = module._score
BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
slow = lambda *case: pytest.param(*case, marks=pytest.mark.slow)
SEEDS, POSITIONS = np.array([3, -7, 2**31 - 1], np.int32), np.array([0, 5, -(2**31)], np.int32)
COUNTS = np.zeros((2, 9), np.int32)
ALL = dict(temperature=1.0, top_k=None, top_p=None, min_p=None)


def normal(rng, shape):
    return rng.standard_normal(shape)


def ties(rng, shape):
    return rng.integers(0, 3, shape)


def peaked(rng, shape):
    """One probable token, NaN, and a row of -inf alone."""
    x = rng.standard_normal(shape)
    x[0, shape[1] // 2], x[1, 1], x[2] = 60.0, np.nan, -np.inf
    return x


def tokens(x, **options):
    """By the kernels, which must agree with the sort."""
    with lab.interpret() as seen:
        found = np.asarray(sample(x, SEEDS, POSITIONS, **options))
    limits, changes = ({name: value for name, value in options.items() if (name in ALL) == is_in} for is_in in (1, 0))
    ((wanted, _),) = sampled(ALL | limits, np.asarray(x).astype(np.float64), SEEDS, POSITIONS, **changes)
    np.testing.assert_array_equal(found, wanted)
    np.testing.assert_array_equal(module.sample_reference(x, SEEDS, POSITIONS, **options), wanted)
    assert found.dtype == np.int32 and not seen.races_found
    return found


CASES = [
    (700, F32, {}, normal), (90, F16, dict(temperature=0.0), ties), (130, BF16, dict(top_k=1), peaked),
    (300, BF16, dict(top_k=40, top_p=0.6, temperature=0.8), ties), (200, F32, dict(top_p=0.05), normal),
    (300, F32, dict(top_p=0.9, min_p=0.02, temperature=2.0), peaked), (1, F32, dict(top_p=0.0), normal),
    slow(20000, F32, {}, normal), slow(20000, BF16, dict(top_p=0.9), normal), slow(9001, F32, dict(top_k=60), normal),
    slow(400, F16, dict(min_p=1.0), ties), slow(5000, F32, dict(top_k=2000, top_p=0.3), normal),
    slow(500, BF16, dict(top_p=0.5), ties), slow(700, F32, dict(top_p=1.0), peaked),
]  # fmt: skip


@pytest.mark.parametrize("columns, dtype, options, values", CASES)
def test_sample(columns, dtype, options, values):
    tokens(array(values(np.random.default_rng(columns), (3, columns)), dtype), **options)


def test_a_row_alone_and_options_for_each_row():
    """A row's token is the same beside other rows, whose options differ; log probabilities have the same bits."""
    x = array(np.random.default_rng(0).standard_normal((3, 300)), F32)
    options = dict(temperature=np.array([0.5, 1.0, 0.0], np.float32), top_p=np.array([0.1, 0.9, 1.0], np.float32))
    with lab.interpret():
        found, (of_token, best, index) = sample(x, SEEDS, POSITIONS, num_logprobs=3, **options)
        alone = {name: each[1:2] for name, each in options.items()}
        one, (of_one, *_) = sample(x[1:2], SEEDS[1:2], POSITIONS[1:2], num_logprobs=0, **alone)
    for row in range(3):
        case = ALL | {name: float(each[row]) for name, each in options.items()}
        wanted = sampled(case, np.asarray(x, np.float64)[row : row + 1], SEEDS[row : row + 1], POSITIONS[row : row + 1])
        assert found[row] == wanted[0][0][0]
    assert one[0] == found[1] and of_one[0] == of_token[1]
    exact = np.asarray(jax.nn.log_softmax(x))
    np.testing.assert_allclose(of_token, exact[np.arange(3), found], rtol=1e-5)
    np.testing.assert_allclose(best, -np.sort(-exact)[:, :3], rtol=1e-5)
    np.testing.assert_array_equal(index, np.argsort(-exact)[:, :3])


@pytest.mark.parametrize(
    "columns, names, limits",
    [
        (90, CHANGES, dict(top_k=np.int64(9))), (200, ("words", "frequency_penalty"), dict(top_p=0.6)),
        slow(9001, CHANGES, {}), slow(2000, ("bias", "words", "presence_penalty"), dict(temperature=0.0)),
        slow(700, ("repetition_penalty", "prompt"), dict(min_p=0.1)),
    ],
)  # fmt: skip
def test_changed_logits(columns, names, limits):
    """The token, and once log probabilities of what the logits have become; one of the rows allows no token."""
    rng = np.random.default_rng(columns)
    x, changes = array(2.0 * rng.standard_normal((3, columns)), F32), changes_of(names, rng, 3, columns)
    if "allowed" in changes:
        changes["allowed"][2] = 0
    found = tokens(x, **limits, **changes)
    if "top_k" not in limits:
        return
    with lab.interpret():
        again, (of_token, best, index) = sample(x, SEEDS, POSITIONS, num_logprobs=4, **limits, **changes)
    exact = changed(np.float64(x), **changes)[:2]
    exact -= np.log(np.exp(exact).sum(1, keepdims=True))
    np.testing.assert_array_equal(again, found)
    np.testing.assert_allclose(of_token[:2], exact[np.arange(2), found[:2]], rtol=1e-5)
    np.testing.assert_allclose(best[:2], -np.sort(-exact)[:, :4], rtol=1e-5)
    np.testing.assert_array_equal(index[:2], np.argsort(-exact)[:, :4])


def test_sets_are_packed_as_numpy_packs_them():
    is_in = np.random.default_rng(0).random((2, 70)) < 0.5
    np.testing.assert_array_equal(np.asarray(logits.packed(is_in)).view(np.uint32), in_words(is_in))


@pytest.mark.parametrize("top_k, k", [(7, 7), (np.int64(7), 7), (jnp.int32(7), 90)])
def test_an_integer_is_compiled_for_and_an_array_is_not(top_k, k, monkeypatch):
    seen = []
    monkeypatch.setattr(module, "_call", lambda logits, of_row, limits, k, *_: seen.append(k))
    with lab.interpret():
        sample(np.zeros((2, 90), np.float32), 0, 0, top_k=top_k)
    assert seen == [k]


@pytest.mark.parametrize("name, value", [("LISTED", 64), ("LISTED", 1), slow("NEAR", np.inf)])
def test_candidates_that_run_out(name, value, monkeypatch):
    """Where no candidate is kept the draw goes on, to the same token: in lists; in the row, if these are too long; with
    all sums made again."""
    x = array(np.random.default_rng(4).standard_normal((3, 300)), F32)
    monkeypatch.setattr(chain, "SLOTS", 2)
    monkeypatch.setattr(chain, "FEW", 1)
    monkeypatch.setattr(kernel_choose, name, value)
    jax.clear_caches()
    tokens(x, top_p=0.02)
    jax.clear_caches()


@pytest.mark.parametrize(
    "values, options",
    [(normal, dict(top_p=0.6)), (normal, {}), (ties, dict(temperature=0.0)), slow(ties, dict(top_p=0.3)),
     slow(peaked, dict(top_p=0.9)), slow(peaked, {}), slow(normal, dict(min_p=0.5))],
)  # fmt: skip
@pytest.mark.parametrize("pieces", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_parts_of_several_pieces(pieces, values, options, monkeypatch):
    """Which many rows have, and few here: bounds, loads ahead and, where the best are equal, all scores."""
    of = kernel_best.best_plan
    longer = lambda *args: (lambda plan: dataclasses.replace(plan, part=pieces * plan.piece))(of(*args))
    for place in (kernel_best, kernel_mass):
        monkeypatch.setattr(place, "best_plan", longer)
    jax.clear_caches()
    tokens(array(values(np.random.default_rng(7), (3, 2500)), F32), **options)
    jax.clear_caches()


def test_draws_are_those_of_softmax():
    """A chi-square test of 2**20 draws among 16 tokens: the maxima of what is a kernel's score, for as many seeds and
    positions."""
    logits = np.random.default_rng(0).standard_normal(16).astype(np.float32)
    score = jax.jit(jax.vmap(
        lambda seed, position: jnp.argmax(score_of(seed, position, 0.7, logits, jnp.arange(16, dtype=jnp.int32)))
    ))  # fmt: skip
    seed, position = (n.astype(jnp.int32) for n in jnp.divmod(jnp.arange(2**20), 2**10))
    counts = np.bincount(np.asarray(score(seed, position)), minlength=16)
    p = np.exp(logits.astype(np.float64) / 0.7)
    wanted = 2**20 * p / p.sum()
    assert ((counts - wanted) ** 2 / wanted).sum() < 44.3  # 15 degrees of freedom: once in 10**4 seeds.


def test_noise():
    """That of NumPy, and of a winner among 2**20 columns: small numbers keep their digits."""
    key = noise.row_key(jnp.int32(-5), jnp.int32(9))
    found = np.asarray(noise.gumbel(key, jnp.arange(2**20, dtype=jnp.int32)))
    # In float32 1 - u of a u near 1 has few digits: those noises are the lowest, and win nothing.
    np.testing.assert_allclose(found, gumbel(-5, 9, 2**20), rtol=1e-5, atol=1e-4)
    above = np.asarray(noise.gumbel_bound(key, jnp.arange(2**20, dtype=jnp.int32))) + noise.BOUND - found
    assert above.min() > 0 and np.median(above) < 0.7  # A bound, and mostly a close one.
    assert abs(found.mean() - 0.5772) < 0.006 and abs(found.var() - np.pi**2 / 6) < 0.02
    bits = np.asarray(noise.bits(key, jnp.arange(2**20, dtype=jnp.int32)))
    assert len(np.unique(bits)) == 2**20 and len(np.unique(found[found > 8])) == (found > 8).sum()


@pytest.mark.parametrize(
    "change, mutant, options",
    [
        ("what is not more probable counts", lambda monkeypatch: monkeypatch.setattr(
            kernel_mass, "share_of", lambda x, top, scale: x * 0 + 1.0), dict(top_p=0.3)),
        ("a position has no noise of its own", lambda monkeypatch: monkeypatch.setattr(
            noise, "row_key", lambda seed, position: (seed, seed)), {}),
        ("a set is read a word too far", lambda monkeypatch: monkeypatch.setattr(
            threads, "bits", lambda words, column, vec, interpreted: words[...][jnp.minimum(column // 32 + 1, 6)]
            >> (column & 31) & 1), dict(allowed=in_words(np.random.default_rng(2).random((3, 200)) < 0.5))),
    ],
)  # fmt: skip
def test_mutants(change, mutant, options, monkeypatch):
    mutant(monkeypatch)
    jax.clear_caches()
    with pytest.raises(AssertionError):
        tokens(array(np.random.default_rng(1).standard_normal((3, 200)) * 3, F32), **options)
    jax.clear_caches()


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, dict(top_k=50, top_p=0.9), dict(top_p=0.9)])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_it_compiles_for_an_h200(dtype, options):
    rows, aval = (jax.ShapeDtypeStruct((64,), jnp.int32),) * 2, jax.ShapeDtypeStruct((64, 128256), dtype)
    compiled = lab.compile_for("h200", lambda *args: sample(*args, **options), aval, *rows)
    assert compiled.spill_bytes == 0


@pytest.mark.parametrize(
    "change, says",
    [
        (dict(logits=np.zeros(9, np.float32)), r"logits.shape=\(9,\); must be \(R, V\)"),
        (dict(logits=np.zeros((2, 9), np.int32)), "logits.dtype is int32; must be float32, bfloat16 or float16: cast"),
        (
            dict(seeds=np.zeros(3, np.int32)),
            r"seeds.shape=\(3,\); must be \(\) or \(2,\), one for all rows or for each",
        ),
        (dict(positions=1.5), "positions.dtype is float32; must be one of integer: cast it"),
        (dict(temperature=-1.0), r"temperature=-1.0; must be from 0 to .*: pass None for no limit"),
        (dict(top_k=0), "top_k=0; must be from 1 to 2048"),
        (dict(top_p=1.5), "top_p=1.5; must be from 0 to 1"),
        (dict(min_p=np.array([0.0, -1.0])), r"min_p=\[ 0. -1.\]; must be from 0 to 1"),
        (dict(repetition_penalty=1.2), "repetition_penalty without counts or prompt; .*: pass either"),
        (dict(presence_penalty=1.2), "presence_penalty without counts; .*: pass how often"),
        (
            dict(frequency_penalty=2000.0, counts=COUNTS),
            "frequency_penalty=2000.0; must be from -1000.0 to 1000.0: pass None for no penalty",
        ),
        (
            dict(repetition_penalty=0.0, counts=COUNTS),
            "repetition_penalty=0.0; must be from 0.001 to 1000.0: pass None",
        ),
        (dict(presence_penalty=1.0, counts=COUNTS[0]), r"counts.shape=\(9,\); must be \(2, 9\): reshape"),
        (dict(presence_penalty=1.0, counts=COUNTS * 1.0), "counts.dtype is float.*; must be int32: cast it"),
        (
            dict(logit_bias=np.zeros((2, 8), np.float32)),
            r"logit_bias.shape=\(2, 8\); must be \(2, 9\), or \(9,\) for all",
        ),
        (
            dict(allowed=np.zeros((2, 9), np.int32)),
            r"allowed.shape=\(2, 9\); must be \(2, 1\), or .* 32 tokens: reshape",
        ),
        (dict(allowed=np.zeros((2, 9), np.float32)), "allowed.dtype is float32; must be bool or int32 or uint32: cast"),
        (dict(num_logprobs=10), "num_logprobs=10; must be from 0 to 9 for 9 columns: pass fewer"),
    ],
)
def test_refusals(change, says):
    given = dict(logits=np.zeros((2, 9), np.float32), seeds=1, positions=2) | change
    with pytest.raises(ValueError, match=rf"^cookbook.sample: {says}"):
        sample(**given)

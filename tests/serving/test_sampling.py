"""Sampling: what is cut off and what is drawn, against sorting in NumPy; equal for a row whoever else is there."""

import contextlib
import functools

import jax
import numpy as np
import pytest

import lab
from serving import Engine, LlamaConfig, init
from serving.sampling import Options, sample
from serving.step import ALL_TOKENS

VOCAB = 50


def cut_by_sorting(logits, temperature, top_k, top_p, min_p) -> np.ndarray:
    """Which tokens stay, in float64; ties as in `Request`."""
    x = np.float64(logits) / (temperature or 1.0)
    kept = np.isin(np.arange(len(x)), np.argsort(-x, kind="stable")[:top_k])
    p = np.where(kept, np.exp(x - x.max()), 0.0)
    p /= p.sum()
    order = np.argsort(-p)
    count = np.searchsorted(np.cumsum(p[order]), top_p) + 1 if top_p < 1 else len(p)
    kept &= p >= p[order[min(count, len(p)) - 1]]
    return kept & (p >= min_p * p.max())


def options_of(rows: list[tuple], seed: int = 0) -> Options:
    """Options from rows of (temperature, top_k, top_p, min_p)."""
    temperatures, top_ks, top_ps, min_ps = zip(*rows, strict=True)
    seeds, positions = np.arange(len(rows), dtype=np.uint32) + np.uint32(seed), np.full(len(rows), 7, np.int32)
    return Options(
        np.float32(temperatures), seeds, positions, np.int32(top_ks), np.float32(top_ps), np.float32(min_ps)
    )  # fmt: skip


DRAWS = 60  # A row has so many. Where other tokens than the probable ones matter, the temperature is high.


def kept_of(logits, options: Options, cuts="both") -> np.ndarray:
    """Which tokens are drawn, by as many seeds as it takes to find those that are likely enough."""
    found = np.zeros(logits.shape, bool)
    for seed in range(DRAWS):
        options = options._replace(seeds=np.full(len(logits), seed, np.uint32))
        tokens = np.asarray(sample(logits, options, draws=True, cuts=cuts, logprobs=False).tokens)
        found[np.arange(len(logits)), tokens] = True
    return found


@pytest.mark.parametrize("seed", range(3))
def test_what_is_cut_off_is_what_sorting_cuts_off(seed):
    """No other token is ever drawn, and of those that stay all that are likely are."""
    rng, rows = np.random.default_rng(seed), []
    for _ in range(200):
        row = [0.3, 1.0, 2.0], [1, 2, 7, 50, ALL_TOKENS], [0.1, 0.5, 0.95, 1], [0, 0.05, 0.5, 1]
        rows.append(tuple(rng.choice(values) for values in row))
    logits = np.float32(rng.normal(size=(len(rows), VOCAB)) * rng.choice([0.1, 1, 10], (len(rows), 1)))
    expected = np.array([cut_by_sorting(row, *of) for row, of in zip(logits, rows, strict=True)])
    kept = kept_of(logits, options_of(rows))
    assert not (kept & ~expected).any()
    share = np.where(expected, np.exp((logits - logits.max(1, keepdims=True)) / [[row[0]] for row in rows]), 0.0)
    share /= share.sum(1, keepdims=True)
    assert kept[share > 0.25].all()  # 0.75 ** 60 is 3e-8.
    assert len({*kept.sum(axis=1)}) > 5


@pytest.mark.parametrize(
    "logits, row, kept",
    [
        ([3, 1, 3, 0], (9, 1, 1.0, 0.0), [0]),  # The first of equal ones.
        ([-5, -1, -3, -4], (9, 2, 1.0, 0.0), [1, 2]),
        ([-1, 0.0, -0.0, 1], (9, 2, 1.0, 0.0), [1, 3]),
        (np.log([0.5, 0.3, 0.15, 0.05]), (1, 4, 0.8, 0.0), [0, 1]),
        (np.log([0.5, 0.3, 0.15, 0.05]), (1, 4, 0.81, 0.0), [0, 1, 2]),
        (np.log([0.5, 0.3, 0.15, 0.05]), (1, 3, 0.84, 0.0), [0, 1]),  # After top_k has left three, two have 0.84.
        (np.log([0.5, 0.3, 0.15, 0.05]), (1, 4, 1.0, 0.2), [0, 1, 2]),
        ([0, 1, 2, 3], (0, 1, 0.1, 1.0), [3]),  # Greedy.
    ],
)
def test_a_few_by_hand(logits, row, kept):
    assert np.flatnonzero(kept_of(np.float32([logits]), options_of([row]))[0]).tolist() == kept


@pytest.mark.kernels
@pytest.mark.parametrize("cuts", ["both", ""])
def test_the_kernels_draw_the_tokens_of_xla(cuts):
    """Each in the company of rows that sample in other ways; and log probabilities."""
    plain, logits = (0.9, ALL_TOKENS, 1.0, 0.0), np.float32(np.random.default_rng(0).normal(size=(5, 200)))
    rows = [(0.0, ALL_TOKENS, 1.0, 0.0), plain, plain]
    rows += [(2.0, 7, 0.9, 0.01), (1.0, ALL_TOKENS, 0.5, 0.1)] if cuts else [plain] * 2
    logits[2, 3] = np.nan
    draw = lambda name: lab.run(
        lambda: sample(logits, options_of(rows), backend=name, draws=True, cuts=cuts, logprobs=bool(cuts))
    )
    ours, theirs = draw("cookbook"), draw("xla")
    np.testing.assert_array_equal(ours.tokens, theirs.tokens)
    assert ours.tokens[2] == -1 and len(set(ours.tokens.tolist())) > 2
    fine = np.arange(5) != 2
    for one, other in zip(ours.logprobs or (), theirs.logprobs or (), strict=True):
        np.testing.assert_allclose(np.asarray(one)[fine], np.asarray(other)[fine], atol=1e-5)


def sampled(logits, rows, seed=0, **kwargs):
    flags = dict(draws=True, cuts="both", logprobs=False) | kwargs
    return sample(np.float32(logits), options_of(rows, seed), **flags)


def test_draws_follow_what_is_left_of_the_probabilities():
    count, logits = 4000, np.float32([2.0, 1.0, 0.0, -1.0, -2.0])
    tokens = np.asarray(sampled(np.tile(logits, (count, 1)), [(0.7, 3, 1.0, 0.0)] * count).tokens)
    p = np.exp(logits[:3] / 0.7) / np.exp(logits[:3] / 0.7).sum()
    frequency = np.bincount(tokens, minlength=5) / count
    assert (frequency[3:] == 0).all() and (abs(frequency[:3] - p) < 4 * np.sqrt(p * (1 - p) / count)).all()


def test_rows_that_need_less_have_the_same_tokens_beside_rows_that_need_more():
    """A greedy row in a batch that draws, and a row that cuts nothing off in one that does."""
    logits = np.random.default_rng(0).normal(size=(4, VOCAB))
    plain = [(0.0, ALL_TOKENS, 1.0, 0.0), (0.9, ALL_TOKENS, 1.0, 0.0)]
    mixed = sampled(logits, [*plain, (0.5, 3, 1.0, 0.0), (1.0, 50, 0.5, 0.0)]).tokens
    assert mixed[0] == sampled(logits[:2], plain, draws=False, cuts="").tokens[0] == logits[0].argmax()
    assert (mixed[:2] == sampled(logits[:2], plain, cuts="").tokens).all()


def test_greedy_draws_no_noise():
    """No noise is in the program of a batch that is greedy throughout, nor a sort in others that need none."""
    arguments = np.zeros((2, VOCAB), np.float32), options_of([(0.0, ALL_TOKENS, 1.0, 0.0)] * 2)
    text = lambda **flags: sample.lower(*arguments, **flags, logprobs=False).as_text()
    assert not {"stablehlo.log", "stablehlo.sort"} & set(text(draws=False, cuts="").split())
    assert "stablehlo.log" in text(draws=True, cuts="") and "stablehlo.sort" not in text(draws=True, cuts="")
    assert "stablehlo.sort" in text(draws=True, cuts="both")


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("row", [(0.0, ALL_TOKENS, 1.0, 0.0), (1.0, 3, 0.9, 0.1)])
def test_logits_that_are_not_finite_have_no_token(bad, row):
    logits = np.random.default_rng(0).normal(size=(3, VOCAB))
    good = sampled(logits, [row] * 3).tokens
    logits[1, 20] = bad
    tokens = sampled(logits, [row] * 3).tokens
    assert tokens[1] == -1 and tokens[0] == good[0] >= 0 and tokens[2] == good[2]
    logits[1] = -np.inf
    assert sampled(logits, [row] * 3).tokens[1] == -1


# JAX's options ------------------------------------------------------------------------------------------------------

OPTIONS = dict(
    jax_default_prng_impl="rbg", jax_threefry_partitionable=False, jax_numpy_dtype_promotion="strict",
    jax_numpy_rank_promotion="raise", jax_debug_nans=True, jax_debug_infs=True, jax_enable_x64=True,
    jax_default_matmul_precision="bfloat16",
)  # fmt: skip


@contextlib.contextmanager
def under(**options):
    before = {name: getattr(jax.config, name) for name in options}
    try:
        for name, value in options.items():
            jax.config.update(name, value)
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


@pytest.mark.parametrize("options", [dict(jax_default_prng_impl="unsafe_rbg"), OPTIONS], ids=["unsafe_rbg", "all"])
def test_tokens_do_not_depend_on_jaxs_options(options):
    """Those of a row on its own seed alone: other generators draw the noise of all rows of a vmap together."""
    logits = np.float32(np.random.default_rng(0).normal(size=(4, VOCAB)))
    rows = [(0.9, ALL_TOKENS, 1.0, 0.0), (2.0, 9, 1.0, 0.0), (2.0, 50, 0.9, 0.0), (2.0, 50, 1.0, 0.01)]
    fresh = lambda: jax.jit(functools.partial(sample.__wrapped__, draws=True, cuts="both", logprobs=True))
    draw = lambda: [fn(logits, options_of(rows, seed)).tokens.tolist() for fn in [fresh()] for seed in range(20)]
    with under(**options):
        found = draw()
    assert found == draw()


CONFIG = LlamaConfig(61, 64, 64, 1, 2, 1, 64, dtype="float32")


def served(**how) -> list[list[int]]:
    engine = Engine(CONFIG, init(CONFIG), num_pages=8, max_seqs=2, max_tokens_per_step=2, backend="xla", **how)
    requests = [engine.submit([3, 4], 3, temperature=0.8 * i, seed=i) for i in range(2)]
    engine.run()
    return [request.generated for request in requests]


@pytest.mark.slow
def test_an_engine_does_not_depend_on_jaxs_options():
    """One run under all of them, and one with each operation by itself. Its parameters are random numbers too."""
    with under(**OPTIONS):
        found = served()
    with under(jax_disable_jit=True):
        assert served(num_scheduler_steps=2) == found


def test_a_step_of_the_kernels_is_traced_under_any_of_jaxs_options():
    config = LlamaConfig(61, 128, 128, 1, 2, 1, 64, qk_norm=True)
    params = {name: np.zeros(shape, config.dtype) for name, shape in config.shapes.items()}
    with under(**OPTIONS):
        Engine(config, params, num_pages=4, max_seqs=4, max_tokens_per_step=4)

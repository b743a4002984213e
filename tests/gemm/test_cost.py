"""The choice of a configuration: what is predicted can be built, and something is chosen for every problem."""

import dataclasses
import inspect
import math
import random

import jax.numpy as jnp
import pytest

import cookbook
from cookbook.gemm import cost
from cookbook.gemm.cost import Problem
from cookbook.gemm.dense import cost_int8_weights
from cookbook.gemm.dense.four_bits import E2M1
from cookbook.gemm.dense.kernel_int8_weights import plan_of as plan_of_narrow
from cookbook.gemm.dense.matmul import default_config
from cookbook.gemm.plan import Config, Tiles, identity, plan_of

matmul_fp8 = inspect.getmodule(cookbook.matmul_fp8)
BF16, F32, FP8 = (jnp.dtype(dtype) for dtype in (jnp.bfloat16, jnp.float32, jnp.float8_e4m3fn))


def random_size(rng: random.Random, unit: int = 1) -> int:
    """From one unit to 16,384, as often small as large."""
    return max(1, round(2 ** rng.uniform(0, 14) / unit)) * unit


def random_problem(rng: random.Random) -> Problem:
    """One of those that `matmul` and `matmul_fp8` take."""
    dtype, out_dtype = rng.choice((BF16, BF16, FP8)), rng.choice((BF16, F32))
    transpose_a, transpose_b = (rng.random() < 0.5 for _ in range(2))
    if dtype == FP8:
        transpose_a, transpose_b = False, True
    m, n = random_size(rng, 8 if transpose_a else 1), random_size(rng, 1 if transpose_b else 8)
    k = random_size(rng, 16 if dtype == FP8 else 8)
    itemsizes = dtype.itemsize, dtype.itemsize, out_dtype.itemsize
    return Problem(m, n, k, (transpose_a, not transpose_b), itemsizes, rng.choice((132, 132, 4)))


def plan(problem: Problem, config: Config):
    dtype, out_dtype = {1: FP8, 2: BF16}[problem.itemsizes[0]], {2: BF16, 4: F32}[problem.itemsizes[2]]
    return plan_of(problem.m, problem.n, problem.k, (dtype, dtype), problem.transposed, identity, out_dtype, config,
                   problem.num_sms)  # fmt: skip


def require_fit(plan):
    assert plan.num_stages >= 2
    assert all(phase.store_pieces for phase in plan.phases)


@pytest.mark.parametrize("seed", range(60))
def test_candidates_can_be_built(seed):
    """All are unlike; their predicted times are positive; one of a finite time fits into shared memory."""
    rng = random.Random(seed)
    problem = random_problem(rng)
    candidates = cost.candidates(problem)
    assert len(set(candidates)) == len(candidates) > 0
    for config in rng.sample(candidates, min(20, len(candidates))):
        time = cost.predict(config, problem)
        assert time > 0
        if math.isfinite(time):
            require_fit(plan(problem, config))


def test_best_is_chosen_for_every_problem():
    """The same one in every run, of those predicted; it is no slower than any other."""
    rng = random.Random(0)
    edges = [Problem(m, n, k, (False, True)) for m in (1, 17) for n in (8, 24) for k in (8, 4096)]
    for problem in [*edges, *(random_problem(rng) for _ in range(200))]:
        best = cost.best(problem)
        cost.best.cache_clear()
        assert cost.best(problem) == best == cost.ranked(problem, 1)[0]
        assert 0 < cost.predict(best, problem) < math.inf
        require_fit(plan(problem, best))


def test_ranked_begins_with_the_best():
    problem = Problem(4096, 4096, 4096, (False, True))
    ranked = cost.ranked(problem, 40)
    times = [cost.predict(config, problem) for config in ranked]
    assert len(set(ranked)) == 40 and times == sorted(times) and ranked[0] == cost.best(problem)
    assert cost.ranked(Problem(1, 8, 8, (False, True)), 10_000) != []


def test_the_transposed_problem_takes_as_long_swapped():
    """Which operand is called a does not matter, where rows of o are as well aligned as its columns."""
    problem = Problem(512, 2048, 1024, (False, True))
    config = Config(128, 64)
    swapped = dataclasses.replace(config, swapped=True)
    assert cost.predict(config, problem) == cost.predict(swapped, problem.flipped)


@pytest.mark.parametrize(
    "m, n, k, is_right",
    [
        (8192, 8192, 8192, lambda c: c.tile_m * c.tile_n >= 128 * 192 and c.split_k == 1),
        (8, 8192, 8192, lambda c: c.swapped and c.tile_n <= 16),
        (64, 64, 65536, lambda c: c.split_k > 1),
        (1, 8, 8, lambda c: c.split_k == 1 and c.cluster_m == c.cluster_n == 1),
    ],
)
def test_the_choice_is_sensible(m, n, k, is_right):
    """Large tiles for large products, few columns for few rows, parts of K where there is little else to divide."""
    config = default_config(m, n, k)
    assert is_right(config), config


def test_fp8_chooses_for_every_problem():
    rng = random.Random(1)
    sizes = [(random_size(rng), random_size(rng), random_size(rng, 16)) for _ in range(200)]
    for m, n, k in [(1, 1, 16), (17, 8, 16), *sizes]:
        config = matmul_fp8.default_config(m, n, k)
        assert config == matmul_fp8.default_config(m, n, k)
        require_fit(plan(Problem(m, n, k, (False, False), (1, 1, 2)), config))


@pytest.mark.parametrize("bits", [8, 4])
def test_narrow_weights_choose_for_every_problem(bits):
    rng = random.Random(2)
    op = cost_int8_weights
    sizes = [(random_size(rng), random_size(rng, 16), random_size(rng, 16)) for _ in range(100)]
    rows = [(m, 16 * m, 64 * m) for m in range(1, 40)]
    four_bits = E2M1(BF16) if bits == 4 else None
    for m, n, k in [(1, 16, 16), *rows, *sizes]:
        config = op.default_config(m, n, k, bits=bits)
        op.default_config.cache_clear()
        assert config == op.default_config(m, n, k, bits=bits) == op.ranked(m, n, k, 5, bits=bits)[0]
        tiles = Tiles(n, m, k, config.tile_k, config, 132)
        weights, x = (jnp.zeros((), dtype) for dtype in (jnp.uint32 if bits == 4 else jnp.int8, BF16))
        require_fit(plan_of_narrow(tiles, weights, x, F32, False, four_bits=four_bits))

"""The choice of a configuration for grouped products: that there is one, and that it has the shape it should have."""

import itertools
import random

import jax.numpy as jnp
import pytest

from cookbook.gemm import cost
from cookbook.gemm.grouped import cost as group_cost
from cookbook.gemm.grouped.plan import gated, row_plan, sum_plan
from cookbook.gemm.plan import identity

BF16, F32, FP8 = (jnp.dtype(dtype) for dtype in (jnp.bfloat16, jnp.float32, jnp.float8_e4m3fn))


def rows(m, n, k, num_groups, *, transpose_rhs=False, dtype=BF16, out_dtype=BF16, is_gated=False, num_sms=132):
    return group_cost.RaggedProblem(m, n, k, num_groups, transpose_rhs, dtype, out_dtype, is_gated, num_sms)


def plan(p: group_cost.RaggedProblem, config):
    plain = row_plan(p.m, p.n, p.k, p.num_groups, p.dtype, p.transpose_rhs, identity, p.out_dtype, config, p.num_sms)
    return gated(plain) if p.is_gated else plain


@pytest.mark.parametrize(
    "transpose_rhs, is_gated, out", list(itertools.product((False, True), (False, True), (BF16, F32)))
)
def test_there_is_a_configuration_for_every_product(transpose_rhs, is_gated, out):
    """And it fits the shared memory."""
    rng = random.Random(0)
    for _ in range(20):
        m, n, k, g = (int(rng.choice((1, 8)) * 2 ** rng.uniform(0, high)) for high in (14, 10, 10, 8))
        if not transpose_rhs:
            n = -(-n // 8) * 8
        p = rows(m, n, -(-k // 8) * 8, g, transpose_rhs=transpose_rhs, is_gated=is_gated, out_dtype=out)
        for config in group_cost.ranked(p, 3):
            assert plan(p, config).num_stages >= 2 and p.predict(config) > 0


def test_there_is_a_configuration_for_every_sum():
    rng = random.Random(0)
    for _ in range(20):
        m, n, total, g = (int(8 * 2 ** rng.uniform(0, high)) // 8 * 8 for high in (10, 10, 14, 8))
        config = group_cost.best(
            group_cost.SumsProblem(m, n, total + rng.choice((0, 1)), g, BF16, rng.choice((BF16, F32)))
        )
        assert sum_plan(m, n, total, g, BF16, BF16, config).num_stages >= 2


@pytest.mark.parametrize("is_gated", [False, True])
def test_few_rows_a_group_get_narrow_tiles(is_gated):
    """And the time is about that of reading the matrices."""
    p = rows(512, 1536, 4096, 128, is_gated=is_gated)
    config = group_cost.best(p)
    assert config.swapped and config.tile_n <= 32
    alike = p._time(config, p.num_groups, cost.H200)
    assert alike < 1.05 * 128 * 4096 * 1536 * (2 + 2 * is_gated) / 4.08e6 and p.predict(config) < alike
    assert group_cost.best(rows(16384, 4096, 4096, 8)).tile_m >= 128


def test_more_groups_cost_more():
    times = [(p := rows(8192, 2048, 2048, g)).predict(group_cost.best(p)) for g in (1, 8, 64, 256)]
    assert times == sorted(times) and times[-1] > 1.2 * times[0]


def test_fp8_is_faster():
    p = rows(32768, 4096, 7168, 4, transpose_rhs=True, dtype=FP8)
    wide = rows(32768, 4096, 7168, 4, transpose_rhs=True)
    assert p.predict(group_cost.best(p)) < 0.6 * wide.predict(group_cost.best(wide))

"""Grouped products of 8-bit floats and of 8-bit integer weights: structures, scales, errors, mutants."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cookbook
import lab
from cookbook.gemm.grouped import kernel_fp8
from cookbook.gemm.plan import Config
from tests.arrays import array
from tests.gemm.ragged import slow

fp8, int8 = (inspect.getmodule(x) for x in (cookbook.ragged_dot_fp8, cookbook.ragged_dot_int8_weights))
ragged_dot_fp8, ragged_dot_int8_weights = fp8.ragged_dot_fp8, int8.ragged_dot_int8_weights
E4M3, SIZES = jnp.float8_e4m3fn, [33, 0, 129, 64, 7, 66]
POISON = 90  # Rows of no group, which are NaN.


def scales(rng, *shape, rows=None):
    x = rng.uniform(0.5, 2, size=shape)
    if rows is not None:
        x[rows:] = np.nan
    return array(x, jnp.float32)


def matrices(rng, num_groups, n, k, transpose_rhs):
    return rng.normal(size=(num_groups, n, k) if transpose_rhs else (num_groups, k, n)) + 0.1


def operands(n, k, transpose_rhs, by_block, sizes=SIZES):
    rng, rows, num_groups = np.random.default_rng(n + k), sum(sizes), len(sizes)
    m, blocks = rows + POISON, (-(-n // 128), -(-k // 128))
    lhs = array(rng.normal(size=(m, k)) + 0.1, jnp.float32).astype(E4M3).at[rows:].set(jnp.nan)
    rhs = array(matrices(rng, num_groups, n, k, transpose_rhs), jnp.float32).astype(E4M3)
    of_lhs = scales(rng, m, *((blocks[1],) if by_block else ()), rows=rows)
    of_rhs = scales(rng, num_groups, *((blocks if transpose_rhs else blocks[::-1]) if by_block else (n,)))
    return lhs, rhs, of_lhs, of_rhs, array(sizes, jnp.int32)


def check(n, k, transpose_rhs=True, by_block=True, *, config, gpu=None, **how):
    fns = ragged_dot_fp8, fp8.ragged_dot_fp8_reference
    fns = [functools.partial(fn, transpose_rhs=transpose_rhs) for fn in fns]
    return lab.check(
        functools.partial(fns[0], config=config, **how), fns[1], *operands(n, k, transpose_rhs, by_block), gpu=gpu
    )


# N and K, whether rhs is given as (G, N, K), whether scales are of blocks, and the configuration.
STRUCTURES = {
    "rows and columns": (136, 144, True, False, Config(128, 64)),
    "rows and columns, swapped": (200, 272, True, False, Config(128, 32, swapped=True, cluster_m=2)),
    "blocks": (192, 400, True, True, Config(128, 128)),
    "blocks of a plain rhs": (200, 272, False, True, Config(64, 128, split_dim=1, cluster_n=2)),
    "blocks, swapped": (200, 400, True, True, Config(128, 24, swapped=True)),
    "blocks, two pieces of rows": (200, 272, True, True, Config(256, 32, swapped=True)),
}


@pytest.mark.parametrize("name", slow(STRUCTURES, ["rows and columns, swapped"]))
def test_fp8(name):
    *sizes, config = STRUCTURES[name]
    check(*sizes, config=config, gpu="h200")


def test_fp8_of_a_shard_in_float32():
    lhs, rhs, of_lhs, of_rhs, sizes = operands(64, 144, True, True)
    lhs, of_lhs = (jnp.nan_to_num(x.astype(jnp.float32)).astype(x.dtype) for x in (lhs, of_lhs))
    how = dict(group_offset=2, transpose_rhs=True)
    fns = (
        functools.partial(ragged_dot_fp8, **how, out_dtype=jnp.float32),
        functools.partial(fp8.ragged_dot_fp8_reference, **how),
    )
    # Hopper's tensor cores keep fewer bits of a sum of 8-bit products than float32 has: 128 of them at a time here.
    tolerance = 1e-3 if lab.on_gpu() else None
    lab.check(*fns, lhs, rhs[2:5], of_lhs, of_rhs[2:5], sizes, tolerance=tolerance, gpu=None)


def integers(n, k, transpose_rhs, sizes=SIZES):
    rng, rows, num_groups = np.random.default_rng(n + k), sum(sizes), len(sizes)
    lhs = array(rng.normal(size=(rows + POISON, k)) + 0.1, jnp.bfloat16).at[rows:].set(jnp.nan)
    rhs = rng.integers(-128, 128, size=(num_groups, n, k) if transpose_rhs else (num_groups, k, n))
    return lhs, array(rhs, jnp.int8), scales(rng, num_groups, n), array(sizes, jnp.int32)


def check_int8(n, k, transpose_rhs=True, *, config=None, gpu=None):
    fns = ragged_dot_int8_weights, int8.ragged_dot_int8_weights_reference
    fns = [functools.partial(fn, transpose_rhs=transpose_rhs) for fn in fns]
    lab.check(functools.partial(fns[0], config=config), fns[1], *integers(n, k, transpose_rhs), gpu=gpu)


@pytest.mark.parametrize(
    "n, k, transpose_rhs, config",
    [
        (200, 400, True, int8.Config(128, 32)),
        pytest.param(264, 144, False, int8.Config(128, 16, cluster_m=2, tile_k=64), marks=pytest.mark.slow),
        (136, 144, True, int8.Config(256, 64, tile_k=64, warpgroups=4)),
    ],
)
def test_int8_weights(n, k, transpose_rhs, config):
    check_int8(n, k, transpose_rhs, config=config, gpu="h200")


@pytest.mark.parametrize("by_block", [False, True])
def test_every_product_has_a_configuration(by_block):
    for m, n, k, g in ((1, 8, 16, 64), (512, 1536, 4096, 128), (32768, 4096, 7168, 4), (100, 75, 32, 3)):
        assert fp8.default_config(m, n, k, g, by_block=by_block)
        assert int8.default_config(m, n, k, g).split_k == 1
    assert fp8.default_config(512, 1536, 4096, 128, by_block=by_block).swapped


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(lhs=jnp.ones((8, 16), jnp.bfloat16)), "scale and cast them"),
        (dict(rhs=jnp.ones((2, 8, 32), E4M3)), "share no K: 16 is not 32"),
        (dict(lhs=jnp.ones((8, 8), E4M3), rhs=jnp.ones((2, 8, 8), E4M3)), "along K, 8 bytes.*pad it to 16"),
        (dict(scale_lhs=jnp.ones(7)), "must be floats"),
        (dict(scale_rhs=jnp.ones((2, 1, 1)), scale_lhs=jnp.ones((8, 2))), "one for each block"),
        (dict(scale_rhs=jnp.ones((2, 1, 1)), scale_lhs=jnp.ones((8, 1)), config=Config(128, 256)), "divide 128"),
        (dict(group_sizes=np.array([9, 0])), "ends at row 9 of 8"),
        (dict(out_dtype=jnp.int8), "must be bfloat16"),
    ],
)
def test_errors_of_fp8_name_the_rule(change, message):
    args = dict(lhs=jnp.ones((8, 16), E4M3), rhs=jnp.ones((2, 8, 16), E4M3), scale_lhs=jnp.ones(8))
    args |= dict(scale_rhs=jnp.ones((2, 8)), group_sizes=jnp.array([3, 5]), transpose_rhs=True) | change
    with pytest.raises(ValueError, match=message), lab.interpret():
        ragged_dot_fp8(**args)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(rhs=jnp.ones((2, 8, 16), jnp.bfloat16)), "and int8"),
        (dict(rhs=jnp.ones((2, 16, 8), jnp.int8)), "16 is not 8"),
        (dict(lhs=jnp.ones((8, 8), jnp.bfloat16), rhs=jnp.ones((2, 8, 8), jnp.int8)), "along K, 8 bytes.*pad it to 16"),
        (dict(scales=jnp.ones((8,))), "one float for each column"),
        (dict(config=Config()), "cookbook.ragged_dot_int8_weights.Config"),
        (dict(config=int8.Config(split_k=2)), "of split_k=1"),
        (dict(out_dtype=jnp.float32), "transposed"),
    ],
)
def test_errors_of_int8_weights_name_the_rule(change, message):
    args = dict(lhs=jnp.ones((8, 16), jnp.bfloat16), rhs=jnp.ones((2, 8, 16), jnp.int8), scales=jnp.ones((2, 8)))
    args |= dict(group_sizes=jnp.array([3, 5]), transpose_rhs=True) | change
    with pytest.raises(ValueError, match=message), lab.interpret():
        ragged_dot_int8_weights(**args)


@pytest.mark.parametrize("mutated", ["another group", "another row", "another step", "rows of no group", None])
def test_mutants_of_the_scales_are_caught(run_only, monkeypatch, mutant, found_if, mutated):
    by_block = mutated != "rows of no group"
    if mutated == "another group":
        monkeypatch.setattr(kernel_fp8, "scaled_group", lambda *_: 0)
    elif mutated == "another row":
        right = kernel_fp8.pad_row_scales
        monkeypatch.setattr(fp8, "pad_row_scales", lambda *args: jnp.roll(right(*args), 1, axis=1))
    elif mutated == "another step":
        mutant(kernel_fp8, "jnp", minimum=lambda a, b: jnp.minimum(a, b) - 1 if a is not b else a)
    elif mutated:
        mutant(kernel_fp8, "lax", cond=lambda _, product, __: product())
    jax.clear_caches()
    with found_if(mutated is not None):
        check(192, 272, True, by_block, config=Config(128, 64))
    jax.clear_caches()


def on_gpu(fn, of, args, error=4e-3):
    outs, wanted = [fn(*args) for _ in range(10)], of(*args)
    assert float(jnp.linalg.norm(outs[0] - wanted) / jnp.linalg.norm(wanted)) < error
    assert all((out == outs[0]).all() for out in outs)


BIG = np.random.default_rng(0).multinomial(4000, np.random.default_rng(0).dirichlet(np.full(13, 0.5))).tolist()


@pytest.mark.parametrize("by_block", [False, True])
@pytest.mark.parametrize("config", [None, Config(128, 16, swapped=True), Config(64, 128, split_dim=1, cluster_m=2)])
def test_fp8_is_right_in_every_run_on_the_gpu(gpu, by_block, config):
    args = operands(1024, 2048, True, by_block, BIG)
    fn = jax.jit(functools.partial(ragged_dot_fp8, transpose_rhs=True, config=config))
    # Tensor cores add fp8 products with fewer bits than float32 has, unless sums are promoted.
    error = 4e-3 if by_block else 1e-2
    on_gpu(fn, jax.jit(functools.partial(fp8.ragged_dot_fp8_reference, transpose_rhs=True)), args, error)


@pytest.mark.parametrize("config", [None, int8.Config(128, 16), int8.Config(128, 128, cluster_m=2, tile_k=64)])
def test_int8_weights_are_right_in_every_run_on_the_gpu(gpu, config):
    fn = jax.jit(functools.partial(ragged_dot_int8_weights, transpose_rhs=True, config=config))
    of = jax.jit(functools.partial(int8.ragged_dot_int8_weights_reference, transpose_rhs=True))
    on_gpu(fn, of, integers(1024, 2048, True, BIG))

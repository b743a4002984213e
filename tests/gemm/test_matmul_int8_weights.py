"""The int8-weight matmul: a few rows and many, weights stored both ways, sizes on both sides of a tile."""

import dataclasses
import functools
import importlib
import inspect
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cookbook import lab

module = importlib.import_module("cookbook.gemm.matmul_int8_weights")
Config, matmul_int8_weights = module.Config, module.matmul_int8_weights
SMALL = Config(tile_n=64)


def operands(m, n, k, dtype=jnp.bfloat16, transpose_w=False):
    """Random normal rows; weights over the whole range, -128 and 127 among them; scales that differ by far."""
    rng = np.random.default_rng(m * n + k)
    w = rng.integers(-128, 128, size=(k, n))
    w[0, :2] = -128, 127
    scales = jnp.asarray(np.exp(rng.normal(size=n)) / 100, jnp.float32)
    return jnp.asarray(rng.normal(size=(m, k)) + 0.1, dtype), jnp.asarray(w.T if transpose_w else w, jnp.int8), scales


def check(m, n, k, dtype=jnp.bfloat16, transpose_w=False, fn=matmul_int8_weights, **kwargs):
    flip = lambda a, w, s: module.matmul_int8_weights_reference(a, w.T if transpose_w else w, s)
    fn = functools.partial(fn, transpose_w=transpose_w, **kwargs)
    return lab.check(fn, flip, *operands(m, n, k, dtype, transpose_w))


@pytest.mark.parametrize("transpose_w", [False, True])
@pytest.mark.parametrize("m, n, k", [(128, 256, 128), (1, 16, 16), (16, 1040, 528), (130, 80, 144)])
def test_any_size(m, n, k, transpose_w):
    check(m, n, k, transpose_w=transpose_w)


@pytest.mark.parametrize("out_dtype", [None, jnp.float16, jnp.float32])
def test_dtypes(out_dtype):
    check(72, 144, 144, jnp.float16, out_dtype=out_dtype, config=SMALL)


@pytest.mark.parametrize("transpose_w", [False, True])
@pytest.mark.parametrize(
    "config",
    [
        Config(),
        Config(num_stages=2, store_slots=2),
        Config(cluster_dim=0),
        Config(tile_n=128, cluster_dim=1, split_k=2, tile_k=128),
        Config(tile_m=256, tile_n=128),
        Config(tile_n=64, tile_k=256, num_stages=3),
        Config(tile_m=64, tile_n=64, split_dim=2, tile_k=256),
        Config(tile_n=24, split_dim=2, tile_k=256, cluster_dim=0, split_k=2, num_stages=3),
        Config(tile_n=24, split_k=3, tile_k=128, num_stages=5),
    ],
    ids=str,
)
def test_every_kind_of_config(config, transpose_w):
    m, n = (400, 784) if config.tile_n >= 128 else (136, 400)  # Ragged, and several tiles, but not too many.
    check(m, n, 272, transpose_w=transpose_w, config=config)


CONFIGS = (
    Config(),
    SMALL,
    *(module.default_config(m, 2048, 4096) for m in (16, 64, 128)),
    Config(tile_n=64, tile_k=256, num_stages=3),
)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_what_the_compiler_makes_of_it(config):
    """Shared memory is as priced; no spill; weights leave shared memory in whole words; products do not wait for one
    another, which ptxas would say."""
    avals = [
        jax.ShapeDtypeStruct(*x)
        for x in (((128, 4096), jnp.bfloat16), ((2048, 4096), jnp.int8), ((2048,), jnp.float32))
    ]
    fn = functools.partial(matmul_int8_weights, config=config, transpose_w=True)
    compiled = lab.compile_for("h200", fn, *avals)
    assert config.smem_bytes <= compiled.smem_bytes <= config.smem_bytes + 1024
    assert compiled.spill_bytes == 0 and not compiled.remarks and "LDS.U8" not in compiled.sass


def test_aligned_operands_need_no_copy():
    with lab.interpret():
        fn = functools.partial(matmul_int8_weights, transpose_w=True)
        jaxpr = jax.make_jaxpr(fn)(*operands(128, 256, 128, transpose_w=True))
    outside = {eqn.primitive.name for eqn in jaxpr.eqns[-1].params["jaxpr"].eqns}
    assert outside and not outside & {"transpose", "pad", "copy"}


def test_jit_vmap_and_determinism():
    a, w, s = (jnp.stack(x) for x in zip(*(operands(72, 64, 144) for _ in range(2)), strict=True))
    fn = functools.partial(matmul_int8_weights, config=SMALL)
    runs = [
        lab.run(jax.vmap(fn), a, w, s),
        lab.run(jax.jit(jax.vmap(fn)), a, w, s),
        lab.run(fn, a[0], w[0], s[0])[None],
    ]
    assert all((run[0] == runs[0][0]).all() for run in runs)


def test_empty():
    a, w, s = operands(8, 16, 16)
    assert matmul_int8_weights(a[:0], w, s).shape == (0, 16)
    np.testing.assert_array_equal(matmul_int8_weights(a[:, :0], w[:0], s), jnp.zeros((8, 16)))


def ones(*shape, dtype=jnp.bfloat16):
    return jnp.ones(shape, dtype)


W, S = ones(16, 32, dtype=jnp.int8), ones(32, dtype=jnp.float32)


@pytest.mark.parametrize(
    "fn, message",
    [
        (lambda: matmul_int8_weights(ones(8, 8), W, S), "8 is not 16"),
        (lambda: matmul_int8_weights(ones(8, 16), W[:, :24], S[:24]), "a row of w_q has 24 values.*pad it to 32"),
        (lambda: matmul_int8_weights(ones(8, 12), W[:12], S), "a row of a has 12 values.*pad it to 16"),
        (lambda: matmul_int8_weights(ones(2, 8, 16), W, S), "vmap"),
        (lambda: matmul_int8_weights(ones(8, 16), W.astype(jnp.bfloat16), S), "int8: cast"),
        (lambda: matmul_int8_weights(ones(8, 16), W, S[:3]), r"scales.shape=\(3,\).*must be \(32,\)"),
        (lambda: matmul_int8_weights(ones(8, 16), W, S, out_dtype=jnp.int8), "out_dtype"),
        (lambda: matmul_int8_weights(ones(8, 16), W, S, config=module.MatmulConfig()), "of another kernel"),
        (lambda: Config(tile_m=512), "tile_m=512 must leave 64 or 128"),
        (lambda: Config(tile_m=64, tile_n=64, split_dim=2), "tile_k=64 must be 256"),
        (lambda: Config(tile_n=72), "tile_n=72 must be a multiple"),
        (lambda: Config(tile_m=256), "at most 128"),
        (lambda: Config(tile_k=32), "tile_k=32"),
        (lambda: Config(split_dim=1), "split_dim=1"),
        (lambda: Config(num_stages=9), "bytes of shared memory"),
    ],
)
def test_errors_name_the_rule(fn, message):
    with pytest.raises(ValueError, match=message):
        fn()


@pytest.mark.parametrize(
    "old, new",
    [
        ("        plgpu.barrier_wait(filled.at[slot(step)])\n", ""),
        ("pl.ds(role * rows, rows)", "pl.ds(0, rows)"),
        ("        plgpu.barrier_wait(written)\n", ""),
        (
            "vectors = w_q if transpose_w else w_q.T, dict(col_scale=",
            "vectors = w_q if transpose_w else w_q.T, dict(bias=",
        ),
    ],
)
def test_mutants_are_caught(run_only, monkeypatch, old, new):
    """Weights read before they arrive; the same weights for both warpgroups; sums read before they are there; a scale
    that is added."""
    source = inspect.getsource(module)
    assert source.count(old) == 1
    copy = types.ModuleType("mutant_of_matmul_int8_weights")
    copy.__package__ = module.__package__
    monkeypatch.setitem(sys.modules, copy.__name__, copy)
    exec(compile(source.replace(old, new), copy.__name__, "exec"), copy.__dict__)
    config = Config(tile_m=64, tile_n=64, split_dim=2, tile_k=256) if "written" in old else SMALL
    small = copy.Config(**dataclasses.asdict(config))  # A class of the copy's own.
    with pytest.raises(Exception, match=r"(?i)\brace|\bwait|\bphase|\bresult|\bbarrier"):
        check(72, 256, 400, fn=copy.matmul_int8_weights, config=small)


def test_registers_and_slots_live_long_enough(gpu):
    """What the interpreter can not see: weights or a slot overwritten while a WGMMA still reads them."""
    for m, n, k in ((4096, 8192, 4096), (16, 8192, 8192), (128, 8192, 8192)):
        a, w, s = operands(m, n, k, transpose_w=True)
        wanted = module.matmul_int8_weights_reference(a, w.T, s)
        default = module.default_config(m, n, k)
        for tile_k in (256,) if default.split_dim == 2 else (64, 128):  # Warpgroups that split K need 128 values each.
            config = dataclasses.replace(default, tile_k=tile_k, num_stages=2)
            fn = functools.partial(matmul_int8_weights, transpose_w=True, out_dtype=jnp.float32, config=config)
            runs = [fn(a, w, s) for _ in range(10)]
            assert float(jnp.linalg.norm(runs[0] - wanted) / jnp.linalg.norm(wanted)) < 1e-5
            assert all((run == runs[0]).all() for run in runs)

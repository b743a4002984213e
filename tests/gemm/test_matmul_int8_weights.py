"""The int8-weight matmul: a few rows and many, weights stored both ways, sizes on both sides of a tile."""

import dataclasses
import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lab
from cookbook.gemm import operand
from cookbook.gemm import plan as core
from cookbook.gemm.dense import kernel_int8_weights
from tests.arrays import array

module = importlib.import_module("cookbook.gemm.dense.matmul_int8_weights")
Config, matmul_int8_weights = module.Config, module.matmul_int8_weights
SMALL = Config(tile_n=64)


def operands(m, n, k, dtype=jnp.bfloat16, transpose_w=False):
    """Random normal rows; weights over the whole range, -128 and 127 among them; scales that differ by far."""
    rng = np.random.default_rng(m * n + k)
    w = rng.integers(-128, 128, size=(k, n))
    w[0, :2] = -128, 127
    scales = array(np.exp(rng.normal(size=n)) / 100, jnp.float32)
    return array(rng.normal(size=(m, k)) + 0.1, dtype), array(w.T if transpose_w else w, jnp.int8), scales


def check(m, n, k, dtype=jnp.bfloat16, transpose_w=True, gpu=None, **kwargs):
    flip = lambda a, w, s: module.matmul_int8_weights_reference(a, w.T if transpose_w else w, s)
    fn = functools.partial(matmul_int8_weights, transpose_w=transpose_w, **kwargs)
    return lab.check(fn, flip, *operands(m, n, k, dtype, transpose_w), gpu=gpu)


@pytest.mark.parametrize("m, n, k, transpose_w", [(1, 16, 16, False), (130, 80, 144, False), (16, 1040, 272, True)])
def test_any_size(m, n, k, transpose_w):
    check(m, n, k, transpose_w=transpose_w, gpu="h200")


def test_any_number_of_columns_of_transposed_weights():
    """Rows of w_q are aligned, those of o are not; o has 32 bits."""
    check(20, 77, 144, jnp.float16, out_dtype=jnp.float32, config=SMALL)


# (M, N, K) and the configuration: ragged, and several tiles for each of four SMs.
STRUCTURES = {
    "two stages": ((136, 528, 400), Config(tile_n=64, num_stages=2, store_slots=4, overlap=True)),
    "256 rows": ((72, 800, 272), Config(256, 96, store_slots=1)),
    "long steps": ((136, 400, 528), Config(tile_n=64, tile_k=256, num_stages=3, grid_minor_dim=1)),
    "short steps": ((300, 272, 144), Config(tile_n=256, tile_k=64, overlap=True)),
    "two steps, overlapped": ((72, 144, 144), Config(tile_n=32, overlap=True)),
    "one step, overlapped": ((8, 144, 64), Config(tile_n=8, overlap=True)),
    "clusters of 2 x 2": ((200, 520, 272), Config(tile_n=64, cluster_m=2, cluster_n=2)),
    "clusters of 4 x 1": ((24, 1040, 144), Config(tile_n=16, cluster_m=4, tile_k=64)),
    "parts of 24 rows": ((40, 272, 272), Config(tile_n=24, split_k=3, num_stages=5)),
    "a part without a step": ((8, 272, 528), Config(tile_n=8, split_k=8)),
    "overlapped parts of another kernel": (
        (40, 272, 528),
        Config(tile_n=24, split_k=2, second_kernel=True, overlap=True),
    ),
}


SLOW = {
    "two stages",
    "256 rows",
    "clusters of 2 x 2",
    "a part without a step",
    "two steps, overlapped",
    "parts of another kernel",
}  # Others differ from each in one thing.


@pytest.mark.parametrize("name", [pytest.param(x, marks=[pytest.mark.slow] * (x in SLOW)) for x in STRUCTURES])
def test_every_structure(name):
    shape, config = STRUCTURES[name]
    check(*shape, config=config)


@pytest.fixture
def priced(monkeypatch):
    """The plans of the kernels that are launched in a test."""
    plans = []
    right = module.fused_product
    fused_product = lambda *args, plan, **kwargs: plans.append(plan) or right(*args, plan=plan, **kwargs)
    monkeypatch.setattr(module, "fused_product", fused_product)
    return plans


CONFIGS = [config for name, (_, config) in STRUCTURES.items() if name not in SLOW] + [
    module.default_config(16, 2048, 4096)
]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_what_the_compiler_makes_of_it(config, priced):
    """Shared memory is as priced; no spill; weights leave shared memory in whole words; products do not wait for one
    another, which ptxas would say."""
    avals = [
        jax.ShapeDtypeStruct(*x)
        for x in (((128, 4096), jnp.bfloat16), ((2048, 4096), jnp.int8), ((2048,), jnp.float32))
    ]
    fn = functools.partial(matmul_int8_weights, config=config, transpose_w=True)
    compiled = lab.compile_for("h200", fn, *avals)
    nbytes = priced[0].smem_bytes(priced[0].num_stages)
    assert nbytes <= compiled.smem_bytes <= nbytes + 1024
    assert compiled.spill_bytes == 0 and not compiled.remarks and "LDS.U8" not in compiled.sass


def test_aligned_operands_need_no_copy():
    with lab.interpret():
        fn = functools.partial(matmul_int8_weights, transpose_w=True)
        jaxpr = str(jax.make_jaxpr(fn)(*operands(128, 320, 128, transpose_w=True)))
    assert " transpose[" not in jaxpr and " pad[" not in jaxpr


small = functools.partial(matmul_int8_weights, config=SMALL)


def close(out, wanted):
    out, wanted = (np.asarray(x, np.float64) for x in (out, wanted))
    assert out.shape == wanted.shape and np.linalg.norm(out - wanted) < 5e-3 * np.linalg.norm(wanted)


def test_vmap_and_determinism():
    operand = operands(72, 64, 144)
    out = lab.run(jax.vmap(small), *(jnp.stack([x, x]) for x in operand))
    np.testing.assert_array_equal(out[0], out[1])
    close(out[0], module.matmul_int8_weights_reference(*operand))


def test_compiles_under_x64():
    """Scales of 64 bits become 32."""
    avals = [jax.ShapeDtypeStruct(*x) for x in (((32, 512), jnp.bfloat16), ((512, 512), jnp.int8), ((512,), "float64"))]
    with jax.enable_x64(True):
        for config in (None, Config(tile_n=32, split_k=2)):
            fn = functools.partial(matmul_int8_weights, transpose_w=True, config=config)
            assert lab.compile_for("h200", fn, *avals).spill_bytes == 0


def test_options_of_any_scalar_type_and_lists():
    a, w, _ = operands(8, 16, 16)
    scales = [float(x) for x in range(16)]
    out = lab.run(lambda: small(np.asarray(a), np.asarray(w).T, scales, transpose_w=np.bool_(True)))
    close(out, module.matmul_int8_weights_reference(a, w, jnp.array(scales)))


def test_nan_goes_where_it_should():
    """Not into columns that share a tile with an infinite scale, nor beyond the end of a row."""
    a, w, s = operands(72, 80, 144)
    a, s = a.at[3, 5].set(jnp.nan).at[70, 143].set(jnp.inf), s.at[11].set(jnp.inf)
    out, wanted = lab.run(small, a, w, s), module.matmul_int8_weights_reference(a, w, s)
    np.testing.assert_array_equal(jnp.isnan(out), jnp.isnan(wanted))
    np.testing.assert_array_equal(jnp.isinf(out), jnp.isinf(wanted))


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
        (lambda: matmul_int8_weights(ones(8, 8), W[:8], S), "w_q has 8 values along K, 8 bytes.*pad it to 16"),
        (lambda: matmul_int8_weights(ones(8, 12), W[:12], S), "a has 12 values along K, 24 bytes.*pad it to 16"),
        (lambda: matmul_int8_weights(ones(2, 8, 16), W, S), "vmap"),
        (lambda: matmul_int8_weights(ones(8, 16), W.astype(jnp.bfloat16), S), "int8: cast"),
        (lambda: matmul_int8_weights(ones(8, 16), W, S[:3]), r"scales.shape=\(3,\).*must be \(32,\)"),
        (lambda: matmul_int8_weights(ones(8, 16), W, S, out_dtype=jnp.int8), "out_dtype"),
        (
            lambda: matmul_int8_weights(ones(8, 16), W, S, config=core.Config()),
            "must be a cookbook.matmul_int8_weights.Config",
        ),
        (lambda: matmul_int8_weights(ones(8, 16), object(), S), "w_q=.*; must be an array"),
        (lambda: matmul_int8_weights(ones(8, 16), W, S, transpose_w="no"), "transpose_w='no'; must be one bool"),
        (lambda: jax.jit(lambda t: matmul_int8_weights(ones(8, 16), W, S, transpose_w=t))(True), "is traced"),
        (lambda: Config(tile_m=64), "tile_m=64.* leaves 32"),
        (lambda: Config(tile_n=260), "tile_n=260"),
        (lambda: Config(256, 256), "64 x 256"),
        (lambda: Config(tile_k=32), "tile_k=32"),
        (lambda: Config(warpgroups=5), r"warpgroups=5 must be one of \[2, 4\]"),
        (lambda: Config(256, 144, warpgroups=4), "at most 128 x 256 values"),
        (lambda: Config(warpgroups=4), "leave each compute warpgroup a multiple of 64 rows"),
        (lambda: Config(split_dim=1), "split_dim=1"),
        (lambda: Config(swapped=False), "self.swapped=False True|self.swapped=False"),
        (lambda: Config(tile_n=64, tail_split=2), "self.tail_split=2"),
        (lambda: lab.run(functools.partial(small, config=Config(num_stages=9)), *operands(8, 16, 16)), "num_stages=9"),
    ],
)
def test_errors_name_the_rule(fn, message):
    with pytest.raises(ValueError, match=message):
        fn()


@pytest.mark.parametrize("mutation", ["wait", "rows", "scale", None])
def test_mutants_are_caught(run_only, monkeypatch, mutant, found_if, mutation):
    """Weights read before they arrive; the same weights for both warpgroups; a scale that is added."""
    multiply, fused_product = kernel_int8_weights.multiply, module.fused_product
    if mutation == "wait":
        ring = operand.Ring
        deaf = lambda plan, ring, *args, **scratch: multiply(plan, Deaf(**vars(ring)), *args, **scratch)
        Deaf = type("Deaf", (ring,), dict(wait=lambda self, count: self.slot(count)))
        monkeypatch.setattr(kernel_int8_weights, "multiply", deaf)
    elif mutation == "rows":
        mutant(kernel_int8_weights, "pl", ds=lambda start, size: slice(0, size))
    elif mutation == "scale":
        as_bias = lambda *operands: operands[:3] + (dict(bias=operands[3]["col_scale"]),)
        monkeypatch.setattr(module, "fused_product", lambda *args, **kwargs: fused_product(*as_bias(*args), **kwargs))
    jax.clear_caches()
    with found_if(mutation is not None):
        check(72, 256, 400, config=SMALL)
    jax.clear_caches()


@pytest.mark.parametrize("m, n, k", [(4096, 4096, 4096), (16, 8192, 8192), (128, 8192, 8192)])
def test_registers_and_slots_live_long_enough(gpu, m, n, k):
    """The interpreter cannot see this: weights or a slot overwritten while a WGMMA still reads them."""
    a, w, s = operands(m, n, k, transpose_w=True)
    wanted = module.matmul_int8_weights_reference(a, w.T, s)
    default = module.default_config(m, n, k)
    for tile_k in (64, 128):
        config = dataclasses.replace(default, tile_k=tile_k, num_stages=2)
        fn = jax.jit(functools.partial(matmul_int8_weights, transpose_w=True, out_dtype=jnp.float32, config=config))
        runs = [fn(a, w, s) for _ in range(10)]
        assert float(jnp.linalg.norm(runs[0] - wanted) / jnp.linalg.norm(wanted)) < 1e-5
        assert all((run == runs[0]).all() for run in runs)

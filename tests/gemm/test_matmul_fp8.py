"""The fp8 matmul: both formats, each kind of scale, K on both sides of a step of 128."""

import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lab
from cookbook.gemm import kernel
from tests.arrays import array
from tests.gemm.structures import SMALL

module = importlib.import_module("cookbook.gemm.dense.matmul_fp8")
Config, matmul_fp8, reference = module.Config, module.matmul_fp8, module.matmul_fp8_reference
E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2


def operands(m, n, k, a_dtype=E4M3, b_dtype=E4M3, transpose_b=True):
    """Random normal; means are shifted, so that a term dropped or counted twice shows."""
    rng = np.random.default_rng(m * n + k)
    a, b = (array(rng.normal(size=shape) + 0.25, jnp.float32) for shape in ((m, k), (k, n)))
    return a.astype(a_dtype), (b.T if transpose_b else b).astype(b_dtype)


def scales(m, n):
    rng = np.random.default_rng(m + n)
    return (array(np.exp(rng.normal(size=size)), jnp.float32) for size in (m, n))


def check(m, n, k, a_dtype=E4M3, b_dtype=E4M3, scale_a=1.0, scale_b=1.0, transpose_b=True, tolerance=None, gpu=None,
          **kwargs):  # fmt: skip
    fn = functools.partial(matmul_fp8, scale_a=scale_a, scale_b=scale_b, transpose_b=transpose_b, **kwargs)
    flip = lambda a, b: reference(a, b.T if transpose_b else b, scale_a, scale_b)
    return lab.check(fn, flip, *operands(m, n, k, a_dtype, b_dtype, transpose_b), tolerance=tolerance, gpu=gpu)


@pytest.mark.parametrize("m, n, k", [(1, 1, 16), (130, 77, 528)])
def test_any_size(m, n, k):
    check(m, n, k, gpu="h200")


@pytest.mark.parametrize("a_dtype, b_dtype, transpose_b", [(E4M3, E5M2, True), (E5M2, E4M3, False)])
def test_formats(a_dtype, b_dtype, transpose_b):
    check(72, 136, 272, a_dtype, b_dtype, scale_a=0.5, scale_b=3.0, transpose_b=transpose_b, config=SMALL, gpu="h200")


@pytest.mark.parametrize(
    "kind, out_dtype, config",
    [
        ("two numbers", jnp.float32, Config(64, 128, split_dim=1, split_k=2, second_kernel=True)),
        ("rows and a number", jnp.float16, Config(64, 128, split_dim=1, split_k=2)),
        ("rows and columns", jnp.bfloat16, Config(128, 96, tail_split=2, cluster_n=2, swapped=True)),
    ],
)
def test_scales(kind, out_dtype, config):
    """`test_epilogue.py` has every kind in every structure of the kernel."""
    of_rows, of_columns = scales(136, 136)
    scale_a, scale_b = {"two numbers": (1.75, np.float32(3.0)), "rows and a number": (of_rows, 2.0),
                        "rows and columns": (of_rows[:, None], of_columns[None])}[kind]  # fmt: skip
    # The tensor cores of a GPU add fp8 products with fewer bits than float32 has: 2e-4 was seen.
    tolerance = 1e-3 if out_dtype == jnp.float32 and lab.on_gpu() else None
    check(136, 136, 400, scale_a=scale_a, scale_b=scale_b, out_dtype=out_dtype, config=config, tolerance=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("config", [Config(128, 128, cluster_m=2, cluster_n=2), Config(256, 96, store_slots=1),
                                    Config(128, 192, tail_split=3), Config(64, 224, split_dim=1)], ids=str)  # fmt: skip
def test_structures(config):
    check(300, 520, 400, config=config)


def test_aligned_operands_need_no_copy():
    with lab.interpret():
        jaxpr = str(jax.make_jaxpr(functools.partial(matmul_fp8, transpose_b=True))(*operands(128, 128, 128)))
    assert " transpose[" not in jaxpr and " pad[" not in jaxpr


small = functools.partial(matmul_fp8, transpose_b=True, config=SMALL)


def close(out, wanted):
    out, wanted = (np.asarray(x, np.float64) for x in (out, wanted))
    assert out.shape == wanted.shape and np.linalg.norm(out - wanted) < 5e-3 * np.linalg.norm(wanted)


def test_vmap_and_determinism():
    """Scales that are arrays too: one number for each product of the batch."""
    a, b = (jnp.stack([x, x]) for x in operands(72, 64, 144))
    out = lab.run(jax.vmap(lambda a, b, scale: small(a, b, scale_a=scale)), a, b, jnp.array([1.0, 2.0]))
    np.testing.assert_array_equal(out[1], 2 * out[0])
    close(out[0], reference(a[0], b[0].T, 1.0, 1.0))


def test_compiles_under_x64():
    """Scales of 64 bits become 32."""
    avals = [jax.ShapeDtypeStruct((256, 256), E4M3)] * 2
    with jax.enable_x64(True):
        fn = lambda a, b, scale: matmul_fp8(a, b, scale_a=scale, scale_b=np.float64(2.0), transpose_b=True)
        assert lab.compile_for("h200", fn, *avals, jax.ShapeDtypeStruct((256,), jnp.float64)).spill_bytes == 0


def test_options_of_any_scalar_type_and_lists():
    a, b = operands(8, 4, 16)
    how = dict(transpose_b=np.bool_(True), scale_a=np.float64(1.0), scale_b=[0.0, 1.0, 2.0, 3.0])
    out = lab.run(lambda: small(np.asarray(a), np.asarray(b), **how))
    close(out, reference(a, b.T, 1.0, jnp.arange(4.0)))


def test_nan_goes_where_it_should():
    a, b = operands(72, 72, 144)
    a, b = a.at[3, 5].set(jnp.nan), b.at[11, 140].set(jnp.nan)
    np.testing.assert_array_equal(jnp.isnan(lab.run(small, a, b)), jnp.isnan(reference(a, b.T, 1.0, 1.0)))


def test_empty():
    assert matmul_fp8(jnp.zeros((0, 16), E4M3), jnp.zeros((16, 8), E4M3)).shape == (0, 8)
    np.testing.assert_array_equal(matmul_fp8(jnp.zeros((3, 0), E4M3), jnp.zeros((0, 8), E4M3)), jnp.zeros((3, 8)))


def ones(*shape, dtype=E4M3):
    return jnp.ones(shape, dtype)


@pytest.mark.parametrize(
    "fn, message",
    [
        (lambda: matmul_fp8(ones(8, 16), ones(32, 8)), "16 is not 32"),
        (lambda: matmul_fp8(ones(8, 24), ones(24, 8)), "a has 24 values along K, 24 bytes.*pad it to 32"),
        (lambda: matmul_fp8(ones(2, 8, 16), ones(16, 8)), "vmap"),
        (lambda: matmul_fp8(ones(8, 16), ones(16, 8, dtype=jnp.bfloat16)), "b.dtype=dtype\\(bfloat16\\)"),
        (lambda: matmul_fp8([[1.0] * 16], ones(16, 8)), "a.dtype=dtype\\('float32'\\)"),
        (lambda: matmul_fp8(object(), ones(16, 8)), "a=.*; must be an array"),
        (
            lambda: matmul_fp8(ones(8, 16), ones(16, 8), scale_a=ones(3, dtype=jnp.float32)),
            r"scale_a is float32 \(3,\)",
        ),
        (lambda: matmul_fp8(ones(8, 16), ones(16, 8), scale_b=2), "scale_b is int32"),
        (lambda: matmul_fp8(ones(8, 16), ones(16, 8), scale_b="2"), "scale_b=.2.; must be an array"),
        (lambda: matmul_fp8(ones(8, 16), ones(16, 8), out_dtype=E4M3), "out_dtype"),
        (lambda: matmul_fp8(ones(8, 16), ones(16, 8), transpose_b=2), "transpose_b=2; must be one bool"),
        (lambda: jax.jit(lambda flag: matmul_fp8(ones(8, 16), ones(16, 8), transpose_b=flag))(True), "is traced"),
    ],
)
def test_errors_name_the_rule(fn, message):
    with pytest.raises(ValueError, match=message):
        fn()


def test_mutant_that_ignores_a_scale_is_caught(run_only, monkeypatch):
    monkeypatch.setattr(kernel, "scale_and_shift", lambda product, fused: product)
    jax.clear_caches()
    with pytest.raises(lab.CheckError):
        check(64, 128, 128, scale_a=2.0, config=SMALL)
    jax.clear_caches()


def test_as_exact_as_the_tensor_cores_allow(gpu):
    """Their sums of fp8 products keep fewer bits than float32; the result is no worse than XLA's product."""
    a, b = operands(4096, 4096, 4096)
    exact = reference(a, b.T, 1.0, 1.0)
    error = lambda out: float(jnp.linalg.norm(out.astype(jnp.float32) - exact) / jnp.linalg.norm(exact))
    peer = jax.lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=jnp.bfloat16)
    for config in (None, Config(128, 128, cluster_m=4, num_stages=2)):
        runs = [matmul_fp8(a, b, transpose_b=True, config=config) for _ in range(10)]
        assert error(runs[0]) <= 1.5 * error(peer)
        assert all((run == runs[0]).all() for run in runs)

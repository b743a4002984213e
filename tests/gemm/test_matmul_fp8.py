"""The fp8 matmul: both formats, each kind of scale, K on both sides of a step of 128."""

import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cookbook import lab

module = importlib.import_module("cookbook.gemm.matmul_fp8")
matmul_fp8, reference = module.matmul_fp8, module.matmul_fp8_reference
SMALL = module.Config(tile_m=64, tile_n=128, split_dim=1)
E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2


def operands(m, n, k, a_dtype=E4M3, b_dtype=E4M3, transpose_b=False):
    """Random normal; means are shifted, so that a term dropped or counted twice shows."""
    rng = np.random.default_rng(m * n + k)
    a, b = (jnp.asarray(rng.normal(size=shape) + 0.25, jnp.float32) for shape in ((m, k), (k, n)))
    return a.astype(a_dtype), (b.T if transpose_b else b).astype(b_dtype)


def scales(m, n):
    rng = np.random.default_rng(m + n)
    return (jnp.asarray(np.exp(rng.normal(size=size)), jnp.float32) for size in (m, n))


def check(m, n, k, a_dtype=E4M3, b_dtype=E4M3, scale_a=1.0, scale_b=1.0, transpose_b=True, tolerance=None, **kwargs):
    fn = functools.partial(matmul_fp8, scale_a=scale_a, scale_b=scale_b, transpose_b=transpose_b, **kwargs)
    flip = lambda a, b: reference(a, b.T if transpose_b else b, scale_a, scale_b)
    return lab.check(fn, flip, *operands(m, n, k, a_dtype, b_dtype, transpose_b), tolerance=tolerance)


@pytest.mark.parametrize("m, n, k", [(128, 256, 128), (1, 1, 16), (130, 77, 144), (257, 64, 528)])
def test_any_size(m, n, k):
    check(m, n, k)


@pytest.mark.parametrize("transpose_b", [True, False])
@pytest.mark.parametrize("a_dtype, b_dtype", [(E4M3, E5M2), (E5M2, E4M3), (E5M2, E5M2)])
def test_formats(a_dtype, b_dtype, transpose_b):
    check(72, 136, 272, a_dtype, b_dtype, transpose_b=transpose_b, config=SMALL)


@pytest.mark.parametrize("split_k", [1, 2])
@pytest.mark.parametrize("out_dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_scales(out_dtype, split_k):
    config = module.Config(tile_m=64, tile_n=128, split_dim=1, split_k=split_k)
    of_rows, of_columns = scales(130, 136)
    for scale_a, scale_b in ((0.5, 3.0), (of_rows, 1.0), (of_rows[:, None], of_columns[None])):
        # The tensor cores of a GPU add fp8 products with fewer bits than float32 has: 2e-4 was seen.
        tolerance = 1e-3 if out_dtype == jnp.float32 and lab.on_gpu() else None
        check(130, 136, 272, scale_a=scale_a, scale_b=scale_b, out_dtype=out_dtype, config=config, tolerance=tolerance)


@pytest.mark.parametrize("cluster_dim", [None, 0, 1])
def test_clusters_and_many_tiles(cluster_dim):
    check(300, 1100, 400, config=module.Config(cluster_dim=cluster_dim))


def test_aligned_operands_need_no_copy():
    a, b = operands(128, 128, 128, transpose_b=True)
    with lab.interpret():
        jaxpr = str(jax.make_jaxpr(functools.partial(matmul_fp8, transpose_b=True))(a, b)).split("core_map")[0]
    assert " transpose[" not in jaxpr and " pad[" not in jaxpr


def test_jit_vmap_and_determinism():
    a, b = (jnp.stack(x) for x in zip(*(operands(72, 64, 144, transpose_b=True) for _ in range(2)), strict=True))
    fn = functools.partial(matmul_fp8, transpose_b=True, config=SMALL)
    runs = [lab.run(jax.vmap(fn), a, b), lab.run(jax.jit(jax.vmap(fn)), a, b), lab.run(fn, a[0], b[0])[None]]
    assert all((run[0] == runs[0][0]).all() for run in runs)


def test_nan_goes_where_it_should():
    a, b = operands(72, 72, 144, transpose_b=True)
    a, b = a.at[3, 5].set(jnp.nan), b.at[11, 140].set(jnp.nan)
    out = lab.run(functools.partial(matmul_fp8, transpose_b=True), a, b)
    np.testing.assert_array_equal(jnp.isnan(out), jnp.isnan(reference(a, b.T, 1.0, 1.0)))


def test_empty():
    assert matmul_fp8(jnp.zeros((0, 16), E4M3), jnp.zeros((16, 8), E4M3)).shape == (0, 8)
    np.testing.assert_array_equal(matmul_fp8(jnp.zeros((3, 0), E4M3), jnp.zeros((0, 8), E4M3)), jnp.zeros((3, 8)))


def ones(*shape, dtype=E4M3):
    return jnp.ones(shape, dtype)


@pytest.mark.parametrize(
    "fn, message",
    [
        (lambda: matmul_fp8(ones(8, 16), ones(32, 8)), "16 is not 32"),
        (lambda: matmul_fp8(ones(8, 24), ones(24, 8)), "pad both to 32"),
        (lambda: matmul_fp8(ones(2, 8, 16), ones(16, 8)), "vmap"),
        (lambda: matmul_fp8(ones(8, 16), ones(16, 8, dtype=jnp.bfloat16)), "b.dtype=dtype\\(bfloat16\\)"),
        (
            lambda: matmul_fp8(ones(8, 16), ones(16, 8), scale_a=ones(3, dtype=jnp.float32)),
            r"scale_a is float32 \(3,\)",
        ),
        (lambda: matmul_fp8(ones(8, 16), ones(16, 8), scale_b=2), "scale_b is int32"),
        (lambda: matmul_fp8(ones(8, 16), ones(16, 8), out_dtype=E4M3), "out_dtype"),
    ],
)
def test_errors_name_the_rule(fn, message):
    with pytest.raises(ValueError, match=message):
        fn()


def test_mutant_that_ignores_a_scale_is_caught(monkeypatch):
    kernel = importlib.import_module("cookbook.gemm.matmul")
    monkeypatch.setattr(kernel, "_scale_and_shift", lambda product, fused: product)
    jax.clear_caches()
    with pytest.raises(lab.CheckError):
        check(64, 128, 128, scale_a=2.0, config=SMALL)
    jax.clear_caches()


def test_as_exact_as_the_tensor_cores_allow(gpu):
    """Their sums of fp8 products keep fewer bits than float32; the result is no worse than XLA's product."""
    a, b = operands(4096, 4096, 4096, transpose_b=True)
    exact = reference(a, b.T, 1.0, 1.0)
    error = lambda out: float(jnp.linalg.norm(out.astype(jnp.float32) - exact) / jnp.linalg.norm(exact))
    peer = jax.lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=jnp.bfloat16)
    runs = [matmul_fp8(a, b, transpose_b=True) for _ in range(10)]
    assert error(runs[0]) <= 1.5 * error(peer)
    assert all((run == runs[0]).all() for run in runs)

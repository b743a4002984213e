"""MXFP8: the quantization, the reference, and what is refused. The kernel itself is compiled, in `test_compiled.py`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lab
from cookbook import blackwell
from cookbook.blackwell import matmul_mxfp8, quantize_mxfp8
from cookbook.blackwell.plan import Config
from tests.arrays import array
from tests.blackwell.grid import RUNGS, of_rung

E4M3, E8M0 = jnp.float8_e4m3fn, jnp.float8_e8m0fnu


def exact(x, scales):
    return np.asarray(x, np.float64) * np.repeat(np.asarray(scales, np.float64), 32, axis=-1)


def rows(count, k, dtype=jnp.float32, seed=0):
    """Random normal rows whose blocks of 32 differ by many powers of two."""
    rng = np.random.default_rng(seed)
    return array(rng.normal(size=(count, k)) * np.exp2(rng.integers(-30, 30, (count, k // 32))).repeat(32, 1), dtype)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_quantization(dtype):
    x = rows(40, 320, dtype)
    values, scales = quantize_mxfp8(x)
    assert (values.dtype, scales.dtype, values.shape, scales.shape) == (E4M3, E8M0, (40, 320), (40, 10))
    blocks, largest = (np.abs(np.asarray(y, np.float64)).reshape(40, 10, 32) for y in (x, values))
    assert largest.max() <= 448 and (largest.max(-1) > 448 / 2 - 16).all(), (
        "the least scale with which nothing saturates"
    )
    # Half a unit in the last of 3 bits; values far below the largest are subnormal, with a unit of 2**-9.
    error = np.abs(exact(values, scales) - np.asarray(x, np.float64)).reshape(40, 10, 32)
    assert (error <= np.maximum(blocks / 16, np.asarray(scales, np.float64)[..., None] * 2.0**-10) * (1 + 1e-6)).all()


@pytest.mark.parametrize(
    "largest, exponent", [(448.0, 0), (448.5, 1), (224.0, -1), (224.25, 0), (1.0, -8), (2.0**100, 92)]
)
def test_the_scale_of_a_block(largest, exponent):
    x = jnp.zeros((1, 32)).at[0, 7].set(largest)
    values, scales = quantize_mxfp8(x)
    assert float(scales[0, 0]) == 2.0**exponent
    np.testing.assert_allclose(exact(values, scales), x, rtol=1 / 16)


def test_blocks_of_zeros_and_with_a_nan():
    x = jnp.ones((1, 96)).at[0, :32].set(0).at[0, 40].set(jnp.nan).at[0, 70].set(-jnp.inf)
    values, scales = quantize_mxfp8(x)
    assert float(scales[0, 0]) == 1 and (np.asarray(values, np.float32)[0, :32] == 0).all()
    assert np.isnan(np.asarray(scales, np.float32)[0, 1:]).all()


def test_leading_axes_and_jit():
    x = rows(6, 64).reshape(2, 3, 64)
    for ours, other in zip(jax.jit(quantize_mxfp8)(x), quantize_mxfp8(x.reshape(6, 64)), strict=True):
        np.testing.assert_array_equal(np.asarray(ours, np.float32).reshape(other.shape), np.asarray(other, np.float32))


def test_the_reference_is_the_product():
    (a, a_scales), (b, b_scales) = (quantize_mxfp8(rows(count, 96, seed=count)) for count in (5, 7))
    wanted = exact(a, a_scales) @ exact(b, b_scales).T + np.arange(7.0)
    for is_exact, tolerance in ((True, 1e-14), (False, 1e-5)):
        with jax.enable_x64(is_exact):
            out = blackwell.matmul_mxfp8_reference(a, a_scales, b, b_scales, jnp.arange(7.0), "relu")
        assert out.dtype == (jnp.float64 if is_exact else jnp.float32)
        found, rectified = np.asarray(out, np.float64), np.maximum(wanted, 0)
        assert np.linalg.norm(found - rectified) < tolerance * np.linalg.norm(rectified)


def test_a_quantized_product_is_near_the_product():
    x, y = (array(np.random.default_rng(count).normal(size=(count, 256)), jnp.float32) for count in (64, 72))
    out, wanted = blackwell.matmul_mxfp8_reference(*quantize_mxfp8(x), *quantize_mxfp8(y)), x @ y.T
    assert 1e-3 < jnp.linalg.norm(out - wanted) / jnp.linalg.norm(wanted) < 5e-2


def test_empty():
    values, scales = quantize_mxfp8(jnp.zeros((3, 0)))
    out = matmul_mxfp8(values, scales, values[:2], scales[:2], bias=jnp.ones(2))
    np.testing.assert_array_equal(out, jnp.ones((3, 2)))


A, S = jnp.ones((8, 64), E4M3), jnp.ones((8, 2), E8M0)


@pytest.mark.parametrize(
    "fn, message",
    [
        (lambda: matmul_mxfp8(A[None], S, A, S), "use jax.vmap"),
        (lambda: matmul_mxfp8(A.astype(jnp.float32), S, A, S), "a.dtype=.*cookbook.blackwell.quantize_mxfp8"),
        (lambda: matmul_mxfp8(A, S, A[:, :32], S), "share no K: 64 is not 32"),
        (lambda: matmul_mxfp8(A[:, :48], S, A[:, :48], S), "K is 48; must be a multiple of 32"),
        (lambda: matmul_mxfp8(A, S[:, :1], A, S), r"a_scales is float8_e8m0fnu \(8, 1\); must be .* \(8, 2\)"),
        (lambda: matmul_mxfp8(A, S, A, jnp.ones((8, 2))), r"b_scales is float32 \(8, 2\)"),
        (lambda: matmul_mxfp8(A, S, A, S, bias=jnp.ones(3)), r"must be \(8,\), N"),
        (lambda: matmul_mxfp8(A, S, A, S, out_dtype=E4M3), "out_dtype"),
        (lambda: matmul_mxfp8(A, S, A, object()), "b_scales=.*; must be an array"),
        (lambda: quantize_mxfp8(jnp.ones((2, 40))), "multiple of 32.*jnp.pad"),
        (lambda: quantize_mxfp8(jnp.ones((2, 64), jnp.int8)), "floating dtype"),
    ],
)
def test_errors_name_the_rule(fn, message):
    with pytest.raises(ValueError, match=message):
        fn()


def test_a_gradient_is_refused_by_name():
    loss = lambda bias: matmul_mxfp8(A, S, A, S, bias=bias, out_dtype=jnp.float32).sum()
    with pytest.raises(ValueError, match="no gradient.*cookbook.blackwell.matmul of 16-bit"):
        lab.compile_for("b200", jax.grad(loss), jax.ShapeDtypeStruct((8,), jnp.float32))


@pytest.mark.parametrize("size", [(300, 200, 96), (130, 520, 1056), (1, 8, 32)])
@pytest.mark.parametrize("rung", RUNGS)
def test_every_rung_runs(blackwell_gpu, rung, size):
    """On a B200 alone: no interpreter has scaled MMA. Against float64, five equal runs."""
    (a, a_scales), (b, b_scales) = (quantize_mxfp8(rows(count, size[2], seed=count)) for count in size[:2])
    bias = jnp.linspace(-1, 1, size[1])
    fn = lambda *args: matmul_mxfp8(*args[:4], bias=args[4], config=of_rung(rung, 128))
    lab.check(fn, blackwell.matmul_mxfp8_reference, a, a_scales, b, b_scales, bias, gpu="b200")


def test_what_the_interpreter_lacks_is_said_by_name():
    with pytest.raises(RuntimeError, match="no block-scaled MMA.*compile_for.*matmul_mxfp8_reference"), lab.interpret():
        matmul_mxfp8(A, S, A, S)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="says what to do without one")
def test_without_a_gpu():
    with pytest.raises(RuntimeError, match=r'JAX sees no GPU.*compile_for\("b200"'):
        matmul_mxfp8(A, S, A, S)


def test_a_configuration_too_wide_for_tensor_memory():
    avals = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (A, S, A, S)]
    with pytest.raises(ValueError, match="524 columns of tensor memory with the scales"):
        lab.compile_for("b200", lambda *args: matmul_mxfp8(*args, config=Config()), *avals)

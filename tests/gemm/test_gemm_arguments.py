"""Arguments that these ops take and refuse besides their own errors: names that JAX's users try, sizes, derivatives."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cookbook
import lab
from cookbook import _host
from cookbook.gemm import differentiable
from tests.arrays import array

BF16, F16, F32, FP8 = jnp.bfloat16, jnp.float16, jnp.float32, jnp.float8_e4m3fn
SIZES = jnp.array([3, 5])


def ones(*shape, dtype=BF16):
    return jnp.ones(shape, dtype)


CALLS = {
    "matmul": dict(a=ones(8, 16), b=ones(16, 16)),
    "glu": dict(x=ones(8, 16), w_gate=ones(16, 16), w_up=ones(16, 16)),
    "matmul_blocked": dict(a=ones(8, 16), b=ones(16, 16)),
    "matmul_wgmma": dict(a=ones(8, 16), b=ones(16, 16)),
    "matmul_pipelined": dict(a=ones(8, 16), b=ones(16, 16)),
    "matmul_fp8": dict(a=ones(8, 16, dtype=FP8), b=ones(16, 16, dtype=FP8), scale_a=ones(8, dtype=F32)),
    "matmul_int4_weights": dict(x=ones(8, 64), w=ones(1, 1, 512, dtype=jnp.uint32), scales=ones(1, 16)),
    "matmul_mxfp4_weights": dict(x=ones(8, 64), w=ones(1, 1, 512, dtype=jnp.uint32),
                                 scales=ones(1, 16, dtype=jnp.uint16)),  # fmt: skip
    "matmul_int8_weights": dict(a=ones(8, 16), w_q=ones(16, 16, dtype=jnp.int8), scales=ones(16, dtype=F32)),
    "ragged_dot": dict(lhs=ones(8, 16), rhs=ones(2, 16, 16), group_sizes=SIZES),
    "ragged_dot_transposed": dict(lhs=ones(8, 16), rhs=ones(8, 16), group_sizes=SIZES),
    "ragged_dot_fp8": dict(lhs=ones(8, 16, dtype=FP8), rhs=ones(2, 16, 16, dtype=FP8), scale_lhs=ones(8, dtype=F32),
                           scale_rhs=ones(2, 16, dtype=F32), group_sizes=SIZES),
    "ragged_dot_int4_weights": dict(lhs=ones(8, 64), w=ones(2, 1, 1, 512, dtype=jnp.uint32), scales=ones(2, 1, 16),
                                    group_sizes=SIZES),
    "ragged_dot_mxfp4_weights": dict(lhs=ones(8, 64), w=ones(2, 1, 1, 512, dtype=jnp.uint32),
                                     scales=ones(2, 1, 16, dtype=jnp.uint16), group_sizes=SIZES),
    "ragged_dot_int8_weights": dict(lhs=ones(8, 16), rhs=ones(2, 16, 16, dtype=jnp.int8), scales=ones(2, 16, dtype=F32),
                                    group_sizes=SIZES),
    "blackwell.matmul": dict(a=ones(8, 16), b=ones(16, 16)),
    "blackwell.ragged_dot": dict(lhs=ones(8, 16), rhs=ones(2, 16, 16), group_sizes=SIZES),
    "blackwell.matmul_mxfp8": dict(a=ones(8, 32, dtype=FP8), a_scales=ones(8, 1, dtype=jnp.float8_e8m0fnu),
                                   b=ones(16, 32, dtype=FP8), b_scales=ones(16, 1, dtype=jnp.float8_e8m0fnu)),
    "moe": dict(x=ones(4, 16), router_logits=ones(4, 2, dtype=F32), w_gate_up=ones(2, 16, 16), w_down=ones(2, 8, 16),
                top_k=1),
}  # fmt: skip


def op_of(name):
    """`cookbook.name`, which may be in a module of the package."""
    return functools.reduce(getattr, name.split("."), cookbook)


@pytest.mark.parametrize("name", [name for name in CALLS if not name.startswith("moe")])
@pytest.mark.parametrize("config", [4, dict(tile_m=64), _host])
def test_a_config_of_another_kind_is_refused(name, config):
    with pytest.raises(ValueError, match=rf"cookbook.{name}: config=.*must be a cookbook.{name}.Config: pass"):
        op_of(name)(**CALLS[name], config=config)


@pytest.mark.parametrize(
    "name", [name for name in CALLS if name.split(".")[-1] not in ("glu", "moe", "matmul", "ragged_dot")]
)
def test_first_derivatives_that_are_not_there_are_refused_by_name(name):
    """In each operand of floats, scales too."""
    operands = {key: x for key, x in CALLS[name].items() if jnp.issubdtype(jnp.asarray(x).dtype, jnp.floating)}
    fixed = {key: x for key, x in CALLS[name].items() if key not in operands}
    for key, x in operands.items():
        fn = lambda x, key=key: op_of(name)(**(operands | {key: x} | fixed)).astype(F32).sum()
        with pytest.raises(ValueError, match=f"cookbook.{name} has no gradient: differentiate "), lab.interpret():
            jax.eval_shape(lambda x, fn=fn: jax.vjp(fn, x)[0], x)


@pytest.mark.parametrize("name", ["glu", "matmul", "ragged_dot", "blackwell.matmul", "blackwell.ragged_dot"])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_second_derivatives_are_refused_by_name(name, activation):
    """In reverse mode and in forward mode over reverse mode; traced, not run."""
    operands = CALLS[name]
    a = next(iter(operands))
    fn = lambda x: (op_of(name)(**(operands | {a: x}), activation=activation).astype(F32) ** 2).sum()
    twice = lambda x: jax.grad(lambda x: jax.grad(fn)(x).astype(F32).sum())(x)
    mixed = lambda x: jax.jvp(jax.grad(fn), (x,), (x,))[1]
    for second in (twice, mixed):
        with pytest.raises(ValueError, match=f"cookbook.{name} has no second derivative"), lab.interpret():
            jax.eval_shape(second, operands[a])


@pytest.mark.parametrize("name, named", [("matmul", "preferred_element_type"), ("ragged_dot", "preferred_element_type"),
                                         ("blackwell.matmul", "preferred_element_type"), ("matmul", "out_dtype"),
                                         ("matmul_fp8", "out_dtype"), ("matmul_wgmma", "out_dtype")])  # fmt: skip
@pytest.mark.parametrize("dtype", ["float", jnp.int8, "no dtype", 3.5])
def test_dtypes_of_results_are_refused_by_name(name, named, dtype):
    with pytest.raises(ValueError, match=rf"cookbook.{name}: {named}=.*; must be bfloat16, float16 or float32"):
        op_of(name)(**CALLS[name], **{named: dtype})


def test_names_of_jax_mean_what_they_mean_there():
    """Nothing runs: whatever the precision, the same program; one name for the result's dtype."""
    a, b = CALLS["matmul"].values()
    program = lambda **how: str(jax.make_jaxpr(functools.partial(cookbook.matmul, **how))(a, b))
    grouped = lambda **how: str(jax.make_jaxpr(functools.partial(cookbook.ragged_dot, **how))(**CALLS["ragged_dot"]))
    with lab.interpret():
        for precision in ("highest", "default", jax.lax.Precision.HIGH, ("highest", None)):
            assert program(precision=precision) == program()
            assert grouped(precision=precision) == grouped()
        assert program(preferred_element_type="float32") == program(out_dtype=F32) != program()
    for op, operands in ((cookbook.matmul, CALLS["matmul"]), (cookbook.ragged_dot, CALLS["ragged_dot"])):
        for precision in ("best", 3, jax.lax.DotAlgorithmPreset.F16_F16_F16):
            with pytest.raises(ValueError, match=f"cookbook.{op.__name__}: precision=.*must be None or a jax.lax"):
                op(**operands, precision=precision)
    with pytest.raises(ValueError, match="cookbook.matmul: out_dtype=.*preferred_element_type=.*give one"):
        cookbook.matmul(a, b, out_dtype=F32, preferred_element_type=F32)


def test_num_groups_is_a_number():
    for num_groups, message in (
        (2.0, "num_groups=2.0; must be one int: pass 2"),
        (-1, "num_groups=-1; must be at least"),
    ):
        with pytest.raises(ValueError, match=f"cookbook.ragged_dot_transposed: {message}"):
            cookbook.ragged_dot_transposed(**CALLS["ragged_dot_transposed"], num_groups=num_groups)


@pytest.mark.parametrize("sizes", [[1.5, 2.0], [[3, 5]], [3, [5]], ["3", "5"], None])
def test_sizes_that_are_no_integers_are_refused(sizes):
    with pytest.raises(ValueError, match="cookbook.ragged_dot: group_sizes"):
        cookbook.ragged_dot(**(CALLS["ragged_dot"] | dict(group_sizes=sizes)))


# Empty ----------------------------------------------------------------------------------------------------------------


def test_empty_with_leading_axes():
    """Also without a K, and without a column."""
    for lead, n, k in (((2, 0), 16, 8), ((0, 3), 16, 8), ((2, 3), 0, 8), ((2, 3), 16, 0)):
        for op in (cookbook.matmul, cookbook.blackwell.matmul):
            out = op(ones(*lead, k), ones(k, n))
            assert out.shape == (*lead, n) and not out.any()


def test_gradients_of_empty_operands():
    loss = lambda a, b: cookbook.matmul(a, b, out_dtype=F32).sum()
    for m, n, k in ((0, 16, 8), (3, 0, 8), (3, 16, 0)):
        operands = ones(m, k, dtype=F16), ones(k, n, dtype=F16)
        for grad, like in zip(jax.grad(loss, (0, 1))(*operands), operands, strict=True):
            assert grad.shape == like.shape and grad.dtype == like.dtype and not grad.any()


# Large ----------------------------------------------------------------------------------------------------------------


def shaped(*shape, dtype=BF16):
    return jax.ShapeDtypeStruct(shape, dtype)


LARGE = 2**31
BEYOND = {
    "glu": (shaped(8, 8), shaped(8, LARGE), shaped(8, LARGE)),
    "matmul": (shaped(LARGE, 8), shaped(8, 8)),
    "matmul_wgmma": (shaped(8, LARGE), shaped(LARGE, 8)),
    "matmul_pipelined": (shaped(8, 8), shaped(8, LARGE)),
    "matmul_blocked": (shaped(LARGE, 8), shaped(8, 8)),
    "matmul_fp8": (shaped(LARGE, 16, dtype=FP8), shaped(16, 16, dtype=FP8)),
    "matmul_int4_weights": (shaped(8, 64), shaped(LARGE // 64, 1, 512, dtype=jnp.uint32), shaped(1, LARGE)),
    "matmul_int8_weights": (shaped(8, 16), shaped(16, LARGE, dtype=jnp.int8), shaped(LARGE, dtype=F32)),
    "ragged_dot": (shaped(8, 8), shaped(2, 8, LARGE), shaped(2, dtype=jnp.int32)),
    "ragged_dot_transposed": (shaped(8, 8), shaped(8, LARGE), shaped(2, dtype=jnp.int32)),
    "blackwell.matmul": (shaped(LARGE, 8), shaped(8, 8)),
    "blackwell.ragged_dot": (shaped(8, 8), shaped(2, 8, LARGE), shaped(2, dtype=jnp.int32)),
}


@pytest.mark.parametrize("name", BEYOND)
def test_sizes_beyond_indices_of_32_bits_are_refused(name):
    with pytest.raises(ValueError, match=rf"cookbook.{name}: [MNK]=2147483648; must be below 2\*\*31 - 1024"):
        jax.eval_shape(op_of(name), *BEYOND[name])


def test_too_many_rows_of_tokens_are_refused():
    tokens = 2**24
    operands = shaped(tokens, 8), shaped(tokens, 126, dtype=F32), shaped(126, 8, 16), shaped(126, 8, 8)
    with pytest.raises(ValueError, match="cookbook.moe: 16777216 rows of tokens by 126 experts; must"):
        jax.eval_shape(functools.partial(cookbook.moe, top_k=1), *operands)


@pytest.mark.parametrize(
    "name, weights, how",
    [
        ("matmul_int8_weights", [shaped(49168, 64, dtype=jnp.int8), shaped(49168, dtype=F32)], dict(transpose_w=True)),
        ("matmul", [shaped(64, 49168)], dict(config=cookbook.matmul.Config(swapped=True))),
    ],
)
def test_stores_from_registers_count_in_64_bits(name, weights, how):
    """Transposed results of 32 bits, which alone leave without TMA: here more than 2**32 of them."""
    fn = functools.partial(op_of(name), out_dtype=F32, **how)
    ptx = lab.compile_for("h200", fn, shaped(2**17 + 8, 64), *weights).ptx
    assert re.search(r"mul\.wide\.[su]32 .*, 49280;", ptx)  # A row times the length of one, padded to tiles.


# Gradients of float16 -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("exponent", [-149, -120, -24, 0, 17, 110])
def test_a_gradient_is_brought_into_the_range_of_float16(exponent):
    """As exact as float16 can be, but for what is smaller than the largest by 2**30; NaN and infinities stay alone."""
    x = (np.random.default_rng(0).normal(size=(9, 8)) * 2.0**exponent).astype(np.float32)
    x[3], x[8] = 0, np.inf
    x[4, :2] = np.nan, -np.inf
    used = np.arange(9)[:, None] < 8
    found, unscaled = differentiable.as_operand(jnp.asarray(x), jnp.dtype(F16), lambda: used)
    back = np.asarray(unscaled(found.astype(F32)), np.float64)
    np.testing.assert_array_equal(np.isfinite(found), np.isfinite(x))
    assert np.abs(np.where(np.isfinite(x), found, 0)).max() <= 2.0**15
    with np.errstate(over="ignore"):
        rounded = x.astype(np.float64).astype(np.float16).astype(np.float64)  # The result's own dtype loses no more.
    for ours, wanted in zip(back.ravel(), rounded.ravel(), strict=True):
        np.testing.assert_allclose(ours, wanted, rtol=2.0**-10, atol=2.0**-24)


def test_gradients_of_other_dtypes_are_cast_alone():
    for dtype, gradient in ((BF16, F32), (BF16, F16), (F16, F16)):
        found, unscaled = differentiable.as_operand(ones(3, dtype=gradient), jnp.dtype(dtype))
        assert found.dtype == dtype and unscaled is None


def half(seed, *shape):
    return array(2.0**-6 * np.random.default_rng(seed).normal(size=shape), F16)


@pytest.mark.parametrize("name, scales", [("matmul", (2.0**17, 2.0**-24)), ("ragged_dot", (2.0**17,)),
                                          ("blackwell.matmul", (2.0**-24,))])  # fmt: skip
def test_float16_gradients_under_loss_scales(name, scales):
    """float32 results of float16 operands; one program. Rows of no group have gradients far larger than others."""
    a, b, rows = half(0, 24, 32), half(1, 32, 16), 20 if name == "ragged_dot" else 24
    weights = np.random.default_rng(2).normal(size=(24, 16))
    how = dict(activation="silu", preferred_element_type=F32)

    def gradients(a, b):
        operands = (a, b[None], jnp.array([rows])) if name == "ragged_dot" else (a, b)
        product = lambda *x: op_of(name)(*x, *operands[2:], **how)
        cotangent = array(np.where(np.arange(24)[:, None] < rows, weights, 1e30), F32)
        pull = jax.vjp(product, *operands[:2])[1]
        return [pull(cotangent * scale) for scale in scales]

    found = lab.run(gradients, a, b)
    a, b = (np.asarray(x, np.float64) for x in (a, b))
    sigmoid = 1 / (1 + np.exp(-(a @ b)))
    d = weights * sigmoid * (1 + a @ b * (1 - sigmoid)) * (np.arange(24)[:, None] < rows)
    for scale, pair in zip(scales, found, strict=True):
        for x, wanted in zip(pair, (d @ b.T, a.T @ d), strict=True):
            assert x.dtype == F16
            # The gradient that is multiplied and the result are rounded to float16, the latter to no less than 2**-24.
            limit = 2.0**-25 * wanted.size**0.5 + 1e-3 * np.linalg.norm(scale * wanted)
            assert np.linalg.norm(np.asarray(x, np.float64).reshape(wanted.shape) - scale * wanted) < limit

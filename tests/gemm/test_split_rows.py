# SPDX-License-Identifier: Apache-2.0
"""`split_rows`: bits as NumPy has them in float64, what a sum of halves keeps, and what the compiler makes of it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

import lab
from cookbook.gemm.dense import split_rows as op
from cookbook.gemm.dense.split_rows import split_rows, split_rows_reference
from tests import ptx
from tests.arrays import array
from tests.lowering import lowered

BF16, F16, E4M3 = jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn


def silu(gate, up):
    return jax.nn.silu(gate) * up


def clamped(gate, up):
    gate, up = jnp.minimum(gate, 1.5), jnp.clip(up, -1.5, 1.5)
    return gate * jax.nn.sigmoid(1.702 * gate) * (up + 1)


def rows(m, k, dtype):
    """Rows of many magnitudes; if there are three, one of a huge and tiny values, one near the least, one of zeros."""
    rng = np.random.default_rng(m * k)
    x = rng.normal(size=(m, k)) * np.exp2(rng.integers(-12, 12, size=(m, k)))
    if m >= 3:
        x[0, k // 2] = -float(jnp.finfo(dtype).max)
        if dtype == BF16:
            x[0, : k // 2] *= 2.0**40  # Numbers that the scale makes subnormal are zeros on a CPU.
            x[0, k // 2 + 1 :] *= 2.0**40
            x[1] = rng.choice([-1, 0, 1], size=k) * 2.0**-125 * rng.uniform(1, 2, size=k)
        x[2] = [-0.0, 0.0] * (k // 2)
    return array(x, dtype)


def in_order(values):
    """Where each 16 values of K lie, from the documented places."""
    i = np.arange(16)
    pair, lane, half = i // 8, i // 2 % 4, i % 2
    out = np.empty_like(values).reshape(len(values), -1, 16)
    out[:, :, 4 * lane + 2 * half + pair] = values.reshape(out.shape)
    return out.reshape(values.shape)


def expected(x):
    """(halves, scales), and the sums of halves in the order of K, in float64."""
    x = np.asarray(x, np.float64)
    x = np.pad(x, ((0, 0), (0, -x.shape[1] % 64)))
    mantissa, exponent = np.frexp(np.abs(x).max(1))
    exponent = np.where(mantissa == 0, -126, np.maximum(exponent - np.where(mantissa > 0.875, 8, 9), -126))
    scaled = x * np.exp2(-exponent.astype(float))[:, None]
    high = scaled.astype(E4M3)
    low = (scaled - high.astype(float)).astype(E4M3)
    halves = np.concatenate([in_order(high), in_order(low)], 1)
    sums = (high.astype(float) + low.astype(float)) * np.exp2(exponent)[:, None]
    return halves.view(np.uint8), np.exp2(exponent.astype(np.float32)), sums


def check(found, wanted):
    np.testing.assert_array_equal(np.asarray(found[0]).view(np.uint8), wanted[0])
    scales, num = np.asarray(found[1]), len(wanted[1])
    assert scales.shape == op.scales_shape(num) and scales.shape[1] % 2 == 0 and scales.shape[1] >= num + 64
    np.testing.assert_array_equal(scales[0, :num], wanted[1])
    np.testing.assert_array_equal(scales[1, : num - 1], wanted[1][1:])


@pytest.mark.parametrize("m, k, dtype", [(3, 8, BF16), (5, 40, F16), (7, 96, BF16), (3, 2880, BF16), (2, 8200, BF16)])
def test_bits(m, k, dtype):
    x = rows(m, k, dtype)
    check(lab.run(split_rows, x), expected(x))


@pytest.mark.parametrize("activation, m, k, dtype", [(silu, 5, 40, BF16), (clamped, 3, 160, F16)])
def test_values_of_an_activation_are_split(activation, m, k, dtype):
    x = rows(m + 3, 2 * k, dtype)[3:]
    values = activation(*jnp.split(x.astype(jnp.float32), 2, axis=1)).astype(dtype)
    check(lab.run(functools.partial(split_rows, activation=activation), x), expected(values))


def test_how_near_the_sum_is():
    x = rows(64, 256, BF16)[3:]  # Without the rows whose numbers a CPU flushes to zero.
    exact, sums = np.asarray(x, np.float64), expected(x)[2]
    check(split_rows_reference(x), expected(x))
    largest = np.abs(exact).max(1, keepdims=True)
    is_large = np.abs(exact) >= largest * 2.0**-8
    np.testing.assert_array_equal(sums[is_large], exact[is_large])
    error = np.abs(sums - exact).max()
    assert 0 < error and (np.abs(sums - exact) <= largest * 2.0**-17).all()


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_makes_a_row_nan(value):
    x = rows(7, 40, BF16).at[4, 33].set(value)
    halves, scales = lab.run(split_rows, x)
    scales = np.asarray(scales)[0, :7]
    product = np.asarray(halves, np.float32).sum(1) * scales
    np.testing.assert_array_equal(np.isnan(product), np.arange(7) == 4)
    assert np.isnan(scales[4])


def test_no_rows():
    halves, scales = lab.run(split_rows, jnp.zeros((0, 40), BF16))
    assert halves.shape == (0, 128) and scales.shape == (2, 64)


@pytest.mark.parametrize("k, dtype", [(192, BF16), (2880, F16)])
def test_what_threads_load_round_and_store(k, dtype):
    """The compiled code, which the interpreter does not run, of one row and without its scale."""
    x = np.array(rows(2, 2 * k, dtype), order="C")[1:]
    x = (x / np.abs(x).max()).astype(dtype) * 2
    x[0, [3, k + 3]] = 256, 192

    def body(x_gmem, halves_gmem):
        gate, up = (part.astype(jnp.float32) for part in op._load(x_gmem.at[0], 2))
        op._store((gate + up).astype(dtype).astype(jnp.float32), halves_gmem.at[0])

    kernel = plgpu.kernel(body, out_type=jax.ShapeDtypeStruct((1, 2 * k), E4M3))
    halves = np.zeros((1, 2 * k), np.uint8)
    ptx.run(lab.compile_for("h200", kernel, jax.ShapeDtypeStruct(x.shape, dtype)).ptx, x, halves)
    values = (x[:, :k].astype(np.float32) + x[:, k:].astype(np.float32)).astype(dtype)
    assert values.max() == 448
    np.testing.assert_array_equal(halves, expected(values)[0])


@pytest.mark.parametrize("k, activation", [(5760, None), (8192, clamped)])
def test_what_the_compiler_makes_of_it(k, activation):
    """No spill; whole vectors move."""
    parts = 1 if activation is None else 2
    compiled = lab.compile_for(
        "h200", functools.partial(split_rows, activation=activation), jax.ShapeDtypeStruct((256, parts * k), BF16)
    )
    assert compiled.spill_bytes == 0 and len(compiled.kernels) == 1
    chunks = -(-k // 2048)
    assert compiled.sass.count("LDG") == compiled.sass.count("LDG.E.128") == 2 * parts * chunks
    assert compiled.sass.count("STG.E.128") == compiled.sass.count("STG") - 2 == 2 * chunks


@pytest.mark.parametrize("k", [8, 1408, 8184])
def test_lowers(k):
    lowered(split_rows, jax.ShapeDtypeStruct((1, k), F16))
    lowered(functools.partial(split_rows, activation=silu), jax.ShapeDtypeStruct((1000, 2 * k), BF16))

"""The exercises of chapter 9: solutions are accepted; wrong answers and untouched skeletons are not."""

import math
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tests.exercises.answers import NOTEBOOKS, accepted, rejected

sys.path.insert(0, str(NOTEBOOKS))

from exercises import ex09  # noqa: E402

# The crossover and quantized weights


def quantise(w, *, xp=jnp, largest=127, axis=0, measure=lambda w: abs(w), rounded=True):
    top = measure(w).max(axis=axis)
    scales = xp.where(top > 0, top / largest, 1)
    values = w / scales
    return (xp.round(values) if rounded else values).astype(xp.int8), scales


def in_numpy(w):
    return quantise(np.asarray(w), xp=np)


def per_tensor(w):
    scale = abs(w).max() / 127
    return jnp.round(w / scale).astype(jnp.int8), jnp.full(w.shape[1], scale)


def per_row(w):
    scale = abs(w).max(axis=1, keepdims=True) / 127
    return jnp.round(w / jnp.where(scale > 0, scale, 1)).astype(jnp.int8), scale[:40, 0]


def zeros_forgotten(w):
    scales = abs(w).max(axis=0) / 127
    return jnp.round(w / scales).astype(jnp.int8), scales


def zero_scales(w):
    scales = abs(w).max(axis=0) / 127
    return jnp.round(w / jnp.where(scales > 0, scales, 1)).astype(jnp.int8), scales


def inverted(w):
    w_q, scales = quantise(w)
    return w_q, 1 / scales


def wrapped(w):
    scales = abs(w).max(axis=0) / 128
    values = np.round(np.asarray(w) / np.where(np.asarray(scales) > 0, scales, 1)).astype(np.int64)
    return jnp.asarray(values.astype(np.int8)), jnp.where(scales > 0, scales, 1)


def with_minus_128(w):
    scales = jnp.where(abs(w).max(axis=0) > 0, abs(w).max(axis=0) / 127.9, 1)
    return jnp.clip(jnp.round(w / scales), -128, 127).astype(jnp.int8), scales


def kept_as_floats(w):
    w_q, scales = quantise(w)
    return w_q.astype(jnp.float32), scales


def kept_dims(w):
    w_q, scales = quantise(w)
    return w_q, scales[None]


@pytest.mark.parametrize("right", [quantise, in_numpy])
def test_quantise_solution(right):
    accepted(ex09.check_quantise(right))


@pytest.mark.parametrize(
    "wrong, said",
    [
        (per_tensor, "is enough"),
        (per_row, "comes back as"),
        (zeros_forgotten, "must be positive"),
        (zero_scales, "must be positive"),
        (inverted, "comes back as"),
        (wrapped, "-128"),
        (with_minus_128, "-128"),
        (kept_as_floats, "must be int8"),
        (kept_dims, "one a column"),
        (lambda w: quantise(w, rounded=False), "Rounded to the nearest?"),
        (lambda w: quantise(w, measure=lambda w: w), "-128"),
        (lambda w: quantise(w, largest=64), "is enough"),
        (lambda w: quantise(w, largest=128), "-128"),
        (lambda w: quantise(w)[0], "must return a pair"),
        (lambda w: (None, None), "write its body"),
        (lambda w: 1 / 0, "raised ZeroDivisionError"),
    ],
)
def test_quantise_wrong(wrong, said):
    rejected(ex09.check_quantise(wrong), said)


def largest_m(k, n, peak, bandwidth, weight_bytes=1, row_bytes=2, flops=2):
    a_row = flops * k * n / peak - row_bytes * (k + n) / bandwidth
    return math.floor(weight_bytes * k * n / bandwidth / a_row) if a_row > 0 else math.inf


def solved_by_search(k, n, peak, bandwidth):
    memory_bound = lambda m: 2 * m * k * n / peak <= (k * n + 2 * m * (k + n)) / bandwidth
    if memory_bound(10**9):
        return float("inf")
    low, high = 0, 10**9
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if memory_bound(middle) else (low, middle)
    return low


@pytest.mark.parametrize("right", [largest_m, solved_by_search, lambda *case: float(largest_m(*case))])
def test_crossover_solution(right):
    accepted(ex09.check_crossover(right))


@pytest.mark.parametrize(
    "wrong, said",
    [
        (lambda *case: largest_m(*case, weight_bytes=2), "one byte"),
        (lambda *case: largest_m(*case, row_bytes=0), "cross memory too"),
        (lambda *case: largest_m(*case, row_bytes=1), "of the result is 2 bytes"),
        (lambda *case: largest_m(*case, flops=1), "2 operations"),
        (lambda *case: largest_m(*case) + 1, "round down"),
        (lambda *case: min(largest_m(*case), 10**9) + 0.5, "round down"),
        (lambda k, n, peak, bandwidth: 103, "solve for M"),
        (lambda k, n, peak, bandwidth: "many", "must be a number"),
        (lambda k, n, peak, bandwidth: k / 0, "raised ZeroDivisionError"),
    ],
)
def test_crossover_wrong(wrong, said):
    rejected(ex09.check_crossover(wrong), said)


def test_crossover_cases_lie_on_both_sides():
    found = [ex09._largest_m(*case) for case in ex09.CASES]
    assert math.inf in found and len(set(found)) == len(found)


# The choice of a format

TENSOR, ROW, E5M2 = ex09.FORMATS
RIGHT = dict(plain=TENSOR, rows=ROW, channels=E5M2)


def test_formats_solution():
    accepted(ex09.check_formats(RIGHT))


@pytest.mark.parametrize(
    "wrong, said",
    [
        (RIGHT | dict(plain=ROW), '"plain"'),
        (RIGHT | dict(plain=E5M2), "has less"),
        (RIGHT | dict(rows=TENSOR), '"rows"'),
        (RIGHT | dict(rows=E5M2), '"rows"'),
        (RIGHT | dict(channels=TENSOR), '"channels"'),
        (RIGHT | dict(channels=ROW), '"channels"'),
        (RIGHT | dict(channels="int8"), "is none of"),
        (RIGHT | dict(channels=None), "name a format"),
        (TENSOR, "answer with a dict"),
        (dict(plain=TENSOR), "answer with a dict"),
    ],
)
def test_formats_wrong(wrong, said):
    rejected(ex09.check_formats(wrong), said)


def test_formats_are_far_apart():
    """The right answers hang on no random seed, and are three different ones."""
    for seed in range(4):
        found = {name: ex09.best_format(ex09.format_errors(*pair)) for name, pair in ex09.operands(seed).items()}
        assert found == RIGHT
    for name, pair in ex09.operands().items():
        errors = ex09.format_errors(*pair)
        others = [errors[f] for f in ex09.FORMATS if f != RIGHT[name] and not (name == "plain" and f == ROW)]
        assert min(others) > 1.5 * errors[RIGHT[name]]


# Scales along K


def block_scaled(a, b, scale_a, scale_b, step_of=lambda step: step, use_a=True, use_b=True):
    tile = 128, 64

    def along(axis, vector):
        value = plgpu.load(vector, layout=plgpu.Layout.WGMMA.reduce(1 - axis), optimized=False)
        return lax.broadcast_in_dim(value, tile, [axis])

    def body(a_gmem, b_gmem, scale_a_gmem, scale_b_gmem, o_gmem, a_smem, b_smem, o_smem, filled):
        def scaled(step, total):
            ks = pl.ds(step * 128, 128)
            plgpu.copy_gmem_to_smem(a_gmem.at[:, ks], a_smem, filled)
            plgpu.copy_gmem_to_smem(b_gmem.at[:, ks], b_smem, filled)
            plgpu.barrier_wait(filled)

            def multiply(acc):
                plgpu.wgmma(acc, a_smem, b_smem.T)
                return acc[...]

            sums = pl.run_scoped(multiply, plgpu.ACC(tile, jnp.float32))
            if use_a:
                sums *= along(0, scale_a_gmem.at[step_of(step)])
            if use_b:
                sums *= along(1, scale_b_gmem.at[step_of(step)])
            return total + sums

        zeros = plgpu.layout_cast(jnp.zeros(tile, jnp.float32), plgpu.Layout.WGMMA)
        o_smem[...] = lax.fori_loop(0, a.shape[1] // 128, scaled, zeros).astype(o_smem.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(o_smem, o_gmem)
        plgpu.wait_smem_to_gmem(0)

    out_type = jax.ShapeDtypeStruct(tile, jnp.bfloat16)
    scratch = [plgpu.SMEM((128, 128), a.dtype), plgpu.SMEM((64, 128), b.dtype), plgpu.SMEM(tile, jnp.bfloat16)]
    scratch += [plgpu.Barrier(num_arrivals=2)]
    return plgpu.kernel(body, out_type=out_type, scratch_types=scratch)(a, b, scale_a, scale_b)


@pytest.mark.parametrize(
    "wrong, said",
    [
        (dict(use_a=False, use_b=False), "no scale was applied"),
        (dict(use_b=False), "the scales of a alone"),
        (dict(use_a=False), "the scales of b alone"),
        (dict(step_of=lambda step: 0), "the first step's scales"),
    ],
)
def test_block_scales_wrong(wrong, said):
    rejected(ex09.check_block_scales(lambda *args: block_scaled(*args, **wrong)), said)


# Dequantized weights


def dequantise(w_q, scales, axis=1, early=False, out_dtype=jnp.bfloat16):
    shape = 64, 128

    def body(w_gmem, scales_gmem, o_gmem):
        rows, columns = (pl.ds(lax.axis_index(name) * size, size) for name, size in zip("rc", shape, strict=True))
        values = plgpu.load(w_gmem.at[rows, columns], layout=plgpu.Layout.WGMMA, optimized=False)
        vector = scales_gmem.at[columns if axis == 1 else rows]
        scale = plgpu.load(vector, layout=plgpu.Layout.WGMMA.reduce(1 - axis), optimized=False)
        scale = lax.broadcast_in_dim(scale, shape, [axis])
        if early:
            scale = scale.astype(jnp.bfloat16)
        o_gmem[rows, columns] = (values.astype(scale.dtype) * scale).astype(out_dtype)

    grid = dict(grid=(w_q.shape[0] // 64, w_q.shape[1] // 128), grid_names=("r", "c"))
    return plgpu.kernel(body, out_type=jax.ShapeDtypeStruct(w_q.shape, out_dtype), **grid)(w_q, scales)


@pytest.mark.parametrize(
    "wrong, said",
    [
        (dict(axis=0), "it must be"),
        (dict(early=True), "rounded twice"),
        (dict(out_dtype=jnp.float32), "must be bfloat16"),
    ],
)
def test_dequantise_wrong(wrong, said):
    rejected(ex09.check_dequantise(lambda *args: dequantise(*args, **wrong)), said)


def test_dequantise_outside_of_a_kernel():
    rejected(ex09.check_dequantise(lambda w_q, scales: (w_q * scales).astype(jnp.bfloat16)), "must be a kernel")

"""The exercises of chapter 9: solutions are accepted; wrong answers and untouched skeletons are not."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_solutions as course
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tests.exercises.answers import NOTEBOOKS, accepted, rejected

sys.path.insert(0, str(NOTEBOOKS))

from exercises import ex09  # noqa: E402

STEM = "09_low_precision"


def exercise(name: str) -> course.course.Exercise:
    """The exercise of this name, with its skeleton and its solution."""
    return next(part for part in course.course.exercises(course.course.SOLUTIONS / f"{STEM}.py") if part.id == name)


# Quantized weights


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


def block_scaled(a, b, scale_a, scale_b, step_of=lambda step: step, use_a=True, use_b=True, rounded=False):
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
            if rounded:
                sums = sums.astype(jnp.bfloat16).astype(jnp.float32)
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
        (dict(rounded=True), "compare with the sum over steps"),
    ],
)
def test_block_scales_wrong(wrong, said):
    rejected(ex09.check_block_scales(lambda *args: block_scaled(*args, **wrong)), said)


# A result in fp8


@pytest.mark.parametrize(
    "right, wrong, said",
    [
        ("along(0, scale_a_gmem, tile) * ", "", "scale_a was not applied"),
        (" * along(1, scale_b_gmem, tile)", "", "scale_b was not applied"),
        ("values / scale_o_gmem[0]", "values", "was not divided by scale_o"),
        ("values / scale_o_gmem[0]", "values * scale_o_gmem[0]", "divide by scale_o"),
        ("jnp.clip(values / scale_o_gmem[0], -448.0, 448.0)", "values / scale_o_gmem[0]", "too large"),
        ("jnp.clip(values / scale_o_gmem[0], -448.0,", "jnp.minimum(values / scale_o_gmem[0],", "at -448"),
        ("values / scale_o_gmem[0], -448.0, 448.0)", "values, -448.0, 448.0) / scale_o_gmem[0]", "too large"),
        ("-448.0, 448.0", "-240.0, 240.0", "where e4m3 ends"),
        ("scale_o_gmem[0], -", "scale_o_gmem[0] + 1.0, -", "it must be"),
        ("write_tile(values, o_smem, o_gmem)", "pass", "was the result written?"),
        ("SMEM(tile, E4M3)", "SMEM(tile, E5M2)", "Not yet"),
    ],
)
def test_fp8_result_wrong(right, wrong, said):
    verdict = course.mistaken(STEM, "exercise-3", right, wrong)
    assert not verdict and said in repr(verdict), verdict


def test_fp8_result_without_any_scale():
    part = exercise("exercise-3")
    rejected(course.verdict(STEM, part, part.skeleton), "no scale was applied")


@pytest.mark.parametrize(
    "right, as_well",
    [
        ("jnp.clip(values / scale_o_gmem[0], -448.0, 448.0)",
         "jnp.maximum(jnp.minimum(values * (1 / scale_o_gmem[0]), 448.0), -448.0)"),
        ("along(0, scale_a_gmem, tile) * along(1, scale_b_gmem, tile)",
         "along(1, scale_b_gmem, tile)\n        values *= along(0, scale_a_gmem, tile)"),
    ],
)  # fmt: skip
def test_fp8_result_written_otherwise(right, as_well):
    accepted(course.mistaken(STEM, "exercise-3", right, as_well))


def test_fp8_result_outside_of_a_kernel():
    def outside(a, b, scale_a, scale_b, scale_o):
        sums = a.astype(jnp.float32) @ b.astype(jnp.float32).T
        return jnp.clip(sums * scale_a[:, None] * scale_b / scale_o, -448, 448).astype(a.dtype)

    rejected(ex09.check_fp8_result(outside), "must be a kernel")


# An adder of few bits


def cut_sum(terms, bits):
    """By integers, one term after the other."""
    _, exponent = np.frexp(max(abs(term) for term in terms))
    total = 0
    for term in terms:
        total += int(np.ldexp(term, int(bits - exponent)))  # Python's int cuts towards zero.
    return np.ldexp(float(total), int(exponent - bits))


def test_cut_sum_written_otherwise():
    accepted(ex09.check_cut_sum(cut_sum))


@pytest.mark.parametrize(
    "right, wrong, said",
    [
        ("np.trunc(terms / unit)", "np.floor(terms / unit)", "towards zero"),
        ("np.trunc(terms / unit)", "np.rint(terms / unit)", "not rounded"),
        ("np.trunc(terms / unit)", "(terms / unit)", "Nothing was cut off"),
        ("(np.trunc(terms / unit) * unit).sum()", "np.trunc(terms.sum() / unit) * unit", "before the addition"),
        ("top + 1 - bits", "top - bits", "One bit more"),
        ("top + 1 - bits", "top + 2 - bits", "One bit fewer"),
        ("np.floor(np.log2", "np.ceil(np.log2", "gives the last bit that fits"),
        ("np.abs(terms).max()", "terms.max()", "largest absolute value"),
        (" * unit).sum()", ").sum()", "gives the last bit that fits"),
        (".sum()", "", "must be a number"),
    ],
)
def test_cut_sum_wrong(right, wrong, said):
    rejected(course.mistaken(STEM, "exercise-4", right, wrong), said)


def test_cases_of_the_adder_tell_mistakes_apart():
    wrong = dict(cut=np.floor), dict(cut=np.rint), dict(first=True), dict(shift=1), dict(shift=-1), dict(size=np.max)
    sums = [tuple(ex09._cut_sum(*case, **keywords) for case in ex09.SUMS) for keywords in ({}, *wrong)]
    assert len(set(sums)) == len(sums)

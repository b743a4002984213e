"""The exercises of chapter 9b: right answers are accepted; each likely mistake is turned down with its reason."""

import math
import sys

import jax
import jax.numpy as jnp
import pytest
import test_solutions as course
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

import lab
from tests.exercises.answers import NOTEBOOKS, accepted, rejected

sys.path.insert(0, str(NOTEBOOKS))

from exercises import ex09b  # noqa: E402

STEM = "09b_int8_weights"


def exercise(name: str) -> course.course.Exercise:
    """The exercise of this name, with its skeleton and its solution."""
    return next(part for part in course.course.exercises(course.course.SOLUTIONS / f"{STEM}.py") if part.id == name)


# The crossover


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
    accepted(ex09b.check_crossover(right))


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
    rejected(ex09b.check_crossover(wrong), said)


def test_crossover_cases_lie_on_both_sides():
    found = [ex09b._largest_m(*case) for case in ex09b.CASES]
    assert math.inf in found and len(set(found)) == len(found)


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
    rejected(ex09b.check_dequantise(lambda *args: dequantise(*args, **wrong)), said)


def test_dequantise_outside_of_a_kernel():
    rejected(ex09b.check_dequantise(lambda w_q, scales: (w_q * scales).astype(jnp.bfloat16)), "must be a kernel")


# Float16 from a byte

BITS = "((bits & jnp.int16(0xFF)) ^ jnp.int16(0x80)) | jnp.int16(0x6400)"


@pytest.mark.parametrize(
    "right, wrong, said",
    [
        ("(bits & jnp.int16(0xFF))", "bits", "& 0xFF"),
        (" ^ jnp.int16(0x80)) |", ") |", "without a sign"),
        ("1024 + 128", "1024", "128 too large"),
        ("jnp.float16(1024 + 128)", "jnp.float16(0)", "1152 too large"),
        ("0x6400", "0x4300", "Which float has the bits"),
        (BITS, "bits | jnp.int16(0x6400)", "Not yet"),
        ("floats = lax.bitcast_convert_type(bits, jnp.float16) - jnp.float16(1024 + 128)",
         "floats = weights.astype(jnp.float16)", "by astype"),
        ("o_gmem[rows] = floats", "pass", "was the result written"),
    ],
)  # fmt: skip
def test_half_wrong(right, wrong, said):
    verdict = course.mistaken(STEM, "exercise-3", right, wrong)
    assert not verdict and said in repr(verdict), verdict


@pytest.mark.parametrize(
    "as_well",
    [
        "(bits & jnp.int16(0xFF)) ^ jnp.int16(0x6480)",  # One operation fewer.
        "((bits + jnp.int16(128)) & jnp.int16(0xFF)) + jnp.int16(0x6400)",
    ],
)
def test_half_written_otherwise(as_well):
    accepted(course.mistaken(STEM, "exercise-3", BITS, as_well))


def test_half_converted_outside_of_the_kernel():
    def outside(w_q):
        def copy(w_gmem, o_gmem):
            o_gmem[...] = w_gmem[...]

        return plgpu.kernel(copy, out_type=jax.ShapeDtypeStruct(w_q.shape, jnp.float16))(w_q.astype(jnp.float16))

    rejected(ex09b.check_half(outside), "by astype")


# Exchanged operands


def few_rows(a, w_t, scales):
    """Another right one: the conversion in the layout of the product, two barriers, the steps unrolled."""
    (m, k), n = a.shape, w_t.shape[0]

    def body(a_gmem, w_gmem, scales_gmem, o_gmem, a_smem, w_smem, wide_smem, o_smem, rows_in, weights_in):
        first = lax.axis_index("tile") * 64

        def multiply(acc):
            for step in range(k // 64):
                ks = pl.ds(64 * step, 64)
                plgpu.copy_gmem_to_smem(w_gmem.at[pl.ds(first, 64), ks], w_smem, weights_in)
                plgpu.copy_gmem_to_smem(a_gmem.at[:, ks], a_smem, rows_in)
                plgpu.barrier_wait(weights_in)
                weights = plgpu.load(w_smem, layout=plgpu.Layout.WGMMA, optimized=False)
                wide_smem[...] = weights.astype(a.dtype)
                plgpu.commit_smem()
                plgpu.barrier_wait(rows_in)
                plgpu.wgmma(acc, wide_smem, a_smem.T)
                plgpu.wgmma_wait(0)
            return acc[...]

        values = pl.run_scoped(multiply, plgpu.ACC((64, m), jnp.float32))
        layout = plgpu.Layout.WGMMA.reduce(1)
        scale = plgpu.load(scales_gmem.at[pl.ds(first, 64)], layout=layout, optimized=False)
        values = (values * lax.broadcast_in_dim(scale, values.shape, [0])).astype(a.dtype)
        o_smem.T[...] = plgpu.layout_cast(values, plgpu.Layout.WGMMA_TRANSPOSED)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(o_smem, o_gmem.at[:, pl.ds(first, 64)])
        plgpu.wait_smem_to_gmem(0)

    tiles = ((m, 64), a.dtype), ((64, 64), jnp.int8), ((64, 64), a.dtype), ((m, 64), a.dtype)
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((m, n), a.dtype),
        grid=(n // 64,),
        grid_names=("tile",),
        scratch_types=[*(plgpu.SMEM(*tile) for tile in tiles), plgpu.Barrier(), plgpu.Barrier()],
        compiler_params=lab.compiler_params(),
    )(a, w_t, scales)


def test_few_rows_written_otherwise():
    accepted(ex09b.check_few_rows(few_rows))


def test_few_rows_padded():
    """A tile of 64 rows of which most are nobody's: right results, and most of the product in vain."""

    def padded(a, w_t, scales):
        part = exercise("exercise-4")
        code = part.solution.replace("tile = 64, m", "tile = 64, 64").replace("SMEM((m, 64)", "SMEM((64, 64)")
        code = code.replace("a_gmem.at[:, ks], a_smem,", "a_gmem.at[:, ks], a_smem.at[pl.ds(0, m)],")
        code = code.replace("copy_smem_to_gmem(o_smem,", "copy_smem_to_gmem(o_smem.at[pl.ds(0, m)],")
        names = {}
        for cell in part.needs:
            exec(course.cells(STEM)[cell].source, names)
        exec(code[: code.index("ex09b.")], names)
        return names["few_rows"](a, w_t, scales)

    rejected(ex09b.check_few_rows(padded), "multiplied in vain")


@pytest.mark.parametrize(
    "right, wrong, said",
    [
        ("plgpu.wgmma(acc, wide_smem, a_smem.T)", "plgpu.wgmma(acc, a_smem, wide_smem.T)", "Not yet"),
        ("values *= along(0, scales_gmem.at[columns], tile)", "pass", "scales were not applied"),
        ("along(0, scales_gmem", "along(1, scales_gmem", "Not yet"),
        ("plgpu.barrier_wait(filled)", "pass", "Not yet"),
        ("o_gmem.at[:, columns])", "o_gmem.at[:, pl.ds(0, 64)])", "Not yet"),
    ],
)
def test_few_rows_wrong(right, wrong, said):
    verdict = course.mistaken(STEM, "exercise-4", right, wrong)
    assert not verdict and said in repr(verdict), verdict


def test_few_rows_as_they_were():
    part = exercise("exercise-4")
    rejected(course.verdict(STEM, part, part.skeleton), "has 64 rows or a multiple")

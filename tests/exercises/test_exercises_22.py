"""The exercises of chapter 22: right answers are accepted; each likely mistake is turned down with its reason."""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_solutions as course
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from cookbook import _device
from tests.exercises.answers import NOTEBOOKS, accepted, rejected

sys.path.insert(0, str(NOTEBOOKS))

from exercises import ex22, judge  # noqa: E402

STEM = "22_decode_step"


def forever(*args):
    while True:
        pass


CHECKS = (ex22.check_added_norm, ex22.check_turned, ex22.check_source_row, ex22.check_step)


@pytest.mark.parametrize("check", CHECKS)
def test_an_answer_that_never_ends_is_turned_down(monkeypatch, check):
    monkeypatch.setattr(judge, "SECONDS", 0.5)
    rejected(check(forever), "has not ended")


# A norm with its residual


def added_norm(x, residual, scale, *, dtypes=(jnp.bfloat16, jnp.float32)):
    """Another right one: other loads, the root by a division, the sum stored first."""

    layout = plgpu.Layout.WG_STRIDED((x.shape[1],), 4)

    def kernel(x_gmem, residual_gmem, scale_gmem, y_gmem, total_gmem):
        row = lax.axis_index("row")
        read = lambda ref: plgpu.load(ref, layout=layout, optimized=False).astype(jnp.float32)
        total = read(residual_gmem.at[row]) + read(x_gmem.at[row])
        total_gmem[row] = total.astype(total_gmem.dtype)
        root = jnp.sqrt(jnp.sum(total * total * (1 / total.size)) + 1e-6)
        y_gmem[row] = (total / root * read(scale_gmem)).astype(y_gmem.dtype)

    out_type = [jax.ShapeDtypeStruct(x.shape, dtype) for dtype in dtypes]
    return plgpu.kernel(kernel, out_type=out_type, grid=(len(x),), grid_names=("row",))(x, residual, scale)


def test_another_right_norm_is_accepted():
    accepted(ex22.check_added_norm(added_norm))


@pytest.mark.parametrize(
    "right, wrong, said",
    [
        ("total = x + load(residual_gmem.at[row])", "total = x", "the norm of x alone"),
        ("jnp.sum(total * total)", "jnp.sum(x * x)", "the squares must be those of the sum"),
        ("(total * inverse * scale)", "(total * inverse)", "not multiplied by scale"),
        (" * (1 / total.size)", "", "divide by the number of columns"),
        ("lax.rsqrt(jnp.sum(total * total) * (1 / total.size) + eps)", "1.0", "not divided by the root"),
        (" + eps)", ")", "eps belongs under the root"),
        ("+ eps)", "+ 1.0)", "the norm: element"),
        ("total_gmem[row] = total", "pass", "the sum was never stored"),
        ("total_gmem[row] = total", "total_gmem[row] = x", "total_gmem has x alone"),
        (
            "total_gmem[row] = total",
            "total_gmem[row] = total.astype(jnp.bfloat16).astype(jnp.float32)",
            "keep it in float32",
        ),
        ("total_gmem[row] = total", "total_gmem[row] = 2 * total", "the sum: element"),
        ("x + load(residual_gmem.at[row])", "x + load(residual_gmem)", "cannot be compiled for a GPU"),
        ("x + load(residual_gmem.at[row])", "x + load(residual_gmem.at[row + 1])", "beyond the end"),
    ],
)
def test_norm_wrong(right, wrong, said):
    rejected(course.mistaken(STEM, "exercise-1", right, wrong), said)


@pytest.mark.parametrize(
    "wrong, said",
    [
        (lambda x, residual, scale: added_norm(x + residual, jnp.zeros_like(x), scale), "outside of the kernel"),
        (lambda x, residual, scale: (added_norm(x, residual, scale)[0], x + residual), "outside of the kernel"),
        (lambda x, residual, scale: (x * scale, x + residual), "must be a kernel"),
        (lambda x, residual, scale: added_norm(x, residual, scale)[0], "two arrays"),
        (functools.partial(added_norm, dtypes=(jnp.float32, jnp.float32)), "the norm is bfloat16"),
        (functools.partial(added_norm, dtypes=(jnp.bfloat16, jnp.bfloat16)), "the sum float32"),
    ],
)
def test_norm_of_the_wrong_kind(wrong, said):
    rejected(ex22.check_added_norm(wrong), said)


# A rotation to mend


def turned(q, cos, sin, *, halves=lambda a, b, c, s: (a * c - b * s, b * c + a * s)):
    """Another right one: straight from registers to global memory, as the package's kernel stores."""
    half = q.shape[2] // 2

    def kernel(q_gmem, cos_gmem, sin_gmem, o_gmem):
        tokens, head = pl.ds(64 * lax.axis_index("block"), 64), lax.axis_index("head")
        read = lambda ref: plgpu.load(ref, layout=plgpu.Layout.WGMMA, optimized=False).astype(jnp.float32)
        parts = [pl.ds(part * half, half) for part in range(2)]
        a, b = (read(q_gmem.at[tokens, head, part]) for part in parts)
        for part, value in zip(parts, halves(a, b, read(cos_gmem.at[tokens]), read(sin_gmem.at[tokens])), strict=True):
            _device.store(o_gmem.at[tokens, head, part], value.astype(o_gmem.dtype))

    out_type = jax.ShapeDtypeStruct(q.shape, q.dtype)
    grid = dict(grid=(len(q) // 64, q.shape[1]), grid_names=("block", "head"))
    return plgpu.kernel(kernel, out_type=out_type, **grid)(q, cos, sin)


def test_another_right_rotation_is_accepted():
    accepted(ex22.check_turned(turned))


@pytest.mark.parametrize(
    "right, wrong, said",
    [
        ("a, b = a * c - b * s, b * c + a * s", "a = a * c - b * s; b = b * c + a * s", "turned already"),
        ("a, b = a * c - b * s, b * c + a * s", "a, b = a * c + b * s, b * c - a * s", "the wrong way"),
        ("a, b = a * c - b * s, b * c + a * s", "a, b = a * c + b * s, b * c + a * s", "that it must subtract"),
        ("a, b = a * c - b * s, b * c + a * s", "a, b = a * c - b * s, b * c - a * s", "that it must add"),
        ("a, b = a * c - b * s, b * c + a * s", "b, a = a * c - b * s, b * c + a * s", "each other's place"),
        ("a, b = a * c - b * s, b * c + a * s", "a, b = a * c - a * s, b * c + b * s", "meets itself"),
        ("a, b = a * c - b * s, b * c + a * s", "pass", "nothing is turned"),
        ("a, b = a * c - b * s, b * c + a * s", "a, b = a * c, b * c", "element"),
        ("read(sin_gmem.at[tokens])", "read(sin_gmem.at[pl.ds(0, 64)])", "heads of 64: element (64,"),
        ("plgpu.commit_smem()  #", "#", "commit what you have stored"),
        ("plgpu.wait_smem_to_gmem(0)", "pass", "wait for all of them"),
        ("for part in range(2):", "for part in range(1):", "were never written"),
        ("read(of_head.at[:, pl.ds(half, half)])", "read(of_head.at[:, pl.ds(half, 8)])", "cannot be compiled"),
    ],
)
def test_rotation_wrong(right, wrong, said):
    rejected(course.mistaken(STEM, "exercise-2", right, wrong), said)


def neighbours(q, cos, sin):
    """Pairs of neighbours, which XLA brings to halves and back."""
    half = q.shape[2] // 2
    apart = q.reshape(*q.shape[:2], half, 2).swapaxes(2, 3).reshape(q.shape)
    return turned(apart, cos, sin).reshape(*q.shape[:2], 2, half).swapaxes(2, 3).reshape(q.shape)


@pytest.mark.parametrize(
    "wrong, said",
    [
        (neighbours, "neighbouring values are paired"),
        (lambda q, cos, sin: turned(q, cos, -sin), "outside of the kernel"),
        (lambda q, cos, sin: turned(q, cos, sin) * 1, "outside of the kernel"),
        (lambda q, cos, sin: q * 2, "must be a kernel"),
        (lambda q, cos, sin: turned(q, cos, sin)[:, :1], "it must be that of q"),
        (lambda q, cos, sin: None, "must be a kernel"),
    ],
)
def test_rotation_of_the_wrong_kind(wrong, said):
    rejected(ex22.check_turned(wrong), said)


# Gate and up in one tile


def source_row(row, hidden, piece):
    """Another right one: the whole order at once."""
    rows = np.arange(2 * hidden).reshape(2, hidden // piece, piece)
    return rows.swapaxes(0, 1).ravel()[row]


def test_another_right_order_is_accepted():
    accepted(ex22.check_source_row(source_row))


@pytest.mark.parametrize("hidden, piece", ex22.TILES)
def test_a_tile_of_the_right_order_has_partners(hidden, piece):
    """SwiGLU of each tile, and nothing beyond it, is SwiGLU of the whole product."""
    rng = np.random.default_rng(0)
    x, weight = rng.standard_normal((3, 16)), rng.standard_normal((2 * hidden, 16))
    swiglu = lambda gate, up: gate / (1 + np.exp(-gate)) * up
    product = x @ weight[[ex22._source_row(row, hidden, piece) for row in range(2 * hidden)]].T
    tiles = product.reshape(3, -1, 2, piece)
    whole = swiglu(*np.split(x @ weight.T, 2, axis=1))
    np.testing.assert_allclose(swiglu(tiles[:, :, 0], tiles[:, :, 1]).reshape(3, hidden), whole)


def other_direction(row, hidden, piece):
    which, i = divmod(row, hidden)
    return i // piece * 2 * piece + which * piece + i % piece


@pytest.mark.parametrize(
    "wrong, said",
    [
        (lambda row, hidden, piece: row, "of the gate alone"),
        (lambda row, hidden, piece: row % 2 * hidden + row // 2, "take turns one by one"),
        (lambda row, hidden, piece: row // piece % 2 * hidden + row % piece, "the rows of the first"),
        (lambda row, hidden, piece: row // (2 * piece) * piece + row % piece, "those of up begin at `hidden`"),
        (lambda row, hidden, piece: (source_row(row, hidden, piece) + hidden) % (2 * hidden), "begins with the gate"),
        (
            lambda row, hidden, piece: row // piece % 2 * hidden + row // (2 * piece) * 2 * piece + row % piece,
            "only `piece` of each matrix",
        ),
        (other_direction, "the other direction"),
        (lambda row, hidden, piece: 0, "at which place of the tile"),
        (lambda row, hidden, piece: float(source_row(row, hidden, piece)), "a whole number"),
        (lambda row, hidden, piece: True, "a whole number"),
        (lambda row, hidden, piece: None, "write its body"),
        (lambda row, hidden, piece: row // 0, "raised ZeroDivisionError"),
    ],
)
def test_order_wrong(wrong, said):
    rejected(ex22.check_source_row(wrong), said)


# The time of a step


def step(weight_bytes, token_bytes, sequences, length, layers, launches, once, rate, us):
    """Another right one, in microseconds until the end."""
    read, written = length * token_bytes * sequences, token_bytes * sequences
    streamed = 1e6 * (weight_bytes + read + written) / rate
    return np.float64(streamed + us * (once + launches * layers)) / 1000


def test_another_right_time_is_accepted():
    accepted(ex22.check_step(step))


def changed(**of_case):
    """The right answer for a case in which some numbers are replaced."""
    names = "weight_bytes token_bytes sequences length layers launches once rate us".split()

    def answer(*case):
        case = dict(zip(names, case, strict=True))
        return step(**case | {name: of(case) for name, of in of_case.items()})

    return answer


def the_longer_alone(*case):
    bytes_alone, launches_alone = changed(us=lambda case: 0)(*case), changed(rate=lambda case: np.inf)(*case)
    return max(bytes_alone, launches_alone)


@pytest.mark.parametrize(
    "wrong, said",
    [
        (changed(length=lambda case: case["length"] - 1), "also writes"),
        (changed(sequences=lambda case: 1), "of its own"),
        (changed(length=lambda case: 0), "of all tokens so far"),
        (changed(token_bytes=lambda case: 0), "keys and values as well"),
        (changed(weight_bytes=lambda case: case["weight_bytes"] * case["sequences"]), "a step reads them once"),
        (changed(layers=lambda case: 1), "Each layer has that many"),
        (changed(once=lambda case: case["once"] * case["layers"]), "not in each layer"),
        (changed(once=lambda case: 0), "cost as much"),
        (changed(us=lambda case: 0), "That is the bound"),
        (the_longer_alone, "add them"),
        (lambda *case: step(*case) / 1e3, "in seconds"),
        (lambda *case: step(*case) * 1e3, "in microseconds"),
        (lambda *case: 1.1 * step(*case), "mind the units"),
        (lambda *case: "long", "must be a number"),
        (lambda *case: None, "write its body"),
        (lambda length: length, "raised TypeError"),
    ],
)
def test_time_wrong(wrong, said):
    rejected(ex22.check_step(wrong), said)

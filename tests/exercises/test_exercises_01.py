"""Chapter 1's exercises: right answers pass, and each likely mistake is turned down in our words."""

import functools
import pathlib
import sys

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

NOTEBOOKS = pathlib.Path(__file__).parents[2] / "notebooks"
sys.path.insert(0, str(NOTEBOOKS))

from exercises import ex01, judge  # noqa: E402

TILE = 1024


def turned_down(verdict, said: str):
    assert not verdict, verdict
    assert repr(verdict).startswith("Not yet: ") and said in verdict.text, verdict


# Lines of a warp


def lines(nbytes, stride, threads=32, line=128):
    return len({i * stride // line for i in range(threads)})


def test_lines_of_a_warp():
    assert ex01.check_lines_of_a_warp(lines)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda nbytes, stride: 32,  # One for each thread.
        lambda nbytes, stride: 32 * nbytes // 128,  # As if coalesced.
        lambda nbytes, stride: -(-32 * stride // 128),  # A thread too many.
        lambda nbytes, stride: (31 * stride + nbytes - 1) // 128 + 1,  # Lines in between, too.
        lambda nbytes, stride: lines(nbytes, stride, line=32),
        lambda nbytes, stride: lines(nbytes, stride, threads=128),
    ],
)
def test_wrong_lines_of_a_warp(wrong):
    turned_down(ex01.check_lines_of_a_warp(wrong), "lines, not")


def test_lines_that_never_end(monkeypatch):
    monkeypatch.setattr(judge, "SECONDS", 2)

    def loops(nbytes, stride):
        while True:
            pass

    turned_down(ex01.check_lines_of_a_warp(loops), "has not ended after 2 s")


# The gain of fusion


def test_gain_of_fusing():
    assert ex01.check_gain_of_fusing(lambda inputs, kernels: (inputs + 1 + 2 * (kernels - 1)) / (inputs + 1))


@pytest.mark.parametrize(
    "wrong",
    [
        lambda inputs, kernels: kernels,
        lambda inputs, kernels: (inputs + 1 + 2 * kernels) / (inputs + 1),  # Counts the first kernel twice.
        lambda inputs, kernels: (inputs + kernels) / (inputs + 1),  # Forgets that results are read back.
        lambda inputs, kernels: kernels * (inputs + 1) / (inputs + 1),
        lambda inputs, kernels: (inputs + 2 * (kernels - 1)) / inputs,  # Forgets the result.
        lambda inputs, kernels: 5 / 3,
    ],
)
def test_wrong_gain_of_fusing(wrong):
    turned_down(ex01.check_gain_of_fusing(wrong), "arrays cross HBM")


# SwiGLU


def swiglu(gate, up, vec=8, dtype=jnp.float32, compute=lambda gate, up: jax.nn.silu(gate) * up, out_dtype=None):
    layout = plgpu.Layout.WG_STRIDED((TILE,), vec)
    out_dtype = out_dtype or gate.dtype

    def body(gate_gmem, up_gmem, o_gmem):
        where = pl.ds(lax.axis_index("block") * TILE, TILE)
        gate, up = (plgpu.load(ref.at[where], layout=layout).astype(dtype) for ref in (gate_gmem, up_gmem))
        o_gmem[where] = compute(gate, up).astype(out_dtype)

    out_type = jax.ShapeDtypeStruct(gate.shape, out_dtype)
    return plgpu.kernel(body, out_type=out_type, grid=(gate.size // TILE,), grid_names=("block",))(gate, up)


def test_swiglu():
    verdict = ex01.check_swiglu(swiglu)
    assert verdict and "16 bytes a load" in verdict.text, verdict


@pytest.mark.parametrize(
    "wrong, said",
    [
        (dict(vec=4), "16 bytes a load"),
        (dict(vec=1), "16 bytes a load"),
        (dict(dtype=jnp.bfloat16), "compute in float32"),
        (dict(out_dtype=jnp.float32), "must be bfloat16"),
        (dict(compute=lambda gate, up: jax.nn.silu(up) * gate), "it must be"),
        (dict(compute=lambda gate, up: jax.nn.sigmoid(gate) * up), "it must be"),
        (dict(compute=lambda gate, up: jax.nn.gelu(gate) * up), "it must be"),
    ],
)
def test_wrong_swiglu(wrong, said):
    turned_down(ex01.check_swiglu(lambda gate, up: swiglu(gate, up, **wrong)), said)


def test_swiglu_that_is_no_kernel():
    turned_down(ex01.check_swiglu(lambda gate, up: jax.nn.silu(gate) * up), "must be a kernel")


def test_swiglu_in_two_kernels():
    silu, multiply = (functools.partial(swiglu, compute=f) for f in (lambda g, u: jax.nn.silu(g), lambda g, u: g * u))
    turned_down(ex01.check_swiglu(lambda gate, up: multiply(silu(gate, up), up)), "launches 2 kernels")


def test_swiglu_that_is_multiplied_outside():
    outside = lambda gate, up: swiglu(gate, up, compute=lambda gate, up: jax.nn.silu(gate)) * up
    turned_down(ex01.check_swiglu(outside), "mul is computed outside of the kernel")


# Any length


def relu(x, tail="one block", piece=128):
    """max(x, 0). `tail` says what happens to the elements after the last whole tile."""
    n, left = x.size, x.size % TILE
    blocks = {"none": n // TILE, "beyond": pl.cdiv(n, TILE), "shifted": pl.cdiv(n, TILE)}.get(tail, max(n // TILE, 1))

    def body(x_gmem, o_gmem):
        def apply(start, size):
            where = pl.ds(start, size)
            o_gmem[where] = jnp.maximum(x_gmem[where], 0)

        block = lax.axis_index("block")
        if tail == "shifted" and n >= TILE:
            apply(jnp.minimum(block * TILE, n - TILE), TILE)
        elif n >= TILE:
            apply(block * TILE, TILE)
        if left and tail in ("one block", "whole pieces", "beyond the end") or n < TILE:

            @pl.when(block == blocks - 1)
            def _():
                @pl.loop(0, left // piece if tail == "whole pieces" else pl.cdiv(left, piece))
                def _(i):
                    start = n - left + i * piece
                    apply(start if tail == "beyond the end" else jnp.minimum(start, n - piece), piece)

    grid = dict(grid=(max(blocks, 1),), grid_names=("block",))
    return plgpu.kernel(body, out_type=jax.ShapeDtypeStruct(x.shape, x.dtype), **grid)(x)


def test_relu_of_any_length():
    assert ex01.check_relu_of_any_length(relu)


@pytest.mark.parametrize(
    "tail, said",
    [
        ("none", "never written"),
        ("whole pieces", "never written"),
        ("beyond", "beyond the end"),
        ("beyond the end", "beyond the end"),
        ("shifted", "race: write"),
    ],
)
def test_wrong_relu_of_any_length(tail, said):
    turned_down(ex01.check_relu_of_any_length(lambda x: relu(x, tail)), said)


def test_relu_that_loses_nan():
    def chosen(x):
        def body(x_gmem, o_gmem):
            x_tile = x_gmem[...]
            o_gmem[...] = jnp.where(x_tile > 0, x_tile, jnp.zeros_like(x_tile))

        return plgpu.kernel(body, out_type=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)

    turned_down(ex01.check_relu_of_any_length(chosen), "is 0; it must be nan")


def test_relu_that_loses_a_sign():
    def absolute(x):
        def body(x_gmem, o_gmem):
            o_gmem[...] = jnp.abs(x_gmem[...])

        return plgpu.kernel(body, out_type=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)

    turned_down(ex01.check_relu_of_any_length(absolute), "it must be")

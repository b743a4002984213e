"""The exercises of chapter 19b: solutions are accepted; wrong answers and untouched skeletons are not."""

import functools
import math
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

import lab
from cookbook import blackwell
from cookbook.blackwell.core import Config
from tests.exercises.answers import NOTEBOOKS, accepted, rejected
from tests.exercises.test_solutions import mistaken

sys.path.insert(0, str(NOTEBOOKS))

from exercises import ex19b, judge  # noqa: E402

# Halves


def held(row, col, tile_n, half):
    cols = tile_n // 2
    return (
        slice(row + 128 * half, row + 128 * half + 128),
        slice(col + cols * half, col + cols * half + cols),
        slice(col, col + tile_n),
    )


@pytest.mark.parametrize("right", [held, lambda *case: list(held(*case))])
def test_held_solution(right):
    accepted(ex19b.check_held(right))


@pytest.mark.parametrize(
    "wrong, said",
    [
        (lambda row, col, n, half: held(row, col, n, 0), "128 rows of its own"),
        (lambda row, col, n, half: (held(row, col, n, half)[0], *[slice(col, col + n)] * 2), "half of the columns"),
        (lambda *case: (*held(*case)[:2], held(*case)[1]), "with both halves of B"),
        (lambda *case: held(*case)[:2], "must be three slices"),
        (lambda *case: 3, "must be three slices"),
        (lambda *case: 1 / 0, "raised ZeroDivisionError"),
    ],
)
def test_held_wrong(wrong, said):
    rejected(ex19b.check_held(wrong), said)


# Tiles in any order


def twice(x):
    """Differs from the solution: no warpgroup but one, one slot, and no number is counted at all."""

    def body(x_gmem, o_gmem, x_smem, filled):
        @plgpu.dynamic_scheduling_loop(("tile",))
        def _(info):
            rows = pl.ds(info.index[0] * 64, 64)
            plgpu.copy_gmem_to_smem(x_gmem.at[rows], x_smem, filled)
            plgpu.barrier_wait(filled)
            x_smem[...] = 2 * x_smem[...]
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(x_smem, o_gmem.at[rows])
            plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(x.shape[0] // 64,),
        grid_names=("tile",),
        scratch_types=[plgpu.SMEM((64, 64), x.dtype), plgpu.Barrier()],
    )(x)


def test_order_solution():
    accepted(ex19b.check_order(twice))


LOOP = """        loop = plgpu.dynamic_scheduling_loop(
            ("tile",), thread_axis="role", init_carry=jnp.int32(0)
        )
        turns = loop(one_tile)
"""
TURNS = "turns = loop(one_tile)"
ALONE = """        import types
        index = lax.axis_index("tile")
        turns = one_tile(types.SimpleNamespace(index=(index,), local_index=jnp.int32(0)), jnp.int32(0))
"""


@pytest.mark.parametrize(
    "right, wrong, said",
    [
        ("count = info.local_index", "count = info.index[0]", "A slot follows from how many tiles"),
        ("count = info.local_index", "count = info.local_index + 1", "never end"),
        ("slot = ring.fill(count)", "slot = ring.fill(info.index[0])", "A slot follows from how many tiles"),
        (TURNS, TURNS + "\n        turns = tiles", "At the end a block waits for the fills of its own tiles"),
        ("info.index[0] * 64", "info.local_index * 64", "Two blocks write"),
        ("2 * x_smem", "3 * x_smem", "twice x"),
        (LOOP, ALONE, "no launch is cancelled"),
        ("    )(x)", "    )(x + 0)", "outside of the kernel"),
        ("    def body(", "    while True: pass\n    def body(", "has not ended"),
    ],
)
def test_order_wrong(right, wrong, said, monkeypatch):
    if "while" in wrong:
        monkeypatch.setattr(judge, "SECONDS", 1)
    rejected(mistaken("19b_pairs", "exercise-order", right, wrong), said)


def test_order_by_xla():
    rejected(ex19b.check_order(lambda x: 2 * x), "no launch is cancelled")


# A scale


def exponent(block):
    fraction, power = np.frexp(np.abs(block).max())
    return power - 9 if fraction <= 0.875 else power - 8


def by_logarithm(block):
    return math.ceil(math.log2(float(np.abs(block).max()) / 448))


@pytest.mark.parametrize("right", [exponent, by_logarithm])
def test_exponent_solution(right):
    accepted(ex19b.check_exponent(right))


@pytest.mark.parametrize(
    "wrong, said",
    [
        (lambda block: math.floor(math.log2(np.abs(block).max())) - 8, "it saturates"),
        (lambda block: math.floor(math.log2(np.abs(block).max())) - 7, "half the scale would do"),
        (lambda block: math.ceil(math.log2(max(block.max(), 1e-9) / 448)), "it saturates"),
        (lambda block: math.log2(np.abs(block).max() / 448), "must be a whole number"),
        (lambda block: "small", "must be a whole number"),
        (lambda block: block[99], "raised IndexError"),
    ],
)
def test_exponent_wrong(wrong, said):
    rejected(ex19b.check_exponent(wrong), said)


def test_exponents_are_those_of_the_package():
    for values in ex19b.BLOCKS:
        block = jnp.zeros(32).at[: len(values)].set(jnp.asarray(values))
        _, scales = blackwell.quantize_mxfp8(block)
        assert float(scales[0]) == 2.0 ** ex19b._exponent(values)


# Quantize, in a kernel


def quantize(x):
    """Differs from the solution: one addition carries a mantissa above 1.75 into the exponent; 16 columns at a time."""
    rows, columns = x.shape

    def body(x_gmem, values_gmem, exponents_gmem, x_smem, values_smem, filled):
        plgpu.copy_gmem_to_smem(x_gmem, x_smem, filled)
        plgpu.barrier_wait(filled)
        for block in range(columns // 32):
            here = [pl.ds(32 * block + 16 * half, 16) for half in range(2)]
            parts = [plgpu.load(x_smem.at[:, at], layout=plgpu.Layout.WGMMA) for at in here]
            largest = jnp.maximum(*(jnp.max(jnp.abs(part), axis=1) for part in parts))
            bits = lax.bitcast_convert_type(largest, jnp.int32)
            exponent = ((bits + 0x1FFFFF) >> 23) - 135
            inverse = lax.bitcast_convert_type((127 - exponent) << 23, jnp.float32)
            for at, part in zip(here, parts, strict=True):
                scaled = part * lax.broadcast_in_dim(inverse, part.shape, (0,))
                values_smem[:, at] = scaled.astype(values_smem.dtype)
            exponents_gmem[block] = exponent
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(values_smem, values_gmem)
        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((rows, columns), jnp.float8_e4m3fn),
            jax.ShapeDtypeStruct((columns // 32, rows), jnp.int32),
        ),
        scratch_types=[
            plgpu.SMEM((rows, columns), x.dtype),
            plgpu.SMEM((rows, columns), jnp.float8_e4m3fn),
            plgpu.Barrier(),
        ],
    )(x)


def test_quantize_solution():
    accepted(ex19b.check_quantize(quantize))


def test_the_exercise_quantizes_as_the_package_does():
    x = jnp.asarray(ex19b._rows_to_quantize())
    values, exponents = judge.run_kernel(quantize, x)
    wanted, scales = blackwell.quantize_mxfp8(x)
    assert (np.asarray(values) == np.asarray(wanted)).all()
    assert (np.exp2(np.asarray(exponents, np.float32)).T == np.asarray(scales, np.float32)).all()


@pytest.mark.parametrize(
    "right, wrong, said",
    [
        ("jnp.where(mantissa > 0x600000, 7, 8)", "8", "it saturates"),
        ("jnp.where(mantissa > 0x600000, 7, 8)", "7", "half the scale would do"),
        ("mantissa > 0x600000", "mantissa >= 0x600000", "half the scale would do"),
        ("mantissa > 0x600000", "mantissa > 0x700000", "it saturates"),
        ("mantissa > 0x600000", "mantissa > 0", "half the scale would do"),
        ("(bits >> 23) - 127", "(bits >> 23)", "half the scale would do"),
        ("jnp.max(jnp.abs(part), axis=1)", "jnp.max(part, axis=1)", "the exponent is"),
        ("(127 - exponent)", "(127 + exponent)", "the values"),
        ("jnp.int32)\n            floor", "jnp.int32)\n            bits = jnp.zeros_like(bits)\n            floor",
         "cannot be compiled"),
        ("        plgpu.commit_smem()\n", "", "commit what you have stored"),
        ("    )(x)", "    )(x * 1)", "outside of the kernel"),
        ("    def body(", "    while True: pass\n    def body(", "has not ended"),
    ],
)  # fmt: skip
def test_quantize_wrong(right, wrong, said, monkeypatch):
    if "while" in wrong:
        monkeypatch.setattr(judge, "SECONDS", 1)
    rejected(mistaken("19b_pairs", "exercise-quantize", right, wrong), said)


def quantized_by_xla(x):
    values, scales = blackwell.quantize_mxfp8(x)
    return values, jnp.log2(scales.astype(jnp.float32)).astype(jnp.int32).T


def test_quantize_by_xla():
    rejected(ex19b.check_quantize(quantized_by_xla), "must be a kernel")


# Columns


def columns(tile_n, accumulators, scaled, *, least=32, most=512, power=True):
    total = tile_n * accumulators + (4 * (1 + -(-tile_n // 128)) if scaled else 0)
    total = max(least, 2 ** math.ceil(math.log2(total)) if power else total)
    return total if total <= most else None


@pytest.mark.parametrize("right", [columns, lambda *case: (found := columns(*case)) and np.int64(found)])
def test_columns_solution(right):
    accepted(ex19b.check_columns(right))


@pytest.mark.parametrize(
    "wrong, said",
    [
        (functools.partial(columns, power=False, least=0), "powers of two"),
        (functools.partial(columns, most=1024), "There are 512"),
        (lambda n, acc, scaled: columns(n, acc, False), "Scales take columns"),
        (functools.partial(columns, least=0), "Add up sums and scales"),
        (lambda *case: 512, "Add up sums and scales"),
        (lambda *case: "many", "must be a whole number"),
        (lambda n, acc, scaled: n / 0, "raised ZeroDivisionError"),
    ],
)
def test_columns_wrong(wrong, said):
    rejected(ex19b.check_columns(wrong), said)


@pytest.mark.parametrize("tile_n, accumulators", [(64, 1), (96, 2), (192, 2), (16, 1)])
def test_columns_are_those_that_are_allocated(tile_n, accumulators):
    from tests.blackwell.test_compiled import tmem_allocated

    config, aval = Config(tile_n=tile_n, num_accumulators=accumulators), jax.ShapeDtypeStruct((512, 256), jnp.bfloat16)
    fn = functools.partial(blackwell.matmul, config=config, transpose_b=True)
    plain = lab.compile_for("b200", fn, aval, aval)
    mx = [jax.ShapeDtypeStruct((512, 256), jnp.float8_e4m3fn), jax.ShapeDtypeStruct((512, 8), jnp.float8_e8m0fnu)]
    scaled = lab.compile_for("b200", functools.partial(blackwell.matmul_mxfp8, config=config), *mx, *mx)
    for compiled, is_scaled in ((plain, False), (scaled, True)):
        assert tmem_allocated(compiled.ptx) == ex19b._columns(tile_n, accumulators, is_scaled)

"""The exercises of chapter 6: solutions are accepted; wrong answers and untouched skeletons are not."""

import functools
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

import lab
from cookbook.gemm.rungs.matmul_pipelined import Config, matmul_pipelined
from tests.exercises.answers import NOTEBOOKS, accepted, rejected
from tests.exercises.test_solutions import changed, course, mistaken, verdict

sys.path.insert(0, str(NOTEBOOKS))

from exercises import ex06, judge  # noqa: E402

# Exercise 2


def stages_for(tile_m, tile_n, tile_k, blocks):
    budget = 233_472 // blocks - 1_024
    stages = max(budget, 0) // (2 * (tile_m + tile_n) * tile_k + 8)
    return stages if 2 * tile_m * tile_n + 8 * stages <= budget else 0


def without_b(tile_m, tile_n, tile_k, blocks):
    return (233_472 // blocks - 1_024) // (2 * tile_m * tile_k + 8)


def without_blocks(tile_m, tile_n, tile_k, blocks):
    return stages_for(tile_m, tile_n, tile_k, 1)


def without_reserve(tile_m, tile_n, tile_k, blocks):
    stages = 233_472 // blocks // (2 * (tile_m + tile_n) * tile_k + 8)
    return stages if 2 * tile_m * tile_n + 8 * stages <= 233_472 // blocks else 0


def without_barrier(tile_m, tile_n, tile_k, blocks):
    stages = (233_472 // blocks - 1_024) // (2 * (tile_m + tile_n) * tile_k)
    return stages if 2 * tile_m * tile_n <= 233_472 // blocks - 1_024 else 0


def without_output(tile_m, tile_n, tile_k, blocks):
    return (233_472 // blocks - 1_024) // (2 * (tile_m + tile_n) * tile_k + 8)


def float_stages(tile_m, tile_n, tile_k, blocks):
    return (233_472 / blocks - 1_024) / (2 * (tile_m + tile_n) * tile_k + 8)


def raises(*args):
    raise KeyError("tile")


@pytest.mark.parametrize(
    "wrong, said",
    [
        (without_b, "a tile of A and a tile of B"),
        (without_blocks, "shared by all its blocks"),
        (without_reserve, "reserves 1 KB"),
        (without_barrier, "barrier of 8 bytes"),
        (without_output, "tile of the output"),
        (float_stages, "is an int"),
        (raises, "raised KeyError"),
        (lambda *case: 3, "Count the bytes"),
    ],
)
def test_stages_wrong(wrong, said):
    rejected(ex06.check_stages(wrong), said)


@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("tile", [(128, 128), (128, 192)])
def test_stages_prices_as_the_compiler_does(tile, stages):
    """The exercise's arithmetic is that of the real kernel, barriers and output tile included."""
    config = Config(tile_m=tile[0], tile_n=tile[1], num_stages=stages, delay_release=0)
    aval = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16)
    try:
        compiled = lab.compile_for("h200", functools.partial(matmul_pipelined, config=config), aval, aval)
    except lab.ToolchainMissing as error:
        pytest.skip(str(error))
    ring = stages * ex06.ITEMSIZE * sum(tile) * 64
    assert compiled.smem_bytes == max(ring, ex06.ITEMSIZE * tile[0] * tile[1]) + ex06.BARRIER * stages


# Exercise 1


@pytest.mark.parametrize(
    "wrong, said",
    [
        (("A", 10), "A is right"),
        (("B", 9), "B is right"),
        (("D", 8), "D is right"),
        (("C", 10), "C it is"),
        (("C", 8), "C it is"),
        (("C", "9"), "C it is"),
        (("E", 9), "no configuration"),
        ("C", "a pair"),
        (("C", None), "a pair"),
    ],
)
def test_wrong_release_wrong(wrong, said):
    rejected(ex06.check_wrong_release(wrong), said)


def test_wrong_release_has_one_answer():
    assert [name for name, (_, delay, wait) in ex06.CONFIGURATIONS.items() if wait > delay] == ["C"]


# Exercises 3 and 4, kernels: the solutions with one mistake.


@pytest.mark.parametrize(
    "right, wrong, said",
    [
        ("wgmma(acc_up, a_smem, up_smem)", "wgmma(acc_up, a_smem, gate_smem)", "`gate` stands in both"),
        ("(a_gmem, gate_gmem, up_gmem)\n", "(a_gmem, up_gmem, gate_gmem)\n", "silu belongs to the product with `gate`"),
        ("jax.nn.silu(acc_gate[...])", "acc_gate[...]", "without silu"),
        ("jax.nn.silu(acc_gate[...]) * acc_up[...]", "acc_gate[...] + acc_up[...]", "one accumulator"),
        ("[a_spec, b_spec, b_spec]", "[a_spec, b_spec]", "cannot be compiled"),
        ("plgpu.wgmma_wait(0)", "plgpu.wgmma_wait(1)", "may still read the slot"),
    ],
)
def test_gated_wrong(right, wrong, said):
    rejected(mistaken("06_pipelining", "exercise-gated", right, wrong), said)


A_SPEC, B_SPEC = "(mi, ki))", "(ki, ni))"
WAIT = "plgpu.wgmma_wait(0)"


def delayed(running: int):
    """Changes of the solution: a slot is refilled a step later, and so many products still run."""
    late = [(spec, f"{spec[:-1]}, delay_release=1)") for spec in (A_SPEC, B_SPEC)]
    return [*late, (WAIT, f"plgpu.wgmma_wait({running})")]


def test_gated_with_a_queued_product():
    """Each step has two products, so two may run while the slot of the step before is refilled, and three may not."""
    accepted(changed("06_pipelining", "exercise-gated", *delayed(2)))
    rejected(changed("06_pipelining", "exercise-gated", *delayed(3)), "may still read the slot")


def product(a, b):
    def body(a_gmem, b_gmem, o_gmem, a_smem, b_smem, loaded):
        def multiply(acc):
            @pl.loop(0, a.shape[1] // 64)
            def _(step):
                ks = pl.ds(step * 64, 64)
                plgpu.copy_gmem_to_smem(a_gmem.at[:, ks], a_smem, loaded)
                plgpu.copy_gmem_to_smem(b_gmem.at[ks], b_smem, loaded)
                plgpu.barrier_wait(loaded)
                plgpu.wgmma(acc, a_smem, b_smem)
                plgpu.wgmma_wait(0)

            return acc[...]

        o_gmem[...] = pl.run_scoped(multiply, plgpu.ACC((a.shape[0], b.shape[1]))).astype(a.dtype)

    tiles = plgpu.SMEM((a.shape[0], 64), a.dtype), plgpu.SMEM((64, b.shape[1]), b.dtype)
    out_type = jax.ShapeDtypeStruct((a.shape[0], b.shape[1]), a.dtype)
    return plgpu.kernel(body, out_type=out_type, scratch_types=[*tiles, plgpu.Barrier(num_arrivals=2)])(a, b)


def silu_and_multiply(x, y):
    def body(x_gmem, y_gmem, o_gmem):
        o_gmem[...] = (jax.nn.silu(x_gmem[...].astype(jnp.float32)) * y_gmem[...]).astype(o_gmem.dtype)

    return plgpu.kernel(body, out_type=jax.ShapeDtypeStruct(x.shape, x.dtype))(x, y)


def test_gated_by_three_kernels():
    answer = lambda a, gate, up: silu_and_multiply(product(a, gate), product(a, up))
    rejected(ex06.check_gated(answer), "launches 3 kernels, and 1 is asked for")


def test_gated_that_loads_a_twice():
    """One pipeline for each product."""
    two = """
            for acc, b_gmem in ((acc_gate, gate_gmem), (acc_up, up_gmem)):
                def step(_, a_smem, b_smem, acc=acc):
                    plgpu.wgmma(acc, a_smem, b_smem)
                    plgpu.wgmma_wait(0)

                plgpu.emit_pipeline(
                    step, grid=(steps,), in_specs=[a_spec, b_spec], max_concurrent_steps=3
                )(a_gmem, b_gmem)
"""
    one = """
            plgpu.emit_pipeline(
                step, grid=(steps,), in_specs=in_specs, max_concurrent_steps=3
            )(*operands)
"""
    rejected(changed("06_pipelining", "exercise-gated", (one, two)), "A is loaded once for each of the two")


def test_transposed_a_that_refills_too_early():
    rejected(
        changed("06_pipelining", "exercise-3", ("delay_release=1", "delay_release=0")),
        "may still read the slot: wait for it first. wgmma_wait(n) leaves the last n products running",
    )


def test_transposed_a_by_a_copy():
    """The skeleton, which multiplies a as it lies, of an a that XLA transposes."""
    skeleton = next(
        found for found in course.exercises(course.SOLUTIONS / "06_pipelining.py") if found.id == "exercise-3"
    )
    source = skeleton.skeleton.replace(
        "    tile_m, tile_n, tile_k = tile\n", "    tile_m, tile_n, tile_k = tile\n    a = a.T\n"
    )
    source = source.replace("pl.cdiv(a.shape[0]", "pl.cdiv(a.shape[1]").replace(
        "(a.shape[1], b.shape[1])", "(a.shape[0], b.shape[1])"
    )
    rejected(verdict("06_pipelining", skeleton, source), "transpose is computed outside of the kernel")


@pytest.mark.parametrize(
    "right, wrong, said",
    [
        ("(tile_k, tile_m), lambda ki: (ki, mi)", "(tile_k, tile_m), lambda ki: (mi, ki)", "a of 128 x 128"),
        ("lambda ki: (ki, mi)", "lambda ki: (ki * tile_k, mi * tile_m)", "a of 128 x 128"),
        ("wgmma(acc, a_smem.T, b_smem)", "wgmma(acc, a_smem, b_smem)", "cannot be compiled"),
        ("return launch(body, (a.shape[1], b.shape[1]), tile)(a, b)", "return jnp.matmul(a.T, b)", "must be a kernel"),
        ("tile)(a, b)", "tile)(a.T.T * 1, b)", "outside of the kernel"),
        ("def body(", "while True:\n        steps += 1\n\n    def body(", "has not ended"),
    ],
)
def test_transposed_a_wrong(right, wrong, said, monkeypatch):
    if "while True" in wrong:
        monkeypatch.setattr(judge, "SECONDS", 1)
    rejected(mistaken("06_pipelining", "exercise-3", right, wrong), said)

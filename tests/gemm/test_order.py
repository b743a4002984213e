"""When slots are given back, read off the traced kernels: WGMMA is asynchronous, which the interpreter does not model.

`exercises.order` plays a kernel as a GPU may that ends all work as late as it can.
"""

import functools
import importlib
import inspect
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import cookbook
from cookbook import _host
from cookbook.gemm import kernel, operand, plan
from cookbook.gemm.grouped.tables import Table
from cookbook.gemm.plan import Config

sys.path.insert(0, str(Path(__file__).parents[2] / "notebooks"))

from exercises import order  # noqa: E402

GPU = _host.Target("h200", num_sms=2)  # So that a block has several tiles.
SIZES, ORDER = jnp.array([70, 0, 133, 60]), jnp.array([2, 0, 3, 1])  # The groups' rows; the largest group first.
SWIZZLED = operand.swizzled


@pytest.fixture(autouse=True)
def one_view_and_a_table_of_numbers(monkeypatch):
    """As for the interpreter, a tile has one description; and tiles are looked up in numbers that the play follows."""
    for module in (operand, plan):
        monkeypatch.setattr(module, "swizzled", lambda *args: SWIZZLED(*args[:-1], True))
    for module in (operand, kernel):
        monkeypatch.setattr(module, "views", lambda smem, *_: (smem, smem))
    ends = jnp.cumsum(SIZES)
    table = Table(None, ORDER, (ends - SIZES)[ORDER], ends[ORDER])
    monkeypatch.setattr(inspect.getmodule(cookbook.ragged_dot_transposed), "sum_table", lambda *_: table)
    jax.clear_caches()
    yield
    jax.clear_caches()


def aval(dtype, *shape):
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def played(fn, *avals):
    """The blocks of the kernels that `fn` launches."""
    with _host.building_for(GPU):
        kernels = order.play(jax.jit(lambda *args: fn(*args)).trace(*avals).jaxpr, avals)
    return [block for kernel in kernels for block in kernel]


def matmul(**how):
    operands = aval("bfloat16", 400, 264), aval("bfloat16", 264, 256)
    return functools.partial(cookbook.matmul, config=Config(128, 128, num_stages=2, **how)), operands


def glu():
    operands = aval("bfloat16", 400, 264), *[aval("bfloat16", 264, 256)] * 2
    return functools.partial(cookbook.glu, config=Config(128, 64, num_stages=2)), operands


def rung(op, **how):
    return functools.partial(op, config=op.Config(64, 64, num_stages=2, **how)), matmul()[1]


def fp8():
    operands = aval("float8_e4m3fn", 400, 528), aval("float8_e4m3fn", 256, 528)
    return functools.partial(cookbook.matmul_fp8, transpose_b=True, config=Config(128, 128, num_stages=2)), operands


def int8(**how):
    operands = aval("bfloat16", 136, 656), aval("int8", 272, 656), aval("float32", 272)
    config = cookbook.matmul_int8_weights.Config(tile_n=64, num_stages=2, **how)
    return functools.partial(cookbook.matmul_int8_weights, transpose_w=True, config=config), operands


def four_bits(op, dtype, groups, **how):
    operands = aval("bfloat16", 136, 656), aval("uint32", 5, 11, 512), aval(dtype, groups, 272)
    return functools.partial(op, config=op.Config(tile_n=64, num_stages=2, **how)), operands


def ragged(config=Config(128, 64, num_stages=2), **how):  # noqa: B008
    operands = aval("bfloat16", 300, 264), aval("bfloat16", 4, 264, 256), SIZES
    return functools.partial(cookbook.ragged_dot, config=config, **how), operands


def sums():
    operands = aval("bfloat16", 304, 136), aval("bfloat16", 304, 128), SIZES
    return functools.partial(cookbook.ragged_dot_transposed, config=Config(128, 64, num_stages=2)), operands


def ragged_fp8():
    matrices, scales = aval("float8_e4m3fn", 4, 256, 528), aval("float32", 4, 2, 5)
    operands = aval("float8_e4m3fn", 300, 528), matrices, aval("float32", 300, 5), scales, SIZES
    return functools.partial(
        cookbook.ragged_dot_fp8, transpose_rhs=True, config=Config(128, 64, num_stages=2)
    ), operands


def ragged_int8():
    operands = aval("bfloat16", 300, 656), aval("int8", 4, 256, 656), aval("float32", 4, 256), SIZES
    config = cookbook.ragged_dot_int8_weights.Config(tile_n=64, num_stages=2)
    return functools.partial(cookbook.ragged_dot_int8_weights, transpose_rhs=True, config=config), operands


# Each kernel, and the module that waits for its products.
KERNELS = {
    "matmul": (matmul, "kernel"),
    "one slot for stores": (functools.partial(matmul, store_slots=1), "kernel"),
    "swapped": (functools.partial(matmul, swapped=True), "kernel"),
    "parts of another kernel": (functools.partial(matmul, split_k=2, second_kernel=True), "kernel"),
    "matmul_fp8": (fp8, "kernel"),
    "matmul_wgmma": (functools.partial(rung, cookbook.matmul_wgmma), "rungs.matmul_wgmma"),
    "matmul_pipelined": (functools.partial(rung, cookbook.matmul_pipelined), "rungs.matmul_pipelined"),
    "matmul_int8_weights": (int8, "dense.kernel_int8_weights"),
    "overlapped int8 weights": (functools.partial(int8, overlap=True), "dense.kernel_int8_weights"),
    "matmul_int4_weights": (
        functools.partial(four_bits, cookbook.matmul_int4_weights, "bfloat16", 6),
        "dense.kernel_int8_weights",
    ),
    "overlapped MXFP4 weights": (
        functools.partial(four_bits, cookbook.matmul_mxfp4_weights, "uint16", 11, overlap=True),
        "dense.kernel_int8_weights",
    ),
    "ragged_dot": (ragged, "kernel"),
    "glu": (glu, "gated.kernel"),
    "swiglu": (functools.partial(ragged, activation="swiglu"), "gated.kernel"),
    "ragged_dot_transposed": (sums, "grouped.kernel_transposed"),
    "ragged_dot_fp8": (ragged_fp8, "grouped.kernel_fp8"),
    "ragged_dot_int8_weights": (ragged_int8, "dense.kernel_int8_weights"),
}


@pytest.mark.parametrize("name", KERNELS)
def test_no_slot_is_given_back_under_a_product(name):
    fn, operands = KERNELS[name][0]()
    for block in played(fn, *operands):
        assert block.fault is None and block.is_whole and block.count("product") > 4


@pytest.mark.parametrize("name", KERNELS)
def test_mutants_that_wait_for_one_product_less_are_caught(mutant, name):
    make, module = KERNELS[name]
    module = importlib.import_module(f"cookbook.gemm.{module}")
    wait, load = module.plgpu.wgmma_wait, module.plgpu.wgmma_accumulator_load
    changes = dict(
        wgmma_wait=lambda n: wait(n + 1), wgmma_accumulator_load=lambda acc, wait_n: load(acc, wait_n=wait_n + 1)
    )
    mutant(module, "plgpu", **changes)
    fn, operands = make()
    assert any("WGMMA" in str(block.fault) for block in played(fn, *operands))


@pytest.mark.parametrize("forgotten", ["commit_smem", "wait_smem_to_gmem"])
def test_mutants_of_the_stores_are_caught(mutant, forgotten):
    """A piece stored before it is committed; a slot written again while TMA sends it."""
    mutant(kernel, "plgpu", **{forgotten: lambda *_, **__: None})
    fn, operands = matmul(store_slots=1)
    assert all(block.fault for block in played(fn, *operands))

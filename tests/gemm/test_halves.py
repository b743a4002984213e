"""Products of few rows with e2m1 weights in FP8: the order of K, every shape of a tile, roundings, errors, mutants."""

import dataclasses
import functools
import inspect

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import cookbook
import lab
from cookbook import _host
from cookbook.gemm.dense import halves, pack
from cookbook.gemm.dense.four_bits import E2M1
from cookbook.gemm.dense.split_rows import split_rows_reference
from tests.arrays import array
from tests.gemm.test_four_bits import (
    BF16,
    E2M1_VALUES,
    F16,
    F32,
    Config,
    check_mxfp4,
    checkpoint,
    mxfp4,
    ragged_mxfp4,
    rows_of_groups,
)

FEW = Config(128, 16, tile_k=128, fp8=True)


def sums_of_an_instruction(word, part: int):
    """(64, 32) weights that the four registers of each thread of an FP8 product hold, as PTX says where they belong."""
    first, last = (np.asarray(x).reshape(4, 8, 4, 4) for x in E2M1.fours(jnp.asarray(word)))
    out = np.zeros((64, 32))
    for warp, row, lane in np.ndindex(4, 8, 4):
        registers = halves.registers_of(first[warp, row, lane], last[warp, row, lane], part)
        for i, register in enumerate(registers):
            number = np.uint32([register]).view(np.uint8).view(ml_dtypes.float8_e4m3fn).astype(float)
            at = 16 * (i // 2) + 4 * lane
            out[16 * warp + row + 8 * (i % 2), at : at + 4] = number * 64
    return out


def test_registers_have_k_in_the_order_of_split_rows():
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 16, size=(64, 64))
    blocks = array((codes[:, 0::2] | codes[:, 1::2] << 4).reshape(64, 2, 16), jnp.uint8)
    words, _ = cookbook.pack_mxfp4(blocks, jnp.full((64, 2), 127, jnp.uint8))
    # A number that says which value of K it is; all are exact in high halves.
    x = np.float32([[k % 8 + 1 for k in range(64)], [k // 8 + 1 for k in range(64)]])
    split = split_rows_reference(array(x, BF16))
    high = np.asarray(split.halves, np.float32)[:, :64] * np.asarray(split.scales)[0, :2, None]
    order = high[0] - 1 + 8 * (high[1] - 1)
    for part in range(2):
        here = order[32 * part : 32 * part + 32].astype(int)
        assert sorted(here) == list(range(32 * part, 32 * part + 32))
        np.testing.assert_array_equal(sums_of_an_instruction(words[0, 0], part), E2M1_VALUES[codes[:, here]])


@pytest.mark.parametrize(
    "m, n, k, config",
    [
        (21, 77, 200, FEW),
        (3, 80, 544, dataclasses.replace(FEW, num_stages=2)),
        (9, 264, 544, Config(256, 8, tile_k=256, warpgroups=4, split_k=2, fp8=True)),
        (70, 136, 96, Config(128, 48, tile_k=128, split_k=2, second_kernel=True, fp8=True)),
        (20, 520, 160, dataclasses.replace(FEW, cluster_m=2, cluster_n=2)),
    ],
)
def test_products(m, n, k, config):
    """Rows, columns and K end within a tile, a warpgroup, a block of weights, a step; parts of K, added either way."""
    check_mxfp4(m, n, k // 32 * 32, config=config)


@pytest.mark.parametrize("k", [8, 200, 224])
def test_weights_beyond_k_count_for_nothing(k):
    """They were packed for a longer K, and rows of x end in the middle of a block of them."""
    w, scales = cookbook.pack_mxfp4(*checkpoint(np.random.default_rng(k), 80, -(-k // 64) * 64))
    x = array(np.random.default_rng(0).normal(size=(5, k)), BF16)
    fn = functools.partial(cookbook.matmul_mxfp4_weights, config=FEW)
    lab.check(fn, mxfp4.matmul_mxfp4_weights_reference, x, w, scales, gpu=None)


def test_rows_of_tiny_values():
    w, scales = cookbook.pack_mxfp4(*checkpoint(np.random.default_rng(2), 80, 160))
    x = array(np.random.default_rng(0).normal(size=(5, 160)) * 2.0 ** np.array([[-60], [0], [-40], [40], [-90]]), BF16)
    out = lab.run(functools.partial(cookbook.matmul_mxfp4_weights, config=FEW), x, w, scales)
    wanted = mxfp4.matmul_mxfp4_weights_reference(x, w, scales)
    error = np.abs(np.float64(out) - np.float64(wanted)).max(1) / np.abs(np.float64(wanted)).max(1)
    assert (error < 4e-3).all()


def test_float32_results_lose_no_more_than_14_bits():
    """Tensor cores alone round: on an H200 the error was 4.4e-5, and 9.8e-5 with the high halves first."""
    w, scales = cookbook.pack_mxfp4(*checkpoint(np.random.default_rng(3), 80, 512))
    x = array(np.random.default_rng(0).normal(size=(16, 512)), BF16)
    out = lab.run(functools.partial(cookbook.matmul_mxfp4_weights, config=FEW, out_dtype=F32), x, w, scales)
    exact = np.asarray(x, np.float64) @ np.asarray(mxfp4.widened(w, scales, F32), np.float64)
    assert np.linalg.norm(np.float64(out) - exact) < 7e-5 * np.linalg.norm(exact)


def test_groups_in_fp8_by_default():
    n = 136
    w, scales = cookbook.pack_mxfp4(*checkpoint(np.random.default_rng(4), n, 160, lead=(4,)))
    x, sizes = rows_of_groups(160)
    assert ragged_mxfp4.default_config(len(x), n, 160, 4).fp8
    fn = cookbook.ragged_dot_mxfp4_weights
    lab.check(fn, ragged_mxfp4.ragged_dot_mxfp4_weights_reference, x, w, scales, sizes)


@pytest.mark.parametrize(
    "m, out_dtype, expected", [(16, None, True), (16, F16, False), (16, F32, False), (4096, None, False)]
)
def test_only_bfloat16_results_of_few_rows_are_in_fp8(m, out_dtype, expected):
    avals = (m, 128), BF16, pack.shape_of(192, 128), jnp.uint32, (2, 192), jnp.uint16
    avals = [jax.ShapeDtypeStruct(*x) for x in zip(avals[::2], avals[1::2], strict=True)]
    with _host.building_for(_host.Target("h200", 132)):
        program = jax.make_jaxpr(functools.partial(cookbook.matmul_mxfp4_weights, out_dtype=out_dtype))(*avals)
    assert ("f8_e4m3fn" in str(program)) == expected


@pytest.mark.parametrize("rows", [8, 16, 24, 32, 48])
def test_every_tile_compiles_without_spills(rows):
    """One product of two starts anew, and the other adds to it; no weight is scaled before."""
    n, k = 5760, 2880
    config = Config(256, rows, tile_k=128, warpgroups=4, fp8=True)
    words, scales = ((8, *pack.shape_of(n, k)), jnp.uint32), ((8, k // 64, n), jnp.uint16)
    avals = ((8 * rows, k), BF16), words, scales, ((8,), jnp.int32)
    fn = functools.partial(cookbook.ragged_dot_mxfp4_weights, config=config)
    kernel = lab.compile_for("h200", fn, *(jax.ShapeDtypeStruct(*x) for x in avals)).kernels[-1]
    starts = kernel.sass.count("RZ, !UPT"), kernel.sass.count(f"QGMMA.64x{rows}x32.F32.E4M3.E4M3")
    assert starts[1] == 2 * starts[0] == 16 and "HMUL2" not in kernel.sass
    assert not kernel.remarks
    assert kernel.spill_bytes <= (8 if rows == 48 else 0)  # Two registers, stored before the loop and read after it.


def test_what_is_not_finite_stays_in_its_row_and_column():
    rng = np.random.default_rng(1)
    blocks, scales = checkpoint(rng, 80, 160)
    w, scales = cookbook.pack_mxfp4(blocks, scales.at[11, 3].set(255))
    x = array(rng.normal(size=(10, 160)), BF16).at[3, 5].set(jnp.nan).at[7, 135].set(jnp.inf)
    out = np.asarray(lab.run(functools.partial(cookbook.matmul_mxfp4_weights, config=FEW), x, w, scales), np.float32)
    row, column = np.ogrid[:10, :80]
    np.testing.assert_array_equal(~np.isfinite(out), (row == 3) | (row == 7) | (column == 11))


@pytest.mark.parametrize(
    "fn, message",
    [
        (lambda: Config(256, 16, tile_k=128, fp8=True), "64 columns a warpgroup"),
        (lambda: Config(128, 16, tile_k=64, fp8=True), "128 or 256 values of K"),
        (lambda: Config(128, 16, tile_k=128, overlap=True, fp8=True), "no overlap"),
        (lambda: Config(128, 48, tile_k=128, cluster_n=2, fp8=True), "at most 48 rows; take fewer, or fp8=False"),
        (lambda: Config(256, 24, tile_k=256, warpgroups=4, fp8=True), "at most 16 rows, 128 values of K or 2 warp"),
        (
            lambda: cookbook.matmul_int4_weights(
                jnp.ones((8, 128), BF16), jnp.ones((1, 2, 512), jnp.uint32), jnp.ones((1, 16), BF16), config=FEW
            ),
            "fp8=False: only e2m1",
        ),
        (
            lambda: cookbook.matmul_int8_weights(
                jnp.ones((8, 128), BF16), jnp.ones((128, 16), jnp.int8), jnp.ones(16), config=FEW
            ),
            "fp8=False: only e2m1",
        ),
    ],
)
def test_errors_name_the_rule(fn, message):
    with pytest.raises(ValueError, match=message):
        fn()


@pytest.mark.parametrize("mutation", ["low", "scale", "row", None])
def test_mutants_are_caught(run_only, monkeypatch, found_if, mutation):
    """Without the low halves; with the first scale of 64 of K for both; with the scale of the row before."""
    module, scales = inspect.getmodule(cookbook.matmul_int4_weights), halves._scales
    split, low = module.split_rows, np.arange(512) >= 256
    of_x = {
        "low": lambda x: split(x)._replace(halves=jnp.where(low, 0, split(x).halves)),
        "row": lambda x: split(x)._replace(scales=jnp.roll(split(x).scales, 1, axis=1)),
    }
    if mutation == "scale":
        monkeypatch.setattr(halves, "_scales", lambda both: scales(both)[:1] * 2)
    monkeypatch.setattr(module, "split_rows", of_x.get(mutation, split))
    jax.clear_caches()
    with found_if(mutation is not None):
        check_mxfp4(8, 144, 256, config=FEW)
    jax.clear_caches()

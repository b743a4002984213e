"""Right answers of exercises are right of the package, of the compiler and of the figures too."""

import functools
import itertools
import math
import pathlib
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
from cookbook.gemm import plan
from cookbook.gemm.rungs.matmul_pipelined import Config, matmul_pipelined

NOTEBOOKS = pathlib.Path(__file__).parents[2] / "notebooks"
sys.path.append(str(NOTEBOOKS))

from exercises import ex06, ex07, ex08, ex09, ex16, ex19b, ex20, ex22, judge  # noqa: E402


def compiled(gpu, kernel, *avals):
    try:
        return lab.compile_for(gpu, kernel, *avals)
    except lab.ToolchainMissing as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("tile", [(128, 128), (128, 192)])
def test_chapter_6_prices_a_ring_as_the_compiler_does(tile, stages):
    config = Config(tile_m=tile[0], tile_n=tile[1], num_stages=stages, delay_release=0)
    aval = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16)
    smem_bytes = compiled("h200", functools.partial(matmul_pipelined, config=config), aval, aval).smem_bytes
    ring = stages * ex06.ITEMSIZE * sum(tile) * 64
    assert smem_bytes == max(ring, ex06.ITEMSIZE * tile[0] * tile[1]) + ex06.BARRIER * stages


def test_one_configuration_of_chapter_6_is_wrong():
    assert [name for name, (_, delay, wait) in ex06.CONFIGURATIONS.items() if wait > delay] == ["C"]


@pytest.mark.parametrize("wgs", [2, 3, 4])
def test_a_kernel_that_exchanges_registers_starts_with_those_of_chapter_7(wgs):
    def body(x_gmem, o_gmem, x_smem):
        wg = lax.axis_index("wg")
        pl.when(wg == wgs)(lambda: plgpu.set_max_registers(24, action="decrease"))

        @pl.when(wg < wgs)
        def _():
            plgpu.set_max_registers(ex07.launch_registers(wgs), action="increase")
            x_smem[wg] = x_gmem[wg] + 1
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(x_smem.at[wg], o_gmem.at[wg])
            plgpu.wait_smem_to_gmem(0)

    aval = jax.ShapeDtypeStruct((wgs, 256), jnp.float32)
    scratch = [plgpu.SMEM(aval.shape, aval.dtype)]
    kernel = plgpu.kernel(body, out_type=aval, num_threads=wgs + 1, thread_name="wg", scratch_types=scratch)
    assert compiled("h200", kernel, aval).registers == ex07.launch_registers(wgs)


def test_clues_of_chapter_7_tell_the_faults_apart(capsys):
    runs = {name: ex07.model(**knobs) for name, knobs in ex07.FAULTS.items()}
    burst = {name: run[3].load_start < run[0].load_end for name, run in runs.items()}
    overlap = {name: run[1].load_start < run[0].mma_end for name, run in runs.items()}
    assert burst == {"one stage": False, "two steps late": True, "one copy at a time": False}
    assert overlap == {"one stage": False, "two steps late": True, "one copy at a time": True}
    ex07.facts()
    assert capsys.readouterr().out.count("copies start") == 3


@pytest.mark.parametrize("cluster", [1, 2])
def test_waves_of_chapter_8_are_the_turns_of_the_busiest_block(cluster):
    cases = [case for case in ex08.SHARE_CASES if case[4] == cluster and case[1] % case[2][1] == 0]
    assert cases
    for m, n, tile, num_sms, _ in cases:
        tiles = plan.Tiles(m, n, 64, 64, plan.Config(*tile, cluster_m=cluster), num_sms)
        turns, count = math.ceil(tiles.count / tiles.clusters), math.ceil(m / tile[0]) * math.ceil(n / tile[1])
        assert ex08._share(m, n, tile, num_sms, cluster) == pytest.approx(count / (turns * num_sms))


def test_sums_of_chapter_9_tell_mistakes_apart():
    wrong = dict(cut=np.floor), dict(cut=np.rint), dict(first=True), dict(shift=1), dict(shift=-1), dict(size=np.max)
    sums = [tuple(ex09._cut_sum(*case, **keywords) for case in ex09.SUMS) for keywords in ({}, *wrong)]
    assert len(set(sums)) == len(sums)


@pytest.mark.parametrize("m, num_groups, tile", [(7, 3, 2), (6, 2, 4), (2, 3, 4), (9, 3, 3), (0, 2, 4)])
def test_entries_of_chapter_16_are_the_most_of_all_sizes(m, num_groups, tile):
    sizes = (s for s in itertools.product(range(m + 1), repeat=num_groups) if sum(s) <= m)
    assert max(sum(-(-size // tile) for size in s) for s in sizes) == ex16.most_entries(m, num_groups, tile)


def test_exponents_of_chapter_19b_are_those_of_the_package():
    for values in ex19b.BLOCKS:
        _, scales = blackwell.quantize_mxfp8(jnp.zeros(32).at[: len(values)].set(jnp.asarray(values)))
        assert float(scales[0]) == 2.0 ** ex19b._exponent(values)
    x = ex19b._rows_to_quantize()
    _, scales = blackwell.quantize_mxfp8(jnp.asarray(x))
    exponents = np.vectorize(lambda most: ex19b._exponent((most,)))(np.abs(x.reshape(len(x), -1, 32)).max(axis=2))
    assert (np.exp2(exponents) == judge.wide(scales)).all()


def test_the_evidence_of_chapter_20_holds():
    a, b, out = (np.asarray(x, np.float32) for x in ex20.evidence())
    wrong = np.abs(out - a @ b).reshape(4, 64, -1, 64).max(axis=(1, 3)) > 0.01
    assert np.argwhere(wrong).tolist() == [[2, 1]]
    rows, columns = slice(128, 192), slice(64, 128)
    terms = [(a[rows, i : i + 32] @ b[i : i + 32, columns]).ravel() for i in range(0, 256, 32)]
    found, *_ = np.linalg.lstsq(np.stack(terms, axis=1), out[rows, columns].ravel())
    assert found.round(2).tolist() == [1, 1, 1, 2, 1, 0, 1, 1]


@pytest.mark.parametrize("hidden, piece", ex22.TILES)
def test_a_tile_of_chapter_22_has_partners(hidden, piece):
    """SwiGLU of each tile, and nothing beyond it, is SwiGLU of the whole product."""
    rng = np.random.default_rng(0)
    x, weight = rng.standard_normal((3, 16)), rng.standard_normal((2 * hidden, 16))
    swiglu = lambda gate, up: gate / (1 + np.exp(-gate)) * up
    product = x @ weight[[ex22._source_row(row, hidden, piece) for row in range(2 * hidden)]].T
    tiles = product.reshape(3, -1, 2, piece)
    whole = swiglu(*np.split(x @ weight.T, 2, axis=1))
    np.testing.assert_allclose(swiglu(tiles[:, :, 0], tiles[:, :, 1]).reshape(3, hidden), whole)


def test_a_tile_of_chapter_19b_that_is_asked_for_ahead_waits_for_its_sm():
    """A block asks for its next tile when it starts one."""

    def end(times, tiles=16):
        starts, ends, given = [(0.0, sm) for sm in range(len(times))], [], len(times)
        while starts:
            start, sm = starts.pop(starts.index(min(starts)))
            ends.append(start + times[sm])
            if given < tiles:
                given += 1
                starts.append((ends[-1], sm))
        return max(ends)

    assert [end(times) for times in ((1, 1, 1, 1), (1, 1, 1.6, 1), (3, 1, 1, 2))] == [4, 5, 9]

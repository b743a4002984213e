"""What the exercises ask for is what the package, the compiler and the figures do."""

import functools
import pathlib
import sys

import jax
import jax.numpy as jnp
import pytest

import lab
from cookbook.gemm.rungs.matmul_pipelined import Config, matmul_pipelined

NOTEBOOKS = pathlib.Path(__file__).parents[2] / "notebooks"
sys.path.append(str(NOTEBOOKS))

from exercises import ex06  # noqa: E402


def compiled(gpu, kernel, *avals):
    try:
        return lab.compile_for(gpu, kernel, *avals)
    except lab.ToolchainMissing as error:
        pytest.skip(str(error))


def test_the_map_has_every_chapter():
    from figures.start_here.course_map import CHAPTERS

    assert {path.stem for path in NOTEBOOKS.glob("[0-9]*.ipynb")} <= {name for name, *_ in CHAPTERS}


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

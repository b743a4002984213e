"""How much a step launches: a number that is not to grow unnoticed. Counted in the program for an H200, without one."""

import collections
import dataclasses

import pytest

import lab
from bench import serving as bench

SHORT = dataclasses.replace(bench.LLAMA_1B.config, num_hidden_layers=1)


def launches(config, weights=None, packing=None) -> list[lab.Launch]:
    try:
        return bench.decode_launches(config, 64, weights, packing)
    except lab.ToolchainMissing as error:
        pytest.skip(str(error))


@pytest.mark.slow
def test_a_layer_is_nine_launches_and_a_step_little_more():
    """All of a layer are kernels of this package: nothing is cast, added, sliced or copied between them. Besides them,
    a step has embeddings, angles, the attention's table, where each layer's pages lie, the last norm, logits, what
    sampling reads, and sampling."""
    two, three = (launches(dataclasses.replace(SHORT, num_hidden_layers=count)) for count in (2, 3))
    layer = list((collections.Counter(three) - collections.Counter(two)).elements())
    assert len(layer) == 9 and all(launch.is_kernel for launch in layer), layer
    assert {"gemm_kernel", "rms_norm_row", "rope_write_kv_kernel"} <= {launch.name for launch in layer}
    assert not any("copy" in launch.name for launch in three)
    assert len(two) - 2 * 9 <= 11, two


@pytest.mark.slow
@pytest.mark.parametrize(
    "config, weights, packing, most",
    [
        (SHORT, "int8", None, 24),
        (bench.MOE_LAYER.config, None, None, 20),
        (dataclasses.replace(bench.GPT_OSS.config, num_hidden_layers=2, window_layers=(0,)), None, "mxfp4", 37),
    ],
    ids=("int8", "experts", "gpt-oss"),
)
def test_other_models_launch_no_more_than_they_did(config, weights, packing, most):
    """Products of 8-bit weights whose parts XLA adds up are two launches; a layer of gpt-oss is thirteen."""
    found = launches(config, weights, packing)
    assert len(found) <= most, found

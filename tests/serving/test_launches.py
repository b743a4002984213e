"""How much a step launches: a number that is not to grow unnoticed. Counted in the program for an H200, without one."""

import collections
import dataclasses
import functools

import jax
import numpy as np
import pytest

import lab
from bench import serving as bench
from cookbook import _host
from serving import step
from serving.model import empty_pages
from serving.weights import prepared

SHORT = dataclasses.replace(bench.LLAMA_1B.config, num_hidden_layers=1)


def launches(config, weights=None) -> list[lab.Launch]:
    try:
        return bench.decode_launches(config, 64, weights)
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
    "config, weights, most", [(SHORT, "int8", 24), (bench.MOE_LAYER.config, None, 31)], ids=("int8", "experts")
)
def test_other_models_launch_no_more_than_they_did(config, weights, most):
    """Products of 8-bit weights whose parts XLA adds up are two launches; routing takes XLA many."""
    found = launches(config, weights)
    assert len(found) <= most, found


@pytest.mark.parametrize("dependent", [True, False])
def test_every_kernel_of_a_step_with_dependent_launches_waits(dependent):
    config = dataclasses.replace(SHORT, vocab_size=512, hidden_size=128, intermediate_size=256)
    params = {name: jax.ShapeDtypeStruct(shape, config.dtype) for name, shape in config.shapes.items()}
    weights = jax.eval_shape(functools.partial(prepared, config), params)
    pages = jax.eval_shape(lambda: empty_pages(config, 8, 16))
    packed, form = step.joined(step.padding(4, 64, 4))
    args = config, weights, pages, packed, np.zeros(4, np.int32)
    with _host.building_for(_host.Target("h200", 132)):
        how = form | dict(backend="cookbook", decode=True, draws=None)
        program = str(step._program(step.model_step, (), dependent).trace(*args, **how).jaxpr)
    kernels = program.count("= mpmd_map[")
    assert kernels >= 9 and program.count("griddepcontrol_wait") == kernels * dependent

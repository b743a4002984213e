"""How much a step launches: a number that is not to grow unnoticed. Counted in the program for an H200, without one."""

import collections
import json
import pathlib
import subprocess
import sys

import pytest

from cookbook import lab
from cookbook.lab.toolchain import device

ROOT = pathlib.Path(__file__).parents[2]
COUNT = """
import dataclasses, json
from bench import serving as bench
from cookbook.serving import LlamaConfig

llama = dataclasses.replace(bench.LLAMA_1B.config, num_hidden_layers=2)
short = dataclasses.replace(llama, num_hidden_layers=1)
models = dict(two=(llama, None), one=(short, None), int8=(short, "int8"), experts=(bench.MOE_LAYER.config, None))
found = {name: bench.decode_launches(config, 64, weights) for name, (config, weights) in models.items()}
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def launches() -> dict[str, list]:
    """[name, whether it is a kernel of this package] of each launch; counted in a process of its own, as one can
    compile for one architecture alone."""
    try:
        device("h200")
    except lab.ToolchainMissing as error:
        pytest.skip(str(error))
    result = subprocess.run([sys.executable, "-c", COUNT], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def test_a_layer_is_nine_launches(launches):
    """All of them kernels of this package: nothing is cast, added, sliced or copied between them."""
    one, two = (collections.Counter(map(tuple, launches[name])) for name in ("one", "two"))
    layer = list((two - one).elements())
    assert len(layer) == 9 and all(is_kernel for _, is_kernel in layer), layer
    assert {"roles_kernel", "rms_norm_row", "rope_write_kv_kernel"} <= {name for name, _ in layer}
    assert not any("copy" in name for name, _ in two)


def test_a_step_is_little_more_than_its_layers(launches):
    """Embeddings, angles, the attention's table, the last norm, logits, what sampling reads, and greedy sampling."""
    assert len(launches["one"]) - 9 <= 11, launches["one"]


@pytest.mark.parametrize("name, most", [("int8", 24), ("experts", 39)])
def test_other_models_launch_no_more_than_they_did(launches, name, most):
    """Products of 8-bit weights whose parts XLA adds up are two launches; routing takes XLA many."""
    assert len(launches[name]) <= most, launches[name]

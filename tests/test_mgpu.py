"""Where kernels run, without `cookbook.lab`."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

import cookbook
from cookbook import _mgpu

A, B = jnp.ones((64, 64), jnp.bfloat16), jnp.ones((64, 128), jnp.bfloat16)


def test_interpreting():
    with _mgpu.interpreting(num_sms=2):
        assert _mgpu.require_target("matmul") == _mgpu.Target("the GPU interpreter", 2, interpreted=True)
        np.testing.assert_array_equal(cookbook.matmul(A, B), np.full((64, 128), 64.0))
    assert _mgpu._target.get() is None


@pytest.mark.parametrize("target", [_mgpu.Target("cpu", 4), _mgpu.Target("the GPU interpreter", 4)])
@pytest.mark.parametrize("forced_first", [True, False])
def test_a_kernel_for_a_gpu_is_not_interpreted(target, forced_first):
    """Its result would be NaN: it has what the interpreter cannot do."""
    contexts = [plgpu.force_gpu_interpret_mode(), _mgpu.building_for(target)]
    first, second = contexts if forced_first else contexts[::-1]
    with first, second, pytest.raises(RuntimeError, match="are interpreted.*lab.interpret"):
        cookbook.matmul(A, B)


def test_a_kernel_for_the_interpreter_is_interpreted():
    with (
        _mgpu.building_for(_mgpu.Target("any", 4, interpreted=True)),
        pytest.raises(RuntimeError, match="are not interpreted"),
    ):
        cookbook.matmul(A, B)

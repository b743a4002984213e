"""Fixtures and helpers of the tests on hosts with several GPUs."""

import jax
import pytest

from cookbook import lab


@pytest.fixture(params=[2, 4, 8])
def mesh(request):
    if not lab.on_gpu() or jax.device_count() < request.param:
        pytest.skip(f"needs {request.param} Hopper or newer GPUs")
    if jax.device_count() > request.param:
        pytest.skip("a larger case tests this host")
    return jax.make_mesh((request.param,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))

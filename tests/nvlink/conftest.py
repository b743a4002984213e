"""Fixtures and helpers of the tests on hosts with several GPUs."""

import jax
import pytest
from jax.experimental.mosaic.gpu.launch_context import LaunchContext

import lab


@pytest.fixture(params=[2, 4, 8])
def mesh(request):
    if not lab.on_gpu() or jax.device_count() < request.param:
        pytest.skip(f"needs {request.param} Hopper or newer GPUs")
    if jax.device_count() > request.param:
        pytest.skip("a larger case tests this host")
    return jax.make_mesh((request.param,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))


@pytest.fixture
def described_peers(monkeypatch):
    """The peers whose addresses TMA's descriptors get in what is compiled next: see the rules in protocol.py."""
    peers, original = [], LaunchContext._recompute_peer_id

    def seen(self, peer, *args, **kwargs):
        peers.append(peer)
        return original(self, peer, *args, **kwargs)

    monkeypatch.setattr(LaunchContext, "_recompute_peer_id", seen)
    return peers

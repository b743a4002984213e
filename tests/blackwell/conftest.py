"""Fixtures that the tests of this folder share."""

import pytest

import lab


@pytest.fixture
def blackwell_gpu():
    """Skips everywhere but on a data-centre Blackwell."""
    if not lab.on_gpu("b200"):
        pytest.skip("needs a B200: JAX's interpreter has no block-scaled MMA")

import pytest


@pytest.fixture(autouse=True)
def models_on_the_cpu(on_cpu):
    """But for tests marked `kernels`."""

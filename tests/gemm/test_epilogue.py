"""Everything that may be fused with a product, at once, in every way in which a result leaves the kernel."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lab
from cookbook import _host
from cookbook.gemm.kernel import kernel
from cookbook.gemm.launch import fused_product
from cookbook.gemm.plan import Config, plan_of
from tests.arrays import array

M, N, K = 70, 72, 136
PARTS = dict(split_dim=1, split_k=2)
WAYS = {  # The configuration and the dtype of the result.
    "whole": (Config(128, 64), jnp.bfloat16),
    "parts": (Config(64, 128, **PARTS), jnp.float32),
    "parts of another kernel": (Config(64, 128, **PARTS, second_kernel=True), jnp.bfloat16),
    "tail": (Config(64, 64, split_dim=1, tail_split=2), jnp.float32),
    "swapped, from registers": (Config(128, 24, swapped=True), jnp.float32),
    "swapped parts": (Config(128, 24, swapped=True, split_k=3), jnp.bfloat16),
    "swapped parts of another kernel": (Config(128, 24, swapped=True, split_k=2, second_kernel=True), jnp.float32),
    "swapped tail": (Config(128, 48, swapped=True, tail_split=3), jnp.bfloat16),
}


def operands():
    """No vector is 1 or another's double: none can be left out, come twice or stand for another."""
    rng = np.random.default_rng(0)
    a, b = (array(rng.normal(size=shape) / 16, jnp.bfloat16) for shape in ((M, K), (N, K)))
    sizes = dict(scale=1, row_scale=M, col_scale=N, bias=N)
    return a, b, {name: array(rng.uniform(1.2, 3, size=size), jnp.float32) for name, size in sizes.items()}


def faults(ways, num_sms=3):
    """The ways whose results are wrong. All are of one program."""

    def products(a, b, vectors):
        for name in ways:
            config, dtype = WAYS[name]
            plan = plan_of(M, N, K, (a.dtype,) * 2, (False, False), jnp.tanh, jnp.dtype(dtype), config, num_sms, True)
            yield fused_product(kernel, a, b, vectors, plan=plan, params=_host.compiler_params())

    a, b, vectors = operands()
    found = lab.run(lambda *args: list(products(*args)), a, b, vectors)
    a, b, *vectors = (np.asarray(x, np.float64) for x in (a, b, *vectors.values()))
    scale, of_rows, of_columns, bias = vectors
    wanted = np.tanh(a @ b.T * scale * of_rows[:, None] * of_columns + bias)
    error = lambda out: np.linalg.norm(np.asarray(out, np.float64) - wanted) / np.linalg.norm(wanted)
    return [name for name, out in zip(ways, found, strict=True) if not error(out) < 2e-3]


@pytest.mark.usefixtures("no_gpu")
def test_every_vector_in_every_way():
    assert faults(WAYS) == []


@pytest.mark.parametrize("name", ["scale", "row_scale", "col_scale", "bias", None])
def test_mutants_that_apply_a_vector_twice_are_caught(run_only, monkeypatch, name):
    """Once in the kernel of the parts, and once where they are added up."""
    right = _host.kernel
    _, _, vectors = operands()

    def with_vector(body, **how):
        launch = right(body, **how)
        padded = {name: jnp.pad(vectors[name], (0, 512 - vectors[name].size))} if name else {}
        return lambda a, b, vectors: launch(a, b, vectors | padded)

    monkeypatch.setattr(_host, "kernel", with_vector)
    jax.clear_caches()
    ways = ["parts of another kernel"]
    assert faults(ways) == (ways if name else [])
    jax.clear_caches()

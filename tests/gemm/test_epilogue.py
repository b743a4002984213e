"""Everything that may be fused with a product, at once, in every way in which a result leaves the kernel."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cookbook
import lab
from cookbook import _host
from cookbook.gemm import kernel as module
from cookbook.gemm.kernel import kernel
from cookbook.gemm.launch import fused_product
from cookbook.gemm.plan import Config, plan_of
from tests.arrays import array

M, N, K = 70, 72, 136
WHOLE = 64, 64, K  # Whole pieces of o, but in most ways not whole tiles.
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


def operands(m=M, n=N, k=K):
    """No vector is 1 or another's double: none can be left out, come twice or stand for another."""
    rng = np.random.default_rng(0)
    a, b = (array(rng.normal(size=shape) / 16, jnp.bfloat16) for shape in ((m, k), (n, k)))
    sizes = dict(scale=1, row_scale=m, col_scale=n, bias=n)
    return a, b, {name: array(rng.uniform(1.2, 3, size=size), jnp.float32) for name, size in sizes.items()}


def products(ways, a, b, vectors, num_sms=3):
    """The product in each of these ways, interpreted."""
    sizes, dtypes = (len(a), *b.shape), (a.dtype, b.dtype)
    for name in ways:
        config, dtype = WAYS[name]
        plan = plan_of(*sizes, dtypes, (False, False), jnp.tanh, jnp.dtype(dtype), config, num_sms, True)
        yield fused_product(kernel, a, b, vectors, plan=plan, params=_host.compiler_params())


def faults(ways, sizes=(M, N, K)):
    """The ways whose results are wrong. All are of one program."""
    a, b, vectors = operands(*sizes)
    found = lab.run(lambda *args: list(products(ways, *args)), a, b, vectors)
    a, b, *vectors = (np.asarray(x, np.float64) for x in (a, b, *vectors.values()))
    scale, of_rows, of_columns, bias = vectors
    wanted = np.tanh(a @ b.T * scale * of_rows[:, None] * of_columns + bias)
    error = lambda out: np.linalg.norm(np.asarray(out, np.float64) - wanted) / np.linalg.norm(wanted)
    return [name for name, out in zip(ways, found, strict=True) if not error(out) < 2e-3]


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("sizes", [(M, N, K), WHOLE], ids=["cut pieces", "whole pieces"])
def test_every_vector_in_every_way(sizes):
    assert faults(WAYS, sizes) == []


# Vectors that end within a tile ---------------------------------------------------------------------------------------


def test_whole_pieces_are_not_padded():
    with lab.interpret():
        jaxpr = str(jax.make_jaxpr(lambda *args: list(products(WAYS, *args)))(*operands(*WHOLE)))
    assert " pad[" not in jaxpr


def test_xla_has_nothing_to_do():
    """The program for an H200 is the kernels alone, though none of their tiles divides the vectors."""
    aval, (m, n, k) = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)), (192, 320, 256)
    plain, flipped = Config(128, 256), Config(128, 256, swapped=True)

    def fp8(a, b, of_rows, of_columns, config=plain):
        return cookbook.matmul_fp8(a, b, scale_a=of_rows, scale_b=of_columns, transpose_b=True, config=config)

    def half(a, b, bias, config=flipped):
        return cookbook.matmul(a, b, bias=bias, transpose_b=True, activation="gelu", config=config)

    of_half = [aval("bfloat16", m, k), aval("bfloat16", n, k), aval("float32", n)]
    of_fp8 = [aval("float8_e4m3fn", m, k), aval("float8_e4m3fn", n, k), aval("float32", m), aval("float32", n)]
    try:
        found = lab.launches("h200", lambda x, y: (half(*x), fp8(*y)), of_half, of_fp8)
        spilled = lab.compile_for("h200", functools.partial(half, config=plain), *of_half).spill_bytes
    except lab.ToolchainMissing as error:
        pytest.skip(str(error))
    assert [launch.is_kernel for launch in found] == [True, True], found
    assert spilled == 0


@pytest.mark.parametrize(
    "wrong",
    [lambda start, last: start, lambda start, last: last, jnp.minimum],
    ids=["beyond the end", "always the last", "right"],
)
def test_mutants_that_load_other_pieces_are_caught(run_only, mutant, wrong):
    """Beyond the end, where the interpreter finds no array; or always the last piece."""
    mutant(module, "jnp", minimum=wrong)
    try:
        found = faults(["tail"])
    except jax.errors.JaxRuntimeError as error:
        assert "Out-of-bounds read" in str(error)
        found = ["tail"]
    assert found == ([] if wrong is jnp.minimum else ["tail"])


# Mutants --------------------------------------------------------------------------------------------------------------


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

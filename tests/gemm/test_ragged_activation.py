"""Activations of grouped products, SwiGLU above all: structures, gradients, errors, mutants."""

import dataclasses
import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lab
from cookbook import _host
from cookbook.gemm.gated import kernel as gated
from cookbook.gemm.plan import Config, Operand
from tests.arrays import array
from tests.gemm.ragged import floats, gradients, operands, slow

module = importlib.import_module("cookbook.gemm.grouped.ragged_dot")
ragged_dot, reference = module.ragged_dot, module.ragged_dot_reference
SIZES = [33, 0, 129, 64, 7, 66]


def check(m, n, k, sizes=SIZES, *, transpose_rhs=False, gpu=None, activation="swiglu", **kwargs):
    how = dict(transpose_rhs=transpose_rhs, activation=activation)
    args = operands(m, n, k, sizes, transpose_rhs)
    lab.check(functools.partial(ragged_dot, **how, **kwargs), functools.partial(reference, **how), *args, gpu=gpu)


# (M, N of o, K), whether rhs is given as (G, 2N, K), the configuration.
STRUCTURES = {
    "columns of both in one row of TMA": ((330, 64, 72), False, Config(128, 64)),
    "wide": ((330, 192, 72), False, Config(128, 128)),
    "columns that TMA cuts off": ((330, 104, 72), False, Config(256, 64)),
    "an odd number of columns": ((330, 75, 72), True, Config(128, 64, num_stages=2)),
    "swapped": ((330, 128, 136), False, Config(128, 24, swapped=True)),
    "swapped clusters": ((330, 136, 72), True, Config(128, 32, swapped=True, cluster_m=2, cluster_n=2)),
}


@pytest.mark.parametrize("name", slow(STRUCTURES, ["wide"]))
def test_swiglu(name):
    (m, n, k), transpose_rhs, config = STRUCTURES[name]
    check(m, 2 * n, k, transpose_rhs=transpose_rhs, config=config, gpu="h200")


@pytest.mark.parametrize("activation", ["relu", "gelu", "silu", jnp.tanh])
def test_others(activation):
    check(150, 64, 72, [33, 0, 65], activation=activation, config=Config(128, 64))


@pytest.mark.parametrize("activation", ["silu", "swiglu"])
@pytest.mark.parametrize("dtype, swapped", [("bfloat16", False), ("bfloat16", True), ("float16", False)])
def test_a_configuration_is_used_under_differentiation(monkeypatch, activation, dtype, swapped):
    """Also for the product that the activation is then applied to, and traced, not run. Nothing transposes its 32 bits,
    which float16 operands have: then another one is chosen."""
    found, right = [], module.row_plan
    monkeypatch.setattr(module, "row_plan", lambda *args: found.append(args[8]) or right(*args))
    lhs, rhs, config = jnp.ones((8, 64), dtype), jnp.ones((2, 64, 128), dtype), Config(128, 64, swapped=swapped)
    out = lambda lhs, config: ragged_dot(lhs, rhs, [3, 5], activation=activation, config=config)
    loss = lambda lhs, config: out(lhs, config).astype("float32").sum()
    with _host.building_for(_host.Target("h200", 132)):
        jax.eval_shape(functools.partial(jax.grad(loss), config=config), lhs)
        assert found[0] == config
        if dtype == "float16":
            jax.eval_shape(functools.partial(jax.grad(loss), config=Config(128, 64, swapped=True)), lhs)


@pytest.mark.parametrize("activation, transpose_rhs", [("swiglu", False), ("swiglu", True), ("gelu", False)])
def test_gradients(activation, transpose_rhs):
    lhs, rhs, sizes = operands(200, 128, 72, [33, 0, 64, 66], transpose_rhs)
    cols = 64 if activation == "swiglu" else 128
    weights = array(np.random.default_rng(0).normal(size=(200, cols)), jnp.float32)
    how = dict(transpose_rhs=transpose_rhs, activation=activation)
    clean = lambda lhs, *rest, **how: reference(jnp.nan_to_num(lhs), *rest, **how)
    fns = gradients(ragged_dot, weights, **how), gradients(clean, weights, **how)
    # Three roundings to 16 bits: of the product that is kept, of its gradient, and of the result.
    lab.check(*fns, lhs, rhs, sizes, gpu=None, tolerance=4e-3)


def test_a_shard():
    lhs, rhs, sizes = operands(200, 128, 72, [33, 0, 64, 66], rows=200)
    how = dict(activation="swiglu", group_offset=1)
    fns = [functools.partial(fn, **how) for fn in (functools.partial(ragged_dot, config=Config(128, 64)), reference)]
    lab.check(*fns, lhs, rhs[1:3], sizes, gpu=None)


def test_an_empty_product():
    out = ragged_dot(jnp.ones((8, 0), jnp.bfloat16), jnp.ones((1, 0, 16), jnp.bfloat16), [8], activation="swiglu")
    assert out.shape == (8, 8) and not out.any()


@pytest.mark.parametrize(
    "cols, how, message",
    [
        (128, dict(config=Config(128, 256)), "at most 64 x 128 values of o"),
        (11, dict(transpose_rhs=True), "a column of the gate for each other"),
        (24, {}, "begin at column 12 of .*pad the gate and the up product to 16 columns each"),
        (24, dict(activation="glu"), "activation='glu' is not known"),
        (24, dict(activation=jnp.sort), "not element-wise"),
    ],
)
def test_errors_name_the_rule(cols, how, message):
    transpose_rhs = how.get("transpose_rhs", False)
    with pytest.raises(ValueError, match=message):
        lhs, rhs, sizes = operands(16, cols, 8, [16], transpose_rhs)
        lab.run(functools.partial(ragged_dot, **dict(activation="swiglu") | how), lhs, rhs, sizes)


@pytest.mark.parametrize("mutated", ["the same tile twice", "up and gate", "no product of a step", None])
def test_mutants_of_the_pair_are_caught(run_only, monkeypatch, mutant, found_if, mutated):
    right = Operand.copy
    wrong = {"the same tile twice": lambda i: (0, i), "up and gate": lambda i: (i, 1 - i)}.get(mutated)

    def copy(operand, gmem, at, smem, *args):
        """A tile of the pair, of the matrix's columns, to another place of the slot than its own."""
        if not operand.partner:
            return right(operand, gmem, at, smem, *args)
        for tile, place in map(wrong, range(2)):
            begin = [x + tile * operand.partner * (dim == operand.transposed) for dim, x in enumerate(at)]
            right(dataclasses.replace(operand, partner=0), gmem, begin, smem.at[place], *args)

    if wrong:
        monkeypatch.setattr(Operand, "copy", lambda operand, gmem, at, smem, *args, **how: copy(
            operand, gmem, at, smem, *args, *how.values()
        ))  # fmt: skip
    elif mutated:
        loop = gated.pl.loop
        mutant(gated, "pl", loop=lambda first, last: loop(first + 1, last))
    jax.clear_caches()
    with found_if(mutated is not None):
        check(200, 256, 136, [33, 1, 65, 40], config=Config(128, 64))
    jax.clear_caches()


@pytest.mark.parametrize("config", [Config(128, 128), Config(128, 128, swapped=True), Config(128, 16, swapped=True)])
def test_right_in_every_run_on_the_gpu(gpu, config):
    rng = np.random.default_rng(0)
    sizes = rng.multinomial(4000, rng.dirichlet(np.full(13, 0.5)))
    args = floats(4096, 1024), floats(13, 1024, 1536), array(sizes, jnp.int32)
    fn = jax.jit(functools.partial(ragged_dot, config=config, activation="swiglu"))
    outs, wanted = [fn(*args) for _ in range(10)], jax.jit(functools.partial(reference, activation="swiglu"))(*args)
    assert float(jnp.linalg.norm(outs[0] - wanted) / jnp.linalg.norm(wanted)) < 4e-3
    assert all((out == outs[0]).all() for out in outs)

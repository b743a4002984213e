"""The gated linear unit: structures of its kernel, activations, gradients, values, errors, mutants."""

import dataclasses
import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cookbook
import lab
from cookbook import _host
from cookbook.gemm import cost
from cookbook.gemm import kernel as plain
from cookbook.gemm.gated import kernel, kernel_sum
from cookbook.gemm.gated import plan as plans
from cookbook.gemm.tiles import Config
from tests.arrays import array

module = importlib.import_module("cookbook.gemm.gated.glu")
glu = cookbook.glu
SMALL = Config(64, 128, split_dim=1)
BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32

TANH = np.sqrt(2 / np.pi)
ACTIVATIONS = {
    "silu": lambda x: x / (1 + jnp.exp(-x)),
    "gelu": lambda x: 0.5 * x * (1 + jnp.tanh(TANH * (x + 0.044715 * x**3))),
    "relu": lambda x: jnp.where(x < 0, 0, x),
    "sigmoid": lambda x: 1 / (1 + jnp.exp(-x)),
    None: lambda x: x,
}


def exact(x, w_gate, w_up, activation="silu", transpose_weights=False):
    """Shares no code with the package; float64 for float64."""
    x, w_gate, w_up = (v.astype(jnp.promote_types(v.dtype, F32)) for v in (x, w_gate, w_up))
    out = "...k,nk->...n" if transpose_weights else "...k,kn->...n"
    gate, up = (jnp.einsum(out, x, w, precision="highest") for w in (w_gate, w_up))
    return ACTIVATIONS.get(activation, activation)(gate) * up


def operands(m, n, k, dtype=BF16, transpose_weights=False):
    """Random normal; means are shifted, so that a term dropped or counted twice shows. The gate is about one."""
    rng = np.random.default_rng(m * n + k)
    x, *weights = (array(rng.normal(size=size) + 0.1, dtype) for size in ((m, k), (k, n), (k, n)))
    weights = [w * w.dtype.type(k**-0.5) for w in weights]
    return x, *(w.T if transpose_weights else w for w in weights)


def check(m, n, k, *, dtype=BF16, transpose_weights=False, activation="silu", gpu=None, **kwargs):
    how = dict(activation=activation, transpose_weights=transpose_weights)
    args = operands(m, n, k, dtype, transpose_weights)
    return lab.check(functools.partial(glu, **how, **kwargs), functools.partial(exact, **how), *args, gpu=gpu)


# Sizes, structures, operands ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("m, n, k, dtype", [(1, 8, 8, BF16), (257, 72, 40, F16), (40, 520, 520, BF16)])
def test_any_size(m, n, k, dtype):
    check(m, n, k, dtype=dtype, gpu="h200")


# (M, N, K), whether weights are given as (N, K), the configuration. Tails in all dimensions; more tiles than SMs.
STRUCTURES = {
    "small": ((130, 264, 200), False, SMALL),
    "wide": ((260, 264, 200), False, Config(128, 128, num_stages=2, store_slots=3)),
    "tall": ((520, 136, 72), False, Config(256, 64, grid_minor_dim=1, grid_tile_width=1, store_slots=1)),
    "an odd number of columns": ((130, 77, 72), True, Config(64, 32, split_dim=1, num_stages=9)),
    "clusters": ((300, 264, 136), False, Config(128, 128, cluster_m=2, cluster_n=2)),
    "parts": ((72, 136, 264), False, Config(64, 128, split_dim=1, split_k=5)),
    "parts with slices of one owner": ((72, 40, 520), True, Config(128, 16, split_k=4)),
    "tail of thirds": ((650, 72, 136), True, Config(128, 96, tail_split=3, store_slots=3)),
    "swapped": ((40, 648, 200), False, Config(128, 24, store_slots=1, swapped=True)),
    "swapped and tall": ((40, 600, 200), True, Config(256, 64, swapped=True)),
    "swapped clusters": ((264, 600, 72), False, Config(128, 96, cluster_m=2, swapped=True)),
    "swapped parts": ((40, 264, 200), False, Config(128, 40, split_k=3, swapped=True)),
    "swapped parts, side by side": ((40, 264, 200), False, Config(64, 32, split_dim=1, split_k=3, swapped=True)),
    "swapped tail": ((104, 584, 72), False, Config(128, 96, tail_split=3, swapped=True)),
}  # fmt: skip
SLOW = {"wide", "tall", "swapped and tall", "swapped clusters", "swapped parts, side by side"}


@pytest.mark.parametrize("name", [pytest.param(x, marks=[pytest.mark.slow] * (x in SLOW)) for x in STRUCTURES])
def test_every_structure(name):
    (m, n, k), transpose_weights, config = STRUCTURES[name]
    check(m, n, k, transpose_weights=transpose_weights, config=config, gpu="h200")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_configurations_that_may_be_chosen(seed):
    """Sizes, an activation and one of the candidates at random."""
    rng = np.random.default_rng(seed)
    transpose_weights = bool(rng.integers(2))
    m, n, k = (int(size) for size in rng.integers(1, (300, 400, 500)))
    n, k = n if transpose_weights else -(-n // 8) * 8, -(-k // 8) * 8
    candidates = plans.Problem(m, n, k, transpose_weights, num_sms=4).candidates()
    config, activation = candidates[rng.integers(len(candidates))], [*ACTIVATIONS][seed % len(ACTIVATIONS)]
    check(m, n, k, transpose_weights=transpose_weights, activation=activation, config=config)


@pytest.mark.parametrize("activation", [*ACTIVATIONS, jnp.tanh])
def test_every_activation(activation):
    check(72, 136, 72, activation=activation, config=SMALL)


@pytest.mark.parametrize("rows", [(), (2, 3, 12)])
def test_leading_dimensions(rows):
    x, w_gate, w_up = operands(72, 40, 64)
    x = x[0] if rows == () else x.reshape(*rows, 64)
    lab.check(glu, exact, x, w_gate, w_up, gpu=None)


@pytest.mark.parametrize("m, n, k, transpose_weights", [(648, 584, 200, False), (130, 136, 72, True)])
def test_no_operand_is_copied(m, n, k, transpose_weights):
    args = operands(m, n, k, transpose_weights=transpose_weights)
    with lab.interpret():
        jaxpr = str(jax.make_jaxpr(functools.partial(glu, transpose_weights=transpose_weights))(*args))
    assert " transpose[" not in jaxpr and " pad[" not in jaxpr


# Configurations -------------------------------------------------------------------------------------------------------

SHAPES = ((4096, 14336, 4096), (8192, 8192, 2048), (16, 14336, 4096), (1, 11008, 4096), (3000, 4504, 1704))


@pytest.mark.parametrize("transpose_weights", [False, True])
@pytest.mark.parametrize("m, n, k", SHAPES)
def test_a_configuration_is_as_good_as_that_of_one_wide_product(m, n, k, transpose_weights):
    """As the model has it: a tile of both products side by side takes as long as one of a plain product."""
    problem = plans.Problem(m, n, k, transpose_weights)
    wide = problem.plain(2 * n, 2)
    assert problem.predict(plans.best(problem)) < 1.03 * cost.predict(cost.best(wide), wide)


def test_the_default_compiles_without_spills():
    for m, n, k in SHAPES[:3]:
        avals = [jax.ShapeDtypeStruct(size, BF16) for size in ((m, k), (k, n), (k, n))]
        compiled = lab.compile_for("h200", glu, *avals)
        assert compiled.spill_bytes == 0 and len(compiled.kernels) == 1


def test_a_step_has_three_kernels():
    """Forward; the gradient of x; those of the weights, which run one. XLA adds one, of values alone."""
    loss = lambda *args: glu(*args).astype(F32).sum()
    avals = [jax.ShapeDtypeStruct(size, BF16) for size in ((256, 512), (512, 1024), (512, 1024))]
    compiled = lab.compile_for("h200", jax.grad(loss, (0, 1, 2)), *avals)
    assert compiled.spill_bytes == 0 and len(compiled.kernels) == 3


# Values ---------------------------------------------------------------------------------------------------------------


def test_nan_and_infinity_go_where_they_should():
    x, w_gate, w_up = operands(72, 72, 72)
    x, w_up = x.at[3, 5].set(jnp.nan).at[7, 1].set(jnp.inf), w_up.at[9, 11].set(-jnp.inf)
    wanted = exact(x, w_gate, w_up)
    for config in (None, Config(64, 128, split_dim=1, split_k=2)):
        out = lab.run(functools.partial(glu, config=config), x, w_gate, w_up)
        np.testing.assert_array_equal(jnp.isnan(out), jnp.isnan(wanted))
        np.testing.assert_array_equal(jnp.isinf(out), jnp.isinf(wanted))


@pytest.mark.parametrize("m, n, k", [(0, 16, 8), (3, 0, 8), (3, 16, 0)])
def test_empty(m, n, k):
    args = [jnp.ones(size, F16) for size in ((m, k), (k, n), (k, n))]
    out, pull = jax.vjp(glu, *args)
    assert out.shape == (m, n) and not out.any()
    for gradient, x in zip(pull(out), args, strict=True):
        assert gradient.shape == x.shape and gradient.dtype == x.dtype and not gradient.any()


# Gradients ------------------------------------------------------------------------------------------------------------


def gradients(fn, d_out):
    return lambda *args: jax.vjp(fn, *args)[1](d_out.astype(jax.eval_shape(fn, *args).dtype))


def check_gradients(m, n, k, *, dtype=BF16, transpose_weights=False, activation="silu", gpu=None, **kwargs):
    how = dict(activation=activation, transpose_weights=transpose_weights)
    d_out = array(np.random.default_rng(1).normal(size=(m, n)), dtype)
    fns = (gradients(fn, d_out) for fn in (functools.partial(glu, **how, **kwargs), functools.partial(exact, **how)))
    # Three roundings to 16 bits: of the products that are kept, of their gradients, and of the result.
    limit = 4e-3 if dtype == BF16 else 6e-4
    return lab.check(*fns, *operands(m, n, k, dtype, transpose_weights), gpu=gpu, tolerance=limit)


@pytest.mark.parametrize(
    "m, n, k, how",
    [
        (130, 136, 200, dict(gpu="h200")),
        (72, 77, 72, dict(transpose_weights=True, dtype=F16, activation="gelu")),
        (40, 264, 136, dict(config=Config(128, 40, split_k=3, swapped=True), activation="sigmoid")),
        (200, 100, 328, dict(transpose_weights=True, activation=None)),
        (150, 72, 64, dict(activation=jnp.tanh)),
    ],
)
def test_gradients(m, n, k, how):
    check_gradients(m, n, k, **how)


@pytest.mark.parametrize("scale", [2.0**6, 2.0**-16])
def test_float16_gradients_under_loss_scales(scale):
    """Large and tiny losses, as `jax.vjp` of the float32 formula has them."""
    args = operands(24, 32, 64, F16)
    d_out = array(np.random.default_rng(1).normal(size=(24, 32)) * scale, F16)
    ours, wanted = lab.run(gradients(glu, d_out), *args), gradients(exact, d_out)(*(x.astype(F32) for x in args))
    for found, right in zip(ours, wanted, strict=True):
        right = np.asarray(right.astype(F16), np.float64)  # The result's own dtype loses no more.
        assert np.linalg.norm(np.asarray(found, np.float64) - right) < 2e-3 * np.linalg.norm(right)


def test_products_beyond_float16_leave_gradients_finite():
    """A gate of 1e5: the unit's result is finite, so its gradients are."""
    x, w_gate, w_up = jnp.full((8, 64), 40.0, F16), jnp.full((64, 8), 40.0, F16), jnp.full((64, 8), 2.0**-12, F16)
    out, pull = lab.run(lambda *args: jax.vjp(functools.partial(glu, activation="sigmoid"), *args), x, w_gate, w_up)
    found = lab.run(lambda d: pull(d), jnp.ones_like(out))
    wanted = gradients(functools.partial(exact, activation="sigmoid"), jnp.ones_like(out))(x, w_gate, w_up)
    for ours, right in zip(found, wanted, strict=True):
        np.testing.assert_allclose(np.float64(ours), np.float64(right), rtol=2e-3)


def test_a_configuration_is_used_under_differentiation(monkeypatch):
    found, right = [], module.gated_plan
    monkeypatch.setattr(module, "gated_plan", lambda *args: found.append(args[6]) or right(*args))
    loss = lambda x, *weights: glu(x, *weights, config=SMALL).astype(F32).sum()
    with _host.building_for(_host.Target("h200", 132)):
        jax.eval_shape(jax.grad(loss), *operands(8, 64, 64))
    assert found == [SMALL]


def test_what_is_kept_for_the_backward_pass():
    """Operands and both products; under `jax.checkpoint` operands alone."""
    args = operands(24, 40, 64)
    for fn, wanted in ((glu, 2), (jax.checkpoint(glu), 0)):
        with _host.building_for(_host.Target("h200", 132)):
            kept = jax.eval_shape(lambda *args, fn=fn: jax.vjp(fn, *args)[1], *args)
        assert sum(x.shape == (24, 40) and x.dtype == BF16 for x in jax.tree.leaves(kept)) == wanted


def test_shard_map_of_columns_with_gradients():
    """Each device has some columns of both weights, as tensor parallelism has them; here one device."""
    mesh = jax.make_mesh((1,), ("x",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:1])
    cols, args = jax.P(None, "x"), operands(64, 72, 40)
    fn = jax.shard_map(glu, mesh=mesh, in_specs=(jax.P(), cols, cols), out_specs=cols)
    d_out = array(np.random.default_rng(1).normal(size=(64, 72)), BF16)
    for found, right in zip(lab.run(gradients(fn, d_out), *args), gradients(exact, d_out)(*args), strict=True):
        found, right = (np.asarray(x, np.float64) for x in (found, right))
        assert np.linalg.norm(found - right) < 5e-3 * np.linalg.norm(right)


# Errors ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, how, message",
    [
        (dict(x=jnp.ones((), BF16)), {}, r"x.shape=\(\); must be \(..., K\)"),
        (dict(w_gate=jnp.ones((16, 24), BF16)), {}, r"w_gate.shape=\(16, 24\) share no K: 64 is not 16"),
        (dict(w_up=jnp.ones((64, 32), BF16)), {}, r"w_up.shape=\(64, 32\); must be the same"),
        (dict(w_up=jnp.ones((64, 24), F16)), {}, "w_up.dtype=float16; must both be bfloat16 or both float16"),
        (dict(x=jnp.ones((3, 8, 64), F32)), {}, "x.dtype=float32"),
        (dict(w_gate=jnp.ones((64, 20), BF16), w_up=jnp.ones((64, 20), BF16)), {}, "a row of w_gate has 20 values"),
        ({}, dict(activation="swiglu"), "activation='swiglu' is not known; pass one of .*sigmoid"),
        ({}, dict(activation=jnp.sort), "not element-wise"),
        ({}, dict(transpose_weights=True), "share no K"),
        ({}, dict(transpose_weights=2), "transpose_weights=2; must be"),
        ({}, dict(config=Config(128, 256)), "64 x 256 values of o: must be at most 64 x 128"),
        ({}, dict(config=Config(64, 128, split_dim=1, split_k=2, second_kernel=True)), "adds up parts of one product"),
    ],
)
def test_errors_name_the_rule(changes, how, message):
    args = dict(zip(("x", "w_gate", "w_up"), operands(8, 24, 64), strict=True)) | changes
    with pytest.raises(ValueError, match=message), lab.interpret():
        jax.eval_shape(lambda **args: glu(**args, **how), **args)


# Mutants --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mutated", ["up and gate", "the gate twice", "no product of a step", "parts", None])
def test_mutants_of_the_pair_are_caught(run_only, monkeypatch, mutant, found_if, mutated):
    config = Config(64, 128, split_dim=1, split_k=2) if mutated == "parts" else SMALL
    if mutated in ("up and gate", "the gate twice"):
        right, pair = kernel.multiply_both, (1, 0) if mutated == "up and gate" else (0, 0)
        monkeypatch.setattr(kernel, "multiply_both", lambda *args: [right(*args)[i] for i in pair])
    elif mutated == "no product of a step":
        loop = kernel.pl.loop
        mutant(kernel, "pl", loop=lambda first, last: loop(first + 1, last))
    elif mutated:  # The sums of the first part alone.
        mutant(plain, "functools", reduce=lambda fn, sums: sums[0])
    jax.clear_caches()
    with found_if(mutated is not None):
        check(72, 136, 264, config=config)
    jax.clear_caches()


@pytest.mark.parametrize("mutated", ["the first pair twice", "no step of its own", None])
def test_mutants_of_the_sum_are_caught(run_only, monkeypatch, found_if, mutated):
    """In the gradient of x: which pair a step's operands are of, and where the second begins."""
    right, plan, calls = kernel_sum.copy_step, kernel_sum.sum_plan, []

    def first_twice(plan, ring, slot, a, b, *place):
        calls.append((a, b) if len(calls) % 2 == 0 else calls[-1])
        right(plan, ring, slot, *calls[-1], *place)

    def unpadded(m, n, k, *rest):
        found = plan(m, n, k, *rest)
        return dataclasses.replace(found, tiles=dataclasses.replace(found.tiles, k=2 * k))

    if mutated == "the first pair twice":
        monkeypatch.setattr(kernel_sum, "copy_step", first_twice)
    elif mutated:
        monkeypatch.setattr(kernel_sum, "sum_plan", unpadded)
    jax.clear_caches()
    with found_if(mutated is not None):
        check_gradients(72, 136, 64)
    jax.clear_caches()


# On the GPU -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("m, n, k", [(4096, 1536, 1024), (16, 4096, 2048)])
def test_right_in_every_run_on_the_gpu(gpu, m, n, k):
    args = operands(m, n, k)
    outs, wanted = [jax.jit(glu)(*args) for _ in range(10)], jax.jit(exact)(*args)
    assert float(jnp.linalg.norm(outs[0].astype(F32) - wanted) / jnp.linalg.norm(wanted)) < 4e-3
    assert all((out == outs[0]).all() for out in outs)

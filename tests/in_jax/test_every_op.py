"""Every op inside JAX: under its global options, in its transformations, on its meshes; and what is refused by name.

Most is traced for an H200 and not run: what a kernel computes is tested with its family.
"""

import contextlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import cookbook
import lab
from bench.ops import OPS, function, named
from cookbook import _host

pytestmark = pytest.mark.usefixtures("no_gpu")
TARGETS = {9: _host.Target("h200", 132), 10: _host.Target("b200", 148)}
KERNELS = [name for name in OPS if name != "merge_attention"]  # That one is left to XLA.
DIFFERENTIABLE = [name for name, op in OPS.items() if op.gradients]


def call(name: str, **changes):
    """The op as a function of its operands, by name, for the axis of a mesh that it needs."""
    op, fn = OPS[name], function(name)
    axis = [op.axis] if op.axis else []
    return lambda **operands: fn(
        *(operands[key] for key in op.operands),
        *axis,
        **{**op.options, **changes},
        **{key: operands[key] for key in op.more if key in operands},
    )


def said(name: str, operand: str = "") -> str:
    """How a message names the op, or an operand; a pattern."""
    names = [r"fuse\(<lambda>\)", r"argument \d"] if name == "fuse" else [name, operand]
    return names[bool(operand)]


def mesh_of(kind: AxisType, devices: int = 2):
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((devices,), ("d",), axis_types=(kind,)))


def traced(name: str, fn, operands):
    """`fn(**operands)`, traced for a GPU: its program, without addresses."""
    with _host.building_for(TARGETS[OPS[name].major]):
        program = str(jax.make_jaxpr(lambda operands: fn(**operands))(operands))
    return re.sub(r"0x[0-9a-f]+|Var\(id=\d+\)", "", program)


def with_gradient(name: str, fn):
    """`fn` and, for an op that has one, its gradient, with the results as cotangents."""
    names = OPS[name].gradients
    if not names:
        return fn

    def both(**operands):
        rest = {name: x for name, x in operands.items() if name not in names}
        out, pull = jax.vjp(lambda given: fn(**(operands | given | rest)), {name: operands[name] for name in names})
        no_gradient = lambda x: np.zeros(x.shape, jax.dtypes.float0)  # Indices have none.
        return out, pull(jax.tree.map(lambda x: x if jnp.issubdtype(x.dtype, jnp.inexact) else no_gradient(x), out))

    return both


def test_every_op_is_here():
    blackwell = {f"blackwell.{name}" for name in ("matmul", "matmul_mxfp8", "ragged_dot")}
    assert {*OPS} == {*cookbook.__all__} | blackwell


# Options --------------------------------------------------------------------------------------------------------------


def shared(name: str, **changes):
    """The op with its gradient on a mesh of two devices: each has half of the first operand, and all of the others."""
    op = OPS[name]
    operands = op.arrays(with_more=True)
    first = next(iter(operands))
    operands[first] = np.concatenate([operands[first]] * 2)
    specs = {name: P("d") if name == first else P() for name in operands}
    # JAX's kernels take no Ref of an array that varies.
    fn = jax.shard_map(
        lambda operands: call(name, **op.choices | changes)(**operands), in_specs=(specs,), out_specs=P("d"),
        check_vma=name not in ("write_kv", "rope_write_kv") and not name.endswith("_step"),
    )  # fmt: skip
    return with_gradient(name, lambda **operands: fn(operands)), operands


@pytest.mark.parametrize("name, changes", [*((name, {}) for name in OPS), ("attention", dict(deterministic=False))])
def test_options_of_jax_change_nothing(name, changes):
    """Nor does a mesh, which is there in both cases. The program with its kernels is the same."""
    fn, operands = shared(name, **changes)
    with mesh_of(AxisType.Auto):
        plain = traced(name, fn, operands)
        with (
            jax.numpy_dtype_promotion("strict"),
            jax.numpy_rank_promotion("raise"),
            jax.default_matmul_precision("highest"),
            jax.default_prng_impl("unsafe_rbg"),
        ):
            assert traced(name, fn, operands) == plain


@pytest.mark.parametrize("name", [name for name in OPS if not OPS[name].axis])
def test_transformations_under_x64(name):
    """A scan over a batch of calls that are computed again for the gradient."""
    op = OPS[name]
    operands = {key: np.stack([x, x]) for key, x in op.arrays().items()}
    fn = with_gradient(name, lambda **operands: jax.checkpoint(lambda operands: call(name)(**operands))(operands))

    def scanned(**operands):
        step = lambda count, operands: (count, jax.vmap(lambda operands: fn(**operands))(operands))
        return jax.lax.scan(step, 0, jax.tree.map(lambda x: x[None], operands))[1]

    with jax.enable_x64(True):
        assert "mpmd_map" in traced(name, scanned, operands) or name not in KERNELS


def run(name: str, *options):
    """The op, interpreted, with most of what its family computes outside kernels."""
    operands = {key: jax.device_put(x) for key, x in OPS[name].arrays().items()}
    with contextlib.ExitStack() as stack:
        for context in (lab.interpret(detect_races=False), *options):
            stack.enter_context(context)
        return [np.float32(x) for x in jax.tree.leaves(call(name)(**operands))]


@pytest.mark.parametrize("name", ["paged_attention", "ssd"])
def test_called_eagerly_no_program_returns_what_is_not_finite(name):
    assert all(np.isfinite(x).all() for x in run(name, jax.debug_nans(True), jax.debug_infs(True)))


@pytest.mark.parametrize("name", ["matmul", "ragged_dot", "rms_norm"])
def test_runs_without_jit(name):
    """Operation by operation, none of which may be NaN."""
    assert all(np.isfinite(x).all() for x in run(name, jax.disable_jit(), jax.debug_nans(True)))


# Calls that are refused by name, before anything is launched ----------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in KERNELS if not OPS[name].axis])
def test_operands_over_an_explicit_axis(name):
    mesh = jax.sharding.AbstractMesh((1,), ("d",), axis_types=(AxisType.Explicit,))
    sharding = jax.NamedSharding(mesh, P("d"))
    operands = OPS[name].arrays()
    with jax.sharding.use_abstract_mesh(mesh):
        for key, x in operands.items():
            given = operands | {key: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)}
            sharded = f"^cookbook.{said(name)}: {said(name, key)} is sharded over 'd': call it inside jax.shard_map"
            with pytest.raises(ValueError, match=sharded):
                jax.eval_shape(lambda given: call(name)(**given), given)


@pytest.mark.parametrize("name", [name for name in KERNELS if not OPS[name].axis])
def test_operands_that_are_no_arrays(name):
    operands = OPS[name].arrays()
    for key in operands:
        for nothing in ("x", [["x"], []], *[None] * (key not in OPS[name].optional)):
            no_array = rf"^cookbook.{said(name)}: {said(name, key)}=.*; must be an array .*: pass"
            with pytest.raises(ValueError, match=no_array):
                call(name)(**operands | {key: nothing})


@pytest.mark.parametrize("name", [name for name in OPS if hasattr(function(name), "Config")])
def test_configs_of_another_kind(name):
    for config in (4, {}, object):
        with pytest.raises(ValueError, match=f"cookbook.{name}: config=.*; must be a cookbook.{name}.Config: pass"):
            evaluated(name, OPS[name].arrays(), config=config)


@pytest.mark.parametrize("name, option", [(name, option) for name in OPS for option in OPS[name].static])
def test_traced_options(name, option):
    with pytest.raises(ValueError, match=f"^cookbook.{name}: {option} is traced, but.*static_argnames of jax.jit"):
        jax.eval_shape(lambda value: call(name, **{option: value})(**OPS[name].arrays()), 1)


@pytest.mark.parametrize("name", KERNELS)
def test_without_a_gpu(name, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    with pytest.raises(RuntimeError, match=rf"^cookbook.{said(name)} .*JAX sees no GPU.*`import lab`"):
        evaluated(name, OPS[name].arrays())


def evaluated(name: str, operands, **changes):
    """The shapes of the results; on a mesh of two devices for an op that needs one."""
    fn = lambda operands: call(name, **changes)(**operands)
    with mesh_of(AxisType.Auto) if OPS[name].axis else contextlib.nullcontext():
        if OPS[name].axis:
            operands = {key: np.concatenate([x] * 2) for key, x in operands.items()}
            fn = jax.shard_map(fn, in_specs=P("d"), out_specs=P("d"), check_vma=False)
        return jax.eval_shape(fn, operands)


# Empty in, empty out --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, axes",
    [(name, axes) for name in OPS for axes in OPS[name].empty],
    ids=lambda x: x if isinstance(x, str) else "-".join(f"{k}{v}" for k, v in x.items()),
)
def test_empty_operands(name, axes, monkeypatch):
    """Without a GPU: nothing is launched. Results, and gradients, are empty, or zeros, or operands as they were; lse
    is -inf."""
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    operands = OPS[name].arrays()
    for key, axis in axes.items():
        operands[key] = np.delete(operands[key], slice(None), axis)
    with mesh_of(AxisType.Auto) if OPS[name].axis else contextlib.nullcontext():
        fn = with_gradient(name, call(name))
        if OPS[name].axis:
            fn = jax.shard_map(lambda operands, fn=fn: fn(**operands), in_specs=P(), out_specs=P(), check_vma=False)
            jax.eval_shape(fn, operands)
            return
        out = jax.jit(lambda operands: fn(**operands))(operands)
    for x in jax.tree.leaves(out):
        same = any(np.array_equal(x, y) for y in operands.values())
        assert same or (np.float32(x) == 0).all() or (np.float32(x) == -np.inf).all()


# Derivatives that are refused -----------------------------------------------------------------------------------------


def derived(name: str, derive):
    """The program of `derive(loss, operand)`: the sum of squares of the results, by one differentiable operand."""
    op, operands = OPS[name], OPS[name].arrays()
    first = op.gradients[0]

    def both(operands):
        def loss(x):
            out = call(name)(**operands | {first: x})
            return sum((x.astype(jnp.float32) ** 2).sum() for x in jax.tree.leaves(out))

        return derive(loss, operands[first])

    fn = jax.shard_map(both, in_specs=P(), out_specs=P(), check_vma=False) if op.axis else both
    with mesh_of(AxisType.Auto):
        return traced(name, lambda **operands: fn(operands), operands)


@pytest.mark.parametrize("name", [name for name in DIFFERENTIABLE if name in KERNELS])
def test_forward_mode(name):
    """The program holds what is refused where it is lowered, or run: `test_forward_mode_is_refused` of test_host.py."""
    program = derived(name, lambda f, x: jax.jvp(f, (x,), (x,)))
    assert re.search(rf"tangent\[op={said(name)}\]", program)


MADE_OF_OPS = ("add", "all_gather", "all_to_all", "fuse", "reduce_scatter", "reduce_sum", "top_k")  # Their gradients.


@pytest.mark.parametrize("name", [name for name in DIFFERENTIABLE if name in KERNELS])
def test_second_derivatives(name):
    second = lambda f, x: jax.grad(lambda x: (jax.grad(f)(x).astype(jnp.float32) ** 2).sum())(x)
    if name in MADE_OF_OPS:
        assert derived(name, second)
        return
    refused = "ragged_dot" if name == "moe" else name  # It is made of it.
    message = f"cookbook.{refused} has no second derivative: differentiate {refused}_reference"
    with pytest.raises(ValueError, match=message):
        derived(name, second)


@pytest.mark.parametrize("name", [name for name in KERNELS if name not in DIFFERENTIABLE])
def test_gradients(name):
    for first in (key for key, x in OPS[name].operands.items() if not isinstance(x, np.ndarray)):
        operands = OPS[name].arrays()
        if not jnp.issubdtype(operands[first].dtype, jnp.floating):
            continue
        loss = lambda x, first=first, operands=operands: sum(
            out.astype(jnp.float32).sum() for out in jax.tree.leaves(call(name)(**operands | {first: x}))
        )
        with _host.building_for(TARGETS[OPS[name].major]):
            with pytest.raises(ValueError, match=f"cookbook.{name} has no gradient: differentiate"):
                jax.eval_shape(jax.grad(loss), operands[first])


AUTOMATIC = "On an automatic mesh JAX gathers sharded operands on every device and says nothing: call it inside `jax."


@pytest.mark.parametrize("name", [name for name in KERNELS if not OPS[name].axis])
def test_the_docstring_says_what_an_automatic_mesh_does(name):
    """JAX tells the op nothing about such a mesh, so that it cannot refuse."""
    assert AUTOMATIC in named(name).__doc__.partition("Args:")[0]

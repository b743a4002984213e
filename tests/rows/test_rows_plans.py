"""The plans that softmax, the norms and reduce_sum choose by themselves, lowered for an H200: one plan of each kind.

Mosaic refuses some layouts of the threads of a warp, and says so when it lowers a kernel. The interpreter takes all.
And what becomes of arrays beyond 32-bit offsets.
"""

import functools
import inspect
import itertools
import math
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cookbook
import lab
from cookbook import _host, group_norm, layer_norm, reduce_sum, rms_norm, softmax
from cookbook.rows import core, leading, norm, norm_backward
from tests.lowering import H200, lowered

reduce_sum_module, softmax_module = (inspect.getmodule(getattr(cookbook, name)) for name in ("reduce_sum", "softmax"))
BF16, F32, E4M3 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32), jnp.dtype(jnp.float8_e4m3fn)


def pull(fn):
    """The gradient of `fn(*args)` along the last argument."""
    return lambda *args: jax.vjp(fn, *args[:-1])[1](args[-1])


def gated(norm_before_gate: bool):
    return lambda x, gate, weight: group_norm(x, weight, gate=gate, norm_before_gate=norm_before_gate)


# Each with its gradient.
OPS = {
    "softmax": lambda x: pull(softmax)(x, x),
    "rms_norm": lambda x: pull(rms_norm)(x, x[0], x),
    "reduce_sum": lambda x: reduce_sum(x, -1),
    "layer_norm": lambda x: pull(layer_norm)(x, x[0], x[0], x),
    "group_norm before": lambda x: pull(gated(True))(x, x, x[0], x),
    "group_norm after": lambda x: pull(gated(False))(x, x, x[0], x),
    "rms_norm of 8 bits": lambda x: rms_norm(x, x[0], residual=x, out_dtype=E4M3),
}
VALUES = {  # Registers for values of a norm, in the forward and the backward kernel.
    "rms_norm": (core.Config.register_values, norm_backward.REGISTER_VALUES),
    "layer_norm": (core.Config.register_values, norm_backward.REGISTER_VALUES),
    "group_norm before": (norm.REGISTER_VALUES, norm_backward.MORE_REGISTER_VALUES),
    "group_norm after": (norm.REGISTER_VALUES, norm_backward.MORE_REGISTER_VALUES),
    "rms_norm of 8 bits": (norm.REGISTER_VALUES,),
}


@pytest.mark.parametrize(
    "op, shape, dtype",
    [
        ("softmax", (200, 12), BF16),
        ("rms_norm", (300, 6), F32),
        ("reduce_sum", (5000, 12), BF16),
        *((op, (300, 12), BF16) for op in VALUES),
    ],
)
def test_rows_that_one_thread_could_hold(op, shape, dtype):
    """No thread has a row to itself: JAX takes no layout in which only one thread holds a row."""
    lowered(OPS[op], jax.ShapeDtypeStruct(shape, dtype))


def plans(op: str, rows: int, cols: int, itemsize: int):
    """The plans of the op and of its gradient."""
    if op == "reduce_sum":
        return [reduce_sum_module.plan_of(rows, cols, itemsize, None, H200.num_sms)]
    if op == "softmax":
        most = softmax_module.REGISTER_VALUES
        return [core.plan_rows(rows, cols, itemsize, None, values) for values in (most, most // 2)]
    blocks, (forward, *backward) = norm_backward.BLOCKS_PER_SM * H200.num_sms, VALUES[op]
    backward = [norm_backward.backward_plan(rows, cols, itemsize, blocks, values) for values in backward]
    return [core.plan_rows(rows, cols, itemsize, None, forward), *backward]


def traits(plan) -> set:
    """All that a kernel over rows depends on but for numbers: the layout of its values, and which code there is."""
    shares_columns = plan.cols != plan.num_groups * plan.group * plan.shape[-1]
    is_ahead = norm_backward.rows_ahead(plan, 2 * [jnp.dtype(f"f{plan.itemsize}")], 1) > 0
    code = plan.spread, plan.num_groups > 1, shares_columns, is_ahead
    return {(type(plan), plan.vec, plan.lanes), (type(plan), *code)}


def loads(plan) -> int:
    """Loads of a thread that are unrolled: those of a group, for each of its rows."""
    return plan.group * plan.config.block_rows * plan.lanes // core.WARPGROUP


def sizes():
    """(Rows, columns, dtype): every length of a row up to 2,100 and 200 up to 65,536, of few rows, some and many."""
    rng = np.random.default_rng(0)
    for cols in [*range(1, 2101), *map(int, rng.integers(2101, 65537, 200))]:
        most = 2**31 // cols
        for (low, high), dtype in itertools.product(((1, 40), (40, 3000), (3000, most)), (BF16, F32)):
            yield int(rng.integers(low, min(high, most))), cols, dtype


def of_each_kind(cases):
    """The arguments of those (cost, traits, arguments) that together have all traits, cheap ones first."""
    seen = set()
    for _, traits, args in sorted(cases, key=lambda case: case[0]):
        if not traits <= seen:
            seen |= traits
            yield args


@pytest.mark.slow
@pytest.mark.parametrize("op", [op for op in OPS if op != "group_norm after"])  # It has the plans of the one before.
def test_rows_of_every_length(op, monkeypatch):
    # The second stage of the norms' gradients is a sum over the leading axis.
    monkeypatch.setattr(leading, "sum_leading", lambda target, params, dtype, *x: jnp.zeros(x[0].shape[1:], dtype))
    jax.clear_caches()
    cases = []
    for rows, cols, dtype in sizes():
        chosen = plans(op, *core._padded_shape(rows, cols, dtype.itemsize), dtype.itemsize)
        cases.append((sum(map(loads, chosen)), set().union(*map(traits, chosen)), ((rows, cols), dtype)))
    for shape, dtype in of_each_kind(cases):
        lowered(OPS[op], jax.ShapeDtypeStruct(shape, dtype))
    jax.clear_caches()


@pytest.mark.slow
def test_columns_of_every_length():
    cases = []
    for rows, cols, dtype in itertools.islice(sizes(), 0, None, 11):
        plan = leading.choose(rows, cols, dtype.itemsize, H200)
        code = (
            plan.rows_kept > 1,
            plan.leftover > 0,
            plan.num_tiles > 1,
            plan.columns_of_block < leading.CHUNK,
            plan.blocks_per_tile > 1,
        )
        traits = {(plan.vec, plan.windows_across, dtype), *enumerate(code), plan.leftover_span}
        places = plan.places_per_span * plan.spans_at_once + plan.leftover_places
        cases.append((places + plan.loads_in_flight, traits, (plan, dtype)))
    for plan, dtype in of_each_kind(cases):
        launch = functools.partial(leading._launch, plan, _host.compiler_params(), F32)
        lowered(lambda x, launch=launch: launch([x]), jax.ShapeDtypeStruct((plan.rows, plan.cols), dtype))


# Arrays that offsets of 32 bits do not reach --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "op, shape",
    [
        ("softmax", (300_000, 8191)),
        ("reduce_sum", (2**17 + 3, 37835)),
        ("rms_norm", (2**19 + 64, 4096)),
        ("group_norm before", (2**19 + 64, 4096)),
        ("layer_norm", (2**17 + 3, 20000)),
    ],
)
def test_offsets_beyond_32_bits(op, shape):
    """No sum or product of 32 bits becomes an address. A sum over the leading axis is one of parts below that."""
    compiled = lab.compile_for("h200", OPS[op], jax.ShapeDtypeStruct(shape, BF16))
    kernels = [kernel.ptx for kernel in compiled.kernels if "entry leading_kernel" not in kernel.ptx]
    assert kernels and not re.findall(r"(?:mul\.wide|cvt\.s64)\.s32.*", "".join(kernels))


class Itself:
    """In the place of a Ref's `at`: gives the slice that it is asked for."""

    def __getitem__(self, where):
        return where


def test_the_last_row_of_a_large_array(monkeypatch):
    plan, row = core.RaggedPlan(300_000, 8191, 2, core.Config(1, 128)), 299_999
    monkeypatch.setattr(jax.lax, "axis_index", lambda name: jnp.int32(row))
    part = plan.near(types.SimpleNamespace(at=Itself()))
    assert int(part.start) % plan.vec == 0
    counted = np.zeros(plan.cols, int)
    for where, _, low, high in plan._parts():
        start = int(part.start) + int(where.start) - row * plan.cols
        counted[start + low : start + high] += 1
    assert (counted == 1).all()


@pytest.mark.parametrize("op, cols", [("softmax", 2051), ("rms_norm", 2051), ("reduce_sum", 12801)])
def test_rows_that_are_counted_from_a_near_one(op, cols, monkeypatch):
    """As those of a large array are."""
    fn = {"softmax": softmax, "rms_norm": lambda x: rms_norm(x, x[0])}.get(op, lambda x: reduce_sum(x, -1))
    x = np.random.default_rng(0).normal(size=(11, cols)).astype(BF16)
    wanted = lab.run(fn, x)
    monkeypatch.setattr(core.RaggedPlan, "is_large", True)
    jax.clear_caches()
    np.testing.assert_array_equal(lab.run(fn, x), wanted)
    jax.clear_caches()


def test_sums_over_the_leading_axis_of_parts(monkeypatch):
    """As of a large matrix: in parts of rows, and their sums again."""
    monkeypatch.setattr(leading, "VALUES_MAX", 700)
    sizes = []

    def sum_by(plan, target, params, dtype, factors):
        sizes.append(plan.rows * plan.cols)
        return jnp.sum(math.prod(x if x.ndim == 2 else x[:, None] for x in factors), 0).astype(dtype)

    monkeypatch.setattr(leading, "sum_by", sum_by)
    x, factor = (np.random.default_rng(0).normal(size=size).astype(np.float32) for size in ((70, 130), 70))
    got = leading.sum_leading(H200, None, F32, jnp.asarray(x), jnp.asarray(factor))
    np.testing.assert_allclose(got, (x * factor[:, None]).astype(np.float64).sum(0), rtol=1e-5, atol=1e-5)
    assert len(sizes) > 15 and max(sizes) <= 700
    with pytest.raises(
        ValueError, match="cookbook.reduce_sum: 2 rows of 351 values; must have at most 350 .*: sum parts"
    ):
        leading.sum_leading(H200, None, F32, jnp.zeros((2, 351)))

"""layer_norm, group_norm and the 8-bit rms_norm, with their gradients; references are written here once more."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lab
from cookbook import _host, group_norm, layer_norm, matmul_fp8, rms_norm
from cookbook.rows import core, norm, norm_backward, rms_norm_of_parts
from cookbook.rows.group_norm import group_norm_reference
from cookbook.rows.layer_norm import layer_norm_reference
from lab import toolchain
from tests.arrays import array

BF16, F16, F32, E4M3 = jnp.bfloat16, jnp.float16, jnp.float32, jnp.float8_e4m3fn


def slow(*case):
    return pytest.param(*case, marks=pytest.mark.slow)


def normal(seed, shape, dtype=F32, scale=1.0, shift=0.0):
    return array(np.random.default_rng(seed).normal(size=shape) * scale + shift, dtype)


def at_least_f32(*arrays):
    return [None if x is None else x.astype(jnp.promote_types(x.dtype, F32)) for x in arrays]


def exact_layer_norm(x, weight, bias=None, residual=None, eps=1e-5):
    x, weight, bias, residual = at_least_f32(x, weight, bias, residual)
    x = x if residual is None else x + residual
    y = (x - x.mean(-1, keepdims=True)) / jnp.sqrt(jnp.var(x, -1, keepdims=True) + eps) * weight
    y = y if bias is None else y + bias
    return y if residual is None else (y, x)


def exact_group_norm(x, weight, bias=None, gate=None, group_size=None, before=True, is_rms_norm=True, eps=1e-5):
    """Group by group."""
    x, weight, bias, gate = at_least_f32(x, weight, bias, gate)
    size = group_size or x.shape[-1]
    silu = 1 if gate is None else gate / (1 + jnp.exp(-gate))
    t, parts = x if before else x * silu, []
    for at in range(0, x.shape[-1], size):
        v = t[..., at : at + size]
        v = v if is_rms_norm else v - v.mean(-1, keepdims=True)
        of = slice(at, at + size) if weight.size == x.shape[-1] else slice(None)
        v = v / jnp.sqrt((v**2).mean(-1, keepdims=True) + eps) * weight[of]
        parts.append(v if bias is None else v + bias[of])
    return jnp.concatenate(parts, -1) * (silu if before else 1)


def pull(fn):
    """The gradient of `fn(*args)` along the last argument, in all others."""
    return lambda *args: jax.vjp(fn, *args[:-1])[1](args[-1])


def at_full_width(fn):
    """`fn` of arguments of float32 or more: gradients come as such."""
    return lambda *args: fn(*jax.tree.map(lambda x: x.astype(jnp.promote_types(x.dtype, F32)), args))


def gpu_of(shape):
    return "h200" if shape in ((37, 96), (9, 5120), (6, 4, 128), (5, 384)) else None


# Short rows, odd ones, one column, one row; spread over the warpgroup, evenly and not; beyond the registers.
LAYER_CASES = [
    ((37, 96), BF16, None), ((37, 999), F32, None), ((5, 1), F32, F32), ((9, 5120), BF16, BF16), ((9, 12), F16, F32),
    ((2, 20003), BF16, F32), slow((2, 6001), BF16, None), slow((1, 16384), F32, None), slow((131, 2), F32, F16),
]  # fmt: skip


@pytest.mark.parametrize("num, cols, gpu", [(5, 1368, "h200"), (3, 100, None)])
def test_rms_norm_of_parts(num, cols, gpu):
    """Rows that no token has are NaN; a row of few values is added up by XLA."""
    rng, parts = np.random.default_rng(cols), 3
    rows = array(rng.permutation(num * parts + 2)[: num * parts].reshape(num, parts), jnp.int32)
    x = jnp.full((num * parts + 2, cols), jnp.nan, BF16).at[rows].set(normal(1, (num, parts, cols), BF16))
    weights, residual = array(rng.random((num, parts)), F32), normal(2, (num, cols), scale=3.0)
    fn = functools.partial(rms_norm_of_parts.rms_norm_of_parts, eps=1e-3, out_dtype=BF16)

    def exact(x, rows, weights, residual, scale):
        total = residual + (weights[:, :, None] * x[rows].astype(F32)).sum(1)
        return total / jnp.sqrt((total**2).mean(-1, keepdims=True) + 1e-3) * scale, total

    lab.check(fn, exact, x, rows, weights, residual, normal(3, (cols,), scale=0.1, shift=1.0), gpu=gpu)


@pytest.mark.parametrize("shape, dtype, residual_dtype", LAYER_CASES, ids=str)
def test_layer_norm(shape, dtype, residual_dtype):
    x, weight, bias = normal(0, shape, dtype, 2, 0.5), normal(1, shape[-1:], F32, 1, 1), normal(2, shape[-1:], BF16)
    args = (x, weight, bias) if residual_dtype is None else (x, weight, bias, normal(3, shape, residual_dtype))
    fn = lambda x, w, b, r=None: layer_norm(x, w, b, residual=r)
    # A column less its mean leaves rounding alone.
    tolerance = (1e-6, None) if shape[-1] == 1 and residual_dtype else None
    lab.check(fn, exact_layer_norm, *args, gpu=gpu_of(shape), tolerance=tolerance)


@pytest.mark.parametrize("cols", [300, 20003, 2051])
def test_layer_norm_of_rows_far_from_zero(cols):
    """Squares of the distance from the mean lose no digits to it, in rows of one group of pieces and of several, and in
    one that begins anywhere, whose pieces leave its ends."""
    x = normal(0, (2, cols), F32, 1.0, 1e4)
    lab.check(layer_norm, lambda x: exact_layer_norm(x, jnp.ones(cols)), x, gpu=None)


@pytest.mark.parametrize("shape, dtype, residual_dtype", LAYER_CASES, ids=str)
def test_layer_norm_gradients(shape, dtype, residual_dtype):
    x, weight, bias = normal(0, shape, dtype, 2, 0.5), normal(1, shape[-1:], F32, 1, 1), normal(2, shape[-1:], BF16)
    dy = normal(4, shape, dtype)
    tolerance = None
    if residual_dtype is None:
        fn, exact, args = layer_norm, exact_layer_norm, (x, weight, bias, dy)
    else:
        fn = lambda x, w, b, r: layer_norm(x, w, b, residual=r)
        exact = exact_layer_norm
        residual = normal(3, shape, residual_dtype)
        args = x, weight, bias, residual, (dy, normal(5, shape, residual_dtype))
        # The kernel gets the rounded sum.
        tolerance = 1e-2 if residual_dtype != F32 else 5e-3 if dtype != F32 else 1e-4
    if shape[-1] == 1:
        tolerance = (1e-4, None, None, 1e-4)  # x has no gradient but that of the sum; weight none.
        args = (x, weight, bias, residual, (dy, normal(5, shape, residual_dtype)))
    lab.check(pull(fn), at_full_width(pull(exact)), *args, gpu=gpu_of(shape), tolerance=tolerance)


# Heads with one weight for all; groups with weights of their own, more and fewer than a block has rows, in numbers that
# share no factor with it; one group; rows spread over the warpgroup; groups beyond the registers.
GROUP_CASES = [  # Shape, group size, dtype, dtype of the gate, columns of the weight.
    ((6, 4, 128), None, BF16, BF16, 128), ((5, 384), 128, BF16, F32, 384), ((7, 5 * 24), 24, F32, F32, 5 * 24),
    ((3, 3 * 2048), 2048, BF16, BF16, 3 * 2048), ((4, 5, 64), 64, F16, None, 64),
    ((2, 2 * 6000), 6000, F32, BF16, 12000), ((9, 12), 6, BF16, BF16, 12), slow((3, 7), 1, F32, F32, 7),
    slow((2, 40 * 64), 64, BF16, BF16, 40 * 64), slow((2, 3, 256), None, F32, F32, 256),
]  # fmt: skip
# Norm before the gate, and whether it leaves the mean.
KINDS = [(True, True), (False, True), (True, False), (False, False)]


def group_case(shape, size, dtype, gate_dtype, cols, kind):
    before, is_rms_norm = kind
    arrays = [normal(0, shape, dtype, 2, 0.3), normal(1, (cols,), F32, 1, 1), normal(2, (cols,), F32)]
    if gate_dtype is not None:
        arrays.append(normal(3, shape, gate_dtype, 2))
    how = dict(group_size=size, norm_before_gate=before, is_rms_norm=is_rms_norm)
    fn = lambda x, w, b, z=None: group_norm(x, w, b, gate=z, **how)
    exact = lambda x, w, b, z=None: exact_group_norm(x, w, b, z, size, before, is_rms_norm)
    return fn, exact, arrays


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("shape, size, dtype, gate_dtype, cols", GROUP_CASES, ids=str)
def test_group_norm(shape, size, dtype, gate_dtype, cols, kind):
    fn, exact, arrays = group_case(shape, size, dtype, gate_dtype, cols, kind)
    tolerance = 1e-4 if size == 1 and not kind[1] else None  # A column less its mean leaves rounding alone.
    lab.check(fn, exact, *arrays, gpu=gpu_of(shape) if kind[1] else None, tolerance=tolerance)


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("shape, size, dtype, gate_dtype, cols", GROUP_CASES, ids=str)
def test_group_norm_gradients(shape, size, dtype, gate_dtype, cols, before):
    kind = before, before == (gate_dtype == BF16)  # All kinds, two for a case.
    fn, exact, arrays = group_case(shape, size, dtype, gate_dtype, cols, kind)
    dy = normal(4, shape, dtype)
    if size == 1 and not kind[1]:
        pytest.skip("a group of one column less its mean is 0: its gradients are rounding alone")
    gpu = gpu_of(shape) if kind[1] else None
    lab.check(pull(fn), at_full_width(pull(exact)), *arrays, dy, gpu=gpu)


@pytest.mark.parametrize("shape", [(8192, 4096), slow((8192, 128)), slow((4096, 12288)), slow((32, 8192))], ids=str)
def test_no_registers_are_spilled(shape):
    x, w = jax.ShapeDtypeStruct(shape, BF16), jax.ShapeDtypeStruct(shape[-1:], F32)
    with_sum = lambda op: lambda x, w, r: op(x, w, residual=r)
    gated = lambda before: lambda x, w, z: group_norm(x, w, gate=z, norm_before_gate=before)
    programs = [
        (pull(layer_norm), (x, w, w, x)), *((pull(gated(before)), (x, w, x, x)) for before in (True, False)),
        *((pull(with_sum(op)), (x, w, x, (x, x))) for op in (rms_norm, layer_norm)),
        (layer_norm, (x, w, w)), (gated(True), (x, w, x)), (gated(False), (x, w, x)),
        (lambda x, w, r: rms_norm(x, w, residual=r, out_dtype=E4M3), (x, w, x)),
    ]  # fmt: skip
    for fn, args in programs:
        assert lab.compile_for("h200", fn, *args).spill_bytes == 0


# 8 bits ---------------------------------------------------------------------------------------------------------------


def exact_ratios(x, scale, residual=None):
    """Each y over its row's largest, and these over 448."""
    x, scale, residual = at_least_f32(x, scale, residual)
    total = x if residual is None else x + residual
    y = total / jnp.sqrt((total**2).mean(-1, keepdims=True) + 1e-6) * scale
    top = jnp.abs(y).max(-1)
    ratios = y / jnp.where(top == 0, 1, top)[..., None]
    return (ratios, top / 448) if residual is None else (ratios, top / 448, total)


# The first three are compiled, too. Beyond the registers; one column; rows that begin anywhere.
EIGHT_BIT_CASES = [
    ((37, 96), BF16, None), ((9, 5120), BF16, BF16), ((5, 384), F32, F32), ((2, 3, 999), F16, None),
    ((2, 20003), F32, BF16), ((5, 1), F32, None), slow((3, 8191), BF16, BF16), slow((3, 16384), BF16, None),
]  # fmt: skip


@pytest.mark.parametrize("largest, out_dtype", [(448, E4M3), (127, jnp.int8)], ids=str)
@pytest.mark.parametrize("shape, dtype, residual_dtype", EIGHT_BIT_CASES, ids=str)
def test_rms_norm_of_8_bits(shape, dtype, residual_dtype, largest, out_dtype):
    args = [normal(0, shape, dtype, 2), normal(1, shape[-1:], F32, 1, 1)]
    args += [] if residual_dtype is None else [normal(2, shape, residual_dtype)]

    def fn(x, scale, residual=None):
        y, y_scale, *total = rms_norm(x, scale, residual=residual, out_dtype=out_dtype)
        assert y.dtype == out_dtype and y_scale.dtype == F32 and y_scale.shape == x.shape[:-1]
        return y.astype(F32) / largest, y_scale * (largest / 448), *total

    # A number of e4m3 is off by a sixteenth of itself at most; an int8 by half of a 127th of the row's largest.
    lab.check(fn, exact_ratios, *args, gpu=gpu_of(shape), tolerance=(4e-2, 1e-6, *[None] * len(args[2:])))


def test_8_bits_fit_a_product():
    """`matmul_fp8` takes them, and its product is near that of the numbers that they stand for."""
    x, scale, w = normal(0, (70, 128), BF16), normal(1, (128,), F32, 1, 1), normal(2, (64, 128), F32).astype(E4M3)

    def fn(x, scale, w):
        y, y_scale = rms_norm(x, scale, out_dtype=E4M3)
        return matmul_fp8(y, w, scale_a=y_scale, transpose_b=True)

    ratios, y_scale = exact_ratios(x, scale)
    wanted = (ratios * 448 * y_scale[:, None]) @ w.astype(F32).T
    got = lab.run(fn, x, scale, w).astype(F32)
    assert jnp.linalg.norm(got - wanted) / jnp.linalg.norm(wanted) < 0.05


@pytest.mark.parametrize("cols", [40, 4096])
def test_8_bits_of_special_rows(cols):
    """Rows of zeros, tiny ones and huge ones, in which no number overflows; NaN and infinity stay in their row."""
    x = np.random.default_rng(0).normal(size=(6, cols)).astype(np.float32)
    x[0], x[1], x[2], x[3, 5], x[4, 7] = 0, x[1] * 1e-18, x[2] * 1e17, np.nan, np.inf
    y, y_scale = (np.asarray(out, np.float32) for out in lab.run(lambda x: rms_norm(x, out_dtype=E4M3), x))
    finite = [1, 2, 5]
    assert (y[0] == 0).all() and y_scale[0] == 0
    assert (np.abs(y[finite]).max(-1) == 448).all() and np.isfinite(y_scale[finite]).all()
    assert np.isnan(y[3]).any() and np.isnan(y[4, 7]) and np.isnan(y_scale[[3, 4]]).all()


def test_8_bits_have_no_gradient():
    x = normal(0, (4, 40))
    with pytest.raises(ValueError, match="cookbook.rms_norm has no gradient: differentiate rms_norm with an out_dtype"):
        lab.run(jax.grad(lambda x: jnp.sum(rms_norm(x, out_dtype=E4M3)[1])), x)


# In place -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    # Rows of a warp, evenly and not; one group and several; rows left over; one column; rows that begin anywhere.
    "shape, dtype", [((8, 96), BF16), ((2, 4, 5120), F32), ((37, 999), BF16), ((2, 20480), BF16), ((3, 1), F32),
                     slow((3, 8191), BF16)],
    ids=str,
)  # fmt: skip
def test_the_sum_in_the_place_of_the_residual(shape, dtype):
    """The same bits as in an array of its own."""
    x, residual, scale = normal(0, shape, BF16), normal(1, shape, dtype), normal(2, shape[-1:])
    for fn in (layer_norm, functools.partial(rms_norm, out_dtype=E4M3)):

        def in_place(x, residual, scale, fn=fn):
            ref = jax.new_ref(residual)
            y = fn(x, scale, residual=ref)
            return (*y, ref[...]) if isinstance(y, tuple) else (y, ref[...])

        with lab.interpret() as seen:
            wanted, got = fn(x, scale, residual=residual), jax.jit(in_place)(x, residual, scale)
        assert not seen.races_found
        for a, b in zip(got, wanted, strict=True):
            np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


def test_a_donated_residual_is_not_copied():
    x, scale = jax.ShapeDtypeStruct((8192, 4096), BF16), jax.ShapeDtypeStruct((4096,), BF16)

    def step(x, residual, scale):
        ref = jax.new_ref(residual)
        return rms_norm(x, scale, residual=ref), jax.freeze(ref)

    try:
        device = toolchain.devices("h200", 1)[0]
    except lab.ToolchainMissing as missing:
        pytest.skip(str(missing))
    avals = [
        jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=jax.sharding.SingleDeviceSharding(device))
        for a in (x, x, scale)
    ]
    with _host.building_for(_host.Target("h200", 132)), jax.default_device(device):
        lowered = jax.jit(step, donate_argnums=1).lower(*avals)
    memory = lowered.compile().memory_analysis()
    assert memory.alias_size_in_bytes == 8192 * 4096 * 2 and memory.temp_size_in_bytes < 2**20


def test_a_residual_in_place_has_no_gradient():
    def fn(x):
        return jnp.sum(rms_norm(x, residual=jax.new_ref(jnp.ones((4, 40)))))

    with pytest.raises(ValueError, match="cookbook.rms_norm has no gradient: differentiate rms_norm of an array"):
        lab.run(jax.grad(fn), normal(0, (4, 40)))
    with pytest.raises(ValueError, match=r"residual.shape=\(3,\); must be \(4, 40\)"):
        rms_norm(normal(0, (4, 40)), residual=jax.new_ref(jnp.ones(3)))


# Mutants --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "module, name, changed",
    [
        # The mean of a first group is taken for that of the row; no mean is subtracted; dbias counts rows twice.
        (norm.Norm, "finish", lambda self, sums, cols, shift: (shift, jax.lax.rsqrt(sums[0] / cols + self.eps))),
        (norm_backward, "_minus", lambda pieces, value: pieces),
        (core.Plan, "fresh_rows", lambda self, value, *where: value),
    ],
)
def test_mutants_of_layer_norm_are_caught(module, name, changed, mutant, monkeypatch):
    shape = (2, 20003) if name == "finish" else (37, 96)
    x, weight, bias, dy = normal(0, shape, F32, 2, 3), normal(1, shape[-1:]), normal(2, shape[-1:]), normal(3, shape)
    x = x.at[:, 15000:].add(5) if name == "finish" else x
    monkeypatch.setattr(module, name, changed)
    with pytest.raises(lab.CheckError, match="error"):
        lab.check(pull(layer_norm), at_full_width(pull(exact_layer_norm)), x, weight, bias, dy, gpu=None)


def test_mutant_of_groups_is_caught(mutant):
    """All groups have the first one's weight."""
    fn, exact, arrays = group_case((40, 3 * 24), 24, F32, F32, 72, (True, True))
    mutant(norm, "_device", rem=lambda a, b: 0)
    with pytest.raises(lab.CheckError, match="error"):
        lab.check(fn, exact, *arrays, gpu=None)


@pytest.mark.parametrize("name, before", [("silu", True), ("silu", False), ("sigmoid", True), ("sigmoid", False)])
def test_mutants_of_the_gate_are_caught(name, before, mutant, monkeypatch):
    """silu is the sigmoid in the forward kernel; the backward one has another gate."""
    fn, exact, arrays = group_case((7, 2 * 24), 24, F32, F32, 24, (before, True))
    monkeypatch.setattr(norm if name == "silu" else norm_backward, name, lambda z: norm.sigmoid(z + 0.01))
    fns = (fn, exact) if name == "silu" else (pull(fn), at_full_width(pull(exact)))
    with pytest.raises(lab.CheckError, match="error"):
        lab.check(*fns, *arrays, *([] if name == "silu" else [normal(4, (7, 48))]), gpu=None)


def test_mutant_of_the_factor_is_caught(mutant, monkeypatch):
    monkeypatch.setattr(norm, "SMALLEST", 1e3)
    fn = lambda x: rms_norm(x, out_dtype=E4M3)[0].astype(F32) / 448
    with pytest.raises(lab.CheckError, match="error"):
        lab.check(fn, lambda x: exact_ratios(x, jnp.ones(96))[0], normal(0, (9, 96)), gpu=None, tolerance=4e-2)


# Arguments ------------------------------------------------------------------------------------------------------------


def test_defaults_and_names():
    x, ones, zeros = normal(0, (5, 40), BF16), jnp.ones(40), jnp.zeros(40)
    fns = [
        (lambda x: layer_norm(x), lambda x: layer_norm(x, ones, zeros)),
        (lambda x: layer_norm(x, epsilon=0.1, out_dtype="float32"), lambda x: layer_norm(x, eps=0.1, out_dtype=F32)),
        (lambda x: group_norm(x), lambda x: rms_norm(x, eps=1e-5)),
        (lambda x: group_norm(x, is_rms_norm=False), lambda x: layer_norm(x)),
        (lambda x: group_norm(x, group_size=8), lambda x: group_norm(x.reshape(5, 5, 8))),
        (lambda x: group_norm(x, ones, group_size=np.int64(8)), lambda x: group_norm(x, ones[:8], group_size=8)),
    ]  # fmt: skip
    for got, wanted in lab.run(lambda x: [(a(x), b(x).reshape(a(x).shape)) for a, b in fns], x):
        assert got.dtype == wanted.dtype
        np.testing.assert_array_equal(got, wanted)


def test_references_are_those_of_the_formula():
    x, w, b, z = normal(0, (5, 40)), normal(1, 40), normal(2, 40), normal(3, (5, 40))
    np.testing.assert_allclose(layer_norm_reference(x, w, b), exact_layer_norm(x, w, b), rtol=1e-4, atol=1e-5)
    for before, is_rms_norm in KINDS:
        got = group_norm_reference(x, w, b, z, 8, 1e-5, before, is_rms_norm)
        np.testing.assert_allclose(got, exact_group_norm(x, w, b, z, 8, before, is_rms_norm), rtol=1e-4, atol=1e-5)


def test_empty():
    assert layer_norm(jnp.zeros((0, 5)), residual=jnp.zeros((0, 5)))[1].shape == (0, 5)
    assert group_norm(jnp.zeros((3, 0))).shape == (3, 0)
    assert group_norm(jnp.zeros((0, 8)), gate=jnp.zeros((0, 8)), group_size=4).shape == (0, 8)
    y, y_scale = rms_norm(jnp.zeros((0, 5)), out_dtype=E4M3)
    assert (y.shape, y.dtype, y_scale.shape) == ((0, 5), E4M3, (0,))


@pytest.mark.parametrize(
    "fn, message",
    [
        (lambda x: layer_norm(x, jnp.ones(3)), r"cookbook.layer_norm: weight.shape=\(3,\); must be \(40,\)"),
        (lambda x: layer_norm(x, None, jnp.ones(3)), r"layer_norm: bias.shape=\(3,\)"),
        (lambda x: layer_norm(x, residual=x[0]), r"layer_norm: residual.shape=\(40,\); must be \(8, 40\), the shape"),
        (lambda x: layer_norm(x, eps=-1), "layer_norm: eps=-1.0; must be 0 or more"),
        (lambda x: layer_norm(x, out_dtype=E4M3), "layer_norm: out_dtype=.*must be bfloat16, float16 or float32"),
        (lambda x: layer_norm(x, config=3), "config=3; must be a cookbook.layer_norm.Config"),
        (lambda x: group_norm(x, group_size=7), "cookbook.group_norm: group_size=7; must divide 40"),
        (lambda x: group_norm(x, group_size=0), "group_size=0; must divide 40"),
        (lambda x: group_norm(x, group_size="8"), "group_size='8'; must be one int"),
        (
            lambda x: group_norm(x, jnp.ones(5), group_size=8),
            r"weight.shape=\(5,\); must be \(40,\), .* or \(8,\), one for",
        ),
        (lambda x: group_norm(x, gate=x[:1]), r"gate.shape=\(1, 40\); must be \(8, 40\)"),
        (lambda x: group_norm(x, norm_before_gate=1), "norm_before_gate=1; must be one bool"),
        (lambda x: group_norm(x, config=group_norm.Config(64)), "config.block_rows=64; must be at most"),
        (lambda x: group_norm(jnp.ones((1, 70000))), "70000; at most 65536 were tested"),
        (lambda x: rms_norm(x, out_dtype=jnp.uint8), "out_dtype"),
    ],
)
def test_errors_name_the_rule(fn, message):
    with pytest.raises(ValueError, match=message):
        lab.run(fn, jnp.ones((8, 40)))

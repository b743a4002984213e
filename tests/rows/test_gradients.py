"""Gradients of softmax, rms_norm and reduce_sum, and what JAX does with them: transformations, options, array-likes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lab
from cookbook import reduce_sum, rms_norm, softmax
from cookbook.rows import core
from cookbook.rows.reduce_sum import reduce_sum_reference
from cookbook.rows.rms_norm import rms_norm_reference
from cookbook.rows.softmax import softmax_reference
from tests.arrays import array

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
# More rows than blocks (8 on the interpreter's 4 SMs) and rows left over; padded, narrow, odd; spread over a warpgroup;
# too long for the registers.
slow = lambda *case: pytest.param(*case, marks=pytest.mark.slow)
SHAPES = [
    ((5, 1), F32),
    ((131, 15), BF16),
    ((37, 1000), BF16),
    ((3, 3001), F32),
    slow((3, 5, 64), F16),
    slow((11, 2056), BF16),
]


def normal(seed, shape, dtype=F32, scale=1.0):
    return array(np.random.default_rng(seed).normal(size=shape) * scale, dtype)


def pull(fn):
    """The gradient of `fn(*args)` along the last argument."""
    return lambda *args: jax.vjp(fn, *args[:-1])[1](args[-1])


def softmax_gradient(x, dy):
    """As the kernel gets it: the result that is kept has the dtype of `x`."""
    dtype = jnp.promote_types(x.dtype, F32)
    y, dy = softmax_reference(x.astype(dtype)).astype(x.dtype).astype(dtype), dy.astype(dtype)
    return (y * (dy - jnp.sum(y * dy, -1, keepdims=True)),)


def rms_norm_gradient(x, scale, dy):
    dtype = jnp.promote_types(x.dtype, F32)
    return pull(rms_norm_reference)(x.astype(dtype), scale.astype(dtype), dy.astype(dtype))


@pytest.mark.parametrize("shape, dtype", SHAPES, ids=str)
def test_softmax(shape, dtype):
    gpu = "h200" if shape == (37, 1000) else None
    lab.check(pull(softmax), softmax_gradient, normal(0, shape, dtype, 2), normal(1, shape, dtype), gpu=gpu)


@pytest.mark.parametrize("shape, dtype", SHAPES, ids=str)
def test_rms_norm(shape, dtype):
    args = normal(0, shape, dtype, 2), 1 + normal(1, shape[-1:], BF16), normal(2, shape, dtype)
    # With a single column dx is what is left of two terms that all but cancel: float32 keeps few of its digits.
    tolerance = (3e-2, None) if shape[-1] == 1 else None
    gpu = "h200" if shape == (37, 1000) else None
    lab.check(pull(rms_norm), rms_norm_gradient, *args, gpu=gpu, tolerance=tolerance)


def test_rms_norm_of_a_few_rows_without_eps():
    """Rows that are added to fill a block have no part in the gradient of scale."""
    x, scale, dy = normal(0, (2, 8)), normal(1, 8), normal(2, (2, 8))
    got = lab.run(
        lambda *args: jax.vjp(lambda x, scale: rms_norm(x, scale, eps=0.0), *args[:2])[1](args[2]), x, scale, dy
    )
    wanted = jax.vjp(lambda x, scale: rms_norm_reference(x, scale, 0.0), x, scale)[1](dy)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), got, wanted)


@pytest.mark.parametrize("dtype, out_dtype", [(F32, BF16), slow(BF16, F32)], ids=str)
def test_rms_norm_of_a_sum(dtype, out_dtype):
    """Both terms get the gradient of the sum; with no gradient of the sum itself as well."""
    x, residual, scale = normal(0, (37, 300), dtype, 2), normal(1, (37, 300)), 1 + normal(2, 300, BF16)
    fn = lambda x, residual, scale: rms_norm(x, scale, residual=residual, out_dtype=out_dtype)
    reference = lambda x, residual, scale: rms_norm_reference(x, scale, residual=residual)
    dy, d_total = normal(3, x.shape, out_dtype), normal(4, x.shape)
    got = lab.run(lambda *args: jax.vjp(fn, *args)[1]((dy, d_total)), x, residual, scale)
    wide = [a.astype(F32) for a in (x, residual, scale)]
    wanted = jax.vjp(reference, *wide)[1]((dy.astype(F32), d_total))
    for ours, theirs, like in zip(got, wanted, (x, residual, scale), strict=True):
        assert ours.dtype == like.dtype
        error = jnp.linalg.norm((ours.astype(F32) - theirs).ravel()) / jnp.linalg.norm(theirs.ravel())
        assert error < (1e-5 if like.dtype == F32 else 5e-3)
    dx = lab.run(jax.grad(lambda x: jnp.sum(fn(x, residual, scale)[0].astype(F32))), x)
    assert dx.shape == x.shape


@pytest.mark.parametrize(
    # Beyond float16 at either end; copied ahead; of a residual of float16.
    "shape, dtype, residual_dtype, size, scale",
    [((37, 256), F16, None, 64.0, 2.0**17), ((5, 4096), F16, None, 2.0**-12, 2.0**-24),
     ((37, 300), F32, F16, 1.0, 1e6)],
    ids=str,
)  # fmt: skip
def test_a_cotangent_is_not_rounded_to_float16(shape, dtype, residual_dtype, size, scale):
    """As under a loss scale: results are float32, and gradients of float16 inside its range."""
    x, weight, dy = normal(0, shape, dtype, size), normal(1, shape[-1:]), normal(2, shape, F32, scale)
    options = dict(eps=1e-12, residual=None if residual_dtype is None else normal(3, shape, residual_dtype))
    fn = lambda x, weight: rms_norm(x, weight, out_dtype=F32, **options)
    first = lambda out: out if residual_dtype is None else out[0]
    got = lab.run(lambda *args: jax.vjp(lambda *args: first(fn(*args)), *args)[1](dy), x, weight)
    wanted = jax.vjp(lambda *args: first(rms_norm_reference(*args, **options)), x.astype(F32), weight)[1](dy)
    for ours, theirs in zip(got, wanted, strict=True):
        error = jnp.linalg.norm((ours.astype(F32) - theirs).ravel()) / jnp.linalg.norm(theirs.ravel())
        assert error < (1e-3 if ours.dtype == F16 or residual_dtype == F16 else 1e-5)


def test_softmax_gradient_is_that_of_jax():
    """And not just that of the formula above."""
    x, dy = normal(0, (9, 300)), normal(1, (9, 300))
    np.testing.assert_allclose(softmax_gradient(x, dy)[0], pull(jax.nn.softmax)(x, dy)[0], atol=1e-6)


@pytest.mark.parametrize("axis", [0, -1, 2])
def test_reduce_sum(axis):
    x = normal(0, (3, 2, 40), BF16)
    dy = normal(1, reduce_sum_reference(x, axis).shape, BF16)
    (dx,) = lab.run(pull(lambda x: reduce_sum(x, axis)), x, dy)
    np.testing.assert_array_equal(dx, jnp.broadcast_to(jnp.expand_dims(dy, axis), x.shape))


@pytest.mark.parametrize("cols", [8192, *map(slow, (1024, 4096, 8191, 65536))])
def test_no_registers_are_spilled(cols):
    x, scale = jax.ShapeDtypeStruct((16384, cols), BF16), jax.ShapeDtypeStruct((cols,), F32)
    assert lab.compile_for("h200", pull(rms_norm), x, scale, x).spill_bytes == 0
    assert lab.compile_for("h200", pull(softmax), x, x).spill_bytes == 0


# At home in JAX -------------------------------------------------------------------------------------------------------

SCALE = np.linspace(0.5, 2, 40, dtype=np.float32)
OPS = {
    "softmax": softmax,
    "rms_norm": lambda x: rms_norm(x, SCALE),
    "reduce_sum": lambda x: reduce_sum(x, -1),
    "reduce_sum leading": lambda x: reduce_sum(x, 0),
}
REFERENCES = {
    "softmax": softmax_reference,
    "rms_norm": lambda x: rms_norm_reference(x, SCALE),
    "reduce_sum": lambda x: jnp.sum(x, -1),
    "reduce_sum leading": lambda x: jnp.sum(x, 0),
}


def twice(op, x):
    """A scan whose step is `op` under checkpoint."""
    step = jax.checkpoint(lambda x, _: (x + jnp.sin(op(x)) * jnp.ones_like(x[:, :1] if op(x).ndim == 1 else x), None))
    return jax.lax.scan(step, x, length=2)[0]


@pytest.mark.parametrize("name", ["rms_norm", slow("softmax")])
def test_checkpoint_scan_and_donation(name):
    x = jax.ShapeDtypeStruct((40, 40), F32)
    lab.compile_for("h200", jax.grad(lambda x: jnp.sum(twice(OPS[name], x))), x)
    donated = normal(0, (40, 40))
    wanted = REFERENCES[name](donated)
    np.testing.assert_allclose(lab.run(jax.jit(OPS[name], donate_argnums=0), donated), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["rms_norm", slow("reduce_sum leading")])
def test_x64(name):
    x = normal(0, (13, 40), BF16)
    with jax.enable_x64(True):
        out = lab.run(OPS[name], x)
        lab.compile_for("h200", pull(OPS[name]) if "sum" not in name else lambda x, _: OPS[name](x), x, out)
    assert out.dtype == BF16
    np.testing.assert_array_equal(out, lab.run(OPS[name], x))


def test_reduce_sum_has_every_derivative():
    x = normal(0, (13, 40))
    loss = lambda total: lambda x: jnp.sum(jax.grad(lambda x: jnp.sum(total(x) ** 3))(x) ** 2)
    got, wanted = lab.run(jax.grad(loss(OPS["reduce_sum"])), x), jax.grad(loss(REFERENCES["reduce_sum"]))(x)
    np.testing.assert_allclose(got, wanted, rtol=1e-4)


@pytest.mark.parametrize(
    "eps", [np.float64(1e-2), jnp.float32(1e-2), *map(slow, (1e-2, np.float32(1e-2), 0, np.array(1e-2)))]
)
def test_eps_as_any_scalar(eps):
    x, scale = normal(0, (4, 40)), normal(1, 40)
    out = lab.run(lambda x: rms_norm(x, scale, eps=eps), x)
    np.testing.assert_allclose(out, rms_norm_reference(x, scale, float(eps)), rtol=1e-5)


def test_array_likes_and_options():
    rows = [[1.0, 2.0], [3.0, 5.0]]
    np.testing.assert_allclose(lab.run(softmax, rows), jax.nn.softmax(jnp.array(rows)), rtol=1e-6)
    np.testing.assert_array_equal(lab.run(lambda: reduce_sum(np.float32(rows), np.int64(-1))), [3.0, 8.0])
    np.testing.assert_allclose(
        lab.run(lambda: rms_norm(rows, [1.0, 1.0])), rms_norm_reference(jnp.array(rows), jnp.ones(2))
    )


@pytest.mark.parametrize(
    "fn, message",
    [
        (lambda: softmax(None), "cookbook.softmax: x=None; must be an array"),
        (lambda: rms_norm(jnp.ones(4), "s"), "cookbook.rms_norm: scale=.s.; must be an array"),
        (lambda: rms_norm(jnp.ones(4), jnp.ones(4), eps="small"), "eps='small'"),
        (lambda: jax.jit(lambda e: rms_norm(jnp.ones(4), jnp.ones(4), eps=e))(0.1), "rms_norm: eps is traced"),
        (lambda: jax.jit(lambda a: reduce_sum(jnp.ones(4), a))(0), "reduce_sum: axis is traced"),
        (lambda: reduce_sum(jnp.ones(4), 0.5), "axis=0.5"),
    ],
)
def test_errors_name_the_argument(fn, message):
    with pytest.raises(ValueError, match=message):
        fn()


@pytest.mark.parametrize("left_out", ["fresh", "fresh_rows"])
def test_mutants_that_count_twice(left_out, mutant, monkeypatch):
    monkeypatch.setattr(core.Plan, left_out, lambda self, value, *where: value)
    args = normal(0, (37, 700), BF16), normal(1, 700), normal(2, (37, 700), BF16)
    with pytest.raises(lab.CheckError, match="error"):
        lab.check(pull(rms_norm), rms_norm_gradient, *args, gpu=None)

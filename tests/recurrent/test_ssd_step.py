"""One token of SSD for each sequence: the recurrence's step, and its state in place."""

import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lab
from cookbook import ssd, ssd_step
from tests.arrays import array

module = importlib.import_module("cookbook.recurrent.ssd.ssd_step")
reference, Config = module.ssd_step_reference, module.Config
slow = functools.partial(pytest.param, marks=pytest.mark.slow)


def operands(batch=2, heads=2, head_dim=64, groups=1, state_dim=128, dtype=jnp.bfloat16, seed=0):
    """x, dt, a, b, c, the state and d."""
    rng = np.random.default_rng(seed)
    normal = lambda *shape, dtype=jnp.float32: array(rng.normal(size=shape) + 0.1, dtype)
    x, b, c = (normal(batch, n, size, dtype=dtype) for n, size in ((heads, head_dim), *[(groups, state_dim)] * 2))
    dt, a = jnp.abs(normal(batch, heads)), -jnp.abs(normal(heads))
    return x, dt, a, b, c, normal(batch, heads, head_dim, state_dim), normal(heads)


def with_d(fn, **how):
    return lambda *args: fn(*args[:6], d=args[6], **how)


@pytest.mark.parametrize(
    "sizes",
    [
        dict(groups=2),
        dict(state_dim=64, head_dim=24),
        dict(batch=1, state_dim=256, dtype=jnp.float32),
        slow(dict(batch=1, head_dim=128, state_dim=1024, dtype=jnp.float16)),
    ],
    ids=str,
)
def test_sizes(sizes):
    lab.check(with_d(ssd_step), with_d(reference), *operands(**sizes))


@pytest.mark.parametrize("values", [8, slow(16), slow(128)])
def test_configs(values):
    lab.check(with_d(ssd_step, config=Config(values)), with_d(reference), *operands(batch=1), gpu=None)


def test_steps_are_the_sequence():
    """Five tokens after 70 equal 75 at once."""
    rng = np.random.default_rng(1)
    normal = lambda *shape: array(rng.normal(size=shape), jnp.bfloat16)
    x, b, c, a = normal(1, 75, 1, 64), normal(1, 75, 1, 64) / 8, normal(1, 75, 1, 64) / 8, -jnp.ones(1)
    dt = array(rng.uniform(0.01, 0.5, size=(1, 75, 1)), jnp.float32)
    wanted, final = lab.run(functools.partial(ssd, return_final_state=True), x, dt, a, b, c)
    _, state = lab.run(
        functools.partial(ssd, return_final_state=True), *(m[:, :70] for m in (x, dt)), a, b[:, :70], c[:, :70]
    )
    for t in range(70, 75):
        y, state = lab.run(ssd_step, x[:, t], dt[:, t], a, b[:, t], c[:, t], state)
        # Two units in the last place of bfloat16: the sequence's kernel rounds operands of products.
        np.testing.assert_allclose(y.astype(jnp.float32), wanted[:, t].astype(jnp.float32), rtol=2**-6, atol=2**-7)
    np.testing.assert_allclose(state, final, rtol=2**-6, atol=2**-7)


def test_a_reset():
    """-inf lets nothing stay, but everything where the step is 0."""
    x, dt, _, *rest = operands(batch=2)
    dt, a = dt.at[0].set(0.0), jnp.full(2, -jnp.inf)
    lab.check(with_d(ssd_step), with_d(reference), x, dt, a, *rest, gpu=None)
    _, state = lab.run(with_d(ssd_step), x, dt, a, *rest)
    assert (state[0] == rest[2][0]).all() and (state[1] != rest[2][1]).all()


def test_a_ref_is_written_in_place():
    *args, state, d = operands(batch=1)
    y, new = lab.run(functools.partial(ssd_step, d=d), *args, state)
    ref = jax.new_ref(state)
    np.testing.assert_array_equal(lab.run(functools.partial(ssd_step, d=d), *args, ref), y)
    np.testing.assert_array_equal(ref[...], new)


def test_nan_stays_in_its_sequence():
    x, *rest, d = operands()
    run = lambda x: lab.run(ssd_step, x, *rest)
    (y, state), (spoiled, spoiled_state) = run(x), run(x.at[0].set(jnp.nan))
    np.testing.assert_array_equal(spoiled[1], y[1])
    np.testing.assert_array_equal(spoiled_state[1], state[1])
    assert jnp.isnan(spoiled[0]).all()


@pytest.mark.parametrize("state_dim", [64, 128, 256])
def test_what_the_compiler_makes_of_it(state_dim):
    args = jax.eval_shape(lambda: operands(256, 32, 64, 1, state_dim))
    compiled = lab.compile_for("h200", with_d(ssd_step), *args)
    # At least three blocks of 128 threads find room on an SM, with up to 64 values a thread: 96 KB in flight.
    assert compiled.spill_bytes == 0 and compiled.registers <= 65_536 // (3 * 128)
    assert "LD.E.128" in compiled.sass and "ST.E.128" in compiled.sass


X, DT, A, B, C, STATE, D = operands()


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: ssd_step(X[0], DT, A, B, C, STATE), "one token"),
        (lambda: ssd_step(X, DT[:1], A, B, C, STATE), r"dt.shape=\(1, 2\); must be \(2, 2\)"),
        (lambda: ssd_step(X, DT, A, B, C, STATE[:, :, :, :64]), "state.shape"),
        (lambda: ssd_step(X, DT, A, B, C, STATE.astype(jnp.bfloat16)), "must be float32"),
        (lambda: ssd_step(X.astype(jnp.int32), DT, A, B, C, STATE), "x.dtype=int32"),
        (lambda: ssd_step(X[..., :4], DT, A, B, C, STATE[:, :, :4]), "multiple of 8"),
        (lambda: ssd_step(X, DT, A, *(jnp.repeat(m, 3, 1) for m in (B, C)), STATE), "not a multiple of 3"),
        (lambda: ssd_step("x", DT, A, B, C, STATE), "x=.x.; must be an array"),
        (lambda: Config(12), "tile_values=12"),
    ],
)
def test_bad_arguments_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_no_sequence_is_no_work():
    y, state = lab.run(ssd_step, *(m if m.ndim == 1 else m[:0] for m in (X, DT, A, B, C, STATE)))
    assert y.shape == (0, 2, 64) and state.shape == (0, 2, 64, 128)

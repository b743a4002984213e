"""One token of each sequence through Kimi Delta Attention: the recurrence's step, and its state in place."""

import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_kda import problem, recurrence

import lab
from cookbook import kda, kda_step

module = importlib.import_module("cookbook.recurrent.kda.kda_step")
reference, Config = module.kda_step_reference, module.Config
slow = functools.partial(pytest.param, marks=pytest.mark.slow)


def operands(batch=3, key_heads=1, heads=2, key_dim=128, value_dim=64, **how):
    """q, k, v, g, beta of one token of each sequence, and the states."""
    *tokens, state, _ = problem(batch, 1, key_heads, heads, key_dim, value_dim, **how)
    return *(x[:, 0] for x in tokens), state


@pytest.mark.parametrize(
    "sizes",
    [
        dict(),
        dict(batch=5, key_heads=2, heads=4, key_dim=64, value_dim=128),
        dict(batch=1, dtype=jnp.float16, beta=1.0),
        slow(dict(batch=9, heads=3, value_dim=128, decay=5.0)),
    ],
    ids=str,
)
def test_sizes(sizes):
    lab.check(kda_step, reference, *operands(**sizes))


@pytest.mark.parametrize("config", [Config(2, 1), slow(Config(4, 1)), slow(Config(2, 3))], ids=str)
def test_configs(config):
    lab.check(functools.partial(kda_step, config=config), reference, *operands(batch=11), gpu=None)


def test_the_reference_is_the_recurrence():
    args = operands(key_dim=64, unit=False)
    with jax.enable_x64(True):
        exact = [jnp.asarray(np.float64(x)) for x in args]
        o, state = reference(*exact, use_qk_l2norm=True)
        wanted, final = recurrence(*(x[:, None] for x in exact[:5]), exact[5], norm=True)
        np.testing.assert_allclose(o, wanted[:, 0], atol=1e-12)
        np.testing.assert_allclose(state, final, atol=1e-12)


def test_resets():
    *tokens, state = operands()
    strong = np.random.default_rng(0).choice([-np.inf, -1e9, -100.0, -0.1, 0.0], tokens[3].shape)
    tokens[3] = jnp.asarray(strong, jnp.float32)
    lab.check(kda_step, reference, *tokens, state, gpu=None)


def test_norms():
    """XLA divides by them and rounds to 16 bits, once for the key and once for the query."""
    how = dict(use_qk_l2norm=True)
    args = operands(unit=False)
    lab.check(functools.partial(kda_step, **how), functools.partial(reference, **how), *args, tolerance=2**-7, gpu=None)


def test_a_scale_of_zero():
    of_zero = (functools.partial(fn, scale=0.0) for fn in (kda_step, reference))
    assert (lab.check(*of_zero, *operands(), gpu=None).output[0] == 0).all()


def test_steps_are_the_sequence():
    """Three tokens after 70 equal 73 at once."""
    *tokens, state, _ = problem(1, 73, heads=2)
    of = functools.partial(kda, return_final_state=True)
    wanted, final = lab.run(lambda *args: of(*args[:5], initial_state=args[5]), *tokens, state)
    _, now = lab.run(lambda *args: of(*args[:5], initial_state=args[5]), *(x[:, :70] for x in tokens), state)
    for t in range(70, 73):
        out, now = lab.run(kda_step, *(x[:, t] for x in tokens), now)
        np.testing.assert_allclose(np.float32(out), np.float32(wanted[:, t]), atol=2e-2)
    np.testing.assert_allclose(now, final, atol=1e-2)


def test_a_ref_is_written_in_place():
    *token, state = operands()
    wanted, new = lab.run(kda_step, *token, state)
    ref = jax.new_ref(state)
    out = lab.run(kda_step, *token, ref)
    assert (out == wanted).all() and (ref[...] == new).all()


def test_the_compiled_kernel():
    for key_dim in (64, 128):
        compiled = lab.compile_for("h200", kda_step, *operands(key_dim=key_dim))
        assert compiled.spill_bytes == 0 and not compiled.remarks


def test_bad_arguments_are_refused():
    q, k, v, g, beta, state = operands()
    with lab.interpret():
        with pytest.raises(ValueError, match=r"g is .*must be \(3, 2, 128\)"):
            kda_step(q, k, v, g[..., 0], beta, state)
        with pytest.raises(ValueError, match="call it use_qk_l2norm"):
            kda_step(q, k, v, g, beta, state, use_qk_l2norm_in_kernel=True)
        with pytest.raises(ValueError, match="at least 2"):
            Config(1)

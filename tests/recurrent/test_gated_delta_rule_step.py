"""One token of each sequence through the gated delta rule: the recurrence's step, and its state in place."""

import functools
import importlib

import delta
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

import lab
from cookbook import gated_delta_rule, gated_delta_rule_step
from cookbook.recurrent.arguments import normalized

module = importlib.import_module("cookbook.recurrent.delta.gated_delta_rule_step")
reference, Config = module.gated_delta_rule_step_reference, module.Config
slow = functools.partial(pytest.param, marks=pytest.mark.slow)


def operands(batch=3, key_heads=1, heads=2, key_dim=128, value_dim=64, **how):
    """q, k, v, g, beta of one token of each sequence, and the states."""
    *tokens, state, _ = delta.problem(batch, 1, key_heads, heads, key_dim, value_dim, **how)
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
    lab.check(gated_delta_rule_step, reference, *operands(**sizes))


@pytest.mark.parametrize("config", [Config(2, 1), slow(Config(4, 1)), slow(Config(2, 3))], ids=str)
def test_configs(config):
    args = operands(batch=11)
    lab.check(functools.partial(gated_delta_rule_step, config=config), reference, *args, gpu=None)


def test_resets():
    *tokens, state = operands()
    tokens[3] = jnp.asarray([[-jnp.inf, -0.1], [-1e9, 0.0], [-100.0, -jnp.inf]])
    lab.check(gated_delta_rule_step, reference, *tokens, state, gpu=None)


def test_a_scale_of_zero():
    of_zero = (functools.partial(fn, scale=0.0) for fn in (gated_delta_rule_step, reference))
    assert (lab.check(*of_zero, *operands(), gpu=None).output[0] == 0).all()


def test_norms_of_queries_and_keys():
    q, k, *rest = operands()
    step = functools.partial(lab.run, functools.partial(gated_delta_rule_step, use_qk_l2norm=True))
    of_unit = lab.run(gated_delta_rule_step, *(normalized(x) for x in (q, 9 * k)), *rest)
    for ours, wanted in zip(step(q, 9 * k, *rest), of_unit, strict=True):
        assert (ours == wanted).all()


def test_steps_are_the_sequence():
    """Three tokens after 70 equal 73 at once."""
    *tokens, state, _ = delta.problem(1, 73, heads=2)
    of = functools.partial(gated_delta_rule, return_final_state=True)
    wanted, final = lab.run(lambda *args: of(*args[:5], initial_state=args[5]), *tokens, state)
    _, now = lab.run(lambda *args: of(*args[:5], initial_state=args[5]), *(x[:, :70] for x in tokens), state)
    for t in range(70, 73):
        out, now = lab.run(gated_delta_rule_step, *(x[:, t] for x in tokens), now)
        np.testing.assert_allclose(np.float32(out), np.float32(wanted[:, t]), atol=2e-2)
    np.testing.assert_allclose(now, final, atol=1e-2)


def test_a_ref_is_written_in_place():
    *token, state = operands()
    wanted, new = lab.run(gated_delta_rule_step, *token, state)
    ref = jax.new_ref(state)
    out = lab.run(gated_delta_rule_step, *token, ref)
    assert (out == wanted).all() and (ref[...] == new).all()


def test_what_the_compiler_makes_of_it():
    for key_dim in (64, 128):
        compiled = lab.compile_for("h200", gated_delta_rule_step, *operands(key_dim=key_dim))
        assert compiled.spill_bytes == 0 and compiled.smem_bytes <= Config().smem_bytes(key_dim)
        assert Config().blocks_per_sm * (compiled.smem_bytes + 1024) <= 228 * 1024


def changed(**changes):
    args = dict(zip(("q", "k", "v", "g", "beta", "state"), operands(), strict=True))
    for name, change in changes.items():
        args[name] = change(args[name]) if callable(change) else change
    return gated_delta_rule_step(**args)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: changed(q=lambda q: q[0]), r"q.shape=.*must be \(B, K, N\)"),
        (lambda: changed(k=lambda k: k.astype(jnp.float16)), "all bfloat16 or all float16: cast them"),
        (lambda: changed(v=lambda v: v[:2]), r"v their \(B\)"),
        (lambda: changed(v=lambda v: v[..., :40]), r"each must be one of \(64, 128\)"),
        (lambda: changed(g=lambda g: g[:, :1]), "g is "),
        (lambda: changed(state=lambda s: s.astype(jnp.bfloat16)), "state is .*float32"),
        (lambda: changed(config=Config(4, 2)), "bytes of shared memory"),
        (lambda: Config(1), "at least 2"),
    ],
)
def test_bad_arguments_are_refused(call, message):
    with lab.interpret(), pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("changes", [{}, dict(wait_smem_to_gmem=lambda n, **_: n or plgpu.wait_smem_to_gmem(0))])
def test_a_mutant_is_caught(run_only, found_if, mutant, changes):
    """The slot of a tile whose copy to memory is in flight is refilled."""
    mutant(module, "plgpu", **changes)
    with found_if(changes):
        lab.check(gated_delta_rule_step, reference, *operands(batch=20))  # Five turns of a block, in three slots.

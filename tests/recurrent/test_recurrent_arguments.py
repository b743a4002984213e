"""The recurrent ops refuse arguments by name, and return what they got where there are no tokens."""

import functools
import inspect
import re

import delta
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ssd_problems

import cookbook
import lab
from tests.arrays import array

modules = {
    name: inspect.getmodule(getattr(cookbook, name))
    for name in ("gated_delta_rule", "gated_delta_rule_step", "kda", "kda_step", "ssd", "ssd_step", "linear_attention")
}


def problems(batch=2, length=3, heads=2):
    """Arguments of each op by name."""
    q, k, v, g, beta, state, _ = delta.problem(max(batch, 1), max(length, 1), heads=max(heads, 1))
    q, k = (x[:batch, :length] for x in (q, k))
    v, g, beta = (x[:batch, :length, :heads] for x in (v, g, beta))
    state = state[:batch, :heads]
    tokens = dict(q=q, k=k, v=v, g=g, beta=beta)
    dt, a = jnp.exp(g), -jnp.ones(heads)
    wide = dict(x=v, dt=dt, a=a, b=k, c=q)
    of_channels = tokens | dict(g=g[..., None] * jnp.ones(q.shape[-1]))
    of_token = lambda args: {name: x[:, 0] if x.ndim > 1 and length else x for name, x in args.items()}
    ops = dict(
        gated_delta_rule=tokens | dict(initial_state=state), ssd=wide | dict(initial_state=state),
        kda=of_channels | dict(initial_state=state), kda_step=of_token(of_channels) | dict(state=state),
        linear_attention=dict(query=q, key=k, value=v, initial_state=state),
        gated_delta_rule_step=of_token(tokens) | dict(state=state), ssd_step=of_token(wide) | dict(state=state),
    )  # fmt: skip
    return ops if length else {name: ops[name] for name in SEQUENCES}


SEQUENCES = "gated_delta_rule", "kda", "ssd", "linear_attention"
OPS = problems()
each_op = pytest.mark.parametrize("op", OPS)


def refused(op, message, **changes):
    with lab.interpret(), pytest.raises(ValueError, match=f"^cookbook.{op}: {message}"):
        getattr(cookbook, op)(**OPS[op] | changes)


@each_op
def test_what_is_no_array_or_config_is_refused(op):
    for name in OPS[op]:
        refused(op, rf"{name}=\[\[1\], \[1, 2\]\]; must be an array", **{name: [[1], [1, 2]]})
        if name != "initial_state":
            refused(op, f"{name}=None; must be an array", **{name: None})
    for config in (4, dict(num_stages=3), modules["ssd" if "delta" in op else "gated_delta_rule"].Config()):
        refused(op, f"config=.*must be a cookbook.{op}.Config", config=config)


@each_op
@pytest.mark.parametrize(
    "name, fix",
    [("output_final_state", "call it return_final_state"), ("z", "jax.nn.silu"), ("seq_idx", "cu_seqlens")],
)
def test_names_of_other_libraries_say_what_to_do(op, name, fix):
    refused(op, f"{name}=1; must be left out or None: .*{fix}", **{name: 1})
    with pytest.raises(TypeError, match=rf"{op}\(\) got an unexpected keyword argument 'zz'"):
        getattr(cookbook, op)(**OPS[op], zz=None)


@pytest.mark.parametrize("op", SEQUENCES)
def test_what_is_compiled_into_the_kernel_may_not_be_traced(op):
    call = lambda **how: getattr(cookbook, op)(**OPS[op], **how)
    names = ["return_final_state", "scale"] if op != "ssd" else ["return_final_state", "chunk_size"]
    for name in names:
        with pytest.raises(ValueError, match=f"^cookbook.{op}: {name} is traced.*static_argnames"):
            jax.jit(lambda value, name=name: call(**{name: value}))(1)
    refused(op, "return_final_state=2; must be one bool", return_final_state=2)
    if op not in ("gated_delta_rule", "kda"):
        refused(op, "chunk_size=64.0; must be one int: pass 64", chunk_size=64.0)
        refused(op, "chunk_size=32; must be one of", chunk_size=jnp.int32(32))


def test_numbers_of_jax_are_taken():
    how = dict(chunk_size=jnp.int32(128), return_final_state=np.bool_(True))
    with lab.interpret():
        y, _ = jax.eval_shape(functools.partial(cookbook.ssd, **how), *list(OPS["ssd"].values())[:5])
    assert y.shape == OPS["ssd"]["x"].shape


@pytest.mark.parametrize("sizes", [dict(batch=0), dict(length=0), dict(heads=0)], ids=str)
def test_empty_in_empty_out(sizes):
    """Also the gradients; where there are no tokens, states stay as they are. Nothing is launched: there is no GPU."""
    for op, args in problems(**sizes).items():
        how = dict(return_final_state=True) if op in SEQUENCES else {}
        out, state = getattr(cookbook, op)(**args, **how)
        given = args.get("initial_state", args.get("state"))
        assert out.size == 0 and out.shape == args.get("v", args.get("x", args.get("value"))).shape
        np.testing.assert_array_equal(state, given)
        if op in SEQUENCES:
            fn = functools.partial(getattr(cookbook, op), **how)
            gradients = jax.grad(lambda args, fn=fn: sum(out.astype(jnp.float32).sum() for out in fn(**args)))(args)
            assert all((gradients[name] == (name == "initial_state")).all() for name in args)


def test_no_tokens_of_packed_sequences():
    args = {name: x if name == "initial_state" else x[:1, :0] for name, x in OPS["gated_delta_rule"].items()}
    how = dict(cu_seqlens=jnp.zeros(3, jnp.int32), return_final_state=True)
    out, state = cookbook.gated_delta_rule(**args, **how)
    assert out.shape == (1, 0, 2, 64) and (state == args["initial_state"]).all()


# States of other libraries --------------------------------------------------------------------------------------------


def qwen3_next(query, key, value, g, beta, initial_state):
    """Qwen3-Next's recurrence, with its layout of states: (B, H, N, P)."""
    query, key, value, g, beta, state = (np.asarray(x, np.float64) for x in (query, key, value, g, beta, initial_state))
    out = np.zeros(value.shape)
    for t in range(value.shape[1]):
        state = state * np.exp(g[:, t])[..., None, None]
        held = np.einsum("bhnp,bhn->bhp", state, key[:, t])
        state = state + np.einsum("bhn,bhp->bhnp", key[:, t], (value[:, t] - held) * beta[:, t, :, None])
        out[:, t] = np.einsum("bhnp,bhn->bhp", state, query[:, t]) / np.sqrt(query.shape[-1])
    return out, state


def test_the_docstring_converts_a_state_of_qwen3_next():
    line = re.search(r"^ +initial_state = (.*)$", modules["gated_delta_rule"].__doc__, re.M)[1]
    convert = lambda theirs: eval(line, dict(jnp=jnp, theirs=theirs))
    q, k, v, g, beta, theirs, _ = delta.problem(length=20, heads=2, key_heads=2, dtype=jnp.float32)
    wanted, wanted_state = qwen3_next(q, k, v, g, beta, theirs)
    reference = modules["gated_delta_rule"].gated_delta_rule_reference
    out, state = reference(q, k, v, g, beta, initial_state=convert(theirs), return_final_state=True)
    np.testing.assert_allclose(out, wanted, atol=1e-5)
    np.testing.assert_allclose(convert(state), wanted_state, atol=1e-5)


def simple_gla(q, k, v, g, scale, initial_state):
    """fla's recurrence, with its layout of states: (B, H, N, P)."""
    q, k, v, g, state = (np.asarray(x, np.float64) for x in (q, k, v, g, initial_state))
    out = np.zeros(v.shape)
    for t in range(v.shape[1]):
        state = state * np.exp(g[:, t])[..., None, None] + np.einsum("bhn,bhp->bhnp", k[:, t], v[:, t])
        out[:, t] = scale * np.einsum("bhnp,bhn->bhp", state, q[:, t])
    return out, state


def test_the_tables_of_ssd_and_linear_attention_are_those_of_fla():
    x, dt, a, b, c = ssd_problems.operands(length=20, heads=2, groups=2, dtype=jnp.float32)
    theirs = array(np.random.default_rng(1).normal(size=(1, 2, 64, 64)), jnp.float32)
    state = jnp.swapaxes(theirs, 2, 3)
    pairs = (
        (modules["ssd"].ssd_reference(x, dt, a, b, c, initial_state=state),
         simple_gla(c, b, x * dt[..., None], dt * a, 1.0, theirs)),
        (modules["linear_attention"].linear_attention_reference(c, b, x, initial_state=state),
         simple_gla(c, b, x, 0 * dt, 64**-0.5, theirs)),
    )  # fmt: skip
    for (out, final), (wanted, wanted_final) in pairs:
        np.testing.assert_allclose(out, wanted, atol=1e-4)
        np.testing.assert_allclose(jnp.swapaxes(final, 2, 3), wanted_final, atol=1e-4)

"""Sinks: a logit of each head that takes its share of the weights, in every op, and its gradient."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_attention as dense
import test_attention_bwd as backward
import test_paged_attention as decode
import test_varlen_attention as packed

import lab
from cookbook import attention, paged_attention, ragged_paged_attention, varlen_attention
from lab import interpreter
from tests.arrays import array


def sinks(num_heads):
    """They have the size of logits: none takes all, and none takes nothing."""
    return array(2 * np.random.default_rng(0).normal(size=num_heads) + 1, jnp.float32)


@pytest.mark.parametrize("how", [dict(), dict(is_causal=True, logits_soft_cap=3.0), dict(local_window_size=(5, 0))])
def test_attention(how):
    """With a window there are queries that see nothing else."""
    report = dense.check(*dense.operands(150, 77), sinks=sinks(2), gpu="h200", **how)
    if "local_window_size" in how:
        out, lse = report.output
        assert (out[:, 90:] == 0).all()
        np.testing.assert_allclose(lse[0, 90:], np.tile(sinks(2), (60, 1)), rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("heads, kv_heads", [(6, 2), (71, 1)])
def test_packed_and_paged(heads, kv_heads):
    """Groups whose heads do not fill the rows of a warpgroup, and one with more heads than that has rows."""
    more = dict(sinks=sinks(heads), gpu="h200" if heads == 6 else None)
    packed.check(*packed.packed([9, 12, 0], [20, 12, 5], heads, kv_heads), is_causal=True, **more)
    packed.check(*packed.paged([9, 12], [20, 70], heads, kv_heads), fn=ragged_paged_attention, **more)
    decode.check(*decode.operands([90, 40, 0], heads, kv_heads), **more)


def test_a_sink_counts_once_in_a_sequence_of_many_pieces(monkeypatch):
    monkeypatch.setattr(interpreter, "NUM_SMS", 13)
    decode.check(*decode.operands([700, 70], heads=2, kv_heads=1), sinks=sinks(2))


@pytest.mark.slow
def test_no_sinks_are_sinks_of_minus_infinity():
    none = jnp.full((2,), -jnp.inf)
    for op, args in (
        (attention, dense.operands(70, 50)),
        (varlen_attention, packed.packed()),
        (paged_attention, decode.operands([90, 0], heads=2)),
    ):
        op = functools.partial(op, return_lse=True)
        for got, wanted in zip(lab.run(functools.partial(op, sinks=none), *args), lab.run(op, *args), strict=True):
            np.testing.assert_array_equal(got, wanted)


def gradients(fn, *args, **kwargs):
    """(dq, dk, dv, dsinks) of `fn`, for given gradients of out and lse."""
    *operands, d_out, d_lse = args
    fn = (
        functools.partial(fn, return_lse=True, **kwargs)
        if fn is not dense.reference
        else functools.partial(fn, **kwargs)
    )
    (out, lse), vjp = jax.vjp(lambda *args: fn(*args[:3], sinks=args[3]), *operands)
    return vjp((d_out.astype(out.dtype), d_lse.astype(lse.dtype)))


def check_gradients(fn=attention, gpu=None, **how):
    query, key, value = dense.operands(100, 77, heads=4, kv_heads=2)
    rng = np.random.default_rng(1)
    d_out = array(rng.normal(size=query.shape) + 0.2, query.dtype)
    d_lse = array(rng.normal(size=query.shape[:3]), jnp.float32)
    return lab.check(
        functools.partial(gradients, fn, **how), functools.partial(gradients, dense.reference, **how),
        query, key, value, sinks(4), d_out, d_lse, tolerance=backward.TOLERANCE[query.dtype], gpu=gpu,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("how", [dict(is_causal=True), dict(local_window_size=(5, 0), logits_soft_cap=3.0)])
def test_gradients(how):
    check_gradients(gpu="h200", **how)


@pytest.mark.slow
def test_no_sink_and_no_key_have_no_gradient():
    """Queries of segment 1 see no key; the first head has no sink."""
    q, k, v = dense.operands(40, 24)
    ids = [np.arange(size)[None].repeat(len(q), 0) for size in (40, 24)]
    segments = dict(segment_ids=ids[0] % 2, kv_segment_ids=0 * ids[1])
    loss = lambda sinks: (attention(q, k, v, sinks=sinks, **segments).astype(jnp.float32) ** 2).sum()
    found = lab.run(jax.grad(loss), jnp.asarray([-jnp.inf, 0.5]))
    assert found[0] == 0 and np.isfinite(found[1]) and found[1] != 0


def test_gradients_of_sinks_keep_their_dtype():
    args = dense.operands(20, 20)
    loss = lambda sinks: attention(*args, sinks=sinks).astype(jnp.float32).sum()
    assert lab.run(jax.grad(loss), sinks(2).astype(jnp.bfloat16)).dtype == jnp.bfloat16


@pytest.mark.parametrize(
    "wrong, message",
    [
        (jnp.ones(3), r"sinks = \(3,\), float32; must be \(2,\)"),
        (jnp.ones(2, jnp.int32), "one logit per head, in floats"),
    ],
)
@pytest.mark.parametrize("name", ["attention", "varlen_attention", "paged_attention"])
def test_errors_name_the_rule(name, wrong, message):
    op, args = dict(
        attention=(attention, dense.operands(20, 20)),
        varlen_attention=(varlen_attention, packed.packed()),
        paged_attention=(paged_attention, decode.operands([9], heads=2)),
    )[name]
    with pytest.raises(ValueError, match=f"cookbook.{name}: .*{message}"), lab.interpret():
        op(*args, sinks=wrong)


MUTANTS = [
    ("attention", "steps", "", ""),  # Nothing is wrong, and nothing is found.
    ("attention", "steps", "weight = 0.0 if sinks is None else 1.0", "weight = 0.0"),
    ("attention", "dense/kernel", "sinks[:, None] * LOG2E", "sinks[:, None]"),
    ("attention", "dense/kernel", "core.row_sinks(sinks, tile.head)", "core.row_sinks(sinks, tile.kv_head)"),
    ("gradients", "dense/attention", "", ""),
    ("gradients", "dense/attention", "return -(weight", "return (weight"),
    (
        "gradients",
        "dense/attention",
        "preferred_element_type=jnp.float32) - d_lse",
        "preferred_element_type=jnp.float32)",
    ),
    ("varlen_attention", "packed/plan", "", ""),
    ("varlen_attention", "packed/plan", "first + np.arange(WG_ROWS) % self.heads", "first + 0 * np.arange(WG_ROWS)"),
    ("varlen_attention", "packed/plan", "np.minimum(unit % self.chunks * self.heads, group - self.heads)", "0"),
    ("paged_attention", "decode/merge_pieces", "", ""),
    ("paged_attention", "decode/merge_pieces", "numbers(1.0)\n", "numbers(0.0)\n"),
    ("paged_attention", "decode/merge_pieces", "per_row) * LOG2E, numbers", "per_row), numbers"),
    ("paged_attention", "decode/plan", "unit % self.chunks * self.rows + row", "row"),
]


@pytest.mark.parametrize("op, file, old, new", MUTANTS)
def test_mutants_are_caught(run_only, found_if, mutant_of, op, file, old, new):
    """A sink that is not counted, in the wrong base, of another head, a gradient of the wrong sign or without lse's."""
    rooms = dict(varlen_attention="packed", paged_attention="decode")
    mutant = mutant_of(file, old, new)(f"{rooms.get(op, 'dense')}.{'attention' if op == 'gradients' else op}")
    with found_if(old != new):
        if op == "attention":
            dense.check(*dense.operands(70, 50), fn=mutant.attention, config=mutant.Config(64), sinks=sinks(2))
        elif op == "gradients":
            check_gradients(mutant.attention)
        elif op == "varlen_attention":
            fn, args = mutant.varlen_attention, packed.packed([9, 12], [20, 12], 71, 1)
            packed.check(*args, fn=fn, config=mutant.Config(64), sinks=sinks(71))
        else:
            fn, args = mutant.paged_attention, decode.operands([90, 40], 71, 1)
            decode.check(*args, fn=fn, config=mutant.Config(64), sinks=sinks(71))

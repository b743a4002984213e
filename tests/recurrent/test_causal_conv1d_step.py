"""A few tokens of each sequence through the causal convolution, and its state in place."""

import functools
import inspect

import conv
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lab
from cookbook import causal_conv1d, causal_conv1d_step
from tests.lowering import lowered

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
reference = inspect.getmodule(causal_conv1d_step).causal_conv1d_step_reference
slow = functools.partial(pytest.param, marks=pytest.mark.slow)


def exact(x, state, weight, bias, silu=True):
    rows = x if x.ndim == 3 else x[:, None]
    y, final, *_ = conv.exact(rows, weight, bias, state, np.zeros(rows.shape), np.zeros(state.shape), silu=silu)
    return y.reshape(x.shape), final


@pytest.mark.parametrize(
    "sizes, is_flat",
    [
        (dict(batch=3, length=1, columns=256), True),
        (dict(batch=2, length=3, columns=130, taps=8), False),
        slow(dict(batch=2, length=1, columns=128, taps=2, dtype=F32), False),
        slow(dict(batch=1, length=9, columns=40, taps=3, dtype=F16), False),
    ],
    ids=str,
)
def test_sizes(sizes, is_flat):
    x, weight, bias, state, *_ = conv.problem(**sizes)
    x = x[:, 0] if is_flat else x
    for activation in ("silu", None):
        fn = functools.partial(causal_conv1d_step, activation=activation)
        lab.check(fn, functools.partial(exact, silu=activation is not None), x, state, weight, bias, gpu=None)


def test_steps_are_the_sequence():
    """Bitwise: seven tokens after 20, one, two and four at a time."""
    x, weight, bias, state, *_ = conv.problem(batch=2, length=27)
    fn = functools.partial(causal_conv1d, return_final_state=True, activation="silu")
    run = lambda x, state: lab.run(lambda x, state: fn(x, weight, bias, initial_state=state), x, state)
    (wanted, final), (_, state) = run(x, state), run(x[:, :20], state)
    step = functools.partial(causal_conv1d_step, activation="silu")
    for first, end in ((20, 21), (21, 23), (23, 27)):
        y, state = lab.run(step, x[:, first:end], state, weight, bias)
        np.testing.assert_array_equal(y, wanted[:, first:end])
    np.testing.assert_array_equal(state, final)


def test_a_state_of_another_dtype():
    x, weight, bias, state, *_ = conv.problem(batch=2, length=2, columns=128)
    lab.check(causal_conv1d_step, functools.partial(exact, silu=False), x, state.astype(F32), weight, bias, gpu=None)


@pytest.mark.parametrize("columns", [128, 130])
def test_a_ref_is_written_in_place(columns):
    x, weight, _, state, *_ = conv.problem(batch=2, length=1, columns=columns)
    y, new = lab.run(causal_conv1d_step, x, state, weight)
    ref = jax.new_ref(state)
    np.testing.assert_array_equal(lab.run(lambda x, weight: causal_conv1d_step(x, ref, weight), x, weight), y)
    np.testing.assert_array_equal(ref[...], new)


def test_nan_stays_in_its_channel():
    x, weight, bias, state, *_ = conv.problem(batch=2, length=2, columns=128)
    run = lambda x, state: lab.run(causal_conv1d_step, x, state, weight, bias)
    wanted, spoiled = run(x, state), run(x.at[0, 1, 5].set(jnp.nan), state.at[1, 9, 0].set(jnp.nan))
    bad = [np.isnan(np.asarray(m, np.float32)) for m in spoiled]
    assert bad[0].sum() == 2 and bad[0][0, 1, 5] and bad[0][1, 0, 9] and bad[1].sum() == 1 and bad[1][0, 5, 2]
    for found, wanted_, nan in zip(spoiled, wanted, bad, strict=True):
        np.testing.assert_array_equal(np.asarray(found)[~nan], np.asarray(wanted_)[~nan])


def test_what_the_compiler_makes_of_it():
    x, weight, bias, state, *_ = jax.eval_shape(lambda: conv.problem(256, 1, 8192))
    compiled = lab.compile_for("h200", causal_conv1d_step, x, state, weight, bias)
    # 16 blocks of 128 threads on an SM, which are all that it has room for.
    assert compiled.spill_bytes == 0 and compiled.registers <= 32
    lowered(causal_conv1d_step, x, state, jax.ShapeDtypeStruct(weight.shape, F32), bias)


X, WEIGHT, BIAS, STATE, *_ = conv.problem(batch=2, length=3)
GIVEN = dict(x=X, state=STATE, weight=WEIGHT, bias=BIAS)


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(x=X[0, 0]), r"x.shape=\(200,\); must be \(B, D\) or \(B, T, D\)"),
        (dict(weight=WEIGHT[:, :3]), r"state.shape=\(2, 200, 3\); must be \(2, 200, 2\)"),
        (dict(state=STATE[:1]), r"state.shape=\(1, 200, 3\); must be \(2, 200, 3\)"),
        (dict(state=STATE.astype(jnp.int8)), "state.dtype=int8; must be"),
        (dict(activation="relu"), "activation='relu'; must be"),
        (dict(cache_seqlens=1), "cache_seqlens=1; must be left out or None"),
    ],
)
def test_bad_arguments_are_refused(changes, message):
    with lab.interpret(), pytest.raises(ValueError, match=f"^cookbook.causal_conv1d_step: .*{message}"):
        causal_conv1d_step(**GIVEN | changes)


def test_no_sequence_is_no_work():
    y, state = causal_conv1d_step(X[:0], STATE[:0], WEIGHT)
    assert y.shape == (0, 3, 200) and state.shape == (0, 200, 3)

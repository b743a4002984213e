"""The causal convolution and its gradients, against NumPy in float64: any sizes, cuts, packed sequences and states."""

import functools
import inspect
import itertools

import conv
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mutants import copy_of

import cookbook
import lab
from bench.ops import prefixes
from cookbook import _host, causal_conv1d
from cookbook.recurrent.conv import plan
from tests.arrays import array
from tests.lowering import H200, lowered

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
module = inspect.getmodule(causal_conv1d)
reference, Config = module.causal_conv1d_reference, module.Config
slow = functools.partial(pytest.param, marks=pytest.mark.slow)
LENS = (0, 2, 17, 0, 1, 16, 0)  # The last 4 of 40 rows belong to no sequence.


def both(fn, x, weight, bias, state, dy, d_state, **how):
    """(y, final states, gradients of all operands)."""
    call = functools.partial(fn, return_final_state=True, **how)
    out, pull = jax.vjp(lambda x, weight, bias, state: call(x, weight, bias, initial_state=state),
                        x, weight, bias, state)  # fmt: skip
    return *out, *pull((dy, d_state))


def check(args, *, lens=None, silu=True, gpu=None, fn=causal_conv1d, tolerance=None, **how):
    how |= dict(activation="silu" if silu else None)
    if lens is not None:
        how["cu_seqlens"] = array(conv.starts(lens), jnp.int32)
    wanted = functools.partial(conv.exact, lens=lens, silu=silu)
    # Gradients of x have two terms at the last rows, each rounded: that of y and that of the final state.
    tolerance = tolerance or (None, None, 2 * float(jnp.finfo(args[0].dtype).eps), None, None, None)
    return lab.check(functools.partial(both, fn, **how), wanted, *args, gpu=gpu, tolerance=tolerance)


@pytest.mark.parametrize(
    "sizes, how",
    [
        (dict(length=53, columns=384), dict(gpu="h200")),
        (dict(batch=3, length=1, columns=130, taps=2), dict(silu=False)),
        (dict(length=5, columns=3, taps=8, dtype=F32), {}),
        slow(dict(batch=2, length=33, columns=257, taps=3, dtype=F16), {}),
        slow(dict(length=70, columns=640, taps=5), {}),
        slow(dict(length=18, columns=1536, taps=4, dtype=F32), dict(silu=False)),
    ],
    ids=str,
)
def test_sizes(sizes, how):
    check(conv.problem(**sizes), **how)


@pytest.mark.parametrize(
    "taps, silu, dtype", [(4, True, BF16), slow(8, False, F32), slow(2, True, F16)], ids=str
)  # fmt: skip
def test_packed_sequences(taps, silu, dtype):
    check(conv.problem(taps=taps, lens=LENS, dtype=dtype), lens=LENS, silu=silu)


def test_sequences_longer_than_parts():
    lens = 70, 3, 64
    check(conv.problem(length=140, columns=128, lens=lens), lens=lens)


@pytest.mark.parametrize("config", [Config(5, 2, 1), slow(Config(1, 4, 1)), slow(Config(64, 32, 1))], ids=str)
def test_configs(config):
    args = conv.problem(length=23, columns=200)
    check(args, config=config)
    y, wanted = (lab.run(functools.partial(causal_conv1d, config=c), *args[:3]) for c in (config, None))
    np.testing.assert_array_equal(y, wanted)


def test_mixed_dtypes():
    x, weight, bias, state, dy, d_state = conv.problem(length=9)
    mixed = x, weight.astype(F32), bias.astype(F16), state.astype(F32), dy, d_state.astype(F32)
    y, final, *gradients = check(mixed, tolerance=(None, None, 2**-7, None, None, None)).output
    assert [m.dtype for m in (y, final, *gradients)] == [BF16, F32, BF16, F32, F16, F32]


def test_without_bias_or_state():
    x, weight, *_, dy, _ = conv.problem(length=21)
    fn = lambda x, weight, dy: jax.vjp(causal_conv1d, x, weight)[1](dy)
    zeros = np.zeros((1, 200, 3))
    wanted = lambda x, weight, dy: conv.exact(x, weight, zeros[0, :, 0], zeros, dy, zeros, silu=False)[2:4]
    lab.check(fn, wanted, x, weight, dy, gpu=None)
    y, state = lab.run(functools.partial(causal_conv1d, return_final_state=True), x[:, :2], weight)
    assert state.dtype == BF16 and (state[..., 0] == 0).all() and (state[0, :, 1:].T == x[0, :2]).all()
    assert y.shape == (1, 2, 200)


def test_two_halves_are_the_whole():
    """Bitwise, from the first one's final state."""
    x, weight, bias, state, *_ = conv.problem(batch=2, length=30, dtype=F32)
    fn = functools.partial(causal_conv1d, activation="swish", return_final_state=True)
    run = lambda x, state: lab.run(lambda x, state: fn(x, weight, bias, initial_state=state), x, state)
    wanted, wanted_state = run(x, state)
    for cut in (1, 2, 17):
        y, middle = run(x[:, :cut], state)
        rest, final = run(x[:, cut:], middle)
        np.testing.assert_array_equal(jnp.concatenate([y, rest], 1), wanted)
        np.testing.assert_array_equal(final, wanted_state)


def test_nan_stays_in_its_sequence():
    """Also that of rows of no sequence, which have zeros as results and as gradients."""
    args, how = conv.problem(lens=LENS), dict(cu_seqlens=array(conv.starts(LENS), jnp.int32))
    fn = functools.partial(both, causal_conv1d, **how)
    y, final, dx, *sums, d_state = lab.run(fn, *args)
    others = np.r_[0:2, 19:40]  # Rows of all but the third sequence, which has rows 2 to 18.
    spoil = lambda m, rows: m.at[:, rows].set(jnp.nan)
    spoiled = lab.run(fn, spoil(args[0], slice(2, 19)), *args[1:4], spoil(args[4], slice(2, 19)), args[5])
    np.testing.assert_array_equal(spoiled[0][:, others], y[:, others])
    np.testing.assert_array_equal(spoiled[2][:, others], dx[:, others])
    keep = np.arange(len(LENS)) != 2
    np.testing.assert_array_equal(spoiled[1][keep], final[keep])
    np.testing.assert_array_equal(spoiled[5][keep], d_state[keep])
    unowned = lab.run(fn, spoil(args[0], slice(36, 40)), *args[1:4], spoil(args[4], slice(36, 40)), args[5])
    for found, wanted in zip(unowned, (y, final, dx, *sums, d_state), strict=True):
        np.testing.assert_array_equal(found, wanted)
    assert not np.any(y[:, 36:]) and not np.any(dx[:, 36:])


def test_nan_stays_in_its_row_of_a_batch():
    args = conv.problem(batch=3, length=19, columns=128)
    run = lambda *args: lab.run(functools.partial(both, causal_conv1d), *args)
    by_sequence = 0, 3, 4, 5  # Weights and bias are those of all.
    spoiled = (m.at[1].set(jnp.nan) if i in by_sequence else m for i, m in enumerate(args))
    wanted, spoiled = run(*args), run(*spoiled)
    for of in (0, 1, 2, 5):  # The weights' gradients are sums over all.
        np.testing.assert_array_equal(spoiled[of][::2], wanted[of][::2])
        assert np.isnan(np.asarray(spoiled[of], np.float32)[1]).all()


def test_one_channel_does_not_touch_another():
    x, weight, bias, state, dy, d_state = conv.problem(length=9, columns=384)
    run = lambda x: lab.run(functools.partial(both, causal_conv1d), x, weight, bias, state, dy, d_state)
    for found, wanted in zip(run(x.at[..., 7].set(jnp.nan)), run(x), strict=True):
        axis = [n == 384 for n in found.shape].index(True)
        np.testing.assert_array_equal(np.delete(found, 7, axis), np.delete(wanted, 7, axis))


def test_vmap_scan_and_remat():
    x, weight, bias, state, dy, _ = conv.problem(batch=2, length=6)
    fn = functools.partial(causal_conv1d, activation="silu", return_final_state=True)

    def scanned(x, weight):
        step = jax.checkpoint(lambda state, x: fn(x, weight, bias, initial_state=state)[::-1])
        return jnp.concatenate(jax.lax.scan(step, state, jnp.stack([x[:, :3], x[:, 3:]]))[1], axis=1)

    wanted = lambda x, weight: fn(x, weight, bias, initial_state=state)[0]
    mapped = lambda x, weight: jax.vmap(lambda x, s: fn(x[None], weight, bias, initial_state=s[None])[0][0])(x, state)
    run = lambda fn: lab.run(lambda *args: jax.vjp(fn, *args)[1](dy), x, weight)
    exactly = run(wanted)
    for found, of in itertools.product((run(scanned), run(mapped)), range(2)):
        # Where a scan is cut, two rounded terms make a gradient.
        assert conv.distance(found[of], exactly[of]) < 2**-8


def test_the_reference_is_exact():
    """`causal_conv1d_reference`, which users differentiate, in float64."""
    for lens in (None, LENS):
        args = conv.problem(lens=lens)
        with jax.enable_x64(True):
            x, weight, bias, state = (jnp.asarray(np.asarray(m, np.float64)) for m in args[:4])
            how = {} if lens is None else dict(cu_seqlens=jnp.asarray(conv.starts(lens)))
            found = reference(x, weight, bias, activation="silu", initial_state=state, **how)
        for out, wanted in zip(found, conv.exact(*args, lens=lens), strict=False):
            np.testing.assert_allclose(out, wanted, atol=1e-12)


def test_layouts_of_other_libraries():
    """The table of the docstring: fla's state has one token more, causal_conv1d has time last."""
    x, weight, bias, *_ = conv.problem(length=7, dtype=F32)
    theirs = array(np.random.default_rng(3).normal(size=(1, 200, 4)), F32)
    y, final = reference(x, weight, bias, initial_state=theirs[:, :, 1:])
    rows = np.concatenate([np.swapaxes(theirs, 1, 2), x], axis=1)
    wanted = [(rows[0, t + 1 : t + 5] * np.asarray(weight).T).sum(0) + np.asarray(bias) for t in range(7)]
    np.testing.assert_allclose(y[0], np.stack(wanted), atol=1e-5)
    np.testing.assert_array_equal(final, np.swapaxes(rows[:, -3:], 1, 2))


# Plans ----------------------------------------------------------------------------------------------------------------


def gradient(packed: bool, **how):
    """(a function of all operands, how many sequences are packed): y, states and all gradients."""

    def fn(x, weight, bias, state, dy, d_state, *cu_seqlens):
        more = dict(cu_seqlens=cu_seqlens[0]) if packed else {}
        return both(causal_conv1d, x, weight, bias, state, dy, d_state, activation="silu", **more, **how)

    return fn


def avals(batch, length, columns, taps, dtype=BF16, num_seqs=None):
    aval = lambda *shape: jax.ShapeDtypeStruct(shape, dtype)
    x, states = aval(batch, length, columns), aval(num_seqs or batch, columns, taps - 1)
    packed = [jax.ShapeDtypeStruct((num_seqs + 1,), jnp.int32)] if num_seqs else []
    return [x, aval(columns, taps), aval(columns), states, x, states, *packed]


@pytest.mark.parametrize(
    "columns, taps, dtype, num_seqs, bits",
    [
        (4096, 4, BF16, None, 64),
        slow(4224, 8, BF16, 5, 32),
        slow(4096, 3, F32, None, 128),
        slow(4098, 5, F32, 5, 64),
        slow(131, 2, F16, None, 16),
    ],
)
def test_default_plans_have_room(columns, taps, dtype, num_seqs, bits):
    """No spills, and loads as long as the plan says."""
    args = avals(1 if num_seqs else 8, 4096, columns, taps, dtype, num_seqs)
    compiled = lab.compile_for("h200", gradient(num_seqs is not None), *args)
    assert compiled.spill_bytes == 0
    # At least three blocks of 128 threads on an SM, and so enough loads in flight.
    assert compiled.registers <= 65_536 // (3 * 128)
    name = {16: "LDG.E.U16", 32: "LDG.E R"}.get(bits, f"LDG.E.{bits}")
    assert all(name in kernel.sass for kernel in compiled.kernels)


@pytest.mark.parametrize("columns", [130, *map(slow, (1, 127, 258, 1284))])
def test_every_number_of_columns_is_lowered(columns):
    lowered(gradient(False), *avals(1, 3, columns, 4, F16))


def test_how_columns_are_dealt():
    assert plan.vec_of(4096, 4) == 4 and plan.vec_of(4097, 4) == 1 and plan.vec_of(128, 8) == 1
    assert plan.vec_of(384, 4) == 1  # Tiles of 128 and not of 512, most of which would be computed twice.
    for columns in range(128, 5000):
        vec = plan.vec_of(columns, 8)
        assert columns % vec == 0 and vec * 128 <= columns


def test_a_grid_of_many_parts(monkeypatch):
    """A GPU refuses more than 65,535 along any axis of a grid but the last."""
    grids, rows = [], 70_000

    def stub(body, *, out_type, **how):
        grids.append(_host._launchable(**how)["grid"])
        return lambda *operands: jax.tree.map(lambda out: jnp.zeros(out.shape, out.dtype), out_type)

    monkeypatch.setattr(_host, "kernel", stub)
    jax.clear_caches()
    with _host.building_for(H200):
        jax.eval_shape(gradient(True), *avals(1, rows, 1024, 4, num_seqs=rows))
    jax.clear_caches()
    assert all(max(grid[:-1]) < 2**16 < grid[-1] for grid in grids)


# Arguments ------------------------------------------------------------------------------------------------------------

X, WEIGHT, BIAS, STATE, *_ = conv.problem(batch=2, length=3)
GIVEN = dict(x=X, weight=WEIGHT, bias=BIAS, initial_state=STATE)


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(x=X[0]), r"x.shape=\(3, 200\); must be \(B, T, D\)"),
        (dict(weight=WEIGHT.T), r"weight.shape=\(4, 200\); must be \(200, W\)"),
        (dict(weight=WEIGHT[:, :1], initial_state=None), "W from 2 to 8.*padded with zeros on the left"),
        (dict(bias=BIAS[:7]), r"bias.shape=\(7,\); must be \(200,\)"),
        (dict(initial_state=STATE[:1]), r"initial_state.shape=\(1, 200, 3\); must be \(2, 200, 3\)"),
        (dict(x=X.astype(jnp.int32)), "x.dtype=int32; must be bfloat16, float16 or float32: cast"),
        (dict(activation="gelu"), "activation='gelu'; must be 'silu', 'swish' or None"),
        (dict(cu_seqlens=prefixes(2, 1)), "cu_seqlens with a batch of 2"),
        (dict(config=Config(vec=4)), "config.vec=4; must divide the 200 columns"),
        (dict(return_final_state=2), "return_final_state=2; must be one bool"),
        (dict(seq_idx=1), "seq_idx=1; must be left out or None: say where sequences begin by cu_seqlens"),
        (dict(residual=X), "residual=...; must be left out or None: add it"),
        (dict(initial_states=STATE), "initial_states=...; must be left out or None: call it initial_state"),
    ],
)
def test_bad_arguments_are_refused(changes, message):
    with lab.interpret(), pytest.raises(ValueError, match=f"^cookbook.causal_conv1d: .*{message}"):
        causal_conv1d(**GIVEN | changes)


def test_configs_that_no_kernel_has():
    for bad in (dict(vec=3), dict(part_rows=0), dict(rows_at_once=0)):
        with pytest.raises(ValueError, match="must be"):
            Config(**bad)


def test_no_tokens_leave_states_as_they_are():
    for x in (X[:, :0], X[:0]):
        y, state = cookbook.causal_conv1d(x, WEIGHT, initial_state=STATE[: len(x)], return_final_state=True)
        assert y.shape == x.shape and (state == STATE[: len(x)]).all()


# Mutants: each fails the check that the kernel passes. ----------------------------------------------------------------


@pytest.mark.parametrize(
    "file, old, new",
    [
        ("conv/kernel", "pl.loop(end, part.end)", "pl.loop(end, part.end)"),
        ("conv/kernel", "groups * at_once, end, lambda", "groups * at_once, end - 1, lambda"),
        ("conv/plan", "jnp.minimum(i + 1, groups - 1)", "jnp.minimum(i, groups - 1)"),
        ("conv/kernel", "pl.loop(end, part.end)", "pl.loop(end, end)"),
        ("conv/plan", "keep_if(row >= self.seq_first, value, before)", "value"),
        ("conv/plan", "row - self.seq_first + num, 0", "row - self.seq_first, 0"),
        ("conv/kernel_backward", "weight[::-1]", "weight"),
        ("conv/kernel_backward", "row < part.seq_end, row < part.end", "row < part.seq_end, row < part.seq_end"),
        ("conv/kernel_backward", "row < part.seq_end, row < part.end", "row < plan.num_rows, row < part.end"),
        ("conv/kernel_backward", "(part.first_row == part.seq_first) & (part", "(part.first_row >= 0) & (part"),
        ("conv/kernel_backward", "(1.0 + z * (1.0 - share))", "(1.0 + z)"),
        ("conv/causal_conv1d", "d_initial + more", "d_initial"),
        ("conv/causal_conv1d", ".add(dx_rows)", ".add(0)"),
    ],
    ids=str,
)
def test_mutants_are_caught(run_only, monkeypatch, tmp_path, file, old, new):
    """Rows left out, not zeroed, or of neighbours; taps in the wrong order; sums counted twice; states forgotten."""
    fn = copy_of("conv.causal_conv1d", monkeypatch, tmp_path, file, old, new).causal_conv1d
    lens = 20, 1, 16
    args = conv.problem(lens=lens, columns=128)
    args = (args[0].at[:, 37:].set(jnp.nan), *args[1:])
    if old == new:
        check(args, lens=lens, fn=fn)
    else:
        with pytest.raises(lab.CheckError):
            check(args, lens=lens, fn=fn)

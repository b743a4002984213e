"""The gated delta rule: chunks equal the recurrence, whatever the lengths, decays, parts and neighbours."""

import dataclasses
import functools
import importlib

import delta
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from delta import check, problem
from mutants import copy_of

import lab
from cookbook import _host, gated_delta_rule
from cookbook.recurrent.delta import kernel, kernel_backward, kernel_gradients
from cookbook.recurrent.sequences import Sequences
from tests.arrays import array

module = importlib.import_module("cookbook.recurrent.delta.gated_delta_rule")
reference, Config = module.gated_delta_rule_reference, module.Config
slow = functools.partial(pytest.param, marks=pytest.mark.slow)
NAMES = "q", "k", "v", "g", "beta", "initial_state"


@pytest.mark.parametrize("length", [1, 64, 199, *map(slow, (63, 65))])
def test_lengths(length):
    check(gated_delta_rule, problem(length=length))


@pytest.mark.parametrize(
    "sizes",
    [
        dict(heads=4, key_heads=2, key_dim=128, length=70),
        dict(value_dim=128, batch=2, length=70, dtype=jnp.float16),
        slow(dict(key_dim=128, value_dim=128, heads=3, length=130)),
    ],
    ids=str,
)
def test_sizes(sizes):
    check(gated_delta_rule, problem(**sizes))


@pytest.mark.parametrize(
    "how",
    [
        dict(decay=0.0, correlated=0.95, beta=1.0),
        dict(beta=0.0),
        slow(dict(decay=1e-5, correlated=0.5)),
        slow(dict(decay=1.0, beta=1.0)),
    ],
    ids=str,
)
def test_decays_and_betas(how):
    """No decay and keys that are nearly the same, corrections of none or all. Strong decays are in `test_resets`."""
    check(gated_delta_rule, problem(length=140, **how))


@pytest.mark.parametrize("config", [Config(2), Config(output_wgs=2), slow(Config(4, 2))], ids=str)
def test_configs(config):
    check(gated_delta_rule, problem(length=330), config=config, scale=0.3)


def test_a_scale_of_zero():
    """It is a scale, not a missing one: o is zero, and so is the reference's."""
    args = problem(length=10)
    report = check(gated_delta_rule, args, scale=0.0)
    assert (report.output[0] == 0).all() and (reference(*args[:5], scale=0.0) == 0).all()


TWO = Config(num_stages=2, state_wgs=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "how, config",
    [
        (dict(lens=[70, 0, 1], heads=1, key_dim=128, padding=5), TWO),
        slow(dict(length=140, batch=2, heads=2), TWO),
        slow(dict(length=520, decay=0.002), dataclasses.replace(TWO, parts=2)),
    ],
    ids=str,
)
def test_both_columns_of_a_head_in_a_block(how, config):
    check(gated_delta_rule, problem(value_dim=128, **how), config=config)


@pytest.mark.parametrize("sizes, state_wgs", [((128, 128, 132), 1), ((128, 128, 133), 2), ((64, 64, 200), 1)])
def test_a_block_has_two_columns_where_there_are_more_than_sms(sizes, state_wgs):
    assert module.default_config(*sizes, num_sms=132).state_wgs == state_wgs


def test_chunks_are_the_recurrence():
    args = problem(length=200, heads=2, key_dim=128, seed=3)
    with jax.enable_x64(True):
        exact = [jnp.asarray(np.asarray(x, np.float64)) for x in args[:6]]
        wanted = reference(*exact[:5], initial_state=exact[5], return_final_state=True)
        got = delta.chunked(*map(np.asarray, exact))
        for ours, theirs in zip(got, wanted, strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-12)


def test_no_drift():
    """65536 tokens in float32, rounded where the kernel rounds, are as far from float64 at the end as at the start."""
    args = problem(length=65536, decay=1e-4, seed=4)[:6]
    rounded = lambda x: x.astype(jnp.bfloat16).astype(x.dtype)
    exact, _ = delta.chunked(*(np.asarray(x, np.float64) for x in args))
    ours, _ = delta.chunked(*args, rounded=rounded)
    error = (ours - exact)[0, :, 0]
    first, last = (np.linalg.norm(error[rows]) for rows in (slice(2048, 4096), slice(-2048, None)))
    assert last < 1.5 * first


def run(*args, **how):
    q, k, v, g, beta, state, cu = args
    how |= dict(initial_state=state, cu_seqlens=cu, return_final_state=True)
    return lab.run(functools.partial(gated_delta_rule, **how), q, k, v, g, beta)


@pytest.mark.slow
@pytest.mark.parametrize("at, norm", [(64, False), (64, True), slow(100, False), slow(1, False)])
def test_a_sequence_may_be_split_anywhere(at, norm):
    *tokens, state, cu = problem(length=150, unit=not norm)
    # A GPU divides what is short, and adds in another order.
    in_one = functools.partial(run, config=Config(parts=1), use_qk_l2norm=norm)
    whole, final = in_one(*tokens, state, cu)
    first, between = in_one(*(x[:, :at] for x in tokens), state, cu)
    second, end = in_one(*(x[:, at:] for x in tokens), between, cu)
    parts = jnp.concatenate([first, second], axis=1)
    if at % delta.CHUNK == 0:
        assert (parts == whole).all() and (end == final).all()
    np.testing.assert_allclose(np.float32(parts), np.float32(whole), atol=2e-2)
    np.testing.assert_allclose(end, final, atol=2e-2)


@pytest.mark.slow
@pytest.mark.parametrize("how", [dict(length=520), slow(dict(lens=[300, 3, 200]))], ids=str)
def test_parts(how):
    check(gated_delta_rule, problem(decay=0.002, **how), config=Config(parts=2))


@pytest.mark.parametrize(
    "shape, parts", [((1, 8192, 64), None), ((1, 32768, 8), 8), ((4, 8192, 64), None), ((1, 600, 1), None)]
)
def test_sequences_are_split_where_they_do_not_fill_the_gpu(shape, parts):
    batch, length, heads = shape
    v = jax.ShapeDtypeStruct((batch, length, heads, 128), jnp.bfloat16)
    plan = module._plan(1.0, Config(), v, v, None, False, _host.Target("h200", 132))
    assert plan.sequences.part_rows == (parts and length // parts)


LENS = [70, 0, 1, 130]


@pytest.mark.slow
@pytest.mark.parametrize("config", [None, slow(Config(2, 2))], ids=str)
def test_packed_sequences(config):
    check(gated_delta_rule, problem(lens=LENS, heads=2, padding=5), config=config)


@pytest.mark.slow
def test_packed_sequences_are_those_alone():
    args = problem(lens=[70, 64, 3])
    in_one = functools.partial(run, config=Config(parts=1))  # A GPU divides what is short, and adds in another order.
    out, final = in_one(*args)
    for i, (start, end) in enumerate(((0, 70), (70, 134), (134, 137))):
        alone = in_one(*(x[:, start:end] for x in args[:5]), args[5][i : i + 1], None)
        assert (alone[0] == out[:, start:end]).all() and (alone[1] == final[i : i + 1]).all()


@pytest.mark.parametrize("name", ["k", "v", slow("q"), slow("g"), slow("beta")])
def test_nan_stays_in_its_sequence(name):
    args = dict(zip((*NAMES, "cu"), problem(lens=[70, 33, 40]), strict=True))
    wanted, states = run(*args.values())
    args[name] = args[name].at[:, 70:103].set(jnp.nan)
    out, final = run(*args.values())
    for rows in (slice(0, 70), slice(103, None)):
        assert (out[:, rows] == wanted[:, rows]).all()
    assert jnp.isnan(out[:, 70:103]).any() and (final[::2] == states[::2]).all()


# Gradients -----------------------------------------------------------------------------------------------------------


def gradients(op, args, seed=7, **how):
    """A function of the floating-point arguments: gradients of random sums of o and the final states by all of them."""
    rng = np.random.default_rng(seed)
    of_o, of_states = rng.normal(size=args[2].shape), rng.normal(size=args[5].shape)
    if args[6] is not None:
        of_o[:, int(args[6][-1]) :] = 0

    def loss(q, k, v, g, beta, state):
        results = op(q, k, v, g, beta, initial_state=state, cu_seqlens=args[6], return_final_state=True, **how)
        return sum((x * array(w, jnp.promote_types(x.dtype, jnp.float32))).sum() for x, w in
                   zip(results, (of_o, of_states), strict=True))  # fmt: skip

    return jax.grad(loss, tuple(range(6)))


def check_gradients(args, tolerance=2**-7, **how):
    """Against float64. The same numbers are rounded to 16 bits as in flash-linear-attention, two products after one
    another: an error of about 2**-8, or below 2**-7."""
    ours = gradients(gated_delta_rule, args, **how)
    clean = [jnp.nan_to_num(x) for x in args[:6]]
    theirs = gradients(reference, args, **{k: v for k, v in how.items() if k != "config"})
    got = lab.run(ours, *args[:6])
    with jax.enable_x64(True):
        exact = jax.jit(theirs)(*(jnp.asarray(np.asarray(x, np.float64)) for x in clean))
    for name, ours, wanted in zip(NAMES, got, exact, strict=True):
        ours, wanted = np.asarray(ours, np.float64), np.asarray(wanted)
        error = np.linalg.norm(ours - wanted) / max(np.linalg.norm(wanted), 1e-30)
        assert np.isfinite(ours).all() and error < tolerance, (name, error)


@pytest.mark.parametrize(
    "how",
    [
        dict(length=130, heads=2, key_dim=128),
        dict(lens=[70, 0, 30], padding=5, value_dim=128),
        slow(dict(lens=[70, 0, 1, 130], padding=5, heads=2, key_heads=1, key_dim=128, value_dim=128)),
        slow(dict(length=64, batch=2, heads=3, dtype=jnp.float16)),
        slow(dict(length=100, beta=0.0)),
        slow(dict(length=100, correlated=0.5, beta=1.0)),
    ],
    ids=str,
)
def test_gradients(how):
    check_gradients(problem(**how))


@pytest.mark.parametrize(
    "how",
    [
        dict(lens=[30, 0, 70], padding=5, heads=2, key_dim=128),
        slow(dict(length=130, heads=3, dtype=jnp.float16)),
        slow(dict(length=70, key_heads=2, heads=4, key_dim=128, value_dim=128)),
    ],
    ids=str,
)
def test_norms_of_queries_and_keys(how):
    """Rows of any norm: o, the states, and gradients through the norms. In the first problem a key head has two blocks
    of inverses."""
    args = problem(decay=0.1, unit=False, **how)
    got, wanted = run(*args, use_qk_l2norm=True), exactly(args, use_qk_l2norm=True)
    for ours, exact in zip(got, wanted, strict=True):
        assert np.linalg.norm(np.float64(ours) - exact) < 2**-7 * np.linalg.norm(exact)
    check_gradients(args, use_qk_l2norm=True)


@pytest.mark.slow
def test_norms_of_zeros():
    """Apart from other rows, since their gradients are 1000 times as large."""
    q, k, *rest = problem(length=70, decay=0.1, unit=False)
    args = q.at[:, 3].set(0), k.at[:, 4].set(0), *rest
    assert (run(*args, use_qk_l2norm=True)[0][:, 3] == 0).all()
    check_gradients(args, use_qk_l2norm=True)


def exactly(args, **how):
    """(o, final states) in float64."""
    with jax.enable_x64(True):
        tokens = [jnp.asarray(np.nan_to_num(np.float64(x))) for x in args[:6]]
        call = functools.partial(reference, cu_seqlens=args[6], return_final_state=True, **how)
        return [np.asarray(x) for x in jax.jit(lambda *xs: call(*xs[:5], initial_state=xs[5]))(*tokens)]


STRONG = -30.0, -100.0, -1e3, -1e6, -1e9, -np.inf


def test_resets():
    """Gates of any strength anywhere; half a chunk of them before weak ones. Errors are those of weak gates, in the
    dtype of more bits."""
    *args, state, _ = problem(batch=2, length=70, dtype=jnp.float16)
    rng, g = np.random.default_rng(2), np.array(args[3])
    strong = rng.uniform(size=g.shape) < 0.2
    strong[0, :32], strong[0, 32:64] = True, False
    g[strong] = rng.choice(STRONG, strong.sum())
    args = *args[:3], array(g, jnp.float32), args[4], state

    def all_results(op, args):
        out, vjp = jax.vjp(lambda *xs: op(*xs[:5], initial_state=xs[5], return_final_state=True), *args)
        rng = np.random.default_rng(7)
        return *out, *vjp(tuple(jnp.asarray(rng.normal(size=o.shape), o.dtype) for o in out))

    got = lab.run(functools.partial(all_results, gated_delta_rule), args)
    with jax.enable_x64(True):
        wanted = all_results(reference, [jnp.asarray(np.float64(x)) for x in args])
    for name, ours, exact in zip(("o", "states", *NAMES), got, wanted, strict=True):
        ours, exact = np.float64(ours), np.asarray(exact)
        assert np.linalg.norm(ours - exact) < 2**-9 * np.linalg.norm(exact), name
    assert (got[5][g < -100] == 0).all()


@pytest.mark.slow
def test_gradients_where_keys_are_nearly_the_same():
    """Corrections and their gradients are then differences of numbers many times as large, which have 8 bits."""
    check_gradients(problem(length=100, decay=0.0, correlated=0.9, beta=1.0), tolerance=2**-5)


def test_gradients_end_where_o_does():
    """Starts that go back, which are not valid, are read as the largest so far, by both passes."""
    *tokens, state, _ = problem(lens=[64, 6])
    starts = array([0, 64, 32], jnp.int32)

    def both(*tokens):
        out, vjp = jax.vjp(lambda *x: gated_delta_rule(*x, initial_state=state, cu_seqlens=starts), *tokens)
        return out, *vjp(jnp.ones_like(out))

    o, *gradients = lab.run(both, *tokens)
    for x in (o, *gradients):
        used = np.asarray(x[0] != 0).reshape(70, -1).any(1)
        assert used[:64].all() and not used[64:].any()


@pytest.mark.slow
def test_gradients_of_parts_and_a_scale():
    check_gradients(problem(length=520, decay=0.002), config=Config(parts=2), scale=0.5)


# The machine code ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "key_dim, config", [(128, None), (64, None), (128, TWO), slow(128, Config(3, 2)), slow(128, Config(parts=2))]
)
def test_what_the_compiler_makes_of_it(key_dim, config):
    args = problem(1, 8192 if config == Config(parts=2) else 256, 2, 4, key_dim, 128)
    op = functools.partial(gated_delta_rule, config=config)
    compiled = lab.compile_for("h200", op, *args[:5])
    assert compiled.spill_bytes == 0 and not compiled.remarks
    assert compiled.smem_bytes <= (config or module.default_config(key_dim)).smem_bytes(key_dim)


@pytest.mark.slow
@pytest.mark.parametrize("key_dim, norm", [(128, True), slow(64, False)])
def test_what_the_compiler_makes_of_the_gradients(key_dim, norm):
    """A problem with more tiles than SMs, of which the last chunks are cut."""
    aval = lambda heads, *dim, dtype=jnp.bfloat16: jax.ShapeDtypeStruct((2, 4001, heads, *dim), dtype)
    args = aval(4, key_dim), aval(4, key_dim), aval(8, 128), *[aval(8, dtype=jnp.float32)] * 2
    loss = lambda *args: gated_delta_rule(*args, use_qk_l2norm=norm).astype(jnp.float32).sum()
    *others, last = lab.compile_for("h200", jax.grad(loss, tuple(range(5))), *args).kernels
    assert others[0].blocks_per_sm == 3
    assert not any(kernel.spill_bytes or kernel.remarks for kernel in others)
    assert last.spill_bytes <= 100 and not last.remarks  # Counters and addresses of the loop over tiles, no matrices.


def test_warpgroups_find_the_registers_that_they_ask_for():
    for (states, outputs), (state, output, memory) in kernel.REGISTERS.items():
        assert states * state + outputs * output + memory <= 512
    for states, (state, weights, memory) in kernel_backward.REGISTERS.items():
        assert states * state + weights + memory <= 512
    for (pieces, _), (pairs, columns, memory) in kernel_gradients.REGISTERS.items():
        assert pairs + pieces * columns + memory <= 512


# Arguments -----------------------------------------------------------------------------------------------------------


def changed(**changes):
    args = dict(zip((*NAMES, "cu_seqlens"), problem(length=10, heads=2), strict=True))
    for name, change in changes.items():
        args[name] = change(args[name]) if callable(change) else change
    return gated_delta_rule(**args)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: changed(q=lambda q: q[0]), r"q.shape=.*must be \(B, T, K, N\)"),
        (lambda: changed(k=lambda k: k.astype(jnp.float16)), "all bfloat16 or all float16: cast them"),
        (lambda: changed(v=lambda v: v[:, :5]), r"v their \(B, T\)"),
        (lambda: changed(v=lambda v: v[..., :40]), r"each must be one of \(64, 128\): pad with zeros"),
        (lambda: changed(g=lambda g: g[..., :1]), r"g is .*must be \(1, 10, 2\)"),
        (lambda: changed(beta=lambda b: b.astype(jnp.int32)), "floating-point"),
        (lambda: changed(initial_state=lambda s: s[..., :5]), "initial_state"),
        (lambda: changed(cu_seqlens=jnp.zeros((), jnp.int32)), "cu_seqlens"),
        (lambda: changed(scale="x"), "scale='x'"),
        (lambda: changed(config=Config(9)), "bytes of shared memory"),
        (lambda: Config(1), "at least 2"),
        (lambda: Config(output_wgs=2, state_wgs=2), r"\(1, 1\), \(1, 2\) or \(2, 1\)"),
        (lambda: changed(config=Config(state_wgs=2)), "state_wgs=1"),
        (lambda: Config(parts=0), "at least 1"),
    ],
)
def test_bad_arguments_are_refused(call, message):
    with lab.interpret(), pytest.raises(ValueError, match=message):
        call()


def test_without_a_gpu_it_says_what_to_do(no_gpu):
    if jax.default_backend() == "gpu":
        pytest.skip("there is a GPU")
    with pytest.raises(RuntimeError, match="lab.interpret"):
        changed()


# Mutants -------------------------------------------------------------------------------------------------------------

NOTHING = ("tiles", "PIECE", "PIECE")


@pytest.mark.parametrize(
    "file, old, new",
    [
        NOTHING,
        ("delta/kernel", "True, piece * decay)", "True, piece)"),
        ("delta/kernel", "row >= col", "row > col"),
        ("delta/kernel_inverse", "(2, 4, 8, 16, 32)", "(2, 4, 8, 16)"),
        slow("delta/kernel_inverse", "row >= column", "row + 1 >= column"),
        slow("delta/kernel_inverse", "keys.clear(0, rows, interpreted)", "pass"),
        slow("delta/kernel", "shared.states.acquire(i)", "pass"),
        slow("tiles", "operand.clear(stage,", "(lambda *_: None)(stage,"),
    ],
)  # fmt: skip
def test_mutants_are_caught(run_only, found_if, monkeypatch, tmp_path, file, old, new):
    """A state not decayed, masks off by one, the inverse's last block left out, a wait, neighbours' rows."""
    fn = copy_of("delta.gated_delta_rule", monkeypatch, tmp_path, file, old, new)
    *tokens, state, _ = problem(length=270)
    starts = array([0, 70, 130, 270], jnp.int32)
    tokens = [x.at[:, 70:130].set(jnp.nan) for x in tokens]
    kept = lambda o: o.at[:, 70:130].set(0)
    ours = lambda *args: kept(fn.gated_delta_rule(*args, cu_seqlens=starts, config=fn.Config(2)))
    of = lambda *args: kept(reference(*map(jnp.nan_to_num, args), cu_seqlens=starts))
    with found_if(old != new):
        lab.check(ours, of, *tokens, tolerance=2**-7)


@pytest.mark.parametrize(
    "file, old, new",
    [
        ("delta/kernel_backward", "True, ds[p] * decay)", "True, ds[p])"),
        slow("delta/kernel_backward", "row >= col", "row > col"),
        ("delta/kernel_gradients", "row > col, dkk", "row >= col, dkk"),
        slow("delta/kernel_gradients", "dcum += _row_dots(k, term)", "dcum += 0"),
        slow("delta/kernel_gradients", "= col_q + col_k, ", "= col_q, "),
        slow("delta/gradients", "dlast = by_token.sum(-1) +", "dlast ="),
    ],
)  # fmt: skip
def test_mutants_of_the_gradients_are_caught(run_only, monkeypatch, tmp_path, file, old, new):
    fn = copy_of("delta.gated_delta_rule", monkeypatch, tmp_path, file, old, new)
    monkeypatch.setitem(globals(), "gated_delta_rule", fn.gated_delta_rule)
    with pytest.raises(AssertionError):
        check_gradients(problem(length=130))


@pytest.mark.slow
@pytest.mark.parametrize(
    "file, old, new",
    [
        slow("delta/kernel_gradients", "load(u).astype(jnp.float32) * spread(dot, 0)", "0"),
        slow("delta/kernel_gradients", "for piece in pieces) for which", "for piece in [0]) for which"),
        slow("delta/kernel_gradients", "plgpu.barrier_wait(shared.exchanged)", "pass"),
        slow("delta/kernel_inverse", "store(Q, queries, normalize(", "store(K, queries, normalize("),
        slow("delta/kernel_inverse", "is_first = _device.rem(first_head, group) == 0", "is_first = first_head >= 0"),
    ],
)
def test_mutants_of_norms_are_caught(run_only, monkeypatch, tmp_path, file, old, new):
    """A projection or a piece of it left out, a wait, the keys' place, two blocks that store the same."""
    fn = copy_of("delta.gated_delta_rule", monkeypatch, tmp_path, file, old, new)
    monkeypatch.setitem(globals(), "gated_delta_rule", fn.gated_delta_rule)
    with pytest.raises((AssertionError, RuntimeError)):
        check_gradients(problem(length=70, heads=2, key_dim=128, unit=False), use_qk_l2norm=True)


@pytest.mark.usefixtures("on_cpu")
def test_each_row_is_in_one_chunk():
    sequences = Sequences(3, 150, True, delta.CHUNK)
    first, num = (np.asarray(x) for x in sequences.places_of_chunks(jnp.asarray([0, 70, 70, 140])))
    rows = [row + i for row, count in zip(first, num, strict=True) for i in range(count)]
    assert sorted(rows) == list(range(140))

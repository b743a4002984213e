"""Kimi Delta Attention: chunks equal the recurrence in float64, whatever the lengths, gates and neighbours."""

import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from mutants import copy_of

import lab
from cookbook import _host, kda
from cookbook.recurrent.kda import kernel
from cookbook.recurrent.kda.kernel_norms import before_norms
from tests.arrays import array

module = importlib.import_module("cookbook.recurrent.kda.kda")
Config = module.Config
slow = functools.partial(pytest.param, marks=pytest.mark.slow)
NAMES = "q", "k", "v", "g", "beta", "initial_state"
LENS = [70, 0, 1, 130]
# Relative errors of o and states: decayed keys, the inverse, corrections and states are rounded to 16 bits one after
# another, which have an epsilon of 2**-8 or 2**-11. Gradients go through the chain once more.
TOLERANCE = {jnp.bfloat16: 2**-7, jnp.float16: 2**-10}
OF_GRADIENTS = {jnp.bfloat16: 2**-6, jnp.float16: 2**-9}


def problem(batch=1, length=100, key_heads=1, heads=1, key_dim=64, value_dim=64, *, lens=None, decay=0.05, beta=None,
            dtype=jnp.bfloat16, seed=0, padding=0, unit=True):  # fmt: skip
    """(q, k, v, g, beta, initial_state, cu_seqlens); NaN after the last of the packed sequences with these `lens`.

    Every channel of every token has a gate of its own, `decay` on average; without `unit` keys and queries have any
    norm.
    """
    rng = np.random.default_rng(seed)
    length = length if lens is None else sum(lens) + padding
    normal = lambda heads, dim: rng.normal(size=(batch, length, heads, dim))
    q, k, v = normal(key_heads, key_dim), normal(key_heads, key_dim), normal(heads, value_dim)
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) if unit else x for x in (q, k))
    g = -2 * decay * rng.uniform(size=(batch, length, heads, key_dim))
    beta = rng.uniform(size=v.shape[:3]) if beta is None else np.full(v.shape[:3], beta)
    state = rng.normal(size=(batch if lens is None else len(lens), heads, value_dim, key_dim))
    if padding:
        for x in (q, k, v, g, beta):
            x[:, -padding:] = np.nan
    arrays = [array(x, dtype) for x in (q, k, v)] + [array(x, jnp.float32) for x in (g, beta, state)]
    return *arrays, None if lens is None else array(np.cumsum([0, *lens]), jnp.int32)


def one_sequence(q, k, v, g, beta, state, scale, norm):
    """(o, final state) of one head of one sequence, token by token."""

    def token(state, now):
        q, k, v, g, beta = now
        if norm:
            q, k = (x / jnp.sqrt(jnp.dot(x, x) + 1e-6) for x in (q, k))
        faded = state @ jnp.diag(jnp.exp(g))
        state = faded + beta * jnp.outer(v - faded @ k, k)
        return state, scale * (state @ q)

    state, o = lax.scan(token, state, (q, k, v, g, beta))
    return o, state


def recurrence(q, k, v, g, beta, state, cu=None, scale=None, norm=False):
    """(o, final states), in the arguments' dtype; o is zero after the last packed sequence."""
    heads, scale = v.shape[2], q.shape[3] ** -0.5 if scale is None else scale
    q, k = (jnp.repeat(x, heads // x.shape[2], axis=2) for x in (q, k))
    of_heads = jax.vmap(functools.partial(one_sequence, scale=scale, norm=norm), (1, 1, 1, 1, 1, 0), (1, 0))
    if cu is None:
        return jax.vmap(of_heads)(q, k, v, g, beta, state)
    o, states = jnp.zeros_like(v), []
    for i, (start, end) in enumerate(zip(cu[:-1], cu[1:], strict=True)):
        own, final = of_heads(*(x[0, start:end] for x in (q, k, v, g, beta)), state[i])
        o, states = o.at[0, start:end].set(own), [*states, final]
    return o, jnp.stack(states)


def exactly(fn, args):
    """`fn` of the arguments in float64, rows of no sequence zero."""
    with jax.enable_x64(True):
        return jax.tree.map(np.asarray, jax.jit(fn)(*(jnp.nan_to_num(jnp.asarray(np.float64(x))) for x in args)))


def error_of(ours, exact):
    ours = np.asarray(ours, np.float64)
    assert np.isfinite(ours).all()
    return np.linalg.norm(ours - exact) / max(np.linalg.norm(exact), 1e-30)


def check(args, *, fn=kda, tolerance=None, scale=None, norm=False, **how):
    """o and the final states against float64, with poisoned memory and races on."""
    *arrays, cu = args
    cuts = None if cu is None else np.asarray(cu).tolist()
    wanted = exactly(lambda *args: recurrence(*args, cuts, scale, norm), arrays)
    call = lambda *args: fn(*args[:5], initial_state=args[5], cu_seqlens=cu, return_final_state=True, scale=scale,
                            use_qk_l2norm=norm, **how)  # fmt: skip
    got = lab.run(call, *arrays)
    for name, ours, exact in zip(("o", "states"), got, wanted, strict=True):
        limit = tolerance or TOLERANCE[args[0].dtype.type]
        assert (error := error_of(ours, exact)) < limit, (name, error)
    return got


@pytest.mark.parametrize("length", [1, 64, 199, *map(slow, (63, 65))])
def test_lengths(length):
    check(problem(length=length))


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
    check(problem(**sizes))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, slow(jnp.float16)])
@pytest.mark.parametrize(
    "how", [dict(decay=0.0), dict(decay=10.0, beta=1.0), slow(dict(decay=0.5)), slow(dict(beta=0.0))], ids=str
)
def test_gates(how, dtype):
    """None, and 20 per token, where products of a chunk's decays and of their reciprocals are far out of range."""
    check(problem(length=140, dtype=dtype, **how))


def test_channels_that_last_beside_channels_that_fade():
    """A strong gate in half of the channels costs the others no bits: their errors are those of weak gates."""
    q, k, v, g, *rest = problem(length=130, dtype=jnp.float16, decay=0.01)
    check((q, k, v, g.at[..., ::2].set(-20.0), *rest))


STRONG = -30.0, -100.0, -1e3, -1e6, -1e9, -np.inf


def resets(seed=2, **how):
    """A problem with gates of any strength anywhere; half a chunk of them before weak ones."""
    *args, state, _ = problem(length=70, dtype=jnp.float16, **how)
    rng, g = np.random.default_rng(seed), np.array(args[3])
    strong = rng.uniform(size=g.shape) < 0.2
    strong[0, :32], strong[0, 32:64] = True, False
    g[strong] = rng.choice(STRONG, strong.sum())
    return *args[:3], array(g, jnp.float32), args[4], state, None


def test_resets():
    check(resets(batch=2))


@pytest.mark.parametrize("config", [Config(2), slow(Config(3))], ids=str)
def test_configs(config):
    check(problem(length=330), config=config, scale=0.3)


def test_a_scale_of_zero():
    assert (check(problem(length=10), scale=0.0)[0] == 0).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    "how", [dict(lens=[70, 0, 1], key_dim=128, padding=5), slow(dict(length=140, heads=2))], ids=str
)
def test_both_columns_of_a_head_in_a_block(how):
    check(problem(value_dim=128, **how), config=Config(2, 2))


@pytest.mark.parametrize("sizes, state_wgs", [((128, 128, 132), 1), ((128, 128, 133), 2), ((64, 64, 200), 1)])
def test_a_block_has_two_columns_where_there_are_more_than_sms(sizes, state_wgs):
    assert module.default_config(*sizes, num_sms=132).state_wgs == state_wgs


@pytest.mark.parametrize("key_dim", [64, slow(128)])
def test_norms(key_dim):
    check(problem(length=70, key_heads=2, heads=2, key_dim=key_dim, unit=False), norm=True)


def test_the_reference_is_the_recurrence():
    *arrays, cu = problem(lens=[70, 3], heads=2, unit=False)
    how = dict(cu_seqlens=np.asarray(cu), use_qk_l2norm=True, return_final_state=True)
    got = exactly(lambda *args: module.kda_reference(*args[:5], initial_state=args[5], **how), arrays)
    wanted = exactly(lambda *args: recurrence(*args, np.asarray(cu).tolist(), norm=True), arrays)
    for ours, exact in zip(got, wanted, strict=True):
        np.testing.assert_allclose(ours, exact, atol=1e-12)


def test_packed_sequences():
    o, _ = check(problem(lens=LENS, heads=2, padding=5))
    assert (o[:, -5:] == 0).all()


def run(*args, **how):
    q, k, v, g, beta, state, cu = args
    call = functools.partial(kda, initial_state=state, cu_seqlens=cu, return_final_state=True, **how)
    return lab.run(call, q, k, v, g, beta)


@pytest.mark.slow
def test_packed_sequences_are_those_alone():
    """Bitwise: the gates' sums are made in the kernel."""
    args = problem(lens=[70, 64, 3])
    out, final = run(*args)
    for i, (start, end) in enumerate(((0, 70), (70, 134), (134, 137))):
        alone = run(*(x[:, start:end] for x in args[:5]), args[5][i : i + 1], None)
        assert (alone[0] == out[:, start:end]).all() and (alone[1] == final[i : i + 1]).all()


@pytest.mark.parametrize("at", [64, slow(100)])
def test_a_sequence_may_be_split_anywhere(at):
    """Bitwise where a chunk ends."""
    *tokens, state, cu = problem(length=150)
    whole, final = run(*tokens, state, cu)
    first, between = run(*(x[:, :at] for x in tokens), state, cu)
    second, end = run(*(x[:, at:] for x in tokens), between, cu)
    parts = jnp.concatenate([first, second], axis=1)
    if at % 64 == 0:
        assert (parts == whole).all() and (end == final).all()
    np.testing.assert_allclose(np.float32(parts), np.float32(whole), atol=2e-2)
    np.testing.assert_allclose(end, final, atol=2e-2)


@pytest.mark.parametrize("name", ["g", slow("k"), slow("v"), slow("q"), slow("beta")])
def test_nan_stays_in_its_sequence(name):
    args = dict(zip((*NAMES, "cu"), problem(lens=[70, 33, 40]), strict=True))
    wanted, states = run(*args.values())
    args[name] = args[name].at[:, 70:103].set(jnp.nan)
    out, final = run(*args.values())
    for rows in (slice(0, 70), slice(103, None)):
        assert (out[:, rows] == wanted[:, rows]).all()
    assert jnp.isnan(out[:, 70:103]).any() and (final[::2] == states[::2]).all()


def test_no_tokens():
    *tokens, state, _ = problem(length=3)
    with lab.interpret():
        o, final = kda(*(x[:, :0] for x in tokens), initial_state=state, return_final_state=True)
    assert o.shape == (1, 0, 1, 64) and (final == state).all()


# Gradients -----------------------------------------------------------------------------------------------------------


def gradients(op, shapes, seed=7):
    """A function of the floating-point arguments: gradients of random sums of o and the final states by all of them."""
    rng = np.random.default_rng(seed)
    weights = [rng.normal(size=shape) for shape in shapes]
    loss = lambda *args: sum((x * w.astype(jnp.promote_types(x.dtype, jnp.float32))).sum()
                             for x, w in zip(op(*args), weights, strict=True))  # fmt: skip
    return jax.grad(loss, tuple(range(6)))


def check_gradients(args, fn=kda, scale=None, norm=False, **how):
    *arrays, cu = args
    cuts, shapes = None if cu is None else np.asarray(cu).tolist(), (args[2].shape, args[5].shape)
    op = lambda *args: fn(*args[:5], initial_state=args[5], cu_seqlens=cu, return_final_state=True, scale=scale,
                          use_qk_l2norm=norm, **how)  # fmt: skip
    of_op, exact = (gradients(op, shapes) for op in (op, lambda *args: recurrence(*args, cuts, scale, norm)))
    got, wanted = lab.run(of_op, *arrays), exactly(exact, arrays)
    for name, ours, exact in zip(NAMES, got, wanted, strict=True):
        assert (error := error_of(ours, exact)) < OF_GRADIENTS[args[0].dtype.type], (name, error)
    return got


@pytest.mark.parametrize(
    "how",
    [
        dict(length=130, heads=2, key_dim=128),
        dict(lens=[70, 0, 30], padding=5, value_dim=128),
        slow(dict(length=100, beta=0.0)),
        slow(dict(length=100, decay=0.0, dtype=jnp.float16)),
        slow(dict(length=100, decay=10.0)),
    ],
    ids=str,
)
def test_gradients(how):
    check_gradients(problem(**how))


@pytest.mark.parametrize(
    "how",
    [dict(lens=[3, 0, 64], padding=5, heads=2), slow(dict(length=130, key_heads=2, heads=2, key_dim=128))],
    ids=str,
)
def test_gradients_through_norms_and_a_scale(how):
    check_gradients(problem(unit=False, **how), scale=0.5, norm=True)


@pytest.mark.parametrize("shape, group", [((5, 1, 64), 3), ((37, 3, 128), 1)])
def test_gradients_before_norms(shape, group):
    """Fewer rows than a block has, rows that are left over."""
    rng = np.random.default_rng(3)
    q, k = (rng.normal(size=shape) for _ in "qk")
    arrays = [
        array(x, jnp.float16) for x in (q, k, *(rng.normal(size=(shape[0], shape[1] * group, shape[2])) for _ in "qk"))
    ]
    got = lab.run(functools.partial(before_norms, params=_host.compiler_params()), *arrays)
    for x, du, ours in zip(arrays[:2], arrays[2:], got, strict=True):
        x, du = np.float64(x), np.float64(du).reshape(*shape[:2], group, -1).sum(2)
        factor = 1 / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6)
        exact = factor * du - factor**3 * x * (x * du).sum(-1, keepdims=True)
        assert error_of(ours, exact) < 2**-11


def test_gradients_of_resets():
    args = resets(batch=2)
    assert (check_gradients(args)[3][args[3] < -100] == 0).all()


# The machine code ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "key_dim, how",
    [(128, {}), slow(64, {}), slow(128, dict(config=Config(2, 2))), slow(128, dict(use_qk_l2norm=True))],
    ids=str,
)
def test_the_compiled_kernels(key_dim, how):
    args = problem(1, 256, 2, 4, key_dim, 128)
    compiled = lab.compile_for("h200", functools.partial(kda, **how), *args[:5])
    assert compiled.spill_bytes == 0 and not compiled.remarks
    assert compiled.smem_bytes <= how.get("config", module.default_config(key_dim)).smem_bytes(key_dim)
    prepare = min(compiled.kernels, key=lambda kernel: kernel.threads)
    assert 2 * (prepare.smem_bytes + 1024) <= 228 * 1024  # Two of its blocks share an SM.


@pytest.mark.parametrize(
    "key_dim, value_dim, length, norm",
    [(128, 128, 256, True), slow(64, 64, 300, False)],
)
def test_the_compiled_gradients(key_dim, value_dim, length, norm):
    loss = lambda *args: kda(*args, use_qk_l2norm=norm).astype(jnp.float32).sum()
    args = problem(2, length, 2, 4, key_dim, value_dim)
    compiled = lab.compile_for("h200", jax.grad(loss, tuple(range(5))), *args[:5])
    *others, of_operands = sorted(compiled.kernels, key=lambda kernel: "kda_gradients" in kernel.name)
    # A few addresses, kept for after its loop: the operands' gradients take all 255 registers.
    assert of_operands.spill_bytes <= 64 and not any(kernel.spill_bytes for kernel in others)
    assert not compiled.remarks and of_operands.blocks_per_sm == 2


def test_warpgroups_find_the_registers_that_they_ask_for():
    for (states, outputs), (state, output, memory) in kernel.REGISTERS.items():
        assert states * state + outputs * output + memory <= 512


# Arguments -----------------------------------------------------------------------------------------------------------


def changed(**changes):
    args = dict(zip((*NAMES, "cu_seqlens"), problem(length=10, heads=2), strict=True))
    for name, change in changes.items():
        args[name] = change(args[name]) if callable(change) else change
    return kda(**args)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: changed(q=lambda q: q[0]), r"q.shape=.*must be \(B, T, K, N\)"),
        (lambda: changed(g=lambda g: g[..., 0]), r"g is .*must be \(1, 10, 2, 64\)"),
        (lambda: changed(beta=lambda b: b[..., :1]), r"beta is .*must be \(1, 10, 2\)"),
        (lambda: changed(v=lambda v: v[..., :40]), r"each must be one of \(64, 128\): pad with zeros"),
        (lambda: changed(initial_state=lambda s: s[..., :5]), "initial_state"),
        (lambda: changed(cu_seqlens=jnp.zeros((), jnp.int32)), "cu_seqlens"),
        (lambda: changed(scale="x"), "scale='x'"),
        (lambda: changed(use_qk_l2norm_in_kernel=True), "call it use_qk_l2norm"),
        (lambda: changed(A_log=jnp.zeros(2)), "multiply g by"),
        (lambda: changed(config=Config(9)), "bytes of shared memory"),
        (lambda: Config(1), "at least 2"),
        (lambda: Config(2, 3), "1 or 2"),
        (lambda: changed(config=Config(2, 2)), "state_wgs=1"),
    ],
)
def test_bad_arguments_are_refused(call, message):
    with lab.interpret(), pytest.raises(ValueError, match=message):
        call()


# Mutants -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "file, old, new",
    [
        ("tiles", "PIECE", "PIECE"),
        ("kda/kernel", "s[p] * decay(p))", "s[p])"),
        ("kda/gates", "NUM_BLOCKS = 6", "NUM_BLOCKS = 5"),
        slow("kda/gates", "row, row | (block - 1)", "row, row | block"),
        slow("kda/kernel_prepare", "distance < 0, pairs", "distance <= 0, pairs"),
        slow("kda/kernel_prepare", "operand.clear(0, rows, plan.interpreted)", "pass"),
        slow("kda/kernel", "shared.states.acquire(i)", "0"),
    ],
)  # fmt: skip
def test_mutants_are_caught(run_only, monkeypatch, tmp_path, file, old, new):
    """A state not decayed, a power of two left out, a boundary off, a wrong diagonal, neighbours' rows, a wait."""
    fn = copy_of("kda.kda", monkeypatch, tmp_path, file, old, new).kda
    args = problem(lens=[70, 60, 140], decay=0.2)
    args = tuple(x.at[:, 70:130].set(jnp.nan) for x in args[:5]) + args[5:]
    kept = lambda x: x.at[:, 70:130].set(0)
    clean = lambda *tokens, **how: (lambda o, s: (kept(o), s.at[1].set(0)))(*fn(*tokens, **how))
    tokens = [jnp.nan_to_num(x) for x in args[:6]]
    o, states = (np.array(x) for x in exactly(lambda *args: recurrence(*args, [0, 70, 130, 270]), tokens))
    o[:, 70:130], states[1] = 0, 0

    def caught():
        try:
            got = lab.run(lambda *args: clean(*args[:5], initial_state=args[5], cu_seqlens=array([0, 70, 130, 270],
                          jnp.int32), return_final_state=True), *args[:6])  # fmt: skip
            return any(not error_of(a, b) < 2**-7 for a, b in zip(got, (o, states), strict=True))
        except (AssertionError, RuntimeError):
            return True

    assert caught() == (old != new)

"""SSD: chunks equal the recurrence, whatever the lengths, decays, parts and neighbours."""

import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mutants import copy_of
from ssd_problems import BF16, chunked, error, more, operands

import lab
from cookbook import _device, linear_attention, ssd
from cookbook.recurrent import arguments
from cookbook.recurrent.sequences import CHUNKS, Sequences, rows_per_part
from cookbook.recurrent.ssd import kernel, kernel_backward
from cookbook.recurrent.ssd.linear_attention import linear_attention_reference
from cookbook.recurrent.ssd.plan import Plan
from cookbook.recurrent.states import LEAST_DECAY, cumulative_decays
from tests.arrays import array

module = importlib.import_module("cookbook.recurrent.ssd.ssd")
reference, Config = module.ssd_reference, module.Config
# Pairs, states and scaled rows are rounded before they are multiplied, as tensor cores want it, and the result is too:
# less than a unit in the last place, where the reference rounds once.
TOLERANCE = {jnp.dtype(BF16): 2**-8, jnp.dtype(jnp.float16): 2**-11}
slow = functools.partial(pytest.param, marks=pytest.mark.slow)


def check(x, dt, a, b, c, *, d=None, initial_state=None, gpu=None, config=None, chunk_size=None, **how):
    """Also compiles it if `gpu` is named."""
    ours = functools.partial(ssd, return_final_state=True, config=config, chunk_size=chunk_size, **how)
    call = lambda fn: lambda *args: fn(*args[:5], d=args[5], initial_state=args[6])
    of, tolerance = functools.partial(reference, **how), TOLERANCE[x.dtype]
    return lab.check(call(ours), call(of), x, dt, a, b, c, d, initial_state, tolerance=(tolerance,) * 2, gpu=gpu)


@pytest.mark.parametrize("length", [1, 64, 199, *map(slow, (63, 65))])
def test_lengths(length):
    check(*operands(length=length))


@pytest.mark.parametrize("length", [129, 391, *map(slow, (1, 127, 128))])
def test_lengths_with_chunks_of_128(length):
    check(*operands(length=length), chunk_size=128)


@pytest.mark.parametrize(
    "sizes",
    [
        dict(head_dim=128, state_dim=128, heads=2, groups=2),
        dict(state_dim=256, batch=2, length=70),
        dict(heads=3, dtype=jnp.float16),
        slow(dict(head_dim=192, heads=2, groups=1, length=70)),
    ],
    ids=str,
)
def test_sizes(sizes):
    args = operands(**sizes)
    d, initial, *_ = more(args[0], args[3])
    check(*args, d=d, initial_state=initial, gpu="h200" if sizes.get("state_dim") == 256 else None)


@pytest.mark.parametrize("steps", [(1e-6, 1e-5), (1e-4, 50.0)], ids=str)
def test_decays(steps):
    """Nothing of the state is forgotten within these lengths, or all of it at once; `test_resets` has stronger ones."""
    check(*operands(length=150, steps=steps))


def test_sums_of_decays_keep_their_differences():
    """Gates of any strength anywhere, in chunks of each size: what a chunk lets stay from each token to each later one,
    against float64. An error of 2**-10 is half a rounding of float16's; resets leave nothing."""
    rng, size = np.random.default_rng(0), (2, 40)
    for chunk in CHUNKS:
        gates = -rng.uniform(0.0, 0.2, (*size, chunk))
        strong = rng.uniform(size=gates.shape) < rng.uniform(size=(*size, 1))
        strong[0, 0], strong[1, 0] = np.arange(chunk) < chunk // 2, True
        gates = np.where(strong, rng.choice([-1, -30, -100, -1e3, -1e6, -1e9, -np.inf], gates.shape), gates)
        logs = np.maximum(np.float32(gates) / np.log(2), np.log2(LEAST_DECAY)).astype(np.float32)
        sums = np.asarray(cumulative_decays(logs), np.float64)
        got, earlier = np.exp2(np.minimum(sums[..., :, None] - sums[..., None, :], 0)), np.arange(chunk)
        wanted = np.ones_like(got)
        for t in range(1, chunk):
            wanted[..., t, :t] = wanted[..., t - 1, :t] * np.exp(gates[..., t, None])
        kept = earlier[:, None] >= earlier
        assert (np.abs(got - wanted) <= 2**-10 * wanted + 2.0**-60)[..., kept].all()


def test_resets():
    """Heads that forget all at some tokens, or at each; a of -inf is the limit, also where a step is 0."""
    x, dt, a, b, c = map(np.array, operands(length=100, heads=3))
    rng = np.random.default_rng(1)
    resets = rng.uniform(size=dt.shape) < [0.2, 0.0, 0.0]
    dt[resets], x[resets] = rng.choice([100.0, 1e3, 1e6, 1e9], resets.sum()), 0
    a[:] = -1.0, -1e6, -np.inf
    dt[0, ::3, 2] = 0
    args = [array(m, m.dtype) for m in (x, dt, a, b, c)]
    _, initial, *cotangents = more(args[0], args[3])

    def all_results(fn, **how):
        call = lambda x, dt, a, b, c, initial: fn(x, dt, a, b, c, initial_state=initial, **how)
        out, vjp = jax.vjp(call, *args, initial)
        return *out, *vjp(tuple(ct.astype(o.dtype) for ct, o in zip(cotangents, out, strict=True)))

    got = lab.run(lambda: all_results(functools.partial(ssd, return_final_state=True)))
    with jax.enable_x64():
        args, initial = [jnp.asarray(np.float64(m)) for m in args], jnp.asarray(np.float64(initial))
        wanted = all_results(reference)
    for i, (ours, exact) in enumerate(zip(got, wanted, strict=True)):
        if i == 3:  # The gradient of a step of 0 is a = -inf times something.
            assert np.isfinite(ours).all()
            ours, exact = ours[..., :2], exact[..., :2]
        assert error(ours, exact) < 2**-7, i
    assert (got[3][resets] == 0).all() and got[4][2] == 0


def test_the_error_is_that_of_the_same_arithmetic():
    """As large as that of flash-linear-attention, which rounds the same operands: at most 1.5 times."""
    x, dt, a, b, c = operands(length=640)
    rounded = lambda m: np.asarray(m, BF16).astype(np.float64)
    squeezed = x[0, :, 0], dt[0, :, 0], a[0], b[0, :, 0], c[0, :, 0]
    exact, exact_state = chunked(*squeezed, chunk=640)
    peer, peer_state = chunked(*squeezed, 64, rounded)
    for chunk in CHUNKS:
        y, state = lab.run(functools.partial(ssd, chunk_size=chunk, return_final_state=True), x, dt, a, b, c)
        assert error(y[0, :, 0], exact) <= 1.5 * error(rounded(peer), exact)
        assert error(state[0, 0], exact_state) <= 1.5 * error(peer_state, exact_state)


@pytest.mark.parametrize("chunk", [1, 5, 64, 200])
def test_chunks_are_the_recurrence(chunk):
    x, dt, a, b, c = operands(length=150)
    with jax.enable_x64():
        wanted = reference(*(array(m, jnp.float64) for m in (x, dt, a, b, c)))
    got = chunked(x[0, :, 0], dt[0, :, 0], a[0], b[0, :, 0], c[0, :, 0], chunk)
    for result, exact in zip(got, (wanted[0][0, :, 0], wanted[1][0, 0]), strict=True):
        np.testing.assert_allclose(result, exact, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("at", [64, slow(100), slow(1)])
def test_a_sequence_may_be_split_anywhere(at):
    x, dt, a, b, c = operands(length=150)
    run = functools.partial(lab.run, functools.partial(ssd, return_final_state=True))
    whole, final = run(x, dt, a, b, c)
    first, state = run(x[:, :at], dt[:, :at], a, b[:, :at], c[:, :at])
    rest = functools.partial(ssd, initial_state=state, return_final_state=True)
    second, end = lab.run(rest, x[:, at:], dt[:, at:], a, b[:, at:], c[:, at:])
    if at % 64 == 0:  # The same chunks.
        np.testing.assert_array_equal(jnp.concatenate([first, second], axis=1), whole)
        np.testing.assert_array_equal(end, final)
    assert error(jnp.concatenate([first, second], axis=1), whole) < 2**-8 and error(end, final) < 2**-8


@pytest.mark.parametrize("length, parts", [(1500, 3), slow(513, 2)])
def test_parts(length, parts):
    args = operands(length=length)
    d, initial, *_ = more(args[0], args[3])
    check(*args, d=d, initial_state=initial, config=Config(parts=parts), gpu="h200" if parts == 3 else None)


@pytest.mark.parametrize("shape, parts", [((4, 8192, 32), None), ((1, 65536, 32), 4), ((2, 1000, 1), None)])
def test_sequences_are_cut_where_they_do_not_fill_the_gpu(shape, parts):
    batch, length, heads = shape
    rows = rows_per_part(batch, length, heads, num_sms=132)
    assert rows is None if parts is None else -(-length // rows) == parts and rows % 128 == 0


# Packed sequences -----------------------------------------------------------------------------------------------------

STARTS = array([0, 100, 100, 171, 235, 290], jnp.int32)  # One is empty, one a whole chunk; rows after the last.


@pytest.mark.parametrize("config", [None, Config(128, 2, 1), slow(Config(parts=2))], ids=str)
def test_packed_sequences(config):
    args = operands(length=300)
    d, initial, *_ = more(args[0], args[3], num_seqs=5)
    args[0].at[:, 290:].set(jnp.nan)
    y, final = check(*args, d=d, initial_state=initial, cu_seqlens=STARTS, config=config).output
    assert (y[0, 290:] == 0).all() and (final[1] == initial[1]).all()


@pytest.mark.slow
def test_packed_sequences_are_those_alone():
    x, dt, a, b, c = operands(length=235)
    packed = lab.run(functools.partial(ssd, cu_seqlens=STARTS[:5]), x, dt, a, b, c)
    for first, end in ((0, 100), (100, 171), (171, 235)):
        alone = lab.run(ssd, *(m if m.ndim == 1 else m[:, first:end] for m in (x, dt, a, b, c)))
        np.testing.assert_array_equal(packed[:, first:end], alone)


def test_nan_stays_in_its_sequence():
    """In all operands of the second of three, whose rows the chunks of the first and of the third touch; and in the
    rows after the last."""
    args = operands(length=235)
    starts = array([0, 70, 141, 205], jnp.int32)
    spoil = lambda m: m if m.ndim == 1 else m.at[:, 70:141].set(jnp.nan).at[:, 205:].set(jnp.nan)
    fn = functools.partial(ssd, cu_seqlens=starts, return_final_state=True)
    (y, state), (spoiled, spoiled_state) = lab.run(fn, *args), lab.run(fn, *map(spoil, args))
    kept = np.r_[0:70, 141:235]
    np.testing.assert_array_equal(spoiled[:, kept], y[:, kept])
    np.testing.assert_array_equal(spoiled_state[::2], state[::2])
    assert jnp.isnan(spoiled[:, 70:141]).all() and jnp.isnan(spoiled_state[1]).all()


def test_starts_out_of_range_are_cut():
    args = operands(length=150)
    wrong, right = (array(starts, jnp.int32) for starts in ([-3, 70, 40, 10**9], [0, 70, 70, 150]))
    run = lambda starts: lab.run(functools.partial(ssd, cu_seqlens=starts), *args)
    np.testing.assert_array_equal(run(wrong), run(right))


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("part_rows", [None, 128, 256])
@pytest.mark.parametrize("is_packed", [False, True])
def test_each_row_is_in_one_part(is_packed, part_rows):
    starts = np.array([0, 100, 100, 550, 600, 900]) if is_packed else np.arange(4) * 300
    sequences = Sequences(len(starts) - 1, 1000 if is_packed else 900, is_packed, 64, part_rows)
    table, seq = map(np.asarray, jax.jit(sequences.parts)(starts))
    chunks = []
    rows = []
    for first, end, stop, chunk, state in table:
        rows += range(first, stop)
        chunks += range(chunk, chunk - (first - stop) // 64)
        if state < sequences.num_parts:
            assert end == (stop if seq[state] < sequences.num_seqs else first)
            assert seq[state] == sequences.num_seqs or starts[seq[state]] <= first <= starts[seq[state] + 1]
    assert sorted(rows) == list(range(sequences.num_rows))
    assert sorted(chunks) == list(range(len(chunks))) and len(chunks) <= sequences.num_chunks
    values = np.arange(1.0, sequences.num_rows + 1, dtype=np.float32)[:, None]
    in_chunks = jax.jit(sequences.in_chunks)(values, starts)[0]
    assert in_chunks.sum() == values[: starts[-1]].sum()
    sums = jax.jit(sequences.sums_of_parts)(in_chunks.sum(-1)[None], table)
    wanted = np.zeros(sequences.num_parts)
    for first, end, _, _, state in table:
        if state < sequences.num_parts:
            wanted[state] = np.arange(first + 1, end + 1).sum()
    np.testing.assert_array_equal(sums[:, 0][: len(wanted)], wanted)


# Gradients ------------------------------------------------------------------------------------------------------------


def gradients(fn, x, dt, a, b, c, d, initial, dy, d_final, **how):
    call = lambda x, dt, a, b, c, d, initial: fn(x, dt, a, b, c, d=d, initial_state=initial, **how)
    (y, final), vjp = jax.vjp(call, x, dt, a, b, c, d, initial)
    return vjp((dy.astype(y.dtype), d_final.astype(final.dtype)))


def check_gradients(*args, config=None, gpu=None, tolerance=2**-7, **how):
    num_seqs = None if "cu_seqlens" not in how else len(how["cu_seqlens"]) - 1
    ours = functools.partial(ssd, return_final_state=True, config=config)
    fns = [functools.partial(gradients, fn, **how) for fn in (ours, reference)]
    return lab.check(*fns, *args, *more(args[0], args[3], num_seqs), tolerance=(tolerance,) * 7, gpu=gpu)


@pytest.mark.parametrize(
    "sizes",
    [
        dict(length=100, heads=2),
        slow(dict(length=70, batch=2, heads=2, groups=2, state_dim=128)),
        slow(dict(length=128, head_dim=128, state_dim=256)),
        slow(dict(length=130, dtype=jnp.float16)),
    ],
    ids=str,
)
def test_gradients(sizes):
    check_gradients(*operands(**sizes))


@pytest.mark.slow
@pytest.mark.parametrize("steps", [(4.0, 12.0), slow((1e-6, 1e-5)), slow((1e-4, 50.0))], ids=str)
def test_gradients_of_decays(steps):
    """With strong decay the gradient of a is what is left of sums that all but cancel. No token here lets less than
    2**-64 of the state stay, which the op takes for that: beside it the initial state's exact gradient is nothing."""
    check_gradients(*operands(length=100, steps=steps))


@pytest.mark.slow
def test_gradients_of_packed_sequences():
    check_gradients(*operands(length=300), cu_seqlens=STARTS)


@pytest.mark.slow
@pytest.mark.parametrize("how", [dict(), slow(dict(cu_seqlens=jnp.asarray([0, 100, 410, 455])))], ids=str)
def test_gradients_of_parts(how):
    """Three, two, and less than two chunks of 64 in the last part."""
    check_gradients(*operands(length=460), config=Config(parts=3), **how)


@pytest.mark.slow
def test_gradients_with_chunks_of_128():
    check_gradients(*operands(length=200), config=Config(128, 2, 1))


@pytest.mark.slow
def test_nan_stays_in_the_gradients_of_its_sequence():
    x, dt, a, b, c = operands(length=205)
    starts = array([0, 70, 141, 205], jnp.int32)
    spoil = lambda m: m.at[:, 70:141].set(jnp.nan)

    def gradient(x, dt, b, c):
        loss = lambda *args: (ssd(args[0], args[1], a, *args[2:], cu_seqlens=starts).astype(jnp.float32) ** 2)[
            :, kept
        ].sum()
        return jax.grad(loss, argnums=(0, 1, 2, 3))(x, dt, b, c)

    kept = np.r_[0:70, 141:205]
    clean, spoiled = lab.run(gradient, x, dt, b, c), lab.run(gradient, *map(spoil, (x, dt, b, c)))
    for wanted, got in zip(clean, spoiled, strict=True):
        np.testing.assert_array_equal(got[:, kept], wanted[:, kept])


# Linear attention -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [None, slow(0.3)])
def test_linear_attention(scale):
    value, _, _, key, query = operands(length=150, heads=2)
    _, initial, *_ = more(value, key)
    fns = [functools.partial(fn, scale=scale) for fn in (linear_attention, linear_attention_reference)]
    fns[0] = functools.partial(fns[0], return_final_state=True)
    call = lambda fn: lambda q, k, v, initial: fn(q, k, v, initial_state=initial)
    lab.check(*map(call, fns), 8 * query, 8 * key, value, initial, tolerance=(2**-8,) * 2, gpu=None)


def test_linear_attention_is_a_masked_product():
    value, _, _, key, query = operands(length=70)
    wanted = jnp.tril(query[0, :, 0].astype(jnp.float32) @ key[0, :, 0].astype(jnp.float32).T) @ value[0, :, 0]
    got = lab.run(functools.partial(linear_attention, scale=1.0), query, key, value)
    assert error(got[0, :, 0], wanted) < 2**-8


@pytest.mark.slow
def test_gradients_of_linear_attention():
    value, _, _, key, query = operands(length=100)
    loss = lambda fn: lambda q, k, v: (fn(q, k, v, scale=0.5).astype(jnp.float32) ** 2).sum()
    of = lambda *args: linear_attention_reference(*args, scale=0.5)[0].astype(value.dtype)
    got = lab.run(jax.grad(loss(linear_attention), argnums=(0, 1, 2)), query, key, value)
    wanted = jax.grad(loss(lambda *args, scale: of(*args)), argnums=(0, 1, 2))(query, key, value)
    assert all(error(g, w) < 2**-6 for g, w in zip(got, wanted, strict=True))


# At home in JAX, compiled, and refused --------------------------------------------------------------------------------


def test_jit_vmap_and_determinism():
    args = operands(length=70)
    runs = lab.run(ssd, *args), lab.run(jax.jit(ssd), *args)
    several = lab.run(jax.vmap(ssd, in_axes=(0, None, None, None, None)), jnp.stack([args[0], 2 * args[0]]), *args[1:])
    assert (runs[0] == runs[1]).all() and (several[0] == runs[0]).all() and not (several[1] == runs[0]).all()


def avals(batch, length, heads, head_dim, groups, state_dim):
    wide = jax.ShapeDtypeStruct((batch, length, groups, state_dim), BF16)
    x, dt, a = ((batch, length, heads, head_dim), BF16), ((batch, length, heads), jnp.float32), ((heads,), jnp.float32)
    return [*(jax.ShapeDtypeStruct(*m) for m in (x, dt, a)), wide, wide]


@pytest.mark.parametrize("config", [None, Config(128, 2, 1)], ids=str)
@pytest.mark.parametrize("state_dim", arguments.SSD_STATE_DIMS)
def test_what_the_compiler_makes_of_it(state_dim, config):
    if config and state_dim == 256:
        with pytest.raises(ValueError, match="fewer stages"):
            ssd(*operands(length=1, state_dim=256), config=config)
        return
    compiled = lab.compile_for("h200", functools.partial(ssd, config=config), *avals(4, 8192, 32, 64, 32, state_dim))
    need = (config or module.default_config(state_dim)).smem_bytes(state_dim)
    assert need <= compiled.smem_bytes <= need + 2048
    assert compiled.spill_bytes == 0 and not compiled.remarks


@pytest.mark.parametrize("state_dim, spills", [(128, 16), slow(64, 0), slow(256, 80)])
def test_what_the_compiler_makes_of_the_gradients(state_dim, spills):
    """Numbers that all warpgroups share are spilled, and with N = 256 a few of the state's warpgroup."""
    loss = lambda *args: ssd(*args).astype(jnp.float32).sum()
    compiled = lab.compile_for("h200", jax.grad(loss, (0, 1, 2, 3, 4)), *avals(4, 8192, 32, 64, 32, state_dim))
    plan = Plan(Sequences(4, 4 * 8192, False, 64), 32, 32, 1, state_dim // 64, jnp.dtype(BF16), 0, 0, False)
    need = _device.smem_bytes(kernel_backward.scratch(kernel_backward.with_stages(plan)))
    assert need <= compiled.smem_bytes <= need + 4096
    assert compiled.spill_bytes <= spills and not compiled.remarks


def test_warpgroups_find_the_registers_that_they_ask_for():
    shares = [(memory, *[others] * count) for count, (memory, others) in kernel.REGISTERS.items()]
    for share in (*shares, *kernel_backward.REGISTERS.values()):
        assert sum(share) <= 65_536 // (128 * len(share)) // 8 * 8 * len(share)


X, DT, A, B, C = operands(length=4, heads=2)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: ssd(X[0], DT, A, B, C), r"x.shape=\(4, 2, 64\)"),
        (lambda: ssd(X, DT, A, B.astype(jnp.float32), C), "b.dtype=float32"),
        (lambda: ssd(X, DT[:, :2], A, B, C), r"dt.shape=\(1, 2, 2\); must be \(1, 4, 2\)"),
        (lambda: ssd(X, DT, A[:1], B, C), r"a.shape=\(1,\)"),
        (lambda: ssd(X, DT, A, B, C[:, :, :, :32]), r"c.shape"),
        (lambda: ssd(X, DT.astype(jnp.int32), A, B, C), "dt.dtype=int32"),
        (lambda: ssd(X[..., :32], DT, A, B, C), "multiple of 64"),
        (lambda: ssd(X, DT, A, B[..., :32], C[..., :32]), r"one of \(64, 128, 256\)"),
        (lambda: ssd(X, DT, A, *(jnp.repeat(m, 3, axis=2) for m in (B, C))), "not a multiple of 3"),
        (lambda: ssd(X, DT, A, B, C, chunk_size=32), "chunk_size=32"),
        (lambda: ssd(X, DT, A, B, C, chunk_size=128, config=Config()), "chunk_size=128"),
        (lambda: ssd(X, DT, A, B, C, initial_state=jnp.ones((1, 2, 64, 64), BF16)), "initial_state is"),
        (lambda: ssd(X, DT, A, B, C, cu_seqlens=jnp.asarray([0])), "num_seqs \\+ 1"),
        (lambda: ssd(*operands(batch=2, length=4), cu_seqlens=STARTS), "batch of 2"),
        (lambda: ssd("x", DT, A, B, C), "x=.x.; must be an array"),
        (lambda: linear_attention(C, B, X[..., :32]), "heads of value have 32"),
        (lambda: linear_attention(C[0], B, X), "query.shape"),
        (lambda: Config(chunk_size=96), "chunk_size=96"),
        (lambda: Config(num_stages=1), "num_stages=1"),
        (lambda: Config(parts=0), "parts=0"),
    ],
)  # fmt: skip
def test_bad_arguments_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_without_a_gpu_it_says_what_to_do(no_gpu):
    if jax.default_backend() == "gpu":
        pytest.skip("there is a GPU")
    with pytest.raises(RuntimeError, match="lab.interpret"):
        ssd(X, DT, A, B, C)


# Mutants: each fails the check that the kernel passes. ----------------------------------------------------------------

NOTHING = ("ssd/ssd", "PIECE", "PIECE")


@pytest.mark.parametrize(
    "file, old, new",
    [
        NOTHING,
        ("ssd/kernel_state", "[piece * decay for piece in state]", "state"),
        ("ssd/kernel", "jnp.where(s <= t, exponent, -jnp.inf)", "jnp.where(s < t, exponent, -jnp.inf)"),
        ("ssd/kernel", "shared.states.acquire(i)", "shared.states.slot(i)"),
        ("tiles", "operand.clear(stage, jnp.maximum(end, 0), part.interpreted)", "pass"),
        ("tiles", "pl.when(num_rows >= PIECE)(lambda: copy(0, PIECE))", "copy(0, PIECE)"),
        ("ssd/plan", "decay[:, None, None] * start + local", "start + local"),
        ("ssd/plan", "LOG2E * a.astype", "a.astype"),
    ],
)  # fmt: skip
def test_mutants_are_caught(run_only, found_if, monkeypatch, tmp_path, file, old, new):
    """A state not decayed, a mask off by one, waits left out, neighbours' rows let in or overwritten."""
    fn = copy_of("ssd.ssd", monkeypatch, tmp_path, file, old, new)
    x, dt, a, b, c = operands(length=1300)
    starts = array([0, 70, 141, 1300], jnp.int32)
    x = x.at[:, 70:141].set(jnp.nan)
    config = fn.Config(num_stages=2, num_states=1, parts=2)
    ours = lambda *args: fn.ssd(*args, cu_seqlens=starts, config=config)
    kept = lambda y: y.at[:, 70:141].set(0)
    of = lambda x, *rest: kept(reference(jnp.nan_to_num(x), *rest, cu_seqlens=starts)[0])
    with found_if(old != new):
        lab.check(lambda *args: kept(ours(*args)), of, x, dt, a, b, c, tolerance=2**-7)


@pytest.mark.parametrize(
    "file, old, new",
    [
        NOTHING,
        ("ssd/kernel_backward", "(j <= i, row - column)", "(j < i, row - column)"),
        ("ssd/kernel_backward", "(i <= j, column - row)", "(i < j, column - row)"),
        ("ssd/gradients", "d_dt = of(KEY_SUM) + of(OWN_SUM) + of(END_SUM)", "d_dt = of(KEY_SUM) + of(END_SUM)"),
        ("ssd/gradients", "(of(STATE_SUM) + end)", "end"),
        ("ssd/kernel_backward", "dx if skip is None else", "dx if True else"),
        ("ssd/kernel_backward", "shared.gradients.acquire(i)", "shared.gradients.slot(i)"),
        ("ssd/kernel_state", "if reverse:", "if False:"),
    ],
)
def test_mutants_of_the_gradients_are_caught(run_only, found_if, monkeypatch, tmp_path, file, old, new):
    fn = copy_of("ssd.ssd", monkeypatch, tmp_path, file, old, new)
    args = operands(length=130)
    ours = functools.partial(fn.ssd, return_final_state=True)
    with found_if(old != new):
        fns = [functools.partial(gradients, fn) for fn in (ours, reference)]
        lab.check(*fns, *args, *more(args[0], args[3]), tolerance=(2**-7,) * 7)

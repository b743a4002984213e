"""rope_write_kv: queries and keys are rotated, rows are written where their slots say, and nothing else is touched."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lab
from cookbook import rope_write_kv
from tests.arrays import array

module = importlib.import_module("cookbook.attn.cache.rope_write_kv")
reference = module.rope_write_kv_reference
BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
PAGES, PAGE_SIZE = 5, 4
slow = lambda *case: pytest.param(*case, marks=pytest.mark.slow)


def operands(tokens, num_q, num_kv, head_dim, dtype=BF16, norms=False):
    """Arguments, and norms if wanted. Pages are NaN; every third token is padding, one is beyond the cache."""
    rng = np.random.default_rng(tokens + num_q + head_dim)
    normal = lambda *shape: array(rng.normal(size=shape), dtype)
    angles = array(rng.uniform(0, 7, (tokens, head_dim // 2)), F32)
    slots = rng.permutation(PAGES * PAGE_SIZE)[:tokens].astype(np.int32)
    slots[1::3] = -1
    slots[2::7] = PAGES * PAGE_SIZE
    pages = jnp.full((PAGES, PAGE_SIZE, num_kv, head_dim), jnp.nan, dtype)
    scales = dict(q_norm=1 + 0.2 * normal(head_dim), k_norm=1 - 0.2 * normal(head_dim)) if norms else {}
    return [normal(tokens, num_q + 2 * num_kv, head_dim), jnp.cos(angles), jnp.sin(angles), pages, pages, slots], scales


def written(slots) -> np.ndarray:
    """Which slots of the cache get a row."""
    found = np.zeros(PAGES * PAGE_SIZE, bool)
    found[[slot for slot in slots if 0 <= slot < found.size]] = True
    return found


def check(args, scales, gpu=None):
    """Against the reference, races included; and slots that are not written stay NaN, and others have none."""
    fixed = lambda fn: lambda *args: fn(*args, **scales)
    zeros = [jnp.zeros_like(pages) for pages in args[3:5]]  # A comparison of errors takes no NaN.
    report = lab.check(fixed(rope_write_kv), fixed(reference), *args[:3], *zeros, args[5], gpu=gpu)
    for pages in lab.run(fixed(rope_write_kv), *args)[1:]:
        is_nan = np.isnan(np.asarray(pages, np.float32)).reshape(PAGES * PAGE_SIZE, -1)
        np.testing.assert_array_equal(is_nan.all(axis=1), ~written(args[5]))
        np.testing.assert_array_equal(is_nan.any(axis=1), ~written(args[5]))
    return report


@pytest.mark.parametrize(
    # A piece for all heads, several, one shifted back, fewer heads than warps; loads of 16 bytes down to one value.
    "tokens, num_q, num_kv, head_dim, dtype, norms",
    [
        (8, 32, 8, 64, BF16, False), (3, 16, 2, 128, BF16, True), (4, 5, 1, 256, F16, True), (3, 7, 5, 64, F32, False),
        slow(3, 1, 1, 64, BF16, True), slow(2, 40, 8, 128, BF16, False), slow(3, 9, 3, 256, F32, True),
        slow(2, 64, 4, 128, F16, True), slow(1, 12, 12, 64, BF16, True),
    ],
    ids=str,
)  # fmt: skip
def test_shapes(tokens, num_q, num_kv, head_dim, dtype, norms):
    report = check(*operands(tokens, num_q, num_kv, head_dim, dtype, norms), gpu="h200")
    assert report.compiled is None or report.compiled.spill_bytes == 0


@pytest.mark.parametrize("num_q, num_kv, head_dim, dtype, norms", [(5, 3, 64, BF16, True), (4, 5, 128, F32, False)])
def test_pages_of_8_bit_floats(num_q, num_kv, head_dim, dtype, norms):
    """A scale for each head; what lies beyond 448 of it is cut there, and a NaN stays one."""
    (qkv, cos, sin, pages, _, slots), norms = operands(6, num_q, num_kv, head_dim, dtype, norms)
    rng = np.random.default_rng(0)
    scales = [array(rng.permutation(np.geomspace(0.002, 0.3, num_kv)), F32) for _ in "kv"]
    slots[0] = place = min(set(range(PAGES * PAGE_SIZE)) - set(slots.tolist()))  # The row of the NaN is written.
    qkv = qkv.at[0, -1, 3].set(jnp.nan)
    zeros = jnp.zeros(pages.shape, jnp.float8_e4m3fn)
    fixed = lambda fn: lambda *args: fn(*args[:-2], k_scale=args[-2], v_scale=args[-1], **norms)
    args = (qkv, cos, sin, zeros, zeros, slots, *scales)
    got, wanted = lab.run(fixed(rope_write_kv), *args), jax.jit(fixed(reference))(*args)
    for x, y in zip(got[1:], wanted[1:], strict=True):
        np.testing.assert_array_equal(np.asarray(x, np.float32), np.asarray(y, np.float32))
    np.testing.assert_allclose(np.asarray(got[0], np.float32), np.asarray(wanted[0], np.float32), rtol=2**-7, atol=1e-3)
    v = np.asarray(got[2], np.float32)
    assert np.isnan(v[place // PAGE_SIZE, place % PAGE_SIZE, -1, 3]) and np.isnan(v).sum() == 1 and np.nanmax(v) == 448
    assert lab.compile_for("h200", fixed(rope_write_kv), *args).spill_bytes == 0


def test_the_reference_turns_complex_numbers():
    """As the paper has it, with a head's halves as real and imaginary parts."""
    (qkv, cos, sin, *rest), _ = operands(4, 3, 2, 64, F32)
    q, k_pages, v_pages = reference(qkv, cos, sin, *rest)
    pairs = np.asarray(qkv[:, :5, :32] + 1j * qkv[:, :5, 32:]) * np.asarray(cos + 1j * sin)[:, None]
    turned = np.concatenate([pairs.real, pairs.imag], axis=-1)
    np.testing.assert_allclose(q, turned[:, :3], atol=1e-5)
    for token, slot in enumerate(rest[2]):
        if 0 <= slot < PAGES * PAGE_SIZE:
            page = slot // PAGE_SIZE, slot % PAGE_SIZE
            np.testing.assert_allclose(k_pages[page], turned[token, 3:], atol=1e-5)
            np.testing.assert_array_equal(v_pages[page], qkv[token, 5:])


def test_values_are_moved_bit_by_bit_and_a_nan_stays_with_its_head():
    (qkv, *rest), scales = operands(6, 4, 2, 64, BF16, norms=True)
    rest[-1] = np.arange(6, dtype=np.int32)
    bits = np.array(qkv).view(np.uint16)
    bits[:, 6:] = np.random.default_rng(0).integers(0, 2**16, bits[:, 6:].shape)  # NaNs of every kind.
    bits[2, 1, 5], bits[3, 5, 60] = 0x7FC0, 0x7FC0
    q, k, v = lab.run(lambda *args: rope_write_kv(*args, **scales), jnp.asarray(bits.view(BF16)), *rest)
    np.testing.assert_array_equal(np.asarray(v).view(np.uint16).reshape(-1, 2, 64)[:6], bits[:, 6:])
    nan_heads = lambda x: np.isnan(np.asarray(x, np.float32)).any(axis=-1)
    assert np.argwhere(nan_heads(q)).tolist() == [[2, 1]]
    assert np.argwhere(nan_heads(k).reshape(-1, 2)[:6]).tolist() == [[3, 1]]


def test_donated_pages_keep_their_place():
    """Traced for a GPU: each array of pages that is donated lies where the one that comes out lies."""
    args, _ = operands(4, 8, 2, 64)
    with module._host.building_for(module._host.Target("a GPU", 132)):
        traced = jax.jit(lambda *args: rope_write_kv(*args), donate_argnums=(3, 4)).trace(*args)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    (main,) = (line for line in text.splitlines() if "func.func public @main" in line)
    for number in (1, 2):
        assert f"tf.aliasing_output = {number}" in main.split("%arg")[3 + number]


def test_no_tokens_or_no_pages():
    args, _ = operands(3, 4, 2, 64)
    q, *pages = rope_write_kv(*(x[:0] if i in (0, 1, 2, 5) else x for i, x in enumerate(args)))
    assert q.shape == (0, 4, 64) and all(np.isnan(x.astype(F32)).all() for x in pages)


# Mutants -------------------------------------------------------------------------------------------------------------

rotated, normalised, store = module._rotated, module._normalised, module.Heads.store


def turned_back(heads, pieces, cos, sin, norm, eps):
    return [(b, a) for a, b in rotated(heads, [(b, a) for a, b in pieces], cos, sin, None, eps)]


def without_shift(heads):
    return list(range(0, heads.count - heads.rows + 1, heads.rows))


def other_head(heads, out_gmem, row, pieces):
    return store(heads, out_gmem, row, pieces[::-1])


def unscaled(heads, pieces, norm_gmem, eps):
    return normalised(heads, pieces, norm_gmem, 10.0)


@pytest.mark.parametrize(
    "where, name, wrong",
    [
        (module, "_rotated", turned_back),
        (module, "_rotated", lambda heads, pieces, *rest: pieces),
        (module, "_rotated", lambda heads, pieces, cos, sin, norm, eps: rotated(heads, pieces, cos, sin, None, eps)),
        (module, "_normalised", unscaled),
        (module.Heads, "starts", property(without_shift)),
        (module.Heads, "store", other_head),
        (module.Heads, "at", lambda self, ref, row, start, part: ref.at[0, pl_ds(start, self.rows), half(self, part)]),
    ],
    ids=["turned the other way", "not turned", "no norm", "another eps", "no last piece", "other heads", "one token"],
)
def test_mutants_are_caught(mutant, monkeypatch, where, name, wrong):
    monkeypatch.setattr(where, name, wrong)
    with pytest.raises((lab.CheckError, AssertionError)):
        check(*operands(6, 40, 5, 64, norms=True))


def pl_ds(start, size):
    return module.pl.ds(start, size)


def half(heads, part):
    return module.pl.ds(part * heads.half, heads.half)


def test_a_mutant_that_writes_padding_is_caught(mutant):
    mutant(module, "pl", when=lambda condition: lambda fn: fn())
    with pytest.raises((lab.CheckError, AssertionError, IndexError, ValueError)):
        check(*operands(6, 4, 2, 64))


# Errors --------------------------------------------------------------------------------------------------------------


def wrong(**changes):
    args, scales = operands(3, 4, 2, 64, norms=True)
    named = dict(zip(("qkv", "cos", "sin", "k_pages", "v_pages", "slot_mapping"), args, strict=True)) | scales
    return lambda: rope_write_kv(**{name: changes.get(name, lambda x: x)(x) for name, x in named.items()})


PAGES_AND_QKV = ("qkv", "k_pages", "v_pages")


@pytest.mark.parametrize(
    "fn, message",
    [
        (wrong(qkv=lambda x: x[0]), r"qkv has shape \(8, 64\); must be \(T, N_q \+ 2 H, D\)"),
        (wrong(qkv=lambda x: x[:, :4]), r"must have query heads beside 2 x 2"),
        (wrong(cos=lambda x: x[:, :16]), r"cos has shape \(3, 16\); must be \(3, 32\)"),
        (wrong(v_pages=lambda x: x[:3]), r"v_pages has shape \(3, 4, 2, 64\); must be \(5, 4, 2, 64\)"),
        (wrong(slot_mapping=lambda x: x[:2]), r"slot_mapping has shape \(2,\); must be \(3,\)"),
        (wrong(slot_mapping=lambda x: x.astype(np.int16)), "slot_mapping.dtype is int16; must be int32"),
        (wrong(sin=lambda x: x.astype(BF16)), "sin.dtype is bfloat16; must be float32"),
        (wrong(k_pages=lambda x: x.astype(F16)), "k_pages.dtype is float16; must be bfloat16"),
        (wrong(**dict.fromkeys(PAGES_AND_QKV, lambda x: x.astype(jnp.int8))), "must be bfloat16, float16 or float32"),
        (wrong(**dict.fromkeys(PAGES_AND_QKV, lambda x: x[..., :32])), "head_dim=32 .*; must be 64, 128 or 256"),
        (wrong(q_norm=lambda x: x[:5]), r"q_norm has shape \(5,\); must be \(64,\)"),
        (wrong(q_norm=lambda x: None), "k_norm is given alone"),
        (wrong(qkv=lambda x: jnp.zeros((3, 600, 64), BF16)), "38400 values; must be at most 32768"),
    ],
)
def test_errors_name_the_rule(fn, message):
    with pytest.raises(ValueError, match=message):
        fn()


def test_it_is_named_where_a_gradient_is_asked_for():
    args, _ = operands(3, 4, 2, 64, F32)
    fn = lambda qkv: rope_write_kv(qkv, *args[1:])[0].sum()
    with pytest.raises(ValueError, match="cookbook.rope_write_kv has no gradient: differentiate rope_write_kv_ref"):
        lab.run(jax.grad(fn), args[0])


def test_every_layout_holds_each_value_once():
    """Pieces cover all heads, and their loads divide a head's half."""
    for half_dim in (32, 64, 128):
        for itemsize in (2, 4):
            for count in range(1, 70):
                heads = module.Heads(0, count, half_dim, itemsize)
                covered = {start + i for start in heads.starts for i in range(heads.rows)}
                assert covered == set(range(count)) and heads.half % heads.vec == 0
                assert heads.half // heads.vec <= 32 and heads.vec * itemsize <= 16
                assert heads.rows in (1, 128 * heads.vec // half_dim)

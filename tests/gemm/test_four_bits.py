"""Weights of 4 bits: packed from every layout and back, widened in registers, multiplied; errors, mutants."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

import cookbook
import lab
from cookbook import _device, _host
from cookbook.gemm.dense import four_bits, kernel_int8_weights, pack
from cookbook.gemm.dense.four_bits import E2M1, Integers
from cookbook.gemm.experts import packed
from tests import ptx
from tests.arrays import array

int4, mxfp4 = (inspect.getmodule(op) for op in (cookbook.matmul_int4_weights, cookbook.matmul_mxfp4_weights))
ragged_int4, ragged_mxfp4 = map(
    inspect.getmodule, (cookbook.ragged_dot_int4_weights, cookbook.ragged_dot_mxfp4_weights)
)
module_of_experts = inspect.getmodule(cookbook.moe)
matmul_int4_weights, matmul_mxfp4_weights, Config = int4.matmul_int4_weights, mxfp4.matmul_mxfp4_weights, int4.Config
BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
E2M1_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E2M1_VALUES = np.concatenate([E2M1_VALUES, -E2M1_VALUES])


def groups(rng, k, n, size, dtype, zeros_dtype=None):
    """Scales that differ by far, and zero points, one below and one above the integers' middle among them."""
    shape = -(-k // size), n
    zeros = None if zeros_dtype is None else array(rng.integers(0, 17, size=shape), zeros_dtype)
    return array(np.exp(rng.normal(size=shape)) / 100, dtype), zeros


def integers(m, n, k, size=128, dtype=BF16, scale_dtype=BF16, zeros_dtype=None):
    rng = np.random.default_rng(m * n + k)
    w = cookbook.pack_int4(array(rng.integers(-8, 8, size=(k, n)), jnp.int8))
    scales, zeros = groups(rng, k, n, size, scale_dtype, zeros_dtype)
    x = array(rng.normal(size=(m, k)) + 0.1, dtype)
    return (x, w, scales) if zeros is None else (x, w, scales, zeros)


def checkpoint(rng, n, k, lead=()):
    """Blocks and scales as gpt-oss has them."""
    blocks = array(rng.integers(0, 256, size=(*lead, n, k // 32, 16)), jnp.uint8)
    return blocks, array(rng.integers(117, 124, size=(*lead, n, k // 32)), jnp.uint8)


def check(m, n, k, size=128, dtype=BF16, scale_dtype=BF16, zeros_dtype=None, gpu=None, **how):
    def fn(x, w, scales, zeros=None):
        return matmul_int4_weights(x, w, scales, zeros=zeros, group_size=size, **how)

    def reference(x, w, scales, zeros=None):
        return int4.matmul_int4_weights_reference(x, w, scales, zeros, size, weight_dtype=dtype)

    return lab.check(fn, reference, *integers(m, n, k, size, dtype, scale_dtype, zeros_dtype), gpu=gpu)


def check_mxfp4(m, n, k, gpu=None, **how):
    rng = np.random.default_rng(n + k)
    operands = array(rng.normal(size=(m, k)) + 0.1, BF16), *cookbook.pack_mxfp4(*checkpoint(rng, n, k))
    fn = functools.partial(matmul_mxfp4_weights, **how)
    return lab.check(fn, mxfp4.matmul_mxfp4_weights_reference, *operands, gpu=gpu)


# Packing --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [8, 200])
def test_integers_are_packed_as_documented_and_back(k):
    w = np.random.default_rng(k).integers(-8, 8, size=(k, 85)).astype(np.int8)
    words = np.asarray(cookbook.pack_int4(w))
    assert words.dtype == np.uint32 and words.shape == (2, -(-k // 64), 512)
    np.testing.assert_array_equal(cookbook.unpack_int4(words, k, 85), w)
    column = np.arange(85)
    warp, following, row = column // 16 % 4, column // 8 % 2, column % 8
    for i in range(k):
        part, pair, lane, half = i // 32 % 2, i // 8 % 4, i // 2 % 4, i % 2
        found = words[column // 64, i // 64, 4 * (32 * warp + 4 * row + lane) + 2 * following + part]
        np.testing.assert_array_equal((found >> (16 * half + 4 * pair) & 15).astype(int) - 8, w[i])


def words_of(values, order=range(8)):
    """int32 words of 8 values along the last axis, value `order[i]` in nibble i."""
    values = values.reshape(*values.shape[:-1], -1, 8).astype(np.uint32)
    return sum(values[..., of] << np.uint32(4 * i) for i, of in enumerate(order)).view(np.int32)


@pytest.mark.parametrize("layout", ["gptq", "gptq_v2", "awq"])
def test_checkpoints_keep_their_weights(layout):
    rng, k, n = np.random.default_rng(0), 192, 24
    q, zeros, scales = rng.integers(0, 16, size=(k, n)), rng.integers(1, 16, size=(3, n)), rng.normal(size=(3, n))
    if layout == "awq":
        order = 0, 2, 4, 6, 1, 3, 5, 7
        packed = cookbook.pack_int4_awq(words_of(q, order), words_of(zeros, order), scales)
    else:
        less = int(layout == "gptq")
        qweight, order = words_of(np.ascontiguousarray(q.T)).T, np.arange(k) // 64
        how = dict(zeros_less_one=bool(less), g_idx=order)
        packed = cookbook.pack_int4_gptq(qweight, words_of(zeros - less), scales, **how)
        with pytest.raises(ValueError, match="g_idx must be None or arange"):
            cookbook.pack_int4_gptq(qweight, words_of(zeros), scales, g_idx=order[::-1])
    np.testing.assert_array_equal(cookbook.unpack_int4(packed[0], k, n), q - 8)
    np.testing.assert_array_equal(packed[1], scales.astype(np.float32))
    np.testing.assert_array_equal(packed[2], zeros)


@pytest.mark.parametrize("k", [64, 96])
def test_mxfp4_keeps_every_value(k):
    """All of 16 values and of the scales that are promised, of experts too; the least ones lose bits."""
    rng = np.random.default_rng(k)
    blocks, scales = checkpoint(rng, 3, k, lead=(2,))
    scales = (
        scales.at[0, 0, 0]
        .set(35)
        .at[0, 0, -1]
        .set(147)
        .at[1]
        .set(rng.integers(35, 148, size=(3, k // 32), dtype=np.uint8))
    )
    values = E2M1_VALUES[np.stack([np.asarray(blocks) & 15, np.asarray(blocks) >> 4], -1)].reshape(2, 3, -1, 32)
    wanted = values * 2.0 ** (np.asarray(scales, float)[..., None] - 127)
    w, packed = cookbook.pack_mxfp4(blocks, scales)
    assert w.shape == (2, 1, -(-k // 64), 512) and packed.shape == (2, -(-k // 64), 3)
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):  # A GPU's powers are an ulp off.
        found = np.asarray(mxfp4.widened(w, packed, jnp.float64))[:, :k]
    np.testing.assert_array_equal(found, wanted.reshape(2, 3, k).swapaxes(1, 2))


# In registers ---------------------------------------------------------------------------------------------------------


def widened(form, words, *of_groups):
    """A block of columns as the code of a warpgroup widens it: the interpreter does it by other instructions."""
    units = words.shape[1]

    def body(w, *rest):
        words, (*numbers, out) = form_of.words(w, 0, 64), rest
        read = [[_device.load(x.at[i], _device.ROWS) for i in range(x.shape[0])] for x in numbers]
        wide = four_bits.widen(form, words, read, False)
        for i, part in enumerate(wide):
            _device.store(out.at[:, 64 * i : 64 * i + 64], part)

    form_of, words = four_bits.Blocks(jnp.dtype(jnp.uint32), 64, 64 * units, False), four_bits.in_runs(words)
    kernel = plgpu.kernel(body, out_type=jax.ShapeDtypeStruct((64, 64 * units), form.dtype))
    arrays = [np.array(x, order="C") for x in (words, *of_groups)]
    compiled = lab.compile_for("h200", kernel, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays))
    out = np.zeros((64, 64 * units), form.dtype)
    ptx.run(compiled.ptx, *arrays, out)
    return out.astype(np.float64) * 2.0**form.held


@pytest.mark.parametrize(
    "dtype, scale_dtype, zeros_dtype, size",
    [(BF16, BF16, None, 32), (BF16, F16, jnp.uint8, 64), (F16, F16, F16, 128)],
)
def test_integers_are_widened_exactly(dtype, scale_dtype, zeros_dtype, size):
    """Every integer, in place, times its scale, rounded once."""
    rng, k = np.random.default_rng(size), 128
    w = rng.integers(-8, 8, size=(k, 64)).astype(np.int8)
    scales, zeros = groups(rng, k, 64, size, scale_dtype, zeros_dtype)
    of_groups = [scales] if zeros is None else [scales, zeros]
    form = Integers(jnp.dtype(dtype), scales.dtype, size, None if zeros is None else zeros.dtype)
    found = widened(form, cookbook.pack_int4(w), *of_groups)
    of_rows = lambda numbers: np.repeat(np.asarray(numbers, np.float64), size, axis=0)
    wanted = (w + 8 - (8 if zeros is None else of_rows(zeros))) * of_rows(scales)
    bits = (8, -133) if dtype == BF16 else (11, -24)
    np.testing.assert_array_equal(found, ptx.rounded(wanted, *bits).T)


def test_mxfp4_is_widened_exactly():
    blocks, scales = checkpoint(np.random.default_rng(1), 64, 128)
    scales = scales.at[:8].set(127 - 92).at[8:16].set(127 + 20)
    w, packed = cookbook.pack_mxfp4(blocks, scales)
    values = E2M1_VALUES[np.stack([np.asarray(blocks) & 15, np.asarray(blocks) >> 4], -1)].reshape(64, 4, 32)
    wanted = values * 2.0 ** (np.asarray(scales, float)[..., None] - 127)
    np.testing.assert_array_equal(widened(E2M1(jnp.dtype(BF16)), w, packed), wanted.reshape(64, 128))


# Products -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "m, n, k, size, how",
    [
        (40, 77, 200, 32, dict(zeros_dtype=jnp.uint8, config=Config(tile_n=40, num_stages=2, overlap=True))),
        (20, 144, 272, 64, dict(scale_dtype=F32, config=Config(tile_n=24, split_k=3))),
        (8, 272, 136, 128, dict(dtype=F16, scale_dtype=F16, config=Config(tile_n=8, tile_k=64, cluster_m=2))),
    ],
)
def test_every_kind_of_integers(m, n, k, size, how):
    check(m, n, k, size, **how)


def test_mxfp4():
    check_mxfp4(40, 264, 352, config=Config(256, 40, tile_k=256))


@pytest.mark.parametrize("op, m", [("int4", 1), ("mxfp4", 4096)])
def test_what_the_compiler_makes_of_it(op, m):
    """No spill; one load takes a thread's words of a block; products wait for none; one instruction scales a pair."""
    n, k = 8192, 4096
    scales = ((k // 128, n), BF16) if op == "int4" else ((k // 64, n), jnp.uint16)
    avals = [jax.ShapeDtypeStruct(*x) for x in (((m, k), BF16), (pack.shape_of(n, k), jnp.uint32), scales)]
    compiled = lab.compile_for("h200", getattr(cookbook, f"matmul_{op}_weights"), *avals)
    assert compiled.spill_bytes == 0 and not compiled.remarks
    assert "LDS.128" in compiled.sass and "LDS.U8" not in compiled.sass and "HADD2" not in compiled.sass
    # One scales a pair, and the products that take it as an operand are as many for each four pairs.
    scaling = compiled.sass.count("HFMA2.BF16" if op == "int4" else "HMUL2.BF16")
    assert scaling >= 4 * compiled.sass.count("HGMMA") - 8 and compiled.sass.count("HGMMA") >= 4


def test_nan_stays_in_its_row_and_column():
    x, w, scales = integers(10, 80, 136)
    x, scales = x.at[3, 5].set(jnp.nan).at[7, 135].set(jnp.inf), scales.at[1, 11].set(jnp.inf)
    out = lab.run(functools.partial(matmul_int4_weights, config=Config(tile_n=16)), x, w, scales)
    wanted = int4.matmul_int4_weights_reference(x, w, scales)
    np.testing.assert_array_equal(jnp.isnan(out), jnp.isnan(wanted))


def test_no_copy_of_aligned_operands():
    with _host.building_for(_host.Target("h200", 132)):
        for op, operands in ((matmul_int4_weights, integers(8, 64, 128)), (matmul_mxfp4_weights, MX)):
            jaxpr = str(jax.make_jaxpr(op)(*operands))
            assert all(f" {name}[" not in jaxpr for name in ("transpose", "pad", "copy"))


def ones(*shape, dtype=BF16):
    return jnp.ones(shape, dtype)


W, S = ones(1, 2, 512, dtype=jnp.uint32), ones(1, 16)
MX = ones(8, 128), W, ones(2, 16, dtype=jnp.uint16)
call = functools.partial(matmul_int4_weights, ones(8, 128))


@pytest.mark.parametrize(
    "fn, message",
    [
        (lambda: matmul_int4_weights(ones(8, 132), W, S), "a row of x has 132 values, 264 bytes.*pad it to 136"),
        (
            lambda: matmul_int4_weights(ones(8, 64), W, S),
            r"w.shape=\(1, 2, 512\) beside K = 64 of x and N = 16 .*\(1, 1, 512\),",
        ),
        (lambda: call(ones(1, 2, 512, dtype=jnp.int8), S), "int8.*and uint32: pack the weights"),
        (lambda: matmul_int4_weights(ones(8, 128, dtype=F32), W, S), "float32.*must be bfloat16 or float16"),
        (lambda: matmul_int4_weights(ones(2, 8, 128), W, S), "vmap"),
        (lambda: call(W, S, group_size=48), "group_size=48; must be one of"),
        (lambda: call(W, S, group_size=64), r"scales.shape=\(1, 16\).*must be \(2, 16\)"),
        (lambda: call(W, S.astype(jnp.int8)), "must be .*floats"),
        (lambda: call(W, S, zeros=ones(2, 16)), r"zeros.shape=\(2, 16\).*must be \(1, 16\)"),
        (lambda: matmul_mxfp4_weights(MX[0].astype(F16), *MX[1:]), "float16.*must be bfloat16"),
        (lambda: matmul_mxfp4_weights(*MX[:2], S), r"must be \(2, 16\) and uint16.*pack_mxfp4"),
        (lambda: cookbook.pack_int4(ones(16, 16)), "w has shape .* must be int8"),
        (lambda: cookbook.pack_int4(9 - ones(16, 16, dtype=jnp.int8)), "integers from 8 to 8; must be from -8 to 7"),
        (lambda: cookbook.unpack_int4(W, 64, 9), r"words.shape=\(1, 2, 512\), k=64, n=9; must end with \(1, 1, 512\)"),
        (lambda: cookbook.pack_mxfp4(ones(4, 2, 8, dtype=jnp.uint8), ones(4, 2, dtype=jnp.uint8)), "must be .*16"),
        (
            lambda: cookbook.pack_int4_awq(ones(8, 1, dtype=jnp.int32), ones(1, 2, dtype=jnp.int32), ones(1, 8)),
            "qzeros",
        ),
        (
            lambda: cookbook.pack_int4_awq(ones(8, 1, dtype=jnp.int32), ones(3, 1, dtype=jnp.int32), ones(3, 8)),
            "divide K",
        ),
    ],
)
def test_errors_name_the_rule(fn, message):
    with pytest.raises(ValueError, match=message):
        fn()


@pytest.mark.parametrize("mutation", ["group", "half", None])
def test_mutants_are_caught(run_only, monkeypatch, mutant, found_if, mutation):
    """Scales of the group before; those of a unit's first half for its second half too."""
    if mutation == "group":
        div = _device.div
        mutant(kernel_int8_weights, "_device", div=lambda a, b: jnp.maximum(div(a, b) - 1, 0))
    elif mutation == "half":
        right = Integers.interpreted
        monkeypatch.setattr(
            Integers, "interpreted", lambda self, bits, half, *rest: right(self, bits, half // 2 * 2, *rest)
        )
    jax.clear_caches()
    with found_if(mutation is not None):
        check(8, 144, 264, 32, config=Config(tile_n=8))
    jax.clear_caches()


def test_ptx_that_is_carried_out_rounds():
    x = np.array([1 + 2.0**-8, 1 + 3 * 2.0**-8, 2.0**-134 * 3, -3.0])
    np.testing.assert_array_equal(ptx.from_bf16(ptx.to_bf16(x)), [1, 1 + 2.0**-6, 2.0**-132, -3.0])


def test_packing_is_of_arrays_alone():
    """So it runs inside jit, and words are those of `pack.shape_of`."""
    words = jax.eval_shape(cookbook.pack_int4, jax.ShapeDtypeStruct((72, 8), jnp.int8))
    assert words.shape == pack.shape_of(8, 72) == (1, 2, 512)
    assert cookbook.pack_int4(np.zeros((72, 0), np.int8)).shape == (0, 2, 512)


# Groups of rows -------------------------------------------------------------------------------------------------------

SIZES = [33, 0, 40, 7]
POISON = 9  # Rows of no group, which are NaN.


def rows_of_groups(k, dtype=BF16):
    rows = sum(SIZES)
    x = np.random.default_rng(k).normal(size=(rows + POISON, k)) + 0.1
    return array(x, dtype).at[rows:].set(jnp.nan), array(SIZES, jnp.int32)


def test_groups_of_integers():
    rng, n, k = np.random.default_rng(3), 77, 136
    w = cookbook.pack_int4(array(rng.integers(-8, 8, size=(4, k, n)), jnp.int8))
    scales, zeros = (jnp.stack(x) for x in zip(*(groups(rng, k, n, 64, F16, jnp.uint8) for _ in SIZES), strict=True))
    x, sizes = rows_of_groups(k)
    how = dict(zeros=zeros, group_size=64)
    fns = cookbook.ragged_dot_int4_weights, ragged_int4.ragged_dot_int4_weights_reference
    fn, reference = (lambda *args, fn=fn: fn(*args, **how) for fn in fns)
    lab.check(fn, reference, x, w, scales, sizes)


def test_groups_of_mxfp4():
    w, scales = cookbook.pack_mxfp4(*checkpoint(np.random.default_rng(4), 144, 160, lead=(4,)))
    x, sizes = rows_of_groups(160)
    config = Config(128, 16, tile_k=256, cluster_m=2)
    fn = functools.partial(cookbook.ragged_dot_mxfp4_weights, config=config)
    lab.check(fn, ragged_mxfp4.ragged_dot_mxfp4_weights_reference, x, w, scales, sizes)


@pytest.mark.parametrize("n, gpu", [(136, "h200"), (192, None)])
def test_biases_of_groups(n, gpu):
    """Columns end within those of a warpgroup, or before them; rows of no group have no bias."""
    w = cookbook.pack_mxfp4(*checkpoint(np.random.default_rng(n), n, 160, lead=(4,)))
    x, sizes = rows_of_groups(160)
    bias = array(np.random.default_rng(7).normal(size=(4, n)), F32)

    def fn(x, w, scales, sizes, bias):
        operands = ragged_mxfp4.checked("op", x, w, scales)
        return ragged_int4.grouped("op", *operands, sizes, None, config=Config(256, 16, warpgroups=4), bias=bias)

    def reference(x, w, scales, sizes, bias):
        out = ragged_mxfp4.ragged_dot_mxfp4_weights_reference(x, w, scales, sizes)
        biases = jnp.concatenate([jnp.broadcast_to(of, (size, n)) for of, size in zip(bias, SIZES, strict=True)])
        return out.at[: sum(SIZES)].add(biases)

    lab.check(fn, reference, x, *w, sizes, bias, gpu=gpu)


@pytest.mark.parametrize("count", [pytest.param(3, marks=pytest.mark.slow), 2])
def test_experts_of_gpt_oss(count):
    """All experts, and the last two alone, whose biases are theirs; both clamps are met."""
    rng, hidden, inner = np.random.default_rng(5), 96, 40
    blocks, scales = checkpoint(rng, 2 * inner, hidden, lead=(3,))
    weights = cookbook.pack_mxfp4(blocks, scales + 4), cookbook.pack_mxfp4(*checkpoint(rng, hidden, 64, lead=(3,)))
    x, logits = array(rng.normal(size=(10, hidden)), BF16), array(rng.normal(size=(10, 3)), F32)
    biases = array(rng.normal(size=(3, 2 * inner)), F32), array(rng.normal(size=(3, hidden)), F32)
    mine = lambda arrays: jax.tree.map(lambda y: y[3 - count :], arrays)

    def of(op):
        def fn(x, logits, weights, biases):
            b_gate_up, b_down = mine(biases)
            how = dict(b_gate_up=b_gate_up, b_down=b_down, swiglu_limit=7.0, top_k=2, group_offset=3 - count)
            return op(x, logits, *mine(weights), **how)

        return fn

    fn, reference = of(cookbook.moe), of(module_of_experts.moe_reference)
    lab.check(fn, reference, x, logits, weights, biases, gpu=None, tolerance=6e-3)  # Rounded between the products.


@pytest.mark.parametrize("count, inner", [(2, 0), (0, 32)])
def test_experts_of_no_values_and_no_experts(count, inner):
    rng, hidden = np.random.default_rng(5), 64
    empty = lambda n, k: (jnp.zeros((count, n, k // 32, 16), jnp.uint8), jnp.zeros((count, n, k // 32), jnp.uint8))
    weights = cookbook.pack_mxfp4(*empty(2 * inner, hidden)), cookbook.pack_mxfp4(*empty(hidden, inner))
    x, logits = array(rng.normal(size=(4, hidden)), BF16), array(rng.normal(size=(4, max(count, 2))), F32)
    bias = array(rng.normal(size=(count, hidden)), F32)
    fn = lambda x, logits, bias, *weights: cookbook.moe(x, logits, *weights, b_down=bias, top_k=1, group_offset=0)
    wanted = np.float64(bias)[np.argmax(logits, axis=1)] if count else np.zeros((4, hidden))
    np.testing.assert_allclose(np.float64(lab.run(fn, x, logits, bias, *weights)), wanted, rtol=2.0**-8)


def test_a_token_that_is_not_finite_stays_alone():
    """In products in FP8, one after the other, of experts that the routing kernel takes or does not take."""
    rng, hidden, inner = np.random.default_rng(5), 64, 32
    for count in (3, 130):
        weights = [cookbook.pack_mxfp4(*checkpoint(rng, *size, lead=(count,))) for size in ((64, hidden), (64, inner))]
        x = array(rng.normal(size=(6, hidden)), BF16).at[2, 7].set(jnp.nan).at[4, 33].set(jnp.inf)
        logits = array(rng.normal(size=(6, count)), F32)
        assert all(packed.takes_halves(w, 12, k, 4) for w, k in zip(weights, (hidden, inner), strict=True))
        out, wanted = (
            np.float64(fn(x, logits, *weights, top_k=2)) for fn in (in_interpreter(cookbook.moe), moe_in_float32)
        )
        fine = np.isfinite(out)
        np.testing.assert_array_equal(fine, np.repeat([[True, True, False, True, False, True]], hidden, 0).T)
        error = np.linalg.norm((out - wanted)[fine[:, 0]])
        assert error < 6e-3 * np.linalg.norm(wanted[fine[:, 0]])  # Rounded between the products.


def in_interpreter(fn):
    return lambda *args, **kwargs: lab.run(functools.partial(fn, **kwargs), *args)


def moe_in_float32(x, *args, **kwargs):
    return module_of_experts.moe_reference(x.astype(F32), *args, **kwargs)


def test_experts_with_more_tokens_than_the_mean_have_one_tile():
    """gpt-oss's 64 tokens are 8 rows per expert; tiles of 8 rows would convert half of the experts' weights twice."""
    config = ragged_mxfp4.default_config(256, 5760, 2880, 32)
    assert (config.tile_n, config.tile_k) == (16, 128)


def packed_integers(k, n, size=32):
    """Integers of two experts, with zero points; and the float64 (2, K, N) that NumPy makes of them."""
    rng = np.random.default_rng(k)
    q = rng.integers(-8, 8, size=(2, k, n))
    scales, zeros = (jnp.stack(x) for x in zip(*(groups(rng, k, n, size, F16, jnp.uint8) for _ in q), strict=True))
    of_rows = lambda x: np.repeat(np.float64(x), size, axis=1)[:, :k]
    wide = (q + 8 - of_rows(zeros)) * of_rows(scales)
    return (cookbook.pack_int4(array(q, jnp.int8)), scales, zeros), array(wide, F32)


def test_experts_of_integers():
    """The size of groups follows from the shapes."""
    (gate_up, wide), (down, wide_down), rng = packed_integers(64, 32), packed_integers(16, 64), np.random.default_rng(6)
    x, logits = array(rng.normal(size=(7, 64)), BF16), array(rng.normal(size=(7, 2)), F32)
    fn = lambda x, logits, *packed: cookbook.moe(x, logits, *packed[:2], top_k=1, renormalize=False)
    reference = lambda x, logits, *packed: module_of_experts.moe_reference(x, logits, *packed[2:], 1, False)
    lab.check(fn, reference, x, logits, gate_up, down, wide, wide_down, gpu=None, tolerance=6e-3)


PAIR = ones(2, 1, 1, 512, dtype=jnp.uint32), ones(2, 1, 16, dtype=jnp.uint16)  # MXFP4.


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(w_down=ones(2, 8, 16)), "w_gate_up and w_down must both be arrays, or both be packed"),
        (dict(w_down=PAIR[:1]), r"w_down has 1 parts; must be an array, or \(w, scales\) or"),
        (dict(x=ones(4, 16, dtype=F16)), "x.dtype=.*float16.*; must be bfloat16 beside these weights"),
        (dict(w_down=(PAIR[0], PAIR[1][..., :8])), r"w_down\[1\].shape=\(2, 1, 8\); must be .* \(E, groups, 16\)"),
        (dict(w_gate_up=(PAIR[0][..., :4], PAIR[1])), r"w_gate_up\[0\].shape=.*; must be \(2, 1, 1, 512\), blocks"),
        (dict(w_down=(PAIR[0][:, :0], PAIR[1])), r"w_down\[0\].shape=.*; must be \(2, 1, 1, 512\), blocks"),
        (dict(w_gate_up=(PAIR[0], PAIR[1].astype(F32).repeat(2, 1))), "one for each group"),
        (dict(w_gate_up=(PAIR[0], PAIR[1].repeat(2, 1))), r"scales.shape=\(2, 2, 16\).*must be \(2, 1, 16\)"),
        (dict(w_gate_up=(PAIR[0].astype(jnp.int32), PAIR[1])), "int32.*and uint32"),
        (dict(w_gate_up=(*PAIR, PAIR[1])), r"w_gate_up has scales of uint16, .* and zeros; must be \(w, scales\)"),
        (dict(x=ones(4, 12)), "rows of 12 values; must be a multiple of 8"),
    ],
)
def test_errors_of_packed_experts_name_the_rule(change, message):
    args = dict(x=ones(4, 16), router_logits=ones(4, 2, dtype=F32), w_gate_up=PAIR, w_down=PAIR) | change
    with pytest.raises(ValueError, match=message):
        lab.run(lambda: cookbook.moe(**args, top_k=1))


def test_packed_experts_have_no_gradient():
    logits = ones(4, 2, dtype=F32)
    with pytest.raises(ValueError, match="cookbook.moe has no gradient: differentiate cookbook.moe of widened weights"):
        lab.run(jax.grad(lambda x: cookbook.moe(x, logits, PAIR, PAIR, top_k=1).sum().astype(F32)), ones(4, 16))


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(w=W), r"w.shape=\(1, 2, 512\).*; lhs must be \(M, K\), and w and scales of a matrix for each group"),
        (dict(lhs=ones(8, 64)), r"beside K = 64 of lhs and N = 16 of scales; must end with \(1, 1, 512\)"),
        (dict(scales=ones(2, 2, 16)), r"must be \(2, 2, 16\) and uint16"),
        (dict(out_dtype=F32), "must be bfloat16 or float16, because tiles are transposed"),
        (dict(config=Config(128, 16, split_k=2)), "must be of split_k=1"),
        (dict(group_sizes=np.array([9, 0])), "ends at row 9 of 8"),
    ],
)
def test_errors_of_groups_name_the_rule(change, message):
    args = dict(lhs=MX[0], w=ones(2, 1, 2, 512, dtype=jnp.uint32), scales=ones(2, 2, 16, dtype=jnp.uint16))
    with pytest.raises(ValueError, match=message):
        cookbook.ragged_dot_mxfp4_weights(**(args | dict(group_sizes=jnp.array([3, 5])) | change))

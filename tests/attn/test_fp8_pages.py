"""Pages of 8-bit floats with scales of heads: written, decoded, and read by mixed batches."""

import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lab
from cookbook import paged_attention, ragged_paged_attention, write_kv
from cookbook.attn.decode import kernel_fp8 as decode_fp8
from tests.arrays import array

decode = importlib.import_module("cookbook.attn.decode.paged_attention")
ragged = importlib.import_module("cookbook.attn.packed.ragged_paged_attention")
writing = importlib.import_module("cookbook.attn.cache.write_kv")
E4M3 = jnp.float8_e4m3fn
SMALL = decode.Config(block_kv=64)
OF_LSE = 2.0**-12 if lab.on_gpu() else 2e-6  # A GPU's tensor cores keep 13 bits of sums of products of 8-bit floats.


def paged(q_lens, kv_lens, heads=4, kv_heads=2, head_dim=64, page_size=16):
    """Pages in random order; NaN in what nobody uses; ids out of range after the lengths; queries of all sizes."""
    rng = np.random.default_rng(sum(kv_lens) + head_dim + page_size)
    width = -(-max(kv_lens) // page_size) + 1
    num_pages = len(kv_lens) * width + 2
    q = rng.normal(size=(sum(q_lens), heads, head_dim)) * 2.0 ** rng.integers(-9, 3, (sum(q_lens), heads, 1))
    kv = rng.normal(size=(2, num_pages, page_size, kv_heads, head_dim)) + 0.1
    tables = rng.permutation(num_pages)[: len(kv_lens) * width].reshape(-1, width)
    used = np.zeros((num_pages, page_size), bool)
    for table, length in zip(tables, kv_lens, strict=True):
        position = np.arange(length)
        used[table[position // page_size], position % page_size] = True
        table[-(-length // page_size) :] = rng.choice([-1, num_pages, 2**31 - 1, -(2**31)])
    kv[:, ~used] = np.nan
    scales = [array(rng.uniform(0.5, 2, kv_heads), jnp.float32) for _ in range(2)]
    args = array(q, jnp.bfloat16), *(array(x, E4M3) for x in kv), array(tables, jnp.int32)
    return [*args, array(kv_lens, jnp.int32), *scales]


def check(*args, fn=paged_attention, config=SMALL, gpu=None, of_out=None, **how):
    call = lambda fn, *args, **more: fn(*args[:-2], k_scale=args[-2], v_scale=args[-1], **how, **more)
    kernel = functools.partial(call, fn, config=config, return_lse=True)
    # Queries as two terms are exact beside bfloat16's rounding of weights and out.
    tolerance = (of_out, OF_LSE)
    return lab.check(kernel, functools.partial(call, decode.paged_attention_reference), *args, tolerance=tolerance,
                     gpu=gpu)  # fmt: skip


@pytest.mark.parametrize("page_size", [16, 64, 256])
def test_decode_of_lengths_and_page_sizes(page_size):
    lens = [0, 1, page_size - 1, page_size, page_size + 1, 63, 64, 65, 320]
    out, lse = check(*paged([1] * 9, lens, page_size=page_size)).output
    assert (out[0] == 0).all() and jnp.isneginf(lse[0]).all() and jnp.isfinite(lse[1:]).all()


@pytest.mark.slow
@pytest.mark.parametrize("head_dim, heads", [(64, 71), (128, 3), (256, 3)])
def test_decode_of_head_dims_and_groups(head_dim, heads):
    """By the default configuration, with heads up to 128 by two compute warpgroups, which have nothing to merge of a
    sequence of no tokens."""
    # Sums over 256 values lose the most bits on a GPU, and its weights with them: 6.5e-3 was measured.
    of_out = 1e-2 if lab.on_gpu() and head_dim == 256 else None
    args = paged([1, 1, 1], [150, 0, 100], heads=heads, kv_heads=1, head_dim=head_dim)
    out, lse = check(*args, config=None, of_out=of_out).output
    assert (out[1] == 0).all() and jnp.isneginf(lse[1]).all()


@pytest.mark.parametrize("block_kv", [64, 128])
def test_nan_in_a_key_reaches_lse(block_kv):
    """By one compute warpgroup, and by two of which one sees it."""
    args = paged([1, 1], [90, 40])
    args[1] = args[1].at[args[3][0, 5], 3].set(jnp.nan)
    *args, k_scale, v_scale = args
    how = dict(k_scale=k_scale, v_scale=v_scale, config=decode.Config(block_kv=block_kv))
    for x in lab.run(functools.partial(paged_attention, return_lse=True, **how), *args):
        assert jnp.isnan(x[0]).all() and jnp.isfinite(x[1]).all()


@pytest.mark.slow
@pytest.mark.parametrize("how", [dict(local_window_size=70), dict(logits_soft_cap=3.0, scale=2.0)], ids=str)
def test_decode_with_windows_soft_caps_and_scales(how):
    check(*paged([1] * 5, [200, 70, 71, 0, 1]), **how)


def test_terms_of_a_query_are_the_query():
    """Rows of all sizes, zero among them: what `scales` splits in the kernel, split here by the same arithmetic."""
    q = np.random.default_rng(0).normal(size=(64, 64)) * 2.0 ** np.arange(-40, 24)[:, None]
    q = np.asarray(array(q, jnp.bfloat16), np.float32)
    q[3] = 0
    octave = np.round(np.log2(np.maximum(np.abs(q).max(1), 2.0**-100)))[:, None]
    left, terms = q * np.exp2(decode_fp8.NEAR_END - octave), 0
    assert np.abs(left).max() < 448
    for _ in range(decode_fp8.TERMS):
        rounded = np.asarray(array(left, E4M3), np.float32)
        left, terms = left - rounded, terms + rounded
    error = np.abs(terms * np.exp2(octave - decode_fp8.NEAR_END) - q)
    assert (error <= 2.0**-17 * np.abs(q).max(1, keepdims=True)).all()


def check_ragged(q_lens, args, fn=ragged_paged_attention, config=None, **how):
    *args, k_scale, v_scale = args
    args = [*args, array(np.append(0, np.cumsum(q_lens)), jnp.int32), k_scale, v_scale]
    call = lambda fn, *args, **more: fn(*args[:-2], k_scale=args[-2], v_scale=args[-1], **how, **more)
    kernel = functools.partial(call, fn, config=config, return_lse=True)
    reference = functools.partial(call, ragged.ragged_paged_attention_reference)
    return lab.check(kernel, reference, *args, tolerance=(None, OF_LSE), gpu=None)


@pytest.mark.parametrize(
    "page_size, head_dim, how",
    [
        (16, 64, dict()),
        (128, 128, dict(local_window_size=50)),
        (64, 256, dict(logits_soft_cap=3.0)),
        (32, 64, dict(config=ragged.Config(64, 2, 3, in_turns=False))),
    ],
    ids=str,
)
def test_mixed_batches(page_size, head_dim, how):
    q_lens, kv_lens = [1, 40, 0, 70, 1], [90, 40, 17, 200, 1]
    check_ragged(q_lens, paged(q_lens, kv_lens, page_size=page_size, head_dim=head_dim), **how)


def written(dtype, scale, heads=3, head_dim=64, new=None):
    rng = np.random.default_rng(heads)
    new = rng.normal(size=(2, 7, heads, head_dim)) * 100 if new is None else new
    pages = array(rng.normal(size=(2, 4, 16, heads, head_dim)), E4M3)
    slots = array([5, 63, -1, 17, 64, 0, 2**31 - 1], jnp.int32)
    args = *array(new, dtype), *pages, slots
    scales = dict(k_scale=scale, v_scale=2 * scale)
    return args, scales, lab.run(functools.partial(write_kv, **scales), *args)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize("heads, head_dim", [(3, 64), (1, 8), (8, 128)])
def test_written_rows_are_scaled_and_rounded(dtype, heads, head_dim):
    """The bits of NumPy's division and rounding; other slots keep theirs."""
    args, scales, out = written(dtype, jnp.arange(1.0, heads + 1), heads, head_dim)
    for new, pages, scale, found in zip(args[:2], args[2:4], scales.values(), out, strict=True):
        wanted = np.asarray(pages).reshape(-1, heads, head_dim).copy()
        rounded = np.clip(np.asarray(new, np.float32) / np.asarray(scale)[:, None], -448, 448)
        for token, slot in enumerate(np.asarray(args[4])):
            if 0 <= slot < len(wanted):
                wanted[slot] = rounded[token].astype(wanted.dtype)
        bits = [x.reshape(wanted.shape).view(np.uint8).astype(int) for x in (np.asarray(found), wanted)]
        # A GPU divides to within 2 units of float32, and may round numbers half way between two the other way.
        assert np.abs(bits[0] - bits[1]).max() <= lab.on_gpu()
    for found, wanted in zip(out, writing.write_kv_reference(*args, **scales), strict=True):
        bits = [np.asarray(x).view(np.uint8).astype(int) for x in (found, wanted)]
        assert np.abs(bits[0] - bits[1]).max() <= 1  # XLA rounds some numbers twice, by way of 16 bits.


def test_what_is_beyond_the_end_is_cut():
    """Neither NaN nor anything else than the largest number; a NaN stays one."""
    new = np.full((2, 7, 3, 64), 1e5)
    new[:, :, 0], new[:, :, 1, 0], new[:, :, 2] = -np.inf, np.nan, 3e38
    _, _, (k_pages, _) = written(jnp.float32, 1.0, new=new)
    row = np.asarray(k_pages, np.float32)[0, 5]
    assert (row[0] == -448).all() and np.isnan(row[1, 0]) and (row[1, 1:] == 448).all() and (row[2] == 448).all()


def test_written_and_decoded():
    """`paged_attention` reads the rows that `write_kv` wrote, both with scales: attention of the tokens themselves."""
    rng = np.random.default_rng(0)
    k, v = (array(rng.normal(size=(40, 2, 64)) * size, jnp.bfloat16) for size in (1.0, 30.0))
    q = array(rng.normal(size=(1, 4, 64)), jnp.bfloat16)
    scales = dict(k_scale=jnp.asarray([0.01, 0.02]), v_scale=0.25)

    def decoded(q, k, v):
        pages = write_kv(k, v, *jnp.zeros((2, 4, 16, 2, 64), E4M3), jnp.arange(40, dtype=jnp.int32), **scales)
        tables, lens = jnp.arange(4, dtype=jnp.int32)[None], array([40], jnp.int32)
        return paged_attention(q, *pages, tables, lens, **scales)

    out = lab.run(decoded, q, k, v)
    wanted = jax.nn.dot_product_attention(*(x.astype(jnp.float32) for x in (q[:, None], k[None], v[None])))[:, 0]
    error = jnp.linalg.norm(out.astype(jnp.float32) - wanted) / jnp.linalg.norm(wanted)
    assert 0.005 < error < 0.05  # That of e4m3, which keeps 4 bits.


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_what_the_compiler_makes_of_it(priced, head_dim):
    """Shared memory is as priced, no product waits for another, and a number is widened by half an instruction."""
    of, like = jax.ShapeDtypeStruct, jnp.int32
    cache = of((64, 64, 8, head_dim), E4M3)
    decoding = of((4, 32, head_dim), jnp.bfloat16), cache, cache, of((4, 8), like), of((4,), like)
    compiled = lab.compile_for("h200", paged_attention, *decoding).kernels[0]
    config = decode.default_config(head_dim, is_fp8=True)
    assert priced[0] <= compiled.smem_bytes <= priced[0] + 2048 and not compiled.remarks
    assert compiled.spill_bytes <= 48  # Numbers of a piece, outside of its loops over blocks.
    widened = [line for line in compiled.instructions if "F16.E4M3.UNPACK" in line]
    # Blocks that are cut and blocks that are not, two numbers an instruction; and the two terms of the query.
    assert len(widened) <= (2 * config.block_kv * head_dim + 2 * 64 * head_dim) / 128 / 2
    batch = of((64, 32, head_dim), jnp.bfloat16), *decoding[1:], of((5,), like)
    compiled = lab.compile_for("h200", ragged_paged_attention, *batch).kernels[0]
    assert priced[1] <= compiled.smem_bytes <= priced[1] + 2048 and not compiled.remarks
    assert compiled.spill_bytes <= (192 if head_dim == 256 else 48)  # A few bytes differ from ptxas to ptxas.


Q = jnp.ones((1, 4, 64), jnp.bfloat16)
CACHE, TABLES, LENS = jnp.ones((2, 16, 2, 64), E4M3), jnp.zeros((1, 1), jnp.int32), jnp.ones(1, jnp.int32)
WIDE = CACHE.astype(jnp.bfloat16)
NEW, SLOTS = jnp.ones((1, 2, 64), jnp.bfloat16), jnp.zeros(1, jnp.int32)


@pytest.mark.parametrize(
    "fn, message",
    [
        (lambda: paged_attention(Q.astype(jnp.float16), CACHE, CACHE, TABLES, LENS), "and q bfloat16"),
        (lambda: paged_attention(Q, CACHE, WIDE, TABLES, LENS), "both must be"),
        (lambda: paged_attention(Q, WIDE, WIDE, TABLES, LENS, k_scale=1.0), "k_scale is for pages of float8_e4m3fn"),
        (lambda: paged_attention(Q, CACHE, CACHE, TABLES, LENS, k_scale=jnp.ones(3)), "or 2, one for each head"),
        (lambda: paged_attention(Q, CACHE, CACHE, TABLES, LENS, v_scale=1), "v_scale is int32"),
        (
            lambda: paged_attention(Q, CACHE, CACHE, TABLES, LENS, config=decode.Config(128, 16)),
            "bytes of shared memory",
        ),
        (
            lambda: paged_attention(Q, CACHE, CACHE, TABLES, LENS, config=decode.Config(64, 2, num_pairs=2)),
            "num_pairs=2; must be 1 with pages of 8 bits",
        ),
        (
            lambda: ragged_paged_attention(Q, WIDE, WIDE, TABLES, LENS, jnp.arange(2, dtype=jnp.int32), v_scale=1.0),
            "v_scale is for pages",
        ),
        (lambda: write_kv(NEW, NEW, CACHE, WIDE, SLOTS), "must be the same"),
        (lambda: write_kv(NEW, NEW, WIDE, WIDE, SLOTS, v_scale=2.0), "v_scale is for pages"),
        (lambda: write_kv(NEW, NEW, CACHE, CACHE, SLOTS, k_scale=jnp.ones((2, 1))), "k_scale is"),
        (lambda: write_kv(NEW.astype(E4M3), NEW, CACHE, CACHE, SLOTS), "k_new.dtype is float8_e4m3fn"),
    ],
)
def test_errors_name_the_rule(fn, message):
    with lab.interpret(), pytest.raises(ValueError, match=message):
        fn()


@pytest.mark.parametrize(
    "name, old, new",
    [
        ("decode/kernel_fp8", "", ""),  # Nothing is wrong, and nothing is found.
        ("decode/kernel_fp8", "TERMS, WIDE_SLOTS = 2, 2", "TERMS, WIDE_SLOTS = 1, 2"),
        ("decode/kernel_fp8", "left = left - rounded", "left = left + 0 * rounded"),
        ("decode/kernel_fp8", "wide_ring.acquire(steps_done + step)", "wide_ring.slot(steps_done + step)"),
        ("decode/kernel_fp8", "piece.kv_len - first), (first", "piece.kv_len - first + 1), (first"),
        ("decode/kernel_fp8", "v_scale[kv_head]", "k_scale[kv_head]"),
        ("decode/kernel_fp8", "barriers(c.num_stages, 1 + wgs)", "barriers(c.num_stages, 1)"),
        ("decode/kernel_fp8", "plgpu.barrier_wait(half.handed)", "pass"),
        ("decode/kernel_fp8", "    plgpu.barrier_wait(half.terms_filled)\n", ""),
        ("decode/kernel_fp8", "first + half.keys.start", "first"),
        ("core", "tanh(s * per_row(scale / self.soft_cap", "tanh(s * per_row(self.scale / self.soft_cap + 0 * scale"),
        ("cache/pages_fp8", "index < seen[1]", "index <= seen[1]"),
    ],
)
def test_mutants_of_decode_are_caught(run_only, found_if, mutant_of, name, old, new):
    """A query of 4 bits, slots refilled too early, NaN after the last token, a wrong scale."""
    mutant = mutant_of(name, old, new)("decode.paged_attention")
    with found_if(old != new):
        args = paged([1, 1], [700, 70], head_dim=64)
        check(*args, fn=mutant.paged_attention, config=mutant.Config(), logits_soft_cap=30.0, scale=1.0)


@pytest.mark.parametrize(
    "name, old, new",
    [
        ("packed/kernel_fp8", "", ""),
        ("packed/kernel_fp8", "        plgpu.barrier_wait(landed.at[which])\n", ""),
        ("packed/kernel_fp8", "slot = ring.acquire(count)", "slot = ring.slot(count)"),
        ("packed/kernel_fp8", "(seen[1] < block_kv)", "(seen[1] < 0)"),
        ("packed/kernel_fp8", "copy(KEYS, tile, block - 1, ids)", "copy(KEYS, tile, block, ids)"),
        ("packed/kernel", "scale[tile.kv_head] for scale", "scale[0] for scale"),
    ],
)
def test_mutants_of_mixed_batches_are_caught(run_only, found_if, mutant_of, name, old, new):
    """Copies not waited for, slots refilled too early, NaN after the last token, keys of another block, a wrong
    scale."""
    mutant = mutant_of(name, old, new)("packed.ragged_paged_attention")
    with found_if(old != new):
        args = paged([1, 40], [300, 170], page_size=128)
        check_ragged([1, 40], args, mutant.ragged_paged_attention, mutant.Config(64, 2))

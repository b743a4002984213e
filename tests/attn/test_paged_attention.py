"""Decode over pages: lengths beside a page and a block, groups of every size, ids and lengths out of range."""

import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lab
from cookbook import _host, merge_attention, paged_attention
from cookbook.attn.cache.pages import Pages, page_of
from cookbook.attn.checks import PAGE_SIZES
from cookbook.attn.core import SERVED_HEAD_DIMS, Problem
from cookbook.attn.decode.plan import Part, Plan, ends_and_seqs
from lab import interpreter
from tests.arrays import array

module = importlib.import_module("cookbook.attn.decode.paged_attention")
Config, reference = module.Config, module.paged_attention_reference
SMALL = Config(block_kv=64, num_stages=2)


def operands(kv_lens, heads=4, kv_heads=2, head_dim=64, page_size=16, width=None, dtype=jnp.bfloat16):
    """Pages in random order; NaN in those that nobody uses and after the lengths; ids there are out of range."""
    rng = np.random.default_rng(sum(kv_lens) + head_dim + page_size)
    width = width or max(1, -(-max(kv_lens) // page_size))
    num_pages = len(kv_lens) * width + 2
    q = rng.normal(size=(len(kv_lens), heads, head_dim))
    tables = rng.permutation(num_pages)[: len(kv_lens) * width].reshape(len(kv_lens), width)
    caches = rng.normal(size=(2, num_pages, page_size, kv_heads, head_dim)) + 0.1
    used = np.zeros((num_pages, page_size), bool)
    for table, length in zip(tables, kv_lens, strict=True):
        position = np.arange(length)
        used[table[position // page_size], position % page_size] = True
        table[-(-length // page_size) :] = rng.choice([-1, num_pages, 2**31 - 1, -(2**31)])
    caches[:, ~used] = np.nan
    floats = [array(x, dtype) for x in (q, *caches)]
    return [*floats, array(tables, jnp.int32), array(kv_lens, jnp.int32)]


def check(*args, fn=paged_attention, config=SMALL, gpu=None, **kwargs):
    """Also compiles it if `gpu` is named: for each kind of kernel that test_what_the_compiler_makes_of_it lacks."""
    fn = functools.partial(fn, config=config, return_lse=True, **kwargs)
    # A GPU's tanh, exponentials and logarithms are not exact to float32's last places: lse was off by 6 epsilons.
    tolerance = (None, 1e-6) if "logits_soft_cap" in kwargs else None
    return lab.check(fn, functools.partial(reference, **kwargs), *args, tolerance=tolerance, gpu=gpu)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_lengths_and_page_sizes(page_size):
    """None, one, a page and one less and more, a block and one less and more, all that the table holds."""
    lens = [0, 1, page_size - 1, page_size, page_size + 1, 63, 64, 65, 320 - 320 % page_size]
    report = check(*operands(lens, page_size=page_size))
    out, lse = report.output
    assert (out[0] == 0).all() and jnp.isneginf(lse[0]).all() and jnp.isfinite(lse[1:]).all()


@pytest.mark.parametrize(
    "heads, kv_heads",
    [(4, 4), (6, 2), (71, 1), *(pytest.param(*heads, marks=pytest.mark.slow) for heads in ((1, 1), (16, 1), (130, 2)))],
)
def test_groups_of_heads(heads, kv_heads):
    """Up to more query heads than a WGMMA has rows, and numbers of them that divide by nothing."""
    check(*operands([90, 40], heads, kv_heads), gpu="h200" if heads in (6, 71) else None)


@pytest.mark.parametrize(
    "head_dim, config, dtype",
    [
        (64, None, jnp.float16),
        (80, None, jnp.bfloat16),
        (128, None, jnp.bfloat16),
        (256, None, jnp.bfloat16),
        *(pytest.param(size, None, jnp.bfloat16, marks=pytest.mark.slow) for size in (96, 192)),
    ],
)
def test_head_dims_and_dtypes(head_dim, config, dtype):
    check(*operands([150, 100], heads=3, kv_heads=1, head_dim=head_dim, dtype=dtype), config=config)


@pytest.mark.parametrize(
    "how",
    [
        dict(local_window_size=70),
        dict(local_window_size=(0, 5)),
        dict(local_window_size=(130, None), logits_soft_cap=3.0),
        pytest.param(dict(scale=2.0), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_windows_soft_caps_and_scales(how):
    check(*operands([200, 70, 71, 72, 0, 1]), gpu="h200", **how)


@pytest.mark.parametrize("block_kv, num_stages", [(64, 4), (128, 2), pytest.param(64, 2, marks=pytest.mark.slow)])
def test_sizes_of_an_earlier_attempt(block_kv, num_stages):
    """Blocks of 64 query rows, of keys, and stages, at which an earlier kernel did not compile: right."""
    check(*operands([300, 100], head_dim=128), config=Config(block_kv, num_stages), gpu="h200")


@pytest.mark.parametrize("lens", [[300, 100, 0, 64, 65], [1]])
def test_two_parts_of_a_block(lens):
    check(*operands(lens), config=Config(64, 2, num_pairs=2), gpu="h200" if len(lens) > 1 else None)


@pytest.mark.parametrize("block_kv, num_stages", [(64, 8), (128, 4)])
def test_sizes_that_do_not_fit_are_refused_before_launch(block_kv, num_stages):
    with pytest.raises(ValueError, match="bytes of shared memory .* fewer stages or smaller blocks"):
        lab.run(functools.partial(paged_attention, config=Config(block_kv, num_stages)), *operands([9], head_dim=128))


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("num_sms, kv_heads, num_parts", [(1, 2, 1), (4, 2, 2), (7, 1, 7), (132, 8, 16), (132, 1, 132)])
def test_every_block_has_its_part(num_sms, kv_heads, num_parts):
    """Parts of equal length take all blocks in their order, whatever the lengths of sequences are, and what the second
    kernel computes of them is what the first was given."""
    lens = [1, 700, 3, 64, 0, 129, 250]
    q, k_pages, _, tables, kv_lens = operands(lens, heads=2 * kv_heads, kv_heads=kv_heads)
    problem = Problem(2 * kv_heads, kv_heads, 64, q.dtype, 1.0, None, None, 0, interpreted=True)
    pages = Pages(*k_pages.shape[:2], tables.shape[1], SMALL.block_kv)
    plan = Plan(problem, len(q), pages, SMALL, num_sms)
    assert plan.num_parts == num_parts
    blocks = np.maximum(-(-np.array(lens) // 64), 1)
    seq_starts, taken = np.cumsum(blocks) - blocks, []
    parts = [Part(plan, *ends_and_seqs(plan, kv_lens), kv_lens, p) for p in range(num_parts)]
    for number, part in enumerate(parts):
        first, begin, steps, pieces = (int(x) for x in (part.first_seq, part.begin, part.steps, part.pieces))
        taken += [number] * steps
        if steps:
            assert seq_starts[first] + begin == len(taken) - steps and begin < blocks[first]
            last = first + pieces - 1
            assert seq_starts[last] < len(taken) <= seq_starts[last] + blocks[last]
    assert len(taken) == blocks.sum() and max(np.bincount(taken, minlength=num_parts)) - len(taken) // num_parts <= 1
    assert [int(plan.part_of(jnp.int32(block), jnp.int32(len(taken)))) for block in range(len(taken))] == taken


@pytest.mark.slow
def test_more_pieces_than_are_merged_at_once(monkeypatch):
    """13 SMs take a sequence in as many pieces; the later keys' logits are the largest, so that sums are rescaled."""
    monkeypatch.setattr(interpreter, "NUM_SMS", 13)
    args = operands([700, 70], heads=2, kv_heads=1)
    args[1] = args[1].at[args[3][0, args[3].shape[1] // 2 :]].multiply(4.0)
    check(*args)


def test_pages_may_be_shared():
    """Two sequences with the same first pages, and a page that one has twice."""
    args = operands([100, 120, 64], width=8)
    tables = args[3].at[1, :3].set(args[3][0, :3]).at[2, 1].set(args[3][2, 0])
    check(*args[:3], tables, args[4])


@pytest.mark.usefixtures("on_cpu")
def test_pages_that_are_not_there_are_the_one_after_the_last():
    """Where TMA reads zeros: any other index could be that of a row, in the sum with others. A block's columns after
    the table's last are the last: nothing is read behind the table."""
    ids = np.array([[-1, 6, 7, 8], [2**31 - 1, -(2**31), 0, 3], [7 * 2**28, -7, 2**27, 6]], np.int32)
    at = jax.jit(functools.partial(page_of, num_pages=7))
    found = [[int(at(ids, seq, column)) for column in range(4)] for seq in range(3)]
    assert found == [[7, 6, 7, 7], [7, 7, 0, 3], [7, 7, 7, 6]]
    assert [int(at(ids, 1, column)) for column in (4, 5, 2**27)] == [3, 3, 3]
    pages = Pages(7, 16, 4, 64)
    assert [int(page) for page in jax.jit(pages.of_block)(ids, 1, 0)] == [7, 7, 0, 3]
    assert [int(page) for page in jax.jit(pages.of_block)(ids, 2, 1)] == [6] * 4
    assert [int(pages.length(x)) for x in (-5, 0, 63, 65, 2**31 - 1)] == [0, 0, 63, 64, 64]


def test_ids_out_of_range_read_zeros():
    """Below the length: pages of zeros, whatever the id."""
    args = operands([100, 100, 100])
    wrong = array([-1, -(2**31), 2**31 - 1, 2**27, args[1].shape[0]], jnp.int32)
    check(*args[:3], args[3].at[0, 2].set(wrong[0]).at[1, :2].set(wrong[1:3]).at[2, 4:6].set(wrong[3:]), args[4])


def test_lengths_out_of_range_are_cut():
    args = operands([96, 40])
    whole = lab.run(paged_attention, *args)
    cut = lab.run(paged_attention, *args[:4], array([2**31 - 1, -5], jnp.int32))
    np.testing.assert_array_equal(cut[0], whole[0])
    assert (cut[1] == 0).all()


def test_check_block_tables_names_the_sequence():
    tables, lens = np.array([[0, 1], [2, 9]]), np.array([32, 17])
    check_tables = functools.partial(module.check_block_tables, num_pages=4, page_size=16)
    check_tables(tables, np.array([32, 16]))
    for call, message in (
        (lambda: check_tables(tables, lens), r"block_tables\[1, 1\] = 9; must be a page from 0 to 3"),
        (lambda: check_tables(tables, np.array([33, 16])), r"kv_lens\[0\] = 33; must be from 0 to 2 pages"),
        (lambda: check_tables(tables, np.array([1, -1])), r"kv_lens\[1\] = -1"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_merge_attention():
    """Halves of the keys, of which one may be empty, merge into the whole."""
    args = operands([160, 70], width=10)
    decode = functools.partial(paged_attention, return_lse=True, config=SMALL)
    halves = [(args[3][:, :5], jnp.minimum(args[4], 80)), (args[3][:, 5:], jnp.maximum(args[4] - 80, 0))]
    whole, parts = lab.run(decode, *args), [lab.run(decode, *args[:3], *half) for half in halves]
    out, lse = merge_attention(*parts[0], *parts[1])
    assert out.dtype == jnp.bfloat16 and jnp.isneginf(parts[1][1][1]).all()
    # A unit in the last place of bfloat16, in which the halves are given.
    np.testing.assert_allclose(out.astype(jnp.float32), whole[0].astype(jnp.float32), atol=2**-8, rtol=2**-7)
    np.testing.assert_allclose(lse, whole[1], rtol=1e-5)
    empty = merge_attention(parts[1][0][1], parts[1][1][1], parts[1][0][1], parts[1][1][1])
    assert (empty[0] == 0).all() and jnp.isneginf(empty[1]).all()


@pytest.mark.parametrize("how", [dict(), dict(sinks=jnp.zeros(4)), dict(local_window_size=30)], ids=str)
def test_nan_in_a_key_reaches_lse(how):
    """Only a sequence that reads the key has it, and there the lse is NaN, too: -inf says that no key is seen."""
    args = operands([90, 40])
    args[1] = args[1].at[args[3][0, 5], 3].set(jnp.nan)
    decode = functools.partial(paged_attention, return_lse=True, config=SMALL, **how)
    for x in lab.run(decode, *args):
        assert jnp.isnan(x[0]).all() and jnp.isfinite(x[1]).all()


@pytest.mark.slow
def test_jit_vmap_and_determinism():
    args = operands([90, 10])
    fn = functools.partial(paged_attention, config=SMALL)
    runs = lab.run(fn, *args), lab.run(jax.jit(fn), *args)
    several = lab.run(jax.vmap(fn, in_axes=(0, None, None, None, None)), jnp.stack([args[0], 2 * args[0]]), *args[1:])
    assert (runs[0] == runs[1]).all() and (several[0] == runs[0]).all() and not (several[1] == runs[0]).all()


@pytest.mark.parametrize("head_dim", SERVED_HEAD_DIMS)
def test_what_the_compiler_makes_of_it(priced, head_dim):
    page_size = (16, 128)[SERVED_HEAD_DIMS.index(head_dim) % 2]  # Either size with small heads and with large ones.
    pages = jax.ShapeDtypeStruct((2048, page_size, 8, head_dim), jnp.bfloat16)
    q = jax.ShapeDtypeStruct((64, 32, head_dim), jnp.bfloat16)
    tables, lens = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((64, 512), (64,)))
    compiled = lab.compile_for("h200", paged_attention, q, pages, pages, tables, lens)
    assert priced[0] <= compiled.smem_bytes <= priced[0] + 2560 and not compiled.remarks
    # With heads of 256 some numbers of a piece are spilled, outside of the loops: 84 to 108 bytes, as ptxas pleases.
    assert compiled.spill_bytes <= (128 if head_dim == 256 else 0)


Q, PAGES = jnp.ones((2, 4, 64), jnp.bfloat16), jnp.ones((3, 16, 2, 64), jnp.bfloat16)
TABLES, LENS = jnp.ones((2, 3), jnp.int32), jnp.ones((2,), jnp.int32)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(q=Q[0]), "q.shape"),
        (dict(q=Q[:1]), "number of sequences"),
        (dict(q=Q.astype(jnp.float32)), "cast them"),
        (dict(v_pages=PAGES.astype(jnp.float16)), "v_pages.dtype"),
        (dict(v_pages=PAGES[:2]), "v_pages.shape"),
        (dict(k_pages=PAGES[:, :8], v_pages=PAGES[:, :8]), "page_size=8 must be one of"),
        (dict(q=Q[:, :3]), "3 query heads"),
        (dict(q=Q[..., :32], k_pages=PAGES[..., :32], v_pages=PAGES[..., :32]), "head_dim=32"),
        (dict(block_tables=TABLES[0]), "block_tables.shape"),
        (dict(kv_lens=LENS.astype(jnp.int8)), "kv_lens.dtype"),
        (dict(local_window_size=-1), "local_window_size=-1"),
        (dict(local_window_size=(1, 2, 3)), "before, after"),
        (dict(scale=0.0), "scale=0.0"),
    ],
    ids=str,
)
def test_errors_name_the_rule(change, message):
    args = dict(q=Q, k_pages=PAGES, v_pages=PAGES, block_tables=TABLES, kv_lens=LENS) | change
    with pytest.raises(ValueError, match=message):
        paged_attention(**args)


def test_configs_are_checked():
    with pytest.raises(ValueError, match="block_kv=96"):
        Config(block_kv=96)
    big = jnp.ones((3, 16, 1, 256), jnp.bfloat16)
    with _host.building_for(_host.Target("a GPU", 132)), pytest.raises(ValueError, match="bytes of shared memory"):
        paged_attention(jnp.ones((2, 4, 256), jnp.bfloat16), big, big, TABLES, LENS, config=Config())


@pytest.mark.parametrize(
    "name, old, new",
    [
        ("decode/kernel", "", ""),  # Nothing is wrong, and nothing is found.
        ("decode/kernel", "(token < piece.kv_len)", "(token <= piece.kv_len)"),
        ("decode/kernel", "clear(problem, smem.v_rows.at[slot], low - first, piece.kv_len - first)", "pass"),
        (
            "decode/kernel",
            "of_block(block_tables, piece.seq, ",
            "of_block(block_tables, lax.div(piece.seq, jnp.int32(2)), ",
        ),
        ("decode/merge_pieces", "acc * spread(alpha), ", "acc, "),
        ("decode/merge_pieces", "l_i * alpha\n", "l_i\n"),
        (
            "decode/merge_pieces",
            "share = jnp.exp2(lse - shift)",
            "share = jnp.exp2(0 * lse)",
        ),
        ("decode/merge_pieces", "", ""),
        ("decode/merge_pieces", "jnp.where(l_i != 0, lse, -jnp.inf)", "jnp.where(l_i > 0, lse, -jnp.inf)"),
        ("decode/kernel", "acc * per_row(alpha, acc.shape)", "acc"),
        (
            "cache/pages",
            "return jnp.where((page >= 0) & (page < num_pages), page, num_pages)",
            "return jnp.maximum(page, 0)",
        ),
        ("decode/kernel", "slot = smem.ring.acquire(steps_done + step)", "slot = smem.ring.slot(steps_done + step)"),
        ("decode/kernel", "        pl.when(i > 0)(lambda: plgpu.barrier_wait(smem.q_freed))\n", ""),
        ("decode/kernel", "    smem.ring.drain(count)\n", ""),
        ("decode/kernel", "where = piece.seq + part, unit", "where = piece.seq, unit"),
    ],
)
def test_mutants_are_caught(run_only, found_if, mutant_of, monkeypatch, name, old, new):
    """A mask off by one, NaN let in, a stale row of the table, sums merged or scaled wrongly, NaN taken for no keys, an
    id let through, waits that are missing, pieces in each other's place."""
    mutant = mutant_of(name, old, new)("decode.paged_attention")
    # To be merged wrongly a sequence needs more pieces than are merged at once. The last keys have the largest logits.
    merges = "merge" in name
    monkeypatch.setattr(interpreter, "NUM_SMS", 13 if merges else 3)
    args = operands([700 if merges else 300, 70, 0], heads=2, kv_heads=1)
    args[3] = args[3].at[1, 1].set(-7)
    args[1] = args[1].at[args[3][0, args[3].shape[1] // 2 :]].multiply(4.0)
    if merges:
        args[1] = args[1].at[args[3][1, 0], 3].set(jnp.nan)
    with found_if(old != new):
        check(*args, fn=mutant.paged_attention, config=mutant.Config(block_kv=64, num_stages=2))

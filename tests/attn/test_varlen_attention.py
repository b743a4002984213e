"""Packed sequences, their keys packed too or in pages: ragged ends of queries and keys, neighbours that must not be
touched, decode tokens beside chunks of prompts."""

import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_attention import pads

import lab
from cookbook import paged_attention, ragged_paged_attention, varlen_attention
from cookbook.attn import tiles
from cookbook.attn.core import SERVED_HEAD_DIMS, Problem
from cookbook.attn.dense.attention import Config, attention
from cookbook.attn.packed import plan as packed_plan
from lab import interpreter
from tests.arrays import array

module = importlib.import_module("cookbook.attn.packed.varlen_attention")
reference = module.varlen_attention_reference
ragged_reference = importlib.import_module(
    "cookbook.attn.packed.ragged_paged_attention"
).ragged_paged_attention_reference
SMALL = Config(block_kv=64)
# Fewer queries than keys, as many, more; one alone; none; keys of which nobody asks; a start at no multiple of 8.
Q_LENS, KV_LENS = [70, 1, 0, 33, 5, 40], [70, 100, 7, 50, 3, 0]


def cumulative(lens):
    return array(np.cumsum([0, *lens]), jnp.int32)


def packed(q_lens=Q_LENS, kv_lens=KV_LENS, heads=2, kv_heads=1, head_dim=64, dtype=jnp.bfloat16, padding=5):
    """Behind the last sequence there are rows of NaN."""
    rng = np.random.default_rng(sum(q_lens) + head_dim + heads)
    q = rng.normal(size=(sum(q_lens) + padding, heads, head_dim))
    kv = rng.normal(size=(2, sum(kv_lens) + padding, kv_heads, head_dim)) + 0.1
    q[sum(q_lens) :], kv[:, sum(kv_lens) :] = np.nan, np.nan
    return [*(array(x, dtype) for x in (q, *kv)), cumulative(q_lens), cumulative(kv_lens)]


def paged(q_lens=Q_LENS, kv_lens=KV_LENS, heads=2, kv_heads=1, head_dim=64, page_size=16, padding=5):
    """Pages in random order; NaN in what nobody uses; ids out of range after the lengths."""
    rng = np.random.default_rng(sum(q_lens) + head_dim + page_size)
    width = -(-max(kv_lens) // page_size) + 1
    num_pages = len(kv_lens) * width + 2
    q = rng.normal(size=(sum(q_lens) + padding, heads, head_dim))
    kv = rng.normal(size=(2, num_pages, page_size, kv_heads, head_dim)) + 0.1
    tables = rng.permutation(num_pages)[: len(kv_lens) * width].reshape(-1, width)
    used = np.zeros((num_pages, page_size), bool)
    for table, length in zip(tables, kv_lens, strict=True):
        position = np.arange(length)
        used[table[position // page_size], position % page_size] = True
        table[-(-length // page_size) :] = rng.choice([-1, num_pages, 2**31 - 1, -(2**31)])
    kv[:, ~used] = np.nan
    floats = [array(x, jnp.bfloat16) for x in (q, *kv)]
    return [*floats, array(tables, jnp.int32), array(kv_lens, jnp.int32), cumulative(q_lens)]


def check(*args, fn=varlen_attention, config=SMALL, gpu=None, **how):
    """Also compiles it if `gpu` is named: for each kind of kernel that test_what_the_compiler_makes_of_it lacks."""
    of = reference if len(args) == 5 else ragged_reference
    fn = functools.partial(fn, config=config, return_lse=True, **how)
    # A GPU's tanh, exponentials and logarithms are not exact to float32's last places: lse was off by 6 epsilons.
    tolerance = (None, 1e-6) if "logits_soft_cap" in how else None
    return lab.check(fn, functools.partial(of, **how), *args, tolerance=tolerance, gpu=gpu)


@pytest.mark.parametrize(
    "how",
    [
        dict(),
        dict(is_causal=True),
        dict(local_window_size=(30, 10), logits_soft_cap=3.0),
        dict(is_causal=True, local_window_size=(40, 9)),
        pytest.param(dict(is_causal=True, scale=2.0), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_masks_and_lengths(how):
    report = check(*packed(), gpu="h200" if "local_window_size" in how else None, **how)
    out, lse = report.output
    assert (out[-5:] == 0).all() and jnp.isneginf(lse[-5:]).all()  # Behind the last sequence.
    assert (out[109:149] == 0).all() and jnp.isneginf(lse[109:149]).all()  # Queries of a sequence without keys.


@pytest.mark.slow
@pytest.mark.parametrize(
    "heads, kv_heads", [(2, 2), (71, 1), *(pytest.param(heads, 1, marks=pytest.mark.slow) for heads in (3, 130))]
)
def test_groups_of_heads(heads, kv_heads):
    """As many queries have room in a tile as 64 rows hold, up to one with a part of its heads."""
    check(*packed([9, 12], [20, 12], heads, kv_heads), is_causal=True, gpu="h200" if heads == 71 else None)


@pytest.mark.parametrize(
    "head_dim, config, dtype",
    [
        (64, None, jnp.float16),
        (80, None, jnp.bfloat16),
        (256, None, jnp.bfloat16),
        *(pytest.param(size, None, jnp.bfloat16, marks=pytest.mark.slow) for size in (96, 128, 192)),
        (64, Config(64, 3, 3), jnp.bfloat16),
    ],
)
def test_head_dims_and_configs(head_dim, config, dtype):
    args = packed([50, 30], [90, 130], heads=2, kv_heads=1, head_dim=head_dim, dtype=dtype)
    check(*args, is_causal=True, config=config, gpu="h200" if head_dim == 64 else None)


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [80, 192])
def test_head_dims_in_pages(head_dim):
    args = paged([9, 12], [20, 70], heads=4, kv_heads=2, head_dim=head_dim)
    check(*args, fn=ragged_paged_attention, config=None, gpu="h200")


@pytest.mark.parametrize("page_size", [16, 256, pytest.param(64, marks=pytest.mark.slow)])
def test_pages(page_size):
    check(*paged(page_size=page_size), fn=ragged_paged_attention, gpu="h200" if page_size != 16 else None)


@pytest.mark.slow
@pytest.mark.parametrize("page_size", [128, pytest.param(16, marks=pytest.mark.slow)])
def test_pages_with_the_default_configuration(page_size):
    args = paged([50, 1, 0, 5], [150, 100, 7, 3], heads=2, kv_heads=1, head_dim=128, page_size=page_size)
    check(*args, fn=ragged_paged_attention, config=None)


@pytest.mark.slow
@pytest.mark.parametrize("how", [dict(local_window_size=40), dict(logits_soft_cap=3.0, scale=0.5)], ids=str)
def test_pages_with_windows_and_soft_caps(how):
    check(*paged([70, 5, 40], [70, 100, 0]), fn=ragged_paged_attention, gpu="h200", **how)


@pytest.mark.slow
@pytest.mark.parametrize("config", [Config(64, 4), Config(128, 2)], ids=str)
def test_sizes_of_an_earlier_attempt(config):
    """Blocks of 128 query rows, of keys, and stages, at which an earlier kernel did not compile: right."""
    check(*paged([40, 1], [100, 140], head_dim=128), fn=ragged_paged_attention, config=config, gpu="h200")


def test_ids_out_of_range_read_zeros():
    args = paged([20, 30], [60, 30])
    wrong = array([-1, 2**31 - 1, args[1].shape[0]], jnp.int32)
    check(*args[:3], args[3].at[0, :2].set(wrong[:2]).at[1, 1].set(wrong[2]), *args[4:], fn=ragged_paged_attention)


@pytest.mark.slow
def test_one_token_each_is_decode():
    """The kernel of single tokens gives the same, but for the rounding of sums in another order."""
    args = paged([1, 1, 1], [70, 1, 33], padding=0)
    several = lab.run(ragged_paged_attention, *args)
    single = lab.run(paged_attention, *args[:5])
    # A unit in the last place of bfloat16.
    np.testing.assert_allclose(several.astype(jnp.float32), single.astype(jnp.float32), atol=2**-8, rtol=2**-7)


@pytest.mark.slow
def test_one_sequence_is_attention():
    args = packed([150], [150], padding=0)
    fn = functools.partial(attention, is_causal=True, config=SMALL)
    several = lab.run(functools.partial(varlen_attention, is_causal=True, config=SMALL), *args)
    whole = lab.run(fn, *(x[None] for x in args[:3]))[0]
    # A unit in the last place of bfloat16: masks of other blocks.
    np.testing.assert_allclose(several.astype(jnp.float32), whole.astype(jnp.float32), atol=2**-7, rtol=2**-7)


def test_nan_stays_in_its_sequence():
    """In keys, values and queries of the second of three, whose rows share blocks and tiles with the others'. The third
    is longer than a block: its first block has rows of the second, and none behind the third's last."""
    q, k, v, cu_q, cu_kv = packed([20, 21, 22], [33, 34, 135])
    fn = functools.partial(varlen_attention, config=SMALL)
    clean = lab.run(fn, q, k, v, cu_q, cu_kv)
    spoiled = lab.run(fn, q.at[20:41].set(jnp.nan), k.at[33:67].set(jnp.nan), v.at[33:67].set(jnp.nan), cu_q, cu_kv)
    np.testing.assert_array_equal(
        np.delete(np.asarray(spoiled), range(20, 41), 0), np.delete(np.asarray(clean), range(20, 41), 0)
    )


def test_starts_out_of_range_are_cut():
    """Starts beyond the end, or that go back, leave no row written twice: as if they stood where the last one did."""
    q, k, v, cu_q, cu_kv = packed([20, 21, 22], [33, 34, 35], padding=0)
    wrong_q, wrong_kv = array([0, 20, 5, 10**9], jnp.int32), array([-3, 33, 40, 2**31 - 1], jnp.int32)
    right_q, right_kv = array([0, 20, 20, 63], jnp.int32), array([0, 33, 40, 102], jnp.int32)
    fn = functools.partial(varlen_attention, config=SMALL)
    np.testing.assert_array_equal(lab.run(fn, q, k, v, wrong_q, wrong_kv), lab.run(fn, q, k, v, right_q, right_kv))


def problem(heads, kv_heads, head_dim):
    return Problem(heads, kv_heads, head_dim, jnp.dtype(jnp.bfloat16), 1.0, None, None, 0, interpreted=True)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("heads, num_blocks", [(2, 3), (8, 132), (1, 16)])
def test_each_tile_is_listed_once(heads, num_blocks):
    q_lens, kv_lens = np.array([300, 0, 7, 64, 1]), np.array([300, 5, 700, 64, 0])
    plan = packed_plan.Plan(problem(4 * heads, heads, 64), 400, 5, None, SMALL, num_blocks)
    starts = cumulative(kv_lens)
    tabulate = jax.jit(functools.partial(packed_plan.table, plan))
    table, counts, _ = tabulate(cumulative(q_lens), starts[:-1], jnp.diff(starts))
    table, counts = np.asarray(table), np.asarray(counts)
    tiles = [
        dict(zip(packed_plan.FIELDS, table[i * num_blocks + block], strict=True))
        for block, count in enumerate(counts) for i in range(count)
    ]  # fmt: skip
    for unit in range(heads):
        rows = [tile["token"] + np.arange(tile["num_q"]) for tile in tiles if tile["unit"] == unit]
        assert sorted(np.concatenate(rows)) == list(range(400))  # The 28 rows after the last sequence too.
    assert sum(counts) == len(tiles) and max(counts) - min(counts) <= 1
    assert all(tile["source"] % 8 == 0 and 0 <= tile["first_kv"] < 8 for tile in tiles)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(
    "lens, units",
    [([2048] * 16, 8), ([4000, 3100, 900, 2500, 600] * 3, 8), ([2048] * 16, 32), ([16384] * 10, 2)],  # The last sorts.
)
def test_work_is_dealt_out_evenly(lens, units):
    """No block of threads has 2.5 % more steps than the mean, which is less than one long tile of the first problem;
    and units take turns whose keys L2 cannot hold."""
    steps = np.concatenate([-(-np.arange(32, n + 32, 32) // 128) for n in lens])
    plan = packed_plan.Plan(problem(4 * units, units, 128), sum(lens), len(lens), None, Config(), 132)
    padded = array(np.pad(steps, (0, plan.max_tiles - len(steps))), jnp.int32)
    row, unit, counts = map(
        np.asarray, jax.jit(functools.partial(packed_plan.deal, plan))(padded, len(steps), sum(lens))
    )
    dealt = [np.arange(count) * 132 + block for block, count in enumerate(counts)]
    assert sorted(zip(*((x[np.concatenate(dealt)]).tolist() for x in (row, unit)), strict=True)) == [
        (i, j) for i in range(len(steps)) for j in range(units)
    ]
    work = np.array([(steps[row[mine]] + 1).sum() for mine in dealt])
    assert work.max() <= 1.025 * work.mean()
    assert len(set(unit[: 2 * 132])) <= 2


@pytest.mark.slow
def test_jit_vmap_and_determinism():
    args = packed([20, 3], [33, 40])
    fn = functools.partial(varlen_attention, is_causal=True, config=SMALL)
    runs = lab.run(fn, *args), lab.run(jax.jit(fn), *args)
    several = lab.run(jax.vmap(fn, in_axes=(0, None, None, None, None)), jnp.stack([args[0], 2 * args[0]]), *args[1:])
    assert (runs[0] == runs[1]).all() and (several[0] == runs[0]).all() and not (several[1] == runs[0]).all()


@pytest.mark.parametrize("head_dim", SERVED_HEAD_DIMS)
def test_what_the_compiler_makes_of_it(priced, head_dim):
    how = dict(is_causal=SERVED_HEAD_DIMS.index(head_dim) % 2 == 1)  # Either mask with small heads and with large ones.
    q, kv = (jax.ShapeDtypeStruct((8192, heads, head_dim), jnp.bfloat16) for heads in (16, 4))
    cu = jax.ShapeDtypeStruct((17,), jnp.int32)
    compiled = lab.compile_for("h200", functools.partial(varlen_attention, **how), q, kv, kv, cu, cu)
    assert priced[0] <= compiled.smem_bytes <= priced[0] + 2560 and not compiled.remarks
    # The memory warpgroup, which has few registers, spills numbers of a tile.
    assert compiled.spill_bytes <= {64: 32}.get(head_dim, 112 if head_dim <= 128 else 144)


@pytest.mark.parametrize("num_seqs, is_padded", [(16, False), (2, True)])
def test_values_are_padded_by_a_copy_for_many_queries_alone(num_seqs, is_padded):
    q, kv = (jax.ShapeDtypeStruct((4095, heads, 128), jnp.bfloat16) for heads in (16, 4))
    assert pads(varlen_attention, q, kv, kv, *[jax.ShapeDtypeStruct((num_seqs + 1,), jnp.int32)] * 2) == is_padded


@pytest.mark.slow
def test_padded_values(monkeypatch):
    """NaN behind the last sequence included."""
    monkeypatch.setattr(tiles, "PADDED_FROM", 0)
    check(*packed(head_dim=80), is_causal=True)


@pytest.mark.parametrize("page_size", [16, 128])
def test_what_the_compiler_makes_of_pages(page_size):
    q, pages = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((4096, 32, 128), (2048, page_size, 8, 128)))
    ints = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((17, 512), (17,), (18,))]
    compiled = lab.compile_for("h200", ragged_paged_attention, q, pages, pages, *ints)
    # The memory warpgroup spills ids of a block's pages: with pages of 16, 72 bytes with JAX 0.11, 88 with 0.12.
    assert compiled.spill_bytes <= {16: 112, 128: 32}[page_size] and not compiled.remarks


Q, KV, CU = jnp.ones((8, 4, 64), jnp.bfloat16), jnp.ones((9, 2, 64), jnp.bfloat16), array([0, 3, 8], jnp.int32)
PAGES, TABLES = jnp.ones((3, 16, 2, 64), jnp.bfloat16), jnp.ones((2, 3), jnp.int32)


@pytest.mark.parametrize(
    "fn, message",
    [
        (lambda: varlen_attention(Q[0], KV, KV, CU, CU), "q.shape"),
        (lambda: varlen_attention(Q, KV, KV.astype(jnp.float16), CU, CU), "v.dtype"),
        (lambda: varlen_attention(Q, KV, KV[:5], CU, CU), "the same shape"),
        (lambda: varlen_attention(Q[..., :32], KV[..., :32], KV[..., :32], CU, CU), "one of"),
        (lambda: varlen_attention(Q[:, :3], KV, KV, CU, CU), "3 query heads"),
        (lambda: varlen_attention(Q, KV, KV, CU, CU[:2]), "num_seqs \\+ 1"),
        (lambda: varlen_attention(Q, KV, KV, CU.astype(jnp.int8), CU), "cu_seqlens_q.dtype"),
        (lambda: varlen_attention(Q, KV, KV, CU, CU, local_window_size=(1,)), "before, after"),
        (lambda: ragged_paged_attention(Q[0], PAGES, PAGES, TABLES, CU[:2], CU), "q.shape"),
        (lambda: ragged_paged_attention(Q, PAGES, PAGES, TABLES, CU, CU), "kv_lens.shape"),
        (lambda: ragged_paged_attention(Q, PAGES, PAGES, TABLES, CU[:2], CU[:2]), "cu_seqlens_q = "),
        (lambda: ragged_paged_attention(Q, PAGES[:, :8], PAGES[:, :8], TABLES, CU[:2], CU), "page_size=8"),
        (lambda: ragged_paged_attention(Q, PAGES, PAGES, TABLES, CU[:2], CU, scale=0.0), "scale=0.0"),
    ],
)
def test_errors_name_the_rule(fn, message):
    with pytest.raises(ValueError, match=message):
        fn()


@pytest.mark.parametrize(
    "name, old, new",
    [
        ("packed/kernel", "", ""),  # Nothing is wrong, and nothing is found.
        ("core", "", ""),
        ("packed/plan", "first_q = num_kv - q_len + first", "first_q = first_kv + first"),
        ("packed/plan", "num_q=jnp.clip(q_len - first, 0, plan.queries)", "num_q=plan.queries + 0 * first"),
        (
            "packed/kernel",
            "tiles.clear(problem, shared.v_rows.at[slot], tile.first_kv - first, tile.num_kv - first)",
            "pass",
        ),
        ("packed/kernel", "(block * block_kv < tile.first_kv) | ", "(block < 0) | "),
        ("packed/kernel", "        plgpu.barrier_wait(v_landed.at[0])\n", ""),
        ("packed/kernel", "pl.when(i > 0)(lambda wg=wg: plgpu.barrier_wait(shared.q_freed.at[wg]))", "pass"),
        (
            "packed/plan",
            "starts = jnp.append(starts_q, plan.num_tokens)",
            "starts = jnp.append(starts_q, starts_q[-1])",
        ),
        ("packed/plan", "num_tiles = dealt(wave), num_rows * plan.units", "num_tiles = dealt(wave), num_rows"),
        ("core", "(columns >= self.first_kv) & (columns <= self.position(rows))", "columns <= self.position(rows)"),
        ("core", "tests.append(columns >= self.first_kv)", "tests.append(columns >= 0)"),
        ("core", "row if self.group == 1 else div(row, self.group)", "row"),
        ("core", "tests.append(columns <= q_ids + self.right)", "pass"),
    ],
)
def test_mutants_are_caught(run_only, found_if, mutant_of, monkeypatch, name, old, new):
    """Masks aligned at the start, rows of the next sequence written, NaN let in, waits that are missing, rows after
    the last sequence forgotten, tiles forgotten, a neighbour's keys seen, a position for each head."""
    mutant = mutant_of(name, old, new)("packed.varlen_attention")
    monkeypatch.setattr(interpreter, "NUM_SMS", 2)
    args = packed([70, 30, 20], [83, 34, 130], heads=4, kv_heads=2)
    args[2] = args[2].at[83:117].set(jnp.nan)  # The second sequence's, whose results are NaN; no others are.
    # Causal masks have a comparison of their own.
    is_causal = name != "core" or "self.position(rows)" in old
    how = dict(is_causal=True) if is_causal else dict(local_window_size=(100, 9))
    fn = functools.partial(mutant.varlen_attention, config=mutant.Config(block_kv=64), return_lse=True, **how)

    def of(q, k, v, *cu):
        out, lse = reference(q, k, jnp.nan_to_num(v), *cu, **how)
        return out.at[70:100].set(jnp.nan), lse

    with found_if(old != new):
        lab.check(fn, of, *args)

"""FlashAttention-3, forward: every kind of mask, lengths on both sides of a block, queries that see nothing."""

import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lab
from cookbook import _host
from cookbook.attn import core, tiles
from cookbook.attn.dense.plan import Plan, dealt_out
from tests.arrays import array

module = importlib.import_module("cookbook.attn.dense.attention")
attention, Config, reference = module.attention, module.Config, module.attention_reference
SMALL = Config(block_kv=64)


def operands(num_q, num_kv, heads=2, kv_heads=1, head_dim=64, batch=1, dtype=jnp.bfloat16):
    rng = np.random.default_rng(num_q * num_kv + head_dim)
    shapes = (batch, num_q, heads, head_dim), *((batch, num_kv, kv_heads, head_dim),) * 2
    return [array(rng.normal(size=shape) + 0.1, dtype) for shape in shapes]


def check(*args, fn=attention, config=SMALL, gpu=None, **kwargs):
    """Also compiles it if `gpu` is named: for each kind of kernel that test_what_the_compiler_makes_of_it lacks."""
    fn = functools.partial(fn, config=config, return_lse=True, **kwargs)
    # A GPU's tanh, exponentials and logarithms are not exact to float32's last places: lse was off by 6 epsilons.
    tolerance = (None, 1e-6) if "logits_soft_cap" in kwargs else None
    return lab.check(fn, functools.partial(reference, **kwargs), *args, tolerance=tolerance, gpu=gpu)


MASKS = [
    dict(),
    dict(is_causal=True),
    dict(local_window_size=(40, 10)),
    dict(local_window_size=17),
    dict(local_window_size=(70, None)),
    dict(is_causal=True, local_window_size=(50, 9)),
    dict(is_causal=True, logits_soft_cap=3.0),
]


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_masks(mask):
    """More queries than keys; the last block of each is cut."""
    check(*operands(150, 77), gpu="h200", **mask)


@pytest.mark.parametrize(
    "mask", [*MASKS[1:3], *(pytest.param(mask, marks=pytest.mark.slow) for mask in MASKS[3:])], ids=str
)
def test_more_keys_than_queries(mask):
    check(*operands(40, 201), **mask)


@pytest.mark.parametrize("mask", MASKS[:2], ids=str)
def test_whole_blocks(mask):
    check(*operands(128, 128), **mask)


@pytest.mark.parametrize(
    "head_dim, config",
    [(72, None), (256, None), (128, Config(num_stages=3, block_kv=64)), (8, None), (192, Config(64))],
)
def test_head_dims(head_dim, config):
    check(*operands(70, 150, head_dim=head_dim), config=config, is_causal=True, gpu="h200")


@pytest.mark.parametrize("heads, kv_heads, batch", [(4, 4, 1), (4, 2, 2), (3, 1, 1)])
def test_groups_of_heads(heads, kv_heads, batch):
    check(*operands(33, 50, heads, kv_heads, batch=batch), is_causal=True)


def test_float16_scale_and_large_logits():
    check(*operands(64, 100, dtype=jnp.float16), scale=8.0, gpu="h200")


def test_queries_that_see_nothing():
    """Keys that a window has left behind: zeros, and no logarithm of nothing."""
    args = operands(200, 40)
    report = check(*args, local_window_size=(5, 0))
    out, lse = report.output
    assert (out[:, 60:] == 0).all() and jnp.isneginf(lse[:, 60:]).all() and jnp.isfinite(lse[:, :40]).all()


def test_blocks_cover_what_the_mask_shows():
    """Against the mask itself: every key that is seen lies between the first block and the end, and whole blocks are
    seen by all."""
    for left, right in ((None, None), (None, 0), (5, 3), (0, 0), (30, None), (2, 40)):
        blocks = core.Blocks(num_kv=50, block_kv=16, left=left, right=right)
        for first_q in range(0, 90, 7):
            first, end = (int(x) for x in blocks.seen(first_q, 10))
            start, stop = (int(x) for x in blocks.whole(first_q, 10, first, end))
            seen = np.asarray(blocks.mask(np.arange(first_q, first_q + 10)[:, None], np.arange(64)[None]))
            seen = np.broadcast_to(seen, (10, 64)).reshape(10, 4, 16)
            assert not seen[:, :first].any() and not seen[:, end:].any()
            assert 0 <= first <= start <= stop <= end and (end <= 4 or first == end) and seen[:, start:stop].all()
            inside = [i for i in range(4) if seen[:, i].all()]
            assert all(start <= i < stop for i in inside)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("window", [None, 7, (5, 9), (5, None), (None, 9), (0, 0)], ids=str)
def test_reference(is_causal, window):
    """Against JAX under a mask that NumPy makes one pair after the other: a kernel can be no better than this."""
    query, key, value = (x.astype(jnp.float32) for x in operands(30, 30))
    before, after = window if isinstance(window, tuple) else (window, window)
    sees = lambda i, j: (
        not (is_causal and j > i) and (before is None or j >= i - before) and (after is None or j <= i + after)
    )
    mask = np.array([[sees(i, j) for j in range(30)] for i in range(30)])
    out, _ = reference(query, key, value, is_causal=is_causal, local_window_size=window)
    with jax.default_matmul_precision("highest"):  # By default a GPU rounds the operands to TF32.
        wanted = jax.nn.dot_product_attention(query, key, value, mask=jnp.asarray(mask)[None, None])
    np.testing.assert_allclose(out, wanted, atol=1e-5)  # The roundings of float32.


@pytest.mark.parametrize(
    "mask",
    [dict(is_causal=True), dict(local_window_size=(60, 5)), pytest.param(dict(), marks=pytest.mark.slow)],
    ids=str,
)
def test_segments(mask):
    """Packed sequences, of which some have no keys."""
    args = operands(153, 140, batch=2)
    rng = np.random.default_rng(0)
    ids = [array(np.sort(rng.integers(0, 5, x.shape[:2]), axis=1), jnp.int32) for x in args[:2]]
    check(*args, segment_ids=ids[0], kv_segment_ids=jnp.where(ids[1] == 2, 3, ids[1]), gpu="h200", **mask)


def values_stay_in_their_segments(fn) -> bool:
    """Whether values that are not finite make those results NaN whose queries see them, and change no others."""
    query, key, value = operands(150, 150)
    ids = jnp.repeat(jnp.arange(3, dtype=jnp.int32), 50)[None]
    fn = functools.partial(fn, segment_ids=ids, is_causal=True, return_lse=True)
    spoiled = value.at[0, 70, 0, 3].set(jnp.nan).at[0, 72, 0, 5].set(jnp.inf)
    for clean, got in zip(lab.run(fn, query, key, value), lab.run(fn, query, key, spoiled), strict=True):
        clean, got, others = np.asarray(clean), np.asarray(got), np.r_[0:70, 100:150]
        if not np.isnan(got[:, 70:100]).all() or (got[:, others] != clean[:, others]).any():
            return False
    return True


def test_values_that_are_not_finite_stay_in_their_segments():
    """Among the rows of one tile and the keys of one block, and before the first query that sees them."""
    assert values_stay_in_their_segments(attention)


@pytest.mark.parametrize(
    "old, new",
    [
        ("_kept_apart(key, value) if segments else (key, value)", "key, value"),
        ("jnp.where(finite.all(axis=3, keepdims=True), key, jnp.nan), ", "key, "),
        ("jnp.where(finite, value, 0)", "value"),
    ],
)
def test_mutants_that_let_values_out(mutant_of, old, new):
    assert not values_stay_in_their_segments(mutant_of("dense/kernel", old, new)("dense.attention").attention)


@pytest.mark.parametrize(
    "config", [Config(), Config(64, 3, 2, in_turns=False), Config(64, 4, 3, sums_by_thread=False)], ids=str
)
def test_configs(config):
    check(*operands(450, 200), config=config, is_causal=True)


def test_tiles_are_dealt_out_evenly():
    """Each tile once, the longest first, and no block has much more to do than another."""
    steps = tuple(range(1, 33))
    time, table = dealt_out(steps, 64, 4, 132)
    mine = [row[1 : 1 + row[0]] for row in table]
    assert sorted(tile for tiles in mine for tile in tiles) == list(range(32 * 64))
    work = np.array([sum(steps[tile % 32] for tile in tiles) for tiles in mine])
    assert work.max() <= 1.05 * work.mean() and work.max() <= time
    assert (dealt_out((3, 3), 1, 1, 132)[1] == [[1, 0, 0], [1, 1, 0]]).all()


def test_weights_sum_to_one_and_order_of_keys_is_free():
    """Values of ones give ones; keys that trade places together with their values change rounding alone."""
    query, key, value = operands(70, 150)
    out = lab.run(attention, query, key, jnp.ones_like(value))
    # The sum is of weights before they are rounded, each by at most half a unit in the last place.
    np.testing.assert_allclose(out.astype(jnp.float32), 1.0, atol=2**-8, rtol=0)
    order = np.random.default_rng(0).permutation(150)
    a, b = (lab.run(attention, query, k, v) for k, v in ((key, value), (key[:, order], value[:, order])))
    # Two units in the last place of bfloat16.
    np.testing.assert_allclose(a.astype(jnp.float32), b.astype(jnp.float32), atol=2**-7, rtol=2**-7)


@pytest.mark.slow
def test_jit_vmap_and_determinism():
    q, k, v = operands(40, 50, batch=2)
    fn = functools.partial(attention, config=SMALL, is_causal=True)
    runs = [
        lab.run(fn, q, k, v),
        lab.run(jax.jit(fn), q, k, v),
        lab.run(jax.vmap(fn), q[:, None], k[:, None], v[:, None]),
    ]
    assert (runs[0] == runs[1]).all() and (runs[0] == runs[2][:, 0]).all()


def test_causal_output_of_a_prefix_is_the_prefix_of_the_output():
    q, k, v = operands(150, 150)
    fn = functools.partial(attention, config=SMALL, is_causal=True)
    whole, part = lab.run(fn, q, k, v), lab.run(fn, *(x[:, :90] for x in (q, k, v)))
    # Equal but for a unit in the last place of bfloat16: a block of keys may be whole in one, masked in the other.
    np.testing.assert_allclose(whole[:, :90].astype(jnp.float32), part.astype(jnp.float32), atol=2**-7, rtol=2**-7)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(
    "mask", [dict(), dict(is_causal=True), dict(local_window_size=(1024, 0), logits_soft_cap=30.0)]
)
def test_what_the_compiler_makes_of_it(priced, head_dim, mask):
    """Shared memory is as priced, nothing is spilled, and no product waits for another, which ptxas would say."""
    shape = jax.ShapeDtypeStruct((4, 4096, 32, head_dim), jnp.bfloat16)
    compiled = lab.compile_for("h200", functools.partial(attention, **mask), shape, shape, shape)
    assert priced[0] <= compiled.smem_bytes <= priced[0] + 2048 and not compiled.remarks
    # Windows have steps of three kinds, and a soft cap its own numbers, for which three warpgroups' registers do not
    # suffice; with heads of 256 some numbers of a tile are spilled, outside of its loops.
    most = 320 if "local_window_size" in mask else 64 if head_dim == 256 else 0
    assert compiled.spill_bytes <= most


@pytest.mark.parametrize(
    "batch, length, heads, is_causal, wgs",
    [
        (8, 2950, 1, True, 2),
        (1, 6172, 2, False, 2),
        (4, 4096, 32, True, 3),
        (3, 16030, 12, True, 3),
    ],
)
def test_two_warpgroups_where_three_leave_sms_idle(batch, length, heads, is_causal, wgs):
    problem = core.Problem(heads, heads, 64, jnp.bfloat16, 1.0, None, None, 0 if is_causal else None, False)
    plan = Plan(problem, batch, length, length, False, module.default_config(64, is_causal))
    assert plan.config.compute_wgs == 3 and module._fitted(plan, 132).config.compute_wgs == wgs


def pads(fn, *avals) -> bool:
    """Whether an operand is padded by a copy before the kernel gets it."""
    with _host.building_for(_host.Target("a GPU", 132)):
        return " pad[" in str(jax.make_jaxpr(fn)(*avals))


@pytest.mark.parametrize("num_q, num_kv, head_dim, is_padded", [
    (1000, 4095, 128, False), (1000, 4096, 72, False), (4095, 4095, 128, True), (4096, 4096, 72, True),
    (4095, 4096, 128, False), (4095, 4095, 64, False), (4095, 4095, 40, False),
])  # fmt: skip
def test_values_are_padded_by_a_copy_for_many_queries_alone(num_q, num_kv, head_dim, is_padded):
    q, kv = (jax.ShapeDtypeStruct((1, num, 4, head_dim), jnp.bfloat16) for num in (num_q, num_kv))
    assert pads(attention, q, kv, kv) == is_padded


@pytest.mark.parametrize("head_dim, mask", [(64, MASKS[2]), (72, MASKS[1])], ids=str)
def test_padded_values(head_dim, mask, monkeypatch):
    monkeypatch.setattr(tiles, "PADDED_FROM", 0)
    check(*operands(150, 77, head_dim=head_dim), **mask)


def some(*shape, dtype=jnp.bfloat16):
    return jnp.ones(shape, dtype)


GOOD = some(1, 8, 2, 64)


@pytest.mark.parametrize(
    "fn, message",
    [
        (lambda: attention(GOOD[0, 0], GOOD, GOOD), "query.shape"),
        (lambda: attention(GOOD, GOOD.astype(jnp.float16), GOOD), "cast them"),
        (lambda: attention(GOOD, GOOD[:, :4], GOOD), "the same shape"),
        (lambda: attention(some(1, 8, 3, 64), GOOD, GOOD), "3 query heads"),
        (lambda: attention(*[some(1, 8, 2, 12)] * 3), "multiple of 8"),
        (lambda: attention(*[some(1, 8, 2, 264)] * 3), "from 8 to 256"),
        (lambda: attention(GOOD, GOOD, GOOD, local_window_size=(-1, 0)), "at least 0"),
        (lambda: attention(GOOD, GOOD, GOOD, local_window_size=[1, 0]), "a tuple"),
        (lambda: attention(GOOD, GOOD, GOOD, local_window_size=(1, 2, 3)), "before, after"),
        (lambda: attention(GOOD, GOOD, GOOD, scale=-1.0), "scale=-1.0; must be above 0: None stands for 1 / sqrt"),
        (lambda: attention(GOOD, GOOD, GOOD, logits_soft_cap=0), "logits_soft_cap=0.0; .*: None stands for no cap"),
        (lambda: Config(compute_wgs=4), "compute_wgs=4"),
        (lambda: attention(GOOD, GOOD, GOOD, kv_segment_ids=some(1, 8, dtype=jnp.int32)), "without segment_ids"),
        (lambda: attention(GOOD, GOOD, GOOD, segment_ids=some(1, 7, dtype=jnp.int32)), r"segment_ids = \(1, 7\)"),
        (lambda: attention(GOOD, GOOD, GOOD, segment_ids=some(1, 8)), "an integer each"),
        (
            lambda: attention(GOOD, *[some(1, 9, 2, 64)] * 2, segment_ids=some(1, 8, dtype=jnp.int32)),
            "give kv_segment_ids",
        ),
        (lambda: Config(block_kv=96), "block_kv=96"),
        (lambda: Config(block_kv=256, compute_wgs=3), "block_kv=256 .* from 64 to 192"),
        (lambda: Config(num_stages=1), "num_stages=1"),
    ],
)
def test_errors_name_the_rule(fn, message):
    with pytest.raises(ValueError, match=message):
        fn()


@pytest.mark.parametrize(
    "name, old, new",
    [
        ("dense/attention", "", ""),  # Nothing is wrong, and nothing is found.
        ("core", "columns <= q_ids + self.right)", "columns < q_ids + self.right)"),
        ("core", "columns >= q_ids - self.left)", "columns > q_ids - self.left)"),
        ("core", "[columns < self.num_kv]", "[columns >= 0]"),
        ("checks", "left=sizes[0], right=right", "left=sizes[0] and sizes[0] + 1, right=right"),
        ("steps", "return sums * per_row(alpha, sums.shape),", "return sums,"),
        ("steps", "l_i * alpha + p.sum(axis=1)", "l_i + p.sum(axis=1)"),
        ("steps", "l_i * per_row(alpha, l_i.shape) + ", "l_i + "),
        ("steps", "shift = jnp.where(m_new == -jnp.inf, 0.0, m_new) if masked else m_new", "shift = m_new"),
        ("steps", "slot = keys.wait(work.steps_done + step)", "slot = keys.slot(work.steps_done + step)"),
        ("dense/kernel", "        plgpu.barrier_wait(shared.q_filled.at[wg])\n", ""),
        ("core", "        self.keys.drain(count)\n", ""),
        pytest.param(
            "dense/kernel",
            "shared.turns.drain(wg)",
            "pass",
            marks=pytest.mark.skipif(
                jax.__version_info__ >= (0, 12), reason="its interpreter lets barriers end like that"
            ),
        ),
        ("dense/kernel", "lse_log2 / LOG2E", "lse_log2"),
    ],
)
def test_mutants_are_caught(run_only, found_if, mutant_of, name, old, new):
    """Masks off by one, a forgotten length, a missing rescale, logarithms of nothing, missing waits, barriers that are
    not drained, a wrong base."""
    mutant = mutant_of(name, old, new)("dense.attention")
    with found_if(old != new):
        config = mutant.Config(block_kv=64, sums_by_thread="p.sum(axis=1)" not in old)
        check(*operands(330, 190), fn=mutant.attention, config=config, local_window_size=(100, 0))

"""Attention of 8-bit floats: masks, lengths, descales, and how far rounding takes it from float64."""

import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

import lab
from cookbook import _host
from cookbook.attn import core
from cookbook.attn.dense import transpose_fp8
from tests.arrays import array

module = importlib.import_module("cookbook.attn.dense.attention_fp8")
attention_fp8, Config, reference = module.attention_fp8, module.Config, module.attention_fp8_reference
SMALL = Config(block_kv=64)
E4M3 = jnp.float8_e4m3fn
# Each weight is rounded by at most 1 part in 16, on average 1 in 40. A GPU's tensor cores keep 13 bits of sums of
# products of 8-bit floats.
OF_LSE = 2.0**-12 if lab.on_gpu() else 1e-6
TOLERANCE = (0.03, OF_LSE)
DESCALES = ("q_descale", "k_descale", "v_descale")


def operands(num_q, num_kv, heads=2, kv_heads=1, head_dim=64, batch=1):
    rng = np.random.default_rng(num_q * num_kv + head_dim)
    shapes = (batch, num_q, heads, head_dim), *((batch, num_kv, kv_heads, head_dim),) * 2
    descales = [array(rng.uniform(0.5, 2, (batch, kv_heads)), jnp.float32) for _ in DESCALES]
    return [*(array(rng.normal(size=shape) + 0.1, E4M3) for shape in shapes), *descales]


def check(*args, fn=attention_fp8, config=SMALL, gpu=None, tolerance=TOLERANCE, **kwargs):
    def call(fn, q, k, v, *descales, **more):
        return fn(q, k, v, **dict(zip(DESCALES, descales, strict=True)), **kwargs, **more)

    kernel = functools.partial(call, fn, config=config, return_lse=True)
    return lab.check(kernel, functools.partial(call, reference), *args, tolerance=tolerance, gpu=gpu)


MASKS = [
    dict(),
    dict(is_causal=True),
    dict(local_window_size=(40, 10)),
    dict(is_causal=True, local_window_size=(50, 9)),
    dict(is_causal=True, logits_soft_cap=3.0),
]


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_masks(mask):
    """More queries than keys; the last block of each is cut."""
    check(*operands(150, 77), **mask)


@pytest.mark.parametrize("mask", MASKS[1:3], ids=str)
def test_more_keys_than_queries(mask):
    check(*operands(40, 201, head_dim=128), **mask)


@pytest.mark.parametrize(
    "head_dim, config",
    [
        (64, Config(block_kv=96)),  # Blocks that are no multiple of 64, so that a causal mask cuts two.
        (128, Config(block_kv=160, num_stages=3, in_turns=False)),
        (128, Config(block_kv=192, compute_wgs=3, overlap=False)),
        (256, None),
        (256, Config(block_kv=96, overlap=False)),
    ],
    ids=str,
)
def test_head_dims_and_configs(head_dim, config):
    check(*operands(140, 333, head_dim=head_dim), config=config, is_causal=True)


@pytest.mark.parametrize("heads, kv_heads, batch", [(4, 2, 2), (3, 1, 1)])
def test_groups_of_heads(heads, kv_heads, batch):
    check(*operands(33, 50, heads, kv_heads, batch=batch), is_causal=True)


def test_queries_that_see_nothing():
    out, lse = check(*operands(200, 40), local_window_size=(5, 0)).output
    assert (out[:, 60:] == 0).all() and jnp.isneginf(lse[:, 60:]).all() and jnp.isfinite(lse[:, :40]).all()


def test_scalars_scale_as_arrays_do():
    q, k, v, *_ = operands(40, 50)
    run = lambda *descales: lab.run(
        lambda *args: attention_fp8(*args, **dict(zip(DESCALES, descales, strict=True)), out_dtype=jnp.float16), q, k, v
    )
    one = jnp.ones((1, 1), jnp.float32)
    np.testing.assert_array_equal(run(0.5, 2.0, np.float32(3)), run(0.5 * one, 2 * one, jnp.float32(3)))
    assert run(1.0, 1.0, 1.0).dtype == jnp.float16


def test_large_logits_and_descales():
    """Rows whose weight lies on one key; descales that would overflow e4m3 many times."""
    q, k, v, *_ = operands(64, 100)
    check(q, k, v, *(jnp.full((1, 1), x, jnp.float32) for x in (30.0, 3.0, 1e20)), tolerance=(0.03, max(3e-6, OF_LSE)))


def small_weights():
    """One key with a logit 8 above those of 300 others, whose weights together are a tenth."""
    q, k, v = (np.zeros((1, n, 1, 64)) for n in (64, 301, 301))
    q[..., 0], k[:, 0, :, 0], v[:, 1:] = 8.0, 8.0, 1.0
    return [*(array(x, E4M3) for x in (q, k, v)), *[jnp.ones((1, 1), jnp.float32)] * 3]


def test_small_weights_are_not_lost():
    check(*small_weights())


@pytest.mark.parametrize("seed", [0, 1])
def test_rounding_costs_little_beside_that_of_the_operands(seed):
    """Against float64 of the operands before they are rounded: at most 1.2 times the error of attention in float64 of
    the rounded ones."""
    rng = np.random.default_rng(seed)
    exact = [rng.normal(size=(1, n, 1, 128)) * scale for n, scale in ((128, 1.0), (512, 3.0), (512, 0.2))]
    descales = [np.float32(np.abs(x).max() / 448) for x in exact]
    rounded = [array(x / d, E4M3) for x, d in zip(exact, descales, strict=True)]
    ones = dict.fromkeys(DESCALES, 1.0)
    scales = dict(zip(DESCALES, descales, strict=True))
    with jax.enable_x64():
        wanted, _ = reference(*exact, **ones)
        best, _ = reference(*(np.asarray(x, np.float64) for x in rounded), **scales)
    out = lab.run(functools.partial(attention_fp8, **scales), *rounded)
    error = lambda x: np.linalg.norm(np.asarray(x, np.float64) - wanted) / np.linalg.norm(wanted)
    assert error(out) <= 1.2 * error(best)


def test_reference():
    """Against JAX's attention in float32 of the dequantized operands."""
    q, k, v, *descales = operands(30, 40, heads=4, kv_heads=2, batch=2)
    out, _ = reference(q, k, v, **dict(zip(DESCALES, descales, strict=True)), is_causal=True)
    wide = [
        x.astype(jnp.float32) * np.repeat(d, x.shape[2] // 2, axis=1)[:, None, :, None]
        for x, d in zip((q, k, v), descales, strict=True)
    ]
    with jax.default_matmul_precision("highest"):  # By default a GPU rounds the operands to TF32.
        wanted = jax.nn.dot_product_attention(*wide, is_causal=True)
    np.testing.assert_allclose(out, wanted, atol=1e-5, rtol=1e-4)


def owners(layout, shape):
    """Which thread holds each element of an array of this layout, and at which place among its own."""
    found = layout.to_mgpu()
    tiling = found.tiling.tile_shape(shape)
    index = np.arange(np.prod(shape)).reshape(shape)
    for tile in found.tiling.tiles:  # (..., rows, columns) becomes (..., whole tiles, rows and columns of a tile).
        lead, split = index.ndim - len(tile), []
        for size, part in zip(index.shape[lead:], tile, strict=True):
            split += [size // part, part]
        order = [lead + 2 * i for i in range(len(tile))] + [lead + 2 * i + 1 for i in range(len(tile))]
        index = index.reshape(*index.shape[:lead], *split).transpose(*range(lead), *order)
    assert index.shape == tuple(tiling)
    dims = [dim % index.ndim for dim in (*found.warp_dims, *found.lane_dims)]
    others = [dim for dim in range(index.ndim) if dim not in dims]
    return index.transpose(*dims, *others).reshape(128, -1)


def test_keys_change_places_as_registers_are_renamed():
    """A thread's weights, pair after pair as the product leaves them, are the quadruples of an 8-bit operand: their
    columns there have the values that `transposed` puts there."""
    shape = (64, 64)
    mine, wide = owners(plgpu.Layout.WGMMA, shape), owners(plgpu.Layout.WGMMA_8BIT, shape)
    # (thread, 8 columns, 8 rows, pair) to (thread, 16 columns, 8 rows, quadruple), as `rename` does.
    renamed = mine.reshape(128, 4, 2, 2, 2).swapaxes(2, 3).reshape(128, -1)
    column = np.empty(shape, int)
    column.ravel()[wide] = renamed % 64  # Which column of s each column of the operand has.
    assert (column == column[0]).all()
    bits = np.arange(64)[:, None] >> np.arange(64) & 1  # A key's number, a bit in each column of its value.
    value, how = array(bits[None, :, None], E4M3), dict(interpreted=not lab.on_gpu())
    out = lab.run(lambda v: transpose_fp8.transposed(v, params=_host.compiler_params(), **how), value)
    found = (np.asarray(out, np.int64)[0, 0, :6] << np.arange(6)[:, None]).sum(0)
    np.testing.assert_array_equal(found[:64], column[0])
    assert (found[64:] == 0).all()
    p = jnp.broadcast_to(jnp.arange(64.0), shape)
    as_fp8 = lambda x: np.asarray(x, E4M3)
    np.testing.assert_array_equal(as_fp8(transpose_fp8.as_operand(p, True)), as_fp8(column.astype(np.float32)))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("is_causal", [False, True])
def test_what_the_compiler_makes_of_it(priced, head_dim, is_causal):
    """Shared memory is as priced, no product waits for another, and no weight is moved between threads: shuffles are
    those of rows' maxima and last sums alone."""
    shape, one = jax.ShapeDtypeStruct((1, 4096, 4, head_dim), E4M3), jax.ShapeDtypeStruct((), jnp.float32)
    fn = lambda q, k, v, a, b, c: attention_fp8(q, k, v, q_descale=a, k_descale=b, v_descale=c, is_causal=is_causal)
    compiled = lab.compile_for("h200", fn, *[shape] * 3, *[one] * 3)
    assert priced[0] <= compiled.smem_bytes <= priced[0] + 2048 and not compiled.remarks
    # A mask's column numbers, and with heads of 256 a tile's numbers, are spilled outside of the loops over blocks.
    most = 512 if is_causal and head_dim == 256 else 192 if is_causal or head_dim == 256 else 32
    assert compiled.spill_bytes <= most
    steps = 4 if is_causal else 3  # First, masked, whole, last: each with a softmax but the last.
    (attends,) = [kernel for kernel in compiled.kernels if kernel.opcodes["QGMMA"]]
    assert attends.opcodes["SHFL"] <= 4 * steps + 4  # Two rows' maxima in each step, and in the end their sums.
    assert attends.opcodes["PRMT"] <= (64 if is_causal else 16)  # With a mask weights that are spilled are packed anew.


def some(*shape, dtype=E4M3):
    return jnp.ones(shape, dtype)


GOOD, ONES = some(1, 8, 2, 64), dict.fromkeys(DESCALES, 1.0)


@pytest.mark.parametrize(
    "fn, message",
    [
        (lambda: attention_fp8(GOOD[0, 0], GOOD, GOOD, **ONES), "q.shape"),
        (lambda: attention_fp8(GOOD, GOOD.astype(jnp.bfloat16), GOOD, **ONES), "k.dtype = bfloat16"),
        (lambda: attention_fp8(GOOD, GOOD, GOOD.astype(jnp.float8_e5m2), **ONES), "v.dtype = float8_e5m2"),
        (lambda: attention_fp8(GOOD, GOOD[:, :4], GOOD, **ONES), "the same shape"),
        (lambda: attention_fp8(some(1, 8, 3, 64), GOOD, GOOD, **ONES), "3 query heads"),
        (lambda: attention_fp8(*[some(1, 8, 2, 96)] * 3, **ONES), "head_dim=96"),
        (lambda: attention_fp8(GOOD, GOOD, GOOD, **ONES | dict(k_descale=np.ones(3, np.float32))), "k_descale is"),
        (lambda: attention_fp8(GOOD, GOOD, GOOD, **ONES | dict(v_descale=1)), "v_descale is int32"),
        (lambda: attention_fp8(GOOD, GOOD, GOOD, **ONES, out_dtype=E4M3), "out_dtype"),
        (lambda: attention_fp8(GOOD, GOOD, GOOD, **ONES, scale=-1.0), "scale=-1.0"),
        (lambda: attention_fp8(GOOD, GOOD, GOOD, **ONES, local_window_size=(1, 2, 3)), "before, after"),
        (lambda: Config(block_kv=80), "block_kv=80 must be a multiple of 32"),
        (lambda: Config(block_kv=224, compute_wgs=3), "block_kv=224 .* from 64 to 192"),
        (lambda: Config(num_stages=1), "num_stages=1"),
        (lambda: attention_fp8(*[some(1, 8, 2, 256)] * 3, **ONES, config=Config()), "overlap=False"),
        (
            lambda: attention_fp8(GOOD, GOOD, GOOD, **ONES, config=core.Config()),
            "must be a cookbook.attention_fp8.Config",
        ),
        (
            lambda: jax.grad(lambda d: attention_fp8(GOOD, GOOD, GOOD, **ONES | dict(v_descale=d)).sum())(1.0),
            "gradient",
        ),
    ],
)
def test_errors_name_the_rule(fn, message):
    with lab.interpret(), pytest.raises(ValueError, match=message):
        fn()


@pytest.mark.parametrize(
    "name, old, new",
    [
        ("dense/attention_fp8", "", ""),  # Nothing is wrong, and nothing is found.
        ("dense/kernel_fp8", "q_descale[head] * k_descale[head]", "q_descale[head]"),
        ("dense/transpose_fp8", "jnp.float16)\n", "jnp.float16) * 2\n"),
        ("dense/plan", "(right != 0 or self.config.block_kv % WG_ROWS != 0)", "right != 0"),
        ("dense/kernel_fp8", "m_i - OCTAVES", "m_i"),
        ("dense/kernel_fp8", "return finish(*sums, work.value_scale)", "return finish(*sums)"),
        ("dense/kernel_fp8", "(acc * per_row(alpha, acc.shape) + pv,)", "(acc + pv,)"),
        ("dense/kernel_fp8", "work.shared.values.wait(count - 1)\n    turns.take", "turns.take"),
        ("dense/kernel_fp8", "OCTAVES = 8", "OCTAVES = 0"),
    ],
)
def test_mutants_are_caught(run_only, found_if, mutant_of, name, old, new):
    """A forgotten descale, keys in another order, two cut blocks taken for one, weights 256 times as large, a missing
    rescale, a missing wait, weights that fall below what e4m3 can hold."""
    mutant = mutant_of(name, old, new)("dense.attention_fp8")
    with found_if(old != new):
        if "OCTAVES" in old:
            check(*small_weights(), fn=mutant.attention_fp8, config=mutant.Config())
        else:
            check(*operands(330, 390), fn=mutant.attention_fp8, config=mutant.Config(block_kv=96), is_causal=True)

"""Gradients of attention by the one kernel that also adds up dq."""

import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_attention import operands
from test_attention_bwd import OTHERS, attention, check

import lab
from cookbook import _device, _host
from cookbook.attn.backward import kernel_fused
from cookbook.attn.backward.plan import OneKernel, Plan
from cookbook.attn.core import Problem
from tests.arrays import array

module = importlib.import_module("cookbook.attn.backward.gradients")
check = functools.partial(check, deterministic=False)


# Queries, keys, query heads, key heads, head_dim, batch: more than one tile of 128 keys and block of queries, or less.
# The second, third and fifth have a part of its own for each query head, the fifth with two KV heads.
@pytest.mark.parametrize(
    "shape, mask",
    [
        ((140, 150, 4, 2, 64, 2), dict(is_causal=True)),
        ((70, 140, 2, 1, 128), dict(local_window_size=(40, 10))),
        ((140, 64, 2, 1, 72), dict(logits_soft_cap=3.0, local_window_size=(70, None))),
        pytest.param((130, 256, 3, 1, 128), dict(), marks=pytest.mark.slow),
        pytest.param((100, 77, 4, 2), dict(is_causal=True, local_window_size=(50, 9)), marks=pytest.mark.slow),
        pytest.param((40, 300), dict(local_window_size=17), marks=pytest.mark.slow),
        pytest.param((200, 40), dict(local_window_size=(5, 0)), marks=pytest.mark.slow),  # Some see nothing.
    ],
    ids=str,
)
def test_masks(shape, mask):
    check(*operands(*shape), **mask)


@pytest.mark.slow
def test_segments_and_float16():
    args = operands(103, 140, batch=2, dtype=jnp.float16)
    rng = np.random.default_rng(0)
    ids = [array(np.sort(rng.integers(0, 4, x.shape[:2]), axis=1), jnp.int32) for x in args[:2]]
    check(*args, segment_ids=ids[0], kv_segment_ids=ids[1], peaked=2)


@pytest.mark.slow
def test_rows_of_a_tile_that_are_no_keys():
    """Their logits are 0 and all others far below: without -inf their weights would be infinite, and dq NaN. A branch
    for them would take registers from every step."""
    query, key, value = (jnp.abs(x) for x in operands(70, 90))
    check(20 * query, -20 * key, value, peaked=4)
    plan = plan_of(64, None, 1, num_kv=4095)
    assert plan.num_kv % plan.rows and not (plan.cuts.first or plan.cuts.last or plan.cuts.all)


@pytest.mark.slow
def test_heads_over_128_have_two_kernels():
    assert module.default_config(256) is None
    check(*operands(70, 70, head_dim=256))


def plan_of(head_dim, right, group, config=None, num_q=4096, num_kv=4096):
    problem = Problem(8, 8 // group, head_dim, jnp.dtype(jnp.bfloat16), 1.0, None, None, right, interpreted=False)
    config = config or module.default_config(head_dim)
    return Plan(problem, 1, num_q, num_kv, has_segments=False, for_query=False, config=config)


def gradients_by(config, args):
    """(dq, dk, dv) by the kernels that `config` names, all with the same results of the forward pass."""
    (batch, num_q, heads, head_dim), kv_heads = args[0].shape, args[1].shape[2]
    interpreted, params = not lab.on_gpu(), _host.compiler_params(approx_math=True)
    problem = Problem(heads, kv_heads, head_dim, args[0].dtype, 0.1, None, None, None, interpreted)
    out, lse = attention(*args, scale=0.1, return_lse=True)
    return module.gradients(
        *args, (), out, lse.swapaxes(1, 2), args[0], jnp.zeros((batch, heads, num_q)), problem=problem, params=params,
        config=config,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kv_heads", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_another_configuration(kv_heads):
    """Three stages: the same to rounding as by two kernels."""
    args, config = operands(140, 300, head_dim=128, kv_heads=kv_heads), OneKernel(num_stages=3)
    both = lab.run(lambda *args: (gradients_by(config, args), gradients_by(None, args)), *args)
    for a, b in zip(*both, strict=True):
        error = jnp.linalg.norm((a.astype(jnp.float32) - b.astype(jnp.float32)).ravel())
        assert error <= 2**-9 * jnp.linalg.norm(b.astype(jnp.float32).ravel())


@pytest.mark.slow
def test_jit_and_vmap():
    args = operands(40, 50, batch=2)
    fn = functools.partial(attention, is_causal=True, deterministic=False)
    grad = jax.grad(lambda q, k, v: fn(q, k, v).astype(jnp.float32).sum(), argnums=(0, 1, 2))
    alone = lab.run(jax.jit(grad), *args)
    mapped = lab.run(jax.vmap(grad, in_axes=(0, None, 0)), args[0][None], args[1], args[2][None])
    for a, b in zip(alone, mapped, strict=True):
        np.testing.assert_allclose(a.astype(jnp.float32), b[0].astype(jnp.float32), rtol=2**-7, atol=1e-3)


@pytest.mark.parametrize(
    "head_dim, config, message",
    [
        (64, dict(runs_ahead=True), "too few registers for head_dim=64"),
        (256, dict(), "a block has"),
        (128, dict(num_stages=4), "needs .* bytes of shared memory"),
    ],
)
def test_configurations_that_do_not_fit(head_dim, config, message):
    plan = plan_of(head_dim, None, 1, OneKernel(**config))
    with pytest.raises(ValueError, match=message):
        plan.config.check(head_dim, _device.smem_bytes(kernel_fused.scratch(plan)))


def test_one_stage_is_refused():
    with pytest.raises(ValueError, match=r"self.num_stages=1 must be at least 2"):
        OneKernel(num_stages=1)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("right, group", [(None, 4), (0, 1)])
def test_what_the_compiler_makes_of_it(head_dim, right, group):
    """No product waits for another, which ptxas would say; one loop has the five products, in all their pieces, and the
    last dq follows it."""
    plan = plan_of(head_dim, right, group)
    query, key = (jax.ShapeDtypeStruct((1, 4096, heads, head_dim), jnp.bfloat16) for heads in (8, 8 // group))
    vector = jax.ShapeDtypeStruct((1, 8, 4096), jnp.float32)
    params = _host.compiler_params(approx_math=True)
    fn = lambda k, v, q, do, lse, delta: module._in_one_kernel(plan, params, (k, v), (q, do), (lse, delta), ())
    compiled = lab.compile_for("h200", fn, key, key, query, query, vector, vector)
    assert not compiled.remarks and compiled.smem_bytes == _device.smem_bytes(kernel_fused.scratch(plan))
    of_heads, of_queries, of_keys = head_dim // 16, plan.block // 16, plan.rows // 16
    assert compiled.opcodes["HGMMA"] == 2 * of_heads + 2 * of_queries + 2 * of_keys
    assert sum("UTMAREDG" in line for line in compiled.instructions) == 2
    # dk, dv and two blocks of logits fill the registers. A mask's values are spilled, which only its blocks load again.
    # JAX 0.12 spills 12 bytes more than 0.11.
    assert compiled.spill_bytes <= (96 if right is None else 512)


@pytest.mark.parametrize(
    "name, old, new",
    [
        ("backward/kernel_fused", "", ""),  # Nothing is wrong, and nothing is found.
        ("backward/kernel_fused", "ds_slot = dq.exchange.wait(count)", "ds_slot = dq.exchange.slot(count)"),
        ("backward/kernel_fused", "dq.put(count + 1, ds)", "dq.put(count, ds)"),
        (
            "backward/kernel_fused",
            "lambda: dq.add(share, place_before)",
            "lambda: (dq.add(share, place_before), dq.add(share, place_before))[0]",
        ),
        ("backward/kernel_fused", "    plgpu.wait_smem_to_gmem(0, wait_read_only=not interpreted)", "    pass"),
        ("backward/kernel_fused", "place + 2 * plan.num_blocks", "place"),
        ("backward/kernel_fused", "pl.when(tile.steps > 0)(lambda: dq.add", "pl.when(tile.steps > 9)(lambda: dq.add"),
        ("backward/gradients", "zeros = jnp.zeros(", "zeros = jnp.ones("),
        ("backward/kernel_fused", "if plan.num_kv % plan.rows:", "if False:"),
    ],
)
def test_mutants_are_caught(run_only, found_if, mutant_of, name, old, new):
    """A missing wait for dsᵀ, dsᵀ in the wrong slot, dq added twice, a share that the next one overwrites, the wrong
    head of a group, the last dq forgotten, dq added to what is not zero, rows that are no keys."""
    mutant = mutant_of(name, old, new)("dense.attention").attention
    query, key, value = operands(140, 150, batch=4 if "plan.num_blocks" in old else 1)
    with found_if(old != new):
        check(40 * jnp.abs(query), -jnp.abs(key), value, fn=mutant, peaked=4)


@pytest.mark.skipif(not lab.on_gpu(), reason="what several blocks add in memory at once is seen on a GPU alone")
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("shape", [shape for shape in OTHERS if shape[-1] <= 128], ids=str)
def test_no_less_exact_than_by_two_kernels(shape, is_causal):
    """Twenty runs: dk and dv are the same in all, dq to the rounding of its sums."""
    batch, num_q, num_kv, heads, kv_heads, head_dim = shape
    args = operands(num_q, num_kv, heads, kv_heads, head_dim, batch)

    @functools.partial(jax.jit, static_argnums=0)
    def grads(deterministic, *args):
        out, vjp = jax.vjp(functools.partial(attention, is_causal=is_causal, deterministic=deterministic), *args)
        return [x.astype(jnp.float32) for x in vjp(jnp.cos(args[0]).astype(out.dtype))]

    expected, first = grads(True, *args), grads(False, *args)
    for _ in range(20):
        dq, *others = grads(False, *args)
        for got, before in zip(others, first[1:], strict=True):
            np.testing.assert_array_equal(got, before)
        for got, want in zip((dq, *others), expected, strict=True):
            assert jnp.linalg.norm((got - want).ravel()) <= 2**-8 * jnp.linalg.norm(want.ravel())

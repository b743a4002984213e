"""Gradients of attention: through out and lse, for every kind of mask; bitwise reproducible."""

import dataclasses
import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_attention import MASKS, operands

import lab
from cookbook import _host
from cookbook.attn.backward.plan import OneKernel, TwoKernels, two_kernels
from cookbook.attn.core import Problem
from lab import interpreter
from tests.arrays import array
from tests.lowering import lowered

forward = importlib.import_module("cookbook.attn.dense.attention")
module = importlib.import_module("cookbook.attn.backward.gradients")
kernel = importlib.import_module("cookbook.attn.backward.kernel")
attention, reference = forward.attention, forward.attention_reference
# Weights and their gradients are rounded to the operands' dtype before they are multiplied, as tensor cores want it,
# and so is the result: two errors of at most half a unit in the last place, where the reference rounds once.
TOLERANCE = {jnp.dtype(jnp.bfloat16): 2**-8, jnp.dtype(jnp.float16): 2**-11}


def gradients(fn, *args, **kwargs):
    """(dq, dk, dv) of `fn` for given gradients of out and lse; where lse is -inf it has none."""
    query, key, value, d_out, d_lse = args
    (out, lse), vjp = jax.vjp(functools.partial(fn, **kwargs), query, key, value)
    return vjp((d_out.astype(out.dtype), jnp.where(jnp.isneginf(lse), 0.0, d_lse).astype(lse.dtype)))


def check(*args, fn=attention, seed=0, peaked=1, gpu=None, **kwargs):
    """`peaked`: by how much more gradients may err where weights are near 0 and 1, so that dp - delta nearly vanishes:
    delta is of out as rounded. It is compiled too if `gpu` is named: for what test_what_the_compiler_makes_of_it lacks.
    """
    query, key, value = args
    (batch, num_q, heads, _), rng = query.shape, np.random.default_rng(seed)
    d_out = array(rng.normal(size=query.shape) + 0.2, query.dtype)
    d_lse = array(rng.normal(size=(batch, num_q, heads)), jnp.float32)
    options = dict(deterministic=kwargs.pop("deterministic", True), config=kwargs.pop("config", None))
    return lab.check(
        functools.partial(gradients, functools.partial(fn, return_lse=True, **options), **kwargs),
        functools.partial(gradients, reference, **kwargs),
        query, key, value, d_out, d_lse, tolerance=peaked * TOLERANCE[query.dtype], gpu=gpu,
    )  # fmt: skip


# Both bounds of a window, and causal masks with a soft cap, have all steps of the others.
@pytest.mark.parametrize(
    "mask",
    [
        MASKS[0],
        MASKS[2],
        MASKS[6],
        *(pytest.param(mask, marks=pytest.mark.slow) for mask in (*MASKS[1:2], *MASKS[3:6])),
    ],
    ids=str,
)
def test_masks(mask):
    """More queries than keys; the last block of each is cut."""
    check(*operands(100, 77), gpu="h200" if "logits_soft_cap" in mask else None, **mask)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mask", [dict(local_window_size=(40, 10)), pytest.param(dict(is_causal=True), marks=pytest.mark.slow)], ids=str
)
def test_more_keys_than_queries(mask):
    check(*operands(40, 140), **mask)


@pytest.mark.slow
@pytest.mark.parametrize(
    "head_dim, kv_heads",
    [(72, 1), (256, 2), *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in [(128, 2), (256, 1)])],
)
def test_head_dims(head_dim, kv_heads):
    """With as many KV heads as query heads, pieces of heads over 64 lie apart."""
    check(*operands(70, 100, head_dim=head_dim, kv_heads=kv_heads), is_causal=True, gpu="h200")


CAUSAL, FULL, NARROW = (None, 0), (None, None), (99, 0)


@pytest.mark.slow
@pytest.mark.parametrize("heads, kv_heads, batch", [(4, 2, 2), pytest.param(4, 2, 1, marks=pytest.mark.slow)])
def test_groups_of_heads(heads, kv_heads, batch):
    """In the first case a block of keys goes through both heads of its group; in the second each head has a block, and
    the parts of two KV heads are added up."""
    args = operands(70, 150, heads, kv_heads, batch=batch)
    problem = Problem(heads, kv_heads, 64, args[0].dtype, 1.0, None, *CAUSAL, interpreted=True)
    assert module._parts(kernel.Plan(problem, batch, 70, 150, False, for_query=False), interpreter.NUM_SMS) == 3 - batch
    check(*args, is_causal=True)


@pytest.mark.parametrize(
    "batch, kv_heads, num_q, num_kv, window, parts",
    [
        (1, 1, 4096, 300, CAUSAL, 12), (1, 2, 4096, 500, CAUSAL, 12), (2, 2, 2048, 4096, CAUSAL, 3),
        (4, 2, 2048, 4096, CAUSAL, 2), (8, 2, 2048, 4096, CAUSAL, 1),
        (8, 2, 4096, 4096, CAUSAL, 2), (8, 2, 16384, 16384, CAUSAL, 3), (1, 2, 2**18, 2**18, CAUSAL, 12),
        (8, 2, 16384, 16384, FULL, 1), (8, 2, 16384, 16384, NARROW, 1), (2, 2, 2048, 4096, FULL, 1),
        (5, 1, 4096, 7300, FULL, 2), (1, 1, 4096, 256, FULL, 12),
    ],
)  # fmt: skip
def test_more_blocks_share_few_keys_or_many_queries(batch, kv_heads, num_q, num_kv, window, parts):
    """Least divisors of a group of 12. With a causal mask they give each of 132 SMs two blocks of 128 keys, and leave
    no more heads in flight than the L2 cache holds; or they are all 12. Else blocks have as much to do, and the
    divisors fill enough of the SMs, over all waves, or as many as any."""
    problem = Problem(12 * kv_heads, kv_heads, 64, jnp.dtype(jnp.bfloat16), 1.0, None, *window, interpreted=False)
    plan = kernel.Plan(problem, batch, num_q, num_kv, has_segments=False, for_query=False)
    assert module._parts(plan, 132) == parts


@pytest.mark.parametrize("head_dim, length, kernels", [(64, 2040, 2), (64, 2048, 1), (128, 512, 1), (192, 4096, 2)])
def test_the_default_is_the_faster(head_dim, length, kernels):
    x = jax.ShapeDtypeStruct((1, length, 2, head_dim), jnp.bfloat16)
    grads = jax.grad(lambda *args: attention(*args).astype(jnp.float32).sum(), argnums=(0, 1, 2))
    assert sum(launch.is_kernel for launch in lab.launches("h200", grads, x, x, x)) == 1 + kernels


def given(*args, **kwargs):
    """The configuration of the forward pass of small problems, with this one of the gradients."""
    return forward.Config(block_kv=64, backward=TwoKernels(*args, **kwargs))


@pytest.mark.parametrize(
    "head_dim, config",
    [
        (64, given(64, 128, 2, 3)),
        pytest.param(64, given(128, 64, 2, 2), marks=pytest.mark.slow),
        pytest.param(128, given(num_stages=2), marks=pytest.mark.slow),
        (128, forward.Config(block_kv=64, backward=OneKernel(3))),
        pytest.param(128, forward.Config(block_kv=64, backward=OneKernel(3, True)), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_tiles_that_are_given(head_dim, config):
    args = operands(100, 150, head_dim=head_dim)
    check(*args, config=config, deterministic=None, is_causal=True, gpu="h200")


def test_tiles_that_are_given_are_those_that_run():
    x = jax.ShapeDtypeStruct((1, 512, 2, 64), jnp.bfloat16)

    def program(backward):
        fn = functools.partial(attention, config=forward.Config(backward=backward))
        return lab.program.digest(
            jax.grad(lambda *args: fn(*args).astype(jnp.float32).sum(), argnums=(0, 1, 2)), x, x, x
        )

    assert program(None) == program(two_kernels(64)) != program(TwoKernels()) != program(OneKernel())


@pytest.mark.parametrize(
    "head_dim, backward, deterministic, message",
    [
        (64, TwoKernels(128, 128, 3), None, "too few registers for head_dim=64: use two_kernels"),
        (128, TwoKernels(128, num_stages=2), None, "too few registers"),
        (128, TwoKernels(num_stages=8), None, "needs .* bytes of shared memory"),
        (128, OneKernel(num_stages=4), None, "needs .* bytes of shared memory"),
        (256, TwoKernels(dq_wgs=3, num_stages=2), None, "needs .* bytes|too few registers"),
        (64, OneKernel(), True, "deterministic=True, config.backward=.*; True needs TwoKernels"),
        (64, TwoKernels(), False, "deterministic=False, config.backward="),
    ],
)
def test_tiles_that_do_not_fit_are_refused(head_dim, backward, deterministic, message):
    x = jax.ShapeDtypeStruct((1, 512, 2, head_dim), jnp.bfloat16)
    config = dataclasses.replace(forward.default_config(head_dim), backward=backward)
    fn = functools.partial(attention, config=config, deterministic=deterministic)
    with pytest.raises(ValueError, match=message):
        lowered(jax.grad(lambda *args: fn(*args).astype(jnp.float32).sum()), x, x, x)


@pytest.mark.parametrize("wrong", [dict(num_stages=1), dict(block_q=96), dict(block_kv=256), dict(dq_wgs=1)], ids=str)
def test_tiles_that_no_kernel_has(wrong):
    with pytest.raises(ValueError, match=f"self.{next(iter(wrong))}={next(iter(wrong.values()))}"):
        TwoKernels(**wrong)
    with pytest.raises(ValueError, match="must be an attention.OneKernel"):
        forward.Config(backward=forward.Config())


@pytest.mark.slow
def test_odd_lengths_are_not_copied():
    def launches(length: int) -> list[str]:
        x = jax.ShapeDtypeStruct((1, length, 2, 64), jnp.bfloat16)
        grads = jax.grad(lambda *args: attention(*args).astype(jnp.float32).sum(), argnums=(0, 1, 2))
        return [launch.name for launch in lab.launches("h200", grads, x, x, x)]

    assert launches(1021) == launches(1024)


@pytest.mark.slow
def test_float16_and_scale():
    check(*operands(64, 100, dtype=jnp.float16), scale=0.7, peaked=2)


@pytest.mark.slow
@pytest.mark.parametrize("mask", [dict(local_window_size=(60, 5)), dict()], ids=str)
def test_segments(mask):
    args = operands(103, 140, batch=2)
    rng = np.random.default_rng(0)
    ids = [array(np.sort(rng.integers(0, 4, x.shape[:2]), axis=1), jnp.int32) for x in args[:2]]
    check(*args, segment_ids=ids[0], kv_segment_ids=ids[1], gpu="h200", **mask)


@pytest.mark.slow
def test_large_logits():
    """Weights of 0 and 1 alone: no infinity on the way, also in the rows that fill up a block."""
    query, key, value = operands(70, 90)
    check(40 * query, key, value, is_causal=True, peaked=2)


@pytest.mark.slow
def test_queries_that_see_nothing():
    """Their gradient is zero, and nothing of them reaches another."""
    query, key, value = operands(200, 40)
    grad = jax.grad(lambda q: attention(q, key, value, local_window_size=(5, 0)).astype(jnp.float32).sum())
    dq = lab.run(grad, query)
    assert (dq[:, 60:] == 0).all() and (dq[:, :40] != 0).any() and jnp.isfinite(dq).all()


@pytest.mark.slow
def test_jit_vmap_checkpoint_and_determinism():
    args = operands(40, 50, batch=2)
    loss = lambda fn: lambda q, k, v: fn(q, k, v).astype(jnp.float32).sum()
    fn = functools.partial(attention, is_causal=True, deterministic=True)
    grad = jax.grad(loss(fn), argnums=(0, 1, 2))
    runs = [
        lab.run(grad, *args),
        lab.run(jax.jit(grad), *args),
        [x[:, 0] for x in lab.run(jax.vmap(grad), *(x[:, None] for x in args))],
    ]
    runs.append(lab.run(jax.grad(loss(jax.checkpoint(fn)), argnums=(0, 1, 2)), *args))
    for other in runs[1:]:
        for a, b in zip(runs[0], other, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("right, for_query", [(None, True), (0, False)])
def test_what_the_compiler_makes_of_it(head_dim, right, for_query):
    """No product waits for another, which ptxas would say, and next to nothing is spilled."""
    problem = Problem(8, 8, head_dim, jnp.dtype(jnp.bfloat16), 1.0, None, None, right, interpreted=False)
    plan = kernel.Plan(problem, 1, 4096, 4096, has_segments=False, for_query=for_query)
    x = jax.ShapeDtypeStruct((1, 4096, 8, head_dim), jnp.bfloat16)
    vector = jax.ShapeDtypeStruct((1, 8, 4096), jnp.float32)
    params = _host.compiler_params(approx_math=True)
    fn = lambda a, b, c, d, lse, delta: kernel.launch(plan, params, (a, b), (c, d), (lse, delta), ())
    compiled = lab.compile_for("h200", fn, x, x, x, x, vector, vector)
    assert not compiled.remarks
    # dk and dv fill the registers: of a tile's numbers some are spilled, and with a causal mask more, in its own loop.
    assert compiled.spill_bytes <= (16 if right is None else 256)


# The soft cap's derivative, in the steps of both kernels.
CAP = "ds = ds if problem.soft_cap is None else ds * (1.0 - s * s)\n            start_accumulate("
DQ_CAP, DK_CAP = CAP + "dq_ref", CAP + "dk_ref"


@pytest.mark.parametrize(
    "name, old, new",
    [
        ("backward/gradients", "", ""),  # Nothing is wrong, and nothing is found.
        ("backward/gradients", '"btnh,btnh->bnt", out, d_out', '"btnh,btnh->bnt", d_out, d_out'),
        ("backward/gradients", "preferred_element_type=jnp.float32) - d_lse", "preferred_element_type=jnp.float32)"),
        ("backward/kernel", DQ_CAP, DQ_CAP.replace("ds * (1.0 - s * s)", "ds")),
        ("backward/kernel", DK_CAP, DK_CAP.replace("ds * (1.0 - s * s)", "ds")),
        ("backward/plan", "self.block, right, left)", "self.block, left, right)"),
        ("backward/kernel", "ds.astype(problem.dtype), q[slot", "ds.astype(problem.dtype), do[slot"),
        ("backward/kernel", "ds.astype(problem.dtype), k[slot", "ds.astype(problem.dtype), v[slot"),
        ("backward/kernel", "slot=ring.wait(count)", "slot=ring.slot(count)"),
        ("backward/plan", "self.head * plan.group + i", "self.head * plan.group"),
        ("backward/kernel", "_device.div(tile.head, plan.parts)", "tile.head"),
        ("backward/gradients", "-1, dkdv_plan.parts, width)", "dkdv_plan.parts, -1, width).swapaxes(2, 3)"),
    ],
)
def test_mutants_are_caught(run_only, found_if, mutant_of, name, old, new):
    """delta of the wrong tensor, a forgotten gradient of lse, a soft cap without its
    derivative, blocks of the wrong queries, dk and dq from the wrong operand, a missing wait, one head for all of a
    group, keys and sums of the wrong head where blocks share a group."""
    mutant = mutant_of(name, old, new)("dense.attention").attention
    args = operands(130, 150, batch=4) if "group + i" in old else operands(130, 100, 4, 2)
    with found_if(old != new):
        check(*args, fn=mutant, local_window_size=(40, 0), logits_soft_cap=3.0)


# Batch, queries, keys, query heads, key heads, head_dim: of the tests of JAX's own kernel for Hopper, and such as
# tokamax's tests have (grouped heads, a length that is no multiple of a block, more keys than queries).
OTHERS = [
    (1, 4096, 4096, 4, 1, 64),
    (4, 4096, 4096, 6, 3, 128),
    (1, 4096, 4096, 4, 4, 256),
    (2, 1024, 1024, 4, 4, 64),
    (2, 1023, 1023, 4, 1, 128),
    (1, 384, 1024, 8, 2, 128),
]


@pytest.mark.skipif(not lab.on_gpu(), reason="takes minutes in the interpreter, and cuDNN needs a GPU")
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("shape", OTHERS, ids=str)
def test_no_less_exact_than_cudnn(shape, is_causal):
    """The errors of out and of each gradient are at most 1.5 times cuDNN's (of heads up to 128, which it has)."""
    batch, num_q, num_kv, heads, kv_heads, head_dim = shape
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = (
        (batch, num_q, heads, head_dim),
        *((batch, num_kv, kv_heads, head_dim),) * 2,
        (batch, num_q, heads, head_dim),
    )
    query, key, value, d_out = (jax.random.normal(*args, jnp.bfloat16) for args in zip(keys, shapes, strict=True))

    def results(fn, *args):
        out, vjp = jax.vjp(fn, *args)
        return out, *vjp(d_out.astype(out.dtype))

    exact = jax.jit(functools.partial(results, lambda *args: reference(*args, is_causal=is_causal)[0]))(
        *(x.astype(jnp.float32) for x in (query, key, value))
    )
    error = lambda got: [
        float(jnp.linalg.norm((x.astype(jnp.float32) - y).ravel()) / jnp.linalg.norm(y.ravel()))
        for x, y in zip(got, exact, strict=True)
    ]
    run = lambda fn: error(
        jax.jit(functools.partial(results, functools.partial(fn, is_causal=is_causal)))(query, key, value)
    )
    ours = run(attention)
    limit = [2**-8] * 4  # Two roundings to bfloat16.
    if head_dim <= 128 and num_q % 64 == 0:
        limit = [1.5 * e for e in run(functools.partial(jax.nn.dot_product_attention, implementation="cudnn"))]
    assert all(mine <= most for mine, most in zip(ours, limit, strict=True)), (ours, limit)

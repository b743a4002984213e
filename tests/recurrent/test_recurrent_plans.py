"""The default plans of the recurrent ops, lowered for an H200, once for each that makes another program.

Lengths, batches and heads make no other programs but by what is named here: a cut chunk, packed sequences, parts, two
columns a block, and how many heads share the inverse's block.
"""

import functools
import inspect
import math

import jax
import jax.numpy as jnp
import pytest

import cookbook
from cookbook import _host
from tests.lowering import H200, lowered

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
AVAL = jax.ShapeDtypeStruct


def delta(batch, length, key_heads, heads, key_dim, value_dim, *, dtype=BF16, numbers=F32):
    q, v = AVAL((batch, length, key_heads, key_dim), dtype), AVAL((batch, length, heads, value_dim), dtype)
    return q, q, v, *[AVAL(v.shape[:3], numbers)] * 2


def channels(batch, length, key_heads, heads, key_dim, value_dim, **how):
    q, k, v, _, beta = delta(batch, length, key_heads, heads, key_dim, value_dim, **how)
    return q, k, v, AVAL((*v.shape[:3], key_dim), how.get("numbers", F32)), beta


def space(batch, length, groups, heads, state_dim, size, *, dtype=BF16, numbers=F32):
    b, x = AVAL((batch, length, groups, state_dim), dtype), AVAL((batch, length, heads, size), dtype)
    return x, AVAL(x.shape[:3], numbers), AVAL((heads,), numbers), b, b


def call(op, args, *, num_seqs=None, grad=False, starts=False, **how):
    """(a function, its arguments) of `op`, which has final states; with `starts` from initial ones."""
    wide, narrow = (args[2], args[0]) if op in (cookbook.gated_delta_rule, cookbook.kda) else (args[0], args[-1])
    states = AVAL((num_seqs or wide.shape[0], *wide.shape[2:], narrow.shape[3]), F32)
    more = dict(initial_state=states) if starts else {}
    packed = dict(cu_seqlens=AVAL((num_seqs + 1,), jnp.int32)) if num_seqs else {}

    def fn(*arrays):
        arrays, named = arrays[: len(args)], dict(zip([*more, *packed], arrays[len(args) :], strict=True))
        cu = {name: named.pop(name) for name in packed}
        run = lambda arrays, named: op(*arrays, **named, **cu, **how, return_final_state=True)
        loss = lambda *given: sum(out.astype(F32).sum() for out in run(*given))
        return jax.grad(loss, (0, 1))(arrays, named) if grad else run(arrays, named)

    return fn, (*args, *more.values(), *packed.values())


GATED, KDA, SSD = cookbook.gated_delta_rule, cookbook.kda, cookbook.ssd
PLANS = {
    "gated delta rule, packed, two columns a block, four heads an inverse":
        (GATED, delta(1, 30_000, 1, 4, 128, 128, dtype=F16), dict(num_seqs=20, grad=True)),
    "gated delta rule, parts, three heads an inverse, x64":
        (GATED, delta(1, 16_001, 1, 3, 64, 64, numbers=BF16), dict(grad=True, starts=True, use_qk_l2norm=True)),
    "kda, packed, two columns a block":
        (KDA, channels(1, 30_000, 1, 4, 128, 128, dtype=F16), dict(num_seqs=20, grad=True, use_qk_l2norm=True)),
    "kda, x64": (KDA, channels(1, 1001, 1, 3, 64, 64, numbers=BF16), dict(grad=True, starts=True)),
    "kda, whole chunks": (KDA, channels(2, 4096, 2, 2, 64, 128), dict(grad=True)),
    "ssd, packed and parts, x64": (SSD, space(1, 9000, 1, 4, 64, 64), dict(num_seqs=5, grad=True)),
    "ssd, whole chunks": (SSD, space(2, 4096, 2, 80, 128, 64, numbers=BF16), dict(grad=True, starts=True)),
    "ssd, one token": (SSD, space(3, 1, 1, 1, 256, 192, dtype=F16), dict(grad=True)),
    "ssd, long chunks, packed": (SSD, space(1, 1000, 1, 3, 128, 64), dict(chunk_size=128, num_seqs=3)),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
def test_default_plans(name):
    op, args, how = PLANS[name]
    fn, avals = call(op, args, **how)
    with jax.enable_x64("x64" in name):
        lowered(fn, *avals)


def test_steps_of_every_size():
    """Each way in which the kernel of `ssd_step` cuts a state, and both sizes of heads of the other."""
    seen, step = set(), inspect.getmodule(cookbook.ssd_step)
    for state_dim in (64, *range(128, 1025, 128)):
        for size in range(8, 521, 8):
            plan = step.Plan(2, 1, size, state_dim, step.Config())
            if (key := (plan.rows, plan.width, state_dim if state_dim < 512 else 512)) in seen:
                continue
            seen.add(key)
            x, c = (BF16, F32) if len(seen) % 2 else (F32, F16)
            shapes = ((2, 2, size), x), ((2, 2), F32), ((2,), F16), ((2, 1, state_dim), c), ((2, 1, state_dim), c)
            lowered(cookbook.ssd_step, *[AVAL(*shape) for shape in shapes], AVAL((2, 2, size, state_dim), F32))
    for key_dim, value_dim in ((64, 128), (128, 64)):
        *tokens, _ = delta(3, 1, 1, 2, key_dim, value_dim, numbers=BF16), None
        tokens = [AVAL((x.shape[0], *x.shape[2:]), x.dtype) for x in tokens[0]]
        lowered(cookbook.gated_delta_rule_step, *tokens, AVAL((3, 2, value_dim, key_dim), F32))
        tokens[3] = AVAL((3, 2, key_dim), BF16)
        lowered(cookbook.kda_step, *tokens, AVAL((3, 2, value_dim, key_dim), F32))


MANY = 70_000  # More than the blocks that CUDA allows along an axis of a grid other than its last.


@pytest.mark.parametrize(
    "fn, args",
    [
        (cookbook.ssd_step, (*[AVAL((MANY, 2, 64), BF16), AVAL((MANY, 2), F32), AVAL((2,), F32)],
                             *[AVAL((MANY, 1, 64), BF16)] * 2, AVAL((MANY, 2, 64, 64), F32))),
        call(SSD, space(1, MANY, 1, 2, 64, 64), num_seqs=MANY, grad=True),
        call(GATED, delta(1, MANY, 1, 2, 64, 64), num_seqs=MANY, grad=True),
        call(GATED, delta(1, 64 * MANY + 1, 1, 1, 64, 64), grad=True),
        call(KDA, channels(1, MANY, 1, 2, 64, 64), num_seqs=MANY, grad=True),
    ],
    ids=["steps", "ssd", "gated delta rule", "chunks", "kda"],
)  # fmt: skip
def test_grids_of_many_blocks(monkeypatch, fn, args):
    """A GPU refuses others when a kernel is launched; lowering does not."""
    grids = []

    def stub(body, *, out_type, **how):
        grids.append(_host._launchable(**how)["grid"])
        return lambda *operands: jax.tree.map(lambda out: jnp.zeros(out.shape, out.dtype), out_type)

    monkeypatch.setattr(_host, "kernel", stub)
    jax.clear_caches()
    with _host.building_for(H200):
        jax.eval_shape(lambda *args: fn(*args), *args)
    jax.clear_caches()
    assert any(math.prod(grid) > MANY for grid in grids) and all(max(grid[:-1]) < 2**16 for grid in grids if grid[:-1])


@pytest.mark.parametrize("op", ["ssd", "gated_delta_rule"])
def test_tables_of_packed_sequences_under_promotion_of_ranks_that_raises(op):
    sequences = functools.partial(call, num_seqs=3, grad=True, starts=True)
    fn, args = sequences(*((SSD, space(1, 100, 1, 1, 64, 64)) if op == "ssd" else (GATED, delta(1, 100, 1, 1, 64, 64))))
    with _host.building_for(H200), jax.numpy_rank_promotion("raise"):
        jax.eval_shape(lambda *args: fn(*args), *args)

"""A bias of the logits, added to a copy of the family where its docstrings say that one goes."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lab
from cookbook import _host
from cookbook.attn.core import Problem
from tests.arrays import array

KEYS, SEEN, SLOPE, CAP = 192, 128, 0.03, 2.0

# A bias that falls from key to key, to -inf for all keys of the last block.
RECIPE = f"""
        from cookbook.attn.core import LOG2E
        key = plgpu.broadcasted_iota(jnp.int32, s.shape, 1, layout=plgpu.Layout.WGMMA) + FIRST
        b = jnp.where(key < {SEEN}, -{SLOPE} * key.astype(jnp.float32), -jnp.inf)
        s = s + b * LOG2E / per_row(scale_log2, s.shape)
"""
SCORED = "s, scale_log2 = self.problem.scored(s, self.logit_scale)\n"
MASK = """\
        if masked:
            s = jnp.where(self.span.mask(self.first_row, self.span.end - 1 - step), s, -jnp.inf)
"""
STEP = "        return softmax_step(s, m_i, l_i, scale_log2, {}, octaves)"
OF_PAGES = "        if masked:\n            token ="


def expected(q, k, v, cap):
    """(out, lse) of one sequence: q (N, H), k and v (KEYS, H)."""
    logits = q @ k.T.astype(q.dtype) * q.shape[1] ** -0.5
    logits = logits if cap is None else cap * jnp.tanh(logits / cap)
    logits += jnp.where(jnp.arange(KEYS) < SEEN, -SLOPE * jnp.arange(KEYS), -jnp.inf)
    return jax.nn.softmax(logits) @ v.astype(q.dtype), jax.nn.logsumexp(logits, axis=1)


def operands(dtype=jnp.bfloat16):
    rng = np.random.default_rng(0)
    q, *kv = (rng.normal(size=(size, 64)) for size in (8, KEYS, KEYS))
    return array(q, jnp.bfloat16), *(array(x, dtype) for x in kv)


def test_a_bias_of_attention(mutant_of):
    recipe = RECIPE.replace("FIRST", "(self.span.end - 1 - step) * s.shape[1]")
    old, new = SCORED + MASK + STEP.format("masked"), SCORED + recipe + MASK + STEP.format("True")
    changed = mutant_of("steps", old, new)("dense.attention")

    def attention(q, k, v):
        how = dict(logits_soft_cap=CAP, return_lse=True, config=changed.Config(block_kv=64))
        out, lse = changed.attention(q[None, :, None], k[None, :, None], v[None, :, None], **how)
        return out[0, :, 0], lse[0, :, 0]

    lab.check(attention, functools.partial(expected, cap=CAP), *operands())


@pytest.mark.parametrize("kernel, dtype, cap", [("kernel_fp8", jnp.float8_e4m3fn, None), ("kernel", jnp.bfloat16, CAP)])
def test_a_bias_of_paged_attention(mutant_of, kernel, dtype, cap):
    """With pages of 8 bits, and no soft cap, `scale_log2` is one number per row."""
    first = "first" if kernel == "kernel" else "first + half.keys.start"
    recipe = RECIPE.replace("FIRST", first).replace("-jnp.inf", "-1e4")
    changed = mutant_of(f"decode/{kernel}", OF_PAGES, recipe + OF_PAGES)("decode.paged_attention")
    tables, lens = jnp.arange(KEYS // 16, dtype=jnp.int32)[None], jnp.array([KEYS], jnp.int32)

    def decode(q, k, v):
        paged = (x.reshape(-1, 16, 1, 64) for x in (k, v))
        how = dict(logits_soft_cap=cap, return_lse=True, config=changed.Config(block_kv=64))
        out, lse = changed.paged_attention(q[None], *paged, tables, lens, **how)
        return out[0], lse[0]

    lab.check(decode, functools.partial(expected, cap=cap), *operands(dtype), tolerance=(None, 1e-6))


def test_a_bias_in_the_gradient_of_queries(mutant_of):
    """In the exponent: s is the tanh, which its derivative reads again."""
    key = "(plgpu.broadcasted_iota(jnp.int32, s.shape, 1, layout=plgpu.Layout.WGMMA) + block * plan.block)"
    b = f"jnp.where({key} < {SEEN}, -{SLOPE} * {key}.astype(jnp.float32), -jnp.inf)"
    old = "p = jnp.exp2(s * scale_log2 - spread(lse, 0, s.shape))"
    changed = mutant_of("backward/kernel", old, old.replace("- spread", f"+ {b} * {math.log2(math.e)} - spread"))
    problem = Problem(1, 1, 64, jnp.bfloat16, 64**-0.5, CAP, None, None, interpreted=True)
    as_one = lambda x: x[None, :, None]

    def dq(q, k, v, do):
        out, lse = expected(*(x.astype(jnp.float32) for x in (q, k, v)), cap=CAP)
        found = changed("backward.gradients").gradients(
            as_one(q), as_one(k), as_one(v), (), as_one(out.astype(q.dtype)), lse[None, None], as_one(do), 0.0,
            problem=problem, params=_host.compiler_params(approx_math=True),
        )  # fmt: skip
        return found[0][0, :, 0]

    q, k, v = operands()
    do = array(np.random.default_rng(1).normal(size=q.shape), q.dtype)
    reference = lambda q, k, v, do: jax.vjp(lambda q: expected(q, k, v, CAP)[0], q)[1](do)[0]
    lab.check(dq, reference, q, k, v, do, tolerance=2**-7, gpu=None)

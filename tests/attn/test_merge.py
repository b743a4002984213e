"""merge_attention takes the results of every op: halves of the keys, computed by any two, merge into the whole."""

import functools
import itertools

import jax.numpy as jnp
import numpy as np
import pytest

import lab
from cookbook import attention, merge_attention, paged_attention, ragged_paged_attention, varlen_attention
from tests.arrays import array

HALF, PAGE, NUM_SEQS, HEADS, KV_HEADS, HEAD_DIM = 48, 16, 3, 4, 2, 64  # Tokens of a half; one query a sequence.


def operands():
    rng = np.random.default_rng(0)
    shapes = (NUM_SEQS, HEADS, HEAD_DIM), *((NUM_SEQS, 2 * HALF, KV_HEADS, HEAD_DIM),) * 2
    return [array(rng.normal(size=shape), jnp.bfloat16) for shape in shapes]


def starts(length):
    return jnp.arange(NUM_SEQS + 1, dtype=jnp.int32) * length


def dense(q, k, v):
    out, lse = attention(q[:, None], k, v, return_lse=True)
    return out[:, 0], lse[:, 0]


def packed(q, k, v):
    flat = (x.reshape(-1, KV_HEADS, HEAD_DIM) for x in (k, v))
    return varlen_attention(q, *flat, starts(1), starts(k.shape[1]), return_lse=True)


def in_pages(op):
    def call(q, k, v):
        num_pages = k.shape[1] // PAGE
        caches = (x.reshape(-1, PAGE, KV_HEADS, HEAD_DIM) for x in (k, v))
        tables = jnp.arange(NUM_SEQS * num_pages, dtype=jnp.int32).reshape(NUM_SEQS, num_pages)
        lens = jnp.full((NUM_SEQS,), k.shape[1], jnp.int32)
        return op(q, *caches, tables, lens, return_lse=True)

    return call


def ragged(q, k_pages, v_pages, tables, lens, **how):
    return ragged_paged_attention(q, k_pages, v_pages, tables, lens, starts(1), **how)


OPS = dict(dense=dense, packed=packed, paged=in_pages(paged_attention), ragged=in_pages(ragged))


@functools.cache
def result(name: str, part: int):
    """That of one op over a half of the keys; the whole for part 2."""
    q, *kv = operands()
    keys = slice(None) if part == 2 else slice(part * HALF, (part + 1) * HALF)
    return lab.run(OPS[name], q, *(x[:, keys] for x in kv))


@pytest.mark.parametrize("a, b", list(itertools.product(OPS, OPS)))
def test_parts_of_every_op_merge_with_those_of_every_other(a, b):
    out, lse = merge_attention(*result(a, 0), *result(b, 1))
    assert out.shape == (NUM_SEQS, HEADS, HEAD_DIM) and lse.shape == out.shape[:-1]
    whole = result("dense", 2)
    # A unit in the last place of bfloat16, in which the halves are given.
    np.testing.assert_allclose(out.astype(jnp.float32), whole[0].astype(jnp.float32), atol=2**-8, rtol=2**-7)
    np.testing.assert_allclose(lse, whole[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", OPS)
def test_lse_has_the_shape_of_out_without_its_last_axis(name):
    out, lse = result(name, 2)
    assert lse.shape == out.shape[:-1] and lse.dtype == jnp.float32


@pytest.mark.parametrize("name", OPS)
def test_nan_is_not_taken_for_no_keys(name):
    """A result of NaN has an lse of NaN, so that merging keeps it. An lse of -inf would drop it."""
    q, k, v = operands()
    out, lse = lab.run(OPS[name], q.at[1, 2].set(jnp.nan), k[:, :HALF], v[:, :HALF])
    is_nan = np.zeros(lse.shape, bool)
    is_nan[1, 2] = True
    np.testing.assert_array_equal(jnp.isnan(lse), is_nan)
    np.testing.assert_array_equal(jnp.isnan(out), np.broadcast_to(is_nan[..., None], out.shape))
    merged = merge_attention(out, lse, *result("dense", 1))
    for x, wanted in zip(merged, (out, lse), strict=True):
        np.testing.assert_array_equal(jnp.isnan(x), jnp.isnan(wanted))

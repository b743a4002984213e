"""The default plans of all sizes lower for an H200: the interpreter accepts layouts that the compiler refuses."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cookbook
import lab
from cookbook.attn.checks import PAGE_SIZES
from cookbook.attn.core import HEAD_DIMS, SERVED_HEAD_DIMS
from fuzz.cases import Draw
from tests.lowering import lowered

BF16, F16, F32, E4M3 = jnp.bfloat16, jnp.float16, jnp.float32, jnp.float8_e4m3fn
of = jax.ShapeDtypeStruct


def ints(*shape):
    return of(shape, jnp.int32)


def draw_heads(draw: Draw) -> tuple[int, int]:
    """Query heads and key heads: up to more of a group than a warpgroup has rows."""
    kv_heads = draw.choice(1, 1, 2, 3, 8)
    return kv_heads * draw.choice(1, 1, 2, 3, 4, 5, 7, 8, 12, 16, 64, 71, 130), kv_heads


def draw_options(draw: Draw) -> dict:
    window = draw.choice(None, None, draw.number(0, 3000), (draw.number(0, 300), draw.number(0, 300)),
                         (None, draw.number(0, 50)), (draw.number(0, 5000), None), (0, 0))  # fmt: skip
    return dict(
        scale=draw.choice(None, 0.3), logits_soft_cap=draw.choice(None, None, 30.0), local_window_size=window,
        return_lse=draw.sometimes(),
    )  # fmt: skip


def with_sinks(draw: Draw, heads: int, arrays: dict) -> dict:
    return arrays | (dict(sinks=of((heads,), F32)) if draw.sometimes(0.25) else {})


def draw_attention(draw: Draw, head_dim: int):
    """Both passes of every fourth size of heads, the forward pass of the others."""
    (heads, kv_heads), dtype, batch = draw_heads(draw), draw.choice(BF16, F16), draw.choice(1, 1, 2, 5)
    num_q, num_kv = draw.size(5000, zero=0), draw.size(5000, zero=0)
    query, key = of((batch, num_q, heads, head_dim), dtype), of((batch, num_kv, kv_heads, head_dim), dtype)
    arrays = with_sinks(draw, heads, dict(query=query, key=key, value=key))
    if draw.sometimes(0.3):
        arrays |= dict(segment_ids=ints(batch, num_q), kv_segment_ids=ints(batch, num_kv))
    how = draw_options(draw) | dict(is_causal=draw.sometimes(), deterministic=draw.choice(None, True, False))
    if head_dim % 32 != 24:
        return cookbook.attention, arrays, how

    def gradients(query, key, value, **given):
        loss = lambda *args: sum(x.astype(F32).sum() for x in jax.tree.leaves(cookbook.attention(*args, **given)))
        return jax.grad(loss, (0, 1, 2))(query, key, value)

    return gradients, arrays, how


def draw_fp8(draw: Draw, head_dim: int):
    (heads, kv_heads), batch = draw_heads(draw), draw.number(1, 3)
    q, kv = (of((batch, draw.size(5000, zero=0), n, head_dim), E4M3) for n in (heads, kv_heads))
    descale = of(draw.choice((), (batch, kv_heads)), F32)
    arrays = dict(q=q, k=kv, v=kv) | {f"{name}_descale": descale for name in "qkv"}
    return cookbook.attention_fp8, arrays, draw_options(draw) | dict(is_causal=draw.sometimes())


def draw_varlen(draw: Draw, head_dim: int):
    (heads, kv_heads), dtype, num_seqs = draw_heads(draw), draw.choice(BF16, F16), draw.size(200, zero=0)
    q, kv = (of((draw.size(9000, zero=0), n, head_dim), dtype) for n in (heads, kv_heads))
    starts = ints(num_seqs + 1)
    arrays = with_sinks(draw, heads, dict(q=q, k=kv, v=kv, cu_seqlens_q=starts, cu_seqlens_kv=starts))
    return cookbook.varlen_attention, arrays, draw_options(draw) | dict(is_causal=draw.sometimes())


def draw_cache(draw: Draw, heads: int, head_dim: int, dtype) -> dict:
    """Pages of `dtype`, or of 8 bits."""
    narrow = dtype != F16 and head_dim % 64 == 0 and draw.sometimes()
    shape = draw.size(3000, zero=0), draw.choice(*PAGE_SIZES), heads, head_dim
    pages = dict.fromkeys(("k_pages", "v_pages"), of(shape, E4M3 if narrow else dtype))
    return pages | (dict(k_scale=of((heads,), F32), v_scale=of((), F32)) if narrow and draw.sometimes() else {})


def draw_paged(draw: Draw, head_dim: int, is_ragged: bool = False):
    (heads, kv_heads), num_seqs = draw_heads(draw), draw.size(300, zero=0)
    dtype = BF16 if head_dim == 64 else draw.choice(BF16, F16)
    cache = draw_cache(draw, kv_heads, head_dim, dtype if head_dim in HEAD_DIMS else F16)
    dtype = BF16 if cache["k_pages"].dtype == E4M3 else cache["k_pages"].dtype
    arrays = with_sinks(draw, heads, cache) | dict(block_tables=ints(num_seqs, draw.size(300)), kv_lens=ints(num_seqs))
    rows = draw.size(5000, zero=0) if is_ragged else num_seqs
    arrays["q"] = of((rows, heads, head_dim), dtype)
    if is_ragged:
        return cookbook.ragged_paged_attention, arrays | dict(cu_seqlens_q=ints(num_seqs + 1)), draw_options(draw)
    return cookbook.paged_attention, arrays, draw_options(draw)


def draw_ragged(draw: Draw, head_dim: int):
    return draw_paged(draw, head_dim, is_ragged=True)


def draw_write(draw: Draw, head_dim: int):
    tokens, heads, dtype = draw.size(5000, zero=0), draw.number(1, 40), draw.choice(BF16, F16, F32)
    new = of((tokens, heads, head_dim), dtype)
    cache = draw_cache(draw, heads, head_dim, dtype)
    return cookbook.write_kv, dict(k_new=new, v_new=new, **cache, slot_mapping=ints(tokens)), {}


def draw_rope(draw: Draw, head_dim: int):
    tokens, heads, dtype = draw.size(5000, zero=0), draw.choice(1, 2, 3, 4, 5, 7, 8, 16), draw.choice(BF16, F16, F32)
    qkv = of((tokens, draw.number(1, 64) + 2 * heads, head_dim), dtype)
    angles = dict.fromkeys(("cos", "sin"), of((tokens, head_dim // 2), F32))
    norms = dict.fromkeys(("q_norm", "k_norm"), of((head_dim,), draw.choice(BF16, F32))) if draw.sometimes() else {}
    cache = draw_cache(draw, heads, head_dim, dtype)
    return cookbook.rope_write_kv, dict(qkv=qkv, **angles, **norms, **cache, slot_mapping=ints(tokens)), {}


SIZES = [
    *((draw_attention, head_dim) for head_dim in range(8, 257, 8)),
    *((draw, head_dim) for draw in (draw_varlen, draw_paged, draw_ragged) for head_dim in SERVED_HEAD_DIMS),
    *((draw, head_dim) for draw in (draw_fp8, draw_rope) for head_dim in HEAD_DIMS),
    *((draw_write, head_dim) for head_dim in (8, 24, 64, 136, 512)),
]


@pytest.mark.parametrize("draw, head_dim", SIZES, ids=lambda x: getattr(x, "__name__", str(x)))
def test_default_plans_lower(draw, head_dim):
    """Each size of heads, with all else drawn at random."""
    fn, arrays, how = draw(Draw(np.random.default_rng(head_dim)), head_dim)
    names = sorted(arrays)
    lowered(lambda *args: fn(**dict(zip(names, args, strict=True)), **how), *(arrays[name] for name in names))


@pytest.mark.parametrize("name", ["write_kv", "rope_write_kv"])
def test_slots_of_caches_beyond_32_bit_offsets(name):
    """A cache of 2**33 values: a slot's place is its number times its values in 64 bits."""
    cache, new, slots = of((2**19, 16, 8, 128), BF16), of((9, 8, 128), BF16), ints(9)
    args = new, new, cache, cache, slots
    if name == "rope_write_kv":
        args = of((9, 24, 128), BF16), *[of((9, 64), F32)] * 2, cache, cache, slots
    compiled = lab.compile_for("h200", getattr(cookbook, name), *args)
    assert not re.search(r"(shl\.b32|mul\.lo\.s32).*, (10|1024);", compiled.ptx)
    assert re.search(r"mul\.wide\.[us]32.*, 2048;|shl\.b64.*, 1[01];", compiled.ptx)

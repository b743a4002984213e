"""Attention of every kind, and the cache that it reads."""

import math

import jax
import numpy as np

import cookbook

from .cases import Draw, Op, Values
from .gemm import HALVES

DIMS = (64, 128, 256)
SERVED_DIMS = (*DIMS, 80, 96, 192)
LARGE = (2**31 - 1, 2**31, [2**40, 3])  # Windows that show all, or all on one side.
# By the dtype that weights are rounded to: the share that a weight may be off by, and the share that a sum of products
# may be off by. Tensor cores keep fewer bits of sums of 8-bit floats.
ROUNDING = {"bfloat16": (2.0**-7, 1e-5), "float16": (2.0**-10, 1e-5), "float8_e4m3fn": (2.0**-4, 2.0**-11)}
LEAST = {"float8_e4m3fn": 2.0**-18, "float16": 2.0**-25}  # Weights of these dtypes are multiples of twice this number.


def attend(q, k, v, seen, sink, scale, cap, dtype, dtype_k):
    """(out, slack), (lse, slack) of queries (T, H), keys and values (S, H), seen (T, S). A sink is one more logit.

    Products with keys of `dtype_k` are as exact as the tensor cores' of that dtype. Weights of queries of 16 bits are
    float16 where values have 8."""
    products = scale * (q @ k.T)
    logits = products if cap is None else cap * np.tanh(products / cap)
    logits = np.where(seen, logits, -np.inf)
    top = logits.max(1, keepdims=True, initial=sink)
    at = np.where(np.isfinite(top), top, 0)
    p = np.exp(logits - at)
    total = p.sum(1, keepdims=True) + np.exp(sink - at)
    p = np.divide(p, total, out=np.zeros_like(p), where=total > 0)
    values = np.where(seen.any(0)[:, None], v, 0.0)  # NaN in values that no query sees counts for nothing.
    size = np.where(seen, scale * (np.abs(q) @ np.abs(k.T)), 0).max(1, keepdims=True, initial=0)
    of_weights, of_sums = ROUNDING[dtype][0], ROUNDING[dtype_k][1]
    off = of_sums * size + (0 if cap is None else cap * 2.0**-10)
    error = (of_weights + np.expm1(np.minimum(2 * off, 10))) * (p @ np.abs(values))
    weights = "float16" if dtype != dtype_k else dtype
    error += LEAST.get(weights, 0.0) * (seen @ np.abs(values))
    lse = (top + np.log(np.where(total > 0, total, 1)))[:, 0]
    return (p @ values, error), (lse, 1e-4 + 2 * off[:, 0] + 1e-6 * np.abs(np.where(np.isfinite(lse), lse, 0)))


def all_heads(case, q, k, v, seen, sinks):
    """The same of (T, N, H), (S, K, H), (N,): query head n reads key head n // (N // K)."""
    group = q.shape[1] // k.shape[1]
    scale = case["scale"] if case["scale"] is not None else 1 / math.sqrt(q.shape[2])
    how = case["cap"], case["dtype"], cache_dtype(case)
    heads = [
        attend(q[:, n], k[:, n // group], v[:, n // group], seen, sink, scale, *how)
        for n, sink in enumerate(np.full(q.shape[1], -np.inf) if sinks is None else sinks)
    ]
    return [tuple(np.stack([head[i][j] for head in heads], 1) for j in (0, 1)) for i in (0, 1)]


def visible(case, queries, keys) -> np.ndarray:
    """Which of the keys at these positions each query at these positions sees."""
    distance, window = keys[None, :] - queries[:, None], case["window"]
    left, right = window if isinstance(window, list) else (window, window)
    seen = np.ones(distance.shape, bool)
    if left is not None:
        seen &= distance >= -left
    if right is not None and not case["is_causal"]:
        seen &= distance <= right
    return seen & (distance <= 0) if case["is_causal"] else seen


def draw_options(draw: Draw, *windows) -> dict:
    return dict(
        dtype=draw.choice(*HALVES), scale=draw.choice(None, None, 0.3, 1.0), cap=draw.choice(None, None, 30.0),
        window=draw.choice(None, None, *windows, draw.choice(*LARGE)), lse=draw.sometimes(),
        values=draw.choice("normal", "normal", "zeros"), sinks=draw.choice(None, None, "normal", "-inf"),
    )  # fmt: skip


def with_sinks(case: dict, values: Values, given: dict) -> dict:
    return given | ({} if case["sinks"] is None else dict(sinks=values((case["heads"],), kind=case["sinks"])))


def how(case, *names) -> dict:
    given = dict(scale=case["scale"], logits_soft_cap=case["cap"], return_lse=case["lse"])
    window = case["window"]
    given["local_window_size"] = tuple(window) if isinstance(window, list) else window
    return given | {name: case[name] for name in names}


def draw_heads(draw: Draw) -> dict:
    kv_heads, group = draw.number(1, 4 if draw.large else 2), draw.choice(1, 1, 2, 3, draw.choice(4, 8, 16))
    if not draw.large and kv_heads > 1:
        group = min(group, 2)
    return dict(kv_heads=kv_heads, heads=kv_heads * group)


def outputs(case, out):
    return out if case["lse"] else (out,)


# One shape ------------------------------------------------------------------------------------------------------------


def draw_attention(draw: Draw) -> dict:
    case = draw_options(draw, 0, 20, [7, 0], [None, 5], [40, None]) | draw_heads(draw) | dict(
        batch=draw.number(1, 2), q=draw.size(90, large=16), kv=draw.size(150, large=10),
        dim=draw.choice(*DIMS, draw.size(256, 8, 0, 1)), is_causal=draw.sometimes(), segments=draw.choice(0, 0, 3),
    )  # fmt: skip
    case["grad"] = case["values"] == "normal" and draw.sometimes(0.15)
    case["deterministic"] = draw.choice(None, True, False)  # Which kernels have the gradients.
    return case


def attention_arrays(case: dict, values: Values) -> dict:
    (b, t, s, h), dtype = (case[name] for name in ("batch", "q", "kv", "dim")), case["dtype"]
    key = values((b, s, case["kv_heads"], h), dtype, case["values"])
    given = dict(query=values((b, t, case["heads"], h), dtype), key=key, value=values(key.shape, dtype))
    if case["segments"]:
        ids = lambda n: np.sort(values.rng.integers(0, case["segments"], (b, n)), 1).astype(np.int32)
        given |= dict(segment_ids=ids(t), kv_segment_ids=ids(s))
    return with_sinks(case, values, given)


def call_attention(case, query, key, value, **arrays):
    return outputs(case, cookbook.attention(query, key, value, **arrays, **how(case, "is_causal", "deterministic")))


def attention_reference(case, query, key, value, segment_ids=None, kv_segment_ids=None, sinks=None):
    seen = visible(case, np.arange(query.shape[1]), np.arange(key.shape[1]))
    batches = []
    for i in range(len(query)):
        same = True if segment_ids is None else segment_ids[i][:, None] == kv_segment_ids[i][None, :]
        batches.append(all_heads(case, query[i], key[i], value[i], seen & same, sinks))
    results = [tuple(np.stack([batch[i][j] for batch in batches]) for j in (0, 1)) for i in (0, 1)]
    return results if case["lse"] else results[:1]


def draw_fp8(draw: Draw) -> dict:
    case = draw_attention(draw)
    for name in ("sinks", "segments", "grad", "deterministic", "values"):
        del case[name]
    return case | dict(dim=draw.choice(*DIMS), dtype="float8_e4m3fn", out_dtype=draw.choice(*HALVES),
                       descales=draw.choice("one", "each"))  # fmt: skip


def fp8_arrays(case: dict, values: Values) -> dict:
    (b, t, s, h), dtype = (case[name] for name in ("batch", "q", "kv", "dim")), case["dtype"]
    kv = b, s, case["kv_heads"], h
    shape = () if case["descales"] == "one" else kv[::2]
    descales = {f"{name}_descale": values.rng.uniform(0.25, 2, shape).astype(np.float32) for name in "qkv"}
    return dict(q=values((b, t, case["heads"], h), dtype), k=values(kv, dtype), v=values(kv, dtype), **descales)


def call_fp8(case, **arrays):
    return outputs(case, cookbook.attention_fp8(**arrays, **how(case, "is_causal", "out_dtype")))


def fp8_reference(case, q, k, v, **descales):
    def times(name, x):
        each = np.broadcast_to(descales[f"{name}_descale"], (x.shape[0], case["kv_heads"]))
        return x * np.repeat(each, x.shape[2] // case["kv_heads"], axis=1)[:, None, :, None]

    return attention_reference(case, times("q", q), times("k", k), times("v", v))


# Packed ---------------------------------------------------------------------------------------------------------------


def starts(draw: Draw, rows: int, num_seqs: int) -> list[int]:
    """Where sequences begin: some are empty, some rows may belong to none, and some starts may go too far or back."""
    cuts = np.sort(draw.rng.integers(0, rows + 1, num_seqs))
    if draw.sometimes(0.4):
        cuts[-1] = rows
    if draw.sometimes(0.2):
        cuts[draw.number(0, num_seqs - 1)] = draw.number(-rows, 3 * rows)
    return [0, *cuts.tolist()]


def whole(cu, rows: int) -> np.ndarray:
    """Starts as the ops read them: cut at the rows, and never back."""
    return np.maximum.accumulate(np.clip(cu, 0, rows))


def draw_varlen(draw: Draw) -> dict:
    q, kv, num_seqs = draw.size(90, large=16), draw.size(150, large=10), draw.number(1, 4)
    return draw_options(draw, 0, 20, [7, 0], [None, 5]) | draw_heads(draw) | dict(
        q=q, kv=kv, dim=draw.choice(*SERVED_DIMS), is_causal=draw.sometimes(), cu_q=starts(draw, q, num_seqs),
        cu_kv=starts(draw, kv, num_seqs), unowned=draw.choice("normal", "nan"),
    )  # fmt: skip


def varlen_arrays(case: dict, values: Values) -> dict:
    dtype, kv_shape = case["dtype"], (case["kv"], case["kv_heads"], case["dim"])
    k, v = values(kv_shape, dtype, case["values"]), values(kv_shape, dtype)
    if case["unowned"] == "nan":
        end = whole(case["cu_kv"], case["kv"])[-1]
        k[end:], v[end:] = math.nan, math.nan
    cu_q, cu_kv = (np.asarray(case[name], np.int32) for name in ("cu_q", "cu_kv"))
    q = values((case["q"], case["heads"], case["dim"]), dtype)
    return with_sinks(case, values, dict(q=q, k=k, v=v, cu_seqlens_q=cu_q, cu_seqlens_kv=cu_kv))


def packed(case, q, starts_q, keys_of, sinks):
    """Results of sequences; `keys_of(i)` are the keys and values of one. Rows of none are zeros: they see no key."""
    out, lse = np.zeros_like(q), np.zeros(q.shape[:2])
    lse[:] = -np.inf if sinks is None else sinks
    errors = np.zeros_like(out), np.zeros_like(lse)
    for i, (begin, end) in enumerate(zip(starts_q, starts_q[1:], strict=False)):
        k, v = keys_of(i)
        mine = slice(begin, end)
        seen = visible(case, np.arange(len(k) - (end - begin), len(k)), np.arange(len(k)))
        (out[mine], errors[0][mine]), (lse[mine], errors[1][mine]) = all_heads(case, q[mine], k, v, seen, sinks)
    return [(out, errors[0]), (lse, errors[1])][: 1 + case["lse"]]


def call_varlen(case, **arrays):
    return outputs(case, cookbook.varlen_attention(**arrays, **how(case, "is_causal")))


def varlen_reference(case, q, k, v, cu_seqlens_q, cu_seqlens_kv, sinks=None):
    begin = whole(cu_seqlens_kv, len(k))
    return packed(case, q, whole(cu_seqlens_q, len(q)), lambda i: [x[begin[i] : begin[i + 1]] for x in (k, v)], sinks)


# Pages ----------------------------------------------------------------------------------------------------------------


def draw_pages(draw: Draw) -> dict:
    """A cache; some ids of pages are hostile, and so are some lengths, where `hostile` says so."""
    size, num_seqs, num_pages = draw.choice(16, 16, 32, 64, 128), draw.number(1, 4), draw.number(1, 12)
    per_seq = draw.number(1, max(1, (2000 if draw.large else 150) // size))
    lens = draw.rng.integers(0, per_seq * size + 1, num_seqs)
    if draw.sometimes(0.2):
        lens[draw.number(0, num_seqs - 1)] = draw.choice(0, -3, per_seq * size + draw.number(1, 500), 2**31 - 1)
    cache = draw_cache(draw)
    return draw_options(draw, 0, 20, [9, 3]) | draw_heads(draw) | dict(
        dim=draw.choice(*(DIMS if cache else SERVED_DIMS)), page_size=size, num_pages=num_pages, pages_per_seq=per_seq,
        kv_lens=lens.tolist(), ids=draw.choice("valid", "valid", "hostile"), is_causal=True,
        unowned=draw.choice("normal", "nan", "nan"),
    ) | cache  # fmt: skip


def draw_cache(draw: Draw) -> dict:
    """Pages of the operands' dtype; or of 8-bit floats, with scales, beside queries of bfloat16."""
    scales = draw.choice(None, None, "none", "one", "each")
    return {} if scales is None else dict(dtype="bfloat16", scales=scales)


def cache_dtype(case) -> str:
    return "float8_e4m3fn" if "scales" in case else case["dtype"]


def with_scales(case, values: Values, given: dict) -> dict:
    shapes = dict(one=(), each=(case.get("kv_heads", case["heads"]),))
    if case.get("scales") not in shapes:
        return given
    scale = lambda: values.rng.uniform(0.02, 2, shapes[case["scales"]]).astype(np.float32)
    return given | dict(k_scale=scale(), v_scale=scale())


def lengths(case) -> np.ndarray:
    return np.clip(case["kv_lens"], 0, case["pages_per_seq"] * case["page_size"])


def page_arrays(case: dict, values: Values) -> dict:
    """Pages that no sequence reads, and rows of its last page beyond its length, hold NaN if `unowned` says so."""
    pages, size = case["num_pages"], case["page_size"]
    shape, tables = (pages, size, case["kv_heads"], case["dim"]), (len(case["kv_lens"]), case["pages_per_seq"])
    k, v = values(shape, cache_dtype(case), case["values"]), values(shape, cache_dtype(case))
    ids = values.rng.integers(0, pages, tables)
    if case["ids"] == "hostile":
        wrong = values.rng.random(tables) < 0.3
        ids = np.where(wrong, values.rng.choice([-1, pages, pages + 7, -(2**31), 2**31 - 1], tables), ids)
    owned = np.zeros((pages, size), bool)
    for row, length in zip(ids, lengths(case), strict=True):
        for j, page in enumerate(row):
            if 0 <= page < pages:
                owned[page, : max(0, length - j * size)] = True
    if case["unowned"] == "nan":
        k[~owned], v[~owned] = math.nan, math.nan
    lens = np.asarray(case["kv_lens"], np.int32)
    return with_scales(case, values, dict(k_pages=k, v_pages=v, block_tables=ids.astype(np.int32), kv_lens=lens))


def gathered(case, k_pages, v_pages, block_tables, k_scale=1.0, v_scale=1.0):
    """Keys and values of each sequence. A page that is not there is zeros."""

    k_pages, v_pages = k_pages * np.reshape(k_scale, (-1, 1)), v_pages * np.reshape(v_scale, (-1, 1))

    def rows(pages, table, length):
        exists = (table >= 0) & (table < len(pages))
        found = np.where(exists[:, None, None, None], pages[np.where(exists, table, 0)], 0.0)
        return found.reshape(-1, *pages.shape[2:])[:length]

    pairs = zip(block_tables, lengths(case), strict=True)
    return [[rows(pages, *pair) for pages in (k_pages, v_pages)] for pair in pairs]


def paged_arrays(case: dict, values: Values) -> dict:
    q = values((len(case["kv_lens"]), case["heads"], case["dim"]), case["dtype"])
    return with_sinks(case, values, dict(q=q) | page_arrays(case, values))


def decode_case(case) -> dict:
    """Its window counts to the left alone."""
    return case | dict(window=case["window"][0] if isinstance(case["window"], list) else case["window"])


def call_paged(case, **arrays):
    return outputs(case, cookbook.paged_attention(**arrays, **how(case)))


def paged_reference(case, q, k_pages, v_pages, block_tables, kv_lens, sinks=None, **scales):
    keys = gathered(case, k_pages, v_pages, block_tables, **scales)
    return packed(decode_case(case), q, np.arange(len(q) + 1), keys.__getitem__, sinks)


def draw_ragged(draw: Draw) -> dict:
    case = draw_pages(draw)
    rows = draw.size(60, large=16)
    return case | dict(q=rows, cu_q=starts(draw, rows, len(case["kv_lens"])))


def ragged_arrays(case: dict, values: Values) -> dict:
    q = values((case["q"], case["heads"], case["dim"]), case["dtype"])
    starts_q = np.asarray(case["cu_q"], np.int32)
    return with_sinks(case, values, dict(q=q, cu_seqlens_q=starts_q) | page_arrays(case, values))


def call_ragged(case, **arrays):
    return outputs(case, cookbook.ragged_paged_attention(**arrays, **how(case)))


def ragged_reference(case, q, k_pages, v_pages, block_tables, kv_lens, cu_seqlens_q, sinks=None, **scales):
    keys = gathered(case, k_pages, v_pages, block_tables, **scales)
    return packed(decode_case(case), q, whole(cu_seqlens_q, len(q)), keys.__getitem__, sinks)


# The cache, and merged results ----------------------------------------------------------------------------------------


def draw_write(draw: Draw) -> dict:
    return dict(
        tokens=draw.size(80), pages=draw.number(1, 9), page_size=draw.choice(1, 7, 16, 32), heads=draw.number(1, 8),
        dim=draw.size(128, 8, 0, 1), dtype=draw.choice("float32", *HALVES), hostile=draw.sometimes(),
        values=draw.choice("normal", "nan"),
    ) | draw_cache(draw)  # fmt: skip


def slots(case: dict, values: Values) -> np.ndarray:
    """Distinct places, and some that are padding or beyond the cache."""
    end = case["pages"] * case["page_size"]
    found = values.rng.permutation(max(end, case["tokens"]))[: case["tokens"]]
    found = np.where(found < end, found, -1)
    if case["hostile"]:
        wrong = values.rng.random(len(found)) < 0.3
        found = np.where(wrong, values.rng.choice([-1, end, end + 5, -(2**31), 2**31 - 1], len(found)), found)
    return found.astype(np.int32)


def caches(case: dict, values: Values) -> dict:
    shape = case["pages"], case["page_size"], case["heads"], case["dim"]
    found = {name: values(shape, cache_dtype(case), case["values"]) for name in ("k_pages", "v_pages")}
    return with_scales(case, values, found)


def written(new, pages, slot_mapping):
    """Pages with the rows of `new` at their slots."""
    flat = pages.reshape(-1, *pages.shape[2:]).copy()
    there = (slot_mapping >= 0) & (slot_mapping < len(flat))
    flat[slot_mapping[there]] = new[there]
    return flat.reshape(pages.shape)


def write_arrays(case: dict, values: Values) -> dict:
    new = case["tokens"], case["heads"], case["dim"]
    k_new, v_new = (values(new, case["dtype"], case["values"]) for _ in "kv")
    return dict(k_new=k_new, v_new=v_new, **caches(case, values), slot_mapping=slots(case, values))


def as_in_cache(case, new, off=0.0, scale=1.0):
    """Rows as the cache has them, and by how much they may be off, which were off by `off`: in 8 bits by a rounding,
    which `compare` allows for, and by half of the smallest number."""
    if "scales" not in case:
        return new, off
    scale = np.reshape(scale, (-1, 1))
    return np.clip(new / scale, -448, 448), 2.0**-10 + 1.2 * off / scale + 1e-6 * np.abs(new / scale)


def write_reference(case, k_new, v_new, k_pages, v_pages, slot_mapping, k_scale=1.0, v_scale=1.0):
    results = []
    for new, pages, scale in ((k_new, k_pages, k_scale), (v_new, v_pages, v_scale)):
        new, off = as_in_cache(case, new, scale=scale)
        off = written(off + np.zeros_like(new), np.zeros_like(pages), slot_mapping)
        results.append((written(new, pages, slot_mapping), off))
    return results


def draw_rope(draw: Draw) -> dict:
    return draw_write(draw) | dict(
        dim=draw.choice(*DIMS), queries=draw.number(1, 16 if draw.large else 6), heads=draw.number(1, 4),
        norm=draw.choice(None, 1e-6, 1e-5),
    )  # fmt: skip


def rope_arrays(case: dict, values: Values) -> dict:
    tokens, dim = case["tokens"], case["dim"]
    qkv = values((tokens, case["queries"] + 2 * case["heads"], dim), case["dtype"], case["values"])
    angles = values.rng.uniform(0, 100, (tokens, dim // 2))
    cos, sin = (part(angles).astype(np.float32) for part in (np.cos, np.sin))
    given = dict(qkv=qkv, cos=cos, sin=sin, **caches(case, values), slot_mapping=slots(case, values))
    if case["norm"]:
        given |= dict(q_norm=values((dim,), case["dtype"]), k_norm=values((dim,), case["dtype"]))
    return given


def call_rope(case, **arrays):
    return jax.tree.leaves(cookbook.rope_write_kv(**arrays, **(dict(eps=case["norm"]) if case["norm"] else {})))


def rope_reference(
    case, qkv, cos, sin, k_pages, v_pages, slot_mapping, q_norm=None, k_norm=None, k_scale=1.0, v_scale=1.0
):
    def rotated(x, norm):
        if norm is not None:
            x = x / np.sqrt(np.mean(x * x, -1, keepdims=True) + case["norm"]) * norm
        (a, b), (c, s) = np.split(x, 2, -1), (cos[:, None], sin[:, None])
        off = 1e-5 * (np.abs(a) + np.abs(b))
        return np.concatenate([a * c - b * s, b * c + a * s], -1), np.concatenate([off, off], -1)

    n, h = case["queries"], case["heads"]
    (q, q_off), (k, k_off) = rotated(qkv[:, :n], q_norm), rotated(qkv[:, n : n + h], k_norm)
    results = [(q, q_off)]
    news = as_in_cache(case, k, k_off, k_scale), as_in_cache(case, qkv[:, n + h :], 0.0, v_scale)
    for (new, off), pages in zip(news, (k_pages, v_pages), strict=True):
        off = written(off + np.zeros_like(new), np.zeros_like(pages), slot_mapping)
        results.append((written(new, pages, slot_mapping), off))
    return results


def draw_merge(draw: Draw) -> dict:
    return dict(
        shape=[draw.size(20), draw.number(1, 4)], dim=draw.number(1, 64), dtype=draw.choice("float32", *HALVES),
        of_nothing=draw.choice("0", "nan"),
    )  # fmt: skip


def merge_arrays(case: dict, values: Values) -> dict:
    out = lambda: values((*case["shape"], case["dim"]), case["dtype"])
    lse = lambda: values(case["shape"], "float32", "-inf rows", 10.0)
    given = dict(out_a=out(), lse_a=lse(), out_b=out(), lse_b=lse())
    for part in "ab":
        given[f"out_{part}"][np.isneginf(given[f"lse_{part}"])] = float(case["of_nothing"])
    return given


def merge_reference(case, out_a, lse_a, out_b, lse_b):
    lse = np.logaddexp(lse_a, lse_b)
    out_a, out_b = (np.where(np.isneginf(x)[..., None], 0, out) for out, x in ((out_a, lse_a), (out_b, lse_b)))
    part = lambda x: np.where(np.isneginf(lse), 0, np.exp(x - np.where(np.isneginf(lse), 0, lse)))[..., None]
    size = part(lse_a) * np.abs(out_a) + part(lse_b) * np.abs(out_b)
    return [(part(lse_a) * out_a + part(lse_b) * out_b, 2e-5 * size), (lse, 1e-5)]


OPS = {
    "attention": Op(
        draw_attention, attention_arrays, call_attention, attention_reference,
        gradients=("query", "key", "value", "sinks"),
    ),
    "attention_fp8": Op(draw_fp8, fp8_arrays, call_fp8, fp8_reference),
    "varlen_attention": Op(draw_varlen, varlen_arrays, call_varlen, varlen_reference),
    "paged_attention": Op(draw_pages, paged_arrays, call_paged, paged_reference),
    "ragged_paged_attention": Op(draw_ragged, ragged_arrays, call_ragged, ragged_reference),
    "write_kv": Op(
        draw_write, write_arrays, lambda case, **arrays: cookbook.write_kv(**arrays), write_reference
    ),
    "rope_write_kv": Op(draw_rope, rope_arrays, call_rope, rope_reference),
    "merge_attention": Op(
        draw_merge, merge_arrays, lambda case, **arrays: cookbook.merge_attention(**arrays), merge_reference
    ),
}  # fmt: skip

# SPDX-License-Identifier: Apache-2.0
"""Checks of the arguments of every op of this family, and what all ops return where no query sees a key."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from .. import _device, _host
from .core import E4M3, HEAD_DIMS, SERVED_HEAD_DIMS

PAGE_SIZES = (16, 32, 64, 128, 256)

_SHAPES = "say it by is_causal, local_window_size or attention's segment_ids; jax.nn.dot_product_attention takes it"
_LENGTHS = "use varlen_attention, whose cu_seqlens say them, or give attention segment_ids"
# Arguments of other libraries' functions, and what says the same here.
ELSEWHERE = dict(
    mask=_SHAPES, attn_mask=_SHAPES, bias="jax.nn.dot_product_attention takes it",
    alibi_slopes="jax.nn.dot_product_attention takes a bias",
    query_seq_lengths=_LENGTHS, key_value_seq_lengths=_LENGTHS, implementation="leave it out: there is one",
    precision="leave it out: sums are float32", dropout_p="leave it out: there is no dropout",
    dropout_rate="leave it out: there is no dropout", softmax_scale="call it scale", sm_scale="call it scale",
    causal="call it is_causal", softcap="call it logits_soft_cap, with None for 0",
    soft_cap="call it logits_soft_cap", attn_logits_soft_cap="call it logits_soft_cap",
    window_size="call it local_window_size, with None for -1",
    window_left="call it local_window_size, with None for -1",
    sliding_window="call it local_window_size: (sliding_window - 1, None)", s_aux="call it sinks",
    return_attn_probs="call it return_lse", return_softmax_lse="call it return_lse",
    max_seqlen_q="leave it out: cu_seqlens_q says it", max_seqlen_k="leave it out: cu_seqlens_kv says it",
    mask_value="leave it out: what is masked has the weight 0",
    kv_cache_dtype="leave it out: the dtype of the pages says it",
    epsilon="call it eps", interleaved="neighbouring pairs are not supported: rotate in JAX and use write_kv",
    positions="pass their cos and sin",
)  # fmt: skip


def elsewhere(op: str, given: dict) -> None:
    """`_host.elsewhere` for arguments that attention has in other libraries."""
    _host.elsewhere(op, given, ELSEWHERE)


def arrays(op: str, **given) -> list:
    """`given` as JAX arrays. Under `jax_enable_x64` too, lists and NumPy's arrays become arrays of 32 bits.

    Raises:
      ValueError: JAX can make no array of one.
    """

    def array(name, x):
        on_host = isinstance(x, np.ndarray | list | tuple)
        with jax.enable_x64(False) if on_host else contextlib.nullcontext():
            return _host.as_array(op, name, x)

    return [array(*item) for item in given.items()]


def options(op: str, head_dim: int, is_causal, scale, logits_soft_cap, local_window_size, positions: int) -> dict:
    """Scale, soft cap and window, in the words of `core.Problem`. Each number may be Python's, NumPy's or JAX's.

    No sequence has more than so many `positions`, of queries or of keys: a window as large shows all.

    Raises:
      ValueError: one is traced, of another kind, or out of range.
    """
    numbers = dict(scale=head_dim**-0.5 if scale is None else scale, logits_soft_cap=logits_soft_cap)
    for name, without in dict(scale="1 / sqrt(head_dim)", logits_soft_cap="no cap").items():
        if numbers[name] is not None:
            numbers[name] = _host.option(op, name, numbers[name], float)
            if not numbers[name] > 0:
                raise ValueError(
                    f"{_host.PACKAGE}.{op}: {name}={numbers[name]}; must be above 0: None stands for {without}"
                )
    sizes = local_window_size if isinstance(local_window_size, tuple) else (local_window_size,) * 2
    wrong = isinstance(local_window_size, list) or len(sizes) != 2
    if not wrong:
        sizes = tuple(None if size is None else _host.option(op, "local_window_size", size, int) for size in sizes)
    if wrong or any(size is not None and size < 0 for size in sizes):
        raise ValueError(
            f"{_host.PACKAGE}.{op}: {local_window_size=}; must be a number of keys, at least 0, or a tuple "
            "(before, after): None stands for all"
        )
    sizes = tuple(None if size is None or size >= positions else size for size in sizes)
    right = 0 if _host.option(op, "is_causal", is_causal, bool) else sizes[1]
    return dict(scale=numbers["scale"], soft_cap=numbers["logits_soft_cap"], left=sizes[0], right=right)


def flag(op: str, name: str, value) -> bool | None:
    """`value`, a Python, NumPy or JAX bool, as Python's; or None.

    Raises:
      ValueError: it is another; or traced.
    """
    return None if value is None else _host.option(op, name, value, bool)


def check_operands(op: str, axes: str, is_fp8: bool = False, **given) -> None:
    """Checks queries, keys and values, `given` in this order by their names: that they have these axes, a dtype that is
    supported, and fit together.

    Raises:
      ValueError: they do not.
    """
    called, (q_name, k_name, v_name), (q, k, v) = f"{_host.PACKAGE}.{op}", given, given.values()
    for name, x in given.items():
        if x.ndim != len(axes.split(", ")):
            raise ValueError(f"{called}: {name}.shape={x.shape}; must be ({axes}): reshape it")
        if is_fp8 and x.dtype != E4M3:
            raise ValueError(f"{called}: {name}.dtype = {x.dtype}; must be {E4M3.__name__}: divide by a scale, cast it")
        if not is_fp8 and (x.dtype not in (jnp.bfloat16, jnp.float16) or x.dtype != q.dtype):
            raise ValueError(f"{called}: {name}.dtype = {x.dtype}; all must be bfloat16 or all float16: cast them")
    if k.shape != v.shape or k.shape[:-3] != q.shape[:-3] or k.shape[-1] != q.shape[-1]:
        shapes = ", ".join(f"{name}.shape={x.shape}" for name, x in given.items())
        raise ValueError(
            f"{called}: {shapes}; {k_name} and {v_name} must have the same shape, and batch and head_dim of {q_name}"
        )
    groups(op, q.shape[-2], k.shape[-2])


def groups(op: str, num_heads: int, num_kv_heads: int) -> None:
    """Checks that as many query heads read each key head.

    Raises:
      ValueError: they do not.
    """
    if num_heads % num_kv_heads if num_kv_heads else num_heads:
        raise ValueError(
            f"{_host.PACKAGE}.{op}: {num_heads} query heads are not a multiple of {num_kv_heads} key heads: as many "
            "must read each"
        )


def num_positions(op: str, num_q: int, num_kv: int) -> int:
    """Most positions of a sequence of at most `num_q` queries and `num_kv` keys.

    Raises:
      ValueError: kernels cannot count them in 32 bits.
    """
    if num_q + num_kv >= 2**31 - 1024:  # A few tiles further than the last of them.
        raise ValueError(
            f"{_host.PACKAGE}.{op}: {num_q} queries and {num_kv} keys; must be fewer than 2**31 - 1024 in all: give "
            f"parts of the keys, and merge their results ({_host.PACKAGE}.merge_attention)"
        )
    return max(num_q, num_kv)


def empty_results(q, sinks, dtype=None):
    """(out, lse) where no query (..., heads, head_dim) sees a key, or there are no queries."""
    lse = jnp.full(q.shape[:-1], -jnp.inf, jnp.float32) if sinks is None else jnp.broadcast_to(sinks, q.shape[:-1])
    return jnp.zeros(q.shape, dtype or q.dtype), lse


def sinks(op: str, sinks, num_heads: int):
    """`sinks` as a JAX array in float32, or None.

    Raises:
      ValueError: they are not a number a head.
    """
    if sinks is None:
        return None
    (sinks,) = arrays(op, sinks=sinks)
    if sinks.shape != (num_heads,) or not jnp.issubdtype(sinks.dtype, jnp.floating):
        raise ValueError(
            f"{_host.PACKAGE}.{op}: sinks = {sinks.shape}, {sinks.dtype}; must be ({num_heads},), one logit per head, "
            "in floats"
        )
    return sinks.astype(jnp.float32)


def segment_ids(op: str, ids, kv_ids, shape: tuple[int, int], kv_shape: tuple[int, int]):
    """Segments of queries and of keys, as int32 that are equal, and in order, where these are.

    Raises:
      ValueError: they are no integers of these shapes, or have no integer dtype in common.
    """
    with jax.enable_x64():  # Without it 0 and 2**32 would be the same segment.
        ids = _integers(op, "segment_ids", ids, shape)
        kv_ids = _integers(op, "kv_segment_ids", kv_ids, kv_shape)
        dtype = jnp.promote_types(ids.dtype, kv_ids.dtype)
        if jnp.can_cast(dtype, jnp.int32):
            return ids.astype(jnp.int32), kv_ids.astype(jnp.int32)
        if not jnp.issubdtype(dtype, jnp.integer):
            raise ValueError(
                f"{_host.PACKAGE}.{op}: segment ids of {ids.dtype} and {kv_ids.dtype} share no integers: cast one"
            )
        # Wider ids become their ranks.
        both = jnp.concatenate([ids.astype(dtype), kv_ids.astype(dtype)], axis=1)
        ranks = jax.vmap(lambda x: jnp.searchsorted(jnp.sort(x), x))(both).astype(jnp.int32)
        return ranks[:, : shape[1]], ranks[:, shape[1] :]


def _integers(op: str, name: str, ids, shape):
    if isinstance(ids, np.ndarray) and ids.dtype.kind in "iu" and ids.size:
        if -(2**31) <= int(ids.min()) and int(ids.max()) < 2**31:
            ids = ids.astype(np.int32)  # No ranks are needed for them.
    ids = _host.as_array(op, name, ids)
    if ids.shape != shape or not jnp.issubdtype(ids.dtype, jnp.integer):
        raise ValueError(f"{_host.PACKAGE}.{op}: {name} = {ids.shape}, {ids.dtype}; must be {shape}, an integer each")
    return ids


def check_smem(op: str, config, need: int, head_dim: int) -> None:
    """Checks that a block has the `need` bytes of shared memory that a configuration asks for.

    Raises:
      ValueError: it has fewer.
    """
    if need > _device.SMEM_BYTES_MAX:
        raise ValueError(
            f"{_host.PACKAGE}.{op}: {config} needs {need} bytes of shared memory for {head_dim=}, and a block has "
            f"{_device.SMEM_BYTES_MAX}: fewer stages or smaller blocks"
        )


def check_cache(op: str, q, k_pages, v_pages, block_tables, kv_lens) -> None:
    """Checks the operands of attention over pages.

    Raises:
      ValueError: a shape or dtype is not supported.
    """
    called = f"{_host.PACKAGE}.{op}"
    if q.ndim != 3:
        raise ValueError(f"{called}: {q.shape=}; must be (tokens, heads, head_dim): reshape it")
    for name, x in (("q", q), ("k_pages", k_pages), ("v_pages", v_pages)):
        if x.dtype not in (q.dtype, E4M3) or q.dtype not in (jnp.bfloat16, jnp.float16):
            raise ValueError(
                f"{called}: {name}.dtype = {x.dtype}; all must be bfloat16 or all float16, or q bfloat16 and pages "
                "float8_e4m3fn: cast them"
            )
    if k_pages.dtype != v_pages.dtype or (k_pages.dtype == E4M3 and q.dtype != jnp.bfloat16):
        raise ValueError(
            f"{called}: {q.dtype=}, {k_pages.dtype=}, {v_pages.dtype=}; with pages of float8_e4m3fn both must be, and "
            "q bfloat16: cast them"
        )
    if k_pages.ndim != 4 or k_pages.shape != v_pages.shape or k_pages.shape[3] != q.shape[-1]:
        raise ValueError(
            f"{called}: {k_pages.shape=}, {v_pages.shape=}, {q.shape=}; both caches must be (num_pages, page_size, "
            "kv_heads, head_dim), with the head_dim of q"
        )
    num_pages, page_size, num_kv_heads, head_dim = k_pages.shape
    if page_size not in PAGE_SIZES or head_dim not in SERVED_HEAD_DIMS:
        raise ValueError(
            f"{called}: {page_size=} must be one of {PAGE_SIZES}, {head_dim=} one of {SERVED_HEAD_DIMS} (TMA's boxes): "
            "pad heads, copy the cache to other pages"
        )
    if k_pages.dtype == E4M3 and head_dim not in HEAD_DIMS:
        raise ValueError(f"{called}: {head_dim=}; must be one of {HEAD_DIMS} with pages of float8_e4m3fn: pad it")
    groups(op, q.shape[-2], num_kv_heads)
    if k_pages.size // head_dim >= 2**31:
        raise ValueError(f"{called}: {k_pages.shape=} has 2^31 rows or more, which TMA cannot index: split the cache")
    if block_tables.ndim != 2 or kv_lens.shape != block_tables.shape[:1]:
        raise ValueError(
            f"{called}: {block_tables.shape=}, {kv_lens.shape=}; must be (num_seqs, pages_per_seq) and (num_seqs,)"
        )
    for name, x in (("block_tables", block_tables), ("kv_lens", kv_lens)):
        if x.dtype != jnp.int32:
            raise ValueError(f"{called}: {name}.dtype = {x.dtype}; must be int32: cast it")


def check_block_tables(block_tables, kv_lens, *, num_pages: int, page_size: int) -> None:
    """Looks at the numbers themselves, on the host; the kernels, which cannot raise, read zeros in place of a page that
    is not there and cut a length that the table cannot hold.

    Args:
      block_tables: (num_seqs, pages_per_seq), integers.
      kv_lens: (num_seqs,), integers.
      num_pages, page_size: of the cache.

    Raises:
      ValueError: names the first sequence whose length, or one of whose pages below its length, is out of range.
    """
    tables, lens = np.asarray(block_tables), np.asarray(kv_lens)
    for seq, (table, length) in enumerate(zip(tables, lens, strict=True)):
        if not 0 <= length <= tables.shape[1] * page_size:
            raise ValueError(
                f"sequence {seq}: kv_lens[{seq}] = {length}; must be from 0 to {tables.shape[1]} pages of {page_size} "
                "tokens: widen block_tables"
            )
        used = table[: pl.cdiv(int(length), page_size)]
        if len(wrong := np.flatnonzero((used < 0) | (used >= num_pages))):
            j = wrong[0]
            raise ValueError(
                f"sequence {seq}: block_tables[{seq}, {j}] = {used[j]}; must be a page from 0 to {num_pages - 1}, for "
                f"its {length} tokens reach into it"
            )

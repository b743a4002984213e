"""Paged attention for mixed batches: chunks of prompts and single tokens of answers, in one launch.

    out = softmax(mask(cap(scale q kᵀ))) v  for each sequence, causal, aligned at its end

Shapes: q (T, N, H), the new tokens of sequence i being rows `cu_seqlens_q[i]` to `cu_seqlens_q[i + 1]`, the last of its
`kv_lens[i]` tokens; k_pages, v_pages, block_tables and kv_lens as in `paged_attention`; out (T, N, H), lse (T, N).

The kernel, its roles, barriers and bounds are those of `varlen_attention`, whose memory warpgroup finds blocks of keys
through the block table here. Sequences are not split: where a few long ones have one new token each and there is little
else, `paged_attention` has all SMs read them. Page ids and lengths out of range: as in `paged_attention`; starts of
sequences are cut at T, and never go back.

Not supported: what `paged_attention` does not support. Source: Kwon et al., "PagedAttention" (2023).
"""

import jax.numpy as jnp

from .attention import Config
from .core import check_numbers
from .paged_attention import check_cache
from .varlen_attention import Pages, run, varlen_attention_reference


def ragged_paged_attention_reference(
    q, k_pages, v_pages, block_tables, kv_lens, cu_seqlens_q, *, scale=None, logits_soft_cap=None,
    local_window_size=None,
):  # fmt: skip
    """(out, lse) in at least float32, over gathered pages."""
    num_seqs, width = block_tables.shape
    length = width * k_pages.shape[1]
    there = ((block_tables >= 0) & (block_tables < len(k_pages)))[:, :, None, None, None]
    # Each sequence gets the room of its table; the packed reference wants keys one after the other, so they move up.
    lens = jnp.clip(kv_lens, 0, length)
    starts = jnp.append(0, jnp.cumsum(lens)).astype(jnp.int32)
    seq, token = jnp.divmod(jnp.arange(num_seqs * length), length)
    to = jnp.where(token < lens[seq], starts[seq] + token, num_seqs * length)

    def packed(pages):
        rows = jnp.where(there, pages[block_tables], 0).reshape(num_seqs * length, *pages.shape[2:])
        return jnp.zeros_like(rows).at[to].set(rows, mode="drop")

    return varlen_attention_reference(
        q, packed(k_pages), packed(v_pages), cu_seqlens_q, starts, is_causal=True, scale=scale,
        logits_soft_cap=logits_soft_cap, local_window_size=local_window_size,
    )  # fmt: skip


def _check(q, k_pages, v_pages, block_tables, kv_lens, cu_seqlens_q, scale, logits_soft_cap, local_window_size) -> None:
    op = "cookbook.ragged_paged_attention"
    if q.ndim != 3 or 0 in q.shape:
        raise ValueError(f"{op}: {q.shape=}; must be (rows, heads, head_dim), none of them 0")
    check_cache(op, q, k_pages, v_pages, block_tables, kv_lens)
    if cu_seqlens_q.shape != (len(kv_lens) + 1,) or cu_seqlens_q.dtype != jnp.int32:
        raise ValueError(
            f"{op}: cu_seqlens_q = {cu_seqlens_q.shape}, {cu_seqlens_q.dtype}; must be (num_seqs + 1,), here "
            f"({len(kv_lens) + 1},), int32"
        )
    check_numbers(op, scale, logits_soft_cap, local_window_size)


def ragged_paged_attention(
    q, k_pages, v_pages, block_tables, kv_lens, cu_seqlens_q, *, scale=None, logits_soft_cap=None,
    local_window_size=None, return_lse=False, config: Config | None = None,
):  # fmt: skip
    """Attention of the new tokens of each sequence to those before them, whose keys and values lie in pages.

    The same to the bit in every run. A page that is not there counts as zeros, and a length is cut at what the block
    table holds: `cookbook.paged_attention.check_block_tables` looks for both.

    Args:
      q: (T, heads, head_dim), the queries of the new tokens of all sequences, one after the other; bfloat16 or
        float16; head_dim 64, 128 or 256.
      k_pages, v_pages: (num_pages, page_size, kv_heads, head_dim), of the dtype of `q`, with the new tokens in them;
        page_size 16, 32, 64, 128 or 256; kv_heads divides heads.
      block_tables: (num_seqs, pages_per_seq), int32: the pages of each sequence, in order. Entries after those that
        `kv_lens` needs do not matter.
      kv_lens: (num_seqs,), int32: tokens of each sequence, with the new ones.
      cu_seqlens_q: (num_seqs + 1,), int32: where the new tokens of each sequence begin in `q`, and the last ones end.
      scale: what logits are multiplied by; None for 1 / sqrt(head_dim).
      logits_soft_cap: c, so that logits become c tanh(logits / c).
      local_window_size: how many tokens before itself each one sees; of a pair the first counts.
      return_lse: also return the logarithms of the sums of exponentials.
      config: blocks, stages and warpgroups, as of `attention`; None chooses by head_dim.

    Returns:
      (T, heads, head_dim), of the dtype of `q`; with `return_lse` also (T, heads), float32, natural logarithms. A token
      that sees none, and a row of q after the last sequence, gives zeros, and -inf.

    Raises:
      ValueError: a shape, dtype or number is not supported; RuntimeError: no GPU.
    """
    _check(q, k_pages, v_pages, block_tables, kv_lens, cu_seqlens_q, scale, logits_soft_cap, local_window_size)
    return run(
        "ragged_paged_attention", q, k_pages, v_pages, block_tables, cu_seqlens_q, kv_lens,
        pages=Pages(*k_pages.shape[:2], block_tables.shape[1]), is_causal=True, scale=scale,
        local_window_size=local_window_size, logits_soft_cap=logits_soft_cap, return_lse=return_lse, config=config,
    )  # fmt: skip


ragged_paged_attention.Config = Config  # `cookbook.ragged_paged_attention` is this function, not its module.

# SPDX-License-Identifier: Apache-2.0
"""Paged attention for mixed batches: chunks of prompts and single tokens of answers, in one launch.

    out = softmax(mask(cap(scale q kᵀ))) v  for each sequence, causal, aligned at its end

Shapes: q (T, N, H), the new tokens of sequence i being rows `cu_seqlens_q[i]` to `cu_seqlens_q[i + 1]`, the last of its
`kv_lens[i]` tokens; k_pages, v_pages, block_tables and kv_lens as in `paged_attention`; out (T, N, H), lse (T, N).

The kernel, its roles, barriers and bounds are those of `kernel.py`, whose memory warpgroup finds blocks of keys through
the block table here. Sequences are not split: where a few long ones have one new token each and there is little
else, `paged_attention` has all SMs read them. Page ids and lengths out of range: as in `paged_attention`; starts of
sequences are cut at T, and never go back.

Other names of the arguments; `decode/paged_attention.py` has those of the cache:

    here            flash-attn               vLLM                    FlashInfer
    cu_seqlens_q    cu_seqlens_q             query_start_loc         qo_indptr
    kv_lens         seqused_k                seq_lens                paged_kv_last_page_len, and the pages before it
    lse (T, N), ln  softmax_lse (N, T), ln   softmax_lse (N, T), ln  lse (T, N), log2

Not supported: what `paged_attention` does not support. Source: Kwon et al., "PagedAttention" (2023).
"""

import jax
import jax.numpy as jnp

from ... import _device, _host
from .. import checks, references
from ..cache.pages import Pages
from ..cache.pages_fp8 import page_scales
from ..core import E4M3, Config, Problem
from . import kernel, kernel_fp8
from .plan import Plan, default_config


def ragged_paged_attention_reference(
    q, k_pages, v_pages, block_tables, kv_lens, cu_seqlens_q, *, scale=None, logits_soft_cap=None,
    local_window_size=None, sinks=None, k_scale=1.0, v_scale=1.0,
):  # fmt: skip
    """(out, lse) in at least float32, over gathered pages."""
    # Each sequence gets the room of its table; the packed reference wants keys one after the other, so they move up.
    num_seqs, length = len(block_tables), block_tables.shape[1] * k_pages.shape[1]
    lens = jnp.clip(kv_lens, 0, length)
    starts = jnp.append(0, jnp.cumsum(lens)).astype(jnp.int32)
    seq, token = jnp.divmod(jnp.arange(num_seqs * length), length)
    to = jnp.where(token < lens[seq], starts[seq] + token, num_seqs * length)

    def packed(pages, page_scale):
        rows = references.gather(pages, page_scale, block_tables).reshape(num_seqs * length, *pages.shape[2:])
        return jnp.zeros_like(rows).at[to].set(rows, mode="drop")

    return references.attend_packed(
        q, packed(k_pages, k_scale), packed(v_pages, v_scale), cu_seqlens_q, starts, True, scale, local_window_size,
        logits_soft_cap, sinks,
    )  # fmt: skip


def ragged_paged_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    block_tables: jax.Array,
    kv_lens: jax.Array,
    cu_seqlens_q: jax.Array,
    *,
    scale: float | None = None,
    logits_soft_cap: float | None = None,
    local_window_size: _host.Window | None = None,
    sinks: jax.Array | None = None,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    return_lse: bool = False,
    config: Config | None = None,
    **others,
) -> jax.Array | tuple[jax.Array, ...]:
    """Attention of the new tokens of each sequence to those before them, whose keys and values lie in pages.

    Bitwise reproducible from run to run. A page that is not there counts as zeros, and a length is cut at what the
    block table holds: `cookbook.paged_attention.check_block_tables` looks for both.

    On an automatic mesh JAX gathers sharded operands on every device and says nothing: call it inside `jax.shard_map`.

    Args:
      q: (T, heads, head_dim), the queries of the new tokens of all sequences, one after the other; bfloat16 or
        float16; head_dim 64, 80, 96, 128, 192 or 256.
      k_pages, v_pages: (num_pages, page_size, kv_heads, head_dim), of the dtype of `q`, or float8_e4m3fn with a
        bfloat16 `q` and head_dim 64, 128 or 256, with the new tokens in them; page_size 16, 32, 64, 128 or 256;
        kv_heads divides heads.
      block_tables: (num_seqs, pages_per_seq), int32: the pages of each sequence, in order. Entries after those that
        `kv_lens` needs do not matter.
      kv_lens: (num_seqs,), int32: tokens of each sequence, with the new ones.
      cu_seqlens_q: (num_seqs + 1,), int32: where the new tokens of each sequence begin in `q`, and the last ones end.
      scale: what logits are multiplied by; None for 1 / sqrt(head_dim).
      logits_soft_cap: c, so that logits become c tanh(logits / c); None for none.
      local_window_size: how many tokens before itself each one sees; of a pair the first counts.
      sinks: (heads,), floats: a logit per head, which acts as one extra key with a value of zero.
      k_scale, v_scale: with pages of float8_e4m3fn, what a stored 1 stands for, above 0: a float, or (kv_heads,) of
        them; None for 1.
      return_lse: also return the logarithms of the sums of exponentials.
      config: blocks, stages and warpgroups, as of `attention`; None chooses by head_dim.
      others: arguments that other libraries have, such as `mask_value`, if they are None.

    Returns:
      (T, heads, head_dim), of the dtype of `q`; with `return_lse` also (T, heads), float32, natural logarithms. A token
      that sees none, and a row of q after the last sequence, gives zeros, and -inf or its sink.

    Raises:
      ValueError: a shape, dtype or number is not supported; RuntimeError: no GPU.
    """
    op = "ragged_paged_attention"
    checks.elsewhere(op, others)
    if others.get("causal") is False:
        raise ValueError(
            f"{_host.PACKAGE}.{op}: causal=False; must be causal: gather the pages and use varlen_attention"
        )
    *cache, cu_seqlens_q = checks.arrays(
        op, q=q, k_pages=k_pages, v_pages=v_pages, block_tables=block_tables, kv_lens=kv_lens, cu_seqlens_q=cu_seqlens_q
    )
    checks.check_cache(op, *cache)
    q, k_pages, v_pages, block_tables, kv_lens = cache
    if cu_seqlens_q.shape != (len(kv_lens) + 1,) or cu_seqlens_q.dtype != jnp.int32:
        raise ValueError(
            f"{_host.PACKAGE}.{op}: cu_seqlens_q = {cu_seqlens_q.shape}, {cu_seqlens_q.dtype}; must be "
            f"(num_seqs + 1,), here ({len(kv_lens) + 1},), int32"
        )
    num_tokens, num_heads, head_dim = q.shape
    positions = checks.num_positions(op, num_tokens, block_tables.shape[1] * k_pages.shape[1])
    how = checks.options(op, head_dim, True, scale, logits_soft_cap, local_window_size, positions)
    scales = page_scales(op, k_pages, k_scale, v_scale)
    return_lse, sinks = checks.flag(op, "return_lse", return_lse), checks.sinks(op, sinks, num_heads)
    config = _host.require_config(op, config, Config) or default_config(head_dim)
    if 0 in (*q.shape, *block_tables.shape):
        results = checks.empty_results(q, sinks)
        return results if return_lse else results[0]
    target = _host.require_tensor_cores(op)
    problem = Problem(num_heads, k_pages.shape[2], head_dim, q.dtype, **how, interpreted=target.interpreted)
    pages, copies_tiles = Pages.of(k_pages, block_tables, config.block_kv), not problem.whole_panels
    plan = Plan(problem, num_tokens, len(kv_lens), pages, config, target.num_sms, copies_tiles)
    chosen = kernel_fp8 if k_pages.dtype == E4M3 else kernel
    checks.check_smem(op, config, _device.smem_bytes(chosen.scratch(plan)), head_dim)
    params, instead = _host.compiler_params(approx_math=True), f"{_host.PACKAGE}.attention with segment_ids"
    q, k_pages, v_pages, sinks, *scales = _host.without_gradient(op, instead, q, k_pages, v_pages, sinks, *scales)
    with _host.own_options():  # Around the kernel too.
        out, lse = chosen.forward(
            q, k_pages, v_pages, block_tables, cu_seqlens_q, kv_lens, sinks, *scales, plan=plan, params=params,
            return_lse=return_lse,
        )  # fmt: skip
    return (out, lse) if return_lse else out


ragged_paged_attention.Config = Config  # `cookbook.ragged_paged_attention` is this function, not its module.

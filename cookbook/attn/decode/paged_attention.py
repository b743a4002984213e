# SPDX-License-Identifier: Apache-2.0
"""Paged attention, decode: one query token of each sequence, keys and values in pages of a cache.

    out = softmax(mask(cap(scale q kᵀ))) v,    lse = log sum exp of the same logits

Shapes: q (num_seqs, N, H), k_pages and v_pages (num_pages, page_size, K, H), block_tables (num_seqs, pages_per_seq),
int32: page `block_tables[i, j]` holds tokens j page_size to (j + 1) page_size of sequence i, of which the first
`kv_lens[i]` count. out (num_seqs, N, H), lse (num_seqs, N). N is a multiple of K; the N / K query heads that share keys
are the rows of one WGMMA, which has 64.

`plan.py` cuts the keys of all sequences into equal parts; `kernel.py` has the kernel, with its roles and barriers,
`kernel_fp8.py` that of pages of 8 bits, and `merge_pieces.py` the kernel that merges the results of parts.

Other names of the arguments; `dense/attention.py` has those of numbers:

    here             flash-attn           vLLM              FlashInfer
    k_pages          k_cache              key_cache         paged_kv_cache[0], "NHD"
    v_pages          v_cache              value_cache       paged_kv_cache[1], "NHD"
    block_tables     block_table          block_table       paged_kv_indptr, paged_kv_indices
    kv_lens          cache_seqlens        seq_lens          paged_kv_last_page_len, and the pages before it
    lse (S, N), ln   softmax_lse, ln      softmax_lse, ln   lse (S, N), log2

Bound by: memory, of which each key and value is read once; once for each 64 heads of a larger group.

`cache/pages.py` says what becomes of page ids and lengths that are out of range.

Not supported: pages of other sizes than 16, 32, 64, 128 and 256, heads of others than 64, 80, 96, 128, 192
and 256, gradients.
Sources: Kwon et al., "PagedAttention" (2023); Osama et al., "Stream-K" (2023), on equal parts.
"""

import functools

import jax
import jax.numpy as jnp

from ... import _device, _host
from .. import checks, references
from ..cache.pages import Pages, at_least_two
from ..cache.pages_fp8 import page_scales
from ..checks import check_block_tables
from ..core import E4M3, Problem
from . import kernel, kernel_fp8
from .merge_pieces import merge_pieces
from .plan import Config, Plan


def paged_attention_reference(
    q, k_pages, v_pages, block_tables, kv_lens, *, scale=None, logits_soft_cap=None, local_window_size=None,
    sinks=None, k_scale=1.0, v_scale=1.0,
):  # fmt: skip
    """(out, lse) in at least float32, over gathered pages."""
    k, v = (references.gather(*pages, block_tables) for pages in ((k_pages, k_scale), (v_pages, v_scale)))
    distance = jnp.arange(k.shape[1]) - (kv_lens[:, None] - 1)
    seen = references.visible(distance, True, local_window_size)[:, None]
    out, lse = references.attend(q[:, None], k, v, seen, scale, logits_soft_cap, sinks)
    return out[:, 0], lse[:, 0]


def default_config(head_dim: int, is_fp8: bool = False) -> Config:
    """The configuration for heads of this size; of pages of 8 bits more are in flight. With small heads a
    block has two parts, one of which can compute while the other waits."""
    if head_dim <= 64:
        return Config(num_stages=6) if is_fp8 else Config(block_kv=64, num_stages=3, num_pairs=2)
    return Config(num_stages=3 if is_fp8 else 2) if head_dim <= 128 else Config(block_kv=64)


def paged_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    block_tables: jax.Array,
    kv_lens: jax.Array,
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
    """Attention of the last token of each sequence to all of its tokens, whose keys and values lie in pages.

    Bitwise reproducible from run to run. A page that is not there counts as zeros, and a length is cut at what the
    block table holds: `cookbook.paged_attention.check_block_tables` looks for both.

    On an automatic mesh JAX gathers sharded operands on every device and says nothing: call it inside `jax.shard_map`.

    Args:
      q: (num_seqs, heads, head_dim), the queries of the last tokens; bfloat16 or float16; head_dim 64, 80, 96,
        128, 192 or 256.
      k_pages, v_pages: (num_pages, page_size, kv_heads, head_dim), of the dtype of `q`, or float8_e4m3fn with a
        bfloat16 `q` and head_dim 64, 128 or 256; page_size 16, 32, 64, 128 or 256; kv_heads divides heads.
      block_tables: (num_seqs, pages_per_seq), int32: a sequence's pages, in order; beyond `kv_lens` any number will do.
      kv_lens: (num_seqs,), int32: tokens of each sequence, with the one that asks.
      scale: what logits are multiplied by; None for 1 / sqrt(head_dim).
      logits_soft_cap: c, so that logits become c tanh(logits / c); None for none.
      local_window_size: how many tokens before itself the last one sees; of a pair the first counts.
      sinks: (heads,), floats: a logit per head, which acts as one extra key with a value of zero.
      k_scale, v_scale: with pages of float8_e4m3fn, what a stored 1 stands for, above 0: a float, or (kv_heads,) of
        them; None for 1.
      return_lse: also return the logarithms of the sums of exponentials.
      config: blocks, stages and pairs; None chooses by head_dim.
      others: arguments that other libraries have, such as `mask_value`, if they are None.

    Returns:
      (num_seqs, heads, head_dim), of the dtype of `q`; with `return_lse` also (num_seqs, heads), float32, natural
      logarithms. A sequence of no tokens gives zeros, and -inf or its sink.

    Raises:
      ValueError: a shape, dtype or number is not supported; RuntimeError: no GPU.
    """
    op = "paged_attention"
    checks.elsewhere(op, others)
    return_lse, config = checks.flag(op, "return_lse", return_lse), _host.require_config(op, config, Config)
    q, k_pages, v_pages, block_tables, kv_lens = checks.arrays(
        op, q=q, k_pages=k_pages, v_pages=v_pages, block_tables=block_tables, kv_lens=kv_lens
    )
    checks.check_cache(op, q, k_pages, v_pages, block_tables, kv_lens)
    if len(block_tables) != len(q):
        raise ValueError(
            f"{_host.PACKAGE}.{op}: {q.shape=} and {block_tables.shape=} differ in their number of sequences"
        )
    (num_seqs, num_heads, head_dim), num_kv_heads = q.shape, k_pages.shape[2]
    positions = checks.num_positions(op, 1, block_tables.shape[1] * k_pages.shape[1])
    how = checks.options(op, head_dim, True, scale, logits_soft_cap, local_window_size, positions)
    scales, sinks = page_scales(op, k_pages, k_scale, v_scale), checks.sinks(op, sinks, num_heads)
    is_fp8 = k_pages.dtype == E4M3
    if 0 in (*q.shape, *block_tables.shape):
        results = checks.empty_results(q, sinks)
        return results if return_lse else results[0]
    target = _host.require_tensor_cores(op)
    config = config or default_config(head_dim, is_fp8)
    if is_fp8 and config.num_pairs > 1:
        raise ValueError(f"{_host.PACKAGE}.{op}: {config.num_pairs=}; must be 1 with pages of 8 bits: leave it out")
    problem = Problem(num_heads, num_kv_heads, head_dim, q.dtype, **how, interpreted=target.interpreted)
    pages = Pages.of(k_pages, block_tables, config.block_kv)
    plan = Plan(problem, num_seqs, pages, config, target.num_sms)
    checks.check_smem(op, config, smem_bytes(config, head_dim, is_fp8), head_dim)
    q, k_pages, v_pages, sinks, *scales = _host.without_gradient(
        op, f"{_host.PACKAGE}.attention", q, k_pages, v_pages, sinks, *scales
    )
    params = _host.compiler_params(approx_math=True)
    with _host.own_options():  # Around the kernels too.
        results = _run(
            q, k_pages, v_pages, block_tables, kv_lens, sinks, scales, plan=plan, params=params, return_lse=return_lse
        )
    return results if return_lse else results[0]


def smem_bytes(config: Config, head_dim: int, is_fp8: bool = False) -> int:
    """Shared memory of a block of the first kernel for heads of this size."""
    problem = Problem(1, 1, head_dim, jnp.dtype(jnp.bfloat16), 1.0, None, None, 0, interpreted=False)
    plan = Plan(problem, 1, Pages(2, config.block_kv, 1, config.block_kv), config, 1)
    return config.num_pairs * _device.smem_bytes((kernel_fp8 if is_fp8 else kernel).scratch(plan))


@functools.partial(jax.jit, static_argnames=("plan", "params", "return_lse"))
def _run(q, k_pages, v_pages, block_tables, kv_lens, sinks, scales, *, plan: Plan, params, return_lse: bool):
    """(out, lse), lse None unless it is asked for. One program for both kernels: some of the pieces between them are
    memory that nobody wrote, in which `jax_debug_nans` would find NaN."""
    pieces = (kernel_fp8 if k_pages.dtype == E4M3 else kernel).pieces
    pages = map(at_least_two, (k_pages, v_pages))
    ends, *found = pieces(q, *pages, block_tables, kv_lens, *scales, plan=plan, params=params)
    out, lse = merge_pieces(ends, kv_lens, *found, sinks, plan=plan, params=params)
    return out, lse if return_lse else None


paged_attention.Config = Config  # `cookbook.paged_attention` is this function, not its module.
paged_attention.check_block_tables = check_block_tables


def flops(kv_lens, num_heads: int, head_dim: int) -> int:
    """Floating-point operations of the two products over sequences of these lengths."""
    return 4 * num_heads * head_dim * int(sum(kv_lens))


def bytes_moved(kv_lens, num_kv_heads: int, head_dim: int, itemsize: int = 2) -> int:
    """Keys and values, of `itemsize` bytes, each once. All else is small beside them."""
    return 2 * itemsize * num_kv_heads * head_dim * int(sum(kv_lens))

# SPDX-License-Identifier: Apache-2.0
"""Attention over packed sequences of any lengths, whose keys are packed too.

    out = softmax(mask(cap(scale q kᵀ))) v  for each sequence,    lse = log sum exp of the same logits

Shapes: q (T, N, H), the queries of sequence i being rows `cu_seqlens_q[i]` to `cu_seqlens_q[i + 1]`; k and v (S, K, H),
its keys and values being rows `cu_seqlens_kv[i]` to `cu_seqlens_kv[i + 1]`; out (T, N, H), lse (T, N). N is a multiple
of K.
With `is_causal` the last query of a sequence sees all of its keys, the one before all but the last, and so on. Rows
after the last sequence give zeros.

`kernel.py` has the kernel, with its roles and barriers, `plan.py` the list of its tiles, and `steps.py` the steps of
its compute warpgroups.

Other names of the arguments; `dense/attention.py` has those of its own arguments:

    here            flash-attn             vLLM                     FlashInfer
    cu_seqlens_q    cu_seqlens_q           query_start_loc          qo_indptr
    cu_seqlens_kv   cu_seqlens_k           cu_seqlens_k             kv_indptr
    (not needed)    max_seqlen_q, _k       max_query_len            (planned)
    lse (T, N), ln  softmax_lse (N, T), ln softmax_lse (N, T), ln   lse (T, N), log2

Bound by: the tensor cores; with few queries for each sequence, memory.

Not supported: gradients (`attention` with segment_ids has them), heads of other sizes than 64, 80, 96, 128, 192 and
256. If S is not a multiple of 8, or H not of 64, v is padded by a copy, or with few queries per sequence comes in tiles
of 8 rows. Sources: Shah et al., "FlashAttention-3" (2024).
"""

import jax
import jax.numpy as jnp

from ... import _device, _host
from .. import checks, references
from ..core import SERVED_HEAD_DIMS, Config, Problem
from ..tiles import by_tile
from . import kernel
from .plan import Plan, default_config


def varlen_attention_reference(
    q, k, v, cu_seqlens_q, cu_seqlens_kv, *, is_causal=False, scale=None, local_window_size=None, logits_soft_cap=None,
    sinks=None,
):  # fmt: skip
    """(out, lse) in at least float32."""
    return references.attend_packed(
        q, k, v, cu_seqlens_q, cu_seqlens_kv, is_causal, scale, local_window_size, logits_soft_cap, sinks
    )


def _check(q, k, v, cu_seqlens_q, cu_seqlens_kv) -> None:
    op = f"{_host.PACKAGE}.varlen_attention"
    checks.check_operands("varlen_attention", "rows, heads, head_dim", q=q, k=k, v=v)
    if q.shape[2] not in SERVED_HEAD_DIMS:
        raise ValueError(f"{op}: head_dim={q.shape[2]}; must be one of {SERVED_HEAD_DIMS}: pad it")
    if cu_seqlens_q.ndim != 1 or cu_seqlens_q.shape != cu_seqlens_kv.shape or not len(cu_seqlens_q):
        raise ValueError(f"{op}: {cu_seqlens_q.shape=}, {cu_seqlens_kv.shape=}; both must be (num_seqs + 1,)")
    for name, x in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_kv", cu_seqlens_kv)):
        if x.dtype != jnp.int32:
            raise ValueError(f"{op}: {name}.dtype = {x.dtype}; must be int32: cast it")


def varlen_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cu_seqlens_q: jax.Array,
    cu_seqlens_kv: jax.Array,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    local_window_size: _host.Window | None = None,
    logits_soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    return_lse: bool = False,
    config: Config | None = None,
    **others,
) -> jax.Array | tuple[jax.Array, ...]:
    """Attention of packed sequences, each to its own keys, as flash-attn's varlen functions; bitwise reproducible
    from run to run.

    On an automatic mesh JAX gathers sharded operands on every device and says nothing: call it inside `jax.shard_map`.

    Args:
      q: (T, N, H), the queries of all sequences one after the other; bfloat16 or float16; H is 64, 80, 96, 128, 192
        or 256.
      k, v: (S, K, H), their keys and values, of the dtype of `q`; K divides N.
      cu_seqlens_q: (num_seqs + 1,), int32: where queries of each sequence begin in `q`, and where the last ones end.
      cu_seqlens_kv: (num_seqs + 1,), int32: the same of keys.
      is_causal: the last query of a sequence sees all of its keys, the one before all but the last, and so on.
      scale: what logits are multiplied by; None for 1 / sqrt(H).
      local_window_size: (left, right): how many keys a query sees before and after its own position, which are
        aligned at the ends; None for a side without bound, one number for both.
      logits_soft_cap: c, so that logits become c tanh(logits / c); None for none.
      sinks: (N,), floats: a logit per head, which acts as one extra key with a value of zero.
      return_lse: also return the logarithms of the sums of exponentials.
      config: blocks, stages and warpgroups, as of `attention`; None chooses by H.
      others: arguments that other libraries have, such as `max_seqlen_q`, if they are None.

    Returns:
      (T, N, H), of the dtype of `q`; with `return_lse` also (T, N), float32, natural logarithms. A query that sees no
      key gives zeros, and -inf or its sink; so does a row of q after the last sequence.

    Raises:
      ValueError: a shape, dtype or number is not supported; RuntimeError: no GPU.
    """
    op = "varlen_attention"
    checks.elsewhere(op, others)
    args = q, k, v, cu_seqlens_q, cu_seqlens_kv = checks.arrays(
        op, q=q, k=k, v=v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_kv=cu_seqlens_kv
    )
    _check(*args)
    (num_tokens, num_heads, head_dim), num_seqs = q.shape, len(cu_seqlens_q) - 1
    positions = checks.num_positions(op, num_tokens, len(k))
    how = checks.options(op, head_dim, is_causal, scale, logits_soft_cap, local_window_size, positions)
    return_lse, sinks = checks.flag(op, "return_lse", return_lse), checks.sinks(op, sinks, num_heads)
    config = _host.require_config(op, config, Config) or default_config(head_dim)
    if 0 in (*q.shape, num_seqs, len(k)):
        results = checks.empty_results(q, sinks)
        return results if return_lse else results[0]
    target = _host.require_tensor_cores(op)
    problem = Problem(num_heads, k.shape[1], head_dim, q.dtype, **how, interpreted=target.interpreted)
    copies_tiles = by_tile(problem, len(k), num_tokens // num_seqs)
    plan = Plan(problem, num_tokens, num_seqs, None, config, target.num_sms, copies_tiles)
    checks.check_smem(op, config, _device.smem_bytes(kernel.scratch(plan)), head_dim)
    params, instead = _host.compiler_params(approx_math=True), f"{_host.PACKAGE}.attention with segment_ids"
    q, k, v, sinks = _host.without_gradient(op, instead, q, k, v, sinks)
    with _host.own_options():  # Around the kernel too.
        out, lse = kernel.forward(
            q, k, v, None, cu_seqlens_q, cu_seqlens_kv, sinks, plan=plan, params=params, return_lse=return_lse
        )  # fmt: skip
    return (out, lse) if return_lse else out


varlen_attention.Config = Config  # `cookbook.varlen_attention` is this function, not its module.


def flops(q_lens, kv_lens, num_heads: int, head_dim: int, is_causal: bool = False) -> int:
    """Floating-point operations of the two products over these lengths; a causal mask leaves out hidden pairs."""
    pairs = (q * (kv - (q - 1) / 2 if is_causal else kv) for q, kv in zip(q_lens, kv_lens, strict=True))
    return int(4 * num_heads * head_dim * sum(pairs))


def bytes_moved(q_lens, kv_lens, num_heads: int, num_kv_heads: int, head_dim: int) -> int:
    """q and out, k and v, of 16 bits, each once."""
    return 4 * head_dim * (num_heads * int(sum(q_lens)) + num_kv_heads * int(sum(kv_lens)))

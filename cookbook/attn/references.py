# SPDX-License-Identifier: Apache-2.0
"""The part that the references of this family share. The kernels use none of it, so that a bug of theirs shows."""

import jax
import jax.numpy as jnp


def visible(distance, is_causal: bool, local_window_size):
    """Whether a query sees the key that lies `distance` positions after it."""
    sizes = local_window_size if isinstance(local_window_size, tuple) else (local_window_size,) * 2
    before, after = (None if size is None else min(int(size), 2**31 - 1) for size in sizes)
    seen = distance <= (0 if is_causal else jnp.inf)
    seen = seen if before is None else seen & (distance >= -before)
    return seen if after is None else seen & (distance <= after)


def attend(query, key, value, seen, scale, logits_soft_cap, sinks=None):
    """(out, lse) in at least float32: query (B, T, N, H), key and value (B, S, K, H), seen (B or 1, T, S), lse
    (B, T, N), sinks (N,). A value that no query sees may be NaN."""
    dtype = jnp.promote_types(query.dtype, jnp.float32)
    value = jnp.where(seen.any(1)[..., None, None], value, 0)
    k, v = (jnp.repeat(x.astype(dtype), query.shape[2] // key.shape[2], axis=2) for x in (key, value))
    s = jnp.einsum("btnh,bsnh->btns", query.astype(dtype), k, precision="highest")
    s *= query.shape[-1] ** -0.5 if scale is None else scale
    s = s if logits_soft_cap is None else logits_soft_cap * jnp.tanh(s / logits_soft_cap)
    seen = seen[:, :, None]
    if sinks is not None:  # One key more, which every query sees, and whose value is zero.
        s = jnp.append(s, jnp.broadcast_to(sinks.astype(dtype)[:, None], (*s.shape[:3], 1)), axis=3)
        seen = jnp.pad(seen, [(0, 0)] * 3 + [(0, 1)], constant_values=True)
        v = jnp.pad(v, ((0, 0), (0, 1), (0, 0), (0, 0)))
    sees_any = seen.any(axis=-1, keepdims=True)
    s = jnp.where(seen, s, jnp.where(sees_any, -jnp.inf, 0.0))  # Gradients are finite where nothing is seen, too.
    lse = jnp.where(sees_any[..., 0], jax.nn.logsumexp(s, axis=-1), -jnp.inf)
    p = jnp.where(sees_any, jax.nn.softmax(s, axis=-1), 0.0)
    return jnp.einsum("btns,bsnh->btnh", p, v, precision="highest"), lse


def attend_packed(
    q, k, v, cu_seqlens_q, cu_seqlens_kv, is_causal, scale, local_window_size, logits_soft_cap, sinks
):  # fmt: skip
    """(out, lse) of packed sequences, aligned at their ends: q (T, N, H), k and v (S, K, H), lse (T, N)."""

    def places(cu_seqlens, num_rows):
        """The sequence of each row, and its position counted from the sequence's end."""
        seq = jnp.searchsorted(cu_seqlens, jnp.arange(num_rows), side="right") - 1
        return seq, jnp.arange(num_rows) - jnp.append(cu_seqlens[1:], 0)[seq]

    (q_seq, q_ids), (kv_seq, kv_ids) = places(cu_seqlens_q, len(q)), places(cu_seqlens_kv, len(k))
    seen = (q_seq[:, None] == kv_seq) & (q_seq < len(cu_seqlens_q) - 1)[:, None]
    seen &= visible(kv_ids - q_ids[:, None], is_causal, local_window_size)
    out, lse = attend(q[None], k[None], v[None], seen[None], scale, logits_soft_cap, sinks)
    return out[0], lse[0]


def written(pages, new, slot_mapping, scale=None):
    """`pages` with rows of `new`, (tokens, kv_heads, head_dim), in their slots; pages of 8 bits have them over their
    scale, cut at the end of e4m3. A row without a slot is left out."""
    if pages.dtype == jnp.float8_e4m3fn:
        scale = jnp.reshape(jnp.asarray(1.0 if scale is None else scale, jnp.float32), (-1, 1))
        new = jnp.clip(new.astype(jnp.float32) / scale, -448, 448)
    slots = pages.reshape(-1, *pages.shape[2:])
    where = jnp.where(slot_mapping < 0, len(slots), slot_mapping)  # JAX would count a negative one from the end.
    return slots.at[where].set(new.astype(pages.dtype), mode="drop").reshape(pages.shape)


def gather(pages, scale, block_tables):
    """The pages of each sequence one after the other, (num_seqs, tokens, kv_heads, head_dim), times their scale; zeros
    for an id that is no page."""
    there = ((block_tables >= 0) & (block_tables < len(pages)))[:, :, None, None, None]
    dtype = jnp.float32 if pages.dtype.itemsize == 1 else jnp.promote_types(pages.dtype, jnp.float32)
    rows = jnp.where(there, pages[block_tables].astype(dtype), 0) * jnp.reshape(jnp.asarray(scale), (-1, 1))
    return rows.reshape(len(block_tables), -1, *pages.shape[2:])

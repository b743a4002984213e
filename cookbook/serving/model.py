"""A decoder as Llama's: RMSNorm, rotary positions, grouped-query attention, SwiGLU; over a paged cache.

Its variants: heads of queries and keys that are normalised (Qwen3), a mixture of experts in place of the MLP (Mixtral,
Qwen3-MoE), Llama 3's rotary frequencies.

Parameters are a flat dict. A weight is (outputs, inputs), under its name in Hugging Face's checkpoints:
`model.layers.0.self_attn.q_proj.weight` is the first layer's of queries. Experts' weights are joined and (experts,
inputs, outputs), as `cookbook.moe` takes them. Weights, activations that are multiplied by them, and pages are of
`LlamaConfig.dtype`; the residual stream, normalisation and logits are float32.

Not supported: biases, windows of attention.
Source: Touvron et al., "LLaMA: Open and Efficient Foundation Language Models" (2023).
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from cookbook.serving.backends import backend as backend_of
from cookbook.serving.config import LlamaConfig, RopeScaling


def empty_pages(config: LlamaConfig, num_pages: int, page_size: int) -> list[tuple[jax.Array, jax.Array]]:
    """(k_pages, v_pages) of each layer: (num_pages, page_size, num_key_value_heads, head_dim) each, zeros."""
    shape = num_pages, page_size, config.num_key_value_heads, config.head_dim
    return [tuple(jnp.zeros(shape, config.dtype) for _ in "kv") for _ in range(config.num_hidden_layers)]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """T tokens of R sequences, packed one after the other, and padding after them."""

    tokens: jax.Array  # (T,) int32.
    positions: jax.Array  # (T,) int32: where a token stands in its sequence, from 0 on.
    slot_mapping: jax.Array  # (T,) int32: page * page_size + offset, where its keys and values go; -1 for padding.
    block_tables: jax.Array  # (R, pages a sequence) int32.
    kv_lens: jax.Array  # (R,) int32: tokens of each sequence, those of this batch included; 0 for padding.
    cu_seqlens_q: jax.Array  # (R + 1,) int32: sequence i has the tokens from cu_seqlens_q[i] to cu_seqlens_q[i + 1].
    temperatures: jax.Array  # (R,) float32.
    seeds: jax.Array  # (R,) uint32.
    top_ks: jax.Array  # (R,) int32.
    top_ps: jax.Array  # (R,) float32.
    min_ps: jax.Array  # (R,) float32.


def rotate(x, positions, theta: float, scaling: RopeScaling | None = None):
    """Rotary positions: value i and i + H / 2 of a head are turned by the angle position / theta**(2 i / H).

    Args:
      x: (T, heads, H).
      positions: (T,).
      scaling: changes the angles a token.

    Returns:
      float32.
    """
    half = x.shape[-1] // 2
    frequencies = theta ** (-np.arange(half) / half)
    frequencies = np.float32(scaling.scaled(frequencies) if scaling else frequencies)
    angles = positions[:, None, None] * frequencies
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def forward(config: LlamaConfig, params, pages, batch: Batch, *, backend: str, decode: bool):
    """The logits after the last token of each sequence of the batch.

    Args:
      params: of `init` or `load`.
      pages: of `empty_pages`.
      backend: "cookbook" or "xla".
      decode: whether each sequence has one token in the batch, and T = R.

    Returns:
      (R, vocab_size) float32, undefined where a sequence has no token; and the pages with the batch's tokens written.
    """
    ops, dtype = backend_of(backend), jnp.dtype(config.dtype)
    norm = lambda x, name: ops.rms_norm(x, params[f"{name}.weight"], eps=config.rms_norm_eps).astype(dtype)
    linear = lambda x, name, out=dtype: ops.matmul(x, params[f"{name}.weight"], transpose_b=True, out_dtype=out)
    heads = lambda x: x.reshape(x.shape[0], -1, config.head_dim)
    turned = lambda x: rotate(x, batch.positions, config.rope_theta, config.rope_scaling).astype(dtype)
    norm_heads = lambda x, name: norm(x.reshape(-1, config.head_dim), name).reshape(x.shape) if config.qk_norm else x

    x = params["model.embed_tokens.weight"][batch.tokens].astype(jnp.float32)
    pages = list(pages)
    for i in range(config.num_hidden_layers):
        layer = f"model.layers.{i}"
        y = norm(x, f"{layer}.input_layernorm")
        q, k = (heads(linear(y, f"{layer}.self_attn.{name}_proj")) for name in "qk")
        q, k = (turned(norm_heads(x, f"{layer}.self_attn.{name}_norm")) for x, name in ((q, "q"), (k, "k")))
        v = heads(linear(y, f"{layer}.self_attn.v_proj"))
        pages[i] = ops.write_kv(k, v, *pages[i], batch.slot_mapping)
        if decode:
            out = ops.paged_attention(q, *pages[i], batch.block_tables, batch.kv_lens)
        else:
            out = ops.ragged_paged_attention(q, *pages[i], batch.block_tables, batch.kv_lens, batch.cu_seqlens_q)
        x = x + linear(out.reshape(x.shape[0], -1), f"{layer}.self_attn.o_proj", jnp.float32)
        y = norm(x, f"{layer}.post_attention_layernorm")
        if config.num_experts:
            experts = (params[f"{layer}.mlp.experts.{name}_proj.weight"] for name in ("gate_up", "down"))
            router_logits = linear(y, f"{layer}.mlp.gate", jnp.float32)
            x = x + ops.moe(
                y, router_logits, *experts, top_k=config.num_experts_per_tok, renormalize=config.norm_topk_prob
            )
        else:
            gated = ops.swiglu(linear(y, f"{layer}.mlp.gate_proj"), linear(y, f"{layer}.mlp.up_proj"))
            x = x + linear(gated, f"{layer}.mlp.down_proj", jnp.float32)
    last = x if decode else x[jnp.maximum(batch.cu_seqlens_q[1:] - 1, 0)]
    head = "model.embed_tokens" if config.tie_word_embeddings else "lm_head"
    return linear(norm(last, "model.norm"), head, jnp.float32), pages

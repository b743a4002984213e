"""A decoder as Llama's: RMSNorm, rotary positions, grouped-query attention, SwiGLU; over a paged cache.

Its variants: heads of queries and keys that are normalised (Qwen3), a mixture of experts in place of the MLP (Mixtral,
Qwen3-MoE), Llama 3's rotary frequencies and YaRN's; biases, windows of attention in some layers, attention sinks and a
clamped SwiGLU (gpt-oss).

Parameters are a flat dict. A weight is (outputs, inputs), under its name in Hugging Face's checkpoints:
`model.layers.0.self_attn.q_proj.weight` is the first layer's of queries. Experts' weights are joined and (experts,
inputs, outputs), as `cookbook.moe` takes them. Weights, activations that are multiplied by them, and pages are of
`LlamaConfig.dtype`, pages also of float8_e4m3fn; the residual stream, normalisation and logits are float32. `forward`
takes them as `weights.prepared` gives them: joined, and in 8 bits if wanted.

A layer of a step that decodes is as few kernels as there are points where all tokens, or all of a row, have to meet:

    norm (adds the residual)  ->  product q, k, v  ->  rotation and write to the pages  ->  attention, and its merge
    ->  product o  ->  norm (adds the residual)  ->  product gate, up with SwiGLU  ->  product down

and with experts, whose rows the next norm weights and adds to the residual,

    ->  product of the router  ->  routing, which copies rows  ->  product gate, up with SwiGLU  ->  product down

Source: Touvron et al., "LLaMA: Open and Efficient Foundation Language Models" (2023).
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from serving.backends import backend as backend_of
from serving.config import LlamaConfig, RopeScaling, YarnScaling
from serving.weights import rows_of


def empty_pages(
    config: LlamaConfig, num_pages: int, page_size: int, kv_cache_dtype: str | None = None
) -> tuple[jax.Array, jax.Array]:
    """(k_pages, v_pages): (page_layers, num_pages, page_size, num_key_value_heads, head_dim) each, zeros; of
    float8_e4m3fn if `kv_cache_dtype` is "fp8". The host hands over each array in each step, so that two cost less than
    two a layer.
    """
    shape = config.page_layers, num_pages, page_size, config.num_key_value_heads, config.head_dim
    dtype = jnp.float8_e4m3fn if kv_cache_dtype == "fp8" else config.dtype
    return jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """T tokens of R sequences, packed one after the other, and padding after them."""

    tokens: jax.Array  # (T,) int32.
    positions: jax.Array  # (T,) int32: where a token stands in its sequence, from 0 on.
    slot_mapping: jax.Array  # (T,) int32: page * page_size + offset, where its keys and values go; -1 for padding.
    block_tables: jax.Array  # (R, pages a sequence) int32.
    # With windows, the same of the layers that have one; an entry is -1 where the page is given back.
    window_slot_mapping: jax.Array | None = None
    window_tables: jax.Array | None = None
    kv_lens: jax.Array  # (R,) int32: tokens of each sequence, those of this batch included; 0 for padding.
    cu_seqlens_q: jax.Array  # (R + 1,) int32: sequence i has the tokens from cu_seqlens_q[i] to cu_seqlens_q[i + 1].
    temperatures: jax.Array  # (R,) float32.
    seeds: jax.Array  # (R,) uint32.
    top_ks: jax.Array  # (R,) int32.
    top_ps: jax.Array  # (R,) float32.
    min_ps: jax.Array  # (R,) float32.


def angles(positions, head_dim: int, theta: float, scaling: RopeScaling | YarnScaling | None = None):
    """cos and sin, (T, head_dim / 2) float32 each, of the angles position / theta**(2 i / head_dim).

    Args:
      positions: (T,).
      scaling: changes the angles a token, and multiplies both results by its `attention_factor`.
    """
    half = head_dim // 2
    frequencies = theta ** (-np.arange(half) / half)
    frequencies = np.float32(scaling.scaled(frequencies, theta) if scaling else frequencies)
    turned = positions[:, None] * frequencies
    cos, sin = jnp.cos(turned), jnp.sin(turned)
    if scaling and scaling.attention_factor != 1:
        return cos * scaling.attention_factor, sin * scaling.attention_factor
    return cos, sin


def rotate(x, positions, theta: float, scaling: RopeScaling | YarnScaling | None = None):
    """Rotary positions: values i and i + H / 2 of a head are turned by the i-th of its token's `angles`.

    Args:
      x: (T, heads, H).
      positions: (T,).
      scaling: changes the angles a token.

    Returns:
      float32.
    """
    cos, sin = (part[:, None] for part in angles(positions, x.shape[-1], theta, scaling))
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def forward(config: LlamaConfig, weights, pages, batch: Batch, *, backend: str, decode: bool):
    """The logits after the last token of each sequence of the batch.

    Args:
      weights: of `prepared`.
      pages: of `empty_pages`.
      backend: "cookbook" or "xla".
      decode: whether each sequence has one token in the batch, and T = R.

    Returns:
      (R, vocab_size) float32, undefined where a sequence has no token; and the pages with the batch's tokens written.
    """
    ops, dtype, rows = backend_of(backend), jnp.dtype(config.dtype), batch.tokens.shape[0]
    weight = lambda name: weights[f"{name}.weight"]
    attend = ops.paged_attention if decode else ops.ragged_paged_attention
    lens = batch.kv_lens, *(() if decode else (batch.cu_seqlens_q,))
    shape, layers, places = pages[0].shape, np.arange(config.page_layers, dtype=np.int32), config.places_in_page
    pages = [x.reshape(-1, *shape[2:]) for x in pages]  # One layer's after the other's.

    def in_layers(size: int, *kinds):
        """Pages or slots of each kind of layers in all layers, which have `size` each: two launches for the model."""
        numbers = jnp.stack(kinds if config.window_layers else kinds[:1])[:, None]
        first = layers.reshape(-1, *[1] * (numbers.ndim - 2)) * size
        return jnp.where(numbers < 0, -1, numbers + first)

    tables = in_layers(shape[1], batch.block_tables, batch.window_tables)
    slots = in_layers(shape[1] * shape[2], batch.slot_mapping, batch.window_slot_mapping)
    turns = angles(batch.positions, config.head_dim, config.rope_theta, config.rope_scaling)

    def linear(x, name, out=dtype):
        return ops.linear(x, weight(name), out, weights.get(f"{name}.bias"))

    def normed(x, added, name):
        """The norm of x + added, and that sum: the residual, which stays float32."""
        how = dict(scale=weight(name), eps=config.rms_norm_eps, out_dtype=dtype)
        if isinstance(added, tuple):  # Rows of experts, their places and weights.
            return ops.rms_norm_of_parts(*added, residual=x, **how)
        return (ops.rms_norm(x, **how), x) if added is None else ops.rms_norm(added, residual=x, **how)

    x, added = rows_of(weight("model.embed_tokens"), batch.tokens), None
    for i in range(config.num_hidden_layers):
        layer = f"model.layers.{i}"
        y, x = normed(x, added, f"{layer}.input_layernorm")
        qkv = linear(y, f"{layer}.self_attn.qkv_proj").reshape(rows, -1, config.head_dim)
        norms = {f"{name}_norm": weight(f"{layer}.self_attn.{name}_norm") for name in "qk" if config.qk_norm}
        how = dict(sinks=weights[f"{layer}.self_attn.sinks"]) if config.attention_sinks else {}
        kind, at = int(i in config.window_layers), places[i]
        if kind:
            how |= dict(local_window_size=config.sliding_window - 1)  # Without the token that asks.
        q, *pages = ops.rope_write_kv(qkv, *turns, *pages, slots[kind, at], eps=config.rms_norm_eps, **norms)
        out = attend(q, *pages, tables[kind, at], *lens, **how)
        added = linear(out.reshape(rows, -1), f"{layer}.self_attn.o_proj", jnp.float32)
        y, x = normed(x, added, f"{layer}.post_attention_layernorm")
        if config.num_experts:
            experts = (weight(f"{layer}.mlp.experts.{name}_proj") for name in ("gate_up", "down"))
            router_logits = linear(y, f"{layer}.mlp.gate", jnp.float32)
            how = dict(top_k=config.num_experts_per_tok, renormalize=config.norm_topk_prob)
            if config.expert_bias:
                how |= {f"b_{name}": weights[f"{layer}.mlp.experts.{name}_proj.bias"] for name in ("gate_up", "down")}
            if config.swiglu_limit is not None:
                how |= dict(swiglu_limit=config.swiglu_limit)
            added = ops.experts(y, router_logits, *experts, **how)
        else:
            added = linear(ops.gated(y, weight(f"{layer}.mlp.gate_up_proj")), f"{layer}.mlp.down_proj", jnp.float32)
    if not decode:
        last = jnp.maximum(batch.cu_seqlens_q[1:] - 1, 0)
        x, added = (
            x[last],
            (added[0], *(of_tokens[last] for of_tokens in added[1:])) if config.num_experts else added[last],
        )
    y, _ = normed(x, added, "model.norm")
    head = "model.embed_tokens" if config.tie_word_embeddings else "lm_head"
    return linear(y, head, jnp.float32), tuple(x.reshape(shape) for x in pages)

"""A tiny decoder trained on the spot, in seconds on one core, and its perplexity as the engine's steps have it.

Random weights say nothing about quantisation: their logits mean nothing, and every error looks alike. The text is of a
random process that takes attention to learn: the next token depends on the last two, in ways drawn at random.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from serving import LlamaConfig, init
from serving.model import empty_pages, forward, rotate
from serving.step import padding
from serving.weights import prepared

CONFIG = LlamaConfig(32, 64, 128, 2, 2, 1, 64, dtype="float32", tie_word_embeddings=True)
PAGE = 16


def texts(count: int, length: int, seed: int, vocab: int = CONFIG.vocab_size) -> np.ndarray:
    """(count, length) tokens. The process is the same for every seed: each pair of tokens has three successors."""
    process = np.random.default_rng(12)
    successors, odds = process.integers(0, vocab, (vocab, vocab, 3)), np.float64([0.7, 0.2, 0.1])
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, vocab, (count, length)).astype(np.int32)
    for i in range(2, length):
        tokens[:, i] = successors[tokens[:, i - 2], tokens[:, i - 1], rng.choice(3, count, p=odds)]
    return tokens


def loss(params, tokens, config: LlamaConfig = CONFIG):
    """Mean negative log probability of each token after the first two, of dense sequences, which `jax.grad` takes."""
    count, length = tokens.shape
    norm = lambda x, name: (
        x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + config.rms_norm_eps) * params[f"{name}.weight"]
    )
    heads = lambda x: rotate(x.reshape(count * length, -1, config.head_dim), positions, config.rope_theta)
    positions, x = jnp.tile(jnp.arange(length), count), params["model.embed_tokens.weight"][tokens]
    for i in range(config.num_hidden_layers):
        layer = f"model.layers.{i}"
        linear = lambda x, name, layer=layer: x @ params[f"{layer}.{name}.weight"].T
        y = norm(x, f"{layer}.input_layernorm")
        q, k = (heads(linear(y, f"self_attn.{name}_proj")).reshape(count, length, -1, config.head_dim) for name in "qk")
        v = linear(y, "self_attn.v_proj").reshape(k.shape)
        out = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + linear(out.reshape(count, length, -1), "self_attn.o_proj")
        y = norm(x, f"{layer}.post_attention_layernorm")
        x = x + linear(jax.nn.silu(linear(y, "mlp.gate_proj")) * linear(y, "mlp.up_proj"), "mlp.down_proj")
    logits = norm(x, "model.norm")[:, 1:-1] @ params["model.embed_tokens.weight"].T
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 2:, None], axis=-1)
    return -jnp.mean(chosen)


@functools.cache
def trained(steps: int = 400, rate: float = 4e-3) -> dict[str, jax.Array]:
    """Parameters after so many steps of Adam, each on 24 new texts."""

    @jax.jit
    def update(i, params, means, squares, tokens):
        gradients = jax.grad(loss)(params, tokens)
        means = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, means, gradients)
        squares = jax.tree.map(lambda s, g: 0.99 * s + 0.01 * g * g, squares, gradients)
        unbiased = jax.tree.map(lambda m, s: m / (1 - 0.9**i) / (jnp.sqrt(s / (1 - 0.99**i)) + 1e-8), means, squares)
        pace = rate * jnp.minimum(1.0, 2 * (1 - i / (steps + 1)))
        return jax.tree.map(lambda p, u: p - pace * u, params, unbiased), means, squares

    params = init(CONFIG)
    means = squares = jax.tree.map(jnp.zeros_like, params)
    for i in range(steps):
        params, means, squares = update(jnp.float32(i + 1), params, means, squares, texts(24, 34, 1000 + i))
    return params


def perplexity(
    config: LlamaConfig, params, tokens, *, weights: str | None = None, kv_cache_dtype: str | None = None,
    backend: str = "xla",
) -> float:  # fmt: skip
    """exp of the mean negative log probability of texts (count, length), each token after the first two; by steps that
    decode, token by token over a paged cache, as the engine runs them."""
    (count, length), each = tokens.shape, -(-tokens.shape[1] // PAGE)
    params = {name: value.astype(config.dtype) for name, value in params.items()}
    prepared_weights = prepared(config, params, weights)
    batch = padding(count, each, count)
    batch.block_tables[:] = np.arange(count * each).reshape(count, each)
    run = jax.jit(functools.partial(forward, config, backend=backend, decode=True), donate_argnums=1)
    pages, total = empty_pages(config, count * each, PAGE, kv_cache_dtype), 0.0
    for i in range(length - 1):
        batch.tokens[:], batch.positions[:], batch.kv_lens[:] = tokens[:, i], i, i + 1
        batch.slot_mapping[:] = batch.block_tables[:, i // PAGE] * PAGE + i % PAGE
        # XLA may read NumPy's arrays later, in place: it gets copies.
        logits, pages = run(prepared_weights, pages, jax.tree.map(np.copy, batch))
        if i:
            total -= np.take_along_axis(np.asarray(jax.nn.log_softmax(logits)), tokens[:, i + 1, None], axis=1).mean()
    return float(np.exp(total / (length - 2)))

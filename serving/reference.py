"""Reference for the engine's tokens: one sequence at a time, token by token, a dense cache, all in float32."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from serving.config import LlamaConfig
from serving.model import rotate
from serving.request import Request
from serving.sampling import scores


def generate(config: LlamaConfig, params, request: Request, max_seq_len: int) -> tuple[list[int], np.ndarray]:
    """Generates what the engine should for a request's prompt and options.

    Args:
      params: of `init` or `load`; the arithmetic with them is float32.
      max_seq_len: tokens of the cache; at least those of the prompt and all new ones.

    Returns:
      The new tokens; and the scores of which each has the largest, (new tokens, vocab_size) float32. Where the two
      largest differ by less than rounding moves them, another implementation may rightly choose the other token.

    Raises:
      ValueError: the cache is too short, or the model one that this reference does not have.
    """
    if config.qk_norm or config.num_experts or config.attention_bias or config.attention_sinks or config.window_layers:
        raise ValueError(
            f"generate: {config}; must have no norms of heads, experts, biases, sinks or windows, which are not in here"
        )
    if request.top_k or request.top_p < 1 or request.min_p:
        raise ValueError("generate: top_k, top_p and min_p are not in here; must be None, 1 and 0")
    num_prompt, most = len(request.prompt), len(request.prompt) + request.max_new_tokens
    if most > max_seq_len:
        raise ValueError(f"generate: {max_seq_len=} must be at least {most}, the tokens of the prompt and the new ones")
    tokens = np.zeros(max_seq_len, np.int32)
    tokens[:num_prompt] = request.prompt
    stop = np.isin(np.arange(config.vocab_size), list(request.stop_tokens))
    options = np.float32([request.temperature]), np.uint32([request.seed])
    end, tokens, chosen_of = jax.device_get(_decode(config, params, tokens, num_prompt, most, stop, *options))
    return tokens[num_prompt:end].tolist(), chosen_of[num_prompt:end]


@functools.partial(jax.jit, static_argnames=("config",))
def _decode(config: LlamaConfig, params, tokens, num_prompt, most, stop, temperature, seed):
    """How many tokens there are in the end, the tokens (max_seq_len,), and the scores (max_seq_len, vocab_size)."""
    params = jax.tree.map(lambda value: value.astype(jnp.float32), params)
    shape = config.num_hidden_layers, 2, tokens.size, config.num_key_value_heads, config.head_dim

    def add_token(state):
        position, _, tokens, chosen_of, cache = state
        logits, cache = _logits(config, params, cache, tokens[position], position)
        position += 1
        noisy = scores(logits[None], temperature, seed, position[None])[0]
        best, is_new = jnp.argmax(noisy), position >= num_prompt
        tokens = tokens.at[position].set(jnp.where(is_new, best, tokens[position]))
        return position, is_new & stop[best], tokens, chosen_of.at[position].set(noisy), cache

    more = lambda state: (state[0] < most - 1) & ~state[1]
    chosen_of = jnp.zeros((tokens.size, config.vocab_size))
    start = jnp.int32(0), jnp.bool_(False), tokens, chosen_of, jnp.zeros(shape)
    position, _, tokens, chosen_of, _ = jax.lax.while_loop(more, add_token, start)
    return position + 1, tokens, chosen_of


def _logits(config: LlamaConfig, params, cache, token, position):
    """The logits (vocab_size,) after a token at a position, and the cache with its keys and values."""
    with jax.default_matmul_precision("highest"):
        x = params["model.embed_tokens.weight"][token]
        for i in range(config.num_hidden_layers):
            weight = lambda name, i=i: params[f"model.layers.{i}.{name}.weight"]
            y = _norm(config, x, weight("input_layernorm"))
            q, k, v = ((weight(f"self_attn.{name}_proj") @ y).reshape(-1, config.head_dim) for name in "qkv")
            rope = config.rope_theta, config.rope_scaling
            q, k = (rotate(part[None], jnp.reshape(position, 1), *rope)[0] for part in (q, k))
            cache = cache.at[i, :, position].set(jnp.stack([k, v]))
            k, v = (jnp.repeat(part, q.shape[0] // k.shape[0], axis=1) for part in cache[i])
            s = jnp.einsum("nh,snh->ns", q, k) * config.head_dim**-0.5
            p = jax.nn.softmax(jnp.where(jnp.arange(k.shape[0]) <= position, s, -jnp.inf), axis=-1)
            x = x + weight("self_attn.o_proj") @ jnp.einsum("ns,snh->nh", p, v).reshape(-1)
            y = _norm(config, x, weight("post_attention_layernorm"))
            x = x + weight("mlp.down_proj") @ (jax.nn.silu(weight("mlp.gate_proj") @ y) * (weight("mlp.up_proj") @ y))
        head = "model.embed_tokens" if config.tie_word_embeddings else "lm_head"
        return params[f"{head}.weight"] @ _norm(config, x, params["model.norm.weight"]), cache


def _norm(config: LlamaConfig, x, scale):
    return x * jax.lax.rsqrt(jnp.mean(x * x) + config.rms_norm_eps) * scale

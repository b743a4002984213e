"""Sizes and options of a decoder, and the shapes of its parameters."""

import dataclasses
import functools
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from cookbook import _host
from serving.defaults import under_defaults


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Llama 3's rotary frequencies for texts longer than those of the first training.

    Wavelengths above `original_max_position_embeddings / low_freq_factor` grow by `factor`, those below the same over
    `high_freq_factor` stay, and those between are interpolated.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def __post_init__(self):
        _convert_numbers(self)
        if not (self.factor >= 1 and 0 < self.low_freq_factor < self.high_freq_factor):
            raise ValueError(f"{self}: factor must be at least 1, and 0 < low_freq_factor < high_freq_factor")
        if self.original_max_position_embeddings < 1:
            raise ValueError(f"{self}: original_max_position_embeddings must be at least 1")

    def scaled(self, frequencies):
        """The frequencies in place of `frequencies`, in radians a token."""
        turns = self.original_max_position_embeddings * frequencies / (2 * math.pi)
        kept = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        kept = np.clip(kept, 0, 1)
        return frequencies * (kept + (1 - kept) / self.factor)


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """Sizes, most of them under the names of Hugging Face's `config.json`."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int  # With experts, that of each.
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False  # Whether logits are products with the embeddings.
    dtype: str = "bfloat16"  # dtype of weights and pages.
    rope_scaling: RopeScaling | None = None
    qk_norm: bool = False  # Whether the heads of queries and keys are normalised, as in Qwen3.
    num_experts: int = 0  # 0: no mixture, but one MLP.
    num_experts_per_tok: int = 0
    norm_topk_prob: bool = True  # Whether the weights of a token's experts add up to 1.
    max_position_embeddings: int | None = None  # Tokens of the longest sequence; None: whatever the cache holds.
    eos_token_ids: tuple[int, ...] = ()  # Tokens with which a request ends if it does not say otherwise.

    def __post_init__(self):
        _convert_numbers(self)
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type is int and field.name[:11] != "num_experts" and not value >= 1:
                raise ValueError(f"LlamaConfig: {field.name} = {value}; must be at least 1")
        if self.rope_theta <= 0 or self.rms_norm_eps < 0:
            raise ValueError(f"{self.rope_theta=} must be above 0, {self.rms_norm_eps=} at least 0")
        if self.max_position_embeddings is not None and self.max_position_embeddings < 1:
            raise ValueError(f"{self.max_position_embeddings=} must be at least 1, or None for what the cache holds")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"{self.num_attention_heads=} must be a multiple of {self.num_key_value_heads=}: each key head serves "
                "the same number of query heads"
            )
        if self.head_dim % 2:
            raise ValueError(f"{self.head_dim=} must be even: rotary positions turn pairs")
        if self.dtype not in ("bfloat16", "float16", "float32"):
            raise ValueError(f"{self.dtype=} must be bfloat16, float16 or float32")
        if self.num_experts and not 1 <= self.num_experts_per_tok <= self.num_experts:
            raise ValueError(f"{self.num_experts_per_tok=} must be from 1 to {self.num_experts=}")
        if any(not 0 <= token < self.vocab_size for token in self.eos_token_ids):
            raise ValueError(f"{self.eos_token_ids=} must be tokens, from 0 to {self.vocab_size - 1}")

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each parameter, by name."""
        d, q, kv = self.hidden_size, *(n * self.head_dim for n in (self.num_attention_heads, self.num_key_value_heads))
        layer = {
            "input_layernorm": (d,),
            "self_attn.q_proj": (q, d),
            "self_attn.k_proj": (kv, d),
            "self_attn.v_proj": (kv, d),
            "self_attn.o_proj": (d, q),
            "post_attention_layernorm": (d,),
        }
        if self.qk_norm:
            layer |= {"self_attn.q_norm": (self.head_dim,), "self_attn.k_norm": (self.head_dim,)}
        if self.num_experts:
            layer |= {
                "mlp.gate": (self.num_experts, d),
                "mlp.experts.gate_up_proj": (self.num_experts, d, 2 * self.intermediate_size),
                "mlp.experts.down_proj": (self.num_experts, self.intermediate_size, d),
            }
        else:
            layer |= {
                "mlp.gate_proj": (self.intermediate_size, d),
                "mlp.up_proj": (self.intermediate_size, d),
                "mlp.down_proj": (d, self.intermediate_size),
            }
        shapes = {
            f"model.layers.{i}.{name}.weight": shape
            for i in range(self.num_hidden_layers)
            for name, shape in layer.items()
        }
        shapes |= {"model.embed_tokens.weight": (self.vocab_size, d), "model.norm.weight": (d,)}
        return shapes if self.tie_word_embeddings else shapes | {"lm_head.weight": (self.vocab_size, d)}

    @property
    def page_bytes_per_token(self) -> int:
        """Keys and values of one token, in all layers."""
        return 2 * self.num_hidden_layers * self.num_key_value_heads * self.head_dim * jnp.dtype(self.dtype).itemsize


def _convert_numbers(config) -> None:
    """Makes each number of a frozen dataclass one of Python's, and says which one cannot be."""
    for field in dataclasses.fields(config):
        kind, value = field.type, getattr(config, field.name)
        convert = functools.partial(_host.option, f"serving.{type(config).__name__}", field.name)
        if kind == int | None and value is not None:
            kind = int
        if kind == tuple[int, ...]:
            value = tuple(convert(token, int) for token in ([value] if np.ndim(value) == 0 else value))
        elif kind in (int, float, bool):
            value = convert(value, kind)
        object.__setattr__(config, field.name, value)


def check_params(config: LlamaConfig, params) -> None:
    """Compares parameters with what a model of these sizes has.

    Raises:
      ValueError: one is missing, unknown, or of another shape or dtype.
    """
    if not isinstance(params, Mapping):
        raise ValueError(f"params: {type(params).__name__}; must be a dict of arrays: take that of init or load")
    shapes = config.shapes
    if missing := sorted(shapes.keys() - params.keys()):
        raise ValueError(f"params: lacks {len(missing)} parameter(s), such as {missing[0]}, of {config}")
    if unknown := sorted(params.keys() - shapes.keys()):
        raise ValueError(f"params: has {len(unknown)} unknown parameter(s), such as {unknown[0]}; {config} has no such")
    for name, value in params.items():
        if value.shape != shapes[name] or value.dtype != config.dtype:
            raise ValueError(
                f"params: {name} is {value.shape}, {value.dtype}; must be {shapes[name]}, {config.dtype}, for {config}"
            )


@under_defaults
def init(config: LlamaConfig, seed: int = 0) -> dict[str, jax.Array]:
    """Random parameters: products keep the variance of what is multiplied, norms' scales are near 1."""
    params = {}
    for i, (name, shape) in enumerate(config.shapes.items()):
        noise = jax.random.normal(jax.random.fold_in(jax.random.key(seed), i), shape, jnp.float32)
        if len(shape) == 1:
            noise = 1 + 0.1 * noise
        elif name != "model.embed_tokens.weight" or config.tie_word_embeddings:
            noise *= shape[1] ** -0.5  # Inputs of a product come second, in experts' weights too.
        params[name] = noise.astype(config.dtype)
    return params

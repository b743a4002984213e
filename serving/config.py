"""Sizes and options of a decoder, and the shapes of its parameters."""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from cookbook import _host
from serving import quantized
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
    attention_factor: ClassVar[float] = 1.0

    def __post_init__(self):
        _convert_numbers(self)
        if not (self.factor >= 1 and 0 < self.low_freq_factor < self.high_freq_factor):
            raise ValueError(f"{self}: factor must be at least 1, and 0 < low_freq_factor < high_freq_factor")
        if self.original_max_position_embeddings < 1:
            raise ValueError(f"{self}: original_max_position_embeddings must be at least 1")

    def scaled(self, frequencies, theta: float):
        """The frequencies in place of `frequencies`, in radians per token; `theta` is their base."""
        turns = self.original_max_position_embeddings * frequencies / (2 * math.pi)
        kept = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        kept = np.clip(kept, 0, 1)
        return frequencies * (kept + (1 - kept) / self.factor)


@dataclasses.dataclass(frozen=True)
class YarnScaling:
    """YaRN's rotary frequencies, as gpt-oss has them.

    Pairs that turn more than `beta_fast` times within `original_max_position_embeddings` tokens keep their frequency,
    those that turn fewer than `beta_slow` times are slowed down by `factor`, and those between are interpolated.

    Source: Peng et al., "YaRN: Efficient Context Window Extension of Large Language Models" (2023).
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True  # Whether the pairs between which frequencies are interpolated are whole numbers.
    attention_factor: float | None = None  # By which cosines and sines are multiplied; None: 0.1 ln(factor) + 1.

    def __post_init__(self):
        if self.attention_factor is None:
            object.__setattr__(self, "attention_factor", 0.1 * math.log(max(float(self.factor), 1.0)) + 1.0)
        _convert_numbers(self)
        if not (self.factor >= 1 and 0 < self.beta_slow < self.beta_fast and self.attention_factor > 0):
            raise ValueError(f"{self}: factor must be at least 1, 0 < beta_slow < beta_fast, and 0 < attention_factor")
        if self.original_max_position_embeddings < 1:
            raise ValueError(f"{self}: original_max_position_embeddings must be at least 1")

    def scaled(self, frequencies, theta: float):
        """The frequencies in place of `frequencies`, in radians per token; `theta` is their base."""
        half = len(frequencies)
        turning = lambda turns: (  # The pair, as a real number, that turns so many times.
            half * math.log(self.original_max_position_embeddings / (turns * 2 * math.pi)) / math.log(theta)
        )
        low, high = turning(self.beta_fast), turning(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * half - 1)
        high = high + 0.001 if low == high else high
        slowed = np.clip((np.arange(half) - low) / (high - low), 0, 1)
        return frequencies * (1 - slowed + slowed / self.factor)


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
    rope_scaling: RopeScaling | YarnScaling | None = None
    qk_norm: bool = False  # Whether the heads of queries and keys are normalised, as in Qwen3.
    num_experts: int = 0  # 0: no mixture, but one MLP.
    num_experts_per_tok: int = 0
    norm_topk_prob: bool = True  # Whether the weights of a token's experts add up to 1.
    max_position_embeddings: int | None = None  # Tokens of the longest sequence; None: whatever the cache holds.
    eos_token_ids: tuple[int, ...] = ()  # Tokens with which a request ends if it does not say otherwise.
    attention_bias: bool = False  # Whether the products of attention have biases.
    attention_sinks: bool = False  # Whether each head has a logit beside those of its keys, without a value.
    sliding_window: int | None = None  # Tokens that a layer of `window_layers` sees, the one that asks included.
    window_layers: tuple[int, ...] = ()
    expert_bias: bool = False  # Whether the router and the products of experts have biases.
    swiglu_limit: float | None = None  # At which gpt-oss's SwiGLU clamps; None for silu(gate) * up.

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
        if (self.expert_bias or self.swiglu_limit is not None) and not self.num_experts:
            raise ValueError(f"{self.expert_bias=}, {self.swiglu_limit=}; must be False and None without experts")
        if self.swiglu_limit is not None and not self.swiglu_limit > 0:
            raise ValueError(f"{self.swiglu_limit=} must be above 0, or None")
        if self.window_layers and (self.sliding_window is None or self.sliding_window < 1):
            raise ValueError(f"{self.sliding_window=} must be at least 1, for {self.window_layers=}")
        if not set(self.window_layers) < set(range(self.num_hidden_layers)):
            raise ValueError(
                f"{self.window_layers=} must be some of the {self.num_hidden_layers} layers, from 0 on, and not all"
            )
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
        biases = {}
        if self.attention_bias:
            biases |= {f"self_attn.{name}_proj.bias": (n,) for name, n in (("q", q), ("k", kv), ("v", kv), ("o", d))}
        if self.attention_sinks:
            biases |= {"self_attn.sinks": (self.num_attention_heads,)}
        if self.expert_bias:
            biases |= {
                "mlp.gate.bias": (self.num_experts,),
                "mlp.experts.gate_up_proj.bias": (self.num_experts, 2 * self.intermediate_size),
                "mlp.experts.down_proj.bias": (self.num_experts, d),
            }
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
        layer = {f"{name}.weight": shape for name, shape in layer.items()} | biases
        shapes = {
            f"model.layers.{i}.{name}": shape for i in range(self.num_hidden_layers) for name, shape in layer.items()
        }
        shapes |= {"model.embed_tokens.weight": (self.vocab_size, d), "model.norm.weight": (d,)}
        return shapes if self.tie_word_embeddings else shapes | {"lm_head.weight": (self.vocab_size, d)}

    @property
    def window(self) -> int | None:
        """`sliding_window`, if a layer has one."""
        return self.sliding_window if self.window_layers else None

    @property
    def page_layers(self) -> int:
        """Layers whose keys and values a page holds: those with a window, or the others, whichever are more."""
        return max(len(self.window_layers), self.num_hidden_layers - len(self.window_layers))

    @property
    def places_in_page(self) -> tuple[int, ...]:
        """For each layer, how many layers of its kind come before it."""
        counts, places = [0, 0], []
        for i in range(self.num_hidden_layers):
            kind = i in self.window_layers
            places.append(counts[kind])
            counts[kind] += 1
        return tuple(places)

    @property
    def page_bytes_per_token(self) -> int:
        """Keys and values of one token in a page."""
        return 2 * self.page_layers * self.num_key_value_heads * self.head_dim * jnp.dtype(self.dtype).itemsize


def _convert_numbers(config) -> None:
    """Makes each number of a frozen dataclass one of Python's, and says which one cannot be."""
    for field in dataclasses.fields(config):
        kind, value = field.type, getattr(config, field.name)
        convert = functools.partial(_host.option, f"serving.{type(config).__name__}", field.name)
        if kind in (int | None, float | None) and value is not None:
            kind = int if kind == int | None else float
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
        if isinstance(value, quantized.Packed):
            if not value.is_of(shapes[name]) or name == "model.embed_tokens.weight":
                of = jax.tree.map(lambda x: x.shape, value)
                raise ValueError(f"params: {name} is {of}; must stand for {shapes[name]}, and embeddings be floats")
        elif value.shape != shapes[name] or value.dtype != config.dtype:
            raise ValueError(
                f"params: {name} is {value.shape}, {value.dtype}; must be {shapes[name]}, {config.dtype}, for {config}"
            )


@under_defaults
def init(config: LlamaConfig, seed: int = 0, packing: str | None = None) -> dict[str, jax.Array]:
    """Random parameters: products keep the variance of what is multiplied, norms' scales are near 1.

    With `packing` "mxfp4" experts' weights are packed, and with "int4" all matrices of layers but routers.

    Raises:
      ValueError: there is no such packing.
    """
    if packing not in (None, "mxfp4", "int4"):
        raise ValueError(f'init: {packing=}; must be None, "mxfp4" or "int4"')
    params = {}
    for i, (name, shape) in enumerate(config.shapes.items()):
        key = jax.random.fold_in(jax.random.key(seed), i)
        is_expert, is_product = ".mlp.experts." in name, "_proj." in name
        if packing and name.endswith(".weight") and (is_expert if packing == "mxfp4" else is_product):
            params[name] = quantized.random(key, shape, config.dtype, packing)
            continue
        noise = jax.random.normal(key, shape, jnp.float32)
        if name.endswith((".bias", ".sinks")):
            noise *= 0.1
        elif len(shape) == 1:
            noise = 1 + 0.1 * noise
        elif name != "model.embed_tokens.weight" or config.tie_word_embeddings:
            noise *= shape[1] ** -0.5  # Inputs of a product come second, in experts' weights too.
        params[name] = noise.astype(config.dtype)
    return params

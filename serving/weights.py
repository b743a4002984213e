"""A model's parameters as its steps multiply by them: joined, and in 8 bits if wanted. Packed ones stay packed.

    name in a layer               is made of
    self_attn.qkv_proj            q_proj, k_proj and v_proj, one below the other: one product in place of three
    mlp.gate_up_proj              gate_proj and up_proj

All others keep their names. Each weight of 8 bits is an `Int8`, with a scale for each of its outputs. Biases and sinks
are float32, as kernels read them: a cast in a step would be a launch.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from serving.config import LlamaConfig
from serving.quantized import Packed, joined

JOINED = {"self_attn.qkv_proj": [f"self_attn.{name}_proj" for name in "qkv"],
          "mlp.gate_up_proj": ["mlp.gate_proj", "mlp.up_proj"]}  # fmt: skip


class Int8(NamedTuple):
    """A weight of (outputs, inputs): `values * scales[:, None]`."""

    values: jax.Array  # (outputs, inputs) int8.
    scales: jax.Array  # (outputs,) float32.


def prepared(config: LlamaConfig, params: dict[str, jax.Array], kind: str | None = None) -> dict:
    """The weights that `forward` takes, of the parameters that `init` and `load` give.

    Joined weights are copies: as long as the caller keeps `params`, both are in memory.

    Args:
      kind: None for weights as they are; "int8" for all matrices in 8 bits, each output channel with a scale.

    Raises:
      ValueError: there is no such kind, or the model has experts, which are not quantised, or packed weights.
    """
    if kind not in (None, "int8"):
        raise ValueError(f'weights = {kind!r}; must be None or "int8"')
    if kind and config.num_experts:
        raise ValueError(
            f"weights = {kind!r} with {config.num_experts} experts; must be None: experts are not quantised"
        )
    if kind and any(isinstance(value, Packed) for value in params.values()):
        raise ValueError(f"weights = {kind!r} with packed parameters; must be None: they have 4 bits already")
    weights = dict(params)
    for i in range(config.num_hidden_layers):
        for name_of_all, parts in JOINED.items():
            for kind_of in ("weight", "bias"):
                names = [f"model.layers.{i}.{name}.{kind_of}" for name in parts]
                if names[0] in weights:
                    whole = joined([weights.pop(name) for name in names], config.hidden_size, config.dtype)
                    weights[f"model.layers.{i}.{name_of_all}.{kind_of}"] = whole
    for name, value in weights.items():
        if name.endswith((".bias", ".sinks")):
            weights[name] = value.astype(jnp.promote_types(value.dtype, jnp.float32))
        elif kind and value.ndim == 2:
            weights[name] = quantised(value)
    return weights


@jax.jit
def quantised(weight) -> Int8:
    """A matrix in 8 bits: the largest value of each output is 127 of its scale."""
    wide = weight.astype(jnp.float32)
    scales = jnp.max(jnp.abs(wide), axis=1) / 127
    values = jnp.round(wide / jnp.where(scales > 0, scales, 1.0)[:, None])
    return Int8(values.astype(jnp.int8), scales)


def rows_of(weight, rows):
    """Some rows of a matrix, as float32: the embeddings of tokens."""
    if isinstance(weight, Int8):
        return weight.values[rows].astype(jnp.float32) * weight.scales[rows][:, None]
    return weight[rows].astype(jnp.float32)

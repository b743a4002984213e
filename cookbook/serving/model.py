"""A decoder as Llama's: RMSNorm, rotary positions, grouped-query attention, SwiGLU; over a paged cache.

Parameters are a flat dict with the names and shapes of Hugging Face's Llama checkpoints, so that `load` reads those: a
weight is (outputs, inputs), and `model.layers.0.self_attn.q_proj.weight` is the first layer's of queries. Weights,
activations that are multiplied by them, and pages are of `LlamaConfig.dtype`; the residual stream, normalisation and
logits are float32.

Not supported: scaled rotary frequencies (Llama 3.1's `rope_scaling`), biases.
Source: Touvron et al., "LLaMA: Open and Efficient Foundation Language Models" (2023).
"""

import dataclasses
import functools
import itertools
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from cookbook.serving.backends import backend as backend_of
from cookbook.serving.sampling import scores


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """Sizes, under the names of Hugging Face's `config.json`."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False  # Whether logits are products with the embeddings.
    dtype: str = "bfloat16"  # dtype of weights and pages.

    def __post_init__(self):
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"{self.num_attention_heads=} must be a multiple of {self.num_key_value_heads=}: each key head serves "
                "the same number of query heads"
            )
        if self.head_dim % 2:
            raise ValueError(f"{self.head_dim=} must be even: rotary positions turn pairs")
        if self.dtype not in ("bfloat16", "float16", "float32"):
            raise ValueError(f"{self.dtype=} must be bfloat16, float16 or float32")

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


def init(config: LlamaConfig, seed: int = 0) -> dict[str, jax.Array]:
    """Random parameters: products keep the variance of what is multiplied, norms' scales are near 1."""
    params = {}
    for i, (name, shape) in enumerate(config.shapes.items()):
        noise = jax.random.normal(jax.random.fold_in(jax.random.key(seed), i), shape, jnp.float32)
        if len(shape) == 1:
            noise = 1 + 0.1 * noise
        elif name != "model.embed_tokens.weight" or config.tie_word_embeddings:
            noise *= shape[1] ** -0.5
        params[name] = noise.astype(config.dtype)
    return params


def save(params: dict[str, jax.Array], path) -> None:
    """Writes parameters to one safetensors file. Needs the package safetensors (the extra `serving`)."""
    import safetensors.flax  # The rest runs where there is no safetensors.

    safetensors.flax.save_file(params, str(path))


def load(config: LlamaConfig, path) -> dict[str, jax.Array]:
    """Reads a safetensors file, or all of a folder, in `config.dtype`. Tensors of other names are left where they are.

    Needs the package safetensors (the extra `serving`).

    Raises:
      ValueError: there is no such file, or a parameter is missing or of another shape.
    """
    import safetensors

    path = pathlib.Path(path)
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files or not all(file.is_file() for file in files):
        raise ValueError(f"load: path = {str(path)!r} is neither a safetensors file nor a folder of such")
    shapes, params = config.shapes, {}
    for file in files:
        with safetensors.safe_open(str(file), framework="flax") as tensors:
            for name in shapes.keys() & tensors.keys():
                params[name] = tensors.get_tensor(name).astype(config.dtype)
    if missing := sorted(shapes.keys() - params.keys()):
        raise ValueError(f"load: {str(path)!r} lacks {len(missing)} parameter(s), such as {missing[0]}")
    for name, value in params.items():
        if value.shape != shapes[name]:
            raise ValueError(f"load: {name} is {value.shape} in {str(path)!r}; must be {shapes[name]} for {config}")
    return params


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


def rotate(x, positions, theta: float):
    """Rotary positions: value i and i + H / 2 of a head are turned by the angle position / theta**(2 i / H).

    Args:
      x: (T, heads, H).
      positions: (T,).

    Returns:
      float32.
    """
    half = x.shape[-1] // 2
    angles = positions[:, None, None] * theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
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
    turned = lambda x: rotate(heads(x), batch.positions, config.rope_theta).astype(dtype)

    x = params["model.embed_tokens.weight"][batch.tokens].astype(jnp.float32)
    pages = list(pages)
    for i in range(config.num_hidden_layers):
        layer = f"model.layers.{i}"
        y = norm(x, f"{layer}.input_layernorm")
        q, k = (turned(linear(y, f"{layer}.self_attn.{name}_proj")) for name in "qk")
        v = heads(linear(y, f"{layer}.self_attn.v_proj"))
        pages[i] = ops.write_kv(k, v, *pages[i], batch.slot_mapping)
        if decode:
            out = ops.paged_attention(q, *pages[i], batch.block_tables, batch.kv_lens)
        else:
            out = ops.ragged_paged_attention(q, *pages[i], batch.block_tables, batch.kv_lens, batch.cu_seqlens_q)
        x = x + linear(out.reshape(x.shape[0], -1), f"{layer}.self_attn.o_proj", jnp.float32)
        y = norm(x, f"{layer}.post_attention_layernorm")
        gated = ops.swiglu(linear(y, f"{layer}.mlp.gate_proj"), linear(y, f"{layer}.mlp.up_proj"))
        x = x + linear(gated, f"{layer}.mlp.down_proj", jnp.float32)
    last = x if decode else x[jnp.maximum(batch.cu_seqlens_q[1:] - 1, 0)]
    head = "model.embed_tokens" if config.tie_word_embeddings else "lm_head"
    return linear(norm(last, "model.norm"), head, jnp.float32), pages


def step(config: LlamaConfig, params, pages, batch: Batch, previous=None, *, backend: str, decode: bool):
    """`forward`, and sampling.

    Args:
      batch: of NumPy's arrays, which go to the device as one: each transfer costs the host as much, however small.
      previous: the next tokens of the step before, (R,) int32: a token -1 - i of the batch stands for the i-th of them.
        So a step can begin before the host knows them. None if the batch has no such token.

    Returns:
      The next token of each sequence, (R,) int32; the scores of which it has the largest, (R, vocab_size) float32; and
      the pages, in place of those given.
    """
    arrays, tree = jax.tree.flatten(batch)
    layout = tuple((array.shape, array.dtype) for array in arrays)
    starts = _starts(layout)
    packed = np.zeros(starts[-1], np.int32)
    for start, array in zip(starts, arrays, strict=False):
        packed[start : start + array.size] = array.ravel().view(np.int32)
    return _step(config, params, pages, packed, previous, tree=tree, layout=layout, backend=backend, decode=decode)


def _starts(layout) -> list[int]:
    """Where arrays begin in one of int32, and the last ends: at multiples of 256 bytes, as a kernel wants its operands,
    for XLA gives it a part as it lies."""
    return [0, *itertools.accumulate(-(-math.prod(shape) // 64) * 64 for shape, _ in layout)]


@functools.partial(
    jax.jit, static_argnames=("config", "tree", "layout", "backend", "decode"), donate_argnames=("pages",)
)
def _step(config: LlamaConfig, params, pages, packed, previous, *, tree, layout, backend: str, decode: bool):
    part = lambda start, shape, dtype: packed[start : start + math.prod(shape)].view(dtype).reshape(shape)
    batch = jax.tree.unflatten(tree, [part(start, *of) for start, of in zip(_starts(layout), layout, strict=False)])
    if previous is not None:
        tokens = jnp.where(batch.tokens < 0, previous[jnp.maximum(-1 - batch.tokens, 0)], batch.tokens)
        batch = dataclasses.replace(batch, tokens=tokens)
    logits, pages = forward(config, params, pages, batch, backend=backend, decode=decode)
    noisy = scores(logits, batch.temperatures, batch.seeds, batch.kv_lens)
    return jnp.argmax(noisy, axis=-1).astype(jnp.int32), noisy, pages

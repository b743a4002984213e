"""Weights of 4 bits: those of checkpoints, in the words that kernels read.

    quant_method   packed weight of (outputs N, inputs K)
    mxfp4          _blocks (E, N, K / 32, 16) bytes, two e2m1 each; _scales (E, N, K / 32), exponents of two, + 127
    gptq           qweight (K / 8, N), qzeros (G, N / 8), scales (G, N), g_idx (K,)
    awq            qweight (K, N / 8), qzeros (G, N / 8), scales (G, N)

A weight of gptq and awq is scale * (q - zero); q and zero have 4 bits, eight of them in an int32. There are G groups of
inputs, and g_idx says which one an input is in. gptq stores zero - 1, unless its checkpoint_format is gptq_v2.

`packed` is the one place where these are packed anew, each as a `Packed`. Its values are exact, and scales keep the
dtype that they have. Widened to floats are matrices that no kernel takes: with groups out of order, as desc_act leaves
them, or of a size that GROUPS lacks and 128 does not divide; and embeddings, of which rows are taken.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import cookbook
from cookbook.gemm.dense.four_bits import E2M1_BIAS
from cookbook.gemm.dense.matmul_int4_weights import GROUPS
from cookbook.gemm.dense.pack import AWQ_ORDER, NIBBLES, in_blocks, nibbles, of_columns, shape_of
from cookbook.gemm.experts import packed as of_experts

# Keys of a `quantization_config` that change no weight: how these were found, which kernels others run.
IGNORED = set(
    """
    act_group_aware backend batch_size block_name_to_quantize cache_block_outputs damp_auto_increment damp_percent
    dataset desc_act dequantize disable_exllama do_fuse exllama_config fuse_max_seq_len hyb_act lm_head
    max_input_length meta model_file_base_name model_name_or_path model_seqlen modules_in_block_to_quantize
    modules_to_fuse modules_to_not_convert module_name_preceding_first_block mse pad_token_id quant_method
    static_groups sym tokenizer true_sequential use_cuda_fp16 use_exllama
""".split()
)
# Keys with the only value that they may have.
ONLY = {
    "mxfp4": {},
    "gptq": {"bits": 4, "is_marlin_format": False, "pack_dtype": "int32", "dynamic": {}},
    "awq": {"bits": 4, "w_bit": 4, "version": "gemm", "zero_point": True},
}
READ = {"mxfp4": set(), "gptq": {"group_size", "checkpoint_format"}, "awq": {"group_size", "q_group_size"}}
MODELS = {"mxfp4": {"gpt_oss"}} | dict.fromkeys(("gptq", "awq"), {"llama", "qwen3", "mixtral", "qwen3_moe"})


@dataclasses.dataclass(frozen=True)
class Packing:
    """The `quantization_config` of a `config.json`."""

    method: str
    group_size: int | None = None  # Inputs that share a scale; -1 for all.
    zero_offset: int = 0  # Added to a stored zero.
    symmetric: bool = False  # All zeros are said to be 8.

    @classmethod
    def of(cls, raw: dict) -> "Packing | None":
        """That of the contents of a `config.json`; None if its weights are floats.

        Raises:
          ValueError: the method or a key is unknown, or has a value that is not supported; it is named.
        """
        if (given := raw.get("quantization_config")) is None:
            return None
        given = {key: value for key, value in given.items() if value is not None}
        method, model_type = given.get("quant_method"), raw.get("model_type")
        if model_type not in MODELS.get(method, ()):
            supported = "; ".join(f"{name!r} for {', '.join(sorted(models))}" for name, models in MODELS.items())
            raise ValueError(
                f"config.json: quantization_config.quant_method = {method!r} is not supported for {model_type}; must "
                f"be {supported}"
            )
        if unknown := sorted(given.keys() - IGNORED - ONLY[method].keys() - READ[method]):
            raise ValueError(
                f"config.json: quantization_config.{unknown[0]} = {given[unknown[0]]!r} is a key that is not known for "
                f"{method}"
            )
        for key, value in ONLY[method].items():
            if given.get(key, value) != value:
                raise ValueError(
                    f"config.json: quantization_config.{key} = {given[key]!r} is not supported; must be {value!r}"
                )
        if method == "mxfp4":
            return cls(method)
        if "bits" not in given and "w_bit" not in given:
            raise ValueError("config.json: quantization_config lacks bits")
        group_size = given.get("group_size", given.get("q_group_size"))
        if not isinstance(group_size, int) or not (group_size == -1 or group_size > 0):
            raise ValueError(
                f"config.json: quantization_config.group_size = {group_size!r}; must be above 0, or -1 for all inputs"
            )
        form = given.get("checkpoint_format", "gptq")
        if form not in ("gptq", "gptq_v2"):
            raise ValueError(
                f"config.json: quantization_config.checkpoint_format = {form!r} is not supported; must be 'gptq' or "
                "'gptq_v2'"
            )
        return cls(method, group_size, int(method == "gptq" and form == "gptq"), given.get("sym") is True)


class Packed(NamedTuple):
    """A weight of 4 bits, as `cookbook.matmul_int4_weights` takes it; and one of experts, as `cookbook.moe` does."""

    words: jax.Array  # (ceil(outputs / 64), ceil(inputs / 64), 512) uint32, of experts (experts, ...).
    scales: jax.Array  # (groups of inputs, outputs) floats; of MXFP4 uint16, two scales each.
    zeros: jax.Array | None = None  # As scales, integers; None: 8, and with MXFP4.

    @property
    def columns(self) -> jax.Array:
        """The words of each output, which may be put in another order: (outputs, words)."""
        return of_columns(self.words)[..., : self.scales.shape[-1], :]

    def is_of(self, shape: tuple[int, ...]) -> bool:
        """Whether it stands for floats of this shape: (outputs, inputs), or (experts, inputs, outputs)."""
        if len(shape) not in (2, 3):
            return False
        *lead, outputs, inputs = shape if len(shape) == 2 else (shape[0], shape[2], shape[1])
        sizes = (64,) if self.scales.dtype == jnp.uint16 else GROUPS
        return (
            self.words.shape == (*lead, *shape_of(outputs, inputs))
            and self.scales.shape in [(*lead, -(-inputs // size), outputs) for size in sizes]
            and (self.zeros is None or self.zeros.shape == self.scales.shape)
        )

    def floats(self, inputs: int, dtype) -> jax.Array:
        """(outputs, inputs), or of experts (experts, inputs, outputs)."""
        parts = tuple(x for x in self if x is not None)
        if self.scales.ndim == 3:
            return of_experts.floats(parts, inputs, jnp.float32).astype(dtype)
        return of_experts.floats(tuple(x[None] for x in parts), inputs, jnp.float32)[0].T.astype(dtype)


def alike(weights: list, inputs: int, dtype) -> list:
    """Weights that are to become one: all of them packed in the same way, or else all floats."""
    form = lambda x: (x.scales.dtype, x.scales.shape[-2], x.zeros is None) if isinstance(x, Packed) else None
    if len({form(x) for x in weights}) == 1:
        return weights
    return [x.floats(inputs, dtype) if isinstance(x, Packed) else x for x in weights]


def joined(weights: list, inputs: int, dtype):
    """Matrices of these inputs, one below the other."""
    first, *_ = weights = alike(weights, inputs, dtype)
    if not isinstance(first, Packed):
        return jnp.concatenate(weights)
    _, *rest = zip(*weights, strict=True)
    words = in_blocks(jnp.concatenate([weight.columns for weight in weights]))
    return Packed(words, *(None if x[0] is None else jnp.concatenate(x, axis=1) for x in rest))


def stacked(weights: list, inputs: int, dtype):
    """Experts' weights, of the matrix of each."""
    first, *_ = weights = alike(weights, inputs, dtype)
    if isinstance(first, Packed):
        return jax.tree.map(lambda *x: jnp.stack(x), *weights)
    return jnp.stack([x.T for x in weights])


def random(key, shape: tuple[int, ...], dtype, kind: str) -> Packed:
    """Random weights in place of floats of this shape, "mxfp4" or "int4", that keep the variance of what they multiply.
    Integers have no zeros, and groups of 128."""
    *lead, outputs, inputs = shape if len(shape) == 2 else (shape[0], shape[2], shape[1])
    words = jax.random.bits(key, (*lead, *shape_of(outputs, inputs)), jnp.uint32)
    if kind == "int4":
        scale = (inputs * 21.5) ** -0.5  # 21.5 is the mean square of integers from -8 to 7.
        return Packed(words, jnp.full((*lead, -(-inputs // GROUPS[-1]), outputs), scale, dtype))
    exponent = E2M1_BIAS + round(np.log2((inputs * 8.56) ** -0.5))  # 8.56 is that of e2m1 values.
    return Packed(words, jnp.full((*lead, -(-inputs // 64), outputs), exponent * 257, jnp.uint16))


def packed(packing: Packing, tensors: dict, dtype) -> dict:
    """The tensors with packed weights as `Packed`, under the names that floats have elsewhere, and floats of `dtype`.
    Takes what it replaces out of `tensors`, so that not all are in memory twice.

    Raises:
      ValueError: a tensor of a packed weight is missing, or of another shape or dtype.
    """
    found = {}
    for name in sorted(tensors):
        if packing.method == "mxfp4" and name.endswith("_blocks"):
            whole = name.removesuffix("_blocks")
            parts = _parts(tensors, whole, "_blocks", "_scales")
            experts, outputs, groups, _ = (*parts["_blocks"].shape, 0, 0, 0, 0)[:4]
            of = (experts, outputs, groups)
            _require(whole, parts, {"_blocks": ((*of, 16), jnp.uint8), "_scales": (of, jnp.uint8)})
            found[whole] = Packed(*jax.jit(cookbook.pack_mxfp4)(*parts.values()))
        elif packing.method != "mxfp4" and name.endswith(".qweight"):
            prefix = name.removesuffix("qweight")
            found[f"{prefix}weight"] = _of_integers(packing, tensors, prefix, dtype)
            bias = tensors.get(f"{prefix}bias")
            if bias is not None and not jnp.any(bias):  # Some tools write one of zeros where the model has none.
                del tensors[f"{prefix}bias"]
    return found | {name: value.astype(dtype) for name, value in tensors.items()}


def _of_integers(packing: Packing, tensors: dict, prefix: str, dtype):
    """A packed weight of gptq or awq."""
    is_gptq = packing.method == "gptq"
    parts = _parts(tensors, prefix, "qweight", "qzeros", "scales")
    groups = tensors.pop(f"{prefix}g_idx", None) if is_gptq else None
    rows, columns = (*parts["qweight"].shape, 0, 0)[:2]
    inputs, outputs = (8 * rows, columns) if is_gptq else (rows, 8 * columns)
    size = inputs if packing.group_size == -1 else packing.group_size
    count = -(-inputs // size) if size else 0
    floats = parts["scales"].dtype if jnp.issubdtype(parts["scales"].dtype, jnp.floating) else jnp.float16
    wanted = {
        "qweight": ((rows, columns), jnp.int32), "qzeros": ((count, outputs // 8), jnp.int32),
        "scales": ((count, outputs), floats),
    }  # fmt: skip
    _require(prefix, parts, wanted)
    groups = np.arange(inputs) // max(size, 1) if groups is None else np.asarray(groups)
    if groups.shape != (inputs,) or not ((groups >= 0) & (groups < count)).all():
        raise ValueError(f"load: {prefix}g_idx is {groups.shape}; must be ({inputs},), groups from 0 to {count - 1}")
    in_order, repeats = (groups == np.arange(inputs) // size).all(), max(1, size // GROUPS[-1])
    if in_order and inputs % size == 0 and size // repeats in GROUPS and not prefix.endswith("embed_tokens."):
        pack = cookbook.pack_int4_awq
        if is_gptq:
            pack = functools.partial(cookbook.pack_int4_gptq, zeros_less_one=bool(packing.zero_offset))
        words, *of_groups = jax.jit(pack)(*parts.values())
        scales, zeros = (x if repeats == 1 else jnp.repeat(x, repeats, axis=0) for x in of_groups)
        return Packed(words, scales, None if packing.symmetric and bool((zeros == 8).all()) else zeros)
    if is_gptq:
        return of_gptq(*parts.values(), jnp.asarray(groups), packing.zero_offset, dtype=dtype)
    return of_awq(*parts.values(), jnp.asarray(groups), dtype=dtype)


def _parts(tensors: dict, prefix: str, *ends: str) -> dict:
    """The tensors of one weight, which are taken out."""
    if missing := [end for end in ends if prefix + end not in tensors]:
        raise ValueError(f"load: lacks {prefix}{missing[0]}, a part of a packed weight: download the checkpoint anew")
    return {end: tensors.pop(prefix + end) for end in ends}


def _require(prefix: str, parts: dict, wanted: dict) -> None:
    for end, (shape, dtype) in wanted.items():
        if parts[end].shape != shape or parts[end].dtype != dtype:
            raise ValueError(
                f"load: {prefix}{end} is {parts[end].shape}, {parts[end].dtype}; must be {shape}, {jnp.dtype(dtype)}, "
                "to go with the other parts of this packed weight and quantization_config"
            )


@functools.partial(jax.jit, static_argnames="dtype")
def of_gptq(qweight, qzeros, scales, groups, zero_offset, *, dtype):
    """(N, K) weights. Eight inputs share an int32 of `qweight`, eight outputs one of `qzeros`; the first of each in the
    lowest bits."""
    values = _integers(qweight.T, range(NIBBLES)).T
    zeros = _integers(qzeros, range(NIBBLES)) + zero_offset
    return ((values - zeros[groups]) * scales.astype(jnp.float32)[groups]).astype(dtype).T


@functools.partial(jax.jit, static_argnames="dtype")
def of_awq(qweight, qzeros, scales, groups, *, dtype):
    """(N, K) weights. Eight outputs share an int32, in the order of `AWQ_ORDER`."""
    values, zeros = (_integers(x, AWQ_ORDER) for x in (qweight, qzeros))
    return ((values - zeros[groups]) * scales.astype(jnp.float32)[groups]).astype(dtype).T


def _integers(words, order):
    """(rows, columns) integers from 0 to 15, eight columns in an int32 of `words`."""
    return nibbles(words, order).reshape(len(words), -1).astype(jnp.int32)

"""Checkpoints of Hugging Face's form: a folder with `config.json` and one or more safetensors files.

`load` has the tables of architectures and quantizations. `hf_config.py` says which keys of `config.json` are read, and
`generation_config.json` may name more EOS tokens. Where there is a `model.safetensors.index.json`, the files count that
it names; else `model.safetensors`; else all safetensors files. A tensor that the model does not have is refused, but
for buffers of rotary frequencies, which the config gives. Reading and writing need the package safetensors (the extra
`serving`).
"""

import json
import pathlib
import re

import jax
import jax.numpy as jnp

from cookbook.gemm.dense.pack import in_blocks
from serving.config import LlamaConfig, check_params
from serving.hf_config import config_of, raw_of
from serving.quantized import Packed, Packing, joined, packed, stacked

# Names of an expert's gate, up and down products.
EXPERT_NAMES = {
    "mixtral": ("block_sparse_moe.gate", "block_sparse_moe.experts", ("w1", "w3", "w2")),
    "qwen3_moe": ("mlp.gate", "mlp.experts", ("gate_proj", "up_proj", "down_proj")),
}
# Names of gpt-oss, under one layer, and ours.
GPT_OSS_NAMES = {
    "mlp.router.weight": "mlp.gate.weight",
    "mlp.router.bias": "mlp.gate.bias",
    "mlp.experts.gate_up_proj": "mlp.experts.gate_up_proj.weight",
    "mlp.experts.gate_up_proj_bias": "mlp.experts.gate_up_proj.bias",
    "mlp.experts.down_proj": "mlp.experts.down_proj.weight",
    "mlp.experts.down_proj_bias": "mlp.experts.down_proj.bias",
}
INDEX = "model.safetensors.index.json"
# Buffers that older versions of transformers wrote: rotary frequencies, which follow from the config.
ROTARY_BUFFER = re.compile(r"\brotary_emb\.(inv_freq|original_inv_freq|cos_cached|sin_cached)$")


def load(folder, dtype: str | None = None) -> tuple[LlamaConfig, dict[str, jax.Array]]:
    """The config and the parameters of a checkpoint.

        architecture            model_type     what is special
        LlamaForCausalLM        llama          `rope_type` is default, llama3 or yarn, as in all others
        Qwen3ForCausalLM        qwen3          heads of queries and keys are normalised
        MixtralForCausalLM      mixtral        a mixture of experts; weights of a token's experts add up to 1
        Qwen3MoeForCausalLM     qwen3_moe      both; whether these weights add up to 1 is an option
        GptOssForCausalLM       gpt_oss        windows in some layers, a sink per head, biases, clamped SwiGLU

        quantization_config     architectures     what is stored
        none                    all               floats
        mxfp4                   gpt_oss           experts: e2m1, two per byte, and a power of two per 32 of them
        gptq, 4 bits            all others        matrices: integers, and a zero and a scale per group of inputs
        awq, 4 bits, gemm       all others        the same, in another order

    Packed weights stay packed, as `Packed` of `quantized.py`, which also says which ones cannot. They are exact.

    Args:
      folder: with `config.json` and safetensors files.
      dtype: of the parameters; None for that of `config.json`.

    Raises:
      ValueError: a file is missing, such as one that the index names; `config.json` has a key that is unknown, a value
        that is not supported or two that contradict each other; a tensor is missing, unknown, there twice or of another
        shape; or the quantization is another one.
    """
    import safetensors

    folder = pathlib.Path(folder)
    files = _files_of(folder)
    if not files or not (folder / "config.json").is_file():
        raise ValueError(f"load: folder = {str(folder)!r}; must be a folder with config.json and safetensors files")
    raw, generation = (_json(folder / name) for name in ("config.json", "generation_config.json"))
    packing = Packing.of(raw)
    config = config_of({name: value for name, value in raw.items() if name != "quantization_config"}, dtype, generation)
    tensors = {}
    for file, wanted in files.items():
        with safetensors.safe_open(str(file), framework="flax") as opened:
            there = list(opened.keys())
            for name in wanted or there:
                if ROTARY_BUFFER.search(name):
                    continue
                if name not in there:
                    raise ValueError(f"load: {file.name} lacks {name}, which {INDEX} says is in it: download both anew")
                if name in tensors:
                    raise ValueError(f"load: {name} is in {file.name} and in a file before it; must be in one of them")
                value = opened.get_tensor(name)
                is_float = jnp.issubdtype(value.dtype, jnp.floating)
                tensors[name] = value.astype(config.dtype) if is_float and not packing else value
    if config.tie_word_embeddings:  # Some write it all the same.
        tensors.pop("lm_head.weight", None)
    if packing:
        tensors = packed(packing, tensors, config.dtype)
    params = _params_of(config, raw["model_type"], tensors)
    try:
        check_params(config, params)
    except ValueError as error:
        raise ValueError(f"load: {str(folder)!r}: {error}") from None
    return config, params


def save(config: LlamaConfig, params: dict[str, jax.Array], folder) -> None:
    """Writes `config.json` and `model.safetensors`, which `load` and transformers read.

    Raises:
      ValueError: the parameters are not the config's, or some are packed; the model is of no known architecture; or
        the folder has the index of another checkpoint.
    """
    import safetensors.flax

    check_params(config, params)
    if some := next((name for name, value in params.items() if isinstance(value, Packed)), None):
        raise ValueError(f"save: {some} is packed; must be floats: copy the checkpoint that it was loaded from")
    model_type = _model_type_of(config)
    folder = pathlib.Path(folder)
    if (folder / INDEX).exists():
        raise ValueError(
            f"save: folder = {str(folder)!r} has {INDEX}, by which other files count; must have none: take another "
            "folder, or remove it"
        )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw_of(config, model_type), indent=2))
    tensors = _tensors_of(config, model_type, params)
    safetensors.flax.save_file(tensors, str(folder / "model.safetensors"))


def _files_of(folder: pathlib.Path) -> dict[pathlib.Path, list[str]]:
    """The safetensors files that count, each with the tensors to read of it; none stand for all."""
    if not (folder / INDEX).is_file():
        one = folder / "model.safetensors"
        return {file: [] for file in ([one] if one.is_file() else sorted(folder.glob("*.safetensors")))}
    files: dict[pathlib.Path, list[str]] = {}
    for name, file in _json(folder / INDEX).get("weight_map", {}).items():
        files.setdefault(folder / file, []).append(name)
    for file in files:
        if not file.is_file():
            raise ValueError(f"load: {str(folder)!r} lacks {file.name}, which {INDEX} names: download it")
    return files


def _json(path: pathlib.Path) -> dict:
    """The contents of a file; nothing of one that is not there."""
    return json.loads(path.read_text()) if path.is_file() else {}


def _model_type_of(config: LlamaConfig) -> str:
    """The architecture that has these options.

    Raises:
      ValueError: none has.
    """
    parts = config.attention_sinks, config.expert_bias, config.swiglu_limit is not None
    if any(parts) or config.attention_bias or config.window_layers:
        if all(parts) and config.norm_topk_prob and not config.qk_norm:
            return "gpt_oss"
        raise ValueError(f"save: {config}; no known architecture has these options: must have all of gpt-oss's or none")
    model_type = {(False, False): "llama", (True, False): "qwen3", (False, True): "mixtral", (True, True): "qwen3_moe"}[
        config.qk_norm, config.num_experts > 0
    ]
    if model_type == "mixtral" and not config.norm_topk_prob:
        raise ValueError("save: norm_topk_prob = False without qk_norm; must be True: no known architecture has that")
    return model_type


def _params_of(config: LlamaConfig, model_type: str, tensors: dict) -> dict:
    """The parameters as `LlamaConfig.shapes` has them, of a checkpoint's tensors."""
    if model_type == "gpt_oss":
        return {_renamed(name, GPT_OSS_NAMES): _halves(value) if ".gate_up_proj" in name else value
                for name, value in tensors.items()}  # fmt: skip
    return _with_experts_joined(config, model_type, tensors) if config.num_experts else tensors


def _tensors_of(config: LlamaConfig, model_type: str, params: dict) -> dict:
    """The inverse of `_params_of`."""
    if model_type == "gpt_oss":
        names = {ours: theirs for theirs, ours in GPT_OSS_NAMES.items()}
        return {_renamed(name, names): _interleaved(value) if ".gate_up_proj" in name else value
                for name, value in params.items()}  # fmt: skip
    return _with_experts_apart(config, model_type, params) if config.num_experts else params


def _renamed(name: str, names: dict[str, str]) -> str:
    """A tensor's name, with the part after the number of its layer replaced."""
    layer = re.match(r"model\.layers\.\d+\.", name)
    start = layer.end() if layer else 0
    return name[:start] + names.get(name[start:], name[start:])


def _halves(gate_up):
    """Columns of the gate, then the up product's, of columns that alternate."""
    if isinstance(gate_up, Packed):
        return Packed(in_blocks(_halves(gate_up.columns.mT).mT), _halves(gate_up.scales))
    return jnp.concatenate([gate_up[..., ::2], gate_up[..., 1::2]], axis=-1)


def _interleaved(gate_up):
    """The inverse of `_halves`."""
    return jnp.stack(jnp.split(gate_up, 2, axis=-1), axis=-1).reshape(gate_up.shape)


def _with_experts_joined(config: LlamaConfig, model_type: str, tensors: dict) -> dict:
    """Each layer's experts in two arrays, as `LlamaConfig.shapes` has them."""
    gate, experts, parts = EXPERT_NAMES[model_type]
    pattern = re.compile(rf"model\.layers\.\d+\.(?:{re.escape(experts)}\..*|{re.escape(gate)})\.weight")
    params = {name: value for name, value in tensors.items() if not pattern.fullmatch(name)}
    rest = tensors.keys() - params.keys()

    def take(name: str) -> jax.Array:
        if name not in rest:
            raise ValueError(f"load: lacks {name}")
        rest.remove(name)
        return tensors.pop(name)

    for i in range(config.num_hidden_layers):
        layer = f"model.layers.{i}"
        gates, ups, downs = (
            [take(f"{layer}.{experts}.{e}.{part}.weight") for e in range(config.num_experts)] for part in parts
        )
        both = [joined(pair, config.hidden_size, config.dtype) for pair in zip(gates, ups, strict=True)]
        gate_up = stacked(both, config.hidden_size, config.dtype)
        params[f"{layer}.mlp.experts.gate_up_proj.weight"] = gate_up
        params[f"{layer}.mlp.experts.down_proj.weight"] = stacked(downs, config.intermediate_size, config.dtype)
        params[f"{layer}.mlp.gate.weight"] = take(f"{layer}.{gate}.weight")
    return params | {name: tensors[name] for name in rest}


def _with_experts_apart(config: LlamaConfig, model_type: str, params: dict) -> dict:
    """The inverse of `_with_experts_joined`."""
    gate, experts, parts = EXPERT_NAMES[model_type]
    tensors = {name: value for name, value in params.items() if ".mlp." not in name}
    for i in range(config.num_hidden_layers):
        layer = f"model.layers.{i}"
        tensors[f"{layer}.{gate}.weight"] = params[f"{layer}.mlp.gate.weight"]
        for e in range(config.num_experts):
            both = params[f"{layer}.mlp.experts.gate_up_proj.weight"][e]
            down = params[f"{layer}.mlp.experts.down_proj.weight"][e]
            for part, value in zip(parts, (*jnp.split(both, 2, axis=1), down), strict=True):
                tensors[f"{layer}.{experts}.{e}.{part}.weight"] = value.T
    return tensors

"""Checkpoints of Hugging Face's form: a folder with `config.json` and one or more safetensors files.

    architecture            model_type     what is special
    LlamaForCausalLM        llama          Llama 3's rotary frequencies, if `rope_type` is llama3
    Qwen3ForCausalLM        qwen3          heads of queries and keys are normalised
    MixtralForCausalLM      mixtral        a mixture of experts; weights of a token's experts add up to 1
    Qwen3MoeForCausalLM     qwen3_moe      both; whether these weights add up to 1 is an option

`hf_config.py` says which keys of `config.json` are read, and `generation_config.json` may name more EOS tokens. Where
there is a `model.safetensors.index.json`, the files count that it names; else `model.safetensors`; else all safetensors
files. A tensor that the model does not have is refused, but for buffers of rotary frequencies, which the config gives.
Reading and writing need the package safetensors (the extra `serving`).
"""

import json
import pathlib
import re

import jax
import jax.numpy as jnp

from serving.config import LlamaConfig, check_params
from serving.hf_config import config_of, raw_of

# Names of an expert's gate, up and down products.
EXPERT_NAMES = {
    "mixtral": ("block_sparse_moe.gate", "block_sparse_moe.experts", ("w1", "w3", "w2")),
    "qwen3_moe": ("mlp.gate", "mlp.experts", ("gate_proj", "up_proj", "down_proj")),
}
INDEX = "model.safetensors.index.json"
# Buffers that older versions of transformers wrote: rotary frequencies, which follow from the config.
ROTARY_BUFFER = re.compile(r"\brotary_emb\.(inv_freq|original_inv_freq|cos_cached|sin_cached)$")


def load(folder, dtype: str | None = None) -> tuple[LlamaConfig, dict[str, jax.Array]]:
    """The config and the parameters of a checkpoint.

    Args:
      folder: with `config.json` and safetensors files.
      dtype: of the parameters; None for that of `config.json`.

    Raises:
      ValueError: a file is missing, such as one that the index names; `config.json` has a key that is unknown, a value
        that is not supported or two that contradict each other; a tensor is missing, unknown, there twice or of another
        shape.
    """
    import safetensors

    folder = pathlib.Path(folder)
    files = _files_of(folder)
    if not files or not (folder / "config.json").is_file():
        raise ValueError(f"load: folder = {str(folder)!r}; must be a folder with config.json and safetensors files")
    raw, generation = (_json(folder / name) for name in ("config.json", "generation_config.json"))
    config = config_of(raw, dtype, generation)
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
                tensors[name] = opened.get_tensor(name).astype(config.dtype)
    if config.tie_word_embeddings:  # Some write it all the same.
        tensors.pop("lm_head.weight", None)
    params = _with_experts_joined(config, raw["model_type"], tensors) if config.num_experts else tensors
    try:
        check_params(config, params)
    except ValueError as error:
        raise ValueError(f"load: {str(folder)!r}: {error}") from None
    return config, params


def save(config: LlamaConfig, params: dict[str, jax.Array], folder) -> None:
    """Writes `config.json` and `model.safetensors`, which `load` and transformers read.

    Raises:
      ValueError: the parameters are not the config's, the model is of no known architecture, or the folder has the
        index of another checkpoint.
    """
    import safetensors.flax

    check_params(config, params)
    model_type = {(False, False): "llama", (True, False): "qwen3", (False, True): "mixtral", (True, True): "qwen3_moe"}[
        config.qk_norm, config.num_experts > 0
    ]
    if model_type == "mixtral" and not config.norm_topk_prob:
        raise ValueError("save: norm_topk_prob = False without qk_norm; must be True: no known architecture has that")
    folder = pathlib.Path(folder)
    if (folder / INDEX).exists():
        raise ValueError(
            f"save: folder = {str(folder)!r} has {INDEX}, by which other files count; must have none: take another "
            "folder, or remove it"
        )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw_of(config, model_type), indent=2))
    tensors = _with_experts_apart(config, model_type, params) if config.num_experts else params
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
        weights = [
            [take(f"{layer}.{experts}.{e}.{part}.weight").T for part in parts] for e in range(config.num_experts)
        ]
        joined = [jnp.concatenate([gate, up], axis=1) for gate, up, _ in weights]
        params[f"{layer}.mlp.experts.gate_up_proj.weight"] = jnp.stack(joined)
        params[f"{layer}.mlp.experts.down_proj.weight"] = jnp.stack([down for _, _, down in weights])
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

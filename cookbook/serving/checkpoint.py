"""Checkpoints of Hugging Face's form: a folder with `config.json` and one or more safetensors files.

    architecture            model_type     what is special
    LlamaForCausalLM        llama          Llama 3's rotary frequencies, if `rope_type` is llama3
    Qwen3ForCausalLM        qwen3          heads of queries and keys are normalised
    MixtralForCausalLM      mixtral        a mixture of experts; weights of a token's experts add up to 1
    Qwen3MoeForCausalLM     qwen3_moe      both; whether these weights add up to 1 is an option

A key of `config.json` is read, or one that changes no logits, or has the value of which this is true; any other one is
refused, and so is a tensor that the model does not have. Reading and writing need the package safetensors (the extra
`serving`).
"""

import json
import pathlib
import re

import jax
import jax.numpy as jnp

from cookbook.serving.config import LlamaConfig, RopeScaling, check_params

# Keys that change no logits: how a model was made, how it is trained, what others do with it.
IGNORED = {
    "_name_or_path", "architectures", "attention_dropout", "bos_token_id", "initializer_range", "max_window_layers",
    "model_type", "output_router_logits", "pad_token_id", "pretraining_tp", "router_aux_loss_coef",
    "router_jitter_noise", "transformers_version", "use_cache",
}  # fmt: skip
# Keys that may be there with a value that leaves the model as it is here; None stands for a missing one too.
ONLY = {
    "attention_bias": False, "mlp_bias": False, "hidden_act": "silu", "use_sliding_window": False,
    "sliding_window": None, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
READ = {
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "rms_norm_eps", "tie_word_embeddings", "max_position_embeddings", "eos_token_id", "dtype",
    "torch_dtype", "rope_theta", "rope_scaling", "rope_parameters", "layer_types",
}  # fmt: skip
OF_EXPERTS = {
    "llama": set(),
    "qwen3": set(),
    "mixtral": {"num_local_experts", "num_experts_per_tok"},
    "qwen3_moe": {
        "num_local_experts", "num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob",
    },
}  # fmt: skip
# Names of an expert's gate, up and down products.
EXPERT_NAMES = {
    "mixtral": ("block_sparse_moe.gate", "block_sparse_moe.experts", ("w1", "w3", "w2")),
    "qwen3_moe": ("mlp.gate", "mlp.experts", ("gate_proj", "up_proj", "down_proj")),
}


def load(folder, dtype: str | None = None) -> tuple[LlamaConfig, dict[str, jax.Array]]:
    """The config and the parameters of a checkpoint.

    Args:
      folder: with `config.json` and safetensors files.
      dtype: of the parameters; None for that of `config.json`.

    Raises:
      ValueError: a file is missing; `config.json` has a key that is unknown or a value that is not supported; a tensor
        is missing, unknown, there twice or of another shape.
    """
    import safetensors

    folder = pathlib.Path(folder)
    files = sorted(folder.glob("*.safetensors"))
    if not files or not (folder / "config.json").is_file():
        raise ValueError(f"load: folder = {str(folder)!r}; must be a folder with config.json and safetensors files")
    raw = json.loads((folder / "config.json").read_text())
    config = config_of(raw, dtype)
    tensors = {}
    for file in files:
        with safetensors.safe_open(str(file), framework="flax") as opened:
            for name in opened.keys():
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
      ValueError: the parameters are not the config's, or the model is of no known architecture.
    """
    import safetensors.flax

    check_params(config, params)
    model_type = {(False, False): "llama", (True, False): "qwen3", (False, True): "mixtral", (True, True): "qwen3_moe"}[
        config.qk_norm, config.num_experts > 0
    ]
    if model_type == "mixtral" and not config.norm_topk_prob:
        raise ValueError("save: norm_topk_prob = False without qk_norm; must be True: no known architecture has that")
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(_raw_of(config, model_type), indent=2))
    tensors = _with_experts_apart(config, model_type, params) if config.num_experts else params
    safetensors.flax.save_file(tensors, str(folder / "model.safetensors"))


def config_of(raw: dict, dtype: str | None = None) -> LlamaConfig:
    """The config of the contents of a `config.json`.

    Raises:
      ValueError: a key is unknown, a value is not supported, or a key is missing; it is named.
    """
    model_type = raw.get("model_type")
    if model_type not in OF_EXPERTS:
        raise ValueError(f"config.json: model_type = {model_type!r}; must be one of {', '.join(OF_EXPERTS)}")
    known = READ | IGNORED | ONLY.keys() | OF_EXPERTS[model_type]
    if unknown := sorted(raw.keys() - known):
        raise ValueError(f"config.json: {unknown[0]} = {raw[unknown[0]]!r} is a key that is not known for {model_type}")
    for key, value in ONLY.items():
        # Qwen3 writes a window that it does not use.
        is_unused = key == "sliding_window" and raw.get("use_sliding_window") is False
        if raw.get(key, value) not in (value, None) and not is_unused:
            raise ValueError(f"config.json: {key} = {raw[key]!r} is not supported; must be {value!r}")
    if other := set(raw.get("layer_types") or ()) - {"full_attention"}:
        raise ValueError(f"config.json: layer_types has {min(other)!r}, not supported; must all be 'full_attention'")
    sizes = {}
    # Their defaults depend on the architecture, and on the version that wrote the file.
    required = {
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "rms_norm_eps",
        *(["num_key_value_heads"] if model_type != "llama" else []), *(["head_dim"] if "qwen3" in model_type else []),
    }  # fmt: skip
    for name in sorted(required):
        if raw.get(name) is None:
            raise ValueError(f"config.json: lacks {name}")
        sizes[name] = raw[name]
    heads = sizes["num_attention_heads"]
    sizes.setdefault("num_key_value_heads", raw.get("num_key_value_heads") or heads)
    sizes.setdefault("head_dim", raw.get("head_dim") or sizes["hidden_size"] // heads)
    theta, scaling = _rope_of(raw)
    eos = raw.get("eos_token_id")
    if model_type in EXPERT_NAMES:
        sizes["num_experts"] = raw.get("num_local_experts", raw.get("num_experts"))
        sizes["num_experts_per_tok"] = raw.get("num_experts_per_tok")
        if None in sizes.values():
            raise ValueError("config.json: lacks num_local_experts (or num_experts) or num_experts_per_tok")
        # A file leaves out what is the default of its architecture.
        sizes["norm_topk_prob"] = raw.get("norm_topk_prob", model_type == "mixtral")
        sizes["intermediate_size"] = raw.get("moe_intermediate_size", sizes["intermediate_size"])
    return LlamaConfig(
        **sizes,
        rope_theta=theta,
        rope_scaling=scaling,
        tie_word_embeddings=raw.get("tie_word_embeddings", False),
        dtype=dtype or raw.get("dtype") or raw.get("torch_dtype") or "float32",
        qk_norm=model_type.startswith("qwen3"),
        max_position_embeddings=raw.get("max_position_embeddings"),
        eos_token_ids=() if eos is None else (eos,) if isinstance(eos, int) else tuple(eos),
    )


def _rope_of(raw: dict) -> tuple[float, RopeScaling | None]:
    """The rotary base and scaling, as transformers wrote them before version 5 and writes them since."""
    rope = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    theta = rope.pop("rope_theta", raw.get("rope_theta", 10000.0 if raw["model_type"] == "llama" else None))
    if theta is None:
        raise ValueError("config.json: lacks rope_theta")
    kind = rope.pop("rope_type", rope.pop("type", "default"))
    if kind == "default" and not rope:
        return theta, None
    names = {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
    if kind != "llama3" or rope.keys() != names:
        raise ValueError(
            f"config.json: rope_type = {kind!r} with {sorted(rope)} is not supported; must be 'default' with nothing "
            f"else, or 'llama3' with {sorted(names)}"
        )
    return theta, RopeScaling(**rope)


def _raw_of(config: LlamaConfig, model_type: str) -> dict:
    rope = dict(rope_type="default", rope_theta=config.rope_theta)
    if config.rope_scaling:
        rope |= dict(rope_type="llama3", **vars(config.rope_scaling))
    names = READ - {"torch_dtype", "rope_theta", "rope_scaling", "rope_parameters", "layer_types", "eos_token_id"}
    raw = dict(model_type=model_type, rope_parameters=rope, hidden_act="silu", eos_token_id=list(config.eos_token_ids))
    raw |= {name: getattr(config, name) for name in sorted(names)}
    if config.num_experts:
        raw |= dict(num_local_experts=config.num_experts, num_experts_per_tok=config.num_experts_per_tok)
    if model_type == "qwen3_moe":
        raw |= dict(moe_intermediate_size=config.intermediate_size, norm_topk_prob=config.norm_topk_prob)
    architecture = "".join(map(str.capitalize, model_type.split("_")))
    return {name: value for name, value in raw.items() if value is not None} | dict(
        architectures=[f"{architecture}ForCausalLM"]
    )


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

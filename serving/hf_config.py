"""The `config.json` of a checkpoint of Hugging Face's form, as a `LlamaConfig`, and the other way round.

A key of `config.json` is read, or one that changes no logits, or has the value of which this is true; any other one is
refused. Where two keys say the same thing, as `rope_scaling` and `rope_parameters` do, they must not contradict each
other: libraries differ in which of the two they believe.
"""

from serving.config import LlamaConfig, RopeScaling, YarnScaling

# Keys that change no logits: how a model was made, how it is trained, what others do with it, how they sample from it.
IGNORED = set(
    """
    _attn_implementation _attn_implementation_autoset _attn_implementation_internal _commit_hash _flash_attn_2_enabled
    _name_or_path architectures attention_dropout attn_implementation bad_words_ids begin_suppress_tokens bos_token_id
    chunk_size_feed_forward decoder_start_token_id diversity_penalty do_sample early_stopping embd_pdrop
    encoder_no_repeat_ngram_size exponential_decay_length_penalty finetuning_task forced_bos_token_id
    forced_eos_token_id gradient_checkpointing hidden_dropout id2label initializer_range is_decoder is_llama_config
    label2id length_penalty max_length max_sequence_length max_window_layers min_length mlp_dropout model_max_length
    model_type no_repeat_ngram_size num_beam_groups num_beams num_logits_to_keep num_return_sequences output_attentions
    output_hidden_states output_router_logits output_scores pad_token_id prefix pretraining_tp problem_type
    remove_invalid_values repetition_penalty resid_pdrop return_dict return_dict_in_generate router_aux_loss_coef
    router_jitter_noise sep_token_id suppress_tokens task_specific_params temperature tf_legacy_loss
    tie_encoder_decoder tokenizer_class top_k top_p torchscript transformers.js_config transformers_version typical_p
    unk_token_id unsloth_fixed unsloth_version use_bfloat16 use_cache use_flash_attn use_flash_attention_2
""".split()
)
# Keys that may be there with a value that leaves the model as it is here; None stands for a missing one too.
ONLY = {
    "attention_bias": False, "mlp_bias": False, "hidden_act": "silu", "use_sliding_window": False,
    "sliding_window": None, "decoder_sparse_step": 1, "mlp_only_layers": [], "partial_rotary_factor": 1.0,
    "rope_interleaved": False, "is_encoder_decoder": False, "add_cross_attention": False, "pruned_heads": {},
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
    "gpt_oss": {
        "num_local_experts", "num_experts", "num_experts_per_tok", "experts_per_token", "swiglu_limit", "swiglu_alpha",
        "initial_context_length",
    },
}  # fmt: skip
SWIGLU_ALPHA = 1.702  # gpt-oss's, and the only one that `cookbook.moe` has.
# Keys of `ONLY` that an architecture reads all the same.
ALSO_READ = {"gpt_oss": {"attention_bias", "sliding_window"}}


def config_of(raw: dict, dtype: str | None = None, generation: dict | None = None) -> LlamaConfig:
    """The config of the contents of a `config.json`.

    Args:
      generation: the contents of `generation_config.json`, whose EOS tokens end a request too.

    Raises:
      ValueError: a key is unknown, a value is not supported, a key is missing, or two contradict each other; they are
        named.
    """
    model_type = raw.get("model_type")
    if model_type not in OF_EXPERTS:
        raise ValueError(f"config.json: model_type = {model_type!r}; must be one of {', '.join(OF_EXPERTS)}")
    raw = {name: value for name, value in raw.items() if value is not None}  # Which stands for a missing key.
    known = READ | IGNORED | ONLY.keys() | OF_EXPERTS[model_type]
    if unknown := sorted(raw.keys() - known):
        raise ValueError(f"config.json: {unknown[0]} = {raw[unknown[0]]!r} is a key that is not known for {model_type}")
    for key, value in ONLY.items():
        # Qwen3 writes a window that it does not use.
        is_unused = key == "sliding_window" and raw.get("use_sliding_window") is False
        is_read = is_unused or key in ALSO_READ.get(model_type, ())
        if raw.get(key, value) != value and not is_read:
            raise ValueError(f"config.json: {key} = {raw[key]!r} is not supported; must be {value!r}")
    if model_type != "gpt_oss" and (other := set(raw.get("layer_types") or ()) - {"full_attention"}):
        raise ValueError(f"config.json: layer_types has {min(other)!r}, not supported; must all be 'full_attention'")
    sizes = {}
    # Their defaults depend on the architecture, and on the version that wrote the file.
    required = {
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "rms_norm_eps",
        *(["num_key_value_heads"] if model_type != "llama" else []), *(["head_dim"] if "qwen3" in model_type else []),
    }  # fmt: skip
    for name in sorted(required):
        if name not in raw:
            raise ValueError(f"config.json: lacks {name}")
        sizes[name] = raw[name]
    heads = sizes["num_attention_heads"]
    sizes.setdefault("num_key_value_heads", raw.get("num_key_value_heads", heads))
    sizes.setdefault("head_dim", raw.get("head_dim", sizes["hidden_size"] // heads))
    theta, scaling = _rope_of(raw)
    eos = [*_tokens(raw.get("eos_token_id")), *_tokens((generation or {}).get("eos_token_id"))]
    if OF_EXPERTS[model_type]:
        sizes["num_experts"] = _agreed(raw, "num_local_experts", "num_experts")
        sizes["num_experts_per_tok"] = _agreed(raw, "num_experts_per_tok", "experts_per_token")
        if None in sizes.values():
            raise ValueError("config.json: lacks num_local_experts (or num_experts) or num_experts_per_tok")
        # A file leaves out what is the default of its architecture.
        sizes["norm_topk_prob"] = raw.get("norm_topk_prob", model_type != "qwen3_moe")
        sizes["intermediate_size"] = raw.get("moe_intermediate_size", sizes["intermediate_size"])
    if model_type == "gpt_oss":
        sizes |= _of_gpt_oss(raw, scaling)
    return LlamaConfig(
        **sizes,
        rope_theta=theta,
        rope_scaling=scaling,
        tie_word_embeddings=raw.get("tie_word_embeddings", False),
        dtype=dtype or _agreed(raw, "dtype", "torch_dtype") or ("bfloat16" if model_type == "gpt_oss" else "float32"),
        qk_norm=model_type.startswith("qwen3"),
        max_position_embeddings=raw.get("max_position_embeddings"),
        eos_token_ids=tuple(dict.fromkeys(eos)),
    )


def _of_gpt_oss(raw: dict, scaling: RopeScaling | YarnScaling | None) -> dict:
    """The fields of `LlamaConfig` that only gpt-oss has."""
    if raw.get("swiglu_alpha", SWIGLU_ALPHA) != SWIGLU_ALPHA:
        raise ValueError(
            f"config.json: swiglu_alpha = {raw['swiglu_alpha']!r} is not supported; must be {SWIGLU_ALPHA}"
        )
    first = raw.get("initial_context_length")
    if first is not None and first != getattr(scaling, "original_max_position_embeddings", first):
        raise ValueError(
            f"config.json: initial_context_length = {first!r} and original_max_position_embeddings = "
            f"{scaling.original_max_position_embeddings!r} mean the same; must be equal: remove the wrong one"
        )
    layers = raw["num_hidden_layers"]
    kinds = raw.get("layer_types") or ["sliding_attention", "full_attention"] * layers
    if other := set(kinds) - {"sliding_attention", "full_attention"}:
        raise ValueError(
            f"config.json: layer_types has {min(other)!r}, not supported; must be 'sliding_attention' or "
            "'full_attention'"
        )
    if "layer_types" in raw and len(kinds) != layers:
        raise ValueError(f"config.json: layer_types has {len(kinds)} layers; must have num_hidden_layers = {layers}")
    return dict(
        attention_bias=raw.get("attention_bias", True), attention_sinks=True, expert_bias=True,
        sliding_window=raw.get("sliding_window", 128), swiglu_limit=raw.get("swiglu_limit", 7.0),
        window_layers=tuple(i for i, kind in enumerate(kinds[:layers]) if kind == "sliding_attention"),
    )  # fmt: skip


def _tokens(value) -> list[int]:
    """The tokens of `eos_token_id`: none, one, or a list."""
    return [] if value is None else [value] if isinstance(value, int) else list(value)


def _agreed(values: dict, *names: str):
    """The value of these keys, which have the same meaning; None if there is none of them.

    Raises:
      ValueError: two are not equal.
    """
    found = {name: values[name] for name in names if values.get(name) is not None}
    for name, value in found.items():
        first = next(iter(found))
        if value != found[first]:
            raise ValueError(
                f"config.json: {first} = {found[first]!r} and {name} = {value!r} mean the same; must be equal: remove "
                "the wrong one"
            )
    return next(iter(found.values()), None)


def _rope_of(raw: dict) -> tuple[float, RopeScaling | YarnScaling | None]:
    """The rotary base and scaling. Both are in `rope_parameters` since version 5 of transformers. Before it wrote the
    base beside `rope_scaling`."""
    ropes = {key: raw[key] for key in ("rope_parameters", "rope_scaling") if raw.get(key)}
    thetas = {f"{key}.rope_theta": rope.get("rope_theta") for key, rope in ropes.items()}
    theta = _agreed(raw | thetas, "rope_theta", *thetas)
    if theta is None and raw["model_type"] != "llama":
        raise ValueError("config.json: lacks rope_theta")
    scalings = {key: _scaling_of(key, rope) for key, rope in ropes.items()}
    if len(set(scalings.values())) > 1:
        _agreed(ropes, *ropes)  # They are not equal either: this says it.
    return 10000.0 if theta is None else theta, next(iter(scalings.values()), None)


def _scaling_of(key: str, rope: dict) -> RopeScaling | YarnScaling | None:
    rope = {name: value for name, value in rope.items() if value is not None and name != "rope_theta"}
    kind = _agreed(rope, "rope_type", "type") or "default"
    rope = {name: value for name, value in rope.items() if name not in ("rope_type", "type")}
    if rope.get("partial_rotary_factor") == 1:
        del rope["partial_rotary_factor"]
    if (kind, rope) in (("default", {}), ("linear", dict(factor=1))):
        return None
    names = {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
    if kind == "llama3" and rope.keys() == names:
        return RopeScaling(**rope)
    required, more = ({"factor", "original_max_position_embeddings"},
                      {"beta_fast", "beta_slow", "truncate", "attention_factor"})  # fmt: skip
    if kind == "yarn" and required <= rope.keys() <= required | more:
        return YarnScaling(**rope)
    raise ValueError(
        f"config.json: {key} has rope_type = {kind!r} with {rope}, not supported; must be 'default' with nothing "
        f"else, 'linear' with a factor of 1, 'llama3' with {sorted(names)}, or 'yarn' with {sorted(required)} and at "
        f"most {sorted(more)}"
    )


def raw_of(config: LlamaConfig, model_type: str) -> dict:
    """The inverse of `config_of`."""
    rope = dict(rope_type="default", rope_theta=config.rope_theta)
    if config.rope_scaling:
        kind = "yarn" if isinstance(config.rope_scaling, YarnScaling) else "llama3"
        rope |= dict(rope_type=kind, **vars(config.rope_scaling))
    names = READ - {"torch_dtype", "rope_theta", "rope_scaling", "rope_parameters", "layer_types", "eos_token_id"}
    raw = dict(model_type=model_type, rope_parameters=rope, hidden_act="silu", eos_token_id=list(config.eos_token_ids))
    raw |= {name: getattr(config, name) for name in sorted(names)}
    if config.num_experts:
        raw |= dict(num_local_experts=config.num_experts, num_experts_per_tok=config.num_experts_per_tok)
    if model_type == "qwen3_moe":
        raw |= dict(moe_intermediate_size=config.intermediate_size, norm_topk_prob=config.norm_topk_prob)
    if model_type == "gpt_oss":
        kinds = ["sliding_attention" if i in config.window_layers else "full_attention"
                 for i in range(config.num_hidden_layers)]  # fmt: skip
        names = "attention_bias", "sliding_window", "swiglu_limit"
        raw |= dict(layer_types=kinds, **{name: getattr(config, name) for name in names})
    architecture = "".join(map(str.capitalize, model_type.split("_")))
    return {name: value for name, value in raw.items() if value is not None} | dict(
        architectures=[f"{architecture}ForCausalLM"]
    )

"""Checkpoints of each architecture: logits are those of NumPy in float64, and of transformers where it is installed."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import numpy_models
import pytest
from safetensors.numpy import save_file

import lab
from bench.peers import imports
from serving import Engine, LlamaConfig, RopeScaling, YarnScaling, init, load, memory, quantized, save
from serving.checkpoint import config_of
from serving.model import empty_pages, forward
from serving.quantized import Packed, Packing
from serving.request import Chunk, Request
from serving.step import pack
from serving.weights import prepared
from tests.arrays import array

SIZES = dict(
    vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=64, max_position_embeddings=256, rms_norm_eps=1e-5, dtype="float32",
)  # fmt: skip
LLAMA3 = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32)
INDEX = "model.safetensors.index.json"
PLAIN = dict(rope_parameters=dict(rope_type="default", rope_theta=10000.0))
RAW = dict(
    llama=dict(model_type="llama", rope_theta=10000.0),
    llama3=dict(
        model_type="llama", rope_theta=500000.0, rope_scaling=dict(rope_type="llama3", **LLAMA3), eos_token_id=[5, 7],
        tie_word_embeddings=True, hidden_act="silu", attention_bias=False, torch_dtype="float32",
    ),
    qwen3=dict(
        model_type="qwen3", use_sliding_window=False, sliding_window=4096, layer_types=["full_attention"] * 2, **PLAIN
    ),
    mixtral=dict(model_type="mixtral", num_local_experts=4, num_experts_per_tok=2, sliding_window=None, **PLAIN),
    qwen3_moe=dict(
        model_type="qwen3_moe", num_experts=8, num_experts_per_tok=3, moe_intermediate_size=48, norm_topk_prob=True,
        decoder_sparse_step=1, mlp_only_layers=[], **PLAIN,
    ),
    qwen3_moe_plain=dict(
        model_type="qwen3_moe", num_experts=8, num_experts_per_tok=3, moe_intermediate_size=48, norm_topk_prob=False,
        **PLAIN,
    ),
    gpt_oss=dict(
        model_type="gpt_oss", num_local_experts=8, num_experts_per_tok=4, sliding_window=16, swiglu_limit=1.0,
        layer_types=["sliding_attention", "full_attention"], attention_bias=True, rope_theta=150000.0,
        initial_context_length=16, experts_per_token=4, rope_scaling=dict(
            rope_type="yarn", factor=32.0, beta_fast=8.0, beta_slow=0.02, truncate=False,
            original_max_position_embeddings=16,
        ),
    ),
)  # fmt: skip


GPT_OSS = {
    "mlp.router.weight": "mlp.gate.weight", "mlp.router.bias": "mlp.gate.bias",
    "mlp.experts.gate_up_proj": "mlp.experts.gate_up_proj.weight",
    "mlp.experts.gate_up_proj_bias": "mlp.experts.gate_up_proj.bias",
    "mlp.experts.down_proj": "mlp.experts.down_proj.weight",
    "mlp.experts.down_proj_bias": "mlp.experts.down_proj.bias",
}  # fmt: skip
WHOLE_NAMES = ".bias", "_bias", ".sinks", ".experts.gate_up_proj", ".experts.down_proj"


def tensors_of(raw: dict, seed: int = 0) -> dict[str, np.ndarray]:
    """Random tensors under the names of an architecture's checkpoints, written down here anew."""
    rng, d, vocab = np.random.default_rng(seed), raw["hidden_size"], raw["vocab_size"]
    heads, kv, dim = raw["num_attention_heads"], raw["num_key_value_heads"], raw["head_dim"]
    moe = raw["model_type"] in ("mixtral", "qwen3_moe")
    inner = raw.get("moe_intermediate_size", raw["intermediate_size"])
    shapes = {"model.embed_tokens": (vocab, d), "model.norm": (d,)}
    shapes |= {} if raw.get("tie_word_embeddings") else {"lm_head": (vocab, d)}
    for i in range(raw["num_hidden_layers"]):
        layer = {"input_layernorm": (d,), "post_attention_layernorm": (d,)}
        layer |= {f"self_attn.{name}_proj": (n * dim, d) for name, n in (("q", heads), ("k", kv), ("v", kv))}
        layer |= {"self_attn.o_proj": (d, heads * dim)}
        if "qwen3" in raw["model_type"]:
            layer |= {"self_attn.q_norm": (dim,), "self_attn.k_norm": (dim,)}
        block = "block_sparse_moe" if raw["model_type"] == "mixtral" else "mlp"
        names = ("w1", "w3", "w2") if raw["model_type"] == "mixtral" else ("gate_proj", "up_proj", "down_proj")
        count = raw.get("num_local_experts", raw.get("num_experts"))
        products = dict(zip(names, ((inner, d), (inner, d), (d, inner)), strict=True))
        if raw["model_type"] == "gpt_oss":
            layer |= {f"self_attn.{name}_proj.bias": (n * dim,) for name, n in (("q", heads), ("k", kv), ("v", kv))}
            layer |= {
                "self_attn.o_proj.bias": (d,), "self_attn.sinks": (heads,), "mlp.router": (count, d),
                "mlp.router.bias": (count,), "mlp.experts.gate_up_proj": (count, d, 2 * inner),
                "mlp.experts.gate_up_proj_bias": (count, 2 * inner), "mlp.experts.down_proj": (count, inner, d),
                "mlp.experts.down_proj_bias": (count, d),
            }  # fmt: skip
        else:
            for each in [f"{block}.experts.{e}" for e in range(count)] if moe else ["mlp"]:
                layer |= {f"{each}.{name}": shape for name, shape in products.items()}
            layer |= {f"{block}.gate": (count, d)} if moe else {}
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    draw = lambda shape: rng.normal(1, 0.2, shape) if len(shape) == 1 else rng.normal(0, 0.15, shape)
    full_name = lambda name: name if name.endswith(WHOLE_NAMES) else f"{name}.weight"
    return {full_name(name): draw(shape).astype(np.float32) for name, shape in shapes.items()}


def written(folder, name: str, changes: dict | None = None, drop=()) -> dict:
    """Writes a checkpoint in three files; returns its tensors."""
    raw = {key: value for key, value in (SIZES | RAW[name]).items() if key not in drop} | (changes or {})
    tensors = tensors_of(SIZES | RAW[name])
    (folder / "config.json").write_text(json.dumps(raw))
    for i in range(3):
        part = {key: tensors[key] for key in sorted(tensors)[i::3]}
        add_file(folder, f"model-0000{i + 1}-of-00003.safetensors", part)
    return tensors


def add_file(folder, file: str, tensors: dict) -> None:
    """Adds a file of tensors to a checkpoint, and to its index."""
    save_file(tensors, str(folder / file))
    index = folder / INDEX
    files = json.loads(index.read_text())["weight_map"] if index.exists() else {}
    index.write_text(json.dumps(dict(metadata={}, weight_map=files | dict.fromkeys(tensors, file))))


@functools.partial(jax.jit, static_argnames=("config", "backend"))
def last_logits(config: LlamaConfig, params, batch, backend: str):
    return forward(config, prepared(config, params), empty_pages(config, 8, 16), batch, backend=backend, decode=False)[
        0
    ]


def ours(config: LlamaConfig, params, tokens, backend: str = "xla") -> np.ndarray:
    """The logits after the last token."""
    request = Request(tokens, 1)
    request.pages = list(range(7, -1, -1))
    request.window_pages = request.pages[::-1] if config.window_layers else []
    return np.asarray(last_logits(config, params, pack([Chunk(request, 0, len(tokens))], 16, 2, False), backend)[0])


@pytest.mark.parametrize("name", RAW)
def test_logits_are_numpys(tmp_path, name):
    written(tmp_path, name)
    config, params = load(tmp_path)
    tokens = np.random.default_rng(1).integers(0, 96, 60)
    expected = numpy_models.logits(tmp_path, tokens)
    for length in (1, 33, 60):
        error = np.abs(ours(config, params, tokens[:length]) - expected[length - 1]).max()
        assert error < 2e-5 * np.abs(expected).max()  # float32: some 20 times its rounding.
    assert config.eos_token_ids == ((5, 7) if name == "llama3" else ())


@pytest.mark.kernels
@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama3", "qwen3", "mixtral", "qwen3_moe", "gpt_oss"])
def test_kernels_compute_each_architecture(tmp_path, name):
    """In bfloat16: the kernels' logits are as near to float64 as XLA's are, but for a factor of 1.5."""
    is_gpt_oss = name == "gpt_oss"  # Its two layers differ.
    written(tmp_path, name, dict(sliding_window=3) if is_gpt_oss else dict(num_hidden_layers=1))
    (tmp_path / "model.safetensors.index.json").unlink()  # It names the tensors of the second layer.
    for file in () if is_gpt_oss else tmp_path.glob("*.safetensors"):
        kept = {key: value for key, value in numpy_models.load_file(str(file)).items() if "layers.1." not in key}
        save_file(kept, str(file))
    config, params = load(tmp_path, dtype="bfloat16")
    tokens = np.random.default_rng(1).integers(0, 96, 5)
    expected = numpy_models.logits(tmp_path, tokens)[-1]
    kernels, xla = (
        np.linalg.norm(lab.run(ours, config, params, tokens, name) - expected) for name in ("cookbook", "xla")
    )
    assert kernels < 1.5 * xla < 0.1 * np.linalg.norm(expected)


@pytest.mark.parametrize("name", ["LlamaFor", "Qwen3For", "MixtralFor", "Qwen3MoeFor", "GptOssFor"])
def test_logits_are_those_of_transformers(tmp_path, name):
    reason = "compares with transformers and torch, which are not installed here: pip install transformers torch"
    if not (imports("torch") and imports("transformers")):
        pytest.skip(reason)
    import torch
    import transformers

    options = dict(
        LlamaFor=dict(
            rope_parameters=dict(rope_type="llama3", rope_theta=500000.0, **LLAMA3), tie_word_embeddings=True
        ),
        Qwen3For={},
        MixtralFor=dict(num_local_experts=4, num_experts_per_tok=2),
        Qwen3MoeFor=dict(num_experts=8, num_experts_per_tok=3, moe_intermediate_size=48, norm_topk_prob=True),
        GptOssFor=dict(num_local_experts=8, num_experts_per_tok=4, sliding_window=16),
    )[name]
    sizes = {key: value for key, value in SIZES.items() if key != "dtype"}
    torch.manual_seed(0)
    config = getattr(transformers, name.replace("For", "Config"))(**sizes, **options)
    model = getattr(transformers, f"{name}CausalLM")(config).eval().float()
    for p in model.parameters():
        torch.nn.init.normal_(p, *((1, 0.2) if p.dim() == 1 else (0, 0.15)))
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    tokens = np.random.default_rng(1).integers(0, 96, 60)
    with torch.no_grad():
        expected = model(torch.tensor(tokens[None])).logits[0].numpy()
    config, params = load(tmp_path)
    for length in (1, 33, 60):
        np.testing.assert_allclose(ours(config, params, tokens[:length]), expected[length - 1], atol=1e-4)


@pytest.mark.parametrize("name", RAW)
def test_a_model_survives_the_file(tmp_path, name):
    written(tmp_path, name)
    config, params = load(tmp_path)
    save(config, params, tmp_path / "again")
    again, same = load(tmp_path / "again")
    assert again == config and same.keys() == params.keys() and all((same[key] == params[key]).all() for key in params)
    tensors = numpy_models.load_file(str(tmp_path / "again" / "model.safetensors"))
    assert tensors.keys() == tensors_of(SIZES | RAW[name]).keys()


def packed(values: np.ndarray) -> np.ndarray:
    """int32 of the last axis of eight numbers from 0 to 15, the first in the lowest bits."""
    words = np.zeros(values.shape[:-1], np.uint32)
    for i in range(8):
        words |= values[..., i].astype(np.uint32) << np.uint32(4 * i)
    return words.view(np.int32)


def in_mxfp4(rng, name: str, shape) -> tuple[dict, np.ndarray]:
    """The packed tensors of random experts, (E, inputs, outputs), and their values."""
    experts, inputs, outputs = shape
    codes = rng.integers(0, 16, (experts, outputs, inputs))
    exponents = rng.integers(-6, 2, (experts, outputs, inputs // 32))
    sign, exponent, mantissa = codes >> 3, codes >> 1 & 3, codes & 1
    values = np.where(exponent == 0, mantissa * 0.5, 2.0 ** (exponent - 1) * (1 + mantissa / 2)) * (1 - 2 * sign)
    values *= np.repeat(2.0**exponents, 32, axis=2)
    blocks = (codes[..., ::2] + 16 * codes[..., 1::2]).reshape(experts, outputs, inputs // 32, 16)
    parts = {f"{name}_blocks": blocks.astype(np.uint8), f"{name}_scales": (exponents + 127).astype(np.uint8)}
    return parts, values.swapaxes(1, 2)


def in_integers(rng, name: str, shape, quantization: dict) -> tuple[dict, np.ndarray]:
    """The packed tensors of a random matrix, (outputs, inputs), and its values."""
    (outputs, inputs), method, group = shape, quantization["quant_method"], quantization["group_size"]
    of_input = np.arange(inputs) // group
    if quantization.get("desc_act"):
        of_input = rng.permutation(of_input)
    q, zeros = rng.integers(0, 16, (inputs, outputs)), rng.integers(1, 16, (inputs // group, outputs))
    zeros = np.full_like(zeros, 8) if quantization.get("sym") else zeros
    scales = rng.uniform(0.01, 0.03, zeros.shape).astype(np.float16)
    values = (q - zeros[of_input]) * scales[of_input].astype(np.float64)
    if method == "awq":
        mixed = lambda x: packed(x.reshape(len(x), -1, 8)[..., [0, 2, 4, 6, 1, 3, 5, 7]])
        parts = dict(qweight=mixed(q), qzeros=mixed(zeros))
    else:
        words = packed(q.reshape(-1, 8, outputs).swapaxes(1, 2))
        zeros = packed((zeros - ("checkpoint_format" not in quantization)).reshape(len(zeros), -1, 8))
        parts = dict(qweight=words, qzeros=zeros, g_idx=of_input.astype(np.int32), bias=np.zeros(outputs, np.float16))
    prefix = name.removesuffix("weight")
    return {prefix + part: value for part, value in (parts | dict(scales=scales)).items()}, values.T


QUANTIZED = {
    "mxfp4": dict(quant_method="mxfp4", modules_to_not_convert=["lm_head"]),
    "gptq": dict(quant_method="gptq", bits=4, group_size=32, desc_act=True, sym=False, damp_percent=0.1),
    "gptq_v2": dict(quant_method="gptq", bits=4, group_size=32, sym=False, checkpoint_format="gptq_v2"),
    "gptq_sym": dict(quant_method="gptq", bits=4, group_size=32, desc_act=False, sym=True),
    "awq": dict(quant_method="awq", bits=4, group_size=32, version="gemm", zero_point=True),
}


def written_packed(folder, method: str, change=lambda parts: parts, name: str | None = None) -> dict:
    """Writes a checkpoint with packed weights, of gpt-oss, Qwen3 or `name`; returns the values of all tensors."""
    name = name or ("gpt_oss" if method == "mxfp4" else "qwen3")
    raw, rng = SIZES | RAW[name] | dict(quantization_config=QUANTIZED[method]), np.random.default_rng(5)
    stored, values = {}, {}
    for key, value in tensors_of(raw).items():
        parts = {key: value}
        if method == "mxfp4" and value.ndim == 3:
            parts, value = in_mxfp4(rng, key, value.shape)
        elif method != "mxfp4" and value.ndim == 2 and "layers" in key and not key.endswith("gate.weight"):
            parts, value = in_integers(rng, key, value.shape, QUANTIZED[method])
        values[key] = value
        stored |= parts
    (folder / "config.json").write_text(json.dumps(raw))
    save_file(change({key: np.ascontiguousarray(value) for key, value in stored.items()}), folder / "model.safetensors")
    return values


def widened(config: LlamaConfig, params: dict) -> dict:
    """The parameters as floats, each rounded once to the dtype of the config."""
    inputs = lambda name: config.shapes[name][1]  # Matrices and experts alike.
    return {
        name: value.floats(inputs(name), config.dtype) if isinstance(value, Packed) else value
        for name, value in params.items()
    }


@pytest.mark.parametrize("method", QUANTIZED)
def test_weights_stay_packed_and_are_exact(tmp_path, method):
    """But for groups out of order, which are widened. Values are compared with those that were packed."""
    values = written_packed(tmp_path, method)
    name_of = lambda key: key[:15] + GPT_OSS.get(key[15:], key[15:])  # After "model.layers.0.".
    config, params = load(tmp_path, dtype="bfloat16")
    assert params.keys() == set(map(name_of, values))
    assert sum(isinstance(x, Packed) for x in params.values()) == dict(mxfp4=4, gptq=0).get(method, 14)
    wide = widened(dataclasses.replace(config, dtype="float32"), params)
    for key, value in values.items():
        if "gate_up_proj" in key:
            value = np.concatenate([value[..., ::2], value[..., 1::2]], axis=-1)
        expected, found = value.astype(np.float32), wide[name_of(key)]
        np.testing.assert_array_equal(
            np.float32(found), expected if found.dtype == np.float32 else np.float32(expected.astype(found.dtype))
        )
    with_zeros = {x.zeros is not None for x in params.values() if isinstance(x, Packed)}
    assert with_zeros == dict(gptq=set(), awq={True}, gptq_v2={True}).get(method, {False})


@pytest.mark.parametrize("method, name", [("mxfp4", "gpt_oss"), ("awq", "qwen3"), ("gptq_sym", "mixtral")])
def test_packed_weights_give_the_logits_of_widened_ones(tmp_path, method, name):
    """XLA, which widens them in each step, has the same bits. And they are counted as what they take."""
    written_packed(tmp_path, method, name=name)
    config, params = load(tmp_path)
    wide, tokens = widened(config, params), np.random.default_rng(1).integers(0, 96, 40)
    assert sum(isinstance(x, Packed) for x in params.values()) == dict(mxfp4=4, awq=14, gptq_sym=12)[method]
    np.testing.assert_array_equal(ours(config, params, tokens), ours(config, wide, tokens))
    sizes = dict(num_pages=16, max_seq_len=64)
    saved = memory(config, wide, **sizes).weights - memory(config, params, **sizes).weights
    arrays = lambda params: sum(x.nbytes for x in jax.tree.leaves(prepared(config, params)))  # As an engine has them.
    assert saved == arrays(wide) - arrays(params) > 0 and memory(config, **sizes) == memory(config, wide, **sizes)


def test_large_groups_are_packed_as_several():
    """The kernels take groups of up to 128. One group of all inputs is -1 in a config."""
    for size in (256, -1):
        quantization = dict(quant_method="gptq", bits=4, group_size=256)
        parts, values = in_integers(np.random.default_rng(0), "x.weight", (8, 256), quantization)
        packing = Packing.of(dict(model_type="llama", quantization_config=quantization | dict(group_size=size)))
        found = quantized.packed(packing, {key: jnp.asarray(x) for key, x in parts.items()}, "float32")
        assert found.keys() == {"x.weight"} and found["x.weight"].scales.shape == (2, 8)
        np.testing.assert_array_equal(found["x.weight"].floats(256, "float32"), values.astype(np.float32))


def test_parts_that_are_packed_in_different_ways_are_joined_as_floats(tmp_path):
    """As where the groups of one matrix alone are out of order."""
    config = LlamaConfig(61, 64, 64, 1, 2, 1, 64, dtype="float32")
    params, floats = init(config, packing="int4"), init(config)
    assert sum(isinstance(x, Packed) for x in params.values()) == 7
    mixed = params | {name: x for name, x in floats.items() if ".q_proj." in name}
    joined = prepared(config, mixed)
    np.testing.assert_array_equal(
        joined["model.layers.0.self_attn.qkv_proj.weight"][128:192],
        params["model.layers.0.self_attn.k_proj.weight"].floats(64, "float32"),
    )
    assert isinstance(joined["model.layers.0.mlp.gate_up_proj.weight"], Packed)
    for name, x in params.items():  # Random weights keep the variance of what they multiply.
        if isinstance(x, Packed):
            inputs = config.shapes[name][1]
            assert abs(np.std(x.floats(inputs, "float32")) * inputs**0.5 - 1) < 0.1, name
    with pytest.raises(ValueError, match="weights = 'int8' with packed parameters"):
        prepared(config, params, "int8")
    with pytest.raises(ValueError, match="save: model.layers.0.* is packed; must be floats"):
        save(config, params, tmp_path)
    with pytest.raises(ValueError, match='packing=.fp8.; must be None, "mxfp4" or "int4"'):
        init(config, packing="fp8")
    name = "model.layers.0.mlp.down_proj.weight"
    with pytest.raises(ValueError, match=f"params: {name} is .*; must stand for"):
        Engine(config, params | {name: params[name]._replace(zeros=jnp.ones(3))}, num_pages=4, backend="xla")


@pytest.mark.parametrize(
    "method, config, message",
    [
        ("awq", dict(version="gemv"), "quantization_config.version = 'gemv' is not supported; must be 'gemm'"),
        ("awq", dict(bits=8), "quantization_config.bits = 8 is not supported; must be 4"),
        ("gptq", dict(group_size=0), "quantization_config.group_size = 0; must be above 0, or -1"),
        ("gptq", dict(group_size=64), r"qzeros is \(3, 8\), int32; must be \(2, 8\), int32"),
        ("gptq", dict(checkpoint_format="marlin"), "checkpoint_format = 'marlin' is not supported"),
        ("gptq", dict(new_key=1), "quantization_config.new_key = 1 is a key that is not known for gptq"),
        ("gptq", dict(quant_method="mxfp4"), "quant_method = 'mxfp4' is not supported for qwen3"),
        (
            "gptq",
            dict(quant_method="fp8"),
            "quant_method = 'fp8' is not supported for qwen3; must be 'mxfp4' for gpt_oss",
        ),
        ("mxfp4", dict(quant_method="awq"), "quant_method = 'awq' is not supported for gpt_oss"),
    ],
)
def test_other_quantizations_are_refused_by_name(tmp_path, method, config, message):
    written_packed(tmp_path, method)
    raw = json.loads((tmp_path / "config.json").read_text())
    raw["quantization_config"] |= config
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match=message):
        load(tmp_path)


@pytest.mark.parametrize(
    "method, change, message",
    [
        ("mxfp4", lambda name, x: None if name.endswith("down_proj_scales") else x, "lacks .*down_proj_scales, a part"),
        ("mxfp4", lambda name, x: x[..., :8] if "_blocks" in name else x, r"_blocks is .*8\), uint8; must be .*16\)"),
        (
            "awq",
            lambda name, x: x.astype(np.float32) if "qzeros" in name else x,
            "qzeros is .*float32; must be .*int32",
        ),
        ("gptq", lambda name, x: x + 1 if "g_idx" in name else x, "g_idx is .*; must be .*groups from 0 to 2"),
        ("gptq", lambda name, x: x + 1 if name.endswith("bias") else x, "unknown parameter.*bias"),
    ],
)
def test_parts_of_packed_weights_that_do_not_fit_are_named(tmp_path, method, change, message):
    changed = lambda parts: {name: y for name, x in parts.items() if (y := change(name, x)) is not None}
    written_packed(tmp_path, method, changed)
    with pytest.raises(ValueError, match=message):
        load(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_an_engine_serves_a_checkpoint_and_ends_with_its_stop_tokens(tmp_path, name):
    written(tmp_path, name)
    config, params = load(tmp_path)
    engine = lambda config: Engine(config, params, num_pages=16, max_seqs=4, max_tokens_per_step=8, backend="xla")
    alone = engine(config)
    request = alone.submit(range(30), 6)  # Windows of 16 tokens leave the first page behind.
    alone.run()
    sequence = list(range(30))
    for token in request.generated:
        assert token == np.argmax(numpy_models.logits(tmp_path, sequence)[-1])
        sequence.append(token)
    ending = engine(dataclasses.replace(config, eos_token_ids=(request.generated[2], 95)))
    again = ending.submit(range(30), 6)
    ending.run()
    assert again.generated == request.generated[: request.generated.index(request.generated[2]) + 1]
    assert again.finish_reason == "stop"


def test_weights_take_a_dtype_and_a_head_that_is_tied_is_left(tmp_path):
    tensors = written(tmp_path, "llama3")
    add_file(tmp_path, "z.safetensors", {"lm_head.weight": tensors["model.embed_tokens.weight"]})
    config, params = load(tmp_path, dtype="bfloat16")
    assert {str(value.dtype) for value in params.values()} == {"bfloat16"} and "lm_head.weight" not in params
    value = tensors["model.layers.1.self_attn.q_proj.weight"]
    assert (params["model.layers.1.self_attn.q_proj.weight"] == array(value, jnp.bfloat16)).all()


def test_a_config_as_transformers_4_wrote_it():
    """Llama 3.2 1B's, gpt-oss-20b's, and that of Mixtral 8x7B, which has no head_dim."""
    llama = dict(
        architectures=["LlamaForCausalLM"], attention_bias=False, attention_dropout=0.0, bos_token_id=128000,
        eos_token_id=128001, head_dim=64, hidden_act="silu", hidden_size=2048, initializer_range=0.02,
        intermediate_size=8192, max_position_embeddings=131072, mlp_bias=False, model_type="llama",
        num_attention_heads=32, num_hidden_layers=16, num_key_value_heads=8, pretraining_tp=1, rms_norm_eps=1e-05,
        rope_scaling=dict(
            factor=32.0, high_freq_factor=4.0, low_freq_factor=1.0, original_max_position_embeddings=8192,
            rope_type="llama3",
        ), rope_theta=500000.0, tie_word_embeddings=True, torch_dtype="bfloat16", transformers_version="4.45.0.dev0",
        use_cache=True, vocab_size=128256,
    )  # fmt: skip
    assert config_of(llama) == LlamaConfig(
        128256, 2048, 8192, 16, 32, 8, 64, 500000.0, 1e-5, True, "bfloat16", RopeScaling(32.0, 1.0, 4.0, 8192),
        max_position_embeddings=131072, eos_token_ids=(128001,),
    )  # fmt: skip
    mixtral = dict(
        architectures=["MixtralForCausalLM"], attention_dropout=0.0, bos_token_id=1, eos_token_id=2, hidden_act="silu",
        hidden_size=4096, initializer_range=0.02, intermediate_size=14336, max_position_embeddings=32768,
        model_type="mixtral", num_attention_heads=32, num_experts_per_tok=2, num_hidden_layers=32,
        num_key_value_heads=8, num_local_experts=8, output_router_logits=False, rms_norm_eps=1e-05,
        rope_theta=1000000.0, router_aux_loss_coef=0.02, sliding_window=None, tie_word_embeddings=False,
        torch_dtype="bfloat16", transformers_version="4.36.0.dev0", use_cache=True, vocab_size=32000,
    )  # fmt: skip
    gpt_oss = dict(
        architectures=["GptOssForCausalLM"], attention_bias=True, attention_dropout=0.0, eos_token_id=200002,
        experts_per_token=4, head_dim=64, hidden_act="silu", hidden_size=2880, initial_context_length=4096,
        initializer_range=0.02, intermediate_size=2880, layer_types=["sliding_attention", "full_attention"] * 12,
        max_position_embeddings=131072, model_type="gpt_oss", num_attention_heads=64, num_experts_per_tok=4,
        num_hidden_layers=24, num_key_value_heads=8, num_local_experts=32, output_router_logits=False,
        pad_token_id=199999, rms_norm_eps=1e-05, rope_scaling=dict(
            beta_fast=32.0, beta_slow=1.0, factor=32.0, original_max_position_embeddings=4096, rope_type="yarn",
            truncate=False,
        ), rope_theta=150000, router_aux_loss_coef=0.9, sliding_window=128, swiglu_limit=7.0,
        tie_word_embeddings=False, transformers_version="4.55.0.dev0", use_cache=True, vocab_size=201088,
    )  # fmt: skip
    assert config_of(gpt_oss) == LlamaConfig(
        201088, 2880, 2880, 24, 64, 8, 64, 150000.0, 1e-5, rope_scaling=YarnScaling(32.0, 4096, truncate=False),
        num_experts=32, num_experts_per_tok=4, max_position_embeddings=131072, eos_token_ids=(200002,),
        attention_bias=True, attention_sinks=True, sliding_window=128, window_layers=tuple(range(0, 24, 2)),
        expert_bias=True, swiglu_limit=7.0,
    )  # fmt: skip
    config = config_of(mixtral)
    assert (config.head_dim, config.num_experts, config.num_experts_per_tok, config.norm_topk_prob) == (128, 8, 2, True)


@pytest.mark.parametrize(
    "name, changes, drop, message",
    [
        ("llama", dict(attention_bias=True), (), "attention_bias = True is not supported"),
        ("llama", dict(hidden_act="gelu"), (), "hidden_act = 'gelu' is not supported; must be 'silu'"),
        ("llama", dict(partial_rotary_factor=0.5), (), "partial_rotary_factor = 0.5 is not supported; must be 1.0"),
        ("llama", dict(num_local_experts=4), (), "num_local_experts = 4 is a key that is not known for llama"),
        ("llama", dict(rope_scaling=dict(rope_type="yarn", factor=4.0)), (), "rope_type = 'yarn'"),
        ("llama", dict(rope_scaling=dict(type="linear", factor=4.0)), (), "rope_type = 'linear'"),
        ("llama", dict(model_type="gemma3"), (), "model_type = 'gemma3'"),
        ("llama", dict(quantization_config={}), (), "quantization_config"),
        ("llama", {}, ("hidden_size",), "lacks hidden_size"),
        ("qwen3", {}, ("head_dim",), "lacks head_dim"),
        ("qwen3", dict(rope_parameters={}), (), "lacks rope_theta"),
        ("qwen3", dict(use_sliding_window=True), (), "use_sliding_window = True is not supported"),
        ("qwen3", dict(layer_types=["sliding_attention"] * 2), (), "layer_types has 'sliding_attention'"),
        ("mixtral", dict(sliding_window=4096), (), "sliding_window = 4096 is not supported"),
        ("mixtral", {}, ("num_local_experts",), "lacks num_local_experts"),
        ("qwen3_moe", dict(decoder_sparse_step=2), (), "decoder_sparse_step = 2 is not supported"),
        ("qwen3_moe", dict(mlp_only_layers=[0]), (), r"mlp_only_layers = \[0\] is not supported"),
        ("gpt_oss", dict(swiglu_alpha=1.0), (), "swiglu_alpha = 1.0 is not supported; must be 1.702"),
        ("gpt_oss", dict(layer_types=["chunked_attention"] * 2), (), "layer_types has 'chunked_attention'"),
        ("gpt_oss", dict(layer_types=["sliding_attention"] * 2), (), "window_layers=.*and not all"),
        ("gpt_oss", dict(layer_types=["full_attention"]), (), "layer_types has 1 layers; must have num_hidden_layers"),
        ("gpt_oss", dict(initial_context_length=8), (), "initial_context_length = 8 and original_max_position"),
        ("llama", dict(swiglu_limit=7.0), (), "swiglu_limit = 7.0 is a key that is not known for llama"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(name, changes, drop, message):
    with pytest.raises(ValueError, match=message):
        config_of({key: value for key, value in (SIZES | RAW[name] | changes).items() if key not in drop})


@pytest.mark.parametrize(
    "name, extra, missing, message",
    [
        ("llama", "model.layers.0.self_attn.q_proj.bias", None, "1 unknown parameter.*q_proj.bias"),
        ("llama", "model.layers.0.self_attn.q_norm.weight", None, "1 unknown parameter.*q_norm"),
        ("llama", None, "model.layers.1.input_layernorm.weight", "lacks 1 parameter.*model.layers.1.input_layernorm"),
        ("mixtral", "model.layers.0.block_sparse_moe.experts.4.w1.weight", None, "unknown.*experts.4.w1"),
        ("mixtral", None, "model.layers.1.block_sparse_moe.experts.3.w2.weight", "lacks .*experts.3.w2"),
        ("qwen3_moe", None, "model.layers.1.mlp.gate.weight", "lacks model.layers.1.mlp.gate.weight"),
    ],
)
def test_tensors_that_do_not_fit_are_named(tmp_path, name, extra, missing, message):
    tensors = written(tmp_path, name)
    for file in (*tmp_path.glob("*.safetensors"), tmp_path / INDEX):
        file.unlink()
    tensors |= {extra: np.zeros(3, np.float32)} if extra else {}
    save_file({key: value for key, value in tensors.items() if key != missing}, str(tmp_path / "a.safetensors"))
    with pytest.raises(ValueError, match=message):
        load(tmp_path)


def test_files_that_do_not_fit_are_named(tmp_path):
    with pytest.raises(ValueError, match="must be a folder with config.json"):
        load(tmp_path)
    tensors = written(tmp_path, "llama", dict(vocab_size=128))
    with pytest.raises(ValueError, match=r"embed_tokens.weight is \(96, 64\).* must be \(128, 64\)|lm_head"):
        load(tmp_path)
    name = sorted(tensors)[0]
    save_file({name: tensors[name]}, str(tmp_path / "z.safetensors"))
    (tmp_path / INDEX).unlink()
    with pytest.raises(ValueError, match=f"{name} is in z.safetensors and in a file before"):
        load(tmp_path)


def test_the_index_decides_which_files_count(tmp_path):
    """Others may lie there: the original form of a checkpoint, an adapter, what an older one has left."""
    tensors = written(tmp_path, "llama")
    save_file({key: value + 1 for key, value in tensors.items()}, str(tmp_path / "consolidated.safetensors"))
    first = tmp_path / "model-00001-of-00003.safetensors"
    stale = sorted(tensors)[1]  # The index has it in another file.
    save_file(numpy_models.load_file(str(first)) | {stale: tensors[stale] + 1}, str(first))
    config, params = load(tmp_path)
    for key, value in tensors.items():
        np.testing.assert_array_equal(params[key], value)
    with pytest.raises(ValueError, match="has model.safetensors.index.json, by which other files count"):
        save(config, params, tmp_path)
    save_file({stale: tensors[stale]}, str(tmp_path / "model-00002-of-00003.safetensors"))
    with pytest.raises(ValueError, match="model-00002-of-00003.safetensors lacks .*, which model.safetensors.index"):
        load(tmp_path)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ValueError, match="lacks model-00002-of-00003.safetensors, which model.safetensors.index.json"):
        load(tmp_path)


def test_one_file_counts_before_others_without_an_index(tmp_path):
    tensors = written(tmp_path, "llama")
    (tmp_path / INDEX).unlink()
    save_file({key: value + 1 for key, value in tensors.items()}, str(tmp_path / "model.safetensors"))
    _, params = load(tmp_path)
    np.testing.assert_array_equal(params["model.norm.weight"], tensors["model.norm.weight"] + 1)


def test_buffers_of_rotary_frequencies_are_left(tmp_path):
    tensors = written(tmp_path, "llama")
    buffers = [*(f"model.layers.{i}.self_attn.rotary_emb.inv_freq" for i in range(2)), "model.rotary_emb.inv_freq"]
    add_file(tmp_path, "z.safetensors", {name: np.ones(32, np.float32) for name in buffers})
    assert load(tmp_path)[1].keys() == tensors.keys()


@pytest.mark.parametrize("ours, others, tokens", [(5, [5, 7], (5, 7)), (None, 9, (9,)), ([3, 4], None, (3, 4))])
def test_an_eos_of_the_generation_config_counts_too(tmp_path, ours, others, tokens):
    written(tmp_path, "llama", dict(eos_token_id=ours))
    (tmp_path / "generation_config.json").write_text(json.dumps(dict(eos_token_id=others, do_sample=True)))
    assert load(tmp_path)[0].eos_token_ids == tokens


ROPE_OF_LLAMA3 = dict(rope_type="llama3", **LLAMA3)


@pytest.mark.parametrize(
    "name, changes",
    [
        ("llama", dict(partial_rotary_factor=1.0)),
        ("llama", dict(rope_scaling=dict(type="linear", factor=1.0))),
        ("llama", dict(rope_scaling=dict(rope_type="default"), rope_parameters=dict(rope_theta=10000.0))),
        ("llama", dict(rope_parameters=dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=1.0))),
        ("llama", dict(_attn_implementation_autoset=True, tokenizer_class="LlamaTokenizer", unsloth_version="2025.1")),
        ("llama", dict(quantization_config=None, rope_interleaved=False, is_llama_config=True, id2label={"0": "A"})),
        ("llama", dict(dtype="float32", torch_dtype="float32", temperature=0.6, max_length=20)),
        ("llama3", dict(rope_parameters=dict(rope_theta=500000.0, **ROPE_OF_LLAMA3))),
        ("llama3", dict(rope_scaling=dict(type="llama3", **ROPE_OF_LLAMA3))),
        ("qwen3_moe", dict(num_local_experts=8)),
    ],
)
def test_what_changes_nothing_is_taken(name, changes):
    raw = SIZES | RAW[name]
    assert config_of(raw | changes) == config_of(raw)


def test_yarn_between_whole_pairs():
    """With `truncate`, which gpt-oss does not have."""
    scaling = YarnScaling(8.0, 1024, beta_fast=16.0, beta_slow=2.0)
    found = scaling.scaled(10000.0 ** (-np.arange(32) / 32), 10000.0)
    rope = dict(vars(scaling), rope_type="yarn", rope_theta=10000.0)
    np.testing.assert_allclose(found, numpy_models.frequencies(dict(rope_parameters=rope), 64), rtol=1e-12)
    assert 0 < (found == 10000.0 ** (-np.arange(32) / 32)).sum() < 20  # Some keep their frequency.
    assert scaling.attention_factor == pytest.approx(0.1 * np.log(8) + 1)


@pytest.mark.parametrize(
    "name, changes, message",
    [
        ("llama3", dict(rope_parameters=dict(rope_type="default", rope_theta=500000.0)), "rope_parameters = .* mean"),
        (
            "llama3",
            dict(rope_parameters=dict(rope_theta=10000.0, **ROPE_OF_LLAMA3)),
            "rope_theta = 500000.0 and rope",
        ),
        ("llama", dict(rope_scaling=ROPE_OF_LLAMA3, **PLAIN), "rope_scaling = .*llama3"),
        (
            "qwen3",
            dict(rope_theta=1e6),
            "rope_theta = 1000000.0 and rope_parameters.rope_theta = 10000.0",
        ),
        ("llama3", dict(rope_scaling=dict(type="yarn", **ROPE_OF_LLAMA3)), "rope_type = 'llama3' and type = 'yarn'"),
        ("llama", dict(torch_dtype="bfloat16"), "dtype = 'float32' and torch_dtype = 'bfloat16'"),
        ("qwen3_moe", dict(num_local_experts=4), "num_local_experts = 4 and num_experts = 8 mean the same"),
    ],
)
def test_keys_that_contradict_each_other_are_refused(name, changes, message):
    """One of them would be ignored: which, libraries do not agree on."""
    with pytest.raises(ValueError, match=message):
        config_of(SIZES | RAW[name] | changes)

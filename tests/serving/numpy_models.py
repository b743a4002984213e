"""The models of `serving.checkpoint` in NumPy and float64, from the files of a checkpoint.

Shares no code with the package: one sequence, no cache, loops over heads and experts.
"""

import json
import pathlib

import numpy as np
from safetensors.numpy import load_file


def logits(folder, tokens) -> np.ndarray:
    """(T, vocab_size): the logits after each token of one sequence."""
    folder = pathlib.Path(folder)
    config = json.loads((folder / "config.json").read_text())
    weights = {}
    for file in folder.glob("*.safetensors"):
        weights |= {name: np.asarray(value, np.float64) for name, value in load_file(str(file)).items()}
    x = weights["model.embed_tokens.weight"][list(tokens)]
    for i in range(config["num_hidden_layers"]):
        layer = {
            name.removeprefix(f"model.layers.{i}.").removesuffix(".weight"): value
            for name, value in weights.items()
            if name.startswith(f"model.layers.{i}.")
        }
        is_window = config.get("layer_types", ["full_attention"] * (i + 1))[i] == "sliding_attention"
        window = config["sliding_window"] if is_window else None
        x = x + attention(config, layer, norm(config, x, layer["input_layernorm"]), window)
        x = x + mlp(config, layer, norm(config, x, layer["post_attention_layernorm"]))
    x = norm(config, x, weights["model.norm.weight"])
    head = "model.embed_tokens.weight" if config.get("tie_word_embeddings") else "lm_head.weight"
    return x @ weights[head].T


def norm(config, x, scale):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + config["rms_norm_eps"]) * scale


def silu(x):
    return x / (1 + np.exp(-x))


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def frequencies(config, head_dim):
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = rope.get("rope_theta", config.get("rope_theta"))
    found = []
    for i in range(head_dim // 2):
        frequency = theta ** (-2 * i / head_dim)
        if rope.get("rope_type") == "llama3":
            wavelength = 2 * np.pi / frequency
            longest = rope["original_max_position_embeddings"] / rope["low_freq_factor"]
            shortest = rope["original_max_position_embeddings"] / rope["high_freq_factor"]
            if wavelength > longest:
                frequency /= rope["factor"]
            elif wavelength >= shortest:
                smooth = rope["original_max_position_embeddings"] / wavelength - rope["low_freq_factor"]
                smooth /= rope["high_freq_factor"] - rope["low_freq_factor"]
                frequency = (1 - smooth) * frequency / rope["factor"] + smooth * frequency
        if rope.get("rope_type") == "yarn":
            # The pair that turns n times in the first context, as a real number, falls with the logarithm of n.
            context, pairs = rope["original_max_position_embeddings"], head_dim / 2
            first, last = (
                pairs * np.log(context / (2 * np.pi * rope[name])) / np.log(theta)
                for name in ("beta_fast", "beta_slow")
            )
            if rope.get("truncate", True):
                first, last = np.floor(first), np.ceil(last)
            slow = min(max((i - max(first, 0)) / (min(last, head_dim - 1) - max(first, 0)), 0), 1)
            frequency = frequency * (1 - slow) + frequency / rope["factor"] * slow
        found.append(frequency)
    return np.array(found)


def turned(config, x):
    """(T, head_dim): value i and i + head_dim / 2 as the parts of a complex number, turned."""
    half = x.shape[1] // 2
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("rope_type") == "yarn":
        x = x * (0.1 * np.log(rope["factor"]) + 1)
    z = (x[:, :half] + 1j * x[:, half:]) * np.exp(1j * np.outer(np.arange(len(x)), frequencies(config, x.shape[1])))
    return np.concatenate([z.real, z.imag], axis=1)


def affine(layer, name, x):
    return x @ layer[name].T + layer.get(f"{name}.bias", 0)


def attention(config, layer, x, window):
    heads, kv_heads, dim = (config[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    q, k, v = (affine(layer, f"self_attn.{name}_proj", x).reshape(len(x), -1, dim) for name in "qkv")
    out = []
    for h in range(heads):
        qh, kh, vh = q[:, h], k[:, h // (heads // kv_heads)], v[:, h // (heads // kv_heads)]
        if "self_attn.q_norm" in layer:
            qh, kh = norm(config, qh, layer["self_attn.q_norm"]), norm(config, kh, layer["self_attn.k_norm"])
        s = turned(config, qh) @ turned(config, kh).T / np.sqrt(dim)
        s[np.triu_indices(len(x), 1)] = -np.inf
        if window:
            s[np.tril_indices(len(x), -window)] = -np.inf
        if "self_attn.sinks" in layer:  # One more key, whose value is zero.
            s = np.column_stack([s, np.full(len(x), layer["self_attn.sinks"][h])])
            vh = np.vstack([vh, np.zeros(dim)])
        out.append(softmax(s) @ vh)
    return affine(layer, "self_attn.o_proj", np.concatenate(out, axis=1))


def mlp(config, layer, x):
    if "mlp.gate_proj" in layer:
        return (silu(x @ layer["mlp.gate_proj"].T) * (x @ layer["mlp.up_proj"].T)) @ layer["mlp.down_proj"].T
    if "mlp.router" in layer:
        return gpt_oss_mlp(config, layer, x)
    is_mixtral = "block_sparse_moe.gate" in layer
    prefix = "block_sparse_moe" if is_mixtral else "mlp"
    gate, up, down = ("w1", "w3", "w2") if is_mixtral else ("gate_proj", "up_proj", "down_proj")
    out = np.zeros_like(x)
    for t, token in enumerate(x):
        p = softmax(layer[f"{prefix}.gate"] @ token)
        best = np.argsort(-p)[: config["num_experts_per_tok"]]
        total = p[best].sum() if is_mixtral or config["norm_topk_prob"] else 1.0
        for e in best:
            w = {name: layer[f"{prefix}.experts.{e}.{name}"] for name in (gate, up, down)}
            out[t] += p[e] / total * (w[down] @ (silu(w[gate] @ token) * (w[up] @ token)))
    return out


def gpt_oss_mlp(config, layer, x):
    out, limit = np.zeros_like(x), config["swiglu_limit"]
    for t, token in enumerate(x):
        scores = affine(layer, "mlp.router", token)
        best = np.argsort(-scores)[: config["num_experts_per_tok"]]
        for weight, e in zip(softmax(scores[best]), best, strict=True):
            both = token @ layer["mlp.experts.gate_up_proj"][e] + layer["mlp.experts.gate_up_proj_bias"][e]
            gate, up = np.minimum(both[::2], limit), np.clip(both[1::2], -limit, limit)
            inner = gate / (1 + np.exp(-1.702 * gate)) * (up + 1)
            out[t] += weight * (inner @ layer["mlp.experts.down_proj"][e] + layer["mlp.experts.down_proj_bias"][e])
    return out

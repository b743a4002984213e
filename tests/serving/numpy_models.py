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
        x = x + attention(config, layer, norm(config, x, layer["input_layernorm"]))
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
        found.append(frequency)
    return np.array(found)


def turned(config, x):
    """(T, head_dim): value i and i + head_dim / 2 as the parts of a complex number, turned."""
    half = x.shape[1] // 2
    z = (x[:, :half] + 1j * x[:, half:]) * np.exp(1j * np.outer(np.arange(len(x)), frequencies(config, x.shape[1])))
    return np.concatenate([z.real, z.imag], axis=1)


def attention(config, layer, x):
    heads, kv_heads, dim = (config[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    q, k, v = ((x @ layer[f"self_attn.{name}_proj"].T).reshape(len(x), -1, dim) for name in "qkv")
    out = []
    for h in range(heads):
        qh, kh, vh = q[:, h], k[:, h // (heads // kv_heads)], v[:, h // (heads // kv_heads)]
        if "self_attn.q_norm" in layer:
            qh, kh = norm(config, qh, layer["self_attn.q_norm"]), norm(config, kh, layer["self_attn.k_norm"])
        s = turned(config, qh) @ turned(config, kh).T / np.sqrt(dim)
        s[np.triu_indices(len(x), 1)] = -np.inf
        out.append(softmax(s) @ vh)
    return np.concatenate(out, axis=1) @ layer["self_attn.o_proj"].T


def mlp(config, layer, x):
    if "mlp.gate_proj" in layer:
        return (silu(x @ layer["mlp.gate_proj"].T) * (x @ layer["mlp.up_proj"].T)) @ layer["mlp.down_proj"].T
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

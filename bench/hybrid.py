"""Times a training step of a hybrid language model on kernels and on plain XLA: `python -m bench hybrid`.

Twelve layers as in Qwen3-Next: three with the gated delta rule, then one with attention; their MLPs are SwiGLU, every
fourth one a mixture of experts. Parameters and `forward` are the same for both, which differ in `Ops` alone:

    tokens -> embedding
    12 x   norm (adds the residual) -> attention or delta rule -> norm (adds the residual) -> SwiGLU or experts
           attention    q, k, v -> rotary positions -> attention, causal -> product
           delta rule   q, k, v -> convolution -> norm 1 of q and k, delta rule -> norm per head, gate -> product
    norm (adds the residual) -> loss of the product with the embedding

Products with one weight are XLA's in both. Parameters and AdamW's moments are float32; the model computes in bfloat16.
Without a GPU the recorded figures are printed.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import cookbook
import lab
from bench.problems import conv_by_xla, delta_rule_by_chunks
from cookbook.loss.cross_entropy import cross_entropy_reference
from cookbook.recurrent.arguments import normalized
from cookbook.rows.group_norm import group_norm_reference
from cookbook.rows.rms_norm import rms_norm_reference
from lab.timing import wall_ms
from serving.model import rotate

DTYPE = jnp.bfloat16
ROPE_THETA = 10_000.0
CONV_TAPS = 4
DECAY_BIAS = -4.0  # A token multiplies the state by about 1 - exp(-4).
TARGET = 1.5  # How many times as fast as plain XLA the step should be.
LEARNING_RATE, BETAS, EPS, WEIGHT_DECAY = 1e-3, (0.9, 0.95), 1e-8, 0.1


@dataclasses.dataclass(frozen=True)
class Sizes:
    """A model, and how many tokens it sees in a step."""

    layers: tuple[tuple[str, str], ...]  # For each: "attention" or "delta"; "glu" or "moe".
    vocabulary: int
    hidden: int
    heads: int  # Query heads in attention, value heads in the delta rule.
    kv_heads: int  # Heads of keys and values in attention.
    key_heads: int  # Heads of queries and keys in the delta rule.
    head_dim: int
    inner: int  # Columns between the products of SwiGLU.
    expert_inner: int
    experts: int
    top_k: int
    batch: int
    length: int

    @property
    def tokens(self) -> int:
        return self.batch * self.length


PERIOD = ("delta", "glu"), ("delta", "moe"), ("delta", "glu"), ("attention", "glu")
FULL = Sizes(
    3 * PERIOD, vocabulary=32_000, hidden=768, heads=6, kv_heads=2, key_heads=3, head_dim=128, inner=1536,
    expert_inner=384, experts=8, top_k=2, batch=8, length=2048,
)  # fmt: skip
TINY = Sizes(
    PERIOD[1::2], vocabulary=64, hidden=64, heads=2, kv_heads=1, key_heads=1, head_dim=64, inner=64, expert_inner=64,
    experts=4, top_k=2, batch=1, length=64,
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Ops:
    """The operations of the model that are kernels, or XLA's; with the arguments and results of the kernels."""

    rms_norm: Callable  # (x, scale, residual=None): y, or y and the sum.
    attention: Callable  # (q, k, v), causal.
    conv: Callable  # (x, weight, bias), with silu.
    delta_rule: Callable  # (q, k, v, g, beta), of queries and keys divided by their norms.
    gated_norm: Callable  # (x, scale, gate=...): the norm of each head, times silu(gate).
    glu: Callable  # (x, w_gate, w_up), with silu.
    moe: Callable  # (x, router_logits, w_gate_up, w_down, top_k=...)
    loss: Callable  # (hidden, weight, labels), the mean.


def _plain_norm(x, scale, residual=None):
    if residual is None:
        return rms_norm_reference(x, scale).astype(x.dtype)
    y, total = rms_norm_reference(x, scale, residual=residual)
    return y.astype(x.dtype), total.astype(residual.dtype)


def _plain_delta_rule(q, k, v, g, beta):
    return delta_rule_by_chunks(normalized(q), normalized(k), v, g, beta)


def _plain_gated_norm(x, scale, gate):
    return group_norm_reference(x, scale, gate=gate).astype(x.dtype)


def _plain_glu(x, w_gate, w_up):
    return jax.nn.silu(x @ w_gate) * (x @ w_up)


def _plain_moe(x, router_logits, w_gate_up, w_down, top_k: int):
    """Each expert has all tokens, weighted by 0 where it is not chosen. With `jax.lax.ragged_dot` XLA multiplies by all
    experts, too, and `top_k` times as many rows."""
    chosen, experts = jax.lax.top_k(router_logits, top_k)
    of_expert = experts[..., None] == jnp.arange(len(w_down))
    weights = jnp.sum(jnp.where(of_expert, jax.nn.softmax(chosen)[..., None], 0), axis=-2)
    gate, up = jnp.split(jnp.einsum("bth,ehi->ebti", x, w_gate_up), 2, axis=-1)
    inner = jax.nn.silu(gate) * up * jnp.moveaxis(weights, -1, 0)[..., None].astype(x.dtype)
    return jnp.einsum("ebti,eih->bth", inner, w_down)


def _plain_loss(hidden, weight, labels):
    return cross_entropy_reference(hidden @ weight.T, labels)


KERNELS = Ops(
    rms_norm=cookbook.rms_norm,
    attention=functools.partial(cookbook.attention, is_causal=True),
    conv=functools.partial(cookbook.causal_conv1d, activation="silu"),
    delta_rule=functools.partial(cookbook.gated_delta_rule, use_qk_l2norm=True),
    gated_norm=cookbook.group_norm,
    glu=cookbook.glu,
    moe=cookbook.moe,
    loss=cookbook.linear_cross_entropy,
)
PLAIN = Ops(
    rms_norm=_plain_norm,
    attention=functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation="xla"),
    conv=conv_by_xla,
    delta_rule=_plain_delta_rule,
    gated_norm=_plain_gated_norm,
    glu=_plain_glu,
    moe=_plain_moe,
    loss=_plain_loss,
)
IMPLS = {"cookbook": KERNELS, "xla": PLAIN}


def _shapes_of_layer(sizes: Sizes, mixer: str, mlp: str) -> dict[str, tuple[int, ...]]:
    hidden, inner, dim = sizes.hidden, sizes.inner, sizes.head_dim
    values, keys = sizes.heads * dim, sizes.key_heads * dim
    shapes = {"norm": (hidden,), "mlp_norm": (hidden,), "out": (values, hidden)}
    if mixer == "attention":
        shapes["qkv"] = hidden, values + 2 * sizes.kv_heads * dim
    else:
        mixed = 2 * keys + values
        shapes |= {"qkv": (hidden, mixed), "conv": (mixed, CONV_TAPS), "conv_bias": (mixed,), "gate": (hidden, values)}
        shapes |= {"decay_beta": (hidden, 2 * sizes.heads), "head_norm": (dim,)}
    if mlp == "glu":
        return shapes | {"w_gate": (hidden, inner), "w_up": (hidden, inner), "w_down": (inner, hidden)}
    experts, inner = sizes.experts, sizes.expert_inner
    shapes |= {"w_gate_up": (experts, hidden, 2 * inner), "w_down": (experts, inner, hidden)}
    return shapes | {"router": (hidden, experts)}


def init(sizes: Sizes, key) -> dict[str, Any]:
    """Random parameters, float32: "embedding", which is the weight of the loss, too, "norm", and "layers"."""

    def drawn(name: str, shape, key):
        if name.endswith("norm"):
            return jnp.ones(shape, jnp.float32)
        if name == "conv_bias":
            return jnp.zeros(shape, jnp.float32)
        inputs = shape[-1] if name == "conv" else shape[-2]
        return inputs**-0.5 * jax.random.normal(key, shape, jnp.float32)

    def layer(kinds, key):
        shapes = _shapes_of_layer(sizes, *kinds)
        keys = jax.random.split(key, len(shapes))
        return {name: drawn(name, shape, key) for (name, shape), key in zip(shapes.items(), keys, strict=True)}

    first, *keys = jax.random.split(key, 1 + len(sizes.layers))
    return {
        "embedding": 0.02 * jax.random.normal(first, (sizes.vocabulary, sizes.hidden), jnp.float32),
        "norm": jnp.ones(sizes.hidden, jnp.float32),
        "layers": [layer(kinds, key) for kinds, key in zip(sizes.layers, keys, strict=True)],
    }


def _split_heads(sizes: Sizes, x, *heads: int):
    """Parts of the last axis of `x`, each with so many heads."""
    x = x.reshape(*x.shape[:2], -1, sizes.head_dim)
    return jnp.split(x, np.cumsum(heads)[:-1], axis=2)


def _attention(ops: Ops, sizes: Sizes, weights, x):
    q, k, v = _split_heads(sizes, x @ weights["qkv"], sizes.heads, sizes.kv_heads, sizes.kv_heads)
    q, k = (rotate(x, jnp.arange(sizes.length), ROPE_THETA).astype(DTYPE) for x in (q, k))
    return ops.attention(q, k, v).reshape(*x.shape[:2], -1) @ weights["out"]


def _delta_rule(ops: Ops, sizes: Sizes, weights, x):
    mixed = ops.conv(x @ weights["qkv"], weights["conv"], weights["conv_bias"])
    q, k, v = _split_heads(sizes, mixed, sizes.key_heads, sizes.key_heads, sizes.heads)
    decay, beta = jnp.split((x @ weights["decay_beta"]).astype(jnp.float32), 2, axis=-1)
    g, beta = -jax.nn.softplus(decay + DECAY_BIAS), jax.nn.sigmoid(beta)
    o, (gate,) = ops.delta_rule(q, k, v, g, beta), _split_heads(sizes, x @ weights["gate"], sizes.heads)
    return ops.gated_norm(o, weights["head_norm"], gate=gate).reshape(*x.shape[:2], -1) @ weights["out"]


def _mlp(ops: Ops, sizes: Sizes, weights, x):
    if "router" not in weights:
        return ops.glu(x, weights["w_gate"], weights["w_up"]) @ weights["w_down"]
    logits = jnp.matmul(x, weights["router"], preferred_element_type=jnp.float32)
    return ops.moe(x, logits, weights["w_gate_up"], weights["w_down"], top_k=sizes.top_k)


def forward(ops: Ops, sizes: Sizes, params, tokens):
    """The mean loss of predicting each token by those before it.

    Args:
      ops: `KERNELS` or `PLAIN`.
      params: of `init`.
      tokens: (batch, length + 1) int32.
    """
    weights = jax.tree.map(lambda x: x.astype(DTYPE), params)
    total, added = params["embedding"][tokens[:, :-1]].astype(DTYPE), None
    for (mixer, _), layer in zip(sizes.layers, weights["layers"], strict=True):
        if added is None:
            x = ops.rms_norm(total, layer["norm"])
        else:
            x, total = ops.rms_norm(added, layer["norm"], residual=total)
        added = (_attention if mixer == "attention" else _delta_rule)(ops, sizes, layer, x)
        x, total = ops.rms_norm(added, layer["mlp_norm"], residual=total)
        added = _mlp(ops, sizes, layer, x)
    hidden, _ = ops.rms_norm(added, weights["norm"], residual=total)
    return ops.loss(hidden, weights["embedding"], tokens[:, 1:])


class Training(NamedTuple):
    """Parameters, and AdamW's means of their gradients and of the squares of these."""

    params: Any
    mean: Any
    square: Any
    count: jax.Array


def start(sizes: Sizes, seed: int = 0) -> Training:
    params = init(sizes, jax.random.key(seed))
    zeros = jax.tree.map(jnp.zeros_like, params)
    return Training(params, zeros, zeros, jnp.zeros((), jnp.int32))


def step(ops: Ops, sizes: Sizes, training: Training, tokens) -> tuple[Training, jax.Array]:
    """A step of AdamW on a batch: what comes after it, and the loss before it."""
    loss, gradients = jax.value_and_grad(functools.partial(forward, ops, sizes))(training.params, tokens)
    count, (b1, b2) = training.count + 1, BETAS
    mean = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, training.mean, gradients)
    square = jax.tree.map(lambda s, g: b2 * s + (1 - b2) * g * g, training.square, gradients)

    def updated(p, m, s):
        change = m / (1 - b1**count) / (jnp.sqrt(s / (1 - b2**count)) + EPS)
        return p - LEARNING_RATE * (change + WEIGHT_DECAY * (p if p.ndim > 1 else 0))

    return Training(jax.tree.map(updated, training.params, mean, square), mean, square, count), loss


def tokens_of_chain(sizes: Sizes, seed: int = 0) -> np.ndarray:
    """(batch, length + 1) int32 of a Markov chain: each token has four successors, one of them likely. The chain is the
    same for all seeds, which draw the way through it."""
    successors = np.random.default_rng(0).integers(0, sizes.vocabulary, (sizes.vocabulary, 4), dtype=np.int32)
    rng = np.random.default_rng(seed)
    choices = rng.choice(4, (sizes.batch, sizes.length), p=(0.7, 0.1, 0.1, 0.1))
    tokens = np.empty((sizes.batch, sizes.length + 1), np.int32)
    tokens[:, 0] = rng.integers(0, sizes.vocabulary, sizes.batch)
    for i in range(sizes.length):
        tokens[:, i + 1] = successors[tokens[:, i], choices[:, i]]
    return tokens


def num_params(sizes: Sizes) -> int:
    params = jax.eval_shape(functools.partial(init, sizes), jax.random.key(0))
    return sum(math.prod(x.shape) for x in jax.tree.leaves(params))


def name(sizes: Sizes) -> str:
    """Name under which times are stored."""
    return f"hybrid/{round(num_params(sizes) / 1e6)}m_b{sizes.batch}_t{sizes.length}/bf16"


def program(ops: Ops, sizes: Sizes) -> tuple[Callable, tuple]:
    """One step as a function, and the shapes of its arguments."""
    tokens = jax.ShapeDtypeStruct((sizes.batch, sizes.length + 1), jnp.int32)
    return functools.partial(step, ops, sizes), (jax.eval_shape(functools.partial(start, sizes)), tokens)


def memory(compiled: jax.stages.Compiled) -> int:
    """Bytes that a compiled program takes beside its arguments and results."""
    return compiled.memory_analysis().temp_size_in_bytes


def _measured(impl: str, sizes: Sizes, iterations: int) -> tuple[lab.Measurement, dict | None]:
    """The kernels' time of a step; and the time from step to step, and the memory of the program."""
    problem, of, compiled, args = name(sizes), program(IMPLS[impl], sizes), None, ()
    if lab.results.measuring():
        args = jax.jit(functools.partial(start, sizes))(), jnp.asarray(tokens_of_chain(sizes))
        compiled = jax.jit(of[0]).lower(*args).compile()
    row = lab.measure(compiled, *args, problem=problem, impl=impl, iterations=iterations, inputs="a Markov chain",
                      of=of)  # fmt: skip
    more = lambda: dict(wall_ms=wall_ms(compiled, args), temporary_bytes=memory(compiled))
    return row, lab.results.value(f"{problem}/{impl}", more)


def run(iterations: int = 10, sizes: Sizes = FULL) -> bool | None:
    """Time a step with both and print the figures; the recorded ones, where there is no GPU.

    Returns:
      Whether the target is reached: `TARGET` times as fast as plain XLA, with less memory; None if nobody knows.
    """
    measured = {impl: _measured(impl, sizes, iterations) for impl in IMPLS}
    print(f"{name(sizes)}: a training step of {num_params(sizes) / 1e6:.0f}M parameters on {sizes.tokens} tokens")
    if any(more is None or math.isnan(row.median_ms) for row, more in measured.values()):
        print("    not recorded")
        return None
    for impl, (row, more) in measured.items():
        print(
            f"    {impl:10s}{row.median_ms:10.2f} ms of kernels{more['wall_ms']:10.2f} ms from step to step"
            f"{1e3 * sizes.tokens / more['wall_ms']:10.0f} tokens/s"
            f"{more['temporary_bytes'] / 1e9:8.2f} GB beside arguments and results"
        )
    (ours, our_more), (plain, plain_more) = measured["cookbook"], measured["xla"]
    ratio, share = plain.median_ms / ours.median_ms, our_more["temporary_bytes"] / plain_more["temporary_bytes"]
    reached = ratio >= TARGET and share < 1
    print(f"    {ratio:.2f} times as fast as plain XLA, with {share:.2f} of its memory")
    print(f"    target {'reached' if reached else 'MISSED'}: {TARGET} times as fast, with less memory")
    return reached

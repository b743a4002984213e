# SPDX-License-Identifier: Apache-2.0
"""FlashAttention-3, forward: softmax(scale q kᵀ) v without its matrix of weights ever in memory.

    out = softmax(mask(cap(scale q kᵀ))) v,    lse = log sum exp of the same logits

Shapes: query (B, T, N, H), key and value (B, S, K, H), out (B, T, N, H), lse (B, T, N). N is a multiple of K: query
head n reads key head n // (N // K). All are bfloat16 or all float16; logits, sums and lse are float32. H is a multiple
of 8, up to 256. Positions count from the start of both sequences: with `is_causal` query i sees keys 0 to i.

`kernel.py` has the kernel, with its roles and barriers, `steps.py` the steps of its compute warpgroups, and
`backward/gradients.py` the gradients.

Other names of the arguments, and of lse:

    here               flash-attn            vLLM                  FlashInfer
    scale              softmax_scale         scale                 sm_scale
    is_causal          causal                causal                causal
    local_window_size  window_size, -1: all  sliding_window - 1    window_left, -1: all
    logits_soft_cap    softcap, 0: none      logits_soft_cap       logits_soft_cap
    sinks              s_aux                 sinks                 sinks
    return_lse         return_attn_probs     return_softmax_lse    return_lse
    lse (B, T, N), ln  (B, N, T), ln         (N, tokens), ln       (tokens, N), log2

Bound by: the tensor cores with heads of 128 and 256, and with heads of 64 the CUDA cores, which have as many
exponentials for half of the products.

Not supported: masks as arrays, biases, dropout. If H is over 64 and not a multiple of 64, or S is not a multiple of 8,
values are padded by a copy, or with few queries come in tiles of 8 rows; the backward pass pads its operands by copies.
Source: Shah et al., "FlashAttention-3" (2024).
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ... import _device, _host
from .. import checks, core, references, tiles
from ..backward import gradients
from ..backward.plan import OneKernel, TwoKernels
from ..core import Problem
from . import kernel
from .plan import Plan


@dataclasses.dataclass(frozen=True)
class Config(core.Config):
    """The configuration of both passes; with a `core.Config` gradients have the kernels that are chosen without one."""

    backward: OneKernel | TwoKernels | None = None  # The gradients' tiles; None chooses by the problem.

    def __post_init__(self):
        super().__post_init__()
        if not isinstance(self.backward, OneKernel | TwoKernels | None):
            raise ValueError(
                f"{self.backward=} must be an attention.OneKernel, an attention.TwoKernels, or None to have one chosen"
            )


def attention_reference(
    query, key, value, *, scale=None, is_causal=False, local_window_size=None, logits_soft_cap=None, segment_ids=None,
    kv_segment_ids=None, sinks=None,
):  # fmt: skip
    """(out, lse) in at least float32."""
    distance = jnp.arange(key.shape[1]) - jnp.arange(query.shape[1])[:, None]
    seen = references.visible(distance, is_causal, local_window_size)[None]
    if segment_ids is not None:
        kv_segment_ids = segment_ids if kv_segment_ids is None else kv_segment_ids
        seen = seen & (segment_ids[:, :, None] == kv_segment_ids[:, None, :])
    return references.attend(query, key, value, seen, scale, logits_soft_cap, sinks)


def default_config(head_dim: int, is_cut: bool = True) -> Config:
    """The configuration for heads of this size, with a causal mask or a window if it `is_cut`; for heads up to 64
    `attention` takes two compute warpgroups in place of three where that is faster (`_fitted`).
    """
    if head_dim <= 64:
        return Config(num_stages=4, compute_wgs=3)
    if head_dim <= 128:
        return Config(in_turns=is_cut, sums_by_thread=is_cut)
    return Config(block_kv=64, in_turns=False, sums_by_thread=not is_cut)


def _check(query, key, value) -> None:
    checks.check_operands("attention", "batch, positions, heads, head_dim", query=query, key=key, value=value)
    if query.shape[3] % 8 or not 8 <= query.shape[3] <= 256:
        raise ValueError(
            f"{_host.PACKAGE}.attention: head_dim={query.shape[3]}; must be a multiple of 8 from 8 to 256 (TMA's 16 "
            "bytes): pad it"
        )


def _batch_of_one(x):
    """`x`, an array or a list, with a leading axis of size 1; None stays None."""
    return None if x is None else x[None] if hasattr(x, "shape") else [x]


def _segments(query, key, segment_ids, kv_segment_ids) -> tuple:
    """The segments of queries and of keys, int32; () if there are none."""
    op = f"{_host.PACKAGE}.attention"
    if segment_ids is None:
        if kv_segment_ids is not None:
            raise ValueError(f"{op}: kv_segment_ids without segment_ids, which say of each query what it may see")
        return ()
    if kv_segment_ids is None and query.shape[1] != key.shape[1]:
        raise ValueError(f"{op}: {query.shape=}, {key.shape=} differ in length: give kv_segment_ids too")
    kv_segment_ids = segment_ids if kv_segment_ids is None else kv_segment_ids
    return checks.segment_ids("attention", segment_ids, kv_segment_ids, query.shape[:2], key.shape[:2])


# Time of a step of two compute warpgroups beside one of three, with heads of 64: of 34 problems on an H200 half lay
# between 0.83 and 0.85.
NARROW_STEP = 0.85


@dataclasses.dataclass(frozen=True)
class Options:
    """Arguments of `attention` that are not arrays."""

    scale: float
    soft_cap: float | None
    left: int | None
    right: int | None
    config: core.Config | None
    deterministic: bool | None
    return_lse: bool


class Residuals(NamedTuple):
    """Arrays that the backward pass needs: operands, and results as the kernel writes them."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    sinks: jax.Array | None
    segments: tuple
    out: jax.Array
    lse: jax.Array


def _problem(query, key, options: Options, interpreted: bool) -> Problem:
    return Problem(
        query.shape[2], key.shape[2], query.shape[3], query.dtype, options.scale, options.soft_cap, options.left,
        options.right, interpreted,
    )  # fmt: skip


def _fitted(plan: Plan, num_sms: int) -> Plan:
    """`plan`, of the default configuration. Tiles of three warpgroups may leave SMs idle, or few queries to the last
    tile: two take its place if they are done earlier."""
    if plan.config.compute_wgs == 2:
        return plan
    narrow = dataclasses.replace(plan, config=dataclasses.replace(plan.config, compute_wgs=2))
    return narrow if NARROW_STEP * narrow.time(num_sms) < plan.time(num_sms) else plan


def _run(query, key, value, sinks, segments, options: Options, return_lse: bool):
    """(out, lse), lse as the kernel writes it, (batch, heads, positions), or None."""
    target = _host.require_tensor_cores("attention")
    problem = _problem(query, key, options, target.interpreted)
    config = options.config or default_config(problem.head_dim, problem.has_window)
    (batch, num_q), num_kv = query.shape[:2], key.shape[1]
    copies_tiles = problem.panels > 1 and tiles.by_tile(problem, num_kv, num_q)
    plan = Plan(problem, batch, num_q, num_kv, bool(segments), config, copies_tiles=copies_tiles)
    plan = plan if options.config else _fitted(plan, target.num_sms)
    checks.check_smem("attention", config, _device.smem_bytes(kernel.scratch(plan)), problem.head_dim)
    params = _host.compiler_params(approx_math=True)
    return kernel.forward(
        query, key, value, sinks, segments, plan=plan, num_sms=target.num_sms, params=params, return_lse=return_lse
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _attention(query, key, value, sinks, segments, options: Options):
    return _run(query, key, value, sinks, segments, options, options.return_lse)


def _attention_fwd(query, key, value, sinks, segments, options: Options):
    run = _host.without_derivative("attention", functools.partial(_run, options=options, return_lse=True))
    out, lse = run(query, key, value, sinks, segments)
    residuals = Residuals(query, key, value, sinks, segments, out, lse)
    return (out, lse if options.return_lse else None), residuals


def _attention_bwd(options: Options, residuals: Residuals, cotangents):
    query, key, value, sinks, segments, out, lse = residuals
    d_out, d_lse = cotangents
    d_lse = jnp.zeros_like(lse) if d_lse is None else d_lse
    target = _host.require_tensor_cores("attention")
    problem = _problem(query, key, options, target.interpreted)
    launch = functools.partial(
        gradients.gradients,
        problem=problem,
        num_sms=target.num_sms,
        params=_host.compiler_params(approx_math=True),
        config=gradients.choose_config(
            problem.head_dim, query.shape[1], options.deterministic, getattr(options.config, "backward", None)
        ),
    )
    launch = _host.without_derivative("attention", launch)
    d_sinks = None if sinks is None else _sinks_gradient(sinks, out, lse, d_out, d_lse)
    return *launch(query, key, value, segments, out, lse, d_out, d_lse), d_sinks, None


def _sinks_gradient(sinks, out, lse, d_out, d_lse):
    """A sink has the weight exp(sink - lse) of each query, and a value of zero. lse is (batch, heads, positions)."""
    delta = jnp.einsum("btnh,btnh->bnt", out, d_out, precision="default", preferred_element_type=jnp.float32) - d_lse
    # Without a sink and without a key both logarithms are -inf.
    sinks = sinks[None, :, None]
    weight = jnp.where(jnp.isneginf(sinks), 0, jnp.exp(sinks - lse))
    return -(weight * delta).sum((0, 2))


_attention.defvjp(_attention_fwd, _attention_bwd)


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    local_window_size: _host.Window | None = None,
    logits_soft_cap: float | None = None,
    segment_ids: jax.Array | None = None,
    kv_segment_ids: jax.Array | None = None,
    sinks: jax.Array | None = None,
    return_lse: bool = False,
    return_residual: bool = False,
    deterministic: bool | None = None,
    config: Config | None = None,
    **others,
) -> jax.Array | tuple[jax.Array, ...]:
    """Scaled dot-product attention, as `jax.nn.dot_product_attention`. Its results are bitwise reproducible from run to
    run; its gradients are with `deterministic=True`.

    Differentiable in query, key, value and sinks, also through lse; these, out and lse are kept for the backward pass.

    On an automatic mesh JAX gathers sharded operands on every device and says nothing: call it inside `jax.shard_map`.

    Args:
      query: (B, T, N, H), or (T, N, H), and then nothing has a batch; bfloat16 or float16.
      key, value: (B, S, K, H), of the dtype of `query`; K divides N.
      scale: what logits are multiplied by; None for 1 / sqrt(H). All numbers may be Python's, NumPy's or JAX's.
      is_causal: query i sees keys up to i.
      local_window_size: (left, right): query i sees keys i - left to i + right; None for a side without bound, one
        number for both.
      logits_soft_cap: c, so that logits become c tanh(logits / c); None for none.
      segment_ids: (B, T) integers of any kind: a query sees only keys with its own id. A block of keys is skipped if no
        query's id lies between the block's least and largest: sequences packed one after the other cost what they do
        apart. A value that is not finite makes all results of the queries that see it NaN, and of no others; gradients
        are not kept apart like that. This costs a copy of keys and values.
      kv_segment_ids: (B, S) integers, of the keys; None for `segment_ids`.
      sinks: (N,), floats: a logit per head, which acts as one extra key with a value of zero.
      return_lse: also return the logarithms of the sums of exponentials; `return_residual` says the same.
      deterministic: True: gradients, too, are bitwise reproducible, by two kernels with seven products.
        False: by one kernel with five, which adds up the gradient of `query` in float32 in memory, in an order that
        differs from run to run. None: False, but True for heads up to 64 with few queries, where two kernels were
        measured faster. With heads over 128 gradients are always reproducible.
      config: blocks, stages and warpgroups; None chooses by the problem. Its field `backward` has those of the
        gradients: an `attention.OneKernel`, or an `attention.TwoKernels`, whose gradients are reproducible.
      others: arguments that other libraries have, such as `mask` and `bias`, if they are None.

    Returns:
      (B, T, N, H), of the dtype of `query`; with `return_lse` also (B, T, N), float32, natural logarithms. A query that
      sees no key gives zeros, and -inf or its sink.

    Raises:
      ValueError: a shape, dtype or option is not supported; RuntimeError: no GPU.
    """
    op = "attention"
    checks.elsewhere(op, others)
    return_lse = checks.flag(op, "return_lse", return_lse) or checks.flag(op, "return_residual", return_residual)
    deterministic = checks.flag(op, "deterministic", deterministic)
    query, key, value = checks.arrays(op, query=query, key=key, value=value)
    if is_one := query.ndim == 3:
        segment_ids, kv_segment_ids = map(_batch_of_one, (segment_ids, kv_segment_ids))
    query, key, value = (_batch_of_one(x) if x.ndim == 3 else x for x in (query, key, value))
    _check(query, key, value)
    positions = checks.num_positions(op, query.shape[1], key.shape[1])
    how = checks.options(op, query.shape[3], is_causal, scale, logits_soft_cap, local_window_size, positions)
    options = Options(**how, config=_host.require_config(op, config, core.Config), deterministic=deterministic,
                      return_lse=return_lse)  # fmt: skip
    segments, sinks = _segments(query, key, segment_ids, kv_segment_ids), checks.sinks(op, sinks, query.shape[2])
    if 0 in (*query.shape, *key.shape):
        out, lse = checks.empty_results(query, sinks)
    else:
        operands, tree = jax.tree.flatten((query, key, value, sinks, segments))
        out, lse = _attention(*jax.tree.unflatten(tree, _host.reverse_only(op, *operands)), options)
        lse = lse.swapaxes(1, 2) if return_lse else None
    results = (out, lse)[: 1 + return_lse]
    results = tuple(x[0] for x in results) if is_one else results
    return results if return_lse else results[0]


attention.Config = Config  # `cookbook.attention` is this function, not its module.
attention.OneKernel, attention.TwoKernels = OneKernel, TwoKernels


def flops(batch: int, num_q: int, num_kv: int, num_heads: int, head_dim: int, is_causal: bool = False) -> int:
    """Floating-point operations of the two products; half as many with a causal mask."""
    return 4 * batch * num_heads * num_q * num_kv * head_dim // (2 if is_causal else 1)


def bytes_moved(batch: int, num_q: int, num_kv: int, num_heads: int, num_kv_heads: int, head_dim: int) -> int:
    """query and out, key and value, of 16 bits, each once."""
    return 4 * batch * head_dim * (num_q * num_heads + num_kv * num_kv_heads)

# SPDX-License-Identifier: Apache-2.0
"""Kimi Delta Attention of Kimi Linear: the delta rule with a gate for each channel of a key.

    S_t = S_{t-1} diag(exp(g_t)) + beta_t (v_t - S_{t-1} diag(exp(g_t)) k_t) k_t^T,    o_t = scale S_t q_t

Shapes: q and k (B, T, K, N); v and o (B, T, H, P); g (B, T, H, N); beta (B, T, H); states (B, H, P, N), float32. K
divides H: value head h reads key head h // (H // K). q, k and v are all bfloat16 or all float16; N and P are 64 or 128.
Keys should have norm 1 at most, which `use_qk_l2norm=True` sees to, and beta lie between 0 and 1; where beta times the
squared norm of a key is above 2, the recurrence itself grows.

In a chunk of 64 tokens the corrections u = beta (v - ...) depend on each other by a triangle, as in
`gated_delta_rule`; but here each channel has its own decay between two tokens. No exponential of a positive number is
ever taken. Two kernels, whose files have the formulas and the tables of roles and barriers:

    kernel_prepare   for all chunks at once: the triangles and their inverses, the weights of the results, and keys and
                     queries multiplied by their decays
    kernel           from chunk to chunk, a block for each 64 values of a head, or for each head where those are more
                     than SMs

The backward pass keeps what the first kernel made. It makes the states before all chunks again (`kernel`), then the
gradients of the states, from the last chunk to the first (`kernel_backward`), and from both the gradients of the
operands, for all chunks at once (`kernel_gradients`). `gradients.py` derives it all. XLA adds dq and dk over the value
heads that share a key head, and differentiates the norms.

Other names of the arguments, and other layouts:

    here                  fla's chunk_kda and fused_recurrent_kda
    q, k, v, g, beta      the same
    scale                 scale
    states (B, H, P, N)   (B, H, N, P)
    return_final_state    output_final_state
    cu_seqlens            cu_seqlens
    use_qk_l2norm         use_qk_l2norm_in_kernel

Where N = P a state from there has the right shape and is wrong:

    initial_state = jnp.swapaxes(theirs, 2, 3)

and back by the same. g here are the logarithms of the decays; with `use_gate_in_kernel=True` fla makes them itself, as
-jnp.exp(A_log)[:, None] * jax.nn.softplus(g + dt_bias) for each head.

Bound by: the stream of what the first kernel hands to the second; where sequences and heads do not fill the GPU, the
latency of a chunk, three products in a row.
Not supported: parts of a sequence on several SMs, second derivatives.
Source: Kimi Team, "Kimi Linear: An Expressive, Efficient Attention Architecture" (2025).
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from ... import _device, _host
from ..._device import PIECE
from .. import arguments
from ..sequences import Sequences
from ..states import as_states
from . import kernel
from .gradients import gradients
from .kernel_prepare import prepare
from .plan import CHUNK, KdaPlan

ELSEWHERE = arguments.ELSEWHERE_OF_DELTA | dict(
    use_gate_in_kernel="pass -jnp.exp(A_log)[:, None] * jax.nn.softplus(g + dt_bias) as g",
    A_log="multiply g by -jnp.exp(A_log)[:, None]", dt_bias="add it to g before the softplus",
    lower_bound="pass jnp.maximum(g, lower_bound) as g", safe_gate="gates of any strength are safe",
)  # fmt: skip


def kda_reference(
    q, k, v, g, beta, *, scale=None, initial_state=None, return_final_state=False, cu_seqlens=None, use_qk_l2norm=False
):  # fmt: skip
    """The recurrence, token by token, in at least float32."""
    dtype, (batch, length, heads, size), dim = jnp.promote_types(v.dtype, jnp.float32), v.shape, k.shape[3]
    q, k = (jnp.repeat(x.astype(dtype), heads // x.shape[2], axis=2) for x in (q, k))
    q, k = (arguments.normalized(x) if use_qk_l2norm else x for x in (q, k))
    rows = [x.astype(dtype).reshape(-1, *x.shape[2:]) for x in (q, k, v, g, beta)]
    starts = jnp.arange(batch + 1) * length if cu_seqlens is None else cu_seqlens
    seq = jnp.searchsorted(starts[1:], jnp.arange(batch * length), side="right")  # The sequence of each row.
    states = jnp.zeros((len(starts), heads, size, dim), dtype)  # One more, of the rows after the last sequence.
    states = states if initial_state is None else states.at[:-1].set(initial_state)
    scale = dim**-0.5 if scale is None else scale

    def token(states, row):
        (q, k, v, g, beta), seq = row
        state = jnp.exp(g)[:, None] * states[seq]
        change = beta[:, None] * (v - (state * k[:, None]).sum(-1))
        state = state + change[..., None] * k[:, None]
        o = scale * (state * q[:, None]).sum(-1)
        return states.at[seq].set(state), jnp.where(seq < len(starts) - 1, o, 0)

    states, o = lax.scan(token, states, (rows, seq))
    return (o.reshape(v.shape), states[:-1]) if return_final_state else o.reshape(v.shape)


@dataclasses.dataclass(frozen=True)
class Config:
    num_stages: int = 2  # Chunks in shared memory.
    state_wgs: int = 1  # Slices of 64 values, all of one head, that a block goes through, with a warpgroup for each.

    def __post_init__(self):
        if self.num_stages < 2 or self.state_wgs not in (1, 2):
            raise ValueError(
                f"{self.num_stages=} must be at least 2 (a chunk is loaded while another is used), and "
                f"{self.state_wgs=} 1 or 2 (registers)"
            )

    def smem_bytes(self, key_dim: int) -> int:
        """Shared memory of a block of the serial kernel."""
        return _smem_bytes(self, key_dim)


@functools.lru_cache
def _smem_bytes(config: Config, key_dim: int) -> int:
    q, v = (jax.ShapeDtypeStruct((1, 1, 1, size), jnp.bfloat16) for size in (key_dim, config.state_wgs * PIECE))
    return _device.smem_bytes(kernel.scratch(_plan(1.0, config, q, v, None, False, _host.Target("", num_sms=1))))


def default_config(key_dim: int, value_dim: int = 64, value_slices: int = 1, num_sms: int = 1) -> Config:
    """The configuration for keys and values of these sizes, and `value_slices` of 64 of all heads and sequences."""
    if value_dim == 2 * PIECE and value_slices > num_sms:
        return Config(num_stages=2 if key_dim > 64 else 3, state_wgs=2)
    return Config(num_stages=2 if key_dim > 64 else 4)


def _plan(scale: float, config: Config, q, v, cu_seqlens, use_qk_l2norm: bool, target: _host.Target) -> KdaPlan:
    (batch, length, heads, size), (key_heads, key_dim) = v.shape, q.shape[2:]
    num_seqs = batch if cu_seqlens is None else len(cu_seqlens) - 1
    sequences = Sequences(num_seqs, batch * length, cu_seqlens is not None, CHUNK)
    return KdaPlan(
        sequences, key_heads, heads, pieces=key_dim // PIECE, slices_per_head=size // PIECE, dtype=q.dtype, scale=scale,
        interpreted=target.interpreted, use_qk_l2norm=use_qk_l2norm, num_stages=config.num_stages,
        state_wgs=config.state_wgs, has_outputs=True,
    )  # fmt: skip


@functools.partial(jax.jit, static_argnames=("plan", "params"))
def _launch(q, k, v, g, beta, initial, cu_seqlens, *, plan: KdaPlan, params):
    """(o, final states, (squares, decays)), of operands without a batch, v in slices of 64."""
    sequences = plan.sequences
    beta = sequences.in_chunks(beta.astype(jnp.float32), cu_seqlens)
    places = sequences.places_of_chunks(cu_seqlens)
    prepared = prepare(*places, q, k, g.astype(jnp.float32), beta, plan=plan, params=params)
    table, _ = sequences.parts(cu_seqlens)
    states, o = kernel.launch(plan, table, v, *prepared, initial, params)
    return o, states, prepared


def _forward(plan: KdaPlan, q, k, v, g, beta, initial_state, cu_seqlens):
    """((o, final states), (squares, decays)); the backward pass needs the second pair."""
    rows = lambda x: x.reshape(-1, *x.shape[2:])
    initial = None if initial_state is None else as_states(initial_state, plan.value_slices)
    o, final, kept = _launch(
        rows(q), rows(k), v.reshape(-1, plan.value_slices, PIECE), rows(g), rows(beta), initial, cu_seqlens,
        plan=plan, params=_host.compiler_params(approx_math=True),
    )  # fmt: skip
    return (o.reshape(v.shape), final.reshape(-1, plan.heads, v.shape[3], k.shape[3])), kept


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _kda(plan: KdaPlan, q, k, v, g, beta, initial_state, cu_seqlens):
    return _forward(plan, q, k, v, g, beta, initial_state, cu_seqlens)[0]


def _kda_fwd(plan: KdaPlan, q, k, v, g, beta, initial_state, cu_seqlens):
    forward = _host.without_derivative("kda", functools.partial(_forward, plan))
    results, kept = forward(q, k, v, g, beta, initial_state, cu_seqlens)
    return results, (q, k, v, g, beta, initial_state, cu_seqlens, kept)


def _kda_bwd(plan: KdaPlan, residuals, cotangents):
    _host.require_tensor_cores("kda")
    params = _host.compiler_params(approx_math=True)

    def backward(q, k, v, g, beta, initial_state, cu_seqlens, kept, do, d_final):
        rows = lambda x: x.reshape(-1, *x.shape[2:])
        slices = lambda x: x.reshape(-1, plan.value_slices, PIECE)
        states = lambda x: None if x is None else as_states(x, plan.value_slices)
        *grads, d_initial = gradients(
            rows(q), rows(k), slices(v), rows(g), rows(beta), states(initial_state), cu_seqlens, *kept,
            slices(do.astype(v.dtype)), states(d_final), plan=plan, params=params,
        )  # fmt: skip
        alike = lambda x, dx: dx.reshape(x.shape).astype(x.dtype)
        d_initial = None if initial_state is None else alike(initial_state, d_initial)
        return *map(alike, (q, k, v, g, beta), grads), d_initial

    return *_host.without_derivative("kda", backward)(*residuals, *cotangents), None


_kda.defvjp(_kda_fwd, _kda_bwd)


def kda(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    *,
    scale: float | None = None,
    initial_state: jax.Array | None = None,
    return_final_state: bool = False,
    cu_seqlens: jax.Array | None = None,
    use_qk_l2norm: bool = False,
    config: Config | None = None,
    **others,
) -> jax.Array | tuple[jax.Array, ...]:
    """Kimi Delta Attention over a sequence.

    A sequence gives the same bits whole or cut at multiples of 64 tokens.

    On an automatic mesh JAX gathers sharded operands on every device and says nothing: call it inside `jax.shard_map`.

    Args:
      q, k: (B, T, K, N), bfloat16 or float16; N is 64 or 128. Keys of norm 1 keep the state bounded.
      v: (B, T, H, P), of the dtype of `q`; K divides H, and P is 64 or 128.
      g: (B, T, H, N), at most 0: a token multiplies column c of the state by exp(g[c]), but by 2**-64 at least: -inf
        leaves 2**-64 of it, and has a gradient of 0. Float32 is read as it is; other dtypes are converted first.
      beta: (B, T, H), from 0 to 1: how much of the error of the state a token corrects.
      scale: of o; None for 1 / sqrt(N).
      initial_state: (B, H, P, N), float32; None for zeros.
      return_final_state: also return the states after the last tokens.
      cu_seqlens: (num_seqs + 1,), integers: where packed sequences begin in a batch of 1, and where the last one ends.
        States then have num_seqs in the place of B. The first one begins at 0.
      use_qk_l2norm: divide the heads of q and k by sqrt(sum(x**2) + 1e-6) first, in the kernel.
      config: stages and warpgroups; None chooses by the shapes.
      others: arguments that other libraries have, such as `use_gate_in_kernel`, if they are None or False.

    Returns:
      o, of the shape and dtype of `v`, zeros after the last packed sequence; with `return_final_state` also the
      states, (B, H, P, N) in float32.

    Raises:
      ValueError: a shape, dtype or number is not supported; RuntimeError: no GPU.
    """
    op = "kda"
    _host.elsewhere(op, others, ELSEWHERE)
    required, optional = dict(q=q, k=k, v=v, g=g, beta=beta), dict(initial_state=initial_state, cu_seqlens=cu_seqlens)
    q, k, v, g, beta, initial_state, cu_seqlens = arguments.arrays(op, required, optional)
    arguments.check_delta(op, "B, T", q, k, v, g, beta, per_channel=True)
    (batch, _, heads, size), dim = v.shape, q.shape[3]
    num_seqs = arguments.check_packed(op, cu_seqlens, batch)
    arguments.check_state(op, "initial_state", initial_state, (num_seqs, heads, size, dim))
    return_final_state = _host.option(op, "return_final_state", return_final_state, bool)
    use_qk_l2norm = _host.option(op, "use_qk_l2norm", use_qk_l2norm, bool)
    scale = dim**-0.5 if scale is None else _host.option(op, "scale", scale, float)
    config = _host.require_config(op, config, Config)
    if 0 in v.shape:
        o, final = arguments.untouched(v, initial_state, (num_seqs, heads, size, dim))
        return (o, final) if return_final_state else o
    target = _host.require_tensor_cores(op)
    config = config or default_config(dim, size, num_seqs * heads * size // PIECE, target.num_sms)
    if size % (config.state_wgs * PIECE):
        raise ValueError(
            f"{_host.PACKAGE}.{op}: {config=} with heads of {size} values; a block's slices are of one head: "
            "state_wgs=1"
        )
    if (need := config.smem_bytes(dim)) > _device.SMEM_BYTES_MAX:
        raise ValueError(
            f"{_host.PACKAGE}.{op}: {config=} needs {need} bytes of shared memory for keys of {dim}, and a block has "
            f"{_device.SMEM_BYTES_MAX}: lower num_stages"
        )
    plan = _plan(scale, config, q, v, cu_seqlens, use_qk_l2norm, target)
    operands = q, k, v, g, beta, initial_state, cu_seqlens
    leaves, tree = jax.tree.flatten(operands)
    o, final = _kda(plan, *jax.tree.unflatten(tree, _host.reverse_only(op, *leaves)))
    return (o, final) if return_final_state else o


kda.Config = Config  # `cookbook.kda` is this function, not its module.


def flops(rows: int, heads: int, key_dim: int, value_dim: int) -> int:
    """Floating-point operations of a chunk's products: of keys with keys and queries, by the inverse, with states."""
    pairs = CHUNK * (2 * key_dim + 2 * value_dim)
    return 2 * rows * heads * (pairs + 3 * key_dim * value_dim)


def bytes_moved(rows: int, key_heads: int, heads: int, key_dim: int, value_dim: int) -> int:
    """q, k, v and o of 16 bits, g and beta of 32, each once."""
    return rows * (4 * key_heads * key_dim + 4 * heads * value_dim + 4 * heads * (key_dim + 1))

# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule of Qwen3-Next: a state that is corrected, chunk by chunk on tensor cores.

    S_t = exp(g_t) S_{t-1} + beta_t (v_t - exp(g_t) S_{t-1} k_t) k_t^T,    o_t = scale S_t q_t

Shapes: q and k (B, T, K, N); v and o (B, T, H, P); g and beta (B, T, H); states (B, H, P, N), float32. K divides H:
value head h reads key head h // (H // K). q, k and v are all bfloat16 or all float16; N and P are 64 or 128. Keys
should have norm 1 at most, and beta lie between 0 and 1; where beta times the squared norm of a key is above 2, the
recurrence itself grows.

In a chunk of 64 tokens the errors e, which beta makes corrections of the state, depend on each other by a triangle:

    (1 + lower) e = v - exp(cum) k S^T,    lower[t, j] = exp(cum[t] - cum[j]) k[t] . k[j] beta[j]  for j < t, else 0

Here cum is the sum of g within the chunk, made by XLA. Exponentials of positive numbers are never used. Two kernels,
whose files have the formulas and the tables of roles and barriers:

    kernel_inverse   the inverses of all chunks' triangles at once; with `use_qk_l2norm` it also divides q and k by
                     their norms, for all that comes after
    kernel           from chunk to chunk, a block for each 64 values of a head, or for each head where those are more
                     than SMs

Where sequences and heads do not fill the GPU, a sequence is split into parts. A first pass takes all parts from a zero
state, a second one runs the identity through them, and XLA combines both to the states at the parts' starts; the
last pass makes o. Each of the three passes is as long as a part, so splitting pays from four parts on.

The backward pass makes the states before all chunks again (`kernel`), then the gradients of the states, from the last
chunk to the first (`kernel_backward`), and those of the operands, for all chunks at once (`kernel_gradients`).
`gradients.py` derives them.

Other names of the arguments, and other layouts:

    here                  fla                          Qwen3-Next in transformers
    q, k                  q, k                         query, key, repeated to H heads
    v                     v                            value
    g, beta               g, beta                      g, beta
    scale                 scale                        none: 1 / sqrt(N)
    states (B, H, P, N)   (B, H, N, P)                 (B, H, N, P)
    return_final_state    output_final_state           output_final_state
    cu_seqlens            cu_seqlens                   none
    use_qk_l2norm         use_qk_l2norm_in_kernel      use_qk_l2norm_in_kernel

Both have the keys' axis of a state before the values'. Where N = P a state from there has the right shape and is wrong:

    initial_state = jnp.swapaxes(theirs, 2, 3)

and back by the same; `states_from` and `states_to` of `cookbook.recurrent.states` do it by the library's name.

To add a gate: one that scales the state, a number per token and head, is added to g in the ops, and one that scales a
correction multiplies beta there. One that scales o goes wherever `plan.scale` stands in the kernels. A decay of each
channel of a key is no change of this kind: exp(cum) is one number per token in all kernels.

Bound by: the latency of a chunk, three products in a row, with as many blocks as SMs; otherwise the tensor cores.
Not supported: second derivatives.
Chapter: notebooks/17b_delta_rule.ipynb. Source: Yang, Kautz and Hatamizadeh, "Gated Delta Networks" (2024).
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ... import _device, _host
from ..._device import PIECE
from .. import arguments
from ..sequences import Sequences, rows_per_part
from ..states import LEAST_DECAY, as_states, cumulative_decays
from . import kernel
from .gradients import gradients
from .kernel_inverse import inverses, norms_and_inverses
from .parts import starts_of_parts
from .plan import CHUNK, ForwardPlan

LEAST_PARTS = 4  # Fewer parts do not pay for three passes.


def gated_delta_rule_reference(
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
        state = jnp.exp(g)[:, None, None] * states[seq]
        change = beta[:, None] * (v - (state * k[:, None]).sum(-1))
        state = state + change[..., None] * k[:, None]
        o = scale * (state * q[:, None]).sum(-1)
        return states.at[seq].set(state), jnp.where(seq < len(starts) - 1, o, 0)

    states, o = lax.scan(token, states, (rows, seq))
    return (o.reshape(v.shape), states[:-1]) if return_final_state else o.reshape(v.shape)


@dataclasses.dataclass(frozen=True)
class Config:
    num_stages: int = 3  # Chunks in shared memory.
    output_wgs: int = 1  # Warpgroups for the results, beside those for the states.
    parts: int | None = None  # Parts of a sequence; None: one, or as many as fill the GPU.
    state_wgs: int = 1  # Slices of 64 values, all of one head, that a block goes through, with a warpgroup for each.

    def __post_init__(self):
        if self.num_stages < 2 or (self.state_wgs, self.output_wgs) not in ((1, 1), (1, 2), (2, 1)):
            raise ValueError(
                f"{self.num_stages=} must be at least 2 (a chunk is loaded while another is used), and "
                f"{(self.state_wgs, self.output_wgs)=} (1, 1), (1, 2) or (2, 1) (registers)"
            )
        if self.parts is not None and self.parts < 1:
            raise ValueError(f"{self.parts=} must be at least 1, or None")

    def smem_bytes(self, key_dim: int) -> int:
        """Shared memory of a block of the forward kernel."""
        return _smem_bytes(self, key_dim)


@functools.lru_cache
def _smem_bytes(config: Config, key_dim: int) -> int:
    q, v = (jax.ShapeDtypeStruct((1, 1, 1, size), jnp.bfloat16) for size in (key_dim, config.state_wgs * PIECE))
    return _device.smem_bytes(kernel.scratch(_plan(1.0, config, q, v, None, False, _host.Target("", num_sms=1))))


def default_config(key_dim: int, value_dim: int = 64, value_slices: int = 1, num_sms: int = 1) -> Config:
    """The configuration for keys and values of these sizes, and `value_slices` of 64 of all heads and sequences."""
    if value_dim == 2 * PIECE and value_slices > num_sms:
        return Config(num_stages=2 if key_dim > 64 else 3, state_wgs=2)
    return Config(num_stages=3 if key_dim > 64 else 4)


def _plan(scale: float, config: Config, q, v, cu_seqlens, use_qk_l2norm: bool, target: _host.Target) -> ForwardPlan:
    (batch, length, heads, size), (key_heads, key_dim) = v.shape, q.shape[2:]
    num_seqs = batch if cu_seqlens is None else len(cu_seqlens) - 1
    value_slices, mean_length = heads * size // PIECE, pl.cdiv(batch * length, num_seqs)
    most_parts = min(target.num_sms // (num_seqs * value_slices), mean_length // 512)
    parts = config.parts or (None if most_parts >= LEAST_PARTS else 1)
    part_rows = rows_per_part(num_seqs, mean_length, value_slices, target.num_sms, parts)
    sequences = Sequences(num_seqs, batch * length, cu_seqlens is not None, CHUNK, part_rows)
    return ForwardPlan(
        sequences, key_heads, heads, key_dim // PIECE, size // PIECE, q.dtype, scale, target.interpreted,
        use_qk_l2norm, config.num_stages, config.state_wgs, config.output_wgs, has_values=True, keeps_all=False,
        num_sms=target.num_sms,
    )  # fmt: skip


@functools.partial(jax.jit, static_argnames=("plan", "params"))
def _launch(q, k, v, g, beta, initial, cu_seqlens, *, plan: ForwardPlan, params):
    """(o, final states, (cum, beta, inverse), normed), of operands without a batch, v in slices of 64. With
    `use_qk_l2norm`, `normed` holds q and k divided by their norms, and the factor of each row; without it, None."""
    sequences = plan.sequences
    cum = cumulative_decays(sequences.in_chunks(g.astype(jnp.float32), cu_seqlens))
    beta = sequences.in_chunks(beta.astype(jnp.float32), cu_seqlens)
    places = sequences.places_of_chunks(cu_seqlens)
    how, normed = dict(interpreted=plan.interpreted, params=params), None
    if plan.use_qk_l2norm:
        inverse, *normed = norms_and_inverses(*places, q, k, cum, beta, is_ragged=sequences.is_ragged, **how)
        q, k, _ = normed
    else:
        inverse = inverses(*places, k, cum, beta, **how)
    table, seq = sequences.parts(cu_seqlens)
    starts = initial
    if sequences.part_rows is not None:
        starts, final = starts_of_parts(plan, table, seq, k, v, inverse, cum, beta, initial, params)
    states, o = kernel.launch(plan, table, q, k, v, inverse, cum, beta, starts, params)
    return o, states if sequences.part_rows is None else final, (cum, beta, inverse), normed


def _forward(plan: ForwardPlan, q, k, v, g, beta, initial_state, cu_seqlens):
    """((o, final states), (cum, beta, inverse), normed), as `_launch` has them; the backward pass needs these."""
    rows = lambda x: x.reshape(-1, *x.shape[2:])
    initial = None if initial_state is None else as_states(initial_state, plan.value_slices)
    o, final, *kept = _launch(
        rows(q), rows(k), v.reshape(-1, plan.value_slices, PIECE), rows(g), rows(beta), initial, cu_seqlens,
        plan=plan, params=_host.compiler_params(approx_math=True),
    )  # fmt: skip
    return (o.reshape(v.shape), final.reshape(-1, plan.heads, v.shape[3], k.shape[3])), *kept


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gated_delta_rule(plan: ForwardPlan, q, k, v, g, beta, initial_state, cu_seqlens):
    return _forward(plan, q, k, v, g, beta, initial_state, cu_seqlens)[0]


def _gated_delta_rule_fwd(plan: ForwardPlan, q, k, v, g, beta, initial_state, cu_seqlens):
    forward = _host.without_derivative("gated_delta_rule", functools.partial(_forward, plan))
    results, kept, normed = forward(q, k, v, g, beta, initial_state, cu_seqlens)
    if normed:
        *of_heads, factors = normed
        q, k = (x.reshape(q.shape) for x in of_heads)
    return results, (q, k, v, g, beta, initial_state, cu_seqlens, (*kept, factors if normed else None))


def _gated_delta_rule_bwd(plan: ForwardPlan, residuals, cotangents):
    _host.require_tensor_cores("gated_delta_rule")
    params = _host.compiler_params(approx_math=True)

    def backward(q, k, v, g, beta, initial_state, cu_seqlens, kept, do, d_final):
        rows = lambda x: x.reshape(-1, *x.shape[2:])
        slices = lambda x: x.reshape(-1, plan.value_slices, PIECE)
        states = lambda x: None if x is None else as_states(x, plan.value_slices)
        dq, dk, dv, dg, dbeta, d_initial = gradients(
            rows(q), rows(k), slices(v), states(initial_state), cu_seqlens, *kept, slices(do.astype(v.dtype)),
            states(d_final), plan=plan, params=params,
        )  # fmt: skip
        alike = lambda x, dx: dx.reshape(x.shape).astype(x.dtype)
        pairs = (q, dq), (k, dk), (v, dv), (g, dg), (beta, dbeta)
        d_initial = None if initial_state is None else alike(initial_state, d_initial)
        return *(alike(*pair) for pair in pairs), d_initial

    return *_host.without_derivative("gated_delta_rule", backward)(*residuals, *cotangents), None


_gated_delta_rule.defvjp(_gated_delta_rule_fwd, _gated_delta_rule_bwd)


def gated_delta_rule(
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
    """The gated delta rule over a sequence; a compiled program is bitwise reproducible from run to run.

    A sequence that is cut between two chunks of 64 tokens and continued from its state has the same bits as the whole
    one, as long as neither is split into parts: the order of all sums in a chunk is fixed.

    On an automatic mesh JAX gathers sharded operands on every device and says nothing: call it inside `jax.shard_map`.

    Args:
      q, k: (B, T, K, N), bfloat16 or float16; N is 64 or 128. Keys of norm 1 keep the state bounded.
      v: (B, T, H, P), of the dtype of `q`; K divides H, and P is 64 or 128.
      g: (B, T, H), at most 0: a token multiplies the state by exp(g), but by 2**-64 at least: -inf leaves 2**-64 of a
        state, and has a gradient of 0.
      beta: (B, T, H), from 0 to 1: how much of the error of the state a token corrects.
      scale: of o; None for 1 / sqrt(N).
      initial_state: (B, H, P, N), float32; None for zeros.
      return_final_state: also return the states after the last tokens.
      cu_seqlens: (num_seqs + 1,), integers: where packed sequences begin in a batch of 1, and where the last one ends.
        States then have num_seqs in the place of B. The first one begins at 0.
      use_qk_l2norm: divide the heads of q and k by sqrt(sum(x**2) + 1e-6) first, in the kernel.
      config: stages, warpgroups and parts; None chooses by the shapes.
      others: arguments that other libraries have, such as `head_first`, if they are None or False.

    Returns:
      o, of the shape and dtype of `v`, zeros after the last packed sequence; with `return_final_state` also the
      states, (B, H, P, N) in float32.

    Raises:
      ValueError: a shape, dtype or number is not supported; RuntimeError: no GPU.
    """
    op = "gated_delta_rule"
    _host.elsewhere(op, others, arguments.ELSEWHERE_OF_DELTA)
    required, optional = dict(q=q, k=k, v=v, g=g, beta=beta), dict(initial_state=initial_state, cu_seqlens=cu_seqlens)
    q, k, v, g, beta, initial_state, cu_seqlens = arguments.arrays(op, required, optional)
    arguments.check_delta(op, "B, T", q, k, v, g, beta)
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
    operands = q, k, v, jnp.maximum(g, math.log(LEAST_DECAY)), beta, initial_state, cu_seqlens
    leaves, tree = jax.tree.flatten(operands)
    o, final = _gated_delta_rule(plan, *jax.tree.unflatten(tree, _host.reverse_only(op, *leaves)))
    return (o, final) if return_final_state else o


gated_delta_rule.Config = Config  # `cookbook.gated_delta_rule` is this function, not its module.


def flops(rows: int, heads: int, key_dim: int, value_dim: int) -> int:
    """Floating-point operations of a chunk's products: of keys with keys and queries, by the inverse, with states."""
    pairs = CHUNK * (2 * key_dim + 2 * value_dim)
    return 2 * rows * heads * (pairs + 3 * key_dim * value_dim)


def bytes_moved(rows: int, key_heads: int, heads: int, key_dim: int, value_dim: int) -> int:
    """q, k, v and o of 16 bits, g and beta of 32, each once."""
    return rows * (4 * key_heads * key_dim + 4 * heads * value_dim + 8 * heads)

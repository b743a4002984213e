# SPDX-License-Identifier: Apache-2.0
"""Mamba-2's recurrence, computed in chunks: SSD, the state-space dual, forward.

    S[t] = exp(dt[t] a) S[t-1] + dt[t] x[t] b[t]ᵀ        y[t] = S[t] c[t] + d x[t]        for each head

Shapes: x (B, T, H, P), dt (B, T, H), a and d (H,), b and c (B, T, G, N), y as x, states (B, H, P, N) in float32. Head
h of x goes with head h // (H // G) of b and c. x, b and c are all bfloat16 or all float16; dt, a and d of any float
dtype, dt at least 0 and a at most 0. P is a multiple of 64, N 64, 128 or 256. T and H are free.

In a chunk of rows, with cum[t] the sum of dt a from the chunk's first row to t, the same is

    y[t] = exp(cum[t]) S c[t] + sum over s <= t of exp(cum[t] - cum[s]) (c[t] . b[s]) dt[s] x[s]    S: before the chunk

so that tensor cores do the work. XLA makes cum. Every exponent is at most 0, however strong the decay.

Role table: one block for each head of each sequence, or of each part of one, which goes through its chunks in order.
A head of more than 64 values is several, which share a, dt, b and c.

    memory     one: copies x, b, c, dt and cum of chunk after chunk
    state      one: has the state in registers, stores it in 16 bits before each chunk, and adds the chunk to it
    output     one for each 64 rows of a chunk: y, from the state that was stored

Barrier table, of two rings, `chunks` from memory to all others and `states` from state to output:

    barrier                arrivals                      who waits
    chunks.filled[stage]   copies of a chunk             state and output, before they read it
    chunks.freed[stage]    state, every output           memory, before it refills the stage
    landed                 copies of the last chunk of   memory, before it zeroes rows that are not the part's, and then
                           a sequence                    arrives at chunks.filled in place of the copies
    states.filled[stage]   state                         output, before y reads the state of its chunk
    states.freed[stage]    every output                  state, before it stores another state in the stage

Where sequences and heads do not fill the GPU, each sequence is cut into parts. A first kernel computes the states of
all parts from zero, XLA combines them, and this kernel starts each part from its state: x and b are read twice.

Other names of the arguments, and other layouts:

    here                  mamba_chunk_scan_combined of mamba_ssm   chunk_simple_gla of fla
    x                     x                                        v, scaled by dt
    dt                    dt; dt_bias, dt_softplus, dt_limit       g = dt a
    a                     A                                        g = dt a
    b, c                  B, C                                     k, q; scale=1
    d                     D; also (H, P)                           none
    initial_state         initial_states                           initial_state
    return_final_state    return_final_states                      output_final_state
    states (B, H, P, N)   (B, H, P, N)                             (B, H, N, P)
    cu_seqlens            seq_idx                                  cu_seqlens
    y                     y; z, a gate                             o

So dt is `jax.nn.softplus(dt + dt_bias)` of a Mamba-2 layer, and its gate is `y * jax.nn.silu(z)`. A state from fla is
`jnp.swapaxes(theirs, 2, 3)` here. transformers' Mamba-2 has states as here.

Bound by: memory.

Not supported: second derivatives.
Source: Dao and Gu, "Transformers are SSMs" (2024).
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ... import _device, _host
from ..._device import PIECE
from .. import arguments
from ..sequences import CHUNKS, Sequences, rows_per_part
from ..states import as_states, combine
from . import kernel, kernel_backward, kernel_state
from .gradients import gradients
from .plan import Plan, decay_of_parts, end_of_part, make_vectors


def ssd_reference(x, dt, a, b, c, *, d=None, initial_state=None, cu_seqlens=None):
    """(y, final state) in at least float32, one token after the other."""
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    batch, length, heads, _ = x.shape
    spread = lambda m: jnp.repeat(m, heads // m.shape[2], axis=2)
    rows = [m.astype(dtype).reshape(-1, *m.shape[2:]) for m in (x, dt, spread(b), spread(c))]
    starts = jnp.arange(batch + 1) * length if cu_seqlens is None else cu_seqlens
    seq = jnp.searchsorted(starts[1:], jnp.arange(batch * length), side="right")  # The sequence of each row.
    states = jnp.zeros((len(starts), *x.shape[2:], b.shape[3]), dtype)  # One more, of the rows after the last sequence.
    states = states if initial_state is None else states.at[:-1].set(initial_state)
    decay = jnp.maximum(a.astype(dtype), jnp.finfo(dtype).min)  # Infinity times a step of 0 is NaN.

    def token(states, row):
        x, dt, b, c, seq = row
        state = jnp.exp(dt * decay)[:, None, None] * states[seq] + (dt[:, None] * x)[..., None] * b[:, None]
        y = (state * c[:, None]).sum(-1) + (0 if d is None else d[:, None] * x)
        return states.at[seq].set(state), jnp.where(seq < len(starts) - 1, y, 0)

    states, y = lax.scan(token, states, (*rows, seq))
    return y.reshape(x.shape), states[:-1]


@dataclasses.dataclass(frozen=True)
class Config:
    chunk_size: int = 64  # Rows that become one product. More: fewer states are made, and more products of pairs.
    num_stages: int = 4  # Chunks in shared memory.
    num_states: int = 2  # States before chunks in shared memory: how far the state's warpgroup may be ahead of outputs.
    parts: int | None = None  # Parts of a sequence; None: as many as fill the GPU.

    def __post_init__(self):
        if self.chunk_size not in CHUNKS:
            raise ValueError(f"{self.chunk_size=} must be one of {CHUNKS} (rows of a WGMMA, and registers)")
        if self.num_stages < 2 or self.num_states < 1:
            raise ValueError(
                f"{self.num_stages=} must be at least 2 (a chunk is loaded while another is used), {self.num_states=} "
                "at least 1"
            )
        if self.parts is not None and self.parts < 1:
            raise ValueError(f"{self.parts=} must be at least 1, or None")

    def smem_bytes(self, state_dim: int) -> int:
        """Shared memory of a block of the forward kernel."""
        return _smem_bytes(self, state_dim)


@functools.lru_cache
def _smem_bytes(config: Config, state_dim: int) -> int:
    sequences = Sequences(1, 1, False, config.chunk_size)
    pieces, dtype = state_dim // PIECE, jnp.dtype(jnp.bfloat16)
    plan = Plan(sequences, 1, 1, 1, pieces, dtype, config.num_stages, config.num_states, interpreted=False)
    return _device.smem_bytes(kernel.scratch(plan))


def default_config(state_dim: int, chunk_size: int | None = None) -> Config:
    """The configuration for states with this many columns: as many stages as shared memory has room for, up to 6."""
    for num_states, num_stages in ((2, 6), (2, 5), (2, 4), (2, 3), (2, 2), (1, 2)):
        config = Config(chunk_size or 64, num_stages, num_states)
        if config.smem_bytes(state_dim) <= _device.SMEM_BYTES_MAX:
            return config
    return config


@functools.partial(jax.jit, static_argnames=("plan", "scale", "params"))
def _launch(x, dt, a, b, c, d, initial, cu_seqlens, *, plan: Plan, scale: float, params):
    """(y, final states, the states that parts start from or None), of operands without a batch."""
    sequences = plan.sequences
    vectors = make_vectors(sequences, dt, a, cu_seqlens)
    table, seq = sequences.parts(cu_seqlens)
    starts = initial
    if sequences.part_rows is not None:
        zeros = jnp.zeros((sequences.num_seqs, *plan.state_shape[1:]), jnp.float32)
        local = kernel_state.launch(plan, table, x, b, vectors, None, params)
        parts = decay_of_parts(plan, vectors, table), local
        starts, final = combine(end_of_part, parts, seq, zeros if initial is None else initial)
    y, *finals = kernel.launch(plan, scale, table, x, b, c, vectors, d, starts, params)
    return y, finals[0] if finals else final, starts


def _choose(op: str, state_dim: int, chunk_size, config) -> Config:
    """The configuration for these arguments.

    Raises:
      ValueError: they contradict each other, or no block has room.
    """
    config = _host.require_config(op, config, Config)
    if chunk_size is not None:
        chunk_size = _host.option(op, "chunk_size", chunk_size, int)
    if chunk_size not in (None, *CHUNKS) or config and chunk_size not in (None, config.chunk_size):
        raise ValueError(
            f"{_host.PACKAGE}.{op}: {chunk_size=}; must be one of {CHUNKS}, and that of config: None chooses"
        )
    config = config or default_config(state_dim, chunk_size)
    if (need := config.smem_bytes(state_dim)) > _device.SMEM_BYTES_MAX:
        raise ValueError(
            f"{_host.PACKAGE}.{op}: {config=} needs {need} bytes of shared memory with states of {state_dim} columns, "
            f"and a block has {_device.SMEM_BYTES_MAX}: chunks of 64, or fewer stages"
        )
    return config


def _plan(config: Config, x, b, heads_per_dt: int, num_seqs: int, is_packed: bool, target: _host.Target) -> Plan:
    """The op on operands without a batch, x with heads of 64 values."""
    (num_rows, heads, _), (_, groups, state_dim) = x.shape, b.shape
    part_rows = rows_per_part(num_seqs, pl.cdiv(num_rows, num_seqs), heads, target.num_sms, config.parts)
    sequences = Sequences(num_seqs, num_rows, is_packed, config.chunk_size, part_rows)
    stages = config.num_stages, config.num_states
    return Plan(sequences, heads, groups, heads_per_dt, state_dim // PIECE, x.dtype, *stages, target.interpreted)


def _forward(plan: Plan, scale: float, operands, initial, cu_seqlens):
    """(y, final states, the states that parts start from)."""
    params = _host.compiler_params(approx_math=True)
    return _launch(*operands, initial, cu_seqlens, plan=plan, scale=scale, params=params)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _ssd(op: str, plan: Plan, scale: float, operands, initial, cu_seqlens):
    return _forward(plan, scale, operands, initial, cu_seqlens)[:2]


def _ssd_fwd(op: str, plan: Plan, scale: float, operands, initial, cu_seqlens):
    forward = _host.without_derivative(op, functools.partial(_forward, plan, scale))
    y, final, starts = forward(operands, initial, cu_seqlens)
    return (y, final), (operands, initial, cu_seqlens, starts)


def _ssd_bwd(op: str, plan: Plan, scale: float, residuals, cotangents):
    _host.require_tensor_cores(op)
    operands, initial, cu_seqlens, starts = residuals
    params, plan = _host.compiler_params(approx_math=True), kernel_backward.with_stages(plan)
    backward = _host.without_derivative(op, functools.partial(gradients, plan=plan, scale=scale, params=params))
    *operand_gradients, d_initial = backward(*operands, initial, cu_seqlens, starts, *cotangents)
    return tuple(operand_gradients), d_initial, None


_ssd.defvjp(_ssd_fwd, _ssd_bwd)


def chunk_scan(
    op: str, x, dt, a, b, c, d, initial_state, cu_seqlens, chunk_size, config, return_final_state, scale: float = 1.0
):  # fmt: skip
    """The results of `ssd` for checked arrays, y but for the part of d times `scale`; for `linear_attention` too."""
    (batch, length, heads, size), state_dim = x.shape, b.shape[-1]
    num_seqs, split = (batch if cu_seqlens is None else len(cu_seqlens) - 1), size // PIECE
    return_final_state = _host.option(op, "return_final_state", return_final_state, bool)
    config = _choose(op, state_dim, chunk_size, config)
    if 0 in x.shape:
        y, final = arguments.untouched(x, initial_state, (num_seqs, heads, size, state_dim))
        return (y, final) if return_final_state else y
    target = _host.require_tensor_cores(op)
    rows = lambda m: m.reshape(batch * length, *m.shape[2:])
    operands = x.reshape(batch * length, heads * split, PIECE), rows(dt), a, rows(b), rows(c), d
    initial = None if initial_state is None else as_states(initial_state, heads * split)
    plan = _plan(config, operands[0], operands[3], split, num_seqs, cu_seqlens is not None, target)
    leaves, tree = jax.tree.flatten((operands, initial, cu_seqlens))
    operands, initial, cu_seqlens = jax.tree.unflatten(tree, _host.reverse_only(op, *leaves))
    y, final = _ssd(op, plan, scale, operands, initial, cu_seqlens)
    y, final = y.reshape(x.shape), final.reshape(num_seqs, heads, size, state_dim)
    return (y, final) if return_final_state else y


def ssd(
    x: jax.Array,
    dt: jax.Array,
    a: jax.Array,
    b: jax.Array,
    c: jax.Array,
    *,
    d: jax.Array | None = None,
    chunk_size: int | None = None,
    initial_state: jax.Array | None = None,
    return_final_state: bool = False,
    cu_seqlens: jax.Array | None = None,
    config: Config | None = None,
    **others,
) -> jax.Array | tuple[jax.Array, ...]:
    """Mamba-2's recurrence over a sequence; a compiled program is bitwise reproducible from run to run.

    A sequence that is cut between two chunks and continued from its state has the same bits as the whole one, as long
    as neither is split into parts: the order of all sums in a chunk is fixed.

    On an automatic mesh JAX gathers sharded operands on every device and says nothing: call it inside `jax.shard_map`.

    Args:
      x: (B, T, H, P), bfloat16 or float16; P is a multiple of 64.
      dt: (B, T, H), at least 0: how far each token moves the state.
      a: (H,), at most 0: a token multiplies the state by exp(dt a), but by 2**-64 at least: -inf leaves 2**-64 of a
        state, unless dt is 0. The gradients of what leaves so little are 0.
      b, c: (B, T, G, N), of the dtype of `x`; G divides H, and N is 64, 128 or 256.
      d: (H,), how much of x is added to y; None for nothing.
      chunk_size: rows that become one product, 64 or 128 (N at most 128); None chooses.
      initial_state: (B, H, P, N), float32; None for zeros.
      return_final_state: also return the states after the last tokens.
      cu_seqlens: (num_seqs + 1,), integers: where packed sequences begin in a batch of 1, and where the last one ends.
        States then have num_seqs in the place of B. The first one begins at 0.
      config: stages and parts; None chooses by N.
      others: arguments that other libraries have, such as `z` and `dt_bias`, if they are None or False.

    Returns:
      y, of the shape and dtype of `x`, zeros after the last packed sequence; with `return_final_state` also the
      states, (B, H, P, N) in float32.

    Raises:
      ValueError: a shape, dtype or number is not supported; RuntimeError: no GPU.
    """
    _host.elsewhere("ssd", others, arguments.ELSEWHERE)
    required, optional = dict(x=x, dt=dt, a=a, b=b, c=c), dict(d=d, initial_state=initial_state, cu_seqlens=cu_seqlens)
    arrays = arguments.arrays("ssd", required, optional)
    arguments.check_ssd("ssd", *arrays)
    return chunk_scan("ssd", *arrays, chunk_size, config, return_final_state)


ssd.Config = Config  # `cookbook.ssd` is this function, not its module.


def flops(rows: int, heads: int, head_dim: int, state_dim: int, chunk_size: int = 64) -> int:
    """Floating-point operations of the four products of each chunk, pairs that the mask hides included."""
    pairs = chunk_size * (state_dim + head_dim)
    return 2 * rows * heads * (pairs + 2 * head_dim * state_dim)


def bytes_moved(rows: int, heads: int, head_dim: int, groups: int, state_dim: int) -> int:
    """x, y, b and c of 16 bits, and dt of 32, each once."""
    return rows * (4 * heads * head_dim + 4 * groups * state_dim + 4 * heads)

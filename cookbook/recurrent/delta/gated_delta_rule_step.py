# SPDX-License-Identifier: Apache-2.0
"""One token of each sequence through the gated delta rule: every state read, corrected and written once, in place.

    S = exp(g) S + beta (v - exp(g) S k) k^T,    o = scale S q

Shapes: q and k (B, K, N); v and o (B, H, P); g and beta (B, H); state (B, H, P, N), float32, as of `gated_delta_rule`.
K divides H: value head h reads key head h // (H // K). q, k and v are all bfloat16 or all float16, N and P 64 or 128.

Role table: two blocks of one warpgroup on each SM, which stay. Each takes every so many tiles of 64 of a state's rows:
it corrects one in registers, and writes it where it lay in shared memory, from where TMA stores it; the next tiles are
in flight to the other stages meanwhile. A row of a tile needs no other, so that tiles of a head are independent.

Barrier table:

    barrier         arrivals                             who waits
    filled[stage]   copies of a tile, and of its q, k,   the warpgroup, before it loads the tile into registers
                    v, and g if it is per channel

Other names and layouts: those of `gated_delta_rule`, with the axis T of one token left out. In fla this is
`fused_recurrent_gated_delta_rule`, in transformers `torch_recurrent_gated_delta_rule`; their states (B, H, N, P) are
transposed ones.

Bound by: memory, each state being read and written once.
Not supported: differentiation, several tokens at a time (`gated_delta_rule` with an initial state).
Chapter: notebooks/17b_delta_rule.ipynb. Source: Yang, Kautz and Hatamizadeh, "Gated Delta Networks" (2024).
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ... import _device, _host
from ..._device import COLUMNS, PIECE, ROWS, load
from .. import arguments


def gated_delta_rule_step_reference(q, k, v, g, beta, state, scale=None):
    """(o, new state) in at least float32."""
    dtype, group = jnp.promote_types(v.dtype, jnp.float32), v.shape[1] // k.shape[1]
    q, k = (jnp.repeat(x.astype(dtype), group, axis=1) for x in (q, k))
    state = jnp.exp(g.astype(dtype))[..., None, None] * state
    change = beta[..., None] * (v - (state * k[:, :, None]).sum(-1))
    state = state + change[..., None] * k[:, :, None]
    scale = k.shape[2] ** -0.5 if scale is None else scale
    return scale * (state * q[:, :, None]).sum(-1), state


@dataclasses.dataclass(frozen=True)
class Config:
    num_stages: int = 3  # Tiles of a block in shared memory: one is worked on, the others are in flight.
    blocks_per_sm: int = 2  # While one waits for its tile, the other computes.

    def __post_init__(self):
        if self.num_stages < 2 or not 1 <= self.blocks_per_sm <= 4:
            raise ValueError(
                f"{self.num_stages=} must be at least 2 (a tile is loaded while another is used), "
                f"{self.blocks_per_sm=} 1 to 4 (registers)"
            )

    def smem_bytes(self, key_dim: int, per_channel: bool = False) -> int:
        """Shared memory of a block, with room for JAX's sums. `per_channel`: g are those of `kda_step`."""
        return _smem_bytes(self, key_dim, per_channel)


def _scratch(config: Config, key_dim: int, dtype, per_channel: bool) -> dict:
    stages = config.num_stages
    gates = dict(g_smem=plgpu.SMEM((stages, key_dim), jnp.float32)) if per_channel else {}
    return dict(
        s_smem=plgpu.SMEM((stages, PIECE, key_dim), jnp.float32, **_device.swizzled(PIECE // 2, jnp.float32)),
        q_smem=plgpu.SMEM((stages, key_dim), dtype),
        k_smem=plgpu.SMEM((stages, key_dim), dtype),
        v_smem=plgpu.SMEM((stages, PIECE), dtype),
        **gates,
        filled=_device.barriers(stages, 4 + len(gates)),
    )


@functools.lru_cache
def _smem_bytes(config: Config, key_dim: int, per_channel: bool) -> int:
    return _device.smem_bytes(_scratch(config, key_dim, jnp.bfloat16, per_channel)) + 2048


def _kernel(q_gmem, k_gmem, v_gmem, g_gmem, beta_gmem, state_gmem, o_gmem, *, num_tiles: int, num_stages: int,
            scale: float, s_smem, q_smem, k_smem, v_smem, filled, g_smem=None):  # fmt: skip
    """`v_gmem` and `o_gmem` are (B, slices, 64), and `state_gmem` (B * slices * 64, N). With `g_smem`, g are per
    channel, (B, H, N)."""
    block, blocks, slices = lax.axis_index("block"), lax.axis_size("block"), v_gmem.shape[1]
    per_head, per_key_head = slices // g_gmem.shape[1], slices // k_gmem.shape[1]
    turns = _device.div(num_tiles - block + (blocks - 1), blocks)

    def place(i):
        """(tile, sequence, slice of the values) of turn `i`."""
        tile = block + i * blocks
        return tile, _device.div(tile, slices), _device.rem(tile, slices)

    def rows(tile):
        return state_gmem.at[pl.ds(pl.multiple_of(tile * PIECE, PIECE), PIECE)]

    def start_copies(i):
        stage, (tile, seq, value_slice) = _device.rem(i, num_stages), place(i)
        key_head = _device.div(value_slice, per_key_head)
        copies = [
            (rows(tile), s_smem), (q_gmem.at[seq, key_head], q_smem), (k_gmem.at[seq, key_head], k_smem),
            (v_gmem.at[seq, value_slice], v_smem),
        ]  # fmt: skip
        if g_smem is not None:
            copies.append((g_gmem.at[seq, _device.div(value_slice, per_head)], g_smem))
        for source, smem in copies:
            plgpu.copy_gmem_to_smem(source, smem.at[stage], filled.at[stage])

    def correct(state, i, stage):
        """(new state, o)."""
        _, seq, value_slice = place(i)
        head = _device.div(value_slice, per_head)
        across = lambda smem: lax.broadcast_in_dim(load(smem.at[stage], COLUMNS).astype(jnp.float32), state.shape, [1])
        decay = jnp.exp(g_gmem[seq, head] if g_smem is None else across(g_smem))
        beta = beta_gmem[seq, head]
        state, key = state * decay, across(k_smem)
        error = load(v_smem.at[stage], ROWS).astype(jnp.float32) - (state * key).sum(axis=1)
        state = state + lax.broadcast_in_dim(error * beta, state.shape, [0]) * key
        return state, (state * across(q_smem)).sum(axis=1) * scale

    for i in range(num_stages - 1):
        pl.when(i < turns)(functools.partial(start_copies, i))

    @pl.loop(0, turns)
    def _(i):
        stage, (tile, seq, value_slice) = _device.rem(i, num_stages), place(i)
        plgpu.barrier_wait(filled.at[stage])
        state, o = correct(load(s_smem.at[stage]), i, stage)
        s_smem[stage] = state
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(s_smem.at[stage], rows(tile))
        _device.store(o_gmem.at[seq, value_slice], o.astype(o_gmem.dtype))
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)  # The tile before has left its stage.
        pl.when(i + num_stages - 1 < turns)(lambda: start_copies(i + num_stages - 1))

    plgpu.wait_smem_to_gmem(0)


@functools.partial(jax.jit, static_argnames=("op", "scale", "config", "num_sms", "params"))
def _call(q, k, v, g, beta, state, *, op: str, scale: float, config: Config, num_sms: int, params):
    """From arrays to arrays. The reshapes join neighbouring axes, which moves nothing."""
    (batch, heads, size), dim = v.shape, k.shape[2]
    slices, rows = heads * size // PIECE, _host.ref_of(op, state.reshape(-1, dim))
    o = _host.kernel(
        functools.partial(_kernel, num_tiles=batch * slices, num_stages=config.num_stages, scale=scale),
        out_type=jax.ShapeDtypeStruct((batch, slices, PIECE), v.dtype),
        grid=(min(num_sms * config.blocks_per_sm, batch * slices),),
        grid_names=("block",),
        scratch_types=_scratch(config, dim, v.dtype, g.ndim > 2),
        compiler_params=params,
    )(q, k, v.reshape(batch, slices, PIECE), g.astype(jnp.float32), beta.astype(jnp.float32), rows)
    o, rows = _host.apart((o, jax.freeze(rows)))
    return o.reshape(v.shape), rows.reshape(state.shape)


@functools.partial(jax.jit, static_argnames=("op", "scale", "config", "num_sms", "params"))
def _call_on_ref(q, k, v, g, beta, state, **statics):
    """Inside `jit` a Ref is the value that it has at the time, and XLA gives all its values one buffer: no copies."""
    o, state[...] = _call(q, k, v, g, beta, state[...], **statics)
    return o


def step(op: str, q, k, v, g, beta, state, scale, use_qk_l2norm, config, per_channel: bool = False):
    """The results of `op`: `gated_delta_rule_step`, or `kda_step`, whose g are `per_channel`."""
    q, k, v, g, beta = arguments.arrays(op, dict(q=q, k=k, v=v, g=g, beta=beta))
    state, by_ref = arguments.state_or_ref(op, state)
    arguments.check_delta(op, "B", q, k, v, g, beta, per_channel)
    dim = q.shape[2]
    arguments.check_state(op, "state", state, (*v.shape, dim))
    scale = dim**-0.5 if scale is None else _host.option(op, "scale", scale, float)
    if _host.option(op, "use_qk_l2norm", use_qk_l2norm, bool):
        q, k = arguments.normalized(q), arguments.normalized(k)
    config = _host.require_config(op, config, Config) or Config()
    if 0 in v.shape:
        return jnp.zeros(v.shape, v.dtype) if by_ref else (jnp.zeros(v.shape, v.dtype), state)
    if (need := config.smem_bytes(dim, per_channel) * config.blocks_per_sm) > _device.SMEM_BYTES_MAX:
        raise ValueError(
            f"{_host.PACKAGE}.{op}: {config=} needs {need} bytes of shared memory of an SM for rows of {dim}, which "
            f"has {_device.SMEM_BYTES_MAX}: lower num_stages or blocks_per_sm"
        )
    target = _host.require_target(op)
    refuse = functools.partial(_host.without_gradient, op, f"{op}_reference, of the same module,")
    q, k, v, g, beta = refuse(q, k, v, g, beta)
    state = state if by_ref else refuse(state)[0]
    call = _call_on_ref if by_ref else _call
    params = _host.compiler_params(approx_math=True)
    return call(q, k, v, g, beta, state, op=op, scale=scale, config=config, num_sms=target.num_sms, params=params)


def gated_delta_rule_step(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    state: jax.Array,
    *,
    scale: float | None = None,
    use_qk_l2norm: bool = False,
    config: Config | None = None,
    **others,
) -> tuple[jax.Array, jax.Array]:
    """One token of each sequence through the gated delta rule; the states are changed in place.

    On an automatic mesh JAX gathers sharded operands on every device and says nothing: call it inside `jax.shard_map`,
    with `check_vma=False`.

    Args:
      q, k: (B, K, N), bfloat16 or float16; N is 64 or 128.
      v: (B, H, P), of the dtype of `q`; K divides H, and P is 64 or 128.
      g: (B, H), at most 0: the state is multiplied by exp(g); -inf clears it.
      beta: (B, H), from 0 to 1: how much of the error of the state is corrected.
      state: (B, H, P, N), float32, as `gated_delta_rule` returns it; an array, or a Ref (`jax.new_ref`).
      scale: of o; None for 1 / sqrt(N).
      use_qk_l2norm: divide the heads of q and k by their norms first, as `gated_delta_rule` does.
      config: stages and blocks; None for the default.
      others: arguments that other libraries have, if they are None or False.

    Returns:
      (o, state): o of the shape and dtype of `v`. Donate the state to `jax.jit` (`donate_argnums`), or XLA copies it
      first, unless it was made in the same `jit` and is not used afterwards. With a Ref: o alone, and the Ref is
      written; nothing is copied.

    Raises:
      ValueError: a shape, dtype or number is not supported, or the state varies over a mesh that `jax.shard_map` checks
        (give it check_vma=False); RuntimeError: no GPU.
    """
    op = "gated_delta_rule_step"
    _host.elsewhere(op, others, arguments.ELSEWHERE_OF_DELTA)
    return step(op, q, k, v, g, beta, state, scale, use_qk_l2norm, config)


gated_delta_rule_step.Config = Config  # `cookbook.gated_delta_rule_step` is this function, not its module.


def flops(batch: int, heads: int, key_dim: int, value_dim: int) -> int:
    """A decay, two products with a vector, and an outer product."""
    return 7 * batch * heads * key_dim * value_dim


def bytes_moved(batch: int, key_heads: int, heads: int, key_dim: int, value_dim: int) -> int:
    """The states, read and written, and the token: q, k, v and o of 16 bits, g and beta of 32."""
    token = 4 * key_heads * key_dim + 4 * heads * value_dim + 8 * heads
    return batch * (8 * heads * key_dim * value_dim + token)

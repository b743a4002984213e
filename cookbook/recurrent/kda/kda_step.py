# SPDX-License-Identifier: Apache-2.0
"""One token of each sequence through Kimi Delta Attention: every state read, corrected and written once, in place.

    S = S diag(exp(g)) + beta (v - S diag(exp(g)) k) k^T,    o = scale S q

Shapes: q and k (B, K, N); v and o (B, H, P); g (B, H, N); beta (B, H); state (B, H, P, N), float32, as of `kda`. K
divides H: value head h reads key head h // (H // K). q, k and v are all bfloat16 or all float16, N and P 64 or 128.

Roles and barriers: those of `delta/gated_delta_rule_step.py`, whose kernel this is, with a gate for each channel.

Other names and layouts: those of `kda`, with the axis T of one token left out. In fla this is `fused_recurrent_kda`,
whose states (B, H, N, P) are transposed ones.

Bound by: memory, each state being read and written once.
Not supported: differentiation, several tokens at a time (`kda` with an initial state).
Source: Kimi Team, "Kimi Linear: An Expressive, Efficient Attention Architecture" (2025).
"""

import jax
import jax.numpy as jnp

from ... import _host
from .. import arguments
from ..delta.gated_delta_rule_step import Config, flops, step
from .kda import ELSEWHERE

__all__ = ["Config", "bytes_moved", "flops", "kda_step", "kda_step_reference"]


def kda_step_reference(q, k, v, g, beta, state, scale=None, use_qk_l2norm=False):
    """(o, new state) in at least float32."""
    dtype, group = jnp.promote_types(v.dtype, jnp.float32), v.shape[1] // k.shape[1]
    q, k = (jnp.repeat(x.astype(dtype), group, axis=1) for x in (q, k))
    q, k = (arguments.normalized(x) if use_qk_l2norm else x for x in (q, k))
    state = jnp.exp(g.astype(dtype))[:, :, None] * state
    change = beta[..., None] * (v - (state * k[:, :, None]).sum(-1))
    state = state + change[..., None] * k[:, :, None]
    scale = k.shape[2] ** -0.5 if scale is None else scale
    return scale * (state * q[:, :, None]).sum(-1), state


def kda_step(
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
    """One token of each sequence through Kimi Delta Attention; the states are changed in place.

    On an automatic mesh JAX gathers sharded operands on every device and says nothing: call it inside `jax.shard_map`,
    with `check_vma=False`.

    Args:
      q, k: (B, K, N), bfloat16 or float16; N is 64 or 128.
      v: (B, H, P), of the dtype of `q`; K divides H, and P is 64 or 128.
      g: (B, H, N), at most 0: column c of the state is multiplied by exp(g[c]); -inf clears it.
      beta: (B, H), from 0 to 1: how much of the error of the state is corrected.
      state: (B, H, P, N), float32, as `kda` returns it; an array, or a Ref (`jax.new_ref`).
      scale: of o; None for 1 / sqrt(N).
      use_qk_l2norm: divide the heads of q and k by sqrt(sum(x**2) + 1e-6) first; XLA does it.
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
    op = "kda_step"
    _host.elsewhere(op, others, ELSEWHERE)
    return step(op, q, k, v, g, beta, state, scale, use_qk_l2norm, config, per_channel=True)


kda_step.Config = Config  # `cookbook.kda_step` is this function, not its module.


def bytes_moved(batch: int, key_heads: int, heads: int, key_dim: int, value_dim: int) -> int:
    """The states, read and written, and the token: q, k, v and o of 16 bits, g and beta of 32."""
    token = 4 * key_heads * key_dim + 4 * heads * value_dim + 4 * heads * (key_dim + 1)
    return batch * (8 * heads * key_dim * value_dim + token)

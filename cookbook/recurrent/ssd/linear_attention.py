# SPDX-License-Identifier: Apache-2.0
"""Causal attention without softmax, which is a recurrence: SSD without decay.

    S[t] = S[t-1] + v[t] k[t]ᵀ        out[t] = scale S[t] q[t]        for each head
    out[t] = scale * sum over s <= t of (q[t] . k[s]) v[s], without a state

Shapes: query and key (B, T, K, H), value (B, T, N, P), out as value, states (B, N, P, H) in float32. Value head n goes
with key head n // (N // K). All are bfloat16 or all float16. P is a multiple of 64; H is 64, 128 or 256.

Other names and layouts, in `chunk_linear_attn` of fla:

    here                          there
    query, key, value             q, k, v
    scale                         scale
    states (B, N, P, H)           (B, N, H, P): jnp.swapaxes(theirs, 2, 3)
    return_final_state            output_final_state
    never                         normalize, by default

This is `ssd` with a = 0 and dt = 1, x = value, b = key and c = query: its roles, barriers, bounds and gradients.

Chapter: notebooks/17_linear_attention.ipynb. Source: Katharopoulos et al., "Transformers are RNNs" (2020).
"""

import jax
import jax.numpy as jnp

from ... import _host
from .. import arguments
from .ssd import Config, bytes_moved, chunk_scan, default_config, flops, ssd_reference  # noqa: F401


def linear_attention_reference(query, key, value, *, scale=None, initial_state=None, cu_seqlens=None):
    """(out, final state) in at least float32."""
    dtype = jnp.promote_types(value.dtype, jnp.float32)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    ones, zeros = jnp.ones(value.shape[:3], dtype), jnp.zeros(value.shape[2], dtype)
    return ssd_reference(
        value, ones, zeros, key, scale * query.astype(dtype), initial_state=initial_state, cu_seqlens=cu_seqlens
    )


def linear_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    scale: float | None = None,
    chunk_size: int | None = None,
    initial_state: jax.Array | None = None,
    return_final_state: bool = False,
    cu_seqlens: jax.Array | None = None,
    config: Config | None = None,
    **others,
) -> jax.Array | tuple[jax.Array, ...]:
    """Causal linear attention, without a feature map and without normalisation; bitwise reproducible.

    On an automatic mesh JAX gathers sharded operands on every device and says nothing: call it inside `jax.shard_map`.

    Args:
      query, key: (B, T, K, H), bfloat16 or float16; H is 64, 128 or 256.
      value: (B, T, N, P), of the same dtype; K divides N, and P is a multiple of 64.
      scale: what products of queries and keys are multiplied by; None for 1 / sqrt(H).
      chunk_size, initial_state, return_final_state, cu_seqlens, config: as of `cookbook.ssd`; states are (B, N, P, H).
      others: arguments that other libraries have, such as `normalize`, if they are None or False.

    Returns:
      (B, T, N, P), of the dtype of `value`; with `return_final_state` also the states.

    Raises:
      ValueError: a shape, dtype or number is not supported; RuntimeError: no GPU.
    """
    op = "linear_attention"
    _host.elsewhere(op, others, arguments.ELSEWHERE)
    required = dict(query=query, key=key, value=value)
    optional = dict(initial_state=initial_state, cu_seqlens=cu_seqlens)
    query, key, value, *optional = arguments.arrays(op, required, optional)
    ones, zeros = jnp.ones(value.shape[:3], jnp.float32), jnp.zeros(value.shape[2:3], jnp.float32)
    arrays = value, ones, zeros, key, query, None, *optional
    arguments.check_ssd(op, *arrays, dict(x="value", b="key", c="query"))
    scale = query.shape[-1] ** -0.5 if scale is None else _host.option(op, "scale", scale, float)
    return chunk_scan(op, *arrays, chunk_size, config, return_final_state, scale)


linear_attention.Config = Config  # `cookbook.linear_attention` is this function, not its module.

"""Causal attention without softmax, which is a recurrence: SSD without decay.

    S[t] = S[t-1] + v[t] k[t]ᵀ        out[t] = scale S[t] q[t]        for each head
    out[t] = scale * sum over s <= t of (q[t] . k[s]) v[s], without a state

Shapes: query and key (B, T, K, H), value (B, T, N, P), out as value, states (B, N, P, H) in float32. Value head n goes
with key head n // (N // K). All are bfloat16 or all float16. P is a multiple of 64; H is 64, 128 or 256.

This is `ssd` with a = 0 and dt = 1, x = value, b = key and c = query: its roles, barriers, bounds and gradients.

Chapter: notebooks/17_linear_attention.ipynb. Source: Katharopoulos et al., "Transformers are RNNs" (2020).
"""

import jax.numpy as jnp

from .. import _mgpu
from . import ssd
from .ssd import Config, bytes_moved, default_config, flops  # noqa: F401


def linear_attention_reference(query, key, value, *, scale=None, initial_state=None, cu_seqlens=None):
    """(out, final state) in at least float32."""
    dtype = jnp.promote_types(value.dtype, jnp.float32)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    ones, zeros = jnp.ones(value.shape[:3], dtype), jnp.zeros(value.shape[2], dtype)
    return ssd.ssd_reference(
        value, ones, zeros, key, scale * query.astype(dtype), initial_state=initial_state, cu_seqlens=cu_seqlens
    )


def linear_attention(
    query, key, value, *, scale=None, chunk_size=None, initial_state=None, return_final_state=False, cu_seqlens=None,
    config: Config | None = None,
):  # fmt: skip
    """Causal linear attention, without a feature map and without normalisation; the same to the bit in every run.

    Args:
      query, key: (B, T, K, H), bfloat16 or float16; H is 64, 128 or 256.
      value: (B, T, N, P), of the same dtype; K divides N, and P is a multiple of 64.
      scale: what products of queries and keys are multiplied by; None for 1 / sqrt(H).
      chunk_size, initial_state, return_final_state, cu_seqlens, config: as of `cookbook.ssd`; states are (B, N, P, H).

    Returns:
      (B, T, N, P), of the dtype of `value`; with `return_final_state` also the states.

    Raises:
      ValueError: a shape, dtype or number is not supported; RuntimeError: no GPU.
    """
    op = "linear_attention"
    arrays = dict(query=query, key=key, value=value, initial_state=initial_state, cu_seqlens=cu_seqlens)
    query, key, value, initial_state, cu_seqlens = (
        None if m is None else _mgpu.as_array(op, name, m) for name, m in arrays.items()
    )
    if scale is not None:
        scale = _mgpu.option(op, "scale", scale, float)
    names = dict(x="value", b="key", c="query")
    ones, zeros = jnp.ones(value.shape[:3], jnp.float32), jnp.zeros(value.shape[2:3], jnp.float32)
    config = ssd.check(op, value, ones, zeros, key, query, None, initial_state, cu_seqlens, chunk_size, config, names)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    out, final = ssd.run(op, value, ones, zeros, key, query, None, initial_state, cu_seqlens, config, scale)
    return (out, final) if return_final_state else out


linear_attention.Config = Config  # `cookbook.linear_attention` is this function, not its module.

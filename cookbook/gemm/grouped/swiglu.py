# SPDX-License-Identifier: Apache-2.0
"""SwiGLU of a gate and an up product: silu(gate) * up, or gpt-oss's, which clamps both at a limit."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

ALPHA = 1.702  # gpt-oss's SwiGLU has gate * sigmoid(ALPHA * gate).


@functools.lru_cache
def swiglu_of(limit: float | None):
    """The function of a gate and an up product; the same object each time, which programs are kept for."""

    def silu(gate, up):
        return jax.nn.silu(gate) * up

    def clamped(gate, up):
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
        return gate * jax.nn.sigmoid(ALPHA * gate) * (up + 1)

    return silu if limit is None else clamped


def swiglu(both, limit: float | None = None):
    """(..., N) values of (..., 2N) ones, which hold the gate, then the up product."""
    gate, up = lax.split(both, [both.shape[-1] // 2] * 2, axis=both.ndim - 1)
    return swiglu_of(limit)(gate, up)

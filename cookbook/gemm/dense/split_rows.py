# SPDX-License-Identifier: Apache-2.0
"""(being replaced)"""

import jax.numpy as jnp
from jax import lax

E4M3 = jnp.dtype(jnp.float8_e4m3fn)


def split_rows(x):
    """(M, K) -> halves (M, 2 Kp) e4m3, scales (M,) float32."""
    m, k = x.shape
    x = jnp.pad(x.astype(jnp.float32), ((0, 0), (0, -k % 32)))
    largest = jnp.abs(x).max(1, keepdims=True)
    exponent = ((lax.bitcast_convert_type(largest, jnp.int32) + 0x1FFFFF) >> 23) - 127 - 8
    power = lambda e: lax.bitcast_convert_type(jnp.clip(e + 127, 1, 254) << 23, jnp.float32)
    scaled = x * power(-exponent)
    bits = lax.bitcast_convert_type(scaled, jnp.uint32)
    nearest = lax.bitcast_convert_type((bits + 0x7FFFF + (bits >> 20 & 1)) & jnp.uint32(0xFFF00000), jnp.float32)
    high = jnp.where(jnp.abs(scaled) < 2.0**-6, (scaled + 1.5 * 2.0**14) - 1.5 * 2.0**14, nearest)
    both = jnp.stack([high, scaled - high], 1).astype(E4M3)
    kp = x.shape[1]
    both = both.reshape(m, 2, kp // 16, 2, 4, 2).transpose(0, 1, 2, 4, 5, 3).reshape(m, 2 * kp)
    return both, power(exponent)[:, 0]

# SPDX-License-Identifier: Apache-2.0
"""The noise that makes a draw of a maximum: of x[c] + noise[c] the largest is at column c with probability
softmax(x)[c], where the noise is Gumbel's, -log of an exponential number.

Each number is made of (seed, position, column) alone, by multiplications and shifts that mix bits (C. Wellons' hash of
32 bits, `lowbias32`, twice, with 64 bits of key), so it is the same wherever and beside whatever it is made. For one
seed and position the columns' 32 bits all differ.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax

LOG_2 = float(np.log(2.0))
ADDEND, OTHER = (int(np.uint32(n).astype(np.int32)) for n in (0x9E3779B9, 0x85EBCA6B))
FACTORS = tuple(int(np.uint32(n).astype(np.int32)) for n in (0x7FEB352D, 0x846CA68B))

BOUND = 32 * LOG_2 + 1e-3  # Rounding, and the step of the mixing that `gumbel_bound` leaves out, are far below 1e-3.


def _stir(x):
    for shift, factor in zip((16, 15), FACTORS, strict=True):
        x = (x ^ lax.shift_right_logical(x, jnp.int32(shift))) * factor
    return x


def _mix(x):
    x = _stir(x)
    return x ^ lax.shift_right_logical(x, jnp.int32(16))


def row_key(seed, position):
    """Two int32 that stand for a seed and a position."""
    first = _mix(_mix(seed ^ ADDEND) + position)
    return first, _mix(_mix(position ^ OTHER) + first + seed)


def bits(key, column):
    return _mix(_mix(column + key[0]) ^ key[1])


def gumbel(key, column):
    """float32 noise of int32 columns."""
    # 31 bits in (0, 1]: near 0, where a winner's number lies, float32 keeps them apart.
    u = lax.shift_right_logical(bits(key, column), jnp.int32(1)).astype(jnp.float32) * 2.0**-31 + 2.0**-32
    u = jnp.minimum(u, 1.0 - 2.0**-24)
    # -log(1 - u); the subtraction would lose a small number's digits.
    series = u * (1.0 + u * (1 / 2 + u * (1 / 3 + u * (1 / 4 + u * (1 / 5)))))
    return -jnp.log(jnp.where(u < 1 / 16, series, -jnp.log(1.0 - u)))


def gumbel_bound(key, column):
    """float32 of int32 columns, to which BOUND is added for a number at least as high as the noise, by one logarithm:
    -log(1 - u) is at least u."""
    # The last step of the mixing is left out. It changes the lower 16 bits by no more than the number of the higher 16.
    return -jnp.log(lax.bitcast_convert_type(_stir(_mix(column + key[0]) ^ key[1]), jnp.uint32).astype(jnp.float32))

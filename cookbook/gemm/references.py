# SPDX-License-Identifier: Apache-2.0
"""Products as XLA computes them exactly, and the operations and bytes that they take."""

import jax.numpy as jnp
from jax import lax


def exact_product(a, b):
    """`a @ b`, of all bits of float32, or of float64 if `a` has them."""
    dtype = jnp.promote_types(a.dtype, jnp.float32)
    return jnp.matmul(a.astype(dtype), b.astype(dtype), precision="highest")


def rounded(weights, dtype):
    """Weights of `dtype`. Without the barrier XLA may drop the rounding where it widens them again, as on an H200."""
    return lax.optimization_barrier(weights.astype(dtype))


def flops(m: int, n: int, k: int) -> int:
    """Operations of a product, or of products of `m` rows in all that belong to groups."""
    return 2 * m * n * k


def bytes_moved(m: int, n: int, k: int, itemsize: int = 2) -> int:
    """Each operand read once and the result written once, all of `itemsize` bytes."""
    return itemsize * (m * k + k * n + m * n)

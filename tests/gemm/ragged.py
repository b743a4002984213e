"""Operands and gradients that the tests of grouped products share."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.arrays import array


def floats(*shape, dtype=jnp.bfloat16, rows=None):
    """Random normal, with a shifted mean; rows from `rows` on are NaN."""
    x = np.random.default_rng(sum(shape)).normal(size=shape) + 0.1
    if rows is not None:
        x[rows:] = np.nan
    return array(x, dtype)


def operands(m, n, k, sizes, transpose_rhs=False, dtype=jnp.bfloat16, rows=None):
    """`rows` NaN-free rows of lhs: by default those of groups, unless none is beyond them."""
    rows = sum(sizes) if rows is None else rows
    rhs = floats(len(sizes), n, k, dtype=dtype) if transpose_rhs else floats(len(sizes), k, n, dtype=dtype)
    return floats(m, k, dtype=dtype, rows=rows), rhs, array(sizes, jnp.int32)


def gradients(fn, weights, **how):
    """The gradients of a sum of products with `weights`."""
    product = lambda lhs, rhs, sizes: (fn(lhs, rhs, sizes, **how).astype(weights.dtype) * weights).sum()
    return lambda lhs, rhs, sizes: jax.grad(product, (0, 1))(lhs, rhs, sizes)


def slow(cases, names):
    """`cases`, those with `names` left to `make test ALL=1`: another covers most of each."""
    return [pytest.param(case, marks=pytest.mark.slow) if case in names else case for case in cases]

# SPDX-License-Identifier: Apache-2.0
"""Shared parts of the kernels of the gated delta rule: products, one operand of which may lie in registers."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ..core import COLUMNS, PIECE, ROWS

CHUNK = 64  # Tokens of a chunk: the rows of a WGMMA.
SQUARE = (CHUNK, CHUNK)
TILED = dict(transforms=(plgpu.TilingTransform((8, PIECE)), plgpu.SwizzleTransform(128)))


def load(ref, layout):
    return plgpu.load(ref, layout=layout, optimized=False)


def spread(values, dim: int, shape=SQUARE):
    """`values`, one for each row (`dim` 0) or column (1), as a matrix."""
    return plgpu.layout_cast(lax.broadcast_in_dim(values, shape, [dim]), plgpu.Layout.WGMMA)


def apart_in_square():
    """Row number less column number of a square."""
    row, column = (plgpu.broadcasted_iota(jnp.int32, (CHUNK,), 0, layout=layout) for layout in (ROWS, COLUMNS))
    return spread(row, 0) - spread(column, 1)


def product(pairs, interpreted: bool, acc=None):
    """`acc` + the sum of the products of `pairs` (a, b): a in registers or in shared memory, b in shared memory.

    JAX's interpreter multiplies nothing in registers on its tensor cores.
    """
    shape = pairs[0][0].shape[0], pairs[0][1].shape[1]
    if interpreted:
        value = lambda x: x if isinstance(x, jax.Array) else x[...]
        for a, b in pairs:
            term = jnp.dot(value(a), value(b), preferred_element_type=jnp.float32)
            acc = term if acc is None else acc + term
        plgpu.commit_smem()  # TMA may now overwrite what was read here.
        return plgpu.layout_cast(acc, plgpu.Layout.WGMMA)

    def multiply(ref):
        if acc is not None:
            ref[...] = acc
        for a, b in pairs:
            plgpu.wgmma(ref, a, b)
        return plgpu.layout_cast(ref[...], plgpu.Layout.WGMMA)

    return pl.run_scoped(multiply, plgpu.ACC(shape, jnp.float32))


def multiply(pairs):
    """The sum of the products of `pairs` (a, b), all in shared memory."""

    def add(ref):
        for pair in pairs:
            plgpu.wgmma(ref, *pair)
        return plgpu.layout_cast(ref[...], plgpu.Layout.WGMMA)

    return pl.run_scoped(add, plgpu.ACC((pairs[0][0].shape[0], pairs[0][1].shape[1]), jnp.float32))

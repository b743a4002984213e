# SPDX-License-Identifier: Apache-2.0
"""Sums of the gates of a chunk as products on tensor cores: of a matrix of zeros and ones, made in registers from its
indices, by the gates in two parts of float16, which have 22 bits together.

Two tokens of a chunk part at a power of two, a *block*: the later one is in the second half, and the earlier one in the
first half, of the same 2 `block` tokens.
"""

import math

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from ..._device import COLUMNS, PIECE, ROWS, Ref, Tiles, load, product, spread
from ..states import LEAST_DECAY

NUM_BLOCKS = 6  # Powers of two at which two tokens of a chunk can part.
HALF = PIECE // 2  # Columns of a tile of gates, of 128 bytes.
LEAST_LOG2 = math.log2(LEAST_DECAY)
LOG2_E = math.log2(math.e)


def split(gates: Tiles, parts: Ref, p: int):
    """Leaves piece `p` of the gates, as logarithms to base 2, in two parts of float16, which take the place of `gates`
    in shared memory. Returns it in float32."""
    logs = jnp.concatenate([load(gates.tiled.at[0, 2 * p + half]) for half in range(2)], axis=1)
    logs = jnp.maximum(logs * LOG2_E, LEAST_LOG2)
    plgpu.commit_smem()  # All warps have read the piece.
    high = logs.astype(jnp.float16)
    parts[0] = high
    parts[1] = (logs - high.astype(jnp.float32)).astype(jnp.float16)
    return logs


def sums(matrix, parts: Ref, interpreted: bool):
    """The gates, in parts, that each row of a `matrix` of zeros and ones names, summed."""
    return product([(matrix, parts.at[part]) for part in range(2)], interpreted)


def indices(of_rows, of_columns):
    """(The row, the column) of each row, and of each column, of a product. Both arguments are zeros which the compiler
    does not know: else it would compute with indices long before a loop, and spill."""
    iota = lambda layout: plgpu.broadcasted_iota(jnp.int32, (PIECE,), 0, layout=layout)
    return iota(ROWS) + of_rows, iota(COLUMNS) + of_columns


def ones(first, last, column, dtype=jnp.float16):
    """(64, 64): ones from column `first` to `last` of each row, which may be the one before `first`.

    By arithmetic, which takes two numbers of 16 bits at once: a comparison and a selection take one.
    """
    middle, reach = (first + last).astype(jnp.float32) * 0.5, (last - first).astype(jnp.float32) * 0.5 + 1.0
    column, middle, reach = (
        spread(x.astype(jnp.float32).astype(dtype), dim) for x, dim in ((column, 1), (middle, 0), (reach, 0))
    )
    return jnp.clip(reach - jnp.abs(column - middle), 0, 1)


def to_boundary(row, column, block):
    """The matrix that sums the gates between a token and the boundary of its 2 `block` tokens."""
    is_second = (row & block) != 0
    return ones(jnp.where(is_second, row & -block, row + 1), jnp.where(is_second, row, row | (block - 1)), column)


def from_boundary(row, column, block, dtype):
    """The transpose of `to_boundary`: a row for each gate, with ones for the tokens whose sums it is in."""
    is_second = (row & block) != 0
    first, last = jnp.where(is_second, row, row & -block), jnp.where(is_second, row | (block - 1), row - 1)
    return ones(first, last, column, dtype)


def parted(row, column, block, dtype):
    """(64, 64): ones for the pairs of tokens that part at `block`."""
    first = (row & -block) ^ block
    return ones(first, first + block - 1, column, dtype)

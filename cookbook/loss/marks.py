# SPDX-License-Identifier: Apache-2.0
"""Which tiles of logits need more than exponentials: those with a row's label, or columns beyond the vocabulary.

Few tiles do, and the comparisons cost as many instructions as the rest of an epilogue. A table of marks, which XLA
makes, tells a compute warpgroup which of its tiles take them.
"""

import math

import jax.numpy as jnp

from .. import _device

ROWS, COLUMNS = 64, 128  # Logits that share a mark.
SPARE = 1024  # Rows, and columns, of the largest tile of a cluster, which may end so far beyond the logits.


def of_labels(label, cols: int, vocabulary: int):
    """Marks of logits in `cols` columns of `vocabulary` that count, int32; `label` (rows,) is that of `kernel.py`."""
    shape = -(-(len(label) + SPARE) // ROWS), -(-(cols + SPARE) // COLUMNS)
    beyond = jnp.arange(shape[1]) >= vocabulary // COLUMNS
    column = jnp.where(label >= 0, label // COLUMNS, shape[1])
    marks = jnp.broadcast_to(beyond.astype(jnp.int32), shape)
    return marks.at[jnp.arange(len(label)) // ROWS, column].set(1, mode="drop")


def any_in(marks_gmem, row, col, shape: tuple[int, int]):
    """Whether a tile of `shape` at `row` and `col` has a mark. `col`: 128s and columns of tiles."""
    rows, cols = shape
    last = (COLUMNS - math.gcd(cols, COLUMNS) + cols - 1) // COLUMNS  # The last mark, if it begins as late as it may.
    row, col = _device.div(row, ROWS), _device.div(col, COLUMNS)
    found = [marks_gmem[row + i, col + j] for i in range(-(-rows // ROWS)) for j in range(last + 1)]
    return sum(found[1:], found[0]) > 0

# SPDX-License-Identifier: Apache-2.0
"""How much of the logits stands in memory at a time: blocks of rows, and of columns where they are computed twice."""

import dataclasses

BYTES_MAX = 2e9  # Logits and all else beside operands and results.
UNIT = 128  # Rows of a tile; of fewer a block wastes some.
SECONDS_PER_FLOP, SECONDS_PER_BYTE = 1 / 760e12, 1 / 4.2e12  # Of an H200.


@dataclasses.dataclass(frozen=True)
class Blocks:
    """The blocks of one call."""

    rows: int  # Rows of a block, a multiple of 8: of a call with more the last may be short.
    # None: the gradient of the weight is added up over the blocks of rows. Otherwise it is computed for so many columns
    # at a time, of all rows, whose logits are computed once more.
    cols: int | None = None

    def num(self, rows: int) -> int:
        return -(-rows // self.rows)


def _up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def blocks_of(rows: int, hidden: int, vocabulary: int, pitch: int, memory: str | None) -> Blocks:
    """The blocks of (rows, vocabulary) logits, with 16 bits each, of rows of `hidden` values.

    By default: one if its logits take at most 2 GB, half of what they take in float32. Otherwise as many as keep 2 GB,
    what is needed to add up the gradient of the weight included (another array of its size, and what is left of the
    sums where they are rounded to 16 bits); or, where this leaves no room, blocks of columns too. "low": blocks of both
    that take a twentieth of the logits in float32.
    """
    if memory is None and 2 * rows * pitch <= BYTES_MAX:
        return Blocks(_up(rows, 8))
    left = BYTES_MAX - 4 * vocabulary * hidden
    most = int(left // (2 * pitch + 2 * hidden)) // UNIT * UNIT
    if memory is None and most >= max(4 * UNIT, rows // 64):
        least = -(-rows // most)
        return min((_equal(rows, num) for num in range(least, 2 * least + 1)), key=lambda blocks: (
            6 * blocks.num(rows) * blocks.rows * hidden * vocabulary * SECONDS_PER_FLOP
            + 10 * blocks.num(rows) * hidden * vocabulary * SECONDS_PER_BYTE
        ))  # fmt: skip
    budget = rows * vocabulary / 5 if memory == "low" else BYTES_MAX
    whole = 2 * rows * hidden  # The hidden rows without those that are ignored.
    most = max(UNIT, int(max(budget - whole, budget / 4) // (2 * pitch)) // UNIT * UNIT)
    # A block of columns is logits, and rows of the weight and of its gradient.
    cols = int(max(budget - whole, budget / 4) // (2 * rows + 4 * hidden)) // UNIT * UNIT
    return Blocks(_equal(rows, -(-rows // most)).rows, min(_up(max(cols, UNIT), UNIT), pitch))


def _equal(rows: int, num: int) -> Blocks:
    """So many blocks, of as many rows each."""
    return Blocks(_up(-(-rows // num), UNIT))

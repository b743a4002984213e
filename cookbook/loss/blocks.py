# SPDX-License-Identifier: Apache-2.0
"""How much of the logits stands in memory at a time: blocks of rows, and of columns where they are computed twice."""

import dataclasses

from . import products

BYTES_MAX = 2e9  # Logits and all else beside operands and results.
SHARE = 0.95  # Share of the budget for blocks. The rest is for numbers per row, and for XLA.
UNIT = 128  # Rows of a tile. A block of fewer wastes a part of it.
SECONDS_PER_FLOP, SECONDS_PER_BYTE = 1 / 760e12, 1 / 4.2e12  # An H200's.


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


def blocks_of(rows: int, hidden: int, vocabulary: int, pitch: int, memory: str | None, num_sms: int) -> Blocks:
    """The blocks of (rows, vocabulary) logits, with 16 bits each, of rows of `hidden` values.

    By default: one if its logits take at most 2 GB, half of what they take in float32. Otherwise as many as keep 2 GB,
    float32 sums of the weight's gradient included; or, where these leave no room, blocks of columns too. "low": blocks
    of both that take a twentieth of the logits in float32. Which sizes are fastest, the cost model of gemm says.
    """
    if memory is None and 2 * rows * pitch <= BYTES_MAX:
        return Blocks(_up(rows, 8))
    budget = rows * vocabulary / 5 if memory == "low" else BYTES_MAX
    left = BYTES_MAX - 4 * vocabulary * hidden
    most = int(left // (2 * pitch + 2 * hidden)) // UNIT * UNIT
    if memory is None and most >= max(4 * UNIT, rows // 64):

        def seconds(blocks: Blocks):
            num = blocks.num(rows)
            flops, nbytes = 6 * num * blocks.rows * hidden * vocabulary, 4 * (num - 1) * hidden * vocabulary
            return flops * SECONDS_PER_FLOP + nbytes * SECONDS_PER_BYTE

        return min(map(Blocks, _parts(rows, most)), key=seconds)
    # Each row has its logits, its hidden values with zeros if it is ignored, and its gradient.
    most = int(SHARE * budget // (2 * pitch + 4 * hidden))
    # Beside a block of columns, which is logits, rows of the weight and of its gradient: the hidden values of all rows.
    left = max(SHARE * budget - 2 * rows * hidden, budget / 4)
    most_cols = min(int(left // (2 * rows + 4 * hidden)), pitch)

    def seconds_of_cols(cols: int):
        logits, d_weight = ((rows, cols, hidden), (False, False)), ((cols, hidden, rows), (True, True))
        return -(-pitch // cols) * (products.seconds(*logits, num_sms) + products.seconds(*d_weight, num_sms))

    def seconds_of_rows(size: int):
        logits, d_hidden = ((size, pitch, hidden), (False, False)), ((size, hidden, pitch), (False, True))
        return -(-rows // size) * (products.seconds(*logits, num_sms) + products.seconds(*d_hidden, num_sms))

    cols = min(_parts(pitch, most_cols), key=seconds_of_cols)
    # Where the last block is short, hidden and its gradient are copied, to arrays with more rows.
    sizes = _parts(rows, most)
    whole = [size for size in sizes if rows % size == 0]
    return Blocks(min(whole or sizes, key=seconds_of_rows), min(cols, pitch))


def _parts(size: int, most: int) -> list[int]:
    """Sizes of equal parts, at most `most` if that is a tile: the fewest, and more of them, which may be faster."""
    most = max(UNIT, most // UNIT * UNIT)
    least = -(-size // most)
    return list(dict.fromkeys(_up(-(-size // num), UNIT) for num in range(least, least + least // 2 + 1)))

# SPDX-License-Identifier: Apache-2.0
"""How much of the logits stands in memory at a time: blocks of rows, and of columns where they are computed twice."""

import dataclasses

from . import products

BYTES_MAX = 2e9  # Logits and all else beside operands and results.
SHARE = 0.95  # Share of the budget for blocks. The rest is for numbers per row, and for XLA.
UNIT = 128  # Rows of a tile. A block of fewer wastes a part of it.
# Blocks of rows at most that add to d_weight in 16 bits, where each addition rounds the sum: if logits are computed
# twice, and by default, where this has to pay.
ROUNDED_MAX, ROUNDED_FEW, ROUNDED_GAIN = 16, 4, 1.03
PARTS_SHARE = 1 / 4  # Share of the logits' memory that float32 sums of parts of d_hidden may take beside them.
SECONDS_PER_BYTE = 1 / 4.2e12  # An H200's.


@dataclasses.dataclass(frozen=True)
class Blocks:
    """The blocks of one call."""

    rows: int  # Rows of a block, a multiple of 8: of a call with more the last may be short.
    # None: a block has whole rows of logits. Otherwise so many columns, a multiple of 128, of logits that are computed
    # a second time, for the gradients alone.
    cols: int | None = None
    # Whole rows of logits: whether blocks add to d_weight where it lies, in 16 bits, or to float32 sums beside it.
    rounded: bool = False

    def num(self, rows: int) -> int:
        return -(-rows // self.rows)

    def room(self, rows: int, pitch: int) -> int:
        """Bytes for parts of d_hidden's sums beside logits of whole rows: of one block that leaves so much."""
        logits = 2 * self.rows * pitch
        room = int(PARTS_SHARE * logits)
        return room if self.num(rows) == 1 and logits + room <= BYTES_MAX else 0


def _up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def blocks_of(rows: int, hidden: int, vocabulary: int, pitch: int, memory: str | None, num_sms: int) -> Blocks:
    """The blocks of (rows, vocabulary) logits, with 16 bits each, of rows of `hidden` values.

    By default: one if its logits take at most 2 GB, half of what they take in float32. Otherwise as many as keep 2 GB,
    float32 sums of the weight's gradient included, unless the result itself can hold the sums of a few larger blocks,
    and this is faster; or, where there is no room for either, blocks of columns too. "low": blocks of both that take a
    twentieth of the logits in float32. Which sizes are fastest, the cost model of gemm says.
    """
    if memory is None and 2 * rows * pitch <= BYTES_MAX:
        return Blocks(_up(rows, 8))
    if memory is None and (found := _of_rows(rows, hidden, vocabulary, pitch, num_sms)):
        return found
    budget = SHARE * (rows * vocabulary / 5 if memory == "low" else BYTES_MAX)
    if rows % 8:  # Rows are padded, and their gradient is no longer where the result goes.
        budget = max(0, budget - 2 * hidden * rows)
    found = []
    for num in range(1, ROUNDED_MAX + 1):
        size = _up(-(-rows // num), 8)
        most = int((budget / size - 4 * hidden) / 2)  # Beside a block: float32 sums of the gradient of hidden.
        if found and num > 2 * found[0].num(rows):  # Smaller products are no faster.
            break
        if most >= min(4 * UNIT, pitch):
            found += [Blocks(size, cols) for cols in _parts(pitch, most)]
    if not found:  # Hidden values alone take the budget.
        found = [Blocks(max(size, min(UNIT, _up(rows, 8))), min(8 * UNIT, _up(pitch, UNIT)))]

    def seconds_of_both(blocks: Blocks):  # The loss takes as long with any blocks.
        size, cols, times = blocks.rows, blocks.cols, blocks.num(rows)
        logits = products.seconds((size, cols, hidden), (False, False), num_sms)
        d_weight = products.seconds((cols, hidden, size), (True, True), num_sms)
        d_hidden = products.seconds((size, hidden, cols), (False, True), num_sms, out_bytes=4)
        added = 2 * vocabulary * hidden * (times > 1) * SECONDS_PER_BYTE  # d_weight is read before it is written.
        return times * (-(-pitch // cols) * (logits + d_weight + d_hidden) + added)

    return min(found, key=seconds_of_both)


def _of_rows(rows: int, hidden: int, vocabulary: int, pitch: int, num_sms: int) -> Blocks | None:
    """The fastest blocks of whole rows that take 2 GB, or None."""

    def seconds(blocks: Blocks):
        size, times = blocks.rows, blocks.num(rows)
        logits = products.seconds((size, pitch, hidden), (False, False), num_sms)
        d_weight = products.seconds((pitch, hidden, size), (True, True), num_sms, out_bytes=2 if blocks.rounded else 4)
        d_hidden = products.seconds((size, hidden, pitch), (False, True), num_sms)
        # An addition reads and writes a sum. float32 sums are read once more, and the result is written.
        nbytes = 4 * (times - 1) if blocks.rounded else 8 * (times - 1) + 6
        return times * (logits + d_weight + d_hidden) + nbytes * vocabulary * hidden * SECONDS_PER_BYTE

    def fastest(rounded: bool):
        sums = 0 if rounded else 4 * vocabulary * hidden
        most = int((BYTES_MAX - sums) // (2 * pitch + 2 * hidden)) // UNIT * UNIT
        sizes = _parts(rows, most) if most >= max(4 * UNIT, rows // 64) else []
        found = [Blocks(size, rounded=rounded) for size in sizes]
        return min((x for x in found if not rounded or x.num(rows) <= ROUNDED_FEW), key=seconds, default=None)

    exact, rounded = fastest(False), fastest(True)
    if exact is None or rounded is None:
        return exact or rounded
    return rounded if seconds(exact) > ROUNDED_GAIN * seconds(rounded) else exact


def _parts(size: int, most: int) -> list[int]:
    """Sizes of equal parts, at most `most` if that is a tile: the fewest, and more of them, which may be faster."""
    most = max(UNIT, most // UNIT * UNIT)
    least = -(-size // most)
    return list(dict.fromkeys(_up(-(-size // num), UNIT) for num in range(least, least + min(least // 2, 7) + 1)))

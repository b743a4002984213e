# SPDX-License-Identifier: Apache-2.0
"""How a row is cut up for a selection: into parts of a block each, and a part into pieces of a load each."""

import dataclasses
import math

from jax.experimental import pallas as pl

from .._device import WARPGROUP

# A thread loads so many values for a piece, 4 at once, so that its keys are 16 bytes side by side in shared memory.
# Loads of 8, 16 bytes of 16-bit values, would give every access to keys a bank conflict.
VALUES, VECTOR = 16, 4
PART_MIN = 4096  # Keys of a part, at least: a thread has their loads in flight at once, and fewer would save little.
PART_MAX = 8192  # At most: with their 32 KiB of shared memory 6 blocks share an SM.
PART_LAST = 32768  # In the last stage a block has a row for itself.


def ceil_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def candidates(k: int) -> int:
    """Slots for the keys that a block finds: a search for a threshold that leaves some room ends early."""
    return max(1, pl.cdiv(3 * k, 2 * WARPGROUP)) * WARPGROUP


@dataclasses.dataclass(frozen=True)
class Plan:
    """Statics of one stage: from each part of a row, its `k` largest keys and perhaps some more."""

    cols: int  # Columns of a row.
    k: int
    vec: int  # Columns that a thread loads at once.
    loads: int  # A thread makes so many loads for a piece.
    part: int  # Columns of a part, a multiple of a piece.
    stage: int  # How many stages there were before.

    @property
    def piece(self) -> int:
        return WARPGROUP * self.vec * self.loads

    @property
    def is_short(self) -> bool:
        """Whether a row has fewer columns than a block has threads. Other rows have at least a piece."""
        return self.cols < self.piece

    @property
    def num_pieces(self) -> int:
        return self.part // self.piece

    @property
    def unroll(self) -> int:
        """Pieces that are loaded at once: more where a block has an SM nearly for itself."""
        return next(n for n in ((5, 4, 3, 2, 1) if self.stage else (2, 1)) if self.num_pieces % n == 0)

    @property
    def num_parts(self) -> int:
        return pl.cdiv(self.cols, self.part)

    @property
    def slots(self) -> int:
        """Keys that a part hands on; in the last stage those that are sorted, by a network of a power of 2."""
        return ceil_power_of_2(candidates(self.k)) if self.num_parts == 1 else candidates(self.k)

    @property
    def num_maxima(self) -> int:
        """Maxima of groups of keys, several for each key that is wanted; of a piece at most."""
        return min(self.piece, WARPGROUP * self.vec * ceil_power_of_2(pl.cdiv(4 * self.k, WARPGROUP * self.vec)))

    @property
    def pad(self) -> int:
        """Indices from here on are those of no column: each stage has 2**24 of its own."""
        return (self.stage + 1) << 24


def plan_of(rows: int, cols: int, k: int, stage: int, num_sms: int, values: int = VALUES) -> Plan:
    vec = math.gcd(cols, VECTOR)
    loads = values // vec
    while WARPGROUP * vec * loads > cols and vec * loads > 1:
        vec, loads = (vec, loads // 2) if loads > 1 else (vec // 2, 1)
    piece, slots = WARPGROUP * vec * loads, candidates(k)
    if stage > 0 and cols <= PART_LAST:
        part = cols
    else:
        # Large enough to hand on a fraction of its keys, small enough to keep all SMs busy twice.
        part = min(max(PART_MIN, pl.cdiv(rows * cols, 2 * num_sms)), PART_MAX)
        part = min(max(part, 8 * slots), cols)
    num_pieces = pl.cdiv(part, piece)
    num_pieces += num_pieces > 1 and num_pieces % 2  # An even number: see `unroll`.
    return Plan(cols, k, vec, loads, num_pieces * piece, stage)

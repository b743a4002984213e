# SPDX-License-Identifier: Apache-2.0
"""How a row is cut up for a selection: into parts of a block each, and a part into pieces of a load each."""

import dataclasses
import math

from jax.experimental import pallas as pl

from .._device import WARPGROUP

UNROLL = 8  # Loads of a thread in flight.
PART_MIN = 2048  # Keys of a part, at least: a block that has fewer waits more than it works.
PART_MAX = 8192  # At most: with their 32 KiB of shared memory 6 blocks share an SM.
PART_LAST = 32768  # In the last stage a block has a row for itself.


def ceil_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def candidates(k: int) -> int:
    """Slots for the keys that a block finds: they are sorted by a network, which wants a power of 2, and a search
    for a threshold that leaves some room ends early."""
    return max(WARPGROUP, ceil_power_of_2(k + k // 2))


@dataclasses.dataclass(frozen=True)
class Plan:
    """Statics of one stage: from each part of a row, its `k` largest keys and perhaps some more."""

    cols: int  # Of a row, at least a piece.
    k: int
    vec: int  # Columns that a thread loads at once.
    part: int  # Columns of a part, a multiple of a piece.
    stage: int  # How many stages there were before.

    @property
    def piece(self) -> int:
        return WARPGROUP * self.vec

    @property
    def num_pieces(self) -> int:
        return self.part // self.piece

    @property
    def num_parts(self) -> int:
        return pl.cdiv(self.cols, self.part)

    @property
    def slots(self) -> int:
        """Keys that a part hands on."""
        return candidates(self.k)

    @property
    def unroll(self) -> int:
        return min(UNROLL, self.num_pieces)

    @property
    def num_maxima(self) -> int:
        """Arrays of maxima: 4 maxima for each key that is wanted. 0: there would be too many of them."""
        wanted = ceil_power_of_2(pl.cdiv(4 * self.k, self.piece))
        return wanted if wanted <= self.unroll and 2 * wanted <= self.num_pieces else 0

    @property
    def pad(self) -> int:
        """Indices from here on are those of no column: each stage has 2**24 of its own."""
        return (self.stage + 1) << 24


def plan_of(rows: int, cols: int, itemsize: int, k: int, stage: int, num_sms: int) -> Plan:
    vec = math.gcd(cols, 16 // itemsize)
    while vec > 1 and WARPGROUP * vec > cols:
        vec //= 2
    piece, slots = WARPGROUP * vec, candidates(k)
    if stage > 0 and cols <= PART_LAST:
        part = cols
    else:
        # Large enough to hand on a fraction of its keys, small enough to keep all SMs busy twice.
        part = min(max(PART_MIN, pl.cdiv(rows * cols, 2 * num_sms)), PART_MAX)
        part = min(max(part, 8 * slots), cols)
    num_pieces = pl.cdiv(part, piece)
    unroll = min(UNROLL, num_pieces)
    return Plan(cols, k, vec, pl.cdiv(num_pieces, unroll) * unroll * piece, stage)

# SPDX-License-Identifier: Apache-2.0
"""How a row is cut up for a selection: into parts of a block each, and a part into pieces of a load each."""

import dataclasses
import math

from jax.experimental import pallas as pl

from .._device import WARPGROUP

PIECES_MAX = 32  # Loads unrolled in one go.
REGISTERS = 128  # Keys that a thread keeps.
PART_MIN = 2048  # Keys of a part, at least: a block that has fewer waits more than it works.
REGISTERS_SHARED = 64  # Keys that a thread keeps where few are selected: more blocks then share an SM.


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
    def num_maxima(self) -> int:
        """Pieces of maxima of groups of keys, 4 groups for each key that is wanted; or all pieces, groups of one."""
        return min(self.num_pieces, ceil_power_of_2(pl.cdiv(4 * self.k, self.piece)))

    @property
    def pad(self) -> int:
        """Indices from here on are those of no column: each stage has 2**24 of its own."""
        return (self.stage + 1) << 24


def plan_of(rows: int, cols: int, itemsize: int, k: int, stage: int, num_sms: int) -> Plan:
    vec = math.gcd(cols, 16 // itemsize)
    while vec > 1 and WARPGROUP * vec > cols:
        vec //= 2
    piece = WARPGROUP * vec
    most = WARPGROUP * (REGISTERS_SHARED if 16 * candidates(k) <= WARPGROUP * REGISTERS_SHARED else REGISTERS)
    most = min(most, PIECES_MAX * piece)
    # As many parts as keep all SMs busy twice; but a part must hold several times what it hands on.
    least = max(PART_MIN, 8 * candidates(k))
    if rows * pl.cdiv(cols, most) < 2 * num_sms:
        most = min(most, max(least, pl.cdiv(rows * cols, 2 * num_sms)))
    return Plan(cols, k, vec, pl.cdiv(min(most, cols), piece) * piece, stage)

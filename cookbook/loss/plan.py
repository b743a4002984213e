# SPDX-License-Identifier: Apache-2.0
"""The plan of the kernels along rows: pieces of a row, and the ends of a row that begins within 16 bytes."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .. import _device
from .._device import WARPGROUP

GROUP = 8  # Loads in flight per thread.


@dataclasses.dataclass(frozen=True)
class Plan:
    """Statics of a kernel over the rows of (rows, pitch) logits."""

    rows: int
    cols: int  # Columns that count: the vocabulary. More than `pitch` - 64.
    pitch: int  # Columns of the array, at least 128.
    itemsize: int
    soft_cap: float | None

    @property
    def aligned(self) -> int:
        """Neighbouring columns of 16 bytes, which a thread can load at once where they begin at a multiple of these."""
        return 16 // self.itemsize

    @property
    def has_ends(self) -> bool:
        """Whether rows begin and end within 16 bytes, and are long enough for pieces between."""
        return self.cols == self.pitch and self.pitch % self.aligned > 0 and self.covered >= WARPGROUP * self.aligned

    @property
    def covered(self) -> int:
        """Columns between the ends: as many in every row, wherever it begins."""
        return (self.pitch // self.aligned - 1) * self.aligned

    @property
    def in_pieces(self) -> int:
        """Columns that pieces cover."""
        return self.covered if self.has_ends else self.pitch

    def flat(self, x):
        """Logits, or their gradient, as the kernels take them. Offsets into one dimension can be multiples of 16 bytes
        for the compiler to see; otherwise it loads one value at a time."""
        return x.reshape(-1) if self.has_ends else x

    def piece(self, x_gmem, row, start):
        """The piece that begins `start` columns after the row's first one."""
        if not self.has_ends:
            return x_gmem.at[row, pl.ds(start, self.width)]
        whole, rest = divmod(self.pitch, self.aligned)
        before = lax.div(row * rest + (self.aligned - 1), self.aligned)  # Vectors of 16 bytes are counted.
        at = lambda row, before, start: (row * whole + before) * self.aligned + start
        return x_gmem.at[pl.ds(_device.offsets(self.rows * self.pitch, at, row, before, start), self.width)]

    def column(self, row, start):
        """Where in the row this piece begins."""
        if not self.has_ends:
            return start
        begin = lax.rem(lax.rem(row, self.aligned) * (self.aligned - self.pitch % self.aligned), self.aligned)
        return begin + start

    def value(self, x_gmem, row, column):
        """One value."""
        if not self.has_ends:
            return x_gmem[row, column]
        return x_gmem[self.offset(row, column)]

    def offset(self, row, column):
        at = lambda row, column: row * self.pitch + column
        return _device.offsets(self.rows * self.pitch, at, row, column)

    @property
    def vec(self) -> int:
        """Neighbouring columns that a thread loads at once: 16 bytes, if a row has that many and pieces begin there."""
        if self.has_ends:
            return self.aligned
        return min(math.gcd(self.pitch, self.aligned), 1 << (self.pitch // WARPGROUP).bit_length() - 1)

    @property
    def width(self) -> int:
        """Columns of a piece."""
        return WARPGROUP * self.vec

    @property
    def num_body(self) -> int:
        """Pieces before the last one."""
        return pl.cdiv(self.in_pieces, self.width) - 1

    @property
    def last(self) -> int:
        """The column where the last piece begins, counted from the first piece."""
        return self.in_pieces - self.width

    @property
    def shared(self) -> int:
        """Columns of the last piece that the piece before has too."""
        return self.num_body * self.width - self.last

    @property
    def layout(self):
        return plgpu.Layout.WG_STRIDED((self.width,), self.vec)

    def full(self, value: float):
        return plgpu.layout_cast(jnp.full((self.width,), value, jnp.float32), self.layout)

    def columns(self):
        """The number of each value's column in a piece."""
        return plgpu.broadcasted_iota(jnp.int32, (self.width,), 0, layout=self.layout)

    def load(self, x_gmem, row, start):
        return _device.load(self.piece(x_gmem, row, start), self.layout).astype(jnp.float32)

    def for_each_group(self, body, carry):
        """`body(starts, carry)` for the columns where the pieces of each group begin, but for the last piece."""
        starts = lambda first, count: [(first + i) * self.width for i in range(count)]
        carry = lax.fori_loop(0, self.num_body // GROUP, lambda i, carry: body(starts(i * GROUP, GROUP), carry), carry)
        rest = self.num_body % GROUP
        return body(starts(self.num_body - rest, rest), carry) if rest else carry


@dataclasses.dataclass(frozen=True)
class Ends:
    """The first and the last columns of a row, a value per thread, where pieces do not cover all (`Plan.has_ends`)."""

    plan: Plan
    row: jax.Array

    @property
    def starts(self) -> tuple[int, int]:
        return 0, self.plan.pitch - WARPGROUP

    def refs(self, x_gmem):
        return [x_gmem.at[pl.ds(self.plan.offset(self.row, start), WARPGROUP)] for start in self.starts]

    def load(self, x_gmem):
        return [_device.load(ref, self.layout).astype(jnp.float32) for ref in self.refs(x_gmem)]

    @property
    def layout(self):
        return plgpu.Layout.WG_STRIDED((WARPGROUP,), 1)

    def columns(self):
        """The number of each value's column in the row."""
        thread = plgpu.broadcasted_iota(jnp.int32, (WARPGROUP,), 0, layout=self.layout)
        return [start + thread for start in self.starts]

    def alone(self, values, other: float):
        """`values` in the columns that no piece covers, `other` elsewhere."""
        first, last = self.columns()
        begin = self.plan.column(self.row, 0)
        masks = first < begin, last >= begin + self.plan.covered
        return [jnp.where(mask, x, other) for mask, x in zip(masks, values, strict=True)]

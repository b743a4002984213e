# SPDX-License-Identifier: Apache-2.0
"""The plan of kernels over rows that begin anywhere in memory."""

import dataclasses
import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .. import _device
from .._device import WARPGROUP
from .plan import Plan


@dataclasses.dataclass(frozen=True)
class RaggedPlan(Plan):
    """A row that begins anywhere in memory, in the registers of one warpgroup, by loads of 16 bytes all the same.

    The pieces begin at the row's first aligned column. The columns that they leave at either end are among the first
    or the last 128, two more pieces, which are loaded in words of one column. Arrays are flat; a block is a row."""

    @property
    def vec(self) -> int:
        return 16 // self.itemsize

    @property
    def inner(self) -> int:
        """Columns between the ends, wherever the row begins."""
        return (self.cols - self.vec + 1) // self.vec * self.vec

    @property
    def num_pieces(self) -> int:
        return pl.cdiv(self.inner, self.shape[0])

    @property
    def fits(self) -> bool:
        return self.spread and self.inner >= self.shape[0] and self.num_pieces * self.vec <= self.config.register_values

    @property
    def num_groups(self) -> int:
        return 1

    @property
    def pitch(self) -> int:
        """Columns per row of what `shift` returns."""
        return pl.cdiv(self.cols, self.vec) * self.vec + self.vec

    def shift(self, shared):
        """Values that all rows share, (cols,), as (vec, pitch), flat. Row r begins r columns late: one is aligned as
        the block's row is."""
        return jnp.concatenate([jnp.pad(shared, (r, self.pitch - self.cols - r)) for r in range(self.vec)])

    def near(self, ref):
        """The part of a flat `ref` that rows are counted in (`row_in`): the whole, where offsets of 32 bits reach all
        of it. Otherwise some rows, which lie as those of the whole do."""
        if not self.is_large:
            return ref
        size = self.vec * self.cols
        group = _device.div(lax.axis_index("block"), self.vec)
        return ref.at[pl.ds(_device.offsets(self.rows * self.cols, lambda group: group * size, group), size)]

    def row_in(self, row):
        """The number of the block's row in what `near` returns."""
        return _device.rem(row, self.vec) if self.is_large else row

    @property
    def is_large(self) -> bool:
        return self.rows * self.cols >= 2**31

    def _parts(self, late: bool = False):
        """Each piece: where it starts in what `near` returns, its layout, and the range of its values that no other
        piece covers.

        `late`: where it starts in what `shift` returns."""
        row = self.row_in(lax.axis_index("block")) * self.cols
        row = _device.rem(row, self.vec) * (self.pitch + 1) if late else row
        first = (row + self.vec - 1) // self.vec * self.vec  # Written so, the compiler sees that it is aligned.
        (width,), ends = self.shape, plgpu.Layout.WG_STRIDED((WARPGROUP,), 1)
        for turn in range(0, self.inner, width):
            start = min(turn, self.inner - width)
            yield pl.ds(first + start, width), self.layout, turn - start, width
        last = row + self.cols - WARPGROUP
        yield pl.ds(row, WARPGROUP), ends, 0, first - row
        yield pl.ds(last, WARPGROUP), ends, first + self.inner - last, WARPGROUP

    def pieces(self, x_gmem, row, g):
        # Rows are too long for an array, which is flat too, to have as many values as what `shift` returns.
        late = x_gmem.shape == (self.vec * self.pitch,)
        ref = x_gmem if late else self.near(x_gmem)
        load = lambda where, layout: _device.load(ref.at[where], layout).astype(jnp.float32)
        return (load(where, layout) for where, layout, *_ in self._parts(late))

    def store(self, o_gmem, row, g, pieces):
        ref = self.near(o_gmem)
        for piece, (where, *_) in zip(pieces, self._parts(), strict=True):
            _device.store(ref.at[where], piece.astype(o_gmem.dtype))

    def fresh(self, pieces, g):
        def only(piece, layout, low, high):
            column = plgpu.broadcasted_iota(jnp.int32, piece.shape, 0, layout=layout)
            return jnp.where((column >= low) & (column < high), piece, 0.0)

        return [only(piece, *rest) for piece, (_, *rest) in zip(pieces, self._parts(), strict=True)]

    def reduce(self, combine, reduce, pieces):
        *inner, head, tail = pieces
        return combine(reduce(functools.reduce(combine, inner)), reduce(combine(head, tail)))

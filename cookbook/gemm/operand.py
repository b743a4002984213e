# SPDX-License-Identifier: Apache-2.0
"""An operand of a product: how it lies, how TMA brings a step's tile of it, how tensor cores read that."""

import dataclasses
import itertools

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .. import _device, _host

STEP_BYTES = 128  # Bytes of each row along K in a step: the widest swizzle.


@dataclasses.dataclass(frozen=True)
class Ring(_device.Ring):
    """The ring of a product: a slot holds the tiles of a and of b that a step multiplies."""

    a: _device.Ref  # As tensor cores read them.
    b: _device.Ref
    a_tma: _device.Ref  # As TMA writes them.
    b_tma: _device.Ref
    of_groups: tuple[_device.Ref, ...] = ()  # Numbers of groups along K, for each row of a's tile.


@dataclasses.dataclass(frozen=True)
class Operand:
    """One operand as the kernel reads it: a tile of rows by values of K a step, in pieces that TMA copies at once.

    Tensor cores read tiles of 8 rows by 128 bytes. Pallas has TMA write this layout in whole tiles only. Where it must
    cut at the edge of an array, it writes rows of 128 bytes, which is the same layout if the piece is no wider.
    """

    dtype: jnp.dtype
    rows: int  # Rows of the tile: tile_m of a, tile_n of b.
    tile_k: int  # Values of K per step.
    transposed: bool  # It lies as (K, rows).
    in_pieces: bool = True  # TMA copies pieces of 128 bytes across; False: the tile at once, which must not be cut.
    narrow: bool = False  # The tile has fewer rows than the slot that it is copied to.
    stacked: bool = False  # It is one of several matrices, along a leading axis; a tile's table says which.
    partner: int = 0  # Rows from its tile to another that a step reads too, which follows it in the slot; 0: none.
    of_two: bool = False  # It is two arrays: a step reads the same tile of both, which follow each other in the slot.

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and columns of the tile of a step, as it lies."""
        return (self.tile_k, self.rows) if self.transposed else (self.rows, self.tile_k)

    @property
    def swizzle(self) -> int:
        return min(STEP_BYTES, self.tile[1] * self.dtype.itemsize)

    @property
    def piece(self) -> tuple[int, int]:
        """Rows and columns of what TMA copies at once."""
        return (self.tile[0], self.swizzle // self.dtype.itemsize) if self.in_pieces else self.tile

    @property
    def pieces(self) -> list[tuple[int, int]]:
        """Row and column of each piece, counted in pieces."""
        return list(itertools.product(*(range(t // p) for t, p in zip(self.tile, self.piece, strict=True))))

    @property
    def is_double(self) -> bool:
        """Whether a step reads two tiles of it."""
        return self.partner > 0 or self.of_two

    @property
    def copies(self) -> int:
        """Copies of a step."""
        return (2 if self.is_double else 1) * len(self.pieces)

    def smem(self, slots: int, interpreted: bool):
        shape = (slots, 2, *self.tile) if self.is_double else (slots, *self.tile)
        return swizzled(shape, self.dtype, self.piece if self.in_pieces else None, self.swizzle, interpreted)

    def views(self, smem, interpreted: bool):
        return views(smem, self.piece if self.in_pieces else None, interpreted)

    def at(self, row, k):
        """Indices, no view: where the tile of rows from `row` and values from `k` begins, as the operand lies."""
        return (k, row) if self.transposed else (row, k)

    def copy(self, gmem, at, smem, filled, shared: str | None):
        """Starts the copies of the tile that begins `at` into a slot; blocks along the axis `shared` do it together."""
        if self.is_double:
            one = dataclasses.replace(self, partner=0, of_two=False)
            for i, array in enumerate(gmem if self.of_two else (gmem, gmem)):
                begin = tuple(x + i * self.partner * (dim == self.transposed) for dim, x in enumerate(at))
                one.copy(array, begin, smem.at[i], filled, shared)
            return
        rows, cols = self.piece
        for i, j in self.pieces:
            source = gmem.at[pl.ds(at[0] + i * rows, rows), pl.ds(at[1] + j * cols, cols)]
            target = smem.at[i, j] if self.in_pieces else smem
            if self.narrow:
                target = target.at[pl.ds(0, rows)]
            plgpu.copy_gmem_to_smem(source, target, filled, collective_axes=shared)

    def part(self, smem, wg, rows: int):
        """The `rows` of a slot's tile that warpgroup `wg` multiplies, which may be all of them, as (rows, K)."""
        whole = rows == self.rows
        mine = slice(None) if whole and not self.narrow else pl.ds(0 if whole else wg * rows, rows)
        if not self.transposed:
            return smem.at[0, 0, mine]
        if self.in_pieces:  # A piece for each warpgroup, or one for both.
            return smem.at[0, 0 if whole else wg].T
        return smem.at[:, mine].T

    def pad(self, x):
        """`x` as TMA takes it: padded to whole tiles of the swizzle unless it is copied in pieces. Stacks never are."""
        return x if self.in_pieces or self.stacked else _host.pad_to_tiles(x, _device.SWIZZLE_TILE)


def swizzled(shape, dtype, piece, swizzle: int, interpreted: bool):
    """Shared memory for tiles as tensor cores read them, in pieces; and, if there are any, as TMA writes them.

    The interpreter takes two descriptions for two memories, and cuts off everything: it gets the first alone.
    """
    if piece is not None:
        shape = (*shape[:-2], shape[-2] // piece[0], shape[-1] // piece[1], *piece)
    tile, transform = (8, swizzle // jnp.dtype(dtype).itemsize), plgpu.SwizzleTransform(swizzle)
    tiled = plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform(tile), transform))
    if piece is None or interpreted:
        return tiled
    return plgpu.RefUnion(tiled, plgpu.SMEM(shape, dtype, transforms=(transform,)))


def views(smem, piece, interpreted: bool):
    """(as tensor cores, as TMA sees it) of what `swizzled` described."""
    return (smem, smem) if piece is None or interpreted else tuple(smem)


def is_cut(k: int, rows: int) -> bool:
    """Whether TMA has to cut off tiles of an operand that lies as (K, rows)."""
    return _host.padded_shape((k, rows), _device.SWIZZLE_TILE) != (k, rows)

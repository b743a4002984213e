# SPDX-License-Identifier: Apache-2.0
"""The plan of the kernels over rows (reduce_sum, softmax, rms_norm): which thread holds which part of a row.

One warpgroup is one block. It loads rows from global memory straight into registers, 16 bytes per thread at a time,
works on them there, and stores the result. A long row is spread over all 128 threads; of short rows, each warp has its
own. Many blocks on an SM hide each other's latency, so there is no pipeline and no shared memory to manage.
"""

import dataclasses
import functools
import math

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .. import _device
from .._device import WARP, WARPGROUP

LANES_MIN = 2  # JAX has no layout for fewer threads per row.
UNROLLED_PIECES = 16  # Loads unrolled in one go. More of them (odd row lengths) cost seconds of compile time.
SIDE_BYTES = 8  # The least of a row that threads side by side load at once.
FEW_ROWS = 12 * 132  # Rows so few that a warp each leaves an H100 with too few loads in flight.


@dataclasses.dataclass(frozen=True)
class Config:
    """How a kernel over rows is cut up."""

    # Rows per block. 1: a row is spread over the warpgroup. More: each row lies within one warp, and the rows are a
    # multiple of those that the warps have at once.
    block_rows: int
    register_values: int = 96  # float32 values of a row that a thread keeps; a longer row is read twice.

    def __post_init__(self):
        if self.block_rows < 1 or (self.block_rows > 1 and self.block_rows % 4):
            raise ValueError(f"{self.block_rows=}: must be 1, or a multiple of 4 so that each warp has as many rows")
        if not 8 <= self.register_values <= 192:
            raise ValueError(f"{self.register_values=}: must be from 8 to 192; a thread has 255 registers")


def default_config(rows: int, cols: int, itemsize: int, register_values: int = 96, few_rows: int = FEW_ROWS) -> Config:
    """The configuration for (rows, cols) values of `itemsize` bytes, chosen by times on an H200 and an H100."""
    vec = vec_of(cols, itemsize)
    # A row stays within a warp, which needs no exchange, for up to 16 loads and 128 bytes per thread,
    # or for 24 values where rows are few.
    is_long = cols >= WARP * min(16 * vec, 128 // itemsize, 24 if rows < few_rows else cols)
    if is_long or (rows < WARPGROUP // lanes_of(cols, vec, itemsize) and cols >= WARPGROUP):
        return Config(1, register_values)
    return Config(short_block_rows(rows, cols, itemsize), register_values)


def short_block_rows(rows: int, cols: int, itemsize: int, values: int = 10, most: int = 4, blocks: int = 16 * 132):
    """Rows of a block that has each within a warp: about `values` values per thread, from `most` rows at most, and as
    few as let `blocks` blocks run at once. Each of an H100's 132 SMs has room for the threads of 16."""
    lanes = lanes_of(cols, vec_of(cols, itemsize), itemsize)
    rows_at_once = WARPGROUP // lanes  # In multiples of it, each thread of a warp has something to do.
    return rows_at_once * max(1, min(most, round(values * lanes / cols), pl.cdiv(rows, rows_at_once * blocks)))


def vec_of(cols: int, itemsize: int) -> int:
    """Columns that a thread loads at once from a row within one warp: 16 bytes, or 8 to keep more lanes at work."""
    vec = 16 // itemsize
    return min(math.gcd(cols, vec if cols >= WARP * vec else vec // 2), floor_power_of_2(cols // 2))


def lanes_of(cols: int, vec: int, itemsize: int) -> int:
    """Threads of a warp that share a row: fewer, where the last piece would repeat much of the one before."""
    lanes = min(WARP, floor_power_of_2(cols // vec))
    covered = lambda: pl.cdiv(cols, lanes * vec) * lanes * vec
    while covered() > 1.25 * cols and lanes > LANES_MIN and lanes // 2 * vec * itemsize >= SIDE_BYTES:
        lanes //= 2
    return lanes


@dataclasses.dataclass(frozen=True)
class Plan:
    """Statics of a kernel over the rows of a (rows, cols) matrix, and its loads and stores.

    A row is covered by pieces: each is one load of `vec` neighbouring columns by each of `lanes` threads. The last
    piece is shifted back to end with the row. The columns that it shares with the piece before are computed twice, and
    stored twice with the same value: nothing outside the row is touched, no length needs padding, and only a sum has
    to look away (`fresh`). The rows of the last two tiles overlap in the same way."""

    rows: int
    cols: int
    itemsize: int  # Bytes of a value in memory.
    config: Config

    @property
    def spread(self) -> bool:
        """Whether a row is spread over the warpgroup: its values are 1-D. Otherwise they are (block_rows, columns)."""
        return self.config.block_rows == 1

    @property
    def vec(self) -> int:
        if not self.spread:
            return vec_of(self.cols, self.itemsize)
        return min(math.gcd(self.cols, 16 // self.itemsize), floor_power_of_2(self.cols // WARPGROUP))

    @property
    def lanes(self) -> int:
        """Threads that share a row."""
        return WARPGROUP if self.spread else lanes_of(self.cols, self.vec, self.itemsize)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the values of one piece."""
        piece = self.lanes * self.vec
        return (piece,) if self.spread else (self.config.block_rows, piece)

    @property
    def num_pieces(self) -> int:
        return pl.cdiv(self.cols, self.shape[-1])

    @property
    def num_groups(self) -> int:
        """A group of pieces is what the warpgroup holds in its registers at a time."""
        in_registers = self.config.register_values * WARPGROUP // math.prod(self.shape)
        return pl.cdiv(self.num_pieces, max(1, min(in_registers, UNROLLED_PIECES)))

    @property
    def group(self) -> int:
        """Pieces per group."""
        return pl.cdiv(self.num_pieces, self.num_groups)

    @property
    def num_blocks(self) -> int:
        return self.rows // self.config.block_rows

    @property
    def layout(self):
        """Each thread holds runs of `vec` columns; `lanes` threads side by side share a row."""
        if self.spread:
            return plgpu.Layout.WG_STRIDED(self.shape, self.vec)
        return _device.lanes_layout(self.lanes, self.shape[-1], self.vec)

    def tiles(self, num_blocks: int):
        """How many tiles this block visits, and a function of 0, 1, ... that gives a tile and its first row.

        Each `num_blocks`-th tile is this block's. If rows are left over, the block of the last tile visits one more:
        rows that two tiles share are stored by one block, both times with the same bits.
        """
        block, block_rows = lax.axis_index("block"), self.config.block_rows
        turns = 1 if num_blocks == self.num_blocks else (self.num_blocks - 1 - block) // num_blocks + 1
        if self.rows % block_rows == 0:
            return turns, lambda i: (block + i * num_blocks, (block + i * num_blocks) * block_rows)
        turns += jnp.where(block == (self.num_blocks - 1) % num_blocks, 1, 0)

        def tile(i):
            index = jnp.minimum(block + i * num_blocks, self.num_blocks)
            return index, jnp.minimum(index * block_rows, self.rows - block_rows)

        return turns, tile

    def for_each_tile(self, visit):
        """Calls `visit(row)` with the first row of each tile of this block of `num_blocks`."""
        turns, tile = self.tiles(self.num_blocks)
        if isinstance(turns, int):
            visit(tile(0)[1])
        else:
            pl.loop(0, turns)(lambda i: visit(tile(i)[1]))

    def starts(self, g):
        """For each piece of group `g`: the column where its turn is, and the column where it starts."""
        turns = [(g * self.group + i) * self.shape[-1] for i in range(self.group)]
        last = self.cols - self.shape[-1]
        return [(turn, min(turn, last) if isinstance(turn, int) else jnp.minimum(turn, last)) for turn in turns]

    def load(self, x_gmem, row, g):
        """The pieces of group `g` in float32. `x_gmem` is (rows, cols), or (cols,) for values that all rows share."""
        return list(self.pieces(x_gmem, row, g))

    def pieces(self, x_gmem, row, g):
        """Yields what `load` returns: each piece is loaded when it is asked for."""
        return (self._load_piece(x_gmem, row, pl.ds(start, self.shape[-1])) for _, start in self.starts(g))

    def _load_piece(self, x_gmem, row, columns):
        if x_gmem.ndim == 1 and not self.spread:
            shared = _device.load(x_gmem.at[columns], self.layout.reduce(0))
            return lax.broadcast_in_dim(shared.astype(jnp.float32), self.shape, [1])
        piece = x_gmem.at[columns] if x_gmem.ndim == 1 else self._at(x_gmem, row, columns)
        return _device.load(piece, self.layout).astype(jnp.float32)

    def _at(self, ref, row, columns):
        return ref.at[row, columns] if self.spread else ref.at[pl.ds(row, self.config.block_rows), columns]

    def store(self, o_gmem, row, g, pieces):
        for p, piece in zip(range(self.group), pieces, strict=True):
            self.store_piece(o_gmem, row, g, p, piece)

    def store_piece(self, o_gmem, row, g, p: int, piece):
        """Stores piece `p` of group `g`."""
        _, start = self.starts(g)[p]
        _device.store(self._at(o_gmem, row, pl.ds(start, self.shape[-1])), piece.astype(o_gmem.dtype))

    def fresh(self, pieces, g):
        """The pieces of group `g` with zeros in the columns that an earlier piece holds already."""
        if self.cols == self.num_groups * self.group * self.shape[-1]:
            return pieces
        column = plgpu.broadcasted_iota(jnp.int32, self.shape, len(self.shape) - 1, layout=self.layout)
        return [
            piece if isinstance(turn, int) and turn == start else jnp.where(column >= turn - start, piece, 0.0)
            for piece, (turn, start) in zip(pieces, self.starts(g), strict=True)
        ]

    def fresh_rows(self, value, tile, row):
        """`value`, as `reduce` returns it, with zeros in the rows that an earlier tile holds already."""
        if self.rows % self.config.block_rows == 0:
            return value
        index = plgpu.broadcasted_iota(jnp.int32, self.shape, 0, layout=self.layout)
        return jnp.where(index >= tile * self.config.block_rows - row, value, 0.0)

    def zeros(self):
        return plgpu.layout_cast(jnp.zeros(self.shape, jnp.float32), self.layout)

    def per_row(self, value: float):
        """`value` as what `reduce` returns."""
        full = jnp.full(() if self.spread else self.shape, value, jnp.float32)
        return full if self.spread else plgpu.layout_cast(full, self.layout)

    def reduce(self, combine, reduce, pieces):
        """One value per row: the pieces combined element by element, then reduced across the threads of the row.

        It is a scalar when the row is spread over the warpgroup, and otherwise broadcast over the row.
        """
        combined = functools.reduce(combine, pieces)
        return reduce(combined) if self.spread else lax.broadcast_in_dim(reduce(combined, axis=1), self.shape, [0])

    def store_per_row(self, o_gmem, row, value):
        """Stores one value per row, given as `reduce` returns it, in a vector."""
        if self.spread:
            o_gmem[row] = value
        else:
            _device.store(o_gmem.at[pl.ds(row, self.config.block_rows)], jnp.max(value, axis=1))


def floor_power_of_2(n: int) -> int:
    return 1 << max(n.bit_length() - 1, 0)

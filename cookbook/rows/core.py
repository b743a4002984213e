# SPDX-License-Identifier: Apache-2.0
"""Shared parts of the kernels over rows (reduce_sum, softmax, rms_norm): which thread holds which part of a row.

One warpgroup is one block. It loads rows from global memory straight into registers, 16 bytes per thread at a time,
works on them there, and stores the result. A long row is spread over all 128 threads; of short rows, each warp has its
own. Many blocks on an SM hide each other's latency, so there is no pipeline and no shared memory to manage.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .. import _device, _host
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
    vec = _vec(cols, itemsize)
    # A row stays within a warp, which needs no exchange, for up to 16 loads and 128 bytes per thread,
    # or for 24 values where rows are few.
    is_long = cols >= WARP * min(16 * vec, 128 // itemsize, 24 if rows < few_rows else cols)
    if is_long or (rows < WARPGROUP // _lanes(cols, vec, itemsize) and cols >= WARPGROUP):
        return Config(1, register_values)
    return Config(short_block_rows(rows, cols, itemsize), register_values)


def short_block_rows(rows: int, cols: int, itemsize: int, values: int = 10, most: int = 4, blocks: int = 16 * 132):
    """Rows of a block that has each within a warp: about `values` values per thread, from `most` rows at most, and as
    few as let `blocks` blocks run at once. Each of an H100's 132 SMs has room for the threads of 16."""
    lanes = _lanes(cols, _vec(cols, itemsize), itemsize)
    rows_at_once = WARPGROUP // lanes  # In multiples of it, each thread of a warp has something to do.
    return rows_at_once * max(1, min(most, round(values * lanes / cols), pl.cdiv(rows, rows_at_once * blocks)))


def _vec(cols: int, itemsize: int) -> int:
    """Columns that a thread loads at once from a row within one warp: 16 bytes, or 8 to keep more lanes at work."""
    vec = 16 // itemsize
    return min(math.gcd(cols, vec if cols >= WARP * vec else vec // 2), floor_power_of_2(cols // 2))


def _lanes(cols: int, vec: int, itemsize: int) -> int:
    """Threads of a warp that share a row: fewer, where the last piece would repeat much of the one before."""
    lanes = min(WARP, floor_power_of_2(cols // vec))
    covered = lambda: pl.cdiv(cols, lanes * vec) * lanes * vec
    while covered() > 1.25 * cols and lanes > LANES_MIN and lanes // 2 * vec * itemsize >= SIDE_BYTES:
        lanes //= 2
    return lanes


def as_rows(x, fill, itemsize: int | None = None):
    """`x` as a matrix whose rows are the last axis: (rows, cols), with a lone column or a handful of rows padded.

    `itemsize`: of the array that the plan is made for, if it is not `x`.
    """
    x = x.reshape(-1, x.shape[-1])
    shape = _padded_shape(*x.shape, itemsize or x.dtype.itemsize)
    pads = [(0, full - size) for full, size in zip(shape, x.shape, strict=True)]
    return x if x.shape == shape else jnp.pad(x, pads, constant_values=fill)


def _padded_shape(rows: int, cols: int, itemsize: int) -> tuple[int, int]:
    """A thread's share of a row is found by halving, which ends at two columns and at four rows."""
    cols = max(cols, 2)
    return max(rows, default_config(rows, cols, itemsize).block_rows), cols


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
            return _vec(self.cols, self.itemsize)
        return min(math.gcd(self.cols, 16 // self.itemsize), floor_power_of_2(self.cols // WARPGROUP))

    @property
    def lanes(self) -> int:
        """Threads that share a row."""
        return WARPGROUP if self.spread else _lanes(self.cols, self.vec, self.itemsize)

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
        return [self._load_piece(x_gmem, row, pl.ds(start, self.shape[-1])) for _, start in self.starts(g)]

    def _load_piece(self, x_gmem, row, columns):
        if x_gmem.ndim == 1 and not self.spread:
            shared = _device.load(x_gmem.at[columns], self.layout.reduce(0))
            return lax.broadcast_in_dim(shared.astype(jnp.float32), self.shape, [1])
        piece = x_gmem.at[columns] if x_gmem.ndim == 1 else self._at(x_gmem, row, columns)
        return _device.load(piece, self.layout).astype(jnp.float32)

    def _at(self, ref, row, columns):
        return ref.at[row, columns] if self.spread else ref.at[pl.ds(row, self.config.block_rows), columns]

    def store(self, o_gmem, row, g, pieces):
        for piece, (_, start) in zip(pieces, self.starts(g), strict=True):
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

    def load(self, x_gmem, row, g):
        # Rows are too long for an array, which is flat too, to have as many values as what `shift` returns.
        late = x_gmem.shape == (self.vec * self.pitch,)
        ref = x_gmem if late else self.near(x_gmem)
        load = lambda where, layout: _device.load(ref.at[where], layout).astype(jnp.float32)
        return [load(where, layout) for where, layout, *_ in self._parts(late)]

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


def plan_rows(rows: int, cols: int, itemsize: int, config: Config | None, register_values: int) -> Plan:
    """The plan of a kernel over rows: by a caller's `config`, or chosen by shape."""
    return plan_by(config or default_config(rows, cols, itemsize, register_values), rows, cols, itemsize)


def plan_by(config: Config, rows: int, cols: int, itemsize: int) -> Plan:
    """The plan by a `config` that fits."""
    plan, ragged = (kind(rows, cols, itemsize, config) for kind in (Plan, RaggedPlan))
    # A row of odd length takes so many loads that not all are in flight at once.
    return ragged if plan.num_groups > 1 and ragged.fits else plan


def require_config(op: str, x, config: Config | None) -> Config | None:
    """`config`, by which the kernels can work on the rows of `x`, or None.

    Raises:
      ValueError: it is no `Config`, or rows of this length, or so few, do not have it.
    """
    if _host.require_config(op, config, Config) is None or x.size == 0:
        return None
    block_rows, given = config.block_rows, x.size // x.shape[-1]
    rows, cols = _padded_shape(given, x.shape[-1], x.dtype.itemsize)
    at_once = WARPGROUP // _lanes(cols, _vec(cols, x.dtype.itemsize), x.dtype.itemsize)
    rule = None
    if block_rows == 1 and cols < WARPGROUP:
        rule = f"1 is for rows of {WARPGROUP} values and more, and these have {cols}: pass {at_once}"
    elif block_rows > 1 and block_rows % at_once:
        rule = f"must be a multiple of {at_once} for rows of {cols} values: pass {at_once}"
    elif block_rows > rows:
        rule = f"must be at most {rows} for {given} rows: pass fewer"
    if rule:
        raise ValueError(f"{_host.PACKAGE}.{op}: config.block_rows={block_rows}; {rule}, or leave config out")
    return config


def launch(one_row, plan: Plan, out_type, params, arrays, shared=()):
    """Output of `one_row(plan, *arrays, *shared, out, row)`, called tile by tile for the rows of `arrays`.

    `shared`: arrays of one value for each column. `out_type` may be a tuple; then `one_row` gets as many outputs, and
    as many are returned.
    """
    stored = out_type
    if isinstance(plan, RaggedPlan):
        arrays, shared = [x.reshape(-1) for x in arrays], [plan.shift(x) for x in shared]
        stored = jax.tree.map(lambda out: jax.ShapeDtypeStruct((math.prod(out.shape),), out.dtype), out_type)
    # JAX puts barriers around each store, for kernels that read what they have stored. None of these does. Without
    # barriers each warp goes on with its own rows, which is faster, most of all for short ones.
    params = dataclasses.replace(params, unsafe_no_auto_barriers=True)
    function = one_row.func if isinstance(one_row, functools.partial) else one_row
    # Profilers show the kernel by the name of what it does with a row.
    kernel = functools.wraps(function)(lambda *refs: plan.for_each_tile(functools.partial(one_row, plan, *refs)))
    call = _host.kernel(kernel, out_type=stored, grid=(plan.num_blocks,), grid_names=("block",), compiler_params=params)
    return jax.tree.map(lambda out, like: out.reshape(like.shape), call(*arrays, *shared), out_type)


def require_rows(op: str, name: str, x):
    """`x` as a JAX array that the kernels over rows take."""
    x = require_floats(op, name, x)
    _host.require_indices(op, rows=math.prod(x.shape[:-1]))
    if x.shape[-1] > 65536:
        raise ValueError(
            f"{_host.PACKAGE}.{op}: {name} has rows of {x.shape[-1]}; at most 65536 were tested: split the row"
        )
    return x


def require_floats(op: str, name: str, x):
    x = _host.as_array(op, name, x)
    if x.ndim == 0:
        raise ValueError(f"{_host.PACKAGE}.{op}: {name} is a scalar; it must have at least one axis")
    if x.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise ValueError(
            f"{_host.PACKAGE}.{op}: {name}.dtype is {x.dtype}; must be float32, bfloat16 or float16: cast it"
        )
    return x


def floor_power_of_2(n: int) -> int:
    return 1 << max(n.bit_length() - 1, 0)

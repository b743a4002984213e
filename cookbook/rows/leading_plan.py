# SPDX-License-Identifier: Apache-2.0
"""How a sum over the leading axis is cut up, and which way costs least. `leading.py` has the words and the kernel."""

import dataclasses
import functools
import itertools
import math

import jax.numpy as jnp
from jax.experimental import pallas as pl

from .. import _device, _host
from .._device import WARPGROUP

WARPGROUPS = 4  # Warpgroups of a block.
BYTES_IN_FLIGHT = 128  # Bytes of x that a thread loads before it adds, in at most 16 loads.
CHUNK = WARPGROUP  # Columns that a warpgroup adds up at the end, one per thread.
# Microseconds of a kernel, of loads in flight together, and of a place that a column is added up from; fitted, as are
# the rates, to the times of many plans on an H200.
LAUNCH_US, LOADS_US, PLACE_US = 1.0, 0.31, 0.016
CACHE_BYTES = 50e6  # A smaller matrix may be in the GPU's cache.
# Bytes that the GPU loads in a microsecond beside all that: from its cache, from memory, and from memory in short runs.
CACHE_RATE, MEMORY_RATE, SHORT_RATE = 8.4e6, 5.6e6, 5.0e6


@dataclasses.dataclass(frozen=True)
class LeadingPlan:
    """Statics of one pass over the leading axis of (rows, cols), which lies flat in memory."""

    rows: int
    cols: int
    itemsize: int  # Bytes of a value in memory.
    vec: int = 1  # Neighbouring values that a thread loads at once.
    windows_across: int = 1  # Warpgroups whose windows lie side by side.
    rows_per_line: int = 1
    rows_kept: int = 1  # Rows of sums that a block leaves, side by side: not all rows of a line are added up here.
    blocks_per_tile: int = 1  # Blocks that share the lines of a tile.
    warpgroups: int = WARPGROUPS
    interpreted: bool = False

    @property
    def line_size(self) -> int:
        """Values of a line."""
        return self.rows_per_line * self.cols

    @property
    def window_size(self) -> int:
        """Values that a warpgroup loads at once."""
        return WARPGROUP * self.vec

    @property
    def span_size(self) -> int:
        """Values that windows side by side cover."""
        return self.windows_across * self.window_size

    @property
    def gap(self) -> int:
        """Values that a span may begin before its line or tile does, to be aligned."""
        return self.vec if self.line_size % self.vec else 0

    @property
    def width(self) -> int:
        """Columns of a tile of a line."""
        return min(self.line_size, self.span_size - self.gap)

    @property
    def num_tiles(self) -> int:
        return pl.cdiv(self.line_size, self.width)

    @property
    def overlap(self) -> int:
        """Columns that the last tile shares with the one before."""
        return self.num_tiles * self.width - self.line_size

    def column(self, tile, unit: int = 1):
        """First column of a tile, in units of so many. The last tile is shifted back to end with the line."""
        return jnp.minimum(tile * (self.width // unit), (self.line_size - self.width) // unit)

    def first_vector(self, line, tile):
        """Where a span for the tile of a line begins, in units of `vec` values: the compiler sees aligned loads."""
        if self.gap:
            return _device.div(line * self.line_size + self.column(tile), self.vec)
        return line * (self.line_size // self.vec) + self.column(tile, self.vec)

    @property
    def spans_at_once(self) -> int:
        """Spans that a block loads at once."""
        return self.warpgroups // self.windows_across

    @property
    def lines_per_step(self) -> int:
        """Lines from one load of a thread to its next: a multiple of `vec` values."""
        return self.spans_at_once * self.blocks_per_tile

    @property
    def num_lines(self) -> int:
        """Lines that are loaded in windows; those have to end inside the matrix."""
        return max(0, (self.rows * self.cols - self.span_size - (self.line_size - self.width)) // self.line_size + 1)

    @property
    def leftover(self) -> int:
        """Values after these lines, at the end of the matrix."""
        return self.rows * self.cols - self.num_lines * self.line_size

    @property
    def leftover_span(self) -> int:
        """Values that cover those left over of a tile: as many for each thread of the block."""
        unit = self.warpgroups * WARPGROUP
        return pl.cdiv(self.span_size, unit) * unit if self.leftover else 0

    @property
    def loads_in_flight(self) -> int:
        """Loads of a thread that are in flight at once."""
        return min(16, BYTES_IN_FLIGHT // (self.vec * self.itemsize))

    @property
    def rows_of_sums(self) -> int:
        """Rows of `cols` sums that all blocks leave; several take another pass."""
        return self.blocks_per_tile * self.rows_kept

    @property
    def columns_of_block(self) -> int:
        """Columns of the result that one block stores."""
        return self.rows_kept * self.cols if self.num_tiles == 1 else self.width

    @property
    def places_per_span(self) -> int:
        """Places of a span that hold one of the block's columns."""
        return self.rows_per_line // self.rows_kept

    @property
    def leftover_places(self) -> int:
        """Places of the values left over that hold one of the block's columns."""
        return pl.cdiv(self.leftover, self.rows_kept * self.cols) if self.num_tiles == 1 else 1

    @property
    def zeros_after(self) -> int:
        """Zeros after the values left over, whose last part may be incomplete."""
        return pl.cdiv(self.rows_kept * self.cols, CHUNK) * CHUNK if self.rows_kept > 1 else 0

    @property
    def smem_values(self) -> int:
        """Sums of spans, values left over, zeros, and two chunks: one that loads may end in, one of the result."""
        return self.spans_at_once * self.span_size + self.leftover_span + self.zeros_after + 2 * CHUNK


def candidates(rows: int, cols: int, itemsize: int, target: _host.Target, twice: bool, foldable: bool):
    """Plans of the first of two kernels, or of the only one. Without `foldable` a line is one row."""
    rows_kept = pl.cdiv(CHUNK, cols) if twice else 1
    warpgroups = 2 if target.interpreted else WARPGROUPS  # The interpreter has few threads.
    for load_bytes, windows in itertools.product((4, 8, 16), (1, warpgroups)):
        vec = load_bytes // itemsize
        span = windows * WARPGROUP * vec
        if windows > 1 and cols > span - vec:  # Only lines take several windows.
            continue
        rows_per_line = 1
        if foldable:  # Rows that a span holds wherever it begins: a multiple of those kept, where possible.
            fit = span // cols if span // cols * cols % vec == 0 else (span - vec) // cols
            rows_per_line = max(1, fit // rows_kept * rows_kept)
        plan = LeadingPlan(
            rows, cols, itemsize, vec, windows, rows_per_line, rows_kept if rows_per_line % rows_kept == 0 else 1,
            warpgroups=warpgroups, interpreted=target.interpreted,
        )  # fmt: skip
        if not foldable and plan.leftover > cols:
            continue
        multiple = vec // math.gcd(vec, plan.spans_at_once * plan.line_size)  # Other numbers of blocks misalign loads.
        most = [blocks // plan.num_tiles for blocks in (target.num_sms // 2, target.num_sms, 2 * target.num_sms)]
        for blocks in [min(n, plan.num_lines // plan.spans_at_once) for n in most] if twice else [1]:
            if blocks >= multiple:
                yield dataclasses.replace(plan, blocks_per_tile=blocks // multiple * multiple)


def cost(plan: LeadingPlan, target: _host.Target) -> float:
    """Predicted microseconds of a plan, with the second kernel where it leaves several rows of sums."""
    narrow = plan.vec * plan.itemsize <= 4  # Two blocks of wider loads lack registers to run on an SM at once.
    waves = pl.cdiv(plan.num_tiles * plan.blocks_per_tile, target.num_sms * (1 + narrow))
    rounds = waves * pl.cdiv(pl.cdiv(plan.num_lines, plan.lines_per_step), plan.loads_in_flight)
    chunks = pl.cdiv(plan.columns_of_block, CHUNK * plan.warpgroups)
    places = (plan.places_per_span * plan.spans_at_once + plan.leftover_places) * chunks
    loaded = plan.num_lines * plan.num_tiles * plan.span_size * plan.itemsize
    rate = CACHE_RATE if loaded < CACHE_BYTES else SHORT_RATE if narrow and plan.windows_across == 1 else MEMORY_RATE
    us = LAUNCH_US + rounds * LOADS_US + places * PLACE_US + loaded / rate
    if plan.rows_of_sums == 1:
        return us
    return us + cost(choose(plan.rows_of_sums, plan.cols, 4, target, once=True), target)


@functools.lru_cache(maxsize=1024)
def choose(rows: int, cols: int, itemsize: int, target: _host.Target, foldable: bool = True, once: bool = False):
    """The plan that costs least: of the only kernel, or unless it is `once` of the first of two."""
    ways = [candidates(rows, cols, itemsize, target, twice, foldable) for twice in ([False] if once else [False, True])]
    return min(itertools.chain(*ways), key=lambda plan: cost(plan, target))

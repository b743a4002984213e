# SPDX-License-Identifier: Apache-2.0
"""Sums over the leading axis of a matrix: reduce_sum's, and the second stage of rms_norm's gradient.

The matrix is read as it lies in memory, whatever its row length. A warpgroup loads a *window* at once: neighbouring
values, `vec` a thread. Its next window lies a whole number of rows and of `vec` values further on, so that a thread
meets the same columns again, and loads of `vec` values stay aligned. Where rows are short, a window, or the windows of
a block side by side, cover a *line*: one row or some. Where they are long, each block has a tile of columns.

    barrier    arrivals                                  who waits
    summed     each warpgroup: its sums are in SMEM      each warpgroup

Then the warpgroups share out the columns of the block. For each, they add up what the windows hold of it. A window
that does not fit between its row and the end of the matrix is not loaded: the values that are left over are loaded one
a thread by the first block, and added last.

All adds are in a fixed order, so runs are equal to the bit; atomic additions would not be. Where one kernel has too few
blocks for the GPU, there are two: the first sums stretches of lines, the second adds up its sums.
"""

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .. import _device, _host
from . import core

WARPGROUPS = 4  # Warpgroups of a block.
BYTES_IN_FLIGHT = 128  # Bytes of x that a thread loads before it adds, in at most 16 loads.
CHUNK = core.WARPGROUP  # Columns that a warpgroup adds up at the end, one a thread.
CHUNK_LAYOUT = plgpu.Layout.WG_STRIDED((CHUNK,), 1)
VALUES_MAX = 2**31 - 2**16  # Indices have 32 bits.
UNROLLED_PLACES = 64  # Places of a column that are added up without a loop.
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
    windows: int = 1  # Warpgroups whose windows lie side by side.
    side: int = 1  # Rows of a line.
    kept: int = 1  # Rows side by side in the result: not all of a line's are added up here.
    stretches: int = 1  # Blocks that share the lines of a tile; each leaves a row of sums.
    warpgroups: int = WARPGROUPS
    interpreted: bool = False

    @property
    def line(self) -> int:
        return self.side * self.cols

    @property
    def window(self) -> int:
        return core.WARPGROUP * self.vec

    @property
    def span(self) -> int:
        """Values that windows side by side cover."""
        return self.windows * self.window

    @property
    def slack(self) -> int:
        """Values that a span may begin before its line or tile does, to be aligned."""
        return self.vec if self.line % self.vec else 0

    @property
    def width(self) -> int:
        """Columns of a tile of a line."""
        return min(self.line, self.span - self.slack)

    @property
    def num_tiles(self) -> int:
        return pl.cdiv(self.line, self.width)

    @property
    def shared(self) -> int:
        """Columns that the last tile shares with the one before."""
        return self.num_tiles * self.width - self.line

    def column(self, tile, unit: int = 1):
        """First column of a tile, in units of so many. The last tile is shifted back to end with the line."""
        return jnp.minimum(tile * (self.width // unit), (self.line - self.width) // unit)

    def word(self, line, tile):
        """Where a span for the tile of a line begins, in units of `vec` values: the compiler sees aligned loads."""
        if self.slack:
            return _device.div(line * self.line + self.column(tile), self.vec)
        return line * (self.line // self.vec) + self.column(tile, self.vec)

    @property
    def groups(self) -> int:
        """Spans that a block loads at once."""
        return self.warpgroups // self.windows

    @property
    def stride(self) -> int:
        """Lines from one load of a thread to its next: a multiple of `vec` values."""
        return self.groups * self.stretches

    @property
    def lines(self) -> int:
        """Lines that are loaded in windows; those have to end inside the matrix."""
        return max(0, (self.rows * self.cols - self.span - (self.line - self.width)) // self.line + 1)

    @property
    def left(self) -> int:
        """Values after these lines."""
        return self.rows * self.cols - self.lines * self.line

    @property
    def left_span(self) -> int:
        """Values that cover those left over of a tile: as many for each thread of the block."""
        unit = self.warpgroups * core.WARPGROUP
        return pl.cdiv(self.span, unit) * unit if self.left else 0

    @property
    def loads(self) -> int:
        """Loads of a thread that are in flight at once."""
        return min(16, BYTES_IN_FLIGHT // (self.vec * self.itemsize))

    @property
    def left_rows(self) -> int:
        """Rows of `cols` sums in the result; several take another pass."""
        return self.stretches * self.kept

    @property
    def sums(self) -> int:
        """Columns of the result that one block stores."""
        return self.kept * self.cols if self.num_tiles == 1 else self.width

    @property
    def parts(self) -> int:
        """Places of a span that hold one of the block's columns."""
        return self.side // self.kept

    @property
    def left_parts(self) -> int:
        """The same of what is left over."""
        return pl.cdiv(self.left, self.kept * self.cols) if self.num_tiles == 1 else 1

    @property
    def zeros(self) -> int:
        """Zeros after the values left over, whose last part may be incomplete."""
        return pl.cdiv(self.kept * self.cols, CHUNK) * CHUNK if self.kept > 1 else 0

    @property
    def smem_values(self) -> int:
        """Sums of spans, values left over, zeros, and two chunks: one that loads may end in, one of the result."""
        return self.groups * self.span + self.left_span + self.zeros + 2 * CHUNK


def _product(factors, start, line, size: int, layout):
    """Product of `factors` from `start` on, in float32. A factor of one value a row is that of the row `line`."""
    load = lambda x: plgpu.load(x.at[pl.ds(start, size)], layout=layout, optimized=False).astype(jnp.float32)
    return math.prod(load(x) if x.shape == factors[0].shape else x[line] for x in factors)


def _zeros(size: int, layout):
    return plgpu.layout_cast(jnp.zeros((size,), jnp.float32), layout)


def _sum_lines(factors, first, tile, window, plan: LeadingPlan):
    """Sum of this warpgroup's windows of the lines `first`, `first + plan.stride` and so on."""
    word = plan.word(first, tile) + window * core.WARPGROUP
    step, layout = plan.stride * plan.line // plan.vec, plgpu.Layout.WG_STRIDED((plan.window,), plan.vec)
    load = lambda word, line: _product(factors, word * plan.vec, line, plan.window, layout)
    value = lambda i: load(word + i * step, first + i * plan.stride)

    whole, loads = plan.lines // plan.stride, plan.loads  # Each sum has `whole` loads, or one more.
    add = lambda turn, total: functools.reduce(jnp.add, [value(turn * loads + i) for i in range(loads)], total)
    total = lax.fori_loop(0, whole // loads, add, _zeros(plan.window, layout))
    rest = [value(i) for i in range(whole // loads * loads, whole)]
    if plan.lines % plan.stride:
        has_more = first + whole * plan.stride < plan.lines  # The others load the start of the matrix.
        at = jnp.where(has_more, word + whole * step, window * core.WARPGROUP)
        last = load(at, jnp.where(has_more, first + whole * plan.stride, 0))
        rest.append(jnp.where(jnp.full((plan.window,), has_more), last, 0.0))
    return functools.reduce(jnp.add, rest, total)


def _kernel(factors, o_gmem, *, plan: LeadingPlan, sums_smem, summed):
    tile, stretch, warpgroup = (lax.axis_index(name) for name in ("tile", "stretch", "warpgroup"))
    group, window = _device.div(warpgroup, plan.windows), _device.rem(warpgroup, plan.windows)
    column = plan.column(tile)
    first_line = lambda group: stretch * plan.groups + group
    store = lambda at, value: _device.store(sums_smem.at[pl.ds(at, *value.shape)], value)

    left_smem = plan.groups * plan.span
    mine, left_at = plan.left_span // plan.warpgroups, plan.lines * plan.line + column
    left_start = jnp.minimum(left_at, plan.rows * plan.cols - plan.left_span)
    if plan.left:  # Each warpgroup loads its share now and stores it later, so that none waits for it.
        layout = plgpu.Layout.WG_STRIDED((mine,), 1)
        left = _product(factors, left_start + warpgroup * mine, plan.rows - 1, mine, layout)

    store(warpgroup * plan.window, _sum_lines(factors, first_line(group), tile, window, plan))
    if plan.left:
        index = plgpu.broadcasted_iota(jnp.int32, (mine,), 0, layout=layout) + warpgroup * mine
        is_left = (index >= left_at - left_start) & (stretch == 0)
        store(left_smem + warpgroup * mine, jnp.where(is_left, left, 0.0))

    @pl.loop(warpgroup, plan.zeros // CHUNK, step=plan.warpgroups)
    def _(i):
        store(left_smem + plan.left_span + i * CHUNK, _zeros(CHUNK, CHUNK_LAYOUT))

    plgpu.barrier_arrive(summed)
    plgpu.barrier_wait(summed)

    aligned = lambda group: _device.rem(first_line(group) * plan.line + column, plan.vec) if plan.slack else 0
    begins = [group * plan.span + aligned(group) for group in range(plan.groups)]  # The block's columns in each span.
    skip = jnp.maximum(0, tile - plan.num_tiles + 2) * plan.shared

    def add_up(chunk):
        low = jnp.minimum(skip + chunk * CHUNK, max(0, plan.sums - CHUNK))

        def add(begins, parts, total):
            load = lambda at: plgpu.load(sums_smem.at[pl.ds(at, CHUNK)], layout=CHUNK_LAYOUT, optimized=False)
            places = lambda part: [at + part * plan.kept * plan.cols + low for at in begins]
            one_part = lambda part, total: functools.reduce(jnp.add, [load(at) for at in places(part)], total)
            if parts * len(begins) > UNROLLED_PLACES:
                return lax.fori_loop(0, parts, one_part, total)
            return functools.reduce(lambda total, part: one_part(part, total), range(parts), total)

        total = add(begins, plan.parts, _zeros(CHUNK, CHUNK_LAYOUT))
        if plan.left:
            total = add([left_smem + left_at - left_start], plan.left_parts, total)
        if plan.sums < CHUNK:
            return store(plan.smem_values - CHUNK, total)
        new = jnp.minimum(CHUNK, plan.sums - skip - chunk * CHUNK)
        _store(o_gmem.at[stretch], column + low, total.astype(o_gmem.dtype), new, plan)

    @pl.loop(0, pl.cdiv(plan.sums, CHUNK * plan.warpgroups))
    def _(i):
        chunk = i * plan.warpgroups + warpgroup
        pl.when(skip + chunk * CHUNK < plan.sums)(lambda: add_up(chunk))

    if plan.sums < CHUNK:  # Fewer columns than a warpgroup has threads: one after the other.
        plgpu.barrier_arrive(summed)
        plgpu.barrier_wait(summed)

        @pl.loop(warpgroup, plan.sums, step=plan.warpgroups)
        def _(i):
            o_gmem[stretch, i] = sums_smem[plan.smem_values - CHUNK + i].astype(o_gmem.dtype)


def _store(o_gmem, column, sums, new, plan: LeadingPlan):
    """Stores a chunk of sums, the last `new` of which no other chunk has. Others store the rest too, the same to the
    bit; the interpreter takes that for a race, so that there the chunk stores the new ones alone."""
    if not plan.interpreted:
        return _device.store(o_gmem.at[pl.ds(column, CHUNK)], sums)
    for size in {CHUNK, *((columns - 1) % CHUNK + 1 for columns in (plan.sums, plan.sums - plan.shared))}:
        old = CHUNK - size
        pl.when(new == size)(lambda old=old, size=size: _device.store(o_gmem.at[pl.ds(column + old, size)], sums[old:]))


def candidates(rows: int, cols: int, itemsize: int, target: _host.Target, twice: bool, foldable: bool):
    """Plans of the first of two kernels, or of the only one. Without `foldable` a line is one row."""
    kept = pl.cdiv(CHUNK, cols) if twice else 1
    warpgroups = 2 if target.interpreted else WARPGROUPS  # The interpreter has few threads.
    for load_bytes, windows in itertools.product((4, 8, 16), (1, warpgroups)):
        vec = load_bytes // itemsize
        span = windows * core.WARPGROUP * vec
        if windows > 1 and cols > span - vec:  # Only lines take several windows.
            continue
        side = span // cols  # Rows that a span holds wherever it begins: a multiple of those kept, where possible.
        if side * cols % vec:
            side = (span - vec) // cols
        side = max(1, side // kept * kept) if foldable else 1
        plan = LeadingPlan(rows, cols, itemsize, vec, windows, side, kept if side % kept == 0 else 1,
                           warpgroups=warpgroups, interpreted=target.interpreted)  # fmt: skip
        if not foldable and plan.left > cols:
            continue
        multiple = vec // math.gcd(vec, plan.groups * plan.line)  # Other numbers of stretches misalign loads.
        most = [blocks // plan.num_tiles for blocks in (target.num_sms // 2, target.num_sms, 2 * target.num_sms)]
        for stretches in [min(n, plan.lines // plan.groups) for n in most] if twice else [1]:
            if stretches >= multiple:
                yield dataclasses.replace(plan, stretches=stretches // multiple * multiple)


def cost(plan: LeadingPlan, target: _host.Target) -> float:
    """Predicted microseconds of a plan, with the second kernel where it leaves several rows of sums."""
    narrow = plan.vec * plan.itemsize <= 4  # Two blocks of wider loads lack registers to run on an SM at once.
    waves = pl.cdiv(plan.num_tiles * plan.stretches, target.num_sms * (1 + narrow))
    rounds = waves * pl.cdiv(pl.cdiv(plan.lines, plan.stride), plan.loads)
    places = (plan.parts * plan.groups + plan.left_parts) * pl.cdiv(plan.sums, CHUNK * plan.warpgroups)
    loaded = plan.lines * plan.num_tiles * plan.span * plan.itemsize
    rate = CACHE_RATE if loaded < CACHE_BYTES else SHORT_RATE if narrow and plan.windows == 1 else MEMORY_RATE
    us = LAUNCH_US + rounds * LOADS_US + places * PLACE_US + loaded / rate
    return us if plan.left_rows == 1 else us + cost(choose(plan.left_rows, plan.cols, 4, target, once=True), target)


@functools.lru_cache(maxsize=1024)
def choose(rows: int, cols: int, itemsize: int, target: _host.Target, foldable: bool = True, once: bool = False):
    """The plan that costs least: of the only kernel, or unless it is `once` of the first of two."""
    ways = [candidates(rows, cols, itemsize, target, twice, foldable) for twice in ([False] if once else [False, True])]
    return min(itertools.chain(*ways), key=lambda plan: cost(plan, target))


def sum_leading(target: _host.Target, params, dtype, *factors):
    """Sums over the leading axis of the product of `factors`, (rows, cols) each, or (rows,) in float32, as `dtype`.

    Matrices of several factors have at least 128 columns.

    Raises:
      ValueError: two rows have more values than indices of 32 bits reach.
    """
    rows, cols = factors[0].shape
    if rows * cols > VALUES_MAX:
        if cols > VALUES_MAX // 2:
            raise ValueError(
                f"{_host.PACKAGE}.reduce_sum: {rows} rows of {cols} values; must have at most {VALUES_MAX // 2} "
                "values each: "
                "sum parts of the columns"
            )
        at_once = VALUES_MAX // cols
        parts = [[x[i : i + at_once] for x in factors] for i in range(0, rows, at_once)]
        sums = jnp.stack([sum_leading(target, params, jnp.float32, *part) for part in parts])
        return sum_leading(target, params, dtype, sums)
    itemsize = max(x.dtype.itemsize for x in factors if x.ndim == 2)
    plan = choose(len(factors[0]), cols, itemsize, target, foldable=len(factors) == 1)
    return sum_by(plan, target, params, dtype, factors)


def sum_by(plan: LeadingPlan, target: _host.Target, params, dtype, factors):
    """`sum_leading` by this plan."""
    if plan.left_rows == 1:
        return _launch(plan, params, dtype, factors)[0]
    sums = _launch(plan, params, jnp.float32, factors).reshape(plan.left_rows, plan.cols)
    return _launch(choose(*sums.shape, 4, target, once=True), params, dtype, [sums])[0]


def _launch(plan: LeadingPlan, params, dtype, factors):
    """Rows of sums, one for each stretch."""
    unit = plan.warpgroups * core.WARPGROUP
    least = pl.cdiv(pl.cdiv(plan.span, unit) * unit, plan.cols)  # Rows that any load fits into.
    if plan.rows < least:
        factors = [jnp.pad(x, [(0, least - plan.rows), (0, 0)][: x.ndim]) for x in factors]
        plan = dataclasses.replace(plan, rows=least)
    return _host.kernel(
        functools.partial(_kernel, plan=plan),
        out_type=jax.ShapeDtypeStruct((plan.stretches, plan.kept * plan.cols), dtype),
        grid=(plan.stretches, plan.num_tiles),  # CUDA allows 65535 but for the last.
        grid_names=("stretch", "tile"),
        num_threads=plan.warpgroups,
        thread_name="warpgroup",
        scratch_types=dict(
            sums_smem=plgpu.SMEM((plan.smem_values,), jnp.float32),
            summed=plgpu.Barrier(num_arrivals=plan.warpgroups),
        ),
        compiler_params=params,
    )([x.reshape(-1) for x in factors])

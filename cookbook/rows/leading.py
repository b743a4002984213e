"""Sums over the leading axis of a matrix: reduce_sum's, and the second stage of rms_norm's gradient.

The matrix is read as it lies in memory, whatever its row length. A warpgroup loads a *window* at once: neighbouring
values, `vec` a thread. Its next window lies a whole number of rows and of `vec` values further on, so that a thread
meets the same columns again, and loads of `vec` values stay aligned. Where rows are short, a window covers a *line*,
some rows side by side; where they are long, each block has a tile of columns.

    barrier    arrivals                                  who waits
    summed     each warpgroup: its sums are in SMEM      each warpgroup

Then the warpgroups share out the columns of the block. For each, they add up what the windows hold of it. A window
that does not fit between its row and the end of the matrix is not loaded: the values that are left over are loaded one
a thread by the first block, and added last.

All adds are in a fixed order, so runs are equal to the bit; atomic additions would not be. A matrix with too few
columns to fill the GPU takes two kernels: the first sums stretches of lines, the second adds up its sums.
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

from .. import _mgpu
from . import core

WARPGROUPS = 4, 8  # Warpgroups of a block.
BYTES_IN_FLIGHT = 128  # Bytes of x that a thread loads before it adds, in at most 16 loads.
CHUNK = core.WARPGROUP  # Columns that a warpgroup adds up at the end, one a thread.
CHUNK_LAYOUT = plgpu.Layout.WG_STRIDED((CHUNK,), 1)
VALUES_MAX = 2**31 - 2**16  # Indices have 32 bits.
UNROLLED_PLACES = 64  # Places of a column that are added up without a loop.
SMEM_BYTES = _mgpu.SMEM_BYTES_MAX // 2  # Two blocks of an SM run at once.
RESIDENT = 8  # Warpgroups that an SM runs at once, of 64 registers a thread.
# Microseconds of a kernel, of a block and of a place that one of its columns is added up from, beside their loads.
LAUNCH_US, BLOCK_US, PART_US = 1.2, 1.0, 0.004
LATENCY_US = 1.0  # Of a load while many are in flight.
SM_RATE, GPU_RATE = 50e3, 4.6e6  # Bytes that one SM, and all of them, load in a microsecond.
LOADS = 400  # Loads of a warp that an SM issues in a microsecond, with what it does to their values.


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
    warpgroups: int = WARPGROUPS[0]
    interpreted: bool = False

    @property
    def size(self) -> int:
        return self.rows * self.cols

    @property
    def line(self) -> int:
        return self.side * self.cols

    @property
    def window(self) -> int:
        return core.WARPGROUP * self.vec

    @property
    def layout(self):
        return plgpu.Layout.WG_STRIDED((self.window,), self.vec)

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
            return _mgpu.div(line * self.line + self.column(tile), self.vec)
        return line * (self.line // self.vec) + self.column(tile, self.vec)

    @property
    def groups(self) -> int:
        """Spans that a block loads at once."""
        return self.warpgroups // self.windows

    @property
    def turns(self) -> int:
        """Sums of a group, one after the other: the lines of each are a multiple of `vec` values apart."""
        return self.vec // math.gcd(self.vec, self.groups * self.stretches * self.line)

    @property
    def stride(self) -> int:
        """Lines from one load of a sum to its next."""
        return self.groups * self.stretches * self.turns

    @property
    def lines(self) -> int:
        """Lines that are loaded in windows; those have to end inside the matrix."""
        return max(0, (self.size - self.span - (self.line - self.width)) // self.line + 1)

    @property
    def left(self) -> int:
        """Values after these lines."""
        return self.size - self.lines * self.line

    @property
    def left_loads(self) -> int:
        """Loads of one value by each thread of the block that cover the values left over of a tile."""
        return pl.cdiv(self.span, self.warpgroups * core.WARPGROUP) if self.left else 0

    @property
    def left_span(self) -> int:
        return self.left_loads * self.warpgroups * core.WARPGROUP

    @property
    def loads(self) -> int:
        """Loads of a thread that are in flight at once."""
        return min(16, BYTES_IN_FLIGHT // (self.vec * self.itemsize))

    @property
    def out_cols(self) -> int:
        """Columns of the result."""
        return self.kept * self.cols

    @property
    def left_rows(self) -> int:
        """Rows of `cols` sums in the result; several take another pass."""
        return self.stretches * self.kept

    @property
    def sums(self) -> int:
        """Columns of the result that one block stores."""
        return self.out_cols if self.num_tiles == 1 else self.width

    @property
    def num_chunks(self) -> int:
        return pl.cdiv(self.sums, CHUNK)

    @property
    def parts(self) -> int:
        """Places of a span that hold one of the block's columns."""
        return self.side // self.kept

    @property
    def left_parts(self) -> int:
        """The same of what is left over."""
        return pl.cdiv(self.left, self.kept * self.cols) if self.num_tiles == 1 else 1

    @property
    def spans(self) -> int:
        """Sums of spans in shared memory."""
        return self.groups * self.turns

    @property
    def zeros(self) -> int:
        """Zeros after the values left over, whose last part may be incomplete."""
        return pl.cdiv(self.out_cols, CHUNK) * CHUNK if self.kept > 1 else 0

    @property
    def smem_values(self) -> int:
        """Sums of spans, values left over, zeros, and two chunks: one that loads may end in, one of the result."""
        return self.spans * self.span + self.left_span + self.zeros + 2 * CHUNK

    @property
    def fits(self) -> bool:
        return 4 * self.smem_values <= SMEM_BYTES

    @property
    def scratch(self) -> dict:
        return dict(
            sums_smem=plgpu.SMEM((self.smem_values,), jnp.float32),
            summed=plgpu.Barrier(num_arrivals=self.warpgroups),
        )

    def cost(self, num_sms: int) -> float:
        """Predicted microseconds."""
        blocks = self.num_tiles * self.stretches
        loads = max(1, min(self.loads, pl.cdiv(self.lines, self.stride)))
        in_flight = loads * self.warpgroups * self.window * self.itemsize  # Bytes of a block.
        block_bytes = pl.cdiv(self.lines, self.stretches) * self.span * self.itemsize
        parts = (self.parts * self.spans + self.left_parts) * pl.cdiv(self.num_chunks, self.warpgroups)

        def wave(blocks):
            sm_rate = min(SM_RATE, LOADS * core.LANES * self.vec * self.itemsize)
            rate = min(GPU_RATE, min(blocks, num_sms) * sm_rate, blocks * in_flight / LATENCY_US)
            return BLOCK_US + parts * PART_US + blocks * block_bytes / rate

        at_once = num_sms * RESIDENT // self.warpgroups
        rest = blocks % at_once
        return LAUNCH_US + blocks // at_once * wave(at_once) + (wave(rest) if rest else 0)


def _product(factors, start, line, size: int, layout):
    """Product of `factors` from `start` on, in float32. A factor of one value a row is that of the row `line`."""
    load = lambda x: plgpu.load(x.at[pl.ds(start, size)], layout=layout, optimized=False).astype(jnp.float32)
    each = [load(x) if x.shape == factors[0].shape else x[line] for x in factors]
    return math.prod(each)


def _zeros(size: int, layout):
    return plgpu.layout_cast(jnp.zeros((size,), jnp.float32), layout)


def _sum_lines(factors, first, tile, window, plan: LeadingPlan):
    """Sum of this warpgroup's windows of the lines `first`, `first + plan.stride` and so on."""
    word = plan.word(first, tile) + window * core.WARPGROUP
    step = plan.stride * plan.line // plan.vec
    load = lambda word, line: _product(factors, word * plan.vec, line, plan.window, plan.layout)
    value = lambda i: load(word + i * step, first + i * plan.stride)

    whole, loads = plan.lines // plan.stride, plan.loads  # Each sum has `whole` loads, or one more.
    add = lambda turn, total: functools.reduce(jnp.add, [value(turn * loads + i) for i in range(loads)], total)
    total = lax.fori_loop(0, whole // loads, add, _zeros(plan.window, plan.layout))
    rest = [value(i) for i in range(whole // loads * loads, whole)]
    if plan.lines % plan.stride:
        has_more = first + whole * plan.stride < plan.lines  # The others load the start of the matrix.
        last = load(
            jnp.where(has_more, word + whole * step, window * core.WARPGROUP),
            jnp.where(has_more, first + whole * plan.stride, 0),
        )
        rest.append(jnp.where(jnp.full((plan.window,), has_more), last, 0.0))
    return functools.reduce(jnp.add, rest, total)


def _kernel(factors, o_gmem, *, plan: LeadingPlan, sums_smem, summed):
    tile, stretch, warpgroup = (lax.axis_index(name) for name in ("tile", "stretch", "warpgroup"))
    group, window = _mgpu.div(warpgroup, plan.windows), _mgpu.rem(warpgroup, plan.windows)
    column = plan.column(tile)
    first_line = lambda turn, group: (turn * plan.stretches + stretch) * plan.groups + group
    store = lambda at, value: _mgpu.store(sums_smem.at[pl.ds(at, *value.shape)], value)

    left_smem = plan.spans * plan.span
    mine, left_at = plan.left_span // plan.warpgroups, plan.lines * plan.line + column
    left_start = jnp.minimum(left_at, plan.size - plan.left_span)
    if plan.left:  # Each warpgroup loads its share now and stores it later, so that none waits for it.
        layout = plgpu.Layout.WG_STRIDED((mine,), 1)
        left = _product(factors, left_start + warpgroup * mine, plan.rows - 1, mine, layout)

    @pl.loop(0, plan.turns)
    def _(turn):
        total = _sum_lines(factors, first_line(turn, group), tile, window, plan)
        store((turn * plan.warpgroups + warpgroup) * plan.window, total)

    if plan.left:
        index = plgpu.broadcasted_iota(jnp.int32, (mine,), 0, layout=layout) + warpgroup * mine
        is_left = (index >= left_at - left_start) & (stretch == 0)
        store(left_smem + warpgroup * mine, jnp.where(is_left, left, 0.0))
    if plan.kept > 1:
        pl.loop(warpgroup, plan.zeros // CHUNK, step=plan.warpgroups)(
            lambda i: store(left_smem + plan.left_span + i * CHUNK, _zeros(CHUNK, CHUNK_LAYOUT))
        )
    plgpu.barrier_arrive(summed)
    plgpu.barrier_wait(summed)

    def begin(turn, group):
        """Where the block's columns begin in the sums of a span."""
        span = (turn * plan.groups + group) * plan.span
        return span + _mgpu.rem(first_line(turn, group) * plan.line + column, plan.vec) if plan.slack else span

    begins = [begin(turn, group) for turn in range(plan.turns) for group in range(plan.groups)]
    skip = jnp.maximum(0, tile - plan.num_tiles + 2) * plan.shared

    def add_up(chunk):
        low = jnp.minimum(skip + chunk * CHUNK, max(0, plan.sums - CHUNK))

        def add(begins, parts, total):
            load = lambda at: plgpu.load(sums_smem.at[pl.ds(at, CHUNK)], layout=CHUNK_LAYOUT, optimized=False)
            places = lambda part: [at + part * plan.out_cols + low for at in begins]
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

    @pl.loop(0, pl.cdiv(plan.num_chunks, plan.warpgroups))
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
        return _mgpu.store(o_gmem.at[pl.ds(column, CHUNK)], sums)
    for size in {CHUNK, *((columns - 1) % CHUNK + 1 for columns in (plan.sums, plan.sums - plan.shared))}:
        old = CHUNK - size
        pl.when(new == size)(lambda old=old, size=size: _mgpu.store(o_gmem.at[pl.ds(column + old, size)], sums[old:]))


def _side(cols: int, vec: int, span: int, kept: int) -> int:
    """Rows of a line: as many as a span holds wherever it begins, and a multiple of those kept where possible."""
    whole = span // cols
    side = whole if whole * cols % vec == 0 else (span - vec) // cols
    return max(1, side // kept * kept)


def candidates(rows: int, cols: int, itemsize: int, target: _mgpu.Target, stretches: bool, foldable: bool):
    """Plans of one pass; with `stretches`, of the first of two. Without `foldable` a line is one row."""
    kept = pl.cdiv(CHUNK, cols) if stretches else 1
    sizes = (2,) if target.interpreted else WARPGROUPS  # The interpreter has few threads.
    for warpgroups, vec, windows in itertools.product(sizes, (1, 2, 4, 8), (1, 2, 4, 8)):
        span = windows * core.WARPGROUP * vec
        if vec * itemsize > 16 or windows > warpgroups or (windows > 1 and cols > span - vec):
            continue
        side = _side(cols, vec, span, kept) if foldable else 1
        whole = LeadingPlan(rows, cols, itemsize, vec, windows, side, kept if side % kept == 0 else 1,
                            warpgroups=warpgroups, interpreted=target.interpreted)  # fmt: skip
        if not foldable and whole.left > cols:
            continue
        if not stretches:
            yield whole
            continue
        alike = whole.vec // math.gcd(whole.vec, whole.groups * whole.line)  # Stretches for which `turns` is 1.
        for blocks in (target.num_sms * n // 2 for n in (1, 2, 4, 6, 8)):
            number = max(1, min(blocks // whole.num_tiles, whole.lines // whole.groups))
            yield dataclasses.replace(whole, stretches=number // alike * alike or number)


@functools.lru_cache(maxsize=1024)
def choose(rows: int, cols: int, itemsize: int, target: _mgpu.Target, foldable: bool = True, once: bool = False):
    """The plan that costs least: of the only kernel, or unless it is `once` of the first of two."""
    plans = candidates(rows, cols, itemsize, target, False, foldable)
    if not once:
        plans = itertools.chain(plans, candidates(rows, cols, itemsize, target, True, foldable))
    return min((plan for plan in plans if plan.fits), key=lambda plan: cost(plan, target))


def cost(plan: LeadingPlan, target: _mgpu.Target) -> float:
    """Predicted microseconds of a plan, with the second kernel where it leaves several rows of sums."""
    second = [choose(plan.left_rows, plan.cols, 4, target, once=True)] if plan.left_rows > 1 else []
    return sum(each.cost(target.num_sms) for each in [plan, *second])


def sum_leading(target: _mgpu.Target, params, dtype, *factors):
    """Sums over the leading axis of the product of `factors`, (rows, cols) each, or (rows,) in float32, as `dtype`.

    Matrices of several factors have at least 128 columns.
    """
    rows, cols = factors[0].shape
    if rows * cols > VALUES_MAX:
        at_once = VALUES_MAX // cols
        parts = [[x[i : i + at_once] for x in factors] for i in range(0, rows, at_once)]
        factors = [jnp.stack([sum_leading(target, params, jnp.float32, *part) for part in parts])]
    itemsize = max(x.dtype.itemsize for x in factors if x.ndim == 2)
    plan = choose(len(factors[0]), cols, itemsize, target, foldable=len(factors) == 1)
    return sum_by(plan, target, params, dtype, factors)


def sum_by(plan: LeadingPlan, target: _mgpu.Target, params, dtype, factors):
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
    return _mgpu.kernel(
        functools.partial(_kernel, plan=plan),
        out_type=jax.ShapeDtypeStruct((plan.stretches, plan.out_cols), dtype),
        grid=(plan.stretches, plan.num_tiles),  # CUDA allows 65535 but for the last.
        grid_names=("stretch", "tile"),
        num_threads=plan.warpgroups,
        thread_name="warpgroup",
        scratch_types=plan.scratch,
        compiler_params=params,
    )([x.reshape(-1) for x in factors])

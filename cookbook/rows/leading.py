# SPDX-License-Identifier: Apache-2.0
"""Sums over the leading axis of a matrix: reduce_sum's, and the second stage of rms_norm's gradient.

The matrix is read as it lies in memory, whatever its row length. A warpgroup loads a *window* at once: neighbouring
values, `vec` per thread. Its next window lies a whole number of rows and of `vec` values further on, so that a thread
meets the same columns again, and loads of `vec` values stay aligned. A window, or the windows of a block side by side,
are a *span*. Where rows are short, a span covers a *line*: one row or some. Where they are long, each block has a tile
of columns.

    barrier    arrivals                                  who waits
    summed     each warpgroup: its sums are in SMEM      each warpgroup

Then the warpgroups share out the columns of the block. For each, they add up what the windows hold of it. A window
that does not fit between its row and the end of the matrix is not loaded: the values that are left over are loaded by
the first block, one per thread, and added last.

All adds are in a fixed order, so results are bitwise reproducible; with atomic additions they would not be. Where one
kernel has too few blocks for the GPU, there are two: in the first several blocks share the lines of a tile, and the
second adds up their sums.
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
from .._device import WARPGROUP
from .leading_plan import CHUNK, LeadingPlan, choose

CHUNK_LAYOUT = plgpu.Layout.WG_STRIDED((CHUNK,), 1)
VALUES_MAX = 2**31 - 2**16  # Indices have 32 bits.
UNROLLED_PLACES = 64  # Places of a column that are added up without a loop.


def _product(factors, start, line, size: int, layout):
    """Product of `factors` from `start` on, in float32. A factor with one value per row has that of row `line`."""
    load = lambda x: _device.load(x.at[pl.ds(start, size)], layout).astype(jnp.float32)
    return math.prod(load(x) if x.shape == factors[0].shape else x[line] for x in factors)


def _zeros(size: int, layout):
    return plgpu.layout_cast(jnp.zeros((size,), jnp.float32), layout)


def _sum_lines(factors, first, tile, window, plan: LeadingPlan):
    """Sum of this warpgroup's windows of the lines `first`, `first + plan.lines_per_step` and so on."""
    vector, size, next_line = plan.first_vector(first, tile) + window * WARPGROUP, plan.window_size, plan.lines_per_step
    step, layout = next_line * plan.line_size // plan.vec, plgpu.Layout.WG_STRIDED((size,), plan.vec)
    load = lambda vector, line: _product(factors, vector * plan.vec, line, size, layout)
    value = lambda i: load(vector + i * step, first + i * next_line)

    whole, loads = plan.num_lines // next_line, plan.loads_in_flight  # Each sum has `whole` loads, or one more.
    add = lambda turn, total: functools.reduce(jnp.add, [value(turn * loads + i) for i in range(loads)], total)
    total = lax.fori_loop(0, whole // loads, add, _zeros(size, layout))
    rest = [value(i) for i in range(whole // loads * loads, whole)]
    if plan.num_lines % next_line:
        has_more = first + whole * next_line < plan.num_lines  # The others load the start of the matrix.
        at = jnp.where(has_more, vector + whole * step, window * WARPGROUP)
        last = load(at, jnp.where(has_more, first + whole * next_line, 0))
        rest.append(jnp.where(jnp.full((size,), has_more), last, 0.0))
    return functools.reduce(jnp.add, rest, total)


def _kernel(factors, o_gmem, *, plan: LeadingPlan, sums_smem, summed):
    tile, block, warpgroup = (lax.axis_index(name) for name in ("tile", "block", "warpgroup"))
    span, window = _device.div(warpgroup, plan.windows_across), _device.rem(warpgroup, plan.windows_across)
    column = plan.column(tile)
    first_line = lambda span: block * plan.spans_at_once + span
    store = lambda at, value: _device.store(sums_smem.at[pl.ds(at, *value.shape)], value)

    leftover_smem = plan.spans_at_once * plan.span_size
    share, leftover_at = plan.leftover_span // plan.warpgroups, plan.num_lines * plan.line_size + column
    leftover_start = jnp.minimum(leftover_at, plan.rows * plan.cols - plan.leftover_span)
    if plan.leftover:  # Each warpgroup loads its share now and stores it later, so that none waits for it.
        layout = plgpu.Layout.WG_STRIDED((share,), 1)
        leftover = _product(factors, leftover_start + warpgroup * share, plan.rows - 1, share, layout)

    store(warpgroup * plan.window_size, _sum_lines(factors, first_line(span), tile, window, plan))
    if plan.leftover:
        index = plgpu.broadcasted_iota(jnp.int32, (share,), 0, layout=layout) + warpgroup * share
        is_leftover = (index >= leftover_at - leftover_start) & (block == 0)
        store(leftover_smem + warpgroup * share, jnp.where(is_leftover, leftover, 0.0))

    @pl.loop(warpgroup, plan.zeros_after // CHUNK, step=plan.warpgroups)
    def _(i):
        store(leftover_smem + plan.leftover_span + i * CHUNK, _zeros(CHUNK, CHUNK_LAYOUT))

    plgpu.barrier_arrive(summed)
    plgpu.barrier_wait(summed)

    gap = lambda span: _device.rem(first_line(span) * plan.line_size + column, plan.vec) if plan.gap else 0
    begins = [span * plan.span_size + gap(span) for span in range(plan.spans_at_once)]  # Where its columns are.
    skip = jnp.maximum(0, tile - plan.num_tiles + 2) * plan.overlap

    def add_places(total, begins, num_places: int, low):
        """`total` + the chunk at column `low` of all places after `begins`."""
        load = lambda at: _device.load(sums_smem.at[pl.ds(at, CHUNK)], CHUNK_LAYOUT)
        starts = lambda place: [at + place * plan.rows_kept * plan.cols + low for at in begins]
        add = lambda place, total: functools.reduce(jnp.add, [load(at) for at in starts(place)], total)
        if num_places * len(begins) > UNROLLED_PLACES:
            return lax.fori_loop(0, num_places, add, total)
        return functools.reduce(lambda total, place: add(place, total), range(num_places), total)

    def add_up(chunk):
        low = jnp.minimum(skip + chunk * CHUNK, max(0, plan.columns_of_block - CHUNK))
        total = add_places(_zeros(CHUNK, CHUNK_LAYOUT), begins, plan.places_per_span, low)
        if plan.leftover:
            total = add_places(total, [leftover_smem + leftover_at - leftover_start], plan.leftover_places, low)
        if plan.columns_of_block < CHUNK:
            return store(plan.smem_values - CHUNK, total)
        new = jnp.minimum(CHUNK, plan.columns_of_block - skip - chunk * CHUNK)
        _store(o_gmem.at[block], column + low, total.astype(o_gmem.dtype), new, plan)

    @pl.loop(0, pl.cdiv(plan.columns_of_block, CHUNK * plan.warpgroups))
    def _(i):
        chunk = i * plan.warpgroups + warpgroup
        pl.when(skip + chunk * CHUNK < plan.columns_of_block)(lambda: add_up(chunk))

    if plan.columns_of_block < CHUNK:  # Fewer columns than a warpgroup has threads: one after the other.
        plgpu.barrier_arrive(summed)
        plgpu.barrier_wait(summed)

        @pl.loop(warpgroup, plan.columns_of_block, step=plan.warpgroups)
        def _(i):
            o_gmem[block, i] = sums_smem[plan.smem_values - CHUNK + i].astype(o_gmem.dtype)


def _store(o_gmem, column, sums, new, plan: LeadingPlan):
    """Stores a chunk of sums, the last `new` of which no other chunk has. Others store the rest too, the same values;
    the interpreter takes that for a race, so that there the chunk stores the new ones alone."""
    if not plan.interpreted:
        return _device.store(o_gmem.at[pl.ds(column, CHUNK)], sums)
    ends = plan.columns_of_block, plan.columns_of_block - plan.overlap
    for size in {CHUNK, *((columns - 1) % CHUNK + 1 for columns in ends)}:
        old = CHUNK - size
        pl.when(new == size)(lambda old=old, size=size: _device.store(o_gmem.at[pl.ds(column + old, size)], sums[old:]))


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
                "values each: sum parts of the columns"
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
    if plan.rows_of_sums == 1:
        return _launch(plan, params, dtype, factors)[0]
    sums = _launch(plan, params, jnp.float32, factors).reshape(plan.rows_of_sums, plan.cols)
    return _launch(choose(*sums.shape, 4, target, once=True), params, dtype, [sums])[0]


def _launch(plan: LeadingPlan, params, dtype, factors):
    """Rows of sums, one or more for each block of a tile."""
    unit = plan.warpgroups * WARPGROUP
    least = pl.cdiv(pl.cdiv(plan.span_size, unit) * unit, plan.cols)  # Rows that any load fits into.
    if plan.rows < least:
        factors = [jnp.pad(x, [(0, least - plan.rows), (0, 0)][: x.ndim]) for x in factors]
        plan = dataclasses.replace(plan, rows=least)
    return _host.kernel(
        functools.partial(_kernel, plan=plan),
        out_type=jax.ShapeDtypeStruct((plan.blocks_per_tile, plan.rows_kept * plan.cols), dtype),
        grid=(plan.blocks_per_tile, plan.num_tiles),  # CUDA allows 65535 but for the last.
        grid_names=("block", "tile"),
        num_threads=plan.warpgroups,
        thread_name="warpgroup",
        scratch_types=dict(
            sums_smem=plgpu.SMEM((plan.smem_values,), jnp.float32),
            summed=_device.barriers(1, plan.warpgroups),
        ),
        compiler_params=params,
    )([x.reshape(-1) for x in factors])

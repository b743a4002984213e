# SPDX-License-Identifier: Apache-2.0
"""The routing of few tokens in one launch: their experts and weights, the order of rows, the tables of the products.

    weights[t] = softmax of the top_k largest logits[t, :];   rows of choices in the order of experts, then of tokens
    copies[rows[t]] = x[t], and so the scales of split rows

Shapes: logits (T, E) float32 with T a multiple of 16 and E a power of 2, from 8 to 128; x (T, C) of 16 bits, or
`SplitRows`, or none; `Results` has the others.

A block has a warpgroup for each 16 tokens, at most 4. No rows are sorted or compared: the row of a token in its
expert's group is how many earlier tokens chose the expert. Each block finds all rows anew and copies a few tokens of x
to theirs, as `copy_rows`; the first block stores all else.

| role | does |
|---|---|
| each warpgroup | takes its tokens' largest logits top_k times, 8 threads per token, as `select/kernel_rows.py` |
| | marks the choices in `chosen`; then, a thread for each expert, counts them from token to token |
| warpgroup 0 | adds up the experts' counts, finds the rows, and stores them, x, the sizes and the tables |

| barrier | arrivals | says |
|---|---|---|
| counted | each warpgroup | choices, and how many each expert has of the warpgroup's tokens, are in shared memory |
| filled | the copy of x | the block's tokens of x are in shared memory |

Bound by: latency, `top_k` rounds of two reductions that depend on each other; with 128 experts by the instructions of
one SM, about 7 per logit and round.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ... import _device, _host
from ..._device import WARPGROUP
from ...select import threads
from ...select.kernel import HIGHEST, LOWEST, from_key, to_key
from ...select.kernel_rows import K_MAX, LANES, ROWS, layout
from ..dense.split_rows import SplitRows, scales_shape
from ..grouped.tables import Table, row_entries
from .copy_rows import BOX, lane_of

TOKENS_MAX, EXPERTS_MAX = 256, WARPGROUP  # Shared memory holds 4 bytes for each pair of them.
# Logits times top_k. One SM of an H200 takes 19 us for so many, and `top_k` with XLA 13 us without the tables.
WORK_MAX = 2**18
AT_ONCE = 8  # Tokens whose marks a thread loads together.
COPIED_MAX = 65_536  # Bytes of x that a block copies, in shared memory.


class Results(NamedTuple):
    """Rows and tables, as the kernel stores them."""

    weights: jax.Array  # (T * top_k,) float32.
    rows: jax.Array  # (T * top_k,) int32: where the row of each choice is.
    experts: jax.Array  # (T * top_k,) int32: the expert of each row.
    sizes: jax.Array  # (E,) int32: how many rows each expert has.
    tables: tuple[Table, ...]  # As `row_table` makes them, for each of the tiles.
    copies: jax.Array | None  # (T * top_k, C): a row of x for each choice.
    scales: jax.Array | None  # As `SplitRows` has them, where `copies` are halves.


@dataclasses.dataclass(frozen=True)
class Plan:
    """Statics of a launch."""

    tokens: int  # T, without padding.
    experts: int  # E, without padding.
    top_k: int
    renormalize: bool
    tiles: tuple[int, ...]  # Rows of the products' tiles.
    mine: int  # Tokens of x that a block copies; 0 if there is no x.
    interpreted: bool

    @property
    def blocks(self) -> int:
        """How many times 16 tokens there are."""
        return pl.cdiv(self.tokens, ROWS)

    @property
    def num_wgs(self) -> int:
        return min(4, self.blocks)

    @property
    def turns(self) -> int:
        """How many times a warpgroup takes 16 tokens."""
        return pl.cdiv(self.blocks, self.num_wgs)

    @property
    def choices(self) -> int:
        return self.tokens * self.top_k


def fits(tokens: int, experts: int, top_k: int) -> bool:
    """Whether the kernel can, and takes no longer than XLA."""
    is_small = tokens <= TOKENS_MAX and experts <= EXPERTS_MAX and top_k <= K_MAX
    return is_small and tokens * experts * top_k <= WORK_MAX


def _is_copied(tokens: int, cols: int, itemsize: int) -> bool:
    """Whether the kernel copies rows of x, so many a block."""
    return tokens * cols * itemsize <= COPIED_MAX and cols // lane_of(cols) <= BOX


def _put(plan: Plan, ref, slots, values, layout=threads.PER_THREAD):
    """`threads.scatter` of the first block."""
    scatter = functools.partial(threads.scatter, ref, slots, values, layout, plan.interpreted)
    pl.when(lax.axis_index("block") == 0)(scatter)


def _choose(plan: Plan, block, logits_gmem, weights_gmem, expert_smem, chosen_smem):
    """Experts and weights of the 16 tokens of `block`; marks their choices with 1, all else with 0."""
    cols = logits_gmem.shape[1]
    form = layout(min(4, cols // LANES))
    logits = _device.load(logits_gmem.at[pl.ds(block * ROWS, ROWS)], form)
    column = plgpu.broadcasted_iota(jnp.int32, logits.shape, 1, layout=form)
    row = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=form.reduce(1))
    is_token = block * ROWS + row < plan.tokens
    of_row = lambda number: lax.broadcast_in_dim(number, logits.shape, [0])
    here, slot = pl.ds(block * ROWS * plan.top_k, ROWS * plan.top_k), row * plan.top_k
    # Padding and logits that were taken have the lowest key, which no other logit has.
    keys, values = jnp.where(column < plan.experts, jnp.maximum(to_key(logits), LOWEST + 1), LOWEST), []
    for i in range(plan.top_k):
        top = jnp.max(keys, axis=1)
        expert = jnp.min(jnp.where(keys == of_row(top), column, HIGHEST), axis=1)
        threads.scatter(expert_smem.at[here], slot + i, expert, form.reduce(1), plan.interpreted)
        values.append(from_key(top, jnp.float32))
        keys = jnp.where(column == of_row(expert), LOWEST, keys)
    marks = jnp.where((keys == LOWEST) & (column < plan.experts) & of_row(is_token), 1, 0)
    _device.store(chosen_smem.at[pl.ds(block * ROWS, ROWS), pl.ds(0, cols)], marks)

    most = values[0]
    if not plan.renormalize:  # As `jax.nn.logsumexp`, which takes infinity away from no infinity.
        most = jnp.where(jnp.abs(most) < jnp.inf, most, 0.0)
    shares = [jnp.exp(value - most) for value in values]
    if plan.renormalize:
        total = functools.reduce(jnp.add, shares)
    else:
        total = jnp.sum(jnp.where(column < plan.experts, jnp.exp(logits - of_row(most)), 0.0), axis=1)
    for i, share in enumerate(shares):
        _put(plan, weights_gmem.at[here], slot + i, share / total, form.reduce(1))


def _count(chosen_smem, first, num):
    """Puts in place of each mark how many before it, from token `first` on, its expert has; returns those of all."""

    def some(i, total):
        tokens = [chosen_smem.at[first + i * AT_ONCE + j] for j in range(AT_ONCE)]
        for token, mark in zip(tokens, [_device.load(token, threads.PER_THREAD) for token in tokens], strict=True):
            _device.store(token, total)
            total = total + mark
        return total

    return lax.fori_loop(0, num // AT_ONCE, some, threads.number() * 0)


def _store_table(plan: Plan, tile: int, table: Table, start, size, scan_smem):
    """`row_table` of the groups, without rows before or after them: a thread writes the entries of its expert."""
    number, put = threads.number(), functools.partial(_put, plan)
    count = lax.div(size + (tile - 1), tile)
    before = threads.before(count, scan_smem, plan.interpreted)
    put(table.after, jnp.where(number < plan.experts, number, -1), before + count)
    for i in range(2):
        put(table.after, jnp.where(number == plan.experts - 1, plan.experts + i, -1), before + count)
    for i in range(pl.cdiv(plan.tokens, tile)):
        slot = jnp.where(i < count, before + i, -1)
        for ref, value in ((table.group, number), (table.start, start + i * tile), (table.end, start + size)):
            put(ref, slot, value)


def _store_rows(plan: Plan, out: Results, scales_gmem, expert_smem, chosen_smem, totals_smem, scan_smem,
                rows_smem=None):  # fmt: skip
    """Warpgroup 0: the rows of all choices, their scales if x has any, the experts' sizes, and the tables."""
    number, put = threads.number(), functools.partial(_put, plan)
    totals = [_device.load(totals_smem.at[wg], threads.PER_THREAD) for wg in range(plan.num_wgs)]
    size = jnp.where(number < plan.experts, functools.reduce(jnp.add, totals), 0)
    start = before = threads.before(size, scan_smem, plan.interpreted)
    for wg, total in enumerate(totals):  # Where the rows of each warpgroup's tokens begin.
        _device.store(totals_smem.at[wg], before)
        before = before + total
    put(out.sizes, jnp.where(number < plan.experts, number, -1), size)
    threads.sync(plan.interpreted)

    @pl.loop(0, pl.cdiv(plan.choices, WARPGROUP))
    def _(i):
        choice = i * WARPGROUP + number
        token, is_choice = lax.div(choice, plan.top_k), choice < plan.choices
        expert = _device.load(expert_smem.at[pl.ds(i * WARPGROUP, WARPGROUP)], threads.PER_THREAD)
        expert, token = jnp.where(is_choice, expert, 0), jnp.where(is_choice, token, 0)
        of_wg = lax.div(token, plan.turns * ROWS)
        row = sum(
            threads.gather(ref, (place, expert), 1, plan.interpreted)
            for ref, place in ((totals_smem, of_wg), (chosen_smem, token))
        )
        put(out.rows, jnp.where(is_choice, choice, -1), row)
        if plan.mine:
            _device.store(rows_smem.at[pl.ds(i * WARPGROUP, WARPGROUP)], row)
        put(out.experts, jnp.where(is_choice, row, -1), expert)
        if scales_gmem is not None:
            scale = threads.gather(scales_gmem.at[0], token, 1, plan.interpreted)
            for copy in range(2):
                put(out.scales.at[copy], jnp.where(is_choice, row - copy, -1), scale)

    @pl.when(lax.axis_index("block") == 0)
    def _():
        for tile, table in zip(plan.tiles, out.tables, strict=True):
            _store_table(plan, tile, table, start, size, scan_smem)


def _copy(plan: Plan, first, copies_gmem, rows_smem, x_smem, filled):
    """Warpgroup 0: this block's tokens of x, from `first` on, to their rows."""
    threads.sync(plan.interpreted)
    plgpu.barrier_wait(filled)

    @pl.loop(0, jnp.minimum(plan.mine, plan.tokens - first))
    def _(i):
        for j in range(plan.top_k):
            plgpu.copy_smem_to_gmem(x_smem.at[i], copies_gmem.at[rows_smem[(first + i) * plan.top_k + j]])


def _route(logits_gmem, x_gmem, scales_gmem, *outs, plan: Plan, expert_smem, chosen_smem, totals_smem, scan_smem,
           counted, rows_smem=None, x_smem=None, filled=None):  # fmt: skip
    out, wg, first_token = Results(*outs), lax.axis_index("wg"), lax.axis_index("block") * plan.mine
    if plan.mine:
        source = x_gmem.at[pl.ds(first_token, plan.mine)]
        pl.when(wg == 0)(lambda: plgpu.copy_gmem_to_smem(source, x_smem, filled))
    first = wg * plan.turns
    num = jnp.clip(plan.blocks - first, 0, plan.turns)
    pl.loop(0, num)(lambda turn: _choose(plan, first + turn, logits_gmem, out.weights, expert_smem, chosen_smem))
    threads.sync(plan.interpreted)
    _device.store(totals_smem.at[wg], _count(chosen_smem, first * ROWS, num * ROWS))
    plgpu.barrier_arrive(counted)

    @pl.when(wg == 0)
    def _():
        plgpu.barrier_wait(counted)
        _store_rows(plan, out, scales_gmem, expert_smem, chosen_smem, totals_smem, scan_smem, rows_smem)
        if plan.mine:
            _copy(plan, first_token, out.copies, rows_smem, x_smem, filled)
            plgpu.wait_smem_to_gmem(0)


@functools.partial(jax.jit, static_argnames=("top_k", "renormalize", "tiles", "target", "params"))
def route_few(
    logits, x, top_k: int, renormalize: bool, tiles: tuple[int, ...], target: _host.Target, params
) -> Results:
    """Routes (T, E) `logits` of a size that `fits` accepts, and copies the tokens of x unless their rows are long."""
    mine = pl.cdiv(len(logits), target.num_sms)
    x, scales = x if isinstance(x, SplitRows) else (x, None)
    if x is None or not _is_copied(mine, *x.shape[1:], x.dtype.itemsize):
        x, scales, mine = None, None, 0
    plan = Plan(*logits.shape, top_k, renormalize, tiles, mine, target.interpreted)
    # Shared memory takes marks of a power of 2 of columns.
    logits = _host.pad_to_tiles(logits, (ROWS, max(LANES, 1 << (plan.experts - 1).bit_length())))
    rows, num = logits.shape[0], plan.choices
    ints = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
    entries = [row_entries(num, plan.experts, tile) for tile in tiles]
    places, copies, of_copies = pl.cdiv(rows * top_k, WARPGROUP) * WARPGROUP, None, {}
    if x is not None:
        x = x.reshape(len(x), -1, lane_of(x.shape[1]))
        copies = jax.ShapeDtypeStruct((num, *x.shape[1:]), x.dtype)
        of_copies = dict(
            rows_smem=plgpu.SMEM((places,), jnp.int32),
            x_smem=plgpu.SMEM((plan.mine, *x.shape[1:]), x.dtype),
            filled=plgpu.Barrier(),
        )
    out = _host.kernel(
        functools.partial(_route, plan=plan),
        out_type=Results(
            jax.ShapeDtypeStruct((rows * top_k,), jnp.float32), ints(num), ints(num), ints(plan.experts),
            tuple(Table(ints(plan.experts + 2), ints(n), ints(n), ints(n)) for n in entries), copies,
            None if scales is None else jax.ShapeDtypeStruct(scales_shape(num), scales.dtype),
        ),
        grid=(pl.cdiv(plan.tokens, mine or plan.tokens),),
        grid_names=("block",),
        num_threads=plan.num_wgs,
        thread_name="wg",
        scratch_types=dict(
            expert_smem=plgpu.SMEM((places,), jnp.int32),
            chosen_smem=plgpu.SMEM((rows, EXPERTS_MAX), jnp.int32),
            totals_smem=plgpu.SMEM((plan.num_wgs, EXPERTS_MAX), jnp.int32),
            scan_smem=plgpu.SMEM((WARPGROUP,), jnp.int32),
            counted=plgpu.Barrier(num_arrivals=plan.num_wgs),
            **of_copies,
        ),
        compiler_params=params,
    )(logits, x, scales)  # fmt: skip
    out = Results(*out)
    copies = None if x is None else out.copies.reshape(num, -1)
    copies = copies if scales is None else SplitRows(copies, out.scales)
    return out._replace(weights=out.weights[:num], copies=copies)

# SPDX-License-Identifier: Apache-2.0
"""How probable what is more probable than a candidate is, and the draw where no candidate was probable enough.

`masses`: a block of one warpgroup takes a part of a row, which it keeps in registers: its maximum, and then the sum of
its exponentials and for each candidate the sum of those above it. The parts are the same however many rows there are,
and their sums are added in one order, so a row's results do not depend on its batch.

`choose`: a block per row adds up what the parts have and takes the first candidate that is kept. If none is, it draws
among the tokens above those refused, adds up what is above the one drawn, and so on until one is kept: the most
probable one is.

Barriers: the reductions have their own. Bound by: memory, one read.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .. import _device, _host
from .._device import WARPGROUP
from . import kernel_best, threads
from .kernel import LOWEST, Part, to_key
from .kernel_best import UNKNOWN, best_of_row, best_plan, first, num_wanted
from .kernel_draw import LOWEST_FLOAT, inverse, share_of
from .logits import Logits, leaves, logit, number_of
from .plan import Plan, plan_of

VALUES = 64  # Values of a part that a thread keeps in registers, so that they are loaded once.


def logit_key(x, column):
    return to_key(logit(x))


def part_plan(cols: int) -> Plan:
    """The parts of a row, the same for any number of rows; of a piece each."""
    plan = plan_of(1, cols, 1, 0, num_sms=1, values=VALUES)
    return dataclasses.replace(plan, part=plan.piece)


def _nth(each, j):
    """`each[j]` of a few numbers, or of arrays with `j` as an array."""
    return functools.reduce(lambda found, i: jnp.where(j == i, each[i], found), range(1, len(each)), each[0])


def _is_next(j, value, floor):
    """Whether candidate j may be kept after those up to `floor` are refused: then lower ones are too."""
    return (j == 0) | (value > floor)


def _shares(part: Part, p, loaded, scale, interpreted: bool):
    """(x, top, shares, total): the logits of a part, the highest, what each takes of that, and sums of such shares."""
    x, vec = loaded.astype(jnp.float32), part.plan.vec
    x = jnp.where(part.is_fresh(p) & (x == x), x, -jnp.inf)
    top = jnp.max(threads.highest(x, vec, interpreted))
    return x, top, share_of(x, top, scale), lambda some: jnp.sum(threads.totals(some, vec, interpreted))


def _masses(*refs, plan: Plan, of_refs, num_slots: int, interpreted: bool):
    *arrays, temperature_gmem, top_p_gmem, scores_gmem, columns_gmem, out_gmem = refs
    row, block = lax.axis_index("rows"), lax.axis_index("part")
    x_row = of_refs(arrays).of_row(row)
    scale = inverse(number_of(temperature_gmem, row))
    part = Part(plan, None, None)
    x = part.logits(x_row, 0, interpreted)  # In flight while candidates are compared.
    num, columns = 1, [columns_gmem[row, 0]]
    if num_slots > 1:
        num = num_wanted(number_of(top_p_gmem, row))
        some = lambda n: best_of_row(scores_gmem.at[row], columns_gmem.at[row], num_slots, n)
        few = lambda: some(kernel_best.FEW) + [jnp.int32(UNKNOWN)] * (kernel_best.SLOTS - 1 - kernel_best.FEW)
        columns = lax.cond(num == kernel_best.FEW, few, lambda: some(kernel_best.SLOTS - 1))
    values = [logit(x_row.at(jnp.maximum(column, 0))) for column in columns]
    x, top, share, total = _shares(part, 0, x, scale, interpreted)
    out_gmem[row, 0, block], out_gmem[row, 1, block] = top, total(share)

    before = [functools.reduce(jnp.maximum, values[:j], -jnp.inf) for j in range(len(values))]

    def sum_above(j, _):  # In a loop, because the compiler would sum up for several at once, out of registers.
        value = _nth(values, j)
        for i, number in enumerate((value, _nth(columns, j)), 1):
            out_gmem[row, 2 + i * len(values) + j, block] = number.astype(jnp.float32)

        @pl.when(_is_next(j, value, _nth(before, j)))
        def _():
            out_gmem[row, 2 + j, block] = total(jnp.where(x > value, share, 0.0))

    lax.fori_loop(0, num, sum_above, None)


def masses(logits: Logits, temperature, top_p, candidates, target: _host.Target, params):
    """(rows, 2 + 3 * num, width) float32, of each part of a row: the highest logit, the sum of exp((logit - it) /
    temperature), and for each of `num` candidates the sum of those above it, its logit and its column.

    `candidates` is what `best_few` found, of which `num_wanted(top_p)` are looked at; or a column for each row.
    """
    plan, (rows, found) = part_plan(logits.shape[1]), candidates[0].shape
    # Some numbers for each thread of what reads them, of which those beyond the row's parts are never used.
    width = WARPGROUP * pl.cdiv(plan.num_parts, WARPGROUP)
    num_slots = best_plan(*logits.shape, target.num_sms).num_parts * kernel_best.SLOTS if found > 1 else 1
    most = min(num_slots, kernel_best.SLOTS - 1)
    arrays, of_refs = leaves(logits)
    return _host.kernel(
        functools.partial(_masses, plan=plan, of_refs=of_refs, num_slots=num_slots, interpreted=target.interpreted),
        out_type=jax.ShapeDtypeStruct((rows, 2 + 3 * most, width), jnp.float32),
        grid=(rows, plan.num_parts),
        grid_names=("rows", "part"),
        compiler_params=params,
    )(*arrays, temperature, top_p, *candidates)


def tree_sum(x):
    """The sum over the last axis, always in the same order, which XLA's is not."""
    while x.shape[-1] > 1:
        half = -(-x.shape[-1] // 2)
        x = x[..., :half] + jnp.pad(x[..., half:], [(0, 0)] * (x.ndim - 1) + [(0, 2 * half - x.shape[-1])])
    return x[..., 0]


def log_sum(parts, cols: int):
    """(rows,) log of the sum of exp(logits), of `masses` at a temperature of 1."""
    tops, sums = parts[:, :2, : part_plan(cols).num_parts].swapaxes(0, 1)
    top = jnp.max(tops, axis=1)
    weight = jnp.exp(tops - jnp.maximum(top, LOWEST_FLOAT)[:, None])
    return top + jnp.log(tree_sum(sums * weight))


def _found(parts, scale, top_p, distance, num_parts: int):
    """(token, floor, keeps, above): the first candidate that is kept, otherwise -1; the highest logit of candidates
    that are refused; `keeps(above, value)`, whether a logit with a sum above it is; and `above(sums)` of the parts."""
    most = (parts.shape[0] - 2) // 3
    number = plgpu.broadcasted_iota(jnp.int32, parts.shape[1:], 0, layout=threads.PER_THREAD)
    tops, whole, *sums = (_device.load(parts.at[j], threads.PER_THREAD) for j in range(2 + most))
    values, columns = ([parts[2 + i * most + j, 0] for j in range(most)] for i in (1, 2))
    tops = jnp.where(number < num_parts, tops, -jnp.inf)
    top = jnp.max(tops)
    weight = share_of(tops, top, scale)
    above = lambda sums: jnp.sum(jnp.where(number < num_parts, sums * weight, 0.0))
    limit, num = top_p * above(whole), num_wanted(top_p)
    keeps = lambda above, value: _is_kept(above, value, limit, top + distance, top)

    def look(state):
        j, token, floor = state
        value, column = _nth(values, j), _nth(columns, j).astype(jnp.int32)
        is_known = column != UNKNOWN
        is_kept = is_known & _is_next(j, value, floor) & keeps(above(_nth(sums, number * 0 + j)), value)
        floor = jnp.where(is_known & ~is_kept, jnp.maximum(floor, value), floor)
        return jnp.where(is_known, j + 1, num), jnp.where(is_kept, column, token), floor

    state = jnp.int32(0), jnp.int32(-1), jnp.float32(-jnp.inf)
    _, token, floor = lax.while_loop(lambda state: (state[1] < 0) & (state[0] < num), look, state)
    return token, floor, keeps, above


def _is_kept(above, value, limit, least, top):
    """Whether a logit with a sum `above` it is kept: equal ones are all or none, and the highest always."""
    return ((above < limit) & (value >= least)) | (value >= top)


def _choose(*refs, plan: Plan, of_refs, num: int, num_parts: int, score_of, interpreted: bool):
    parts_gmem, top_p_gmem, distance_gmem, *of_row, out_gmem = refs[num:]
    row = lax.axis_index("rows")
    x_row, part = of_refs(refs[:num]).of_row(row), Part(plan, None, None)
    numbers = [number_of(ref, row) for ref in of_row]
    scale = inverse(numbers[-1])
    limits = (number_of(ref, row) for ref in (top_p_gmem, distance_gmem))
    found, floor, keeps, above = _found(parts_gmem.at[row], scale, *limits, num_parts)
    number = plgpu.broadcasted_iota(jnp.int32, parts_gmem.shape[2:], 0, layout=threads.PER_THREAD)
    pieces = part_plan(plan.cols)  # Those that `masses` added up, of the whole row.
    whole = Part(dataclasses.replace(pieces, part=num_parts * pieces.part), None, None)

    def draw(state):
        above_floor = lambda x, column: jnp.where(logit(x) > state[0], score_of(*numbers, x, column), LOWEST)
        token = first(*part.best(x_row, above_floor, interpreted))[1]
        value = logit(x_row.at(token))

        def add(p, sums):  # As `masses` does, to the last bit.
            x, _, share, total = _shares(whole, p, whole.logits(x_row, p, interpreted), scale, interpreted)
            return jnp.where(number == p, total(jnp.where(x > value, share, 0.0)), sums)

        sums = lax.fori_loop(0, num_parts, add, number.astype(jnp.float32) * 0.0)
        return value, token, keeps(above(sums), value).astype(jnp.int32)

    def more():
        state = floor, jnp.int32(0), jnp.int32(0)
        out_gmem[row] = lax.while_loop(lambda state: state[2] == 0, draw, state)[1]

    pl.when(found < 0)(more)
    pl.when(found >= 0)(lambda: _store(out_gmem, row, found))


def _store(ref, row, value):
    ref[row] = value


def choose(logits: Logits, parts, top_p, distance, score_of, of_row, target: _host.Target, params):
    """(rows,) tokens: the first of the candidates that is kept, otherwise the kept token of the highest score.

    Kept is a logit at most `distance` below the highest with a share of less than `top_p` above it, and the highest.
    `parts` is what `masses` found; the last of `of_row` is the temperature.
    """
    (rows, cols), num_parts = logits.shape, part_plan(logits.shape[1]).num_parts
    arrays, of_refs = leaves(logits)
    plan = plan_of(1, cols, 1, 0, num_sms=1, values=kernel_best.SCORED)
    plan = dataclasses.replace(plan, part=pl.cdiv(cols, plan.piece) * plan.piece)
    statics = dict(plan=plan, of_refs=of_refs, num=len(arrays), num_parts=num_parts, score_of=score_of)
    return _host.kernel(
        functools.partial(_choose, **statics, interpreted=target.interpreted),
        out_type=jax.ShapeDtypeStruct((rows,), jnp.int32),
        grid=(rows, 1),
        grid_names=("rows", "part"),
        compiler_params=params,
    )(*arrays, parts, top_p, distance, *of_row)

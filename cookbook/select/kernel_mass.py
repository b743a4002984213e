# SPDX-License-Identifier: Apache-2.0
"""How probable what is more probable than a candidate is, and the draw where no candidate was probable enough.

`masses`: a block of one warpgroup takes a part of a row, as in `kernel.py`: its maximum, and in a second pass, mostly
from the L1 cache, the sum of its exponentials and for each candidate the sum of those above it. The parts are the same
however many rows there are, and their sums are added in one order, so a row's results do not depend on its batch.

`choose`: a block per row adds up what the parts have and takes the first candidate that is kept. If none is, it draws
among the tokens above the last one refused, adds up what is above the one drawn, and so on until one is kept: the most
probable one is.

Barriers: the reductions have their own. Bound by: memory, one read.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from .. import _device, _host
from .._device import WARPGROUP
from . import threads
from .kernel import HIGHEST, LOWEST, Part, to_key
from .kernel_draw import LOWEST_FLOAT, inverse, share_of
from .logits import Logits, leaves, logit, number_of
from .plan import Plan, plan_of

# Each candidate is refused with a probability of 1 - top_p. Where that is low, fewer sums are enough.
FEW, ENOUGH = 4, 0.85


def logit_key(x, column):
    return to_key(logit(x))


def part_plan(cols: int) -> Plan:
    """The parts of a row, the same for any number of rows."""
    return plan_of(1, cols, 1, 0, num_sms=1)


def _no_sum():
    return threads.number().astype(jnp.float32) * 0.0


def _masses(*refs, plan: Plan, of_refs, interpreted: bool):
    *arrays, temperature_gmem, top_p_gmem, columns_gmem, out_gmem = refs
    row, block = lax.axis_index("rows"), lax.axis_index("part")
    num, x_row = columns_gmem.shape[1], of_refs(arrays).of_row(row)
    candidates = [logit(x_row.at(jnp.minimum(columns_gmem[row, j], plan.cols - 1))) for j in range(num)]
    scale = inverse(number_of(temperature_gmem, row))
    part = Part(plan, None, None)

    def highest(g, top):
        pieces = [g * plan.unroll + u for u in range(plan.unroll)]
        for x in [part.logits(x_row, p, interpreted) for p in pieces]:  # All in flight at once.
            top = jnp.maximum(top, threads.highest(logit(x), plan.vec, interpreted))
        return top

    top = jnp.max(lax.fori_loop(0, plan.num_pieces // plan.unroll, highest, _no_sum() - jnp.inf))

    def sums_above(candidates):
        def add(p, sums):
            x = jnp.where(part.is_fresh(p), logit(part.logits(x_row, p, interpreted)), -jnp.inf)
            share = share_of(x, top, scale)
            shares = [share, *(jnp.where(x > candidate, share, 0.0) for candidate in candidates)]
            more = [threads.totals(some, plan.vec, interpreted) for some in shares]
            return [total + some for total, some in zip(sums, more, strict=True)]

        sums = part.over(add, [_no_sum()] * (1 + len(candidates)))
        for j, value in enumerate([top, *map(jnp.sum, sums)]):
            out_gmem[row, j, block] = value

    if num > FEW:
        few = number_of(top_p_gmem, row) >= ENOUGH
        pl.when(few)(lambda: sums_above(candidates[:FEW]))
        pl.when(~few)(lambda: sums_above(candidates))
    else:
        sums_above(candidates)
    for j, value in enumerate(candidates):
        out_gmem[row, 2 + num + j, block] = value


def masses(logits: Logits, temperature, top_p, candidates, target: _host.Target, params):
    """(rows, 2 + 2 * num, parts) float32 of parts of rows, of which there are `num_parts`: the highest logit, the sum
    of exp((logit - it) / temperature), that of those above each of `candidates`, (rows, num) columns, and the
    candidates' logits. Where `top_p` is at least ENOUGH, the sums are those of the first FEW candidates alone."""
    plan, (rows, num) = part_plan(logits.shape[1]), candidates.shape
    arrays, of_refs = leaves(logits)
    return _host.kernel(
        functools.partial(_masses, plan=plan, of_refs=of_refs, interpreted=target.interpreted),
        # A number per thread, of which those beyond the row's parts are never read.
        out_type=jax.ShapeDtypeStruct((rows, 2 + 2 * num, WARPGROUP), jnp.float32),
        grid=(rows, plan.num_parts),
        grid_names=("rows", "part"),
        compiler_params=params,
    )(*arrays, temperature, top_p, candidates)


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


def _found(parts, candidates_gmem, row, scale, top_p, distance, num_parts: int):
    """(token, top, limit, least): the first candidate that is kept, otherwise -1, and what is kept."""
    num, number = candidates_gmem.shape[1], threads.number()
    of_parts = lambda j: _device.load(parts.at[j], threads.PER_THREAD)
    tops = jnp.where(number < num_parts, of_parts(0), -jnp.inf)
    top = jnp.max(tops)
    weight = share_of(tops, top, scale)
    total = lambda j: jnp.sum(jnp.where(number < num_parts, of_parts(j) * weight, 0.0))
    limit, least, token = top_p * total(1), top + distance, jnp.int32(-1)
    for j in reversed(range(num)):
        value = parts[2 + num + j, 0]
        kept = _is_kept(total(2 + j), value, limit, least, top) & ((top_p < ENOUGH) | (j < FEW))
        token = jnp.where(kept, candidates_gmem[row, j], token)
    return token, top, limit, least


def _is_kept(above, value, limit, least, top):
    """Whether a logit with a sum `above` it is kept: equal ones are all or none, and the highest always."""
    return ((above < limit) & (value >= least)) | (value >= top)


def _choose(*refs, plan: Plan, of_refs, num: int, num_parts: int, score_of, interpreted: bool):
    parts_gmem, candidates_gmem, top_p_gmem, distance_gmem, *of_row, out_gmem = refs[num:]
    row = lax.axis_index("rows")
    x_row, part = of_refs(refs[:num]).of_row(row), Part(plan, None, None)
    numbers = [number_of(ref, row) for ref in of_row]
    scale = inverse(numbers[-1])
    found, top, limit, least = _found(
        parts_gmem.at[row],
        candidates_gmem,
        row,
        scale,
        number_of(top_p_gmem, row),
        number_of(distance_gmem, row),
        num_parts,
    )

    def draw(state):
        floor = state[0]

        def better(p, best):
            x = part.logits(x_row, p, interpreted)
            score = score_of(*numbers, x, part.place(p))
            score = jnp.where((logit(x) > floor) & part.is_fresh(p), score, LOWEST)
            is_better = score > best[0]
            return jnp.where(is_better, score, best[0]), jnp.where(is_better, part.place(p), best[1])

        score, index = part.over(better, (part.column() * 0 + LOWEST, part.column() * 0 + HIGHEST))
        token = jnp.min(jnp.where(score == jnp.max(score), index, HIGHEST))
        value = logit(x_row.at(token))

        def add(p, total):
            x = logit(part.logits(x_row, p, interpreted))
            share = jnp.where((x > value) & part.is_fresh(p), share_of(x, top, scale), 0.0)
            return total + threads.totals(share, plan.vec, interpreted)

        above = jnp.sum(part.over(add, _no_sum()))
        return value, token, _is_kept(above, value, limit, least, top).astype(jnp.int32)

    def more():
        state = jnp.float32(-jnp.inf), jnp.int32(0), jnp.int32(0)
        out_gmem[row] = lax.while_loop(lambda state: state[2] == 0, draw, state)[1]

    pl.when(found < 0)(more)
    pl.when(found >= 0)(lambda: _store(out_gmem, row, found))


def _store(ref, row, value):
    ref[row] = value


def choose(logits: Logits, parts, candidates, top_p, distance, score_of, of_row, target: _host.Target, params):
    """(rows,) tokens: the first of `candidates`, the highest scores in order, that is kept; otherwise the kept token of
    the highest score.

    Kept is a logit at most `distance` below the highest with a share of less than `top_p` above it, and the highest.
    `parts` is what `masses` found; the last of `of_row` is the temperature.
    """
    plan = part_plan(logits.shape[1])
    arrays, of_refs = leaves(logits)
    statics = dict(of_refs=of_refs, num=len(arrays), num_parts=plan.num_parts, score_of=score_of)
    plan = dataclasses.replace(plan, part=pl.cdiv(plan.cols, plan.piece) * plan.piece)
    rows = candidates.shape[0]
    return _host.kernel(
        functools.partial(_choose, plan=plan, **statics, interpreted=target.interpreted),
        out_type=jax.ShapeDtypeStruct((rows,), jnp.int32),
        grid=(rows, 1),
        grid_names=("rows", "part"),
        compiler_params=params,
    )(*arrays, parts, candidates, top_p, distance, *of_row)

# SPDX-License-Identifier: Apache-2.0
"""The token: the first candidate that is kept, of those that `kernel_mass.py` has judged; otherwise a draw goes on.

A block per row adds up what the parts have, and takes the first candidate that is kept. If all that are known are
refused, the draw goes on above them, in one of two ways:

- Each thread lists the tokens above them, in one read of the row. From then on all is in shared memory: the best of the
  lists, the sum above it, and if it is refused the best above it, until one is kept.
- If too many tokens are above them, the best is searched for where it may be: in the parts of the row whose bounds are
  higher than the best that is known. The sum above it takes a read of the row.

A sum over lists has another order than those of `kernel_mass.py`, and how the row was cut up decides what is listed. So
that tokens do not depend on it, a sum near the limit is made again in the order of `kernel_mass.py`.

Barriers: the reductions have their own; a thread reads what it has listed itself. Bound by: a launch; with lists the
latency of the row's loads.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .. import _device, _host
from .._device import WARPGROUP, Ref
from . import chain, kernel_best, threads
from .chain import UNKNOWN, num_wanted
from .kernel_best import first
from .kernel_draw import inverse, share_of
from .kernel_mass import nth, part_plan, shares
from .logits import Logits, leaves, logit, number_of
from .part import HIGHEST, LOWEST, Part, from_key
from .plan import Plan, plan_of

LISTED = 64  # Tokens of a thread's list. With those of a piece more its arrays leave room for two blocks per SM.
AHEAD = 8  # Pieces that are being loaded while others are listed.
NEAR = 2.0**-10  # A part of the limit, far above the error of a sum.


@dataclasses.dataclass(frozen=True)
class Limits:
    """Which logits of a row are kept."""

    weights: jax.Array  # The parts' sums are multiplied by these.
    whole: jax.Array
    limit: jax.Array
    least: jax.Array
    top: jax.Array

    def above(self, sums):
        return jnp.sum(jnp.where(self.weights > 0.0, sums * self.weights, 0.0))

    def keep(self, above, value):
        """Whether a logit with a sum `above` it is kept: equal ones are all or none, and the highest always."""
        return ((above < self.limit) & (value >= self.least)) | (value >= self.top)


def _judged(parts, scale, top_p, distance, num_parts: int):
    """(limits, token, floor, above): the first candidate that is kept, otherwise -1; the logit of the last one refused,
    and the sum above it."""
    most = (parts.shape[0] - 2) // 3
    number = plgpu.broadcasted_iota(jnp.int32, parts.shape[1:], 0, layout=threads.PER_THREAD)
    tops, whole, *sums = (_device.load(parts.at[j], threads.PER_THREAD) for j in range(2 + most))
    values, columns = ([parts[2 + i * most + j, 0] for j in range(most)] for i in (1, 2))
    tops = jnp.where(number < num_parts, tops, -jnp.inf)
    top = jnp.max(tops)
    limits = Limits(share_of(tops, top, scale), 0.0, 0.0, top + distance, top)
    whole = limits.above(whole)
    limits = dataclasses.replace(limits, whole=whole, limit=top_p * whole)

    def look(state):
        j, token, *refused = state
        value, column = nth(values, j), nth(columns, j).astype(jnp.int32)
        is_known = column != UNKNOWN
        above, is_next = limits.above(nth(sums, number * 0 + j)), is_known & ((j == 0) | (value > refused[0]))
        token = jnp.where(is_next & limits.keep(above, value), column, token)
        refused = (jnp.where(is_next, new, old) for new, old in zip((value, above), refused, strict=True))
        return jnp.where(is_known, j + 1, most), token, *refused

    num, state = num_wanted(top_p, distance), (jnp.int32(0), jnp.int32(-1), jnp.float32(-jnp.inf), whole)
    return limits, *lax.while_loop(lambda state: (state[1] < 0) & (state[0] < num), look, state)[1:]


@dataclasses.dataclass(frozen=True)
class Rest:
    """The tokens above those refused, and the draws among them: (token, value, above), the token or, if it is refused,
    -1, its logit, and the sum above it."""

    row: Logits
    part: Part  # All of the row, in small pieces.
    masses: Part  # All of the row, in the pieces of `kernel_mass.py`.
    plan: Plan  # How `kernel_best.py` has cut up the row.
    score_of: functools.partial
    chains: list[Ref]
    num: jax.Array  # So many candidates of each block are known.
    limits: Limits
    scale: jax.Array
    lists: list[Ref]  # Logits, columns, scores.
    interpreted: bool

    def _judged(self, token, value, above):
        return jnp.where(self.limits.keep(above, value), token, -1), value, above

    def _exactly_above(self, value):
        """The sum of `kernel_mass.py`, to the last bit."""
        number = plgpu.broadcasted_iota(jnp.int32, self.limits.weights.shape, 0, layout=threads.PER_THREAD)

        def add(p, x, sums):
            above = shares(self.masses, p, x, self.scale, self.interpreted)[2]
            return jnp.where(number == p, above(threads.number() * 0 + value), sums)

        sums = self.masses.ahead(self.row, add, number.astype(jnp.float32) * 0.0, 1, self.interpreted)
        return self.limits.above(sums)

    def of_chains(self, floor):
        """The best above `floor`. The parts whose bounds are above what is known are searched, the highest first."""
        score, column, key, is_bound = chain.loaded(self.chains, self.plan.num_parts * chain.SLOTS, self.num)
        slot = plgpu.broadcasted_iota(jnp.int32, score.shape, 0, layout=threads.PER_THREAD)
        is_known = (from_key(key, jnp.float32) > floor) & (column != UNKNOWN)
        bounds = jnp.where(is_bound, score, LOWEST)

        def above(x, column):
            return jnp.where(logit(x) > floor, self.score_of(x, column), LOWEST)

        def search(state):
            score, column, bounds, _, place = state
            part = Part(self.plan, None, None, place // chain.SLOTS)
            best, first_column = first(*part.best(self.row, above, self.interpreted))
            is_better = (best > score) | ((best == score) & (first_column < column))
            bounds = jnp.where(slot == place, LOWEST, bounds)
            best, first_column = jnp.where(is_better, best, score), jnp.where(is_better, first_column, column)
            return best, first_column, bounds, *first(bounds, slot)

        state = *first(jnp.where(is_known, score, LOWEST), column), bounds, *first(bounds, slot)
        may_be_better = lambda state: (state[3] >= state[0]) & (state[3] > LOWEST)
        token = lax.while_loop(may_be_better, search, state)[1]
        value = logit(self.row.at(token))
        return self._judged(token, value, self._exactly_above(value))

    def list_above(self, floor):
        """(128,): where each thread's list ends; from `WARPGROUP * LISTED` on it is too long."""
        part = self.part

        def put(p, x, slot):
            has_room = threads.spread(slot, part.plan.piece, part.plan.vec, self.interpreted) < WARPGROUP * LISTED
            x, column = logit(x), part.place(p)
            taken = jnp.where((x > floor) & part.is_fresh(p) & has_room, WARPGROUP, 0)
            return threads.put(self.lists[:2], taken, (x, column), slot, part.plan.vec, True, self.interpreted)

        return part.ahead(self.row, put, threads.number(), AHEAD, self.interpreted)

    def _listed(self, refs, i):
        return [_device.load(ref.at[pl.ds(i * WARPGROUP, WARPGROUP)], threads.PER_THREAD) for ref in refs]

    def of_lists(self, ends, floor):
        """The first in the chain of what is listed that is kept."""
        num, zeros = pl.cdiv(jnp.max(ends), WARPGROUP), threads.number() * 0
        over = lambda visit, state: lax.fori_loop(0, num, visit, state)

        def score(i, _):
            x, column = self._listed(self.lists[:2], i)
            is_there = threads.number() + i * WARPGROUP < ends
            found = jnp.where(is_there, x, -jnp.inf), jnp.where(is_there, self.score_of(x, column), LOWEST)
            for ref, value in zip(self.lists[::2], found, strict=True):
                _device.store(ref.at[pl.ds(i * WARPGROUP, WARPGROUP)], value)

        def draw(state):
            floor = state[1]

            def better(i, best):
                listed = self._listed(self.lists, i)
                is_better = (listed[0] > floor) & (listed[2] > best[2])  # The first of equal scores stays.
                return [jnp.where(is_better, new, old) for new, old in zip(listed, best, strict=True)]

            def add(i, total):
                (x,) = self._listed(self.lists[:1], i)
                return total + jnp.where(x > value, share_of(x, self.limits.top, self.scale), 0.0)

            x, column, score = over(better, [zeros.astype(jnp.float32) - jnp.inf, zeros + HIGHEST, zeros + LOWEST])
            _, token = first(score, column)
            value = jnp.max(jnp.where(column == token, x, -jnp.inf))
            above, limit = jnp.sum(over(add, zeros.astype(jnp.float32))), self.limits.limit
            is_near = (jnp.abs(above - limit) <= NEAR * limit) & (value < self.limits.top)
            above = lax.cond(is_near, lambda: self._exactly_above(value), lambda: above)
            return self._judged(token, value, above)

        over(score, None)
        return lax.while_loop(lambda state: state[0] < 0, draw, (jnp.int32(-1), floor, jnp.float32(0.0)))

    def token(self, floor, above):
        room = WARPGROUP * LISTED

        def go_on(state):
            _, floor, above = state
            # Tokens above the floor are more probable than others, so they are fewer than their part of the sum says.
            may_fit = above * self.part.plan.cols <= 4 * room * self.limits.whole
            ends = lax.cond(may_fit, lambda: self.list_above(floor), lambda: threads.number() + room)
            return lax.cond(jnp.max(ends) < room, lambda: self.of_lists(ends, floor), lambda: self.of_chains(floor))

        return lax.while_loop(lambda state: state[0] < 0, go_on, (jnp.int32(-1), floor, above))[0]


def _choose(*refs, plan: Plan, best: Plan, of_refs, score_of, interpreted: bool):
    *arrays, out_gmem, x_smem, column_smem, score_smem = refs
    x, chains, parts, limits, of_row = of_refs(arrays)
    row, pieces = lax.axis_index("rows"), part_plan(plan.cols)
    numbers = [number_of(ref, row) for ref in of_row]
    scale, given = inverse(numbers[-1]), [number_of(ref, row) for ref in limits]
    limits, token, floor, above = _judged(parts.at[row], scale, *given, pieces.num_parts)

    @pl.when(token >= 0)
    def _():
        out_gmem[row] = token

    @pl.when(token < 0)
    def _():
        pieces_of_row = dataclasses.replace(pieces, part=pieces.num_parts * pieces.part)
        rest = Rest(
            x.of_row(row), Part(plan, None, None), Part(pieces_of_row, None, None), best,
            functools.partial(score_of, *numbers), [ref.at[row] for ref in chains], num_wanted(*given), limits, scale,
            [x_smem, column_smem, score_smem], interpreted,
        )  # fmt: skip
        out_gmem[row] = rest.token(floor, above)


def choose(logits: Logits, chains, parts, limits, score_of, of_row, target: _host.Target, params):
    """(rows,) tokens: the first of the candidates that is kept, otherwise the kept token of the highest score.

    Kept is a logit at most `distance` below the highest with a share of less than `top_p` above it, and the highest;
    `limits` is (top_p, distance). `chains` and `parts` are what `kernel_best.py` and `kernel_mass.py` have found; the
    last of `of_row` is the temperature.
    """
    rows, cols = logits.shape
    arrays, of_refs = leaves((logits, chains, parts, limits, of_row))
    plan = plan_of(1, cols, 1, 0, num_sms=1, values=kernel_best.SCORED)
    plan = dataclasses.replace(plan, part=pl.cdiv(cols, plan.piece) * plan.piece)
    best = kernel_best.best_plan(rows, cols, target.num_sms)
    statics = dict(plan=plan, best=best, of_refs=of_refs, score_of=score_of, interpreted=target.interpreted)
    listed, more = WARPGROUP * LISTED, plan.piece
    return _host.kernel(
        functools.partial(_choose, **statics),
        out_type=jax.ShapeDtypeStruct((rows,), jnp.int32),
        grid=(rows, 1),
        grid_names=("rows", "part"),
        scratch_types=[plgpu.SMEM((listed + more,), jnp.float32), plgpu.SMEM((listed + more,), jnp.int32),
                       plgpu.SMEM((listed,), jnp.int32)],
        compiler_params=params,
    )(*arrays)  # fmt: skip

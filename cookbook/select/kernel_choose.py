# SPDX-License-Identifier: Apache-2.0
"""The token: the first candidate that is kept, of those that `kernel_mass.py` has judged; otherwise a draw goes on.

A block per row adds up what the parts have, and takes the first candidate that is kept. If all that are known are
refused, the draw goes on above them, in one of two ways:

- Each thread lists the tokens above them, in one read of the row. From then on all is in shared memory: the best of the
  lists, the sum above it, and if it is refused the best above it, until one is kept.
- If a list is too long for its thread, the best above them is searched for in the whole row, and the sum above it takes
  one more read.

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
from . import kernel_best, threads
from .chain import UNKNOWN, num_wanted
from .kernel_best import Scores, first
from .kernel_draw import inverse, share_of
from .kernel_mass import nth, part_plan, shares
from .logits import Logits, leaves, logit, number_of
from .part import HIGHEST, LOWEST, Part
from .plan import Plan, plan_of

LISTED = 64  # Tokens of a thread's list. With those of a piece more its arrays leave room for two blocks per SM.
AHEAD = 8  # Pieces that are being loaded while others are listed.
NEAR = 2.0**-10  # A part of the limit, far above the error of a sum.


@dataclasses.dataclass(frozen=True)
class Limits:
    """Which logits of a row are kept."""

    weights: jax.Array  # The parts' sums are multiplied by these.
    limit: jax.Array
    least: jax.Array
    top: jax.Array

    def above(self, sums):
        return jnp.sum(jnp.where(self.weights > 0.0, sums * self.weights, 0.0))

    def keep(self, above, value):
        """Whether a logit with a sum `above` it is kept: equal ones are all or none, and the highest always."""
        return ((above < self.limit) & (value >= self.least)) | (value >= self.top)


def _judged(parts, scale, top_p, distance, num_parts: int):
    """(limits, token, floor): the first candidate that is kept, otherwise -1; the highest logit of those refused."""
    most = (parts.shape[0] - 2) // 3
    number = plgpu.broadcasted_iota(jnp.int32, parts.shape[1:], 0, layout=threads.PER_THREAD)
    tops, whole, *sums = (_device.load(parts.at[j], threads.PER_THREAD) for j in range(2 + most))
    values, columns = ([parts[2 + i * most + j, 0] for j in range(most)] for i in (1, 2))
    tops = jnp.where(number < num_parts, tops, -jnp.inf)
    top = jnp.max(tops)
    limits = Limits(share_of(tops, top, scale), 0.0, top + distance, top)
    limits = dataclasses.replace(limits, limit=top_p * limits.above(whole))

    def look(state):
        j, token, floor = state
        value, column = nth(values, j), nth(columns, j).astype(jnp.int32)
        is_known = column != UNKNOWN
        above, is_next = limits.above(nth(sums, number * 0 + j)), is_known & ((j == 0) | (value > floor))
        token = jnp.where(is_next & limits.keep(above, value), column, token)
        return jnp.where(is_known, j + 1, most), token, jnp.where(is_next, value, floor)

    num, state = num_wanted(top_p, distance), (jnp.int32(0), jnp.int32(-1), jnp.float32(-jnp.inf))
    return limits, *lax.while_loop(lambda state: (state[1] < 0) & (state[0] < num), look, state)[1:]


@dataclasses.dataclass(frozen=True)
class Rest:
    """The tokens above those refused, and the draws among them: (token, value), the token or, if it is refused, -1, and
    its logit."""

    scores: Scores  # All of the row, in small pieces.
    parts: Part  # All of the row, in the pieces of `kernel_mass.py`.
    limits: Limits
    scale: jax.Array
    lists: list[Ref]  # Logits, columns, scores.

    def _exactly_above(self, value):
        """The sum of `kernel_mass.py`, to the last bit."""
        number = plgpu.broadcasted_iota(jnp.int32, self.limits.weights.shape, 0, layout=threads.PER_THREAD)

        def add(p, sums):
            x = self.parts.logits(self.scores.row, p, self.scores.interpreted)
            above = shares(self.parts, p, x, self.scale, self.scores.interpreted)[2]
            return jnp.where(number == p, above(threads.number() * 0 + value), sums)

        return self.limits.above(self.parts.over(add, number.astype(jnp.float32) * 0.0))

    def of_row(self, floor):
        """The best of the row above `floor`."""
        scores, is_above = self.scores, lambda x: logit(x) > floor
        above = dataclasses.replace(
            scores,
            score_of=lambda x, column: jnp.where(is_above(x), scores.score_of(x, column), LOWEST),
            bound_of=lambda x, column: jnp.where(is_above(x), scores.bound_of(x, column), -jnp.inf),
        )
        token = above.best()[1]
        value = logit(scores.row.at(token))
        return jnp.where(self.limits.keep(self._exactly_above(value), value), token, -1), value

    def list_above(self, floor):
        """(128,): where each thread's list ends; from `WARPGROUP * LISTED` on it is too long."""
        part, vec, interpreted = self.scores.part, self.scores.part.plan.vec, self.scores.interpreted

        def put(p, x, slot):
            has_room = threads.spread(slot, part.plan.piece, vec, interpreted) < WARPGROUP * LISTED
            x, column = logit(x), part.place(p)
            taken = jnp.where((x > floor) & part.is_fresh(p) & has_room, WARPGROUP, 0)
            return threads.put(self.lists[:2], taken, (x, column), slot, vec, True, interpreted)

        return part.ahead(self.scores.row, put, threads.number(), AHEAD, interpreted)

    def _listed(self, refs, i):
        return [_device.load(ref.at[pl.ds(i * WARPGROUP, WARPGROUP)], threads.PER_THREAD) for ref in refs]

    def of_lists(self, ends, floor):
        """The first in the chain of what is listed that is kept."""
        num, zeros = pl.cdiv(jnp.max(ends), WARPGROUP), threads.number() * 0
        over = lambda visit, state: lax.fori_loop(0, num, visit, state)

        def score(i, _):
            x, column = self._listed(self.lists[:2], i)
            is_there = threads.number() + i * WARPGROUP < ends
            found = jnp.where(is_there, x, -jnp.inf), jnp.where(is_there, self.scores.score_of(x, column), LOWEST)
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
            return jnp.where(self.limits.keep(above, value), token, -1), value

        over(score, None)
        return lax.while_loop(lambda state: state[0] < 0, draw, (jnp.int32(-1), floor))

    def token(self, floor):
        def go_on(state):
            ends = self.list_above(state[1])
            fits = jnp.max(ends) < WARPGROUP * LISTED
            return lax.cond(fits, lambda: self.of_lists(ends, state[1]), lambda: self.of_row(state[1]))

        return lax.while_loop(lambda state: state[0] < 0, go_on, (jnp.int32(-1), floor))[0]


def _choose(*refs, plan: Plan, of_refs, score_of, bound_of, interpreted: bool):
    *arrays, out_gmem, x_smem, column_smem, score_smem = refs
    x, parts, limits, of_row = of_refs(arrays)
    row, pieces = lax.axis_index("rows"), part_plan(plan.cols)
    numbers = [number_of(ref, row) for ref in of_row]
    scale, given = inverse(numbers[-1]), [number_of(ref, row) for ref in limits]
    limits, token, floor = _judged(parts.at[row], scale, *given, pieces.num_parts)

    @pl.when(token >= 0)
    def _():
        out_gmem[row] = token

    @pl.when(token < 0)
    def _():
        here = (functools.partial(of, *numbers) for of in (score_of, *bound_of))
        scores = Scores(Part(plan, None, None), x.of_row(row), *here, interpreted)
        whole = Part(dataclasses.replace(pieces, part=pieces.num_parts * pieces.part), None, None)
        out_gmem[row] = Rest(scores, whole, limits, scale, [x_smem, column_smem, score_smem]).token(floor)


def choose(logits: Logits, parts, limits, score_of, bound_of, of_row, target: _host.Target, params):
    """(rows,) tokens: the first of the candidates that is kept, otherwise the kept token of the highest score.

    Kept is a logit at most `distance` below the highest with a share of less than `top_p` above it, and the highest;
    `limits` is (top_p, distance). `parts` is what `masses` found; the last of `of_row` is the temperature.
    """
    rows, cols = logits.shape
    arrays, of_refs = leaves((logits, parts, limits, of_row))
    plan = plan_of(1, cols, 1, 0, num_sms=1, values=kernel_best.SCORED)
    plan = dataclasses.replace(plan, part=pl.cdiv(cols, plan.piece) * plan.piece)
    statics = dict(plan=plan, of_refs=of_refs, score_of=score_of, bound_of=bound_of, interpreted=target.interpreted)
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

# SPDX-License-Identifier: Apache-2.0
"""The highest of a row's logits with noise, or a chain of them: a block of one warpgroup takes a part of a row.

A score takes noise, and noise takes two logarithms and a series. So the loop over a part's pieces makes a bound of each
score instead, by one logarithm; it is at least the score, and hardly more for a score that is high. Each thread
remembers in which piece its highest bound lies, and the second highest of its pieces' bounds. Threads exchange nothing
in the loop, and the next pieces are being loaded meanwhile.

After the loop each thread makes one score, that of its highest bound. The best of these is the block's if it is above
all other bounds. If it is not, a thread has had two of the best, and the block makes all scores.

For a draw that keeps only high logits a block hands on a chain (`chain.py`) and the highest bound of all else.

Barriers: the reductions have their own. Bound by: the instructions of the noise's bits and bounds, 25 per value, and
nearly as much by memory, one read.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from .. import _host
from .._device import WARPGROUP
from . import chain, threads
from .logits import Logits, leaves, number_of
from .part import AHEAD, HIGHEST, LOWEST, Part, to_key
from .plan import Plan, plan_of

BLOCKS_PER_SM = 4
SCORED = 8  # Values of a thread in a piece.


def best_plan(rows: int, cols: int, num_sms: int) -> Plan:
    plan = plan_of(rows, cols, 1, 0, num_sms, SCORED)
    if cols % plan.piece and cols % (WARPGROUP * plan.vec) == 0:  # A thread would have columns of the last piece twice.
        plan = dataclasses.replace(plan, loads=1)
    num_parts = max(1, BLOCKS_PER_SM * num_sms // rows)  # At most: parts of a row are about as long as each other.
    num_pieces = pl.cdiv(pl.cdiv(cols, plan.piece), num_parts)
    return dataclasses.replace(plan, part=num_pieces * plan.piece)


def first(score, column):
    """The highest of scores and its column, of equal ones the lowest."""
    top = jnp.max(score)
    # A warp finds a maximum of integers in one step, and a minimum in five.
    return top, ~jnp.max(jnp.where(score == top, ~column, LOWEST))


@dataclasses.dataclass(frozen=True)
class Scores:
    """The scores of a part of a row: `score_of` and `bound_of` are given logits and columns, `raised` a bound."""

    part: Part
    row: Logits
    score_of: functools.partial
    bound_of: functools.partial
    raised: functools.partial
    interpreted: bool

    def _promising(self):
        """(128,), (128,): the piece with each thread's highest bound, and the highest bound of its other pieces."""
        part, plan, zeros = self.part, self.part.plan, threads.number() * 0
        # The last part may end before its pieces do; a piece must not be looked at twice.
        count = jnp.minimum(plan.num_pieces, pl.cdiv(plan.cols - lax.axis_index("part") * plan.part, plan.piece))

        def look(p, x, state):
            highest, piece, rest = state
            bound = self._highest(self.bound_of(x, part.place(p)))
            bound = jnp.where(zeros + p < count, self.raised(bound), -jnp.inf)
            is_higher = bound > highest
            rest = jnp.maximum(rest, jnp.where(is_higher, highest, bound))
            return jnp.where(is_higher, bound, highest), jnp.where(is_higher, p, piece), rest

        lowest = zeros.astype(jnp.float32) - jnp.inf
        return part.ahead(self.row, look, (lowest, zeros, lowest), AHEAD, self.interpreted)[1:]

    def _highest(self, x):
        return threads.highest(x, self.part.plan.vec, self.interpreted)

    def candidates(self):
        """(128,) each: the score of each thread's logit with the highest bound, its column, the logit's key, and a
        bound of the thread's other scores."""
        part, vec, interpreted = self.part, self.part.plan.vec, self.interpreted
        spread = lambda x: threads.spread(x, part.plan.piece, vec, interpreted)
        if part.plan.num_pieces == 1:
            column, x, rest = part.place(0), part.logits(self.row, 0, interpreted), threads.number() - jnp.inf
        else:
            piece, rest = self._promising()
            column = part.place(spread(piece))
            x = self.row.read(
                lambda ref: threads.gather(ref, column, vec, interpreted),
                lambda words: threads.bits(words, column, vec, interpreted),
            )
        bound = self.bound_of(x, column)
        bound = jnp.where(bound == bound, bound, -jnp.inf)
        place = ~self._highest(jnp.where(bound == spread(self._highest(bound)), ~column, LOWEST))
        is_here = column == spread(place)
        value = self._highest(jnp.where(is_here, x.astype(jnp.float32), -jnp.inf))
        rest = jnp.maximum(rest, self.raised(self._highest(jnp.where(is_here, -jnp.inf, bound))))
        return self.score_of(value, place), place, to_key(value), jnp.where(rest > -jnp.inf, to_key(rest), LOWEST)

    def best(self):
        score, place, _, rest = self.candidates()
        found = first(score, place)
        everywhere = lambda: first(*self.part.best(self.row, self.score_of, self.interpreted))
        return lax.cond(found[0] > jnp.max(rest), lambda: found, everywhere)


def _best(*refs, plan: Plan, of_refs, num: int, num_outs: int, score_of, bound_of, interpreted: bool):
    arrays, outs, scratch = refs[:num], refs[num : num + num_outs], refs[num + num_outs :]
    x, of_row, limits = of_refs(arrays)
    row, block = lax.axis_index("rows"), lax.axis_index("part")
    numbers = [number_of(ref, row) for ref in of_row]
    here = (functools.partial(of, *numbers) for of in (score_of, *bound_of))
    scores = Scores(Part(plan, None, None), x.of_row(row), *here, interpreted)

    if limits is None:
        for out_gmem, found in zip(outs, scores.best(), strict=True):
            out_gmem[row, block] = found
        return
    score, place, key, rest = scores.candidates()
    start, (smem,) = block * chain.SLOTS, scratch

    def take(j, score):
        best, column, highest = chain.link(score, place, key, smem, j, interpreted)
        for out_gmem, number in zip(
            outs, (best, jnp.where(best == LOWEST, chain.UNKNOWN, column), highest), strict=True
        ):
            threads.store_one(out_gmem.at[row, pl.ds(start + j, 1)], number, interpreted)
        return chain.left(score, place, key, (column, highest), is_few)

    num_wanted = chain.num_wanted(*(number_of(ref, row) for ref in limits))
    is_few = jnp.where(threads.number() * 0 + num_wanted == chain.FEW, 1, 0)
    left = lax.fori_loop(0, num_wanted, take, score)
    left = jnp.where(is_few != 0, LOWEST, left)  # The best few of the row are among the best few of its blocks.
    for out_gmem, number in zip(outs, (jnp.max(jnp.maximum(rest, left)), chain.UNKNOWN, HIGHEST), strict=True):
        out_gmem[row, start + chain.SLOTS - 1] = jnp.int32(number)


def _first_of_highest(this, other):
    is_this = (this[0] > other[0]) | ((this[0] == other[0]) & (this[1] <= other[1]))
    return tuple(jnp.where(is_this, a, b) for a, b in zip(this, other, strict=True))


def _found(logits: Logits, limits, score_of, bound_of, of_row, target: _host.Target, params):
    plan = best_plan(*logits.shape, target.num_sms)
    arrays, of_refs = leaves((logits, of_row, limits))
    width, num_outs, scratch = plan.num_parts, 2, []
    if limits is not None:
        width, num_outs, scratch = pl.cdiv(plan.num_parts * chain.SLOTS, WARPGROUP) * WARPGROUP, 3, [chain.SCRATCH]
    statics = dict(plan=plan, of_refs=of_refs, num=len(arrays), num_outs=num_outs, score_of=score_of, bound_of=bound_of)
    return _host.kernel(
        functools.partial(_best, **statics, interpreted=target.interpreted),
        out_type=(jax.ShapeDtypeStruct((logits.shape[0], width), jnp.int32),) * num_outs,
        grid=(logits.shape[0], plan.num_parts),
        grid_names=("rows", "part"),
        scratch_types=scratch,
        compiler_params=params,
    )(*arrays)


def best(logits: Logits, score_of, bound_of, of_row, target: _host.Target, params):
    """(rows,) columns of the highest scores, of equal ones the first; column 0 where all are -inf.

    Args:
      score_of: makes keys of the row's numbers from `of_row`, (rows,) or (1,) each, of logits and of their columns.
      bound_of: two functions. The first makes float32 of the same, of which the highest is chosen. The second raises it
        until it is at least the score, and is given the numbers and what the first made.
    """
    found = _found(logits, None, score_of, bound_of, of_row, target, params)
    return lax.reduce(tuple(found), (np.int32(LOWEST), np.int32(HIGHEST)), _first_of_highest, (1,))[1]


def chains(logits: Logits, limits, score_of, bound_of, of_row, target: _host.Target, params):
    """(scores, columns, keys of logits), (rows, width) each, SLOTS of each part of a row: the first of its chain, as
    many as `num_wanted(*limits)`, and in the last slot, with the column UNKNOWN, a bound of all that it leaves out."""
    return tuple(_found(logits, limits, score_of, bound_of, of_row, target, params))

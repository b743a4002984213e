# SPDX-License-Identifier: Apache-2.0
"""The highest of a row's logits with noise, or a chain of them: a block of one warpgroup takes a part of a row.

A score takes noise, and noise takes two logarithms and a series. So the loop over a part's pieces makes a bound of each
score instead, by one logarithm; it is at least the score, and hardly more for a score that is high. Each thread
remembers in which piece its highest bound lies, and the second highest of its pieces' bounds. Threads exchange nothing
in the loop, and the next pieces are being loaded meanwhile.

After the loop each thread makes one score, that of its highest bound. The best of these is the block's if it is above
all other bounds. If it is not, a thread has had two of the best, and the block makes all scores.

A chain is the best, then the best among the logits above its logit, and so on up to the highest logit: the candidates
of a draw that keeps only high logits, because one that is refused takes all lower ones with it. A block adds the
highest bound of what its chain leaves out, so that whoever joins the blocks' chains knows how far the order is right.

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
from jax.experimental.pallas import mosaic_gpu as plgpu

from .. import _device, _host
from .._device import WARPGROUP
from . import threads
from .logits import Logits, leaves, number_of
from .part import HIGHEST, LOWEST, Part, to_key
from .plan import Plan, plan_of

BLOCKS_PER_SM = 4
AHEAD = 2  # Pieces that are being loaded while others are looked at.
SCORED = 8  # Values of a thread in a piece.
SLOTS = 8  # A block hands on a chain of at most 7, and then the bound of all that is left.
UNKNOWN = -1  # The column of that bound.
FEW, ENOUGH = 4, 0.85


def best_plan(rows: int, cols: int, num_sms: int) -> Plan:
    plan = plan_of(rows, cols, 1, 0, num_sms, SCORED)
    if cols % plan.piece and cols % (WARPGROUP * plan.vec) == 0:  # A thread would have columns of the last piece twice.
        plan = dataclasses.replace(plan, loads=1)
    num_parts = max(1, BLOCKS_PER_SM * num_sms // rows)  # At most: parts of a row are about as long as each other.
    num_pieces = pl.cdiv(pl.cdiv(cols, plan.piece), num_parts)
    return dataclasses.replace(plan, part=num_pieces * plan.piece)


def num_wanted(top_p, distance):
    """Each candidate is refused with a probability of 1 - top_p. Where that is low, fewer are enough."""
    return jnp.where((top_p >= ENOUGH) & (distance == -jnp.inf), FEW, SLOTS - 1)


def first(score, column):
    """The highest of scores and its column, of equal ones the lowest."""
    top = jnp.max(score)
    # A warp finds a maximum of integers in one step, and a minimum in five.
    return top, ~jnp.max(jnp.where(score == top, ~column, LOWEST))


def link(score, column, value):
    """(score, column, value) of the next in a chain, and the scores that are left after it: those of higher values."""
    top, best = first(score, column)
    highest = jnp.max(jnp.where((score == top) & (column == best), value, -jnp.inf))
    return (top, best, highest), jnp.where(value > highest, score, LOWEST)


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
        """(128,) each: the score of each thread's logit with the highest bound, its column, the logit, and a bound of
        the thread's other scores."""
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
        return self.score_of(value, place), place, value, jnp.where(rest > -jnp.inf, to_key(rest), LOWEST)

    def best(self):
        score, place, _, rest = self.candidates()
        found = first(score, place)
        everywhere = lambda: first(*self.part.best(self.row, self.score_of, self.interpreted))
        return lax.cond(found[0] > jnp.max(rest), lambda: found, everywhere)


def _best(*refs, plan: Plan, of_refs, num_outs: int, score_of, bound_of, interpreted: bool):
    refs, outs = refs[:-num_outs], refs[-num_outs:]
    x, of_row, limits = of_refs(refs)
    row, block = lax.axis_index("rows"), lax.axis_index("part")
    numbers = [number_of(ref, row) for ref in of_row]
    here = (functools.partial(of, *numbers) for of in (score_of, *bound_of))
    scores = Scores(Part(plan, None, None), x.of_row(row), *here, interpreted)

    def store(at, *found):
        for out_gmem, number in zip(outs, found, strict=True):
            out_gmem[row, at] = number

    if limits is None:
        store(block, *scores.best())
        return
    score, place, value, rest = scores.candidates()

    def take(j, score):
        (best, column, highest), score = link(score, place, value)
        store(block * SLOTS + j, best, jnp.where(best == LOWEST, UNKNOWN, column), highest)
        return score

    left = lax.fori_loop(0, num_wanted(*(number_of(ref, row) for ref in limits)), take, score)
    store(
        block * SLOTS + SLOTS - 1, jnp.maximum(jnp.max(rest), jnp.max(left)), jnp.int32(UNKNOWN), jnp.float32(jnp.inf)
    )


def _first_of_highest(this, other):
    is_this = (this[0] > other[0]) | ((this[0] == other[0]) & (this[1] <= other[1]))
    return tuple(jnp.where(is_this, a, b) for a, b in zip(this, other, strict=True))


def _found(logits: Logits, limits, score_of, bound_of, of_row, target: _host.Target, params):
    plan = best_plan(*logits.shape, target.num_sms)
    arrays, of_refs = leaves((logits, of_row, limits))
    width, kinds = plan.num_parts, [jnp.int32, jnp.int32]
    if limits is not None:
        width, kinds = pl.cdiv(plan.num_parts * SLOTS, WARPGROUP) * WARPGROUP, [*kinds, jnp.float32]
    statics = dict(plan=plan, of_refs=of_refs, num_outs=len(kinds), score_of=score_of, bound_of=bound_of)
    return _host.kernel(
        functools.partial(_best, **statics, interpreted=target.interpreted),
        out_type=tuple(jax.ShapeDtypeStruct((logits.shape[0], width), kind) for kind in kinds),
        grid=(logits.shape[0], plan.num_parts),
        grid_names=("rows", "part"),
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
    """(scores, columns, logits), (rows, width) each, SLOTS of each part of a row: the first of its chain, as
    many as `num_wanted(*limits)`, and in the last slot, with the column UNKNOWN, a bound of all scores that it leaves
    out."""
    return tuple(_found(logits, limits, score_of, bound_of, of_row, target, params))


def joined(chains, num_slots: int, num: int):
    """[(column, logit)], the first `num` of a row's chain, of `chains` in global memory. From where it is
    not known on the columns are UNKNOWN; a bound that equals a score comes before it."""
    slot = plgpu.broadcasted_iota(jnp.int32, chains[0].shape, 0, layout=threads.PER_THREAD)
    place = slot & (SLOTS - 1)
    is_filled = ((place < num) | (place == SLOTS - 1)) & (slot < num_slots)
    score, column, value = (_device.load(ref, threads.PER_THREAD) for ref in chains)
    score, column = jnp.where(is_filled, score, LOWEST), jnp.where(is_filled, column, UNKNOWN)
    found = []
    for _ in range(num):
        (_, *of_best), score = link(score, column, value)
        found.append(tuple(of_best))
    return found

# SPDX-License-Identifier: Apache-2.0
"""The highest of a row's logits with noise, and the next: a block of one warpgroup takes a part of a row.

Noise takes two logarithms and a series, so the loop over the part's pieces makes a bound instead, by one logarithm.
It is at least the score, and hardly more for a score that is high. Each thread remembers the piece in which its highest
bound lies, and the second highest of its pieces' bounds; nothing is exchanged between threads. After the loop each
thread makes the scores of that one piece. The best of all threads is the block's if it is above all bounds that are
left; if not, which takes two near ties in one thread, the block makes all scores.

The loads of the next pieces are in flight while the bounds of one are computed.

Barriers: the reductions have their own. Bound by: memory, one read, and the bits of the noise: 13 operations on
integers per value.
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
from .kernel import HIGHEST, LOWEST, Part, to_key
from .logits import Logits, leaves, number_of
from .plan import Plan, plan_of

BLOCKS_PER_SM = 4
AHEAD = 4  # Pieces that are being loaded while others are looked at.
SCORED = 4  # Values of a thread in a piece: noise takes registers, and a thread scores one piece.
OF_MINUS_INFINITY = -(2**31) + 2**23 - 1  # Its key.
SLOTS = 8  # Of a block that hands on several: the best, at most 7, and after them the bound of all that is left.
UNKNOWN = -1  # The column of that bound.
FEW, ENOUGH = 4, 0.85


def best_plan(rows: int, cols: int, num_sms: int) -> Plan:
    plan = plan_of(rows, cols, 1, 0, num_sms, SCORED)
    of_row = pl.cdiv(cols, plan.piece)
    num_pieces = min(pl.cdiv(of_row * rows, BLOCKS_PER_SM * num_sms), of_row)
    return dataclasses.replace(plan, part=num_pieces * plan.piece)


def num_wanted(top_p):
    """Each candidate is refused with a probability of 1 - top_p. Where that is low, fewer are enough."""
    return jnp.where(top_p >= ENOUGH, FEW, SLOTS - 1)


def first(score, column):
    """The highest of scores and its column, of equal ones the lowest."""
    top = jnp.max(score)
    return top, jnp.min(jnp.where(score == top, column, HIGHEST))


@dataclasses.dataclass(frozen=True)
class Scores:
    """Of a part of a row: `score_of` and `bound_of` are given logits and their columns."""

    part: Part
    row: Logits
    score_of: functools.partial
    bound_of: functools.partial
    interpreted: bool

    def _promising(self):
        """Of each thread, (128,): the piece with its highest bound, and the highest bound of its other pieces."""
        part, plan = self.part, self.part.plan
        ahead = min(AHEAD, plan.num_pieces)
        # The last part may end before its pieces do; a piece must not be looked at twice.
        count = jnp.minimum(plan.num_pieces, pl.cdiv(plan.cols - lax.axis_index("part") * plan.part, plan.piece))
        load = lambda p: part.logits(self.row, jnp.minimum(p, plan.num_pieces - 1), self.interpreted)

        def look(p, x, highest, piece, rest):
            bound = threads.highest(self.bound_of(x, part.place(p)), plan.vec, self.interpreted)
            bound = jnp.where((bound == bound) & (p < count), bound, -jnp.inf)
            is_higher = bound > highest
            rest = jnp.maximum(rest, jnp.where(is_higher, highest, bound))
            return jnp.where(is_higher, bound, highest), jnp.where(is_higher, p, piece), rest

        def some(g, state):
            *seen, loaded = state
            following = []
            for i, x in enumerate(loaded):
                seen = look(g * ahead + i, x, *seen)
                following.append(load((g + 1) * ahead + i))
            return *seen, following

        zeros = threads.number() * 0
        lowest = zeros.astype(jnp.float32) - jnp.inf
        state = lowest, zeros, lowest, [load(p) for p in range(ahead)]
        return lax.fori_loop(0, pl.cdiv(plan.num_pieces, ahead), some, state)[1:3]

    def candidates(self):
        """Of each thread, (128,): its best score, that one's column, and bounds of its other scores: among those of its
        best piece, and among all others."""
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
        score = self.score_of(x, column)
        top = threads.highest(score, vec, interpreted)
        place = ~threads.highest(jnp.where(score == spread(top), ~column, LOWEST), vec, interpreted)
        second = threads.highest(jnp.where(column == spread(place), LOWEST, score), vec, interpreted)
        second = jnp.where(second > OF_MINUS_INFINITY, second, LOWEST)
        return top, place, second, jnp.where(rest > -jnp.inf, to_key(rest), LOWEST)

    def best(self):
        top, place, _, rest = self.candidates()
        found = first(top, place)
        everywhere = lambda: first(*self.part.best(self.row, self.score_of, self.interpreted))
        return lax.cond(found[0] > jnp.max(rest), lambda: found, everywhere)


def _best(*refs, plan: Plan, of_refs, num: int, score_of, bound_of, interpreted: bool):
    top_p_gmem, *of_row, out_gmem, index_gmem = refs[num:]
    row, block = lax.axis_index("rows"), lax.axis_index("part")
    numbers = [number_of(ref, row) for ref in of_row]
    here = (functools.partial(of, *numbers) for of in (score_of, bound_of))
    scores = Scores(Part(plan, None, None), of_refs(refs[:num]).of_row(row), *here, interpreted)
    if out_gmem.shape[1] == plan.num_parts:
        out_gmem[row, block], index_gmem[row, block] = scores.best()
        return
    top, place, second, rest = scores.candidates()

    def store(j, score, column):
        out_gmem[row, block * SLOTS + j] = score
        index_gmem[row, block * SLOTS + j] = column

    def take(j, score):
        best, column = first(score, place)
        store(j, best, jnp.where(best == LOWEST, UNKNOWN, column))
        return jnp.where(place == column, LOWEST, score)

    lax.fori_loop(0, num_wanted(number_of(top_p_gmem, row)), take, top)
    store(SLOTS - 1, jnp.max(jnp.maximum(second, rest)), jnp.int32(UNKNOWN))


def _first_of_highest(this, other):
    is_this = (this[0] > other[0]) | ((this[0] == other[0]) & (this[1] <= other[1]))
    return tuple(jnp.where(is_this, a, b) for a, b in zip(this, other, strict=True))


def _found(logits: Logits, top_p, score_of, bound_of, of_row, target: _host.Target, params):
    plan = best_plan(*logits.shape, target.num_sms)
    arrays, of_refs = leaves(logits)
    statics = dict(plan=plan, of_refs=of_refs, num=len(arrays), score_of=score_of, bound_of=bound_of)
    width = pl.cdiv(plan.num_parts * SLOTS, WARPGROUP) * WARPGROUP if top_p is not None else plan.num_parts
    return plan, _host.kernel(
        functools.partial(_best, **statics, interpreted=target.interpreted),
        out_type=(jax.ShapeDtypeStruct((logits.shape[0], width), jnp.int32),) * 2,
        grid=(logits.shape[0], plan.num_parts),
        grid_names=("rows", "part"),
        compiler_params=params,
    )(*arrays, np.ones(1, np.float32) if top_p is None else top_p, *of_row)


def best(logits: Logits, score_of, bound_of, of_row, target: _host.Target, params):
    """(rows,) columns of the highest scores, of equal ones the first; column 0 where all are -inf.

    Args:
      score_of: makes keys of the row's numbers from `of_row`, (rows,) or (1,) each, of logits and of their columns.
      bound_of: the same for float32 that are at least the scores, or NaN for a logit of NaN or -inf.
    """
    _, found = _found(logits, None, score_of, bound_of, of_row, target, params)
    return lax.reduce(tuple(found), (np.int32(LOWEST), np.int32(HIGHEST)), _first_of_highest, (1,))[1]


def best_few(logits: Logits, top_p, score_of, bound_of, of_row, target: _host.Target, params):
    """(scores, columns), (rows, width) each, SLOTS of each part of a row: its `num_wanted(top_p)` highest scores and,
    in the last one, with the column UNKNOWN, a bound of all that are not among them."""
    return tuple(_found(logits, top_p, score_of, bound_of, of_row, target, params)[1])


def best_of_row(scores_gmem, columns_gmem, num_slots: int, num: int):
    """Columns of the `num` highest scores of a row, of those that `best_few` found, in order. Behind UNKNOWN, which
    comes first where its bound equals a score, the order is not known."""
    slot = plgpu.broadcasted_iota(jnp.int32, scores_gmem.shape, 0, layout=threads.PER_THREAD)
    place = slot & (SLOTS - 1)
    is_filled = ((place < num) | (place == SLOTS - 1)) & (slot < num_slots)
    score, column = (_device.load(ref, threads.PER_THREAD) for ref in (scores_gmem, columns_gmem))
    score, column = jnp.where(is_filled, score, LOWEST), jnp.where(is_filled, column, UNKNOWN)
    columns = []
    for _ in range(num):
        columns.append(first(score, column)[1])
        score = jnp.where(column == columns[-1], LOWEST, score)
    return columns

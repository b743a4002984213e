# SPDX-License-Identifier: Apache-2.0
"""The candidates of a draw that keeps only high logits, as a chain.

The first has the highest score of all, the next the highest score among the logits above the logit of the one before,
and so on up to the highest logit. A candidate that is refused takes all lower logits with it, so the first of the chain
that is kept is the token.

Each link halves the probability above it, on average. For a high top-p that is more than enough, and each link costs a
sum. There the candidates are the few highest scores, and those that are not above the ones before need no sum.

A block hands on the candidates among its threads' best, and then a bound of all scores that these leave out. Whoever
joins the blocks' candidates knows by the bounds how far the order is right.

Barriers: a link has one, `threads.sync`, between what its warps store and what all threads load. Links have places of
their own in shared memory.
"""

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from .. import _device
from .._device import WARP, WARPGROUP
from . import threads
from .part import LOWEST

SLOTS = 8  # A block hands on at most 7 candidates, and then the bound.
UNKNOWN = -1  # The column of a bound.
FEW, ENOUGH = 4, 0.85
WARPS = WARPGROUP // WARP
SCRATCH = plgpu.SMEM((WARPGROUP,), jnp.int32)  # For SLOTS links, 3 numbers of each warp.


def num_wanted(top_p, distance):
    """Each candidate is refused with a probability of 1 - top_p. Where that is low, fewer are enough."""
    return jnp.where((top_p >= ENOUGH) & (distance == -jnp.inf), FEW, SLOTS - 1)


def _is_before(this, other):
    return (this[0] > other[0]) | ((this[0] == other[0]) & (this[1] < other[1]))


def left(score, column, key, taken, is_few):
    """The scores that are left after a candidate is `taken`, (column, key): in a chain those of higher keys. Where few
    candidates are enough, all others: the best few scores have fewer links than a chain of as many."""
    return jnp.where((key > taken[1]) | ((is_few != 0) & (column != taken[0])), score, LOWEST)


def link(score, column, key, smem, j, interpreted: bool):
    """(score, column, key) of the candidate, the same for each thread.

    All are (128,) int32: what each thread has, a score, its column and the key of its logit. `j` is the link's number.
    """
    best = threads.of_warp(score, interpreted)
    first = ~threads.of_warp(jnp.where(score == best, ~column, LOWEST), interpreted)
    highest = threads.of_warp(jnp.where((score == best) & (column == first), key, LOWEST), interpreted)
    found, thread = [best, first, highest], threads.number()
    warp, is_first = thread >> (WARP.bit_length() - 1), (thread & (WARP - 1)) == 0
    place = lambda warp, i: 3 * (WARPS * j + warp) + i
    for i, number in enumerate(found):
        threads.scatter(smem, jnp.where(is_first, place(warp, i), -1), number, threads.PER_THREAD, interpreted)
    threads.sync(interpreted)
    for distance in range(1, WARPS):
        other = [threads.gather(smem, place(warp ^ distance, i), 1, interpreted) for i in range(3)]
        found = [jnp.where(_is_before(other, found), a, b) for a, b in zip(other, found, strict=True)]
    return found


def joined(chains, num_slots: int, num: int, smem, interpreted: bool):
    """[(column, key)], (128,) each, the same for each thread: the first `num` of a row's chain, of the blocks' `chains`
    in global memory. From where it is not known on the columns are UNKNOWN; of equal ones a bound comes before a score.
    """
    slot = plgpu.broadcasted_iota(jnp.int32, chains[0].shape, 0, layout=threads.PER_THREAD)
    place = slot & (SLOTS - 1)
    is_filled = ((place < num) | (place == SLOTS - 1)) & (slot < num_slots)
    score, column, key = (_device.load(ref, threads.PER_THREAD) for ref in chains)
    score, column = jnp.where(is_filled, score, LOWEST), jnp.where(is_filled, column, UNKNOWN)
    highest = lambda x: threads.highest(x, 1, interpreted)
    spread = lambda x: threads.spread(x, score.shape[0], 1, interpreted)
    found = []
    for j in range(num):
        best = highest(score)
        first = ~highest(jnp.where(score == spread(best), ~column, LOWEST))
        is_first = (score == spread(best)) & (column == spread(first))
        _, *of_row = link(best, first, highest(jnp.where(is_first, key, LOWEST)), smem, j, interpreted)
        score = left(score, column, key, list(map(spread, of_row)), score * 0 + (num == FEW))
        found.append(of_row)
    return found

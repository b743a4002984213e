# SPDX-License-Identifier: Apache-2.0
"""A block's part of a row: which columns are its own, their logits, and their keys in shared memory.

A key is an int32 that is ordered as the values are.
"""

import dataclasses

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .. import _device
from .._device import Ref
from . import threads
from .logits import Logits
from .plan import Plan

AHEAD = 2  # Pieces that are being loaded while others are looked at.
LOWEST, HIGHEST = -(2**31), 2**31 - 1


def to_key(x):
    """int32 in the order of `x`: as its bits, of which those after the sign are inverted for a negative number."""
    if x.dtype == jnp.int32:
        return x
    bits = 8 * x.dtype.itemsize
    key = lax.bitcast_convert_type(x, jnp.int32 if bits == 32 else jnp.int16).astype(jnp.int32)
    return key ^ ((key >> 31) & (2 ** (bits - 1) - 1))


def from_key(key, dtype):
    if dtype == jnp.int32:
        return key
    bits = 8 * jnp.dtype(dtype).itemsize
    key = key ^ ((key >> 31) & (2 ** (bits - 1) - 1))
    return lax.bitcast_convert_type(key if bits == 32 else key.astype(jnp.int16), dtype)


@dataclasses.dataclass(frozen=True)
class Part:
    """A block's part of a row: its keys in shared memory, and their indices."""

    plan: Plan
    index_gmem: Ref  # The indices that columns stand for; or None, for themselves.
    keys_smem: Ref

    @property
    def _layout(self):
        return threads.strided(self.plan.vec)

    def column(self):
        return plgpu.broadcasted_iota(jnp.int32, (self.plan.piece,), 0, layout=self._layout)

    def _turn(self, p):
        """(turn, start): the column where it is the turn of piece `p`, and where the piece starts: the last is shifted
        back to end with the row."""
        turn = lax.axis_index("part") * self.plan.part + p * self.plan.piece
        return turn, jnp.minimum(turn, max(self.plan.cols - self.plan.piece, 0))

    def is_fresh(self, p):
        """Where piece `p` has columns that no piece before has, and the row has at all."""
        turn, start = self._turn(p)
        is_fresh = self.column() >= jnp.where(p < self.plan.num_pieces, turn - start, self.plan.piece)
        return is_fresh & (self.column() < self.plan.cols) if self.plan.is_short else is_fresh

    def fresh(self, p, x, otherwise):
        """`x` where piece `p` is fresh. Nearly all pieces are everywhere, and those are not looked at."""
        turn, start = self._turn(p)
        some = lambda: jnp.where(self.is_fresh(p), x, otherwise)
        return some() if self.plan.is_short else lax.cond(turn == start, lambda: x, some)

    def _at(self, p):
        return self.keys_smem.at[pl.ds(p * self.plan.piece, self.plan.piece)]

    def over(self, visit, state):
        """`state = visit(p, state)` for each piece."""
        return lax.fori_loop(0, self.plan.num_pieces, visit, state)

    def values(self, ref, p):
        """Those of piece `p` of `ref`, a row in global memory."""
        return _device.load(ref.at[pl.ds(self._turn(p)[1], self.plan.piece)], self._layout)

    def logits(self, row: Logits, p, interpreted: bool):
        """Those of piece `p` of a row, changed."""
        bits, some = (
            lambda ref, read=read: read(ref, self.place(p), self.plan.vec, interpreted)
            for read in (threads.bits, threads.gather)
        )
        return row.read(some if self.plan.is_short else lambda ref: self.values(ref, p), bits)

    def ahead(self, row: Logits, visit, state, num: int, interpreted: bool):
        """`state = visit(p, logits, state)` for each piece, of which the next `num` are being loaded meanwhile; in the
        end perhaps for some behind the last, which have no fresh columns."""
        num = min(num, self.plan.num_pieces)
        load = lambda p: self.logits(row, jnp.minimum(p, self.plan.num_pieces - 1), interpreted)

        def some(g, state):
            state, loaded = state
            following = []
            for i, x in enumerate(loaded):
                state = visit(g * num + i, x, state)
                following.append(load((g + 1) * num + i))
            return state, following

        return lax.fori_loop(0, pl.cdiv(self.plan.num_pieces, num), some, (state, [load(p) for p in range(num)]))[0]

    def best(self, row: Logits, score_of, interpreted: bool):
        """(scores, columns): the highest of the keys that `score_of` makes of logits and columns, of those that have
        the same place in their pieces."""

        def better(p, x, best):
            score = jnp.where(self.is_fresh(p), score_of(x, self.place(p)), LOWEST)
            is_better = score > best[0]  # Pieces come in order: of equal scores the first stays.
            return jnp.where(is_better, score, best[0]), jnp.where(is_better, self.place(p), best[1])

        return self.ahead(row, better, (self.column() * 0 + LOWEST, self.column() * 0 + HIGHEST), AHEAD, interpreted)

    def load(self, x: Logits, key_of, interpreted: bool):
        """Fills `keys_smem`. Returns the maxima of groups of keys."""
        plan = self.plan

        def some(g, maxima):
            pieces = [g * plan.unroll + u for u in range(plan.unroll)]
            loaded = [self.logits(x, p, interpreted) for p in pieces]  # All in flight at once.
            for p, values in zip(pieces, loaded, strict=True):
                keys = jnp.where(self.is_fresh(p), key_of(values, self.place(p)), LOWEST)
                _device.store(self._at(p), keys)
                maxima = jnp.maximum(maxima, threads.fold(keys, plan.num_maxima, plan.vec, interpreted))
            return maxima

        lowest = plgpu.broadcasted_iota(jnp.int32, (plan.num_maxima,), 0, layout=self._layout) * 0 + LOWEST
        maxima = lax.fori_loop(0, plan.num_pieces // plan.unroll, some, lowest)
        threads.sync(interpreted)  # Threads of a warp may store each other's keys.
        return maxima

    def key(self, p):
        return _device.load(self._at(p), self._layout)

    def place(self, p):
        """The columns of piece `p`; of a short row the last one for all threads that have none."""
        place = self._turn(p)[1] + self.column()
        return jnp.minimum(place, self.plan.cols - 1) if self.plan.is_short else place

    def _rank(self, p):
        """The indices of piece `p`."""
        return self.place(p) if self.index_gmem is None else self.values(self.index_gmem, p)

    def taken(self, p, threshold, last):
        """Which keys of piece `p` are above the threshold, or at it with an index up to `last`: 1, otherwise 0."""
        key = self.key(p)
        tied = (key == threshold) & self.is_fresh(p) & (self._rank(p) <= last)
        return ((key > threshold) | tied).astype(jnp.int32)

    def reaching(self, p, threshold):
        """Which keys of piece `p` reach the threshold. Those that stand for no column are the lowest."""
        return (self.key(p) >= threshold).astype(jnp.int32)

    def num_taken(self, threshold, last):
        """How many are, of those that have the same place in their pieces."""
        return self.over(lambda p, so_far: so_far + self.taken(p, threshold, last), self.column() * 0)

    def num_reaching(self, threshold):
        """How many keys reach it, of those that have the same place in their pieces."""
        return self.over(lambda p, so_far: so_far + self.reaching(p, threshold), self.column() * 0)

# SPDX-License-Identifier: Apache-2.0
"""One stage of a selection: the k largest keys of each part of a row, with their columns.

A key is an int32 that is ordered as the values are; of equal keys the one with the lower index goes first. A warpgroup
per block loads a part of a row into registers, once, and then:

1. `search` finds a threshold that at least k keys reach, and few more. It halves an interval of keys and counts how
   many reach its middle. It looks at maxima first, each of a group of keys: k maxima that reach a threshold are k keys
   that do, and there are few maxima. If too many keys reach it (many large keys in one group), it goes on among all of
   them; and if too many are equal, among their indices.
2. `_collect` writes the keys that reach the threshold and their columns side by side into shared memory: each thread
   counts its own, and a running sum over the threads says where its slots begin.
3. Where a part is a whole row, `sort` puts the slots in order with a bitonic network, and the first k are stored.
   Otherwise all slots are stored, and the next stage selects among those of all parts.

Barriers: the reductions have their own; `threads.sync` stands between a store to shared memory and its loads.
Bound by: memory, one read. Not supported: more than 2**24 columns.
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
from . import logits, threads
from .logits import Logits
from .plan import Plan, plan_of
from .sort import sort

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


def search(count, k: int, most: int, low, high, reached):
    """(threshold, count): the highest threshold that at least `k` keys reach, or a lower one that at most `most` reach.

    `count(threshold)` is how many keys reach a threshold. `reached` keys reach `low`, and these are at least `k`; no
    key is above `high`.
    """

    def halve(state):
        low, high, reached = state
        middle = (low | high) - ((low ^ high) >> 1)  # Rounded up, without overflow.
        here = count(middle)
        enough = here >= k
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle - 1), jnp.where(enough, here, reached)

    going_on = lambda state: (state[0] < state[1]) & (state[2] > most)
    low, _, reached = lax.while_loop(going_on, halve, (low, high, reached))
    return low, reached


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
        return turn, jnp.minimum(turn, self.plan.cols - self.plan.piece)

    def is_fresh(self, p):
        """Where piece `p` has columns that no piece before has."""
        turn, start = self._turn(p)
        return self.column() >= turn - start

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
        bits = lambda ref: threads.bits(ref, self.place(p), self.plan.vec, interpreted)
        return row.read(lambda ref: self.values(ref, p), bits)

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

        def better(p, best):
            score = jnp.where(self.is_fresh(p), score_of(self.logits(row, p, interpreted), self.place(p)), LOWEST)
            is_better = score > best[0]  # Pieces come in order: of equal scores the first stays.
            return jnp.where(is_better, score, best[0]), jnp.where(is_better, self.place(p), best[1])

        return self.over(better, (self.column() * 0 + LOWEST, self.column() * 0 + HIGHEST))

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
        """The columns of piece `p`."""
        return self._turn(p)[1] + self.column()

    def _rank(self, p):
        """The indices of piece `p`."""
        return self.place(p) if self.index_gmem is None else self.values(self.index_gmem, p)

    def taken(self, p, threshold, last):
        """Which keys of piece `p` are above the threshold, or at it with an index up to `last`: 1, otherwise 0."""
        key = self.key(p)

        def exactly():
            tied = (key == threshold) & self.is_fresh(p) & (self._rank(p) <= last)
            return ((key > threshold) | tied).astype(jnp.int32)

        # Keys that stand for no column are the lowest.
        is_simple = (last == HIGHEST) & (threshold > LOWEST)
        return lax.cond(is_simple, lambda: (key >= threshold).astype(jnp.int32), exactly)

    def num_taken(self, threshold, last):
        """How many are, of those that have the same place in their pieces."""
        return self.over(lambda p, so_far: so_far + self.taken(p, threshold, last), self.column() * 0)

    def num_reaching(self, threshold):
        """How many keys reach it, of those that have the same place in their pieces."""
        count = lambda p, so_far: so_far + (self.key(p) >= threshold).astype(jnp.int32)
        return self.over(count, self.column() * 0)

    def bound(self, maxima):
        """(threshold, last, counts): by which at least `k` keys are taken, if there are as many, and at most `slots`;
        and how many are, of those that have the same place in their pieces."""
        plan, low, high = self.plan, jnp.int32(LOWEST), jnp.int32(HIGHEST)
        if plan.part <= plan.slots:
            return low, high, self.num_taken(low, high)
        top = jnp.max(maxima)
        if plan.k == 1:
            low = top
        elif plan.num_maxima >= plan.k:
            count = lambda threshold: jnp.sum((maxima >= threshold).astype(jnp.int32))
            # Few maxima for each key that is wanted stand for more keys: those are not to be too many.
            most = plan.k + plan.k // (8 if plan.num_maxima >= 4 * plan.k else 32)
            low, _ = search(count, plan.k, most, jnp.min(maxima), top, jnp.int32(plan.num_maxima))
        counts = self.num_reaching(low)
        reached = jnp.sum(counts)

        def go_on():
            count = lambda threshold: jnp.sum(self.num_reaching(threshold))
            threshold, still = search(count, plan.k, plan.slots, low, top, reached)
            # Too many keys are equal: how far the indices go, as what is highest of their complements.
            count = lambda complement: jnp.sum(self.num_taken(threshold, ~complement))
            last = ~search(count, plan.k, plan.slots, jnp.int32(LOWEST), high, still)[0]
            return threshold, last, self.num_taken(threshold, last)

        # Mostly there are few enough, and they are counted already.
        return lax.cond((reached <= plan.slots) & (low > LOWEST), lambda: (low, high, counts), go_on)


def _collect(part: Part, x: Logits, key_of, key_smem, index_smem, scan_smem, interpreted: bool):
    """Writes the keys of a part that are taken, and their indices, into the slots."""
    plan = part.plan
    slot = plgpu.broadcasted_iota(jnp.int32, (plan.slots,), 0, layout=threads.PER_THREAD)
    _device.store(key_smem, jnp.where(slot < 0, slot, LOWEST))  # A constant would need 256 slots at a time.
    _device.store(index_smem, slot + (plan.pad + lax.axis_index("part") * plan.slots))
    maxima = part.load(x, key_of, interpreted)
    *bound, counts = part.bound(maxima)
    free = threads.before(threads.totals(counts, plan.vec, interpreted), scan_smem, interpreted)
    refs = key_smem, index_smem
    put = lambda p, free: threads.put(
        refs, part.taken(p, *bound), (part.key(p), part.place(p)), free, plan.vec, interpreted
    )
    part.over(put, free)
    threads.sync(interpreted)
    if part.index_gmem is not None:  # The slots have places, or what is no index.
        place = _device.load(index_smem, threads.PER_THREAD)
        index = threads.gather(part.index_gmem, jnp.minimum(place, plan.cols - 1), 1, interpreted)
        _device.store(index_smem, jnp.where(place < plan.cols, index, place))
        threads.sync(interpreted)


def _select(*refs, plan: Plan, of_refs, num: int, key_of, finish, interpreted: bool):
    x, index_gmem, numbers = of_refs(refs[:num])
    *outs, keys_smem, key_smem, index_smem, scan_smem = refs[num:]
    row, part = lax.axis_index("rows"), lax.axis_index("part")
    here = Part(plan, None if index_gmem is None else index_gmem.at[row], keys_smem)
    _collect(here, x.of_row(row), key_of, key_smem, index_smem, scan_smem, interpreted)
    layout = threads.PER_THREAD
    if plan.num_parts > 1:
        here = pl.ds(part * plan.slots, plan.slots)
        for out_gmem, smem in zip(outs, (key_smem, index_smem), strict=True):
            _device.store(out_gmem.at[row, here], _device.load(smem, layout))
        return
    key, index = sort(key_smem, index_smem, interpreted)
    slot = plgpu.broadcasted_iota(jnp.int32, (plan.slots,), 0, layout=layout)
    if finish is not None:
        numbers = [logits.number_of(ref, row) for ref in numbers]
        outs[0][row] = finish(numbers, key, index, slot, key_smem, interpreted)
        return
    wanted = jnp.where(slot < plan.k, slot, -1)
    for out_gmem, value in zip(outs, (from_key(key, outs[0].dtype), index), strict=True):
        threads.scatter(out_gmem.at[row], wanted, value, layout, interpreted)


def plain_key(x, column):
    return to_key(x)


def select(plan: Plan, x: Logits, index, dtype, target: _host.Target, params, key_of=plain_key, finish=None,
           numbers=()):  # fmt: skip
    """(keys, indices) of (rows, parts * slots), int32; of one part, (values, indices) of (rows, k) in order, or what
    `finish` makes of it.

    Args:
      x: (rows, cols), values or keys, and what changes them.
      index: the indices that the columns of keys stand for; None for the columns themselves.
      key_of: makes keys of values and of their columns.
      finish: makes a row's int32 of its numbers from `numbers`, and of its keys and indices in order.
    """
    last = plan.num_parts == 1
    shape = x.shape[0], plan.k if last else plan.num_parts * plan.slots
    finish = finish if last else None
    arrays, of_refs = logits.leaves((x, index, numbers if finish else ()))
    types = [jax.ShapeDtypeStruct(shape, kind) for kind in (dtype if last else jnp.int32, jnp.int32)]
    return _host.kernel(
        functools.partial(_select, plan=plan, of_refs=of_refs, num=len(arrays), key_of=key_of, finish=finish,
                          interpreted=target.interpreted),
        out_type=[jax.ShapeDtypeStruct(shape[:1], jnp.int32)] if finish else types,
        grid=(x.shape[0], plan.num_parts),
        grid_names=("rows", "part"),
        scratch_types=[plgpu.SMEM((n,), jnp.int32) for n in (plan.part, plan.slots, plan.slots, WARPGROUP)],
        compiler_params=params,
    )(*arrays)  # fmt: skip


def stages(x: Logits, k: int, dtype, target: _host.Target, params, key_of=plain_key, finish=None, numbers=()):
    """(values, indices), (rows, k) each, of the k largest keys of the rows of `x`, at least 128 columns; or (rows,)
    that `finish` makes of them."""
    index, stage = None, 0
    while True:
        plan = plan_of(*x.shape, k, stage, target.num_sms)
        found = select(plan, x, index, dtype, target, params, key_of, finish, numbers)
        if plan.num_parts == 1:
            return found[0] if finish else tuple(found)
        key_of, stage = plain_key, stage + 1
        x, index = Logits(found[0]), found[1]

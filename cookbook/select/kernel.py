# SPDX-License-Identifier: Apache-2.0
"""One stage of a selection: the k largest keys of each part of a row, with their columns.

A key is an int32 that is ordered as the values are; of equal keys the one with the lower index goes first. A warpgroup
per block loads a part of a row into registers, once, and then:

1. `search` finds a threshold that at least k keys reach, and few more. It halves an interval of keys and counts how
   many reach its middle. It looks at maxima first, each of a group of keys: k maxima that reach a threshold are k keys
   that do, and there are few maxima. If too many keys reach it (many large keys in one group), it goes on among all of
   them; and if too many are equal, among their indices.
2. `_collect` writes the keys that reach the threshold side by side into shared memory: each thread counts its own
   and claims as many slots.
3. Where a part is a whole row, `sort` puts the slots in order with a bitonic network, and the first k are stored.
   Otherwise all slots are stored, and the next stage selects among those of all parts.

Barriers: the reductions have their own; `threads.sync` stands between a store to shared memory and its loads.
Bound by: memory, one read. Not supported: more than 2**24 columns.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .. import _device, _host
from .._device import WARPGROUP
from . import threads
from .plan import Plan

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


def _count(taken):
    """How many of the values of a list of arrays are true."""
    return jnp.sum(functools.reduce(jnp.add, [some.astype(jnp.int32) for some in taken]))


def search(keys, k: int, most: int, low, count):
    """(threshold, count): the highest threshold that at least `k` of `keys` reach, or one that at most `most` do.

    `low` is a threshold that `count` keys reach, at least `k`.
    """

    def halve(state):
        low, high, count = state
        middle = (low | high) - ((low ^ high) >> 1)  # Rounded up, without overflow.
        reached = _count([key >= middle for key in keys])
        enough = reached >= k
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle - 1), jnp.where(enough, reached, count)

    going_on = lambda state: (state[0] < state[1]) & (state[2] > most)
    low, _, count = lax.while_loop(going_on, halve, (low, jnp.int32(HIGHEST), count))
    return low, count


def _search_ties(count_to, k: int, most: int, count):
    """The lowest index so that at least `k` keys are taken if of those at the threshold it is the last, or one with
    which at most `most` are."""

    def halve(state):
        low, high, count = state
        middle = (low & high) + ((low ^ high) >> 1)
        reached = count_to(middle)
        enough = reached >= k
        return jnp.where(enough, low, middle + 1), jnp.where(enough, middle, high), jnp.where(enough, reached, count)

    going_on = lambda state: (state[0] < state[1]) & (state[2] > most)
    return lax.while_loop(going_on, halve, (jnp.int32(0), jnp.int32(HIGHEST), count))[1]


class _Part:
    """The keys of a block's part of a row, in registers, and their indices."""

    def __init__(self, plan: Plan, x_gmem, index_gmem):
        self.plan, self.index_gmem, self.layout = plan, index_gmem, threads.strided(plan.piece, plan.vec)
        first = lax.axis_index("part") * plan.part
        self.turns = [first + p * plan.piece for p in range(plan.num_pieces)]
        self.starts = [jnp.minimum(turn, plan.cols - plan.piece) for turn in self.turns]
        self.column = plgpu.broadcasted_iota(jnp.int32, (plan.piece,), 0, layout=self.layout)
        loaded = [_device.load(x_gmem.at[pl.ds(start, plan.piece)], self.layout) for start in self.starts]
        self.keys = [jnp.where(self._is_fresh(p), to_key(x), LOWEST) for p, x in enumerate(loaded)]

    def _is_fresh(self, p: int):
        """Where piece `p`, shifted back to end with the row, has columns that no other piece has."""
        return self.column >= self.turns[p] - self.starts[p]

    def index(self, p: int):
        """Indices of the keys of piece `p`. What is no column of the row comes after all that are."""
        if self.index_gmem is None:
            index = self.starts[p] + self.column
        else:
            index = _device.load(self.index_gmem.at[pl.ds(self.starts[p], self.plan.piece)], self.layout)
        return jnp.where(self._is_fresh(p), index, self.plan.pad + self.turns[p] + self.column)

    def taken(self, p: int, threshold, last):
        """Which keys of piece `p` are above the threshold, or at it with an index up to `last`."""
        key = self.keys[p]
        return (key > threshold) | ((key == threshold) & (self.index(p) <= last))

    def threshold(self):
        """(threshold, last), by which at least `k` keys are taken and at most as many as there are slots."""
        plan, low, every = self.plan, jnp.int32(LOWEST), jnp.int32(self.plan.part)
        if plan.part <= plan.slots:
            return low, jnp.int32(HIGHEST)
        if plan.num_maxima < plan.num_pieces:
            maxima = [functools.reduce(jnp.maximum, self.keys[m :: plan.num_maxima]) for m in range(plan.num_maxima)]
            low, _ = search(maxima, plan.k, plan.k + plan.k // 8, low, jnp.int32(plan.num_maxima * plan.piece))
            every = _count([key >= low for key in self.keys])
        low, count = search(self.keys, plan.k, plan.slots, low, every)
        count_to = lambda last: _count([self.taken(p, low, last) for p in range(plan.num_pieces)])
        return low, _search_ties(count_to, plan.k, plan.slots, count)


def _collect(part: _Part, key_smem, index_smem, counter_smem, interpreted: bool):
    """Writes the keys that are taken, and their indices, into the slots."""
    plan = part.plan
    slot = plgpu.broadcasted_iota(jnp.int32, (plan.slots,), 0, layout=threads.strided(plan.slots, 1))
    key_smem[...] = slot * 0 + LOWEST
    index_smem[...] = slot + (plan.pad + 2**23 + lax.axis_index("part") * plan.slots)
    counter_smem[...] = plgpu.broadcasted_iota(jnp.int32, (WARPGROUP,), 0, layout=threads.PER_THREAD) * 0
    bound = part.threshold()
    threads.sync(interpreted)
    taken = lambda p: part.taken(p, *bound).astype(jnp.int32)
    counts = functools.reduce(jnp.add, [taken(p) for p in range(plan.num_pieces)])
    free = threads.claim(counter_smem, counts, plan.vec, interpreted)
    for p in range(plan.num_pieces):
        slots, free = threads.number(taken(p), free, plan.vec, interpreted)
        threads.scatter(key_smem, slots, part.keys[p], plan.vec, interpreted)
        threads.scatter(index_smem, slots, part.index(p), plan.vec, interpreted)
    threads.sync(interpreted)


def sort(key_smem, index_smem, interpreted: bool):
    """(key, index), the slots in order, the highest key first and of equal ones the lowest index: a bitonic network.

    In each step a slot meets the one that differs from it by `distance`; within runs of `run` slots, every second one
    in reverse, the better of both goes to the front.
    """
    size = key_smem.shape[0]
    layout = threads.strided(size, 1)
    slot = plgpu.broadcasted_iota(jnp.int32, (size,), 0, layout=layout)
    stages = size.bit_length() - 1

    def step(_, state):
        key, index, run, distance = state
        threads.sync(interpreted)
        _device.store(key_smem, key)
        _device.store(index_smem, index)
        threads.sync(interpreted)
        other = slot ^ distance
        other_key = threads.gather(key_smem, other, 1, interpreted)
        other_index = threads.gather(index_smem, other, 1, interpreted)
        better = (key > other_key) | ((key == other_key) & (index < other_index))
        is_front = jnp.where((slot & distance) == 0, 1, 0) ^ jnp.where((slot & run) == 0, 1, 0) ^ 1
        stays = better.astype(jnp.int32) == is_front
        key, index = jnp.where(stays, key, other_key), jnp.where(stays, index, other_index)
        done = distance == 1
        return key, index, jnp.where(done, run * 2, run), jnp.where(done, run, distance >> 1)

    loaded = [_device.load(ref, layout) for ref in (key_smem, index_smem)]
    state = (*loaded, jnp.int32(2), jnp.int32(1))
    return lax.fori_loop(0, stages * (stages + 1) // 2, step, state)[:2]


def _select(x_gmem, *refs, plan: Plan, interpreted: bool):
    *index_gmem, out_gmem, out_index_gmem, key_smem, index_smem, counter_smem = refs
    row, part = lax.axis_index("row"), lax.axis_index("part")
    indices = index_gmem[0].at[row] if index_gmem else None
    _collect(_Part(plan, x_gmem.at[row], indices), key_smem, index_smem, counter_smem, interpreted)
    layout = threads.strided(plan.slots, 1)
    if plan.num_parts > 1:
        here = pl.ds(part * plan.slots, plan.slots)
        _device.store(out_gmem.at[row, here], _device.load(key_smem, layout))
        _device.store(out_index_gmem.at[row, here], _device.load(index_smem, layout))
        return
    key, index = sort(key_smem, index_smem, interpreted)
    slot = plgpu.broadcasted_iota(jnp.int32, (plan.slots,), 0, layout=layout)
    wanted = jnp.where(slot < plan.k, slot, -1)
    threads.scatter(out_gmem.at[row], wanted, from_key(key, out_gmem.dtype), 1, interpreted)
    threads.scatter(out_index_gmem.at[row], wanted, index, 1, interpreted)


def select(plan: Plan, x, index, dtype, target: _host.Target, params):
    """(keys, indices) of (rows, parts * slots), int32; of one part, (values, indices) of (rows, k) in order.

    `x`: (rows, cols), values or keys. `index`: what the columns of keys stand for; None for the columns themselves.
    """
    last = plan.num_parts == 1
    shape = x.shape[0], plan.k if last else plan.num_parts * plan.slots
    return _host.kernel(
        functools.partial(_select, plan=plan, interpreted=target.interpreted),
        out_type=(jax.ShapeDtypeStruct(shape, dtype if last else jnp.int32), jax.ShapeDtypeStruct(shape, jnp.int32)),
        grid=(x.shape[0], plan.num_parts),
        grid_names=("row", "part"),
        scratch_types=[plgpu.SMEM((plan.slots,), jnp.int32)] * 2 + [plgpu.SMEM((WARPGROUP,), jnp.int32)],
        compiler_params=params,
    )(*([x] if index is None else [x, index]))

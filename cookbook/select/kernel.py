# SPDX-License-Identifier: Apache-2.0
"""One stage of a selection: the k largest keys of each part of a row, with their columns.

Keys are ordered as the values are (`part.py`); of equal keys the one with the lower index goes first. A warpgroup
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

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .. import _device, _host
from .._device import WARPGROUP
from . import logits, threads
from .logits import Logits
from .part import HIGHEST, LOWEST, Part, from_key, to_key
from .plan import Plan, plan_of
from .sort import sort


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


def _bound(part: Part, maxima):
    """(threshold, last, counts): by which at least `k` keys are taken, if there are as many, and at most `slots`;
    and how many are, of those that have the same place in their pieces."""
    plan, low, high = part.plan, jnp.int32(LOWEST), jnp.int32(HIGHEST)
    if plan.part <= plan.slots:
        return low, high, part.num_taken(low, high)
    top = jnp.max(maxima)
    if plan.k == 1:
        low = top
    elif plan.num_maxima >= plan.k:
        count = lambda threshold: jnp.sum((maxima >= threshold).astype(jnp.int32))
        # Few maxima for each key that is wanted stand for more keys: those are not to be too many.
        most = plan.k + plan.k // (8 if plan.num_maxima >= 4 * plan.k else 32)
        low, _ = search(count, plan.k, most, jnp.min(maxima), top, jnp.int32(plan.num_maxima))
    counts = part.num_reaching(low)
    reached = jnp.sum(counts)

    def go_on():
        count = lambda threshold: jnp.sum(part.num_reaching(threshold))
        threshold, still = search(count, plan.k, plan.slots, low, top, reached)
        # Too many keys are equal: how far the indices go, as what is highest of their complements.
        count = lambda complement: jnp.sum(part.num_taken(threshold, ~complement))
        last = ~search(count, plan.k, plan.slots, jnp.int32(LOWEST), high, still)[0]
        return threshold, last, part.num_taken(threshold, last)

    # Mostly there are few enough, and they are counted already.
    return lax.cond((reached <= plan.slots) & (low > LOWEST), lambda: (low, high, counts), go_on)


def _collect(part: Part, x: Logits, key_of, key_smem, index_smem, scan_smem, interpreted: bool):
    """Writes the keys of a part that are taken, and their indices, into the slots."""
    plan = part.plan
    slot = plgpu.broadcasted_iota(jnp.int32, (plan.slots,), 0, layout=threads.PER_THREAD)
    _device.store(key_smem, jnp.where(slot < 0, slot, LOWEST))  # A constant would need 256 slots at a time.
    _device.store(index_smem, slot + (plan.pad + lax.axis_index("part") * plan.slots))
    maxima = part.load(x, key_of, interpreted)
    threshold, last, counts = _bound(part, maxima)
    free = threads.before(threads.totals(counts, plan.vec, interpreted), scan_smem, interpreted)
    refs, is_sparse = (key_smem, index_smem), plan.k * WARPGROUP < plan.part

    def put_all(taken):
        put = lambda p, free: threads.put(
            refs, taken(p), (part.key(p), part.place(p)), free, plan.vec, is_sparse, interpreted
        )
        return part.over(put, free)

    is_simple = (last == HIGHEST) & (threshold > LOWEST)
    reaching, taken = (functools.partial(which, threshold=threshold) for which in (part.reaching, part.taken))
    lax.cond(is_simple, lambda: put_all(reaching), lambda: put_all(functools.partial(taken, last=last)))
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
    """(values, indices), (rows, k) each, of the k largest keys of the rows of `x`; or (rows,) that `finish` makes of
    them."""
    index, stage = None, 0
    while True:
        plan = plan_of(*x.shape, k, stage, target.num_sms)
        found = select(plan, x, index, dtype, target, params, key_of, finish, numbers)
        if plan.num_parts == 1:
            return found[0] if finish else tuple(found)
        key_of, stage = plain_key, stage + 1
        x, index = Logits(found[0]), found[1]

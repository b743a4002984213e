# SPDX-License-Identifier: Apache-2.0
"""Slots in shared memory in order, by one warpgroup."""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from .. import _device
from .._device import WARP, WARPGROUP
from . import threads


def sort(key_smem, index_smem, interpreted: bool):
    """(key, index), the slots in order, the highest key first and of equal ones the lowest index: a bitonic network.

    In each step a slot meets the one that differs from it by `distance`; within runs of `run` slots, every second one
    in reverse, the better of both goes to the front. A thread has neighbouring slots, so that most meet in a thread or
    in a warp.
    """
    size, layout = key_smem.shape[0], threads.PER_THREAD
    each = size // WARPGROUP  # Slots of a thread.
    at = plgpu.broadcasted_iota(jnp.int32, (size,), 0, layout=layout)
    slot = (at & (WARPGROUP - 1)) * each + (at >> (WARPGROUP.bit_length() - 1))

    def partners(array, ref, distance):
        if distance < WARP:
            return threads.of_lane(array, distance, interpreted)
        _device.store(ref, array)
        threads.sync(interpreted)
        found = threads.gather(ref, at ^ distance, 1, interpreted)
        threads.sync(interpreted)
        return found

    def meet(state, is_up, distance):
        if distance < each:
            return threads.in_order(*state, is_up, distance, interpreted)
        distance //= each  # Between threads.
        key, index = state
        other_key, other_index = map(functools.partial(partners, distance=distance), state, (key_smem, index_smem))
        better = (key > other_key) | ((key == other_key) & (index < other_index))
        is_front = threads.spread(jnp.where((threads.number() & distance) == 0, 1, 0), size, 1, interpreted)
        stays = better ^ (is_up != is_front)
        return jnp.where(stays, key, other_key), jnp.where(stays, index, other_index)

    def stage(s, state):
        run, distance = 2 << s, size // 2
        is_up = jnp.where((slot & run) == 0, 1, 0)
        while distance:
            met = functools.partial(meet, is_up=is_up, distance=distance)
            state = lax.cond(distance < run, met, lambda state: state, state)
            distance //= 2
        return state

    loaded = tuple(_device.load(ref, layout) for ref in (key_smem, index_smem))
    threads.sync(interpreted)
    state = lax.fori_loop(0, size.bit_length() - 1, stage, loaded)
    if each == 1:
        return state
    # In the order of `at` again, through shared memory; the lowest bits are mixed, so that banks do not conflict.
    place = lambda slot: (slot % each * WARPGROUP + slot // each) ^ (slot % each % WARP)
    for ref, array in zip((key_smem, index_smem), state, strict=True):
        threads.scatter(ref, place(slot), array, layout, interpreted)
    threads.sync(interpreted)
    return tuple(threads.gather(ref, place(at), 1, interpreted) for ref in (key_smem, index_smem))

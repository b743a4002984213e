# SPDX-License-Identifier: Apache-2.0
"""Memory that each thread reads or writes where its own values say, and what a thread makes of its own values alone.

Pallas has no gather and no scatter, so these are a few lines of MLIR each.

All arrays are 1-D and `strided`: element i of (width,) values lies in thread i / vec % 128. JAX's interpreter runs no
such code, so each function has a second form in `jnp`, which it gets by `interpreted`.
"""

import functools

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, memref, scf, vector

from .. import _device
from .._device import WARP, WARPGROUP


def strided(vec: int):
    """The layout of 1-D values of which each thread has runs of `vec`."""
    # As `Layout.WG_STRIDED`, for which JAX sums integers across a warp in 5 steps; for this one it does so in one.
    tiling = plgpu.Tiling(((WARPGROUP * vec,), (WARP * vec,), (vec,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)


PER_THREAD = strided(1)


def _array(shape, dtype, layout):
    return plgpu.ShapeDtypeStruct(shape, dtype, layout=layout)


def _values(array):
    """The values that a thread has of `array`, in the order of their indices."""
    return [
        vector.extract(register, dynamic_position=[], static_position=[i])
        for register in array.registers.flat
        for i in range(register.type.shape[0])
    ]


def _like(array, values):
    """`values` of a thread as an array laid out as `array`."""
    vec = array.registers.flat[0].type.shape[0]
    kind = ir.VectorType.get((vec,), values[0].type)
    registers = [vector.from_elements(kind, values[i : i + vec]) for i in range(0, len(values), vec)]
    signed = True if isinstance(values[0].type, ir.IntegerType) else None
    registers = np.array(registers, dtype=object).reshape(array.registers.shape)
    return mgpu.FragmentedArray(_registers=registers, _layout=array.layout, _is_signed=signed)


def _i32(value: int):
    return arith.constant(ir.IntegerType.get_signless(32), value)


def _index(value):
    return arith.index_cast(ir.IndexType.get(), value)


def sync(interpreted: bool):
    """Every thread of the warpgroup loads after it what any of them has stored before."""
    if not interpreted:

        @plgpu.inline_mgpu()
        def wait(_):
            mgpu.utils.warpgroup_barrier()

        wait()


def totals(x, vec: int, interpreted: bool):
    """(128,): the sum of the values of each thread."""
    if interpreted:
        return x.reshape(-1, WARPGROUP, vec).sum((0, 2))
    add = arith.addi if x.dtype == jnp.int32 else arith.addf

    @plgpu.inline_mgpu(arg_types=(strided(vec), PER_THREAD), return_type=_array((WARPGROUP,), x.dtype, PER_THREAD))
    def sums(_, x, like):
        return _like(like, [functools.reduce(add, _values(x))])

    return sums(x, number())


def totals_above(x, shares, value, vec: int, interpreted: bool):
    """(128,): of each thread the sum of the shares where `x`, float32, is above its `value`, (128,)."""
    if interpreted:
        return totals(jnp.where(x > spread(value, x.shape[0], vec, interpreted), shares, 0.0), vec, interpreted)
    layout = strided(vec)

    @plgpu.inline_mgpu(
        arg_types=(layout, layout, PER_THREAD, PER_THREAD), return_type=_array((WARPGROUP,), x.dtype, PER_THREAD)
    )
    def sums(_, x, shares, value, zero):
        (value,), (total,) = _values(value), _values(zero)
        for each, share in zip(_values(x), _values(shares), strict=True):
            # Chosen after the sum, it is one instruction under a condition.
            is_above = arith.cmpf(arith.CmpFPredicate.OGT, each, value)
            total = arith.select(is_above, arith.addf(total, share), total)
        return _like(zero, [total])

    return sums(x, shares, value, number().astype(jnp.float32) * 0.0)


def highest(x, vec: int, interpreted: bool):
    """(128,): the maximum of the values of each thread, int32, or float32 of which NaN are left out."""
    if interpreted:
        return jnp.nanmax(x.reshape(-1, WARPGROUP, vec), axis=(0, 2))
    larger = arith.maxsi if x.dtype == jnp.int32 else arith.maxnumf

    @plgpu.inline_mgpu(arg_types=(strided(vec), PER_THREAD), return_type=_array((WARPGROUP,), x.dtype, PER_THREAD))
    def maxima(_, x, like):
        return _like(like, [functools.reduce(larger, _values(x))])

    return maxima(x, number())


def spread(x, size: int, vec: int, interpreted: bool):
    """(size,): each thread's value of `x`, (128,), wherever the thread has one."""
    if interpreted:
        return jnp.broadcast_to(x[:, None], (size // (WARPGROUP * vec), WARPGROUP, vec)).reshape(-1)
    layout = strided(vec)

    @plgpu.inline_mgpu(arg_types=(PER_THREAD, layout), return_type=_array((size,), x.dtype, layout))
    def copies(_, x, like):
        return _like(like, _values(x) * (size // WARPGROUP))

    return copies(x, plgpu.broadcasted_iota(jnp.int32, (size,), 0, layout=layout))


def of_warp(x, interpreted: bool):
    """(128,): the maximum of int32 `x`, (128,), in each thread's warp."""
    if interpreted:
        return jnp.repeat(x.reshape(-1, WARP).max(1), WARP)

    @plgpu.inline_mgpu(arg_types=(PER_THREAD,), return_type=_array(x.shape, x.dtype, PER_THREAD))
    def maximum(_, x):
        (value,) = _values(x)
        return _like(x, [mgpu.utils.redux(value, _i32(-1), mgpu.utils.ReductionKind.MAX)])

    return maximum(x)


def of_lane(x, distance: int, interpreted: bool):
    """`x`, `PER_THREAD`, from the thread whose number differs by `distance`, a power of 2 below 32."""
    if interpreted:
        return x[jnp.arange(x.shape[0]) ^ distance]

    @plgpu.inline_mgpu(arg_types=(PER_THREAD,), return_type=_array(x.shape, x.dtype, PER_THREAD))
    def exchange(_, x):
        return _like(x, [mgpu.utils.shfl_bfly(value, distance) for value in _values(x)])

    return exchange(x)


def in_order(key, index, is_up, distance: int, interpreted: bool):
    """(key, index), `PER_THREAD`, after the registers of each thread whose numbers differ by `distance` have met. The
    higher key, of equal ones the lower index, goes into the first of both where `is_up` is 1, and else into the second.
    """
    if interpreted:
        place = jnp.arange(key.shape[0])
        other_key, other_index = (x[place ^ (distance * WARPGROUP)] for x in (key, index))
        better = (key > other_key) | ((key == other_key) & (index < other_index))
        stays = better ^ (((place & (distance * WARPGROUP)) == 0) != (is_up != 0))
        return jnp.where(stays, key, other_key), jnp.where(stays, index, other_index)

    @plgpu.inline_mgpu(
        arg_types=(PER_THREAD,) * 3, return_type=[_array(key.shape, jnp.int32, PER_THREAD) for _ in range(2)]
    )
    def meet(_, key, index, is_up):
        compare, (keys, indices) = arith.CmpIPredicate, map(_values, (key, index))
        for i, up in enumerate(_values(is_up)):
            j = i ^ distance
            if i > j:
                continue
            tied = arith.andi(arith.cmpi(compare.eq, keys[i], keys[j]), arith.cmpi(compare.slt, indices[i], indices[j]))
            better = arith.ori(arith.cmpi(compare.sgt, keys[i], keys[j]), tied)
            stays = arith.cmpi(compare.eq, better, arith.cmpi(compare.ne, up, _i32(0)))
            for each in (keys, indices):
                each[i], each[j] = (arith.select(stays, each[a], each[b]) for a, b in ((i, j), (j, i)))
        return _like(key, keys), _like(index, indices)

    return tuple(meet(key, index, is_up))


def number():
    """(128,): the number of each thread."""
    return plgpu.broadcasted_iota(jnp.int32, (WARPGROUP,), 0, layout=PER_THREAD)


def before(counts, smem, interpreted: bool):
    """(128,): the sum of `counts`, (128,), of the threads before each. `smem`: (128,) int32."""

    def step(i, total):
        distance = 1 << i
        sync(interpreted)
        _device.store(smem, total)
        sync(interpreted)
        earlier = gather(smem, jnp.maximum(number() - distance, 0), 1, interpreted)
        return total + jnp.where(number() >= distance, earlier, 0)

    return lax.fori_loop(0, WARPGROUP.bit_length() - 1, step, counts) - counts


def fold(x, width: int, vec: int, interpreted: bool):
    """(width,): of the values of `x` whose indices differ by multiples of `width`, the maximum."""
    if interpreted:
        return jnp.max(x.reshape(-1, width), axis=0)
    layout = strided(vec)

    @plgpu.inline_mgpu(arg_types=(layout,), return_type=_array((width,), x.dtype, layout))
    def reduce(_, x):
        groups = x.registers.reshape(-1, *layout.to_mgpu().registers_shape((width,)))
        return mgpu.FragmentedArray(
            _registers=functools.reduce(np.vectorize(arith.maxsi, otypes=[object]), groups),
            _layout=x.layout,
            _is_signed=True,
        )

    return reduce(x)


def put(refs, taken, arrays, slot, vec: int, is_sparse: bool, interpreted: bool):
    """Stores what `arrays` hold where `taken` is not 0 in `refs`, each thread into its own slots: from its `slot` on,
    which differ by `taken`.

    `is_sparse`: most warps have no value to store in a run of `vec`, which they skip. Returns each thread's next slot.
    """
    if interpreted:
        by_thread = lambda x: x.reshape(-1, WARPGROUP, vec).swapaxes(0, 1).reshape(WARPGROUP, -1)
        mine = by_thread(taken)
        slots = jnp.where(mine > 0, slot[:, None] + jnp.cumsum(mine, axis=1) - mine, -1)
        for ref, array in zip(refs, arrays, strict=True):
            scatter(ref, slots, by_thread(array), None, interpreted)
        return slot + mine.sum(1)
    layout = strided(vec)

    @plgpu.inline_mgpu(
        arg_types=([plgpu.RefType()] * len(refs), layout, [layout] * len(refs), PER_THREAD),
        return_type=_array((WARPGROUP,), jnp.int32, PER_THREAD),
    )
    def store(_, refs, taken, arrays, slot):
        is_some = lambda number: arith.cmpi(arith.CmpIPredicate.ne, number, _i32(0))

        def put_run(run, at):
            for step, *values in run:
                some = scf.IfOp(is_some(step))
                with ir.InsertionPoint(some.then_block):
                    for ref, value in zip(refs, values, strict=True):
                        memref.store(value, ref, [_index(at)])
                    scf.yield_([])
                at = arith.addi(at, step)
            return at

        each, (at,) = list(zip(_values(taken), *map(_values, arrays), strict=True)), _values(slot)
        for start in range(0, len(each), vec):
            run = each[start : start + vec]
            if not is_sparse:
                at = put_run(run, at)
                continue
            some = scf.IfOp(is_some(functools.reduce(arith.ori, [step for step, *_ in run])), [at.type], has_else=True)
            with ir.InsertionPoint(some.then_block):
                scf.yield_([put_run(run, at)])
            with ir.InsertionPoint(some.else_block):
                scf.yield_([at])
            at = some.results[0]
        return _like(slot, [at])

    return store(list(refs), taken, list(arrays), slot)


def scatter(ref, slots, values, layout, interpreted: bool):
    """`ref[slots[i]] = values[i]` wherever `slots[i]` is at least 0; the slots are different."""
    if interpreted:
        ref[...] = ref[...].at[jnp.where(slots < 0, ref.shape[0], slots)].set(values, mode="drop")
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout, layout))
    def store(_, ref, slots, values):
        for slot, value in zip(_values(slots), _values(values), strict=True):
            some = scf.IfOp(arith.cmpi(arith.CmpIPredicate.sge, slot, _i32(0)))
            with ir.InsertionPoint(some.then_block):
                memref.store(value, ref, [_index(slot)])
                scf.yield_([])

    store(ref, slots, values)


def store_one(ref, values, interpreted: bool):
    """`ref[0] = ` what each of `values`, (128,), is."""
    scatter(ref, jnp.where(number() == 0, 0, -1), values, PER_THREAD, interpreted)


def bits(words, column, vec: int, interpreted: bool):
    """1 where a set, packed into `words`, has the column, otherwise 0. Runs of `vec` columns are in one word."""
    if interpreted:
        return (words[...][column >> 5] >> (column & 31)) & 1
    layout = strided(vec)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout), return_type=_array(column.shape, jnp.int32, layout))
    def load(_, words, column):
        columns, found = _values(column), []
        for i in range(0, len(columns), vec):
            word = memref.load(words, [_index(arith.shrui(columns[i], _i32(5)))])
            shifts = [arith.andi(each, _i32(31)) for each in columns[i : i + vec]]
            found += [arith.andi(arith.shrui(word, shift), _i32(1)) for shift in shifts]
        return _like(column, found)

    return load(words, column)


def gather(ref, slots, vec: int, interpreted: bool):
    """`ref[slots]`; of a 2-D `ref` with two arrays of `slots`."""
    slots = slots if isinstance(slots, tuple) else (slots,)
    if interpreted:
        return ref[...][slots]
    layout = strided(vec)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), [layout] * len(slots)),
        return_type=_array(slots[0].shape, ref.dtype, layout),
    )
    def load(_, ref, slots):
        places = zip(*map(_values, slots), strict=True)
        return _like(slots[0], [memref.load(ref, [_index(slot) for slot in place]) for place in places])

    return load(ref, list(slots))

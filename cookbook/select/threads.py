# SPDX-License-Identifier: Apache-2.0
"""Memory that each thread reads or writes where its own values say: Pallas has no gather, no scatter and no atomics
that return a value, so these are a few lines of MLIR each.

All arrays are 1-D and `strided`: element i of (width,) values lies in thread i / vec % 128. JAX's interpreter runs no
such code, so each function has a second form in `jnp`, which it gets by `interpreted`.
"""

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, memref, scf, vector

from .._device import WARPGROUP


def strided(width: int, vec: int):
    """The layout of (width,) values, of which each thread has runs of `vec`."""
    return plgpu.Layout.WG_STRIDED((width,), vec)


PER_THREAD = strided(WARPGROUP, 1)  # One value per thread.


def _array(shape, dtype, layout):
    return plgpu.ShapeDtypeStruct(shape, dtype, layout=layout)


def _values(array):
    """The values that a thread has of `array`, in the order of their indices."""
    return [
        vector.extract(register, dynamic_position=[], static_position=[i])
        for register in array.registers
        for i in range(register.type.shape[0])
    ]


def _like(array, values):
    """`values` of a thread as an array laid out as `array`."""
    vec = array.registers[0].type.shape[0]
    kind = ir.VectorType.get((vec,), values[0].type)
    registers = [vector.from_elements(kind, values[i : i + vec]) for i in range(0, len(values), vec)]
    signed = True if isinstance(values[0].type, ir.IntegerType) else None
    return mgpu.FragmentedArray(
        _registers=np.array(registers, dtype=object), _layout=array.layout, _is_signed=signed
    )


def _i32(value: int):
    return arith.constant(ir.IntegerType.get_signless(32), value)


def _index(value):
    return arith.index_cast(ir.IndexType.get(), value)


def sync(interpreted: bool):
    """What any thread has stored before, every thread of the warpgroup loads after."""
    if not interpreted:

        @plgpu.inline_mgpu()
        def wait(_):
            mgpu.utils.warpgroup_barrier()

        wait()


def claim(counter_smem, taken, vec: int, interpreted: bool):
    """(128,) int32: the first slot of each thread, which takes as many as the sum of its values of `taken`.

    Slots are numbered from `counter_smem`, (1,) int32, which is moved on. Which thread gets which differs from run to
    run.
    """
    if interpreted:
        counts = taken.reshape(-1, WARPGROUP, vec).sum((0, 2))
        first = counter_smem[0] + jnp.cumsum(counts) - counts
        counter_smem[0] += jnp.sum(counts)
        return first

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), strided(*taken.shape, vec)),
        return_type=_array((WARPGROUP,), jnp.int32, PER_THREAD),
    )
    def add(_, counter, taken):
        count = _i32(0)
        for value in _values(taken):
            count = arith.addi(count, value)
        i32 = ir.IntegerType.get_signless(32)
        some = scf.IfOp(arith.cmpi(arith.CmpIPredicate.sgt, count, _i32(0)), [i32], has_else=True)
        with ir.InsertionPoint(some.then_block):
            zero = arith.constant(ir.IndexType.get(), 0)
            scf.yield_([memref.atomic_rmw(arith.AtomicRMWKind.addi, count, counter, [zero])])
        with ir.InsertionPoint(some.else_block):
            scf.yield_([_i32(0)])
        register = vector.from_elements(ir.VectorType.get((1,), i32), [some.results[0]])
        return mgpu.FragmentedArray(
            _registers=np.array([register], dtype=object), _layout=PER_THREAD.to_mgpu(), _is_signed=True
        )

    return add(counter_smem, taken)


def number(taken, first, vec: int, interpreted: bool):
    """The slots of the values for which `taken` is 1, otherwise -1; and the next slot of each thread, after `first`."""
    if interpreted:
        mine = taken.reshape(-1, WARPGROUP, vec).swapaxes(0, 1).reshape(WARPGROUP, -1)
        slots = first[:, None] + jnp.cumsum(mine, axis=1) - mine
        slots = jnp.where(mine > 0, slots, -1).reshape(WARPGROUP, -1, vec).swapaxes(0, 1).reshape(taken.shape)
        return slots, first + mine.sum(1)
    layout = strided(*taken.shape, vec)

    @plgpu.inline_mgpu(
        arg_types=(layout, PER_THREAD),
        return_type=(_array(taken.shape, jnp.int32, layout), _array((WARPGROUP,), jnp.int32, PER_THREAD)),
    )
    def count(_, taken, first):
        (slot,), slots = _values(first), []
        for value in _values(taken):
            is_taken = arith.cmpi(arith.CmpIPredicate.ne, value, _i32(0))
            slots.append(arith.select(is_taken, slot, _i32(-1)))
            slot = arith.addi(slot, value)
        return _like(taken, slots), _like(first, [slot])

    return count(taken, first)


def scatter(ref, slots, values, vec: int, interpreted: bool):
    """`ref[slots[i]] = values[i]` wherever `slots[i]` is at least 0; the slots are different."""
    if interpreted:
        ref[...] = ref[...].at[jnp.where(slots < 0, ref.shape[0], slots)].set(values, mode="drop")
        return
    layout = strided(*values.shape, vec)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout, layout))
    def store(_, ref, slots, values):
        for slot, value in zip(_values(slots), _values(values), strict=True):
            some = scf.IfOp(arith.cmpi(arith.CmpIPredicate.sge, slot, _i32(0)))
            with ir.InsertionPoint(some.then_block):
                memref.store(value, ref, [_index(slot)])
                scf.yield_([])

    store(ref, slots, values)


def gather(ref, slots, vec: int, interpreted: bool):
    """`ref[slots]`."""
    if interpreted:
        return ref[...][slots]
    layout = strided(*slots.shape, vec)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout), return_type=_array(slots.shape, ref.dtype, layout))
    def load(_, ref, slots):
        return _like(slots, [memref.load(ref, [_index(slot)]) for slot in _values(slots)])

    return load(ref, slots)

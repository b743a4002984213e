# SPDX-License-Identifier: Apache-2.0
"""Rows of 16-bit numbers as sums of two e4m3 numbers, times a power of two for each row.

    x[m, k] ~ scales[m] * (high[m, k] + low[m, k])

Shapes: x (M, K) bfloat16 or float16; halves (M, 2 Kp) float8_e4m3fn, a row's high ones, then its low ones; scales
(2, M + BEYOND) float32: twice, the second time from row 1 on, because a thread loads those of two rows at once, at a
multiple of 8 bytes; the rest is not written. Kp is K rounded up to a multiple of 32; zeros fill the rest. In each 16
values of K, value 8 pair + 2 lane + half lies at 4 lane + 2 half + pair.

A row's scale brings its largest magnitude into (224, 448]; no e4m3 number is above 448. The high half is the nearest
e4m3 number, the low half the one nearest to the remainder. Their sum is exact for bfloat16 values of at least 2^-9 of
the row's largest, and less than 2^-17 of the largest away from smaller ones. The scale of a row with an infinity or a
NaN is NaN.

A block has one row, which its 128 threads keep in registers. A thread loads 16 neighbouring values at a time, so
values change places inside a thread only, and all loads are in flight together. Threads beyond the end of the row load
its last values again and store the same bytes. XLA splits rows of more than 8192 values.

Bound by: memory; a decode step's few rows by latency.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, vector

from ... import _host
from ..._device import WARPGROUP

CHUNK = 16  # Neighbouring values of a thread.
LOADED = 8  # Values that one instruction loads: 16 bytes.
UNIT = 32  # Kp is a multiple of it.
VALUES_MAX = 8192  # A row's values in registers, 64 per thread.
INFINITY = 0x7F800000  # The bits of a float32.
BEYOND = 64  # More scales than rows: a tile that begins at the last row may have as many as 48.


class SplitRows(NamedTuple):
    """Rows as halves, and their scales; see above."""

    halves: jax.Array
    scales: jax.Array


def split_rows_reference(x):
    x = jnp.pad(x.astype(jnp.float32), ((0, 0), (0, -x.shape[1] % UNIT)))
    scales, inverse = _scales_of(_magnitudes(x).max(1))
    scaled = x * inverse[:, None]
    # XLA drops a conversion to e4m3 and back, so this rounds by hand: to 4 bits, or below 2^-6 to multiples of 2^-9.
    bits = lax.bitcast_convert_type(scaled, jnp.uint32)
    normal = lax.bitcast_convert_type((bits + 0x7FFFF + (bits >> 20 & 1)) & jnp.uint32(0xFFF00000), jnp.float32)
    high = jnp.where(jnp.abs(scaled) < 2.0**-6, jnp.round(scaled * 2.0**9) * 2.0**-9, normal)
    both = jnp.stack([high, scaled - high], 1).astype(jnp.float8_e4m3fn)
    both = both.reshape(len(x), -1, 2, 4, 2).transpose(0, 1, 3, 4, 2)  # (row, chunk, lane, half, pair).
    return SplitRows(both.reshape(len(x), -1), jnp.stack([_beyond(scales, BEYOND), _beyond(scales[1:], BEYOND + 1)]))


def _beyond(scales, count: int):
    return jnp.pad(scales, (0, count))


def _magnitudes(x):
    """The bits of |x|, of float32, which are in the order of the numbers; those of a NaN are largest."""
    return lax.bitcast_convert_type(x, jnp.int32) & 0x7FFFFFFF


def _scales_of(largest):
    """(scale, 1 / scale) of rows, from the bits of their largest magnitudes. Both are normal numbers, or the scale is
    NaN."""
    # A mantissa above that of 448 = 1.75 * 2^8 carries into the exponent.
    exponent = jnp.maximum(((largest + 0x1FFFFF) >> 23) - 127 - 8, -126)
    power = lambda exponent: lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)
    return jnp.where(largest < INFINITY, power(exponent), jnp.nan), power(-exponent)


def _padded(cols: int) -> int:
    return pl.cdiv(cols, UNIT) * UNIT


def _layout(cols: int):
    """Every thread has a chunk of each 128."""
    piece = WARPGROUP * CHUNK
    return plgpu.Layout.WG_STRIDED((pl.cdiv(cols, piece) * piece,), vec_size=CHUNK)


def _chunks(cols: int):
    """Where this thread's chunks of a row lie, counted in chunks, as MLIR values."""
    thread, num = mgpu.utils.thread_idx(), _padded(cols) // CHUNK
    constant = lambda value: mgpu.utils.c(value, thread.type)
    return [arith.minui(arith.addi(thread, constant(i)), constant(num - 1)) for i in range(0, num, WARPGROUP)]


def _address(row, index, kind):
    """The place `index` of a row in global memory that is divided into vectors `kind`."""
    pointer = mgpu.utils.llvm.addrspacecast(ir.Type.parse("!llvm.ptr<1>"), mgpu.utils.memref_ptr(row))
    return mgpu.utils.getelementptr(pointer, [index], kind)


def _load(row, part: int, cols: int):
    """The `part`th `cols` values of a row, in `_layout`."""
    layout = _layout(cols)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),), return_type=plgpu.ShapeDtypeStruct(*layout.args, row.dtype, layout=layout)
    )
    def load(_, row):
        kind = ir.VectorType.get((LOADED,), ir.MemRefType(row.type).element_type)
        num = cols // LOADED

        def load_at(index):
            constant = lambda value: mgpu.utils.c(value, index.type)
            inside = arith.minui(index, constant(num - 1))
            address = _address(row, arith.addi(inside, constant(part * num)), kind)
            values = mgpu.utils.llvm.load(kind, address, alignment=16)
            if cols == _padded(cols):
                return values
            is_inside = arith.cmpi(arith.CmpIPredicate.ult, index, constant(num))
            return arith.select(is_inside, values, mgpu.utils.c(0.0, kind))

        def chunk_at(index):
            first = arith.muli(index, mgpu.utils.c(2, index.type))
            second = arith.addi(first, mgpu.utils.c(1, index.type))
            return mgpu.utils.vector_concat([load_at(first), load_at(second)])

        return _array([chunk_at(index) for index in _chunks(cols)], layout)

    return load(row)


def _converted(how: str, kind, *args):
    """What PTX's conversion `how` makes of one or two MLIR values, as a value of the type `kind`."""
    places = ", ".join(f"${i}" for i in range(len(args) + 1))
    bits = ir.IntegerType.get_signless(mgpu.utils.bitwidth(kind))
    return mgpu.utils.bitcast(mgpu.utils.inline_ptx(f"cvt.{how} {places};", *args, result_types=bits), kind)


def _at(values, i: int):
    return vector.extract(values, [], [i])


def _rounded(values, dtype):
    """float32 values in a `_layout`, rounded to 16 bits two at a time: of one alone the GPU rounds a fourth as many."""
    layout = _layout(values.size)

    @plgpu.inline_mgpu(arg_types=(layout,), return_type=plgpu.ShapeDtypeStruct(values.shape, dtype, layout=layout))
    def round_pairs(_, values):
        pair = ir.VectorType.get((2,), mgpu.utils.dtype_to_ir_type(jnp.dtype(dtype)))
        name = "bf16x2" if dtype == jnp.bfloat16 else "f16x2"
        pairs = lambda chunk: [
            _converted(f"rn.{name}.f32", pair, _at(chunk, i + 1), _at(chunk, i)) for i in range(0, CHUNK, 2)
        ]
        return _array([mgpu.utils.vector_concat(pairs(chunk)) for chunk in values.registers], layout)

    return round_pairs(values)


def _array(registers, layout):
    return mgpu.FragmentedArray(_registers=np.array(registers, object), _layout=layout.to_mgpu(), _is_signed=None)


def _store(scaled, row, cols: int):
    """Splits float32 values in `_layout` and stores the halves."""

    @plgpu.inline_mgpu(arg_types=(_layout(cols), plgpu.RefType()))
    def store(_, scaled, row):
        i16, f16, f32 = ir.IntegerType.get_signless(16), ir.F16Type.get(), ir.F32Type.get()
        pair_of = lambda kind: ir.VectorType.get((2,), kind)
        halves = ir.VectorType.get((CHUNK // 2,), i16)
        rounded = lambda pair: _converted("rn.satfinite.e4m3x2.f32", i16, _at(pair, 1), _at(pair, 0))
        widened = lambda bits: arith.extf(pair_of(f32), _converted("rn.f16x2.e4m3x2", pair_of(f16), bits))
        for index, values in zip(_chunks(cols), scaled.registers, strict=True):
            pairs = [vector.from_elements(pair_of(f32), [_at(values, i), _at(values, 8 + i)]) for i in range(8)]
            high = [rounded(pair) for pair in pairs]
            low = [rounded(arith.subf(pair, widened(bits))) for pair, bits in zip(pairs, high, strict=True)]
            for i, half in enumerate((high, low)):
                chunk = arith.addi(index, mgpu.utils.c(i * _padded(cols) // CHUNK, index.type))
                words = vector.from_elements(halves, half)
                mgpu.utils.llvm.store(words, _address(row, chunk, halves), alignment=16)

    store(scaled, row)


def _row(x_gmem, halves_gmem, scales_gmem, *, activation, interpreted: bool):
    row, parts = lax.axis_index("row"), _parts(activation)
    x, cols = x_gmem.at[row], x_gmem.shape[1] // parts
    if interpreted:
        values = _activated(activation, [x[pl.ds(i * cols, cols)] for i in range(parts)])
        halves, scales = split_rows_reference(values[None])
        halves_gmem[row] = halves[0]
        _store_scale(scales_gmem, row, scales[0, 0])
        return
    values = _activated(activation, [_load(x, i, cols) for i in range(parts)], _rounded).astype(jnp.float32)
    largest = jnp.max(_magnitudes(values))
    # JAX has no bitcast of a lone number.
    of_row = lambda shape: _scales_of(lax.broadcast_in_dim(largest, shape, []))
    _store(values * of_row(values.shape)[1], halves_gmem.at[row], cols)
    _store_scale(scales_gmem, row, of_row((1,))[0][0])


def _store_scale(scales_gmem, row, scale):
    scales_gmem[0, row] = scale

    @pl.when(row > 0)
    def _():
        scales_gmem[1, row - 1] = scale


def _parts(activation) -> int:
    return 1 if activation is None else 2


def _activated(activation, parts, rounded=jnp.astype):
    if activation is None:
        return parts[0]
    return rounded(activation(*(part.astype(jnp.float32) for part in parts)), parts[0].dtype)


def split_rows(x, activation=None, *, params=None) -> SplitRows:
    """`x`, or with an `activation` its values, for the product with e2m1 weights.

    Args:
      x: (M, K); with an activation (M, 2K), the columns of a gate, then those of an up product. bfloat16 or float16; K
        is a multiple of 8.
      activation: a function of two float32 arrays, parts of the gate and of the up product, whose values are rounded
        to the dtype of `x`. It takes zeros to zeros. Pass the same object each time: another one is compiled anew.
    """
    if len(x) == 0 or x.shape[1] // _parts(activation) > VALUES_MAX:
        return split_rows_reference(_activated(activation, jnp.split(x, _parts(activation), axis=1)))
    interpreted = _host.require_tensor_cores("split_rows").interpreted
    return SplitRows(*_call(x, activation, interpreted, params or _host.compiler_params()))


@functools.partial(jax.jit, static_argnames=("activation", "interpreted", "params"))
def _call(x, activation, interpreted: bool, params):
    rows, padded = len(x), _padded(x.shape[1] // _parts(activation))
    out_type = (
        jax.ShapeDtypeStruct((rows, 2 * padded), jnp.float8_e4m3fn),
        jax.ShapeDtypeStruct((2, rows + BEYOND), jnp.float32),
    )
    kernel = functools.partial(_row, activation=activation, interpreted=interpreted)
    # Without JAX's barriers around each store: no thread reads what another has stored.
    params = dataclasses.replace(params, unsafe_no_auto_barriers=True)
    return _host.kernel(kernel, out_type=out_type, grid=(rows,), grid_names=("row",), compiler_params=params)(x)

# SPDX-License-Identifier: Apache-2.0
"""Rows of 16-bit numbers as sums of two e4m3 numbers, times a power of two for each row.

    x[m, k] ~ scales[m] * (high[m, k] + low[m, k])

Shapes: x (M, K) bfloat16 or float16; halves (M, 2 Kp) float8_e4m3fn, a row's high ones, then its low ones; scales
`scales_shape(M)` float32. Kp is K rounded up to a multiple of 64; zeros fill the rest, where packed weights may have
values. In each 16 values of K, value 8 pair + 2 lane + half lies at 4 lane + 2 half + pair: `halves.py` says why.

The scales are there twice: scales[0, m] and scales[1, m - 1] are row m's. A thread loads those of two neighbouring rows
at once, at a multiple of 8 bytes, and a group's tile may begin at any row: if that is odd, it reads the second copy.
Places beyond the rows are not written.

Divided by its scale, a row's largest magnitude is in (224, 448], or below that if the scale is 2^-126, the smallest;
448 is the largest e4m3 number. The high half is the nearest e4m3 number, the low half the one nearest to the remainder.
How exact their sum is depends on the value:

    bfloat16, at least 2^-9 of the row's largest      exact
    float16                                           within 2^-9 of the value, or 2^-17 of the row's largest
    bfloat16, smaller                                 within 2^-17 of the row's largest

The scale of a row with an infinity or a NaN is NaN.

A block has one row, which its 128 threads keep in registers. A thread loads 16 neighbouring values at a time, so values
change places only inside a thread. Threads beyond the end of the row load its last values again and store the same
bytes. XLA pads rows whose length is not a multiple of 64, and splits rows of more than 8192 values.

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
UNIT = 64  # Kp is a multiple of it, as K of packed weights is.
VALUES_MAX = 8192  # A row's values in registers, 64 per thread; with an activation, twice as many.
INFINITY = 0x7F800000  # The bits of a float32.
BEYOND = 64  # More scales than rows: a tile that begins at the last row may have so many.


def scales_shape(rows: int) -> tuple[int, int]:
    """The shape of the scales of `rows` rows. Both copies begin at a multiple of 8 bytes, and a product that reads them
    as a vector needs no padding."""
    return 2, pl.cdiv(rows, 32) * 32 + BEYOND


class SplitRows(NamedTuple):
    """Rows as halves, and their scales, in the shapes that this file's first lines give."""

    halves: jax.Array
    scales: jax.Array


def split_rows_reference(x) -> SplitRows:
    """As `split_rows`, by array operations. Scales beyond the rows are zeros."""
    x = jnp.pad(x.astype(jnp.float32), ((0, 0), (0, -x.shape[1] % UNIT)))
    scales, inverse = _scales_of(_magnitudes(x).max(1, initial=0))
    scaled = x * inverse[:, None]
    # XLA drops a conversion to e4m3 and back, so this rounds by hand: to 4 bits, or below 2^-6 to multiples of 2^-9.
    bits = lax.bitcast_convert_type(scaled, jnp.uint32)
    normal = lax.bitcast_convert_type((bits + 0x7FFFF + (bits >> 20 & 1)) & jnp.uint32(0xFFF00000), jnp.float32)
    high = jnp.where(jnp.abs(scaled) < 2.0**-6, jnp.round(scaled * 2.0**9) * 2.0**-9, normal)
    both = jnp.stack([high, scaled - high], 1).astype(jnp.float8_e4m3fn)
    both = both.reshape(len(x), x.shape[1] // 8, 2, 4, 2).transpose(0, 1, 3, 4, 2)  # (.., lane, half, pair).
    scales = jnp.stack([jnp.pad(part, (0, scales_shape(len(x))[1] - part.size)) for part in (scales, scales[1:])])
    return SplitRows(both.reshape(len(x), 2 * x.shape[1]), scales)


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


def _layout(cols: int):
    """Chunks of a row go round the 128 threads in turn."""
    piece = WARPGROUP * CHUNK
    return plgpu.Layout.WG_STRIDED((pl.cdiv(cols, piece) * piece,), vec_size=CHUNK)


def _array(registers, layout):
    return mgpu.FragmentedArray(_registers=np.array(registers, object), _layout=layout.to_mgpu(), _is_signed=None)


def _addresses(row, part: int, cols: int, kind):
    """Pointers to this thread's chunks, vectors of type `kind`, of the `part`th `cols` values of a row."""
    pointer = mgpu.utils.llvm.addrspacecast(ir.Type.parse("!llvm.ptr<1>"), mgpu.utils.memref_ptr(row))
    thread, num = mgpu.utils.thread_idx(), cols // CHUNK
    add = lambda a, b: arith.addi(a, mgpu.utils.c(b, a.type))
    chunks = [arith.minui(add(thread, i), mgpu.utils.c(num - 1, thread.type)) for i in range(0, num, WARPGROUP)]
    return [mgpu.utils.getelementptr(pointer, [add(chunk, part * num)], kind) for chunk in chunks]


def _load(row, parts: int):
    """A row in global memory, cut into `parts` arrays of `_layout`."""
    cols = row.shape[0] // parts
    layout = _layout(cols)
    part_type = plgpu.ShapeDtypeStruct(*layout.args, row.dtype, layout=layout)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=[part_type] * parts)
    def load(_, row):
        kind = ir.VectorType.get((CHUNK,), ir.MemRefType(row.type).element_type)
        load = lambda address: mgpu.utils.llvm.load(kind, address, alignment=16)
        return [_array([load(address) for address in _addresses(row, i, cols, kind)], layout) for i in range(parts)]

    return load(row)


def _converted(how: str, kind, *args):
    """The value of type `kind` that PTX's conversion `how` makes of one or two values."""
    places = ", ".join(f"${i}" for i in range(len(args) + 1))
    bits = ir.IntegerType.get_signless(mgpu.utils.bitwidth(kind))
    return mgpu.utils.bitcast(mgpu.utils.inline_ptx(f"cvt.{how} {places};", *args, result_types=bits), kind)


def _at(values, i: int):
    return vector.extract(values, [], [i])


def _store(scaled, row):
    """Splits float32 values of `_layout`, and stores the halves to `row` in the order that `halves.py` wants."""
    cols = row.shape[0] // 2

    @plgpu.inline_mgpu(arg_types=(_layout(cols), plgpu.RefType()))
    def store(_, scaled, row):
        i16, f16, f32 = ir.IntegerType.get_signless(16), ir.F16Type.get(), ir.F32Type.get()
        two_f16, two_f32 = (ir.VectorType.get((2,), kind) for kind in (f16, f32))
        words = ir.VectorType.get((CHUNK // 2,), i16)
        rounded = lambda pair: _converted("rn.satfinite.e4m3x2.f32", i16, _at(pair, 1), _at(pair, 0))
        widened = lambda bits: arith.extf(two_f32, _converted("rn.f16x2.e4m3x2", two_f16, bits))
        addresses = zip(*(_addresses(row, half, cols, words) for half in range(2)), strict=True)
        for of_halves, values in zip(addresses, scaled.registers, strict=True):
            pairs = [vector.from_elements(two_f32, [_at(values, i), _at(values, 8 + i)]) for i in range(8)]
            high = [rounded(pair) for pair in pairs]
            low = [rounded(arith.subf(pair, widened(bits))) for pair, bits in zip(pairs, high, strict=True)]
            for half, address in zip((high, low), of_halves, strict=True):
                mgpu.utils.llvm.store(vector.from_elements(words, half), address, alignment=16)

    store(scaled, row)


def _row(x_gmem, halves_gmem, scales_gmem, *, activation, interpreted: bool):
    row, parts = lax.axis_index("block"), _parts(activation)
    if interpreted:
        values = _activated(activation, jnp.split(x_gmem[row], parts))
        halves, scales = split_rows_reference(values[None])
        halves_gmem[row] = halves[0]
        _store_scale(scales_gmem, row, scales[0, :1])
        return
    values = _activated(activation, _load(x_gmem.at[row], parts)).astype(jnp.float32)
    largest = jnp.max(_magnitudes(values))
    of_row = lambda shape: _scales_of(lax.broadcast_in_dim(largest, shape, []))  # JAX has no bitcast of a scalar.
    _store(values * of_row(values.shape)[1], halves_gmem.at[row])
    _store_scale(scales_gmem, row, of_row((1,))[0])


def _store_scale(scales_gmem, row, scale):
    scales_gmem[0, pl.ds(row, 1)] = scale

    @pl.when(row > 0)
    def _():
        scales_gmem[1, pl.ds(row - 1, 1)] = scale


def _parts(activation) -> int:
    return 1 if activation is None else 2


def _activated(activation, parts):
    if activation is None:
        return parts[0]
    return activation(*(part.astype(jnp.float32) for part in parts)).astype(parts[0].dtype)


def split_rows(x, activation=None, *, params=None) -> SplitRows:
    """`x`, or with an `activation` its values, for the product with e2m1 weights.

    Args:
      x: (M, K); with an activation (M, 2K), the columns of a gate, then those of an up product. bfloat16 or float16; K
        is a multiple of 8.
      activation: a function of two float32 arrays, parts of the gate and of the up product, whose values are rounded
        to the dtype of `x`. It takes zeros to zeros. Pass the same object each time: another one is compiled anew.
      params: Mosaic's compiler parameters; None for the package's.

    Returns:
      `SplitRows`: halves (M, 2 Kp) float8_e4m3fn, and scales `scales_shape(M)` float32.

    Raises:
      RuntimeError: no GPU with Hopper's tensor cores. Callers check shapes and dtypes.
    """
    if x.size == 0 or x.shape[1] // _parts(activation) > VALUES_MAX:
        return split_rows_reference(_activated(activation, jnp.split(x, _parts(activation), axis=1)))
    interpreted = _host.require_tensor_cores("split_rows").interpreted
    return SplitRows(*_call(x, activation, interpreted, params or _host.compiler_params()))


@functools.partial(jax.jit, static_argnames=("activation", "interpreted", "params"))
def _call(x, activation, interpreted: bool, params):
    parts = _parts(activation)
    x = _host.pad_to_tiles(x.reshape(len(x), parts, -1), (1, 1, UNIT)).reshape(len(x), -1)
    halves = jax.ShapeDtypeStruct((len(x), x.shape[1] // parts * 2), jnp.float8_e4m3fn)
    scales = jax.ShapeDtypeStruct(scales_shape(len(x)), jnp.float32)
    kernel = functools.partial(_row, activation=activation, interpreted=interpreted)
    # The activation's exponentials are approximate, as its values are rounded to 16 bits. There are no barriers of
    # JAX's around stores: no thread reads what another has stored.
    params = dataclasses.replace(params, approx_math=True, unsafe_no_auto_barriers=True)
    launch = dict(grid=(len(x),), grid_names=("block",), compiler_params=params)
    return _host.kernel(kernel, out_type=(halves, scales), **launch)(x)

# SPDX-License-Identifier: Apache-2.0
"""Weights of 4 bits: how they lie, and how they become floats of 16 bits in registers.

Blocks of 64 columns of w by 64 values of K lie one after the other, 2 KB each, so TMA copies long runs: memory sends
these faster than short rows. In a block each of a warpgroup's 128 threads has 16 bytes, which it loads at once. They
hold the 32 weights that this thread multiplies: pairs of neighbouring values of K, eight apart, in two columns, eight
apart. A word of 32 bits has eight weights of one column. Value

    column = 16 warp + 8 next + row,    k = 32 part + 8 pair + 2 lane + half

of a block lies in word 2 next + part of thread 32 warp + 4 row + lane, in the 16 bits of `half`. A pair comes out of a
word by shifts and a mask, and no value moves between threads. An integer from 0 to 15 lies in bits 4 pair to
4 pair + 3 of its half.

An e2m1 value has a sign, two bits of exponent and one of mantissa. As the sign, the last two bits of the exponent and
the first of the mantissa of an e4m3 number they mean 2^-6 times the value. A word's bits make two words of four such
numbers:

    word & FOURS                                  pairs 0 and 1: in byte 2 half + pair
    ((word << 2) ^ (word >> 2)) & FOURS           pairs 2 and 3: in byte 2 half + pair - 2

The second pairs lie in the bits that FOURS leaves out. The xor also brings in bits of the first pairs; `pack.py`
chooses the bits between such that it comes out right. Products in FP8 (`halves.py`) take these words as they are. For
16 bits, shifts and masks make two pairs of each.

In 16 bits, an integer becomes the last bits of a mantissa: a subnormal number. An e2m1 value becomes the sign, the last
bits of the exponent and the first of the mantissa: the value times 2^-126. A multiplication by a large power of two,
part of the scale, makes them normal. GPUs compute with subnormal 16-bit numbers at full speed.

In 16 bits, scales of groups along K multiply the weights, not the sums. Each scaled weight is rounded once, so the
weights are exactly those of a 16-bit matrix of the same values, and a group's sums need no registers of their own.
Scales that are powers of two round nothing. In FP8 scales multiply sums in float32.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from ... import _device
from ..operand import Operand

VALUES = 8  # Weights in a word.
UNIT = 64  # Columns, and values of K, of a block.
WORDS = UNIT * UNIT // VALUES  # In a block.
BOX = 256  # Words along an axis that TMA copies at once: a block is two runs of so many.
PAIRS = 4  # Pairs of weights in a word.
FOURS = 0x9C9C9C9C  # The signs and the magnitudes of four e2m1 values that are e4m3 numbers, times E4M3.
E4M3 = 2.0**-6
HELD = 24  # Weights may be held as 2^-24 of what they are, so that scales that make numbers normal stay in range.


@dataclasses.dataclass(frozen=True)
class Integers:
    """Integers from 0 to 15, less a zero point, times a scale for each group along K."""

    dtype: jnp.dtype  # The dtype of weights in registers.
    scale_dtype: jnp.dtype
    group_size: int
    zeros_dtype: jnp.dtype | None = None  # None: all zero points are 8.

    @property
    def of_groups(self) -> tuple[tuple[str, jnp.dtype, int], ...]:
        """The arrays beside the weights: see `Plan.of_groups`."""
        zeros = () if self.zeros_dtype is None else (("zeros", self.zeros_dtype, self.group_size),)
        return ("scales", self.scale_dtype, self.group_size), *zeros

    def pairs(self, words):
        """The bits of the four pairs of numbers in each word: an integer times the smallest subnormal number."""
        return [(words >> (4 * i) if i else words) & _twice(0xF) for i in range(PAIRS)]

    @property
    def at_once(self) -> bool:
        """Whether one instruction scales: 8 times a scale is exact, and bfloat16 has room for the scale it needs."""
        return self.scale_dtype == self.dtype == jnp.bfloat16 and self.zeros_dtype is None

    @property
    def held(self) -> int:
        return HELD if self.at_once else 0

    def scaled(self, values, half: int, units: int, of_groups):
        """The weights of 32 values of K, the `half`th 32 of a step of `units` 64s: `values` times their scales.

        `values` are (columns, 32) subnormal numbers, `of_groups` lists of (columns,) for each of the step's groups. A
        product and a sum are one instruction.
        """
        scale, *zero = (numbers[half * len(numbers) // (2 * units)] for numbers in of_groups)
        repeat = lambda numbers: _device.spread(numbers, 0, values.shape)
        least = jnp.finfo(self.dtype).smallest_subnormal
        exponent = round(np.log2(float(least)))
        constant = lambda power: jnp.array(2.0**power, self.dtype)
        if self.at_once:
            factor = scale * constant(-exponent - HELD)
            return values * repeat(factor) + repeat(scale * -constant(3 - HELD))
        largest = jnp.finfo(self.dtype).maxexp - 1
        normal = exponent + largest  # An integer times 2^normal is what the largest power of two makes of it.
        zero = repeat(zero[0].astype(self.dtype) * -constant(normal)) if zero else -constant(3 + normal)
        values = values * constant(largest) + zero
        if self.scale_dtype == self.dtype:
            return values * repeat(scale * constant(-normal))
        scale = scale.astype(jnp.float32) * 2.0**-normal
        rounded = scale.astype(self.dtype)
        rest = (scale - rounded.astype(jnp.float32)).astype(self.dtype)
        return values * repeat(rounded) + values * repeat(rest)

    def interpreted(self, bits, half: int, units: int, of_groups):
        """As `scaled`, of bits, on a CPU, which flushes subnormal numbers to zero."""
        scale, *zero = (numbers[half * len(numbers) // (2 * units)].astype(jnp.float32) for numbers in of_groups)
        values = bits.astype(jnp.float32) - (zero[0][:, None] if zero else 8)
        return (values * scale[:, None]).astype(self.dtype) * jnp.array(2.0**-self.held, self.dtype)


E2M1_HELD = 40  # As HELD, for e2m1; larger, so that sums of FP8 products times their scales do not overflow.
# Added to the exponent of a scale, an e8m0 byte: 2^126 makes values normal, and they are held as 2^-E2M1_HELD.
E2M1_BIAS = 126 - E2M1_HELD


@dataclasses.dataclass(frozen=True)
class E2M1:
    """e2m1 values, times a power of two for each 32 along K.

    16 bits hold two scales, each an e8m0 byte plus `E2M1_BIAS`: in the low byte that of a unit's first 32 values of K.
    """

    dtype: jnp.dtype
    held = E2M1_HELD
    of_groups = (("scales", jnp.dtype(jnp.uint16), UNIT),)

    @staticmethod
    def fours(words):
        """Two words of four e4m3 numbers, the values times `E4M3`: pairs 0 and 1 of each word, and pairs 2 and 3."""
        return words & jnp.uint32(FOURS), ((words << 2) ^ (words >> 2)) & jnp.uint32(FOURS)

    def pairs(self, words):
        """The bits of the pairs of numbers in each word: bfloat16 values, e2m1 values times 2^-126."""
        magnitude, sign, pairs = _twice(0x01C0), _twice(0x8000), []
        for fours in self.fours(words):
            pairs += [((fours << 4) & magnitude) | ((fours << 8) & sign), ((fours >> 4) & magnitude) | (fours & sign)]
        return pairs

    def scaled(self, values, half: int, units: int, of_groups):
        """The weights of 32 values of K, the step's `half`th 32: `values`, (columns, 32), times their scales."""
        return values * _device.spread(
            lax.bitcast_convert_type(_exponents(of_groups, half), self.dtype), 0, values.shape
        )

    def interpreted(self, bits, half: int, units: int, of_groups):
        """As `scaled`, of bits, on a CPU, which flushes subnormal numbers to zero."""
        scale = lax.bitcast_convert_type(_exponents(of_groups, half), self.dtype).astype(jnp.float32) * 2.0**-126
        return (self.values(bits) * scale[:, None]).astype(self.dtype)

    def values(self, bits):
        """The values, in float32, of the bits of `pairs`."""
        bits = bits.astype(jnp.int32)
        exponent, mantissa = (bits >> 7) & 3, ((bits >> 6) & 1) / 2
        values = jnp.where(exponent == 0, mantissa, (1 + mantissa) / 2 * (1 << exponent))
        return jnp.where(bits >> 15 == 1, -values, values)


def _exponents(of_groups, half: int):
    """The bits of a bfloat16 scale for each row of weights."""
    both = of_groups[0][half // 2]
    return (both << 7 if half % 2 == 0 else both >> 1) & jnp.uint16(0x7F80)


def _twice(bits: int):
    """The bits in both halves of a word."""
    return jnp.uint32(bits << 16 | bits)


def in_runs(w):
    """Packed weights as TMA copies them."""
    return w.reshape(*w.shape[:-2], w.shape[-2] * (WORDS // BOX), BOX)


@dataclasses.dataclass(frozen=True)
class Blocks(Operand):
    """Weights of 4 bits as an operand: (blocks of columns, runs of words, words of a run), and so is its tile."""

    @property
    def tile(self) -> tuple[int, int, int]:
        return self.rows // UNIT, self.tile_k // UNIT * (WORDS // BOX), BOX

    @property
    def copies(self) -> int:
        return 1

    def smem(self, slots: int, interpreted: bool):
        return plgpu.SMEM((slots, *self.tile), self.dtype)

    def views(self, smem, interpreted: bool):
        return smem, smem

    def at(self, row, k):
        return _device.div(row, UNIT), _device.div(k, UNIT * BOX // WORDS)

    def copy(self, gmem, at, smem, filled, shared: str | None):
        blocks, runs = (pl.ds(start, size) for start, size in zip(at, self.tile[:2], strict=True))
        plgpu.copy_gmem_to_smem(gmem.at[blocks, runs], smem, filled, collective_axes=shared)

    def words(self, smem, wg, rows: int):
        """The words of a slot's tile that warpgroup `wg` multiplies, `rows` of it: for each 64 of K, of each block."""
        blocks, runs = rows // UNIT, WORDS // BOX
        layout = plgpu.Layout.WG_STRIDED((runs, BOX), vec_size=WORDS // _device.WARPGROUP)
        load = lambda block, unit: plgpu.load(smem.at[wg * blocks + block, pl.ds(unit * runs, runs)], layout=layout)
        return [[load(block, unit) for block in range(blocks)] for unit in range(self.tile_k // UNIT)]


def widen(form: Integers | E2M1, words, of_groups, interpreted: bool):
    """The weights of a step as floats of 16 bits, UNIT values of K in each array.

    `words` are those of `Blocks.words`, `of_groups` lists of (rows,) for each of the step's groups.
    """
    wide = []
    for i, blocks in enumerate(words):
        pairs = [form.pairs(block) for block in blocks]
        if interpreted:
            halves, scaled = bits_in_order(pairs), form.interpreted
        else:
            halves, scaled = _in_order(pairs, form.dtype), form.scaled
        wide.append(
            jnp.concatenate([scaled(x, 2 * i + j, len(words), of_groups) for j, x in enumerate(halves)], axis=1)
        )
    return wide


def bits_in_order(blocks):
    """As `_in_order`, of any array, as 16 bits each."""
    words = jnp.stack([jnp.stack(pairs) for pairs in blocks]).reshape(len(blocks), PAIRS, 4, 8, 4, 2, 2)
    bits = lax.bitcast_convert_type(words, jnp.uint16)  # (block, pair, warp, row, lane, next, part, half).
    return list(bits.transpose(6, 0, 2, 5, 3, 1, 4, 7).reshape(2, len(blocks) * UNIT, UNIT // 2))


def _in_order(blocks, dtype):
    """64 values of K, of which each thread has pairs of numbers in `blocks`' words, in the order of K: two arrays."""
    layout, words = plgpu.Layout.WGMMA, [pair for pairs in blocks for pair in pairs]
    half = plgpu.ShapeDtypeStruct((len(blocks) * UNIT, UNIT // 2), dtype, layout=layout)
    of_words = plgpu.Layout.WG_STRIDED(words[0].shape, vec_size=WORDS // _device.WARPGROUP)

    @plgpu.inline_mgpu(arg_types=(of_words,) * len(words), return_type=(half, half))
    def rename(_, *words):
        wgmma = layout.to_mgpu()
        two = wgmma.registers_element_type(mgpu.utils.dtype_to_ir_type(jnp.dtype(dtype)))
        taken = lambda words, i: mgpu.utils.bitcast(mgpu.utils.vector_slice(words, slice(i, i + 1)), two)

        def of_part(part: int):
            """Registers of (which 64 rows, which 8 columns, which 8 rows)."""
            registers = [[taken(x.registers.item(), 2 * following + part) for following in range(2)] for x in words]
            registers = np.array(registers, object).reshape(wgmma.registers_shape(half.shape))
            return mgpu.FragmentedArray(_registers=registers, _layout=wgmma, _is_signed=None)

        return of_part(0), of_part(1)

    return rename(*words)

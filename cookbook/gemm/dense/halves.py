# SPDX-License-Identifier: Apache-2.0
"""Products of few rows with e2m1 weights in FP8: as many WGMMAs as in 16 bits, and fewer instructions of conversion.

The bits of an e2m1 weight make an e4m3 number, 2^-6 times the weight (`four_bits.py`). A bfloat16 value is the sum of
two e4m3 numbers: the value rounded to four significant bits, and what is left. So rows of x are split once, into high
and low halves times a power of two for each row (`split_rows.py`), and tensor cores multiply both by the same weights,
which lie in registers four to a word.

    sums of 32 of K = (e2m1 @ high + e2m1 @ low) in FP8;   total += scale of the 32 * sums, in float32

A weight times its scale is no e4m3 number: the range of e4m3 is too small. So each 32 of K has sums of its own, each of
which is multiplied by a scale: with many rows that takes longer than it saves. Hopper's tensor cores keep about 14 bits
of such sums: fewer than of products in 16 bits, and more than the 8 of a bfloat16 result.

WGMMA takes four registers of A from a thread for 32 values of K: values 4 lane to 4 lane + 3 of columns of w `row` and
`row` + 8, then the values 16 later of both. A thread's words hold values 8 pair + 2 lane + half instead: pairs 0 and 1
take the place of the first four, pairs 2 and 3 of those 16 later. The order of K does not change a sum if both operands
have the same, so `split_rows.py` stores x in this order. Pallas's `wgmma` always adds to what its accumulator holds,
and takes no part of a swizzled tile, so a few lines of PTX take its place. JAX's interpreter multiplies in float32.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir

from ... import _device
from ..operand import STEP_BYTES, Operand, Ring, swizzled
from ..plan import Plan
from .four_bits import E2M1_BIAS, E4M3, UNIT, WORDS, bits_in_order

BLOCK = 32  # Values of K that share a scale, and that one instruction multiplies.
ROWS_MAX = 48  # A tile of more rows is multiplied in 16 bits: to scale its sums would take longer than FP8 saves.
ATOM = 8 * STEP_BYTES  # Bytes of 8 rows of a tile, which tensor cores read together.
TRANSFORMS = plgpu.TilingTransform((8, STEP_BYTES)), plgpu.SwizzleTransform(STEP_BYTES)

llvm, nvvm = mgpu.utils.llvm, mgpu.utils.nvvm


@dataclasses.dataclass(frozen=True, kw_only=True)
class Halves(Operand):
    """Rows of x in halves: high ones and, in the same array from column `low` on, low ones.

    Each piece of a slot has the high halves of all its rows, and below them the low ones.
    """

    low: int

    @property
    def copies(self) -> int:
        return 2 * len(self.pieces)

    def smem(self, slots: int, interpreted: bool):
        rows = 2 * self.rows
        return swizzled((slots, rows, self.tile_k), self.dtype, (rows, STEP_BYTES), STEP_BYTES, interpreted)

    def copy(self, gmem, at, smem, filled, shared: str | None):
        rows, cols = self.piece
        for _, j in self.pieces:
            for half in range(2):
                source = gmem.at[pl.ds(at[0], rows), pl.ds(at[1] + j * cols + half * self.low, cols)]
                plgpu.copy_gmem_to_smem(source, smem.at[0, j, pl.ds(half * rows, rows)], filled, collective_axes=shared)


def multiply(plan: Plan, ring: Ring, before):
    """(64, tile_n) float32 sums of this warpgroup's 64 columns of w and all rows of the tile, in `Layout.WGMMA`.

    The caller multiplies them by the scales of the rows. The steps follow `before` others in the ring.
    """
    tiles, role, units = plan.tiles, lax.axis_index("role"), plan.tiles.tile_k // UNIT
    last = -(-tiles.k // (tiles.tile_k * plan.config.split_k)) - 1
    start, wait = (_multiplied, lambda sums: sums) if plan.interpreted else (_start, _wait)

    def read(step):
        """The slot; words of weights, and two exponents for each column, for each 64 of K."""
        slot, mine = ring.wait(before + step), pl.ds(role * UNIT, UNIT)
        exponents = [plgpu.load(ring.of_groups[0].at[slot, i, mine], layout=_device.ROWS) for i in range(units)]
        words = [words for (words,) in plan.a.words(ring.a.at[slot], role, UNIT)]
        return slot, words, [both.astype(jnp.uint32) for both in exponents]

    def add(step, carry, has_next: bool = True):
        total, (slot, words, exponents) = carry
        following = None
        for unit in range(units):
            smem = ring.b.at[slot, 0, unit * UNIT // STEP_BYTES]
            with jax.named_scope("wgmma"):
                sums = start(plan, words[unit], smem, unit * UNIT % STEP_BYTES)
            if has_next and unit == units - 1:
                following = read(step + 1)
            for of_block, scale in zip(wait(sums), _scales(exponents[unit]), strict=True):
                total = total + of_block * _device.spread(scale, 0, of_block.shape)
        if plan.interpreted:  # It wants to know that TMA may write what threads have read.
            plgpu.commit_smem()
        plgpu.barrier_arrive(ring.freed.at[slot])
        return total, following

    zeros = plgpu.layout_cast(jnp.zeros(plan.compute_tile, jnp.float32), plgpu.Layout.WGMMA)
    carry = lax.fori_loop(0, last, add, (zeros, read(0)))
    total, _ = add(last, carry, has_next=False)
    total = total * (2.0**-E2M1_BIAS / E4M3)
    # XLA would multiply this number and a row's scale first, which may be 0 then. Mosaic keeps the order.
    return lax.optimization_barrier(total) if plan.interpreted else total


def _scales(both):
    """The scales, times 2^E2M1_BIAS, of 32 values of K and of the next 32."""
    return [lax.bitcast_convert_type((both << by) & jnp.uint32(0x7F800000), jnp.float32) for by in (23, 15)]


def _start(plan: Plan, words, smem, k: int):
    """Starts the products of 64 values of K: returns (64, tile_n) sums for each 32, to be read after `_wait`.

    `words` (2, 256) are a block's words of weights; `smem` is a piece of a slot, whose values from `k` on they meet.
    """
    count = plan.config.tile_n
    sums = plgpu.ShapeDtypeStruct((UNIT, count), jnp.float32, layout=plgpu.Layout.WGMMA)
    of_words = plgpu.Layout.WG_STRIDED(words.shape, vec_size=WORDS // _device.WARPGROUP)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(TRANSFORMS), of_words, of_words), return_type=(sums,) * (UNIT // BLOCK))
    def run(_, smem, *fours):
        i32 = ir.IntegerType.get_signless(32)
        fours = mgpu.optimization_barrier(*fours)
        first, last = ([llvm.extractelement(x.registers.item(), _constant(i, i32)) for i in range(4)] for x in fours)
        nvvm.wgmma_fence_aligned()
        swizzle = mgpu.dialect.SwizzlingMode.k128ByteSwizzle
        rows, found = mgpu.mma_utils.encode_descriptor(smem, 0, ATOM, swizzle), []
        for part in range(UNIT // BLOCK):
            columns, total = registers_of(first, last, part), ()
            for half in (1, 0):  # The low halves first: beside the sums of the others they would lose their last bits.
                at = k + part * BLOCK + half * (count // 8) * ATOM
                total = _wgmma(columns, _sum(rows, at // 16), count, total)
            found.append(_array(total, count))
        nvvm.wgmma_commit_group_sync_aligned()
        return tuple(found)

    return run(smem, *plan.four_bits.fours(words))


def registers_of(first, last, part: int) -> list:
    """A thread's registers of A for 32 values of K, the `part`th of 64, from the first and the last four weights of its
    four words. Word 2 next + part is of column `row` or, if `next` is 1, of `row` + 8."""
    return [fours[2 * following + part] for fours in (first, last) for following in range(2)]


def _wait(sums):
    """`sums`, when their products have ended."""
    like = plgpu.ShapeDtypeStruct(sums[0].shape, jnp.float32, layout=plgpu.Layout.WGMMA)

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA,) * len(sums), return_type=(like,) * len(sums))
    def run(_, *sums):
        nvvm.wgmma_wait_group_sync_aligned(0)
        return tuple(mgpu.optimization_barrier(*sums))

    return run(*sums)


def _wgmma(columns, rows, count: int, total):
    """64 columns, in four registers, times `count` rows: sums, added to `total` if there is one."""
    f32, num = ir.F32Type.get(), count // 2
    names = [f"${i}" for i in range(num + len(total) + len(columns) + 1)]
    out, of_columns = ", ".join(names[:num]), ", ".join(names[num + len(total) : -1])
    instruction = f"wgmma.mma_async.sync.aligned.m64n{count}k{BLOCK}.f32.e4m3.e4m3"
    adds = int(bool(total))
    ptx = (
        f"{{ .reg .pred adds; setp.ne.b32 adds, {adds}, 0; "
        f"{instruction} {{{out}}}, {{{of_columns}}}, {names[-1]}, adds, 1, 1; }}"
    )
    constraints = ["=f"] * num + [str(i) for i in range(len(total))] + ["r"] * len(columns) + ["l"]
    of_type, operands = llvm.StructType.get_literal([f32] * num), [*total, *columns, rows]
    found = llvm.inline_asm(of_type, operands, ptx, ",".join(constraints), asm_dialect=0, has_side_effects=True)
    return [llvm.extractvalue(f32, found, [i]) for i in range(num)]


def _array(values, count: int):
    """(64, count) sums as an instruction leaves them: pairs of neighbouring rows of x."""
    of_pair, i32 = ir.VectorType.get((2,), ir.F32Type.get()), ir.IntegerType.get_signless(32)
    layout = plgpu.Layout.WGMMA.to_mgpu()
    registers = np.empty(len(values) // 2, object)
    for i in range(len(registers)):
        pair = llvm.mlir_undef(of_pair)
        for j in range(2):
            pair = llvm.insertelement(pair, values[2 * i + j], _constant(j, i32))
        registers[i] = pair
    shape = layout.registers_shape((UNIT, count))
    return mgpu.FragmentedArray(_registers=registers.reshape(shape), _layout=layout, _is_signed=None)


def _sum(value, number: int):
    of_type = ir.IntegerType.get_signless(64)
    return llvm.add(value, _constant(number, of_type), overflow_flags=llvm.IntegerOverflowFlags.none)


def _constant(value: int, of_type):
    return llvm.ConstantOp(of_type, ir.IntegerAttr.get(of_type, value)).result


def _multiplied(plan: Plan, words, smem, k: int):
    """As `_start` and `_wait`, in float32."""
    rows = smem[...][:, k : k + UNIT].astype(jnp.float32)
    rows = rows.reshape(len(rows), UNIT // 16, 4, 2, 2).transpose(0, 1, 4, 2, 3).reshape(2, -1, UNIT)
    blocks = bits_in_order([plan.four_bits.pairs(words)])
    return [
        jnp.matmul(
            plan.four_bits.values(bits) * E4M3, rows[:, :, i * BLOCK : (i + 1) * BLOCK].sum(0).T, precision="highest"
        )
        for i, bits in enumerate(blocks)
    ]

# SPDX-License-Identifier: Apache-2.0
"""The kernel of a product with weights of 8 bits: as in `kernel.py`, where operand `a` is w_q and operand `b` is a.

The memory warpgroup, the ring, parts of K and the stores are the same. A compute warpgroup reads its rows of a step's
weights into registers, converts them there to 16-bit floats, and multiplies them by a's tile, which the tensor cores
read from shared memory. Meanwhile it reads the weights of the next step, and with `overlap` also converts them. A slot
is freed when the products of its step have ended: they read the registers and the slot till then.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ..kernel import compute, compute_role, load, memory_role
from ..operand import STEP_BYTES, Operand, Ring, swizzled
from ..plan import COMPUTE, Plan, identity
from ..tiles import Config as PlainConfig
from ..tiles import Tiles

UNIT = 64  # Values of a row of a that are swizzled together: 128 bytes.


@dataclasses.dataclass(frozen=True)
class Config(PlainConfig):
    """As `matmul.Config`, for the product of the weights and a, both transposed: M and `tile_m` count columns of w_q, N
    and `tile_n` rows of a."""

    swapped: bool = True
    tile_k: int = 128  # Values of K per step, and bytes of each row of weights.
    overlap: bool = False  # Weights are converted while products of the step before run, which helps in a single wave.

    def check_tile(self):
        super().check_tile()
        if self.split_dim != 0 or not self.swapped or self.tail_split != 1:
            raise ValueError(
                f"{self.split_dim=} must be 0, {self.swapped=} True and {self.tail_split=} 1: weights go through "
                "registers, a warpgroup's own rows of them"
            )
        if self.tile_k not in (64, 128, 256):
            raise ValueError(f"{self.tile_k=} must be 64, 128 or 256: the widths of the swizzle, or two of them")


def plan_of(tiles: Tiles, w_q, a, out_dtype, interpreted: bool, stacked=False) -> Plan:
    """The plan: the weights are operand `a`, of a stack of matrices where they are `stacked`, and a is operand `b`."""
    c, others = tiles.config, ()
    if interpreted:  # Its WGMMA wants both operands in shared memory, of which it has any amount: 16-bit weights.
        wide = (COMPUTE, c.tile_k // UNIT, c.compute_tile[0], UNIT)
        others = (("wide_smem", swizzled(wide, a.dtype, None, STEP_BYTES, interpreted)),)
    weights = Operand(w_q.dtype, c.tile_m, c.tile_k, False, stacked=stacked)
    return Plan(tiles, weights, Operand(a.dtype, c.tile_n, c.tile_k, False), identity, out_dtype, interpreted, others)


def multiply(plan: Plan, ring: Ring, wide_smem, before, acc):
    """The sums of this warpgroup's half of a tile. Its steps follow `before` others in the ring."""
    tiles, role, rows = plan.tiles, lax.axis_index("role"), plan.compute_tile[0]
    last = -(-tiles.k // (tiles.tile_k * plan.config.split_k)) - 1

    def read(step):
        """The weights of a step, 8 bits each."""
        slot = ring.wait(before + step)
        pieces = [ring.a.at[slot, 0, j, pl.ds(role * rows, rows)] for _, j in plan.a.pieces]
        return [plgpu.load(piece, layout=plgpu.Layout.WGMMA) for piece in pieces]

    def convert(weights):
        """As floats of 16 bits, UNIT values of K in each array.

        Another format of weights, of 4 bits say, is unpacked here; `plan_of` says how its bytes lie. Scales of groups
        along K would be multiplied here too, in registers: one scale for each row of `part` and group. Scales of
        whole rows of weights need no place here: they are applied to the sums, by `store` of `gemm/kernel.py` or by
        the grouped kernel.
        """
        with jax.named_scope("convert"):
            wide = [part.astype(plan.b.dtype) for part in weights]
            return [part[:, k : k + UNIT] for part in wide for k in range(0, part.shape[1], UNIT)]

    def start(step, parts):
        if plan.interpreted:
            for i, part in enumerate(parts):
                wide_smem[role, i] = part
            plgpu.commit_smem()
            parts = [wide_smem.at[role, i] for i in range(len(parts))]
        with jax.named_scope("wgmma"):
            for i, part in enumerate(parts):
                plgpu.wgmma(acc, part, ring.b.at[ring.slot(before + step), 0, i].T)

    def in_turn():
        def one_step(step, weights):
            start(step, convert(weights))
            weights = read(step + 1)
            plgpu.wgmma_wait(0)
            ring.release(before + step)
            return weights

        start(last, convert(lax.fori_loop(0, last, one_step, read(0))))

    def overlapped():
        def one_step(step, parts):
            start(step, parts)
            plgpu.wgmma_wait(len(parts))  # The products of the step before have ended, and these go on.
            pl.when(step > 0)(lambda: ring.release(before + step - 1))
            return convert(read(step + 1))

        # Two steps a turn, because the weights of each need registers of their own.
        two_steps = lambda i, parts: one_step(2 * i + 1, one_step(2 * i, parts))
        parts = lax.fori_loop(0, last // 2, two_steps, convert(read(0)))
        start(last, one_step(last - 1, parts) if last % 2 else parts)

    (overlapped if plan.config.overlap else in_turn)()
    values = acc[...]  # Waits for the last product.
    for step in range(max(last - 1, 0) if plan.config.overlap else last, last + 1):
        ring.release(before + step)
    return values


def kernel(w_gmem, a_gmem, vectors, o_gmem, sums_gmem=None, *, plan: Plan, a_smem, b_smem, filled, freed, o_smem=None,
           sums_smem=None, summed=None, wide_smem=None):  # fmt: skip
    """The kernel of `matmul_int8_weights`."""
    ring = plan.ring(a_smem, b_smem, filled, freed)

    @memory_role
    def _():
        load(plan, ring, w_gmem, a_gmem)

    @compute_role
    def _():
        def multiply_tile(plan, before):
            of_tile = functools.partial(multiply, plan, ring, wide_smem, before)
            return pl.run_scoped(of_tile, plgpu.ACC(plan.compute_tile, jnp.float32))

        compute(plan, multiply_tile, (vectors, o_gmem, o_smem), (sums_gmem, sums_smem, summed))

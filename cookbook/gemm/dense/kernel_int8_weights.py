# SPDX-License-Identifier: Apache-2.0
"""Weights of 8 bits in a product: what the compute warpgroups do with a step of them."""

import dataclasses

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ... import _device
from .. import plan as core
from ..plan import COMPUTE

UNIT = 64  # Values of a row of a that are swizzled together: 128 bytes.


@dataclasses.dataclass(frozen=True)
class Config(core.Config):
    """As `core.Config`, for the product of the weights and a, both transposed: M and `tile_m` count columns of w_q, N
    and `tile_n` rows of a."""

    swapped: bool = True
    tile_k: int = 128  # Values of K a step, and bytes of each row of weights.
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


@dataclasses.dataclass(frozen=True)
class Plan(core.Plan):
    """The weights are operand `a`, and a is operand `b`."""

    @property
    def scratch(self) -> dict:
        scratch = super().scratch
        if self.interpreted:  # It wants both operands of WGMMA in shared memory, of which it has any amount.
            wide = (COMPUTE, self.tiles.tile_k // UNIT, self.compute_tile[0], UNIT)
            scratch["wide_smem"] = core.swizzled(wide, self.b.dtype, None, core.STEP_BYTES, self.interpreted)
        return scratch


def multiply(plan: Plan, ring: _device.Ring, w_smem, a_smem, before, acc, wide_smem=None):
    """The sums of this warpgroup's half of a tile, whose steps follow `before` others in the ring."""
    tiles, role, rows = plan.tiles, lax.axis_index("role"), plan.compute_tile[0]
    last = -(-tiles.k // (tiles.tile_k * plan.config.split_k)) - 1

    def load(step):
        """The weights of a step, 8 bits each."""
        slot = ring.wait(before + step)
        pieces = [w_smem.at[slot, 0, j, pl.ds(role * rows, rows)] for _, j in plan.a.pieces]
        return [plgpu.load(piece, layout=plgpu.Layout.WGMMA) for piece in pieces]

    def convert(weights):
        """As floats of 16 bits, UNIT values of K in each array."""
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
                plgpu.wgmma(acc, part, a_smem.at[ring.slot(before + step), 0, i].T)

    def in_turn():
        def one_step(step, weights):
            start(step, convert(weights))
            weights = load(step + 1)
            plgpu.wgmma_wait(0)
            ring.free(before + step)
            return weights

        start(last, convert(lax.fori_loop(0, last, one_step, load(0))))

    def overlapped():
        def one_step(step, parts):
            start(step, parts)
            plgpu.wgmma_wait(len(parts))  # The products of the step before have ended, and these go on.
            pl.when(step > 0)(lambda: ring.free(before + step - 1))
            return convert(load(step + 1))

        # Two steps a turn, because the weights of each need registers of their own.
        two_steps = lambda i, parts: one_step(2 * i + 1, one_step(2 * i, parts))
        parts = lax.fori_loop(0, last // 2, two_steps, convert(load(0)))
        start(last, one_step(last - 1, parts) if last % 2 else parts)

    (overlapped if plan.config.overlap else in_turn)()
    values = acc[...]  # Waits for the last product.
    for step in range(max(last - 1, 0) if plan.config.overlap else last, last + 1):
        ring.free(before + step)
    return values

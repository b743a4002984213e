# SPDX-License-Identifier: Apache-2.0
"""The kernel of a product with weights of 8 or 4 bits: as in `kernel.py`, where operand `a` is w_q and `b` is a.

The memory warpgroup, the ring, parts of K and the stores are the same. A compute warpgroup reads its rows of a step's
weights into registers, converts them there to 16-bit floats, and multiplies them by a's tile, which the tensor cores
read from shared memory. Meanwhile it reads the weights of the next step, and with `overlap` also converts them. A slot
is freed when the products of its step have ended: they read the registers and the slot till then. `four_bits.py` says
how weights of 4 bits lie and are converted; the numbers of their groups along K come with them in the slot. With
`fp8` the rest is as here, and `halves.py` multiplies.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ... import _device, _host
from ..kernel import compute, compute_role, load, memory_role
from ..kernel import copy_step as copy_operands
from ..operand import STEP_BYTES, Operand, Ring, swizzled
from ..plan import REGISTERS, Plan, identity
from ..tiles import Config as PlainConfig
from ..tiles import Tiles
from . import halves
from .four_bits import E2M1, UNIT, Blocks, Integers, widen
from .halves import Halves


@dataclasses.dataclass(frozen=True)
class Config(PlainConfig):
    """As `matmul.Config`, for the product of the weights and a, both transposed: M and `tile_m` count columns of w_q, N
    and `tile_n` rows of a."""

    swapped: bool = True
    tile_k: int = 128  # Values of K per step.
    overlap: bool = False  # Weights are converted while products of the step before run, which helps in a single wave.
    fp8: bool = False  # MXFP4 weights of few rows: products in FP8 (`halves.py`), of 64 columns a warpgroup.
    # Warpgroups that convert and multiply. Each waits for its weights and its products; with more of them others have
    # instructions meanwhile, but each has fewer registers.
    warpgroups: int = 2

    def check_tile(self):
        if self.warpgroups not in REGISTERS:
            raise ValueError(f"{self.warpgroups=} must be one of {sorted(REGISTERS)}")
        super().check_tile()
        if self.tile_m * self.tile_n > 128 * 256:
            raise ValueError(
                f"{self.tile_m=} x {self.tile_n=} with {self.warpgroups=}: at most 128 x 256 values, all of which are "
                "in registers"
            )
        if self.split_dim != 0 or not self.swapped or self.tail_split != 1:
            raise ValueError(
                f"{self.split_dim=} must be 0, {self.swapped=} True and {self.tail_split=} 1: weights go through "
                "registers, a warpgroup's own rows of them"
            )
        if self.tile_k not in (64, 128, 256):
            raise ValueError(f"{self.tile_k=} must be 64, 128 or 256: the widths of the swizzle, or two of them")
        if self.fp8 and (self.tile_m != UNIT * self.warpgroups or self.tile_k == UNIT or self.overlap):
            raise ValueError(
                f"{self.tile_m=}, {self.warpgroups=}, {self.tile_k=}, {self.overlap=} with fp8=True: must be 64 "
                "columns a warpgroup, 128 or 256 values of K, and no overlap"
            )
        if self.fp8 and self.tile_n * self.cluster_n > halves.ROWS_MAX:
            raise ValueError(
                f"{self.tile_n=} x {self.cluster_n=} with fp8=True: must be at most {halves.ROWS_MAX} rows; take "
                "fewer, or fp8=False"
            )
        if self.fp8 and self.tile_k == 256 and self.warpgroups == 4 and self.tile_n > 16:
            raise ValueError(
                f"{self.tile_n=}, {self.tile_k=}, {self.warpgroups=} with fp8=True: must be at most 16 rows, 128 "
                "values of K or 2 warpgroups, because a thread has no registers for more"
            )


def require_config(op: str, config, form: Integers | E2M1 | None = None):
    """Raises a ValueError if `config` is no configuration, or asks for FP8 and the weights are not e2m1 values.

    Weights of 8 bits have no `form`.
    """
    if _host.require_config(op, config, Config) is not None and config.fp8 and not isinstance(form, E2M1):
        raise ValueError(
            f"{_host.PACKAGE}.{op}: {config=}; must be of fp8=False: only e2m1 weights are e4m3 numbers too"
        )


def in_form(config: Config, form: Integers | E2M1, out_dtype, warpgroups: int | None = None) -> Config:
    """`config`, chosen for integers, for weights in this form: few rows by e2m1 in FP8, with so many warpgroups.

    Results in bfloat16 are rounded by far more than sums in FP8 lose; results of other dtypes would show the loss. A
    tile keeps its rows: `moe` makes tables for them without asking for the form.
    """
    if not isinstance(form, E2M1) or out_dtype != jnp.bfloat16 or config.tile_n > halves.ROWS_MAX:
        return config
    wgs = warpgroups or config.warpgroups
    return dataclasses.replace(
        config, tile_m=wgs * UNIT, tile_k=2 * UNIT, cluster_m=1, overlap=False, warpgroups=wgs, fp8=True
    )


def in_both_forms(configs: list[Config], form: Integers | E2M1, out_dtype, warpgroups: int | None = None):
    """As many as `configs`, the best first: each of them `in_form`, and after it as it is in 16 bits."""
    both = [x for config in configs for x in (in_form(config, form, out_dtype, warpgroups), config)]
    return list(dict.fromkeys(both))[: len(configs)]


def plan_of(
    tiles: Tiles, w_q, a, out_dtype, interpreted: bool, stacked=False, four_bits: Integers | E2M1 | None = None
):
    """The plan: the weights are operand `a`, of a stack of matrices where they are `stacked`, and a is operand `b`: its
    halves if the products are in FP8."""
    c, others = tiles.config, ()
    if interpreted and not c.fp8:  # Its WGMMA wants 16-bit weights in shared memory too, of which it has any amount.
        wide = (c.warpgroups, c.tile_k // UNIT, c.compute_tile[0], UNIT)
        others = (("wide_smem", swizzled(wide, a.dtype, None, STEP_BYTES, interpreted)),)
    kind = Operand if four_bits is None else Blocks
    weights = kind(w_q.dtype, c.tile_m, c.tile_k, False, stacked=stacked)
    if c.fp8:
        a = Halves(a.dtype, c.tile_n, c.tile_k, False, low=a.shape[1] // 2)
    else:
        a = Operand(a.dtype, c.tile_n, c.tile_k, False)
    return Plan(tiles, weights, a, identity, out_dtype, interpreted, others, four_bits=four_bits)


def copy_step(plan: Plan, ring: Ring, slot, weights, a_gmem, row, col, k):
    """As `copy_step` of `kernel.py`; `weights` of 4 bits are a tuple of them and of the numbers of their groups."""
    w_gmem, *of_groups = weights if isinstance(weights, tuple) else (weights,)
    copy_operands(plan, ring, slot, w_gmem, a_gmem, row, col, k)
    for gmem, smem, (_, _, size) in zip(of_groups, ring.of_groups, plan.of_groups, strict=True):
        groups = pl.ds(_device.div(k, size), smem.shape[1])
        part = gmem.at[groups, pl.ds(row, plan.config.tile_m)]
        plgpu.copy_gmem_to_smem(part, smem.at[slot], ring.filled.at[slot])


def multiply(plan: Plan, ring: Ring, wide_smem, before, acc):
    """The sums of this warpgroup's columns of a tile. Its steps follow `before` others in the ring."""
    tiles, role, rows = plan.tiles, lax.axis_index("role"), plan.compute_tile[0]
    last = -(-tiles.k // (tiles.tile_k * plan.config.split_k)) - 1

    def read(step):
        """The weights of a step as they lie, and the numbers of their groups along K."""
        slot, mine = ring.wait(before + step), pl.ds(role * rows, rows)
        of_groups = [[plgpu.load(x.at[slot, i, mine], layout=_device.ROWS) for i in range(x.shape[1])]
                     for x in ring.of_groups]  # fmt: skip
        if plan.four_bits:
            return plan.a.words(ring.a.at[slot], role, rows), of_groups
        pieces = [ring.a.at[slot, 0, j, mine] for _, j in plan.a.pieces]
        return [plgpu.load(piece, layout=plgpu.Layout.WGMMA) for piece in pieces], of_groups

    def convert(read):
        """As floats of 16 bits, UNIT values of K in each array.

        Scales of groups along K are applied here, in registers. Scales of whole rows of weights are applied to the
        sums, by `store` of `gemm/kernel.py` or by the grouped kernel.
        """
        weights, of_groups = read
        with jax.named_scope("convert"):
            if plan.four_bits:
                return widen(plan.four_bits, weights, of_groups, plan.interpreted)
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
    return values * 2.0**plan.four_bits.held if plan.four_bits and plan.four_bits.held else values


def kernel(w_gmem, a_gmem, vectors, o_gmem, sums_gmem=None, *, plan: Plan, a_smem, b_smem, filled, freed, o_smem=None,
           sums_smem=None, met=None, arrived=None, wide_smem=None, **of_groups):  # fmt: skip
    """The kernel of products with weights of 8 or 4 bits. `of_groups` are slots for the numbers of groups along K."""
    ring = plan.ring(a_smem, b_smem, filled, freed, *of_groups.values())

    @functools.partial(memory_role, count=plan.config.warpgroups)
    def _():
        load(plan, ring, w_gmem, a_gmem, copy_step)

    @functools.partial(compute_role, count=plan.config.warpgroups)
    def _():
        def multiply_tile(plan, before):
            if plan.config.fp8:
                return halves.multiply(plan, ring, before)
            of_tile = functools.partial(multiply, plan, ring, wide_smem, before)
            return pl.run_scoped(of_tile, plgpu.ACC(plan.compute_tile, jnp.float32))

        compute(plan, multiply_tile, (vectors, o_gmem, o_smem), (sums_gmem, sums_smem, met, arrived))

# SPDX-License-Identifier: Apache-2.0
"""The kernel of `attention_fp8`: `kernel.py` on the tensor cores' 8-bit instructions.

Roles and barriers are those of `kernel.py`. The compute warpgroup's steps differ in four things:

    v           Both operands of an 8-bit product have the summed index along their rows, so v comes transposed,
                (batch, heads, head_dim, positions): `transpose_fp8.py` has the kernel, which runs first.
    p           goes to the product in registers. A thread holds other columns of s than an 8-bit operand wants there:
                of 16 keys 2 and 2, eight apart, where the operand wants 4 neighbours. Instead of moving weights between
                threads, the transposition moves keys: p stays where it is, and its columns meet the right values.
    2 ** OCTAVES   times its size is what p is rounded at: e4m3 ends at 448 and at 2 ** -9, and weights go up to 1.
    acc         Tensor cores add 8-bit products with about 14 bits. Each block's p v is therefore a sum of its own, and
                the CUDA cores add it to acc in float32. That is the multiply-add that rescaling acc is elsewhere.
"""

import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ... import _host
from .. import core
from ..checks import check_smem
from ..core import PIECE, REGISTERS, WG_ROWS, Shared
from ..steps import attend
from ..steps_fp8 import PART, Work, first_step, last_step, overlapped_step, separate_step
from . import kernel as dense
from .transpose_fp8 import transposed


@dataclasses.dataclass(frozen=True)
class Config(core.BlockConfig):
    overlap: bool = True  # Whether q kᵀ and p v of the block before run together, which takes registers for both.

    block_unit: ClassVar[int] = 32

    @property
    def value_piece(self) -> int:
        """Keys of a row of transposed values that are swizzled together."""
        return next(size for size in (128, 64, 32) if self.block_kv % size == 0)

    def smem_bytes(self, head_dim: int) -> int:
        """Queries, both rings, out in 16 bits, and the barriers."""
        barriers = 4 * self.num_stages + 3 * self.compute_wgs
        return (3 * self.rows + 2 * self.num_stages * self.block_kv) * head_dim + 8 * barriers


def check_config(op: str, config, head_dim: int) -> None:
    """Check that a configuration fits.

    Raises:
      ValueError: it does not.
    """
    if config.overlap and head_dim > PART:
        raise ValueError(
            f"{_host.PACKAGE}.{op}: {config} overlaps products, whose sums do not fit into registers for {head_dim=}: "
            "overlap=False"
        )
    check_smem(op, config, config.smem_bytes(head_dim), head_dim)


@dataclasses.dataclass(frozen=True)
class Problem(core.Problem):
    @property
    def piece(self) -> int:
        return min(128, self.head_dim)

    @property
    def width(self) -> int:
        return self.head_dim


@dataclasses.dataclass(frozen=True)
class Plan(dense.Plan):
    out_dtype: jnp.dtype

    @property
    def cuts(self) -> core.Cuts:
        """A causal mask cuts two blocks of 64 rows where blocks do not begin at multiples of 64."""
        last = self.problem.right is not None and self.config.block_kv % WG_ROWS != 0
        return dataclasses.replace(super().cuts, last=super().cuts.last or last)

    @property
    def scratch(self) -> dict:
        p, c = self.problem, self.config
        value_tiles = c.num_stages, c.block_kv // c.value_piece, p.head_dim, c.value_piece
        smem = dict(
            k_smem=core.row_tiles((c.num_stages, p.pieces, c.block_kv, p.piece), p.dtype, p.interpreted),
            v_smem=core.row_tiles(value_tiles, p.dtype, p.interpreted),
        )
        out = core.row_tiles((c.compute_wgs, p.head_dim // PIECE, WG_ROWS, PIECE), self.out_dtype, p.interpreted)
        copies = dict(q_copies=p.pieces, k_copies=p.pieces, v_copies=value_tiles[1])
        return core.scratch(p, c, smem, **copies) | dict(o_smem=out)


def _load_values(plan: Plan, v_gmem, shared: Shared, tile, first, slot):
    """Starts the copies of a block of transposed values, from position `first` on."""
    size = plan.config.value_piece
    for i in range(plan.config.block_kv // size):
        source = v_gmem.at[tile.batch, tile.kv_head, :, pl.ds(first + i * size, size)]
        plgpu.copy_gmem_to_smem(source, shared.v_tma.at[slot, i], shared.values.filled.at[slot])


def _kernel(
    table, q_gmem, k_gmem, v_gmem, q_descale, k_descale, v_descale, out_gmem, lse_gmem, *, plan: Plan, **scratch
):  # fmt: skip
    role, wgs = lax.axis_index("role"), plan.config.compute_wgs
    shared = Shared.of(plan.problem, plan.config, **scratch)

    def work(plan, tile, *rest):
        head = tile.batch, tile.kv_head
        return Work(plan, tile, *rest, q_descale[head] * k_descale[head], v_descale[head])

    @pl.when(role == wgs)
    def _():
        plgpu.set_max_registers(REGISTERS[wgs][0], action="decrease")
        dense._load(plan, table, {}, shared, q_gmem, k_gmem, v_gmem, _load_values)

    @pl.when(role < wgs)
    def _():
        plgpu.set_max_registers(REGISTERS[wgs][1], action="increase")
        one_step = overlapped_step if plan.config.overlap else separate_step
        steps = dict(first_step=first_step, overlapped_step=one_step, last_step=last_step)
        dense._compute(plan, table, {}, None, shared, out_gmem, lse_gmem, functools.partial(attend, **steps), work)


@functools.partial(jax.jit, static_argnames=("plan", "num_sms", "params", "return_lse"))
def forward(q, k, v, q_descale, k_descale, v_descale, *, plan: Plan, num_sms: int, params, return_lse: bool):
    """As `dense.forward`. Each descale is float32 (batch, kv_heads)."""
    v = transposed(v, interpreted=plan.problem.interpreted, params=params)
    c, table = plan.config, plan.schedule(num_sms)
    lse_shape = (plan.batch, plan.problem.num_heads, plan.num_q_blocks * c.rows)
    out, lse = _host.kernel(
        functools.partial(_kernel, plan=plan),
        out_type=[jax.ShapeDtypeStruct(q.shape, plan.out_dtype), jax.ShapeDtypeStruct(lse_shape, jnp.float32)],
        grid=(table.shape[0],),
        grid_names=("block",),
        num_threads=c.compute_wgs + 1,
        thread_name="role",
        scratch_types=plan.scratch,
        compiler_params=params,
    )(jnp.asarray(table), q, k, v, q_descale, k_descale, v_descale)
    return out, lse[:, :, : plan.num_q] if return_lse else None

# SPDX-License-Identifier: Apache-2.0
"""The kernels of attention's backward pass: dk's and dv's, dq's, and the one that makes all three.

Role table: a block for each tile.

    memory     one, with few registers: copies what a tile keeps, then step by step what it goes through
    compute    two, or three for dq of heads of 64. For dk and dv each keeps 64 keys and values, and goes through blocks
               of queries of the heads of its group, all or one of the `parts` of them, with pᵀ and dsᵀ in registers:
               keys along rows, queries along columns, so that lse and delta are one number for each column. For dq
               each keeps 64 queries and do, and goes through blocks of keys and values, with p and ds in registers, and
               lse and delta one number for each row. With heads over 128 both have the same 64 rows, and each half of
               the columns of the sums. With a `bwd_fused.Config` those of dk and dv also add up dq, in memory

Barrier table:

    barrier        arrivals               who waits
    kept           copies of what a tile  compute warpgroups, before the first product
                   keeps
    filled[slot]   copies of a step       compute warpgroups, before its products
    freed[slot]    compute warpgroups     memory, before it refills the slot
    done           compute warpgroups     each other where both read all that the tile kept: before their sums take its
                                          place; where they have the same rows, also before these are copied out
    shared[slot]   compute warpgroups     each other where they add up dq: see `steps_fused.py`

The sums of dq are still in flight when the products of the next step start: a slot is given back one step later.
`steps.py` and `steps_fused.py` have the steps of a compute warpgroup.

Sizes of tiles, blocks and rings are properties of `Plan`; what limits them are the registers, which dk and dv fill.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ... import _device, _host
from .. import core
from ..core import PIECE, REGISTERS, TILED, WG_ROWS, Blocks, Cuts, Problem, div
from . import steps as bwd_steps
from . import steps_fused as bwd_fused
from .steps import Smem, Work

CACHED = 2**26  # Bytes that blocks may share in the L2 cache: somewhat more than the 50 MB that it has, by measurement.
TILED_FLOAT32 = dict(transforms=(plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128)))


@dataclasses.dataclass(frozen=True)
class Plan:
    """Statics of the kernels: dq's if `for_query`, else dk's and dv's. A tile keeps 64 rows for each warpgroup of its
    own two operands (queries and do, or keys and values), and goes through blocks of the other two."""

    problem: Problem  # Its head_dim is a multiple of 64.
    batch: int
    num_q: int
    num_kv: int
    has_segments: bool
    for_query: bool
    config: bwd_fused.Config | None = None  # If given, dk's and dv's kernel also adds up dq.
    # Parts of a group of query heads, each with a block, and a dk and a dv, rounded, of its own: more blocks.
    parts: int = 1

    @property
    def splits_heads(self) -> bool:
        """Whether both compute warpgroups have the same rows, and each half of the columns of the sums."""
        return self.problem.head_dim > 128

    @property
    def compute_wgs(self) -> int:
        return 3 if self.for_query and self.problem.head_dim <= 64 else 2

    @property
    def rows(self) -> int:
        """Rows that a tile keeps."""
        return WG_ROWS * (1 if self.splits_heads else self.compute_wgs)

    @property
    def block(self) -> int:
        """Queries or keys of a step."""
        return 128 if not self.for_query and self.problem.head_dim <= 64 else 64

    @property
    def num_stages(self) -> int:
        """Slots of the ring."""
        if self.config is not None:
            return self.config.num_stages
        step = 4 * self.block * self.problem.head_dim
        return min(4, (_device.SMEM_BYTES_MAX - 4096 - 4 * self.rows * self.problem.head_dim) // step)

    @property
    def group(self) -> int:
        """Query heads that a tile of keys goes through."""
        return self.problem.group // self.parts

    @property
    def num_heads(self) -> int:
        """Heads that have a row of tiles: of queries, or of keys, once for each part."""
        return self.problem.num_heads if self.for_query else self.problem.num_kv_heads * self.parts

    @property
    def heaviest_first(self) -> bool:
        """Whether the first tiles of all heads, which have most to do, start before the second ones. Where the cache
        does not hold what all heads go through, the tiles of a head start together, and share it."""
        heads = self.problem.num_kv_heads if self.for_query else self.problem.num_heads
        nbytes = 4 * self.batch * heads * self.num_blocks * self.block * self.problem.head_dim
        return self.problem.has_window and nbytes <= CACHED

    @property
    def blocks(self) -> Blocks:
        """Which blocks the rows of a tile go with."""
        left, right = self.problem.left, self.problem.right
        if self.for_query:
            return Blocks(self.num_kv, self.block, left, right)
        # Queries after the last one need no mask: their p are zero.
        return Blocks(pl.cdiv(self.num_q, self.block) * self.block, self.block, right, left)

    @property
    def cuts(self) -> Cuts:
        blocks = self.blocks
        last = blocks.right is not None or blocks.num_kv % self.block != 0
        return Cuts(any=True, first=blocks.left is not None or self.has_segments, last=last, all=self.has_segments)

    @property
    def adds_query(self) -> bool:
        return self.config is not None

    @property
    def is_staggered(self) -> bool:
        return self.adds_query and self.config.staggered and not self.problem.has_window

    @property
    def ends_in_tile(self) -> bool:
        """Whether the last tile has rows that are no keys. Their weights have to be zero: dq is a sum over rows."""
        return self.adds_query and self.num_kv % self.rows != 0

    @property
    def num_tiles(self) -> int:
        """Tiles of a head."""
        return pl.cdiv(self.num_q if self.for_query else self.num_kv, self.rows)

    @property
    def num_blocks(self) -> int:
        """Blocks of a head."""
        return pl.cdiv(self.num_kv if self.for_query else self.num_q, self.block)

    @property
    def sum_columns(self) -> int:
        """Columns of the sums of a compute warpgroup."""
        return self.problem.head_dim // 2 if self.splits_heads else self.problem.head_dim

    @property
    def num_sums(self) -> int:
        return 1 if self.for_query else 2

    @property
    def runs_ahead(self) -> bool:
        """Whether the products of a step start while the sums of the one before are in flight: registers have to hold
        the weights of both, and those of dk and dv have no room for them."""
        runs_ahead = self.config.runs_ahead if self.adds_query else self.for_query
        return runs_ahead and not self.problem.interpreted

    @property
    def ring_width(self) -> int:
        """Values of a row of a block in the ring. TMA copies any number of rows of 64 values, and multiples of 8 wider
        ones; but sums of all columns want whole heads."""
        return self.problem.head_dim

    @property
    def kept_width(self) -> int:
        """Values of a row of what a tile keeps, in one of its pieces. Products of whole heads need fewer registers. But
        keys and values that are as many as the queries are not to be padded, nor are their gradients to be cut."""
        any_rows = (self.num_q if self.for_query else self.num_kv) % 8 != 0 and self.problem.group == 1
        return PIECE if any_rows else self.problem.head_dim

    @property
    def kept_columns(self) -> list:
        """Those of each piece of a head that a tile keeps."""
        return [pl.ds(i, self.kept_width) for i in range(0, self.problem.head_dim, self.kept_width)]

    def kept_at(self, column, width: int) -> tuple:
        """Index of `width` columns of all rows, which are of one piece."""
        if self.kept_width == self.problem.head_dim:
            return 0, slice(None), pl.ds(column, width)
        return div(column, PIECE), slice(None), slice(None)

    def tiles(self, *shape: int):
        """Shared memory for tiles of rows; for rows of 64 in both views of `core.row_tiles`."""
        if shape[-1] > PIECE:
            return plgpu.SMEM(shape, self.problem.dtype, **TILED)
        return core.row_tiles(shape, self.problem.dtype, self.problem.interpreted)

    def views(self, smem, width: int):
        """(tensor cores' view, TMA's view) of a buffer of `tiles`."""
        return core.views(smem, self.problem.interpreted or width > PIECE)

    @property
    def scratch(self) -> dict:
        p, pieces = self.problem, len(self.kept_columns)
        scratch = dict(
            kept_smem=self.tiles(2, pieces, self.rows, self.kept_width),
            ring_smem=self.tiles(2, self.num_stages, self.block, self.ring_width),
            kept=plgpu.Barrier(num_arrivals=2 * pieces),
            filled=core.barriers(self.num_stages, 2 if self.for_query else 4),
            freed=core.barriers(self.num_stages, self.compute_wgs),
        )
        if not self.for_query:
            scratch["vectors_smem"] = plgpu.SMEM((2, self.num_stages, self.block), jnp.float32)
        if self.splits_heads or self.adds_query:
            scratch["done"] = plgpu.Barrier(num_arrivals=self.compute_wgs)
        if self.adds_query:
            scratch["ds_smem"] = plgpu.SMEM((2, self.rows, self.block), p.dtype, **TILED)
            scratch["dq_smem"] = plgpu.SMEM((self.compute_wgs, WG_ROWS, PIECE), jnp.float32, **TILED_FLOAT32)
            scratch["shared"] = core.barriers(2, self.compute_wgs)
        return scratch

    @property
    def smem_bytes(self) -> int:
        """Shared memory of a block that also adds up dq."""
        rows = 2 * (self.rows + self.num_stages * self.block)  # Those of two operands each.
        vectors = -(-8 * self.num_stages * self.block // 1024) * 1024
        exchange = 4 * self.rows * self.block + 4 * self.compute_wgs * WG_ROWS * PIECE
        return 2 * rows * self.problem.head_dim + vectors + exchange + 8 * (2 * self.num_stages + 4)


class Tile:
    """Where a tile lies: its rows, of which head, and the blocks that it goes through."""

    def __init__(self, plan: Plan, masks: dict):
        tile = lax.axis_index("tile")
        if plan.for_query:
            # With a causal mask the last queries, and the first keys, have most to do.
            tile = plan.num_tiles - 1 - tile
        self.batch, self.head, self.row = lax.axis_index("batch_index"), lax.axis_index("head_index"), tile * plan.rows
        self.index = tile
        first, end = plan.blocks.seen(self.row, plan.rows)
        if plan.has_segments:
            first = jnp.maximum(first, masks["first"][self.batch, tile])
            end = jnp.minimum(end, masks["end"][self.batch, tile])
        self.first, self.end = first, jnp.maximum(first, end)
        self.blocks = self.end - self.first  # Blocks of each head.
        self.heads = 1 if plan.for_query else plan.group
        self.steps, self.masks = self.blocks * self.heads, masks
        # Blocks before the one it starts with.
        self.shift = div(tile * self.blocks, plan.num_tiles) if plan.is_staggered else 0

    def mask(self, plan: Plan, first_row, block):
        """Which columns of a block the 64 rows from `first_row` on go with."""
        seen, shape = plan.blocks.mask_of(first_row, block), plan.blocks.shape
        if plan.has_segments:
            seen &= core.same_segment(self.masks, self.batch, first_row, block * shape[1], shape)
        return seen

    def other_head(self, plan: Plan, i):
        """The head of the blocks of the `i`-th of `heads`."""
        return div(self.head, plan.problem.group) if plan.for_query else self.head * plan.group + i


def _kernel(
    kept_gmem, ring_gmem, vectors_gmem, masks, dq_gmem, *outs, plan: Plan, kept_smem, ring_smem, filled, freed, **smem
):  # fmt: skip
    wg, tile = lax.axis_index("role"), Tile(plan, masks)
    views = *plan.views(kept_smem, plan.kept_width), *plan.views(ring_smem, plan.ring_width)
    smem = Smem(*views, ring=_device.Ring(filled, freed, plan.num_stages), **smem)
    memory_registers, compute_registers = REGISTERS[plan.compute_wgs]

    @pl.when(wg == plan.compute_wgs)
    def _():
        plgpu.set_max_registers(memory_registers, action="decrease")
        _load(plan, tile, smem, kept_gmem, ring_gmem, vectors_gmem)

    @pl.when(wg < plan.compute_wgs)
    def _():
        plgpu.set_max_registers(compute_registers, action="increase")
        _compute(plan, tile, smem, wg, vectors_gmem, dq_gmem, outs)


def _load(plan: Plan, tile: Tile, smem: Smem, kept_gmem, ring_gmem, vectors_gmem):
    """The memory warpgroup: what the tile keeps, then block after block of what it goes through."""
    for i, gmem in enumerate(kept_gmem):
        for p, columns in enumerate(plan.kept_columns):
            source = gmem.at[tile.batch, pl.ds(tile.row, plan.rows), div(tile.head, plan.parts), columns]
            plgpu.copy_gmem_to_smem(source, smem.kept_tma.at[i, p], smem.kept)

    @pl.loop(0, tile.steps)
    def _(count):
        head = tile.other_head(plan, lax.div(count, tile.blocks))
        block = pl.ds((tile.first + lax.rem(count + tile.shift, tile.blocks)) * plan.block, plan.block)
        slot = smem.ring.fill(count)
        filled = smem.ring.filled.at[slot]
        for i, gmem in enumerate(ring_gmem):
            plgpu.copy_gmem_to_smem(gmem.at[tile.batch, block, head], smem.ring_tma.at[i, slot], filled)
        if not plan.for_query:
            for i, gmem in enumerate(vectors_gmem):
                plgpu.copy_gmem_to_smem(gmem.at[tile.batch, head, block], smem.vectors_smem.at[i, slot], filled)

    smem.ring.drain(tile.steps)


def _compute(plan: Plan, tile: Tile, smem: Smem, wg, vectors_gmem, dq_gmem, outs):
    """A compute warpgroup: the sums of its rows, which take the place of what the tile kept on their way out."""
    first = 0 if plan.splits_heads else wg * WG_ROWS
    first_column = wg * plan.sum_columns if plan.splits_heads else 0
    plgpu.barrier_wait(smem.kept)
    rows = pl.ds(first, WG_ROWS)
    kept = [smem.kept_smem.at[i, :, rows] for i in range(2)]
    work = Work(plan, tile, smem, kept, pl.ds(first_column, plan.sum_columns), tile.row + first, wg, dq_gmem)
    sums = (bwd_fused if plan.adds_query else bwd_steps).sums_of_tile(work, vectors_gmem)

    def meet():
        plgpu.barrier_arrive(smem.done)
        plgpu.barrier_wait(smem.done)

    if plan.splits_heads or plan.adds_query:
        meet()  # The other warpgroup may still read.
    for i, total in enumerate(sums):
        total = (total * (plan.problem.scale if i == 0 else 1.0)).astype(plan.problem.dtype)
        width = min(plan.kept_width, plan.sum_columns)
        for column in range(0, plan.sum_columns, width):
            kept[i][plan.kept_at(first_column + column, width)] = total[:, column : column + width]
    plgpu.commit_smem()
    if plan.splits_heads:
        meet()  # Both halves of the columns are there.

    @pl.when((wg == 0) | (not plan.splits_heads))
    def _():
        for i, out in enumerate(outs):
            for p, columns in enumerate(plan.kept_columns):
                target = out.at[tile.batch, pl.ds(tile.row + first, WG_ROWS), tile.head, columns]
                plgpu.copy_smem_to_gmem(smem.kept_tma.at[i, p, rows], target)

    plgpu.wait_smem_to_gmem(0)


def launch(plan: Plan, params, kept, ring, vectors, segments, dq=None):
    """dq, or (dk, dv) of each part, with as many rows and columns as the operands that are kept. `dq` is a Ref to add
    dq to."""
    masks = core.segment_masks(*segments, plan.rows, plan.block) if segments else {}
    grid = dict(batch_index=plan.batch, head_index=plan.num_heads, tile=plan.num_tiles)
    order = ("tile", "batch_index", "head_index") if plan.heaviest_first else tuple(grid)
    batch, rows, _, columns = kept[0].shape
    shape = batch, rows, plan.num_heads, columns
    return _host.kernel(
        functools.partial(_kernel, plan=plan),
        out_type=[jax.ShapeDtypeStruct(shape, plan.problem.dtype)] * plan.num_sums,
        grid=tuple(grid[name] for name in order),
        grid_names=order,
        num_threads=plan.compute_wgs + 1,
        thread_name="role",
        scratch_types=plan.scratch,
        compiler_params=params,
    )(kept, ring, vectors, masks, dq)

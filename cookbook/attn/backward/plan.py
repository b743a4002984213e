# SPDX-License-Identifier: Apache-2.0
"""Sizes of the backward kernels, which registers limit (dk and dv fill them), and the place of a tile."""

import dataclasses

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ... import _device, _host
from ..._device import Barrier, Ref
from ..checks import check_smem
from ..core import PIECE, REGISTERS, WG_ROWS, Blocks, Cuts, Problem

CACHED = 2**26  # Bytes that blocks may share in the L2 cache: somewhat more than the 50 MB that it has, by measurement.


@dataclasses.dataclass(frozen=True)
class OneKernel:
    """The configuration of the one kernel that makes all three gradients."""

    num_stages: int = 2  # Slots of the ring of blocks of queries and do.
    runs_ahead: bool = False  # Whether dk's product may still run when the next step starts: registers for two steps.

    def __post_init__(self):
        if self.num_stages < 2:
            raise ValueError(f"{self.num_stages=} must be at least 2 (a block is loaded while another is used)")

    def check(self, head_dim: int, need: int) -> None:
        """Check that a block has the `need` bytes of shared memory, and registers enough, for heads of this size.

        Raises:
          ValueError: it has not.
        """
        check_smem("attention", self, need, head_dim)
        if head_dim > 128 or (self.runs_ahead and head_dim <= 64):
            raise ValueError(
                f"{_host.PACKAGE}.attention: {self} leaves too few registers for {head_dim=}: use "
                f"default_config({head_dim})"
            )


@dataclasses.dataclass(frozen=True)
class TwoKernels:
    """The configuration of the two kernels, one for dq and one for dk and dv."""

    block_q: int = 64  # Queries of a step of dk and dv, whose tiles have 128 keys (64 with heads over 128).
    block_kv: int = 64  # Keys of a step of dq.
    dq_wgs: int = 2  # Compute warpgroups of dq, with 64 queries each (the same 64 with heads over 128).
    num_stages: int = 4  # Slots of the ring of either kernel.

    def __post_init__(self):
        if self.num_stages < 2 or self.dq_wgs not in REGISTERS or {self.block_q, self.block_kv} - {64, 128}:
            raise ValueError(
                f"{self.num_stages=} must be at least 2 (a block is loaded while another is used), {self.dq_wgs=} one "
                f"of {list(REGISTERS)}, {self.block_q=} and {self.block_kv=} 64 or 128"
            )

    def check(self, head_dim: int, need: int) -> None:
        """Check that a block has the `need` bytes of shared memory, and registers enough, for heads of this size.

        Raises:
          ValueError: it has not.
        """
        check_smem("attention", self, need, head_dim)
        columns = head_dim // 2 if head_dim > 128 else head_dim
        # Values of a thread: its sums, s and dp, and p or ds of 16 bits. With more ptxas serializes the products.
        of_dq = columns // 2 + self.block_kv * 5 // 4
        of_dkdv = columns + self.block_q * 5 // 4
        too_many = of_dq > {2: 208, 3: 128}[self.dq_wgs] or of_dkdv > 224
        if too_many or (head_dim > 128 and self.dq_wgs > 2):
            raise ValueError(
                f"{_host.PACKAGE}.attention: {self} leaves too few registers for {head_dim=}: use "
                f"two_kernels({head_dim})"
            )


def two_kernels(head_dim: int) -> TwoKernels:
    """The configuration of the two kernels for heads of this size."""
    if head_dim <= 64:
        return TwoKernels(block_q=128, dq_wgs=3)
    return TwoKernels() if head_dim <= 128 else TwoKernels(num_stages=2)


@dataclasses.dataclass(frozen=True)
class Operand:
    """One of the two arrays in a buffer of shared memory: `operand[index]` is a view of a part of it."""

    number: int  # 0 or 1.
    buffer: Ref  # As tensor cores see it.
    tma_buffer: Ref  # As TMA sees it.

    def __getitem__(self, index):
        return self.buffer.at[self.number, *(index if isinstance(index, tuple) else (index,))]

    def tma(self, *index):
        return self.tma_buffer.at[self.number, *index]


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
    # With `OneKernel` the kernel of dk and dv also adds up dq. None: the two kernels as they are by default.
    config: OneKernel | TwoKernels | None = None
    # Parts of a group of query heads, each with a block, and a dk and a dv, rounded, of its own: more blocks.
    parts: int = 1

    @property
    def in_one(self) -> bool:
        """Whether this is the one kernel that makes all three gradients."""
        return isinstance(self.config, OneKernel)

    @property
    def tiles(self) -> TwoKernels:
        """The configuration, where there are two kernels."""
        return self.config or two_kernels(self.problem.head_dim)

    @property
    def splits_heads(self) -> bool:
        """Whether both compute warpgroups have the same rows, and each half of the columns of the sums."""
        return self.problem.head_dim > 128

    @property
    def compute_wgs(self) -> int:
        return self.tiles.dq_wgs if self.for_query else 2

    @property
    def rows(self) -> int:
        """Rows that a tile keeps."""
        return WG_ROWS * (1 if self.splits_heads else self.compute_wgs)

    @property
    def block(self) -> int:
        """Queries or keys of a step."""
        if self.in_one:
            return 128 if self.problem.head_dim <= 64 else 64
        return self.tiles.block_kv if self.for_query else self.tiles.block_q

    @property
    def sum_columns(self) -> int:
        """Columns of the sums of a compute warpgroup."""
        return self.problem.head_dim // 2 if self.splits_heads else self.problem.head_dim

    @property
    def num_stages(self) -> int:
        """Slots of the ring."""
        return self.config.num_stages if self.in_one else self.tiles.num_stages

    @property
    def runs_ahead(self) -> bool:
        """Whether the products of a step start while the sums of the step before are in flight. Then registers hold
        the weights of both steps, for which dk and dv leave no room."""
        return self.config.runs_ahead if self.in_one else self.for_query

    @property
    def group(self) -> int:
        """Query heads that a tile of keys goes through."""
        return self.problem.group // self.parts

    @property
    def num_heads(self) -> int:
        """Heads that have a row of tiles: of queries, or of keys, once for each part."""
        return self.problem.num_heads if self.for_query else self.problem.num_kv_heads * self.parts

    @property
    def num_tiles(self) -> int:
        """Tiles of a head."""
        return pl.cdiv(self.num_q if self.for_query else self.num_kv, self.rows)

    @property
    def num_blocks(self) -> int:
        """Blocks of a head."""
        return pl.cdiv(self.num_kv if self.for_query else self.num_q, self.block)

    @property
    def blocks(self) -> Blocks:
        """Which blocks the rows of a tile go with."""
        left, right = self.problem.left, self.problem.right
        if self.for_query:
            return Blocks(self.num_kv, self.block, left, right)
        # Rows are keys here, so `num_kv` and `block_kv` count queries, and the window's two sides are exchanged.
        # Queries after the last one need no mask: their p are zero, or their do and ds (`gradients.py`).
        return Blocks(self.num_blocks * self.block, self.block, right, left)

    @property
    def cuts(self) -> Cuts:
        blocks = self.blocks
        last = blocks.right is not None or blocks.num_kv % self.block != 0
        return Cuts(first=blocks.left is not None or self.has_segments, last=last, all=self.has_segments)

    @property
    def heaviest_first(self) -> bool:
        """Whether the first tiles of all heads, which have most to do, start before the second ones. Where the cache
        does not hold what all heads go through, the tiles of a head start together, and share it."""
        heads = self.problem.num_kv_heads if self.for_query else self.problem.num_heads
        nbytes = 4 * self.batch * heads * self.num_blocks * self.block * self.problem.head_dim
        return self.problem.has_window and nbytes <= CACHED

    @property
    def kept_width(self) -> int:
        """Values of a row of what a tile keeps, in one of its panels. Products of whole heads need fewer registers. But
        TMA copies any number of rows of 64 values, and of wider rows only a multiple of 8. So where keys are as many as
        queries, panels of 64 save padding them and cutting their gradients."""
        any_rows = (self.num_q if self.for_query else self.num_kv) % 8 != 0 and self.problem.group == 1
        return PIECE if any_rows else self.problem.head_dim

    @property
    def kept_columns(self) -> list:
        """The columns of each panel of a head that a tile keeps."""
        return [pl.ds(i, self.kept_width) for i in range(0, self.problem.head_dim, self.kept_width)]

    def kept_at(self, column, width: int) -> tuple:
        """Index of `width` columns, which are of one panel, of all rows that a tile keeps."""
        if self.kept_width == self.problem.head_dim:
            return 0, slice(None), pl.ds(column, width)
        return _device.div(column, PIECE), slice(None), slice(None)

    @property
    def scratch(self) -> dict:
        """Shared memory of a block, and its barriers."""
        panels, stages = len(self.kept_columns), self.num_stages
        scratch = dict(
            kept_smem=self._tiles(2, panels, self.rows, self.kept_width),
            streamed_smem=self._tiles(2, stages, self.block, self.problem.head_dim),
            kept_filled=plgpu.Barrier(num_arrivals=2 * panels),
            filled=_device.barriers(stages, 2 if self.for_query else 4),
            freed=_device.barriers(stages, self.compute_wgs),
        )
        if not self.for_query:
            scratch["vectors_smem"] = plgpu.SMEM((2, stages, self.block), jnp.float32)
        if self.splits_heads:
            scratch["done"] = plgpu.Barrier(num_arrivals=self.compute_wgs)
        return scratch

    def _tiles(self, *shape: int):
        """Shared memory for tiles of rows; for rows of 64 in both views of `_device.row_tiles`."""
        if shape[-1] > PIECE:
            return plgpu.SMEM(shape, self.problem.dtype, **_device.swizzled())
        return _device.row_tiles(shape, self.problem.dtype, self.problem.interpreted)


@dataclasses.dataclass(frozen=True)
class Buffers:
    """The scratch that all backward kernels have, as the roles use it."""

    kept: list[Operand]  # A tile keeps q and do, or k and v.
    streamed: list[Operand]  # Through the ring come k and v, or q and do.
    vectors: list[Operand]  # lse and delta of the queries that come through the ring.
    kept_filled: Barrier
    ring: _device.Ring

    @classmethod
    def of(cls, plan: Plan, kept_smem, streamed_smem, kept_filled, filled, freed, vectors_smem=None):
        def operands(smem, width: int):
            views = _device.Tiles.views(smem, plan.problem.interpreted or width > PIECE)
            return [Operand(i, views.tiled, views.rows) for i in range(2)]

        return cls(
            operands(kept_smem, plan.kept_width),
            operands(streamed_smem, plan.problem.head_dim),
            [] if vectors_smem is None else [Operand(i, vectors_smem, vectors_smem) for i in range(2)],
            kept_filled,
            _device.Ring(filled, freed, plan.num_stages),
        )


class Tile:
    """Where a tile lies: its rows, of which head, and the blocks that it goes through."""

    def __init__(self, plan: Plan, segment_tables: dict):
        tile = lax.axis_index("tile")
        if plan.for_query:
            # With a causal mask the last queries, and the first keys, have most to do.
            tile = plan.num_tiles - 1 - tile
        self.plan, self.segment_tables, self.index = plan, segment_tables, tile
        self.batch, self.head = lax.axis_index("batch_index"), lax.axis_index("head_index")
        self.row = tile * plan.rows
        first, end = plan.blocks.seen(self.row, plan.rows)
        if plan.has_segments:
            first = jnp.maximum(first, segment_tables["first"][self.batch, tile])
            end = jnp.minimum(end, segment_tables["end"][self.batch, tile])
        self.first, self.end = first, jnp.maximum(first, end)
        self.blocks = self.end - self.first  # Blocks of each head.
        self.heads = 1 if plan.for_query else plan.group
        self.steps = self.blocks * self.heads

    def step(self, count):
        """(head, rows) of the blocks of step `count`."""
        head = self.other_head(lax.div(count, self.blocks))
        block = self.first + lax.rem(count, self.blocks)
        return head, pl.ds(block * self.plan.block, self.plan.block)

    def other_head(self, i):
        """The head of the blocks of the `i`-th of `heads`."""
        plan = self.plan
        return _device.div(self.head, plan.problem.group) if plan.for_query else self.head * plan.group + i

    def share(self, wg):
        """(rows, columns) of a compute warpgroup's sums, in the tile."""
        if self.plan.splits_heads:
            return pl.ds(0, WG_ROWS), pl.ds(wg * self.plan.sum_columns, self.plan.sum_columns)
        return pl.ds(wg * WG_ROWS, WG_ROWS), pl.ds(0, self.plan.sum_columns)

    def whole(self, first_row):
        """(first, end) of the blocks that need no mask for the 64 rows from `first_row` on."""
        if self.plan.cuts.all:
            return self.end, self.end
        return self.plan.blocks.whole(first_row, WG_ROWS, self.first, self.end)

    def phases(self, first_row):
        """(first, end, is masked) of the blocks, for these rows, in their order."""
        cuts, (start, stop) = self.plan.cuts, self.whole(first_row)
        at_start, at_end = [(self.first, start, True)] * cuts.first, [(stop, self.end, True)] * cuts.last
        return [*at_start, (start, stop, False), *at_end]

    def mask(self, first_row, block):
        """Which columns of a block each of the 64 rows from `first_row` on goes with."""
        return self.plan.blocks.mask_of(first_row, block, self.segment_tables, self.batch)

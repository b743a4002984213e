# SPDX-License-Identifier: Apache-2.0
"""Shared by all attention kernels: the problem, which keys a query sees, block by block, and shared memory.

`tiles.py` has values in tiles, `steps.py` the steps of a compute warpgroup, `checks.py` what is asked of arguments,
`cache/pages.py` the cache's pages.
"""

import dataclasses
import functools
import math
import operator
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .. import _device
from .._device import COLUMNS, PIECE, ROWS, Barrier, Index, Ref, div

HEAD_DIMS = (64, 128, 256)  # Sizes of heads of the backward kernels, and of keys and values of 8 bits.
SERVED_HEAD_DIMS = (64, 80, 96, 128, 192, 256)  # Sizes that kernels with packed or paged keys take.
TILE_ROWS = 8  # Rows that are swizzled together.
WG_ROWS = 64  # Rows of a compute warpgroup: the M of a WGMMA.
LOG2E = math.log2(math.e)
E4M3 = jnp.float8_e4m3fn
# Registers per thread of the memory and of the compute warpgroups, by the number of the latter. A memory warpgroup
# that holds ids of pages, or the sizes of tiles of heads of 256, needs more.
REGISTERS = {2: (24, 240), 3: (32, 160)}
REGISTERS_MEMORY = {2: (40, 232), 3: (32, 160)}


def per_row(numbers, shape):
    """A number for each row, repeated along it; a single number stays one."""
    return numbers if jnp.ndim(numbers) == 0 else lax.broadcast_in_dim(numbers, shape, [0])


@dataclasses.dataclass(frozen=True)
class Problem:
    """Statics of every kernel here: its heads, and what becomes of their logits."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: jnp.dtype
    scale: float
    soft_cap: float | None
    left: int | None  # Keys that a query sees before its own position; None for all.
    right: int | None
    interpreted: bool

    @property
    def group(self) -> int:
        """Query heads that share keys."""
        return self.num_heads // self.num_kv_heads

    @property
    def panel(self) -> int:
        """Columns of a head that are swizzled together: 128 bytes, or fewer with small heads of 8 bits."""
        return PIECE if jnp.dtype(self.dtype).itemsize == 2 else min(128, self.head_dim)

    @property
    def panels(self) -> int:
        """Panels of a head."""
        return pl.cdiv(self.head_dim, self.panel)

    @property
    def width(self) -> int:
        """Columns of a head in shared memory: whole panels."""
        return self.panels * self.panel

    def columns(self, panel: int, size: int | None = None):
        """Values of a head that a panel holds, of `size` or as many as are swizzled together. Pallas lets only a traced
        start go beyond the edge."""
        size = size or self.panel
        start = panel * size
        return pl.ds(start if start + size <= self.head_dim else start + 0 * lax.axis_index("role"), size)

    @property
    def whole_panels(self) -> bool:
        return self.width == self.head_dim

    @property
    def has_window(self) -> bool:
        """Whether there are keys that some queries see and others do not, wherever sequences end."""
        return (self.left, self.right) != (None, None)

    def scored(self, s, scale=1.0):
        """(scores, scale_log2) of products s: the base-2 logits are scores * scale_log2. Scores are s, or its tanh with
        a soft cap; scale_log2 is positive, so that maxima may be taken before scaling. `scale`, one number or one for
        each row, is what the operands have still to be multiplied by."""
        scale = scale * self.scale
        if self.soft_cap is None:
            return s, LOG2E * scale
        return jnp.tanh(s * per_row(scale / self.soft_cap, s.shape)), LOG2E * self.soft_cap


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Which blocks of keys rows of queries see, in numbers of NumPy or traced ones; `mask_of` for kernels alone. For dk
    and dv rows are keys, and what is said of keys here is said of queries."""

    num_kv: int  # Where the keys end.
    block_kv: int
    left: int | None  # Keys that a query sees before its own position; None for all.
    right: int | None
    first_kv: int = 0  # Keys before it belong to another sequence.
    first_q: int = 0  # The position of the first query, among the keys.
    group: int = 1  # Neighbouring rows that are heads of the same query.
    # Whether a query sees exactly the keys up to its own position, which has a key: then the end of the keys need not
    # be looked at.
    ends_at_query: bool = False

    def position(self, row):
        """Position among the keys of the query in a row."""
        row = row if self.group == 1 else div(row, self.group)
        return row if isinstance(self.first_q, int) and self.first_q == 0 else self.first_q + row

    def seen(self, first_row, num_rows: int):
        """(first, end) of the blocks that hold a key which one of the rows sees: the visible range."""
        lib = np if isinstance(first_row, np.ndarray) else jnp
        first, end = self.first_kv + 0 * first_row, self.num_kv + 0 * first_row
        if self.left is not None:
            first = lib.maximum(self.position(first_row) - self.left, self.first_kv)
        if self.right is not None:
            end = lib.clip(self.position(first_row + num_rows - 1) + 1 + self.right, 0, self.num_kv)
        first = div(first, self.block_kv)
        return first, lib.maximum(first, div(end + self.block_kv - 1, self.block_kv))

    def whole(self, first_row, num_rows: int, first, end):
        """(first, end) of the blocks between `first` and `end` all of whose keys all rows see: they need no mask."""
        start, stop = self.first_kv + 0 * first_row, self.num_kv + 0 * first_row
        if self.left is not None:
            start = jnp.maximum(self.position(first_row + num_rows - 1) - self.left, self.first_kv)
        if self.right is not None:
            stop = jnp.clip(self.position(first_row) + self.right + 1, 0, self.num_kv)
        start = jnp.clip(div(start + self.block_kv - 1, self.block_kv), first, end)
        return start, jnp.clip(div(stop, self.block_kv), start, end)

    def mask(self, rows, columns):
        """Whether the query of each row sees the key of each column, of a block that some row sees."""
        if self.ends_at_query:
            return (columns >= self.first_kv) & (columns <= self.position(rows))
        q_ids, tests = self.position(rows), []
        if not (isinstance(self.first_kv, int) and self.first_kv == 0):
            tests.append(columns >= self.first_kv)
        if self.left is not None:
            tests.append(columns >= q_ids - self.left)
        if self.right is not None:
            tests.append(columns <= q_ids + self.right)
        ends_with_block = isinstance(self.num_kv, int) and self.num_kv % self.block_kv == 0
        return functools.reduce(operator.and_, tests + [columns < self.num_kv] * (not tests or not ends_with_block))

    def mask_of(self, first_row, block, segment_tables: dict | None = None, batch=0):
        """`mask` of a warpgroup's rows from `first_row` on and the keys of a block, as its products are laid out; with
        `segment_tables` a query sees only keys with its own id."""
        row, column = _device.indices(self.shape)
        seen = self.mask(row + first_row, column + block * self.block_kv)
        if not segment_tables:
            return seen
        row_ids = _device.load(segment_tables["rows"].at[batch, pl.ds(first_row, WG_ROWS)], ROWS)
        column_ids = _device.load(
            segment_tables["columns"].at[batch, pl.ds(block * self.block_kv, self.block_kv)], COLUMNS
        )
        return seen & (per_row(row_ids, self.shape) == _device.spread(column_ids, 1, self.shape))

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the products of a warpgroup's rows and a block."""
        return WG_ROWS, self.block_kv


@dataclasses.dataclass(frozen=True)
class Cuts:
    """Which of the blocks that a warpgroup's rows see may be cut by a mask: only those are masked."""

    first: bool  # Some at the start.
    last: bool  # Some at the end; of a forward kernel, after its first step, which is masked if there are `any`.
    all: bool = False
    any: bool = True


@dataclasses.dataclass(frozen=True)
class Span:
    """The blocks of keys that a tile goes through, the last one first, and which of their keys its rows see."""

    blocks: Blocks
    cuts: Cuts
    first: Index
    end: Index  # After the last one.
    steps: Index  # Number of blocks.
    segment_tables: dict  # `make_segment_tables`, or {}.
    batch: Index  # The batch that `segment_tables` are for.

    @classmethod
    def of(cls, blocks: Blocks, cuts: Cuts, first, end, segment_tables: dict | None = None, batch=None):
        """At least one block, if only to find that no key is seen."""
        end = jnp.maximum(end, 1)
        first = jnp.minimum(first, end - 1)
        return cls(blocks, cuts, first, end, end - first, segment_tables or {}, batch)

    def mask(self, first_row, block):
        """Which keys of a block the 64 rows from `first_row` on see."""
        return self.blocks.mask_of(first_row, block, self.segment_tables, self.batch)

    def phases(self, first_row):
        """(start, whole_start, whole_stop, stop): the steps whose blocks one of the 64 rows sees, and the steps among
        them whose keys all of the rows see, beginning with the second step. Step i takes block `end - 1 - i`."""
        first, end = self.blocks.seen(first_row, WG_ROWS)
        first = jnp.clip(first, self.first, self.end - 1)
        end = jnp.clip(end, first + 1, self.end)
        whole = (end, end) if self.cuts.all else self.blocks.whole(first_row, WG_ROWS, first, end)
        start, stop = self.end - end, self.end - first
        whole_start = jnp.maximum(self.end - whole[1], start + 1)
        return start, whole_start, jnp.maximum(self.end - whole[0], whole_start), stop


def make_segment_tables(row_ids, column_ids, rows: int, block: int) -> dict:
    """Segments for a kernel with tiles of `rows` that go through blocks of `block` columns: the ids of "rows" and
    "columns", padded to whole tiles and blocks; and for each tile the "first" block, and the "end" of the blocks, that
    have ids between the least and the largest of its rows."""
    row_ids, column_ids = (
        jnp.pad(ids.astype(jnp.int32), ((0, 0), (0, -ids.shape[1] % size)), mode="edge")
        for ids, size in ((row_ids, rows), (column_ids, block))
    )
    of_tile = row_ids.reshape(len(row_ids), -1, 1, rows)
    of_block = column_ids.reshape(len(column_ids), 1, -1, block)
    meet = (of_tile.min(-1) <= of_block.max(-1)) & (of_block.min(-1) <= of_tile.max(-1))
    end = jnp.where(meet, jnp.arange(1, meet.shape[2] + 1, dtype=jnp.int32), 0).max(-1)
    return dict(rows=row_ids, columns=column_ids, first=jnp.argmax(meet, -1).astype(jnp.int32), end=end)


def row_sinks(sinks, index):
    """Base-2 logits of the sinks of a warpgroup's rows, which are those in `sinks[index]`; None for none."""
    return None if sinks is None else _device.load(sinks.at[index], ROWS)


# Shared memory --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class BlockConfig:
    block_kv: int = 128  # Keys and values of a step.
    num_stages: int = 2  # Slots of each of the two rings; a power of two costs the least arithmetic.
    compute_wgs: int = 2  # Compute warpgroups, with 64 rows each.
    in_turns: bool = True  # Whether compute warpgroups start their products in turns (ping-pong).
    # Whether a thread adds up the weights that it has itself, in registers of its own, and others' only at the end.
    sums_by_thread: bool = True

    block_multiple: ClassVar[int] = 64  # `block_kv` is a multiple of it.

    def __post_init__(self):
        if self.num_stages < 2 or self.compute_wgs not in REGISTERS:
            raise ValueError(
                f"{self.num_stages=} must be at least 2 (a block is loaded while another is used), "
                f"{self.compute_wgs=} one of {list(REGISTERS)}"
            )
        most = 192 if self.compute_wgs > 2 else 256
        if self.block_kv % self.block_multiple or not 64 <= self.block_kv <= most:
            raise ValueError(
                f"{self.block_kv=} must be a multiple of {self.block_multiple} (keys that TMA and tensor cores take), "
                f"from 64 to {most} (what registers hold, with {self.compute_wgs=})"
            )

    @property
    def rows(self) -> int:
        """Rows of a tile."""
        return WG_ROWS * self.compute_wgs

    def out_over_query(self, head_dim: int) -> bool:
        """Whether out takes the place of the queries on its way out: where shared memory has no room for both."""
        return head_dim > 128


@dataclasses.dataclass(frozen=True)
class Config(BlockConfig):
    """The configuration of the kernels of 16 bits: no other `BlockConfig` is taken for one."""


def scratch(problem: Problem, c: BlockConfig, smem: dict, q_copies: int, k_copies: int, v_copies: int) -> dict:
    """Scratch of a kernel whose rows stay while blocks of keys and values come through two rings: its own `smem` (of
    keys and values at least), and barriers for so many copies of a warpgroup's queries and of a block."""
    wgs, stages = c.compute_wgs, c.num_stages
    tiles = _device.row_tiles((wgs, problem.panels, WG_ROWS, problem.panel), problem.dtype, problem.interpreted)
    found = dict(q_smem=tiles) | smem
    found |= dict(
        q_filled=_device.barriers(wgs, q_copies),
        k_filled=_device.barriers(stages, k_copies),
        v_filled=_device.barriers(stages, v_copies),
        q_freed=_device.barriers(wgs),
        k_freed=_device.barriers(stages, wgs),
        v_freed=_device.barriers(stages, wgs),
        turn=_device.barriers(wgs),
    )
    return found if c.out_over_query(problem.head_dim) else found | dict(o_smem=tiles)


@dataclasses.dataclass(frozen=True)
class Shared:
    """The scratch of `scratch`, as the roles use it. `q`, `k`, `v` and `o` are as tensor cores see them, `_tma` as TMA
    does."""

    q: Ref  # (warpgroups, panels, 64, 64)
    q_tma: Ref
    q_filled: Barrier  # A barrier per warpgroup: the copies of its queries have arrived.
    q_freed: Barrier  # A barrier per warpgroup: it is done with them.
    k: Ref  # (slots, panels, block_kv, 64), or rows of whole heads, (slots, block_kv, head_dim).
    k_tma: Ref
    v: Ref  # (slots, block_kv, width)
    v_tma: Ref  # (slots, block_kv / 8, panels, 8, 64)
    v_rows: Ref  # (slots, block_kv / 8, 8 width), for `clear`.
    keys: _device.Ring  # The ring of the slots of k.
    values: _device.Ring  # That of v.
    turns: _device.Turns
    o: Ref  # As q, in its place where `out_over_query`.
    o_tma: Ref
    frees_early: bool  # Whether queries are done with before out is stored.

    @classmethod
    def of(
        cls, c: BlockConfig, *, q_smem, k_smem, v_smem, q_filled, k_filled, v_filled, q_freed, k_freed, v_freed, turn,
        o_smem=None,
    ):  # fmt: skip
        # A RefUnion is a row of bytes until it is unpacked.
        both = lambda smem: tuple(smem) if len(smem.shape) == 1 else (smem, smem)
        (q, q_tma), (k, k_tma), (v, *v_views) = map(both, (q_smem, k_smem, v_smem))
        rings = _device.Ring(k_filled, k_freed, c.num_stages), _device.Ring(v_filled, v_freed, c.num_stages)
        turns = _device.Turns(turn if c.in_turns else None, c.compute_wgs)
        o_views = (q, q_tma) if o_smem is None else both(o_smem)
        return cls(
            q, q_tma, q_filled, q_freed, k, k_tma, v, v_views[0], v_views[-1], *rings, turns, *o_views,
            frees_early=o_smem is not None,
        )  # fmt: skip

    def key_panel(self, slot, panel: int):
        """64 columns of the keys in a slot."""
        return self.k.at[slot, panel] if len(self.k.shape) == 4 else self.k.at[slot, :, pl.ds(panel * PIECE, PIECE)]

    def free_query(self, wg):
        plgpu.barrier_arrive(self.q_freed.at[wg])

    def drain(self, count):
        """The memory warpgroup, after `count` steps: the last slots are given back too."""
        self.keys.drain(count)
        self.values.drain(count)

    def round_out(self, wg, out):
        """Puts a warpgroup's results, rounded, where TMA may take them from."""
        out = out.astype(self.o.dtype)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # The previous tile's have left.
        for p in range(self.o.shape[1]):
            self.o[wg, p] = out[:, p * PIECE : (p + 1) * PIECE]
        plgpu.commit_smem()

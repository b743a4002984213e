# SPDX-License-Identifier: Apache-2.0
"""Which block of threads decodes what: units, parts and pieces. Index arithmetic, and the statics of the kernels.

A unit is one KV head and up to 64 of its query heads. The blocks of keys of all sequences, one after the
other, are cut into equal parts, so that all end at the same time, whatever the lengths are. There are as many parts as
there can be if each unit of each part gets an SM of its own, or half of one, so units that read other heads of the same
pages do so at about the same time. A piece is the share of a part in one sequence; a second kernel merges the pieces of
each sequence (`merge_pieces.py`).
"""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ... import _device
from ..._device import WARP, WARPGROUP, div, rem
from ..cache.pages import Pages
from ..core import WG_ROWS, Problem


@dataclasses.dataclass(frozen=True)
class Config:
    block_kv: int = 128  # Tokens of a step.
    num_stages: int = 2  # Slots of the ring.
    num_pairs: int = 1  # Parts that a block computes side by side, each with warpgroups and a ring of its own.

    def __post_init__(self):
        if self.block_kv not in (64, 128) or self.num_stages < 2 or self.num_pairs not in (1, 2):
            raise ValueError(
                f"{self.block_kv=} must be 64 or 128 (tokens that tensor cores take at once), {self.num_stages=} at "
                f"least 2 (a block is loaded while another is used), {self.num_pairs=} 1 or 2"
            )


@dataclasses.dataclass(frozen=True)
class Plan:
    """Statics of the kernels."""

    problem: Problem
    num_seqs: int
    pages: Pages
    config: Config
    num_sms: int

    @property
    def chunks(self) -> int:
        """Units that a group makes."""
        return pl.cdiv(self.problem.group, WG_ROWS)

    @property
    def rows(self) -> int:
        """Query heads of a unit."""
        return pl.cdiv(self.problem.group, self.chunks)

    @property
    def rows_at_once(self) -> int:
        """Rows that the second kernel merges at once, a power of 2: one to eight values for each of its 128 threads."""
        width = self.problem.width
        least, most = WARPGROUP // math.gcd(WARPGROUP, width), 512 // width
        return next(rows for rows in (1, 2, 4, 8) if rows >= least and (rows >= self.rows or 2 * rows > most))

    @property
    def merged_layout(self):
        """The layout of these rows: each thread has values of one."""
        rows, width = self.rows_at_once, self.problem.width
        vec = next(vec for vec in (4, 2, 1) if width * rows % (WARPGROUP * vec) == 0)
        columns = WARPGROUP * vec // rows
        if rows >= 4:
            return _device.lanes_layout(WARPGROUP // rows, columns, vec)
        tiling = plgpu.Tiling(((rows, columns), (WARP * vec,), (vec,)))
        return plgpu.Layout.TILED(tiling, warp_dims=(-4, -3)[2 - rows :], lane_dims=(-2,), vector_dim=-1)

    @property
    def stored_rows(self) -> int:
        return pl.cdiv(self.rows, self.rows_at_once) * self.rows_at_once

    @property
    def row_heads(self) -> np.ndarray:
        """The query head of each stored row, for each unit; any for rows that pad."""
        unit, row = np.arange(self.num_units)[:, None], np.arange(self.stored_rows)
        heads = unit // self.chunks * self.problem.group + unit % self.chunks * self.rows + row
        return np.minimum(heads, self.problem.num_heads - 1)

    @property
    def num_units(self) -> int:
        return self.problem.num_kv_heads * self.chunks

    @property
    def num_parts(self) -> int:
        return max(1, self.num_sms // self.num_units) * self.config.num_pairs

    @property
    def num_pieces(self) -> int:
        """Most pieces that there can be."""
        return self.num_seqs + self.num_parts

    @property
    def fp8_compute_wgs(self) -> int:
        """Warpgroups that share the keys of a block of pages of 8 bits. A product takes no fewer than 64 of them."""
        return self.config.block_kv // 64

    def first_seen(self, kv_len):
        """The first token that the last of `kv_len` tokens sees."""
        return 0 if self.problem.left is None else jnp.maximum(kv_len - 1 - self.problem.left, 0)

    def blocks(self, kv_len):
        """(first, number) of the blocks of keys that the last of `kv_len` tokens sees; one, if only to find none."""
        kv_len = self.pages.length(kv_len)
        first = 0 * kv_len if self.problem.left is None else div(self.first_seen(kv_len), self.config.block_kv)
        return first, jnp.maximum(div(kv_len + self.config.block_kv - 1, self.config.block_kv) - first, 1)

    def start(self, part, num_blocks):
        """The first block of a part: the first parts have one more where they cannot all have as many."""
        return part * div(num_blocks, self.num_parts) + jnp.minimum(part, rem(num_blocks, self.num_parts))

    def part_of(self, block, num_blocks):
        """The part that has a block."""
        share, extra = div(num_blocks, self.num_parts), rem(num_blocks, self.num_parts)
        in_long_ones = lax.div(block, share + 1)
        return jnp.where(block < extra * (share + 1), in_long_ones, lax.div(block - extra, jnp.maximum(share, 1)))


class Part:
    """Work of a part: `steps` blocks of keys, from block `begin` of `first_seq` on, in so many `pieces`. `ends` are
    the ends of the sequences in the row of all blocks, and `seqs` the first sequence of each part."""

    def __init__(self, plan: Plan, ends, seqs, kv_lens, part):
        starts, found, begins = [], [], []
        for p in (part, part + 1):
            seq = jnp.minimum(seqs[p], plan.num_seqs - 1)
            _, steps = plan.blocks(kv_lens[seq])
            starts.append(plan.start(p, ends[plan.num_seqs - 1]))
            found.append(seq)
            begins.append(starts[-1] - ends[seq] + steps)
        self.first_seq, self.begin, self.steps = found[0], begins[0], starts[1] - starts[0]
        self.pieces = jnp.where(self.steps > 0, found[1] + jnp.where(begins[1] > 0, 1, 0) - self.first_seq, 0)


class Piece:
    """Share of a part in one sequence: blocks `first` to `first + steps` of its keys."""

    def __init__(self, plan: Plan, kv_lens, seq, begin, remaining):
        self.seq = seq
        self.kv_len = plan.pages.length(kv_lens[seq])
        first, steps = plan.blocks(self.kv_len)
        self.first = first + begin
        self.steps = jnp.minimum(steps - begin, remaining)


def ends_and_seqs(plan: Plan, kv_lens):
    """`ends` and `seqs` of `Part`, by two small kernels of XLA, once for all layers of a model under one `jax.jit`."""
    _, steps = plan.blocks(kv_lens)
    seq = jnp.arange(plan.num_seqs)
    ends = jnp.sum(jnp.where(seq <= seq[:, None], steps, 0), axis=1, dtype=jnp.int32)
    starts = plan.start(jnp.arange(plan.num_parts + 1, dtype=jnp.int32), ends[-1])
    return ends, jnp.sum(ends <= starts[:, None], axis=1, dtype=jnp.int32)


def each_piece(plan: Plan, ends, seqs, kv_lens, part, body):
    """Calls `body(i, piece, steps_done)` for each piece of a part. Returns how many (steps, pieces) it has."""
    work = Part(plan, ends, seqs, kv_lens, part)

    def one(i, steps_done):
        begin = jnp.where(i == 0, work.begin, 0)
        piece = Piece(plan, kv_lens, work.first_seq + i, begin, work.steps - steps_done)
        body(i, piece, steps_done)
        return steps_done + piece.steps

    return lax.fori_loop(0, work.pieces, one, jnp.int32(0)), work.pieces

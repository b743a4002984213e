# SPDX-License-Identifier: Apache-2.0
"""Which block of threads decodes what: units, parts and pieces. Index arithmetic, and the statics of the kernels.

A unit is a KV head, with up to 64 of the query heads that read it. The blocks of keys of all sequences, one after the
other, are cut into equal parts, so that all end at the same time, whatever the lengths are. There are as many parts as
there can be if each unit of each part gets an SM of its own, or half of one, so units that read other heads of the same
pages do so at about the same time. A piece is the share of a part in one sequence; a second kernel merges the pieces of
each sequence (`merge_attention.py`).
"""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ..cache.pages import Pages
from ..core import PIECE, TILED, WG_ROWS, Problem, div, rem, row_tiles
from ..tiles import copies_of_tiles, value_tiles


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

    def smem_bytes(self, head_dim: int) -> int:
        """Out in float32, in whose place the query lies before; the ring; and the barriers."""
        width = pl.cdiv(head_dim, PIECE) * PIECE
        pair = (4 * WG_ROWS + 4 * self.num_stages * self.block_kv) * width + 8 * (2 * self.num_stages + 2)
        return self.num_pairs * pair

    def smem_bytes_fp8(self, head_dim: int) -> int:
        """The same with pages of 8 bits; and the query in two terms, two blocks of wide values, and their barriers."""
        query, ring, wide = 6 * WG_ROWS, 2 * self.num_stages * self.block_kv, 4 * self.block_kv
        return (query + ring + wide) * head_dim + 8 * (2 * self.num_stages + 8)


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
        """Rows that the second kernel merges at once: one to four values for each of its 128 threads."""
        least = 128 // math.gcd(128, self.problem.width)
        return min(pl.cdiv(self.rows, least) * least, 512 // self.problem.width)

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
    def scratch(self) -> dict:
        return dict(pairs=[self.pair_scratch] * self.config.num_pairs)

    @property
    def pair_scratch(self) -> dict:
        p, c = self.problem, self.config
        ring = plgpu.SMEM((c.num_stages, c.block_kv, p.width), p.dtype, **TILED)
        copies = 2 * self.pages.copies
        if not p.whole_pieces:
            ring = row_tiles((c.num_stages, p.pieces, c.block_kv, PIECE), p.dtype, p.interpreted)
            copies = self.pages.copies * (p.pieces + copies_of_tiles(p, self.pages.tokens))
        query = row_tiles((p.pieces, WG_ROWS, PIECE), p.dtype, p.interpreted)
        out = plgpu.SMEM((WG_ROWS, p.width), jnp.float32)
        return dict(
            q_and_out=[query, out] if p.interpreted else plgpu.RefUnion(*query.refs, out),
            k_smem=ring,
            v_smem=value_tiles(c.num_stages, c.block_kv, p),
            q_filled=plgpu.Barrier(num_arrivals=p.pieces),
            q_freed=plgpu.Barrier(),
            filled=plgpu.Barrier(num_arrivals=copies, num_barriers=c.num_stages),
            freed=plgpu.Barrier(num_barriers=c.num_stages),
        )

    def blocks(self, kv_len):
        """(first, number) of the blocks of keys that the last of so many tokens sees; one, if only to find none."""
        kv_len = self.pages.length(kv_len)
        first = (
            0 * kv_len
            if self.problem.left is None
            else div(jnp.maximum(kv_len - 1 - self.problem.left, 0), self.config.block_kv)
        )
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
    """Work of a block of threads: `steps` blocks of keys, from block `begin` of `first_seq` on, in so many `pieces`.
    `ends` are those of the sequences in the row of all blocks, and `seqs` the first sequence of each part."""

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

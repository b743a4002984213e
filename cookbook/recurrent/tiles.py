# SPDX-License-Identifier: Apache-2.0
"""Rows of the recurrent kernels in shared memory: chunks come in by a ring, results go out.

A chunk at the end of a sequence may have rows of the next one in global memory. They are loaded too, since TMA copies
whole tiles, and then zeroed; and of a result only the rows that the sequence has are stored.
"""

import dataclasses
import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .. import _device
from .._device import PIECE, Barrier, Index, Ref, Tiles, div, load, spread
from .sequences import Part

NORM_EPSILON = 1e-6  # Under the root, as in fla's l2norm.


@dataclasses.dataclass(frozen=True)
class Operand:
    """Rows of an array (rows, heads, width * pieces) that a block reads: of one head, into the stages of a ring."""

    gmem: Ref
    smem: Tiles  # (stages, pieces, rows, width).
    head: Index
    pieces: int

    @property
    def width(self) -> int:
        """Columns of a piece, 128 bytes."""
        return self.smem.rows.shape[-1]

    def copy(self, row: Index, num_rows: int, stage: Index, barrier: Barrier):
        for p in range(self.pieces):
            source = self.gmem.at[pl.ds(row, num_rows), self.head, pl.ds(p * self.width, self.width)]
            plgpu.copy_gmem_to_smem(source, self.smem.rows.at[stage, p], barrier)

    def clear(self, stage: Index, end: Index, interpreted: bool):
        """Zeroes the rows from `end` on, which are of another sequence and may be NaN."""
        for p in range(self.pieces):
            _clear((self.smem.tiled if interpreted else self.smem.eights).at[stage, p], end, interpreted)


def _clear(rows: Ref, end: Index, interpreted: bool):
    if interpreted:
        row = lax.broadcasted_iota(jnp.int32, rows.shape, 0)
        rows[...] = jnp.where(row < end, rows[...], 0)
        return

    @pl.loop(div(end, 8), rows.shape[0])
    def _(eight):  # Swizzling moves nothing out of its row of 128 bytes.
        row = 8 * eight + div(plgpu.broadcasted_iota(jnp.int32, rows.shape[1:], 0), rows.shape[1] // 8)
        rows[eight] = jnp.where(row < end, rows[eight], jnp.zeros((), rows.dtype))


def normalize(rows_smem: Ref, pieces: int):
    """Divides rows, in pieces (64, 64), by their norms; what multiplied each of them."""
    rows = [load(rows_smem.at[p]).astype(jnp.float32) for p in range(pieces)]
    squares = functools.reduce(jnp.add, [(x * x).sum(axis=1) for x in rows])
    inverse = lax.rsqrt(squares + NORM_EPSILON)
    for p, x in enumerate(rows):
        rows_smem[p] = (x * spread(inverse, 0)).astype(rows_smem.dtype)
    plgpu.commit_smem()
    return inverse


def load_chunks(part: Part, ring: _device.Ring, landed: Barrier, operands, others, copies: int, reverse: bool = False):
    """The memory warpgroup: fills a ring with all chunks of a part, and returns when all stages have been released.

    Args:
      landed: the copies of a chunk that has rows of another sequence arrive here and not at `ring.filled`, at which
        this warpgroup arrives once it has zeroed those rows.
      operands: each an `Operand`.
      others: `others(chunk, stage)` is a list of (source, target), the copies beside those of rows; `chunk` counts
        through all sequences.
      copies: how many a chunk takes in all.
      reverse: the last chunk comes first.
    """

    @pl.loop(0, part.num_chunks)
    def _(i):
        chunk, stage = (part.num_chunks - 1 - i if reverse else i), ring.acquire(i)

        def copy(barrier):
            for operand in operands:
                operand.copy(part.row(chunk), part.chunk, stage, barrier)
            for source, target in others(part.first_chunk + chunk, stage):
                plgpu.copy_gmem_to_smem(source, target, barrier)

        fill_stage(part, chunk, copy, operands, stage, ring.filled.at[stage], landed, copies)

    ring.drain(part.num_chunks)


def fill_stage(part: Part, chunk: Index, copy, operands, stage: Index, filled: Barrier, landed: Barrier, copies: int):
    """Fills a stage by `copy(barrier)`, which makes so many `copies`, with chunk number `chunk` of a part. `landed` and
    `operands` are those of `load_chunks`."""
    end = part.read_end - part.row(chunk)

    def copy_and_clear():
        copy(landed.at[0])
        plgpu.barrier_wait(landed.at[0])
        for operand in operands:
            operand.clear(stage, jnp.maximum(end, 0), part.interpreted)
        plgpu.commit_smem()
        for _ in range(copies):
            plgpu.barrier_arrive(filled)

    if not part.is_ragged:
        copy(filled)
        return
    pl.when(end >= part.chunk)(lambda: copy(filled))
    pl.when(end < part.chunk)(copy_and_clear)


def store_rows(part: Part, smem: Tiles, tile: int, gmem: Ref, head: Index, piece: int, row: Index):
    """Copies tile number `tile` of `smem`, 64 rows, to rows of `gmem` from `row` on, of a head's `piece`; but none
    after the part's end."""
    num_rows, width = part.write_end - row, smem.rows.shape[-1]

    def copy(skip, size: int):
        target = gmem.at[pl.ds(row + skip, size), head, pl.ds(piece * width, width)]
        plgpu.copy_smem_to_gmem(smem.rows.at[tile, pl.ds(skip, size)], target)

    if not part.is_ragged:
        copy(0, PIECE)
        return
    pl.when(num_rows >= PIECE)(lambda: copy(0, PIECE))

    @pl.when(num_rows < PIECE)
    def _():
        eights = 0 if part.interpreted else div(jnp.maximum(num_rows, 0), 8)
        pl.loop(0, eights)(lambda i: copy(8 * i, 8))
        pl.loop(8 * eights, num_rows)(lambda i: copy(i, 1))

# SPDX-License-Identifier: Apache-2.0
"""Packed sequences of the recurrent kernels, cut into chunks and parts.

A *sequence* is a run of rows of the operands. It is cut into *chunks* of 64 or 128 rows, the last of which may be
shorter, and into *parts*: runs of chunks that one block of threads goes through. Where sequences and heads fill the
GPU, each sequence is one part. Otherwise it has several: their states are first computed from zero, and then combined
(`states.py`).
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from .. import _device, _host
from .._device import Barrier, Index, div

CHUNKS = (64, 128)  # Rows of a chunk.
PART_FIELDS = ("first_row", "read_end", "write_end", "first_chunk", "number")  # They make a `Part`.


@dataclasses.dataclass(frozen=True)
class Sequences:
    """How many rows and sequences there are, and how they are cut. Where packed ones begin is known on the GPU alone.

    Rows after the last packed sequence count as one sequence more, which has no values: its results are zeros.
    """

    num_seqs: int
    num_rows: int  # All sequences together.
    is_packed: bool  # Otherwise all have the same length.
    chunk: int
    part_rows: int | None = None  # A multiple of all of `CHUNKS`; None: each sequence is one part.

    @property
    def length(self) -> int:
        """Rows of each sequence that is not packed."""
        return self.num_rows // self.num_seqs

    @property
    def is_ragged(self) -> bool:
        """Whether a chunk may have rows of another sequence, or of none."""
        return self.is_packed or self.length % self.chunk != 0

    @property
    def num_chunks(self) -> int:
        """Most chunks that there can be."""
        if self.is_packed:
            return self.num_seqs + 1 + self.num_rows // self.chunk
        return self.num_seqs * pl.cdiv(self.length, self.chunk)

    @property
    def num_parts(self) -> int:
        """Most parts that there can be."""
        if self.part_rows is None:
            return self.num_seqs + self.is_packed
        if self.is_packed:
            return self.num_seqs + 1 + self.num_rows // self.part_rows
        return self.num_seqs * pl.cdiv(self.length, self.part_rows)

    @_host.own_options()
    def starts(self, cu_seqlens):
        """(num_seqs + 1,): the first row of each packed sequence and the end of the last, cut at the rows that there
        are. They begin at 0 and never go back."""
        starts = jnp.clip(cu_seqlens.astype(jnp.int32), 0, self.num_rows).at[0].set(0)
        return _host.running(jnp.max, starts)

    def _places(self, starts):
        """(first row, end, first chunk) of each packed sequence, the rows after the last one included."""
        ends = jnp.append(starts, self.num_rows)
        chunks = div(jnp.diff(ends) + (self.chunk - 1), self.chunk)
        return ends[:-1], ends[1:], _host.running(jnp.sum, chunks) - chunks

    @_host.own_options()
    def parts(self, cu_seqlens, in_order: bool = False):
        """Table of the parts, one per row, with `PART_FIELDS`, the longest packed ones first unless they are wanted
        `in_order`; and the sequence of each part, by the part's number.

        An empty sequence has one part without chunks. Parts are numbered from the first sequence to the last, and from
        the start of a sequence to its end; rows of the table for which there is no part have the number `num_parts`.
        """
        if not self.is_packed:
            return self._equal_parts()
        starts, ends, first_chunk = self._places(self.starts(cu_seqlens))
        size = self.part_rows or max(self.num_rows, 1)
        counts = jnp.maximum(div(ends - starts + (size - 1), size), 1)
        last = _host.running(jnp.sum, counts)
        number = jnp.arange(self.num_parts, dtype=jnp.int32)
        seq = jnp.searchsorted(last, number, side="right", method="compare_all").astype(jnp.int32)
        exists = seq < len(starts)
        seq = jnp.minimum(seq, len(starts) - 1)
        skip = (number - (last - counts)[seq]) * size
        first = starts[seq] + skip
        write_end = jnp.where(exists, jnp.minimum(first + size, ends[seq]), first)
        read_end = jnp.where(seq < self.num_seqs, write_end, first)
        number = jnp.where(exists, number, self.num_parts)
        table = jnp.stack([first, read_end, write_end, first_chunk[seq] + skip // self.chunk, number], axis=1)
        table = table if in_order else table[jnp.argsort(first - write_end, stable=True)]
        return table, jnp.where(exists, seq, seq + 1)

    def _equal_parts(self):
        """`parts` of sequences of one length, made on the host: constants, for which a GPU runs no kernels."""
        size = self.part_rows or self.length
        number = np.arange(self.num_parts)
        seq, part = np.divmod(number, self.num_parts // self.num_seqs)
        first = seq * self.length + part * size
        end = np.minimum(first + size, (seq + 1) * self.length)
        first_chunk = seq * pl.cdiv(self.length, self.chunk) + part * size // self.chunk
        table = np.stack([first, end, end, first_chunk, number], axis=1)
        return jnp.asarray(table, jnp.int32), jnp.asarray(seq, jnp.int32)

    @_host.own_options()
    def sums_of_parts(self, values, table):
        """(num_parts, H): sums over the chunks of each part, by the part's number, of `values` (H, num_chunks)."""
        first_row, _, write_end, first, number = table.T
        chunk, last = jnp.arange(self.num_chunks), first + div(write_end - first_row + (self.chunk - 1), self.chunk)
        mine = (chunk[None] >= first[:, None]) & (chunk[None] < last[:, None])
        sums = jnp.where(mine[None], values[:, None], 0.0).sum(-1).T
        return sums.at[number].set(sums, mode="drop") if self.is_packed else sums

    @_host.own_options()
    def rows_of_chunks(self, cu_seqlens):
        """(num_chunks, chunk): the row of each place of a chunk, `num_rows` where it has none."""
        if not self.is_packed:
            rows = np.pad(
                np.arange(self.num_rows).reshape(self.num_seqs, -1), ((0, 0), (0, -self.length % self.chunk)),
                constant_values=self.num_rows,
            )  # fmt: skip
            return jnp.asarray(rows.reshape(self.num_chunks, self.chunk), jnp.int32)
        starts, ends, first_chunk = self._places(self.starts(cu_seqlens))
        chunk = jnp.arange(self.num_chunks, dtype=jnp.int32)
        seq = jnp.searchsorted(first_chunk, chunk, side="right", method="compare_all").astype(jnp.int32) - 1
        rows = (starts[seq] + (chunk - first_chunk[seq]) * self.chunk)[:, None] + jnp.arange(self.chunk)
        is_row = (rows < ends[seq][:, None]) & (seq < self.num_seqs)[:, None]
        return jnp.where(is_row, rows, self.num_rows)

    def places_of_chunks(self, cu_seqlens):
        """(first row, number of rows) of all chunks."""
        rows = self.rows_of_chunks(cu_seqlens)
        return rows[:, 0], (rows < self.num_rows).sum(1, dtype=jnp.int32)

    def in_chunks(self, values, cu_seqlens):
        """`values` (num_rows, H) as (H, num_chunks, chunk), zeros where a chunk has no row."""
        if self.is_packed:
            padded = jnp.pad(values, ((0, 1), (0, 0)))
            return jnp.moveaxis(padded[self.rows_of_chunks(cu_seqlens)], 2, 0)
        values = values.reshape(self.num_seqs, self.length, -1)
        values = jnp.pad(values, ((0, 0), (0, -self.length % self.chunk), (0, 0)))
        return values.reshape(self.num_chunks, self.chunk, -1).transpose(2, 0, 1)

    def in_rows(self, values, cu_seqlens):
        """`values` (H, num_chunks, chunk) as (num_rows, H), zeros for rows of no sequence."""
        values = values.reshape(len(values), -1).T
        if self.is_packed:
            rows = self.rows_of_chunks(cu_seqlens).ravel()
            return jnp.zeros((self.num_rows, values.shape[1])).at[rows].set(values, mode="drop")
        values = values.reshape(self.num_seqs, -1, values.shape[1])[:, : self.length]
        return values.reshape(self.num_rows, -1)


def rows_per_part(num_seqs: int, length: int, heads: int, num_sms: int, parts: int | None = None) -> int | None:
    """Rows of a part, or None where sequences are not cut. `parts` of a sequence are by default as many as make a block
    for each SM.

    With parts the operands of the state are read twice, so one and a half parts per sequence gain nothing. A part has
    at least 512 rows: memory idles while the first chunk is awaited.
    """
    unit = max(CHUNKS)
    parts = parts or min(num_sms // (num_seqs * heads), length // 512)
    return pl.cdiv(pl.cdiv(length, parts), unit) * unit if parts >= 2 else None


@dataclasses.dataclass(frozen=True)
class Part:
    """The part that a block goes through.

    Its rows are those from `first_row` to `write_end`. Rows from `read_end` on belong to no sequence: they count as
    zeros, and so do their results, which are written.
    """

    first_row: Index
    read_end: Index
    write_end: Index
    first_chunk: Index  # Counted through all sequences.
    number: Index  # The part's, and so its states'.
    chunk: int
    is_ragged: bool
    interpreted: bool

    @classmethod
    def of_block(cls, table, sequences: Sequences, interpreted: bool):
        row = lax.axis_index("part")
        fields = [table[row, field] for field in range(len(PART_FIELDS))]
        return cls(*fields, sequences.chunk, sequences.is_ragged, interpreted)

    @property
    def num_chunks(self):
        return div(self.write_end - self.first_row + (self.chunk - 1), self.chunk)

    def row(self, chunk):
        return self.first_row + chunk * self.chunk

    def ring(self, filled: Barrier, freed: Barrier, num_stages: int) -> _device.Ring:
        """A ring of so many stages."""
        if num_stages > 1:
            return _device.Ring(filled, freed, num_stages)
        return _OneStage(filled, freed, 1, zero=self.first_chunk & 2**30)


@dataclasses.dataclass(frozen=True)
class _OneStage(_device.Ring):
    """A ring of one stage that hides the stage's number from the compiler. With a known number the compiler would
    compute all addresses in the stage before the loop over chunks, and spill them: 1.1 KB per thread in the backward
    kernel of SSD with N = 256."""

    zero: Index

    def slot(self, count):
        return jnp.minimum(count, self.zero)

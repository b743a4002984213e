# SPDX-License-Identifier: Apache-2.0
"""Shared by the recurrent kernels: packed sequences in chunks and parts, tiles of rows in shared memory, states.

A *sequence* is a run of rows of the operands. It is cut into *chunks* of 64 or 128 rows, the last of which may be
shorter, and into *parts*: runs of chunks that one block of threads goes through. Where sequences and heads fill the
GPU, each sequence is one part. Otherwise it has several: their states are first computed from zero, and then combined.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .. import _device, _host
from .._device import div

PIECE = 64  # Values of a row that are swizzled together, 128 bytes; and rows of a WGMMA.
CHUNKS = (64, 128)  # Rows of a chunk.
ROWS, COLUMNS = (plgpu.Layout.WGMMA.reduce(dim) for dim in (1, 0))  # One number for each row, or column, of a product.
LEAST_DECAY = 2.0**-64  # A token that lets less than this of the state stay lets this stay: nothing.
PART_FIELDS = ("first_row", "end_row", "stop_row", "first_chunk", "state")


# Sequences, chunks and parts ------------------------------------------------------------------------------------------


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

    def starts(self, cu_seqlens):
        """(num_seqs + 1,): the first row of each packed sequence and the end of the last, cut at the rows that there
        are. They begin at 0 and never go back."""
        starts = jnp.clip(cu_seqlens.astype(jnp.int32), 0, self.num_rows).at[0].set(0)
        return _running(jnp.max, starts)

    def _places(self, starts):
        """(first row, end, first chunk) of each packed sequence, that of the rows after the last one included."""
        ends = jnp.append(starts, self.num_rows)
        chunks = div(jnp.diff(ends) + (self.chunk - 1), self.chunk)
        return ends[:-1], ends[1:], _running(jnp.sum, chunks) - chunks

    @_host.own_options()
    def parts(self, cu_seqlens):
        """Table of the parts, one a row, with `PART_FIELDS`, the longest packed ones first; and the sequence of each
        part in the order of `state`.

        An empty sequence has one part without chunks. The parts of a sequence come one after the other in `state`,
        which numbers them; rows of the table for which there is no part have the state `num_parts`.
        """
        if not self.is_packed:
            return self._equal_parts()
        starts, ends, first_chunk = self._places(self.starts(cu_seqlens))
        size = self.part_rows or max(self.num_rows, 1)
        counts = jnp.maximum(div(ends - starts + (size - 1), size), 1)
        last = _running(jnp.sum, counts)
        number = jnp.arange(self.num_parts, dtype=jnp.int32)
        seq = jnp.searchsorted(last, number, side="right", method="compare_all").astype(jnp.int32)
        exists = seq < len(starts)
        seq = jnp.minimum(seq, len(starts) - 1)
        skip = (number - (last - counts)[seq]) * size
        first = starts[seq] + skip
        stop = jnp.where(exists, jnp.minimum(first + size, ends[seq]), first)
        end = jnp.where(seq < self.num_seqs, stop, first)
        state = jnp.where(exists, number, self.num_parts)
        table = jnp.stack([first, end, stop, first_chunk[seq] + skip // self.chunk, state], axis=1)
        return table[jnp.argsort(first - stop, stable=True)], jnp.where(exists, seq, seq + 1)

    def _equal_parts(self):
        """`parts` of sequences of one length, made on the host: constants, for which a GPU runs no kernels."""
        size = self.part_rows or self.length
        state = np.arange(self.num_parts)
        seq, part = np.divmod(state, self.num_parts // self.num_seqs)
        first = seq * self.length + part * size
        end = np.minimum(first + size, (seq + 1) * self.length)
        first_chunk = seq * pl.cdiv(self.length, self.chunk) + part * size // self.chunk
        table = np.stack([first, end, end, first_chunk, state], axis=1)
        return jnp.asarray(table, jnp.int32), jnp.asarray(seq, jnp.int32)

    @_host.own_options()
    def sums_of_parts(self, values, table):
        """(num_parts, H): sums over the chunks of each part, in the order of `state`, of `values` (H, num_chunks)."""
        first_row, _, stop_row, first, state = table.T
        chunk, last = jnp.arange(self.num_chunks), first + div(stop_row - first_row + (self.chunk - 1), self.chunk)
        mine = (chunk[None] >= first[:, None]) & (chunk[None] < last[:, None])
        sums = jnp.where(mine[None], values[:, None], 0.0).sum(-1).T
        return sums.at[state].set(sums, mode="drop") if self.is_packed else sums

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

    def in_chunks(self, values, cu_seqlens):
        """`values` (num_rows, H) as (H, num_chunks, chunk), zeros where a chunk has no row."""
        if self.is_packed:
            padded = jnp.pad(values, ((0, 1), (0, 0)))
            return jnp.moveaxis(padded[self.rows_of_chunks(cu_seqlens)], 2, 0)
        values = values.reshape(self.num_seqs, self.length, -1)
        values = jnp.pad(values, ((0, 0), (0, -self.length % self.chunk), (0, 0)))
        return values.reshape(self.num_chunks, self.chunk, -1).transpose(2, 0, 1)


def _running(reduce, x):
    """`reduce` of the first number, of the first two, and so on: all at once, which takes a fraction of the time of
    XLA's scan. The numbers are at least 0."""
    i = jnp.arange(x.shape[-1])
    return reduce(jnp.where(i <= i[:, None], x[..., None, :], 0), axis=-1).astype(x.dtype)


def cumulative(values):
    """Sums of `values` (H, chunks, rows) up to each row, in float32: as one product with a triangle of ones, where
    XLA's scan would take a kernel for each doubling."""
    triangle = jnp.asarray(np.tri(values.shape[-1], dtype=np.float32))
    return jnp.einsum("...s,ts->...t", values, triangle, precision="highest")


def cumulative_decays(logs):
    """`cumulative` of the logarithms of decays, none below `LEAST_DECAY`, each sum rounded about once.

    Kernels take differences of these sums. So one strong decay must not cost the bits of the weak ones after it:
    hence the least decay, and whole numbers are summed apart, where nothing is rounded.
    """
    whole = jnp.round(logs)
    return cumulative(jnp.stack([whole, logs - whole])).sum(0)


def part_rows(num_seqs: int, length: int, heads: int, num_sms: int, parts: int | None = None) -> int | None:
    """How long a part is, None where sequences are not to be cut: into `parts`, by default as many as make a block for
    each SM.

    With parts the operands of the state are read twice, so one and a half parts a sequence gain nothing. A part has at
    least 512 rows: memory idles while the first chunk is awaited.
    """
    unit = max(CHUNKS)
    parts = parts or min(num_sms // (num_seqs * heads), length // 512)
    return pl.cdiv(pl.cdiv(length, parts), unit) * unit if parts >= 2 else None


@dataclasses.dataclass(frozen=True)
class Part:
    """The rows of one block, of head `head`. Rows from `end_row` to `stop_row` are results without operands."""

    first_row: object
    end_row: object
    stop_row: object
    first_chunk: object
    state: object
    chunk: int

    @classmethod
    def of_block(cls, table, chunk: int):
        row = lax.axis_index("part")
        return cls(*(table[row, field] for field in range(len(PART_FIELDS))), chunk)

    @property
    def num_chunks(self):
        return div(self.stop_row - self.first_row + (self.chunk - 1), self.chunk)

    def row(self, chunk):
        return self.first_row + chunk * self.chunk

    def ring(self, filled, freed, num_slots: int) -> _device.Ring:
        """A ring that this block goes round."""
        if num_slots > 1:
            return _device.Ring(filled, freed, num_slots)
        return _OneSlot(filled, freed, 1, zero=self.first_chunk & 2**30)


@dataclasses.dataclass(frozen=True)
class _OneSlot(_device.Ring):
    """A ring of one slot, whose number the compiler does not know. It would compute all addresses in the slot before
    the loop over chunks, and spill them: 1.1 KB a thread in the backward kernel of SSD with N = 256."""

    zero: object

    def slot(self, count):
        return jnp.minimum(count, self.zero)


# Shared memory --------------------------------------------------------------------------------------------------------


def row_tiles(shape: tuple[int, ...], dtype, interpreted: bool):
    """Shared memory for rows in pieces, (..., rows, 64), in three views: tiled, for tensor cores; as rows of 128 bytes,
    the only view in which TMA finds any row and cuts off at the edges of an array; and 8 rows together, as they lie.
    The interpreter gets the first."""
    swizzle = plgpu.SwizzleTransform(128)
    tiled = plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform((8, PIECE)), swizzle))
    if interpreted:
        return tiled
    eights = (*shape[:-2], shape[-2] // 8, 8 * PIECE)
    return plgpu.RefUnion(tiled, plgpu.SMEM(shape, dtype, transforms=(swizzle,)), plgpu.SMEM(eights, dtype))


@dataclasses.dataclass(frozen=True)
class Tiles:
    """The views of a buffer of `row_tiles`."""

    tiled: object
    rows: object
    eights: object

    @classmethod
    def views(cls, smem, interpreted: bool):
        return cls(smem, smem, smem) if interpreted else cls(*smem)


@dataclasses.dataclass(frozen=True)
class Operand:
    """Rows of an array (rows, heads, 64 * pieces) that a block reads: of one head, into slots of a ring."""

    gmem: object
    smem: Tiles
    head: object
    pieces: int

    def copy(self, row, num_rows: int, slot, barrier):
        for p in range(self.pieces):
            source = self.gmem.at[pl.ds(row, num_rows), self.head, pl.ds(p * PIECE, PIECE)]
            plgpu.copy_gmem_to_smem(source, self.smem.rows.at[slot, p], barrier)

    def clear(self, slot, end, interpreted: bool):
        """Zeros the rows from `end` on, which are of another sequence and may be NaN."""
        for p in range(self.pieces):
            _clear((self.smem.tiled if interpreted else self.smem.eights).at[slot, p], end, interpreted)


def _clear(rows, end, interpreted: bool):
    if interpreted:
        row = lax.broadcasted_iota(jnp.int32, rows.shape, 0)
        rows[...] = jnp.where(row < end, rows[...], 0)
        return

    @pl.loop(div(end, 8), rows.shape[0])
    def _(eight):  # Swizzling moves nothing out of its row of 128 bytes.
        row = 8 * eight + div(plgpu.broadcasted_iota(jnp.int32, rows.shape[1:], 0), PIECE)
        rows[eight] = jnp.where(row < end, rows[eight], jnp.zeros((), rows.dtype))


@dataclasses.dataclass(frozen=True)
class Loader:
    """The memory warpgroup's part: fills the slots of a ring with the chunks of a part."""

    ring: _device.Ring
    landed: object  # A barrier that the copies of a chunk arrive at which has rows of another sequence.
    operands: tuple[Operand, ...]
    copy_vectors: object  # `copy_vectors(chunk, slot, barrier)`: `num_vectors` copies.
    num_vectors: int
    is_ragged: bool
    interpreted: bool

    @property
    def copies(self) -> int:
        """Arrivals at `ring.filled` for a slot."""
        return self.num_vectors + sum(operand.pieces for operand in self.operands)

    def run(self, part: Part, reverse: bool = False):
        """Loads all chunks of a part, the last one first if in `reverse`; returns when all slots were given back."""

        @pl.loop(0, part.num_chunks)
        def _(i):
            self._load(part, i, part.num_chunks - 1 - i if reverse else i)

        self.ring.drain(part.num_chunks)

    def _load(self, part: Part, count, chunk):
        slot = self.ring.fill(count)
        filled, end = self.ring.filled.at[slot], part.end_row - part.row(chunk)

        def copy(barrier):
            for operand in self.operands:
                operand.copy(part.row(chunk), part.chunk, slot, barrier)
            self.copy_vectors(part.first_chunk + chunk, slot, barrier)

        def copy_and_clear():
            copy(self.landed.at[0])
            plgpu.barrier_wait(self.landed.at[0])
            for operand in self.operands:
                operand.clear(slot, jnp.maximum(end, 0), self.interpreted)
            plgpu.commit_smem()
            for _ in range(self.copies):
                plgpu.barrier_arrive(filled)

        if not self.is_ragged:
            copy(filled)
            return
        pl.when(end >= part.chunk)(lambda: copy(filled))
        pl.when(end < part.chunk)(copy_and_clear)


def store_rows(smem: Tiles, slot: int, gmem, head, piece: int, row, num_rows, *, is_ragged: bool, interpreted: bool):
    """Sends the first `num_rows` of the 64 rows in a slot to those of `gmem` from `row` on, of a head's `piece`."""

    def copy(skip, size: int):
        target = gmem.at[pl.ds(row + skip, size), head, pl.ds(piece * PIECE, PIECE)]
        plgpu.copy_smem_to_gmem(smem.rows.at[slot, pl.ds(skip, size)], target)

    if not is_ragged:
        copy(0, PIECE)
        return
    pl.when(num_rows >= PIECE)(lambda: copy(0, PIECE))

    @pl.when(num_rows < PIECE)
    def _():
        eights = 0 if interpreted else div(jnp.maximum(num_rows, 0), 8)
        pl.loop(0, eights)(lambda i: copy(8 * i, 8))
        pl.loop(8 * eights, num_rows)(lambda i: copy(i, 1))


# States ---------------------------------------------------------------------------------------------------------------


def load_state(gmem, index, pieces: int):
    """A state (64, 64 * pieces) of float32 in registers, as a list of its pieces."""
    at = lambda p: gmem.at[(*index, slice(None), pl.ds(p * PIECE, PIECE))]
    return [plgpu.load(at(p), layout=plgpu.Layout.WGMMA, optimized=False) for p in range(pieces)]


def first_state(gmem, index, pieces: int):
    """The state that a part starts from: zeros if `gmem` is None, or if the part is padding, for which it has none."""
    if gmem is None:
        zero = plgpu.layout_cast(jnp.zeros((PIECE, PIECE), jnp.float32), plgpu.Layout.WGMMA)
        return [zero] * pieces
    first, last = index[0], gmem.shape[0] - 1
    state = load_state(gmem, (jnp.minimum(first, last), *index[1:]), pieces)
    return [jnp.where(lax.broadcast(first <= last, piece.shape), piece, 0.0) for piece in state]


def store_state(gmem, index, state):
    """Stores the state after a part, unless the part is padding, for which `gmem` has no place."""

    @pl.when(index[0] < gmem.shape[0])
    def _():
        for p, piece in enumerate(state):
            _device.store(gmem.at[(*index, slice(None), pl.ds(p * PIECE, PIECE))], piece)


def combine(decay, states, seq, initial, reverse: bool = False):
    """(state at the start of each part, state at the end of each sequence's last part).

    `decay` (parts, heads) is that of a whole part; `states` (parts, heads, P, N) are those at the ends of the parts
    had they started from zero; `seq` the sequence of each part; `initial` (num_seqs, ...). In `reverse` each sequence
    starts at its last part.
    """
    num_seqs = len(initial)
    neighbour = (
        jnp.pad(seq[1:], (0, 1), constant_values=-1) if reverse else jnp.pad(seq[:-1], (1, 0), constant_values=-1)
    )
    given = jnp.pad(initial, ((0, 1), *((0, 0),) * 3))

    def step(carry, part):
        before, ends = carry
        decay, local, seq, is_first = part
        start = jnp.where(is_first, given[seq], before)
        end = decay[:, None, None] * start + local
        return (end, ends.at[seq].set(end)), start

    parts = decay, states, jnp.minimum(seq, num_seqs), seq != neighbour
    zero = jnp.zeros(states.shape[1:], jnp.float32)
    ends = jnp.zeros((num_seqs + 1, *states.shape[1:]), jnp.float32)
    (_, ends), starts = lax.scan(step, (zero, ends), parts, reverse=reverse, unroll=min(16, len(seq)))
    return starts, ends[:num_seqs]


def as_states(states, heads: int):
    """States (num_seqs, H, P, N) with heads of 64 values: (num_seqs, H * P / 64, 64, N). Nothing is moved."""
    return states.reshape(len(states), heads, PIECE, states.shape[-1])

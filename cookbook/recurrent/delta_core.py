"""Shared parts of the kernels of the gated delta rule: chunks of packed sequences, their decays, products, tiles."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .delta_reference import CHUNK

PIECE = 64  # Values of a row that are swizzled together, 128 bytes; also the rows of a WGMMA.
ROWS, COLUMNS = (plgpu.Layout.WGMMA.reduce(dim) for dim in (1, 0))  # One number for each row, or column, of a product.
TILED = dict(transforms=(plgpu.TilingTransform((8, PIECE)), plgpu.SwizzleTransform(128)))


@dataclasses.dataclass(frozen=True)
class Chunks:
    """Where the chunks of all sequences lie, and the parts that sequences are split into: int32 arrays.

    A chunk never holds rows of two sequences: the last one of a sequence is cut. Every sequence has at least one part.
    """

    first_row: jax.Array  # Of each chunk.
    num_rows: jax.Array  # Of each chunk: CHUNK, fewer at the end of a sequence, none after the last chunk.
    parts: jax.Array  # (parts, 3): first row, number of rows, first chunk.
    seq: jax.Array  # The sequence of each part; the number of sequences for a part that is not used.
    last_part: jax.Array  # Of each sequence.


jax.tree_util.register_dataclass(Chunks, [f.name for f in dataclasses.fields(Chunks)], [])


def chunks_of(starts, num_rows: int, part_chunks: int) -> Chunks:
    """The chunks of the sequences whose rows begin at `starts`, in parts of `part_chunks` chunks.

    `starts` has one number more than there are sequences; NumPy's give NumPy's.
    """
    xp = np if isinstance(starts, np.ndarray) else jnp
    starts = xp.clip(starts, 0, num_rows)
    starts = np.maximum.accumulate(starts) if xp is np else lax.cummax(starts)
    lengths, num_seqs = starts[1:] - starts[:-1], len(starts) - 1

    def split(sizes, unit, most: int):
        """(first pieces of each sequence, their number; sequence, number in it, of each piece)"""
        count = -(-sizes // unit)
        first = xp.cumsum(count) - count
        total = int((first + count)[-1]) if xp is np else most
        seq = xp.searchsorted(first + count, xp.arange(total), side="right")
        return first, count, seq, xp.arange(total) - first[xp.minimum(seq, num_seqs - 1)]

    first_chunk, num_chunks, seq, number = split(lengths, CHUNK, num_rows // CHUNK + num_seqs)
    used = xp.minimum(seq, num_seqs - 1)
    first_row = starts[used] + number * CHUNK
    rows_of_chunk = xp.where(seq < num_seqs, xp.clip(starts[used + 1] - first_row, 0, CHUNK), 0)
    first_row = xp.where(seq < num_seqs, first_row, 0)

    most = num_rows // (CHUNK * part_chunks) + num_seqs
    first_part, num_parts, part_seq, part = split(xp.maximum(num_chunks, 1), part_chunks, most)
    used = xp.minimum(part_seq, num_seqs - 1)
    row = starts[used] + part * part_chunks * CHUNK
    rows = xp.clip(starts[used + 1] - row, 0, part_chunks * CHUNK) * (part_seq < num_seqs)
    parts = xp.stack([row, rows, first_chunk[used] + part * part_chunks], axis=1)
    tables = first_row, rows_of_chunk, parts, part_seq, first_part + num_parts - 1
    return Chunks(*(jnp.asarray(table, jnp.int32) for table in tables))


def in_chunks(chunks: Chunks, x):
    """(chunks, CHUNK, ...) of the rows of `x` (rows, ...), in float32; zeros after the end of a sequence."""
    place = jnp.arange(CHUNK)
    values = x.at[chunks.first_row[:, None] + place].get(mode="clip").astype(jnp.float32)
    used = place < chunks.num_rows[:, None]
    return jnp.where(used.reshape(*used.shape, *[1] * (x.ndim - 1)), values, 0.0)


def cumulated(x):
    """(heads, chunks, CHUNK): the sums of (chunks, CHUNK, heads) from the start of the chunk up to each token.

    A product with a triangle of ones is one kernel of XLA's; its cumsum is several.
    """
    ones = np.triu(np.ones((CHUNK, CHUNK), np.float32))
    return jnp.einsum("cth,ts->hcs", x, ones, precision="highest")


def row_tiles(shape: tuple[int, ...], dtype, interpreted: bool):
    """Shared memory for pieces of rows, (..., rows, 64), in three views: tiled, for tensor cores; rows of 128 bytes, in
    which TMA finds a piece at any row; and eight rows together, to zero some of them. The interpreter gets the first."""
    tiled = plgpu.SMEM(shape, dtype, **TILED)
    if interpreted:
        return tiled
    rows = plgpu.SMEM(shape, dtype, transforms=(plgpu.SwizzleTransform(128),))
    return plgpu.RefUnion(tiled, rows, plgpu.SMEM((*shape[:-2], shape[-2] // 8, 8 * PIECE), dtype))


def views(smem, interpreted: bool):
    """(tensor cores' view, TMA's view, rows by eight) of a buffer of `row_tiles`."""
    return (smem, smem, smem) if interpreted else tuple(smem)


def clear(rows_smem, num_rows, interpreted: bool):
    """Zeroes the rows of a piece from `num_rows` on: they belong to another sequence and may be NaN."""
    if interpreted:
        row = lax.broadcasted_iota(jnp.int32, rows_smem.shape, 0)
        rows_smem[...] = jnp.where(row < num_rows, rows_smem[...], jnp.zeros((), rows_smem.dtype))
        return

    @pl.loop(lax.div(num_rows, jnp.int32(8)), rows_smem.shape[0])
    def _(eight):
        # Swizzling moves nothing out of its row of 128 bytes.
        place = plgpu.broadcasted_iota(jnp.int32, (8 * PIECE,), 0)
        row = 8 * eight + lax.div(place, jnp.int32(PIECE))
        rows_smem[eight] = jnp.where(row < num_rows, rows_smem[eight], jnp.zeros((), rows_smem.dtype))


def load(ref, layout):
    return plgpu.load(ref, layout=layout, optimized=False)


def spread(values, dim: int, shape=(CHUNK, CHUNK)):
    """`values`, one for each row (`dim` 0) or column (1), as a matrix."""
    return plgpu.layout_cast(lax.broadcast_in_dim(values, shape, [dim]), plgpu.Layout.WGMMA)


def product(pairs, interpreted: bool, acc=None):
    """`acc` + the sum of the products of `pairs` (a, b): a is 64 rows in registers or in shared memory, b in shared memory.

    JAX's interpreter multiplies nothing in registers on its tensor cores.
    """
    shape = pairs[0][0].shape[0], pairs[0][1].shape[1]
    if interpreted:
        value = lambda x: x if isinstance(x, jax.Array) else x[...]
        for a, b in pairs:
            term = jnp.dot(value(a), value(b), preferred_element_type=jnp.float32)
            acc = term if acc is None else acc + term
        plgpu.commit_smem()  # TMA may now overwrite what was read here.
        return plgpu.layout_cast(acc, plgpu.Layout.WGMMA)

    def multiply(ref):
        if acc is not None:
            ref[...] = acc
        for a, b in pairs:
            plgpu.wgmma(ref, a, b)
        return plgpu.layout_cast(ref[...], plgpu.Layout.WGMMA)

    return pl.run_scoped(multiply, plgpu.ACC(shape, jnp.float32))

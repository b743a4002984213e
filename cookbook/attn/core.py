"""Shared parts of the attention kernels: which keys a query sees, block by block, and how rows lie in memory."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

HEAD_DIMS = (64, 128, 256)  # Sizes of heads that kernels with packed or paged keys take.
PIECE = 64  # Values of a row that are swizzled together, 128 bytes.
LOG2E = math.log2(math.e)
ROWS, COLUMNS = (plgpu.Layout.WGMMA.reduce(dim) for dim in (1, 0))  # One number for each row, or column, of a product.


def window(is_causal: bool, local_window_size) -> tuple[int | None, int | None]:
    """How many keys before and after its own position a query sees; None for all."""
    sizes = local_window_size if isinstance(local_window_size, tuple) else (local_window_size,) * 2
    left, right = (None if size is None else int(size) for size in sizes)
    return left, (0 if is_causal else right)


def div(number, by: int):
    """Quotient, rounded down, of NumPy's or traced int32 numbers that are at least 0."""
    return lax.div(number, jnp.int32(by)) if isinstance(number, jax.Array) else number // by


def rem(number, by: int):
    """Remainder of the same numbers as `div` takes."""
    return lax.rem(number, jnp.int32(by))


def slot_of(plan, step):
    """The slot of a ring that a step uses, where `step` counts from the first one of the block of threads."""
    return rem(step, plan.config.num_stages)


def page_of(block_tables, seq, column, num_pages: int):
    """The page in a column of the block table, or in its last column if there are fewer. An id that is no page becomes
    `num_pages`, where TMA reads zeros; a larger index could wrap around into the array as others are added to it."""
    page = block_tables[seq, jnp.minimum(column, block_tables.shape[1] - 1)]
    return jnp.where((page >= 0) & (page < num_pages), page, num_pages)


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Which blocks of keys rows of queries see: pure arithmetic, for NumPy's numbers and for traced ones."""

    num_kv: int  # Where the keys end.
    block_kv: int
    left: int | None  # Keys that a query sees before its own position; None for all.
    right: int | None
    first_kv: int = 0  # Keys before it belong to another sequence.
    first_q: int = 0  # The position of the first query, among the keys.
    group: int = 1  # Neighbouring rows that are heads of the same query.

    def position(self, row):
        """Position among the keys of the query in a row."""
        row = row if self.group == 1 else div(row, self.group)
        return row if isinstance(self.first_q, int) and self.first_q == 0 else self.first_q + row

    def seen(self, first_row, num_rows: int):
        """(first, end) of the blocks that hold a key which one of the rows sees."""
        lib = np if isinstance(first_row, np.ndarray) else jnp
        first, end = self.first_kv + 0 * first_row, self.num_kv + 0 * first_row
        if self.left is not None:
            first = lib.maximum(self.position(first_row) - self.left, self.first_kv)
        if self.right is not None:
            end = lib.clip(self.position(first_row + num_rows - 1) + 1 + self.right, 0, self.num_kv)
        first = div(first, self.block_kv)
        return first, lib.maximum(first, div(end + self.block_kv - 1, self.block_kv))

    def whole(self, first_row, num_rows: int, first, end):
        """(first, end) of those between `first` and `end` whose keys all the rows see."""
        start, stop = self.first_kv + 0 * first_row, self.num_kv + 0 * first_row
        if self.left is not None:
            start = jnp.maximum(self.position(first_row + num_rows - 1) - self.left, self.first_kv)
        if self.right is not None:
            stop = jnp.clip(self.position(first_row) + self.right + 1, 0, self.num_kv)
        start = jnp.clip(div(start + self.block_kv - 1, self.block_kv), first, end)
        return start, jnp.clip(div(stop, self.block_kv), start, end)

    def mask(self, rows, kv_ids):
        """Whether the query of each row sees each key."""
        seen = kv_ids < self.num_kv
        if not (isinstance(self.first_kv, int) and self.first_kv == 0):
            seen = seen & (kv_ids >= self.first_kv)
        q_ids = self.position(rows)
        seen = seen if self.left is None else seen & (kv_ids >= q_ids - self.left)
        return seen if self.right is None else seen & (kv_ids <= q_ids + self.right)


def check_numbers(op: str, scale, logits_soft_cap, local_window_size) -> None:
    """Check the numbers that attention is given.

    Raises:
      ValueError: one is out of range.
    """
    for name, number in (("scale", scale), ("logits_soft_cap", logits_soft_cap)):
        if number is not None and not number > 0:
            raise ValueError(f"{op}: {name} = {number} must be above 0")
    sizes = local_window_size if isinstance(local_window_size, tuple) else (local_window_size,) * 2
    is_size = lambda size: size is None or (isinstance(size, int | np.integer) and size >= 0)
    if len(sizes) != 2 or not all(map(is_size, sizes)):
        raise ValueError(
            f"{op}: {local_window_size=} must be a number of keys, at least 0, or a tuple (before, after), None for all"
        )


def row_tiles(shape: tuple[int, ...], dtype, interpreted: bool):
    """Shared memory for rows in pieces, (..., pieces, rows, 64), in two views: tiled, for tensor cores; and as rows of
    128 bytes, the only view in which TMA can cut off at the edges of an array. The interpreter gets the first."""
    swizzle = plgpu.SwizzleTransform(128)
    tiled = plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform((8, PIECE)), swizzle))
    return tiled if interpreted else plgpu.RefUnion(tiled, plgpu.SMEM(shape, dtype, transforms=(swizzle,)))


def views(smem, interpreted: bool):
    """(tensor cores' view, TMA's view) of a buffer of `row_tiles`."""
    return (smem, smem) if interpreted else tuple(smem)


def segment_masks(row_ids, column_ids, rows: int, block: int) -> dict:
    """Segments for a kernel with tiles of `rows` that go through blocks of `block` columns: the ids of "rows" and
    "columns", padded to whole tiles and blocks; and for each tile the "first" block, and the "end" of the blocks, whose
    range of ids meets that of its rows."""
    row_ids, column_ids = (
        jnp.pad(ids.astype(jnp.int32), ((0, 0), (0, -ids.shape[1] % size)), mode="edge")
        for ids, size in ((row_ids, rows), (column_ids, block))
    )
    of_tile = row_ids.reshape(len(row_ids), -1, 1, rows)
    of_block = column_ids.reshape(len(column_ids), 1, -1, block)
    meet = (of_tile.min(-1) <= of_block.max(-1)) & (of_block.min(-1) <= of_tile.max(-1))
    end = jnp.where(meet, jnp.arange(1, meet.shape[2] + 1, dtype=jnp.int32), 0).max(-1)
    return dict(rows=row_ids, columns=column_ids, first=jnp.argmax(meet, -1).astype(jnp.int32), end=end)

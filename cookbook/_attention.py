"""What kernels of attention share: which keys a query sees, block by block, and how rows of a head lie in memory."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

PIECE = 64  # Values of a row that are swizzled together, 128 bytes.
LOG2E = math.log2(math.e)
ROWS, COLUMNS = (plgpu.Layout.WGMMA.reduce(dim) for dim in (1, 0))  # One number for each row, or column, of a product.


def window(is_causal: bool, local_window_size) -> tuple[int | None, int | None]:
    """How many keys before and after its own position a query sees; None for all."""
    if local_window_size is None:
        local_window_size = (None, None)
    left, right = (local_window_size,) * 2 if isinstance(local_window_size, int) else local_window_size
    return left, (0 if is_causal else right)


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Which blocks of keys a range of queries sees: pure arithmetic, for NumPy's numbers and for traced ones."""

    num_kv: int  # Keys in all.
    block_kv: int
    left: int | None  # Keys that a query sees before its own position; None for all.
    right: int | None

    def seen(self, first_q, num_q: int):
        """(first, end) of the blocks that hold a key which one of the queries sees."""
        lib = np if isinstance(first_q, np.ndarray) else jnp
        first = 0 * first_q if self.left is None else lib.maximum(first_q - self.left, 0)
        end = self.num_kv + 0 * first_q
        if self.right is not None:
            end = lib.clip(first_q + num_q + self.right, 0, self.num_kv)
        first = self._block(first)
        return first, lib.maximum(first, self._block(end + self.block_kv - 1))

    def whole(self, first_q, num_q: int, first, end):
        """(first, end) of those between `first` and `end` whose keys all the queries see."""
        start, stop = first, self.num_kv + 0 * first_q
        if self.left is not None:
            start = self._block(jnp.maximum(first_q + num_q - 1 - self.left, 0) + self.block_kv - 1)
        if self.right is not None:
            stop = jnp.clip(first_q + self.right + 1, 0, self.num_kv)
        start = jnp.clip(start, first, end)
        return start, jnp.clip(self._block(stop), start, end)

    def _block(self, position):
        """Of a position, which is at least 0."""
        return (
            lax.div(position, jnp.int32(self.block_kv))
            if isinstance(position, jax.Array)
            else position // self.block_kv
        )

    def mask(self, q_ids, kv_ids):
        """Whether each query sees each key."""
        seen = kv_ids < self.num_kv
        seen = seen if self.left is None else seen & (kv_ids >= q_ids - self.left)
        return seen if self.right is None else seen & (kv_ids <= q_ids + self.right)


def row_tiles(shape: tuple[int, ...], dtype, interpreted: bool):
    """Shared memory for rows in pieces, (..., pieces, rows, 64): as tensor cores read them, and as TMA writes them,
    which cuts off at the edges of an array only what it takes for rows of 128 bytes. The interpreter gets the first."""
    swizzle = plgpu.SwizzleTransform(128)
    tiled = plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform((8, PIECE)), swizzle))
    return tiled if interpreted else plgpu.RefUnion(tiled, plgpu.SMEM(shape, dtype, transforms=(swizzle,)))


def views(smem, interpreted: bool):
    """(as tensor cores, as TMA sees it) of what `row_tiles` described."""
    return (smem, smem) if interpreted else tuple(smem)


def segment_masks(row_ids, column_ids, rows: int, block: int) -> dict:
    """Segments for a kernel whose tiles have so many rows, and go through blocks of so many columns: both ids (B, ...),
    as many as there are in whole tiles and blocks, and for each tile the "first" block and the "end" of those with ids
    between the least and the largest of its rows."""
    row_ids, column_ids = (
        jnp.pad(ids.astype(jnp.int32), ((0, 0), (0, -ids.shape[1] % size)), mode="edge")
        for ids, size in ((row_ids, rows), (column_ids, block))
    )
    of_tile = row_ids.reshape(len(row_ids), -1, 1, rows)
    of_block = column_ids.reshape(len(column_ids), 1, -1, block)
    meet = (of_tile.min(-1) <= of_block.max(-1)) & (of_block.min(-1) <= of_tile.max(-1))
    end = jnp.where(meet, jnp.arange(1, meet.shape[2] + 1, dtype=jnp.int32), 0).max(-1)
    return dict(rows=row_ids, columns=column_ids, first=jnp.argmax(meet, -1).astype(jnp.int32), end=end)

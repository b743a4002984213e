# SPDX-License-Identifier: Apache-2.0
"""The parts that every product of this family but the rungs is cut into: operands, tiles, the plan of a kernel.

The kernel sees two operands, `a` of M rows and `b` of N rows, both along K; each may lie transposed, as (K, rows). A
plain (K, N) matrix is therefore a transposed `b`. With `swapped` the caller has exchanged the two operands, and with
them M and N; the tile is transposed on its way out (`kernel.store`), and nothing else has to know.

`kernel.py` has the kernel, `cost.py` chooses the configuration.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .. import _device, _host

COMPUTE, MEMORY = 2, 2  # Compute warpgroups, and the index of the memory warpgroup, which follows them.
STEP_BYTES = 128  # Bytes of each row along K in a step: the widest swizzle.
STORE_ROWS = 64  # Rows of a piece of o on its way out: as many as one WGMMA has.
MEMORY_REGISTERS, COMPUTE_REGISTERS = 40, 232  # Registers per thread; 128 threads each, 65,536 in all.
SPLIT_K_MAX = 8  # Blocks that every Hopper GPU can put into one cluster.
STAGES_MAX = 12  # More slots than this hide no more latency.
RESIDENT = 132, 66, 39, 30, 22, 17, 15, 15  # Clusters of 1 to 8 blocks that an H200 runs at a time, as CUDA says.


def identity(x):
    """No activation."""
    return x


@dataclasses.dataclass(frozen=True)
class Config:
    """How a product is cut up. With `swapped`, all other fields describe the transposed product."""

    tile_m: int = 128  # Rows of o per block.
    tile_n: int = 256  # Columns of o per block.
    num_stages: int | None = None  # Slots of the ring; None for as many as shared memory holds.
    split_dim: int = 0  # The dimension of the tile that the two compute warpgroups divide: 0 for M, 1 for N.
    cluster_m: int = 1  # Neighbouring tiles along M that form a cluster: their blocks load b's tile together.
    cluster_n: int = 1  # Neighbouring tiles along N that form a cluster: their blocks load a's tile together.
    grid_minor_dim: int = 0  # The dimension of the grid of tiles along which the snake runs: 0 for M, 1 for N.
    grid_tile_width: int = 8  # Tiles, or clusters, across the snake.
    split_k: int = 1  # Parts of K, each summed by a block of its own.
    # Whether XLA adds the parts up after the kernel: one launch more, which is worth it for large tiles. Their sums
    # take long from block to block.
    second_kernel: bool = False
    tail_split: int = 1  # Narrower tiles into which each tile of the last, partial wave is cut along N.
    store_slots: int = 2  # Pieces of o of each compute warpgroup that TMA may be storing at a time.
    swapped: bool = False  # Compute the transposed product: a plain b whose rows TMA has to cut needs no copy then.

    def __post_init__(self):
        self.check_tile()
        self.check_rest()

    def check_tile(self):
        if self.split_dim not in (0, 1):
            raise ValueError(f"{self.split_dim=}: must be 0 (M) or 1 (N)")
        rows, cols = self.compute_tile
        if rows % 64 or rows < 64 or cols % 8 or cols < 8:
            raise ValueError(
                f"{self.tile_m=}, {self.tile_n=} must leave each compute warpgroup a multiple of 64 rows (WGMMA) and "
                f"of 8 columns; {self.split_dim=} leaves {rows} and {cols}"
            )
        if self.tile_m > 256 or self.tile_n > 256 or rows * cols > 64 * 256:
            raise ValueError(
                f"{self.tile_m=} x {self.tile_n=}: at most 256 each (TMA), and 64 x 256 values for each of two "
                "warpgroups: a larger accumulator spills their registers"
            )

    def check_rest(self):
        if self.cluster_m not in (1, 2, 4) or self.cluster_n not in (1, 2, 4) or self.cluster_m * self.cluster_n > 4:
            raise ValueError(f"{self.cluster_m=}, {self.cluster_n=}: must be 1, 2 or 4, and at most 4 blocks together")
        if self.grid_minor_dim not in (0, 1):
            raise ValueError(f"{self.grid_minor_dim=}: must be 0 (M) or 1 (N)")
        if self.second_kernel and self.split_k == 1:
            raise ValueError(f"{self.second_kernel=} adds up parts of K, and {self.split_k=} makes none")
        if not 1 <= self.split_k <= SPLIT_K_MAX or (self.split_k > 1 and self.cluster_m * self.cluster_n > 1):
            raise ValueError(
                f"{self.split_k=} must be from 1 to {SPLIT_K_MAX}, the blocks of a cluster; above 1, {self.cluster_m=} "
                f"and {self.cluster_n=} must be 1, because a cluster is of parts of K then"
            )
        if self.tail_split < 1 or self.tile_n % (8 * self.tail_split) or (self.tail_split > 1 and self.split_k > 1):
            raise ValueError(
                f"{self.tail_split=} must cut {self.tile_n=} into multiples of 8 columns, and be 1 with {self.split_k=}"
            )
        if self.num_stages is not None and self.num_stages < 2:
            raise ValueError(f"{self.num_stages=} must be at least 2: a slot is given back one step late")
        if min(self.grid_tile_width, self.store_slots) < 1:
            raise ValueError(f"{self.grid_tile_width=} and {self.store_slots=} must be at least 1")

    @property
    def compute_tile(self) -> tuple[int, int]:
        """Rows and columns of o that one compute warpgroup accumulates."""
        return tuple(
            size // 2 if self.split_dim == dim else size for dim, size in enumerate((self.tile_m, self.tile_n))
        )


@dataclasses.dataclass(frozen=True)
class Operand:
    """One operand as the kernel reads it: a tile of rows by values of K a step, in pieces that TMA copies at once.

    Tensor cores read tiles of 8 rows by 128 bytes. Pallas has TMA write this layout in whole tiles only. Where it must
    cut at the edge of an array, it writes rows of 128 bytes, which is the same layout if the piece is no wider.
    """

    dtype: jnp.dtype
    rows: int  # Rows of the tile: tile_m of a, tile_n of b.
    tile_k: int  # Values of K per step.
    transposed: bool  # It lies as (K, rows).
    in_pieces: bool = True  # TMA copies pieces of 128 bytes across; False: the tile at once, which must not be cut.
    narrow: bool = False  # The tile has fewer rows than the slot that it is copied to.
    stacked: bool = False  # It is one of several matrices, along a leading axis; a tile's table says which.
    partner: int = 0  # Rows from its tile to another that a step reads too, which follows it in the slot; 0: none.

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and columns of the tile of a step, as it lies."""
        return (self.tile_k, self.rows) if self.transposed else (self.rows, self.tile_k)

    @property
    def swizzle(self) -> int:
        return min(STEP_BYTES, self.tile[1] * self.dtype.itemsize)

    @property
    def piece(self) -> tuple[int, int]:
        """Rows and columns of what TMA copies at once."""
        return (self.tile[0], self.swizzle // self.dtype.itemsize) if self.in_pieces else self.tile

    @property
    def pieces(self) -> list[tuple[int, int]]:
        """Row and column of each piece, counted in pieces."""
        return list(itertools.product(*(range(t // p) for t, p in zip(self.tile, self.piece, strict=True))))

    @property
    def copies(self) -> int:
        """Copies of a step."""
        return (2 if self.partner else 1) * len(self.pieces)

    def smem(self, slots: int, interpreted: bool):
        shape = (slots, 2, *self.tile) if self.partner else (slots, *self.tile)
        return swizzled(shape, self.dtype, self.piece if self.in_pieces else None, self.swizzle, interpreted)

    def views(self, smem, interpreted: bool):
        return views(smem, self.piece if self.in_pieces else None, interpreted)

    def at(self, row, k):
        """Where the tile of rows from `row` and values from `k` begins, as the operand lies."""
        return (k, row) if self.transposed else (row, k)

    def copy(self, gmem, at, smem, filled, shared: str | None):
        """Starts the copies of the tile that begins `at` into a slot; blocks along the axis `shared` do it together."""
        if self.partner:
            for i in range(2):
                begin = tuple(x + i * self.partner * (dim == self.transposed) for dim, x in enumerate(at))
                dataclasses.replace(self, partner=0).copy(gmem, begin, smem.at[i], filled, shared)
            return
        rows, cols = self.piece
        for i, j in self.pieces:
            source = gmem.at[pl.ds(at[0] + i * rows, rows), pl.ds(at[1] + j * cols, cols)]
            target = smem.at[i, j] if self.in_pieces else smem
            if self.narrow:
                target = target.at[pl.ds(0, rows)]
            plgpu.copy_gmem_to_smem(source, target, filled, collective_axes=shared)

    def part(self, smem, wg, rows: int):
        """The `rows` of a slot's tile that warpgroup `wg` multiplies, which may be all of them, as (rows, K)."""
        whole = rows == self.rows
        mine = slice(None) if whole and not self.narrow else pl.ds(0 if whole else wg * rows, rows)
        if not self.transposed:
            return smem.at[0, 0, mine]
        if self.in_pieces:  # A piece for each warpgroup, or one for both.
            return smem.at[0, 0 if whole else wg].T
        return smem.at[:, mine].T

    def pad(self, x):
        """`x` as TMA takes it: padded to whole tiles of the swizzle unless it is copied in pieces. Stacks never are."""
        return x if self.in_pieces or self.stacked else _host.pad_to_tiles(x, _device.SWIZZLE_TILE)


def swizzled(shape, dtype, piece, swizzle: int, interpreted: bool):
    """Shared memory for tiles as tensor cores read them, in pieces; and, if there are any, as TMA writes them.

    The interpreter takes two descriptions for two memories, and cuts off everything: it gets the first alone.
    """
    if piece is not None:
        shape = (*shape[:-2], shape[-2] // piece[0], shape[-1] // piece[1], *piece)
    tile, transform = (8, swizzle // jnp.dtype(dtype).itemsize), plgpu.SwizzleTransform(swizzle)
    tiled = plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform(tile), transform))
    if piece is None or interpreted:
        return tiled
    return plgpu.RefUnion(tiled, plgpu.SMEM(shape, dtype, transforms=(transform,)))


def views(smem, piece, interpreted: bool):
    """(as tensor cores, as TMA sees it) of what `swizzled` described."""
    return (smem, smem) if piece is None or interpreted else tuple(smem)


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Which tiles of an (M, N) result a cluster computes, and in which order: index arithmetic alone."""

    m: int
    n: int
    k: int
    tile_k: int
    config: Config
    num_sms: int
    is_tail: bool = False  # These are the narrower tiles of the last wave.

    @property
    def cluster_tile(self) -> tuple[int, int]:
        """Rows and columns of o that a cluster computes at a time."""
        c = self.config
        return c.tile_m * c.cluster_m, c.tile_n * c.cluster_n

    @property
    def grid(self) -> tuple[int, int]:
        """Whole tiles of clusters along M and N."""
        return tuple(-(-size // tile) for size, tile in zip((self.m, self.n), self.cluster_tile, strict=True))

    @property
    def num_steps(self) -> int:
        """Steps of K of each tile and part. All parts have as many: beyond K lie zeros."""
        return -(-self.k // (self.tile_k * self.config.split_k))

    @property
    def clusters(self) -> int:
        """Clusters that the grid launches: as many as fit the GPU, or one a tile where parts of K are added up."""
        c, total = self.config, math.prod(self.grid)
        return total if c.split_k > 1 else min(total, resident(self.num_sms, c.cluster_m * c.cluster_n))

    @property
    def whole(self) -> int:
        """Tiles of clusters that are computed whole: all, or with `tail_split` only full waves."""
        total = math.prod(self.grid)
        return total if self.config.tail_split == 1 else total // self.clusters * self.clusters

    @property
    def count(self) -> int:
        """Tiles of clusters, whole or narrow ones."""
        return (math.prod(self.grid) - self.whole) * self.config.tail_split if self.is_tail else self.whole

    def of_cluster(self, cluster):
        """How many of these tiles cluster `cluster` computes."""
        return _device.div(self.count - cluster + self.clusters - 1, self.clusters)

    def place(self, index, block_m, block_n):
        """(row, column) in o where tile `index` begins, for block (block_m, block_n) of its cluster."""
        c, split = self.config, self.config.tail_split if self.is_tail else 1
        first = self.whole if self.is_tail else 0
        i, j = plgpu.planar_snake(first + _device.div(index, split), self.grid, c.grid_minor_dim, c.grid_tile_width)
        narrow = 0 if split == 1 else _device.rem(index, split) * (c.tile_n // split)
        return (i * c.cluster_m + block_m) * c.tile_m, (j * c.cluster_n + block_n) * c.tile_n + narrow


def owners(cols: int, parts: int, swapped: bool, itemsize: int) -> int:
    """How many of `parts` blocks can add up a slice each of `cols` columns: each has whole pieces to store."""
    unit = 8 if swapped else 32 // itemsize
    return max((n for n in range(1, parts + 1) if cols % n == 0 and cols // n % unit == 0), default=1)


def resident(num_sms: int, size: int) -> int:
    """Clusters of `size` blocks that run at the same time, one block an SM.

    The blocks of a cluster share a GPC, and most cluster sizes do not divide its SMs.
    """
    return max(1, num_sms * RESIDENT[size - 1] // 132)


@dataclasses.dataclass(frozen=True)
class Plan:
    """Statics of one kernel: its tiles, its operands, and what becomes of its sums."""

    tiles: Tiles
    a: Operand
    b: Operand
    activation: Callable  # Element-wise, of sums in registers.
    out_dtype: jnp.dtype
    interpreted: bool
    others: tuple[tuple[str, Any], ...] = ()  # Further scratch of this kernel, not counted in `smem_bytes`.

    @property
    def config(self) -> Config:
        return self.tiles.config

    @property
    def phases(self) -> list["Plan"]:
        """The plan of whole tiles, and after it that of the narrower ones of the last wave, where there are any."""
        tail = dataclasses.replace(self.tiles, is_tail=True)
        if not tail.count:
            return [self]
        b = dataclasses.replace(self.b, rows=self.b.rows // self.config.tail_split, narrow=True)
        return [self] * (self.tiles.whole > 0) + [dataclasses.replace(self, tiles=tail, b=b)]

    @property
    def compute_tile(self) -> tuple[int, int]:
        """Rows and columns of o that one compute warpgroup accumulates."""
        rows, cols = self.config.compute_tile
        return rows, cols // self.config.tail_split if self.tiles.is_tail else cols

    @property
    def stored_dtype(self) -> jnp.dtype:
        """Dtype of the values that the kernel stores: its result, or sums that XLA has yet to add up."""
        return jnp.dtype(jnp.float32) if self.config.second_kernel else self.out_dtype

    @property
    def owners(self) -> int:
        """Blocks of a cluster that add up a slice each of the parts' sums: as many as have whole pieces to store."""
        if not self.adds_parts:
            return 1
        return owners(self.compute_tile[1], self.config.split_k, self.swapped, self.stored_dtype.itemsize)

    @property
    def swapped(self) -> bool:
        """Whether tiles are transposed on their way out; parts of K are not, before they are added up by XLA."""
        return self.config.swapped and not self.config.second_kernel

    @property
    def adds_parts(self) -> bool:
        """Whether the blocks of a cluster are parts of K, which they add up."""
        return self.config.split_k > 1 and not self.config.second_kernel

    @property
    def slice_tile(self) -> tuple[int, int]:
        """Rows and columns of what a compute warpgroup stores of a tile."""
        rows, cols = self.compute_tile
        return rows, cols // self.owners

    @property
    def store_piece(self) -> tuple[int, int]:
        """Rows and columns of a piece of the tile on its way out: the most columns that divide it and are swizzled."""
        cols = self.config.compute_tile[1] // self.owners // self.config.tail_split
        if self.swapped:
            return STORE_ROWS, max(width for width in (8, 16, 32, 64) if cols % width == 0)
        widths = [swizzle // self.stored_dtype.itemsize for swizzle in (32, 64, 128)]
        if cols % widths[0]:
            raise ValueError(
                f"tile_n={self.config.tile_n} leaves {cols} columns of {self.stored_dtype} to store at once: must be a "
                f"multiple of {widths[0]}, 32 bytes (or swapped=True)"
            )
        return STORE_ROWS, max(width for width in widths if cols % width == 0)

    @property
    def store_pieces(self) -> list[tuple[int, int]]:
        """Row and column of each piece of what a compute warpgroup stores of a tile."""
        (rows, cols), (height, width) = self.slice_tile, self.store_piece
        return list(itertools.product(range(0, rows, height), range(0, cols, width)))

    @property
    def stores_directly(self) -> bool:
        """Whether results go to o from registers: transposed ones of 32 bits cannot be transposed in shared memory."""
        return self.swapped and self.stored_dtype.itemsize == 4

    def _scratch(self, num_stages: int) -> dict:
        c, interpreted = self.config, self.interpreted
        axes = tuple(axis for axis in (self.axis_m, self.axis_n) if axis)
        freed = functools.partial(plgpu.ClusterBarrier, collective_axes=axes) if axes else plgpu.Barrier
        scratch = dict(
            a_smem=self.a.smem(num_stages, interpreted),
            b_smem=self.b.smem(num_stages, interpreted),
            filled=plgpu.Barrier(num_arrivals=self.a.copies + self.b.copies, num_barriers=num_stages),
            freed=freed(num_arrivals=COMPUTE, num_barriers=num_stages),
        )
        if not self.stores_directly:
            piece = self.store_piece[:: -1 if self.swapped else 1]
            swizzle = piece[1] * self.stored_dtype.itemsize
            scratch["o_smem"] = swizzled(
                (COMPUTE, c.store_slots, *piece), self.stored_dtype, piece, swizzle, interpreted
            )
        if self.adds_parts and interpreted:  # It has no stores to other blocks: they meet in global memory.
            scratch["summed"] = plgpu.ClusterBarrier(collective_axes=("part",), num_arrivals=COMPUTE)
        elif self.adds_parts:
            rows, cols = self.slice_tile
            swizzle = max(size for size in (32, 64, 128) if 4 * cols % size == 0)
            scratch["sums_smem"] = swizzled((COMPUTE, c.split_k, rows, cols), jnp.float32, None, swizzle, interpreted)
            scratch["summed"] = plgpu.Barrier(num_arrivals=c.split_k - 1, num_barriers=COMPUTE)
        return scratch

    @property
    def axis_m(self) -> str | None:
        """Name of the axis of a cluster's blocks along M, which share b's tile."""
        return "block_m" if self.config.cluster_m > 1 else None

    @property
    def axis_n(self) -> str | None:
        return "block_n" if self.config.cluster_n > 1 else None

    @property
    def cluster(self) -> dict[str, int]:
        """Names and sizes of the axes of a cluster of blocks."""
        if self.adds_parts:
            return dict(part=self.config.split_k)
        axes = (self.axis_m, self.config.cluster_m), (self.axis_n, self.config.cluster_n)
        return {axis: size for axis, size in axes if axis}

    def smem_bytes(self, num_stages: int) -> int:
        """Shared memory of a block with a ring of `num_stages`."""
        return _device.smem_bytes(self._scratch(num_stages))

    @property
    def num_stages(self) -> int:
        """Slots of the ring: as the configuration says, or as many as fit."""
        return slots_of_ring(self.config, self.smem_bytes)

    @property
    def scratch(self) -> dict:
        return self._scratch(self.num_stages) | dict(self.others)

    def num_tiles(self):
        """How many tiles this block computes."""
        return self.tiles.of_cluster(lax.axis_index("cluster"))

    def k(self, step):
        """Where along K `step` of this block's part begins."""
        return (self.part * self.tiles.num_steps + step) * self.tiles.tile_k

    def place(self, tile):
        """(row, column) in o where this block's `tile` begins."""
        blocks = (lax.axis_index(axis) if axis else 0 for axis in (self.axis_m, self.axis_n))
        return self.tiles.place(lax.axis_index("cluster") + tile * self.tiles.clusters, *blocks)

    @property
    def part(self):
        """Which part of K this block sums."""
        return 0 if self.config.split_k == 1 else lax.axis_index("part")

    def share(self, place):
        """(row, column) in o of what this compute warpgroup accumulates of a tile that begins at `place`."""
        role = lax.axis_index("role")
        return tuple(
            start + role * size if self.config.split_dim == dim else start
            for dim, (start, size) in enumerate(zip(place, self.compute_tile, strict=True))
        )


def slots_of_ring(config, smem_bytes: Callable) -> int:
    """Slots of the ring: `config.num_stages`, or as many as fit, where a block with n of them takes `smem_bytes(n)`.

    Raises:
      ValueError: they do not fit.
    """
    wanted = config.num_stages or 2
    if (needed := smem_bytes(wanted)) > _device.SMEM_BYTES_MAX:
        raise ValueError(
            f"num_stages={wanted} of {config.tile_m=}, {config.tile_n=} need {needed} bytes of shared memory, and a "
            f"block has {_device.SMEM_BYTES_MAX}: fewer stages, fewer store slots or smaller tiles"
        )
    fitting = (count for count in range(STAGES_MAX, 1, -1) if smem_bytes(count) <= _device.SMEM_BYTES_MAX)
    return config.num_stages or next(fitting)


def is_cut(k: int, rows: int) -> bool:
    """Whether TMA has to cut off tiles of an operand that lies as (K, rows)."""
    return _host.padded_shape((k, rows), _device.SWIZZLE_TILE) != (k, rows)


def plan_of(m, n, k, dtypes, transposed, activation, out_dtype, config: Config, num_sms=132,
            interpreted=False) -> Plan:  # fmt: skip
    """The plan of an (M, K) by (N, K) product; `dtypes` and `transposed` (it lies as (K, rows)) are of a and of b."""
    if config.swapped:
        (m, n), dtypes, transposed = (n, m), dtypes[::-1], transposed[::-1]
    tile_k = STEP_BYTES // dtypes[0].itemsize
    operands = []
    for name, rows, tile, mine, dtype, lies_transposed in zip(
        "ab", (m, n), (config.tile_m, config.tile_n), config.compute_tile, dtypes, transposed, strict=True
    ):
        in_pieces = not lies_transposed or (is_cut(k, rows) and mine == 64)
        if lies_transposed and mine % 64:
            raise ValueError(
                f"tile_{'mn'[name == 'b']}={tile} leaves a warpgroup {mine} rows of an operand that lies as (K, rows): "
                "must be a multiple of 64, the columns of the 128-byte swizzle"
            )
        operands.append(Operand(dtype, tile, tile_k, lies_transposed, in_pieces))
    if config.tail_split > 1 and transposed[1]:
        raise ValueError(
            f"{config.tail_split=} cuts tiles of an operand that lies as (K, rows), which TMA copies whole: must be 1 "
            "unless b is given as (N, K), or a plain one is `swapped`"
        )
    return Plan(Tiles(m, n, k, tile_k, config, num_sms), *operands, activation, out_dtype, interpreted)

# SPDX-License-Identifier: Apache-2.0
"""How a product is cut up: its configuration, and which tiles of the result a cluster of blocks computes."""

import dataclasses
import math
from typing import ClassVar

from jax.experimental.pallas import mosaic_gpu as plgpu

from .. import _device

SPLIT_K_MAX = 8  # Blocks that every Hopper GPU can put into one cluster.
RESIDENT = 132, 66, 39, 30, 22, 17, 15, 15  # Clusters of 1 to 8 blocks that an H200 runs at a time, as CUDA says.


def exchanged(pair, swapped: bool):
    """The two of `pair`, in the other order if `swapped`."""
    return pair[::-1] if swapped else pair


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
    warpgroups: ClassVar[int] = 2  # Compute warpgroups of a block.

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
            size // self.warpgroups if self.split_dim == dim else size
            for dim, size in enumerate((self.tile_m, self.tile_n))
        )


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


def resident(num_sms: int, size: int) -> int:
    """Clusters of `size` blocks that run at the same time, one block an SM.

    The blocks of a cluster share a GPC, and most cluster sizes do not divide its SMs.
    """
    return max(1, num_sms * RESIDENT[size - 1] // 132)

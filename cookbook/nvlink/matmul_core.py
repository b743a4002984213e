# SPDX-License-Identifier: Apache-2.0
"""Shared parts of the two products: the tiles of all shards in one order, checks, the choice of a configuration.

The kernels are those of `cookbook.gemm`: its plan, its roles, its cost. Here is what they need to work on shards.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from .. import _device, _host
from ..gemm import cost
from ..gemm import kernel as roles
from ..gemm import plan as gemm
from ..gemm.grouped import plan as groups
from . import core


@dataclasses.dataclass(frozen=True)
class Config(gemm.Config):
    """How the product of one device is cut up: the fields of `cookbook.matmul.Config`, apart from parts of K."""

    def __post_init__(self):
        super().__post_init__()
        if self.split_k != 1 or self.tail_split != 1 or self.swapped:
            raise ValueError(
                f"{self.split_k=}, {self.tail_split=} and {self.swapped=} must be 1, 1 and False in products across "
                "GPUs: every device must cut the same tiles out of each shard"
            )


class Entry(NamedTuple):
    """A tile: the step in which its shard comes, its number within the shard, and its place in the shard's rows."""

    step: Any
    number: Any
    row: Any
    col: Any


@dataclasses.dataclass(frozen=True)
class ShardTiles(gemm.Tiles):
    """Tiles of an (M, N) result for each of several shards of M rows, one shard after the other."""

    num_shards: int = 1
    entry: Entry | None = None

    @property
    def shard_grid(self) -> tuple[int, int]:
        """Tiles of clusters along M and N of one shard."""
        return super().grid

    @property
    def grid(self) -> tuple[int, int]:
        rows, cols = self.shard_grid
        return self.num_shards * rows, cols

    @property
    def per_shard(self) -> int:
        rows, cols = self.shard_grid
        return rows * cols

    @property
    def num_steps(self):
        """Steps of the tile that was looked up."""
        return None if self.entry is None else super().num_steps

    def look_up(self, index, block_m, block_n) -> "ShardTiles":
        c, number = self.config, _device.rem(index, self.per_shard)
        i, j = plgpu.planar_snake(number, self.shard_grid, c.grid_minor_dim, c.grid_tile_width)
        row, col = (i * c.cluster_m + block_m) * c.tile_m, (j * c.cluster_n + block_n) * c.tile_n
        return dataclasses.replace(self, entry=Entry(_device.div(index, self.per_shard), number, row, col))


@dataclasses.dataclass(frozen=True)
class ShardPlan(gemm.Plan):
    """A plan for shards. The first clusters of the grid may have other work to do: `first_cluster` multiplies first."""

    first_cluster: int = 0

    @property
    def phases(self) -> list[gemm.Plan]:
        return [self]

    @property
    def entry(self) -> Entry:
        return self.tiles.entry

    @property
    def grid(self) -> tuple[int]:
        return (self.first_cluster + self.tiles.clusters,)

    @property
    def cluster(self) -> dict[str, int]:
        """Names and sizes of a cluster's axes."""
        axes = ((self.axis_m, self.config.cluster_m), (self.axis_n, self.config.cluster_n))
        return {axis: size for axis, size in axes if axis}

    @property
    def block_of_cluster(self) -> tuple:
        """Where this block is in its cluster, along M and N."""
        return tuple(lax.axis_index(axis) if axis else 0 for axis in (self.axis_m, self.axis_n))

    def index(self, tile):
        """The number of this block's `tile` among those of all shards."""
        return lax.axis_index("cluster") - self.first_cluster + tile * self.tiles.clusters

    def num_tiles(self):
        return self.tiles.of_cluster(lax.axis_index("cluster") - self.first_cluster)

    def look_up(self, tile) -> "ShardPlan":
        return dataclasses.replace(self, tiles=self.tiles.look_up(self.index(tile), *self.block_of_cluster))

    def place(self, tile):
        return self.entry.row, self.entry.col


def plan_of(plan, m: int, n: int, k: int, num_shards: int, dtype, transpose_rhs: bool, config, num_sms: int, **fields):
    """The plan, of class `plan`, of products of `num_shards` shards of (M, K) and one (K, N) or, transposed, (N, K)."""
    one = gemm.plan_of(m, n, k, (dtype, dtype), (False, not transpose_rhs), roles.identity, dtype, config, num_sms)
    tiles = ShardTiles(m, n, k, one.tiles.tile_k, config, num_sms, num_shards=num_shards)
    return plan(tiles, one.a, one.b, one.activation, one.out_dtype, one.interpreted, **fields)


@functools.lru_cache(4096)
def best(m: int, n: int, k: int, num_shards: int, itemsize: int, transpose_rhs: bool, num_sms: int):
    """(the configuration of the least predicted time for the products of all shards on one device, that time in us)."""
    problem = cost.Problem(num_shards * m, n, k, (False, not transpose_rhs), (itemsize,) * 3, num_sms)

    def predict(config):  # Tiles of one shard do not reach into the next.
        rows = _host.padded_shape((m,), (config.tile_m * config.cluster_m,))[0]
        return cost.predict(config, dataclasses.replace(problem, m=num_shards * rows))

    plain = [c for c in cost.candidates(problem) if c.split_k == c.tail_split == 1 and not c.swapped]
    config = min(plain, key=predict)
    return config, predict(config)


def require_operands(op: str, lhs, rhs, axis_name):
    """The two matrices as JAX arrays, and the number of devices. Raises ValueError for what is not supported."""
    lhs, rhs = _host.as_array(op, "lhs", lhs), _host.as_array(op, "rhs", rhs)
    if lhs.ndim != 2 or rhs.ndim != 2:
        raise ValueError(
            f"{_host.PACKAGE}.{op}: {lhs.shape=}, {rhs.shape=}; both must be matrices: make their rows one axis"
        )
    groups.check_operands(op, lhs, rhs)
    if lhs.shape[1] != rhs.shape[0]:
        raise ValueError(
            f"{_host.PACKAGE}.{op}: {lhs.shape=} and {rhs.shape=} share no K: {lhs.shape[1]} is not {rhs.shape[0]}; "
            "is one "
            "stored the other way round?"
        )
    n = core.num_devices(op, axis_name)
    return *_host.alike(core.vary(lhs, axis_name), rhs), n

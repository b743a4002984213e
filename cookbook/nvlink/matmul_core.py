# SPDX-License-Identifier: Apache-2.0
"""Shared parts of the two products: the tiles of all shards in one order, checks, the choice of a configuration.

Plans, the product of a tile and costs come from `cookbook.gemm`. Here is what they need to work on shards.
"""

import dataclasses
import functools
from typing import NamedTuple

from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from .. import _device, _host
from .._device import Index
from ..gemm import cost
from ..gemm.arguments import product_sizes, require_halves
from ..gemm.plan import Plan, identity
from ..gemm.plan import plan_of as plain_plan_of
from ..gemm.tiles import Config as PlainConfig
from ..gemm.tiles import Tiles
from . import core


@dataclasses.dataclass(frozen=True)
class Config(PlainConfig):
    """How the product of one device is cut up: the fields of `cookbook.matmul.Config`, apart from parts of K."""

    def __post_init__(self):
        super().__post_init__()
        if self.split_k != 1 or self.tail_split != 1 or self.swapped:
            raise ValueError(
                f"{self.split_k=}, {self.tail_split=} and {self.swapped=} must be 1, 1 and False in products across "
                "GPUs: every device must cut the same tiles out of each shard"
            )


class Tile(NamedTuple):
    """A tile that was looked up: the step in which its shard comes, its number within the shard, its place there."""

    step: Index
    number: Index
    row: Index
    col: Index


@dataclasses.dataclass(frozen=True)
class ShardTiles(Tiles):
    """Tiles of an (M, N) result for each of several shards of M rows, one shard after the other.

    The first clusters of the grid may have other work to do: `first_cluster` multiplies first.
    """

    num_shards: int = 1
    first_cluster: int = 0

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

    def look_up(self, index, block_m, block_n) -> Tile:
        """Tile `index`, as block (block_m, block_n) of its cluster has it."""
        c, number = self.config, _device.rem(index, self.per_shard)
        i, j = plgpu.planar_snake(number, self.shard_grid, c.grid_minor_dim, c.grid_tile_width)
        row, col = (i * c.cluster_m + block_m) * c.tile_m, (j * c.cluster_n + block_n) * c.tile_n
        return Tile(_device.div(index, self.per_shard), number, row, col)


def block_of_cluster(plan: Plan) -> tuple:
    """Where this block is in its cluster, along M and N."""
    return tuple(lax.axis_index(axis) if axis else 0 for axis in (plan.axis_m, plan.axis_n))


def num_tiles(plan: Plan):
    """How many tiles this block computes."""
    return plan.tiles.of_cluster(lax.axis_index("cluster") - plan.tiles.first_cluster)


def tile_of_block(plan: Plan, number) -> Tile:
    """This block's tile `number`."""
    index = lax.axis_index("cluster") - plan.tiles.first_cluster + number * plan.tiles.clusters
    return plan.tiles.look_up(index, *block_of_cluster(plan))


def plan_of(m: int, n: int, k: int, num_shards: int, dtype, transpose_rhs: bool, config, num_sms: int, first_cluster=0):
    """The plan of products of `num_shards` shards of (M, K) and one (K, N) or, with `transpose_rhs`, (N, K)."""
    one = plain_plan_of(m, n, k, (dtype, dtype), (False, not transpose_rhs), identity, dtype, config, num_sms)
    fields = dict(num_shards=num_shards, first_cluster=first_cluster)
    return dataclasses.replace(one, tiles=ShardTiles(m, n, k, one.tiles.tile_k, config, num_sms, **fields))


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
    require_halves(op, lhs=lhs, rhs=rhs)
    product_sizes(op, dict(lhs=lhs, rhs=rhs))
    n = core.num_devices(op, axis_name)
    return *_host.alike(core.vary(lhs, axis_name), rhs), n

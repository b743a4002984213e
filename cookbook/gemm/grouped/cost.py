# SPDX-License-Identifier: Apache-2.0
"""Which configuration of a grouped product is the fastest: `cost.py`'s times of a tile, and how many tiles to expect.

Sizes of groups are known on the device alone. A product is predicted twice, for groups that are all alike and for a
quarter of them that has all rows, and the prediction is the geometric mean: a configuration should do well for both.
Each group ends anywhere in its last tile. So the number of tiles is a random one, and with few groups nearly certain:
whether they fill one wave or begin a second is worth knowing. Sums are predicted for groups that are all alike.
"""

import dataclasses
import functools
import itertools
import math
import statistics

import jax.numpy as jnp

from .. import cost
from ..plan import identity
from ..tiles import Config, exchanged, resident
from .plan import gated, row_plan, sum_plan

CLUSTERS = ((1, 1), (2, 1), (1, 2))
# Fitted to times of many configurations of random products; so far not checked on others.
FILL = 110e3  # Bytes that an SM copies into its ring in a microsecond while all SMs do.
SWAPPED = 1.05  # Time of a tile that is exchanged on its way out, over that of one that is not.


@dataclasses.dataclass(frozen=True)
class RaggedProblem:
    """(M, K) rows of `num_groups` groups by a (K, N) matrix each, or two of them with `is_gated`."""

    m: int
    n: int  # Columns of the result.
    k: int
    num_groups: int
    transpose_rhs: bool
    dtype: jnp.dtype
    out_dtype: jnp.dtype
    is_gated: bool = False
    num_sms: int = 132

    def candidates(self):
        shapes = itertools.product((False, True), cost.SHAPES, cost.WIDTHS, CLUSTERS)
        return [
            config
            for swapped, (tile_m, split_dim), tile_n, (cluster_m, cluster_n) in shapes
            if tile_m * tile_n <= 128 * 256 and tile_n % (8 << split_dim) == 0
            if self._works(
                config := Config(
                    tile_m, tile_n, split_dim=split_dim, cluster_m=cluster_m, cluster_n=cluster_n, swapped=swapped
                )
            )
        ]

    def _works(self, config: Config) -> bool:
        """Whether there is such a plan, and the columns of the result fill more than half of a tile."""
        cols = config.tile_m * config.cluster_m if config.swapped else config.tile_n * config.cluster_n
        if cols >= 2 * max(self.n, 64):
            return False
        try:
            plan = row_plan(
                self.m, self.n, self.k, self.num_groups, self.dtype, self.transpose_rhs, identity, self.out_dtype,
                config, self.num_sms,
            )  # fmt: skip
            if self.is_gated:
                _doubled(gated(plan).config)
        except ValueError:
            return False
        return True

    def predict(self, config: Config, c: cost.Constants = cost.H200) -> float:
        """Microseconds of the product on one H200."""
        return math.sqrt(self._time(config, self.num_groups, c) * self._time(config, -(-self.num_groups // 4), c))

    def _time(self, config: Config, num_groups: int, c: cost.Constants) -> float:
        """Microseconds if that many groups have rows, all as many."""
        n = self.n * (2 if self.is_gated else 1)
        sizes = self.dtype.itemsize, self.dtype.itemsize, self.out_dtype.itemsize
        plain = cost.Problem(self.m, n, self.k, (False, not self.transpose_rhs), sizes, self.num_sms)
        tile = config.tile_m * config.cluster_m, config.tile_n * config.cluster_n
        rows, cols = exchanged(tile, config.swapped)
        with_rows = min(num_groups, self.m)
        across, at_once = -(-self.n // cols), resident(self.num_sms, config.cluster_m * config.cluster_n)
        tiles = with_rows * max(1.0, self.m / with_rows / rows + 0.5) * across
        waves = _expected_waves(tiles / at_once, across * math.sqrt(with_rows / 12) / at_once)
        whole = _doubled(config) if self.is_gated else config
        fill = (whole.tile_m + whole.tile_n) * self.k * sizes[0] / FILL
        tile_time = cost.longer(_tile_time(whole, plain, c), fill) * (SWAPPED if config.swapped else 1.0)
        written = cost.by_alignment(sizes[2] * self.n, c.write_128, c.write_32, c.write_16)
        memory = sizes[0] * self.k * (self.m + with_rows * n) / c.read / 1e6
        memory += sizes[2] * self.m * self.n / written / 1e6
        return c.start + cost.longer(waves * tile_time, memory)


@dataclasses.dataclass(frozen=True)
class SumsProblem:
    """(rows, M) and (rows, N) to a (M, N) matrix for each of `num_groups` groups."""

    m: int
    n: int
    rows: int
    num_groups: int
    dtype: jnp.dtype
    out_dtype: jnp.dtype
    num_sms: int = 132

    def candidates(self):
        tiles = itertools.product((128, 256), (64, 128, 192, 256), CLUSTERS)
        return [
            config
            for tile_m, tile_n, (cluster_m, cluster_n) in tiles
            if tile_m * tile_n <= 128 * 256
            if tile_m * cluster_m < 2 * max(self.m, 128) and tile_n * cluster_n < 2 * max(self.n, 64)
            if self._works(config := Config(tile_m, tile_n, cluster_m=cluster_m, cluster_n=cluster_n))
        ]

    def _works(self, config: Config) -> bool:
        try:
            sum_plan(self.m, self.n, self.rows, self.num_groups, self.dtype, self.out_dtype, config)
        except ValueError:
            return False
        return True

    def predict(self, config: Config, c: cost.Constants = cost.H200) -> float:
        """Microseconds of the sums on one H200."""
        size, out = self.dtype.itemsize, self.out_dtype.itemsize
        steps = self.rows / self.num_groups + 4  # A group begins at any row, and its first step at a multiple of 8.
        one = cost.Problem(self.m, self.n, math.ceil(steps), (True, True), (size, size, out), self.num_sms)
        across = (-(-self.m // (config.tile_m * config.cluster_m)), -(-self.n // (config.tile_n * config.cluster_n)))
        waves = _waves(self.num_groups * math.prod(across), config, self.num_sms)
        written = cost.by_alignment(out * self.n, c.write_128, c.write_32, c.write_16)
        memory = size * self.rows * (self.m + self.n) / c.read / 1e6
        memory += out * self.num_groups * self.m * self.n / written / 1e6
        return c.start + cost.longer(waves * _tile_time(config, one, c), memory)


def _expected_waves(mean: float, deviation: float) -> float:
    """The expected number of waves, where the number of tiles is normally distributed, in multiples of a whole wave."""
    full = statistics.NormalDist(mean, deviation)
    lowest, highest = max(1, math.floor(mean - 5 * deviation)), math.ceil(mean + 5 * deviation)
    return lowest + sum(1 - full.cdf(k) for k in range(lowest, highest))


def _waves(tiles: float, config: Config, num_sms: int) -> float:
    """Waves of so many tiles of clusters, of which the last is half full on average."""
    return max(1.0, tiles / resident(num_sms, config.cluster_m * config.cluster_n) + 0.5)


def _tile_time(config: Config, problem: cost.Problem, c: cost.Constants) -> float:
    return cost.tile_time(config, problem.flipped if config.swapped else problem, config.tile_n, c)


def _doubled(config: Config) -> Config:
    """The configuration of a plain product that does as much in a tile as a gated one of `config`.

    Raises:
      ValueError: there is none.
    """
    name = "tile_m" if config.swapped else "tile_n"
    return dataclasses.replace(config, **{name: 2 * getattr(config, name)})


def ranked(problem: RaggedProblem | SumsProblem, count: int | None = None) -> list[Config]:
    """The `count` configurations of the least predicted time, or all; the best first."""
    return sorted(problem.candidates(), key=problem.predict)[:count]


@functools.lru_cache(4096)
def best(problem: RaggedProblem | SumsProblem) -> Config:
    """The configuration of the least predicted time."""
    return ranked(problem, 1)[0]

# SPDX-License-Identifier: Apache-2.0
"""The plan of a gated linear unit, and its fastest configuration: a plain product's, of tiles twice as wide."""

import dataclasses
import functools

import jax.numpy as jnp

from .. import cost
from ..plan import Plan, identity, plan_of
from ..tiles import Config


def gated_plan(m, n, k, dtype, transpose_weights, activation, config: Config, num_sms=132, interpreted=False) -> Plan:
    """The plan of (M, K) by two (K, N) matrices, or (N, K) with `transpose_weights`.

    Raises:
      ValueError: the kernel cannot work in tiles of this configuration, or not with these operands.
    """
    c = config
    rows, cols = c.compute_tile
    if rows * cols > 64 * 128:
        raise ValueError(
            f"{c.tile_m=} x {c.tile_n=} leaves each of two warpgroups {rows} x {cols} values of o: must be at most "
            "64 x 128, because a warpgroup accumulates the gate and the up product apart"
        )
    if c.second_kernel:
        raise ValueError(f"{c.second_kernel=} adds up parts of one product; must be False for two")
    lies = False, not transpose_weights
    plan = plan_of(m, n, k, (dtype, dtype), lies, activation, dtype, config, num_sms, interpreted)
    name = "a" if c.swapped else "b"
    weights = dataclasses.replace(getattr(plan, name), of_two=True)
    return dataclasses.replace(plan, **{name: weights}, num_sums=2)


@dataclasses.dataclass(frozen=True)
class Problem:
    """(M, K) by two (K, N) matrices, or (N, K) with `transpose_weights`, of 16 bits."""

    m: int
    n: int
    k: int
    transpose_weights: bool
    num_sms: int = 132

    def plain(self, n: int, out_bytes: int) -> cost.Problem:
        """The plain product with `n` columns of so many bytes."""
        return cost.Problem(self.m, n, self.k, (False, not self.transpose_weights), (2, 2, out_bytes), self.num_sms)

    def candidates(self) -> list[Config]:
        return [config for config in cost.candidates(self.plain(self.n, 2)) if self._works(config)]

    def _works(self, config: Config) -> bool:
        """Whether there is such a plan, and its slots fit."""
        sizes, dtype = (self.m, self.n, self.k), jnp.dtype(jnp.bfloat16)
        try:
            plan = gated_plan(*sizes, dtype, self.transpose_weights, identity, config, self.num_sms)
            return plan.num_stages >= 2 and bool(_doubled(config))
        except ValueError:
            return False

    def predict(self, config: Config) -> float:
        """Microseconds on one H200: those of both products side by side, whose values take half as many bytes."""
        return cost.predict(_doubled(config), self.plain(2 * self.n, 1))


def _doubled(config: Config) -> Config:
    """The configuration of a plain product that does as much in a tile as a gated one of `config`.

    Raises:
      ValueError: such a tile is too large for a configuration.
    """
    name = "tile_m" if config.swapped else "tile_n"
    return dataclasses.replace(config, **{name: 2 * getattr(config, name)})


def ranked(problem: Problem, count: int | None = None) -> list[Config]:
    """The `count` configurations of the least predicted time, or all; the best first."""
    return sorted(problem.candidates(), key=problem.predict)[:count]


@functools.lru_cache(4096)
def best(problem: Problem) -> Config:
    """The configuration of the least predicted time."""
    return min(problem.candidates(), key=problem.predict)

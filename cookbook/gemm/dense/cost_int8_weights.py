# SPDX-License-Identifier: Apache-2.0
"""The time that a product with weights of 8 or 4 bits is expected to take, by which a configuration is chosen."""

import functools
import math
from dataclasses import replace

from jax.experimental import pallas as pl

from .. import cost
from ..plan import STAGES_MAX, owners
from ..tiles import SPLIT_K_MAX, resident
from .kernel_int8_weights import Config


@functools.lru_cache(4096)
def default_config(m: int, n: int, k: int, num_sms: int = 132, bits: int = 8) -> Config:
    """The configuration of the least predicted time for an (m, k) by (k, n) product."""
    return ranked(m, n, k, 1, num_sms, bits)[0]


def ranked(m: int, n: int, k: int, count: int, num_sms: int = 132, bits: int = 8) -> list[Config]:
    """The `count` configurations of the least predicted time, the best first: those that are worth timing."""
    found = candidates(m, n, k, num_sms, bits)
    return sorted(found, key=lambda config: predict(config, m, n, k, num_sms, bits))[:count]


def candidates(m: int, n: int, k: int, num_sms: int, bits: int = 8) -> list[Config]:
    found = list(_of_two(m, n, k, num_sms))
    if bits == 4:  # With 8 bits, 16,384 rows of 32 groups took 557 us with four warpgroups, not 521.
        whole = [c for c in found if c.cluster_m == c.split_k == 1 and c.tile_n <= ROWS_OF_FOUR.get(c.tile_k, 0)]
        found += [replace(c, tile_m=256, warpgroups=4, overlap=c.tile_k == 128 and c.tile_n <= 16) for c in whole]
    return found


def _of_two(m: int, n: int, k: int, num_sms: int):
    """The configurations with two warpgroups."""
    widths = [width for width in cost.WIDTHS if width < 2 * m or width == 8]
    for tile_n in widths:
        tiles = pl.cdiv(n, 128) * pl.cdiv(m, tile_n)
        for tile_k in (128, 256) if tile_n <= 32 else (64, 128) if tile_n <= 128 else (64,):
            for cluster_m in (2, 1) if tiles >= num_sms // 2 else (1,):
                overlap = tiles <= num_sms and tile_n >= LEAST_OVERLAP
                yield Config(128, tile_n, cluster_m=cluster_m, tile_k=tile_k, overlap=overlap)
            for split_k in range(2, min(SPLIT_K_MAX, k // 512) + 1):
                if tiles <= WAVES_OF_PARTS * resident(num_sms, split_k) and tile_n <= 128:
                    yield Config(128, tile_n, split_k=split_k, tile_k=tile_k)
                if tiles * split_k <= num_sms:
                    parts = dict(split_k=split_k, second_kernel=True, overlap=tile_n >= LEAST_OVERLAP)
                    yield Config(128, tile_n, tile_k=tile_k, **parts)


def predict(c: Config, m: int, n: int, k: int, num_sms: int, bits: int = 8, conversion=None) -> float:
    """Microseconds of the product on one H200.

    `conversion` takes the place of (CONVERT_STEP, CONVERT[bits], the share of a step's products that it does not hide).
    """
    h, adds_parts = cost.H200, c.split_k > 1 and not c.second_kernel
    fit = resident(num_sms, c.cluster_m * c.split_k) if not c.second_kernel else num_sms // c.split_k
    waves = pl.cdiv(pl.cdiv(n, c.tile_m * c.cluster_m) * pl.cdiv(m, c.tile_n), fit)
    values = c.tile_m * c.tile_n
    received = 4 * values * c.split_k // owners(c.tile_n, c.split_k, True, 2) if adds_parts else 0
    stages = (cost.SMEM_FOR_RING - received) // ((c.tile_m * bits // 8 + 2 * c.tile_n) * c.tile_k)
    if stages < 2:
        return math.inf
    # One warpgroup converts while the other multiplies, at best.
    step, values_of_step, share = conversion or (CONVERT_STEP, CONVERT[bits], 0.5)
    convert = step + values_of_step * c.tile_m * c.tile_k / 16384
    tensor = values * c.tile_k / 2048 / h.tensor / 1e3
    step = max(tensor, convert + share * tensor, h.latency / min(stages, STAGES_MAX))
    time = waves * (pl.cdiv(k, c.tile_k * c.split_k) * step + h.tile + 0.9 * values / 32768)
    if adds_parts:
        time += PARTS_START + PARTS * values * (1 - 1 / c.split_k) / 16384
    elif c.second_kernel:
        time += h.second_kernel + 8e-6 * c.split_k * m * n / h.read
    start = h.start * (waves if c.split_k > 1 else 1)  # A block of parts computes one tile.
    return start + cost.longer(time, (n * k * bits / 8 + 2 * m * (n + k)) / h.read / 1e6)


# The most rows of a tile that leave four warpgroups enough registers, for steps of so many values of K. Few of them
# also leave enough to convert weights while products of the step before run.
ROWS_OF_FOUR = {64: 128, 128: 48, 256: 16}
LEAST_OVERLAP = 128  # Rows of a tile from which on a product of one wave overlaps conversion with products.
WAVES_OF_PARTS = 4  # Waves of clusters that add up parts of K, at most.
PARTS_START = 0.347  # us to add up parts of K,
PARTS = 14.0  # us to add up parts of K, for each 16,384 values that a block sends.
CONVERT_STEP = 0.05  # us of a step to read and convert its weights,
# and more for each 16,384 of so many bits. Those of 4 bits were not timed: they take 0.58 of the instructions.
CONVERT = {8: 0.46, 4: 0.27}

# SPDX-License-Identifier: Apache-2.0
"""Which configuration of a product is predicted to be the fastest on a B200. Nobody here has measured one.

The model has one term for each thing that can bound the kernel: the tensor cores, shared memory, copies into it, the
stores of a tile, HBM. Rates of the tensor cores and of HBM are NVIDIA's figures. Those of copies and stores are assumed
to be an H200's, to which the model of `cookbook.gemm.cost` was fitted.

Shared memory is why a pair of blocks is expected to pay. A step of K is written to it once and read once. For 128 rows
of a and 256 of b that takes 768 cycles at 128 bytes each, and the products take 512; in a pair each block holds 128 of
those 256 rows, and both take 512. The count is weak: on Hopper, tiles that it rules out run at full rate (chapter 7).
Power is left out: pairs of JAX's tutorial, and the libraries, stay well below this bound on normal inputs (chapter
19b), so the model orders configurations better than it predicts their times.
"""

import dataclasses
import functools
import math

from .plan import SCALES, STEP_BYTES, TMEM_COLUMNS, Config

WIDTHS = (32, 64, 96, 128, 160, 192, 224, 256)


@dataclasses.dataclass(frozen=True)
class Constants:
    """Times and rates of one B200, none of them measured."""

    clock: float = 1.85  # Billion cycles a second, at which 148 SMs have the dense rates of the datasheet.
    products: float = 8192.0  # FLOP a cycle and SM of 16-bit products, and twice as many of 8 bits.
    shared: float = 128.0  # Bytes a cycle that an SM reads from or writes to shared memory.
    copy: float = 100.0  # Bytes a cycle that an SM copies into shared memory; an H200's.
    start: float = 2.0  # us of a kernel before its first copy arrives, and after its last store; an H200's.
    tile: float = 0.2  # us to store a tile,
    tile_values: float = 0.4  # and for each 32,768 values of it as much more; an H200's.
    hbm: float = 8.0  # TB/s.


B200 = Constants()


@dataclasses.dataclass(frozen=True)
class Problem:
    """An (M, K) by (K, N) product, or one of groups of rows; `b_lies_plain` says that b lies as (K, N)."""

    m: int
    n: int
    k: int
    b_lies_plain: bool
    itemsize: int  # Bytes of a value of a and b; 1 for MXFP8, with scales.
    out_itemsize: int
    num_sms: int = 148
    one_cta: bool = False  # Only what the interpreter can run.
    num_groups: int = 0  # Groups of rows, each with a matrix of its own, or 0.
    is_gated: bool = False  # A tile of o takes the gate's columns and the up product's.

    def tiles(self, config: Config) -> int:
        """Tiles of a product by `config`. A group, of those that are alike, ends anywhere in its last tile."""
        height, across = config.tile_m * config.cluster_m, -(-self.n // config.tile_n)
        if not self.num_groups:
            return -(-self.m // height) * across
        with_rows = min(self.num_groups, self.m)
        return math.ceil(with_rows * max(1.0, self.m / with_rows / height + 0.5)) * across


def candidates(p: Problem) -> list[Config]:
    """All configurations that are worth predicting."""
    found = []
    for two_ctas in (False,) if p.one_cta else (False, True):
        for width in WIDTHS:
            per_block = width // 2 if two_ctas else width
            if per_block % (64 if p.b_lies_plain else 16) or width >= 2 * max(p.n, 64) or (two_ctas and p.m <= 128):
                continue
            if p.num_groups and width * p.out_itemsize % STEP_BYTES:  # TMA begins a piece at any row.
                continue
            scales = (1 + -(-width // 128)) * SCALES if p.itemsize == 1 else 0
            accumulators = min(2, (TMEM_COLUMNS - scales) // (width * (1 + p.is_gated)))
            found.append(Config(tile_n=width, two_ctas=two_ctas, num_accumulators=accumulators))
    return found


def step_times(config: Config, p: Problem, c: Constants = B200) -> dict[str, float]:
    """Microseconds of a step of K by what could bound it: the longest does."""
    width = config.tile_n * (1 + p.is_gated)
    products = 2 * config.tile_m * width * (STEP_BYTES // p.itemsize) / (c.products * 2 / p.itemsize)
    nbytes = STEP_BYTES * (config.tile_m + width // config.cluster_m)
    cycles = {"tensor cores": products, "shared memory": 2 * nbytes / c.shared, "copies": nbytes / c.copy}
    return {name: count / c.clock / 1e3 for name, count in cycles.items()}


def predict(config: Config, p: Problem, c: Constants = B200) -> float:
    """Microseconds of the product on one B200, as predicted."""
    tiles = p.tiles(config)
    sums = -(-p.k * p.itemsize // STEP_BYTES) * max(step_times(config, p, c).values())
    stored = c.tile + c.tile_values * config.tile_m * config.tile_n / 32768
    waves = -(-tiles // (p.num_sms // config.cluster_m))
    # With two accumulators only the last tile's stores are not hidden.
    time = waves * max(sums, stored) + stored if config.num_accumulators == 2 else waves * (sums + stored)
    matrices = min(p.num_groups, p.m) or 1
    nbytes = p.itemsize * p.k * (p.m + matrices * p.n * (1 + p.is_gated)) + p.out_itemsize * p.m * p.n
    return c.start + max(time, nbytes / c.hbm / 1e6)


@functools.lru_cache(4096)
def best(p: Problem) -> Config:
    """The configuration of the least predicted time; of equal ones, that of the larger tile."""
    return ranked(p)[0]


def ranked(p: Problem) -> list[Config]:
    """All candidates, that of the least predicted time first; of groups, if times are equal, that which computes the
    fewest rows of other groups."""
    blocks = lambda config: p.tiles(config) * config.cluster_m * config.tile_n if p.num_groups else 0
    key = lambda config: (predict(config, p), blocks(config), -math.prod((config.tile_n, config.cluster_m)))
    return sorted(candidates(p), key=key)


def to_try(p: Problem, count: int = 8) -> list[Config]:
    """Configurations worth timing on a B200: the `count` of the least predicted time, and each with what the model
    does not know: tiles handed out by launch control, two warpgroups that store."""
    found = []
    for config in ranked(p)[:count]:
        found.append(config)
        if not p.num_groups:
            found.append(dataclasses.replace(config, schedule="dynamic"))
        halves = config.tile_n % (2 * STEP_BYTES // p.out_itemsize) == 0 if p.num_groups else config.tile_n >= 64
        if halves:
            found.append(dataclasses.replace(config, epilogue_wgs=2))
    return found

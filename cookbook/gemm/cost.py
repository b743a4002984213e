# SPDX-License-Identifier: Apache-2.0
"""Which configuration of a product is the fastest: the ones there are, and a model of their time.

The model has one term for each thing that can bound a kernel, in microseconds: the tensor cores, the copies into shared
memory, the latency that the ring must hide, the stores, the sums of parts of K, HBM. Its constants were fitted to
measured times of many configurations (`python -m bench.fit_cost`); chapter 8 shows what it chooses.
"""

import dataclasses
import functools
import itertools
import math

from .operand import STEP_BYTES
from .plan import STAGES_MAX, owners
from .tiles import SPLIT_K_MAX, Config, resident

SMEM_FOR_RING = 194_000  # Bytes left for the ring beside the pieces on their way out.
WIDTHS = (8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240, 256)
SHAPES = ((64, 1), (128, 0), (256, 0))  # Rows of a tile, and which dimension of it the warpgroups divide.
ROWS_FIRST = 1024  # Bytes of a row along K up to which the tiles of the same rows of o follow each other.
CLUSTERS = ((1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (1, 4))


@dataclasses.dataclass(frozen=True)
class Constants:
    """Times and rates of one H200."""

    start: float = 2.02  # us of a kernel before its first copy arrives, and after its last store.
    tensor: float = 1.61  # Billion cycles a second, at which a step of 128 x 256 takes 1024.
    copy_128: float = 103.0  # Bytes a cycle that an SM copies of rows that begin at multiples of 128 bytes,
    copy_32: float = 47.7  # of 32 bytes,
    copy_16: float = 33.7  # and of 16 bytes.
    shared_copy: float = 0.466  # Share of a copy's time that is left when two blocks make it together.
    step: float = 0.0875  # us of a step that has nothing to do,
    cluster_step: float = 0.0872  # and in a cluster of several tiles as much more.
    latency: float = 1.05  # us from the start of a copy to its arrival.
    tile: float = 0.195  # us of each tile apart from its steps,
    tile_values: float = 0.196  # for each 32,768 values of it as much more,
    piece: float = 0.119  # and for each piece that a warpgroup stores.
    parts: float = 0.1  # us for each part of K that is added to another,
    parts_values: float = 4.0  # and for each 16,384 values that a block sends as much more.
    second_kernel: float = 1.4  # us of a kernel that adds them up instead.
    read: float = 4.21  # TB/s of reads from HBM,
    read_again: float = 0.1  # with as much more time for an operand that several clusters read,
    write_128: float = 3.05  # and TB/s of writes of rows that begin at multiples of 128 bytes,
    write_32: float = 3.24
    write_16: float = 2.2


H200 = Constants()


@dataclasses.dataclass(frozen=True)
class Problem:
    """An (M, K) by (N, K) product: which operand lies as (K, rows), and bytes of a value of a, b and o."""

    m: int
    n: int
    k: int
    transposed: tuple[bool, bool]
    itemsizes: tuple[int, int, int] = (2, 2, 2)
    num_sms: int = 132

    @property
    def flipped(self) -> "Problem":
        """The transposed product."""
        a, b, o = self.itemsizes
        return dataclasses.replace(self, m=self.n, n=self.m, transposed=self.transposed[::-1], itemsizes=(b, a, o))

    @property
    def is_narrow(self) -> bool:
        """Whether it has so few columns of 32 bits, such as a router's, that transposed tiles would reach beyond them:
        all of a tile is stored, and XLA cuts off the rest."""
        return self.n < 64 and self.itemsizes[2] == 4

    def pitch(self, i: int) -> int:
        """Bytes from one row to the next of operand `i`, as it lies."""
        return self.itemsizes[i] * ((self.m, self.n)[i] if self.transposed[i] else self.k)

    def cut(self, i: int) -> bool:
        """Whether TMA has to cut tiles of the swizzle at the edge of operand `i`, which lies as (K, rows)."""
        return self.transposed[i] and (self.k % 8 != 0 or (self.m, self.n)[i] % 64 != 0)


def by_alignment(pitch: int, at_128: float, at_32: float, at_16: float) -> float:
    return at_128 if pitch % 128 == 0 else at_32 if pitch % 32 == 0 else at_16


def candidates(problem: Problem) -> list[Config]:
    """All configurations that are worth predicting."""
    return [
        config
        for swapped in (False, True)
        for shape, width in itertools.product(SHAPES, WIDTHS)
        for config in _of_tile(problem.flipped if swapped else problem, *shape, width, swapped)
    ]


def _of_tile(p: Problem, tile_m: int, split_dim: int, tile_n: int, swapped: bool):
    """Configurations with this tile, of which the result fills more than half."""
    rows, cols = (tile_m, tile_n // 2) if split_dim else (tile_m // 2, tile_n)
    # Columns; only parts of K, and few of them of 32 bits, take tiles so narrow.
    unit, finest = (8, 8) if swapped or p.is_narrow else (32, 32 // p.itemsizes[2])
    least = (64 if p.transposed[1] else unit) * (1 + split_dim)
    if cols % finest or rows * cols > 64 * 256 or tile_m >= 2 * max(p.m, 65) or (tile_n > least and tile_n >= 2 * p.n):
        return
    if any(lies and mine % 64 for lies, mine in zip(p.transposed, (rows, cols), strict=True)):
        return
    if any(p.cut(i) and mine != 64 for i, mine in enumerate((rows, cols))):
        return
    # With a short K the stores take longest: tiles of the same rows of o follow each other, so that HBM's pages fill.
    short = p.k * p.itemsizes[0] <= ROWS_FIRST
    order = dict(grid_minor_dim=int(swapped), grid_tile_width=1) if short else {}
    base = Config(tile_m, tile_n, split_dim=split_dim, swapped=swapped, **order)
    grid = -(-p.m // tile_m), -(-p.n // tile_n)
    tiles = math.prod(grid)
    is_plain = cols % unit == 0
    for split_k in range(2, min(SPLIT_K_MAX, p.k // 128) + 1):
        if tiles <= resident(p.num_sms, split_k) and rows * cols <= 64 * 128:
            yield dataclasses.replace(base, split_k=split_k)
        if is_plain and tiles * split_k <= p.num_sms:
            yield dataclasses.replace(base, split_k=split_k, second_kernel=True)
    for cluster_m, cluster_n in CLUSTERS if is_plain else ():
        if grid[0] < cluster_m or grid[1] < cluster_n or (cluster_m * cluster_n > 1 and tiles < 24):
            continue
        config = dataclasses.replace(base, cluster_m=cluster_m, cluster_n=cluster_n)
        yield config
        fit, clusters = resident(p.num_sms, cluster_m * cluster_n), -(-grid[0] // cluster_m) * -(-grid[1] // cluster_n)
        if clusters > fit and clusters % fit and not p.transposed[1]:
            for split in (2, 3, 4):
                if cols % (unit * split) == 0 and clusters % fit * split <= 2 * fit and tile_n >= 96:
                    yield dataclasses.replace(config, tail_split=split)


def predict(config: Config, problem: Problem, c: Constants = H200) -> float:
    """Microseconds of the product on one H200."""
    p = problem.flipped if config.swapped else problem
    fit = resident(p.num_sms, config.cluster_m * config.cluster_n * (1 if config.second_kernel else config.split_k))
    if config.second_kernel:
        fit //= config.split_k
    grid = -(-p.m // (config.tile_m * config.cluster_m)), -(-p.n // (config.tile_n * config.cluster_n))
    clusters = math.prod(grid)
    if config.tail_split == 1:
        time = -(-clusters // fit) * tile_time(config, p, config.tile_n, c)
    else:
        whole, rest = divmod(clusters, fit)
        narrow = -(-rest * config.tail_split // fit)
        time = whole * tile_time(config, p, config.tile_n, c)
        time += narrow * tile_time(config, p, config.tile_n // config.tail_split, c)
    a, b, o = p.itemsizes
    read = p.k * sum(
        size * (1 + c.read_again * (readers > 1)) for size, readers in zip((a * p.m, b * p.n), grid[::-1], strict=True)
    )
    written = by_alignment(o * problem.n, c.write_128, c.write_32, c.write_16)
    memory = read / c.read / 1e6 + o * p.m * p.n / written / 1e6
    parts = c.second_kernel + 4e-6 * config.split_k * p.m * p.n / c.read if config.second_kernel else 0.0
    parts += c.second_kernel * (config.swapped and not config.second_kernel and problem.is_narrow)
    return c.start + parts + longer(time, memory)


def tile_time(config: Config, p: Problem, tile_n: int, c: Constants) -> float:
    """Microseconds of one tile."""
    tile_m, split_dim = config.tile_m, config.split_dim
    rows, cols = (tile_m, tile_n // 2) if split_dim else (tile_m // 2, tile_n)
    tile_k = STEP_BYTES // p.itemsizes[0]
    adds_parts = config.split_k > 1 and not config.second_kernel
    sums = 0
    if adds_parts:  # Each block receives its slice of every part.
        sums = 8 * rows * cols * config.split_k // owners(cols, config.split_k, config.swapped, p.itemsizes[2])
    stages = min(STAGES_MAX, (SMEM_FOR_RING - sums) // ((tile_m + config.tile_n) * STEP_BYTES))
    if stages < 2:
        return math.inf
    cycles = max(tile_m * tile_n / 32, 2 * (rows + cols * rows / 64))  # The tensor cores' own; or of their operands.
    share = {1: 1.0, 2: c.shared_copy, 4: c.shared_copy**1.5}
    copied = sum(
        STEP_BYTES * size * share[blocks] / by_alignment(p.pitch(i), c.copy_128, c.copy_32, c.copy_16)
        for i, (size, blocks) in enumerate(((tile_m, config.cluster_n), (tile_n, config.cluster_m)))
    )
    idle = c.step + c.cluster_step * (config.cluster_m * config.cluster_n > 1)
    step = longer(cycles / c.tensor / 1e3, copied / 1.7e3, idle, c.latency / stages)
    width = next(width for width in (64, 32, 16, 8) if cols % width == 0)
    values = tile_m * tile_n
    time = -(-p.k // (tile_k * config.split_k)) * step
    time += c.tile + c.tile_values * values / 32768 + c.piece * (rows // 64) * cols / width
    if adds_parts:
        others = config.split_k - 1
        time += c.parts * others + c.parts_values * values * others / config.split_k / 16384
    return time


def longer(*times: float) -> float:
    """The longest of times that overlap; where two are alike, neither hides all of the other."""
    return sum(time**4 for time in times) ** 0.25


@functools.lru_cache(4096)
def best(problem: Problem) -> Config:
    """The configuration of the least predicted time."""
    return min(candidates(problem), key=lambda config: predict(config, problem))


def ranked(problem: Problem, count: int) -> list[Config]:
    """The `count` configurations of the least predicted time, the best first: those that are worth timing."""
    return sorted(candidates(problem), key=lambda config: predict(config, problem))[:count]

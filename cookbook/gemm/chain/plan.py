# SPDX-License-Identifier: Apache-2.0
"""How a chain of products of few rows is cut up, so that all blocks of a grid have about as much to load."""

import dataclasses
import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ... import _device
from ..operand import Operand, swizzled

ROWS = 64  # Rows that a compute warpgroup multiplies.
ROWS_MAX = 128
TILE_K = 64  # Values of K of a tile: 128 bytes, the widest swizzle.
STAGES_MAX = 16
X_BYTES = 65_536  # Shared memory for the stages of x: as many as keep up with the weights' after a barrier.


@dataclasses.dataclass(frozen=True)
class Config:
    """How the products are cut up."""

    tile_n: int  # Columns of a tile of each product: so many rows of weights in a stage, twice.
    parts: int  # Parts of K of the second product, added up at the end.
    num_stages: int | None = None  # Stages of weights; None for as many as shared memory holds.
    x_stages: int | None = None  # Stages of x; None for 64 KiB of them.

    def __post_init__(self):
        if self.tile_n % 8 or not 8 <= self.tile_n <= 128:
            raise ValueError(f"{self.tile_n=} must be a multiple of 8 from 8 to 128: WGMMA")
        if not 1 <= self.parts <= 16:
            raise ValueError(f"{self.parts=} must be from 1 to 16: all are in registers together")
        for name in ("num_stages", "x_stages"):
            value = getattr(self, name)
            if value is not None and not 2 <= value <= STAGES_MAX:
                raise ValueError(f"{name}={value} must be from 2 to {STAGES_MAX}, or None")


@dataclasses.dataclass(frozen=True)
class Product:
    """A product of the chain: (rows, k) by (n, k), whose units of work are parts of K of tiles of columns.

    A step reads two tiles of weights: of the gate and of the up product, or two along K.
    """

    n: int
    k: int
    tile_n: int
    num_blocks: int
    parts: int = 1
    is_gated: bool = False

    @property
    def x_tiles(self) -> int:
        """Tiles of x of a step."""
        return 1 if self.is_gated else 2

    @property
    def num_steps(self) -> int:
        return pl.cdiv(self.k, self.x_tiles * TILE_K)

    @property
    def tiles(self) -> int:
        return pl.cdiv(self.n, self.tile_n)

    def num_units(self, block):
        """Units of a block."""
        return _device.div(self.tiles * self.parts - block + self.num_blocks - 1, self.num_blocks)

    def unit(self, block, i):
        """(first column, part, first step, end) of unit `i` of a block."""
        unit = block + i * self.num_blocks
        part = _device.rem(unit, self.parts)
        start, end = (_device.div(p * self.num_steps, self.parts) for p in (part, part + 1))
        return _device.div(unit, self.parts) * self.tile_n, part, start, end

    def weights(self, col, step) -> list:
        """(row, k) of the two tiles of weights of a step."""
        if self.is_gated:
            return [(col, step * TILE_K), (self.n + col, step * TILE_K)]
        return [(col, step * 2 * TILE_K), (col, step * 2 * TILE_K + TILE_K)]


@dataclasses.dataclass(frozen=True)
class Plan:
    """Statics of a kernel."""

    rows: int
    hidden: int
    inner: int
    dtype: jnp.dtype  # Of weights, and of what they are multiplied with.
    config: Config
    num_blocks: int
    interpreted: bool

    @property
    def compute_wgs(self) -> int:
        return pl.cdiv(self.rows, ROWS)

    @property
    def num_barriers(self) -> int:
        """Barriers of all blocks: x is normalised, the first product is stored, parts of the second are."""
        return 3

    @property
    def up(self) -> Product:
        """The gate's and the up product."""
        return Product(self.inner, self.hidden, self.config.tile_n, self.num_blocks, is_gated=True)

    @property
    def down(self) -> Product:
        return Product(self.hidden, self.inner, self.config.tile_n, self.num_blocks, self.config.parts)

    @property
    def x_operand(self) -> Operand:
        return Operand(self.dtype, ROWS * self.compute_wgs, TILE_K, transposed=False)

    @property
    def w_operand(self) -> Operand:
        return Operand(self.dtype, self.config.tile_n, TILE_K, transposed=False)

    @property
    def x_stages(self) -> int:
        return self.config.x_stages or min(STAGES_MAX, X_BYTES // (self.x_operand.rows * TILE_K * 2))

    def _scratch(self, num_stages: int) -> dict:
        x, w = self.x_operand, self.w_operand
        double = (num_stages, 2, *w.tile)
        return dict(
            x_smem=x.smem(self.x_stages, self.interpreted),
            w_smem=swizzled(double, self.dtype, w.piece, w.swizzle, self.interpreted),
            x_filled=_device.barriers(self.x_stages),
            x_freed=_device.barriers(self.x_stages, self.compute_wgs),
            w_filled=_device.barriers(num_stages, 2),
            w_freed=_device.barriers(num_stages, self.compute_wgs),
        )

    @property
    def num_stages(self) -> int:
        """Stages of weights.

        Raises:
          ValueError: they do not fit.
        """
        fits = lambda count: _device.smem_bytes(self._scratch(count)) <= _device.SMEM_BYTES_MAX
        wanted = self.config.num_stages or 2
        if not fits(wanted):
            raise ValueError(
                f"num_stages={wanted} of {self.config.tile_n=} beside {self.x_stages} stages of x need "
                f"{_device.smem_bytes(self._scratch(wanted))} bytes of shared memory, and a block has "
                f"{_device.SMEM_BYTES_MAX}: fewer stages or a smaller tile"
            )
        return self.config.num_stages or next(filter(fits, range(STAGES_MAX, 1, -1)))

    @property
    def scratch(self) -> dict:
        scratch = self._scratch(self.num_stages)
        if self.interpreted:
            scratch["ready"] = plgpu.ClusterBarrier(
                collective_axes=("block",), num_arrivals=self.compute_wgs, num_barriers=self.num_barriers
            )
        return scratch

    def rings(self, x_smem, w_smem, x_filled, x_freed, w_filled, w_freed) -> "Rings":
        (x, x_tma), (w, w_tma) = (
            operand.views(smem, self.interpreted)
            for operand, smem in ((self.x_operand, x_smem), (self.w_operand, w_smem))
        )
        return Rings(
            _device.Ring(x_filled, x_freed, self.x_stages), _device.Ring(w_filled, w_freed, self.num_stages),
            x, x_tma, w, w_tma,
        )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Rings:
    """The rings of x and of the weights: they fill apart, since weights do not wait for the product before."""

    of_x: _device.Ring
    of_w: _device.Ring
    x: _device.Ref  # As tensor cores read them.
    x_tma: _device.Ref  # As TMA writes them.
    w: _device.Ref
    w_tma: _device.Ref


@functools.lru_cache(1024)
def default_config(hidden: int, inner: int, num_sms: int = 132) -> Config:
    """The configuration with which the busiest block loads the least, few parts first."""

    def steps(config: Config) -> float:
        """Rows of weights times values of K, in tiles, of the busiest block, and what each step and unit costs."""
        products = (
            Product(inner, hidden, config.tile_n, num_sms, is_gated=True),
            Product(hidden, inner, config.tile_n, num_sms, config.parts),
        )
        time = 0.01 * config.parts
        for p in products:
            units = pl.cdiv(p.tiles * p.parts, num_sms)
            time += units * (pl.cdiv(p.num_steps, p.parts) * (config.tile_n + 16) / 80 + 1)
        return time

    tiles = [n for n in range(16, 65, 8) if inner % n == 0]
    most = min(16, pl.cdiv(inner, 2 * TILE_K))
    return min((Config(n, parts) for n in tiles for parts in range(1, most + 1)), key=steps)

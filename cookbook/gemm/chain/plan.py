# SPDX-License-Identifier: Apache-2.0
"""A chain of products of few rows: its stages, and how each is cut up so that all blocks have about as much to load."""

import dataclasses
import functools

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ... import _device
from ..operand import Operand, swizzled

ROWS = 64  # Rows that a compute warpgroup multiplies.
ROWS_MAX = 128
TILE_K = 64  # Values of K of a tile: 128 bytes, the widest swizzle.
STAGES_MAX = 16
PARTS_MAX = 16
TURNS = 0
X_BYTES = 65_536  # Shared memory for the stages of x: as many as keep up with the weights' after a barrier.


@dataclasses.dataclass(frozen=True)
class Cut:
    """How a product is cut up."""

    tile_n: int  # Columns of a tile.
    parts: int = 1  # Parts of K, which the next stage adds up.

    def __post_init__(self):
        if self.tile_n % 8 or not 8 <= self.tile_n <= 128:
            raise ValueError(f"{self.tile_n=} must be a multiple of 8 from 8 to 128, as WGMMA takes it")
        if not 1 <= self.parts <= PARTS_MAX:
            raise ValueError(f"{self.parts=} must be from 1 to {PARTS_MAX}")


@dataclasses.dataclass(frozen=True)
class Product:
    """A stage: `x` times `weights`, whose units of work are parts of K of tiles of columns. The results of each part
    go to `out`, float32; gated, `out` is activation(gate) * up, of the weights' dtype.

    A step reads two tiles of weights: of the gate and of the up product, or two along K.
    """

    x: str
    weights: str
    out: str
    n: int
    k: int
    cut: Cut
    num_blocks: int
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
        return pl.cdiv(self.n, self.cut.tile_n)

    def num_units(self, block):
        """Units of a block."""
        return _device.div(self.tiles * self.cut.parts - block + self.num_blocks - 1, self.num_blocks)

    def unit(self, block, i):
        """(first column, part, first step, end) of unit `i` of a block."""
        unit, parts = block + i * self.num_blocks, self.cut.parts
        part = _device.rem(unit, parts)
        start, end = (_device.div(p * self.num_steps, parts) for p in (part, part + 1))
        return _device.div(unit, parts) * self.cut.tile_n, part, start, end

    def turned(self, block, step, start, end):
        """The `step` of a unit that `block` does in its place: blocks begin at different ones, for all read one x."""
        if not TURNS:
            return step
        return start + _device.rem(step - start + block * TURNS, end - start)

    def places(self, col, step) -> list:
        """(row, k) of the two tiles of weights of a step."""
        if self.is_gated:
            return [(col, step * TILE_K), (self.n + col, step * TILE_K)]
        return [(col, step * 2 * TILE_K), (col, step * 2 * TILE_K + TILE_K)]


@dataclasses.dataclass(frozen=True)
class Normalize:
    """A stage: `y` = RMSNorm of the sum of `arrays`, and of the parts of `product` if there is one, times `scale`. The
    sum goes to `total`."""

    arrays: tuple[str, ...]
    scale: str
    y: str
    total: str | None
    cols: int
    product: Product | None = None


@dataclasses.dataclass(frozen=True)
class AddParts:
    """A stage: `out` = the sum of the parts of `product`."""

    product: Product
    out: str


Stage = Product | Normalize | AddParts


@dataclasses.dataclass(frozen=True)
class Plan:
    """Statics of a kernel."""

    rows: int
    dtype: jnp.dtype  # The weights', and that of what they are multiplied with.
    stages: tuple[Stage, ...]
    num_blocks: int
    num_stages_wanted: int | None
    x_stages_wanted: int | None
    interpreted: bool

    @property
    def compute_wgs(self) -> int:
        return pl.cdiv(self.rows, ROWS)

    @property
    def num_barriers(self) -> int:
        """Barriers of all blocks: one between two stages."""
        return len(self.stages) - 1

    @property
    def products(self) -> list[Product]:
        return [stage for stage in self.stages if isinstance(stage, Product)]

    @property
    def tile_n_max(self) -> int:
        return max(product.cut.tile_n for product in self.products)

    @property
    def x_operand(self) -> Operand:
        return Operand(self.dtype, ROWS * self.compute_wgs, TILE_K, transposed=False)

    def w_operand(self, tile_n: int) -> Operand:
        return Operand(self.dtype, tile_n, TILE_K, transposed=False, narrow=tile_n < self.tile_n_max)

    @property
    def x_stages(self) -> int:
        return self.x_stages_wanted or min(STAGES_MAX, X_BYTES // (self.x_operand.rows * TILE_K * 2))

    def _scratch(self, num_stages: int) -> dict:
        x, w = self.x_operand, self.w_operand(self.tile_n_max)
        return dict(
            x_smem=x.smem(self.x_stages, self.interpreted),
            w_smem=swizzled((num_stages, 2, *w.tile), self.dtype, w.piece, w.swizzle, self.interpreted),
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
        fits = lambda count: _device.smem_bytes(self._scratch(count)) <= _device.SMEM_BYTES_MAX - 1024
        wanted = self.num_stages_wanted or 2
        if not fits(wanted):
            raise ValueError(
                f"num_stages={wanted} of tiles of {self.tile_n_max} columns beside {self.x_stages} stages of x need "
                f"{_device.smem_bytes(self._scratch(wanted))} bytes of shared memory, and a block has "
                f"{_device.SMEM_BYTES_MAX}: fewer stages or a smaller tile"
            )
        return self.num_stages_wanted or next(filter(fits, range(STAGES_MAX, 1, -1)))

    @property
    def scratch(self) -> dict:
        scratch = self._scratch(self.num_stages)
        if self.interpreted:
            scratch["ready"] = plgpu.ClusterBarrier(
                collective_axes=("block",), num_arrivals=self.compute_wgs, num_barriers=self.num_barriers
            )
        return scratch

    def rings(self, x_smem, w_smem, x_filled, x_freed, w_filled, w_freed) -> "Rings":
        x_views, w_views = (
            operand.views(smem, self.interpreted)
            for operand, smem in ((self.x_operand, x_smem), (self.w_operand(self.tile_n_max), w_smem))
        )
        of_x = _device.Ring(x_filled, x_freed, self.x_stages)
        return Rings(of_x, _device.Ring(w_filled, w_freed, self.num_stages), *x_views, *w_views)


@dataclasses.dataclass(frozen=True)
class Rings:
    """The rings of x and of the weights: they fill apart, since weights do not wait for the product before."""

    of_x: _device.Ring
    of_w: _device.Ring
    x: _device.Ref  # As tensor cores read them.
    x_tma: _device.Ref  # As TMA writes them.
    w: _device.Ref
    w_tma: _device.Ref


@functools.lru_cache(4096)
def cut_of(rows: int, n: int, k: int, is_gated: bool, num_sms: int = 132) -> Cut:
    """The cut of the least predicted time: of the copies of the busiest block, and of parts that are added up."""

    def microseconds(cut: Cut) -> float:
        product = Product("", "", "", n, k, cut, num_sms, is_gated)
        units = pl.cdiv(product.tiles * cut.parts, num_sms)
        steps = pl.cdiv(product.num_steps, cut.parts)
        # 32 bytes of weights a ns and SM; a block's x comes from L2, at about twice that.
        step = max((2 * cut.tile_n * 2 * TILE_K) / 32, product.x_tiles * ROWS * 2 * TILE_K / 60, 100) / 1e3
        return units * (steps * step + 0.3) + (0 if is_gated else cut.parts * rows * n * 8 / 3e6)

    widths = [width for width in range(16, 65, 8) if not is_gated or n % width == 0]
    most = 1 if is_gated else min(PARTS_MAX, pl.cdiv(k, 2 * TILE_K))
    return min((Cut(width, parts) for width in widths for parts in range(1, most + 1)), key=microseconds)

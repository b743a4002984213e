# SPDX-License-Identifier: Apache-2.0
"""The plan of Blackwell's matrix products: how a product is cut up, and the statics of its kernel.

Tiles, their order and operands come from `cookbook.gemm.plan`, which this family is built on. Two things
differ from Hopper. Sums lie in tensor memory (TMEM), 512 columns of 128 lanes, and not in registers: two accumulators
fit, so that one is stored while the other is summed. And two blocks of a cluster may work as a pair (`two_ctas`), whose
tensor cores multiply together: each holds its own rows of a and half of b's, and both use all of b.

`kernel.py` has the kernel, `cost.py` chooses the configuration.
"""

import dataclasses
import math
from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from .. import _device, _host
from ..gemm.grouped.plan import RowTiles
from ..gemm.operand import STEP_BYTES, Operand, swizzled
from ..gemm.plan import slots_of_ring
from ..gemm.tiles import Tiles

LOAD, MULTIPLY, STORE = 0, 1, 2  # Warpgroups by role; those from STORE on store.
LANES = 128  # Rows of tensor memory, and of an accumulator.
TMEM_COLUMNS = 512  # Columns of 32 bits that tensor memory has.
SCHEDULES = ("static", "dynamic")
BLOCK = 32  # Values along K that share a scale.
SCALES = STEP_BYTES // BLOCK  # Scales of a row in a step of 8-bit values.


@dataclasses.dataclass(frozen=True)
class Config:
    """How a product is cut up, and which of Blackwell's means it uses."""

    tile_m: int = 128  # Rows of o per block: the lanes of tensor memory.
    tile_n: int = 256  # Columns of o per block, or with `two_ctas` a pair of blocks, each with its own rows.
    two_ctas: bool = False  # Two blocks multiply together, each with half of b's tile: twice the products per byte.
    num_stages: int | None = None  # Slots of the ring; None for as many as shared memory holds.
    # Tiles whose sums are in tensor memory at a time: with two, one is stored under the products of the next.
    num_accumulators: int = 2
    # "static": a block an SM, each with tiles that it knows from the start. "dynamic": a block a tile; a running block
    # cancels the launch of the next and computes its tile itself (cluster launch control).
    schedule: str = "static"
    epilogue_tile_n: int | None = None  # Columns that leave tensor memory at a time; None for 128 bytes of o.
    epilogue_wgs: int = 1  # Warpgroups that store a tile, each its share of the columns.
    store_slots: int = 2  # Pieces of o of each of them that TMA may be storing at a time.
    grid_minor_dim: int = 0  # The dimension of the grid of tiles along which the snake runs: 0 for M, 1 for N.
    grid_tile_width: int = 8  # Tiles, or pairs of blocks, across the snake.

    def __post_init__(self):
        if self.tile_m != LANES:
            raise ValueError(f"{self.tile_m=} must be {LANES}, the lanes of tensor memory")
        unit = 32 if self.two_ctas else 16
        if not unit <= self.tile_n <= 256 or self.tile_n % unit:
            raise ValueError(
                f"{self.tile_n=} must be a multiple of {unit} of at most 256, the widest product of tcgen05, with "
                f"{self.two_ctas=}"
            )
        if self.num_accumulators not in (1, 2):
            raise ValueError(f"{self.num_accumulators=} must be 1 or 2: tensor memory has {TMEM_COLUMNS} columns")
        if self.schedule not in SCHEDULES:
            raise ValueError(f"{self.schedule=} must be one of {SCHEDULES}")
        if self.num_stages is not None and self.num_stages < 2:
            raise ValueError(f"{self.num_stages=} must be at least 2: one is filled while another is multiplied")
        if self.epilogue_wgs not in (1, 2):
            raise ValueError(f"{self.epilogue_wgs=} must be 1 or 2: with two others they share the registers of an SM")
        if self.grid_minor_dim not in (0, 1):
            raise ValueError(f"{self.grid_minor_dim=} must be 0 (M) or 1 (N)")
        if min(self.grid_tile_width, self.store_slots) < 1:
            raise ValueError(f"{self.grid_tile_width=} and {self.store_slots=} must be at least 1")

    # `Tiles` asks for these, and gradients of `ragged_dot` for the last.
    cluster_n = split_k = tail_split = 1
    swapped = False

    @property
    def cluster_m(self) -> int:
        """Blocks of a cluster, one below the other."""
        return 2 if self.two_ctas else 1

    @property
    def is_dynamic(self) -> bool:
        return self.schedule == "dynamic"


@dataclasses.dataclass(frozen=True)
class Plan:
    """Statics of one kernel: its tiles, its operands, and what becomes of its sums."""

    tiles: Tiles
    a: Operand
    b: Operand
    activation: Callable  # Element-wise, of sums in registers.
    out_dtype: jnp.dtype
    scaled: bool  # Operands are MXFP8, with scales.
    interpreted: bool

    # `gemm.grouped.plan.each_tile` asks for these: tiles that it looks up are those of a pair, not of its blocks.
    axis_m = axis_n = None

    @property
    def config(self) -> Config:
        return self.tiles.config

    @property
    def pair(self) -> str | None:
        """Name of the axis of a pair of blocks, which load and multiply together."""
        return "block_m" if self.config.two_ctas else None

    @property
    def clusters(self) -> int:
        """Clusters that the grid launches: as many as run at a time, or one a tile, most of which are cancelled."""
        return math.prod(self.tiles.grid) if self.config.is_dynamic else self.tiles.clusters

    @property
    def store_piece(self) -> tuple[int, int]:
        """Rows and columns of a piece of o on its way out.

        Raises:
          ValueError: a warpgroup's columns are not a multiple of it, or TMA cannot swizzle it.
        """
        c, itemsize = self.config, self.out_dtype.itemsize
        cols = c.tile_n // c.epilogue_wgs
        widths = [nbytes // itemsize for nbytes in (128, 64, 32)]
        fitting = [width for width in widths if cols % width == 0]
        width = c.epilogue_tile_n or (fitting[0] if fitting else 0)
        if width not in fitting:
            raise ValueError(
                f"{c.epilogue_tile_n=} must be one of {widths} columns of {self.out_dtype} (32, 64 or 128 bytes), and "
                f"divide the {cols} that {c.tile_n=} leaves each of {c.epilogue_wgs=}"
            )
        return c.tile_m, width

    @property
    def scale_rows(self) -> tuple[int, int]:
        """Rows of scales, of a and of b, that a block holds of a step: whole units of 128; of b its pair's."""
        return LANES, -(-self.config.tile_n // LANES) * LANES

    @property
    def acc_columns(self) -> int:
        """Columns of an accumulator: those of a tile, or of two tiles where b's has a partner."""
        return (2 if self.b.partner else 1) * self.config.tile_n

    @property
    def tmem_columns(self) -> int:
        """Columns of tensor memory that are used. Scales take 4 columns for 128 rows of a step."""
        scales = sum(self.scale_rows) // LANES * SCALES if self.scaled else 0
        return self.config.num_accumulators * self.acc_columns + scales

    def _scratch(self, num_stages: int) -> dict:
        c, two = self.config, self.config.two_ctas
        copies = self.a.copies + self.b.copies + (2 if self.scaled else 0)
        piece = self.store_piece
        o_smem = (c.epilogue_wgs, c.store_slots, *piece)
        stored = dict(num_arrivals=c.epilogue_wgs, num_barriers=c.num_accumulators, orders_tensor_core=True)
        scratch = dict(
            a_smem=self.a.smem(num_stages, self.interpreted),
            b_smem=self.b.smem(num_stages, self.interpreted),
            o_smem=swizzled(o_smem, self.out_dtype, piece, piece[1] * self.out_dtype.itemsize, self.interpreted),
            acc_tmem=plgpu.TMEM((LANES, c.num_accumulators * self.acc_columns), jnp.float32, collective=two),
            filled=plgpu.Barrier(num_arrivals=copies, num_barriers=num_stages),
            freed=plgpu.Barrier(num_arrivals=1, num_barriers=num_stages, orders_tensor_core=True),
            summed=plgpu.Barrier(num_arrivals=1, num_barriers=c.num_accumulators, orders_tensor_core=True),
            stored=plgpu.ClusterBarrier(collective_axes=(self.pair,), **stored) if two else plgpu.Barrier(**stored),
        )
        if self.scaled:
            for name, rows in zip("ab", self.scale_rows, strict=True):
                scratch[f"{name}_scales_smem"] = plgpu.SMEM(
                    (num_stages, rows // LANES, 1, BLOCK, LANES // BLOCK * SCALES), jnp.float8_e8m0fnu
                )
                scratch[f"{name}_scales_tmem"] = plgpu.TMEM(
                    (rows, SCALES), jnp.float8_e8m0fnu, layout=plgpu.TMEMLayout.SCALES_LAYOUT, collective=two
                )
        return scratch

    def smem_bytes(self, num_stages: int) -> int:
        """Shared memory of a block with a ring of `num_stages`."""
        # Mosaic's own; and answers of cluster launch control.
        others = 64 + (1024 if self.config.is_dynamic else 0)
        return others + _device.smem_bytes(self._scratch(num_stages))

    @property
    def num_stages(self) -> int:
        """Slots of the ring: as the configuration says, or as many as fit."""
        return slots_of_ring(self.config, self.smem_bytes)

    @property
    def scratch(self) -> dict:
        return self._scratch(self.num_stages)

    def place(self, index):
        """(row, column) in o where this block's part of tile `index` begins."""
        return self.tiles.place(index, lax.axis_index(self.pair) if self.pair else 0, 0)

    def accumulator(self, number):
        """Which accumulator sums the tile that has `number` others of its cluster before it."""
        return _device.rem(number, self.config.num_accumulators)

    def k_start(self, step):
        """Where along K a step begins. Beyond K TMA fills in zeros."""
        return step * self.tiles.tile_k

    def source(self, operand: Operand, at, piece):
        """(start, size) along both axes of what a copy of a piece reads, of the operand's tile that begins `at`.

        A pair reads twice the rows, of which each block gets its half; the rows lie along axis `operand.transposed`.
        """
        sizes = list(operand.piece)
        starts = [start + i * size for start, i, size in zip(at, piece, sizes, strict=True)]
        sizes[operand.transposed] *= self.config.cluster_m
        return list(zip(starts, sizes, strict=True))

    def a_tile(self, slot_smem):
        """A slot's tile of a, as (M, K)."""
        return slot_smem.T if self.a.transposed else slot_smem.at[0, 0]

    def b_tiles(self, slot_smem):
        """A slot's tile of b, and its partner where it has one, as (K, N)."""
        tiles = [slot_smem.at[i] for i in range(2)] if self.b.partner else [slot_smem]
        return tiles if self.b.transposed else [tile.at[0, 0].T for tile in tiles]

    def scales_at(self, row, col):
        """The units of 128 rows where the scales of a tile at `row` and `col` begin: of a's scales, and of b's."""
        return _device.div(row, LANES), _device.div(col, self.config.tile_n) * (self.scale_rows[1] // LANES)


def plan_of(m, n, k, dtype, transposed, activation, out_dtype, config: Config, target: _host.Target,
            scaled=False) -> Plan:  # fmt: skip
    """The plan of an (M, K) by (N, K) product; `transposed` says of a and of b whether it lies as (K, rows).

    Raises:
      ValueError: the configuration does not fit the operands.
    """
    operands = operands_of(dtype, transposed, config)
    tiles = Tiles(m, n, k, operands[0].tile_k, config, target.num_sms)
    return fitting(Plan(tiles, *operands, activation, jnp.dtype(out_dtype), scaled, target.interpreted))


def row_plan(m, n, k, num_groups, dtype, transpose_rhs, activation, out_dtype, config: Config, target: _host.Target,
             is_gated=False) -> Plan:  # fmt: skip
    """The plan of (M, K) rows by (G, K, N) matrices, or (G, N, K) with `transpose_rhs`; of 2N columns if `is_gated`.

    Raises:
      ValueError: the configuration does not fit the operands, or not groups.
    """
    out_dtype = jnp.dtype(out_dtype)
    if config.is_dynamic:
        raise ValueError(f"{config.schedule=} must be 'static': how many tiles there are is known on the device alone")
    width, cols = STEP_BYTES // out_dtype.itemsize, config.tile_n // config.epilogue_wgs
    if cols % width or config.epilogue_tile_n not in (None, width):
        raise ValueError(
            f"{config.tile_n=} must leave each of {config.epilogue_wgs=} a multiple of {width} columns of {out_dtype}, "
            f"{STEP_BYTES} bytes, and {config.epilogue_tile_n=} must be {width} or None: a row of a narrower piece "
            "begins where TMA can read none"
        )
    a, b = operands_of(dtype, (False, not transpose_rhs), config)
    b = dataclasses.replace(b, stacked=True, partner=partner_of(n, transpose_rhs) if is_gated else 0)
    tiles = RowTiles(m, n, k, a.tile_k, config, target.num_sms, num_groups=num_groups)
    return fitting(Plan(tiles, a, b, activation, out_dtype, False, target.interpreted))


def partner_of(n: int, transpose_rhs: bool) -> int:
    """Columns from the gate's to the up product's, N each: TMA does not cut plain ones, which are padded."""
    return n if transpose_rhs else _host.padded_shape((n,), _device.SWIZZLE_TILE[1:])[0]


def operands_of(dtype, transposed, config: Config) -> list[Operand]:
    """a and b of a product; `transposed` says of each whether it lies as (K, rows).

    Raises:
      ValueError: a block's share of b's tile is no multiple of the swizzle.
    """
    rows = config.tile_m, config.tile_n // config.cluster_m
    if transposed[1] and rows[1] % 64:
        raise ValueError(
            f"{config.tile_n=} leaves a block {rows[1]} columns of a b that lies as (K, N): must be a multiple of 64, "
            "the columns of the 128-byte swizzle; or give b as (N, K)"
        )
    tile_k = STEP_BYTES // jnp.dtype(dtype).itemsize
    return [
        Operand(jnp.dtype(dtype), size, tile_k, lies_transposed, in_pieces=not lies_transposed)
        for size, lies_transposed in zip(rows, transposed, strict=True)
    ]


def fitting(plan: Plan) -> Plan:
    """`plan`.

    Raises:
      ValueError: its accumulators do not fit in tensor memory.
    """
    if plan.tmem_columns > TMEM_COLUMNS:
        config = plan.config
        raise ValueError(
            f"{config.num_accumulators=} of {config.tile_n=}"
            f"{', for the gate and for the up product,' if plan.b.partner else ''} need "
            f"{plan.tmem_columns} columns of tensor memory{' with the scales' * plan.scaled}, which has "
            f"{TMEM_COLUMNS}: fewer accumulators or columns"
        )
    return plan


def require_interpretable(op: str, config: Config, target: _host.Target) -> None:
    """Raises RuntimeError where JAX's interpreter is to run what it cannot."""
    if not target.interpreted:
        return
    for name, is_used, lacks in (
        ("two_ctas=True", config.two_ctas, "collective MMA"),
        ('schedule="dynamic"', config.is_dynamic, "cluster launch control"),
    ):
        if is_used:
            raise RuntimeError(
                f"{_host.PACKAGE}.{op}: config has {name}, and JAX's interpreter has no {lacks}. Interpret the same "
                "tiles "
                f'without it, and compile this configuration (`lab.compile_for("b200", ...)`)'
            )

# SPDX-License-Identifier: Apache-2.0
"""The plan of a kernel: how operands (`operand.py`) and tiles (`tiles.py`) go together, what becomes of the sums.

The kernel sees two operands, `a` of M rows and `b` of N rows, both along K; each may lie transposed, as (K, rows). A
plain (K, N) matrix is therefore a transposed `b`. With `swapped` the two operands are exchanged (`launch.py`), and with
them M and N; the tile is transposed on its way out (`kernel.store`), and nothing else has to know.

`kernel.py` has the kernel, `cost.py` chooses the configuration.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from .. import _device
from . import exchange
from .operand import STEP_BYTES, Operand, Ring, is_cut, swizzled
from .operand import views as views
from .tiles import Config, Tiles, exchanged

COMPUTE, MEMORY = 2, 2  # Compute warpgroups, and the index of the memory warpgroup, which follows them.
STORE_ROWS = 64  # Rows of a piece of o on its way out: as many as one WGMMA has.
# Registers per thread of the memory warpgroup and of each of so many compute warpgroups: 128 threads each, and 65,536
# registers in all, which a launch hands out in multiples of 8 per thread.
REGISTERS = {2: (40, 232), 4: (32, 112)}
MEMORY_REGISTERS, COMPUTE_REGISTERS = REGISTERS[COMPUTE]
FEW_ROWS = 16  # Rows of a tile; with 48 and more all slots that fit are faster.
STAGES_MAX = 12  # More slots than this hide no more latency.


def identity(x):
    """No activation."""
    return x


def owners(cols: int, parts: int, swapped: bool, itemsize: int) -> int:
    """How many of `parts` blocks can add up a slice each of `cols` columns: each has whole pieces to store."""
    unit = 8 if swapped else 32 // itemsize
    return max((n for n in range(1, parts + 1) if cols % n == 0 and cols // n % unit == 0), default=1)


@dataclasses.dataclass(frozen=True)
class Plan:
    """Statics of one kernel: its tiles, its operands, and what becomes of its sums."""

    tiles: Tiles
    a: Operand
    b: Operand
    activation: Callable  # Element-wise, of sums in registers.
    out_dtype: jnp.dtype
    interpreted: bool
    others: tuple[tuple[str, Any], ...] = ()  # Further scratch of this kernel, not counted in `smem_bytes`.
    num_sums: int = 1  # Sums that a value of o is made of. Those of a warpgroup lie one below the other.
    four_bits: Any = None  # The format of operand a, if its values have 4 bits: `Integers` or `E2M1`.

    @property
    def config(self) -> Config:
        return self.tiles.config

    @property
    def phases(self) -> list["Plan"]:
        """The plan of whole tiles, and after it that of the narrower ones of the last wave, where there are any."""
        tail = dataclasses.replace(self.tiles, is_tail=True)
        if not tail.count:
            return [self]
        b = dataclasses.replace(self.b, rows=self.b.rows // self.config.tail_split, narrow=True)
        return [self] * (self.tiles.whole > 0) + [dataclasses.replace(self, tiles=tail, b=b)]

    @property
    def compute_tile(self) -> tuple[int, int]:
        """Rows and columns of o that one compute warpgroup accumulates."""
        rows, cols = self.config.compute_tile
        return rows, cols // self.config.tail_split if self.tiles.is_tail else cols

    @property
    def stored_dtype(self) -> jnp.dtype:
        """Dtype of the values that the kernel stores: its result, or sums that XLA has yet to add up."""
        return jnp.dtype(jnp.float32) if self.config.second_kernel else self.out_dtype

    @property
    def owners(self) -> int:
        """Blocks of a cluster that add up a slice each of the parts' sums: as many as have whole pieces to store."""
        if not self.adds_parts:
            return 1
        return owners(self.compute_tile[1], self.config.split_k, self.swapped, self.stored_dtype.itemsize)

    @property
    def swapped(self) -> bool:
        """Whether tiles are transposed on their way out; parts of K are not, before they are added up by XLA."""
        return self.config.swapped and not self.config.second_kernel

    @property
    def adds_parts(self) -> bool:
        """Whether the blocks of a cluster are parts of K, which they add up."""
        return self.config.split_k > 1 and not self.config.second_kernel

    @property
    def slice_tile(self) -> tuple[int, int]:
        """Rows and columns of what a compute warpgroup stores of a tile."""
        rows, cols = self.compute_tile
        return rows, cols // self.owners

    @property
    def store_piece(self) -> tuple[int, int]:
        """Rows and columns of a piece of the tile on its way out: the most columns that divide it and are swizzled."""
        cols = self.config.compute_tile[1] // self.owners // self.config.tail_split
        if self.swapped:
            return STORE_ROWS, max(width for width in (8, 16, 32, 64) if cols % width == 0)
        widths = [swizzle // self.stored_dtype.itemsize for swizzle in (32, 64, 128)]
        if cols % widths[0]:
            raise ValueError(
                f"tile_n={self.config.tile_n} leaves {cols} columns of {self.stored_dtype} to store at once: must be a "
                f"multiple of {widths[0]}, 32 bytes (or swapped=True)"
            )
        return STORE_ROWS, max(width for width in widths if cols % width == 0)

    @property
    def store_pieces(self) -> list[tuple[int, int]]:
        """Row and column of each piece of what a compute warpgroup stores of a tile."""
        (rows, cols), (height, width) = self.slice_tile, self.store_piece
        return list(itertools.product(range(0, rows, height), range(0, cols, width)))

    @property
    def stores_directly(self) -> bool:
        """Whether results go to o from registers: transposed ones of 32 bits cannot be transposed in shared memory."""
        return self.swapped and self.stored_dtype.itemsize == 4

    def _scratch(self, num_stages: int) -> dict:
        c, interpreted = self.config, self.interpreted
        axes = tuple(axis for axis in (self.axis_m, self.axis_n) if axis)
        freed = functools.partial(plgpu.ClusterBarrier, collective_axes=axes) if axes else plgpu.Barrier
        scratch = dict(
            a_smem=self.a.smem(num_stages, interpreted),
            b_smem=self.b.smem(num_stages, interpreted),
            filled=plgpu.Barrier(num_arrivals=self.copies, num_barriers=num_stages),
            freed=freed(num_arrivals=c.warpgroups, num_barriers=num_stages),
        )
        for name, dtype, size in self.of_groups:
            groups = max(1, self.tiles.tile_k // size)
            scratch[f"{name}_smem"] = plgpu.SMEM((num_stages, groups, c.tile_m), dtype)
        if not self.stores_directly:
            piece = exchanged(self.store_piece, self.swapped)
            swizzle = piece[1] * self.stored_dtype.itemsize
            scratch["o_smem"] = swizzled(
                (c.warpgroups, c.store_slots, *piece), self.stored_dtype, piece, swizzle, interpreted
            )
        if self.adds_parts:
            scratch["met"] = plgpu.ClusterBarrier(collective_axes=("part",), num_arrivals=c.warpgroups)
        if self.adds_parts and not interpreted:  # The interpreter has no stores to other blocks: see `add_parts`.
            rows, cols = self.slice_tile
            shape = (c.warpgroups, c.split_k, rows * self.num_sums, cols)
            scratch["sums_smem"] = plgpu.SMEM(shape, jnp.float32, transforms=self.sums_transforms)
            scratch["arrived"] = plgpu.SMEM((c.warpgroups, exchange.WORDS), jnp.int32)
        return scratch

    @property
    def sums_transforms(self) -> tuple:
        """How slices of sums of other parts lie in shared memory."""
        swizzle = max(size for size in (32, 64, 128) if 4 * self.slice_tile[1] % size == 0)
        return plgpu.TilingTransform((8, swizzle // 4)), plgpu.SwizzleTransform(swizzle)

    @property
    def received_bytes(self) -> int:
        """Bytes that a compute warpgroup of an owner receives of the sums of other parts."""
        return 4 * (self.config.split_k - 1) * self.num_sums * math.prod(self.slice_tile)

    @property
    def of_groups(self) -> tuple[tuple[str, jnp.dtype, int], ...]:
        """Arrays of (groups along K, rows of a) that a step reads beside its tiles: name, dtype and size of a group."""
        return self.four_bits.of_groups if self.four_bits else ()

    @property
    def copies(self) -> int:
        """Copies of a step."""
        return self.a.copies + self.b.copies + len(self.of_groups)

    @property
    def axis_m(self) -> str | None:
        """Name of the axis of a cluster's blocks along M, which share b's tile."""
        return "block_m" if self.config.cluster_m > 1 else None

    @property
    def axis_n(self) -> str | None:
        return "block_n" if self.config.cluster_n > 1 else None

    @property
    def cluster(self) -> dict[str, int]:
        """Names and sizes of the axes of a cluster of blocks."""
        if self.adds_parts:
            return dict(part=self.config.split_k)
        axes = (self.axis_m, self.config.cluster_m), (self.axis_n, self.config.cluster_n)
        return {axis: size for axis, size in axes if axis}

    def smem_bytes(self, num_stages: int) -> int:
        """Shared memory of a block with a ring of `num_stages`."""
        return _device.smem_bytes(self._scratch(num_stages))

    @property
    def num_stages(self) -> int:
        """Slots of the ring: as the configuration says, or as many as fit. Beside the conversion of 4-bit weights
        for few rows a division for each slot's number counts, so they are a power of two."""
        slots = slots_of_ring(self.config, self.smem_bytes)
        is_given = self.config.num_stages or not self.four_bits or self.config.tile_n > FEW_ROWS
        return slots if is_given else 1 << slots.bit_length() - 1

    @property
    def scratch(self) -> dict:
        return self._scratch(self.num_stages) | dict(self.others)

    def ring(self, a_smem, b_smem, filled, freed, *of_groups) -> Ring:
        """The ring in a kernel's scratch."""
        (a, a_tma), (b, b_tma) = self.a.views(a_smem, self.interpreted), self.b.views(b_smem, self.interpreted)
        return Ring(filled, freed, self.num_stages, a, b, a_tma, b_tma, of_groups)

    def num_tiles(self):
        """How many tiles this block computes."""
        return self.tiles.of_cluster(lax.axis_index("cluster"))

    def k_start(self, step):
        """Where along K `step` of this block's part begins."""
        return (self.part * self.tiles.num_steps + step) * self.tiles.tile_k

    def place(self, tile):
        """(row, column) in o where this block's `tile` begins."""
        blocks = (lax.axis_index(axis) if axis else 0 for axis in (self.axis_m, self.axis_n))
        return self.tiles.place(lax.axis_index("cluster") + tile * self.tiles.clusters, *blocks)

    @property
    def part(self):
        """Which part of K this block sums."""
        return 0 if self.config.split_k == 1 else lax.axis_index("part")

    def share(self, place):
        """(row, column) in o of what this compute warpgroup accumulates of a tile that begins at `place`."""
        role = lax.axis_index("role")
        return tuple(
            start + role * size if self.config.split_dim == dim else start
            for dim, (start, size) in enumerate(zip(place, self.compute_tile, strict=True))
        )


def slots_of_ring(config, smem_bytes: Callable) -> int:
    """Slots of the ring: `config.num_stages`, or as many as fit, where a block with n of them takes `smem_bytes(n)`.

    Raises:
      ValueError: they do not fit.
    """
    wanted = config.num_stages or 2
    if (needed := smem_bytes(wanted)) > _device.SMEM_BYTES_MAX:
        raise ValueError(
            f"num_stages={wanted} of {config.tile_m=}, {config.tile_n=} need {needed} bytes of shared memory, and a "
            f"block has {_device.SMEM_BYTES_MAX}: fewer stages, fewer store slots or smaller tiles"
        )
    fitting = (count for count in range(STAGES_MAX, 1, -1) if smem_bytes(count) <= _device.SMEM_BYTES_MAX)
    return config.num_stages or next(fitting)


def plan_of(m, n, k, dtypes, transposed, activation, out_dtype, config: Config, num_sms=132,
            interpreted=False) -> Plan:  # fmt: skip
    """The plan of an (M, K) by (N, K) product; `dtypes` and `transposed` (it lies as (K, rows)) are of a and of b."""
    (m, n), dtypes, transposed = (exchanged(pair, config.swapped) for pair in ((m, n), dtypes, transposed))
    tile_k = STEP_BYTES // dtypes[0].itemsize
    operands = []
    for name, rows, tile, mine, dtype, lies_transposed in zip(
        "ab", (m, n), (config.tile_m, config.tile_n), config.compute_tile, dtypes, transposed, strict=True
    ):
        in_pieces = not lies_transposed or (is_cut(k, rows) and mine == 64)
        if lies_transposed and mine % 64:
            raise ValueError(
                f"tile_{'mn'[name == 'b']}={tile} leaves a warpgroup {mine} rows of an operand that lies as (K, rows): "
                "must be a multiple of 64, the columns of the 128-byte swizzle"
            )
        operands.append(Operand(dtype, tile, tile_k, lies_transposed, in_pieces))
    if config.tail_split > 1 and transposed[1]:
        raise ValueError(
            f"{config.tail_split=} cuts tiles of an operand that lies as (K, rows), which TMA copies whole: must be 1 "
            "unless b is given as (N, K), or a plain one is `swapped`"
        )
    return Plan(Tiles(m, n, k, tile_k, config, num_sms), *operands, activation, out_dtype, interpreted)

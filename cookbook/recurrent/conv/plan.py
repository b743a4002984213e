# SPDX-License-Identifier: Apache-2.0
"""How a causal convolution is cut into blocks, and what a block does with a row: shared by both kernels.

A block has a *part*, a run of rows of one sequence, and a *tile*, neighbouring columns. It walks down the rows, and its
threads keep the last W - 1 of them in registers. So it reads each row once, and W - 1 rows before its part again.
"""

import dataclasses
import functools
import math

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ... import _device, _host
from ..._device import WARPGROUP, Index, Ref, div
from ..sequences import Sequences

COLUMNS_MIN = WARPGROUP  # A column for each thread.
LOG2E = math.log2(math.e)
BLOCKS_PER_SM = 8  # More blocks than find room on an SM, so that few SMs idle at the end.
LEAST_ROWS, MOST_ROWS = 16, 128  # A part has so many. It reads W - 1 rows and the weights besides its own rows.


@dataclasses.dataclass(frozen=True)
class Config:
    part_rows: int = 64  # Rows that a block walks through.
    rows_at_once: int = 8  # Rows that a thread loads before it computes: loads in flight.
    vec: int = 4  # Neighbouring columns of a thread. It has 2 W values in registers for each.
    loads_ahead: bool = True  # Whether the next rows are loaded before these are computed.

    def __post_init__(self):
        if self.vec not in (1, 2, 4, 8):
            raise ValueError(f"{self.vec=}: must be 1, 2, 4 or 8, which are one load")
        if self.part_rows < 1 or not 1 <= self.rows_at_once <= 32:
            raise ValueError(
                f"{self.part_rows=} must be at least 1, and {self.rows_at_once=} from 1 to 32: a thread has 255 "
                "registers"
            )


def vec_of(columns: int, most: int) -> int:
    """Columns of a thread, at most so many: those with which tiles cover the fewest columns twice."""
    fit = [vec for vec in (8, 4, 2, 1) if vec <= most and columns % vec == 0 and vec * WARPGROUP <= columns]
    covered = lambda vec: pl.cdiv(columns, vec * WARPGROUP) * vec * WARPGROUP
    return min(fit, key=lambda vec: covered(vec) * (1 + 1 / (8 * vec)))  # Short loads are slower, too.


def default_config(
    seqs: int, length: int, columns: int, taps: int, itemsize: int, num_sms: int, gradients: bool = False
) -> Config:
    """The configuration for sequences of this length."""
    most = min(16 // itemsize, 4 if taps <= 4 else 2 if gradients else 4)
    vec = vec_of(columns, most)
    blocks = lambda rows: seqs * pl.cdiv(length, rows) * pl.cdiv(columns, vec * WARPGROUP)
    part_rows = MOST_ROWS
    while part_rows > LEAST_ROWS and blocks(part_rows) < BLOCKS_PER_SM * num_sms:
        part_rows //= 2
    return Config(part_rows, (8 if gradients else 16) // itemsize, vec)


@dataclasses.dataclass(frozen=True)
class Plan:
    """Statics of a kernel."""

    num_seqs: int
    num_rows: int  # All sequences together.
    is_packed: bool
    columns: int
    taps: int  # W.
    has_silu: bool
    config: Config
    interpreted: bool

    @property
    def length(self) -> int:
        """Rows of each sequence that is not packed."""
        return self.num_rows // self.num_seqs

    @property
    def parts_per_seq(self) -> int:
        return pl.cdiv(self.length, self.config.part_rows)

    @property
    def sequences(self) -> Sequences:
        """Packed ones, whose chunks are parts."""
        return Sequences(self.num_seqs, self.num_rows, True, self.config.part_rows, self.config.part_rows)

    @property
    def num_parts(self) -> int:
        return self.sequences.num_parts if self.is_packed else self.num_seqs * self.parts_per_seq

    @property
    def tile(self) -> int:
        """Columns of a block."""
        return WARPGROUP * self.config.vec

    @property
    def num_tiles(self) -> int:
        return pl.cdiv(self.columns, self.tile)

    @property
    def layout(self):
        return plgpu.Layout.WG_STRIDED((self.tile,), self.config.vec)

    @property
    def grid(self) -> dict:
        return dict(grid=(self.num_parts, self.num_tiles), grid_names=("part", "tile"))

    @_host.own_options()
    def table(self, cu_seqlens):
        """(num_parts, 5): the fields of `Part` that say which rows it has, for packed sequences; otherwise None.

        Rows after the last sequence are parts as well, of a sequence that ends where they begin.
        """
        if not self.is_packed:
            return None
        parts, seq = self.sequences.parts(cu_seqlens, in_order=True)
        first, _, end, _, number = parts.T
        first, end = jnp.minimum(first, self.num_rows), jnp.minimum(end, self.num_rows)  # Also where there is no part.
        starts = jnp.append(self.sequences.starts(cu_seqlens), self.num_rows)
        is_real = (number < self.num_parts) & (seq < self.num_seqs)
        at = jnp.minimum(seq, self.num_seqs)
        seq_first = jnp.where(is_real, starts[at], first)
        seq_end = jnp.where(is_real, starts[jnp.minimum(at + 1, self.num_seqs)], first)
        return jnp.stack([first, end, jnp.where(is_real, seq, self.num_seqs), seq_first, seq_end], axis=1)


@dataclasses.dataclass(frozen=True)
class Part:
    """The rows and columns of a block."""

    first_row: Index
    end: Index
    seq: Index  # `num_seqs` for rows of no sequence.
    seq_first: Index
    seq_end: Index
    columns: pl.Slice
    plan: Plan

    @classmethod
    def of_block(cls, plan: Plan, table: Ref | None):
        part, tile = lax.axis_index("part"), lax.axis_index("tile")
        vec = plan.config.vec
        # In units of `vec`, so that the compiler sees aligned loads. The last tile is shifted back to end with the row.
        column = vec * jnp.minimum(tile * WARPGROUP, (plan.columns - plan.tile) // vec)
        columns = pl.ds(column, plan.tile)
        if table is not None:
            return cls(*(table[part, field] for field in range(5)), columns, plan)
        seq = div(part, plan.parts_per_seq)
        first = seq * plan.length + (part - seq * plan.parts_per_seq) * plan.config.part_rows
        seq_end = (seq + 1) * plan.length
        end = jnp.minimum(first + plan.config.part_rows, seq_end)
        return cls(first, end, seq, seq * plan.length, seq_end, columns, plan)

    def load(self, gmem: Ref, *index):
        """A row of `gmem`, or what there is for each column, as it is stored."""
        return plgpu.load(gmem.at[(*index, self.columns)], layout=self.plan.layout)

    def load_f32(self, gmem: Ref, *index):
        return self.load(gmem, *index).astype(jnp.float32)

    def store(self, gmem: Ref, index, value):
        """Stores a row. The columns that the last two tiles share get the same values twice; the interpreter takes that
        for a race, so that there the last tile stores the new ones alone."""
        value, plan = plgpu.layout_cast(value.astype(gmem.dtype), self.plan.layout), self.plan
        shared = plan.num_tiles * plan.tile - plan.columns
        if not (plan.interpreted and shared):
            return _device.store(gmem.at[(*index, self.columns)], value)
        for is_last, skip in ((False, 0), (True, shared)):
            new = pl.ds(self.columns.start + skip, plan.tile - skip)
            store = functools.partial(_device.store, gmem.at[(*index, new)], value[skip:])
            pl.when((lax.axis_index("tile") == plan.num_tiles - 1) == is_last)(store)

    def zeros(self):
        return plgpu.layout_cast(jnp.zeros((self.plan.tile,), jnp.float32), self.plan.layout)

    def weights(self, weight_gmem: Ref, bias_gmem: Ref | None):
        """(the weights of each tap, the bias or None)."""
        weight = [self.load_f32(weight_gmem, tap) for tap in range(self.plan.taps)]
        return weight, None if bias_gmem is None else self.load_f32(bias_gmem)

    def walk(self, load, use, first, groups, carry):
        """The carry after `use(first row, loaded rows, carry)` of so many groups of rows from row `first` on.

        `load(row)` loads the group from `row` on.
        """
        at_once = self.plan.config.rows_at_once
        if not self.plan.config.loads_ahead or self.plan.num_rows < at_once:
            body = lambda i, carry: use(first + i * at_once, load(first + i * at_once), carry)
            return lax.fori_loop(0, groups, body, carry)

        def body(i, state):
            loaded, carry = state
            following = load(first + jnp.minimum(i + 1, groups - 1) * at_once)
            return following, use(first + i * at_once, loaded, carry)

        # Without a group the rows loaded are not used, but they must be there.
        loaded = load(jnp.minimum(first, self.plan.num_rows - at_once))
        return lax.fori_loop(0, groups, body, (loaded, carry))[1]

    def rows_before(self, x_gmem: Ref, initial_gmem: Ref | None):
        """The W - 1 rows before the part: of its sequence, of the initial state, or zeros."""
        rows, num = [], self.plan.taps - 1
        for i in range(num):
            row = self.first_row - num + i
            value, before = self.load_f32(x_gmem, jnp.maximum(row, 0)), self.zeros()
            if initial_gmem is not None:
                seq = jnp.minimum(self.seq, self.plan.num_seqs - 1)
                before = self.load_f32(initial_gmem, seq, jnp.clip(row - self.seq_first + num, 0, num - 1))
            rows.append(keep_if(row >= self.seq_first, value, before))
        return tuple(rows)


def keep_if(condition, value, otherwise):
    """`value` if the scalar `condition` is true."""
    return jnp.where(lax.broadcast(condition, value.shape), value, otherwise)


def convolve(weight, bias, rows):
    """The sum for the last of W `rows`, before the activation."""
    terms = [w * row for w, row in zip(weight, rows, strict=True)]
    return functools.reduce(jnp.add, terms if bias is None else [bias, *terms])


def sigmoid(z):
    """1 / (1 + exp(-z)): a root and a product are quicker than a division."""
    root = lax.rsqrt(1.0 + jnp.exp2(z * -LOG2E))
    return root * root


def silu(z):
    return z * sigmoid(z)

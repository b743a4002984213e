# SPDX-License-Identifier: Apache-2.0
"""The statics of the kernels of the gated delta rule that have states."""

import dataclasses

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from ... import _device
from ..._device import PIECE
from ..sequences import Sequences

CHUNK = 64  # Tokens of a chunk: the rows of a WGMMA.
SQUARE = (CHUNK, CHUNK)


@dataclasses.dataclass(frozen=True)
class Plan:
    """Statics of the forward and both backward kernels. A slice of the values, 64 of a head, has a state that
    needs no other."""

    sequences: Sequences
    key_heads: int
    heads: int
    pieces: int  # Pieces of 64 values of a key.
    slices_per_head: int
    dtype: jnp.dtype
    scale: float
    interpreted: bool
    use_qk_l2norm: bool

    @property
    def value_slices(self) -> int:
        return self.heads * self.slices_per_head

    def head(self, value_slice):
        """The value head of a slice."""
        return _device.div(value_slice, self.slices_per_head)

    def key_head(self, head):
        return _device.div(head, self.heads // self.key_heads)

    def rows(self, *lead: int):
        """Tiles of a chunk's rows, which TMA can cut off and `tiles.py` can clear."""
        return _device.row_tiles((*lead, CHUNK, PIECE), self.dtype, self.interpreted, by_eights=True)

    def squares(self, *lead: int):
        """Matrices of 64 rows and columns, whole ones."""
        return plgpu.SMEM((*lead, *SQUARE), self.dtype, **_device.swizzled())


@dataclasses.dataclass(frozen=True)
class ForwardPlan(Plan):
    """A launch of the forward kernel: all of it, or states alone."""

    num_stages: int  # Chunks in shared memory.
    state_wgs: int  # Warpgroups, and so slices of a block.
    output_wgs: int  # 0: no results of tokens.
    has_values: bool  # Otherwise v is zero.
    keeps_all: bool  # Whether the states before all chunks are results.
    num_sms: int  # For the backward pass.

    @property
    def memory_role(self) -> int:
        return self.state_wgs + self.output_wgs


@dataclasses.dataclass(frozen=True)
class BackwardPlan(Plan):
    """Launches of the backward kernels."""

    num_stages: int  # Chunks in shared memory, in the kernel of the states' gradients.
    state_wgs: int  # Its warpgroups, and so slices of a block.
    num_sms: int  # Blocks of the kernel of the operands' gradients.

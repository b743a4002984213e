# SPDX-License-Identifier: Apache-2.0
"""The statics of all kernels of SSD, and what XLA computes for them: sums of decays, and what parts do to states."""

import dataclasses
import math

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from ... import _device
from ..._device import PIECE
from ..sequences import Sequences
from ..states import LEAST_DECAY, cumulative_decays

LOG2E = math.log2(math.e)
CUM, DT = range(2)  # The vectors of a chunk: sums of dt a in units of log 2, and dt.


@dataclasses.dataclass(frozen=True)
class Plan:
    """Heads have 64 values: one of 128 is two, which share a, dt, b and c."""

    sequences: Sequences
    num_heads: int
    num_groups: int  # Heads of b and c.
    heads_per_dt: int
    pieces: int  # Pieces of a row of b and c, 128 bytes each.
    dtype: jnp.dtype
    num_stages: int  # Chunks in shared memory.
    num_states: int  # States before chunks in shared memory, of the forward kernel.
    interpreted: bool

    @property
    def chunk(self) -> int:
        return self.sequences.chunk

    @property
    def state_shape(self) -> tuple[int, ...]:
        """States of all parts."""
        return self.sequences.num_parts, self.num_heads, PIECE, self.pieces * PIECE

    def group(self, head):
        """The head of b and c that belongs to `head`."""
        return _device.div(head, self.num_heads // self.num_groups)

    def dt_head(self, head):
        return _device.div(head, self.heads_per_dt)

    def tiles(self, *lead: int, rows: int | None = None):
        """Tiles of as many rows as a chunk, or of `rows`."""
        return _device.row_tiles((*lead, rows or self.chunk, PIECE), self.dtype, self.interpreted, by_eights=True)

    def vectors(self):
        """`CUM` and `DT` of the chunks in the ring."""
        return plgpu.SMEM((self.num_stages, 2, self.chunk), jnp.float32)


def make_vectors(sequences: Sequences, dt, a, cu_seqlens):
    """(H, num_chunks, 2, chunk): `CUM`, the sums of dt a up to each row of a chunk in units of log 2, and `DT`."""
    dt = sequences.in_chunks(dt.astype(jnp.float32), cu_seqlens)
    a, least = (LOG2E * a.astype(jnp.float32))[:, None, None], math.log2(LEAST_DECAY)
    forgets = jnp.isneginf(a)  # Infinity times a step of 0 is NaN; that step forgets nothing.
    logs = jnp.where(forgets & (dt > 0), least, jnp.maximum(dt * jnp.where(forgets, 0.0, a), least))
    return jnp.stack([cumulative_decays(logs), dt], axis=2)


def decay_of_parts(plan: Plan, vectors, table):
    """(num_parts, H): the factors by which parts multiply the states that they start from."""
    decay = jnp.exp2(plan.sequences.sums_of_parts(vectors[:, :, CUM, -1], table))
    return jnp.repeat(decay, plan.heads_per_dt, axis=1)


def end_of_part(start, decay, local):
    """The state (H, 64, N) at the end of a part that multiplies states by `decay` (H,), and makes `local` of zero."""
    return decay[:, None, None] * start + local

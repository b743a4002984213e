# SPDX-License-Identifier: Apache-2.0
"""The statics of the kernels of Kimi Delta Attention, and the arrays that one of them leaves for the others."""

import dataclasses

import jax
import jax.numpy as jnp

from ..delta.plan import CHUNK, SQUARE, Plan

INVERSE, WEIGHTS, KEYS_READ = 0, 1, 2  # Places of a chunk's squares; queries and written keys come after KEYS_READ.


@dataclasses.dataclass(frozen=True)
class KdaPlan(Plan):
    """A launch of the kernels. `kernel_prepare` leaves squares of 64 x 64 for each chunk of each value head, in this
    order: the inverse, the weights transposed, and in pieces the keys that read, the queries, and the keys that
    write."""

    num_stages: int  # Chunks in shared memory.
    state_wgs: int  # Warpgroups, and so slices of a block.
    has_outputs: bool  # Otherwise the states before all chunks and the errors are the results, and not o.

    @property
    def memory_role(self) -> int:
        return self.state_wgs + self.has_outputs

    @property
    def state_stages(self) -> int:
        """Chunks whose states are in shared memory: with outputs there is room for one."""
        return 1 if self.has_outputs else 2

    @property
    def num_squares(self) -> int:
        return KEYS_READ + 3 * self.pieces

    @property
    def queries(self) -> int:
        """The place of the queries' first piece."""
        return KEYS_READ + self.pieces

    @property
    def keys_written(self) -> int:
        """The place of the first piece of the keys that write."""
        return KEYS_READ + 2 * self.pieces

    @property
    def prepared(self) -> list:
        """The results of `kernel_prepare`: the squares, and how each channel decays over each chunk, float32; and with
        norms by what it multiplied the rows of q and k, float32."""
        chunks = self.heads, self.sequences.num_chunks
        factors = [jax.ShapeDtypeStruct((2, *chunks, CHUNK), jnp.float32)] * self.use_qk_l2norm
        return [
            jax.ShapeDtypeStruct((*chunks, self.num_squares, *SQUARE), self.dtype),
            jax.ShapeDtypeStruct((*chunks, self.pieces * CHUNK), jnp.float32),
            *factors,
        ]

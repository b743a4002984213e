# SPDX-License-Identifier: Apache-2.0
"""What stands inside the kernels of every family: rings of stages, turns, index arithmetic, stores.

`_host.py` has what stands around a launch. A family works on its own: its folder and the shared files, in a package of
any name.
"""

import dataclasses
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

SMEM_BYTES_MAX = 232_448  # Shared memory that one block may use on Hopper and on data-centre Blackwell.
# Rows and columns of 16 bits that TMA moves as one to or from shared memory swizzled by 128 bytes.
SWIZZLE_TILE = (8, 64)


def div(a, b):
    """The whole quotient of two counts, of Python's or traced: `//` would also provide for negative ones."""
    return a // b if isinstance(a, int) and isinstance(b, int) else lax.div(jnp.int32(a), jnp.int32(b))


def rem(a, b):
    """The remainder of two counts, of Python's or traced."""
    return a % b if isinstance(a, int) and isinstance(b, int) else lax.rem(jnp.int32(a), jnp.int32(b))


def offsets(size: int, of, *indices):
    """`of(*indices)`, offsets into a flat array of `size` values, in 64 bits where 32 are too few.

    `of` must not use `//` on indices: JAX has no lowering for it in 64 bits.
    """
    if size < 2**31:
        return of(*indices)
    with jax.enable_x64(True):
        return of(*(lax.convert_element_type(index, jnp.int64) for index in indices))


@dataclasses.dataclass(frozen=True)
class Ring:
    """Slots of shared memory that a memory warpgroup fills and compute warpgroups free. `count` numbers all fills."""

    filled: Any  # A barrier a slot: the copies into it have arrived.
    freed: Any  # A barrier a slot: its readers are done.
    num_slots: int

    def slot(self, count):
        return rem(count, self.num_slots)

    def fill(self, count):
        """The memory warpgroup: the slot for fill `count`, once nobody reads what it held before."""
        slot = self.slot(count)
        pl.when(count >= self.num_slots)(lambda: plgpu.barrier_wait(self.freed.at[slot]))
        return slot

    def wait(self, count):
        """A compute warpgroup: the slot of fill `count`, once it has arrived."""
        slot = self.slot(count)
        plgpu.barrier_wait(self.filled.at[slot])
        return slot

    def free(self, count):
        """A compute warpgroup: gives the slot of fill `count` back."""
        plgpu.barrier_arrive(self.freed.at[self.slot(count)])

    def drain(self, count):
        """The memory warpgroup, at the end: waits until the last slots, of `count` fills in all, are given back."""
        first = jnp.maximum(count - self.num_slots, 0)
        pl.loop(first, count)(lambda i: plgpu.barrier_wait(self.freed.at[self.slot(i)]))


@dataclasses.dataclass(frozen=True)
class Turns:
    """Which compute warpgroup may start its products: each passes the turn on to the next. Without barriers all may."""

    barriers: Any  # One a warpgroup, the turn has come to it; or None.
    num_wgs: int

    def start(self, wg):
        """Warpgroup 0 gives itself the first turn."""
        if self.barriers is not None:
            pl.when(wg == 0)(lambda: plgpu.barrier_arrive(self.barriers.at[0]))

    def take(self, wg):
        if self.barriers is not None:
            plgpu.barrier_wait(self.barriers.at[wg])

    def pass_on(self, wg):
        if self.barriers is not None:
            plgpu.barrier_arrive(self.barriers.at[rem(wg + 1, self.num_wgs)])

    def drain(self, wg):
        """At the end the last turn has come back to warpgroup 0, and nobody takes it."""
        if self.barriers is not None:
            pl.when(wg == 0)(lambda: plgpu.barrier_wait(self.barriers.at[0]))


def store(ref, value):
    """`ref[...] = value` for a `value` in any layout, also one that JAX has no coalesced plan for."""
    if hasattr(plgpu, "store"):  # JAX >= 0.12, where `ref[...] = value` insists on such a plan.
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value

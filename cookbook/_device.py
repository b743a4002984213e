# SPDX-License-Identifier: Apache-2.0
"""The vocabulary inside the kernels of every family: roles, rings, products, layouts, tiles of rows, index arithmetic.

`_host.py` has what stands around a launch. A family works on its own: its folder and the shared files, in a package of
any name.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

Ref = Any  # A Pallas Ref, of global or shared memory, or an accumulator; `.at[...]` is a view of a part of it.
Barrier = Any  # A Ref of one barrier, or of one for each slot or warpgroup.
Index = Any  # A number, of a block, a row or a step: a Python int, or an int32 that the kernel computes.

SMEM_BYTES_MAX = 232_448  # Shared memory that one block may use on Hopper and on data-centre Blackwell.
SMEM_ALIGNMENT = 1024  # Bytes at whose multiples Mosaic begins each array of shared memory.
# Rows and columns of 16 bits that TMA moves as one to or from shared memory swizzled by 128 bytes.
SWIZZLE_TILE = (8, 64)
PIECE = 64  # Values of 16 bits of a row that are swizzled together, 128 bytes; and rows of a WGMMA.
WARPGROUP, WARP = 128, 32  # Threads.
ROWS, COLUMNS = (plgpu.Layout.WGMMA.reduce(dim) for dim in (1, 0))  # One number for each row, or column, of a product.


# Index arithmetic -----------------------------------------------------------------------------------------------------


def div(a, b):
    """The whole quotient of two counts, Python's, NumPy's or traced: `//` would also provide for negative ones."""
    return lax.div(jnp.int32(a), jnp.int32(b)) if isinstance(a, jax.Array) or isinstance(b, jax.Array) else a // b


def rem(a, b):
    """The remainder of two counts, Python's, NumPy's or traced."""
    return lax.rem(jnp.int32(a), jnp.int32(b)) if isinstance(a, jax.Array) or isinstance(b, jax.Array) else a % b


def offsets(size: int, of, *indices):
    """`of(*indices)`, offsets into a flat array of `size` values, in 64 bits where 32 are too few.

    `of` must not use `//` on indices: JAX has no lowering for it in 64 bits.
    """
    if size < 2**31:
        return of(*indices)
    with jax.enable_x64(True):
        return of(*(lax.convert_element_type(index, jnp.int64) for index in indices))


# Barriers -------------------------------------------------------------------------------------------------------------


def barriers(num: int, arrivals: int = 1):
    """Scratch for `num` barriers, each completed by so many arrivals."""
    return plgpu.Barrier(num_arrivals=arrivals, num_barriers=num)


@dataclasses.dataclass(frozen=True)
class Ring:
    """Slots of shared memory that a producer fills and consumers release. `count` numbers all fills."""

    filled: Barrier  # A barrier per slot: the copies into it have arrived.
    freed: Barrier  # A barrier per slot: its readers are done.
    num_slots: int

    def slot(self, count):
        return rem(count, self.num_slots)

    def acquire(self, count):
        """The producer: waits until the slot for fill `count` has no reader left, and returns it."""
        slot = self.slot(count)
        pl.when(count >= self.num_slots)(lambda: plgpu.barrier_wait(self.freed.at[slot]))
        return slot

    def wait(self, count):
        """A consumer: waits until fill `count` has arrived, and returns its slot."""
        slot = self.slot(count)
        plgpu.barrier_wait(self.filled.at[slot])
        return slot

    def release(self, count):
        """A consumer: gives the slot of fill `count` back."""
        plgpu.barrier_arrive(self.freed.at[self.slot(count)])

    def drain(self, count):
        """The producer, at the end: waits until the last slots, of `count` fills in all, are given back."""
        first = jnp.maximum(count - self.num_slots, 0)
        pl.loop(first, count)(lambda i: plgpu.barrier_wait(self.freed.at[self.slot(i)]))


@dataclasses.dataclass(frozen=True)
class Turns:
    """Which compute warpgroup may start its products: each passes the turn on to the next, as CUTLASS's order barrier
    has it. Without barriers all may."""

    barriers: Barrier  # One per warpgroup, at which its turn arrives; or None.
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
        """At the end warpgroup 0 takes the last turn, which has come back to it."""
        if self.barriers is not None:
            pl.when(wg == 0)(lambda: plgpu.barrier_wait(self.barriers.at[0]))


# Roles ----------------------------------------------------------------------------------------------------------------


def role(is_mine, *, increase_to: int | None = None, decrease_to: int | None = None):
    """Runs the decorated function at once, in the warpgroups for which `is_mine` is true.

    Args:
      increase_to, decrease_to: registers per thread of the role from then on; without either they stay as they are.
    """

    def run(body):
        @pl.when(is_mine)
        def _():
            if increase_to or decrease_to:
                plgpu.set_max_registers(increase_to or decrease_to, action="increase" if increase_to else "decrease")
            body()

        return body

    return run


# Values ---------------------------------------------------------------------------------------------------------------


def load(ref, layout=plgpu.Layout.WGMMA):
    """`ref` in registers, in any layout, also one that JAX has no coalesced plan for."""
    return plgpu.load(ref, layout=layout, optimized=False)


def store(ref, value):
    """`ref[...] = value` for a `value` in any layout, also one that JAX has no coalesced plan for."""
    if hasattr(plgpu, "store"):  # JAX >= 0.12, where `ref[...] = value` insists on such a plan.
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value


def spread(values, dim: int, shape=(PIECE, PIECE)):
    """`values`, one for each row (`dim` 0) or column (1) of a product, repeated to its shape."""
    return lax.broadcast_in_dim(values, shape, [dim])


def indices(shape=(PIECE, PIECE)):
    """(row, column) of each value of a product."""
    return [plgpu.broadcasted_iota(jnp.int32, shape, dim, layout=plgpu.Layout.WGMMA) for dim in (0, 1)]


def lanes_layout(lanes: int, width: int, vec: int):
    """Layout of (rows, width) values: `lanes` threads of a warp share a row, each with runs of `vec` columns."""
    rows_at_once = WARPGROUP // lanes
    if lanes == WARP:
        tiles, warp_dim, lane_dims = ((4, width), (vec,)), -3, (-2,)
    else:
        tiles, warp_dim, lane_dims = ((rows_at_once, width), (rows_at_once // 4, width), (vec,)), -5, (-3, -2)
    return plgpu.Layout.TILED(plgpu.Tiling(tiles), warp_dims=(warp_dim,), lane_dims=lane_dims, vector_dim=-1)


def product(pairs, interpreted: bool, acc=None):
    """`acc` + the sum of the products of `pairs` (a, b): a in registers or in shared memory, b in shared memory.

    JAX's interpreter multiplies nothing in registers on its tensor cores.
    """
    shape = pairs[0][0].shape[0], pairs[0][1].shape[1]
    if interpreted:
        value = lambda x: x if isinstance(x, jax.Array) else x[...]
        for a, b in pairs:
            term = jnp.dot(value(a), value(b), preferred_element_type=jnp.float32)
            acc = term if acc is None else acc + term
        plgpu.commit_smem()  # TMA may now overwrite what was read here.
        return plgpu.layout_cast(acc, plgpu.Layout.WGMMA)

    def multiply(ref):
        if acc is not None:
            ref[...] = acc
        for a, b in pairs:
            plgpu.wgmma(ref, a, b)
        return plgpu.layout_cast(ref[...], plgpu.Layout.WGMMA)

    return pl.run_scoped(multiply, plgpu.ACC(shape, jnp.float32))


def add_product(acc_ref, acc, a, b, interpreted: bool):
    """`acc` + a b, a in registers and b in shared memory, in the accumulator `acc_ref`, which the product may keep.

    JAX's interpreter multiplies nothing in registers on its tensor cores.
    """
    if interpreted:
        acc = acc + jnp.dot(a, b[...], preferred_element_type=jnp.float32)
        plgpu.commit_smem()  # TMA may now overwrite what was read here.
        return acc
    acc_ref[...] = acc
    plgpu.wgmma(acc_ref, a, b)
    return acc_ref[...]


# Shared memory --------------------------------------------------------------------------------------------------------


def swizzled(piece: int = PIECE, dtype=jnp.bfloat16) -> dict:
    """Transforms of shared memory that tensor cores read, whose rows are pieces of so many values."""
    bytes_of_row = piece * jnp.dtype(dtype).itemsize
    return dict(transforms=(plgpu.TilingTransform((8, piece)), plgpu.SwizzleTransform(bytes_of_row)))


def row_tiles(shape: tuple[int, ...], dtype, interpreted: bool, by_eights: bool = False):
    """Shared memory for rows in pieces, (..., rows, piece), in the views that `Tiles` names. The interpreter gets the
    first."""
    transforms = swizzled(shape[-1], dtype)["transforms"]
    views = [plgpu.SMEM(shape, dtype, transforms=transforms), plgpu.SMEM(shape, dtype, transforms=transforms[1:])]
    if by_eights:
        views.append(plgpu.SMEM((*shape[:-2], shape[-2] // 8, 8 * shape[-1]), dtype))
    return views[0] if interpreted else plgpu.RefUnion(*views)


@dataclasses.dataclass(frozen=True)
class Tiles:
    """The views of a buffer of `row_tiles`."""

    tiled: Ref  # For tensor cores.
    rows: Ref  # Rows of a piece each, the only view in which TMA finds any row and cuts off at the edges of an array.
    eights: Ref = None  # 8 rows together, as they lie, `by_eights` alone.

    @classmethod
    def views(cls, smem, interpreted: bool):
        return cls(smem, smem, smem) if interpreted else cls(*smem)


def smem_bytes(scratch: dict) -> int:
    """Shared memory that a kernel's `scratch_types` take: arrays, each aligned, and barriers of 8 bytes."""
    total = 0
    for ref in scratch.values():
        if hasattr(ref, "num_barriers"):
            total += 8 * math.prod(jax.tree.leaves(ref.num_barriers))
        elif getattr(ref, "memory_space", None) != plgpu.TMEM:
            views = ref.refs if isinstance(ref, plgpu.RefUnion) else [ref]  # Views of one array.
            nbytes = max(math.prod(view.shape) * jnp.dtype(view.dtype).itemsize for view in views)
            total += -(-nbytes // SMEM_ALIGNMENT) * SMEM_ALIGNMENT
    return total

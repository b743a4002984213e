# SPDX-License-Identifier: Apache-2.0
"""The kernel of every product of this family but the rungs: its roles, the sums of parts of K, one epilogue.

    o = activation(a @ b * scale * row_scale * col_scale + bias)

Role table: a persistent block on each SM, three warpgroups.

    memory     one: starts the TMA copies of each step of K into the next slot of the ring, and runs ahead into the
               next tile while the others compute or store
    compute    two: each multiplies its half of the tile, then stores it, some pieces (`plan.store_piece`) at a time

Barrier table:

    barrier       arrivals                             who waits
    filled[slot]  each copy of a's and b's tile        the compute warpgroups that read the slot
    freed[slot]   those warpgroups, of all blocks      the memory warpgroup, before it refills the slot (multicast
                  that the slot's data is sent to      writes the slots of several blocks)
    met           the compute warpgroups of a          each of them, before it sends its sums: all expect
                  cluster that divides K               them; interpreted, before it adds them up
    arrived[wg]   the bytes of the other blocks' sums  compute warpgroup wg, before it adds the parts up

`split_k` blocks of one cluster share a tile: each sums its part of K and sends slices of its sums to the others' shared
memory; then each block adds up its slice of the tile, in the order of the parts, so that results are bitwise
reproducible and no second kernel is launched. With `second_kernel` the parts of large tiles go to memory, and XLA adds
them up.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .. import _device
from . import exchange
from .operand import Ring, views
from .plan import COMPUTE, REGISTERS, Plan
from .tiles import exchanged


def memory_role(body, count: int = COMPUTE):
    """Runs the decorated function at once, in the memory warpgroup, which follows `count` compute warpgroups."""
    return _device.role(lax.axis_index("role") == count, decrease_to=REGISTERS[count][0])(body)


def compute_role(body, count: int = COMPUTE):
    """Runs the decorated function at once, in each of `count` compute warpgroups."""
    return _device.role(lax.axis_index("role") < count, increase_to=REGISTERS[count][1])(body)


def load(plan: Plan, ring: Ring, a_gmem, b_gmem, copy=None):
    """The memory warpgroup: all steps of all tiles of this block, as fast as slots are given back.

    `copy` takes the place of `copy_step`.
    """
    copy = copy or copy_step

    def load_tile(plan, before, tile):
        before = before + tile * plan.tiles.num_steps
        row, col = plan.place(tile)

        @pl.loop(0, plan.tiles.num_steps)
        def _(step):
            slot = ring.acquire(before + step)
            copy(plan, ring, slot, a_gmem, b_gmem, row, col, plan.k_start(step))

    before = 0
    for phase in plan.phases:
        pl.loop(0, phase.num_tiles())(functools.partial(load_tile, phase, before))
        before = before + phase.num_tiles() * phase.tiles.num_steps

    # No block leaves while another of its cluster may still arrive at its barriers.
    ring.drain(before)


def copy_step(plan: Plan, ring: Ring, slot, a_gmem, b_gmem, row, col, k):
    """Starts the copies of a step into `slot`: of a from `row` on, of b from `col` on, of both from `k` on."""
    filled, a, b = ring.filled.at[slot], plan.a, plan.b
    with jax.named_scope("load"):
        a.copy(a_gmem, a.at(row, k), ring.a_tma.at[slot], filled, shared=plan.axis_n)
        b.copy(b_gmem, b.at(col, k), ring.b_tma.at[slot], filled, shared=plan.axis_m)


def multiply(plan: Plan, ring: Ring, before, steps):
    """A compute warpgroup: the sums of its share of a tile. The tile's `steps` follow `before` others in the ring."""
    of_tile = functools.partial(multiply_into, plan, ring, before, steps)
    return pl.run_scoped(of_tile, plgpu.ACC(plan.compute_tile, jnp.float32))


def multiply_into(plan: Plan, ring: Ring, before, steps, acc):
    """As `multiply`, in a given accumulator. WGMMA is asynchronous: a slot is given back one step late."""
    role = lax.axis_index("role")

    @pl.loop(0, steps)
    def _(step):
        start_product(plan, ring, ring.wait(before + step), role, acc)
        plgpu.wgmma_wait(1)  # The product before has ended.
        pl.when(step > 0)(lambda: ring.release(before + step - 1))

    values = acc[...]  # Waits for the last product.
    release_last(ring, before, steps)
    return values


def start_product(plan: Plan, ring: Ring, slot, role, acc):
    """Starts to add to `acc` the product of warpgroup `role`'s parts of the tiles in `slot`."""
    rows, cols = plan.compute_tile
    a, b = plan.a.part(ring.a.at[slot], role, rows), plan.b.part(ring.b.at[slot], role, cols)
    with jax.named_scope("wgmma"):
        plgpu.wgmma(acc, a, b.T)


def release_last(ring: Ring, before, steps):
    """Gives back the slot of the last of a tile's `steps`, if it has any."""
    free = lambda: ring.release(before + steps - 1)
    free() if isinstance(steps, int) else pl.when(steps > 0)(free)


def compute(plan: Plan, multiply_tile, out, parts, store_tile=None):
    """A compute warpgroup: stores the sums `multiply_tile(plan, before)` of its share of all tiles.

    `before` counts the steps of the tiles before. `out` and `parts` are what `store`, or a `store_tile` in its place,
    and `add_parts` take.
    """
    store_tile = store_tile or store

    def compute_tile(plan, before, stored, tile):
        sums = multiply_tile(plan, before + tile * plan.tiles.num_steps)
        place, stored = plan.share(plan.place(tile)), stored + tile * len(plan.store_pieces)
        if plan.adds_parts:
            add_parts(plan, out, parts, place, stored, sums, store_tile)
        else:
            store_tile(plan, out, place, stored, sums)

    if plan.adds_parts and not plan.interpreted:
        *_, met, arrived = parts
        exchange.expect(arrived.at[lax.axis_index("role")], plan.received_bytes)
        plgpu.barrier_arrive(met)

    before = stored = 0
    for phase in plan.phases:
        pl.loop(0, phase.num_tiles())(functools.partial(compute_tile, phase, before, stored))
        before = before + phase.num_tiles() * phase.tiles.num_steps
        stored = stored + phase.num_tiles() * len(phase.store_pieces)

    plgpu.wait_smem_to_gmem(0)


def add_parts(plan: Plan, out, parts, place, stored, values, store_tile):
    """A compute warpgroup: stores this block's slice of the sums of all parts, added in the order of the parts.

    `parts` is (the sums of all blocks in global memory, interpreted; those that others sent; the barriers `met` and
    `arrived`).
    """
    sums_gmem, sums_smem, met, arrived = parts
    part, role, (_, width) = lax.axis_index("part"), lax.axis_index("role"), plan.slice_tile
    (row, col), numbers = place, range(plan.config.split_k)
    slices = [values[:, owner * width : (owner + 1) * width] for owner in range(plan.owners)]
    if plan.interpreted:
        rows = pl.ds(row * plan.num_sums, len(values))
        sums_gmem[part, rows, pl.ds(col, values.shape[1])] = values
        plgpu.barrier_arrive(met)
        plgpu.barrier_wait(met)
        sums_of = lambda p: sums_gmem.at[p, rows, pl.ds(col + part * width, width)]
    else:
        plgpu.barrier_wait(met)
        for owner, piece in enumerate(slices):
            to = sums_smem.at[role, part], arrived.at[role], owner, plan.sums_transforms
            pl.when(part != owner)(functools.partial(exchange.send, piece, *to))
        sums_of = lambda p: sums_smem.at[role, p]

    @pl.when(part < plan.owners)
    def _():
        if not plan.interpreted:
            exchange.wait(arrived.at[role])
        mine, *others = slices
        for owner, piece in enumerate(others, start=1):
            mine = lax.cond(part == owner, lambda piece=piece: piece, lambda mine=mine: mine)
        theirs = functools.partial(plgpu.load, layout=plgpu.Layout.WGMMA, optimized=not plan.interpreted)
        sums = [lax.cond(part == p, lambda mine=mine: mine, lambda p=p: theirs(sums_of(p))) for p in numbers]
        store_tile(plan, out, (row, col + part * width), stored, functools.reduce(jnp.add, sums))


def store(plan: Plan, out, place, stored, values):
    """A compute warpgroup: finishes `values`, its share of a tile, and sends it piece after piece to its `place` in o.

    `stored` pieces went before. `out` is (the fused vectors, o, its slots in shared memory).
    """
    fused, o_gmem, o_smem = out
    (row, col), (height, width), role = place, plan.store_piece, lax.axis_index("role")
    o_gmem = o_gmem.at[plan.part] if plan.config.second_kernel else o_gmem
    vectors = {(i, j): _load_vectors(plan, fused, row + i, col + j) for i, j in plan.store_pieces}  # All in flight.

    def finish(i, j):
        piece = scale_and_shift(values[i : i + height, j : j + width], vectors[i, j])
        piece = plan.activation(piece).astype(plan.stored_dtype)
        return plgpu.layout_cast(piece, plgpu.Layout.WGMMA_TRANSPOSED) if plan.swapped else piece

    for number, (i, j) in enumerate(plan.store_pieces):
        if plan.stores_directly:
            _device.store(target_of_piece(plan, o_gmem, row + i, col + j).T, finish(i, j))
            continue
        piece_smem, piece_tma = slot_of_piece(plan, o_smem, role, stored + number)
        piece_smem[...] = finish(i, j)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(piece_tma, target_of_piece(plan, o_gmem, row + i, col + j))


def target_of_piece(plan: Plan, o_gmem, row, col):
    """Where in o the piece at `row` and `col` of the kernel's product lies."""
    rows, cols = (pl.ds(start, size) for start, size in zip((row, col), plan.store_piece, strict=True))
    return o_gmem.at[exchanged((rows, cols), plan.swapped)]


def slot_of_piece(plan: Plan, o_smem, role, number):
    """The slot of warpgroup `role`'s piece `number`, once it is free: as registers go there, and as TMA sends it."""
    slots = plan.config.store_slots
    slot = _device.rem(number, slots)
    tiled, tma = (view.at[role, slot, 0, 0] for view in views(o_smem, plan.store_piece, plan.interpreted))
    plgpu.wait_smem_to_gmem(slots - 1, wait_read_only=True)  # TMA has read the piece that was in this slot.
    return tiled.T if plan.swapped else tiled, tma


def _load_vectors(plan: Plan, fused, row, col) -> dict:
    """The vectors fused with the piece at `row` and `col` of the kernel's product, in the shape of the piece.

    A vector is a whole number of pieces long. Where it ends within a tile, the tile's pieces beyond it get the numbers
    of its last piece. Nothing of these pieces is stored, because o ends before them.
    """

    def load(name: str):
        if name == "scale":
            return fused[name][0]
        axis = (0 if name == "row_scale" else 1) ^ plan.swapped
        start, size, layout = (row, col)[axis], plan.store_piece[axis], plgpu.Layout.WGMMA.reduce(1 - axis)
        (length,) = fused[name].shape
        if length % plan.tiles.cluster_tile[axis]:
            start = jnp.minimum(start, length - size)
        values = _device.load(fused[name].at[pl.ds(start, size)], layout)
        return _device.spread(values, axis, plan.store_piece)

    return {name: load(name) for name in fused}


def scale_and_shift(product, fused: dict):
    for name in ("scale", "row_scale", "col_scale"):
        product = product * fused[name] if name in fused else product
    return product + fused["bias"] if "bias" in fused else product


def kernel(a_gmem, b_gmem, vectors, o_gmem, sums_gmem=None, *, plan: Plan, a_smem, b_smem, filled, freed, o_smem=None,
           sums_smem=None, met=None, arrived=None, copy=None, store_tile=None):  # fmt: skip
    """The kernel of `launch.fused_product`; see the tables above. For `copy` see `load`, for `store_tile` `compute`."""
    ring = plan.ring(a_smem, b_smem, filled, freed)

    @memory_role
    def _():
        load(plan, ring, a_gmem, b_gmem, copy)

    @compute_role
    def _():
        multiply_tile = lambda plan, before: multiply(plan, ring, before, plan.tiles.num_steps)
        compute(plan, multiply_tile, (vectors, o_gmem, o_smem), (sums_gmem, sums_smem, met, arrived), store_tile)

# SPDX-License-Identifier: Apache-2.0
"""The kernel of every product of this family but the rungs: its roles, the sums of parts of K, one epilogue.

    o = activation(a @ b * scale * row_scale * col_scale + bias)

Role table: a persistent block on each SM, three warpgroups.

    memory     one: starts the TMA copies of each step of K into the next slot of the ring, and runs ahead into the
               next tile while the others compute or store
    compute    two: each multiplies its half of the tile, then stores it, some pieces of 64 rows by 128 bytes at a time

Barrier table:

    barrier       arrivals                             who waits
    filled[slot]  each copy of a's and b's tile        the compute warpgroups that read the slot
    freed[slot]   those warpgroups, of all blocks      the memory warpgroup, before it refills the slot (multicast
                  that the slot's data is sent to      writes the slots of several blocks)
    summed[wg]    compute warpgroup wg of the other    compute warpgroup wg, before it adds the parts up
                  blocks of the cluster, with its sums

`split_k` blocks of one cluster share a tile: each sums its part of K and sends slices of its sums to the others' shared
memory; then each block adds up its slice of the tile, in the order of the parts, so that results are bitwise
reproducible and no second kernel is launched. With `second_kernel` the parts of large tiles go to memory, and XLA adds
them up.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .. import _device, _host, _numerics
from .plan import COMPUTE, COMPUTE_REGISTERS, MEMORY, MEMORY_REGISTERS, Plan, identity, views


def load(plan: Plan, ring: _device.Ring, a_gmem, b_gmem, a_smem, b_smem):
    """The memory warpgroup: all steps of all tiles of this block, as fast as slots are given back."""

    def load_tile(plan, before, tile):
        before = before + tile * plan.tiles.num_steps
        row, col = plan.place(tile)

        @pl.loop(0, plan.tiles.num_steps)
        def _(step):
            slot, k = ring.acquire(before + step), plan.k(step)
            with jax.named_scope("load"):
                filled, (a, b) = ring.filled.at[slot], (plan.a, plan.b)
                a.copy(a_gmem, a.at(row, k), a_smem.at[slot], filled, shared=plan.axis_n)
                b.copy(b_gmem, b.at(col, k), b_smem.at[slot], filled, shared=plan.axis_m)

    before = 0
    for phase in plan.phases:
        pl.loop(0, phase.num_tiles())(functools.partial(load_tile, phase, before))
        before = before + phase.num_tiles() * phase.tiles.num_steps

    # No block leaves while another of its cluster may still arrive at its barriers.
    ring.drain(before)


def multiply(plan: Plan, ring: _device.Ring, a_smem, b_smem, before, steps, acc):
    """The sums of this warpgroup's share of a tile. Its `steps` follow `before` others in the ring.

    WGMMA is asynchronous: a slot is given back one step late.
    """
    (rows, cols), role = plan.compute_tile, lax.axis_index("role")

    @pl.loop(0, steps)
    def _(step):
        slot = ring.wait(before + step)
        a, b = plan.a.part(a_smem.at[slot], role, rows), plan.b.part(b_smem.at[slot], role, cols)
        with jax.named_scope("wgmma"):
            plgpu.wgmma(acc, a, b.T)
            plgpu.wgmma_wait(1)  # The product before has ended.
        pl.when(step > 0)(lambda: ring.release(before + step - 1))

    values = acc[...]  # Waits for the last product.
    free = lambda: ring.release(before + steps - 1)
    free() if isinstance(steps, int) else pl.when(steps > 0)(free)
    return values


def compute(plan: Plan, multiply_tile, out, parts):
    """A compute warpgroup: stores the sums `multiply_tile(plan, before)` of its share of all tiles.

    `before` counts the steps of the tiles before. `out` and `parts` are what `store` and `add_parts` take.
    """
    before = stored = 0
    for phase in plan.phases:
        steps, pieces = phase.tiles.num_steps, len(phase.store_pieces)

        def compute_tile(tile, plan=phase, before=before, stored=stored, steps=steps, pieces=pieces):
            sums = multiply_tile(plan, before + tile * steps)
            place, stored = plan.share(plan.place(tile)), stored + tile * pieces
            if plan.adds_parts:
                add_parts(plan, out, parts, place, stored, sums)
            else:
                store(plan, out, place, stored, sums)

        pl.loop(0, phase.num_tiles())(compute_tile)
        before = before + phase.num_tiles() * steps
        stored = stored + phase.num_tiles() * pieces

    plgpu.wait_smem_to_gmem(0)


def add_parts(plan: Plan, out, parts, place, stored, values):
    """A compute warpgroup: stores this block's slice of the sums of all parts, added in the order of the parts.

    `parts` is (the sums of all blocks in global memory, interpreted; those that others sent; who has sent).
    """
    sums_gmem, sums_smem, summed = parts
    part, role, (rows, width) = lax.axis_index("part"), lax.axis_index("role"), plan.slice_tile
    (row, col), numbers = place, range(plan.config.split_k)
    slices = [values[:, owner * width : (owner + 1) * width] for owner in range(plan.owners)]
    if plan.interpreted:
        sums_gmem[part, pl.ds(row, rows), pl.ds(col, values.shape[1])] = values
        plgpu.barrier_arrive(summed)
        plgpu.barrier_wait(summed)
        sums_of = lambda p: sums_gmem.at[p, pl.ds(row, rows), pl.ds(col + part * width, width)]
    else:
        for owner, piece in enumerate(slices):
            send = functools.partial(plgpu.async_store_smem, piece, sums_smem.at[role, part], summed.at[role])
            pl.when(part != owner)(functools.partial(send, cluster_idx=jnp.int32(owner), cluster_dim="part"))
        sums_of = lambda p: sums_smem.at[role, p]

    @pl.when(part < plan.owners)
    def _():
        if not plan.interpreted:
            plgpu.barrier_wait(summed.at[role])
        mine, *others = slices
        for owner, piece in enumerate(others, start=1):
            mine = lax.cond(part == owner, lambda piece=piece: piece, lambda mine=mine: mine)
        theirs = functools.partial(plgpu.load, layout=plgpu.Layout.WGMMA, optimized=not plan.interpreted)
        sums = [lax.cond(part == p, lambda mine=mine: mine, lambda p=p: theirs(sums_of(p))) for p in numbers]
        store(plan, out, (row, col + part * width), stored, functools.reduce(jnp.add, sums))


def store(plan: Plan, out, place, stored, values):
    """A compute warpgroup: finishes `values`, its share of a tile, and sends it piece after piece to its `place` in o.

    `stored` pieces went before. `out` is (the fused vectors, o, its slots in shared memory).
    """
    fused, o_gmem, o_smem = out
    (row, col), (height, width), role = place, plan.store_piece, lax.axis_index("role")
    o_gmem = o_gmem.at[plan.part] if plan.config.second_kernel else o_gmem
    swapped, slots = plan.swapped, plan.config.store_slots
    vectors = {(i, j): _load_vectors(plan, fused, row + i, col + j) for i, j in plan.store_pieces}  # All in flight.

    def finish(i, j):
        piece = scale_and_shift(values[i : i + height, j : j + width], vectors[i, j])
        piece = plan.activation(piece).astype(plan.stored_dtype)
        return plgpu.layout_cast(piece, plgpu.Layout.WGMMA_TRANSPOSED) if swapped else piece

    def target(i, j):
        rows, cols = pl.ds(row + i, height), pl.ds(col + j, width)
        return o_gmem.at[cols, rows] if swapped else o_gmem.at[rows, cols]

    if plan.stores_directly:
        for i, j in plan.store_pieces:
            _device.store(target(i, j).T, finish(i, j))
        return
    o_tiled, o_tma = views(o_smem, plan.store_piece, plan.interpreted)
    for number, (i, j) in enumerate(plan.store_pieces):
        slot = _device.rem(stored + number, slots)
        piece = o_tiled.at[role, slot, 0, 0]
        plgpu.wait_smem_to_gmem(slots - 1, wait_read_only=True)  # TMA has read the piece that was in this slot.
        (piece.T if swapped else piece)[...] = finish(i, j)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(o_tma.at[role, slot, 0, 0], target(i, j))


def _load_vectors(plan: Plan, fused, row, col) -> dict:
    """The vectors fused with the piece at `row` and `col` of the kernel's product, in the shape of the piece."""

    def load(name: str):
        if name == "scale":
            return fused[name][0]
        axis = (0 if name == "row_scale" else 1) ^ plan.swapped
        start, layout = (row, col)[axis], plgpu.Layout.WGMMA.reduce(1 - axis)
        values = _device.load(fused[name].at[pl.ds(start, plan.store_piece[axis])], layout)
        return _device.spread(values, axis, plan.store_piece)

    return {name: load(name) for name in fused}


def scale_and_shift(product, fused: dict):
    for name in ("scale", "row_scale", "col_scale"):
        product = product * fused[name] if name in fused else product
    return product + fused["bias"] if "bias" in fused else product


def kernel(a_gmem, b_gmem, vectors, o_gmem, sums_gmem=None, *, plan: Plan, a_smem, b_smem, filled, freed, o_smem=None,
           sums_smem=None, summed=None):  # fmt: skip
    """The kernel of `fused_product`; see the tables above."""
    (a_smem, a_tma), (b_smem, b_tma) = plan.a.views(a_smem, plan.interpreted), plan.b.views(b_smem, plan.interpreted)
    ring = _device.Ring(filled, freed, plan.num_stages)

    @_device.role(lax.axis_index("role") == MEMORY, decrease_to=MEMORY_REGISTERS)
    def _():
        load(plan, ring, a_gmem, b_gmem, a_tma, b_tma)

    @_device.role(lax.axis_index("role") < COMPUTE, increase_to=COMPUTE_REGISTERS)
    def _():
        def multiply_tile(plan, before):
            of_tile = functools.partial(multiply, plan, ring, a_smem, b_smem, before, plan.tiles.num_steps)
            return pl.run_scoped(of_tile, plgpu.ACC(plan.compute_tile, jnp.float32))

        compute(plan, multiply_tile, (vectors, o_gmem, o_smem), (sums_gmem, sums_smem, summed))


@functools.partial(jax.jit, static_argnames=("kernel", "plan", "params"))
def fused_product(kernel, a, b, vectors: dict, *, plan: Plan, params):
    """`activation(a @ b.T * scale * row_scale * col_scale + bias)`, of `a` and `b` as the plan's operands say.

    `kernel` is this file's, or another with the same roles. `vectors` holds float32 "scale" (1,), "row_scale" (M,),
    "col_scale" (N,) and "bias" (N,), or some of them; with `swapped`, M and N are those of o, which the tiles have
    exchanged.
    """
    c, t = plan.config, plan.tiles
    swapped, activation = c.swapped, plan.activation
    shape, tiles = (t.m, t.n)[:: -1 if swapped else 1], t.cluster_tile[:: -1 if swapped else 1]
    if c.second_kernel:  # It also does what is fused, and transposes.
        plan = dataclasses.replace(plan, activation=identity)
        padded_vectors, padded = {}, (c.split_k, *_host.padded_shape((t.m, t.n), (1, 8)))
    else:
        piece = jax.ShapeDtypeStruct((math.prod(plan.store_piece),), jnp.float32)
        plan = dataclasses.replace(plan, activation=_numerics.lowerable(plan.activation, piece))
        per = dict(scale=1, row_scale=tiles[0], col_scale=tiles[1], bias=tiles[1])
        padded_vectors = {name: _host.pad_to_tiles(vector, (per[name],)) for name, vector in vectors.items()}
        # Direct stores are not cut off at the edge. A row of o is a multiple of 16 bytes for TMA.
        padded = _host.padded_shape(shape, tiles if plan.stores_directly else (1, 8))
    out_type = [jax.ShapeDtypeStruct(padded, plan.stored_dtype)]
    # Neighbouring blocks multiply the same part of K: their SMs need the same operands.
    grid = (dict(part=c.split_k) if c.second_kernel else {}) | dict(cluster=t.clusters)
    if plan.adds_parts and plan.interpreted:
        whole = _host.padded_shape((t.m, t.n), t.cluster_tile)
        out_type.append(jax.ShapeDtypeStruct((c.split_k, *whole), jnp.float32))
    run = launch(functools.partial(kernel, plan=plan), plan, out_type, grid, plan.scratch, params)
    out, *_ = run(plan.a.pad(a), plan.b.pad(b), padded_vectors)
    if not c.second_kernel:
        return out[: shape[0], : shape[1]]
    total = functools.reduce(jnp.add, out[:, : t.m, : t.n])  # One part after the other, in every run.
    columns = {name: vector[:, None] if name == "row_scale" else vector for name, vector in vectors.items()}
    total = scale_and_shift(total.T if swapped else total, columns)
    return activation(total).astype(plan.out_dtype)


def launch(body, plan: Plan, out_type, grid: dict[str, int], scratch: dict, params):
    """`_host.kernel` of a `body` with these roles: a memory warpgroup after two compute warpgroups."""
    return _host.kernel(
        body,
        out_type=out_type,
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        cluster=tuple(plan.cluster.values()),
        cluster_names=tuple(plan.cluster),
        num_threads=COMPUTE + 1,
        thread_name="role",
        scratch_types=scratch,
        compiler_params=params,
    )

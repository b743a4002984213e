# SPDX-License-Identifier: Apache-2.0
"""The kernel of Blackwell's matrix products: its roles and barriers.

    o = activation(a @ b + bias)

Role table: a block on each SM, or two blocks as a pair; 3 or 4 warpgroups.

    load       one: starts the TMA copies of each step of K into the next slot of the ring
    multiply   one: has a single thread issue tcgen05.mma, which reads shared memory and adds to tensor memory; in a
               pair only that of the first block does, for both
    store      one or two: load an accumulator from tensor memory piece after piece, and store it by TMA

Each of the first two needs a single thread. They are warpgroups all the same, not warps of one: `plgpu.warp_map` joins
its warps when it ends, and the loop over tiles that hardware hands out has to be outside it, so that the copies for
the next tile would wait until the products of this one are issued.

Barrier table:

    barrier        arrivals                                who waits
    filled[slot]   each copy of a's and b's tile, of both  multiply, before it reads the slot; in a pair the first
                   blocks of a pair, at the first          block's
    freed[slot]    the tensor cores, when they have read   load, before it refills the slot
                   the slot; in a pair of both blocks
    summed[acc]    the tensor cores, after a tile's last   store, before it loads the accumulator
                   product
    stored[acc]    the store warpgroups, of both blocks    multiply, before it sums another tile in that accumulator

The interpreter runs one CTA with a static schedule. It has no collective or scaled MMA and no cluster launch control.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .. import _device, _host, _numerics
from ..gemm.operand import views
from .plan import LANES, LOAD, MULTIPLY, STORE, Plan


def each_tile(plan: Plan, body):
    """Calls `body(number, index)` for this cluster's tiles: how many came before, and which it is. Returns how many."""
    if not plan.config.is_dynamic:
        first = lax.axis_index("cluster")
        count = plan.tiles.of_cluster(first)
        pl.loop(0, count)(lambda number: body(number, first + number * plan.clusters))
        return count
    axes = () if plan.pair is None else (plan.pair,)

    def one_more(info, carry):
        body(info.local_index, info.index[0])
        return carry + 1

    loop = plgpu.dynamic_scheduling_loop(("cluster",), thread_axis="role", cluster_axes=axes, init_carry=jnp.int32(0))
    return loop(one_more)


def load(plan: Plan, ring: _device.Ring, gmem, smem, place, before, steps):
    """The load warpgroup: the `steps` of a tile, which `before` others precede, as fast as slots are freed.

    `place` is where the pair's tile begins: its copies are shared out between the blocks. `gmem` and `smem` hold both
    operands, and scales after them where there are any.
    """
    row, col = place

    @pl.loop(0, steps)
    def _(step):
        slot, k = ring.acquire(before + step), plan.k_start(step)
        filled = ring.filled.at[slot]
        with jax.named_scope("load"):
            copy(plan, plan.a, gmem[0], plan.a.at(row, k), smem[0].at[slot], filled)
            copy(plan, plan.b, gmem[1], plan.b.at(col, k), smem[1].at[slot], filled)
            if plan.scaled:
                copy_scales(plan, gmem[2:], [ref.at[slot] for ref in smem[2:]], plan.scales_at(row, col), step, filled)


def copy(plan: Plan, operand, gmem, at, smem, filled):
    """Starts the copies of an operand's tile that begins `at`; in a pair each block gets its half of the rows."""
    half = plgpu.CopyPartition.PARTITIONED(int(operand.transposed))
    pair = {} if plan.pair is None else dict(collective_axes=plan.pair, leader_tracked=half)
    if operand.partner:
        for i in range(2):
            begin = [start + i * operand.partner * (dim == operand.transposed) for dim, start in enumerate(at)]
            copy(plan, dataclasses.replace(operand, partner=0), gmem, begin, smem.at[i], filled)
        return
    for piece in operand.pieces:
        rows, cols = plan.source(operand, at, piece)
        target = smem.at[piece] if operand.in_pieces else smem
        plgpu.copy_gmem_to_smem(gmem.at[pl.ds(*rows), pl.ds(*cols)], target, filled, **pair)


def copy_scales(plan: Plan, gmem, smem, units, step, filled):
    """Starts the copies of a step's scales; each block of a pair gets the scales of its rows of a, and all of b's."""
    partition = plgpu.CopyPartition
    counts = plan.config.cluster_m, plan.scale_rows[1] // LANES
    for source, target, unit, count, how in zip(
        gmem, smem, units, counts, (partition.PARTITIONED(0), partition.REPLICATED), strict=True
    ):
        pair = {} if plan.pair is None else dict(collective_axes=plan.pair, leader_tracked=how)
        plgpu.copy_gmem_to_smem(source.at[pl.ds(unit, count), pl.ds(step, 1)], target, filled, **pair)


def multiply(plan: Plan, ring: _device.Ring, smem, acc_tmem, scales_tmem, summed, stored, number, before, steps):
    """The multiply warpgroup: starts all products of a tile, into the accumulator whose turn it is.

    `number` tiles come before, and `before` steps.
    """
    acc, width = plan.accumulator(number), plan.config.tile_n
    parts = [acc_tmem.at[:, pl.ds(acc * plan.acc_columns + at, width)] for at in range(0, plan.acc_columns, width)]
    # Its last tile has left.
    pl.when(number >= plan.config.num_accumulators)(lambda: plgpu.barrier_wait(stored.at[acc]))

    def sum_up():
        @pl.loop(0, steps)
        def _(step):
            slot = ring.wait(before + step)
            a, b_tiles = plan.a_tile(smem[0].at[slot]), plan.b_tiles(smem[1].at[slot])
            scales = {}
            if plan.scaled:
                # The tensor cores copy and multiply in the order of issue: neither waits for the other.
                for source, target in zip(smem[2:], scales_tmem, strict=True):
                    plgpu.async_copy_scales_to_tmem(source.at[slot], target, collective_axis=plan.pair)
                scales = dict(zip(("a_scale", "b_scale"), scales_tmem, strict=True))
            with jax.named_scope("tcgen05"):
                how = dict(accumulate=step > 0, collective_axis=plan.pair, **scales)
                for part, b in zip(parts, b_tiles, strict=True):
                    plgpu.tcgen05_mma(part, a, b, **how)
                plgpu.tcgen05_commit_arrive(ring.freed.at[slot], collective_axis=plan.pair)

        plgpu.tcgen05_commit_arrive(summed.at[acc], collective_axis=plan.pair)

    # The first block of a pair multiplies for both.
    sum_up() if plan.pair is None else pl.when(lax.axis_index(plan.pair) == 0)(sum_up)


def drain_accumulators(plan: Plan, stored, count):
    """The multiply warpgroup, at the end: waits until the last of `count` tiles have left tensor memory."""
    first = jnp.maximum(count - plan.config.num_accumulators, 0)
    pl.loop(first, count)(lambda number: plgpu.barrier_wait(stored.at[plan.accumulator(number)]))


def store(plan: Plan, bias_gmem, o_gmem, o_smem, acc_tmem, summed, stored, number, index):
    """A store warpgroup: its columns of a tile, from tensor memory through registers and shared memory into o."""
    c, (rows, width), wg = plan.config, plan.store_piece, lax.axis_index("role") - STORE
    (row, col), acc = plan.place(index), plan.accumulator(number)
    pieces = c.tile_n // c.epilogue_wgs // width
    o_tiled, o_tma = views(o_smem, plan.store_piece, plan.interpreted)
    plgpu.barrier_wait(summed.at[acc])
    for piece in range(pieces):
        at = (wg * pieces + piece) * width
        values = plgpu.async_load_tmem(acc_tmem.at[:, pl.ds(acc * c.tile_n + at, width)], layout=plgpu.Layout.TCGEN05)
        if bias_gmem is not None:
            layout = plgpu.Layout.TCGEN05.reduce(0)
            values += _device.spread(_device.load(bias_gmem.at[pl.ds(col + at, width)], layout), 1, (rows, width))
        values = plan.activation(values).astype(plan.out_dtype)
        slot = _device.rem(number * pieces + piece, c.store_slots)
        plgpu.wait_smem_to_gmem(c.store_slots - 1, wait_read_only=True)  # TMA has read what was in this slot.
        o_tiled[wg, slot, 0, 0] = values
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(o_tma.at[wg, slot, 0, 0], o_gmem.at[pl.ds(row, rows), pl.ds(col + at, width)])
    plgpu.wait_load_tmem()  # Otherwise the products of another tile could overwrite what is being loaded.
    plgpu.barrier_arrive(stored.at[acc])


def kernel(operands, bias_gmem, o_gmem, *, plan: Plan, a_smem, b_smem, o_smem, acc_tmem, filled, freed, summed, stored,
           a_scales_smem=None, b_scales_smem=None, a_scales_tmem=None, b_scales_tmem=None):  # fmt: skip
    """The kernel of all products of this family. `operands` holds a and b, and their scales after them."""
    role, ring = lax.axis_index("role"), _device.Ring(filled, freed, plan.num_stages)
    (a_smem, a_tma), (b_smem, b_tma) = plan.a.views(a_smem, plan.interpreted), plan.b.views(b_smem, plan.interpreted)
    scales_smem = (a_scales_smem, b_scales_smem) if plan.scaled else ()
    scales_tmem = (a_scales_tmem, b_scales_tmem) if plan.scaled else ()

    def tile(number, index):
        steps = plan.tiles.num_steps

        @_device.role(role == LOAD)
        def _():
            place = plan.tiles.place(index, 0, 0)
            load(plan, ring, operands, (a_tma, b_tma, *scales_smem), place, number * steps, steps)

        @_device.role(role == MULTIPLY)
        def _():
            smem = a_smem, b_smem, *scales_smem
            multiply(plan, ring, smem, acc_tmem, scales_tmem, summed, stored, number, number * steps, steps)

        @_device.role(role >= STORE)
        def _():
            store(plan, bias_gmem, o_gmem, o_smem, acc_tmem, summed, stored, number, index)

    count = each_tile(plan, tile)

    # No block leaves while tensor cores, or the other block of its pair, may still arrive at its barriers.
    pl.when(role == LOAD)(lambda: ring.drain(count * plan.tiles.num_steps))
    pl.when(role == MULTIPLY)(lambda: drain_accumulators(plan, stored, count))
    pl.when(role >= STORE)(lambda: plgpu.wait_smem_to_gmem(0))


@functools.partial(jax.jit, static_argnames=("plan", "params"))
def product(operands, bias, *, plan: Plan, params):
    """`activation(a @ b.T + bias)`, of `operands` as the plan's say; scales, in units of 128 rows, follow them."""
    c, t = plan.config, plan.tiles
    piece = jax.ShapeDtypeStruct((c.tile_m * plan.store_piece[1],), jnp.float32)
    plan = dataclasses.replace(plan, activation=_numerics.lowerable(plan.activation, piece))
    a, b, *scales = operands
    bias = None if bias is None else _host.pad_to_tiles(bias.astype(jnp.float32), (c.tile_n,))
    out = launch(functools.partial(kernel, plan=plan), plan, (t.m, t.n), params)(
        (plan.a.pad(a), plan.b.pad(b), *scales), bias
    )
    return out[:, : t.n]


def launch(body, plan: Plan, shape, params):
    """`_host.kernel` of a `body` with these roles, for an o of this shape."""
    c = plan.config
    return _host.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(_host.padded_shape(shape, (1, 8)), plan.out_dtype),  # Rows for TMA.
        grid=(plan.clusters,),
        grid_names=("cluster",),
        cluster=(2,) if c.two_ctas else (),
        cluster_names=(plan.pair,) if c.two_ctas else (),
        num_threads=STORE + c.epilogue_wgs,
        thread_name="role",
        scratch_types=plan.scratch,
        compiler_params=params,
    )

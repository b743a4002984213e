# SPDX-License-Identifier: Apache-2.0
"""One kernel for a chain of products of few rows, and the norms between them. The weights of all products are one
stream, which never waits for a result.

A persistent block on each SM. Role table, a warpgroup each:

    compute    one for 64 rows, or two: all stages. It multiplies and stores units, normalises rows, adds up parts
    weights    copies tiles of weights, as fast as stages of the ring are given back, over the border between products
    x          copies tiles of what a product multiplies, once all blocks have stored it

Barrier table:

    barrier                      arrivals                           who waits
    w_filled[slot]               two copies                         compute
    w_freed[slot]                each compute warpgroup             weights
    x_filled[slot], x_freed      one copy; as above                 compute; x
    grid[i]                      each compute warpgroup of all      before stage i + 1: x, if it is a product, else
                                 blocks: stage i is stored          compute

While blocks wait for each other, the weights' ring fills: at the end of a wait, what the next product needs in its
first microseconds is in shared memory.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ... import _device, _host
from .grid import GridBarriers
from .plan import ROWS, AddParts, Normalize, Plan, Product, Rings

MEMORY_REGISTERS, COMPUTE_REGISTERS = 40, 208  # Registers per thread: of two memory and at most two compute warpgroups.


def block_index():
    return lax.axis_index("block")


def load_weights(plan: Plan, rings: Rings, refs: dict):
    """The weights warpgroup."""
    count = jnp.int32(0)
    for product in plan.products:

        def load_unit(i, count, product=product):
            col, _, start, end = product.unit(block_index(), i)
            operand, ring = plan.w_operand(product.cut.tile_n), rings.of_w

            @pl.loop(start, end)
            def _(step):
                slot = ring.acquire(count + step - start)
                for half, at in enumerate(product.places(col, product.turned(block_index(), step, start, end))):
                    operand.copy(refs[product.weights], at, rings.w_tma.at[slot, half], ring.filled.at[slot], None)

            return count + end - start

        count = lax.fori_loop(0, product.num_units(block_index()), load_unit, count)
    rings.of_w.drain(count)


def load_x(plan: Plan, rings: Rings, grid: GridBarriers, refs: dict):
    """The x warpgroup."""
    count = jnp.int32(0)
    row = 0 * block_index()  # Traced: JAX 0.12 refuses constant slices beyond an array, where TMA fills up with zeros.
    for number, product in enumerate(plan.stages):
        if not isinstance(product, Product):
            continue
        if number:
            grid.wait(number - 1)

        def load_unit(i, count, product=product):
            (_, _, start, end), each = product.unit(block_index(), i), product.x_tiles

            @pl.loop(start, end)
            def _(step):
                first = product.turned(block_index(), step, start, end) * each
                for tile in range(each):
                    slot = rings.of_x.acquire(count + (step - start) * each + tile)
                    at = row, (first + tile) * plan.x_operand.tile_k
                    plan.x_operand.copy(refs[product.x], at, rings.x_tma.at[slot], rings.of_x.filled.at[slot], None)

            return count + (end - start) * each

        count = lax.fori_loop(0, product.num_units(block_index()), load_unit, count)
    rings.of_x.drain(count)


def multiply(plan: Plan, rings: Rings, product: Product, counts, steps, *accs):
    """A compute warpgroup: the sums of its rows of a unit, in one accumulator or, gated, in two.

    `counts` are the tiles of x, and the steps, that went before.
    """
    wg, each = lax.axis_index("role"), product.x_tiles
    operand, (x_before, w_before) = plan.w_operand(product.cut.tile_n), counts

    def release(step):
        rings.of_w.release(w_before + step)
        for i in range(each):
            rings.of_x.release(x_before + step * each + i)

    @pl.loop(0, steps)
    def _(step):
        w_slot = rings.of_w.wait(w_before + step)
        x_slots = [rings.of_x.wait(x_before + step * each + i) for i in range(each)]
        for half in range(2):
            x = plan.x_operand.part(rings.x.at[x_slots[half % each]], wg, ROWS)
            w = operand.part(rings.w.at[w_slot, half], 0, product.cut.tile_n)
            plgpu.wgmma(accs[half % len(accs)], x, w.T)
        plgpu.wgmma_wait(2)  # The products of the step before have ended.
        pl.when(step > 0)(lambda: release(step - 1))

    values = [acc[...] for acc in accs]
    release(steps - 1)
    return values


def compute(plan: Plan, rings: Rings, product: Product, refs: dict, counts, activation):
    """A compute warpgroup: all units of a product; returns the counts after them."""
    mine, out = pl.ds(lax.axis_index("role") * ROWS, ROWS), refs[product.out]

    def compute_unit(i, counts):
        col, part, start, end = product.unit(block_index(), i)
        steps, columns = end - start, pl.ds(col, product.cut.tile_n)
        of_unit = functools.partial(multiply, plan, rings, product, counts, steps)
        accs = [plgpu.ACC((ROWS, product.cut.tile_n), jnp.float32)] * (2 if product.is_gated else 1)
        sums, *up = pl.run_scoped(of_unit, *accs)
        if product.is_gated:
            _device.store(out.at[mine, columns], (activation(sums) * up[0]).astype(out.dtype))
        else:
            _device.store(out.at[part, mine, columns], sums)
        return counts[0] + steps * product.x_tiles, counts[1] + steps

    return lax.fori_loop(0, product.num_units(block_index()), compute_unit, counts)


def strided(cols: int):
    return plgpu.Layout.WG_STRIDED((cols,), vec_size=math.gcd(cols // _device.WARPGROUP, 4))


def sum_of_parts(product: Product, refs: dict, row, cols, layout):
    """The parts of some columns of a row, added up in their order."""
    parts = [_device.load(refs[product.out].at[part, row, cols], layout) for part in range(product.cut.parts)]
    return functools.reduce(jnp.add, parts)


def normalize(plan: Plan, stage: Normalize, refs: dict, eps: float):
    """Compute warpgroup 0: the rows that are this block's."""
    layout = strided(stage.cols)
    load = lambda ref: _device.load(ref, layout).astype(jnp.float32)

    @pl.loop(0, _device.div(plan.rows - block_index() + plan.num_blocks - 1, plan.num_blocks))
    def _(i):
        row = block_index() + i * plan.num_blocks
        values = [load(refs[name].at[row]) for name in stage.arrays]
        if stage.product:
            values.append(sum_of_parts(stage.product, refs, row, pl.ds(0, stage.cols), layout))
        total = functools.reduce(jnp.add, values)
        inverse = lax.rsqrt(jnp.sum(total * total) * (1.0 / stage.cols) + eps)
        y = refs[stage.y].at[row]
        _device.store(y, (total * inverse * load(refs[stage.scale])).astype(y.dtype))
        if stage.total is not None:
            _device.store(refs[stage.total].at[row], total.astype(refs[stage.total].dtype))


def add_parts(plan: Plan, stage: AddParts, refs: dict):
    """A compute warpgroup: its share of the sums of all parts."""
    threads, wgs, n, out = _device.WARPGROUP, plan.num_blocks * plan.compute_wgs, stage.product.n, refs[stage.out]
    widths = [threads * vec for vec in (8, 4, 2, 1) if n % (threads * vec) == 0]
    # The narrowest pieces of which each warpgroup has one, or the widest.
    width = next((width for width in widths[::-1] if plan.rows * n // width <= wgs), widths[0])
    across, layout = n // width, strided(width)
    first = lax.axis_index("role") * plan.num_blocks + block_index()

    @pl.loop(0, _device.div(plan.rows * across - first + wgs - 1, wgs))
    def _(i):
        piece = first + i * wgs
        row, cols = _device.div(piece, across), pl.ds(_device.rem(piece, across) * width, width)
        _device.store(out.at[row, cols], sum_of_parts(stage.product, refs, row, cols, layout).astype(out.dtype))


def kernel(*refs, plan: Plan, names, activation, eps: float, x_smem, w_smem, x_filled, x_freed, w_filled, w_freed,
           ready=None):  # fmt: skip
    """The kernel of `mlp`. `names` are of all `refs` but the first, the counters of `grid.py`."""
    counters, refs = refs[0], dict(zip(names, refs[1:], strict=True))
    rings = plan.rings(x_smem, w_smem, x_filled, x_freed, w_filled, w_freed)
    role, wgs = lax.axis_index("role"), plan.compute_wgs
    counters = ready if plan.interpreted else counters
    grid = GridBarriers(counters, plan.num_barriers, plan.num_blocks * wgs, plan.interpreted)

    @_device.role(role == wgs, decrease_to=MEMORY_REGISTERS)
    def _():
        load_weights(plan, rings, refs)

    @_device.role(role == wgs + 1, decrease_to=MEMORY_REGISTERS)
    def _():
        load_x(plan, rings, grid, refs)

    @_device.role(role < wgs, increase_to=COMPUTE_REGISTERS)
    def _():
        counts = jnp.int32(0), jnp.int32(0)
        for number, stage in enumerate(plan.stages):
            if isinstance(stage, Product):
                counts = compute(plan, rings, stage, refs, counts, activation)
            else:
                if number:
                    grid.wait(number - 1)
                if isinstance(stage, AddParts):
                    add_parts(plan, stage, refs)
                else:
                    pl.when(role == 0)(functools.partial(normalize, plan, stage, refs, eps))
            if number < plan.num_barriers:
                grid.arrive(number)
        grid.leave()


def launch(plan: Plan, operands: dict, outs: dict, counters, *, activation, eps: float, params) -> dict:
    """The arrays of `outs`, by name, and those that stages hand over to each other."""
    rows = ROWS * plan.compute_wgs
    inner = {
        p.out: jax.ShapeDtypeStruct((rows, p.n), plan.dtype)
        if p.is_gated
        else jax.ShapeDtypeStruct((p.cut.parts, rows, p.tiles * p.cut.tile_n), jnp.float32)
        for p in plan.products
    }
    outs = outs | inner
    blocks = (plan.num_blocks,), ("block",)
    spread = dict(zip(("grid", "grid_names"), blocks, strict=True))
    if plan.interpreted:
        spread = dict(grid=(1,), grid_names=("unit",)) | dict(zip(("cluster", "cluster_names"), blocks, strict=True))
    run = _host.kernel(
        functools.partial(kernel, plan=plan, names=(*operands, *outs), activation=activation, eps=eps),
        out_type=list(outs.values()),
        num_threads=plan.compute_wgs + 2,
        thread_name="role",
        scratch_types=plan.scratch,
        compiler_params=params,
        **spread,
    )
    return dict(zip(outs, run(counters, *operands.values()), strict=True))

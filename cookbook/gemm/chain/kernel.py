# SPDX-License-Identifier: Apache-2.0
"""The kernel of a layer's MLP for few rows: the weights of all its products are one stream, which never waits.

    total = x + residual;  y = rms_norm(total) * scale;  h = activation(y @ gate.T) * (y @ up.T);  o = h @ down.T

A persistent block on each SM. Role table, a warpgroup each:

    compute    one for 64 rows, or two: normalise rows, multiply, store; add up the parts of the second product
    weights    copies tiles of weights, as fast as stages are given back: over the border between two products, too
    x          copies tiles of y or h, once all blocks have stored them

Barrier table:

    barrier                      arrivals                           who waits
    w_filled[stage]              two copies                         compute
    w_freed[stage]               each compute warpgroup             weights
    x_filled[stage], x_freed     one copy; as above                 compute; x
    grid NORMED                  each compute warpgroup of all      x, before the first product
                                 blocks: its rows of y are stored
    grid JOINED                  ... its tiles of h                 x, before the second product
    grid SUMMED                  ... its parts of o                 compute, before they are added up

While blocks wait for each other, the weights' stages fill: at the end of a wait most of what the next product's first
microseconds need is in shared memory.
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
from .plan import ROWS, Plan, Product, Rings

NORMED, JOINED, SUMMED = range(3)
MEMORY_REGISTERS, COMPUTE_REGISTERS = 40, 208  # Registers per thread: of two memory and at most two compute warpgroups.


def block_index():
    return lax.axis_index("block")


def load_weights(plan: Plan, rings: Rings, products):
    """The weights warpgroup. `products` are pairs: a product, and its weights in global memory."""
    count = 0
    for product, w_gmem in products:

        def load_unit(i, count, product=product, w_gmem=w_gmem):
            col, _, start, end = product.unit(block_index(), i)

            @pl.loop(start, end)
            def _(step):
                stage = rings.of_w.acquire(count + step - start)
                for half, at in enumerate(product.weights(col, step)):
                    plan.w_operand.copy(w_gmem, at, rings.w_tma.at[stage, half], rings.of_w.filled.at[stage], None)

            return count + end - start

        count = lax.fori_loop(0, product.num_units(block_index()), load_unit, jnp.int32(count))
    rings.of_w.drain(count)


def load_x(plan: Plan, rings: Rings, grid: GridBarriers, products):
    """The x warpgroup. `products` are triples: a product, what it multiplies, and the barrier to wait at, or None."""
    count = 0
    for product, x_gmem, ready in products:
        if ready is not None:
            grid.wait(ready)

        def load_unit(i, count, product=product, x_gmem=x_gmem):
            _, _, start, end = product.unit(block_index(), i)
            first, end = start * product.x_tiles, end * product.x_tiles

            @pl.loop(first, end)
            def _(tile):
                stage = rings.of_x.acquire(count + tile - first)
                plan.x_operand.copy(
                    x_gmem, (0, tile * plan.x_operand.tile_k), rings.x_tma.at[stage], rings.of_x.filled.at[stage], None
                )

            return count + end - first

        count = lax.fori_loop(0, product.num_units(block_index()), load_unit, jnp.int32(count))
    rings.of_x.drain(count)


def multiply(plan: Plan, rings: Rings, product: Product, counts, steps, *accs):
    """A compute warpgroup: the sums of its rows of a unit, in one accumulator or, gated, in two.

    `counts` are the tiles of x, and the stages of weights, that went before.
    """
    wg, each = lax.axis_index("role"), product.x_tiles
    x_before, w_before = counts

    def release(step):
        rings.of_w.release(w_before + step)
        for i in range(each):
            rings.of_x.release(x_before + step * each + i)

    @pl.loop(0, steps)
    def _(step):
        w_stage = rings.of_w.wait(w_before + step)
        x_stages = [rings.of_x.wait(x_before + step * each + i) for i in range(each)]
        for half in range(2):
            x = plan.x_operand.part(rings.x.at[x_stages[half % each]], wg, ROWS)
            w = plan.w_operand.part(rings.w.at[w_stage, half], 0, product.tile_n)
            plgpu.wgmma(accs[half % len(accs)], x, w.T)
        plgpu.wgmma_wait(2)  # The products of the step before have ended.
        pl.when(step > 0)(lambda: release(step - 1))

    values = [acc[...] for acc in accs]
    release(steps - 1)
    return values


def compute(plan: Plan, rings: Rings, product: Product, counts, store):
    """A compute warpgroup: `store(col, part, sums)` of all units; returns the counts after them."""

    def compute_unit(i, counts):
        col, part, start, end = product.unit(block_index(), i)
        steps = end - start
        of_unit = functools.partial(multiply, plan, rings, product, counts, steps)
        accs = [plgpu.ACC((ROWS, product.tile_n), jnp.float32)] * (2 if product.is_gated else 1)
        store(col, part, pl.run_scoped(of_unit, *accs))
        return counts[0] + steps * product.x_tiles, counts[1] + steps

    return lax.fori_loop(0, product.num_units(block_index()), compute_unit, counts)


def vec_of(cols: int) -> int:
    return math.gcd(cols // _device.WARPGROUP, 4)


def normalize(plan: Plan, arrays, scale_gmem, y_gmem, total_gmem, eps: float):
    """Compute warpgroup 0: the rows of y that are this block's, of the sum of `arrays`, which also goes to `total_gmem`
    if there is one."""
    form = plgpu.Layout.WG_STRIDED((plan.hidden,), vec_size=vec_of(plan.hidden))
    load = lambda ref: _device.load(ref, form).astype(jnp.float32)

    @pl.loop(0, _device.div(plan.rows - block_index() + plan.num_blocks - 1, plan.num_blocks))
    def _(i):
        row = block_index() + i * plan.num_blocks
        total = functools.reduce(jnp.add, [load(ref.at[row]) for ref in arrays])
        inverse = lax.rsqrt(jnp.sum(total * total) * (1.0 / plan.hidden) + eps)
        _device.store(y_gmem.at[row], (total * inverse * load(scale_gmem)).astype(y_gmem.dtype))
        if total_gmem is not None:
            _device.store(total_gmem.at[row], total.astype(total_gmem.dtype))


def add_parts(plan: Plan, parts_gmem, o_gmem):
    """A compute warpgroup: its share of o, each value the sum of all parts in their order."""
    threads, wgs = _device.WARPGROUP, plan.num_blocks * plan.compute_wgs
    widths = [threads * vec for vec in (8, 4, 2, 1) if plan.hidden % (threads * vec) == 0]
    # The widest pieces of which each warpgroup has one, or the narrowest.
    width = next((w for w in reversed(widths) if plan.rows * plan.hidden // w <= wgs), widths[0])
    across = plan.hidden // width
    form = plgpu.Layout.WG_STRIDED((width,), vec_size=vec_of(width))
    first = lax.axis_index("role") * plan.num_blocks + block_index()

    @pl.loop(0, _device.div(plan.rows * across - first + wgs - 1, wgs))
    def _(i):
        piece = first + i * wgs
        row, col = _device.div(piece, across), pl.ds(_device.rem(piece, across) * width, width)
        parts = [_device.load(parts_gmem.at[part, row, col], form) for part in range(plan.config.parts)]
        _device.store(o_gmem.at[row, col], functools.reduce(jnp.add, parts).astype(o_gmem.dtype))


def kernel(*refs, plan: Plan, activation, eps: float, num_arrays: int, num_totals: int, x_smem, w_smem, x_filled,
           x_freed, w_filled, w_freed, ready=None):  # fmt: skip
    """The kernel of `mlp`. `refs`: the arrays that are added up and normalised, scale, both weights, counters; o, their
    sum if it is wanted, y, h, the parts of o."""
    arrays, (scale_gmem, up_gmem, down_gmem, counters) = refs[:num_arrays], refs[num_arrays : num_arrays + 4]
    o_gmem, *totals, y_gmem, h_gmem, parts_gmem = refs[num_arrays + 4 :]
    rings = plan.rings(x_smem, w_smem, x_filled, x_freed, w_filled, w_freed)
    arrivals = plan.num_blocks * plan.compute_wgs
    grid = GridBarriers(ready if plan.interpreted else counters, plan.num_barriers, arrivals, plan.interpreted)
    role, wgs = lax.axis_index("role"), plan.compute_wgs

    @_device.role(role == wgs, decrease_to=MEMORY_REGISTERS)
    def _():
        load_weights(plan, rings, [(plan.up, up_gmem), (plan.down, down_gmem)])

    @_device.role(role == wgs + 1, decrease_to=MEMORY_REGISTERS)
    def _():
        load_x(plan, rings, grid, [(plan.up, y_gmem, NORMED), (plan.down, h_gmem, JOINED)])

    @_device.role(role < wgs, increase_to=COMPUTE_REGISTERS)
    def _():
        pl.when(role == 0)(lambda: normalize(plan, arrays, scale_gmem, y_gmem, totals[0] if totals else None, eps))
        grid.arrive(NORMED)
        mine, columns = pl.ds(role * ROWS, ROWS), lambda col: pl.ds(col, plan.config.tile_n)

        def store_h(col, _, sums):
            gate, up = sums
            _device.store(h_gmem.at[mine, columns(col)], (activation(gate) * up).astype(h_gmem.dtype))

        def store_part(col, part, sums):
            _device.store(parts_gmem.at[part, mine, columns(col)], sums[0])

        counts = compute(plan, rings, plan.up, (jnp.int32(0), jnp.int32(0)), store_h)
        grid.arrive(JOINED)
        compute(plan, rings, plan.down, counts, store_part)
        grid.arrive(SUMMED)
        grid.wait(SUMMED)
        add_parts(plan, parts_gmem, o_gmem)
        grid.leave()


def launch(plan: Plan, arrays, scale, w_gate_up, w_down, counters, *, activation, eps, out_dtype, total_dtype, params):
    """[o, or o and the sum of `arrays`]."""
    of = jax.ShapeDtypeStruct
    rows = ROWS * plan.compute_wgs
    totals = [] if total_dtype is None else [of((plan.rows, plan.hidden), total_dtype)]
    columns = plan.down.tiles * plan.down.tile_n
    out_type = [
        of((plan.rows, plan.hidden), out_dtype), *totals, of((plan.rows, plan.hidden), plan.dtype),
        of((rows, plan.inner), plan.dtype), of((plan.config.parts, rows, columns), jnp.float32),
    ]  # fmt: skip
    blocks = (plan.num_blocks,), ("block",)
    spread = dict(zip(("grid", "grid_names"), blocks, strict=True))
    if plan.interpreted:
        spread = dict(grid=(1,), grid_names=("unit",)) | dict(zip(("cluster", "cluster_names"), blocks, strict=True))
    run = _host.kernel(
        functools.partial(
            kernel, plan=plan, activation=activation, eps=eps, num_arrays=len(arrays), num_totals=len(totals)
        ),
        out_type=out_type,
        num_threads=plan.compute_wgs + 2,
        thread_name="role",
        scratch_types=plan.scratch,
        compiler_params=params,
        **spread,
    )
    return run(*arrays, scale, w_gate_up, w_down, counters)[: 1 + len(totals)]

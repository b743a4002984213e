# SPDX-License-Identifier: Apache-2.0
"""The backward kernel of the norms.

With t = x or x * silu(gate), n = (t - mean) * inverse, y = n * weight + bias or that times silu(gate), and e = dy or
dy * silu(gate):

    dt[c] = inverse * (e * weight - n * mean_c(e * weight * n)), less inverse * mean_c(e * weight) if t is centred
    dweight[c] = sum_r e * n,    dbias[c] = sum_r e

A grid that stays makes all in one pass: each block takes every so many rows and adds up its part of dweight and dbias
in shared memory; a second, small kernel sums these parts, in the same order in every run. While a block works on a row,
the next ones are in flight to a ring of shared memory, if rows are multiples of 16 bytes and fit. Rows that do not fit
the registers are read twice, from shared memory if it holds one of them, and else from the L2 cache; then a block adds
up its part in its row of the result. That of rms_norm is left to the second kernel, which reads x and dy once more. The
ring's barriers:

    barrier       arrivals                                   who waits
    filled[slot]  the copies of a row of x, of the gate, dy  the warpgroup, before it loads the row into registers
    freed[slot]   the warpgroup, which has loaded it         the warpgroup, before it copies another row into the slot

Where rows of the weight take turns (`Norm.groups`), each block meets the same ones in all its tiles.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .. import _device, _host
from . import leading
from .norm import Norm, centre, each, moments, named, sigmoid, total, weight_rows
from .plan import Config, Plan, default_config, short_block_rows

BLOCKS_PER_SM = 2  # As many blocks as the registers allow.
AHEAD_BYTES = 112_000  # Shared memory of each of these blocks.
REGISTER_VALUES = 64  # Values of x, and as many of dy and of the weight.
MORE_REGISTER_VALUES = 40  # With a third array.


def rows_ahead(plan: Plan, dtypes, num_sums: int) -> int:
    """Rows of arrays of `dtypes` that are in flight to shared memory while a block works on another: at most two."""
    row_bytes = plan.cols * sum(dtype.itemsize for dtype in dtypes)
    fit = (AHEAD_BYTES - num_sums * 4 * plan.num_groups * plan.group * math.prod(plan.shape)) // row_bytes
    return min(2, fit) if plan.spread and plan.cols * plan.itemsize % 16 == 0 and fit > 0 else 0


def _is_summed_later(plan: Plan, norm: Norm, num_sums: int) -> bool:
    """Whether dweight is a sum of products that a second kernel reads again, of x, dy and the 1 / root of each row: of
    rows that do not fit the registers, which is faster than sums in memory (4096 x 32768: 427 us in place of 744)."""
    return plan.num_groups > 1 and num_sums == norm.groups == 1 and not norm.is_centered and not norm.gate


@dataclasses.dataclass(frozen=True)
class Parts:
    """Pieces of a group of a row."""

    t: list  # The values that are normalised.
    e: list  # dy, or of a gate after the norm dy * silu(gate).
    share: list | None  # sigmoid(gate).


def _parts(norm: Norm, values) -> Parts:
    x, *second, dy = values
    if not norm.gate:
        return Parts(x, dy, None)
    share = [sigmoid(z) for z in second[0]]
    gated = lambda pieces: each(lambda v, z, s: v * z * s, pieces, *second, share)
    return Parts(gated(x), dy, share) if norm.gate == "before" else Parts(x, gated(dy), share)


def _sums(norm: Norm, plan: Plan, parts: Parts, scale, shift, g):
    """`moments` of a group; sums over each row of (t - `shift`) * e * weight, and of e * weight, if t is centred."""
    products = each(lambda v, s, d: v * s * d, _minus(parts.t, shift), scale, parts.e)
    sums = *moments(norm, plan, parts.t, shift, g), total(plan, products, g)
    return (*sums, total(plan, each(jnp.multiply, parts.e, scale), g)) if norm.is_centered else sums


def _finish(norm: Norm, plan: Plan, sums, shift):
    """Mean and 1 / root; and in dt, the factor of t - mean, and what all columns lose (None if nothing)."""
    lost = None
    if norm.is_centered:
        *sums, lost = sums
    *sums, products = sums
    mean, inverse = norm.finish(sums, plan.cols, shift)
    if norm.is_centered:
        products = products if mean is shift else products - (mean - shift) * lost
        lost = lost * inverse * (1.0 / plan.cols)
    return mean, inverse, inverse * inverse * inverse * products * (1.0 / plan.cols), lost


def _minus(pieces, value):
    return pieces if value is None else [v - value for v in pieces]


def _gradients(norm: Norm, values, share, weights, mean, inverse, slope, lost):
    """Yields, piece by piece: dx and of a gate dgate; t - mean; and e."""
    x, *second, dy = values
    for p, (scale, *bias) in enumerate(zip(*weights, strict=True)):
        t, e = x[p], dy[p]
        if norm.gate:
            # Not the order of `_parts`, or the compiler would keep these products, and lack registers.
            gate, silu = second[0][p], second[0][p] * share[p]
            turn = share[p] * (1.0 + gate * (1.0 - share[p]))  # The derivative of silu.
            t, e = (t * silu, e) if norm.gate == "before" else (t, e * silu)
        off = t if mean is None else t - mean
        dt = e * scale * inverse - off * slope
        dt = dt if lost is None else dt - lost
        if norm.gate == "before":
            yield (dt * silu, dt * x[p] * turn), off, e
        elif norm.gate:
            y = functools.reduce(jnp.add, bias, off * inverse * scale)
            yield (dt, dy[p] * y * turn), off, e
        else:
            yield (functools.reduce(jnp.add, [pieces[p] for pieces in second], dt),), off, e


def _backward_kernel(inputs, weights_gmem, *outs, plan: Plan, norm: Norm, ahead: int, sums_smem=None, filled=None,
                     freed=None, **rows_smem):  # fmt: skip
    """`inputs`: x, then the gate or the gradient of the sum, dy. `outs`: dx, dgate, and the blocks' parts of dweight
    and dbias. Where rows are copied ahead, inputs are flat, unless they are beyond offsets of 32 bits, the only ones
    that copies take."""
    turns, tile = plan.tiles(lax.axis_size("block"))
    gradients_gmem, sums_gmem = outs[: -len(weights_gmem)], outs[-len(weights_gmem) :]
    is_summed_later = _is_summed_later(plan, norm, len(weights_gmem))
    block, is_one_group = lax.axis_index("block"), plan.num_groups == 1
    are_sums_shared = is_one_group or ahead > 0
    ring, at = _device.Ring(filled, freed, ahead), lambda smem, slot: smem.at[pl.ds(slot * plan.cols, plan.cols)]

    def start(i):
        """Starts the copies of the row of turn `i`."""
        slot, (_, row) = ring.acquire(i), tile(i)
        for gmem, smem in zip(inputs, rows_smem.values(), strict=True):
            # Inside the array, so that any length is one copy.
            whole = gmem.at[pl.ds(row * plan.cols, plan.cols)] if gmem.ndim == 1 else gmem.at[row]
            plgpu.copy_gmem_to_smem(whole, at(smem, slot), filled.at[slot], oob_mode=plgpu.OOBFillMode.UNDEFINED)

    def load(i, g):
        """The inputs of a group of turn `i`."""
        if not ahead:
            return [plan.load(x, tile(i)[1], g) for x in inputs]
        slot = ring.wait(i) if is_one_group else ring.slot(i)
        values = [plan.load(at(smem, slot), 0, g) for smem in rows_smem.values()]
        if is_one_group:
            release(i)
        return values

    def release(i):
        plgpu.commit_smem()  # Without it TMA may overwrite the slot while loads from it are in flight.
        ring.release(i)
        pl.when(i + ahead < turns)(lambda: start(i + ahead))

    def place(k, g, p):
        """Where this block adds up its part of dweight (`k` 0) or dbias (1): of piece `p` of a group."""
        if are_sums_shared:
            return sums_smem.at[(k * plan.num_groups + g) * plan.group + p]
        return sums_gmem[k].at[block, pl.ds((g * plan.group + p) * plan.shape[0], plan.shape[0])]

    def for_each_place(visit):
        for k in range(len(sums_gmem)):
            for p in range(plan.group):
                if is_one_group:
                    visit(k, 0, p)
                else:
                    pl.loop(0, plan.num_groups)(lambda g, k=k, p=p: visit(k, g, p))

    def visit(i):
        index, row = tile(i)
        if ahead and not is_one_group:
            ring.wait(i)
        if is_one_group:
            values = load(i, 0)
            kept = values, _parts(norm, values)
        group = lambda g: kept if is_one_group else ((values := load(i, g)), _parts(norm, values))
        weights = lambda g, late=False: norm.weights(plan, weights_gmem, row, g, late)

        shift = centre(norm, plan, group(0)[1].t) if norm.is_centered else None
        sums = lambda g: _sums(norm, plan, group(g)[1], weights(g)[0], shift, g)
        if is_one_group:
            sums = sums(0)
        else:
            zeros = (plan.per_row(0.0),) * (4 if norm.is_centered else 2)
            step = lambda g, so_far: jax.tree.map(jnp.add, so_far, sums(g))
            sums = lax.fori_loop(0, plan.num_groups, step, zeros)
        mean, inverse, *rest = _finish(norm, plan, sums, shift)
        counted = plan.fresh_rows(inverse, index, row)

        def finish(g):
            values, parts = group(g)
            # With a gate registers lack, and weights come from the L1 cache as they are needed.
            late = norm.gate is not None and plan.spread
            found = _gradients(norm, values, parts.share, weights(g, late), mean, inverse, *rest)
            for p, (gradients, off, e) in enumerate(found if late else list(found)):
                for out, gradient in zip(gradients_gmem, gradients, strict=True):
                    plan.store_piece(out, row, g, p, gradient)
                terms = [] if is_summed_later else [off * e * counted, plan.fresh_rows(e, index, row)]
                for k, term in enumerate(terms[: len(sums_gmem)]):
                    _device.store(place(k, g, p), _device.load(place(k, g, p), plan.layout) + term)

        finish(0) if is_one_group else pl.loop(0, plan.num_groups)(finish)
        if ahead and not is_one_group:
            release(i)
        if is_summed_later:
            sums_gmem[0][row] = inverse

    for i in range(ahead):
        pl.when(i < turns)(functools.partial(start, i))
    # Each thread reads what it wrote itself: there is nothing to wait for.
    if not is_summed_later:
        for_each_place(lambda *where: _device.store(place(*where), plan.zeros()))
    pl.loop(0, turns)(visit)
    if ahead:
        ring.drain(turns)
    if are_sums_shared:
        first = block * plan.config.block_rows
        for k, out in enumerate(sums_gmem):
            load_sums = lambda g, k=k: [_device.load(place(k, g, p), plan.layout) for p in range(plan.group)]
            store = lambda g, out=out, load_sums=load_sums: plan.store(out, first, g, load_sums(g))
            store(0) if is_one_group else pl.loop(0, plan.num_groups)(store)


def _scratch(plan: Plan, ahead: int, dtypes, num_sums: int) -> dict:
    if plan.num_groups > 1 and not ahead:
        return {}
    scratch = dict(sums_smem=plgpu.SMEM((num_sums * plan.num_groups * plan.group, *plan.shape), jnp.float32))
    if not ahead:
        return scratch
    rows = {f"row{i}_smem": plgpu.SMEM((ahead * plan.cols,), dtype) for i, dtype in enumerate(dtypes)}
    filled, freed = (_device.barriers(ahead, arrivals) for arrivals in (len(dtypes), 1))
    return scratch | rows | dict(filled=filled, freed=freed)


def backward_plan(rows: int, cols: int, itemsize: int, blocks: int, values: int) -> Plan:
    """The plan of the backward kernel, of which at most so many blocks run. `values` fit a thread's registers."""
    config = default_config(rows, cols, itemsize, values)
    # Few blocks stay, which need more rows at once than many: 16 values per thread, from 8 rows.
    if config.block_rows > 1:
        config = Config(short_block_rows(rows, cols, itemsize, 16, 8, blocks), values)
    plan = Plan(rows, cols, itemsize, config)
    # Rows that do not fit the registers are spread over the warpgroup.
    return plan if plan.num_groups == 1 else Plan(rows, cols, itemsize, Config(1, values))


def _padded(x, rows: int, **how):
    """`x` with so many rows."""
    return jnp.pad(x, ((0, rows - len(x)), (0, 0)), **how)


def _columns(plan: Plan, sums):
    """Sums as a block has them in its row of a result, piece after piece, as sums of columns."""
    turns = [where for g in range(plan.num_groups) for where in plan.starts(g)]
    turn, start = next(((turn, start) for turn, start in turns if turn != start), (plan.cols, plan.cols))
    return jnp.concatenate([sums[:, :turn], sums[:, 2 * turn - start : turn + plan.cols - start]], axis=1)


@functools.partial(jax.jit, static_argnames=("norm", "dtypes", "target", "params"))
def call_backward(arrays, weights, dy, norm: Norm, dtypes, target: _host.Target, params):
    """Gradients of what is normalised, or of x and the gate, as `dtypes`; and those of the weights, which are summed in
    two stages: by each block over its rows, and then over the blocks.

    `arrays`: x and the gate; or the sum and its gradient, which is added.
    """
    inputs, (rows, cols), itemsize = (*arrays, dy), arrays[0].shape, arrays[0].dtype.itemsize
    most = BLOCKS_PER_SM * target.num_sms
    values = REGISTER_VALUES if len(inputs) == 2 else MORE_REGISTER_VALUES
    plan = backward_plan(rows, cols, itemsize, most, values)
    # After so many blocks the rows of the weight are the same again.
    unit = norm.groups // math.gcd(norm.groups, plan.config.block_rows)
    tile_rows = plan.config.block_rows
    if rows < unit * tile_rows or (norm.groups > 1 and rows % tile_rows):
        # The last row again, whose 1 / root is finite if the row's is, but with a dy of 0.
        full = max(unit, pl.cdiv(rows, tile_rows)) * tile_rows
        inputs = [*(_padded(x, full, mode="edge") for x in inputs[:-1]), _padded(dy, full)]
        plan = dataclasses.replace(plan, rows=full)
    num_blocks = max(unit, min(most, plan.num_blocks) // unit * unit)
    input_dtypes = [x.dtype for x in inputs]
    is_summed_later = _is_summed_later(plan, norm, len(weights))
    ahead = 0 if is_summed_later else rows_ahead(plan, input_dtypes, len(weights))
    sums_shape, are_in_pieces = (num_blocks * tile_rows, cols), plan.num_groups > 1 and not ahead
    if is_summed_later:
        sums_shape = (plan.rows,)
    elif are_in_pieces:
        sums_shape = (num_blocks, plan.num_groups * plan.group * plan.shape[0])
    out_types = [jax.ShapeDtypeStruct((plan.rows, cols), dtype) for dtype in dtypes]
    if ahead and plan.rows * cols < 2**31:
        inputs = [x.reshape(-1) for x in inputs]
    outs = _host.kernel(
        functools.partial(named(norm.op, _backward_kernel), plan=plan, norm=norm, ahead=ahead),
        out_type=out_types + [jax.ShapeDtypeStruct(sums_shape, jnp.float32)] * len(weights),
        grid=(num_blocks,),
        grid_names=("block",),
        scratch_types=_scratch(plan, ahead, input_dtypes, len(weights)),
        compiler_params=params,
    )(list(inputs), [weight_rows(norm, weight, tile_rows) for weight in weights])
    gradients, sums = outs[: len(dtypes)], outs[len(dtypes) :]
    if is_summed_later:
        sums = [leading.sum_leading(target, params, weights[0].dtype, inputs[0], inputs[-1], *sums)]
        return [x[:rows] for x in gradients], sums
    if are_in_pieces:
        sums = [_columns(plan, part) for part in sums]
    sums = [
        leading.sum_leading(target, params, weight.dtype, part.reshape(-1, weight.size)).reshape(weight.shape)
        for part, weight in zip(sums, weights, strict=True)
    ]
    return [x[:rows] for x in gradients], sums

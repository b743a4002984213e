# SPDX-License-Identifier: Apache-2.0
"""How probable what is more probable than a candidate is: sums of exponentials, in one read.

A block of one warpgroup takes a part of a row, which it keeps in registers: its maximum, and then the sum of its
exponentials and for each candidate the sum of those above it. The parts are the same however many rows there are, and
their sums are added in one order, so a row's results do not depend on its batch.

Barriers: the reductions have their own. Bound by: memory, one read.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from .. import _host
from .._device import WARPGROUP
from . import chain, threads
from .chain import num_wanted
from .kernel_best import best_plan
from .kernel_draw import LOWEST_FLOAT, inverse, share_of
from .logits import Logits, leaves, logit, number_of
from .part import Part, from_key, to_key
from .plan import Plan, plan_of

VALUES = 64  # Values of a part that a thread keeps in registers, so that they are loaded once.


def logit_key(x, column):
    return to_key(logit(x))


def part_plan(cols: int) -> Plan:
    """The parts of a row, the same for any number of rows; of a piece each."""
    plan = plan_of(1, cols, 1, 0, num_sms=1, values=VALUES)
    return dataclasses.replace(plan, part=plan.piece)


def nth(each, j):
    """`each[j]` of a few numbers, or of arrays with `j` as an array."""
    return functools.reduce(lambda found, i: jnp.where(j == i, each[i], found), range(1, len(each)), each[0])


def shares(part: Part, p, loaded, scale, interpreted: bool):
    """(top, whole, above): the highest logit of a part; functions that add up what each logit takes of that, its share:
    `whole()` all, `above(value)` the shares of what is above a logit."""
    x, vec = part.fresh(p, logit(loaded), -jnp.inf), part.plan.vec
    top = jnp.max(threads.highest(x, vec, interpreted))
    share = share_of(x, top, scale)
    whole = lambda: jnp.sum(threads.totals(share, vec, interpreted))
    return top, whole, lambda value: jnp.sum(threads.totals_above(x, share, value, vec, interpreted))


def _masses(*refs, plan: Plan, of_refs, num_slots: int, interpreted: bool):
    *refs, out_gmem, smem = refs
    logits, temperature, limits, given = of_refs(refs)
    row, block = lax.axis_index("rows"), lax.axis_index("part")
    x_row, part, zeros = logits.of_row(row), Part(plan, None, None), threads.number() * 0
    scale = inverse(number_of(temperature, row))
    x = part.logits(x_row, 0, interpreted)  # In flight while candidates are compared.
    if limits is None:
        num, column = 1, given[row]
        found = [(zeros + column, to_key(logit(x_row.at(column)) + zeros))]
    else:
        num, most = num_wanted(*(number_of(ref, row) for ref in limits)), chain.SLOTS - 1
        some = lambda n: chain.joined([ref.at[row] for ref in given], num_slots, n, smem, interpreted)
        few = lambda: some(chain.FEW) + [[zeros + chain.UNKNOWN, zeros]] * (most - chain.FEW)
        found = lax.cond(num == chain.FEW, few, lambda: some(most))
    top, whole, above = shares(part, 0, x, scale, interpreted)
    out_gmem[row, 0, block], out_gmem[row, 1, block] = top, whole()

    columns, values = zip(*((column, from_key(key, jnp.float32)) for column, key in found), strict=True)
    needed, floor = zeros, zeros - jnp.inf  # A candidate that is not above those before it is refused with them.
    for j in range(len(found)):
        needed += jnp.where((columns[j] != chain.UNKNOWN) & (values[j] > floor), 1 << j, 0)
        floor = jnp.maximum(floor, values[j])
    needed = jnp.max(needed)

    def sum_above(j, _):  # In a loop, because the compiler would sum up for several at once, out of registers.
        value = nth(values, zeros + j)
        for i, number in enumerate((value, nth(columns, zeros + j).astype(jnp.float32)), 1):
            threads.store_one(out_gmem.at[row, 2 + i * len(found) + j, pl.ds(block, 1)], number, interpreted)

        @pl.when(((needed >> j) & 1) != 0)
        def _():
            out_gmem[row, 2 + j, block] = above(value)

    lax.fori_loop(0, num, sum_above, None)


def masses(logits: Logits, temperature, limits, candidates, target: _host.Target, params):
    """(rows, 2 + 3 * num, width) float32, of each part of a row: the highest logit, the sum of exp((logit - it) /
    temperature), and for each of `num` candidates the sum of those above it, its logit and its column.

    `candidates` is what `chains` found for `limits`, joined up to `num_wanted(*limits)`; or, where `limits` is None, a
    column for each row.
    """
    plan, rows = part_plan(logits.shape[1]), logits.shape[0]
    # Some numbers for each thread of what reads them, of which those beyond the row's parts are never used.
    width = WARPGROUP * pl.cdiv(plan.num_parts, WARPGROUP)
    num_slots = best_plan(*logits.shape, target.num_sms).num_parts * chain.SLOTS
    arrays, of_refs = leaves((logits, temperature, limits, candidates))
    most = 1 if limits is None else chain.SLOTS - 1
    return _host.kernel(
        functools.partial(_masses, plan=plan, of_refs=of_refs, num_slots=num_slots, interpreted=target.interpreted),
        out_type=jax.ShapeDtypeStruct((rows, 2 + 3 * most, width), jnp.float32),
        grid=(rows, plan.num_parts),
        grid_names=("rows", "part"),
        scratch_types=[chain.SCRATCH],
        compiler_params=params,
    )(*arrays)


def tree_sum(x):
    """The sum over the last axis, always in the same order, which XLA's is not."""
    while x.shape[-1] > 1:
        half = -(-x.shape[-1] // 2)
        x = x[..., :half] + jnp.pad(x[..., half:], [(0, 0)] * (x.ndim - 1) + [(0, 2 * half - x.shape[-1])])
    return x[..., 0]


def log_sum(parts, cols: int):
    """(rows,) log of the sum of exp(logits), of `masses` at a temperature of 1."""
    tops, sums = parts[:, :2, : part_plan(cols).num_parts].swapaxes(0, 1)
    top = jnp.max(tops, axis=1)
    weight = jnp.exp(tops - jnp.maximum(top, LOWEST_FLOAT)[:, None])
    return top + jnp.log(tree_sum(sums * weight))

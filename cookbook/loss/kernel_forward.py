# SPDX-License-Identifier: Apache-2.0
"""The loss alone: statistics of rows of logits that are never stored.

    z = hidden @ weight^T   in the accumulators of gemm's kernel, float32
    per tile and row        m = max z,   l = sum exp(z - m),   z of the label,   sum z      (3 or 4, parts, rows)
    over all parts          m = max m_i,   l = sum l_i exp(m_i - m),   the sums             by XLA

This is the online normalizer of `kernel.py` with tiles of columns in place of pieces: a compute warpgroup reduces its
columns of a tile while they are in registers, where the kernel of `gemm/kernel.py`, whose roles and barriers these are,
would store them.

Bound by: the tensor cores.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .. import _device, _host
from ..gemm.kernel import kernel, store
from ..gemm.launch import launch
from ..gemm.plan import Plan
from . import marks, products
from .kernel import IGNORED, LOG2_E, LOWEST, capped

PIECE = 32  # Columns that are reduced at once, at most: more take more registers.


def _reduce(plan: Plan, out, place, stored, values, *, cols: int, soft_cap: float | None):
    """A compute warpgroup: what the rows of its share of a tile need. In the place of gemm's `store`."""
    vectors, o_gmem, _ = out
    (row, col), (rows, width) = place, values.shape
    size = math.gcd(width, PIECE)
    spread = lambda x: _device.spread(x, 0, (rows, size))
    total = lambda pieces: jnp.sum(functools.reduce(jnp.add, pieces), axis=1)  # Each thread adds up its own first.
    with_sum = o_gmem.shape[0] == 4

    def numbers(is_marked: bool):
        starts = range(0, width, size)
        pieces = [capped(values[:, start : start + size].astype(jnp.float32), soft_cap) for start in starts]
        where = lambda condition, other: [
            jnp.where(condition(column + start), x, other) for start, x in zip(starts, pieces, strict=True)
        ]
        if is_marked:
            column = col + plgpu.broadcasted_iota(jnp.int32, (rows, size), 1, layout=plgpu.Layout.WGMMA)
            label = spread(_device.load(vectors["label"].at[pl.ds(row, rows)], _device.ROWS))
        sums = [total(where(lambda column: column < cols, 0.0) if is_marked else pieces)] if with_sum else []
        at_label = plgpu.layout_cast(jnp.zeros(rows, jnp.float32), _device.ROWS)
        if is_marked:
            pieces = where(lambda column: column < cols, -jnp.inf)
            at_label = total(where(lambda column: column == label, 0.0))
        m_i = jnp.maximum(jnp.max(functools.reduce(jnp.maximum, pieces), axis=1), LOWEST / 2)
        scaled = spread(m_i * LOG2_E)  # One instruction scales a logit and subtracts this.
        return m_i, total([jnp.exp2(z * LOG2_E - scaled) for z in pieces]), at_label, *sums

    is_marked = marks.any_in(vectors["marks"], row, col, (rows, width))
    of_all = numbers(False)  # While the mark arrives.
    found = lax.cond(is_marked, lambda: numbers(True), lambda: of_all)
    for i, value in enumerate(found):
        _device.store(o_gmem.at[i, _device.div(col, width), pl.ds(row, rows)], value)


def _store_and_reduce(a_gmem, b_gmem, vectors, o_gmem, parts_gmem, *, plan: Plan, cols: int, soft_cap: float | None,
                      **scratch):  # fmt: skip
    """The kernel of gemm, which stores logits and reduces them too, as they are stored."""

    def store_tile(plan, out, place, stored, values):
        values = values.astype(plan.out_dtype)
        store(plan, out, place, stored, values)
        _reduce(plan, (vectors, parts_gmem, None), place, stored, values, cols=cols, soft_cap=soft_cap)

    kernel(a_gmem, b_gmem, {}, o_gmem, plan=plan, store_tile=store_tile, **scratch)


@functools.partial(jax.jit, static_argnames=("plan", "cols", "soft_cap", "with_sum", "stores"))
def _launch(hidden, weight, label, plan: Plan, cols: int, soft_cap: float | None, with_sum: bool, stores: bool):
    """(The numbers of the rows, an array of each; logits, if it `stores` them.)"""
    rows, width = _host.padded_shape((plan.tiles.m, plan.tiles.n), plan.tiles.cluster_tile)
    parts = jax.ShapeDtypeStruct((3 + with_sum, width // plan.compute_tile[1], rows), jnp.float32)
    how = dict(cols=cols, soft_cap=soft_cap)
    if stores:
        body, out = functools.partial(_store_and_reduce, plan=plan, **how), [(plan.tiles.m, plan.tiles.n)]
    else:
        body, out = functools.partial(kernel, plan=plan, store_tile=functools.partial(_reduce, **how)), []
    out = [*(jax.ShapeDtypeStruct(shape, plan.out_dtype) for shape in out), parts]
    run = launch(body, plan, out, dict(cluster=plan.tiles.clusters), plan.scratch, products.params(), not stores)
    padded = jnp.pad(label, (0, rows - len(label)), constant_values=IGNORED)
    vectors = dict(label=padded, marks=marks.of_labels(padded, width, cols))
    *logits, parts = run(plan.a.pad(hidden), plan.b.pad(weight), vectors)
    m_i, l_i, *sums = parts
    top = jnp.max(m_i, axis=0, keepdims=True)
    l_i = jnp.sum(l_i * jnp.exp(m_i - top), axis=0)
    found = top[0], l_i, *(jnp.sum(x, axis=0) for x in sums)
    ignored = (0.0, 1.0, 0.0, 0.0)
    found = [jnp.where(label == IGNORED, value, x[: len(label)]) for value, x in zip(ignored, found, strict=False)]
    return found, logits


def statistics(target: _host.Target, hidden, weight, label, cols: int, pitch: int, transposed: bool,
               soft_cap: float | None, with_sum: bool, stores: bool = False):  # fmt: skip
    """As `kernel.statistics` of the logits `hidden @ weight.T`, in float32, of which `cols` columns count; and, if it
    `stores` them, the logits, of 16 bits, which to JAX never vary over an axis of a mesh: the gradient may take their
    place. Then the numbers are of these."""
    sizes = len(hidden), pitch, hidden.shape[1]
    plan = products.plan(target, hidden, weight, sizes, (False, transposed), hidden.dtype, whole_tiles=True)
    found, logits = _launch(hidden, weight, label, plan, cols, soft_cap, with_sum, stores)
    found = (*(_host.alike(x, label)[0] for x in found), None)[:4]
    return (*logits, found) if stores else found

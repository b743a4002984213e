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
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .. import _device, _host
from ..gemm.kernel import kernel
from ..gemm.launch import launch
from ..gemm.plan import Plan
from . import products
from .kernel import IGNORED, LOWEST, capped, exp

PIECE = 32  # Columns that are reduced at once, at most: more take more registers.


def _reduce(plan: Plan, out, place, stored, values, *, cols: int, soft_cap: float | None):
    """A compute warpgroup: what the rows of its share of a tile need. In the place of gemm's `store`."""
    vectors, o_gmem, _ = out
    (row, col), (rows, width) = place, values.shape
    size = math.gcd(width, PIECE)
    spread = lambda x: _device.spread(x, 0, (rows, size))
    label = spread(_device.load(vectors["label"].at[pl.ds(row, rows)], plgpu.Layout.WGMMA.reduce(1)))
    column = col + plgpu.broadcasted_iota(jnp.int32, (rows, size), 1, layout=plgpu.Layout.WGMMA)
    starts = range(0, width, size)
    logits = [capped(values[:, start : start + size], soft_cap) for start in starts]
    or_else = lambda other: [
        jnp.where(column + start < cols, x, other) for start, x in zip(starts, logits, strict=True)
    ]
    total = lambda pieces: functools.reduce(jnp.add, [jnp.sum(piece, axis=1) for piece in pieces])
    sums = [total(or_else(0.0))] if o_gmem.shape[0] == 4 else []
    pieces = or_else(-jnp.inf)
    m_i = jnp.maximum(functools.reduce(jnp.maximum, [jnp.max(z, axis=1) for z in pieces]), LOWEST)
    l_i = total([exp(z - spread(m_i)) for z in pieces])
    is_label = [column + start == label for start in starts]
    at_label = total([jnp.where(mine, z, 0.0) for mine, z in zip(is_label, pieces, strict=True)])
    for i, value in enumerate([m_i, l_i, at_label, *sums]):
        _device.store(o_gmem.at[i, _device.div(col, width), pl.ds(row, rows)], value)


@functools.partial(jax.jit, static_argnames=("plan", "cols", "soft_cap", "with_sum"))
def _launch(hidden, weight, label, plan: Plan, cols: int, soft_cap: float | None, with_sum: bool):
    rows, width = _host.padded_shape((plan.tiles.m, plan.tiles.n), plan.tiles.cluster_tile)
    parts = jax.ShapeDtypeStruct((3 + with_sum, width // plan.compute_tile[1], rows), jnp.float32)
    reduce = functools.partial(_reduce, cols=cols, soft_cap=soft_cap)
    body = functools.partial(kernel, plan=plan, store_tile=reduce)
    run = launch(body, plan, [parts], dict(cluster=plan.tiles.clusters), plan.scratch, products.params())
    label = jnp.pad(label, (0, rows - len(label)), constant_values=IGNORED)
    [(m_i, l_i, *sums)] = run(plan.a.pad(hidden), plan.b.pad(weight), dict(label=label))
    top = jnp.max(m_i, axis=0, keepdims=True)
    l_i = jnp.sum(l_i * jnp.exp(m_i - top), axis=0)
    return top[0], l_i, *(jnp.sum(x, axis=0) for x in sums)


def statistics(target: _host.Target, hidden, weight, label, cols: int, pitch: int, transposed: bool,
               soft_cap: float | None, with_sum: bool):  # fmt: skip
    """As `kernel.statistics` of the logits `hidden @ weight.T`, in float32, of which `cols` columns count."""
    sizes = len(hidden), pitch, hidden.shape[1]
    plan = products.plan(target, hidden, weight, sizes, (False, transposed), hidden.dtype, whole_tiles=True)
    found = _launch(hidden, weight, label, plan, cols, soft_cap, with_sum)
    ignored = (0.0, 1.0, 0.0, 0.0)
    found = [jnp.where(label == IGNORED, value, x[: len(label)]) for value, x in zip(ignored, found, strict=False)]
    return (*found, None)[:4]

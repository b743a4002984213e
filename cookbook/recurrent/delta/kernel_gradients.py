# SPDX-License-Identifier: Apache-2.0
"""The gradients of a chunk's operands, for all chunks at once: the parallel half of the gated delta rule's backward.

With the state s before a chunk and the gradient ds' of the state after it, both from other kernels, and d[t, s] =
exp(cum[t] - cum[s]), it makes u and its gradient again,

    r = v - exp(cum) k s,    u = inverse r,         e = r - strict(d k k^T) u       (u = beta e)
    du = scale w^T do + exp(cum[-1] - cum) k ds',    dr = inverse^T du,    z = du - strict(d k k^T)^T dr

and from them, where x . y is the sum of products along a row,

    dv = dr,    dbeta = z . e,    dq = scale exp(cum) do s + p k,    dk = dk_plus + dk_minus
    dk_plus = -exp(cum) dr s - strict(d dr u^T) k,    p = scale tril(d do u^T)
    dk_minus = exp(cum[-1] - cum) u ds' + p^T q - strict(d dr u^T)^T k
    dcum = q . dq + k . dk_plus - k . dk_minus,    and for cum[-1] also
           sum(k . (first term of dk_minus)) + exp(cum[-1]) sum(s . ds')

Shapes: those of `delta_forward` and `delta_backward`. dq and dk are made for each column, (rows, columns, N), in the
operands' dtype; vectors (columns, chunks, 4, 64) float32 are dbeta, dcum and the two terms for cum[-1], by row.

Role table: one warpgroup a block, with one chunk of one column; two blocks of an SM hide each other's latencies.

Barrier table:

    barrier   arrivals             who waits
    filled    copies of operands   the warpgroup, before anything

Results take the place of operands in shared memory: dv of v, dk of ds', dq of s.

Bound by: the tensor cores, and the latency of some twenty products in a row.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ... import _device, _host
from .. import core
from ..core import COLUMNS, PIECE, ROWS, Operand, Tiles
from .core import CHUNK, SQUARE, TILED, apart_in_square, load, multiply, product, spread
from .kernel import Plan

DBETA, DCUM, TO_END, DECAYED = range(4)  # The vectors.


def _scratch(plan: Plan) -> dict:
    tiles = lambda *lead: core.row_tiles((1, *lead, CHUNK, PIECE), plan.dtype, plan.interpreted)
    square, vector = plgpu.SMEM(SQUARE, plan.dtype, **TILED), plgpu.SMEM((CHUNK,), jnp.float32)
    rows = {f"{name}_smem": tiles(plan.pieces) for name in ("q", "k", "s", "ds")}
    return rows | dict(
        v_smem=tiles(1),
        do_smem=tiles(1),
        inverse_smem=square,
        r_smem=square,
        u_smem=square,
        rows_smem=vector,
        columns_smem=vector,
        filled=plgpu.Barrier(num_arrivals=4 * plan.pieces + 5),
    )


class Decays:
    """Decays within a chunk, made anew where they are used: there are no registers to keep them in."""

    def __init__(self, rows_smem, columns_smem):
        self.rows_smem, self.columns_smem = rows_smem, columns_smem
        self.last = rows_smem[CHUNK - 1]

    def pairs(self, matrix, strict: bool, transposed: bool = False):
        """`matrix` times d where s < t, or s <= t, and 0 elsewhere; or all of it transposed."""
        apart = apart_in_square()
        difference = spread(load(self.rows_smem, ROWS), 0) - spread(load(self.columns_smem, COLUMNS), 1)
        difference, apart = (-difference, -apart) if transposed else (difference, apart)
        return jnp.where(apart >= int(strict), matrix * jnp.exp(jnp.minimum(difference, 0.0)), 0.0)

    def from_start(self):
        return spread(jnp.exp(load(self.rows_smem, ROWS)), 0)

    def to_end(self):
        return spread(jnp.exp(self.last - load(self.rows_smem, ROWS)), 0)


def _corrections(plan: Plan, d: Decays, q, k, v, do, s, ds, inverse, r_smem, u_smem):
    """dbeta; u goes to `u_smem`, dr to the place of v."""
    half, pieces = lambda x: x.astype(plan.dtype), range(plan.pieces)
    values = load(v, plgpu.Layout.WGMMA).astype(jnp.float32)
    r = values - d.from_start() * multiply([(k.at[p], s.at[p].T) for p in pieces])
    r_smem[...] = half(r)
    plgpu.commit_smem()
    u_smem[...] = half(multiply([(inverse, r_smem)]))
    plgpu.commit_smem()
    keys = [(k.at[p], k.at[p].T) for p in pieces]
    # The sign is that of rounded numbers: if sums get one, ptxas lets no two WGMMAs overlap.
    error = half(product([(-half(d.pairs(multiply(keys), True)), u_smem)], plan.interpreted, r))
    weights = multiply([(k.at[p], q.at[p].T) for p in pieces])
    weights = half(d.pairs(weights * plan.scale, False, transposed=True))
    du = d.to_end() * multiply([(k.at[p], ds.at[p].T) for p in pieces])
    du = product([(weights, do)], plan.interpreted, du)
    r_smem[...] = half(du)
    plgpu.commit_smem()
    v[...] = half(multiply([(inverse.T, r_smem)]))
    plgpu.commit_smem()
    # The keys' product once more, and du as it was stored: there are no registers to keep them in.
    du = load(r_smem, plgpu.Layout.WGMMA).astype(jnp.float32)
    z = product([(-half(d.pairs(multiply(keys), True, transposed=True)), v)], plan.interpreted, du)
    return (z * error.astype(jnp.float32)).sum(axis=1)


def _dot(x_smem, y):
    """x . y of rows."""
    return (load(x_smem, plgpu.Layout.WGMMA).astype(jnp.float32) * y).sum(axis=1)


def _gradients(plan: Plan, d: Decays, q, k, dr, do, s, ds, u, p, sums):
    """`sums`, of dcum and its term for cum[-1], with piece `p` of the keys added; the pieces of dk and dq go to the
    places of ds and s. The squares are made for each piece: there are no registers to keep them in."""
    dcum, to_end = sums
    half = lambda x: x.astype(plan.dtype)
    add = lambda acc, *pairs: product(list(pairs), plan.interpreted, acc)

    def square(a, b, strict, transposed=False):
        return half(d.pairs(multiply([(a, b.T)]) * (1.0 if strict else plan.scale), strict, transposed))

    minus = d.to_end() * multiply([(u, ds.at[p])])
    to_end += _dot(k.at[p], minus)
    minus = add(minus, (square(u, do, False, True), q.at[p]))
    minus = add(minus, (-square(u, dr, True, True), k.at[p]))
    plus = -d.from_start() * multiply([(dr, s.at[p])])
    plus = add(plus, (-square(dr, u, True), k.at[p]))
    dcum += _dot(k.at[p], plus - minus)
    ds[p] = half(plus + minus)

    dq = d.from_start() * plan.scale * multiply([(do, s.at[p])])
    dq = add(dq, (square(do, u, False), k.at[p]))
    s[p] = half(dq)
    return dcum + _dot(q.at[p], dq), to_end


def _kernel(first_rows, num_rows, gmem, dq_gmem, dk_gmem, dv_gmem, vectors_gmem, *, plan: Plan, inverse_smem, r_smem,
            u_smem, rows_smem, columns_smem, filled, **smem):  # fmt: skip
    chunk, column = lax.axis_index("tile"), lax.axis_index("head_index")
    row, num, head = first_rows[chunk], num_rows[chunk], _device.div(column, plan.columns_per_head)
    key_head = _device.div(head, plan.heads // plan.key_heads)
    tiles = {name.removesuffix("_smem"): Tiles.views(x, plan.interpreted) for name, x in smem.items()}
    heads = dict(q=(key_head, plan.pieces), k=(key_head, plan.pieces), v=(column, 1), do=(column, 1))
    operands = [Operand(gmem[name], tiles[name], *where) for name, where in heads.items()]
    for operand in operands:
        operand.copy(row, CHUNK, 0, filled)
    for name in ("s", "ds"):
        for p in range(plan.pieces):
            source = gmem[name].at[chunk, column, :, pl.ds(p * PIECE, PIECE)]
            plgpu.copy_gmem_to_smem(source, tiles[name].rows.at[0, p], filled)
    for name, target in dict(inverse=inverse_smem, rows=rows_smem, columns=columns_smem).items():
        plgpu.copy_gmem_to_smem(gmem[name].at[head, chunk], target, filled)
    plgpu.barrier_wait(filled)
    if plan.sequences.is_ragged:

        @pl.when(num < CHUNK)
        def _():
            for operand in operands:
                operand.clear(0, num, plan.interpreted)
            plgpu.commit_smem()

    q, k, s, ds = (tiles[name].tiled.at[0] for name in ("q", "k", "s", "ds"))
    v, do = (tiles[name].tiled.at[0, 0] for name in ("v", "do"))
    d = Decays(rows_smem, columns_smem)
    number, zero = range(plan.pieces), plgpu.layout_cast(jnp.zeros((CHUNK,), jnp.float32), ROWS)
    decayed = [_dot(s.at[p], load(ds.at[p], plgpu.Layout.WGMMA).astype(jnp.float32)) for p in number]
    put = lambda i, vector: _device.store(vectors_gmem.at[column, chunk, i], vector)
    put(DECAYED, functools.reduce(jnp.add, decayed))
    put(DBETA, _corrections(plan, d, q, k, v, do, s, ds, inverse_smem, r_smem, u_smem))
    gradients = functools.partial(_gradients, plan, d, q, k, v, do, s, ds, u_smem)
    pieces = jnp.where(num > 0, plan.pieces, 0)  # A number that the compiler knows would merge the loop with the rest.
    dcum, to_end = lax.fori_loop(0, pieces, gradients, (zero, zero))
    put(DCUM, dcum)
    put(TO_END, to_end)
    plgpu.commit_smem()
    results = [(dv_gmem, "v", 0)]
    results += [(out, name, p) for out, name in ((dq_gmem, "s"), (dk_gmem, "ds")) for p in range(plan.pieces)]

    def store(skip, size: int):
        for out, name, p in results:
            target = out.at[pl.ds(row + skip, size), column, pl.ds(p * PIECE, PIECE)]
            plgpu.copy_smem_to_gmem(tiles[name].rows.at[0, p, pl.ds(skip, size)], target)

    if plan.sequences.is_ragged:
        pl.when(num >= CHUNK)(lambda: store(0, CHUNK))
        pl.when(num < CHUNK)(lambda: pl.loop(0, num)(lambda skip: store(skip, 1)))
    else:
        store(0, CHUNK)
    plgpu.wait_smem_to_gmem(0)


def run(plan: Plan, first_rows, num_rows, q, k, v, do, states, d_states, inverse, cum, params):
    """[dq, dk, dv, vectors]. Rows of no sequence are not written."""
    (rows, columns, _), dim = v.shape, plan.pieces * PIECE
    gmem = dict(q=q, k=k, v=v, do=do, s=states, ds=d_states, inverse=inverse, rows=cum, columns=cum)
    return _host.kernel(
        functools.partial(_kernel, plan=plan),
        out_type=[
            *[jax.ShapeDtypeStruct((rows, columns, dim), plan.dtype)] * 2,
            jax.ShapeDtypeStruct(v.shape, plan.dtype),
            jax.ShapeDtypeStruct((columns, plan.sequences.num_chunks, 4, CHUNK), jnp.float32),
        ],
        grid=(plan.sequences.num_chunks, columns),
        grid_names=("tile", "head_index"),
        scratch_types=_scratch(plan),
        compiler_params=params,
    )(first_rows, num_rows, gmem)

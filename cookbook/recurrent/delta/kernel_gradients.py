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

Shapes: as in `kernel` and `kernel_backward`. dq and dk are made for each column, (rows, columns, N), in the
operands' dtype; vectors (columns, chunks, 4, 64) float32 are dbeta, dcum and the two terms for cum[-1], by row.

Role table: one warpgroup per block, with one chunk of one column; two blocks of an SM hide each other's latencies.

Barrier table:

    barrier   arrivals             who waits
    filled    copies of operands   the warpgroup, before anything

Results take the place of operands in shared memory: dr, which is dv, of v; dk of ds'; and dq of s.

Bound by: the tensor cores, and the latency of some twenty products in a row.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ... import _device, _host
from ..._device import COLUMNS, PIECE, ROWS, Tiles, load, product, spread
from ..tiles import Operand
from .plan import CHUNK, Plan

DBETA, DCUM, TO_END, DECAYED = range(4)  # The vectors.


def _scratch(plan: Plan) -> dict:
    vector = plgpu.SMEM((CHUNK,), jnp.float32)
    rows = {f"{name}_smem": plan.rows(1, plan.pieces) for name in ("q", "k", "s", "ds")}
    return rows | dict(
        v_smem=plan.rows(1, 1),
        do_smem=plan.rows(1, 1),
        inverse_smem=plan.squares(),
        r_smem=plan.squares(),
        u_smem=plan.squares(),
        rows_smem=vector,
        columns_smem=vector,
        filled=_device.barriers(1, 4 * plan.pieces + 5),
    )


@dataclasses.dataclass(frozen=True)
class Decays:
    """Decays within a chunk, recomputed where they are used to save registers."""

    rows: Any  # cum, to be read along rows, and along columns.
    columns: Any
    last: Any  # cum of the last token.

    def pairs(self, matrix, strict: bool, transposed: bool = False):
        """`matrix` times d where s < t, or s <= t, and 0 elsewhere; or all of it transposed."""
        row, column = (plgpu.broadcasted_iota(jnp.int32, (CHUNK,), 0, layout=layout) for layout in (ROWS, COLUMNS))
        apart = spread(row, 0) - spread(column, 1)
        difference = spread(load(self.rows, ROWS), 0) - spread(load(self.columns, COLUMNS), 1)
        difference, apart = (-difference, -apart) if transposed else (difference, apart)
        return jnp.where(apart >= int(strict), matrix * jnp.exp(jnp.minimum(difference, 0.0)), 0.0)

    def from_start(self):
        return spread(jnp.exp(load(self.rows, ROWS)), 0)

    def to_end(self):
        return spread(jnp.exp(self.last - load(self.rows, ROWS)), 0)


@dataclasses.dataclass(frozen=True)
class Chunk:
    """A chunk's operands in shared memory, as tensor cores see them."""

    plan: Plan
    decays: Decays
    q: Any  # In pieces, as the next three.
    k: Any
    s: Any
    ds: Any  # The gradient of the state after the chunk.
    v: Any
    do: Any
    inverse: Any
    r: Any  # r, and then du.
    u: Any

    def rounded(self, x):
        return x.astype(self.plan.dtype)

    def multiply(self, *pairs, onto=None):
        return product(list(pairs), self.plan.interpreted, onto)

    def by_piece(self, a, b):
        """The product of rows of `a` with rows of `b`, each in pieces."""
        return self.multiply(*((a.at[p], b.at[p].T) for p in range(self.plan.pieces)))


def _make_corrections(c: Chunk):
    """Leaves u in shared memory; returns e, rounded."""
    values = load(c.v).astype(jnp.float32)
    r = values - c.decays.from_start() * c.by_piece(c.k, c.s)
    c.r[...] = c.rounded(r)
    plgpu.commit_smem()
    c.u[...] = c.rounded(c.multiply((c.inverse, c.r)))
    plgpu.commit_smem()
    # Negated after the cast: if an accumulator is negated, ptxas lets no two WGMMAs overlap.
    lower = -c.rounded(c.decays.pairs(c.by_piece(c.k, c.k), strict=True))
    return c.rounded(c.multiply((lower, c.u), onto=r))


def _make_their_gradients(c: Chunk):
    """Leaves dr in the place of v; returns z."""
    weights = c.by_piece(c.k, c.q)
    weights = c.rounded(c.decays.pairs(weights * c.plan.scale, strict=False, transposed=True))
    du = c.decays.to_end() * c.by_piece(c.k, c.ds)
    c.r[...] = c.rounded(c.multiply((weights, c.do), onto=du))
    plgpu.commit_smem()
    c.v[...] = c.rounded(c.multiply((c.inverse.T, c.r)))
    plgpu.commit_smem()
    # The keys' product is recomputed, and du loaded as it was stored, to save registers.
    du = load(c.r).astype(jnp.float32)
    lower = -c.rounded(c.decays.pairs(c.by_piece(c.k, c.k), strict=True, transposed=True))
    return c.multiply((lower, c.v), onto=du)


def _dot(x_smem, y):
    """x . y of rows."""
    return (load(x_smem).astype(jnp.float32) * y).sum(axis=1)


def _make_dk_and_dq(c: Chunk, p, sums):
    """`sums`, of dcum and its term for cum[-1], with piece `p` of the keys added; the pieces of dk and dq go to the
    places of ds and s. The squares are recomputed for each piece to save registers."""
    dcum, to_end = sums
    (q, k, s, ds), dr = (ref.at[p] for ref in (c.q, c.k, c.s, c.ds)), c.v

    def square(a, b, *, strict: bool, transposed: bool = False):
        """a b^T, decayed, below the diagonal if it is `strict`; otherwise with the diagonal, times `scale`."""
        pairs = c.multiply((a, b.T)) * (1.0 if strict else c.plan.scale)
        return c.rounded(c.decays.pairs(pairs, strict, transposed))

    dk_minus = c.decays.to_end() * c.multiply((c.u, ds))
    to_end += _dot(k, dk_minus)
    dk_minus = c.multiply((square(c.u, c.do, strict=False, transposed=True), q), onto=dk_minus)
    dk_minus = c.multiply((-square(c.u, dr, strict=True, transposed=True), k), onto=dk_minus)
    dk_plus = -c.decays.from_start() * c.multiply((dr, s))
    dk_plus = c.multiply((-square(dr, c.u, strict=True), k), onto=dk_plus)
    dcum += _dot(k, dk_plus - dk_minus)
    c.ds[p] = c.rounded(dk_plus + dk_minus)

    dq = c.decays.from_start() * c.plan.scale * c.multiply((c.do, s))
    dq = c.multiply((square(c.do, c.u, strict=False), k), onto=dq)
    c.s[p] = c.rounded(dq)
    return dcum + _dot(q, dq), to_end


def _kernel(first_rows, num_rows, gmem, dq_gmem, dk_gmem, dv_gmem, vectors_gmem, *, plan: Plan, inverse_smem, r_smem,
            u_smem, rows_smem, columns_smem, filled, **smem):  # fmt: skip
    chunk, column = lax.axis_index("tile"), lax.axis_index("head_index")
    row, num, head = first_rows[chunk], num_rows[chunk], plan.head(column)
    tiles = {name.removesuffix("_smem"): Tiles.views(x, plan.interpreted) for name, x in smem.items()}
    heads = dict.fromkeys(("q", "k"), (plan.key_head(head), plan.pieces)) | dict.fromkeys(("v", "do"), (column, 1))
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

    pieces = [tiles[name].tiled.at[0] for name in ("q", "k", "s", "ds")]
    alone = [tiles[name].tiled.at[0, 0] for name in ("v", "do")]
    decays = Decays(rows_smem, columns_smem, rows_smem[CHUNK - 1])
    c = Chunk(plan, decays, *pieces, *alone, inverse_smem, r_smem, u_smem)
    zero = plgpu.layout_cast(jnp.zeros((CHUNK,), jnp.float32), ROWS)
    decayed = [_dot(c.s.at[p], load(c.ds.at[p]).astype(jnp.float32)) for p in range(plan.pieces)]
    put = lambda which, vector: _device.store(vectors_gmem.at[column, chunk, which], vector)
    put(DECAYED, functools.reduce(jnp.add, decayed))
    error = _make_corrections(c)
    put(DBETA, (_make_their_gradients(c) * error.astype(jnp.float32)).sum(axis=1))
    turns = jnp.where(num > 0, plan.pieces, 0)  # A number that the compiler knows would merge the loop with the rest.
    dcum, to_end = lax.fori_loop(0, turns, functools.partial(_make_dk_and_dq, c), (zero, zero))
    put(DCUM, dcum)
    put(TO_END, to_end)
    plgpu.commit_smem()

    def store(skip, size: int):
        for out, name, pieces in ((dv_gmem, "v", 1), (dq_gmem, "s", plan.pieces), (dk_gmem, "ds", plan.pieces)):
            for p in range(pieces):
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

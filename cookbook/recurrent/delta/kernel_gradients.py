# SPDX-License-Identifier: Apache-2.0
"""The gradients of a chunk's operands, for all chunks at once: the parallel half of the gated delta rule's backward.

From the state s before a chunk, which `kernel` made, and the gradient ds' of the state after it, which
`kernel_backward` made, it computes u and du again and then the rest of the derivation in `gradients.py`, in its names,
a step per formula.

Shapes: as in `kernel` and `kernel_backward`. dq and dk are made for each slice, (rows, slices, N), in the operands'
dtype. sums (slices, chunks, 4, 64) float32 are the `SUMS`.

Role table: one warpgroup per block, with one chunk of one slice; two blocks of an SM hide each other's latencies.

Barrier table:

    barrier   arrivals             who waits
    filled    copies of operands   the warpgroup, before anything

Bound by: the tensor cores, and the latency of some twenty products in a row.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ... import _device, _host
from ..._device import COLUMNS, PIECE, ROWS, Index, Ref, Tiles, load, product, spread
from ..tiles import Operand
from .plan import CHUNK, Plan

# Sums along rows that the kernel returns: dbeta and dcum, a number per token; and two terms of the gradient of cum[-1],
# k . (exp(cum[-1] - cum) u ds') per token and s . ds' per value. To return another sum: name it here, `put` it in
# `_compute`, and use it in `gradients.py`.
SUMS = DBETA, DCUM, LAST_BY_TOKEN, LAST_BY_VALUE = range(4)


def _scratch(plan: Plan) -> dict:
    cum = plgpu.SMEM((CHUNK,), jnp.float32)
    rows = {f"{name}_smem": plan.rows(1, plan.pieces) for name in ("q", "k", "s", "ds_next")}
    return rows | dict(
        v_smem=plan.rows(1, 1),
        do_smem=plan.rows(1, 1),
        inverse_smem=plan.squares(),
        r_smem=plan.squares(),
        u_smem=plan.squares(),
        row_cum_smem=cum,
        col_cum_smem=cum,
        filled=_device.barriers(1, 4 * plan.pieces + 5),  # Copies of q, k, s, ds'; v, do, inverse, and cum twice.
    )


@dataclasses.dataclass(frozen=True)
class Decays:
    """Decays within a chunk, recomputed where they are used to save registers."""

    row_cum: Ref  # cum as one number per row of a product, and as one per column.
    col_cum: Ref
    last: jax.Array  # cum of the last token.

    def pairs(self, matrix, strict: bool, transposed: bool = False):
        """tril(d `matrix`), or strict(d `matrix`). `transposed`: the same of the transposed matrix, transposed."""
        row, column = (plgpu.broadcasted_iota(jnp.int32, (CHUNK,), 0, layout=layout) for layout in (ROWS, COLUMNS))
        apart = spread(row, 0) - spread(column, 1)
        difference = spread(load(self.row_cum, ROWS), 0) - spread(load(self.col_cum, COLUMNS), 1)
        difference, apart = (-difference, -apart) if transposed else (difference, apart)
        return jnp.where(apart >= int(strict), matrix * jnp.exp(jnp.minimum(difference, 0.0)), 0.0)

    def from_start(self):
        """exp(cum)"""
        return spread(jnp.exp(load(self.row_cum, ROWS)), 0)

    def to_end(self):
        """exp(cum[-1] - cum)"""
        return spread(jnp.exp(self.last - load(self.row_cum, ROWS)), 0)


@dataclasses.dataclass(frozen=True)
class Chunk:
    """A chunk's operands in shared memory, as tensor cores see them."""

    plan: Plan
    decays: Decays
    q: Ref  # In pieces, as the next three.
    k: Ref
    s: Ref
    ds_next: Ref  # ds', the gradient of the state after the chunk.
    v: Ref
    do: Ref
    inverse: Ref
    r: Ref
    u: Ref

    # Gradients take the places of operands that are not read after them.
    du = property(lambda self: self.r)
    dr = property(lambda self: self.v)
    dk = property(lambda self: self.ds_next)
    dq = property(lambda self: self.s)

    def rounded(self, x):
        return x.astype(self.plan.dtype)

    def multiply(self, *pairs, onto=None):
        return product(list(pairs), self.plan.interpreted, onto)

    def by_piece(self, a, b):
        """a bᵀ, both in pieces."""
        return self.multiply(*((a.at[p], b.at[p].T) for p in range(self.plan.pieces)))


def _errors(c: Chunk):
    """e, rounded. Leaves u in shared memory."""
    # r = v - exp(cum) k sᵀ
    values = load(c.v).astype(jnp.float32)
    r = values - c.decays.from_start() * c.by_piece(c.k, c.s)
    c.r[...] = c.rounded(r)
    plgpu.commit_smem()
    # u = inverse r
    c.u[...] = c.rounded(c.multiply((c.inverse, c.r)))
    plgpu.commit_smem()
    # e = r - m u. Negated after the cast: if an accumulator is negated, ptxas lets no two WGMMAs overlap.
    minus_m = -c.rounded(c.decays.pairs(c.by_piece(c.k, c.k), strict=True))
    return c.rounded(c.multiply((minus_m, c.u), onto=r))


def _gradient_of_corrections(c: Chunk):
    """z. Leaves dr in shared memory."""
    # du = scale wᵀ do + exp(cum[-1] - cum) k ds'ᵀ
    w = c.by_piece(c.k, c.q)
    w = c.rounded(c.decays.pairs(w * c.plan.scale, strict=False, transposed=True))
    du = c.decays.to_end() * c.by_piece(c.k, c.ds_next)
    c.du[...] = c.rounded(c.multiply((w, c.do), onto=du))
    plgpu.commit_smem()
    # dr = inverseᵀ du
    c.dr[...] = c.rounded(c.multiply((c.inverse.T, c.du)))
    plgpu.commit_smem()
    # z = du - mᵀ dr. The keys' product is recomputed, and du loaded as it was stored, to save registers.
    du = load(c.du).astype(jnp.float32)
    minus_m = -c.rounded(c.decays.pairs(c.by_piece(c.k, c.k), strict=True, transposed=True))
    return c.multiply((minus_m, c.dr), onto=du)


def _row_dots(x_smem: Ref, y):
    """x . y"""
    return (load(x_smem).astype(jnp.float32) * y).sum(axis=1)


def _gradients_of_keys_and_queries(c: Chunk, p: Index, sums):
    """Leaves piece `p` of dk and dq in shared memory. Returns `sums`, of `DCUM` and `LAST_BY_TOKEN`, with this piece of
    their rows added. dqk and dkk are recomputed for each piece to save registers."""
    dcum, last_by_token = sums
    q, k, s, ds_next = (ref.at[p] for ref in (c.q, c.k, c.s, c.ds_next))

    def decayed(a, b, *, strict: bool, scale: float = 1.0, transposed: bool = False):
        """tril(d scale a bᵀ), or strict(d scale a bᵀ). `transposed`: the same of b and a, transposed."""
        return c.rounded(c.decays.pairs(c.multiply((a, b.T)) * scale, strict, transposed))

    # dk_minus = exp(cum[-1] - cum) u ds' + dqkᵀ q + dkkᵀ k
    dk_minus = c.decays.to_end() * c.multiply((c.u, ds_next))
    last_by_token += _row_dots(k, dk_minus)
    dqk_transposed = decayed(c.u, c.do, strict=False, scale=c.plan.scale, transposed=True)
    dk_minus = c.multiply((dqk_transposed, q), onto=dk_minus)
    dkk_transposed = -decayed(c.u, c.dr, strict=True, transposed=True)
    dk_minus = c.multiply((dkk_transposed, k), onto=dk_minus)
    # dk_plus = -exp(cum) dr s + dkk k
    dk_plus = -c.decays.from_start() * c.multiply((c.dr, s))
    dkk = -decayed(c.dr, c.u, strict=True)
    dk_plus = c.multiply((dkk, k), onto=dk_plus)
    # dcum = q . dq + k . dk_plus - k . dk_minus, its keys
    dcum += _row_dots(k, dk_plus - dk_minus)
    c.dk[p] = c.rounded(dk_plus + dk_minus)
    # dq = scale exp(cum) do s + dqk k
    dq = c.decays.from_start() * c.plan.scale * c.multiply((c.do, s))
    dqk = decayed(c.do, c.u, strict=False, scale=c.plan.scale)
    dq = c.multiply((dqk, k), onto=dq)
    c.dq[p] = c.rounded(dq)
    return dcum + _row_dots(q, dq), last_by_token


def _compute(c: Chunk, num_rows: Index, put):
    """Leaves dv, dk and dq in shared memory, and stores each of the `SUMS` by `put`."""
    zero = plgpu.layout_cast(jnp.zeros((CHUNK,), jnp.float32), ROWS)
    by_value = [_row_dots(c.s.at[p], load(c.ds_next.at[p]).astype(jnp.float32)) for p in range(c.plan.pieces)]
    put(LAST_BY_VALUE, functools.reduce(jnp.add, by_value))
    # dbeta = z . e
    e = _errors(c)
    z = _gradient_of_corrections(c)
    put(DBETA, (z * e.astype(jnp.float32)).sum(axis=1))
    # The compiler would merge a loop whose length it knows with the rest.
    pieces = jnp.where(num_rows > 0, c.plan.pieces, 0)
    dcum, by_token = lax.fori_loop(0, pieces, functools.partial(_gradients_of_keys_and_queries, c), (zero, zero))
    put(DCUM, dcum)
    put(LAST_BY_TOKEN, by_token)
    plgpu.commit_smem()


def _kernel(first_rows, num_rows, gmem, dq_gmem, dk_gmem, dv_gmem, sums_gmem, *, plan: Plan, inverse_smem, r_smem,
            u_smem, row_cum_smem, col_cum_smem, filled, **smem):  # fmt: skip
    chunk, value_slice = lax.axis_index("tile"), lax.axis_index("unit")
    row, num, head = first_rows[chunk], num_rows[chunk], plan.head(value_slice)
    tiles = {name.removesuffix("_smem"): Tiles.views(x, plan.interpreted) for name, x in smem.items()}
    heads = dict.fromkeys(("q", "k"), (plan.key_head(head), plan.pieces)) | dict.fromkeys(("v", "do"), (value_slice, 1))
    operands = [Operand(gmem[name], tiles[name], *where) for name, where in heads.items()]
    for operand in operands:
        operand.copy(row, CHUNK, 0, filled)
    for name in ("s", "ds_next"):
        for p in range(plan.pieces):
            source = gmem[name].at[chunk, value_slice, :, pl.ds(p * PIECE, PIECE)]
            plgpu.copy_gmem_to_smem(source, tiles[name].rows.at[0, p], filled)
    for name, target in dict(inverse=inverse_smem, row_cum=row_cum_smem, col_cum=col_cum_smem).items():
        plgpu.copy_gmem_to_smem(gmem[name].at[head, chunk], target, filled)
    plgpu.barrier_wait(filled)
    if plan.sequences.is_ragged:

        @pl.when(num < CHUNK)
        def _():
            for operand in operands:
                operand.clear(0, num, plan.interpreted)
            plgpu.commit_smem()

    pieces = [tiles[name].tiled.at[0] for name in ("q", "k", "s", "ds_next")]
    alone = [tiles[name].tiled.at[0, 0] for name in ("v", "do")]
    decays = Decays(row_cum_smem, col_cum_smem, row_cum_smem[CHUNK - 1])
    c = Chunk(plan, decays, *pieces, *alone, inverse_smem, r_smem, u_smem)
    _compute(c, num, put=lambda which, vector: _device.store(sums_gmem.at[value_slice, chunk, which], vector))

    def store(skip, size: int):
        """`size` rows of dr, dq and dk from row `skip` on."""
        for out, name, pieces in ((dv_gmem, "v", 1), (dq_gmem, "s", plan.pieces), (dk_gmem, "ds_next", plan.pieces)):
            for p in range(pieces):
                target = out.at[pl.ds(row + skip, size), value_slice, pl.ds(p * PIECE, PIECE)]
                plgpu.copy_smem_to_gmem(tiles[name].rows.at[0, p, pl.ds(skip, size)], target)

    if plan.sequences.is_ragged:
        pl.when(num >= CHUNK)(lambda: store(0, CHUNK))
        pl.when(num < CHUNK)(lambda: pl.loop(0, num)(lambda skip: store(skip, 1)))
    else:
        store(0, CHUNK)
    plgpu.wait_smem_to_gmem(0)


def launch(plan: Plan, first_rows, num_rows, q, k, v, do, states, d_states, inverse, cum, params):
    """[dq, dk, dv, sums]. Rows of no sequence are not written."""
    (rows, slices, _), dim = v.shape, plan.pieces * PIECE
    gmem = dict(q=q, k=k, v=v, do=do, s=states, ds_next=d_states, inverse=inverse, row_cum=cum, col_cum=cum)
    return _host.kernel(
        functools.partial(_kernel, plan=plan),
        out_type=[
            *[jax.ShapeDtypeStruct((rows, slices, dim), plan.dtype)] * 2,
            jax.ShapeDtypeStruct(v.shape, plan.dtype),
            jax.ShapeDtypeStruct((slices, plan.sequences.num_chunks, len(SUMS), CHUNK), jnp.float32),
        ],
        grid=(plan.sequences.num_chunks, slices),
        grid_names=("tile", "unit"),
        scratch_types=_scratch(plan),
        compiler_params=params,
    )(first_rows, num_rows, gmem)

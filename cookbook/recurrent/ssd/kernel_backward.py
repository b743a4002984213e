# SPDX-License-Identifier: Apache-2.0
"""Gradients of SSD: chunks from the last one to the first, with the gradient of the state in registers.

With S the state before a chunk, g the gradient of the state after it, cum as in `ssd`, and L[t, s] = 0 for s > t,
otherwise exp(cum[t] - cum[s]):

    cb = c bᵀ,  dyx = dy xᵀ
    dc = exp(cum) dy S + (L dyx dt) b
    dx = dt (exp(cum[last] - cum) b gᵀ + (L cb)ᵀ dy) + d dy
    db = dt (exp(cum[last] - cum) x g  + (L dyx)ᵀ c)
    g of the chunk before = exp(cum[last]) g + (exp(cum) dy)ᵀ c

S comes from a kernel before, which writes the states of all chunks. The gradient of cum gives those of dt and a:

    dcum[t] = c[t] . dc[t] - b[t] . db[t],    ddt[t] = b[t] . db[t] / dt[t]

and dcum of a chunk's last row has, beside that, the sum of g times the state after the chunk. A pair of rows adds to
dcum of one what it subtracts from dcum of the other, so these sums all but cancel. They are made in float32, before
pairs are rounded; and a row's pair with itself, or the last row's with the state after the chunk, which do not depend
on cum, are left out: with strong decay nothing else would be there. XLA differentiates the sums from dt a to cum.

Role table: as in `ssd`, one block for each head of each part.

    memory     copies x, dy, b, c, the state before the chunk, dt and cum of chunk after chunk
    state      has g in registers, and stores it in 16 bits for each chunk
    query      dc, and the sums c . dc: pairs by rows t
    key        dx, db, and the sums b . db / dt: the same pairs by rows s, transposed, and so computed again: an operand
               in registers is the left one of a product, with the rows of the result

Barrier table: as in `ssd`, with a ring `gradients` of g, from state to key, in the place of `states`.

Bound by: memory. b and c with fewer heads than x: dc and db of each head are written, and XLA sums them.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ... import _device, _host
from ..._device import COLUMNS, PIECE, ROWS, Barrier, Index, Ref, Ring, Tiles, spread
from ..sequences import Part
from ..states import first_state, store_state
from ..tiles import Operand, load_chunks, store_rows
from .kernel_state import advance, weights
from .plan import CUM, DT, Plan

SQUARE = PIECE, PIECE
CHUNK = 64
STATE, QUERY, KEY, MEMORY = range(4)  # Roles.
# Registers per thread of each role, by the pieces of a row of b; a block starts with 128 for each.
REGISTERS = {1: (120, 152, 184, 56), 2: (120, 152, 184, 56), 4: (176, 136, 160, 40)}
# Sums along rows that the kernel returns: c . dc and b . db / dt from pairs of different rows; what a row's pair with
# itself adds to both; what g adds to the second; g times the state, summed over columns; and dy . x. To return another
# sum: name it here, add it to what `_queries_of_chunk` or `_keys_of_chunk` returns, and use it in `gradients.py`.
SUMS = QUERY_SUM, KEY_SUM, OWN_SUM, END_SUM, STATE_SUM, SKIP_SUM = range(6)


def with_stages(plan: Plan) -> Plan:
    """The plan of this kernel: chunks of 64, and as many stages as shared memory has room for, up to 4."""
    plan = dataclasses.replace(plan, sequences=dataclasses.replace(plan.sequences, chunk=CHUNK))
    plans = [dataclasses.replace(plan, num_stages=stages) for stages in (4, 3, 2, 1)]
    return next(plan for plan in plans if _device.smem_bytes(scratch(plan)) <= _device.SMEM_BYTES_MAX)


def _copies(plan: Plan) -> int:
    """Copies of a chunk: of x and dy, of the vectors, twice, and of b, c and the state."""
    return 2 + 2 + 3 * plan.pieces


def scratch(plan: Plan) -> dict:
    return dict(
        x_smem=plan.tiles(plan.num_stages, 1),
        dy_smem=plan.tiles(plan.num_stages, 1),
        b_smem=plan.tiles(plan.num_stages, plan.pieces),
        c_smem=plan.tiles(plan.num_stages, plan.pieces),
        state_smem=plan.tiles(plan.num_stages, plan.pieces),
        rows_smem=plan.vectors(),
        columns_smem=plan.vectors(),
        g_smem=plan.tiles(1, plan.pieces),
        scaled_smem=plan.tiles(),
        out_smem=plan.tiles(3),
        filled=_device.barriers(plan.num_stages, _copies(plan)),
        freed=_device.barriers(plan.num_stages, 3),
        landed=_device.barriers(1, _copies(plan)),
        state_filled=_device.barriers(1),
        state_freed=_device.barriers(1),
    )


def _kernel(
    table, x_gmem, dy_gmem, b_gmem, c_gmem, states_gmem, vectors_gmem, d_gmem, last_gmem, dx_gmem, db_gmem, dc_gmem,
    sums_gmem, *firsts_gmem, plan: Plan, rows_smem, columns_smem, filled, freed, landed, state_filled, state_freed,
    **tiles,
):  # fmt: skip
    part, role = Part.of_block(table, plan.sequences, plan.interpreted), lax.axis_index("role")
    chunks, gradients = part.ring(filled, freed, plan.num_stages), part.ring(state_filled, state_freed, 1)
    views = {name.removesuffix("_smem"): Tiles.views(smem, plan.interpreted) for name, smem in tiles.items()}
    head = lax.axis_index("head_index")
    shared = Shared(plan, part, head, chunks, gradients, rows_smem, columns_smem, sums_gmem, **views)
    roles = {
        STATE: lambda: _carry_the_gradient(shared, last_gmem, firsts_gmem),
        QUERY: lambda: _compute_queries(shared, dc_gmem),
        KEY: lambda: _compute_keys(shared, d_gmem, dx_gmem, db_gmem),
        MEMORY: lambda: _load_chunks(shared, landed, x_gmem, dy_gmem, b_gmem, c_gmem, states_gmem, vectors_gmem),
    }
    for number, run in roles.items():
        registers = REGISTERS[plan.pieces][number]
        change = "increase_to" if registers > 128 else "decrease_to"
        _device.role(role == number, **{change: registers})(run)


@dataclasses.dataclass(frozen=True)
class Shared:
    """Scratch and indices that the roles of a block share, and steps that query and key warpgroups have in common."""

    plan: Plan
    part: Part
    head: Index
    chunks: Ring  # Its stages hold rows, columns, x, dy, b, c and state.
    gradients: Ring  # Its stage holds g.
    rows: Ref  # `CUM` and `DT`, to be read along rows, and along columns.
    columns: Ref
    sums_gmem: Ref
    x: Tiles
    dy: Tiles
    b: Tiles
    c: Tiles
    state: Tiles
    g: Tiles
    scaled: Tiles
    out: Tiles

    def chunk(self, i):
        """The `i`-th chunk of the part, from the last one on."""
        return self.part.num_chunks - 1 - i

    def store_sums(self, i: Index, sums: dict):
        for which, values in sums.items():
            _device.store(self.sums_gmem.at[self.head, self.part.first_chunk + self.chunk(i), which], values)

    def send(self, i: Index, tile: int, gmem: Ref, piece: int, values):
        """Stores `values`, the `piece`-th of a result's rows, by way of a tile of `out` that is this warpgroup's."""
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # The values before have left.
        self.out.tiled[tile] = values.astype(self.plan.dtype)
        plgpu.commit_smem()
        store_rows(self.part, self.out, tile, gmem, self.head, piece, self.part.row(self.chunk(i)))

    def vector(self, stage, which: int, layout):
        return _device.load((self.rows if layout == ROWS else self.columns).at[stage, which], layout)

    def products(self, stage, by_query: bool):
        """(cb, dyx), or their transposes."""

        def multiply(cb_ref, dyx_ref):
            c, b, dy, x = (m.tiled.at[stage] for m in (self.c, self.b, self.dy, self.x))
            for piece in range(self.plan.pieces):
                left, right = (c, b) if by_query else (b, c)
                plgpu.wgmma(cb_ref, left.at[piece], right.at[piece].T)
            left, right = (dy, x) if by_query else (x, dy)
            plgpu.wgmma(dyx_ref, left.at[0], right.at[0].T)
            return cb_ref[...], dyx_ref[...]

        return pl.run_scoped(multiply, *[plgpu.ACC(SQUARE, jnp.float32)] * 2)

    def decay(self, stage, by_query: bool):
        """L, or its transpose."""
        row, column = (spread(self.vector(stage, CUM, layout), dim) for dim, layout in enumerate((ROWS, COLUMNS)))
        i, j = _device.indices()
        seen, exponent = (j <= i, row - column) if by_query else (i <= j, column - row)
        return jnp.exp2(jnp.where(seen, exponent, -jnp.inf))


def _load_tile(ref):
    return plgpu.load(ref, layout=plgpu.Layout.WGMMA).astype(jnp.float32)


def _load_chunks(shared: Shared, landed: Barrier, x_gmem, dy_gmem, b_gmem, c_gmem, states_gmem, vectors_gmem):
    """The memory warpgroup."""
    plan, head, group = shared.plan, shared.head, shared.plan.group(shared.head)
    operands = (
        Operand(x_gmem, shared.x, head, 1),
        Operand(dy_gmem, shared.dy, head, 1),
        Operand(b_gmem, shared.b, group, plan.pieces),
        Operand(c_gmem, shared.c, group, plan.pieces),
    )

    def vectors_and_state(chunk, stage):
        pairs = [(vectors_gmem.at[plan.dt_head(head), chunk], smem.at[stage]) for smem in (shared.rows, shared.columns)]
        for p in range(plan.pieces):
            source = states_gmem.at[chunk, head, :, pl.ds(p * PIECE, PIECE)]
            pairs.append((source, shared.state.rows.at[stage, p]))
        return pairs

    load_chunks(shared.part, shared.chunks, landed, operands, vectors_and_state, _copies(plan), reverse=True)


def _carry_the_gradient(shared: Shared, last_gmem: Ref, firsts_gmem: tuple):
    """The state's warpgroup: takes g from chunk to chunk, the last one first, and stores it for the key warpgroup."""
    plan, part, index = shared.plan, shared.part, (shared.part.number, shared.head)

    def step(i, g):
        g_stage = shared.gradients.acquire(i)
        for p, piece in enumerate(g):
            shared.g.tiled[g_stage, p] = piece.astype(plan.dtype)
        plgpu.commit_smem()
        plgpu.barrier_arrive(shared.gradients.filled.at[g_stage])
        stage = shared.chunks.wait(i)
        w, decay = weights(shared.rows, stage, plan.chunk, reverse=True)
        products = [piece * _load_tile(shared.state.tiled.at[stage, p]) for p, piece in enumerate(g)]
        shared.store_sums(i, {STATE_SUM: functools.reduce(jnp.add, products).sum(axis=1) * decay})
        dy, c = shared.dy.tiled.at[stage, 0], [shared.c.tiled.at[stage, p] for p in range(plan.pieces)]
        g = advance(g, decay, w, dy, c, shared.scaled, plan.interpreted)
        shared.chunks.release(i)
        return g

    first = lax.fori_loop(0, part.num_chunks, step, first_state(last_gmem, index, plan.pieces))
    shared.gradients.drain(part.num_chunks)
    for first_gmem in firsts_gmem:
        store_state(first_gmem, index, first)


def _compute_queries(shared: Shared, dc_gmem):
    """The query warpgroup."""

    @pl.loop(0, shared.part.num_chunks)
    def _(i):
        stage = shared.chunks.wait(i)
        shared.store_sums(i, _queries_of_chunk(shared, i, stage, dc_gmem))
        shared.chunks.release(i)

    plgpu.wait_smem_to_gmem(0)


def _queries_of_chunk(shared: Shared, i: Index, stage: Index, dc_gmem: Ref) -> dict:
    """The sums of a chunk's queries; dc goes out piece by piece."""
    plan = shared.plan
    cb, dyx = shared.products(stage, by_query=True)
    t, s = _device.indices()
    own, skip = (jnp.where(t == s, m, 0.0).sum(axis=1) for m in (cb * dyx, dyx))
    decayed = dyx * shared.decay(stage, by_query=True) * spread(shared.vector(stage, DT, COLUMNS), 1)  # L dyx dt
    query, pairs = jnp.where(t == s, 0.0, cb * decayed).sum(axis=1), decayed.astype(plan.dtype)
    decay = jnp.exp2(shared.vector(stage, CUM, ROWS))
    dy = shared.dy.tiled.at[stage, 0]
    for piece in range(plan.pieces):

        def gradient(acc, piece=piece):
            """dc = exp(cum) dy S + (L dyx dt) b, and the first term times c, summed along rows."""
            plgpu.wgmma(acc, dy, shared.state.tiled.at[stage, piece])
            from_state = acc[...] * spread(decay, 0)
            sums = (from_state * _load_tile(shared.c.tiled.at[stage, piece])).sum(axis=1)
            b = shared.b.tiled.at[stage, piece]
            return _device.add_product(acc, from_state, pairs, b, plan.interpreted), sums

        dc, sums = pl.run_scoped(gradient, plgpu.ACC(SQUARE, jnp.float32))
        query = query + sums
        shared.send(i, 0, dc_gmem, piece, dc)
    return {QUERY_SUM: query, OWN_SUM: own, SKIP_SUM: skip}


def _compute_keys(shared: Shared, d_gmem, dx_gmem, db_gmem):
    """The key warpgroup."""
    skip = None if d_gmem is None else d_gmem[shared.plan.dt_head(shared.head)].astype(jnp.float32)

    @pl.loop(0, shared.part.num_chunks)
    def _(i):
        stage = shared.chunks.wait(i)
        sums = _keys_of_chunk(shared, i, stage, skip, dx_gmem, db_gmem)
        shared.gradients.release(i)
        shared.store_sums(i, sums)
        shared.chunks.release(i)

    plgpu.wait_smem_to_gmem(0)


def _keys_of_chunk(shared: Shared, i: Index, stage: Index, skip, dx_gmem: Ref, db_gmem: Ref) -> dict:
    """The sums of a chunk's keys; dx and db go out."""
    plan, pieces = shared.plan, range(shared.plan.pieces)
    cb, dyx = shared.products(stage, by_query=False)
    decay = shared.decay(stage, by_query=False)
    cb, (s, t) = cb * decay, _device.indices()
    key = jnp.where(t == s, 0.0, cb * dyx).sum(axis=1)
    cb, dyx = cb.astype(plan.dtype), (dyx * decay).astype(plan.dtype)  # (L cb)ᵀ and (L dyx)ᵀ
    dt, cum = (shared.vector(stage, which, ROWS) for which in (DT, CUM))
    to_end = jnp.exp2(shared.rows[stage, CUM, plan.chunk - 1] - cum)
    g_stage = shared.gradients.wait(i)
    x, dy = (tiles.tiled.at[stage, 0] for tiles in (shared.x, shared.dy))

    def gradient_of_x(acc):
        """exp(cum[last] - cum) b gᵀ + (L cb)ᵀ dy, and the first term times x, summed along rows."""
        for piece in pieces:
            plgpu.wgmma(acc, shared.b.tiled.at[stage, piece], shared.g.tiled.at[g_stage, piece].T)
        from_g = acc[...] * spread(to_end, 0)
        sums = (from_g * _load_tile(x)).sum(axis=1)
        return _device.add_product(acc, from_g, cb, dy, plan.interpreted), sums

    dx, end = pl.run_scoped(gradient_of_x, plgpu.ACC(SQUARE, jnp.float32))
    dx = dx * spread(dt, 0)
    dx = dx if skip is None else dx + skip * _load_tile(dy)
    shared.send(i, 1, dx_gmem, 0, dx)
    for piece in pieces:

        def gradient_of_b(acc, piece=piece):
            """exp(cum[last] - cum) x g + (L dyx)ᵀ c"""
            plgpu.wgmma(acc, x, shared.g.tiled.at[g_stage, piece])
            from_g = acc[...] * spread(to_end, 0)
            return _device.add_product(acc, from_g, dyx, shared.c.tiled.at[stage, piece], plan.interpreted)

        db = pl.run_scoped(gradient_of_b, plgpu.ACC(SQUARE, jnp.float32))
        shared.send(i, 2, db_gmem, piece, db * spread(dt, 0))
    return {KEY_SUM: key, END_SUM: end}


def launch(plan: Plan, table, x, dy, b, c, states, vectors, d, d_ends, params):
    """[dx, db, dc, sums], db and dc for each head of x, sums (H, num_chunks, 6, 64); and the gradients of the states
    that sequences start from, unless they are cut into parts. `states` are those before all chunks, and `d_ends` the
    gradients of those after all parts."""
    wide = jax.ShapeDtypeStruct((*x.shape[:2], plan.pieces * PIECE), x.dtype)
    sums = jax.ShapeDtypeStruct((plan.num_heads, plan.sequences.num_chunks, len(SUMS), CHUNK), jnp.float32)
    out_type = [jax.ShapeDtypeStruct(x.shape, x.dtype), wide, wide, sums]
    if plan.sequences.part_rows is None:
        out_type.append(jax.ShapeDtypeStruct(d_ends.shape, jnp.float32))
    return _host.kernel(
        functools.partial(_kernel, plan=plan),
        out_type=out_type,
        grid=(plan.sequences.num_parts, plan.num_heads),
        grid_names=("part", "head_index"),
        num_threads=4,
        thread_name="role",
        scratch_types=scratch(plan),
        compiler_params=params,
    )(table, x, dy, b, c, states, vectors, d, d_ends)

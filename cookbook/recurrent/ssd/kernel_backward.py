# SPDX-License-Identifier: Apache-2.0
"""Gradients of SSD: chunks from the last one to the first, with the gradient of the state in registers.

With S the state before a chunk, g the gradient of the state after it, cum as in `ssd`, and L[t, s] = 0 for s > t,
otherwise exp(cum[t] - cum[s]):

    p = c bᵀ,  q = dy xᵀ
    dc = exp(cum) dy S + (L q dt) b
    dx = dt (exp(cum[last] - cum) b gᵀ + (L p)ᵀ dy) + d dy
    db = dt (exp(cum[last] - cum) x g  + (L q)ᵀ c)
    g of the chunk before = exp(cum[last]) g + (exp(cum) dy)ᵀ c

S comes from a kernel before, which writes the states of all chunks. The gradients of dt and a come from those of cum:

    dcum[t] = c[t] . dc[t] - b[t] . db[t],    ddt[t] = b[t] . db[t] / dt[t]

and dcum of a chunk's last row has, beside that, the sum of g times the state after the chunk. A pair of rows adds to
dcum of one what it subtracts from dcum of the other, so these sums all but cancel. They are made in float32, before
pairs are rounded; and a row's pair with itself, or the last row's with the state after the chunk, which do not depend
on cum, are left out: with strong decay nothing else would be there. XLA differentiates the sums from dt a to cum.

Role table: as in `ssd`, one block for each head of each part.

    memory     copies x, dy, b, c, the state before the chunk, dt and cum of chunk after chunk into the slots of a ring
    state      has g in registers, and leaves it in 16 bits for each chunk
    query      dc, and the sums c . dc: pairs by rows t
    key        dx, db, and the sums b . db / dt: the same pairs by rows s, transposed, and so computed again: an operand
               in registers is the left one of a product, whose rows are those of the result

Barrier table: as in `ssd`, where the key warpgroup alone waits for what the state's has left.

Bound by: memory. b and c with fewer heads than x: dc and db of each head are written, and XLA sums them.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ... import _device, _host
from .. import core
from ..core import COLUMNS, PIECE, ROWS, Loader, Operand, Part, Tiles
from .kernel_state import CUM, DT, Plan, StateRole, states

SQUARE = PIECE, PIECE
CHUNK = 64
STATE, QUERY, KEY, MEMORY = range(4)  # Roles.
# Registers of a thread of each role, by the pieces of a row of b; a block starts with 128 for each.
REGISTERS = {1: (120, 152, 184, 56), 2: (120, 152, 184, 56), 4: (176, 136, 160, 40)}
# Vectors that the kernel returns: c . dc and b . db / dt from pairs of different rows; what a row's pair with itself
# adds to both; what g adds to the second; g times the state, summed over columns; and dy . x.
QUERY_SUM, KEY_SUM, OWN_SUM, END_SUM, STATE_SUM, SKIP_SUM = range(6)


def smem_bytes(pieces: int, num_stages: int) -> int:
    """The ring, g, w dy, dc, db and dx, and the barriers."""
    tile = 2 * PIECE * PIECE
    ring = num_stages * (tile * (2 + 3 * pieces) + 16 * PIECE)
    return ring + tile * (pieces + 1 + 3) + 8 * (2 * num_stages + 3)


def num_stages(pieces: int) -> int:
    return next(n for n in (4, 3, 2, 1) if smem_bytes(pieces, n) <= _device.SMEM_BYTES_MAX)


def _scratch(plan: Plan) -> dict:
    barriers = lambda num, arrivals=1: plgpu.Barrier(num_arrivals=arrivals, num_barriers=num)
    copies = 2 + 2 + 3 * plan.pieces
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
        filled=barriers(plan.num_stages, copies),
        freed=barriers(plan.num_stages, 3),
        landed=barriers(1, copies),
        left=barriers(1),
        taken=barriers(1),
    )


def _kernel(
    table, x_gmem, dy_gmem, b_gmem, c_gmem, states_gmem, vectors_gmem, d_gmem, given_gmem, dx_gmem, db_gmem, dc_gmem,
    sums_gmem, *firsts_gmem, plan: Plan, rows_smem, columns_smem, filled, freed, landed, left, taken, **tiles,
):  # fmt: skip
    part, role = Part.of_block(table, plan.chunk), lax.axis_index("role")
    ring, lefts = part.ring(filled, freed, plan.num_stages), part.ring(left, taken, 1)
    views = {name.removesuffix("_smem"): Tiles.views(smem, plan.interpreted) for name, smem in tiles.items()}
    block = Block(plan, part, lax.axis_index("head_index"), ring, lefts, rows_smem, columns_smem, sums_gmem, **views)
    roles = {
        STATE: lambda: _carry(block, given_gmem, firsts_gmem),
        QUERY: lambda: _queries(block, dc_gmem),
        KEY: lambda: _keys(block, d_gmem, dx_gmem, db_gmem),
        MEMORY: lambda: _load(block, landed, (x_gmem, dy_gmem), (b_gmem, c_gmem), states_gmem, vectors_gmem),
    }
    for number, run in roles.items():

        @pl.when(role == number)
        def _(number=number, run=run):
            registers = REGISTERS[plan.pieces][number]
            plgpu.set_max_registers(registers, action="increase" if registers > 128 else "decrease")
            run()


@dataclasses.dataclass(frozen=True)
class Block:
    """State that the roles of a block share, and the steps that query and key warpgroups have in common."""

    plan: Plan
    part: Part
    head: object
    ring: _device.Ring
    lefts: _device.Ring  # Slots of g.
    rows: object  # Vectors of the ring, to be read along rows, and along columns.
    columns: object
    sums_gmem: object
    x: Tiles  # In the ring, as the next four.
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

    def store_sums(self, i, sums: dict):
        for which, values in sums.items():
            _device.store(self.sums_gmem.at[self.head, self.part.first_chunk + self.chunk(i), which], values)

    def send(self, i, slot: int, gmem, piece: int, values):
        """Stores a tile of a result, the `piece`-th of its rows, by way of a slot that is this warpgroup's."""
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # The tile before has left.
        self.out.tiled[slot] = values.astype(self.plan.dtype)
        plgpu.commit_smem()
        row = self.part.row(self.chunk(i))
        core.store_rows(
            self.out, slot, gmem, self.head, piece, row, self.part.stop_row - row,
            is_ragged=self.plan.sequences.is_ragged, interpreted=self.plan.interpreted,
        )  # fmt: skip

    def vector(self, slot, which: int, layout):
        smem = self.rows if layout == ROWS else self.columns
        return plgpu.load(smem.at[slot, which], layout=layout, optimized=False)

    def products(self, slot, by_query: bool):
        """(p, q), or their transposes."""

        def multiply(p_ref, q_ref):
            c, b, dy, x = (m.tiled.at[slot] for m in (self.c, self.b, self.dy, self.x))
            for piece in range(self.plan.pieces):
                left, right = (c, b) if by_query else (b, c)
                plgpu.wgmma(p_ref, left.at[piece], right.at[piece].T)
            left, right = (dy, x) if by_query else (x, dy)
            plgpu.wgmma(q_ref, left.at[0], right.at[0].T)
            return p_ref[...], q_ref[...]

        return pl.run_scoped(multiply, *[plgpu.ACC(SQUARE, jnp.float32)] * 2)

    def decay(self, slot, by_query: bool):
        """L, or its transpose."""
        row, column = (_spread(self.vector(slot, CUM, layout), dim) for dim, layout in enumerate((ROWS, COLUMNS)))
        i, j = _indices()
        seen, exponent = (j <= i, row - column) if by_query else (i <= j, column - row)
        return jnp.exp2(jnp.where(seen, exponent, -jnp.inf))

    def sum_of(self, first, weights, second, between):
        """(values + weights @ second, sums), where (values, sums) = between(the sum of the products of the pairs of
        operands in `first`)."""

        def multiply(acc):
            for left, right in first:
                plgpu.wgmma(acc, left, right)
            values, sums = between(acc[...])
            if self.plan.interpreted:
                return values + jnp.dot(weights, second[...], preferred_element_type=jnp.float32), sums
            acc[...] = values
            plgpu.wgmma(acc, weights, second)
            return acc[...], sums

        return pl.run_scoped(multiply, plgpu.ACC(SQUARE, jnp.float32))


def _load_tile(ref):
    return plgpu.load(ref, layout=plgpu.Layout.WGMMA).astype(jnp.float32)


def _indices():
    """(row, column) of each value of a tile."""
    return [plgpu.broadcasted_iota(jnp.int32, SQUARE, dim, layout=plgpu.Layout.WGMMA) for dim in (0, 1)]


def _spread(values, dim: int):
    return lax.broadcast_in_dim(values, SQUARE, [dim])


def _load(block: Block, landed, of_head, of_group, states_gmem, vectors_gmem):
    """The memory warpgroup."""
    plan, head = block.plan, block.head

    def copy_more(chunk, slot, barrier):
        for smem in (block.rows, block.columns):
            plgpu.copy_gmem_to_smem(vectors_gmem.at[plan.dt_head(head), chunk], smem.at[slot], barrier)
        for p in range(plan.pieces):
            source = states_gmem.at[chunk, head, :, pl.ds(p * PIECE, PIECE)]
            plgpu.copy_gmem_to_smem(source, block.state.rows.at[slot, p], barrier)

    narrow = [Operand(gmem, smem, head, 1) for gmem, smem in zip(of_head, (block.x, block.dy), strict=True)]
    group, tiles = plan.group(head), (block.b, block.c)
    wide = [Operand(gmem, smem, group, plan.pieces) for gmem, smem in zip(of_group, tiles, strict=True)]
    more = copy_more, 2 + plan.pieces
    loader = Loader(block.ring, landed, (*narrow, *wide), *more, plan.sequences.is_ragged, plan.interpreted)
    loader.run(block.part, reverse=True)


def _carry(block: Block, given_gmem, firsts_gmem):
    """The state's warpgroup, which has g."""
    plan, part, index = block.plan, block.part, (block.part.state, block.head)

    def leave(i, values):
        slot = block.lefts.fill(i)
        for p, piece in enumerate(values):
            block.g.tiled[slot, p] = piece.astype(plan.dtype)
        plgpu.commit_smem()
        plgpu.barrier_arrive(block.lefts.filled.at[slot])

    def look(i, slot, values, decay):
        products = [v * _load_tile(block.state.tiled.at[slot, p]) for p, v in enumerate(values)]
        block.store_sums(i, {STATE_SUM: functools.reduce(jnp.add, products).sum(axis=1) * decay})

    role = StateRole(plan, block.ring, block.dy, block.c, block.rows, block.scaled, reverse=True, look=look)
    last = role.run(part.num_chunks, core.first_state(given_gmem, index, plan.pieces), leave)
    block.lefts.drain(part.num_chunks)
    for first_gmem in firsts_gmem:
        core.store_state(first_gmem, index, last)


def _queries(block: Block, dc_gmem):
    """The query warpgroup."""

    @pl.loop(0, block.part.num_chunks)
    def _(i):
        slot = block.ring.wait(i)
        block.store_sums(i, _query(block, i, slot, dc_gmem))
        block.ring.free(i)

    plgpu.wait_smem_to_gmem(0)


def _query(block: Block, i, slot, dc_gmem) -> dict:
    """The sums of a chunk's queries; dc goes out piece by piece."""
    p, q = block.products(slot, by_query=True)
    t, s = _indices()
    own, skip = (jnp.where(t == s, m, 0.0).sum(axis=1) for m in (p * q, q))
    q = q * block.decay(slot, by_query=True) * _spread(block.vector(slot, DT, COLUMNS), 1)
    query, weights = jnp.where(t == s, 0.0, p * q).sum(axis=1), q.astype(block.plan.dtype)
    decay = jnp.exp2(block.vector(slot, CUM, ROWS))
    for piece in range(block.plan.pieces):

        def between(values, piece=piece):
            values = values * _spread(decay, 0)
            return values, (values * _load_tile(block.c.tiled.at[slot, piece])).sum(axis=1)

        first = [(block.dy.tiled.at[slot, 0], block.state.tiled.at[slot, piece])]
        dc, sums = block.sum_of(first, weights, block.b.tiled.at[slot, piece], between)
        query = query + sums
        block.send(i, 0, dc_gmem, piece, dc)
    if block.plan.interpreted:
        plgpu.commit_smem()  # TMA may now overwrite what was read here.
    return {QUERY_SUM: query, OWN_SUM: own, SKIP_SUM: skip}


def _keys(block: Block, d_gmem, dx_gmem, db_gmem):
    """The key warpgroup."""
    skip = None if d_gmem is None else d_gmem[block.plan.dt_head(block.head)].astype(jnp.float32)

    @pl.loop(0, block.part.num_chunks)
    def _(i):
        slot = block.ring.wait(i)
        sums = _key(block, i, slot, skip, dx_gmem, db_gmem)
        block.lefts.free(i)
        block.store_sums(i, sums)
        block.ring.free(i)

    plgpu.wait_smem_to_gmem(0)


def _key(block: Block, i, slot, skip, dx_gmem, db_gmem) -> dict:
    """The sums of a chunk's keys; dx and db go out."""
    plan, pieces = block.plan, range(block.plan.pieces)
    p, q = block.products(slot, by_query=False)
    decay = block.decay(slot, by_query=False)
    p, (s, t) = p * decay, _indices()
    key, p, q = jnp.where(t == s, 0.0, p * q).sum(axis=1), p.astype(plan.dtype), (q * decay).astype(plan.dtype)
    dt, cum = (block.vector(slot, which, ROWS) for which in (DT, CUM))
    to_end = jnp.exp2(block.rows[slot, CUM, plan.chunk - 1] - cum)
    at = block.lefts.wait(i)

    def between(values):
        values = values * _spread(to_end, 0)
        return values, (values * _load_tile(block.x.tiled.at[slot, 0])).sum(axis=1)

    first = [(block.b.tiled.at[slot, piece], block.g.tiled.at[at, piece].T) for piece in pieces]
    dx, end = block.sum_of(first, p, block.dy.tiled.at[slot, 0], between)
    dx = dx * _spread(dt, 0)
    dx = dx if skip is None else dx + skip * _load_tile(block.dy.tiled.at[slot, 0])
    block.send(i, 1, dx_gmem, 0, dx)
    for piece in pieces:
        first = [(block.x.tiled.at[slot, 0], block.g.tiled.at[at, piece])]
        between = lambda values: (values * _spread(to_end, 0), ())
        db, _ = block.sum_of(first, q, block.c.tiled.at[slot, piece], between)
        block.send(i, 2, db_gmem, piece, db * _spread(dt, 0))
    if plan.interpreted:
        plgpu.commit_smem()  # TMA may now overwrite what was read here.
    return {KEY_SUM: key, END_SUM: end}


def gradients(plan: Plan, table, seq, is_row, vectors, decay, x, b, c, d, starts, dy, d_final, params):
    """(dx, db, dc, d_vectors, dd, d_initial), of operands without a batch; `starts` are the states that parts start
    from and `decay` (num_parts, H) what they let stay of them; `is_row` (num_chunks, 64) which places have a row."""
    sequences, pieces = plan.sequences, plan.pieces
    chunk_states = states(plan, table, x, b, vectors, starts, params, keeps_all=True)
    if sequences.part_rows is not None:
        local = states(plan, table, dy, c, vectors, None, params, reverse=True)
        given, d_initial = core.combine(decay, local, seq, d_final, reverse=True)
    else:
        given = d_final
    wide = jax.ShapeDtypeStruct((*x.shape[:2], pieces * PIECE), x.dtype)
    out_type = [jax.ShapeDtypeStruct(x.shape, x.dtype), wide, wide]
    out_type.append(jax.ShapeDtypeStruct((plan.num_heads, sequences.num_chunks, 6, CHUNK), jnp.float32))
    if sequences.part_rows is None:
        out_type.append(jax.ShapeDtypeStruct(d_final.shape, jnp.float32))
    dx, db, dc, sums, *firsts = _host.kernel(
        functools.partial(_kernel, plan=plan),
        out_type=out_type,
        grid=(sequences.num_parts, plan.num_heads),
        grid_names=("part", "head_index"),
        num_threads=4,
        thread_name="role",
        scratch_types=_scratch(plan),
        compiler_params=params,
    )(table, x, dy, b, c, chunk_states, vectors, d, given)
    if plan.num_heads != plan.num_groups:
        of_group = lambda m: m.reshape(len(m), plan.num_groups, -1, m.shape[-1])
        db, dc = (of_group(m).astype(jnp.float32).sum(axis=2).astype(m.dtype) for m in (db, dc))
    sums = sums.reshape(-1, plan.heads_per_dt, *sums.shape[1:]).sum(axis=1)
    sums = jnp.where(is_row[:, :1, None], sums, 0.0)  # Chunks that there are not were not written.
    of = lambda which: sums[:, :, which]
    dt, is_last = vectors[:, :, DT], is_row & ~jnp.pad(is_row[:, 1:], ((0, 0), (0, 1)))
    end = dt * jnp.where(is_last, 0.0, of(END_SUM))
    d_cum = of(QUERY_SUM) - dt * of(KEY_SUM) - end
    d_cum = d_cum.at[:, :, -1].add((of(STATE_SUM) + end).sum(axis=-1))
    d_dt = of(KEY_SUM) + of(OWN_SUM) + of(END_SUM)
    d_vectors = jnp.stack([math.log(2.0) * d_cum, d_dt], axis=2)
    dd = None if d is None else sums[:, :, SKIP_SUM].sum(axis=(1, 2)).astype(d.dtype)
    return dx, db, dc, d_vectors, dd, firsts[0] if firsts else d_initial

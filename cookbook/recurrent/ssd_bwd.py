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

and dcum of a chunk's last row has, beside that, the sum of g times the state after the chunk. What a pair gives to dcum
of one row it takes from that of another, so these sums all but cancel. They are made in float32, before pairs are
rounded; and a row's pair with itself, or the last row's with the state after the chunk, which do not depend on cum, are
left out: with strong decay nothing else would be there. XLA differentiates the sums from dt a to cum.

Role table: as in `ssd`, one block for each head of each part.

    memory     copies x, dy, b, c, the state before the chunk, dt and cum of chunk after chunk into the slots of a ring
    state      has g in registers, and leaves it in 16 bits for each chunk
    query      dc and row: pairs by rows t
    key        dx, db and key: the same pairs by rows s, computed again, because tensor cores take one operand of a
               product from registers, but only by its rows

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

from .. import _mgpu
from . import core
from .core import COLUMNS, PIECE, ROWS, Loader, Operand, Part, Tiles
from .ssd_state import CUM, DT, Plan, StateRole, states

SQUARE = PIECE, PIECE
CHUNK = 64
STATE, QUERY, KEY, MEMORY = range(4)  # Roles.
# Registers of a thread of each role, by the pieces of a row of b; a block starts with 128 for each.
REGISTERS = {1: (120, 152, 184, 56), 2: (120, 152, 184, 56), 4: (184, 136, 152, 40)}
# Vectors that the kernel returns: c . dc and b . db / dt from pairs of different rows; what a row's pair with itself
# adds to both; what g adds to the second; g times the state, summed over columns; and dy . x.
QUERY_SUM, KEY_SUM, OWN_SUM, END_SUM, STATE_SUM, SKIP_SUM = range(6)


def smem_bytes(pieces: int, num_stages: int) -> int:
    """The ring, g, w dy, dc, db and dx, and the barriers."""
    tile = 2 * PIECE * PIECE
    ring = num_stages * (tile * (2 + 3 * pieces) + 16 * PIECE)
    return ring + tile * (pieces + 1 + 3) + 8 * (2 * num_stages + 3)


def num_stages(pieces: int) -> int:
    return next(n for n in (4, 3, 2, 1) if smem_bytes(pieces, n) <= _mgpu.SMEM_BYTES_MAX)


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
    sums_gmem, *firsts_gmem, plan: Plan, x_smem, dy_smem, b_smem, c_smem, state_smem, rows_smem, columns_smem, g_smem,
    scaled_smem, out_smem, filled, freed, landed, left, taken,
):  # fmt: skip
    role, head, part = lax.axis_index("role"), lax.axis_index("head_index"), Part.of_block(table, plan.chunk)
    x, dy, b, c, state, g, scaled, out = (
        Tiles.views(smem, plan.interpreted)
        for smem in (x_smem, dy_smem, b_smem, c_smem, state_smem, g_smem, scaled_smem, out_smem)
    )

    def take_registers(of_role: int):
        number = REGISTERS[plan.pieces][of_role]
        plgpu.set_max_registers(number, action="increase" if number > 128 else "decrease")

    ring, lefts = part.ring(filled, freed, plan.num_stages), part.ring(left, taken, 1)

    @pl.when(role == MEMORY)
    def _():
        take_registers(MEMORY)

        def copy_more(chunk, slot, barrier):
            for smem in (rows_smem, columns_smem):
                plgpu.copy_gmem_to_smem(vectors_gmem.at[plan.dt_head(head), chunk], smem.at[slot], barrier)
            for p in range(plan.pieces):
                source = states_gmem.at[chunk, head, :, pl.ds(p * PIECE, PIECE)]
                plgpu.copy_gmem_to_smem(source, state.rows.at[slot, p], barrier)

        group = plan.group(head)
        operands = [Operand(gmem, smem, head, 1) for gmem, smem in ((x_gmem, x), (dy_gmem, dy))]
        operands += [Operand(gmem, smem, group, plan.pieces) for gmem, smem in ((b_gmem, b), (c_gmem, c))]
        load = Loader(
            ring, landed, tuple(operands), copy_more, 2 + plan.pieces, plan.sequences.is_ragged, plan.interpreted
        )
        load.run(part, reverse=True)

    chunk_of = lambda i: part.num_chunks - 1 - i

    def store_sums(which: int, i, sums):
        _mgpu.store(sums_gmem.at[head, part.first_chunk + chunk_of(i), which], sums)

    @pl.when(role == STATE)
    def _():
        take_registers(STATE)

        def leave(i, values):
            slot = lefts.fill(i)
            for p, piece in enumerate(values):
                g.tiled[slot, p] = piece.astype(plan.dtype)
            plgpu.commit_smem()
            plgpu.barrier_arrive(left.at[slot])

        def look(i, slot, values, decay):
            products = [v * _load_tile(state.tiled.at[slot, p]) for p, v in enumerate(values)]
            store_sums(STATE_SUM, i, functools.reduce(jnp.add, products).sum(axis=1) * decay)

        first = core.first_state(given_gmem, (part.state, head), plan.pieces)
        last = StateRole(plan, ring, dy, c, rows_smem, scaled, reverse=True, look=look).run(
            part.num_chunks, first, leave
        )
        lefts.drain(part.num_chunks)
        for first_gmem in firsts_gmem:
            core.store_state(first_gmem, (part.state, head), last)

    def send(i, number: int, gmem, piece: int, values):
        """Stores a tile of a result, of which it is the `piece`-th one."""
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # The tile before has left.
        out.tiled[number] = values.astype(plan.dtype)
        plgpu.commit_smem()
        row = part.row(chunk_of(i))
        core.store_rows(
            out, number, gmem, head, piece, row, part.stop_row - row, is_ragged=plan.sequences.is_ragged,
            interpreted=plan.interpreted,
        )  # fmt: skip

    pairs = Pairs(plan, x, dy, b, c, rows_smem, columns_smem)

    @pl.when(role == QUERY)
    def _():
        take_registers(QUERY)

        @pl.loop(0, part.num_chunks)
        def _(i):
            slot = ring.wait(i)
            sums = _query(pairs, slot, state, functools.partial(send, i, 0, dc_gmem))
            for which, values in zip((QUERY_SUM, OWN_SUM, SKIP_SUM), sums, strict=True):
                store_sums(which, i, values)
            ring.free(i)

        plgpu.wait_smem_to_gmem(0)

    @pl.when(role == KEY)
    def _():
        take_registers(KEY)
        skip = None if d_gmem is None else d_gmem[plan.dt_head(head)].astype(jnp.float32)

        @pl.loop(0, part.num_chunks)
        def _(i):
            slot = ring.wait(i)
            wait = lambda: lefts.wait(i)
            send_x, send_b = functools.partial(send, i, 1, dx_gmem, 0), functools.partial(send, i, 2, db_gmem)
            sums = _key(pairs, slot, skip, g, wait, send_x, send_b)
            lefts.free(i)
            for which, values in zip((KEY_SUM, END_SUM), sums, strict=True):
                store_sums(which, i, values)
            ring.free(i)

        plgpu.wait_smem_to_gmem(0)


def _load_tile(ref):
    return plgpu.load(ref, layout=plgpu.Layout.WGMMA).astype(jnp.float32)


def _indices():
    """(row, column) of each value of a tile."""
    return [plgpu.broadcasted_iota(jnp.int32, SQUARE, dim, layout=plgpu.Layout.WGMMA) for dim in (0, 1)]


def _spread(values, dim: int):
    return lax.broadcast_in_dim(values, SQUARE, [dim])


@dataclasses.dataclass(frozen=True)
class Pairs:
    """Pairs of rows of a chunk, as both warpgroups compute them."""

    plan: Plan
    x: Tiles
    dy: Tiles
    b: Tiles
    c: Tiles
    rows: object
    columns: object

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


def _query(pairs: Pairs, slot, state: Tiles, send):
    """The sums of a chunk's queries; dc goes out piece by piece."""
    p, q = pairs.products(slot, by_query=True)
    t, s = _indices()
    own, skip = (jnp.where(t == s, m, 0.0).sum(axis=1) for m in (p * q, q))
    q = q * pairs.decay(slot, by_query=True) * _spread(pairs.vector(slot, DT, COLUMNS), 1)
    row, weights = jnp.where(t == s, 0.0, p * q).sum(axis=1), q.astype(pairs.plan.dtype)
    decay = jnp.exp2(pairs.vector(slot, CUM, ROWS))
    for piece in range(pairs.plan.pieces):

        def between(values, piece=piece):
            values = values * _spread(decay, 0)
            return values, (values * _load_tile(pairs.c.tiled.at[slot, piece])).sum(axis=1)

        first = [(pairs.dy.tiled.at[slot, 0], state.tiled.at[slot, piece])]
        dc, sums = pairs.sum_of(first, weights, pairs.b.tiled.at[slot, piece], between)
        row = row + sums
        send(piece, dc)
    if pairs.plan.interpreted:
        plgpu.commit_smem()  # TMA may now overwrite what was read here.
    return row, own, skip


def _key(pairs: Pairs, slot, skip, g: Tiles, wait, send_x, send_b):
    """The sums of a chunk's keys; dx and db go out. `wait()` is the slot of g, once it is there."""
    plan, pieces = pairs.plan, range(pairs.plan.pieces)
    p, q = pairs.products(slot, by_query=False)
    decay = pairs.decay(slot, by_query=False)
    p, (s, t) = p * decay, _indices()
    key, p, q = jnp.where(t == s, 0.0, p * q).sum(axis=1), p.astype(plan.dtype), (q * decay).astype(plan.dtype)
    dt, cum = (pairs.vector(slot, which, ROWS) for which in (DT, CUM))
    to_end = jnp.exp2(pairs.rows[slot, CUM, plan.chunk - 1] - cum)
    at = wait()

    def between(values):
        values = values * _spread(to_end, 0)
        return values, (values * _load_tile(pairs.x.tiled.at[slot, 0])).sum(axis=1)

    first = [(pairs.b.tiled.at[slot, piece], g.tiled.at[at, piece].T) for piece in pieces]
    dx, end = pairs.sum_of(first, p, pairs.dy.tiled.at[slot, 0], between)
    dx = dx * _spread(dt, 0)
    send_x(dx if skip is None else dx + skip * _load_tile(pairs.dy.tiled.at[slot, 0]))
    for piece in pieces:
        first = [(pairs.x.tiled.at[slot, 0], g.tiled.at[at, piece])]
        between = lambda values: (values * _spread(to_end, 0), ())
        db, _ = pairs.sum_of(first, q, pairs.c.tiled.at[slot, piece], between)
        send_b(piece, db * _spread(dt, 0))
    if plan.interpreted:
        plgpu.commit_smem()  # TMA may now overwrite what was read here.
    return key, end


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
    dx, db, dc, sums, *firsts = _mgpu.kernel(
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

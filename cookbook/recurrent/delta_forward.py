"""The state of the gated delta rule from chunk to chunk, and the results of the tokens: the serial half of it.

    u = inverse (v - exp(cum) k state),    state' = exp(cum[-1]) state + k^T (exp(cum[-1] - cum) u)
    o = scale (exp(cum) q state + tril(exp(cum[t] - cum[s]) q k^T) u)

Shapes: q and k (rows, key heads, N), v and o (rows, heads, P), cum (heads, chunks, 64) float32, inverse (heads, chunks,
64, 64), states (parts, heads, P, N) float32, transposed. All others are bfloat16 or all float16.

Role table: a block goes through a part of a sequence with 64 of the P values of a head; its warpgroups are

    state    one: the chain. It keeps the state transposed in registers, where WGMMA takes it, u and what they are made
             of as its first operand: nothing that the next chunk waits for goes through shared memory
    output   one or two, which take turns: o of the chunk, from the state and u that `state` leaves in shared memory
    memory   one: copies the chunks' rows, inverses and decays ahead

Barrier table:

    barrier        arrivals                         who waits
    filled[slot]   copies of a chunk                state, and the output warpgroup whose chunk it is
    freed[slot]    state and that warpgroup         memory, before it refills the slot
    landed         copies of k and v, cut chunks    memory, before it zeroes the rows of other sequences, and arrives at
                                                    filled in place of the copies
    handed[slot]   state, which has stored u        the output warpgroup
    taken[slot]    the output warpgroup             state, before it stores the next state

With `with_output` False there is no output warpgroup: it is the first of two passes over a sequence in parts. Blocks
with a piece number from P / 64 on have no values; they start from the rows of the unit matrix, and so their result
is what the part does to any state.

Bound by: the latency of a chunk's three products in a row, where the heads of all sequences do not fill the GPU.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .. import _mgpu
from .delta_core import CHUNK, COLUMNS, PIECE, ROWS, TILED, clear, load, product, row_tiles, spread, views

# Registers of a thread of the state, output and memory warpgroups, by the number of output warpgroups.
REGISTERS = {0: (240, 0, 40), 1: (232, 168, 40), 2: (216, 120, 40)}
HANDED_SLOTS = 2  # Chunks that `state` may be ahead of the output warpgroups.


@dataclasses.dataclass(frozen=True)
class Plan:
    """Statics of the kernel."""

    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    dtype: jnp.dtype
    scale: float
    num_parts: int
    cuts: bool  # Whether the last chunk of a sequence may be cut.
    num_stages: int  # Slots of the ring.
    output_wgs: int
    interpreted: bool

    @property
    def pieces(self) -> int:
        """Pieces of a key."""
        return self.key_dim // PIECE

    @property
    def value_pieces(self) -> int:
        return self.value_dim // PIECE

    @property
    def with_output(self) -> bool:
        return self.output_wgs > 0

    @property
    def columns(self) -> int:
        """Pieces of the states' rows: those of values, and in the first of two passes those of a unit matrix."""
        return self.value_pieces + (0 if self.with_output else self.pieces)

    @property
    def memory_role(self) -> int:
        return 1 + self.output_wgs

    @property
    def copies(self) -> int:
        """Copies of a chunk."""
        return self.pieces + 3 + (self.pieces + 1 if self.with_output else 0)

    @property
    def scratch(self) -> dict:
        tiles = lambda *lead: row_tiles((*lead, CHUNK, PIECE), self.dtype, self.interpreted)
        tiled = lambda *lead: plgpu.SMEM((*lead, CHUNK, PIECE), self.dtype, **TILED)
        vectors = plgpu.SMEM((self.num_stages, CHUNK), jnp.float32)
        barrier = lambda num, arrivals=1: plgpu.Barrier(num_arrivals=arrivals, num_barriers=num)
        scratch = dict(
            k_smem=tiles(self.num_stages, self.pieces),
            v_smem=tiles(self.num_stages),
            t_smem=tiled(self.num_stages),
            columns_smem=vectors,
            filled=barrier(self.num_stages, self.copies),
            freed=barrier(self.num_stages, 1 + min(1, self.output_wgs)),
            landed=barrier(1, self.pieces + 1),
        )
        if not self.with_output:
            return scratch
        return scratch | dict(
            q_smem=tiles(self.num_stages, self.pieces),
            rows_smem=vectors,
            s_smem=tiled(HANDED_SLOTS, self.pieces),
            u_smem=tiled(HANDED_SLOTS),
            o_smem=tiles(self.output_wgs),
            handed=barrier(HANDED_SLOTS),
            taken=barrier(HANDED_SLOTS),
        )


@dataclasses.dataclass(frozen=True)
class Block:
    """Where this block of threads works."""

    part: jax.Array
    first_row: jax.Array
    num_rows: jax.Array
    first_chunk: jax.Array
    head: jax.Array
    piece: jax.Array

    @property
    def num_chunks(self):
        return lax.div(self.num_rows + (CHUNK - 1), jnp.int32(CHUNK))

    def row(self, i):
        return self.first_row + i * CHUNK

    def rows_left(self, i):
        """Rows of chunk `i` that are the sequence's, or more."""
        return self.num_rows - i * CHUNK


def _block(parts) -> Block:
    part = lax.axis_index("part")
    fields = (parts[part, field] for field in range(3))
    return Block(part, *fields, lax.axis_index("head_index"), lax.axis_index("tile"))


def _load(plan: Plan, block: Block, ring: _mgpu.Ring, landed, q_gmem, k_gmem, v_gmem, t_gmem, of_rows, of_columns, smem):
    """The memory warpgroup."""
    key_head = _mgpu.div(block.head, plan.heads // plan.key_heads)
    (_, k_tma, k_eights), (_, v_tma, v_eights) = (views(smem[name], plan.interpreted) for name in ("k_smem", "v_smem"))

    def load_rows(i, slot, barrier):
        """k and v."""
        rows = pl.ds(block.row(i), CHUNK)
        for p in range(plan.pieces):
            plgpu.copy_gmem_to_smem(k_gmem.at[rows, key_head, pl.ds(p * PIECE, PIECE)], k_tma.at[slot, p], barrier)

        def load_values():
            source = v_gmem.at[rows, block.head, pl.ds(block.piece * PIECE, PIECE)]
            plgpu.copy_gmem_to_smem(source, v_tma.at[slot], barrier)

        if plan.with_output:
            load_values()
        else:
            pl.when(block.piece < plan.value_pieces)(load_values)
            pl.when(block.piece >= plan.value_pieces)(lambda: plgpu.barrier_arrive(barrier))

    def load_cut_rows(i, slot, barrier):
        load_rows(i, slot, landed.at[0])
        plgpu.barrier_wait(landed.at[0])
        for eights in (*(k_eights.at[slot, p] for p in range(plan.pieces)), v_eights.at[slot]):
            clear(eights, block.rows_left(i), plan.interpreted)
        plgpu.commit_smem()
        for _ in range(plan.pieces + 1):
            plgpu.barrier_arrive(barrier)

    if not plan.with_output:

        @pl.when(block.piece >= plan.value_pieces)
        def _():
            for slot in range(plan.num_stages):
                clear(v_eights.at[slot], jnp.int32(0), plan.interpreted)
            plgpu.commit_smem()

    @pl.loop(0, block.num_chunks)
    def _(i):
        slot, chunk = ring.fill(i), block.first_chunk + i
        filled = ring.filled.at[slot]
        copy = lambda source, name: plgpu.copy_gmem_to_smem(source, smem[name].at[slot], filled)
        if plan.cuts:
            is_cut = block.rows_left(i) < CHUNK
            pl.when(is_cut)(lambda: load_cut_rows(i, slot, filled))
            pl.when(~is_cut)(lambda: load_rows(i, slot, filled))
        else:
            load_rows(i, slot, filled)
        copy(t_gmem.at[block.head, chunk], "t_smem")
        copy(of_columns.at[block.head, chunk], "columns_smem")
        if plan.with_output:
            _, q_tma, _ = views(smem["q_smem"], plan.interpreted)
            for p in range(plan.pieces):
                source = q_gmem.at[pl.ds(block.row(i), CHUNK), key_head, pl.ds(p * PIECE, PIECE)]
                plgpu.copy_gmem_to_smem(source, q_tma.at[slot, p], filled)
            copy(of_rows.at[block.head, chunk], "rows_smem")

    ring.drain(block.num_chunks)


def _advance(plan: Plan, block: Block, ring: _mgpu.Ring, hand: _mgpu.Ring | None, initial_gmem, final_gmem, smem):
    """The state warpgroup: the state, transposed, through all chunks of the part."""
    k_smem, v_smem = (views(smem[name], plan.interpreted)[0] for name in ("k_smem", "v_smem"))
    t_smem, columns_smem = smem["t_smem"], smem["columns_smem"]
    shape = PIECE, CHUNK

    def changes(i, slot, state):
        """u, transposed: `state` is handed over while the tensor cores are at the products."""
        keys = [(piece, k_smem.at[slot, p].T) for p, piece in enumerate(state)]
        values, inverse = v_smem.at[slot].T, t_smem.at[slot].T
        decay = lambda: spread(-jnp.exp(load(columns_smem.at[slot], COLUMNS)), 1)

        def hand_over():
            if plan.with_output:
                place = hand.fill(i)
                for p, piece in enumerate(state):
                    smem["s_smem"][place, p] = piece

        if plan.interpreted:
            hand_over()
            from_state = (product(keys, True) * decay()).astype(plan.dtype)
            return product([(values, inverse), (from_state, inverse)], True)

        def multiply(x_ref, u_ref):
            for piece, key in keys:
                plgpu.wgmma(x_ref, piece, key)
            plgpu.wgmma(u_ref, values, inverse)
            hand_over()
            x = plgpu.wgmma_accumulator_load(x_ref, wait_n=1)
            from_state = (plgpu.layout_cast(x, plgpu.Layout.WGMMA) * decay()).astype(plan.dtype)
            plgpu.wgmma(u_ref, from_state, inverse)
            return plgpu.layout_cast(u_ref[...], plgpu.Layout.WGMMA)

        return pl.run_scoped(multiply, plgpu.ACC(shape, jnp.float32), plgpu.ACC(shape, jnp.float32))

    def step(i, state):
        slot = ring.wait(i)
        u = changes(i, slot, [piece.astype(plan.dtype) for piece in state])
        if plan.with_output:
            smem["u_smem"][hand.slot(i)] = u.astype(plan.dtype)
            plgpu.commit_smem()
            plgpu.barrier_arrive(hand.filled.at[hand.slot(i)])
        last = columns_smem[slot, CHUNK - 1]
        to_end = (u * spread(jnp.exp(last - load(columns_smem.at[slot], COLUMNS)), 1)).astype(plan.dtype)
        decay = jnp.exp(last)
        state = [
            product([(to_end, k_smem.at[slot, p])], plan.interpreted, piece * decay) for p, piece in enumerate(state)
        ]
        ring.free(i)
        return state

    place = lambda gmem, p: gmem.at[
        block.part, block.head, pl.ds(block.piece * PIECE, PIECE), pl.ds(p * PIECE, PIECE)
    ]
    state = [load(place(initial_gmem, p), plgpu.Layout.WGMMA) for p in range(plan.pieces)]
    state = lax.fori_loop(0, block.num_chunks, step, state)
    for p, piece in enumerate(state):
        _mgpu.store(place(final_gmem, p), piece)
    if plan.with_output:
        hand.drain(block.num_chunks)


def _output(plan: Plan, block: Block, ring: _mgpu.Ring, hand: _mgpu.Ring, o_gmem, smem, wg):
    """An output warpgroup: the results of every chunk, or of every second one."""
    (q_smem, *_), (k_smem, *_), (o_smem, o_tma, _) = (
        views(smem[name], plan.interpreted) for name in ("q_smem", "k_smem", "o_smem")
    )
    s_smem, u_smem = smem["s_smem"], smem["u_smem"]
    row, col = (plgpu.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), dim, layout=plgpu.Layout.WGMMA) for dim in (0, 1))

    @pl.loop(0, _mgpu.div(block.num_chunks - wg + (plan.output_wgs - 1), plan.output_wgs))
    def _(turn):
        i = turn * plan.output_wgs + wg
        slot = ring.wait(i)
        cum = spread(load(smem["rows_smem"].at[slot], ROWS), 0)
        weights = multiply([(q_smem.at[slot, p], k_smem.at[slot, p].T) for p in range(plan.pieces)])
        decay = jnp.exp(jnp.minimum(cum - spread(load(smem["columns_smem"].at[slot], COLUMNS), 1), 0.0))
        weights = jnp.where(row >= col, weights * decay, 0.0).astype(plan.dtype)
        place = hand.wait(i)
        out = multiply([(q_smem.at[slot, p], s_smem.at[place, p].T) for p in range(plan.pieces)])
        out = product([(weights, u_smem.at[place].T)], plan.interpreted, out * jnp.exp(cum))
        ring.free(i)
        hand.free(i)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        o_smem[wg] = (out * plan.scale).astype(plan.dtype)
        plgpu.commit_smem()
        _store(plan, block, i, o_tma.at[wg], o_gmem)

    plgpu.wait_smem_to_gmem(0)


def multiply(pairs):
    """The sum of the products of `pairs`, both in shared memory."""

    def add(ref):
        for a, b in pairs:
            plgpu.wgmma(ref, a, b)
        return plgpu.layout_cast(ref[...], plgpu.Layout.WGMMA)

    return pl.run_scoped(add, plgpu.ACC((pairs[0][0].shape[0], pairs[0][1].shape[1]), jnp.float32))


def _store(plan: Plan, block: Block, i, o_smem, o_gmem):
    """Copies the results of chunk `i` to o, but no rows after the end of the sequence."""

    def copy(row, size: int):
        target = o_gmem.at[pl.ds(block.row(i) + row, size), block.head, pl.ds(block.piece * PIECE, PIECE)]
        plgpu.copy_smem_to_gmem(o_smem.at[pl.ds(row, size)], target)

    if not plan.cuts:
        copy(0, CHUNK)
        return
    num = block.rows_left(i)
    pl.when(num >= CHUNK)(lambda: copy(0, CHUNK))

    @pl.when(num < CHUNK)
    def _():
        if plan.interpreted:  # Its shared memory has one view, which is not cut between tiles.
            pl.loop(0, num)(lambda row: copy(row, 1))
            return
        row = 0 * num
        for size in (32, 16, 8, 4, 2, 1):
            pl.when((num & size) != 0)(functools.partial(copy, row, size))
            row = row + (num & size)


def _kernel(parts, q_gmem, k_gmem, v_gmem, t_gmem, of_rows, of_columns, initial_gmem, *outs, plan: Plan, filled, freed,
            landed, handed=None, taken=None, **smem):  # fmt: skip
    role, block, registers = lax.axis_index("role"), _block(parts), REGISTERS[plan.output_wgs]
    ring = _mgpu.Ring(filled, freed, plan.num_stages)
    hand = _mgpu.Ring(handed, taken, HANDED_SLOTS) if plan.with_output else None

    @pl.when(role == 0)
    def _():
        plgpu.set_max_registers(registers[0], action="increase")
        _advance(plan, block, ring, hand, initial_gmem, outs[0], smem)

    if plan.with_output:

        @pl.when((role >= 1) & (role < plan.memory_role))
        def _():
            plgpu.set_max_registers(registers[1], action="increase" if plan.output_wgs == 1 else "decrease")
            _output(plan, block, ring, hand, outs[1], smem, role - 1)

    @pl.when(role == plan.memory_role)
    def _():
        plgpu.set_max_registers(registers[2], action="decrease")
        _load(plan, block, ring, landed, q_gmem, k_gmem, v_gmem, t_gmem, of_rows, of_columns, smem)


@functools.partial(jax.jit, static_argnames=("plan", "params"))
def forward(parts, q, k, v, inverse, cum, initial, *, plan: Plan, params):
    """[final states, transposed, of each part; with `with_output` o]."""
    states = plan.num_parts, plan.heads, plan.columns * PIECE, plan.key_dim
    out_type = [jax.ShapeDtypeStruct(states, jnp.float32)]
    if plan.with_output:
        out_type.append(jax.ShapeDtypeStruct(v.shape, plan.dtype))
    return _mgpu.kernel(
        functools.partial(_kernel, plan=plan),
        out_type=out_type,
        grid=(plan.num_parts, plan.heads, plan.columns),
        grid_names=("part", "head_index", "tile"),
        num_threads=plan.memory_role + 1,
        thread_name="role",
        scratch_types=plan.scratch,
        compiler_params=params,
    )(parts, q, k, v, inverse, cum, cum, initial)  # cum twice: JAX finds no layout for one reference loaded in two.

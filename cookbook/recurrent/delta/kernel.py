# SPDX-License-Identifier: Apache-2.0
"""The state of the gated delta rule from chunk to chunk, and the results of the tokens: the serial half of it.

    u = inverse (v - exp(cum) k state),    state' = exp(cum[-1]) state + k^T (exp(cum[-1] - cum) u)
    o = scale (exp(cum) q state + tril(exp(cum[t] - cum[s]) q k^T) u)

Shapes: q and k (rows, key heads, N); v and o (rows, columns, 64), where a column is 64 values of a head; cum (heads,
chunks, 64) float32; inverse (heads, chunks, 64, 64); states (parts, columns, 64, N) float32, transposed. All others are
bfloat16 or all float16.

Role table: a block goes through a part of a sequence with one column, or with both of a head; its warpgroups are

    state    one a column: the chain. It keeps the state transposed in registers, where WGMMA takes it, u and what they
             are made of as its first operand: nothing that the next chunk waits for goes through shared memory
    output   one or two, which take turns: o of the chunk, from the states and u that `state` leaves in shared memory
    memory   one: copies the chunks' rows, inverses and decays ahead

Barrier table:

    barrier        arrivals                         who waits
    filled[slot]   copies of a chunk                state and the output warpgroups, also one whose chunk it is not:
                                                    nobody may miss a phase of a barrier that it waits for
    freed[slot]    state and output warpgroups      memory, before it refills the slot
    landed         copies of a chunk that is cut    memory, before it zeroes the rows of other sequences, and arrives at
                                                    filled in place of the copies
    handed[slot]   state, each having stored its u  the output warpgroup
    taken[slot]    the output warpgroup             state, before it stores the next state

Without an output warpgroup the kernel gives states alone: that after each part, or for the backward pass those before
all chunks. Without values it gives the states that follow from a unit matrix: what a part does to any state.

Bound by: the latency of a chunk's three products in a row, where the columns of all sequences do not fill the GPU,
which then has a block for each. Otherwise the tensor cores: a block of two columns multiplies queries and keys once for
both, and one chain computes while the other waits.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ... import _device, _host
from .. import core
from ..core import COLUMNS, PIECE, ROWS, Loader, Operand, Part, Sequences, Tiles
from .core import CHUNK, SQUARE, TILED, load, multiply, product, spread

# Registers of a thread of the state, output and memory warpgroups, by the numbers of state and output warpgroups.
REGISTERS = {(1, 0): (240, 0, 40), (1, 1): (232, 168, 40), (1, 2): (216, 120, 40), (2, 1): (168, 136, 40)}
HANDED_SLOTS = 2  # Chunks that `state` may be ahead of the output warpgroups.


@dataclasses.dataclass(frozen=True)
class Plan:
    """Statics of the kernel."""

    sequences: Sequences
    key_heads: int
    heads: int
    pieces: int  # Pieces of 64 values of a key.
    columns_per_head: int
    dtype: jnp.dtype
    scale: float
    num_stages: int  # Slots of the ring.
    state_wgs: int  # Columns of a block.
    output_wgs: int
    has_values: bool
    keeps_all: bool  # Whether the states before all chunks are results.
    interpreted: bool

    @property
    def columns(self) -> int:
        return self.heads * self.columns_per_head

    @property
    def memory_role(self) -> int:
        return self.state_wgs + self.output_wgs

    @property
    def num_vectors(self) -> int:
        """Copies of a chunk beside those of rows: the inverse, and cum in one or two layouts."""
        return 3 if self.output_wgs else 2

    @property
    def scratch(self) -> dict:
        tiles = lambda *lead: core.row_tiles((*lead, CHUNK, PIECE), self.dtype, self.interpreted)
        tiled = lambda *lead: plgpu.SMEM((*lead, CHUNK, PIECE), self.dtype, **TILED)
        vectors = plgpu.SMEM((self.num_stages, CHUNK), jnp.float32)
        barrier = lambda num, arrivals=1: plgpu.Barrier(num_arrivals=arrivals, num_barriers=num)
        copies = self.num_vectors + self.has_values * self.state_wgs + self.pieces * (2 if self.output_wgs else 1)
        scratch = dict(
            k_smem=tiles(self.num_stages, self.pieces),
            inverse_smem=tiled(self.num_stages),
            columns_smem=vectors,
            filled=barrier(self.num_stages, copies),
            freed=barrier(self.num_stages, self.memory_role),
            landed=barrier(1, copies),
        )
        if self.has_values:
            scratch |= dict(v_smem=tiles(self.num_stages, self.state_wgs))
        if self.output_wgs or self.keeps_all:
            scratch |= dict(s_smem=tiled(HANDED_SLOTS, self.state_wgs, self.pieces))
        if self.output_wgs:
            scratch |= dict(
                u_smem=tiled(HANDED_SLOTS, self.state_wgs),
                q_smem=tiles(self.num_stages, self.pieces),
                rows_smem=vectors,
                o_smem=tiles(self.output_wgs * self.state_wgs),
                handed=barrier(HANDED_SLOTS, self.state_wgs),
                taken=barrier(HANDED_SLOTS),
            )
        return scratch


def _load(plan: Plan, part: Part, unit, ring: _device.Ring, landed, gmem: dict, tiles: dict, smem: dict):
    """The memory warpgroup."""
    head = _device.div(unit * plan.state_wgs, plan.columns_per_head)
    key_head = _device.div(head, plan.heads // plan.key_heads)
    heads = dict(k=(key_head, plan.pieces), v=(unit, plan.state_wgs), q=(key_head, plan.pieces))
    operands = [Operand(gmem[name], tiles[name], *heads[name]) for name in heads if name in tiles]

    def copy_vectors(chunk, slot, barrier):
        for name in ("inverse", "columns", "rows"):
            if f"{name}_smem" in smem:
                plgpu.copy_gmem_to_smem(gmem[name].at[head, chunk], smem[f"{name}_smem"].at[slot], barrier)

    num, is_ragged = plan.num_vectors, plan.sequences.is_ragged
    Loader(ring, landed, tuple(operands), copy_vectors, num, is_ragged, plan.interpreted).run(part)


@dataclasses.dataclass(frozen=True)
class State:
    """A state warpgroup."""

    plan: Plan
    column: object  # Index among the columns of the block.
    ring: _device.Ring
    hand: _device.Ring | None
    tiles: dict
    smem: dict

    def run(self, num_chunks, state, keep):
        """The state after `num_chunks`. `keep(i, piece, smem)` sends a piece of that before chunk `i` away, if it
        `keeps_all`."""

        def step(i, state):
            slot, place = self.ring.wait(i), _device.rem(i, HANDED_SLOTS)
            u = self.changes(i, slot, [piece.astype(self.plan.dtype) for piece in state])
            if self.plan.output_wgs:
                self.smem["u_smem"][place, self.column] = u.astype(self.plan.dtype)
                plgpu.commit_smem()
                plgpu.barrier_arrive(self.hand.filled.at[place])
            elif self.plan.keeps_all:
                plgpu.commit_smem()
                for p in range(self.plan.pieces):
                    keep(i, p, self.smem["s_smem"].at[place, self.column, p])
            last = self.smem["columns_smem"][slot, CHUNK - 1]
            to_end = jnp.exp(last - load(self.smem["columns_smem"].at[slot], COLUMNS))
            to_end, decay = (u * spread(to_end, 1)).astype(self.plan.dtype), jnp.exp(last)
            keys = [self.tiles["k"].tiled.at[slot, p] for p in range(self.plan.pieces)]
            state = [
                product([(to_end, key)], self.plan.interpreted, piece * decay)
                for piece, key in zip(state, keys, strict=True)
            ]
            self.ring.free(i)
            return state

        return lax.fori_loop(0, num_chunks, step, state)

    def hand_over(self, i, state):
        """Stores the state before chunk `i`, rounded, for others."""
        if self.plan.output_wgs:
            self.hand.fill(i)
        elif self.plan.keeps_all:
            plgpu.wait_smem_to_gmem(self.plan.pieces, wait_read_only=True)  # The state in this slot has left.
        if self.plan.output_wgs or self.plan.keeps_all:
            for p, piece in enumerate(state):
                self.smem["s_smem"][_device.rem(i, HANDED_SLOTS), self.column, p] = piece

    def changes(self, i, slot, state):
        """u, transposed. `state` is handed over while the tensor cores are at the products."""
        keys = [(piece, self.tiles["k"].tiled.at[slot, p].T) for p, piece in enumerate(state)]
        inverse = self.smem["inverse_smem"].at[slot].T
        values = [(self.tiles["v"].tiled.at[slot, self.column].T, inverse)] if self.plan.has_values else []
        decay = lambda: spread(-jnp.exp(load(self.smem["columns_smem"].at[slot], COLUMNS)), 1)
        if self.plan.interpreted:
            self.hand_over(i, state)
            from_state = (product(keys, True) * decay()).astype(self.plan.dtype)
            return product([*values, (from_state, inverse)], True)

        def multiply(x_ref, u_ref=None):
            for pair in keys:
                plgpu.wgmma(x_ref, *pair)
            early = [] if u_ref is None else values  # They wait for no state.
            for pair in early:
                plgpu.wgmma(u_ref, *pair)
            self.hand_over(i, state)
            x = plgpu.layout_cast(plgpu.wgmma_accumulator_load(x_ref, wait_n=len(early)), plgpu.Layout.WGMMA)
            x = (x * decay()).astype(self.plan.dtype), inverse
            if u_ref is None:
                return product([*values, x], False)
            plgpu.wgmma(u_ref, *x)
            return plgpu.layout_cast(u_ref[...], plgpu.Layout.WGMMA)

        # Two chains fill each other's gaps, and have registers for one sum at a time.
        return pl.run_scoped(multiply, *[plgpu.ACC(SQUARE, jnp.float32)] * (3 - self.plan.state_wgs))


def _outputs(plan: Plan, part: Part, unit, ring: _device.Ring, hand: _device.Ring, o_gmem, tiles: dict, smem: dict, wg):
    """An output warpgroup: the results of every chunk, or of every second one."""
    row, col = (plgpu.broadcasted_iota(jnp.int32, SQUARE, dim, layout=plgpu.Layout.WGMMA) for dim in (0, 1))

    def outputs(i):
        slot = ring.wait(i)
        queries = [tiles["q"].tiled.at[slot, p] for p in range(plan.pieces)]
        weights = multiply([(query, tiles["k"].tiled.at[slot, p].T) for p, query in enumerate(queries)])
        cum = spread(load(smem["rows_smem"].at[slot], ROWS), 0)
        decay = jnp.exp(jnp.minimum(cum - spread(load(smem["columns_smem"].at[slot], COLUMNS), 1), 0.0))
        weights = jnp.where(row >= col, weights * decay, 0.0).astype(plan.dtype)
        place = hand.wait(i)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        slots = [wg * plan.state_wgs + column for column in range(plan.state_wgs)]
        for column, o_slot in enumerate(slots):
            states = [smem["s_smem"].at[place, column, p].T for p in range(plan.pieces)]
            out = multiply(list(zip(queries, states, strict=True)))
            u = smem["u_smem"].at[place, column].T
            out = product([(weights, u)], plan.interpreted, out * jnp.exp(cum))
            tiles["o"].tiled[o_slot] = (out * plan.scale).astype(plan.dtype)
        ring.free(i)
        hand.free(i)
        plgpu.commit_smem()
        for column, o_slot in enumerate(slots):
            core.store_rows(
                tiles["o"], o_slot, o_gmem, unit, column, part.row(i), part.stop_row - part.row(i),
                is_ragged=plan.sequences.is_ragged, interpreted=plan.interpreted,
            )  # fmt: skip

    def pass_by(i):
        ring.wait(i)
        ring.free(i)

    @pl.loop(0, _device.div(part.num_chunks + (plan.output_wgs - 1), plan.output_wgs))
    def _(turn):
        mine = turn * plan.output_wgs + wg
        if plan.output_wgs == 2:
            other = mine + 1 - 2 * wg
            pl.when(other < part.num_chunks)(lambda: pass_by(other))
        pl.when(mine < part.num_chunks)(lambda: outputs(mine))

    plgpu.wait_smem_to_gmem(0)


def _kernel(table, gmem, initial_gmem, *outs, plan: Plan, filled, freed, landed, handed=None, taken=None, **smem):
    role, unit, part = lax.axis_index("role"), lax.axis_index("unit"), Part.of_block(table, CHUNK)
    tiles = {name: Tiles.views(smem[f"{name}_smem"], plan.interpreted) for name in "qkvo" if f"{name}_smem" in smem}
    ring = _device.Ring(filled, freed, plan.num_stages)
    hand = _device.Ring(handed, taken, HANDED_SLOTS) if plan.output_wgs else None
    registers = REGISTERS[plan.state_wgs, plan.output_wgs]

    @pl.when(role < plan.state_wgs)
    def _():
        column = unit * plan.state_wgs + role
        plgpu.set_max_registers(registers[0], action="increase")

        def keep(i, p, piece):
            plgpu.copy_smem_to_gmem(piece, outs[0].at[part.first_chunk + i, column, :, pl.ds(p * PIECE, PIECE)])

        first = core.first_state(initial_gmem, (part.state, column), plan.pieces)
        last = State(plan, role, ring, hand, tiles, smem).run(part.num_chunks, first, keep)
        if not plan.keeps_all:
            core.store_state(outs[0], (part.state, column), last)
        if plan.output_wgs:
            hand.drain(part.num_chunks)
        plgpu.wait_smem_to_gmem(0)

    if plan.output_wgs:

        @pl.when((role >= plan.state_wgs) & (role < plan.memory_role))
        def _():
            plgpu.set_max_registers(registers[1], action="increase" if plan.output_wgs == 1 else "decrease")
            _outputs(plan, part, unit, ring, hand, outs[1], tiles, smem, role - plan.state_wgs)

    @pl.when(role == plan.memory_role)
    def _():
        plgpu.set_max_registers(registers[2], action="decrease")
        _load(plan, part, unit, ring, landed, gmem, tiles, smem)


def run(plan: Plan, table, q, k, v, inverse, cum, initial, params):
    """The kernel's results: with output warpgroups the states after all parts that are no padding, and o; if it
    `keeps_all` the states before all chunks, (chunks, columns, 64, N), in the operands' dtype; otherwise the states
    after all parts. `initial` None stands for zeros."""
    sequences, state = plan.sequences, (plan.columns, PIECE, plan.pieces * PIECE)
    units, rows = plan.columns // plan.state_wgs, len(k)
    of_units = lambda x: x.reshape(rows, units, PIECE * plan.state_wgs)
    num_states = sequences.num_parts if sequences.part_rows else sequences.num_seqs
    out_type = [jax.ShapeDtypeStruct((num_states, *state), jnp.float32)]
    if plan.output_wgs:
        out_type.append(jax.ShapeDtypeStruct((rows, units, PIECE * plan.state_wgs), plan.dtype))
    if plan.keeps_all:
        out_type = [jax.ShapeDtypeStruct((sequences.num_chunks, *state), plan.dtype)]
    gmem = dict(
        q=q, k=k, v=None if v is None else of_units(v), inverse=inverse, columns=cum, rows=cum
    )  # JAX finds no layout for one array in two.
    results = _host.kernel(
        functools.partial(_kernel, plan=plan),
        out_type=out_type,
        grid=(sequences.num_parts, units),
        grid_names=("part", "unit"),
        num_threads=plan.memory_role + 1,
        thread_name="role",
        scratch_types=plan.scratch,
        compiler_params=params,
    )(table, gmem, initial)
    return [results[0], results[1].reshape(rows, plan.columns, PIECE)] if plan.output_wgs else results


def starts_of_parts(plan: Plan, table, seq, k, v, inverse, cum, initial, params):
    """(states at the starts of all parts, states at the ends of the sequences): two passes over all parts, and the
    parts one after the other, whose states are multiplied by what the part does to any."""
    sequences = plan.sequences
    plan = dataclasses.replace(plan, state_wgs=1, output_wgs=0)
    (local,) = run(plan, table, None, k, v, inverse, cum, None, params)
    unit = jnp.eye(plan.pieces * PIECE, dtype=jnp.float32).reshape(plan.pieces, PIECE, -1)
    unit = jnp.broadcast_to(unit, (sequences.num_parts, plan.heads, *unit.shape))
    plan = dataclasses.replace(plan, columns_per_head=plan.pieces, has_values=False)
    of_heads = lambda states: states.reshape(len(states), plan.heads, -1, states.shape[-1])
    columns = unit.reshape(len(unit), plan.columns, *unit.shape[3:])
    (transition,) = run(plan, table, None, k, None, inverse, cum, columns, params)
    shape = local.shape[1:]
    local, transition = of_heads(local), of_heads(transition)
    given = jnp.zeros((sequences.num_seqs + 1, *local.shape[1:]), jnp.float32)
    given = given if initial is None else given.at[:-1].set(of_heads(initial))

    def step(carry, part):
        before, ends = carry
        local, transition, seq, is_first = part
        start = jnp.where(is_first, given[seq], before)
        end = jnp.einsum("hpn,hnm->hpm", start, transition, precision="highest") + local
        return (end, ends.at[seq].set(end)), start

    is_first = seq != jnp.pad(seq[:-1], (1, 0), constant_values=-1)
    parts = local, transition, jnp.minimum(seq, sequences.num_seqs), is_first
    (_, ends), starts = lax.scan(step, (given[0], given), parts, unroll=min(16, len(seq)))
    return starts.reshape(-1, *shape), ends[:-1].reshape(-1, *shape)

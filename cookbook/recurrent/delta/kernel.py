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
    filled[slot]   copies of a chunk                state and the output warpgroups, for every chunk, also those
                                                    that they pass by: no phase of a barrier may be missed
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
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ... import _device, _host
from ..._device import COLUMNS, PIECE, ROWS, Tiles, load, product, spread
from ..sequences import Part
from ..states import first_state, store_state
from ..tiles import Operand, load_chunks, store_rows
from .plan import CHUNK, SQUARE, Plan

# Registers per thread of the state, output and memory warpgroups, by the numbers of state and output warpgroups.
REGISTERS = {(1, 0): (240, 0, 40), (1, 1): (232, 168, 40), (1, 2): (216, 120, 40), (2, 1): (168, 136, 40)}
HANDED_SLOTS = 2  # Chunks that `state` may be ahead of the output warpgroups.


def _copies(plan: Plan) -> int:
    """Copies of a chunk: the inverse, cum in one or two layouts, values, keys and queries."""
    num_keys = plan.pieces * (2 if plan.output_wgs else 1)
    return (3 if plan.output_wgs else 2) + plan.has_values * plan.state_wgs + num_keys


def scratch(plan: Plan) -> dict:
    vectors = plgpu.SMEM((plan.num_stages, CHUNK), jnp.float32)
    refs = dict(
        k_smem=plan.rows(plan.num_stages, plan.pieces),
        inverse_smem=plan.squares(plan.num_stages),
        columns_smem=vectors,
        filled=_device.barriers(plan.num_stages, _copies(plan)),
        freed=_device.barriers(plan.num_stages, plan.memory_role),
        landed=_device.barriers(1, _copies(plan)),
    )
    if plan.has_values:
        refs |= dict(v_smem=plan.rows(plan.num_stages, plan.state_wgs))
    if plan.output_wgs or plan.keeps_all:
        refs |= dict(s_smem=plan.squares(HANDED_SLOTS, plan.state_wgs, plan.pieces))
    if plan.output_wgs:
        refs |= dict(
            u_smem=plan.squares(HANDED_SLOTS, plan.state_wgs),
            q_smem=plan.rows(plan.num_stages, plan.pieces),
            rows_smem=vectors,
            o_smem=plan.rows(plan.output_wgs * plan.state_wgs),
            handed=_device.barriers(HANDED_SLOTS, plan.state_wgs),
            taken=_device.barriers(HANDED_SLOTS),
        )
    return refs


@dataclasses.dataclass(frozen=True)
class Shared:
    """Scratch and indices that the roles of a block share."""

    plan: Plan
    part: Part
    unit: Any  # Number of the block among those of its part.
    ring: _device.Ring
    hand: _device.Ring | None  # Slots of `state` and `u`, if there are output warpgroups.
    k: Tiles  # In the ring, as the next five.
    inverse: Any
    columns: Any  # cum, to be read along columns, and along rows.
    rows: Any = None
    v: Tiles | None = None
    q: Tiles | None = None
    s: Any = None  # States before chunks.
    u: Any = None
    o: Tiles | None = None


def _kernel(table, gmem, initial_gmem, *outs, plan: Plan, filled, freed, landed, handed=None, taken=None, **smem):
    role, unit, part = (
        lax.axis_index("role"),
        lax.axis_index("unit"),
        Part.of_block(table, plan.sequences, plan.interpreted),
    )
    smem = {name.removesuffix("_smem"): ref for name, ref in smem.items()}
    smem |= {name: Tiles.views(smem[name], plan.interpreted) for name in "qkvo" if name in smem}
    ring = _device.Ring(filled, freed, plan.num_stages)
    hand = _device.Ring(handed, taken, HANDED_SLOTS) if plan.output_wgs else None
    shared = Shared(plan, part, unit, ring, hand, **smem)
    state_registers, output_registers, memory_registers = REGISTERS[plan.state_wgs, plan.output_wgs]

    @_device.role(role < plan.state_wgs, increase_to=state_registers)
    def _():
        _carry_the_state(shared, role, initial_gmem, outs[0])

    if plan.output_wgs:
        change = "increase_to" if plan.output_wgs == 1 else "decrease_to"

        @_device.role((role >= plan.state_wgs) & (role < plan.memory_role), **{change: output_registers})
        def _():
            _compute_outputs(shared, role - plan.state_wgs, outs[1])

    @_device.role(role == plan.memory_role, decrease_to=memory_registers)
    def _():
        _load_chunks(shared, landed, gmem)


def _load_chunks(shared: Shared, landed, gmem: dict):
    """The memory warpgroup."""
    plan = shared.plan
    head = plan.head(shared.unit * plan.state_wgs)
    key_head = plan.key_head(head)
    operands = [Operand(gmem["k"], shared.k, key_head, plan.pieces)]
    if plan.has_values:
        operands.append(Operand(gmem["v"], shared.v, shared.unit, plan.state_wgs))
    if plan.output_wgs:
        operands.append(Operand(gmem["q"], shared.q, key_head, plan.pieces))

    def inverse_and_cum(chunk, slot):
        refs = dict(inverse=shared.inverse, columns=shared.columns, rows=shared.rows)
        return [(gmem[name].at[head, chunk], ref.at[slot]) for name, ref in refs.items() if ref is not None]

    load_chunks(shared.part, shared.ring, landed, operands, inverse_and_cum, _copies(plan))


def _carry_the_state(shared: Shared, wg, initial_gmem, states_gmem):
    """State warpgroup `wg`: takes the state of its column from chunk to chunk, in pieces."""
    plan, part, column = shared.plan, shared.part, shared.unit * shared.plan.state_wgs + wg

    def step(i, state):
        slot, place = shared.ring.wait(i), _device.rem(i, HANDED_SLOTS)
        u = _corrections(shared, wg, i, slot, [piece.astype(plan.dtype) for piece in state])
        if plan.output_wgs:
            shared.u[place, wg] = u.astype(plan.dtype)
            plgpu.commit_smem()
            plgpu.barrier_arrive(shared.hand.filled.at[place])
        elif plan.keeps_all:
            plgpu.commit_smem()
            for p in range(plan.pieces):
                target = states_gmem.at[part.first_chunk + i, column, :, pl.ds(p * PIECE, PIECE)]
                plgpu.copy_smem_to_gmem(shared.s.at[place, wg, p], target)
        last = shared.columns[slot, CHUNK - 1]
        to_end = jnp.exp(last - load(shared.columns.at[slot], COLUMNS))
        u_to_end, decay = (u * spread(to_end, 1)).astype(plan.dtype), jnp.exp(last)
        state = [
            product([(u_to_end, shared.k.tiled.at[slot, p])], plan.interpreted, piece * decay)
            for p, piece in enumerate(state)
        ]
        shared.ring.release(i)
        return state

    first = first_state(initial_gmem, (part.state, column), plan.pieces)
    last = lax.fori_loop(0, part.num_chunks, step, first)
    if not plan.keeps_all:
        store_state(states_gmem, (part.state, column), last)
    if plan.output_wgs:
        shared.hand.drain(part.num_chunks)
    plgpu.wait_smem_to_gmem(0)


def _corrections(shared: Shared, wg, i, slot, state):
    """u of chunk `i`, transposed. `state`, the one before it, is handed over while the tensor cores are at the
    products."""
    plan = shared.plan
    keys = [(piece, shared.k.tiled.at[slot, p].T) for p, piece in enumerate(state)]
    inverse = shared.inverse.at[slot].T
    values = [(shared.v.tiled.at[slot, wg].T, inverse)] if plan.has_values else []
    minus_decay = lambda: spread(-jnp.exp(load(shared.columns.at[slot], COLUMNS)), 1)
    if plan.interpreted:
        _hand_over(shared, wg, i, state)
        from_state = (product(keys, True) * minus_decay()).astype(plan.dtype)
        return product([*values, (from_state, inverse)], True)

    def multiply(from_state_ref, u_ref=None):
        for pair in keys:
            plgpu.wgmma(from_state_ref, *pair)
        early = [] if u_ref is None else values  # They wait for no state.
        for pair in early:
            plgpu.wgmma(u_ref, *pair)
        _hand_over(shared, wg, i, state)
        from_state = plgpu.wgmma_accumulator_load(from_state_ref, wait_n=len(early))
        from_state = plgpu.layout_cast(from_state, plgpu.Layout.WGMMA)
        from_state = (from_state * minus_decay()).astype(plan.dtype)
        if u_ref is None:
            return product([*values, (from_state, inverse)], False)
        plgpu.wgmma(u_ref, from_state, inverse)
        return plgpu.layout_cast(u_ref[...], plgpu.Layout.WGMMA)

    # Two chains fill each other's gaps, and have registers for one sum at a time.
    return pl.run_scoped(multiply, *[plgpu.ACC(SQUARE, jnp.float32)] * (3 - plan.state_wgs))


def _hand_over(shared: Shared, wg, i, state):
    """Stores the state before chunk `i`, rounded, for the output warpgroups, or to be sent away."""
    plan = shared.plan
    if plan.output_wgs:
        shared.hand.acquire(i)
    elif plan.keeps_all:
        plgpu.wait_smem_to_gmem(plan.pieces, wait_read_only=True)  # The state in this slot has left.
    if plan.output_wgs or plan.keeps_all:
        for p, piece in enumerate(state):
            shared.s[_device.rem(i, HANDED_SLOTS), wg, p] = piece


def _compute_outputs(shared: Shared, wg, o_gmem):
    """Output warpgroup `wg`: the results of every chunk, or of every second one."""
    plan, part = shared.plan, shared.part
    row, col = _device.indices()

    def outputs(i):
        slot = shared.ring.wait(i)
        queries = [shared.q.tiled.at[slot, p] for p in range(plan.pieces)]
        keys = [shared.k.tiled.at[slot, p].T for p in range(plan.pieces)]
        weights = product(list(zip(queries, keys, strict=True)), plan.interpreted)
        cum = spread(load(shared.rows.at[slot], ROWS), 0)
        decay = jnp.exp(jnp.minimum(cum - spread(load(shared.columns.at[slot], COLUMNS), 1), 0.0))
        weights = jnp.where(row >= col, weights * decay, 0.0).astype(plan.dtype)
        place = shared.hand.wait(i)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        slots = [wg * plan.state_wgs + column for column in range(plan.state_wgs)]
        for column, o_slot in enumerate(slots):
            states = [shared.s.at[place, column, p].T for p in range(plan.pieces)]
            o = product(list(zip(queries, states, strict=True)), plan.interpreted)
            o = product([(weights, shared.u.at[place, column].T)], plan.interpreted, o * jnp.exp(cum))
            shared.o.tiled[o_slot] = (o * plan.scale).astype(plan.dtype)
        shared.ring.release(i)
        shared.hand.release(i)
        plgpu.commit_smem()
        for column, o_slot in enumerate(slots):
            store_rows(part, shared.o, o_slot, o_gmem, shared.unit, column, part.row(i))

    def pass_by(i):
        shared.ring.wait(i)
        shared.ring.release(i)

    @pl.loop(0, _device.div(part.num_chunks + (plan.output_wgs - 1), plan.output_wgs))
    def _(turn):
        mine = turn * plan.output_wgs + wg
        if plan.output_wgs == 2:
            other = mine + 1 - 2 * wg
            pl.when(other < part.num_chunks)(lambda: pass_by(other))
        pl.when(mine < part.num_chunks)(lambda: outputs(mine))

    plgpu.wait_smem_to_gmem(0)


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
    v = None if v is None else of_units(v)
    # cum is passed twice: one ref cannot have two layouts.
    gmem = dict(q=q, k=k, v=v, inverse=inverse, columns=cum, rows=cum)
    results = _host.kernel(
        functools.partial(_kernel, plan=plan),
        out_type=out_type,
        grid=(sequences.num_parts, units),
        grid_names=("part", "unit"),
        num_threads=plan.memory_role + 1,
        thread_name="role",
        scratch_types=scratch(plan),
        compiler_params=params,
    )(table, gmem, initial)
    return [results[0], results[1].reshape(rows, plan.columns, PIECE)] if plan.output_wgs else results

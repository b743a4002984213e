# SPDX-License-Identifier: Apache-2.0
"""The state of Kimi Delta Attention from chunk to chunk, and the results of the tokens: the serial half of it.

With the state s before a chunk, a row per value, and what `kernel_prepare` left of the chunk,

    e  = inverse (v - keys_read sᵀ)
    o  = queries sᵀ + weights e
    s' = s diag(decay) + eᵀ keys_written,    the state before the next chunk

Shapes: v and o (rows, slices, 64), where a slice is 64 values of a head; squares and decays as `plan.KdaPlan.prepared`
names them; states (sequences, slices, 64, N) float32.

Role table: a block goes through a sequence with one slice, or with both of a head; its warpgroups are

    state    one per slice: the chain e, s', e, s' ... It keeps s and eᵀ in registers, where WGMMA takes its first
             operand: nothing that the next chunk waits for goes through shared memory
    output   one: o of the chunk, from the s and e that `state` leaves in shared memory
    memory   one: copies the chunks' values, squares and decays ahead

Barrier table, of two rings, `chunks` from memory to all others and `states` from state to output:

    barrier                arrivals                         who waits
    chunks.filled[stage]   copies of a chunk                state and output warpgroups
    chunks.freed[stage]    state and output warpgroups      memory, before it refills the stage
    landed                 copies of a chunk that is cut    memory, before it zeroes the rows of other sequences, and
                                                            arrives at chunks.filled in place of the copies
    states.filled          state, each having stored its e  the output warpgroup
    states.freed           the output warpgroup             state, before it stores the next state

Without the output warpgroup the kernel gives the states before all chunks, and e, for the backward pass.

Bound by: the latency of a chunk's three products in a row, or the stream of squares: 8 of 8 KB for a chunk of keys of
128, which leave room for two chunks in shared memory and for one state beside them.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ... import _device, _host
from ..._device import COLUMNS, PIECE, Barrier, Index, Ref, Ring, Tiles, load, product, spread
from ..delta.plan import SQUARE
from ..sequences import Part
from ..states import first_state, store_state
from ..tiles import Operand, load_chunks, store_rows
from .plan import INVERSE, KEYS_READ, WEIGHTS, KdaPlan

# Registers per thread of the state, output and memory warpgroups, by the number of state warpgroups and outputs.
REGISTERS = {(1, False): (240, 0, 40), (1, True): (232, 168, 40), (2, True): (168, 136, 40)}


def scratch(plan: KdaPlan) -> dict:
    copies = plan.state_wgs + 2
    refs = dict(
        v_smem=plan.rows(plan.num_stages, plan.state_wgs),
        squares_smem=plan.squares(plan.num_stages, plan.num_squares),
        decay_smem=plgpu.SMEM((plan.num_stages, plan.pieces * PIECE), jnp.float32),
        s_smem=plan.squares(plan.state_stages, plan.state_wgs, plan.pieces),
        e_smem=plan.squares(plan.state_stages, plan.state_wgs),
        filled=_device.barriers(plan.num_stages, copies),
        freed=_device.barriers(plan.num_stages, plan.memory_role),
        landed=_device.barriers(1, copies),
    )
    if plan.has_outputs:
        refs |= dict(
            o_smem=plan.rows(plan.state_wgs),
            handed=_device.barriers(plan.state_stages, plan.state_wgs),  # The ring `states`: filled, and freed.
            taken=_device.barriers(plan.state_stages),
        )
    return refs


@dataclasses.dataclass(frozen=True)
class Shared:
    """Scratch and indices that the roles of a block share."""

    plan: KdaPlan
    part: Part
    unit: Index  # Number of the block among those of its sequence.
    chunks: Ring  # Its stages hold a chunk's v, squares and decays.
    v: Tiles
    squares: Ref
    decay: Ref
    s: Ref
    e: Ref
    states: Ring | None = None  # Its stages hold s and eᵀ.
    o: Tiles | None = None

    def pieces(self, stage: Index, first: int) -> list:
        """A chunk's rows whose first piece has the place `first` among its squares."""
        return [self.squares.at[stage, first + p] for p in range(self.plan.pieces)]


def _kernel(
    table, gmem, initial_gmem, *outs, plan: KdaPlan, filled, freed, landed, handed=None, taken=None, **smem
):  # fmt: skip
    role, unit = lax.axis_index("role"), lax.axis_index("unit")
    part = Part.of_block(table, plan.sequences, plan.interpreted)
    smem = {name.removesuffix("_smem"): ref for name, ref in smem.items()}
    smem |= {name: Tiles.views(smem[name], plan.interpreted) for name in "vo" if name in smem}
    states = Ring(handed, taken, plan.state_stages) if plan.has_outputs else None
    shared = Shared(plan, part, unit, Ring(filled, freed, plan.num_stages), states=states, **smem)
    state_registers, output_registers, memory_registers = REGISTERS[plan.state_wgs, plan.has_outputs]

    @_device.role(role < plan.state_wgs, increase_to=state_registers)
    def _():
        _carry_the_state(shared, role, initial_gmem, outs)

    if plan.has_outputs:

        @_device.role(role == plan.state_wgs, increase_to=output_registers)
        def _():
            _compute_outputs(shared, outs[1])

    @_device.role(role == plan.memory_role, decrease_to=memory_registers)
    def _():
        _load_chunks(shared, landed, gmem)


def _load_chunks(shared: Shared, landed: Barrier, gmem: dict):
    """The memory warpgroup."""
    plan = shared.plan
    head = plan.head(shared.unit * plan.state_wgs)
    operands = [Operand(gmem["v"], shared.v, shared.unit, plan.state_wgs)]

    def squares_and_decay(chunk, stage):
        refs = dict(squares=shared.squares, decay=shared.decay)
        return [(gmem[name].at[head, chunk], ref.at[stage]) for name, ref in refs.items()]

    load_chunks(shared.part, shared.chunks, landed, operands, squares_and_decay, plan.state_wgs + 2)


def _carry_the_state(shared: Shared, wg: Index, initial_gmem: Ref | None, outs):
    """State warpgroup `wg`: takes the state of its slice from chunk to chunk, in pieces (64, 64) of its N columns."""
    plan, part, value_slice = shared.plan, shared.part, shared.unit * shared.plan.state_wgs + wg

    def step(i, s):
        stage, state_stage = shared.chunks.wait(i), _device.rem(i, plan.state_stages)
        e = _errors(shared, wg, i, stage, [piece.astype(plan.dtype) for piece in s]).astype(plan.dtype)
        shared.e[state_stage, wg] = e
        plgpu.commit_smem()
        if plan.has_outputs:
            plgpu.barrier_arrive(shared.states.filled.at[state_stage])
        else:
            states_gmem, errors_gmem = (out.at[part.first_chunk + i, value_slice] for out in outs)
            for p in range(plan.pieces):
                target = states_gmem.at[:, pl.ds(p * PIECE, PIECE)]
                plgpu.copy_smem_to_gmem(shared.s.at[state_stage, wg, p], target)
            plgpu.copy_smem_to_gmem(shared.e.at[state_stage, wg], errors_gmem)
        # s' = s diag(decay) + eᵀ keys_written
        decay = lambda p: spread(load(shared.decay.at[stage, pl.ds(p * PIECE, PIECE)], COLUMNS), 1)
        s = [
            product([(e, keys)], plan.interpreted, s[p] * decay(p))
            for p, keys in enumerate(shared.pieces(stage, plan.keys_written))
        ]
        shared.chunks.release(i)
        return s

    first = first_state(initial_gmem, (part.number, value_slice), plan.pieces)
    last = lax.fori_loop(0, part.num_chunks, step, first)
    if plan.has_outputs:
        store_state(outs[0], (part.number, value_slice), last)
        shared.states.drain(part.num_chunks)
    plgpu.wait_smem_to_gmem(0)


def _errors(shared: Shared, wg: Index, i: Index, stage: Index, s: list):
    """eᵀ = (vᵀ - s keys_readᵀ) inverseᵀ of chunk `i`, a row per value and a column per token.

    `s`, rounded, is stored while the tensor cores are at the products.
    """
    plan = shared.plan
    keys = [(piece, k.T) for piece, k in zip(s, shared.pieces(stage, KEYS_READ), strict=True)]
    inverse = shared.squares.at[stage, INVERSE].T
    values = shared.v.tiled.at[stage, wg].T, inverse
    if plan.interpreted:
        _store_state_before(shared, wg, i, s)
        return product([values, (-product(keys, True).astype(plan.dtype), inverse)], True)

    def multiply(from_state_ref, e_ref=None):
        for pair in keys:
            plgpu.wgmma(from_state_ref, *pair)
        if e_ref is not None:
            plgpu.wgmma(e_ref, *values)  # Waits for no state.
        _store_state_before(shared, wg, i, s)
        from_state = plgpu.wgmma_accumulator_load(from_state_ref, wait_n=0 if e_ref is None else 1)
        # Negated after the cast: if an accumulator is negated, ptxas lets no two WGMMAs overlap.
        from_state = -plgpu.layout_cast(from_state, plgpu.Layout.WGMMA).astype(plan.dtype)
        if e_ref is None:
            return product([values, (from_state, inverse)], False)
        plgpu.wgmma(e_ref, from_state, inverse)
        return plgpu.layout_cast(e_ref[...], plgpu.Layout.WGMMA)

    # Two chains fill each other's gaps, and have registers for one accumulator at a time.
    accumulators = 2 if plan.state_wgs == 1 else 1
    return pl.run_scoped(multiply, *[plgpu.ACC(SQUARE, jnp.float32)] * accumulators)


def _store_state_before(shared: Shared, wg: Index, i: Index, s: list):
    """Stores the state before chunk `i`, rounded, when its stage is free."""
    plan = shared.plan
    if plan.has_outputs:
        shared.states.acquire(i)
    else:
        plgpu.wait_smem_to_gmem(plan.pieces + 1, wait_read_only=True)  # State and e in this stage have left.
    for p, piece in enumerate(s):
        shared.s[_device.rem(i, plan.state_stages), wg, p] = piece


def _compute_outputs(shared: Shared, o_gmem: Ref):
    """The output warpgroup: o of every chunk."""
    plan, part = shared.plan, shared.part

    @pl.loop(0, part.num_chunks)
    def _(i):
        stage, state_stage = shared.chunks.wait(i), shared.states.wait(i)
        weights, queries = shared.squares.at[stage, WEIGHTS].T, shared.pieces(stage, plan.queries)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for j in range(plan.state_wgs):
            # o = queries sᵀ + weights e
            states = [shared.s.at[state_stage, j, p].T for p in range(plan.pieces)]
            pairs = *zip(queries, states, strict=True), (weights, shared.e.at[state_stage, j].T)
            shared.o.tiled[j] = product(list(pairs), plan.interpreted).astype(plan.dtype)
        shared.chunks.release(i)
        shared.states.release(i)
        plgpu.commit_smem()
        for j in range(plan.state_wgs):
            store_rows(part, shared.o, j, o_gmem, shared.unit, j, part.row(i))

    plgpu.wait_smem_to_gmem(0)


def launch(plan: KdaPlan, table, v, squares, decay, initial, params):
    """[final states, o], or without outputs [states before all chunks, eᵀ], (chunks, slices, 64, N or 64), in the
    operands' dtype. `initial` None stands for zeros."""
    sequences, state = plan.sequences, (plan.value_slices, PIECE, plan.pieces * PIECE)
    units, rows = plan.value_slices // plan.state_wgs, len(v)
    of_units = (rows, units, PIECE * plan.state_wgs)
    if plan.has_outputs:
        final = jax.ShapeDtypeStruct((sequences.num_seqs, *state), jnp.float32)
        out_type = [final, jax.ShapeDtypeStruct(of_units, plan.dtype)]
    else:
        lead = sequences.num_chunks, plan.value_slices, PIECE
        out_type = [jax.ShapeDtypeStruct((*lead, size), plan.dtype) for size in (state[-1], PIECE)]
    results = _host.kernel(
        functools.partial(_kernel, plan=plan),
        out_type=out_type,
        grid=(sequences.num_parts, units),
        grid_names=("part", "unit"),
        num_threads=plan.memory_role + 1,
        thread_name="role",
        scratch_types=scratch(plan),
        compiler_params=params,
    )(table, dict(v=v.reshape(of_units), squares=squares, decay=decay), initial)
    return [results[0], results[1].reshape(v.shape)] if plan.has_outputs else results

# SPDX-License-Identifier: Apache-2.0
"""The gradient of the gated delta rule's state, chunk by chunk from the last one: the serial half of its backward pass.

    du = scale w^T do + exp(cum[-1] - cum) k ds',    w = tril(exp(cum[t] - cum[s]) q k^T),    dr = inverse^T du
    ds = exp(cum[-1]) ds' + (scale exp(cum) do)^T q - (exp(cum) dr)^T k

Shapes: those of `delta_forward`; do as v. The results are ds' of all chunks, (chunks, columns, 64, N), in the operands'
dtype, and ds of the first chunk of each sequence in float32.

Role table: a block goes through a sequence with one column; its warpgroups are

    state      the chain: ds stays transposed in registers, as the state does in `delta_forward`
    weights    makes what waits for no state: w, and do with its decays
    memory     copies the chunks' rows, inverses and decays ahead

Barrier table:

    barrier        arrivals                        who waits
    filled[slot]   copies of a chunk               state and weights
    freed[slot]    state and weights               memory, before it refills the slot
    landed         copies of a chunk that is cut   memory, before it zeroes the rows of other sequences, and arrives at
                                                   filled in place of the copies
    handed[slot]   weights, which has stored w     state
    taken[slot]    state                           weights, before it stores the next w

Bound by: the latency of a chunk's three products in a row.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ... import _device, _host
from .. import core
from ..core import COLUMNS, PIECE, ROWS, Loader, Operand, Part, Tiles
from .core import CHUNK, SQUARE, TILED, load, multiply, product, spread
from .kernel import Plan

REGISTERS = 232, 168, 40  # A thread of the state, weights and memory warpgroups.
HANDED_SLOTS, NUM_VECTORS, NUM_STAGES = 2, 3, 3


def _scratch(plan: Plan) -> dict:
    tiles = lambda *lead: core.row_tiles((*lead, CHUNK, PIECE), plan.dtype, plan.interpreted)
    tiled = lambda *lead: plgpu.SMEM((*lead, CHUNK, PIECE), plan.dtype, **TILED)
    vectors = plgpu.SMEM((NUM_STAGES, CHUNK), jnp.float32)
    barrier = lambda num, arrivals=1: plgpu.Barrier(num_arrivals=arrivals, num_barriers=num)
    copies = NUM_VECTORS + 1 + 2 * plan.pieces
    return dict(
        q_smem=tiles(NUM_STAGES, plan.pieces),
        k_smem=tiles(NUM_STAGES, plan.pieces),
        do_smem=tiles(NUM_STAGES, 1),
        inverse_smem=tiled(NUM_STAGES),
        rows_smem=vectors,
        columns_smem=vectors,
        weights_smem=tiled(HANDED_SLOTS),
        decayed_smem=tiled(HANDED_SLOTS),
        kept_smem=tiled(2, plan.pieces),
        filled=barrier(NUM_STAGES, copies),
        freed=barrier(NUM_STAGES, 2),
        landed=barrier(1, copies),
        handed=barrier(HANDED_SLOTS),
        taken=barrier(HANDED_SLOTS),
    )


def _load(plan: Plan, part: Part, column, ring: _device.Ring, landed, gmem: dict, tiles: dict, smem: dict):
    """The memory warpgroup."""
    head = _device.div(column, plan.columns_per_head)
    key_head = _device.div(head, plan.heads // plan.key_heads)
    operands = tuple(Operand(gmem[name], tiles[name], key_head, plan.pieces) for name in ("q", "k"))
    operands += (Operand(gmem["do"], tiles["do"], column, 1),)

    def copy_vectors(chunk, slot, barrier):
        for name in ("inverse", "columns", "rows"):
            plgpu.copy_gmem_to_smem(gmem[name].at[head, chunk], smem[f"{name}_smem"].at[slot], barrier)

    is_ragged = plan.sequences.is_ragged
    Loader(ring, landed, operands, copy_vectors, NUM_VECTORS, is_ragged, plan.interpreted).run(part, reverse=True)


def _weights(plan: Plan, part: Part, ring: _device.Ring, hand: _device.Ring, tiles: dict, smem: dict):
    """The weights warpgroup."""
    row, col = (plgpu.broadcasted_iota(jnp.int32, SQUARE, dim, layout=plgpu.Layout.WGMMA) for dim in (0, 1))

    @pl.loop(0, part.num_chunks)
    def _(i):
        slot = ring.wait(i)
        q, k = (tiles[name].tiled.at[slot] for name in ("q", "k"))
        weights = multiply([(q.at[p], k.at[p].T) for p in range(plan.pieces)])
        cum = spread(load(smem["rows_smem"].at[slot], ROWS), 0)
        decay = jnp.exp(jnp.minimum(cum - spread(load(smem["columns_smem"].at[slot], COLUMNS), 1), 0.0))
        weights = jnp.where(row >= col, weights * decay * plan.scale, 0.0)
        decayed = load(tiles["do"].tiled.at[slot, 0], plgpu.Layout.WGMMA).astype(jnp.float32)
        place = hand.fill(i)
        smem["weights_smem"][place] = weights.astype(plan.dtype)
        smem["decayed_smem"][place] = (decayed * jnp.exp(cum) * plan.scale).astype(plan.dtype)
        plgpu.commit_smem()
        plgpu.barrier_arrive(hand.filled.at[place])
        ring.free(i)

    hand.drain(part.num_chunks)


def _step(plan: Plan, slot, place, kept, state, tiles: dict, smem: dict):
    """ds of a chunk from ds', its pieces `state`; `kept(pieces)` stores them, rounded."""
    rounded = [piece.astype(plan.dtype) for piece in state]
    q, k = (tiles[name].tiled.at[slot] for name in ("q", "k"))
    columns = smem["columns_smem"].at[slot]
    last, inverse = smem["columns_smem"][slot, CHUNK - 1], smem["inverse_smem"].at[slot]
    from_state = [(piece, k.at[p].T) for p, piece in enumerate(rounded)]
    from_outputs = tiles["do"].tiled.at[slot, 0].T, smem["weights_smem"].at[place]
    decayed, decay = smem["decayed_smem"].at[place].T, jnp.exp(last)
    to_end = lambda: spread(jnp.exp(last - load(columns, COLUMNS)), 1)
    minus_decay = lambda: spread(-jnp.exp(load(columns, COLUMNS)), 1)
    if plan.interpreted:
        kept(rounded)
        du = product([from_outputs], True) + product(from_state, True) * to_end()
        dr = product([(du.astype(plan.dtype), inverse)], True)
        dr = (dr * minus_decay()).astype(plan.dtype)
        return [product([(decayed, q.at[p]), (dr, k.at[p])], True, piece * decay) for p, piece in enumerate(state)]

    def gradient(from_state_ref, du_ref):
        for pair in from_state:
            plgpu.wgmma(from_state_ref, *pair)
        plgpu.wgmma(du_ref, *from_outputs)
        kept(rounded)
        du = plgpu.layout_cast(du_ref[...], plgpu.Layout.WGMMA)
        return du + plgpu.layout_cast(from_state_ref[...], plgpu.Layout.WGMMA) * to_end()

    du = pl.run_scoped(gradient, plgpu.ACC(SQUARE, jnp.float32), plgpu.ACC(SQUARE, jnp.float32))

    def advance(dr_ref, *refs):
        plgpu.wgmma(dr_ref, du.astype(plan.dtype), inverse)
        for p, (ref, piece) in enumerate(zip(refs, state, strict=True)):
            ref[...] = piece * decay
            plgpu.wgmma(ref, decayed, q.at[p])
        dr = plgpu.wgmma_accumulator_load(dr_ref, wait_n=len(refs))
        dr = (plgpu.layout_cast(dr, plgpu.Layout.WGMMA) * minus_decay()).astype(plan.dtype)
        for p, ref in enumerate(refs):
            plgpu.wgmma(ref, dr, k.at[p])
        return [plgpu.layout_cast(ref[...], plgpu.Layout.WGMMA) for ref in refs]

    return pl.run_scoped(advance, *[plgpu.ACC(SQUARE, jnp.float32)] * (1 + plan.pieces))


def _kernel(
    table, gmem, initial_gmem, all_gmem, first_gmem, *, plan: Plan, filled, freed, landed, handed, taken, **smem
):  # fmt: skip
    role, column, part = lax.axis_index("role"), lax.axis_index("head_index"), Part.of_block(table, CHUNK)
    tiles = {name: Tiles.views(smem[f"{name}_smem"], plan.interpreted) for name in ("q", "k", "do")}
    ring, hand = _device.Ring(filled, freed, NUM_STAGES), _device.Ring(handed, taken, HANDED_SLOTS)

    @pl.when(role == 0)
    def _():
        plgpu.set_max_registers(REGISTERS[0], action="increase")

        def step(i, state):
            slot, place, number = ring.wait(i), hand.wait(i), _device.rem(i, 2)

            def kept(pieces):
                plgpu.wait_smem_to_gmem(plan.pieces, wait_read_only=True)  # The gradient in this slot has left.
                for p, piece in enumerate(pieces):
                    smem["kept_smem"][number, p] = piece

            state = _step(plan, slot, place, kept, state, tiles, smem)
            plgpu.commit_smem()
            for p in range(plan.pieces):
                chunk = part.first_chunk + part.num_chunks - 1 - i
                target = all_gmem.at[chunk, column, :, pl.ds(p * PIECE, PIECE)]
                plgpu.copy_smem_to_gmem(smem["kept_smem"].at[number, p], target)
            hand.free(i)
            ring.free(i)
            return state

        last = core.first_state(initial_gmem, (part.state, column), plan.pieces)
        core.store_state(first_gmem, (part.state, column), lax.fori_loop(0, part.num_chunks, step, last))
        plgpu.wait_smem_to_gmem(0)

    @pl.when(role == 1)
    def _():
        plgpu.set_max_registers(REGISTERS[1], action="increase")
        _weights(plan, part, ring, hand, tiles, smem)

    @pl.when(role == 2)
    def _():
        plgpu.set_max_registers(REGISTERS[2], action="decrease")
        _load(plan, part, column, ring, landed, gmem, tiles, smem)


def run(plan: Plan, table, q, k, do, inverse, cum, d_final, params):
    """[ds' of all chunks, ds of the first chunk of each sequence]; `d_final` is that of the final states."""
    sequences, state = plan.sequences, (plan.columns, PIECE, plan.pieces * PIECE)
    gmem = dict(q=q, k=k, do=do, inverse=inverse, columns=cum, rows=cum)  # JAX finds no layout for one array in two.
    return _host.kernel(
        functools.partial(_kernel, plan=plan),
        out_type=[
            jax.ShapeDtypeStruct((sequences.num_chunks, *state), plan.dtype),
            jax.ShapeDtypeStruct((sequences.num_seqs, *state), jnp.float32),
        ],
        grid=(sequences.num_parts, plan.columns),
        grid_names=("part", "head_index"),
        num_threads=3,
        thread_name="role",
        scratch_types=_scratch(plan),
        compiler_params=params,
    )(table, gmem, d_final)

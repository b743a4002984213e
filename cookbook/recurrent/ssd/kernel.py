# SPDX-License-Identifier: Apache-2.0
"""The forward kernel of SSD: its roles, as the table in `ssd` has them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ... import _device, _host
from ..._device import COLUMNS, PIECE, ROWS, Barrier, Index, Ref, Ring, Tiles, load, spread
from ..sequences import Part
from ..states import first_state, store_state
from ..tiles import Operand, load_chunks, store_rows
from .kernel_state import advance, weights
from .plan import CUM, DT, Plan

SQUARE = PIECE, PIECE
# Registers per thread of the memory warpgroup and of the others, by how many the others are.
REGISTERS = {2: (56, 224), 3: (56, 152)}


def _copies(plan: Plan) -> int:
    """Copies of a chunk: of the vectors, twice, of x, and of b and c."""
    return 2 + 1 + 2 * plan.pieces


def scratch(plan: Plan) -> dict:
    outputs = plan.chunk // PIECE
    return dict(
        x_smem=plan.tiles(plan.num_stages, 1),
        b_smem=plan.tiles(plan.num_stages, plan.pieces),
        c_smem=plan.tiles(plan.num_stages, plan.pieces),
        rows_smem=plan.vectors(),  # The vectors twice: JAX finds no layout for one buffer read along rows and columns.
        columns_smem=plan.vectors(),
        state_smem=plan.tiles(plan.num_states, plan.pieces, rows=PIECE),
        scaled_smem=plan.tiles(),
        y_smem=plan.tiles(outputs, rows=PIECE),
        filled=_device.barriers(plan.num_stages, _copies(plan)),
        freed=_device.barriers(plan.num_stages, 1 + outputs),
        landed=_device.barriers(1, _copies(plan)),
        state_filled=_device.barriers(plan.num_states),
        state_freed=_device.barriers(plan.num_states, outputs),
    )


@dataclasses.dataclass(frozen=True)
class Shared:
    """Scratch and indices that the roles of a block share."""

    plan: Plan
    scale: float
    part: Part
    head: Index
    chunks: Ring  # Its stages hold rows, columns, x, b and c.
    states: Ring  # Its stages hold state.
    rows: Ref  # `CUM` and `DT`, to be read along rows, and along columns.
    columns: Ref
    x: Tiles
    b: Tiles
    c: Tiles
    state: Tiles
    scaled: Tiles
    y: Tiles


def _kernel(
    table, x_gmem, b_gmem, c_gmem, vectors_gmem, d_gmem, initial_gmem, y_gmem, *finals_gmem, plan: Plan, scale: float,
    rows_smem, columns_smem, filled, freed, landed, state_filled, state_freed, **tiles,
):  # fmt: skip
    role, head = lax.axis_index("role"), lax.axis_index("head_index")
    part = Part.of_block(table, plan.sequences, plan.interpreted)
    views = {name.removesuffix("_smem"): Tiles.views(smem, plan.interpreted) for name, smem in tiles.items()}
    chunks, states = part.ring(filled, freed, plan.num_stages), part.ring(state_filled, state_freed, plan.num_states)
    shared = Shared(plan, scale, part, head, chunks, states, rows_smem, columns_smem, **views)
    outputs = plan.chunk // PIECE
    memory_registers, compute_registers = REGISTERS[1 + outputs]

    @_device.role(role == outputs + 1, decrease_to=memory_registers)
    def _():
        _load_chunks(shared, landed, x_gmem, b_gmem, c_gmem, vectors_gmem)

    @_device.role(role == outputs, increase_to=compute_registers)
    def _():
        carry_the_state(shared, initial_gmem, finals_gmem)

    for block in range(outputs):

        @_device.role(role == block, increase_to=compute_registers)
        def _(block=block):
            skip = None if d_gmem is None else d_gmem[plan.dt_head(head)].astype(jnp.float32)
            _compute_outputs(shared, block, skip, y_gmem)


def _load_chunks(shared: Shared, landed: Barrier, x_gmem: Ref, b_gmem: Ref, c_gmem: Ref, vectors_gmem: Ref):
    """The memory warpgroup."""
    plan, head, group = shared.plan, shared.head, shared.plan.group(shared.head)
    operands = (
        Operand(x_gmem, shared.x, head, 1),
        Operand(b_gmem, shared.b, group, plan.pieces),
        Operand(c_gmem, shared.c, group, plan.pieces),
    )

    def vectors(chunk, stage):
        source = vectors_gmem.at[plan.dt_head(head), chunk]
        return [(source, shared.rows.at[stage]), (source, shared.columns.at[stage])]

    load_chunks(shared.part, shared.chunks, landed, operands, vectors, _copies(plan))


def carry_the_state(shared: Shared, initial_gmem: Ref | None, finals_gmem: tuple):
    """The state's warpgroup: stores the state before each chunk, rounded, for the outputs, and adds the chunk."""
    plan, index, tiled = shared.plan, (shared.part.number, shared.head), shared.state.tiled

    def step(i, state):
        state_stage = shared.states.acquire(i)
        for p, piece in enumerate(state):
            tiled[state_stage, p] = piece.astype(plan.dtype)
        plgpu.commit_smem()
        plgpu.barrier_arrive(shared.states.filled.at[state_stage])
        stage = shared.chunks.wait(i)
        w, decay = weights(shared.rows, stage, plan.chunk)
        x, b = shared.x.tiled.at[stage, 0], [shared.b.tiled.at[stage, p] for p in range(plan.pieces)]
        state = advance(state, decay, w, x, b, shared.scaled, plan.interpreted)
        shared.chunks.release(i)
        return state

    first = first_state(initial_gmem, index, plan.pieces)
    last = lax.fori_loop(0, shared.part.num_chunks, step, first)
    shared.states.drain(shared.part.num_chunks)
    for final_gmem in finals_gmem:
        store_state(final_gmem, index, last)


def _compute_outputs(shared: Shared, block: int, skip, y_gmem: Ref):
    """An output warpgroup: y of the `block`-th 64 rows of all chunks, with `skip` times x added unless it is None."""
    plan, part = shared.plan, shared.part

    @pl.loop(0, part.num_chunks)
    def _(i):
        stage = shared.chunks.wait(i)
        y = output_of_chunk(shared, i, stage, block)
        if skip is not None:
            x = plgpu.load(shared.x.tiled.at[stage, 0, pl.ds(block * PIECE, PIECE)], layout=plgpu.Layout.WGMMA)
            y = y + skip * x.astype(jnp.float32)
        y = y.astype(plan.dtype)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # The rows of the chunk before have left.
        shared.y.tiled[block] = y
        plgpu.commit_smem()
        # `skip` read x as other loads do, not as WGMMA does: before the fence they may still wait for the WGMMAs of
        # the state's warpgroup, longer than TMA takes to overwrite what they read.
        shared.chunks.release(i)
        store_rows(part, shared.y, block, y_gmem, shared.head, 0, part.row(i) + block * PIECE)

    plgpu.wait_smem_to_gmem(0)


def output_of_chunk(shared: Shared, i: Index, stage: Index, block: int):
    """y of the `block`-th 64 rows of chunk `i` without the part of d, in float32:

    scale (exp(cum) c Sᵀ + (L c bᵀ dt) x), where S is the state before the chunk and L as in `kernel_backward`
    """
    plan, rows = shared.plan, pl.ds(block * PIECE, PIECE)
    cum = load(shared.rows.at[stage, CUM, rows], ROWS)
    queries = lambda p: shared.c.tiled.at[stage, p, rows]
    wait = lambda ref, wait_n: ref[...] if plan.interpreted else plgpu.wgmma_accumulator_load(ref, wait_n=wait_n)

    def multiply_pairs(pairs_ref, column: int):
        """c bᵀ of the `column`-th 64 rows of b."""
        for p in range(plan.pieces):
            keys = shared.b.tiled.at[stage, p, pl.ds(column * PIECE, PIECE)]
            plgpu.wgmma(pairs_ref, queries(p), keys.T)

    def add_values(y_ref, y, decayed, column: int):
        """`y` + the pairs, decayed, times the `column`-th 64 rows of x."""
        x = shared.x.tiled.at[stage, 0, pl.ds(column * PIECE, PIECE)]
        return _device.add_product(y_ref, y, decayed.astype(plan.dtype), x, plan.interpreted)

    def state_and_first_pairs(pairs_ref, y_ref):
        multiply_pairs(pairs_ref, 0)
        state_stage = shared.states.wait(i)
        for p in range(plan.pieces):
            plgpu.wgmma(y_ref, queries(p), shared.state.tiled.at[state_stage, p].T)
        decayed = wait(pairs_ref, plan.pieces) * _decay(shared, stage, cum, 0, is_last=block == 0)
        y = wait(y_ref, 0) * spread(jnp.exp2(cum) * shared.scale, 0)
        shared.states.release(i)
        return add_values(y_ref, y, decayed, 0)

    def more_pairs(pairs_ref, y_ref, y, column: int):
        multiply_pairs(pairs_ref, column)
        decayed = wait(pairs_ref, 0) * _decay(shared, stage, cum, column, is_last=column == block)
        return add_values(y_ref, y, decayed, column)

    accs = [plgpu.ACC(SQUARE, jnp.float32)] * 2
    y = pl.run_scoped(state_and_first_pairs, *accs)
    for column in range(1, block + 1):
        y = pl.run_scoped(functools.partial(more_pairs, y=y, column=column), *accs)
    return y


def _decay(shared: Shared, stage: Index, cum, column: int, is_last: bool):
    """exp(cum[t] - cum[s]) dt[s] for rows t and the `column`-th 64 rows s, if `is_last` for s up to t alone."""
    vector = lambda which: load(shared.columns.at[stage, which, pl.ds(column * PIECE, PIECE)], COLUMNS)
    exponent = spread(cum, 0) - spread(vector(CUM), 1)
    if is_last:
        t, s = _device.indices()
        exponent = jnp.where(s <= t, exponent, -jnp.inf)
    return jnp.exp2(exponent) * spread(vector(DT) * shared.scale, 1)


def launch(plan: Plan, scale: float, table, x, b, c, vectors, d, starts, params):
    """[y], of operands without a batch, and the final states of sequences that are not cut into parts. `starts` are the
    states that parts start from, None for zeros."""
    out_type = [jax.ShapeDtypeStruct(x.shape, x.dtype)]
    if plan.sequences.part_rows is None:
        out_type.append(jax.ShapeDtypeStruct((plan.sequences.num_seqs, *plan.state_shape[1:]), jnp.float32))
    return _host.kernel(
        functools.partial(_kernel, plan=plan, scale=scale),
        out_type=out_type,
        grid=(plan.sequences.num_parts, plan.num_heads),
        grid_names=("part", "head_index"),
        num_threads=plan.chunk // PIECE + 2,
        thread_name="role",
        scratch_types=scratch(plan),
        compiler_params=params,
    )(table, x, b, c, vectors, d, starts)

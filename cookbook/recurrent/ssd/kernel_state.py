# SPDX-License-Identifier: Apache-2.0
"""The states of SSD alone, chunk after chunk: those after all parts, or before all chunks; and the step of all kernels.

    S = exp(cum[last]) S + sum over the chunk's rows t of w[t] x[t] b[t]ᵀ    S (64, N), a row for each value of x

w[t] = exp(cum[last] - cum[t]) dt[t], where cum is the sum of dt a up to t within the chunk. In `reverse` it is the
gradient of the state that goes from chunk to chunk, the last one first, with w[t] = exp(cum[t]), and dy and c in the
places of x and b.

The state is float32 and stays in registers. One operand of the tensor cores is w x, rounded, in shared memory.

Role table: one block for each head of each part.

    state      one: takes the state from chunk to chunk, and stores it
    memory     one: copies x, b, dt and cum of chunk after chunk

Barrier table: filled, freed and landed as in `ssd`, of the ring `chunks`.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ... import _device, _host
from ..._device import PIECE, ROWS, Ref, Tiles
from ..sequences import Part
from ..states import first_state, store_state
from ..tiles import Operand, load_chunks
from .plan import CUM, DT, Plan

SMEM_BYTES = 160_000  # Shared memory of a block, for its ring.


def weights(vectors: Ref, stage, chunk: int, reverse: bool = False):
    """(w, decay of the whole chunk), from `CUM` and `DT` of the chunk's rows."""
    last, cum = vectors[stage, CUM, chunk - 1], lambda: _device.load(vectors.at[stage, CUM], ROWS)
    if reverse:
        return jnp.exp2(cum()), jnp.exp2(last)
    return jnp.exp2(last - cum()) * _device.load(vectors.at[stage, DT], ROWS), jnp.exp2(last)


def advance(state: list, decay, w, x: Ref, b: list, scaled: Tiles, interpreted: bool):
    """The state after a chunk, decay `state` + (w x)ᵀ b; `state` and `b` are lists of pieces, `scaled` room for w x."""
    value = plgpu.load(x, layout=plgpu.Layout.WGMMA).astype(jnp.float32)
    scaled.tiled[...] = (value * _device.spread(w, 0, value.shape)).astype(x.dtype)
    plgpu.commit_smem()
    state = [piece * decay for piece in state]
    if interpreted:
        return [_device.product([(scaled.tiled.T, b_p)], True, piece) for piece, b_p in zip(state, b, strict=True)]

    def products(*accs):
        for acc, piece in zip(accs, state, strict=True):
            acc[...] = piece
        for acc, b_p in zip(accs, b, strict=True):
            plgpu.wgmma(acc, scaled.tiled.T, b_p)
        return [acc[...] for acc in accs]

    return pl.run_scoped(products, *[plgpu.ACC((PIECE, PIECE), jnp.float32) for _ in state])


def _kernel(
    table, x_gmem, b_gmem, vectors_gmem, initial_gmem, out_gmem, *, plan: Plan, reverse: bool, keeps_all: bool, x_smem,
    b_smem, vectors_smem, scaled_smem, filled, freed, landed, state_smem=None,
):  # fmt: skip
    role, head = lax.axis_index("role"), lax.axis_index("head_index")
    part = Part.of_block(table, plan.sequences, plan.interpreted)
    x, b, scaled = (Tiles.views(smem, plan.interpreted) for smem in (x_smem, b_smem, scaled_smem))
    chunks = part.ring(filled, freed, plan.num_stages)

    @_device.role(role == 1)
    def load():
        operands = Operand(x_gmem, x, head, 1), Operand(b_gmem, b, plan.group(head), plan.pieces)
        vectors = lambda chunk, stage: [(vectors_gmem.at[plan.dt_head(head), chunk], vectors_smem.at[stage])]
        load_chunks(part, chunks, landed, operands, vectors, _copies(plan), reverse)

    @_device.role(role == 0)
    def carry_the_state():
        def store_before(i, pieces):
            """Stores the state before the chunk, rounded."""
            state = Tiles.views(state_smem, plan.interpreted)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # The state before has left.
            for p, piece in enumerate(pieces):
                state.tiled[p] = piece.astype(plan.dtype)
            plgpu.commit_smem()
            for p in range(plan.pieces):
                target = out_gmem.at[part.first_chunk + i, head, :, pl.ds(p * PIECE, PIECE)]
                plgpu.copy_smem_to_gmem(state.rows.at[p], target)

        def step(i, state):
            if keeps_all:
                store_before(i, state)
            stage = chunks.wait(i)
            w, decay = weights(vectors_smem, stage, plan.chunk, reverse)
            b_pieces = [b.tiled.at[stage, p] for p in range(plan.pieces)]
            state = advance(state, decay, w, x.tiled.at[stage, 0], b_pieces, scaled, plan.interpreted)
            chunks.release(i)
            return state

        first = first_state(initial_gmem, (part.number, head), plan.pieces)
        last = lax.fori_loop(0, part.num_chunks, step, first)
        if not keeps_all:
            store_state(out_gmem, (part.number, head), last)
        plgpu.wait_smem_to_gmem(0)


def _copies(plan: Plan) -> int:
    """Copies of a chunk: of x, of the vectors, and of b."""
    return 2 + plan.pieces


def launch(plan: Plan, table, x, b, vectors, initial, params, *, reverse: bool = False, keeps_all: bool = False):
    """The state after each part, (num_parts, H, 64, N) in float32; or if it `keeps_all` the one before each chunk,
    (num_chunks, H, 64, N) in the operands' dtype. Parts start from `initial` (num_parts, H, 64, N), None for zeros.
    """
    stage = 2 * plan.chunk * PIECE * (1 + plan.pieces)
    plan = dataclasses.replace(plan, num_stages=min(6, SMEM_BYTES // stage))
    scratch = dict(
        x_smem=plan.tiles(plan.num_stages, 1),
        b_smem=plan.tiles(plan.num_stages, plan.pieces),
        vectors_smem=plan.vectors(),
        scaled_smem=plan.tiles(),
        filled=_device.barriers(plan.num_stages, _copies(plan)),
        freed=_device.barriers(plan.num_stages),
        landed=_device.barriers(1, _copies(plan)),
    )
    out_type = jax.ShapeDtypeStruct(plan.state_shape, jnp.float32)
    if keeps_all:
        scratch |= dict(state_smem=plan.tiles(plan.pieces, rows=PIECE))
        out_type = jax.ShapeDtypeStruct((plan.sequences.num_chunks, *plan.state_shape[1:]), plan.dtype)
    return _host.kernel(
        functools.partial(_kernel, plan=plan, reverse=reverse, keeps_all=keeps_all),
        out_type=out_type,
        grid=(plan.sequences.num_parts, plan.num_heads),
        grid_names=("part", "head_index"),
        num_threads=2,
        thread_name="role",
        scratch_types=scratch,
        compiler_params=params,
    )(table, x, b, vectors, initial)

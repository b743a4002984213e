# SPDX-License-Identifier: Apache-2.0
"""The gradient of the gated delta rule's state, chunk by chunk from the last one: the serial half of its backward pass.

With ds' the gradient of the state after a chunk, ds that of the state before it, and w as in `kernel`,

    du = scale wᵀ do + exp(cum[-1] - cum) k ds'ᵀ
    dr = inverseᵀ du
    ds = exp(cum[-1]) ds' + (scale exp(cum) do)ᵀ q - (exp(cum) dr)ᵀ k

`gradients.py` derives them. Shapes: as in `kernel`; do as v. The results are ds' of all chunks, (chunks, slices, 64,
N), in the operands' dtype, and ds of the first chunk of each sequence in float32.

Role table: a block goes through a sequence with one slice; its warpgroups are

    state      the chain du, dr, ds, du ...: ds, duᵀ and drᵀ stay in registers, as s and uᵀ do in `kernel`
    weights    makes what waits for no state: scale w and scale exp(cum) do
    memory     copies the chunks' rows, inverses and decays ahead

Barrier table, of two rings, `chunks` from memory to all others and `weights` from weights to state:

    barrier                 arrivals                        who waits
    chunks.filled[stage]    copies of a chunk               state and weights
    chunks.freed[stage]     state and weights               memory, before it refills the stage
    landed                  copies of a chunk that is cut   memory, before it zeroes the rows of other sequences, and
                                                            arrives at chunks.filled in place of the copies
    weights.filled[stage]   weights, which has stored w     state
    weights.freed[stage]    state                           weights, before it stores the next w

Bound by: the latency of a chunk's three products in a row.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ... import _device, _host
from ..._device import COLUMNS, PIECE, ROWS, Barrier, Index, Ref, Ring, Tiles, load, product, spread
from ..sequences import Part
from ..states import first_state, store_state
from ..tiles import Operand, load_chunks
from .plan import CHUNK, SQUARE, Plan

REGISTERS = 232, 168, 40  # Per thread of the state, weights and memory warpgroups.
NUM_STAGES = 3  # Chunks in shared memory.
WEIGHTS_STAGES = 2  # Chunks that `weights` may be ahead of `state`.


def _copies(plan: Plan) -> int:
    """Copies of a chunk: the inverse, cum in two layouts, do, and queries and keys."""
    return 3 + 1 + 2 * plan.pieces


def _scratch(plan: Plan) -> dict:
    cum = plgpu.SMEM((NUM_STAGES, CHUNK), jnp.float32)
    return dict(
        q_smem=plan.rows(NUM_STAGES, plan.pieces),
        k_smem=plan.rows(NUM_STAGES, plan.pieces),
        do_smem=plan.rows(NUM_STAGES, 1),
        inverse_smem=plan.squares(NUM_STAGES),
        row_cum_smem=cum,
        col_cum_smem=cum,
        w_smem=plan.squares(WEIGHTS_STAGES),
        decayed_do_smem=plan.squares(WEIGHTS_STAGES),
        out_ds_smem=plan.squares(2, plan.pieces),
        filled=_device.barriers(NUM_STAGES, _copies(plan)),
        freed=_device.barriers(NUM_STAGES, 2),
        landed=_device.barriers(1, _copies(plan)),
        handed=_device.barriers(WEIGHTS_STAGES),  # The ring `weights`: filled, and freed.
        taken=_device.barriers(WEIGHTS_STAGES),
    )


@dataclasses.dataclass(frozen=True)
class Shared:
    """Scratch and indices that the roles of a block share."""

    plan: Plan
    part: Part
    value_slice: Index  # The block's.
    chunks: Ring  # Its stages hold a chunk's q, k, do, inverse and cum.
    q: Tiles
    k: Tiles
    do: Tiles
    inverse: Ref
    row_cum: Ref  # cum as one number per row of a product, and as one per column.
    col_cum: Ref
    weights: Ring  # Its stages hold w and decayed_do.
    w: Ref  # scale w.
    decayed_do: Ref  # scale exp(cum) do.
    out_ds: Ref  # ds' of two chunks, from where they are copied to global memory.


def _kernel(
    table, gmem, last_gmem, all_gmem, first_gmem, *, plan: Plan, filled, freed, landed, handed, taken, **smem
):  # fmt: skip
    role, value_slice = lax.axis_index("role"), lax.axis_index("unit")
    part = Part.of_block(table, plan.sequences, plan.interpreted)
    smem = {name.removesuffix("_smem"): ref for name, ref in smem.items()}
    smem |= {name: Tiles.views(smem[name], plan.interpreted) for name in ("q", "k", "do")}
    chunks, weights = Ring(filled, freed, NUM_STAGES), Ring(handed, taken, WEIGHTS_STAGES)
    shared = Shared(plan, part, value_slice, chunks=chunks, weights=weights, **smem)

    @_device.role(role == 0, increase_to=REGISTERS[0])
    def _():
        _carry_the_gradient(shared, last_gmem, all_gmem, first_gmem)

    @_device.role(role == 1, increase_to=REGISTERS[1])
    def _():
        _make_weights(shared)

    @_device.role(role == 2, decrease_to=REGISTERS[2])
    def _():
        _load_chunks(shared, landed, gmem)


def _load_chunks(shared: Shared, landed: Barrier, gmem: dict):
    """The memory warpgroup."""
    plan = shared.plan
    head = plan.head(shared.value_slice)
    key_head = plan.key_head(head)
    operands = (
        Operand(gmem["q"], shared.q, key_head, plan.pieces),
        Operand(gmem["k"], shared.k, key_head, plan.pieces),
        Operand(gmem["do"], shared.do, shared.value_slice, 1),
    )

    def inverse_and_cum(chunk, stage):
        refs = dict(inverse=shared.inverse, col_cum=shared.col_cum, row_cum=shared.row_cum)
        return [(gmem[name].at[head, chunk], ref.at[stage]) for name, ref in refs.items()]

    load_chunks(shared.part, shared.chunks, landed, operands, inverse_and_cum, _copies(plan), reverse=True)


def _make_weights(shared: Shared):
    """The weights warpgroup."""
    plan, part = shared.plan, shared.part
    row, col = _device.indices()

    @pl.loop(0, part.num_chunks)
    def _(i):
        stage = shared.chunks.wait(i)
        q, k = (tiles.tiled.at[stage] for tiles in (shared.q, shared.k))
        # scale w = scale tril(exp(cum[t] - cum[j]) q kᵀ)
        w = product([(q.at[p], k.at[p].T) for p in range(plan.pieces)], plan.interpreted)
        cum = spread(load(shared.row_cum.at[stage], ROWS), 0)
        decay = jnp.exp(jnp.minimum(cum - spread(load(shared.col_cum.at[stage], COLUMNS), 1), 0.0))
        w = jnp.where(row >= col, w * decay * plan.scale, 0.0)
        do = load(shared.do.tiled.at[stage, 0]).astype(jnp.float32)
        w_stage = shared.weights.acquire(i)
        shared.w[w_stage] = w.astype(plan.dtype)
        shared.decayed_do[w_stage] = (do * jnp.exp(cum) * plan.scale).astype(plan.dtype)
        plgpu.commit_smem()
        plgpu.barrier_arrive(shared.weights.filled.at[w_stage])
        shared.chunks.release(i)

    shared.weights.drain(part.num_chunks)


def _carry_the_gradient(shared: Shared, last_gmem: Ref, all_gmem: Ref, first_gmem: Ref):
    """The state warpgroup: takes ds, in pieces (64, 64) of its N columns, from chunk to chunk, and stores each ds'."""
    plan, part, index = shared.plan, shared.part, (shared.part.number, shared.value_slice)

    def step(i, ds):
        stage, w_stage, ds_stage = shared.chunks.wait(i), shared.weights.wait(i), _device.rem(i, 2)
        rounded, last = [piece.astype(plan.dtype) for piece in ds], shared.col_cum[stage, CHUNK - 1]
        decay = jnp.exp(last)
        du = _gradient_of_corrections(shared, stage, w_stage, ds_stage, rounded, last)
        ds = _gradient_of_state(shared, stage, w_stage, du, ds, decay)
        plgpu.commit_smem()
        for p in range(plan.pieces):
            chunk = part.first_chunk + part.num_chunks - 1 - i
            target = all_gmem.at[chunk, shared.value_slice, :, pl.ds(p * PIECE, PIECE)]
            plgpu.copy_smem_to_gmem(shared.out_ds.at[ds_stage, p], target)
        shared.weights.release(i)
        shared.chunks.release(i)
        return ds

    last = first_state(last_gmem, index, plan.pieces)
    store_state(first_gmem, index, lax.fori_loop(0, part.num_chunks, step, last))
    plgpu.wait_smem_to_gmem(0)


def _gradient_of_corrections(shared: Shared, stage: Index, w_stage: Index, ds_stage: Index, ds: list, last):
    """duᵀ = doᵀ (scale w) + exp(cum[-1] - cum) ds' kᵀ, from ds', rounded, and cum of the `last` token.

    ds' is stored in `shared.out_ds` while the tensor cores are at the products.
    """
    plan, k = shared.plan, shared.k.tiled.at[stage]
    from_state = [(piece, k.at[p].T) for p, piece in enumerate(ds)]
    from_outputs = shared.do.tiled.at[stage, 0].T, shared.w.at[w_stage]
    to_end = lambda: spread(jnp.exp(last - load(shared.col_cum.at[stage], COLUMNS)), 1)

    def store_ds():
        plgpu.wait_smem_to_gmem(plan.pieces, wait_read_only=True)  # The gradient in this stage has left.
        for p, piece in enumerate(ds):
            shared.out_ds[ds_stage, p] = piece

    if plan.interpreted:
        store_ds()
        return product([from_outputs], True) + product(from_state, True) * to_end()

    def multiply(from_state_ref, du_ref):
        for pair in from_state:
            plgpu.wgmma(from_state_ref, *pair)
        plgpu.wgmma(du_ref, *from_outputs)
        store_ds()
        du = plgpu.layout_cast(du_ref[...], plgpu.Layout.WGMMA)
        return du + plgpu.layout_cast(from_state_ref[...], plgpu.Layout.WGMMA) * to_end()

    return pl.run_scoped(multiply, plgpu.ACC(SQUARE, jnp.float32), plgpu.ACC(SQUARE, jnp.float32))


def _gradient_of_state(shared: Shared, stage: Index, w_stage: Index, du, ds: list, decay):
    """ds of a chunk, from duᵀ, ds' and the `decay` of the whole chunk:

    drᵀ = duᵀ inverse,    ds = decay ds' + (scale exp(cum) do)ᵀ q - (exp(cum) drᵀ) k
    """
    plan, pieces = shared.plan, range(shared.plan.pieces)
    q, k = (tiles.tiled.at[stage] for tiles in (shared.q, shared.k))
    inverse, decayed_do = shared.inverse.at[stage], shared.decayed_do.at[w_stage].T
    minus_decay = lambda: spread(-jnp.exp(load(shared.col_cum.at[stage], COLUMNS)), 1)
    if plan.interpreted:
        dr = product([(du.astype(plan.dtype), inverse)], True)
        decayed_dr = (dr * minus_decay()).astype(plan.dtype)
        return [product([(decayed_do, q.at[p]), (decayed_dr, k.at[p])], True, ds[p] * decay) for p in pieces]

    def multiply(dr_ref, *ds_refs):
        plgpu.wgmma(dr_ref, du.astype(plan.dtype), inverse)
        for p in pieces:
            ds_refs[p][...] = ds[p] * decay
            plgpu.wgmma(ds_refs[p], decayed_do, q.at[p])  # Waits for no dr.
        dr = plgpu.wgmma_accumulator_load(dr_ref, wait_n=plan.pieces)
        decayed_dr = (plgpu.layout_cast(dr, plgpu.Layout.WGMMA) * minus_decay()).astype(plan.dtype)
        for p in pieces:
            plgpu.wgmma(ds_refs[p], decayed_dr, k.at[p])
        return [plgpu.layout_cast(ref[...], plgpu.Layout.WGMMA) for ref in ds_refs]

    return pl.run_scoped(multiply, *[plgpu.ACC(SQUARE, jnp.float32)] * (1 + plan.pieces))


def launch(plan: Plan, table, q, k, do, inverse, cum, d_final, params):
    """[ds' of all chunks, ds of the first chunk of each sequence]; `d_final` are the gradients of the final states."""
    sequences, state = plan.sequences, (plan.value_slices, PIECE, plan.pieces * PIECE)
    # cum is passed twice: one ref cannot have two layouts.
    gmem = dict(q=q, k=k, do=do, inverse=inverse, col_cum=cum, row_cum=cum)
    return _host.kernel(
        functools.partial(_kernel, plan=plan),
        out_type=[
            jax.ShapeDtypeStruct((sequences.num_chunks, *state), plan.dtype),
            jax.ShapeDtypeStruct((sequences.num_seqs, *state), jnp.float32),
        ],
        grid=(sequences.num_parts, plan.value_slices),
        grid_names=("part", "unit"),
        num_threads=3,
        thread_name="role",
        scratch_types=_scratch(plan),
        compiler_params=params,
    )(table, gmem, d_final)

# SPDX-License-Identifier: Apache-2.0
"""The gradient of the gated delta rule's state, chunk by chunk from the last one: the serial half of its backward pass.

With ds' the gradient of the state after a chunk, ds that of the state before it, and w as in `kernel`,

    de = scale wᵀ do + exp(cum[-1] - cum) beta k ds'ᵀ
    dr = inverseᵀ de
    ds = exp(cum[-1]) ds' + (scale exp(cum) do)ᵀ q - (exp(cum) dr)ᵀ k

`gradients.py` derives them. Shapes: as in `kernel`; do as v. The results are dr, the gradient of v, as v; ds' of all
chunks, (chunks, slices, 64, N), in the operands' dtype; and ds of the first chunk of each sequence in float32.

Role table: a block goes through a sequence with one slice, or with both of a head; its warpgroups are

    state      one per slice: the chain de, dr, ds, de ... As s and eᵀ in `kernel`, ds, deᵀ and drᵀ stay in registers
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

Bound by: the latency of a chunk's three products in a row. Two chains in a block fill each other's gaps.
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
from ..tiles import Operand, load_chunks, store_rows
from .plan import CHUNK, SQUARE, BackwardPlan

# Registers per thread of the state, weights and memory warpgroups, by the number of state warpgroups.
REGISTERS = {1: (232, 168, 40), 2: (168, 136, 40)}
WEIGHTS_STAGES = 2  # Chunks that `weights` may be ahead of `state`.


def _copies(plan: BackwardPlan) -> int:
    """Copies of a chunk: the inverse, beta, cum in two layouts, do, and queries and keys."""
    return 4 + plan.state_wgs + 2 * plan.pieces


def _scratch(plan: BackwardPlan) -> dict:
    num_stages, wgs = plan.num_stages, plan.state_wgs
    return dict(
        q_smem=plan.rows(num_stages, plan.pieces),
        k_smem=plan.rows(num_stages, plan.pieces),
        do_smem=plan.rows(num_stages, wgs),
        inverse_smem=plan.squares(num_stages),
        row_cum_smem=plgpu.SMEM((num_stages, CHUNK), jnp.float32),
        columns_smem=plgpu.SMEM((num_stages, 2, CHUNK), jnp.float32),
        w_smem=plan.squares(WEIGHTS_STAGES),
        decayed_do_smem=plan.squares(WEIGHTS_STAGES, wgs),
        ds_smem=plan.squares(wgs, plan.pieces),
        dr_smem=plan.rows(wgs),
        filled=_device.barriers(num_stages, _copies(plan)),
        freed=_device.barriers(num_stages, wgs + 1),
        landed=_device.barriers(1, _copies(plan)),
        handed=_device.barriers(WEIGHTS_STAGES),  # The ring `weights`: filled, and freed.
        taken=_device.barriers(WEIGHTS_STAGES, wgs),
    )


@dataclasses.dataclass(frozen=True)
class Shared:
    """Scratch and indices that the roles of a block share."""

    plan: BackwardPlan
    part: Part
    unit: Index  # Number of the block among those of its part.
    chunks: Ring  # Its stages hold a chunk's q, k, do, inverse, beta and cum.
    q: Tiles
    k: Tiles
    do: Tiles
    inverse: Ref
    row_cum: Ref  # cum, one number per row of a product.
    columns: Ref  # cum and beta, one number per column.
    weights: Ring  # Its stages hold w and decayed_do.
    w: Ref  # scale w.
    decayed_do: Ref  # scale exp(cum) do.
    ds: Ref  # ds' and dr of a chunk, from where they are copied to global memory.
    dr: Tiles

    col_cum = property(lambda self: self.columns.at[:, 0])
    beta = property(lambda self: self.columns.at[:, 1])


def _kernel(
    table, gmem, last_gmem, dr_gmem, ds_gmem, first_gmem, *, plan: BackwardPlan, filled, freed, landed, handed, taken,
    **smem,
):  # fmt: skip
    role, unit = lax.axis_index("role"), lax.axis_index("unit")
    part = Part.of_block(table, plan.sequences, plan.interpreted)
    smem = {name.removesuffix("_smem"): ref for name, ref in smem.items()}
    smem |= {name: Tiles.views(smem[name], plan.interpreted) for name in ("q", "k", "do", "dr")}
    chunks, weights = Ring(filled, freed, plan.num_stages), Ring(handed, taken, WEIGHTS_STAGES)
    shared = Shared(plan, part, unit, chunks=chunks, weights=weights, **smem)
    state_registers, weights_registers, memory_registers = REGISTERS[plan.state_wgs]

    @_device.role(role < plan.state_wgs, increase_to=state_registers)
    def _():
        _carry_the_gradient(shared, role, last_gmem, dr_gmem, ds_gmem, first_gmem)

    @_device.role(role == plan.state_wgs, increase_to=weights_registers)
    def _():
        _make_weights(shared)

    @_device.role(role == plan.state_wgs + 1, decrease_to=memory_registers)
    def _():
        _load_chunks(shared, landed, gmem)


def _load_chunks(shared: Shared, landed: Barrier, gmem: dict):
    """The memory warpgroup."""
    plan = shared.plan
    head = plan.head(shared.unit * plan.state_wgs)
    key_head = plan.key_head(head)
    operands = (
        Operand(gmem["q"], shared.q, key_head, plan.pieces),
        Operand(gmem["k"], shared.k, key_head, plan.pieces),
        Operand(gmem["do"], shared.do, shared.unit, plan.state_wgs),
    )

    def others(chunk, stage):
        refs = {name: getattr(shared, name) for name in ("inverse", "beta", "col_cum", "row_cum")}
        return [(gmem[name].at[head, chunk], ref.at[stage]) for name, ref in refs.items()]

    load_chunks(shared.part, shared.chunks, landed, operands, others, _copies(plan), reverse=True)


def _make_weights(shared: Shared):
    """The weights warpgroup."""
    plan, part = shared.plan, shared.part
    row, col = _device.indices()

    @pl.loop(0, part.num_chunks)
    def _(i):
        stage = shared.chunks.wait(i)
        q, k = (tiles.tiled.at[stage] for tiles in (shared.q, shared.k))
        # scale w = scale tril(exp(cum[t] - cum[j]) q kᵀ beta[j])
        w = product([(q.at[p], k.at[p].T) for p in range(plan.pieces)], plan.interpreted)
        cum = spread(load(shared.row_cum.at[stage], ROWS), 0)
        decay = jnp.exp(cum - spread(load(shared.col_cum.at[stage], COLUMNS), 1))  # May be infinite where w is zero.
        scaled_beta = spread(load(shared.beta.at[stage], COLUMNS) * plan.scale, 1)
        w = jnp.where(row >= col, w * decay * scaled_beta, 0.0)
        w_stage = shared.weights.acquire(i)
        shared.w[w_stage] = w.astype(plan.dtype)
        from_start = jnp.exp(cum) * plan.scale
        for wg in range(plan.state_wgs):
            do = load(shared.do.tiled.at[stage, wg]).astype(jnp.float32)
            shared.decayed_do[w_stage, wg] = (do * from_start).astype(plan.dtype)
        plgpu.commit_smem()
        plgpu.barrier_arrive(shared.weights.filled.at[w_stage])
        shared.chunks.release(i)

    shared.weights.drain(part.num_chunks)


def _carry_the_gradient(shared: Shared, wg: Index, last_gmem: Ref, dr_gmem: Ref, ds_gmem: Ref, first_gmem: Ref):
    """State warpgroup `wg`: takes ds of its slice, in pieces (64, 64) of its N columns, from chunk to chunk, and stores
    each ds' and dr."""
    plan, part, value_slice = shared.plan, shared.part, shared.unit * shared.plan.state_wgs + wg

    def step(i, ds):
        stage, w_stage, chunk = shared.chunks.wait(i), shared.weights.wait(i), part.num_chunks - 1 - i
        rounded, decay = [piece.astype(plan.dtype) for piece in ds], jnp.exp(shared.col_cum[stage, CHUNK - 1])
        de = _gradient_of_errors(shared, wg, stage, w_stage, rounded).astype(plan.dtype)

        def store(dr):
            _device.store(shared.dr.tiled.at[wg].T, dr.astype(plan.dtype))
            plgpu.commit_smem()
            for p in range(plan.pieces):
                target = ds_gmem.at[part.first_chunk + chunk, value_slice, :, pl.ds(p * PIECE, PIECE)]
                plgpu.copy_smem_to_gmem(shared.ds.at[wg, p], target)
            store_rows(part, shared.dr, wg, dr_gmem, value_slice, 0, part.row(chunk))

        ds = _gradient_of_state(shared, wg, stage, w_stage, de, ds, decay, store)
        shared.weights.release(i)
        shared.chunks.release(i)
        return ds

    index = part.number, value_slice
    last = first_state(last_gmem, index, plan.pieces)
    store_state(first_gmem, index, lax.fori_loop(0, part.num_chunks, step, last))
    plgpu.wait_smem_to_gmem(0)


def _gradient_of_errors(shared: Shared, wg: Index, stage: Index, w_stage: Index, ds: list):
    """deᵀ = doᵀ (scale w) + exp(cum[-1] - cum) beta ds' kᵀ, from ds', rounded.

    ds' is stored in shared memory, and decays are computed, while the tensor cores are at the products.
    """
    plan, k = shared.plan, shared.k.tiled.at[stage]
    from_state = [(piece, k.at[p].T) for p, piece in enumerate(ds)]
    from_outputs = shared.do.tiled.at[stage, wg].T, shared.w.at[w_stage]

    def to_end():
        last, cum = shared.col_cum[stage, CHUNK - 1], load(shared.col_cum.at[stage], COLUMNS)
        return spread(jnp.exp(last - cum) * load(shared.beta.at[stage], COLUMNS), 1)

    def store_ds():
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # ds' and dr of the chunk before have left.
        for p, piece in enumerate(ds):
            shared.ds[wg, p] = piece

    if plan.interpreted:
        store_ds()
        return product([from_outputs], True) + product(from_state, True) * to_end()

    def multiply(from_state_ref, de_ref=None):
        for pair in from_state:
            plgpu.wgmma(from_state_ref, *pair)
        if de_ref is None:
            store_ds()
            decay = to_end()
            de = plgpu.layout_cast(from_state_ref[...], plgpu.Layout.WGMMA) * decay
            return product([from_outputs], False, de)
        plgpu.wgmma(de_ref, *from_outputs)
        store_ds()
        decay = to_end()
        de = plgpu.layout_cast(de_ref[...], plgpu.Layout.WGMMA)
        return de + plgpu.layout_cast(from_state_ref[...], plgpu.Layout.WGMMA) * decay

    # Two chains fill each other's gaps, and have registers for one accumulator at a time.
    accumulators = 2 if plan.state_wgs == 1 else 1
    return pl.run_scoped(multiply, *[plgpu.ACC(SQUARE, jnp.float32)] * accumulators)


def _gradient_of_state(shared: Shared, wg: Index, stage: Index, w_stage: Index, de, ds: list, decay, store):
    """ds of a chunk, from deᵀ, rounded, ds' and the `decay` of the whole chunk; `store(drᵀ)` is called meanwhile.

    drᵀ = deᵀ inverse,    ds = decay ds' + (scale exp(cum) do)ᵀ q - (exp(cum) drᵀ) k
    """
    plan, pieces = shared.plan, range(shared.plan.pieces)
    q, k = (tiles.tiled.at[stage] for tiles in (shared.q, shared.k))
    inverse, decayed_do = shared.inverse.at[stage], shared.decayed_do.at[w_stage, wg].T
    minus_decay = lambda: spread(-jnp.exp(load(shared.col_cum.at[stage], COLUMNS)), 1)

    if plan.interpreted:
        dr = product([(de, inverse)], True)
        store(dr)
        decayed_dr = (dr * minus_decay()).astype(plan.dtype)
        return [product([(decayed_do, q.at[p]), (decayed_dr, k.at[p])], True, ds[p] * decay) for p in pieces]

    def multiply(dr_ref, *ds_refs):
        plgpu.wgmma(dr_ref, de, inverse)
        for p in pieces:
            ds_refs[p][...] = ds[p] * decay
            plgpu.wgmma(ds_refs[p], decayed_do, q.at[p])  # Waits for no dr.
        from_start = minus_decay()
        dr = plgpu.wgmma_accumulator_load(dr_ref, wait_n=plan.pieces)
        dr = plgpu.layout_cast(dr, plgpu.Layout.WGMMA)
        decayed_dr = (dr * from_start).astype(plan.dtype)
        for p in pieces:
            plgpu.wgmma(ds_refs[p], decayed_dr, k.at[p])
        store(dr)
        return [plgpu.layout_cast(ref[...], plgpu.Layout.WGMMA) for ref in ds_refs]

    return pl.run_scoped(multiply, *[plgpu.ACC(SQUARE, jnp.float32)] * (1 + plan.pieces))


def launch(plan: BackwardPlan, table, q, k, do, inverse, cum, beta, d_final, params):
    """[dr, ds' of all chunks, ds of the first chunk of each sequence]; `d_final` are the gradients of the final
    states."""
    sequences, state = plan.sequences, (plan.value_slices, PIECE, plan.pieces * PIECE)
    units, rows = plan.value_slices // plan.state_wgs, len(q)
    # cum is passed twice: one ref cannot have two layouts.
    gmem = dict(q=q, k=k, do=do.reshape(rows, units, -1), inverse=inverse, beta=beta, col_cum=cum, row_cum=cum)
    return _host.kernel(
        functools.partial(_kernel, plan=plan),
        out_type=[
            jax.ShapeDtypeStruct(do.shape, plan.dtype),
            jax.ShapeDtypeStruct((sequences.num_chunks, *state), plan.dtype),
            jax.ShapeDtypeStruct((sequences.num_seqs, *state), jnp.float32),
        ],
        grid=(sequences.num_parts, units),
        grid_names=("part", "unit"),
        num_threads=plan.state_wgs + 2,
        thread_name="role",
        scratch_types=_scratch(plan),
        compiler_params=params,
    )(table, gmem, d_final)

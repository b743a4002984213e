# SPDX-License-Identifier: Apache-2.0
"""The gradient of Kimi Delta Attention's state, chunk by chunk from the last one: the serial half of its backward pass.

With ds' the gradient of the state after a chunk, and ds that of the state before it,

    de = weightsᵀ do + keys_written ds'ᵀ
    dr = inverseᵀ de
    ds = ds' diag(decay) + doᵀ queries - drᵀ keys_read

`gradients.py` derives them. Shapes: as in `kernel`; do as v. The results are dr, the gradient of v, as v; ds' of all
chunks, (chunks, slices, 64, N), in the operands' dtype; and ds of the first chunk of each sequence in float32.

Role table: a block goes through a sequence with one slice, or with both of a head; its warpgroups are

    state    one per slice: the chain de, dr, ds, de ...: ds, deᵀ and drᵀ stay in registers, as s and eᵀ do in `kernel`
    memory   one: copies the chunks' rows, squares and decays ahead

Barrier table, of the ring `chunks` from memory to state:

    barrier                 arrivals                        who waits
    chunks.filled[stage]    copies of a chunk               state
    chunks.freed[stage]     state                           memory, before it refills the stage
    landed                  copies of a chunk that is cut   memory, before it zeroes the rows of other sequences, and
                                                            arrives at chunks.filled in place of the copies

Bound by: the latency of a chunk's three products in a row, or the stream of squares.
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

REGISTERS = {1: (240, 40), 2: (232, 40)}  # Per thread of the state and memory warpgroups, by the number of the former.


def scratch(plan: KdaPlan) -> dict:
    copies = plan.state_wgs + 2
    return dict(
        do_smem=plan.rows(plan.num_stages, plan.state_wgs),
        squares_smem=plan.squares(plan.num_stages, plan.num_squares),
        decay_smem=plgpu.SMEM((plan.num_stages, plan.pieces * PIECE), jnp.float32),
        ds_smem=plan.squares(plan.state_wgs, plan.pieces),
        dr_smem=plan.rows(plan.state_wgs),
        filled=_device.barriers(plan.num_stages, copies),
        freed=_device.barriers(plan.num_stages, plan.state_wgs),
        landed=_device.barriers(1, copies),
    )


@dataclasses.dataclass(frozen=True)
class Shared:
    """Scratch and indices that the roles of a block share."""

    plan: KdaPlan
    part: Part
    unit: Index  # Number of the block among those of its sequence.
    chunks: Ring  # Its stages hold a chunk's do, squares and decays.
    do: Tiles
    squares: Ref
    decay: Ref
    ds: Ref  # ds' and dr of a chunk, from where they are copied to global memory.
    dr: Tiles

    def pieces(self, stage: Index, first: int) -> list:
        """A chunk's rows whose first piece has the place `first` among its squares."""
        return [self.squares.at[stage, first + p] for p in range(self.plan.pieces)]


def _kernel(
    table, gmem, last_gmem, dr_gmem, ds_gmem, first_gmem, *, plan: KdaPlan, do_smem, squares_smem, decay_smem, ds_smem,
    dr_smem, filled, freed, landed,
):  # fmt: skip
    role, unit = lax.axis_index("role"), lax.axis_index("unit")
    part = Part.of_block(table, plan.sequences, plan.interpreted)
    chunks = Ring(filled, freed, plan.num_stages)
    do, dr = (Tiles.views(smem, plan.interpreted) for smem in (do_smem, dr_smem))
    shared = Shared(plan, part, unit, chunks, do, squares_smem, decay_smem, ds_smem, dr)
    state_registers, memory_registers = REGISTERS[plan.state_wgs]

    @_device.role(role < plan.state_wgs, increase_to=state_registers)
    def _():
        _carry_the_gradient(shared, role, last_gmem, dr_gmem, ds_gmem, first_gmem)

    @_device.role(role == plan.state_wgs, decrease_to=memory_registers)
    def _():
        _load_chunks(shared, landed, gmem)


def _load_chunks(shared: Shared, landed: Barrier, gmem: dict):
    """The memory warpgroup."""
    plan = shared.plan
    head = plan.head(shared.unit * plan.state_wgs)
    operands = [Operand(gmem["do"], shared.do, shared.unit, plan.state_wgs)]

    def squares_and_decay(chunk, stage):
        refs = dict(squares=shared.squares, decay=shared.decay)
        return [(gmem[name].at[head, chunk], ref.at[stage]) for name, ref in refs.items()]

    load_chunks(shared.part, shared.chunks, landed, operands, squares_and_decay, plan.state_wgs + 2, reverse=True)


def _carry_the_gradient(shared: Shared, wg: Index, last_gmem: Ref, dr_gmem: Ref, ds_gmem: Ref, first_gmem: Ref):
    """State warpgroup `wg`: takes ds of its slice, in pieces (64, 64) of its N columns, from chunk to chunk, and stores
    each ds' and dr."""
    plan, part, value_slice = shared.plan, shared.part, shared.unit * shared.plan.state_wgs + wg

    def step(i, ds):
        stage, chunk = shared.chunks.wait(i), part.num_chunks - 1 - i
        de = _gradient_of_errors(shared, wg, stage, [piece.astype(plan.dtype) for piece in ds]).astype(plan.dtype)

        def store(dr):
            _device.store(shared.dr.tiled.at[wg].T, dr)
            plgpu.commit_smem()
            for p in range(plan.pieces):
                target = ds_gmem.at[part.first_chunk + chunk, value_slice, :, pl.ds(p * PIECE, PIECE)]
                plgpu.copy_smem_to_gmem(shared.ds.at[wg, p], target)
            store_rows(part, shared.dr, wg, dr_gmem, value_slice, 0, part.row(chunk))

        ds = _gradient_of_state(shared, wg, stage, de, ds, store)
        shared.chunks.release(i)
        return ds

    index = part.number, value_slice
    last = first_state(last_gmem, index, plan.pieces)
    store_state(first_gmem, index, lax.fori_loop(0, part.num_chunks, step, last))
    plgpu.wait_smem_to_gmem(0)


def _gradient_of_errors(shared: Shared, wg: Index, stage: Index, ds: list):
    """deᵀ = doᵀ weights + ds' keys_writtenᵀ, from ds', rounded, which is stored in shared memory meanwhile."""
    plan = shared.plan
    pairs = [(shared.do.tiled.at[stage, wg].T, shared.squares.at[stage, WEIGHTS].T)]
    pairs += [(piece, k.T) for piece, k in zip(ds, shared.pieces(stage, plan.keys_written), strict=True)]

    def store_ds():
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # ds' and dr of the chunk before have left.
        for p, piece in enumerate(ds):
            shared.ds[wg, p] = piece

    if plan.interpreted:
        store_ds()
        return product(pairs, True)

    def multiply(de_ref):
        for pair in pairs:
            plgpu.wgmma(de_ref, *pair)
        store_ds()
        return plgpu.layout_cast(de_ref[...], plgpu.Layout.WGMMA)

    return pl.run_scoped(multiply, plgpu.ACC(SQUARE, jnp.float32))


def _gradient_of_state(shared: Shared, wg: Index, stage: Index, de, ds: list, store):
    """ds of a chunk, from deᵀ, rounded, and ds'; `store(drᵀ)` is called meanwhile.

    drᵀ = deᵀ inverse,    ds = ds' diag(decay) + doᵀ queries - drᵀ keys_read
    """
    plan, pieces = shared.plan, range(shared.plan.pieces)
    inverse, do = shared.squares.at[stage, INVERSE], shared.do.tiled.at[stage, wg].T
    queries, keys = shared.pieces(stage, plan.queries), shared.pieces(stage, KEYS_READ)
    decay = lambda p: spread(load(shared.decay.at[stage, pl.ds(p * PIECE, PIECE)], COLUMNS), 1)
    if plan.interpreted:
        dr = product([(de, inverse)], True).astype(plan.dtype)
        store(dr)
        minus_dr = -dr
        return [product([(do, queries[p]), (minus_dr, keys[p])], True, ds[p] * decay(p)) for p in pieces]

    def multiply(dr_ref, *ds_refs):
        plgpu.wgmma(dr_ref, de, inverse)
        for p in pieces:
            ds_refs[p][...] = ds[p] * decay(p)
            plgpu.wgmma(ds_refs[p], do, queries[p])  # Waits for no dr.
        dr = plgpu.wgmma_accumulator_load(dr_ref, wait_n=plan.pieces)
        # Negated after the cast: if an accumulator is negated, ptxas lets no two WGMMAs overlap.
        dr = plgpu.layout_cast(dr, plgpu.Layout.WGMMA).astype(plan.dtype)
        minus_dr = -dr
        for p in pieces:
            plgpu.wgmma(ds_refs[p], minus_dr, keys[p])
        store(dr)
        return [plgpu.layout_cast(ref[...], plgpu.Layout.WGMMA) for ref in ds_refs]

    return pl.run_scoped(multiply, *[plgpu.ACC(SQUARE, jnp.float32)] * (1 + plan.pieces))


def launch(plan: KdaPlan, table, do, squares, decay, d_final, params):
    """[dr, ds' of all chunks, ds of the first chunk of each sequence]; `d_final` are the gradients of the final
    states."""
    sequences, state = plan.sequences, (plan.value_slices, PIECE, plan.pieces * PIECE)
    units = plan.value_slices // plan.state_wgs
    return _host.kernel(
        functools.partial(_kernel, plan=plan),
        out_type=[
            jax.ShapeDtypeStruct(do.shape, plan.dtype),
            jax.ShapeDtypeStruct((sequences.num_chunks, *state), plan.dtype),
            jax.ShapeDtypeStruct((sequences.num_seqs, *state), jnp.float32),
        ],
        grid=(sequences.num_parts, units),
        grid_names=("part", "unit"),
        num_threads=plan.state_wgs + 1,
        thread_name="role",
        scratch_types=scratch(plan),
        compiler_params=params,
    )(table, dict(do=do.reshape(len(do), units, PIECE * plan.state_wgs), squares=squares, decay=decay), d_final)

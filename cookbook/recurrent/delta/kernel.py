# SPDX-License-Identifier: Apache-2.0
"""The state of the gated delta rule from chunk to chunk, and the results of the tokens: the serial half of it.

With the state s before a chunk, a row per value as in the ops' arguments, and a row per token in all others,

    e  = inverse (v - exp(cum) k sᵀ)
    o  = scale (exp(cum) q sᵀ + w e),    w[t, j] = exp(cum[t] - cum[j]) q[t] . k[j] beta[j]  for j <= t, else 0
    s' = exp(cum[-1]) s + (exp(cum[-1] - cum) beta e)ᵀ k,    the state before the next chunk

A row of e is the error of a token, which beta makes its correction of the state.

Shapes: q and k (rows, key heads, N); v and o (rows, slices, 64), where a slice is 64 values of a head; cum and
beta (heads, chunks, 64) float32; inverse (heads, chunks, 64, 64), from `kernel_inverse`; states (parts, slices, 64, N)
float32. All others are bfloat16 or all float16.

Role table: a block goes through a part of a sequence with one slice, or with both of a head; its warpgroups are

    state    one per slice: the chain e, s', e, s' ... It keeps s and eᵀ in registers, where WGMMA takes its first
             operand: nothing that the next chunk waits for goes through shared memory
    output   one or two, which take turns: o of the chunk, from the s and e that `state` leaves in shared memory
    memory   one: copies the chunks' rows, inverses and decays ahead

Barrier table, of two rings, `chunks` from memory to all others and `states` from state to output:

    barrier                arrivals                         who waits
    chunks.filled[stage]   copies of a chunk                state and output warpgroups, for every chunk, also those
                                                            that they skip: no phase of a barrier may be missed
    chunks.freed[stage]    state and output warpgroups      memory, before it refills the stage
    landed                 copies of a chunk that is cut    memory, before it zeroes the rows of other sequences, and
                                                            arrives at chunks.filled in place of the copies
    states.filled[stage]   state, each having stored its e  the output warpgroup
    states.freed[stage]    the output warpgroup             state, before it stores the next state

Without an output warpgroup the kernel gives states alone: that after each part, or for the backward pass those before
all chunks, and e with them. Without values it gives the states that follow from a unit matrix: what a part does to any
state.

Bound by: the latency of a chunk's three products in a row, where the slices of all sequences do not fill the GPU,
which then has a block for each. Otherwise the tensor cores: a block of two slices multiplies queries and keys once for
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
from ..._device import COLUMNS, PIECE, ROWS, Barrier, Index, Ref, Ring, Tiles, load, product, spread
from ..sequences import Part
from ..states import first_state, store_state
from ..tiles import Operand, load_chunks, store_rows
from .plan import CHUNK, SQUARE, ForwardPlan

# Registers per thread of the state, output and memory warpgroups, by the numbers of state and output warpgroups.
REGISTERS = {
    (1, 0): (240, 0, 40), (2, 0): (232, 0, 40), (1, 1): (232, 168, 40), (1, 2): (216, 120, 40), (2, 1): (168, 136, 40)
}  # fmt: skip
# Chunks that `state` may be ahead of the output warpgroups: a multiple of their number. Then each of two, which takes
# every second chunk, reads the same stage each time and misses no phase of its barriers.
STATE_STAGES = 2


def _copies(plan: ForwardPlan) -> int:
    """Copies of a chunk: the inverse, beta, cum in one or two layouts, values, keys and queries."""
    num_keys = plan.pieces * (2 if plan.output_wgs else 1)
    return (4 if plan.output_wgs else 3) + plan.has_values * plan.state_wgs + num_keys


def scratch(plan: ForwardPlan) -> dict:
    refs = dict(
        k_smem=plan.rows(plan.num_stages, plan.pieces),
        inverse_smem=plan.squares(plan.num_stages),
        columns_smem=plgpu.SMEM((plan.num_stages, 2, CHUNK), jnp.float32),
        filled=_device.barriers(plan.num_stages, _copies(plan)),
        freed=_device.barriers(plan.num_stages, plan.memory_role),
        landed=_device.barriers(1, _copies(plan)),
    )
    if plan.has_values:
        refs |= dict(v_smem=plan.rows(plan.num_stages, plan.state_wgs))
    if plan.output_wgs or plan.keeps_all:
        refs |= dict(
            s_smem=plan.squares(STATE_STAGES, plan.state_wgs, plan.pieces),
            e_smem=plan.squares(STATE_STAGES, plan.state_wgs),
        )
    if plan.output_wgs:
        refs |= dict(
            q_smem=plan.rows(plan.num_stages, plan.pieces),
            row_cum_smem=plgpu.SMEM((plan.num_stages, CHUNK), jnp.float32),
            o_smem=plan.rows(plan.output_wgs * plan.state_wgs),
            handed=_device.barriers(STATE_STAGES, plan.state_wgs),  # The ring `states`: filled, and freed.
            taken=_device.barriers(STATE_STAGES),
        )
    return refs


@dataclasses.dataclass(frozen=True)
class Shared:
    """Scratch and indices that the roles of a block share."""

    plan: ForwardPlan
    part: Part
    unit: Index  # Number of the block among those of its part.
    chunks: Ring  # Its stages hold a chunk's q, k, v, inverse, cum and beta.
    k: Tiles
    inverse: Ref
    columns: Ref  # cum and beta, one number per column of a product.
    row_cum: Ref = None  # cum, one number per row.
    v: Tiles | None = None
    q: Tiles | None = None
    states: Ring | None = None  # Its stages hold s and eᵀ.
    s: Ref = None
    e: Ref = None
    o: Tiles | None = None

    col_cum = property(lambda self: self.columns.at[:, 0])
    beta = property(lambda self: self.columns.at[:, 1])

    def minus_decay(self, stage):
        """-exp(cum)"""
        return -jnp.exp(load(self.col_cum.at[stage], COLUMNS))

    def to_end(self, stage):
        """exp(cum[-1] - cum) beta"""
        cum, last = load(self.col_cum.at[stage], COLUMNS), self.col_cum[stage, CHUNK - 1]
        return jnp.exp(last - cum) * load(self.beta.at[stage], COLUMNS)


def _kernel(
    table, gmem, initial_gmem, *outs, plan: ForwardPlan, filled, freed, landed, handed=None, taken=None, **smem
):  # fmt: skip
    role, unit = lax.axis_index("role"), lax.axis_index("unit")
    part = Part.of_block(table, plan.sequences, plan.interpreted)
    smem = {name.removesuffix("_smem"): ref for name, ref in smem.items()}
    smem |= {name: Tiles.views(smem[name], plan.interpreted) for name in "qkvo" if name in smem}
    states = Ring(handed, taken, STATE_STAGES) if plan.output_wgs else None
    shared = Shared(plan, part, unit, Ring(filled, freed, plan.num_stages), states=states, **smem)
    state_registers, output_registers, memory_registers = REGISTERS[plan.state_wgs, plan.output_wgs]

    @_device.role(role < plan.state_wgs, increase_to=state_registers)
    def _():
        _carry_the_state(shared, role, initial_gmem, outs)

    if plan.output_wgs:
        change = "increase_to" if plan.output_wgs == 1 else "decrease_to"

        @_device.role((role >= plan.state_wgs) & (role < plan.memory_role), **{change: output_registers})
        def _():
            _compute_outputs(shared, role - plan.state_wgs, outs[1])

    @_device.role(role == plan.memory_role, decrease_to=memory_registers)
    def _():
        _load_chunks(shared, landed, gmem)


def _load_chunks(shared: Shared, landed: Barrier, gmem: dict):
    """The memory warpgroup."""
    plan = shared.plan
    head = plan.head(shared.unit * plan.state_wgs)
    key_head = plan.key_head(head)
    operands = [Operand(gmem["k"], shared.k, key_head, plan.pieces)]
    if plan.has_values:
        operands.append(Operand(gmem["v"], shared.v, shared.unit, plan.state_wgs))
    if plan.output_wgs:
        operands.append(Operand(gmem["q"], shared.q, key_head, plan.pieces))

    def others(chunk, stage):
        refs = {name: getattr(shared, name) for name in ("inverse", "beta", "col_cum", "row_cum")}
        return [(gmem[name].at[head, chunk], ref.at[stage]) for name, ref in refs.items() if ref is not None]

    load_chunks(shared.part, shared.chunks, landed, operands, others, _copies(plan))


def _carry_the_state(shared: Shared, wg: Index, initial_gmem: Ref | None, outs):
    """State warpgroup `wg`: takes the state of its slice from chunk to chunk, in pieces (64, 64) of its N columns."""
    plan, part, value_slice = shared.plan, shared.part, shared.unit * shared.plan.state_wgs + wg

    def step(i, s):
        stage, state_stage = shared.chunks.wait(i), _device.rem(i, STATE_STAGES)
        e, to_end = _errors(shared, wg, i, stage, [piece.astype(plan.dtype) for piece in s])

        def hand_over():
            if plan.output_wgs or plan.keeps_all:
                shared.e[state_stage, wg] = e.astype(plan.dtype)
                plgpu.commit_smem()
            if plan.output_wgs:
                plgpu.barrier_arrive(shared.states.filled.at[state_stage])
            elif plan.keeps_all:
                states_gmem, errors_gmem = (out.at[part.first_chunk + i, value_slice] for out in outs)
                for p in range(plan.pieces):
                    target = states_gmem.at[:, pl.ds(p * PIECE, PIECE)]
                    plgpu.copy_smem_to_gmem(shared.s.at[state_stage, wg, p], target)
                plgpu.copy_smem_to_gmem(shared.e.at[state_stage, wg], errors_gmem)

        s = _next_state(shared, stage, e, to_end, s, hand_over)
        shared.chunks.release(i)
        return s

    first = first_state(initial_gmem, (part.number, value_slice), plan.pieces)
    last = lax.fori_loop(0, part.num_chunks, step, first)
    if not plan.keeps_all:
        store_state(outs[0], (part.number, value_slice), last)
    if plan.output_wgs:
        shared.states.drain(part.num_chunks)
    plgpu.wait_smem_to_gmem(0)


def _next_state(shared: Shared, stage: Index, e, to_end, s: list, hand_over):
    """s' = exp(cum[-1]) s + (exp(cum[-1] - cum) beta e)ᵀ k, from eᵀ; `hand_over()` is called meanwhile."""
    plan, decay = shared.plan, jnp.exp(shared.col_cum[stage, CHUNK - 1])
    u_to_end = (e * spread(to_end, 1)).astype(plan.dtype)
    keys = [shared.k.tiled.at[stage, p] for p in range(plan.pieces)]
    if plan.interpreted:
        hand_over()
        return [product([(u_to_end, k)], True, piece * decay) for piece, k in zip(s, keys, strict=True)]

    def multiply(*refs):
        for ref, piece, k in zip(refs, s, keys, strict=True):
            ref[...] = piece * decay
            plgpu.wgmma(ref, u_to_end, k)
        hand_over()
        return [plgpu.layout_cast(ref[...], plgpu.Layout.WGMMA) for ref in refs]

    return pl.run_scoped(multiply, *[plgpu.ACC(SQUARE, jnp.float32)] * plan.pieces)


def _errors(shared: Shared, wg: Index, i: Index, stage: Index, s: list):
    """eᵀ = (vᵀ - exp(cum) s kᵀ) inverseᵀ of chunk `i`, a row per value and a column per token; and `Shared.to_end`.

    `s`, rounded, is stored, and decays are computed, while the tensor cores are at the products.
    """
    plan = shared.plan
    keys = [(piece, shared.k.tiled.at[stage, p].T) for p, piece in enumerate(s)]
    inverse = shared.inverse.at[stage].T
    values = [(shared.v.tiled.at[stage, wg].T, inverse)] if plan.has_values else []
    if plan.interpreted:
        _store_state_before(shared, wg, i, s)
        from_state = (product(keys, True) * spread(shared.minus_decay(stage), 1)).astype(plan.dtype)
        return product([*values, (from_state, inverse)], True), shared.to_end(stage)

    def finish(pairs, e_ref):
        for pair in pairs:
            plgpu.wgmma(e_ref, *pair)
        to_end = shared.to_end(stage)
        return plgpu.layout_cast(e_ref[...], plgpu.Layout.WGMMA), to_end

    def multiply(from_state_ref, e_ref=None):
        for pair in keys:
            plgpu.wgmma(from_state_ref, *pair)
        early = [] if e_ref is None else values  # They wait for no state.
        for pair in early:
            plgpu.wgmma(e_ref, *pair)
        _store_state_before(shared, wg, i, s)
        minus_decay = spread(shared.minus_decay(stage), 1)
        from_state = plgpu.wgmma_accumulator_load(from_state_ref, wait_n=len(early))
        from_state = plgpu.layout_cast(from_state, plgpu.Layout.WGMMA)
        from_state = (from_state * minus_decay).astype(plan.dtype)
        if e_ref is None:
            pairs = [*values, (from_state, inverse)]
            return pl.run_scoped(functools.partial(finish, pairs), plgpu.ACC(SQUARE, jnp.float32))
        return finish([(from_state, inverse)], e_ref)

    # Two chains fill each other's gaps, and have registers for one accumulator at a time.
    accumulators = 1 if plan.state_wgs == 2 and plan.output_wgs else 2
    return pl.run_scoped(multiply, *[plgpu.ACC(SQUARE, jnp.float32)] * accumulators)


def _store_state_before(shared: Shared, wg: Index, i: Index, s: list):
    """Stores the state before chunk `i` in shared memory, for the output warpgroups or for a copy to `states_gmem`."""
    plan = shared.plan
    if plan.output_wgs:
        shared.states.acquire(i)
    elif plan.keeps_all:
        plgpu.wait_smem_to_gmem(plan.pieces + 1, wait_read_only=True)  # State and e in this stage have left.
    if plan.output_wgs or plan.keeps_all:
        for p, piece in enumerate(s):
            shared.s[_device.rem(i, STATE_STAGES), wg, p] = piece


def _compute_outputs(shared: Shared, wg: Index, o_gmem: Ref):
    """Output warpgroup `wg`: o of every chunk, or of every second one."""
    plan, part = shared.plan, shared.part
    row, col = _device.indices()

    def compute_chunk(i):
        stage = shared.chunks.wait(i)
        queries = [shared.q.tiled.at[stage, p] for p in range(plan.pieces)]
        keys = [shared.k.tiled.at[stage, p].T for p in range(plan.pieces)]
        # w = tril(exp(cum[t] - cum[j]) q kᵀ beta[j])
        w = product(list(zip(queries, keys, strict=True)), plan.interpreted)
        cum = spread(load(shared.row_cum.at[stage], ROWS), 0)
        decay = jnp.exp(cum - spread(load(shared.col_cum.at[stage], COLUMNS), 1))  # May be infinite where w is zero.
        w = w * decay * spread(load(shared.beta.at[stage], COLUMNS), 1)
        w = jnp.where(row >= col, w, 0.0).astype(plan.dtype)
        state_stage = shared.states.wait(i)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        o_tiles = [wg * plan.state_wgs + j for j in range(plan.state_wgs)]
        for j, tile in enumerate(o_tiles):
            # o = scale (exp(cum) q sᵀ + w e)
            states = [shared.s.at[state_stage, j, p].T for p in range(plan.pieces)]
            o = product(list(zip(queries, states, strict=True)), plan.interpreted)
            o = product([(w, shared.e.at[state_stage, j].T)], plan.interpreted, o * jnp.exp(cum))
            shared.o.tiled[tile] = (o * plan.scale).astype(plan.dtype)
        shared.chunks.release(i)
        shared.states.release(i)
        plgpu.commit_smem()
        for j, tile in enumerate(o_tiles):
            store_rows(part, shared.o, tile, o_gmem, shared.unit, j, part.row(i))

    def skip_chunk(i):
        shared.chunks.wait(i)
        shared.chunks.release(i)

    @pl.loop(0, _device.div(part.num_chunks + (plan.output_wgs - 1), plan.output_wgs))
    def _(turn):
        mine = turn * plan.output_wgs + wg
        if plan.output_wgs == 2:
            other = mine + 1 - 2 * wg
            pl.when(other < part.num_chunks)(lambda: skip_chunk(other))
        pl.when(mine < part.num_chunks)(lambda: compute_chunk(mine))

    plgpu.wait_smem_to_gmem(0)


def launch(plan: ForwardPlan, table, q, k, v, inverse, cum, beta, initial, params):
    """The kernel's results: with output warpgroups the states after all parts that are no padding, and o; if it
    `keeps_all` the states before all chunks, (chunks, slices, 64, N), and eᵀ, (chunks, slices, 64, 64), in the dtype of
    the operands; otherwise the states after all parts. `initial` None stands for zeros."""
    sequences, state = plan.sequences, (plan.value_slices, PIECE, plan.pieces * PIECE)
    units, rows = plan.value_slices // plan.state_wgs, len(k)
    of_units = lambda x: x.reshape(rows, units, PIECE * plan.state_wgs)
    num_states = sequences.num_parts if sequences.part_rows else sequences.num_seqs
    out_type = [jax.ShapeDtypeStruct((num_states, *state), jnp.float32)]
    if plan.output_wgs:
        out_type.append(jax.ShapeDtypeStruct((rows, units, PIECE * plan.state_wgs), plan.dtype))
    if plan.keeps_all:
        lead = sequences.num_chunks, plan.value_slices
        out_type = [jax.ShapeDtypeStruct((*lead, PIECE, size), plan.dtype) for size in (state[-1], CHUNK)]
    v = None if v is None else of_units(v)
    # cum is passed twice: one ref cannot have two layouts.
    gmem = dict(q=q, k=k, v=v, inverse=inverse, beta=beta, col_cum=cum, row_cum=cum)
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
    return [results[0], results[1].reshape(rows, plan.value_slices, PIECE)] if plan.output_wgs else results

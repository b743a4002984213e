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
from ..core import COLUMNS, PIECE, ROWS, Loader, Operand, Part, Tiles, first_state, store_rows, store_state
from .kernel_state import CUM, DT, Plan, StateRole

SQUARE = PIECE, PIECE
REGISTERS = {2: (56, 224), 3: (56, 152)}  # A thread of the memory and of the other warpgroups, by how many these are.


def _scratch(plan: Plan) -> dict:
    barriers = lambda num, arrivals=1: plgpu.Barrier(num_arrivals=arrivals, num_barriers=num)
    outputs = plan.chunk // PIECE
    copies = 2 + 1 + 2 * plan.pieces
    return dict(
        x_smem=plan.tiles(plan.num_stages, 1),
        b_smem=plan.tiles(plan.num_stages, plan.pieces),
        c_smem=plan.tiles(plan.num_stages, plan.pieces),
        rows_smem=plan.vectors(),  # The vectors twice: JAX finds no layout for one buffer read along rows and columns.
        columns_smem=plan.vectors(),
        state_smem=plan.tiles(plan.num_states, plan.pieces, rows=PIECE),
        scaled_smem=plan.tiles(),
        y_smem=plan.tiles(outputs, rows=PIECE),
        filled=barriers(plan.num_stages, copies),
        freed=barriers(plan.num_stages, 1 + outputs),
        landed=barriers(1, copies),
        left=barriers(plan.num_states),
        taken=barriers(plan.num_states, outputs),
    )


def _kernel(
    table, x_gmem, b_gmem, c_gmem, vectors_gmem, d_gmem, initial_gmem, y_gmem, *finals_gmem, plan: Plan, scale: float,
    x_smem, b_smem, c_smem, rows_smem, columns_smem, state_smem, scaled_smem, y_smem, filled, freed, landed, left,
    taken,
):  # fmt: skip
    role, head, part = lax.axis_index("role"), lax.axis_index("head_index"), Part.of_block(table, plan.chunk)
    x, b, c, state, scaled, y = (
        Tiles.views(smem, plan.interpreted) for smem in (x_smem, b_smem, c_smem, state_smem, scaled_smem, y_smem)
    )
    outputs = plan.chunk // PIECE
    memory_registers, compute_registers = REGISTERS[1 + outputs]
    ring, states = part.ring(filled, freed, plan.num_stages), part.ring(left, taken, plan.num_states)

    @pl.when(role == outputs + 1)
    def _():
        plgpu.set_max_registers(memory_registers, action="decrease")
        group = plan.group(head)
        wide = Operand(b_gmem, b, group, plan.pieces), Operand(c_gmem, c, group, plan.pieces)

        def copy_vectors(chunk, slot, barrier):
            for smem in (rows_smem, columns_smem):
                plgpu.copy_gmem_to_smem(vectors_gmem.at[plan.dt_head(head), chunk], smem.at[slot], barrier)

        operands, is_ragged = (Operand(x_gmem, x, head, 1), *wide), plan.sequences.is_ragged
        Loader(ring, landed, operands, copy_vectors, 2, is_ragged, plan.interpreted).run(part)

    @pl.when(role == outputs)
    def _():
        plgpu.set_max_registers(compute_registers, action="increase")
        first = first_state(initial_gmem, (part.state, head), plan.pieces)

        def leave(i, values):
            slot = states.fill(i)
            for p, piece in enumerate(values):
                state.tiled[slot, p] = piece.astype(plan.dtype)
            plgpu.commit_smem()
            plgpu.barrier_arrive(left.at[slot])

        last = StateRole(plan, ring, x, b, rows_smem, scaled).run(part.num_chunks, first, leave)
        states.drain(part.num_chunks)
        for final_gmem in finals_gmem:
            store_state(final_gmem, (part.state, head), last)

    output = OutputRole(plan, scale, ring, states, x, b, c, rows_smem, columns_smem, state, y)
    for block in range(outputs):

        @pl.when(role == block)
        def _(block=block):
            plgpu.set_max_registers(compute_registers, action="increase")
            skip = None if d_gmem is None else d_gmem[plan.dt_head(head)].astype(jnp.float32)
            output.run(part, y_gmem, head, skip, block)


@dataclasses.dataclass(frozen=True)
class OutputRole:
    """A warpgroup that computes y of 64 rows of each chunk."""

    plan: Plan
    scale: float
    ring: _device.Ring
    states: _device.Ring
    x: Tiles
    b: Tiles
    c: Tiles
    rows: object  # `CUM` and `DT`, to be read along rows, and along columns.
    columns: object
    state: Tiles
    y: Tiles

    def run(self, part: Part, y_gmem, head, skip, block: int):
        """The `block`-th 64 rows of all chunks of a part."""

        @pl.loop(0, part.num_chunks)
        def _(i):
            values = self.chunk(i, skip, block).astype(self.plan.dtype)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # The rows of the chunk before have left.
            self.y.tiled[block] = values
            plgpu.commit_smem()
            # `skip` read x as other loads do, not as WGMMA does: before the fence they may still wait for the WGMMAs of
            # the state's warpgroup, longer than TMA takes to overwrite what they read.
            self.ring.free(i)
            row = part.row(i) + block * PIECE
            store_rows(
                self.y, block, y_gmem, head, 0, row, part.stop_row - row, is_ragged=self.plan.sequences.is_ragged,
                interpreted=self.plan.interpreted,
            )  # fmt: skip

        plgpu.wait_smem_to_gmem(0)

    def chunk(self, i, skip, block: int):
        """y in float32 of 64 rows, the `block`-th ones; `skip` times x is added unless it is None."""
        slot, rows, pieces = self.ring.wait(i), pl.ds(block * PIECE, PIECE), range(self.plan.pieces)
        cum = plgpu.load(self.rows.at[slot, CUM, rows], layout=ROWS, optimized=False)

        def products(pairs_ref, y_ref):
            self.add_pairs(pairs_ref, slot, rows, 0)
            state = self.states.wait(i)
            for p in pieces:
                plgpu.wgmma(y_ref, self.c.tiled.at[slot, p, rows], self.state.tiled.at[state, p].T)
            weights = self.wait(pairs_ref, len(pieces)) * self.decay(slot, cum, 0, is_last=block == 0)
            y = self.wait(y_ref, 0) * lax.broadcast_in_dim(jnp.exp2(cum) * self.scale, SQUARE, [0])
            self.states.free(i)
            return self.add_values(y_ref, y, weights, slot, 0)

        def more_products(pairs_ref, y_ref, y, column: int):
            self.add_pairs(pairs_ref, slot, rows, column)
            weights = self.wait(pairs_ref, 0) * self.decay(slot, cum, column, is_last=column == block)
            return self.add_values(y_ref, y, weights, slot, column)

        accs = [plgpu.ACC(SQUARE, jnp.float32)] * 2
        y = pl.run_scoped(products, *accs)
        for column in range(1, block + 1):
            y = pl.run_scoped(functools.partial(more_products, y=y, column=column), *accs)
        if skip is not None:
            x = plgpu.load(self.x.tiled.at[slot, 0, rows], layout=plgpu.Layout.WGMMA)
            y = y + skip * x.astype(jnp.float32)
        return y

    def wait(self, ref, wait_n: int):
        return ref[...] if self.plan.interpreted else plgpu.wgmma_accumulator_load(ref, wait_n=wait_n)

    def add_pairs(self, acc, slot, rows, column: int):
        """`acc` + c bᵀ of `rows` and of the `column`-th 64 rows."""
        for p in range(self.plan.pieces):
            b = self.b.tiled.at[slot, p, pl.ds(column * PIECE, PIECE)]
            plgpu.wgmma(acc, self.c.tiled.at[slot, p, rows], b.T)

    def add_values(self, y_ref, y, weights, slot, column: int):
        """`y` + `weights` x of the `column`-th 64 rows."""
        weights, x = weights.astype(self.plan.dtype), self.x.tiled.at[slot, 0, pl.ds(column * PIECE, PIECE)]
        if self.plan.interpreted:
            return y + jnp.dot(weights, x[...], preferred_element_type=jnp.float32)
        y_ref[...] = y
        plgpu.wgmma(y_ref, weights, x)
        return y_ref[...]

    def decay(self, slot, cum, column: int, is_last: bool):
        """exp(cum[t] - cum[s]) dt[s] for rows t and the `column`-th 64 rows s, if `is_last` for s up to t alone."""
        columns = pl.ds(column * PIECE, PIECE)
        load = lambda i: plgpu.load(self.columns.at[slot, i, columns], layout=COLUMNS, optimized=False)
        spread = lambda values, dim: lax.broadcast_in_dim(values, SQUARE, [dim])
        exponent = spread(cum, 0) - spread(load(CUM), 1)
        if is_last:
            t, s = (plgpu.broadcasted_iota(jnp.int32, SQUARE, dim, layout=plgpu.Layout.WGMMA) for dim in (0, 1))
            exponent = jnp.where(s <= t, exponent, -jnp.inf)
        return jnp.exp2(exponent) * spread(load(DT) * self.scale, 1)


def outputs(plan: Plan, scale: float, table, x, b, c, vectors, d, starts, params):
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
        scratch_types=_scratch(plan),
        compiler_params=params,
    )(table, x, b, c, vectors, d, starts)

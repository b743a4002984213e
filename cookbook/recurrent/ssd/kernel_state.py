# SPDX-License-Identifier: Apache-2.0
"""The state of SSD, chunk after chunk: a warpgroup that the forward and the backward kernel have, and a kernel of it.

    S = exp(cum[last]) S + sum over the chunk's rows t of w[t] x[t] b[t]ᵀ    S (64, N), a row for each value of x

w[t] = exp(cum[last] - cum[t]) dt[t], where cum is the sum of dt a up to t within the chunk. In `reverse` it is the
gradient of the state that goes from chunk to chunk, the last one first, with w[t] = exp(cum[t]), and dy and c in the
places of x and b.

The state is float32 and stays in registers. One operand of the tensor cores is w x, rounded, in shared memory.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ... import _device, _host
from .. import core
from ..core import PIECE, ROWS, Loader, Operand, Part, Sequences, Tiles

STATES_BYTES = 160_000  # Shared memory of a block that makes states alone, for its ring.
CUM, DT = range(2)  # The vectors of a chunk: sums of dt a in units of log 2, and dt.


@dataclasses.dataclass(frozen=True)
class Plan:
    """Statics of all kernels of SSD. Heads have 64 values: one of 128 is two, which share a, dt, b and c."""

    sequences: Sequences
    num_heads: int
    num_groups: int  # Heads of b and c.
    heads_per_dt: int
    pieces: int  # Pieces of a row of b and c, 128 bytes each.
    dtype: jnp.dtype
    num_stages: int
    num_states: int  # Slots for the states that the state's warpgroup has left for the others.
    interpreted: bool

    @property
    def chunk(self) -> int:
        return self.sequences.chunk

    @property
    def state_shape(self) -> tuple[int, ...]:
        """States of all parts."""
        return self.sequences.num_parts, self.num_heads, PIECE, self.pieces * PIECE

    def group(self, head):
        """The head of b and c that belongs to `head`."""
        return _device.div(head, self.num_heads // self.num_groups)

    def dt_head(self, head):
        return _device.div(head, self.heads_per_dt)

    def tiles(self, *lead: int, rows: int | None = None):
        return core.row_tiles((*lead, rows or self.chunk, PIECE), self.dtype, self.interpreted)

    def vectors(self):
        return plgpu.SMEM((self.num_stages, 2, self.chunk), jnp.float32)


@dataclasses.dataclass(frozen=True)
class StateRole:
    """A warpgroup that takes the state from chunk to chunk."""

    plan: Plan
    ring: _device.Ring
    x: Tiles  # In the ring.
    b: Tiles
    vectors: object  # In the ring: `CUM` and `DT` of the rows.
    scaled: Tiles  # Room for w x.
    reverse: bool = False
    look: object = None  # Called with the number of a chunk, its slot, the state before it, and its decay.

    def weights(self, slot):
        """(w, decay of the whole chunk)."""
        load = lambda i: plgpu.load(self.vectors.at[slot, i], layout=ROWS, optimized=False)
        last = self.vectors[slot, CUM, self.plan.chunk - 1]
        if self.reverse:
            return jnp.exp2(load(CUM)), jnp.exp2(last)
        return jnp.exp2(last - load(CUM)) * load(DT), jnp.exp2(last)

    def run(self, num_chunks, state, leave):
        """The state after `num_chunks`. `leave(i, state)` is called before each of them with what it starts from."""

        def step(i, state):
            leave(i, state)
            slot = self.ring.wait(i)
            w, decay = self.weights(slot)
            if self.look is not None:
                self.look(i, slot, state, decay)
            x = plgpu.load(self.x.tiled.at[slot, 0], layout=plgpu.Layout.WGMMA).astype(jnp.float32)
            x = x * lax.broadcast_in_dim(w, x.shape, [0])
            self.scaled.tiled[...] = x.astype(self.plan.dtype)
            plgpu.commit_smem()
            state = self.add([piece * decay for piece in state], slot)
            self.ring.free(i)
            return state

        return lax.fori_loop(0, num_chunks, step, state)

    def add(self, state, slot):
        """`state` + (w x)ᵀ b."""
        pieces = range(self.plan.pieces)
        if self.plan.interpreted:
            x = self.scaled.tiled[...].T
            product = lambda p: jnp.dot(x, self.b.tiled[slot, p], preferred_element_type=jnp.float32)
            state = [piece + product(p) for p, piece in zip(pieces, state, strict=True)]
            plgpu.commit_smem()  # TMA may now overwrite what was read here.
            return state

        def products(*accs):
            for acc, piece in zip(accs, state, strict=True):
                acc[...] = piece
            for p, acc in zip(pieces, accs, strict=True):
                plgpu.wgmma(acc, self.scaled.tiled.T, self.b.tiled.at[slot, p])
            return [acc[...] for acc in accs]

        return pl.run_scoped(products, *[plgpu.ACC((PIECE, PIECE), jnp.float32) for _ in pieces])


def _kernel(
    table, x_gmem, b_gmem, vectors_gmem, initial_gmem, out_gmem, *, plan: Plan, reverse: bool, keeps_all: bool, x_smem,
    b_smem, vectors_smem, scaled_smem, filled, freed, landed, state_smem=None,
):  # fmt: skip
    role, head, part = lax.axis_index("role"), lax.axis_index("head_index"), Part.of_block(table, plan.chunk)
    x, b, scaled = (Tiles.views(smem, plan.interpreted) for smem in (x_smem, b_smem, scaled_smem))
    ring = part.ring(filled, freed, plan.num_stages)

    @pl.when(role == 1)
    def _():
        def copy_vectors(chunk, slot, barrier):
            plgpu.copy_gmem_to_smem(vectors_gmem.at[plan.dt_head(head), chunk], vectors_smem.at[slot], barrier)

        operands = Operand(x_gmem, x, head, 1), Operand(b_gmem, b, plan.group(head), plan.pieces)
        Loader(ring, landed, operands, copy_vectors, 1, plan.sequences.is_ragged, plan.interpreted).run(part, reverse)

    @pl.when(role == 0)
    def _():
        def leave(i, values):
            if not keeps_all:
                return
            state = Tiles.views(state_smem, plan.interpreted)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # The state before has left.
            for p, piece in enumerate(values):
                state.tiled[p] = piece.astype(plan.dtype)
            plgpu.commit_smem()
            for p in range(plan.pieces):
                target = out_gmem.at[part.first_chunk + i, head, :, pl.ds(p * PIECE, PIECE)]
                plgpu.copy_smem_to_gmem(state.rows.at[p], target)

        first = core.first_state(initial_gmem, (part.state, head), plan.pieces)
        last = StateRole(plan, ring, x, b, vectors_smem, scaled, reverse).run(part.num_chunks, first, leave)
        if not keeps_all:
            core.store_state(out_gmem, (part.state, head), last)
        plgpu.wait_smem_to_gmem(0)


def states(plan: Plan, table, x, b, vectors, initial, params, *, reverse: bool = False, keeps_all: bool = False):
    """The state after each part, (num_parts, H, 64, N) in float32; or if it `keeps_all` the one before each chunk,
    (num_chunks, H, 64, N) in the operands' dtype. Parts start from `initial` (num_parts, H, 64, N), None for zeros.
    """
    barriers = lambda num, arrivals=1: plgpu.Barrier(num_arrivals=arrivals, num_barriers=num)
    stage = 2 * plan.chunk * PIECE * (1 + plan.pieces)
    plan = dataclasses.replace(plan, num_stages=min(6, STATES_BYTES // stage))
    scratch = dict(
        x_smem=plan.tiles(plan.num_stages, 1),
        b_smem=plan.tiles(plan.num_stages, plan.pieces),
        vectors_smem=plan.vectors(),
        scaled_smem=plan.tiles(),
        filled=barriers(plan.num_stages, 2 + plan.pieces),
        freed=barriers(plan.num_stages),
        landed=barriers(1, 2 + plan.pieces),
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

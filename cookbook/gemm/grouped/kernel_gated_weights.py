# SPDX-License-Identifier: Apache-2.0
"""SwiGLU in the epilogue of a grouped product with weights of 4 bits: the gate's columns, then the up product's.

    o = act(gate) * up,    gate = a @ w[:, :N] + bias[:N],    up = a @ w[:, N:] + bias[N:]

A tile of weights takes half of its columns from the gate, and the other half N columns further. So half of the compute
warpgroups have sums of the gate, and the others those of the up product for the same values of o. The two of a pair
hand over their sums through shared memory and finish them in turn, piece after piece. Who writes a piece has read the
one before, so nobody waits for room.

Barriers, beside those of `gemm/kernel.py`, two for each pair of warpgroups:

    barrier        arrivals              who waits
    handed[turn]   who hands over        the other, before it reads the piece; who does what alternates with the turn
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ... import _device
from ..kernel import slot_of_piece, target_of_piece
from ..operand import Ring
from ..plan import Plan, slots_of_ring
from .kernel import send_rows
from .kernel_int8_weights import run
from .plan import Tile

ALPHA = 1.702  # gpt-oss's SwiGLU has gate * sigmoid(ALPHA * gate).


def gate_of(limit: float | None):
    """The function of a gate and an up product: silu(gate) * up, or gpt-oss's with both cut at the limit."""

    def clamped(gate, up):
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
        return gate * jax.nn.sigmoid(ALPHA * gate) * (up + 1)

    return (lambda gate, up: jax.nn.silu(gate) * up) if limit is None else clamped


def gated(plan: Plan, columns: int) -> Plan:
    """`plan`, of a product with twice as many `columns`, for values of o of so many."""
    plan, pairs = dataclasses.replace(plan, gated=columns), plan.config.warpgroups // 2
    exchange = dict(
        handed_smem=plgpu.SMEM((pairs, *plan.store_piece), jnp.float32),
        handed=plgpu.Barrier(num_barriers=2 * pairs),
    )
    more = _device.smem_bytes(exchange)
    slots = slots_of_ring(plan.config, lambda count: plan.smem_bytes(count) + more)
    config = dataclasses.replace(plan.config, num_stages=plan.config.num_stages or 1 << slots.bit_length() - 1)
    return dataclasses.replace(
        plan,
        tiles=dataclasses.replace(plan.tiles, config=config),
        others=(*plan.others, *exchange.items()),
    )


def copy_step(plan: Plan, ring: Ring, slot, weights, lhs_gmem, row, col, k):
    """As `copy_step` of `dense/kernel_int8_weights.py`, of weights whose columns are (2, N)."""
    (w_gmem, *of_groups), filled, num = weights, ring.filled.at[slot], plan.config.tile_m // 2
    plan.b.copy(lhs_gmem, plan.b.at(col, k), ring.b_tma.at[slot], filled, shared=plan.axis_m)
    row = _device.div(row, 2)
    columns, (blocks, runs, _) = pl.ds(row, num), plan.a.tile
    block, run = plan.a.at(row, k)
    words = w_gmem.at[:, pl.ds(block, blocks // 2), pl.ds(run, runs)]
    copy_halves(plan, words, ring.a_tma.at[slot], filled, 0, plan.axis_n)
    for gmem, smem, (_, _, size) in zip(of_groups, ring.of_groups, plan.of_groups, strict=True):
        groups = pl.ds(_device.div(k, size), smem.shape[1])
        copy_halves(plan, gmem.at[groups, :, columns], smem.at[slot], filled, 1)


def copy_halves(plan: Plan, source, target, filled, axis: int, shared: str | None = None):
    """Starts to copy both halves, `axis` of the source; the interpreter, which reshapes no Ref, one after the other."""
    if not plan.interpreted:
        plgpu.copy_gmem_to_smem(source, target.reshape(source.shape), filled, collective_axes=shared)
        return
    num, before = source.shape[axis + 1], (slice(None),) * axis
    for i in range(2):
        half = target.at[(*before, pl.ds(i * num, num))]
        plgpu.copy_gmem_to_smem(source.at[(*before, i)], half, filled, collective_axes=shared)


def store(plan: Plan, tile: Tile, number, o_gmem, o_smem, values, *, limit, handed_smem, handed):
    """As `store` of `grouped/kernel.py`; `values` are the gate's or the up product's."""
    (height, width), role, pairs = plan.store_piece, lax.axis_index("role"), plan.config.warpgroups // 2
    pair, is_gate = _device.rem(role, pairs), role < pairs
    row, col, left = _device.div(tile.row, 2) + pair * plan.compute_tile[0], tile.col, tile.end - tile.col
    for count, (i, j) in enumerate(plan.store_pieces):
        piece, before = values[i : i + height, j : j + width], number * len(plan.store_pieces) + count
        turn = _device.rem(before, 2)
        barrier, finishes = handed.at[2 * pair + turn], is_gate == (turn == 0)

        @pl.when(~finishes)
        def _(piece=piece, barrier=barrier):
            _device.store(handed_smem.at[pair], piece)
            plgpu.barrier_arrive(barrier)

        @pl.when(finishes)
        def _(piece=piece, barrier=barrier, before=before, i=i, j=j):
            plgpu.barrier_wait(barrier)
            other, gate = _device.load(handed_smem.at[pair]), gate_of(limit)
            out = lax.cond(is_gate, lambda: gate(piece, other), lambda: gate(other, piece)).astype(plan.out_dtype)
            piece_smem, piece_tma = slot_of_piece(plan, o_smem, role, _device.div(before, 2))
            piece_smem[...] = plgpu.layout_cast(out, plgpu.Layout.WGMMA_TRANSPOSED)
            plgpu.commit_smem()  # All threads have read the other's piece by then.
            send_rows(piece_tma, target_of_piece(plan, o_gmem, row + i, col + j), left - j)


def kernel(w_gmem, lhs_gmem, table, bias, o_gmem, *, plan: Plan, limit, handed_smem, handed, **scratch):
    """The kernel of grouped products with weights of 4 bits and SwiGLU."""
    store_tile = functools.partial(store, limit=limit, handed_smem=handed_smem, handed=handed)
    run(w_gmem, lhs_gmem, table, None, bias, o_gmem, plan, **scratch, copy=copy_step, store=store_tile)


@functools.cache
def kernel_with(limit: float | None):
    """`kernel`, with gpt-oss's SwiGLU if it has a limit: the same object each time, as `jax.jit` wants it."""
    return functools.partial(kernel, limit=limit)

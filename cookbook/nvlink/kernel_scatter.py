# SPDX-License-Identifier: Apache-2.0
"""The kernel of `reduce_scatter`.

| warpgroup | does |
|---|---|
| 0, loads | loads a piece of each device's x, its own too, into a slot of a ring in shared memory |
| 1 and 2, add | add the pieces in the devices' order and store the sum: each takes every other part of the slot |

| barrier | arrives | count | waits |
|---|---|---|---|
| filled[slot] | TMA: the pieces of a round are in shared memory | n | warpgroups 1 and 2 |
| freed[slot] | warpgroups 1 and 2: the pieces are added | 2 | warpgroup 0, before it fills the slot again |
| read (semaphore) | each peer's block of this number: it has read all that it adds | n - 1 | the end of warpgroup 0 |
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .. import _device, _host
from . import core, protocol
from .core import Config

LOADED_BYTES = 16_384  # Addends that an adding warpgroup has in its registers at a time: 32 of them per thread.
LOADS, ADDERS = 0, 2  # The warpgroup that loads, and the number of those after it, which add.


def default_config() -> Config:
    """The same for all shapes: short rounds, many of them in flight."""
    return Config(stage_bytes=32_768, num_stages=6)


def scatter_shards(shards, axis_name, config: Config):
    """This device's matrix of the sum of all devices' (n, rows, WIDTH)."""
    n, rows, _ = shards.shape
    plan = core.plan(n, rows, shards.dtype, config, pieces_a_stage=n)
    run = _host.kernel(
        functools.partial(kernel, plan, axis_name),
        out_type=jax.ShapeDtypeStruct(shards.shape[1:], shards.dtype),
        grid=(plan.num_blocks,),
        grid_names=("block",),
        num_threads=1 + ADDERS,
        thread_name="wg",
        scratch_types=dict(
            stages=plgpu.SMEM((config.num_stages, n, plan.piece_rows, core.WIDTH), shards.dtype),
            filled=plgpu.Barrier(num_arrivals=n, num_barriers=config.num_stages),
            freed=plgpu.Barrier(num_arrivals=ADDERS, num_barriers=config.num_stages),
            read=plgpu.SemaphoreType.REGULAR,
        ),
        compiler_params=_host.compiler_params(),
    )
    return run(shards)


def kernel(plan, axis_name, x_gmem, o_gmem, *, stages, filled, freed, read):
    ring, wg = _device.Ring(filled, freed, stages.shape[0]), lax.axis_index("wg")
    _device.role(wg == LOADS)(lambda: load_pieces(plan, axis_name, ring, x_gmem, stages, read))
    _device.role(wg > LOADS)(lambda: add_pieces(plan, ring, stages, o_gmem))


def load_pieces(plan, axis_name, ring, x_gmem, stages, read):
    d, block, roles = lax.axis_index(axis_name), lax.axis_index("block"), protocol.ReduceScatter(plan.n)
    num_rounds = plan.num_rounds(block)

    @pl.loop(0, num_rounds)
    def _(i):
        slot = ring.acquire(i)

        def load(action, device_id):
            owner, i = action.source
            piece = plgpu.remote_ref(x_gmem, device_id).at[owner, plan.piece(block, i)]
            core.load_bytes(piece, stages.at[slot, action.peer], ring.filled.at[slot])

        core.perform(roles.load(d, i), axis_name, {}, load)

    ring.drain(num_rounds)
    core.perform(roles.end(d), axis_name, dict(read=read))


def add_pieces(plan, ring, stages, o_gmem):
    block, wg, dtype = lax.axis_index("block"), lax.axis_index("wg"), o_gmem.dtype
    rows = _rows_at_once(plan, dtype)
    layout = plgpu.Layout.WG_STRIDED((rows, core.WIDTH), 16 // dtype.itemsize)
    first, parts = wg - LOADS - 1, plan.piece_rows // rows

    @pl.loop(0, plan.num_rounds(block))
    def _(i):
        slot, start = ring.wait(i), plan.piece(block, i).start

        @pl.loop(0, _device.div(parts - first + ADDERS - 1, ADDERS))
        def _(k):
            row = (first + k * ADDERS) * rows
            load = lambda q: plgpu.load(stages.at[slot, q, pl.ds(row, rows)], layout=layout, optimized=False)
            total = functools.reduce(jnp.add, [load(q).astype(jnp.float32) for q in range(plan.n)])
            o_gmem[pl.ds(start + row, rows)] = total.astype(dtype)

        plgpu.commit_smem()  # TMA may now overwrite the pieces that were read here.
        ring.release(i)


def _rows_at_once(plan, dtype) -> int:
    """Rows of a piece that are added at once: the most that fit into registers and divide the piece."""
    most = LOADED_BYTES // (plan.n * core.WIDTH * dtype.itemsize)
    fits = range(core.ROW_MULTIPLE, plan.piece_rows + 1, core.ROW_MULTIPLE)
    return max(rows for rows in fits if plan.piece_rows % rows == 0 and rows <= max(most, core.ROW_MULTIPLE))

"""Reduce-scatter over NVLink: every device pushes to each owner what it adds to the owner's shard.

    reduce_scatter(x, axis_name)    x: (n rows, ...), float32, bfloat16 or float16    ->    (rows, ...)

It returns what `jax.lax.psum_scatter(x, axis_name, tiled=True)` returns, inside `jax.shard_map`, on 2 to 8 GPUs of one
host, on a mesh of one axis or several. The sum is taken in float32, in the order of the devices, and rounded once: it
is equal to the bit in every run, and does not depend on the device that owns it.

| warpgroup | does |
|---|---|
| 0, sends | loads a piece for each owner into shared memory and stores it into a slot of the owner's buffer |
| 1, adds | waits for a piece of each device, adds them in order, stores the sum, frees the slots |

| barrier | arrives | count | waits |
|---|---|---|---|
| filled[stage] | TMA: the pieces of a round are in shared memory | 1 | warpgroup 0 |
| arrived[q] (semaphore) | device q, warpgroup 0: a piece has arrived | 1 | warpgroup 1 |
| freed[p] (semaphore) | device p, warpgroup 1: a slot of this device is read | 1 | warpgroup 0 |

Blocks of the same number talk to each other. The buffer is small enough to stay in the L2 cache. A device sends to
itself too, so that all addends come from one place. NVLink bounds the speed: n - 1 shards go out, and as many come in.

Not supported: other axes than the leading one; several hosts; a derivative. Shards of no multiple of 1024 values are
copied once to pad them.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .. import _mgpu
from . import core, protocol
from .core import Config

LOADED_BYTES = 32_768  # Addends that the adding warpgroup has in its registers at a time: 64 of them a thread.
SENDS, ADDS = range(2)  # Warpgroups.


def reduce_scatter_reference(x, axis_name):
    return lax.psum_scatter(x.astype(jnp.float32), axis_name, tiled=True).astype(x.dtype)


def default_config() -> Config:
    """The same for all shapes: it has not been searched."""
    return Config()


def reduce_scatter(x, axis_name, *, config: Config | None = None):
    """This device's shard of the sum of all devices' arrays.

    Args:
      x: what this device adds. The leading axis is shared out, in the order of the devices.
      axis_name: a name of a mesh axis of `jax.shard_map`, or a tuple of names.
      config: how many SMs it uses, and how.

    Raises:
      ValueError: a dtype, a shape or an axis that is not supported; the message says what to do.
      RuntimeError: there is no GPU and none to compile for.
    """
    x, n = core.require_shards("reduce_scatter", x, axis_name)
    if x.shape[0] % n:
        raise ValueError(
            f"cookbook.reduce_scatter: {x.shape=}; the leading axis must be a multiple of the {n} devices on "
            f"{axis_name=}: pad it to {-(-x.shape[0] // n) * n} (jnp.pad)"
        )
    core.require_gpus("reduce_scatter", n)
    if n == 1 or x.size == 0:
        return reduce_scatter_reference(x, axis_name)
    shards = core.as_matrices(x, n)
    config = config or default_config()
    plan = core.plan(n, shards.shape[1], x.dtype, config, pieces_a_stage=n)
    piece = (plan.piece_rows, core.WIDTH)
    kernel = _mgpu.kernel(
        functools.partial(_kernel, plan, axis_name, config),
        out_type=(
            jax.ShapeDtypeStruct(shards.shape[1:], x.dtype),
            jax.ShapeDtypeStruct((plan.num_blocks, n, config.num_slots, *piece), x.dtype),
        ),
        grid=(plan.num_blocks,),
        grid_names=("block",),
        num_threads=2,
        thread_name="wg",
        scratch_types=dict(
            stages=plgpu.SMEM((config.num_stages, n, *piece), x.dtype),
            filled=plgpu.Barrier(num_barriers=config.num_stages),
            arrived=plgpu.SemaphoreType.REGULAR((n,)),
            freed=plgpu.SemaphoreType.REGULAR((n,)),
        ),
        compiler_params=_mgpu.compiler_params(),
    )
    out, _ = kernel(shards)
    return core.from_matrices(out[None], (x.shape[0] // n, *x.shape[1:]))


def _kernel(plan, axis_name, config, x_gmem, o_gmem, slots_gmem, *, stages, filled, arrived, freed):
    roles = protocol.ReduceScatter(plan.n, config.num_slots)
    semaphores, wg = dict(arrived=arrived, freed=freed), lax.axis_index("wg")
    slots_gmem = slots_gmem.at[lax.axis_index("block")]
    pl.when(wg == SENDS)(lambda: _send(plan, roles, axis_name, x_gmem, slots_gmem, stages, filled, semaphores))
    pl.when(wg == ADDS)(lambda: _add(plan, roles, axis_name, slots_gmem, o_gmem, semaphores))


def _send(plan, roles, axis_name, x_gmem, slots_gmem, stages, filled, semaphores):
    d, block = lax.axis_index(axis_name), lax.axis_index("block")
    num_stages, num_rounds = stages.shape[0], plan.num_rounds(block)

    def load(i):
        stage = _mgpu.rem(i, num_stages)
        plgpu.copy_gmem_to_smem(x_gmem.at[:, plan.piece(block, i)], stages.at[stage], filled.at[stage])

    def store(stage, action, device_id):
        plgpu.copy_smem_to_gmem(stages.at[stage, action.peer], plgpu.remote_ref(slots_gmem, device_id).at[action.slot])

    def one_round(i):
        stage = _mgpu.rem(i, num_stages)
        plgpu.barrier_wait(filled.at[stage])
        core.perform(roles.send(d, i), axis_name, semaphores, functools.partial(store, stage))
        plgpu.wait_smem_to_gmem(plan.n, wait_read_only=True)  # The stage of the round before is free.
        pl.when(i + num_stages - 1 < num_rounds)(lambda: load(i + num_stages - 1))

    for i in range(num_stages - 1):
        pl.when(i < num_rounds)(functools.partial(load, i))
    pl.loop(0, num_rounds)(one_round)
    core.perform(roles.end_send(d, num_rounds), axis_name, semaphores)


def _add(plan, roles, axis_name, slots_gmem, o_gmem, semaphores):
    d, block = lax.axis_index(axis_name), lax.axis_index("block")
    num_rounds, dtype = plan.num_rounds(block), o_gmem.dtype
    rows = _rows_at_once(plan, dtype)
    layout = plgpu.Layout.WG_STRIDED((rows, core.WIDTH), 16 // dtype.itemsize)

    def one_round(i):
        actions = roles.add(d, i, num_rounds)
        is_read = [isinstance(action, protocol.Read) for action in actions]
        first, last = is_read.index(True), len(is_read) - is_read[::-1].index(True)
        core.perform(actions[:first], axis_name, semaphores)
        start = plan.piece(block, i).start

        @pl.loop(0, plan.piece_rows // rows)
        def _(part):
            load = lambda slot: slots_gmem.at[slot].at[pl.ds(part * rows, rows)]
            addends = [plgpu.load(load(a.slot), layout=layout, optimized=False) for a in actions[first:last]]
            total = functools.reduce(
                lambda a, b: a + b.astype(jnp.float32), addends[1:], addends[0].astype(jnp.float32)
            )
            o_gmem[pl.ds(start + part * rows, rows)] = total.astype(dtype)

        core.perform(actions[last:], axis_name, semaphores)

    pl.loop(0, num_rounds)(one_round)


def _rows_at_once(plan, dtype) -> int:
    """Rows of a piece that are added at once: the most that fit into registers and divide the piece."""
    most = LOADED_BYTES // (plan.n * core.WIDTH * dtype.itemsize)
    fits = range(core.ROW_MULTIPLE, plan.piece_rows + 1, core.ROW_MULTIPLE)
    return max(rows for rows in fits if plan.piece_rows % rows == 0 and rows <= max(most, core.ROW_MULTIPLE))


def bytes_moved(x, n: int) -> int:
    """Bytes that leave each device over NVLink; as many arrive."""
    return core.cost_bytes(x, n) // n


reduce_scatter.Config = Config

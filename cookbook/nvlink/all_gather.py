"""All-gather over NVLink: every device pushes its shard into the outputs of all, by TMA.

    all_gather(x, axis_name)    x: (rows, ...), float32, bfloat16 or float16    ->    (n rows, ...)

It returns what `jax.lax.all_gather(x, axis_name, tiled=True)` returns, inside `jax.shard_map`, on 2 to 8 GPUs of one
host, on a mesh of one axis or several.

| warpgroup | does |
|---|---|
| 0 | loads pieces of the shard into shared memory, stores each into every device's output, its own last |

| barrier | arrives | count | waits |
|---|---|---|---|
| filled[stage] | TMA: a piece is in shared memory | 1 | warpgroup 0, before it stores the piece |
| arrived (semaphore) | each peer's block of this number: its stores have arrived | n - 1 | the end of the block |

A piece is read once from HBM and crosses NVLink n - 1 times, so NVLink bounds the speed: (n - 1) shards go out, and as
many come in. A block of each device writes only to outputs; nothing needs a buffer, and no slot is used twice.

Not supported: other axes than the leading one; several hosts; a derivative. A shard that is no multiple of 1024 values
is copied once to pad it, and the result once more.
"""

import functools

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .. import _mgpu
from . import core, protocol
from .core import Config


def all_gather_reference(x, axis_name):
    return lax.all_gather(x, axis_name, tiled=True)


def default_config() -> Config:
    """The same for all shapes: it has not been searched."""
    return Config()


def all_gather(x, axis_name, *, config: Config | None = None):
    """The shards of all devices on a mesh axis, one after the other, on every device.

    Args:
      x: this device's shard, with at least one axis. Shards are joined along the leading one.
      axis_name: a name of a mesh axis of `jax.shard_map`, or a tuple of names.
      config: how many SMs it uses, and how.

    Raises:
      ValueError: a dtype, a shape or an axis that is not supported; the message says what to do.
      RuntimeError: there is no GPU and none to compile for.
    """
    x, n = core.require_shards("all_gather", x, axis_name)
    core.require_gpus("all_gather", n)
    shape = (n * x.shape[0], *x.shape[1:])
    if n == 1 or x.size == 0:
        return all_gather_reference(x, axis_name)
    shard = core.as_matrices(x, 1)[0]
    config = config or default_config()
    plan = core.plan(n, shard.shape[0], x.dtype, config, pieces_a_stage=1)
    kernel = _mgpu.kernel(
        functools.partial(_kernel, plan, axis_name, config.num_stages),
        out_type=jax.ShapeDtypeStruct((n, *shard.shape), x.dtype),
        grid=(plan.num_blocks,),
        grid_names=("block",),
        scratch_types=dict(
            stages=plgpu.SMEM((config.num_stages, plan.piece_rows, core.WIDTH), x.dtype),
            filled=plgpu.Barrier(num_barriers=config.num_stages),
            arrived=plgpu.SemaphoreType.REGULAR,
        ),
        compiler_params=_mgpu.compiler_params(),
    )
    return core.from_matrices(kernel(shard), shape)


def _kernel(plan, axis_name, num_stages, x_gmem, o_gmem, *, stages, filled, arrived):
    d, block = lax.axis_index(axis_name), lax.axis_index("block")
    gather, num_rounds = protocol.AllGather(plan.n), plan.num_rounds(block)

    def load(i):
        stage = _mgpu.rem(i, num_stages)
        plgpu.copy_gmem_to_smem(x_gmem.at[plan.piece(block, i)], stages.at[stage], filled.at[stage])

    def store(stage, action, device_id):
        owner, i = action.slot
        out = plgpu.remote_ref(o_gmem, device_id)
        plgpu.copy_smem_to_gmem(stages.at[stage], out.at[owner, plan.piece(block, i)])

    def one_round(i):
        stage = _mgpu.rem(i, num_stages)
        plgpu.barrier_wait(filled.at[stage])
        core.perform(gather.send(d, i), axis_name, {}, functools.partial(store, stage))
        plgpu.wait_smem_to_gmem(plan.n, wait_read_only=True)  # The stage of the round before is free.
        pl.when(i + num_stages - 1 < num_rounds)(lambda: load(i + num_stages - 1))

    for i in range(num_stages - 1):
        pl.when(i < num_rounds)(functools.partial(load, i))
    pl.loop(0, num_rounds)(one_round)
    core.perform(gather.end(d), axis_name, dict(arrived=arrived))


def bytes_moved(x, n: int) -> int:
    """Bytes that leave each device over NVLink; as many arrive."""
    return core.cost_bytes(x, n)


all_gather.Config = Config

# SPDX-License-Identifier: Apache-2.0
"""Reduce-scatter over NVLink: every owner pulls from each device what that adds to its shard, by TMA.

    reduce_scatter(x, axis_name)    x: (n rows, ...), float32, bfloat16 or float16    ->    (rows, ...)

It returns what `jax.lax.psum_scatter(x, axis_name, tiled=True)` returns, inside `jax.shard_map`, on 2 to 8 GPUs of one
host, on a mesh of one axis or several. The sum is taken in float32, in the order of the devices, and rounded once: it
is equal to the bit in every run, and does not depend on the device that owns it.

| warpgroup | does |
|---|---|
| 0, loads | loads a piece of each device's x, its own too, into a slot of a ring in shared memory |
| 1 and 2, add | add the pieces in the devices' order and store the sum: each takes every other part of the slot |

| barrier | arrives | count | waits |
|---|---|---|---|
| filled[slot] | TMA: the pieces of a round are in shared memory | n | warpgroups 1 and 2 |
| freed[slot] | warpgroups 1 and 2: the pieces are added | 2 | warpgroup 0, before it fills the slot again |
| read (semaphore) | each peer's block of this number: it has read all that it adds | n - 1 | the end of warpgroup 0 |

An owner pulls: its TMA reads the peers' memory. XLA starts no device before all are ready, so x can be read at once.
There is no buffer between devices, no signal for a piece, and no wait for a peer until the end. There a block waits for
its peers, because x may be overwritten once the kernel has ended. A load from a peer takes several times as long as one
from HBM, so most of the ring is in flight at any time. NVLink bounds the speed: n - 1 shards come in, and as many go
out.

The derivative is `all_gather`. Not supported: other axes than the leading one; several hosts. Shards of no multiple of
1024 values are copied once to pad them.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .. import _device, _host
from . import all_gather as transposed
from . import core, protocol
from .core import Config

LOADED_BYTES = 16_384  # Addends that an adding warpgroup has in its registers at a time: 32 of them a thread.
LOADS, ADDERS = 0, 2  # The warpgroup that loads, and the number of those after it, which add.


def reduce_scatter_reference(x, axis_name):
    return lax.psum_scatter(x.astype(jnp.float32), axis_name, tiled=True).astype(x.dtype)


def default_config() -> Config:
    """The same for all shapes: short rounds, many of them in flight."""
    return Config(stage_bytes=32_768, num_stages=6)


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
            f"{_host.PACKAGE}.reduce_scatter: {x.shape=}; the leading axis must be a multiple of the {n} devices on "
            f"{axis_name=}: pad it to {-(-x.shape[0] // n) * n} (jnp.pad)"
        )
    _host.require_config("reduce_scatter", config, Config)
    core.require_gpus("reduce_scatter", n, x)
    if n == 1 or x.size == 0:
        return reduce_scatter_reference(x, axis_name)
    out = scatter(core.as_matrices(*_host.reverse_only("reduce_scatter", x), n), axis_name, config or default_config())
    return core.from_matrices(out[None], (x.shape[0] // n, *x.shape[1:]))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def scatter(shards, axis_name, config: Config):
    """This device's matrix of the sum of all devices' (n, rows, WIDTH)."""
    n, rows, _ = shards.shape
    plan = core.plan(n, rows, shards.dtype, config, pieces_a_stage=n)
    kernel = _host.kernel(
        functools.partial(_kernel, plan, axis_name),
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
    return kernel(shards)


scatter.defvjp(
    lambda shards, *how: (scatter(shards, *how), len(shards)),
    lambda axis_name, config, n, g: (transposed.gather(g, n, axis_name, transposed.default_config()),),
)


def _kernel(plan, axis_name, x_gmem, o_gmem, *, stages, filled, freed, read):
    ring, wg = _device.Ring(filled, freed, stages.shape[0]), lax.axis_index("wg")
    pl.when(wg == LOADS)(lambda: _load(plan, axis_name, ring, x_gmem, stages, read))
    pl.when(wg > LOADS)(lambda: _add(plan, ring, stages, o_gmem))


def _load(plan, axis_name, ring, x_gmem, stages, read):
    d, block, roles = lax.axis_index(axis_name), lax.axis_index("block"), protocol.ReduceScatter(plan.n)
    num_rounds = plan.num_rounds(block)

    @pl.loop(0, num_rounds)
    def _(i):
        slot = ring.fill(i)

        def load(action, device_id):
            owner, i = action.source
            piece = plgpu.remote_ref(x_gmem, device_id).at[owner, plan.piece(block, i)]
            core.load_bytes(piece, stages.at[slot, action.peer], ring.filled.at[slot])

        core.perform(roles.load(d, i), axis_name, {}, load)

    ring.drain(num_rounds)
    core.perform(roles.end(d), axis_name, dict(read=read))


def _add(plan, ring, stages, o_gmem):
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
        ring.free(i)


def _rows_at_once(plan, dtype) -> int:
    """Rows of a piece that are added at once: the most that fit into registers and divide the piece."""
    most = LOADED_BYTES // (plan.n * core.WIDTH * dtype.itemsize)
    fits = range(core.ROW_MULTIPLE, plan.piece_rows + 1, core.ROW_MULTIPLE)
    return max(rows for rows in fits if plan.piece_rows % rows == 0 and rows <= max(most, core.ROW_MULTIPLE))


def bytes_moved(x, n: int) -> int:
    """Bytes that leave each device over NVLink; as many arrive."""
    return core.cost_bytes(x, n) // n


reduce_scatter.Config = Config

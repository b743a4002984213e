# SPDX-License-Identifier: Apache-2.0
"""All-gather over NVLink: every device pushes its shard into the outputs of all, by TMA.

    all_gather(x, axis_name)    x: (rows, ...), float32, bfloat16 or float16    ->    (n rows, ...)

It returns what `jax.lax.all_gather(x, axis_name, tiled=True)` returns, inside `jax.shard_map`, on 2 to 8 GPUs of one
host, on a mesh of one axis or several.

Two warpgroups a block copy the shard in pieces: one to the peers, over NVLink, and one to the device's own result.
Their roles and barriers are those of `copies.py`.

A piece is loaded into shared memory once for each device, the first time from HBM and then mostly from the L2 cache.
NVLink bounds the speed: n - 1 shards go out, and as many come in. A block writes only to results; nothing needs a
buffer, and no place is written twice with different values.

The derivative is `reduce_scatter`. Not supported: other axes than the leading one; several hosts. A shard that is no
multiple of 1024 values is copied once to pad it, and the result once more.
"""

import functools

import jax
from jax import lax

from .. import _host
from . import copies, core, protocol, segments
from . import reduce_scatter as transposed
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
    _host.require_config("all_gather", config, Config)
    core.require_gpus("all_gather", n, x)
    shape = (n * x.shape[0], *x.shape[1:])
    if n == 1 or x.size == 0:
        return all_gather_reference(x, axis_name)
    out = gather(core.as_matrices(*_host.reverse_only("all_gather", x), 1)[0], n, axis_name, config or default_config())
    return core.from_matrices(out, shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def gather(shard, n: int, axis_name, config: Config):
    """The shards of n devices, each a matrix."""
    rows, cut = shard.shape[0], core.plan(n, shard.shape[0], shard.dtype, config, pieces_a_stage=2)
    plan = segments.Plan(n, rows, n * rows, core.WIDTH, 1, (cut.piece_rows,), cut.num_blocks)
    kernel = _host.kernel(
        functools.partial(_kernel, plan, axis_name),
        out_type=jax.ShapeDtypeStruct((n * rows, core.WIDTH), shard.dtype),
        grid=(plan.num_blocks,),
        grid_names=("block",),
        num_threads=2,
        thread_name="wg",
        scratch_types=copies.scratch(plan, config.num_stages, shard.dtype),
        compiler_params=_host.compiler_params(),
    )
    return kernel(shard).reshape(n, rows, core.WIDTH)


gather.defvjp(
    lambda shard, *how: (gather(shard, *how), None),
    lambda n, axis_name, config, _, g: (transposed.scatter(g, axis_name, transposed.default_config()),),
)


def _kernel(plan, axis_name, x_gmem, o_gmem, **scratch):
    d = lax.axis_index(axis_name)
    *to_peers, own = [segments.Segment(p, 0, d * plan.rows, plan.rows) for p in protocol.everybody(d, plan.n)]
    copies.push(plan, protocol.AllGather(plan.n), axis_name, (to_peers, [own]), x_gmem, o_gmem, **scratch)


def bytes_moved(x, n: int) -> int:
    """Bytes that leave each device over NVLink; as many arrive."""
    return core.cost_bytes(x, n)


all_gather.Config = Config

# SPDX-License-Identifier: Apache-2.0
"""All-gather over NVLink: every device pushes its shard into the outputs of all, by TMA.

    all_gather(x, axis_name)    x: (rows, ...), float32, bfloat16 or float16    ->    (n rows, ...)

It returns what `jax.lax.all_gather(x, axis_name, tiled=True)` returns, inside `jax.shard_map`, on 2 to 8 GPUs of one
host, on a mesh of one axis or several.

Two warpgroups a block copy the shard in pieces: one to the peers, over NVLink, and one to the device's own result.
Role and barrier tables: `copies.py`.

A piece is loaded into shared memory once for each device, the first time from HBM and then mostly from the L2 cache.
NVLink bounds the speed: n - 1 shards go out, and as many come in. A block writes only to results; nothing needs a
buffer, and no place is written twice with different values.

The derivative is `reduce_scatter`. Not supported: other axes than the leading one; several hosts. A shard that is not a
multiple of 1024 values is copied once to pad it, and the result once more.
"""

import jax
from jax import lax

from .. import _host
from . import core
from .core import Config
from .kernel_gather import default_config as default_config
from .transposes import gather_rows


def all_gather_reference(x, axis_name):
    return lax.all_gather(x, axis_name, tiled=True)


def all_gather(x: jax.Array, axis_name: _host.AxisName, *, config: Config | None = None) -> jax.Array:
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
    if n == 1 or x.size == 0:
        return all_gather_reference(x, axis_name)
    return gather_rows(*_host.reverse_only("all_gather", x), n, axis_name, config)


def bytes_moved(x, n: int) -> int:
    """Bytes that leave each device over NVLink; as many arrive."""
    return core.cost_bytes(x, n)


all_gather.Config = Config

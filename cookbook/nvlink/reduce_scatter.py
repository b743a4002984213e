# SPDX-License-Identifier: Apache-2.0
"""Reduce-scatter over NVLink: every owner pulls from each device what that adds to its shard, by TMA.

    reduce_scatter(x, axis_name)    x: (n rows, ...), float32, bfloat16 or float16    ->    (rows, ...)

It returns what `jax.lax.psum_scatter(x, axis_name, tiled=True)` returns, inside `jax.shard_map`, on 2 to 8 GPUs of one
host, on a mesh of one axis or several. The sum is taken in float32, in the order of the devices, and rounded once: it
is bitwise reproducible from run to run, and does not depend on the device that owns it.

Role and barrier tables: `kernel_scatter.py`, which holds the kernel.

An owner pulls: its TMA reads the peers' memory. XLA starts no device before all are ready, so x can be read at once.
There is no buffer between devices, no signal for a piece, and no wait for a peer until the end. There a block waits for
its peers, because x may be overwritten once the kernel has ended. A load from a peer takes several times as long as one
from HBM, so most of the ring is in flight at any time. NVLink bounds the speed: n - 1 shards come in, and as many go
out.

The derivative is `all_gather`. Not supported: other axes than the leading one; several hosts. A shard that is not a
multiple of 1024 values is copied once to pad it.
"""

import jax
import jax.numpy as jnp
from jax import lax

from .. import _host
from . import core
from .core import Config
from .kernel_scatter import default_config
from .transposes import scatter


def reduce_scatter_reference(x, axis_name):
    return lax.psum_scatter(x.astype(jnp.float32), axis_name, tiled=True).astype(x.dtype)


def reduce_scatter(x: jax.Array, axis_name: _host.AxisName, *, config: Config | None = None) -> jax.Array:
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


def bytes_moved(x, n: int) -> int:
    """Bytes that leave each device over NVLink; as many arrive."""
    return core.cost_bytes(x, n) // n


reduce_scatter.Config = Config

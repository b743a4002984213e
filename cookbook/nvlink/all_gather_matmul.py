# SPDX-License-Identifier: Apache-2.0
"""The product of rows that are shared out over GPUs with a matrix: the all-gather runs during the product.

    all_gather_matmul(lhs, rhs, axis_name)    lhs: (M, K), rhs: (K, N), both bfloat16 or both float16    ->    (n M, N)

It returns `jax.lax.all_gather(lhs, axis_name, tiled=True) @ rhs`, inside `jax.shard_map`, on 2 to 8 GPUs of one host,
on a mesh of one axis or several. Sums are float32. Rows of lhs and rhs must be multiples of 16 bytes.

Each device multiplies its own shard first, then the next device's, and so on, tile after tile in one pipeline. A few
SMs do no products: they send this device's shard to all others, in the order in which those need it.

Role and barrier tables: `kernel_gather_matmul.py`, which holds the kernel.

A block of lhs is the rows of a cluster's tiles. Whole rows are contiguous, so a piece of them is one copy without a
descriptor, as `protocol.py` asks for.

Senders wait for nobody, and the grid has no more blocks than the GPU has SMs: all run at once, in whatever order they
start, and what a product waits for comes.

Bound by: the tensor cores of the SMs that multiply, or by NVLink, which carries n - 1 shards each way. Where the tiles
of all rows of a shard begin at once, they wait for its last block: a few senders may be too slow. The derivative
with respect to lhs is `matmul_reduce_scatter`; the one with respect to rhs gathers lhs again, so that no device keeps
the shards of all until then.

Not supported: several hosts; batches; results of another dtype. Source: Wang et al., "Overlap Communication with
Dependent Computation in Large Deep Learning Models via Decomposition" (2023), for multiplying shard by shard. Theirs
pass round a ring; here they are pushed, so that none waits for another device's product.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from .. import _host
from ..gemm.dense.matmul import matmul
from . import core, matmul_core
from .kernel_gather_matmul import Config, gather_product
from .kernel_gather_matmul import default_config as default_config
from .kernel_scatter_matmul import scatter_product
from .transposes import gather_rows


def all_gather_matmul_reference(lhs, rhs, axis_name):
    lhs = lax.all_gather(lhs, axis_name, tiled=True)
    return jnp.matmul(lhs, rhs, precision="highest", preferred_element_type=jnp.float32).astype(lhs.dtype)


def all_gather_matmul(
    lhs: jax.Array, rhs: jax.Array, axis_name: _host.AxisName, *, config: Config | None = None
) -> jax.Array:
    """The product of all devices' rows with this device's matrix.

    Args:
      lhs: this device's rows, (M, K). The result has the rows of all devices, in their order.
      rhs: this device's matrix, (K, N).
      axis_name: a name of a mesh axis of `jax.shard_map`, or a tuple of names.
      config: tiles of the product, and how many SMs send.

    Raises:
      ValueError: a dtype, a shape or an axis that is not supported; the message says what to do.
      RuntimeError: there is no GPU and none to compile for.
    """
    lhs, rhs, n = matmul_core.require_operands("all_gather_matmul", lhs, rhs, axis_name)
    _host.require_config("all_gather_matmul", config, Config)
    core.require_gpus("all_gather_matmul", n, lhs, rhs)
    if n == 1:
        return matmul(lhs, rhs)
    return _product(*_host.reverse_only("all_gather_matmul", lhs, rhs), axis_name, config)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _product(lhs, rhs, axis_name, config):
    return gather_product(lhs, rhs, axis_name, config)[0]


def _product_fwd(lhs, rhs, axis_name, config):
    return _product(lhs, rhs, axis_name, config), (lhs, rhs)


def _product_bwd(axis_name, config, operands, d_out):
    return _host.without_derivative("all_gather_matmul", functools.partial(_gradients, axis_name))(*operands, d_out)


def _gradients(axis_name, lhs, rhs, d_out):
    d_lhs = scatter_product(d_out, rhs, axis_name, transpose_rhs=True)
    if lhs.size == 0:
        gathered = lax.all_gather(lhs, axis_name, tiled=True)
    else:
        gathered = gather_rows(lhs, lax.axis_size(axis_name), axis_name)
    return d_lhs, matmul(gathered, d_out, transpose_a=True)


_product.defvjp(_product_fwd, _product_bwd)


def flops(m: int, n: int, k: int, num_devices: int) -> int:
    """Floating-point operations of one device."""
    return 2 * num_devices * m * n * k


def bytes_moved(m: int, k: int, num_devices: int, itemsize: int = 2) -> int:
    """Bytes that leave each device over NVLink; as many arrive."""
    return (num_devices - 1) * m * k * itemsize


all_gather_matmul.Config = Config

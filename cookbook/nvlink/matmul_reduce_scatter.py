# SPDX-License-Identifier: Apache-2.0
"""The sum over GPUs of products, shared out by rows: tiles go to their owner as soon as they are computed.

    matmul_reduce_scatter(lhs, rhs, axis_name)    lhs: (n M, K), rhs: (K, N), bfloat16 or float16    ->    (M, N)

It returns `jax.lax.psum_scatter(lhs @ rhs, axis_name, tiled=True)`, inside `jax.shard_map`, on 2 to 8 GPUs of one host,
on a mesh of one axis or several. Rows of lhs and rhs must be multiples of 16 bytes.

Each device computes its part of the sums of all owners, its own tiles last. It rounds the parts of others to the
operands' dtype, as `jax.lax.psum_scatter` gets them, and stores them into the owner's buffer. The owner adds them in
float32 to its own, which is not rounded before: first the part of the next device, then of the one after it, and so on.
The sum is rounded at the end. So each run gives the same bits. But the order depends on the owner, and all parts but
its own are rounded twice: `reduce_scatter` of the products gives other bits.

Role and barrier tables: `kernel_scatter_matmul.py`, which holds the kernel.

Bound by: the tensor cores, or by NVLink, which carries n - 1 shards each way. The derivative with respect to lhs is
`all_gather_matmul`, and what it gathers serves the one with respect to rhs.

Not supported: several hosts; batches; results of another dtype.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from .. import _host
from ..gemm.dense.matmul import matmul
from . import core, matmul_core
from .kernel_gather_matmul import gather_product
from .kernel_scatter_matmul import default_config as default_config
from .kernel_scatter_matmul import scatter_product
from .matmul_core import Config


def matmul_reduce_scatter_reference(lhs, rhs, axis_name):
    part = jnp.matmul(lhs, rhs, precision="highest", preferred_element_type=jnp.float32)
    return lax.psum_scatter(part, axis_name, tiled=True).astype(lhs.dtype)


def matmul_reduce_scatter(
    lhs: jax.Array, rhs: jax.Array, axis_name: _host.AxisName, *, config: Config | None = None
) -> jax.Array:
    """This device's rows of the sum of all devices' products.

    Args:
      lhs: (M, K). Rows of the result are shared out, in the order of the devices.
      rhs: (K, N).
      axis_name: a name of a mesh axis of `jax.shard_map`, or a tuple of names.
      config: tiles of the product. Its `store_slots` are not read: a whole tile waits for NVLink.

    Raises:
      ValueError: a dtype, a shape or an axis that is not supported; the message says what to do.
      RuntimeError: there is no GPU and none to compile for.
    """
    lhs, rhs, n = matmul_core.require_operands("matmul_reduce_scatter", lhs, rhs, axis_name)
    if lhs.shape[0] % n:
        raise ValueError(
            f"{_host.PACKAGE}.matmul_reduce_scatter: {lhs.shape=}; its rows must be a multiple of the {n} devices on "
            f"{axis_name=}: pad them to {-(-lhs.shape[0] // n) * n} (jnp.pad)"
        )
    _host.require_config("matmul_reduce_scatter", config, Config)
    core.require_gpus("matmul_reduce_scatter", n, lhs, rhs)
    if n == 1:
        return matmul(lhs, rhs)
    return _product(*_host.reverse_only("matmul_reduce_scatter", lhs, rhs), axis_name, config)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _product(lhs, rhs, axis_name, config):
    return scatter_product(lhs, rhs, axis_name, config)


def _product_fwd(lhs, rhs, axis_name, config):
    return _product(lhs, rhs, axis_name, config), (lhs, rhs)


def _product_bwd(axis_name, config, operands, d_out):
    return _host.without_derivative("matmul_reduce_scatter", functools.partial(_gradients, axis_name))(*operands, d_out)


def _gradients(axis_name, lhs, rhs, d_out):
    d_lhs, d_out = gather_product(d_out, rhs, axis_name, transpose_rhs=True, keeps_own=True)
    return d_lhs, matmul(lhs, d_out, transpose_a=True)


_product.defvjp(_product_fwd, _product_bwd)


def flops(m: int, n: int, k: int) -> int:
    """Floating-point operations of one device."""
    return 2 * m * n * k


def bytes_moved(m: int, n: int, num_devices: int, itemsize: int = 2) -> int:
    """Bytes that leave each device over NVLink; as many arrive."""
    return (num_devices - 1) * m * n * itemsize // num_devices


matmul_reduce_scatter.Config = Config

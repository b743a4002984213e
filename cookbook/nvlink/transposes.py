# SPDX-License-Identifier: Apache-2.0
"""`gather` and `scatter`, the kernels of `all_gather` and `reduce_scatter`, as each other's transpose.

The gradient of either is the other, so gradients of gradients are these two again.
"""

import functools

import jax

from . import core, kernel_gather, kernel_scatter
from .core import Config


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def gather(shard, n: int, axis_name, config: Config):
    """The shards of n devices, each a matrix: (n, rows, WIDTH)."""
    return kernel_gather.gather_shards(shard, n, axis_name, config)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def scatter(shards, axis_name, config: Config):
    """This device's matrix of the sum of all devices' (n, rows, WIDTH)."""
    return kernel_scatter.scatter_shards(shards, axis_name, config)


gather.defvjp(
    lambda shard, *how: (gather(shard, *how), None),
    lambda n, axis_name, config, _, g: (scatter(g, axis_name, kernel_scatter.default_config()),),
)
scatter.defvjp(
    lambda shards, *how: (scatter(shards, *how), len(shards)),
    lambda axis_name, config, n, g: (gather(g, n, axis_name, kernel_gather.default_config()),),
)


def gather_rows(x, n: int, axis_name, config: Config | None = None):
    """The rows of all devices' `x`, one device after the other."""
    out = gather(core.as_matrices(x, 1)[0], n, axis_name, config or kernel_gather.default_config())
    return core.from_matrices(out, (n * x.shape[0], *x.shape[1:]))

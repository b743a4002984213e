# SPDX-License-Identifier: Apache-2.0
"""The kernel of `all_gather`. `copies.py` has its roles and barriers."""

import functools

import jax
from jax import lax

from .. import _host
from . import copies, core, protocol, segments
from .core import Config


def default_config() -> Config:
    """The same for all shapes: it has not been searched."""
    return Config()


def gather_shards(shard, n: int, axis_name, config: Config):
    """The shards of n devices, each a matrix."""
    rows, cut = shard.shape[0], core.plan(n, shard.shape[0], shard.dtype, config, pieces_a_stage=2)
    plan = segments.Plan(n, rows, n * rows, core.WIDTH, 1, (cut.piece_rows,), cut.num_blocks)
    run = _host.kernel(
        functools.partial(kernel, plan, axis_name),
        out_type=jax.ShapeDtypeStruct((n * rows, core.WIDTH), shard.dtype),
        grid=(plan.num_blocks,),
        grid_names=("block",),
        num_threads=2,
        thread_name="wg",
        scratch_types=copies.scratch(plan, config.num_stages, shard.dtype),
        compiler_params=_host.compiler_params(),
    )
    return run(shard).reshape(n, rows, core.WIDTH)


def kernel(plan: segments.Plan, axis_name, x_gmem, o_gmem, **scratch):
    d = lax.axis_index(axis_name)
    *to_peers, own = [segments.Segment(p, 0, d * plan.rows, plan.rows) for p in protocol.everybody(d, plan.n)]
    copies.push(plan, protocol.AllGather(plan.n), axis_name, (to_peers, [own]), x_gmem, o_gmem, **scratch)

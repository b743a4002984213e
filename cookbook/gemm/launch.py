# SPDX-License-Identifier: Apache-2.0
"""Around a kernel's launch: operands are padded and exchanged, parts of K that a second kernel adds are added."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp

from .. import _host, _numerics
from .kernel import scale_and_shift
from .plan import Plan, identity
from .tiles import exchanged


@functools.partial(jax.jit, static_argnames=("kernel", "plan", "params", "varies", "num_results"))
def fused_product(kernel, a, b, vectors: dict, *, plan: Plan, params, varies: bool = True, num_results: int = 1):
    """`activation(a @ b * scale * row_scale * col_scale + bias)`, of `a` and `b` that lie as the plan's operands say.

    `kernel` is that of `kernel.py`, or another with the same roles. `vectors` holds float32 "scale" (1,), "row_scale"
    (M,), "col_scale" (N,) and "bias" (N,), or some of them; longer ones are read as far as o goes. All this, M and N
    too, is as o has it: here is where `swapped` exchanges a and b. `varies` is that of `_host.kernel`. An operand that
    is two arrays is a tuple of them; a kernel may have several results like o, which are then a list.
    """
    c, t = plan.config, plan.tiles
    activation, (a, b) = plan.activation, exchanged((a, b), c.swapped)
    shape, tiles = exchanged((t.m, t.n), c.swapped), exchanged(t.cluster_tile, c.swapped)
    if c.second_kernel:  # It also does what is fused, and transposes.
        plan = dataclasses.replace(plan, activation=identity)
        padded_vectors, padded = {}, (c.split_k, *_host.padded_shape((t.m, t.n), (1, 8)))
    else:
        piece = jax.ShapeDtypeStruct((math.prod(plan.store_piece),), jnp.float32)
        plan = dataclasses.replace(plan, activation=_numerics.lowerable(plan.activation, piece))
        rows, cols = exchanged(plan.store_piece, c.swapped)
        # Whole pieces, not whole tiles, which would often be a copy: the kernel reads nothing beyond.
        per = dict(scale=1, row_scale=rows, col_scale=cols, bias=cols)
        padded_vectors = {name: _host.pad_to_tiles(vector, (per[name],)) for name, vector in vectors.items()}
        # Direct stores are not cut off at the edge. A row of o is a multiple of 16 bytes for TMA.
        padded = _host.padded_shape(shape, tiles if plan.stores_directly else (1, 8))
    out_type = [jax.ShapeDtypeStruct(padded, plan.stored_dtype)] * num_results
    # Neighbouring blocks multiply the same part of K: their SMs need the same operands.
    grid = (dict(part=c.split_k) if c.second_kernel else {}) | dict(cluster=t.clusters)
    if plan.adds_parts and plan.interpreted:
        rows, cols = _host.padded_shape((t.m, t.n), t.cluster_tile)
        out_type.append(jax.ShapeDtypeStruct((c.split_k, rows * plan.num_sums, cols), jnp.float32))
    run = launch(functools.partial(kernel, plan=plan), plan, out_type, grid, plan.scratch, params, varies)
    out, *others = run(jax.tree.map(plan.a.pad, a), jax.tree.map(plan.b.pad, b), padded_vectors)
    if num_results > 1:
        return [result[: shape[0], : shape[1]] for result in (out, *others[: num_results - 1])]
    if not c.second_kernel:
        return out[: shape[0], : shape[1]]
    total = functools.reduce(jnp.add, out[:, : t.m, : t.n])  # One part after the other, in every run.
    columns = {name: vector[:, None] if name == "row_scale" else vector for name, vector in vectors.items()}
    total = scale_and_shift(total.T if c.swapped else total, columns)
    return activation(total).astype(plan.out_dtype)


def launch(body, plan: Plan, out_type, grid: dict[str, int], scratch: dict, params, varies: bool = True):
    """`_host.kernel` of a `body` with these roles: a memory warpgroup after the compute warpgroups."""
    return _host.kernel(
        body,
        varies=varies,
        out_type=out_type,
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        cluster=tuple(plan.cluster.values()),
        cluster_names=tuple(plan.cluster),
        num_threads=plan.config.warpgroups + 1,
        thread_name="role",
        scratch_types=scratch,
        compiler_params=params,
    )

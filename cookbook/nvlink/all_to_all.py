# SPDX-License-Identifier: Apache-2.0
"""All-to-all over NVLink, of equal or of ragged parts: every device pushes rows to their owners' results, by TMA.

    all_to_all(x, axis_name)                                    x: (n rows, ...)    ->    (n rows, ...)
    all_to_all(x, axis_name, send_sizes=sizes, capacity=c)      x: (rows, ...)      ->    (c, ...), recv_sizes: (n,)

The first returns what `jax.lax.all_to_all(x, axis_name, 0, 0, tiled=True)` returns. The second sends rows of any number
to each device, as experts need it: `jax.lax.ragged_all_to_all`, with the offsets worked out. Inside `jax.shard_map`, on
2 to 8 GPUs of one host, on a mesh of one axis or several; float32, bfloat16 or float16.

| warpgroup | does |
|---|---|
| 0, sends | sends its sizes to all; when all sizes are here, copies the peers' rows into their results (`copies.py`) |
| 1, keeps | copies the rows that stay on the device, and writes zeros into the rows that nobody sends |

| barrier | arrives | count | waits |
|---|---|---|---|
| loaded | TMA: this device's sizes are in shared memory | 1 | warpgroup 0 |
| known[wg] (semaphore) | each device's block of this number: its sizes have arrived | n | each warpgroup |
| filled[wg, stage], arrived (semaphore) | as in `copies.py` | | |

Every device knows all n x n sizes before it sends a row. So it knows where its rows begin in each result, and how many
of them the result has room for. It sends no more than those: a result that is too small loses rows, and nothing is ever
written beyond it. NVLink bounds the speed.

Not supported: other axes than the leading one; several hosts. Rows that do not divide into groups of 16 bytes, or only
into short ones, are padded: a copy of x and one of the result.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .. import _host
from . import copies, core, protocol, segments
from .core import Config

SIZES = 128  # Length of a vector of sizes as it is sent: the first n count.


def all_to_all_reference(x, axis_name, *, send_sizes=None, capacity=None):
    if send_sizes is None:
        return lax.all_to_all(x, axis_name, 0, 0, tiled=True)
    n, d = lax.axis_size(axis_name), lax.axis_index(axis_name)
    capacity = n * x.shape[0] if capacity is None else capacity
    sizes = lax.all_gather(segments.cut(send_sizes, x.shape[0]), axis_name)
    starts = jnp.cumsum(sizes, axis=1) - sizes  # Where the rows for each device begin, by sender.
    ends, row = jnp.cumsum(sizes[:, d]), jnp.arange(capacity)
    sender = jnp.searchsorted(ends, row, side="right").clip(0, n - 1)
    source = (starts[:, d] + sizes[:, d] - ends)[sender] + row
    everything = lax.all_gather(jnp.pad(x, [(0, 1), *[(0, 0)] * (x.ndim - 1)]), axis_name)  # And a row of zeros.
    return everything[sender, jnp.where(row < ends[-1], source, x.shape[0])], segments.cut(sizes[:, d], capacity)


def default_config() -> Config:
    """The same for all shapes: it has not been searched."""
    return Config()


def all_to_all(
    x: jax.Array,
    axis_name: _host.AxisName,
    *,
    send_sizes: jax.Array | None = None,
    capacity: int | None = None,
    config: Config | None = None,
) -> jax.Array | tuple[jax.Array, ...]:
    """Rows of all devices on a mesh axis, each on the device that it is for. It has a derivative.

    Args:
      x: this device's rows, (rows, ...), those for device 0 first, then those for device 1, and so on.
      axis_name: a name of a mesh axis of `jax.shard_map`, or a tuple of names.
      send_sizes: rows for each device, n integers; they may differ between devices and be traced. By default all are
        equal. Negative ones count as 0. Rows of x after their sum are not sent. If they sum to more than the rows of x,
        the last ones are cut.
      capacity: rows of the result; only with `send_sizes`. By default n times as many as x has, which always suffice;
        fewer save memory, and the time to fill it with zeros. If more rows come than fit, the last ones are lost: the
        sum of `recv_sizes` is then `capacity`.
      config: how many SMs it uses, and how.

    Returns:
      The rows that are for this device, device 0's first. With `send_sizes` also `recv_sizes`, n int32: how many
      rows of the result came from each device. The rows of the result after their sum are zeros.

    Raises:
      ValueError: a dtype, a shape or an axis that is not supported; the message says what to do.
      RuntimeError: there is no GPU and none to compile for.
    """
    x, n = core.require_shards("all_to_all", x, axis_name)
    send_sizes, capacity = _require_sizes(x, n, axis_name, send_sizes, capacity)
    _host.require_config("all_to_all", config, Config)
    core.require_gpus("all_to_all", n, x)
    if n == 1 or x.size == 0 or capacity == 0:
        return all_to_all_reference(x, axis_name, send_sizes=send_sizes, capacity=capacity)
    config = config or default_config()
    values = math.prod(x.shape[1:])
    plan = segments.plan(n, x.shape[0], capacity, values, x.dtype, config)
    _host.require_indices("all_to_all", rows=plan.rows * plan.parts, capacity=plan.capacity * plan.parts)
    rows = _host.pad_to_tiles(x.reshape(-1, values), (1, plan.values))
    if send_sizes is None:
        rows, _ = _host.reverse_only("all_to_all", rows, lax.axis_index(axis_name))
        return _dense(rows, plan, axis_name, config)[:, :values].reshape(x.shape)
    sizes = segments.cut(send_sizes, x.shape[0])
    rows, sizes, _ = _host.reverse_only("all_to_all", rows, sizes, lax.axis_index(axis_name))
    out, received = _ragged(rows, sizes, plan, axis_name, config)
    return out[:, :values].reshape(capacity, *x.shape[1:]), received


def _require_sizes(x, n: int, axis_name, send_sizes, capacity):
    """(`send_sizes` as a JAX array, if there are any; the rows of the result). Raises ValueError for bad ones."""
    if send_sizes is None:
        if capacity is not None:
            raise ValueError(
                f"{_host.PACKAGE}.all_to_all: {capacity=} goes with send_sizes: equal parts always fit. Drop it"
            )
        if x.shape[0] % n:
            raise ValueError(
                f"{_host.PACKAGE}.all_to_all: {x.shape=}; the leading axis must be a multiple of the {n} devices on "
                f"{axis_name=}: pad it to {-(-x.shape[0] // n) * n} (jnp.pad), or pass send_sizes"
            )
        return None, x.shape[0]
    send_sizes = _host.as_array("all_to_all", "send_sizes", send_sizes)
    if send_sizes.shape != (n,) or not jnp.issubdtype(send_sizes.dtype, jnp.integer):
        raise ValueError(
            f"{_host.PACKAGE}.all_to_all: send_sizes is {send_sizes.dtype}{list(send_sizes.shape)}; it must be {n} "
            f"integers, the rows for each device on {axis_name=}"
        )
    capacity = n * x.shape[0] if capacity is None else _host.option("all_to_all", "capacity", capacity, int)
    if capacity < 0:
        raise ValueError(f"{_host.PACKAGE}.all_to_all: {capacity=}; it must be 0 or more, the rows of the result")
    return send_sizes, capacity


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _dense(rows, plan: segments.Plan, axis_name, config):
    return _launch(rows, None, plan, axis_name, config, False)[0]


_dense.defvjp(
    lambda rows, *how: (_dense(rows, *how), None),
    lambda plan, axis_name, config, _, g: (_dense(g, plan, axis_name, config),),
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _ragged(rows, sizes, plan: segments.Plan, axis_name, config):
    out, gathered = _launch(rows, sizes, plan, axis_name, config, False)
    return out, segments.cut(gathered[0, :, lax.axis_index(axis_name)], plan.capacity)


def _ragged_bwd(plan: segments.Plan, axis_name, config, sizes, gradients):
    return _back(gradients[0], sizes, plan, axis_name, config), np.zeros(sizes.shape, jax.dtypes.float0)


_ragged.defvjp(lambda rows, sizes, *how: (_ragged(rows, sizes, *how), sizes), _ragged_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _back(rows, sizes, plan: segments.Plan, axis_name, config):
    """The rows of results, where they came from: the transposed exchange. Rows that were lost are zeros."""
    return _launch(rows, sizes, plan, axis_name, config, True)[0]


def _back_bwd(plan: segments.Plan, axis_name, config, sizes, g):
    return _ragged(g, sizes, plan, axis_name, config)[0], np.zeros(sizes.shape, jax.dtypes.float0)


_back.defvjp(lambda rows, sizes, *how: (_back(rows, sizes, *how), sizes), _back_bwd)


def _launch(rows, sizes, plan: segments.Plan, axis_name, config, is_transposed: bool):
    """(result, everybody's sizes as each block got them). Without `sizes` all are equal, and none are exchanged."""
    units = (plan.rows if is_transposed else plan.capacity) * plan.parts
    out_type, operands = [jax.ShapeDtypeStruct((units, plan.width), rows.dtype)], [rows.reshape(-1, plan.width)]
    scratch = copies.scratch(plan, config.num_stages, rows.dtype)
    if sizes is not None:
        out_type.append(jax.ShapeDtypeStruct((plan.num_blocks, plan.n, SIZES), jnp.int32))
        operands.append(jnp.pad(sizes, (0, SIZES - plan.n)))
        scratch |= dict(
            own_sizes=plgpu.SMEM((SIZES,), jnp.int32), loaded=plgpu.Barrier(), known=plgpu.SemaphoreType.REGULAR((2,))
        )
    kernel = _host.kernel(
        functools.partial(_kernel if sizes is not None else _equal_kernel, plan, axis_name, is_transposed),
        out_type=tuple(out_type),
        grid=(plan.num_blocks,),
        grid_names=("block",),
        num_threads=2,
        thread_name="wg",
        scratch_types=scratch,
        compiler_params=_host.compiler_params(),
    )
    out, *gathered = kernel(*operands)
    return out.reshape(-1, plan.values), *gathered


def _equal_kernel(plan, axis_name, is_transposed, x_gmem, o_gmem, **scratch):
    size = plan.rows // plan.n
    routes = segments.routes(plan, lambda q, p: size, lax.axis_index(axis_name), is_transposed)
    copies.push(plan, protocol.AllToAll(plan.n), axis_name, routes, x_gmem, o_gmem, **scratch)


def _kernel(
    plan, axis_name, is_transposed, x_gmem, own_gmem, o_gmem, sizes_gmem, *, own_sizes, loaded, known, **scratch
):
    d, block, wg = lax.axis_index(axis_name), lax.axis_index("block"), lax.axis_index("wg")
    sizes_gmem, roles = sizes_gmem.at[block], protocol.AllToAll(plan.n)

    def store(action, device_id):
        to = plgpu.remote_ref(sizes_gmem, device_id)
        plgpu.copy_smem_to_gmem(own_sizes, to.at[action.slot])

    @pl.when(wg == copies.SENDS)
    def _():
        plgpu.copy_gmem_to_smem(own_gmem, own_sizes, loaded)
        plgpu.barrier_wait(loaded)
        core.perform(roles.announce(d), axis_name, dict(known=known), store)

    core.perform(roles.learn(wg), axis_name, dict(known=known))
    routes = segments.routes(plan, lambda q, p: sizes_gmem[q, p], d, is_transposed)
    copies.push(plan, roles, axis_name, routes, x_gmem, o_gmem, **scratch)


def bytes_moved(x, n: int) -> int:
    """Bytes that leave each device over NVLink where all parts are equal; as many arrive."""
    return core.cost_bytes(x, n) // n


all_to_all.Config = Config

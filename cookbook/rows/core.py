# SPDX-License-Identifier: Apache-2.0
"""Shared parts of the ops over rows: which plan an array gets, what arguments must be, and the launch of a kernel."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp

from .. import _host
from .._device import WARPGROUP
from .plan import Config, Plan, default_config, lanes_of, vec_of
from .plan_ragged import RaggedPlan


def as_rows(x, fill, itemsize: int | None = None):
    """`x` as a matrix whose rows are the last axis: (rows, cols), with a lone column or a handful of rows padded.

    `itemsize`: of the array that the plan is made for, if it is not `x`.
    """
    x = x.reshape(-1, x.shape[-1])
    shape = _padded_shape(*x.shape, itemsize or x.dtype.itemsize)
    pads = [(0, full - size) for full, size in zip(shape, x.shape, strict=True)]
    return x if x.shape == shape else jnp.pad(x, pads, constant_values=fill)


def _padded_shape(rows: int, cols: int, itemsize: int) -> tuple[int, int]:
    """A thread's share of a row is found by halving, which ends at two columns and at four rows."""
    cols = max(cols, 2)
    return max(rows, default_config(rows, cols, itemsize).block_rows), cols


def plan_rows(rows: int, cols: int, itemsize: int, config: Config | None, register_values: int) -> Plan:
    """The plan of a kernel over rows: by a caller's `config`, or chosen by shape."""
    return plan_by(config or default_config(rows, cols, itemsize, register_values), rows, cols, itemsize)


def plan_by(config: Config, rows: int, cols: int, itemsize: int) -> Plan:
    """The plan by a `config` that fits."""
    plan, ragged = (kind(rows, cols, itemsize, config) for kind in (Plan, RaggedPlan))
    # A row of odd length takes so many loads that not all are in flight at once.
    return ragged if plan.num_groups > 1 and ragged.fits else plan


def require_config(op: str, x, config: Config | None) -> Config | None:
    """`config`, by which the kernels can work on the rows of `x`, or None.

    Raises:
      ValueError: it is no `Config`, or rows of this length, or so few, do not have it.
    """
    if _host.require_config(op, config, Config) is None or x.size == 0:
        return None
    block_rows, given = config.block_rows, x.size // x.shape[-1]
    rows, cols = _padded_shape(given, x.shape[-1], x.dtype.itemsize)
    at_once = WARPGROUP // lanes_of(cols, vec_of(cols, x.dtype.itemsize), x.dtype.itemsize)
    rule = None
    if block_rows == 1 and cols < WARPGROUP:
        rule = f"1 is for rows of {WARPGROUP} values and more, and these have {cols}: pass {at_once}"
    elif block_rows > 1 and block_rows % at_once:
        rule = f"must be a multiple of {at_once} for rows of {cols} values: pass {at_once}"
    elif block_rows > rows:
        rule = f"must be at most {rows} for {given} rows: pass fewer"
    if rule:
        raise ValueError(f"{_host.PACKAGE}.{op}: config.block_rows={block_rows}; {rule}, or leave config out")
    return config


def launch(one_row, plan: Plan, out_type, params, arrays, shared=()):
    """Output of `one_row(plan, *arrays, *shared, out, row)`, called tile by tile for the rows of `arrays`.

    `shared`: arrays of one value for each column. `out_type` may be a tuple; then `one_row` gets as many outputs, and
    as many are returned.
    """
    stored = out_type
    if isinstance(plan, RaggedPlan):
        arrays, shared = [x.reshape(-1) for x in arrays], [plan.shift(x) for x in shared]
        stored = jax.tree.map(lambda out: jax.ShapeDtypeStruct((math.prod(out.shape),), out.dtype), out_type)
    # JAX puts barriers around each store, for kernels that read what they have stored. None of these does. Without
    # barriers each warp goes on with its own rows, which is faster, most of all for short ones.
    params = dataclasses.replace(params, unsafe_no_auto_barriers=True)
    function = one_row.func if isinstance(one_row, functools.partial) else one_row
    # Profilers show the kernel by the name of what it does with a row.
    kernel = functools.wraps(function)(lambda *refs: plan.for_each_tile(functools.partial(one_row, plan, *refs)))
    call = _host.kernel(kernel, out_type=stored, grid=(plan.num_blocks,), grid_names=("block",), compiler_params=params)
    return jax.tree.map(lambda out, like: out.reshape(like.shape), call(*arrays, *shared), out_type)


def require_rows(op: str, name: str, x):
    """`x` as a JAX array that the kernels over rows take."""
    x = require_floats(op, name, x)
    _host.require_indices(op, rows=math.prod(x.shape[:-1]))
    if x.shape[-1] > 65536:
        raise ValueError(
            f"{_host.PACKAGE}.{op}: {name} has rows of {x.shape[-1]}; at most 65536 were tested: split the row"
        )
    return x


def require_floats(op: str, name: str, x):
    x = _host.as_array(op, name, x)
    check_floats(op, name, x)
    return x


def check_floats(op: str, name: str, x):
    """Raises a ValueError unless `x`, an array or a Ref, has axes and is of a dtype that the kernels take."""
    if x.ndim == 0:
        raise ValueError(f"{_host.PACKAGE}.{op}: {name} is a scalar; it must have at least one axis")
    if x.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise ValueError(
            f"{_host.PACKAGE}.{op}: {name}.dtype is {x.dtype}; must be float32, bfloat16 or float16: cast it"
        )

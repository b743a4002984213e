# SPDX-License-Identifier: Apache-2.0
"""The groups of a grouped product: sizes that are refused, and by which message."""

import jax
import jax.numpy as jnp
import numpy as np

from ... import _host
from .tables import Groups


def check_group_sizes(group_sizes, rows: int, op: str = "ragged_dot"):
    """Looks, on the host, for sizes that the kernels would clip.

    Args:
      group_sizes: (G,) integers, an array of NumPy's or a concrete one of JAX's.
      rows: M, the rows that groups share out.
      op: whose sizes they are, for the message.

    Raises:
      ValueError: a size is negative, or a group reaches beyond the rows; the first such group is named.
    """
    sizes = np.asarray(jax.device_get(group_sizes)).astype(np.int64)
    if (negative := np.flatnonzero(sizes < 0)).size:
        first = negative[0]
        raise ValueError(
            f"{_host.PACKAGE}.{op}: group_sizes[{first}]={sizes[first]}; must be at least 0: pass 0 for no rows"
        )
    ends = np.cumsum(sizes)
    if (beyond := np.flatnonzero(ends > rows)).size:
        first = beyond[0]
        raise ValueError(
            f"{_host.PACKAGE}.{op}: group_sizes[{first}]={sizes[first]}; the group ends at row {ends[first]} of "
            f"{rows}: sizes must add up to at most {rows}"
        )


def check_groups(op: str, group_sizes, group_offset, rows: int, count: int | None):
    """(group_sizes, group_offset) as arrays. `count` matrices have groups; None: as many as there are sizes.

    Raises:
      ValueError: a shape or dtype is not supported; or a size would be clipped, where sizes are not traced.
    """
    if isinstance(group_sizes, Groups):  # Ours.
        return group_sizes, group_offset
    sizes = _host.as_array(op, "group_sizes", group_sizes)
    if sizes.ndim != 1 or not jnp.issubdtype(sizes.dtype, jnp.integer):
        raise ValueError(
            f"{_host.PACKAGE}.{op}: group_sizes.shape={sizes.shape}, group_sizes.dtype={sizes.dtype}; must be (G,) "
            "integers"
        )
    if count is not None and (sizes.size < count if group_offset is not None else sizes.size != count):
        rule = f"at least {count}" if group_offset is not None else f"{count} (or say group_offset)"
        raise ValueError(
            f"{_host.PACKAGE}.{op}: group_sizes has {sizes.size} groups and there are {count} matrices: {rule}"
        )
    if rows * (sizes.size + 2) >= 2**31:
        raise ValueError(f"{_host.PACKAGE}.{op}: {rows} rows by {sizes.size} groups: their product must be below 2**31")
    is_known = not any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(group_sizes))
    if is_known and getattr(group_sizes, "is_fully_addressable", True):
        check_group_sizes(group_sizes, rows, op)
    if group_offset is None:
        return sizes, None
    offset = _host.as_array(op, "group_offset", group_offset)
    if offset.size != 1 or not jnp.issubdtype(offset.dtype, jnp.integer):
        raise ValueError(f"{_host.PACKAGE}.{op}: {offset.shape=}, {offset.dtype=} of group_offset; must be one integer")
    return sizes, offset.reshape(())

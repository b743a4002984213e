# SPDX-License-Identifier: Apache-2.0
"""The arguments of the grouped products: what is refused, and by which message."""

import jax
import jax.numpy as jnp
import numpy as np

from ... import _host


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


def check_shapes(op: str, lhs, rhs, transpose_rhs: bool, unit: int = 1) -> tuple[int, int, int]:
    """(M, N, K). Raises a ValueError unless both share K, which must be a multiple of `unit`."""
    if lhs.ndim != 2 or rhs.ndim != 3:
        raise ValueError(
            f"{_host.PACKAGE}.{op}: {lhs.shape=}, {rhs.shape=}; must be (M, K) and a matrix for each group"
        )
    (m, k), (k_rhs, n) = lhs.shape, rhs.shape[:0:-1] if transpose_rhs else rhs.shape[1:]
    if k != k_rhs:
        raise ValueError(
            f"{_host.PACKAGE}.{op}: {lhs.shape=} and {rhs.shape=} ({transpose_rhs=}) share no K: {k} is not {k_rhs}; "
            "are matrices stored the other way round?"
        )
    if k % unit:
        raise ValueError(
            f"{_host.PACKAGE}.{op}: {k} values along K; TMA needs a multiple of 16 bytes: pad lhs and rhs to "
            f"{-(-k // unit) * unit} (jnp.pad)"
        )
    _host.require_indices(op, M=m, N=n, K=k)
    return m, n, k


def check_operands(op: str, lhs, rhs):
    """Raises a ValueError unless both have one supported dtype and rows that TMA reads."""
    if lhs.dtype not in (jnp.bfloat16, jnp.float16) or lhs.dtype != rhs.dtype:
        raise ValueError(
            f"{_host.PACKAGE}.{op}: {lhs.dtype=}, {rhs.dtype=}; must both be bfloat16 or both float16: cast one"
        )
    for name, cols in (("lhs", lhs.shape[-1]), ("rhs", rhs.shape[-1])):
        if cols % 8:
            raise ValueError(
                f"{_host.PACKAGE}.{op}: a row of {name} has {cols} values, {2 * cols} bytes; TMA needs a multiple of "
                f"16 bytes: pad it to {-(-cols // 8) * 8} (jnp.pad, one copy of {name})"
            )

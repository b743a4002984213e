# SPDX-License-Identifier: Apache-2.0
"""Product of two arrays of rows, summed along the rows of each group: the gradient of the matrices of `ragged_dot`.

    o[g] = lhs[rows of group g].T @ rhs[rows of group g]

Shapes: lhs (M, K), rhs (M, N), group_sizes (G,) int32, o (G, K, N). Groups lie one after the other, from row 0; o of an
empty group is zeros. lhs and rhs are both bfloat16 or both float16; sums are float32; o is bfloat16, float16 or
float32. Rows of lhs and rhs must be multiples of 16 bytes, which TMA asks for.

Role and barrier tables: `kernel_transposed.py`, which holds the kernel.

Bound by: the tensor cores; with few rows a group, the memory that o goes to. Blocks take tiles of the largest groups
first.

Not supported: batches (use `jax.vmap`), other dtypes, differentiation. Chapter: 16b. Source: Gale et al., "MegaBlocks"
(2022).
"""

import jax
import jax.numpy as jnp
from jax import lax

from ... import _host
from ..arguments import require_halves, require_rows
from ..references import flops as flops
from ..tiles import Config
from . import arguments, cost
from .kernel import grouped_product
from .kernel_transposed import kernel
from .plan import sum_plan
from .tables import bounds, sum_table


def ragged_dot_transposed_reference(lhs, rhs, group_sizes):
    dtype = jnp.promote_types(lhs.dtype, jnp.float32)
    lhs, rhs, ends = lhs.astype(dtype), rhs.astype(dtype), jnp.cumsum(group_sizes)
    row = jnp.arange(lhs.shape[0])[:, None]

    def one(start, end):
        a, b = (jnp.where((row >= start) & (row < end), x, 0) for x in (lhs, rhs))
        return jnp.matmul(a.T, b, precision="highest")

    return lax.map(lambda bounds: one(*bounds), (ends - group_sizes, ends))


def default_config(m, k, n, num_groups, dtype=jnp.bfloat16, out_dtype=None, num_sms=132) -> Config:
    """The configuration of the least predicted time, if groups are alike."""
    return cost.best(problem(m, k, n, num_groups, dtype, out_dtype, num_sms))


def problem(m, k, n, num_groups, dtype=jnp.bfloat16, out_dtype=None, num_sms=132) -> cost.SumsProblem:
    """The sums as `cost.ranked` takes them, which says which configurations are worth timing."""
    return cost.SumsProblem(k, n, m, num_groups, jnp.dtype(dtype), jnp.dtype(out_dtype or dtype), num_sms)


def sums(lhs, rhs, group_sizes, group_offset, count: int, out_dtype, config: Config | None = None):
    """`ragged_dot_transposed` of `count` groups from `group_offset` on. Its arguments have been checked."""
    op, (m, k), n = "ragged_dot_transposed", lhs.shape, rhs.shape[1]
    if 0 in (m, k, n, count):
        return jnp.zeros((count, k, n), out_dtype)
    target = _host.require_tensor_cores(op)
    config = config or default_config(m, k, n, count, lhs.dtype, out_dtype, target.num_sms)
    plan = sum_plan(k, n, m, count, lhs.dtype, out_dtype, config, target.num_sms, target.interpreted)
    table = sum_table(*bounds(group_sizes, m, group_offset, count))
    return grouped_product(kernel, lhs, rhs, table, plan=plan, params=_host.compiler_params())


def ragged_dot_transposed(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    *,
    group_offset: jax.Array | None = None,
    num_groups: int | None = None,
    preferred_element_type: _host.DType | None = None,
    config: Config | None = None,
) -> jax.Array:
    """`lhs.T @ rhs` of each group's rows, with float32 sums, rounded once; bitwise reproducible.

    On an automatic mesh JAX gathers sharded operands on every device and says nothing: call it inside `jax.shard_map`.

    Args:
      lhs: (M, K); bfloat16 or float16.
      rhs: (M, N); of the dtype of `lhs`.
      group_sizes: (G,) integers, as `cookbook.ragged_dot` takes them.
      group_offset, num_groups: compute `num_groups` groups alone, from this one on.
      preferred_element_type: bfloat16, float16 or float32, the dtype of the result; None for the dtype of `lhs`.
      config: tiles, stages, cluster and order; None for the fastest predicted ones.

    Returns:
      (G, K, N), or (num_groups, K, N); zeros for groups without a row.

    Raises:
      ValueError: a rank, shape, dtype or row length is not supported; RuntimeError: no GPU.
    """
    op = "ragged_dot_transposed"
    lhs, rhs = _host.as_array(op, "lhs", lhs), _host.as_array(op, "rhs", rhs)
    _host.require_config(op, config, Config)
    if lhs.ndim != 2 or rhs.ndim != 2 or lhs.shape[0] != rhs.shape[0]:
        raise ValueError(f"{_host.PACKAGE}.{op}: {lhs.shape=}, {rhs.shape=}; must be (M, K) and (M, N)")
    require_halves(op, lhs=lhs, rhs=rhs)
    require_rows(op, "lhs", lhs)
    require_rows(op, "rhs", rhs)
    _host.require_indices(op, M=lhs.shape[0], N=rhs.shape[1], K=lhs.shape[1])
    wanted = lhs.dtype if preferred_element_type is None else preferred_element_type
    out_dtype = _host.require_float(op, wanted, "preferred_element_type")
    if group_offset is not None and num_groups is None:
        raise ValueError(
            f"{_host.PACKAGE}.{op}: {num_groups=}: must say how many groups from group_offset on to compute"
        )
    if num_groups is not None and (num_groups := _host.option(op, "num_groups", num_groups, int)) < 0:
        raise ValueError(f"{_host.PACKAGE}.{op}: {num_groups=}; must be at least 0: pass the number of groups")
    group_sizes, group_offset = arguments.check_groups(op, group_sizes, group_offset, lhs.shape[0], num_groups)
    lhs, rhs = _host.without_gradient(op, f"{op}_reference, of the same module,", lhs, rhs)
    count = group_sizes.size if num_groups is None else num_groups
    return sums(lhs, rhs, group_sizes, group_offset, count, out_dtype, config)


ragged_dot_transposed.Config = Config  # `cookbook.ragged_dot_transposed` is this function, not its module.


def bytes_moved(m: int, n: int, k: int, num_groups: int, itemsize: int = 2) -> int:
    """Both arrays of rows read once, and the matrices of all `num_groups` groups written once."""
    return itemsize * (m * k + m * n + num_groups * k * n)

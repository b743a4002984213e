# SPDX-License-Identifier: Apache-2.0
"""Product of groups of rows with a matrix each on Blackwell's tensor cores: one persistent kernel for all groups.

    o[rows of group g] = activation(lhs[rows of group g] @ rhs[g])

Shapes: lhs (M, K), rhs (G, K, N), or (G, N, K) with `transpose_rhs`, group_sizes (G,) int32, o (M, N). With the
activation "swiglu" rhs has 2N columns: the gate's, then the up product's. Groups lie one after the other, from row 0;
rows that belong to none are zeros. lhs and rhs are both bfloat16 or both float16; sums are float32; o is bfloat16,
float16 or float32. Rows of lhs and rhs must be multiples of 16 bytes, which TMA asks for.

Role and barrier tables: `kernel.py`; what differs: `kernel_ragged.py`, which holds the kernel. A tile begins at a row
of its group, any row. The last pieces of a group are stored as pieces of 64, 32, 16, 8, 4, 2 and 1 rows, or some of
them, as Hopper's `ragged_dot` stores its own. With SwiGLU a tile has two accumulators side by side in tensor memory:
the gate's, and that of the up product.

Bound by: the tensor cores; with few rows per group, the memory that the matrices come from. This is predicted
(`cost.py`): the kernel is compiled for a B200 and interpreted; it was never run or timed on one.

Not supported: batches (use `jax.vmap`), other dtypes; tiles that launch control hands out, because the device alone
knows how many there are; tiles of fewer than 128 rows, so that small groups leave lanes of tensor memory idle. A plain
rhs costs a padded copy unless N is a multiple of 64: store it as (G, N, K). The interpreter runs one CTA.
Chapters: notebooks/16_grouped_matmul.ipynb, notebooks/19b_pairs.ipynb.
Sources: as `cookbook.ragged_dot` and `cookbook.blackwell.matmul`.
"""

import jax
import jax.numpy as jnp
from jax import lax

from .. import _device, _host
from ..gemm.grouped import arguments, differentiable
from ..gemm.grouped.ragged_dot import bytes_moved as bytes_moved
from ..gemm.grouped.ragged_dot import ragged_dot_reference as ragged_dot_reference
from ..gemm.grouped.tables import bounds
from ..gemm.plan import identity
from ..gemm.references import flops as flops
from . import cost
from .kernel_ragged import grouped_product
from .plan import Config, require_interpretable, row_plan

OP = "blackwell.ragged_dot"


def default_config(
    m, n, k, num_groups, dtype=jnp.bfloat16, out_dtype=None, transpose_rhs=False, is_gated=False, num_sms=148,
    interpreted=False,
) -> Config:  # fmt: skip
    """The configuration of the least predicted time for `n` columns of the result, if groups are alike; no measurement
    is behind it."""
    return cost.best(problem(m, n, k, num_groups, dtype, out_dtype, transpose_rhs, is_gated, num_sms, interpreted))


def problem(
    m, n, k, num_groups, dtype=jnp.bfloat16, out_dtype=None, transpose_rhs=False, is_gated=False, num_sms=148,
    interpreted=False,
) -> cost.Problem:  # fmt: skip
    """The product as `cost.to_try` takes it, which says which configurations are worth timing."""
    itemsizes = jnp.dtype(dtype).itemsize, jnp.dtype(out_dtype or dtype).itemsize
    return cost.Problem(m, n, k, not transpose_rhs, *itemsizes, num_sms, interpreted, num_groups, is_gated)


def _launch(lhs, rhs, group_sizes, group_offset, sizes, options: differentiable.Options):
    target, num_groups, transpose_rhs = _host.require_tensor_cores(OP, major=10), rhs.shape[0], options.transpose_rhs
    (_, n, _), is_gated, out_dtype = sizes, options.is_gated, options.out_dtype
    config = options.config or default_config(
        *sizes, num_groups, lhs.dtype, out_dtype, transpose_rhs, is_gated, target.num_sms, target.interpreted
    )
    activation = identity if is_gated else options.activation
    plan = row_plan(*sizes, num_groups, lhs.dtype, transpose_rhs, activation, out_dtype, config, target, is_gated)
    require_interpretable(OP, config, target)
    table = plan.tiles.table_of(group_sizes, group_offset)
    rhs = rhs if transpose_rhs else _padded(rhs, n)
    params = _host.compiler_params(approx_math=options.activation is not identity and out_dtype.itemsize == 2)
    return grouped_product(lhs, rhs, table, plan=plan, params=params)


def _padded(rhs, n: int):
    """Plain matrices, whose columns, of the gate and of the up product each, are whole tiles of the swizzle."""
    if n % _device.SWIZZLE_TILE[1] == 0:
        return rhs
    parts = jnp.split(rhs, rhs.shape[2] // n, axis=2)
    return jnp.concatenate([_host.pad_to_tiles(part, (1, *_device.SWIZZLE_TILE)) for part in parts], axis=2)


def _sums(lhs, rhs, group_sizes, group_offset, count: int, out_dtype):
    """`lhs.T @ rhs` of each group's rows, of `count` groups from `group_offset` on, by XLA.

    As `ragged_dot_transposed.sums`; its rows before the first of these groups are one group more.
    """
    (m, k), n = lhs.shape, rhs.shape[1]
    if 0 in (m, k, n, count):
        return jnp.zeros((count, k, n), out_dtype)
    starts, ends = bounds(group_sizes, m, group_offset, count)
    row = jnp.arange(m, dtype=jnp.int32)[:, None]
    lhs, rhs = (jnp.where((row >= starts[0]) & (row < ends[-1]), x, 0) for x in (lhs, rhs))  # Others may be NaN.
    dims = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
    sizes = jnp.concatenate([starts[:1], ends - starts])
    how = dict(precision=lax.Precision.DEFAULT, preferred_element_type=jnp.float32)  # Exact products of 16-bit values.
    sums = lax.ragged_dot_general(lhs, rhs, sizes, dims, **how)
    return sums[1:].astype(out_dtype)


def ragged_dot(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    *,
    group_offset: jax.Array | None = None,
    transpose_rhs: bool = False,
    activation: _host.Activation | None = None,
    precision: jax.lax.PrecisionLike = None,
    preferred_element_type: _host.DType | None = None,
    config: Config | None = None,
) -> jax.Array:
    """`lhs` times one matrix of `rhs` for each group of rows on data-centre Blackwell: float32 sums, rounded once.

    Compiled for a B200 and interpreted; never run or timed on one.

    Differentiable once in lhs and rhs, as `cookbook.ragged_dot` is. This kernel computes the gradient with respect to
    lhs. XLA computes that with respect to rhs, by `jax.lax.ragged_dot_general`: where it has no kernel for groups, it
    masks all rows for each group, which takes the time and the memory of G products of all rows.

    On an automatic mesh JAX gathers sharded operands on every device and says nothing: call it inside `jax.shard_map`.

    Args:
      lhs: (M, K); bfloat16 or float16.
      rhs: (G, K, N), or (G, N, K) with `transpose_rhs`; of the dtype of `lhs`.
      group_sizes, group_offset: as `cookbook.ragged_dot` takes them.
      transpose_rhs: matrices are given transposed, and are read as they lie.
      activation: "swiglu": rhs has 2N columns, and the result is silu of the first N times the others (N a multiple
        of 8, unless rhs is transposed); or "relu", "gelu" (the tanh form), "sigmoid", "silu", an element-wise
        function, or None.
      precision: as `jax.lax.ragged_dot` takes it; every `jax.lax.Precision` means the same for values of 16 bits.
      preferred_element_type: bfloat16, float16 or float32, the dtype of the result; None for the dtype of `lhs`.
      config: tiles, stages, one or two CTAs; None for the fastest predicted ones.

    Returns:
      (M, N); the activation of zeros, which is zero for those with a name, in rows that belong to no group of rhs.

    Raises:
      ValueError: a rank, shape, dtype, row length, activation or configuration is not supported; RuntimeError: no
        data-centre Blackwell GPU.
    """
    return differentiable.product(
        OP, _launch, _sums, Config, lhs, rhs, group_sizes, group_offset=group_offset, transpose_rhs=transpose_rhs,
        activation=activation, precision=precision, preferred_element_type=preferred_element_type, config=config,
    )  # fmt: skip


ragged_dot.Config = Config  # `cookbook.blackwell.ragged_dot` is this function, not its module.
ragged_dot.check_group_sizes = arguments.check_group_sizes

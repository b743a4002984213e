# SPDX-License-Identifier: Apache-2.0
"""Product of groups of rows with a matrix each, as mixtures of experts need it: one kernel for all groups.

    o[rows of group g] = activation(lhs[rows of group g] @ rhs[g])

Shapes: lhs (M, K), rhs (G, K, N), or (G, N, K) with `transpose_rhs`, group_sizes (G,) int32, o (M, N). With the
activation "swiglu" rhs has 2N columns: the gate's, then the up product's (`kernel_gated.py`). Groups lie one after the
other, from row 0; rows that belong to none are zeros. lhs and rhs are both bfloat16 or both float16; sums are float32;
o is bfloat16, float16 or float32. Rows of lhs and rhs must be multiples of 16 bytes, which TMA asks for.

Role and barrier tables: `gemm/kernel.py`; what differs: `kernel.py`, which holds the kernel. A tile begins at a row of
its group, any row, and reaches over the group's end if the group has no more rows: what it computes of the next group's
rows is not stored. Whole pieces are stored at once, the last ones of a group as pieces of 32, 16, 8, 4, 2 and 1 rows,
or some of them. Where tiles are is read from a table that XLA makes of the sizes, or found in the sizes of few groups
(`tables.py`).

Bound by: the tensor cores; with few rows a group, the memory that the matrices come from. `swapped` then computes the
transposed product, whose tiles may have as few as 8 rows of lhs. `cost.py` chooses the tiles.

To add a bias: in `kernel.store`, before the activation. To add a second accumulator: as `kernel_gated.py` has one. To
add a format: `kernel_fp8.py` has scales of rows and columns (`multiply_and_scale`) and along K (`multiply_blocks`), and
`convert` in `dense/kernel_int8_weights.py` unpacks weights, whose `plan_of` says how they lie.

Not supported: batches (use `jax.vmap`), other dtypes. Chapter: 16. Sources: Gale et al., "MegaBlocks" (2022), for the
grouped product; JAX's `ragged_dot_mgpu`, for the stores by powers of two.
"""

import jax
import jax.numpy as jnp
from jax import lax

from ... import _host
from ..plan import identity
from ..references import flops as flops
from ..tiles import Config
from . import arguments, cost, differentiable
from .kernel import grouped_product, kernel
from .kernel_gated import kernel as gated_kernel
from .plan import gated, row_plan
from .ragged_dot_transposed import sums


def ragged_dot_reference(lhs, rhs, group_sizes, group_offset=0, transpose_rhs=False, activation=None):
    dtype = jnp.promote_types(lhs.dtype, jnp.float32)
    lhs, rhs = lhs.astype(dtype), rhs.astype(dtype).mT if transpose_rhs else rhs.astype(dtype)
    group = jnp.searchsorted(jnp.cumsum(group_sizes), jnp.arange(lhs.shape[0]), side="right") - group_offset

    def add_group(out, matrix):
        number, out = out
        of_group = jnp.matmul(lhs, matrix, precision="highest")
        return (number + 1, jnp.where((group == number)[:, None], of_group, out)), None

    zeros = jnp.zeros((lhs.shape[0], rhs.shape[2]), dtype)
    return differentiable.activation_of("ragged_dot_reference", activation)(
        lax.scan(add_group, (jnp.int32(0), zeros), rhs)[0][1]
    )


def default_config(
    m, n, k, num_groups, dtype=jnp.bfloat16, out_dtype=None, transpose_rhs=False, is_gated=False, num_sms=132
) -> Config:
    """The configuration of the least predicted time for `n` columns of the result, if groups are alike."""
    return cost.best(problem(m, n, k, num_groups, dtype, out_dtype, transpose_rhs, is_gated, num_sms))


def problem(
    m, n, k, num_groups, dtype=jnp.bfloat16, out_dtype=None, transpose_rhs=False, is_gated=False, num_sms=132
) -> cost.RaggedProblem:
    """The product as `cost.ranked` takes it, which says which configurations are worth timing."""
    dtypes = jnp.dtype(dtype), jnp.dtype(out_dtype or dtype)
    return cost.RaggedProblem(m, n, k, num_groups, transpose_rhs, *dtypes, is_gated, num_sms)


def _launch(lhs, rhs, group_sizes, group_offset, sizes, options: differentiable.Options):
    (m, n, k), num_groups, transpose_rhs = sizes, rhs.shape[0], options.transpose_rhs
    target = _host.require_tensor_cores("ragged_dot")
    config = options.config or default_config(
        m, n, k, num_groups, lhs.dtype, options.out_dtype, transpose_rhs, options.is_gated, target.num_sms
    )
    plan = row_plan(
        m, n, k, num_groups, lhs.dtype, transpose_rhs, identity if options.is_gated else options.activation,
        options.out_dtype, config, target.num_sms, target.interpreted,
    )  # fmt: skip
    table = plan.tiles.table_of(group_sizes, group_offset)
    params = _host.compiler_params(approx_math=options.activation is not identity and options.out_dtype.itemsize == 2)
    if options.is_gated:
        return grouped_product(gated_kernel, lhs, rhs, table, plan=gated(plan), params=params)
    return grouped_product(kernel, lhs, rhs, table, plan=plan, params=params)


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
    """`lhs` times one matrix of `rhs` for each group of rows, with float32 sums, rounded once; bitwise reproducible.

    Differentiable once in lhs and rhs: gradients are grouped products too, of the gradient of o rounded to the dtype of
    lhs; to float16 times a power of two, so that loss scales neither overflow nor vanish. Under differentiation an
    activation is applied after the kernel, to the product, which is kept in bfloat16, or in float32 if lhs is float16;
    `jax.checkpoint` has it computed again instead.

    On an automatic mesh JAX gathers sharded operands on every device and says nothing: call it inside `jax.shard_map`.

    Args:
      lhs: (M, K); bfloat16 or float16.
      rhs: (G, K, N), or (G, N, K) with `transpose_rhs`; of the dtype of `lhs`.
      group_sizes: (G,) integers: how many rows of lhs each group has. Rows beyond their sum belong to none. Sizes that
        are not traced are waited for and checked. Traced ones below 0 count as 0, and what goes beyond M is cut off
        (`cookbook.ragged_dot.check_group_sizes` finds both).
      group_offset: None; or an integer, which may be traced, or an array of one: the group that rhs begins with.
        group_sizes then has the sizes of all groups. Rows of groups without a matrix in rhs are zeros.
        Matrices that begin before the first group, or reach beyond the last one, have no rows there.
      transpose_rhs: matrices are given transposed, and are read as they lie.
      activation: "swiglu": rhs has 2N columns, and the result is silu of the first N times the others (N a multiple
        of 8, unless rhs is transposed); or "relu", "gelu" (the tanh form), "sigmoid", "silu", an element-wise
        function, or None.
      precision: as `jax.lax.ragged_dot` takes it; every `jax.lax.Precision` means the same for values of 16 bits.
      preferred_element_type: bfloat16, float16 or float32, the dtype of the result; None for the dtype of `lhs`.
      config: tiles, stages, cluster and order of this product; None for the fastest predicted ones. Products of
        gradients choose their own; so does a float16 one with an activation, differentiated, if this is `swapped`.

    Returns:
      (M, N); the activation of zeros, which is zero for those with a name, in rows that belong to no group of rhs.

    Raises:
      ValueError: a rank, shape, dtype or row length is not supported; RuntimeError: no GPU.
    """
    return differentiable.product(
        "ragged_dot", _launch, sums, Config, lhs, rhs, group_sizes, group_offset=group_offset,
        transpose_rhs=transpose_rhs, activation=activation, precision=precision,
        preferred_element_type=preferred_element_type, config=config,
    )  # fmt: skip


ragged_dot.Config = Config  # `cookbook.ragged_dot` is this function, not its module.
ragged_dot.check_group_sizes = arguments.check_group_sizes


def bytes_moved(m: int, n: int, k: int, num_groups: int, itemsize: int = 2) -> int:
    """Rows and the matrices of the `num_groups` groups that have rows read once, the result written once."""
    return itemsize * (m * k + num_groups * k * n + m * n)

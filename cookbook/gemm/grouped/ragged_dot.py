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

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from ... import _host, _numerics
from .. import differentiable
from ..arguments import product_sizes, require_halves, require_precision
from ..plan import identity
from ..references import flops as flops
from ..tiles import Config
from . import arguments, cost
from .kernel import grouped_product, kernel
from .kernel_gated import kernel as gated_kernel
from .kernel_gated import swiglu
from .plan import gated, row_plan
from .ragged_dot_transposed import sums
from .tables import bounds


def ragged_dot_reference(lhs, rhs, group_sizes, group_offset=0, transpose_rhs=False, activation=None):
    dtype = jnp.promote_types(lhs.dtype, jnp.float32)
    lhs, rhs = lhs.astype(dtype), rhs.astype(dtype).mT if transpose_rhs else rhs.astype(dtype)
    group = jnp.searchsorted(jnp.cumsum(group_sizes), jnp.arange(lhs.shape[0]), side="right") - group_offset

    def add_group(out, matrix):
        number, out = out
        of_group = jnp.matmul(lhs, matrix, precision="highest")
        return (number + 1, jnp.where((group == number)[:, None], of_group, out)), None

    zeros = jnp.zeros((lhs.shape[0], rhs.shape[2]), dtype)
    return _activation("ragged_dot_reference", activation)(lax.scan(add_group, (jnp.int32(0), zeros), rhs)[0][1])


def _activation(op: str, activation):
    """The function of the product that `activation` names."""
    return swiglu if activation == "swiglu" else _numerics.activation_fn(op, activation)


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of a call of `ragged_dot`."""

    transpose_rhs: bool
    out_dtype: jnp.dtype
    config: Config | None
    activation: Callable = identity

    @property
    def is_gated(self) -> bool:
        return self.activation is swiglu


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


def _forward(lhs, rhs, group_sizes, group_offset, options: Options):
    (m, k), num_groups, transpose_rhs = lhs.shape, rhs.shape[0], options.transpose_rhs
    n = rhs.shape[1 if transpose_rhs else 2] // (2 if options.is_gated else 1)
    if 0 in (m, n, k, num_groups):
        activation = identity if options.is_gated else options.activation
        return activation(jnp.zeros((m, n), jnp.float32)).astype(options.out_dtype)
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


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _ragged_dot(lhs, rhs, group_sizes, group_offset, options: Options):
    return _forward(lhs, rhs, group_sizes, group_offset, options)


def _ragged_dot_fwd(lhs, rhs, group_sizes, group_offset, options: Options):
    operands, activation = (lhs, rhs, group_sizes, group_offset), options.activation
    forward = lambda options: _host.without_derivative("ragged_dot", functools.partial(_forward, options=options))
    if activation is identity:
        return forward(options)(*operands), (*operands, None)
    # The backward pass needs what the activation was applied to. To compute it again would cost a third of a step;
    # `jax.checkpoint` does so where memory is short. float16 has too few exponents for it.
    kept = jnp.dtype(jnp.float32) if lhs.dtype == jnp.float16 else lhs.dtype
    # The caller's configuration serves here too, but for results of 32 bits that would have to be transposed.
    config = None if kept.itemsize == 4 and options.config and options.config.swapped else options.config
    before = forward(dataclasses.replace(options, activation=identity, out_dtype=kept, config=config))(*operands)
    return activation(before.astype(jnp.float32)).astype(options.out_dtype), (*operands, before)


def _ragged_dot_bwd(options: Options, residuals, d_out):
    gradients = _host.without_derivative("ragged_dot", functools.partial(_gradients, options))
    return *gradients(*residuals, d_out), None, None


def _gradients(options: Options, lhs, rhs, group_sizes, group_offset, before, d_out):
    (m, _), num_groups, transpose_rhs = lhs.shape, rhs.shape[0], options.transpose_rhs
    if before is not None:
        (d_out,) = jax.vjp(options.activation, before.astype(jnp.float32))[1](d_out.astype(jnp.float32))

    def is_used():
        """Which rows have groups: others may hold anything."""
        (first, *_), (*_, last) = bounds(group_sizes, m, group_offset, num_groups)
        row = jnp.arange(m, dtype=jnp.int32)[:, None]
        return (row >= first) & (row < last)

    d, unscaled = differentiable.as_operand(d_out, lhs.dtype, is_used)
    out_dtype = lhs.dtype if unscaled is None else jnp.dtype(jnp.float32)
    if short := -d.shape[1] % 8:  # rhs is (G, N, K): rows of d are not a multiple of 16 bytes.
        d, rhs_n = jnp.pad(d, ((0, 0), (0, short))), jnp.pad(rhs, ((0, 0), (0, short), (0, 0)))
    else:
        rhs_n = rhs
    d_lhs = _forward(d, rhs_n, group_sizes, group_offset, Options(not transpose_rhs, out_dtype, None))
    pair = (d, lhs) if transpose_rhs else (lhs, d)
    d_rhs = sums(*pair, group_sizes, group_offset, num_groups, out_dtype)[:, : rhs.shape[1]]
    return (d_lhs, d_rhs) if unscaled is None else (unscaled(d_lhs), unscaled(d_rhs))


_ragged_dot.defvjp(_ragged_dot_fwd, _ragged_dot_bwd)


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
        of 8, unless rhs is transposed); or "relu", "gelu" (the tanh form), "silu", an element-wise function, or None.
      precision: as `jax.lax.ragged_dot` takes it; every `jax.lax.Precision` means the same for values of 16 bits.
      preferred_element_type: bfloat16, float16 or float32, the dtype of the result; None for the dtype of `lhs`.
      config: tiles, stages, cluster and order of this product; None for the fastest predicted ones. Products of
        gradients choose their own; so does a float16 one with an activation, differentiated, if this is `swapped`.

    Returns:
      (M, N); the activation of zeros, which is zero for those with a name, in rows that belong to no group of rhs.

    Raises:
      ValueError: a rank, shape, dtype or row length is not supported; RuntimeError: no GPU.
    """
    op = "ragged_dot"
    lhs, rhs = _host.as_array(op, "lhs", lhs), _host.as_array(op, "rhs", rhs)
    transpose_rhs = _host.option(op, "transpose_rhs", transpose_rhs, bool)
    _host.require_config(op, config, Config)
    require_precision(op, precision)
    require_halves(op, lhs=lhs, rhs=rhs)
    product_sizes(op, dict(lhs=lhs, rhs=rhs), transpose_b=transpose_rhs, grouped=True)
    wanted = lhs.dtype if preferred_element_type is None else preferred_element_type
    out_dtype = _host.require_float(op, wanted, "preferred_element_type")
    if activation == "swiglu" and rhs.shape[1 if transpose_rhs else 2] % 2:
        raise ValueError(
            f"{_host.PACKAGE}.{op}: {rhs.shape=} with {activation=}: must have a column of the gate for each other"
        )
    if activation == "swiglu" and not transpose_rhs and rhs.shape[2] % 16:
        cols = rhs.shape[2] // 2
        raise ValueError(
            f"{_host.PACKAGE}.{op}: columns of the up product begin at column {cols} of {rhs.shape=}; TMA copies from "
            f"multiples of 16 bytes: pad the gate and the up product to {-(-cols // 8) * 8} columns each (jnp.pad), or "
            "give rhs as (G, 2N, K) with transpose_rhs"
        )
    if callable(activation):  # Refused here, whether or not the kernel is to apply it.
        _numerics.lowerable(activation, jax.ShapeDtypeStruct((8,), jnp.float32))
    activation = identity if activation is None else _activation(op, activation)
    group_sizes, group_offset = arguments.check_groups(op, group_sizes, group_offset, lhs.shape[0], rhs.shape[0])
    operands = (lhs, rhs, group_sizes) if group_offset is None else (lhs, rhs, group_sizes, group_offset)
    lhs, rhs, group_sizes, group_offset = (*_host.reverse_only(op, *operands), None)[:4]
    return _ragged_dot(lhs, rhs, group_sizes, group_offset, Options(transpose_rhs, out_dtype, config, activation))


ragged_dot.Config = Config  # `cookbook.ragged_dot` is this function, not its module.
ragged_dot.check_group_sizes = arguments.check_group_sizes


def bytes_moved(m: int, n: int, k: int, num_groups: int, itemsize: int = 2) -> int:
    """Rows and the matrices of the `num_groups` groups that have rows read once, the result written once."""
    return itemsize * (m * k + num_groups * k * n + m * n)

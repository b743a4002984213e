# SPDX-License-Identifier: Apache-2.0
"""Matrix product: warp-specialized and persistent, its operands shared in clusters, its results stored meanwhile.

    o = activation(a @ b + bias)

Shapes: a (..., M, K), b (K, N), bias (N,), o (..., M, N); with `transpose_a` a is (K, M), with `transpose_b` b is
(N, K), read as they lie. a and b are both bfloat16 or both float16; sums are float32; o is bfloat16, float16 or
float32. Rows of a and b must be multiples of 16 bytes, which TMA asks for.

Role and barrier tables: `kernel.py`, which holds the kernel. This file says which operands, tiles and epilogue it gets.

Bound by: the tensor cores, and the power that they may draw; for few rows or columns, memory. The tile, the parts of K
and the order are those that `cost.py` predicts to be fastest.

Not supported: batches of b (use `jax.vmap`), other dtypes. A plain b whose N is not a multiple of 64, or whose K is not
a multiple of 8, is read as it lies with `swapped`; a transposed a of such a size costs a padded copy where its tile has
more than 64 rows per warpgroup. Chapters: 7 (roles), 8 (persistence, order, clusters, parts of K). Sources: CUTLASS's
documents on warp-specialized persistent kernels, for the ideas; Osama et al., "Stream-K" (2023), on dividing K.
"""

import jax
import jax.numpy as jnp

from ... import _host, _numerics
from .. import cost, differentiable
from ..kernel import kernel
from ..launch import fused_product
from ..plan import plan_of
from ..references import bytes_moved as bytes_moved
from ..references import exact_product
from ..references import flops as flops
from ..tiles import Config


def matmul_reference(a, b, bias=None, activation=None):
    product = exact_product(a, b)
    product = product if bias is None else product + bias.astype(product.dtype)
    return _numerics.activation_fn("matmul_reference", activation)(product)


def default_config(
    m, n, k, dtype=jnp.bfloat16, out_dtype=None, transpose_a=False, transpose_b=False, num_sms=132
) -> Config:
    """The configuration of the least predicted time for an (M, K) by (K, N) product."""
    itemsizes = jnp.dtype(dtype).itemsize, jnp.dtype(dtype).itemsize, jnp.dtype(out_dtype or dtype).itemsize
    return cost.best(cost.Problem(m, n, k, (transpose_a, not transpose_b), itemsizes, num_sms))


def _launch(a, b, bias, sizes, options: differentiable.Options):
    target = _host.require_tensor_cores("matmul")
    transposes, out_dtype = (options.transpose_a, options.transpose_b), options.out_dtype
    config = options.config or default_config(*sizes, a.dtype, out_dtype, *transposes, target.num_sms)
    plan = plan_of(
        *sizes, (a.dtype, b.dtype), (options.transpose_a, not options.transpose_b), options.activation, out_dtype,
        config, target.num_sms, target.interpreted,
    )  # fmt: skip
    params = _host.compiler_params(approx_math=out_dtype.itemsize == 2)
    vectors = {} if bias is None else dict(bias=bias.astype(jnp.float32))
    return fused_product(kernel, a, b, vectors, plan=plan, params=params)


def matmul(
    a: jax.Array,
    b: jax.Array,
    *,
    bias: jax.Array | None = None,
    activation: _host.Activation | None = None,
    out_dtype: _host.DType | None = None,
    transpose_a: bool = False,
    transpose_b: bool = False,
    precision: jax.lax.PrecisionLike = None,
    preferred_element_type: _host.DType | None = None,
    config: Config | None = None,
) -> jax.Array:
    """`activation(a @ b + bias)`, with float32 sums, rounded once; bitwise reproducible from run to run.

    Differentiable once in a, b and bias: gradients are products by the same kernel, of the gradient of o rounded to the
    dtype of a; to float16 times a power of two, so that loss scales neither overflow nor vanish. Under differentiation
    an activation is applied after the kernel, to float32 sums that are kept.

    On an automatic mesh JAX gathers sharded operands on every device and says nothing: call it inside `jax.shard_map`.

    Args:
      a: (..., M, K), or (K, M) with `transpose_a`; bfloat16 or float16.
      b: (K, N), or (N, K) with `transpose_b`; of the dtype of `a`.
      bias: (N,), of a floating dtype; or None.
      activation: "relu", "gelu" (the tanh form), "sigmoid", "silu", an element-wise function, or None.
      out_dtype: bfloat16, float16 or float32; None for the dtype of `a`.
      transpose_a, transpose_b: the operand is given transposed, and is read as it lies: no transposed copy is made.
      precision: as `jnp.matmul` takes it; every `jax.lax.Precision` means the same for values of 16 bits.
      preferred_element_type: `out_dtype` by the name that `jnp.matmul` gives it.
      config: tiles, stages, cluster and order; None for the fastest predicted ones.

    Returns:
      (..., M, N) of `out_dtype`.

    Raises:
      ValueError: a rank, shape, dtype, row length, activation or option is not supported; RuntimeError: no GPU.
    """
    return differentiable.product(
        "matmul", _launch, Config, a, b, bias=bias, activation=activation, out_dtype=out_dtype, precision=precision,
        preferred_element_type=preferred_element_type, transpose_a=transpose_a, transpose_b=transpose_b, config=config,
    )  # fmt: skip


matmul.Config = Config  # `cookbook.matmul` is this function, not its module.

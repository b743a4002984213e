# SPDX-License-Identifier: Apache-2.0
"""Matrix product on Blackwell's tensor cores: sums in tensor memory, stored under the products of the next tile.

    o = activation(a @ b + bias)

Shapes: a (..., M, K), b (K, N), bias (N,), o (..., M, N); with `transpose_a` a is (K, M), with `transpose_b` b is
(N, K), read as they lie. a and b are both bfloat16 or both float16; sums are float32; o is bfloat16, float16 or
float32. Rows of a and b must be multiples of 16 bytes, which TMA asks for.

Role and barrier tables: `kernel.py`, which holds the kernel. This file says which operands, tiles and epilogue it gets.

Bound by: the tensor cores, and before them by the copies into shared memory, which a pair of blocks halves for b. This
is predicted (`cost.py`): the kernel is compiled for a B200 and interpreted; it was never run or timed on one.

Not supported: batches of b (use `jax.vmap`), other dtypes; tiles of fewer than 128 rows, so that few rows of a leave
tensor cores idle; and parts of K, so that a small o with a long K leaves SMs idle. For few rows of a ask for the
transposed product, `matmul(b, a, transpose_a=True, transpose_b=True).T`, whose tiles can be 16 columns wide. A plain b
costs a padded copy unless N is a multiple of 64 and K of 8, and so does a transposed a: store b as (N, K). The
interpreter runs one CTA with a static schedule.
Chapters: notebooks/19_blackwell.ipynb, notebooks/19b_pairs.ipynb.
Sources: NVIDIA's PTX ISA on tcgen05 and clusterlaunchcontrol; CUTLASS's documents on Blackwell, for the ideas.
"""

import jax
import jax.numpy as jnp

from .. import _host
from ..gemm import differentiable
from ..gemm.dense.matmul import matmul_reference as matmul_reference
from ..gemm.references import bytes_moved as bytes_moved
from ..gemm.references import flops as flops
from . import cost
from .kernel import product
from .plan import Config, plan_of, require_interpretable

OP = "blackwell.matmul"


def default_config(
    m, n, k, dtype=jnp.bfloat16, out_dtype=None, transpose_b=False, num_sms=148, interpreted=False
) -> Config:
    """The configuration of the least predicted time for an (M, K) by (K, N) product; no measurement is behind it."""
    itemsizes = jnp.dtype(dtype).itemsize, jnp.dtype(out_dtype or dtype).itemsize
    return cost.best(cost.Problem(m, n, k, not transpose_b, *itemsizes, num_sms=num_sms, one_cta=interpreted))


def _launch(a, b, bias, sizes, options: differentiable.Options):
    target = _host.require_tensor_cores(OP, major=10)
    transpose_b, out_dtype = options.transpose_b, options.out_dtype
    config = options.config or default_config(
        *sizes, a.dtype, out_dtype, transpose_b, target.num_sms, target.interpreted
    )
    require_interpretable(OP, config, target)
    transposed = options.transpose_a, not transpose_b
    plan = plan_of(*sizes, a.dtype, transposed, options.activation, out_dtype, config, target)
    params = _host.compiler_params(approx_math=out_dtype.itemsize == 2)
    return product((a, b), bias, plan=plan, params=params)


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
    """`activation(a @ b + bias)` on data-centre Blackwell, with float32 sums, rounded once.

    Compiled for a B200 and interpreted; never run or timed on one. Differentiable once in a, b and bias, as
    `cookbook.matmul` is.

    On an automatic mesh JAX gathers sharded operands on every device and says nothing: call it inside `jax.shard_map`.

    Args:
      a: (..., M, K), or (K, M) with `transpose_a`; bfloat16 or float16.
      b: (K, N), or (N, K) with `transpose_b`; of the dtype of `a`.
      bias: (N,), of a floating dtype; or None.
      activation: "relu", "gelu" (the tanh form), "sigmoid", "silu", an element-wise function, or None.
      out_dtype: bfloat16, float16 or float32; None for the dtype of `a`.
      transpose_a, transpose_b: the operand is given transposed, and is read as it lies.
      precision: as `jnp.matmul` takes it; every `jax.lax.Precision` means the same for values of 16 bits.
      preferred_element_type: `out_dtype` by the name that `jnp.matmul` gives it.
      config: tiles, stages, one or two CTAs, and schedule; None for the fastest predicted ones.

    Returns:
      (..., M, N) of `out_dtype`.

    Raises:
      ValueError: a rank, shape, dtype, row length, activation or configuration is not supported; RuntimeError: no
        data-centre Blackwell GPU.
    """
    return differentiable.product(
        OP, _launch, Config, a, b, bias=bias, activation=activation, out_dtype=out_dtype, precision=precision,
        preferred_element_type=preferred_element_type, transpose_a=transpose_a, transpose_b=transpose_b, config=config,
    )  # fmt: skip


matmul.Config = Config  # `cookbook.blackwell.matmul` is this function, not its module.

# SPDX-License-Identifier: Apache-2.0
"""Matrix product of 8-bit floats, scaled: the kernel of `kernel.py` on the tensor cores' fp8 instructions.

    o = (a * scale_a) @ (b * scale_b)

Shapes: a (M, K), b (K, N), or (N, K) with `transpose_b`, o (M, N). a and b are float8_e4m3fn or float8_e5m2, each its
own; scales are float32, one number or one for each row of a and each column of b; o is bfloat16, float16 or float32.
K must be a multiple of 16, the bytes of a row that TMA asks for.

Role and barrier tables: `kernel.py`. The scales are applied to the float32 sums, on their way out.

Bound by: the tensor cores, twice as fast as with 16 bits. They add fp8 products with fewer bits than float32 has,
whichever library asks them to.

Not supported: scales of blocks along K; batches (use `jax.vmap`); differentiation. The tensor cores want both fp8
operands with K along their rows: a plain b is transposed, at the cost of one copy; store weights as (N, K).
Chapter: 9. Source: Micikevicius et al., "FP8 formats for deep learning" (2022).
"""

import math

import jax
import jax.numpy as jnp

from ... import _host
from .. import arguments, cost
from ..kernel import kernel
from ..launch import fused_product
from ..plan import identity, plan_of
from ..references import flops as flops
from ..tiles import Config

DTYPES = (jnp.float8_e4m3fn, jnp.float8_e5m2)


def matmul_fp8_reference(a, b, scale_a, scale_b):
    dtype = jnp.promote_types(jnp.float32, jnp.result_type(scale_a, scale_b))
    product = jnp.matmul(a.astype(dtype), b.astype(dtype), precision="highest")
    return product * jnp.reshape(scale_a, (-1, 1)) * jnp.reshape(scale_b, (1, -1))


def default_config(m: int, n: int, k: int, out_dtype=jnp.bfloat16, num_sms: int = 132) -> Config:
    """The configuration of the least predicted time for an (M, K) by (N, K) product."""
    return cost.best(cost.Problem(m, n, k, (False, False), (1, 1, jnp.dtype(out_dtype).itemsize), num_sms))


def _scale(name: str, scale, size: int):
    """A scale as float32 (1,) or (size,)."""
    scale = _host.as_array("matmul_fp8", name, scale)
    if not jnp.issubdtype(scale.dtype, jnp.floating) or scale.size not in (1, size) or scale.ndim > 2:
        raise ValueError(
            f"{_host.PACKAGE}.matmul_fp8: {name} is {scale.dtype} {scale.shape}; must be one float, or {size} of them, "
            f"one for each {'row of a' if name == 'scale_a' else 'column of b'}"
        )
    return jnp.ravel(scale.astype(jnp.float32))


def _vectors(row_scale, col_scale) -> dict:
    """The kernel's scales, by row and by column; single numbers are multiplied into one `scale`."""
    vectors = dict(row_scale=row_scale, col_scale=col_scale)
    single = [name for name, scale in vectors.items() if scale.size == 1]
    return vectors | (dict(scale=math.prod(vectors.pop(name) for name in single)) if single else {})


def matmul_fp8(
    a: jax.Array,
    b: jax.Array,
    *,
    scale_a: jax.Array = 1.0,
    scale_b: jax.Array = 1.0,
    out_dtype: _host.DType = jnp.bfloat16,
    transpose_b: bool = False,
    config: Config | None = None,
) -> jax.Array:
    """`(a * scale_a) @ (b * scale_b)` of 8-bit floats, with float32 sums, rounded once.

    On an automatic mesh JAX gathers sharded operands on every device and says nothing: call it inside `jax.shard_map`.

    Args:
      a: (M, K); float8_e4m3fn or float8_e5m2.
      b: (K, N), which costs a copy, or (N, K) with `transpose_b`; float8_e4m3fn or float8_e5m2.
      scale_a: a number, or M of them, (M,) or (M, 1); float32.
      scale_b: a number, or N of them, (N,) or (1, N); float32.
      out_dtype: bfloat16, float16 or float32.
      transpose_b: b is given transposed, and is read as it lies.
      config: tiles, stages, cluster and order; None chooses by shape.

    Returns:
      (M, N) of `out_dtype`.

    Raises:
      ValueError: a rank, shape, dtype, scale or row length is not supported; RuntimeError: no GPU.
    """
    a, b = (_host.as_array("matmul_fp8", name, x) for name, x in (("a", a), ("b", b)))
    transpose_b = _host.option("matmul_fp8", "transpose_b", transpose_b, bool)
    out_dtype = _host.require_float("matmul_fp8", out_dtype)
    _host.require_config("matmul_fp8", config, Config)
    if a.dtype not in DTYPES or b.dtype not in DTYPES:
        raise ValueError(
            f"{_host.PACKAGE}.matmul_fp8: {a.dtype=}, {b.dtype=}; must be float8_e4m3fn or float8_e5m2: scale and cast "
            "them"
        )
    m, n, k = arguments.product_sizes("matmul_fp8", dict(a=a, b=b), transpose_b=transpose_b, along_k=True)
    scale_a, scale_b = _scale("scale_a", scale_a, m), _scale("scale_b", scale_b, n)
    instead = f"{_host.PACKAGE}.matmul of 16-bit operands"
    a, b, scale_a, scale_b = _host.without_gradient("matmul_fp8", instead, a, b, scale_a, scale_b)
    vectors = _vectors(scale_a, scale_b)
    if 0 in (m, n, k):
        return jnp.zeros((m, n), out_dtype)
    target = _host.require_tensor_cores("matmul_fp8")
    config = config or default_config(m, n, k, out_dtype, target.num_sms)
    dtypes = a.dtype, b.dtype
    plan = plan_of(m, n, k, dtypes, (False, False), identity, out_dtype, config, target.num_sms, target.interpreted)
    b = b if transpose_b else b.T
    return fused_product(kernel, a, b, vectors, plan=plan, params=_host.compiler_params())


matmul_fp8.Config = Config  # `cookbook.matmul_fp8` is this function, not its module.


def bytes_moved(m: int, n: int, k: int, itemsize: int = 2) -> int:
    """Each operand read once and the result, of `itemsize` bytes, written once."""
    return m * k + k * n + itemsize * m * n

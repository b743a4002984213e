# SPDX-License-Identifier: Apache-2.0
"""Matrix product of 16-bit activations and 8-bit integer weights, which become 16-bit on the way to the tensor cores.

    o = a @ w_q * scales, computed as oᵀ = wᵀ aᵀ

Shapes: a (M, K), w_q (K, N), or (N, K) with `transpose_w`, scales (N,), o (M, N). a is bfloat16 or float16, w_q int8, o
bfloat16, float16 or float32; sums are float32. K must be a multiple of 16, the bytes of a row that TMA asks for. 8-bit
integers are exact in either 16-bit float, so that only the quantization itself errs.

Role and barrier tables: `kernel.py`, where the operand `a` is w_q and the operand `b` is a; and
`kernel_int8_weights.py`, which holds the kernel.

Bound by: the tensor cores with many rows of a, as in `matmul`; with few, the memory that the weights come from. Longer
steps read longer rows at a time.

Not supported: zero points, scales of groups along K; batches (use `jax.vmap`); differentiation. The
tensor cores want weights with K along their rows: a plain w_q is transposed, at the cost of one copy; store weights as
(N, K). Chapter: 9b. Source: Dettmers et al., "LLM.int8()" (2022), for the use.
"""

import jax
import jax.numpy as jnp

from ... import _host
from .. import arguments
from ..launch import fused_product
from ..references import exact_product
from ..references import flops as flops
from ..tiles import Tiles
from .cost_int8_weights import default_config
from .cost_int8_weights import ranked as ranked
from .kernel_int8_weights import Config, kernel, plan_of, require_config


def matmul_int8_weights_reference(a, w_q, scales):
    product = exact_product(a, w_q)
    return product * scales.astype(product.dtype)


def matmul_int8_weights(
    a: jax.Array,
    w_q: jax.Array,
    scales: jax.Array,
    *,
    out_dtype: _host.DType | None = None,
    transpose_w: bool = False,
    config: Config | None = None,
) -> jax.Array:
    """`a @ w_q * scales`, the weights dequantized on the way to the tensor core; float32 sums, rounded once.

    On an automatic mesh JAX gathers sharded operands on every device and says nothing: call it inside `jax.shard_map`.

    Args:
      a: (M, K); bfloat16 or float16.
      w_q: (K, N), which costs a copy, or (N, K) with `transpose_w`; int8.
      scales: (N,), of a floating dtype: what one unit of a column of w_q stands for.
      out_dtype: bfloat16, float16 or float32; None for the dtype of `a`.
      transpose_w: w_q is given transposed, and is read as it lies.
      config: tiles, stages, cluster and order; None chooses by shape.

    Returns:
      (M, N) of `out_dtype`.

    Raises:
      ValueError: a rank, shape, dtype or row length is not supported; RuntimeError: no GPU.
    """
    op = f"{_host.PACKAGE}.matmul_int8_weights"
    a, w_q, scales = (
        _host.as_array("matmul_int8_weights", name, x) for name, x in (("a", a), ("w_q", w_q), ("scales", scales))
    )
    transpose_w = _host.option("matmul_int8_weights", "transpose_w", transpose_w, bool)
    require_config("matmul_int8_weights", config)
    if a.dtype not in (jnp.bfloat16, jnp.float16) or w_q.dtype != jnp.int8:
        raise ValueError(f"{op}: {a.dtype=}, {w_q.dtype=}; must be bfloat16 or float16, and int8: cast them")
    m, n, k = arguments.product_sizes("matmul_int8_weights", dict(a=a, w_q=w_q), transpose_b=transpose_w, along_k=True)
    if scales.shape != (n,) or not jnp.issubdtype(scales.dtype, jnp.floating):
        raise ValueError(f"{op}: {scales.shape=}, {scales.dtype=}; must be ({n},), one float for each of N")
    out_dtype = _host.require_float("matmul_int8_weights", a.dtype if out_dtype is None else out_dtype)
    instead = f"{_host.PACKAGE}.matmul of dequantized weights"
    a, w_q, scales = _host.without_gradient("matmul_int8_weights", instead, a, w_q, scales)
    if 0 in (m, n, k):
        return jnp.zeros((m, n), out_dtype)
    target = _host.require_tensor_cores("matmul_int8_weights")
    config = config or default_config(m, n, k, target.num_sms)
    tiles = Tiles(n, m, k, config.tile_k, config, target.num_sms)
    plan = plan_of(tiles, w_q, a, out_dtype, target.interpreted)
    vectors = dict(col_scale=scales.astype(jnp.float32))
    w_q = w_q if transpose_w else w_q.T
    return fused_product(kernel, a, w_q, vectors, plan=plan, params=_host.compiler_params())


matmul_int8_weights.Config = Config  # `cookbook.matmul_int8_weights` is this function, not its module.


def bytes_moved(m: int, n: int, k: int, itemsize: int = 2) -> int:
    """a and the result, of `itemsize` bytes, and the 8-bit weights, each once."""
    return itemsize * m * k + k * n + itemsize * m * n

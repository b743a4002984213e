# SPDX-License-Identifier: Apache-2.0
"""Matrix product of 16-bit activations and 8-bit integer weights, which become 16-bit on the way to the tensor cores.

    o = a @ w_q * scales, computed as oᵀ = wᵀ aᵀ

Shapes: a (M, K), w_q (K, N), or (N, K) with `transpose_w`, scales (N,), o (M, N). a is bfloat16 or float16, w_q int8, o
bfloat16, float16 or float32; sums are float32. Rows of a and w_q must be multiples of 16 bytes. 8-bit integers are
exact in either 16-bit float, so that only the quantization itself errs.

Role and barrier tables: `kernel.py`, where the operand `a` is w_q and the operand `b` is a; and
`kernel_int8_weights.py`, which holds the kernel.

Bound by: the tensor cores with many rows of a, as in `matmul`; with few, the memory that the weights come from. Longer
steps read longer rows at a time.

Not supported: zero points, scales of groups along K, 4-bit weights; batches (use `jax.vmap`); differentiation. The
tensor cores want weights with K along their rows: a plain w_q is transposed, at the cost of one copy; store weights as
(N, K). Under an automatic mesh JAX gathers sharded operands first: call it inside `jax.shard_map`. Chapter: 9b. Source:
Dettmers et al., "LLM.int8()" (2022), for the use.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ... import _host
from ..kernel import fused_product
from ..plan import Tiles
from .cost_int8_weights import default_config
from .cost_int8_weights import ranked as ranked
from .kernel_int8_weights import Config, kernel, plan_of


def matmul_int8_weights_reference(a, w_q, scales):
    dtype = jnp.promote_types(a.dtype, jnp.float32)
    return jnp.matmul(a.astype(dtype), w_q.astype(dtype), precision="highest") * scales.astype(dtype)


def _check(a, w_q, scales, transpose_w: bool) -> tuple[int, int, int]:
    op = f"{_host.PACKAGE}.matmul_int8_weights"
    if a.ndim != 2 or w_q.ndim != 2:
        raise ValueError(f"{op}: {a.shape=}, {w_q.shape=}; both must be matrices: reshape a, or use jax.vmap")
    if a.dtype not in (jnp.bfloat16, jnp.float16) or w_q.dtype != jnp.int8:
        raise ValueError(f"{op}: {a.dtype=}, {w_q.dtype=}; must be bfloat16 or float16, and int8: cast them")
    (m, k), (k_w, n) = a.shape, w_q.shape[:: -1 if transpose_w else 1]
    if k != k_w:
        raise ValueError(
            f"{op}: {a.shape=} and {w_q.shape=} ({transpose_w=}) share no K: {k} is not {k_w}; is w_q stored the other "
            "way round?"
        )
    for name, x in (("a", a), ("w_q", w_q)):
        unit = 16 // x.dtype.itemsize
        if x.shape[1] % unit:
            raise ValueError(
                f"{op}: a row of {name} has {x.shape[1]} values, {x.shape[1] * x.dtype.itemsize} bytes; TMA needs a "
                f"multiple of 16 bytes: pad it to {pl.cdiv(x.shape[1], unit) * unit} (jnp.pad, one copy of {name})"
            )
    if scales.shape != (n,) or not jnp.issubdtype(scales.dtype, jnp.floating):
        raise ValueError(f"{op}: {scales.shape=}, {scales.dtype=}; must be ({n},), one float for each of N")
    _host.require_indices("matmul_int8_weights", M=m, N=n, K=k)
    return m, n, k


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
    a, w_q, scales = (
        _host.as_array("matmul_int8_weights", name, x) for name, x in (("a", a), ("w_q", w_q), ("scales", scales))
    )
    transpose_w = _host.option("matmul_int8_weights", "transpose_w", transpose_w, bool)
    _host.require_config("matmul_int8_weights", config, Config)
    m, n, k = _check(a, w_q, scales, transpose_w)
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
    return fused_product(kernel, w_q, a, vectors, plan=plan, params=_host.compiler_params())


matmul_int8_weights.Config = Config  # `cookbook.matmul_int8_weights` is this function, not its module.


def flops(m: int, n: int, k: int) -> int:
    return 2 * m * n * k


def bytes_moved(m: int, n: int, k: int, itemsize: int = 2) -> int:
    """a and the result, of `itemsize` bytes, and the 8-bit weights, each once."""
    return itemsize * m * k + k * n + itemsize * m * n

# SPDX-License-Identifier: Apache-2.0
"""Matrix product of bfloat16 activations and MXFP4 weights: e2m1 values, and a power of two for each 32 along K.

    o = x @ (e2m1 * 2^e), computed as oᵀ = wᵀ xᵀ

Shapes: x (M, K), w (ceil(N / 64), ceil(K / 64), 512), scales (ceil(K / 64), N), o (M, N). x is bfloat16, w uint32,
scales uint16, o bfloat16, float16 or float32; sums are float32. K must be a multiple of 8, the 16 bytes of a row of x
that TMA asks for. Weights are exact. Results in bfloat16 for few rows are products in FP8 of x in two halves
(`halves.py`), whose sums of 32 values of K have about 14 bits. In products of 16 bits, sums are 2^-40 of their size
until the end, so results below 2^-86 lose bits.

Role and barrier tables: `kernel.py`, where the operand `a` is w and the operand `b` is x; the kernel is that of
`kernel_int8_weights.py`; `four_bits.py` says how weights lie and what becomes of them; `pack.py` packs them.

Bound by: the memory that the weights come from with few rows of x, the tensor cores with many.

Not supported: float16; batches (use `jax.vmap`); differentiation. Chapter: notebooks/09c_four_bits.ipynb. Source: Open
Compute Project, "OCP Microscaling Formats (MX)" (2023); gpt-oss (2025), for the use.
"""

import functools

import jax
import jax.numpy as jnp

from ... import _host
from ..references import exact_product
from ..references import flops as flops
from .four_bits import E2M1, E2M1_BIAS
from .kernel_int8_weights import Config, in_both_forms
from .matmul_int4_weights import check_sizes, product
from .matmul_int4_weights import ranked as ranked_of_integers
from .pack import e2m1

BLOCK = 32  # Values of K that share a scale.


def matmul_mxfp4_weights_reference(x, w, scales):
    return exact_product(x, widened(w, scales, jnp.promote_types(x.dtype, jnp.float32))[..., : x.shape[1], :])


def widened(w, scales, dtype):
    """(..., K, N) weights, K a multiple of 64."""
    exponents = jnp.stack([scales & 255, scales >> 8], axis=-2).reshape(
        *scales.shape[:-2], 2 * scales.shape[-2], scales.shape[-1]
    )
    exponents = jnp.repeat(exponents.astype(jnp.int32) - (127 + E2M1_BIAS), BLOCK, axis=-2)
    values = e2m1(w)[..., : scales.shape[-1], :]
    return jnp.ldexp(values.mT.astype(dtype), exponents)


@functools.lru_cache(4096)
def default_config(m: int, n: int, k: int, num_sms: int = 132) -> Config:
    """The configuration of the least predicted time, of results in bfloat16: for few rows it is in FP8."""
    return ranked(m, n, k, 1, num_sms)[0]


def ranked(m: int, n: int, k: int, count: int, num_sms: int = 132) -> list[Config]:
    """The `count` configurations of the least predicted time, the best first: those that are worth timing."""
    dtype = jnp.dtype(jnp.bfloat16)
    return in_both_forms(ranked_of_integers(m, n, k, count, num_sms), E2M1(dtype), dtype)


def matmul_mxfp4_weights(
    x: jax.Array,
    w: jax.Array,
    scales: jax.Array,
    *,
    out_dtype: _host.DType | None = None,
    config: Config | None = None,
) -> jax.Array:
    """The product of `x` and MXFP4 weights, whose values are exact; float32 sums, rounded once.

    Few rows are multiplied in FP8 if the result is bfloat16, which hides what these sums lose: see `config`.

    `cookbook.pack_mxfp4` packs weights and scales, once, from gpt-oss's layout.

    On an automatic mesh JAX gathers sharded operands on every device and says nothing: call it inside `jax.shard_map`.

    Args:
      x: (M, K); bfloat16, K a multiple of 8.
      w: (ceil(N / 64), ceil(K / 64), 512); uint32, as packed.
      scales: (ceil(K / 64), N); uint16, as packed. An N that is not a multiple of 8 costs a copy of them.
      out_dtype: bfloat16, float16 or float32; None for the dtype of `x`.
      config: tiles, stages, cluster and order; None chooses by shape. With `fp8=False` products are of 16 bits.

    Returns:
      (M, N) of `out_dtype`. In FP8 a row of x with an infinity gives NaN.

    Raises:
      ValueError: a rank, shape, dtype or row length is not supported; RuntimeError: no GPU.
    """
    op = "matmul_mxfp4_weights"
    x, w, scales = (_host.as_array(op, name, value) for name, value in (("x", x), ("w", w), ("scales", scales)))
    m, n, k = check_sizes(op, x, w, scales, (jnp.bfloat16,))
    if scales.shape != (units := (-(-k // 64), n)) or scales.dtype != jnp.uint16:
        raise ValueError(
            f"{_host.PACKAGE}.{op}: {scales.shape=}, {scales.dtype=}; must be {units} and uint16: pack weights and "
            f"scales together, with {_host.PACKAGE}.pack_mxfp4"
        )
    return product(op, x, w, [scales], E2M1(x.dtype), (m, n, k), out_dtype, config)


matmul_mxfp4_weights.Config = Config  # `cookbook.matmul_mxfp4_weights` is this function, not its module.


def bytes_moved(m: int, n: int, k: int, itemsize: int = 2) -> int:
    """x and the result, of `itemsize` bytes, the weights and a byte for each 32 of them, each once."""
    return itemsize * m * (k + n) + n * k // 2 + n * -(-k // BLOCK)

# SPDX-License-Identifier: Apache-2.0
"""Matrix product of MXFP8 operands: 8-bit floats whose blocks of 32 along K share a power of two.

    o = activation((a * a_scales) @ (b * b_scales).T + bias)

Shapes: a (M, K), a_scales (M, K / 32), b (N, K), b_scales (N, K / 32), bias (N,), o (M, N). a and b are float8_e4m3fn,
scales float8_e8m0fnu, one for each 32 values along K; sums are float32; o is bfloat16, float16 or float32. K must be a
multiple of 32. `quantize_mxfp8` makes an operand of an array.

Role and barrier tables: `kernel.py`, which holds the kernel. The tensor cores apply the scales while they multiply:
they read them from tensor memory, where the multiply warpgroup has a step's scales copied before its products.

Bound by: the tensor cores, twice as fast as with 16 bits. This is predicted (`cost.py`): the kernel is compiled for a
B200; it was never run or timed on one. JAX's interpreter has no scaled MMA.

Not supported: a b that lies as (K, N), other formats (MXFP4, NVFP4, e5m2), batches (use `jax.vmap`), differentiation;
tiles of fewer than 128 rows and parts of K (for a few rows of a, exchange the operands: the result is transposed then).
Scales are rearranged by XLA, one copy of a thirty-second of the operands, into the order that tcgen05.cp reads.
Chapter: notebooks/19b_pairs.ipynb.
Source: the OCP Microscaling Formats specification, version 1.0 (2023); NVIDIA's PTX ISA on tcgen05.mma.
"""

import jax
import jax.numpy as jnp
from jax import lax

from .. import _host, _numerics
from ..gemm import arguments
from ..gemm.plan import identity
from ..gemm.references import flops as flops
from . import cost
from .kernel import product
from .plan import BLOCK, LANES, SCALES, Config, plan_of

OP = "blackwell.matmul_mxfp8"
E4M3, E8M0 = jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e8m0fnu)
E8M0_BIAS, E8M0_NAN = 127, 255


def matmul_mxfp8_reference(a, a_scales, b, b_scales, bias=None, activation=None):
    """In float64 where JAX has it (`jax.enable_x64`), otherwise in float32."""
    dtype = jax.dtypes.canonicalize_dtype(jnp.float64)
    a, b = (
        x.astype(dtype) * jnp.repeat(scales.astype(dtype), 32, axis=1) for x, scales in ((a, a_scales), (b, b_scales))
    )
    out = jnp.matmul(a, b.T, precision="highest")
    out = out if bias is None else out + bias.astype(dtype)
    return _numerics.activation_fn("matmul_mxfp8_reference", activation)(out)


def quantize_mxfp8(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """An array as MXFP8: values and the scales of blocks of 32 along its last axis.

    A block's scale is the least power of two with which its largest value does not exceed 448, the largest of
    float8_e4m3fn: nothing saturates. That is at times twice the scale that the OCP specification proposes, which
    saturates. The scale of a block with a NaN or an infinity is NaN, and so is all that it is multiplied with.

    Args:
      x: (..., K), of a floating dtype; K a multiple of 32.

    Returns:
      (values (..., K) of float8_e4m3fn, scales (..., K / 32) of float8_e8m0fnu).

    Raises:
      ValueError: K is not a multiple of 32, or x is not of a floating dtype.
    """
    x = _host.as_array("blackwell.quantize_mxfp8", "x", x)
    if not jnp.issubdtype(x.dtype, jnp.floating) or x.ndim == 0 or x.shape[-1] % BLOCK:
        raise ValueError(
            f"{_host.PACKAGE}.blackwell.quantize_mxfp8: {x.shape=}, {x.dtype=}; must be of a floating dtype, its last "
            f"axis a multiple of {BLOCK}, the values that share a scale: pad it with zeros (jnp.pad)"
        )
    blocks = x.astype(jnp.float32).reshape(*x.shape[:-1], x.shape[-1] // BLOCK, BLOCK)
    largest = jnp.max(jnp.abs(blocks), axis=-1)
    fraction, exponent = jnp.frexp(largest)  # 448 is 0.875 * 2**9.
    exponent = jnp.where(fraction <= 0.875, exponent - 9, exponent - 8)
    exponent = jnp.clip(jnp.where(largest > 0, exponent, 0), -E8M0_BIAS, E8M0_BIAS)
    values = jnp.ldexp(blocks, -exponent[..., None]).astype(E4M3).reshape(x.shape)
    bits = jnp.where(jnp.isfinite(largest), exponent + E8M0_BIAS, E8M0_NAN).astype(jnp.uint8)
    return values, lax.bitcast_convert_type(bits, E8M0)


def arrange(scales, tile: int):
    """Scales (rows, K / 32) as tcgen05.cp reads them, in units of 128 rows by the 4 scales of a step.

    A unit holds the scales of rows r, r + 32, r + 64 and r + 96 one after the other. Each `tile` rows begin a unit, so
    that the scales of a tile are whole units. Rows and steps are filled up with scales of 2**-127.

    Returns:
      (units, steps of K, 32, 16) of the dtype of `scales`.
    """
    bits = lax.bitcast_convert_type(scales, jnp.uint8)
    bits = _host.pad_to_tiles(bits, (tile, SCALES))
    steps = bits.shape[1] // SCALES
    bits = _host.pad_to_tiles(bits.reshape(-1, tile, steps * SCALES), (1, LANES, SCALES))
    bits = bits.reshape(-1, LANES // BLOCK, BLOCK, steps, SCALES).transpose(0, 3, 2, 1, 4)
    return lax.bitcast_convert_type(bits.reshape(-1, steps, BLOCK, LANES // BLOCK * SCALES), scales.dtype)


def default_config(m: int, n: int, k: int, out_dtype=jnp.bfloat16, num_sms: int = 148) -> Config:
    """The configuration of the least predicted time for an (M, K) by (N, K) product; no measurement is behind it."""
    return cost.best(cost.Problem(m, n, k, False, 1, jnp.dtype(out_dtype).itemsize, num_sms=num_sms))


def _check(a, a_scales, b, b_scales) -> tuple[int, int, int]:
    op = f"{_host.PACKAGE}.{OP}"
    if a.dtype != E4M3 or b.dtype != E4M3:
        raise ValueError(
            f"{op}: {a.dtype=}, {b.dtype=}; must be float8_e4m3fn: {_host.PACKAGE}.blackwell.quantize_mxfp8"
        )
    m, n, k = arguments.product_sizes(OP, dict(a=a, b=b), transpose_b=True)
    if k % BLOCK:
        raise ValueError(f"{op}: K is {k}; must be a multiple of {BLOCK}, the values that share a scale: pad both")
    for name, scales, rows in (("a_scales", a_scales, m), ("b_scales", b_scales, n)):
        if scales.dtype != E8M0 or scales.shape != (rows, k // BLOCK):
            raise ValueError(
                f"{op}: {name} is {scales.dtype} {scales.shape}; must be float8_e8m0fnu ({rows}, {k // BLOCK}), one "
                f"for each {BLOCK} values along K"
            )
    return m, n, k


def matmul_mxfp8(
    a: jax.Array,
    a_scales: jax.Array,
    b: jax.Array,
    b_scales: jax.Array,
    *,
    bias: jax.Array | None = None,
    activation: _host.Activation | None = None,
    out_dtype: _host.DType = jnp.bfloat16,
    config: Config | None = None,
) -> jax.Array:
    """`activation((a * a_scales) @ (b * b_scales).T + bias)` of MXFP8 operands, with float32 sums, rounded once.

    Compiled for a B200; never run or timed on one. JAX's interpreter cannot run it. It has no gradient.

    On an automatic mesh JAX gathers sharded operands on every device and says nothing: call it inside `jax.shard_map`.

    Args:
      a: (M, K); float8_e4m3fn.
      a_scales: (M, K / 32); float8_e8m0fnu.
      b: (N, K); float8_e4m3fn.
      b_scales: (N, K / 32); float8_e8m0fnu.
      bias: (N,), of a floating dtype; or None.
      activation: "relu", "gelu" (the tanh form), "sigmoid", "silu", an element-wise function, or None.
      out_dtype: bfloat16, float16 or float32.
      config: tiles, stages, one or two CTAs, and schedule; None for the fastest predicted ones.

    Returns:
      (M, N) of `out_dtype`.

    Raises:
      ValueError: a rank, shape, dtype, activation or configuration is not supported, or a gradient is asked for;
        RuntimeError: no data-centre Blackwell GPU.
    """
    named = dict(a=a, a_scales=a_scales, b=b, b_scales=b_scales)
    a, a_scales, b, b_scales = (_host.as_array(OP, name, x) for name, x in named.items())
    out_dtype = _host.require_float(OP, out_dtype)
    _host.require_config(OP, config, Config)
    m, n, k = _check(a, a_scales, b, b_scales)
    bias = arguments.bias_of(OP, bias, n)
    activation = identity if activation is None else _numerics.activation_fn(OP, activation)
    operands = (a, a_scales, b, b_scales) if bias is None else (a, a_scales, b, b_scales, bias)
    operands = _host.without_gradient(OP, f"{_host.PACKAGE}.blackwell.matmul of 16-bit operands", *operands)
    a, a_scales, b, b_scales, bias = (*operands, None)[:5]
    if 0 in (m, n, k):
        out = jnp.zeros((m, n), jnp.float32) + (0.0 if bias is None else bias.astype(jnp.float32))
        return activation(out).astype(out_dtype)
    target = _host.require_tensor_cores(OP, major=10)
    if target.interpreted:
        raise RuntimeError(
            f"{_host.PACKAGE}.{OP}: JAX's interpreter has no block-scaled MMA. Compile it without a GPU (`lab."
            f'compile_for("b200", ...)`), or compute `cookbook.{OP}_reference`'
        )
    config = config or default_config(m, n, k, out_dtype, target.num_sms)
    plan = plan_of(m, n, k, E4M3, (False, False), activation, out_dtype, config, target, scaled=True)
    operands = a, b, arrange(a_scales, config.tile_m), arrange(b_scales, config.tile_n)
    return product(operands, bias, plan=plan, params=_host.compiler_params(approx_math=out_dtype.itemsize == 2))


matmul_mxfp8.Config = Config  # `cookbook.blackwell.matmul_mxfp8` is this function, not its module.


def bytes_moved(m: int, n: int, k: int, itemsize: int = 2) -> int:
    """Each operand read once with its scales, and the result, of `itemsize` bytes, written once."""
    return (m * k + k * n) * 33 // 32 + itemsize * m * n

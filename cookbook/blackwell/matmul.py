"""Matrix product on Blackwell's tensor cores: sums in tensor memory, stored under the products of the next tile.

    o = activation(a @ b + bias)

Shapes: a (..., M, K), b (K, N), bias (N,), o (..., M, N); with `transpose_a` a is (K, M), with `transpose_b` b is
(N, K), read as they lie. a and b are both bfloat16 or both float16; sums are float32; o is bfloat16, float16 or
float32. Rows of a and b must be multiples of 16 bytes, which TMA asks for.

Role and barrier tables: `roles.py`, which holds the kernel. This file says which operands, tiles and epilogue it gets.

Bound by: the tensor cores, and before them by the copies into shared memory, which a pair of blocks halves for b. This
is predicted (`cost.py`): the kernel is compiled for a B200 and interpreted; it was never run or timed on one.

Not supported: batches of b (use `jax.vmap`), other dtypes; tiles of fewer than 128 rows, so that few rows of a leave
tensor cores idle; and parts of K, so that a small o with a long K leaves SMs idle. For few rows of a ask for the
transposed product, `matmul(b, a, transpose_a=True, transpose_b=True).T`, whose tiles can be 16 columns wide. A plain b
whose N is no multiple of 64, or whose K is none of 8, costs a padded copy, and so does such a transposed a: store b as
(N, K). The interpreter runs one CTA with a static schedule.
Chapters: notebooks/19_blackwell.ipynb, notebooks/19b_pairs.ipynb.
Sources: NVIDIA's PTX ISA on tcgen05 and clusterlaunchcontrol; CUTLASS's documents on Blackwell, for the ideas.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from .. import _mgpu, _numerics
from . import cost
from .core import Config, plan_of, require_blackwell, require_interpretable
from .roles import identity, product

OP = "blackwell.matmul"


def matmul_reference(a, b, bias=None, activation=None):
    dtype = jnp.promote_types(a.dtype, jnp.float32)
    out = jnp.matmul(a.astype(dtype), b.astype(dtype), precision="highest")
    out = out if bias is None else out + bias.astype(dtype)
    return _numerics.activation_fn("matmul_reference", activation)(out)


def default_config(
    m, n, k, dtype=jnp.bfloat16, out_dtype=None, transpose_b=False, num_sms=148, interpreted=False
) -> Config:
    """The configuration of the least predicted time for an (M, K) by (K, N) product; no measurement is behind it."""
    itemsizes = jnp.dtype(dtype).itemsize, jnp.dtype(out_dtype or dtype).itemsize
    return cost.best(cost.Problem(m, n, k, not transpose_b, *itemsizes, num_sms=num_sms, one_cta=interpreted))


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of a call of `matmul`."""

    transpose_a: bool
    transpose_b: bool
    activation: object
    out_dtype: jnp.dtype
    config: Config | None


def _forward(a, b, bias, options: Options):
    m, n, k = _mgpu.matmul_sizes(OP, a, b, options.transpose_a, options.transpose_b)
    if 0 in (m, n):
        return jnp.zeros((m, n), options.out_dtype)
    if k == 0:
        out = jnp.zeros((m, n), jnp.float32) + (0.0 if bias is None else bias.astype(jnp.float32))
        return options.activation(out).astype(options.out_dtype)
    target = require_blackwell(OP)
    config = options.config or default_config(
        m, n, k, a.dtype, options.out_dtype, options.transpose_b, target.num_sms, target.interpreted
    )
    require_interpretable(OP, config, target)
    transposed = options.transpose_a, not options.transpose_b
    plan = plan_of(m, n, k, a.dtype, transposed, options.activation, options.out_dtype, config, target)
    params = _mgpu.compiler_params(approx_math=options.out_dtype.itemsize == 2)
    return product((a, b), bias, plan=plan, params=params)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _matmul(a, b, bias, options: Options):
    return _forward(a, b, bias, options)


def _matmul_fwd(a, b, bias, options: Options):
    if options.activation is identity:
        return _forward(a, b, bias, options), (a, b, bias, None)
    # The backward pass needs what the activation was applied to, so that it is not fused here.
    before = _forward(a, b, bias, dataclasses.replace(options, activation=identity, out_dtype=jnp.dtype(jnp.float32)))
    return options.activation(before).astype(options.out_dtype), (a, b, bias, before)


def _matmul_bwd(options: Options, residuals, d_out):
    a, b, bias, before = residuals
    d_out = d_out.astype(jnp.float32)
    if before is not None:
        (d_out,) = jax.vjp(options.activation, before)[1](d_out)
    d_bias = None if bias is None else jnp.sum(d_out, axis=0).astype(bias.dtype)
    d, ta, tb = d_out.astype(a.dtype), options.transpose_a, options.transpose_b
    n, extra = d.shape[1], -d.shape[1] % 8
    b_n = b
    if extra:  # b is (N, K): rows of d are no multiple of 16 bytes, and it has to be padded along N.
        d, b_n = jnp.pad(d, ((0, 0), (0, extra))), jnp.pad(b, ((0, extra), (0, 0)))
    times = functools.partial(matmul, out_dtype=a.dtype)
    d_a = times(b_n, d, transpose_a=tb, transpose_b=True) if ta else times(d, b_n, transpose_b=not tb)
    d_b = times(d, a, transpose_a=True, transpose_b=ta)[:n] if tb else times(a, d, transpose_a=not ta)
    return d_a, d_b, d_bias


_matmul.defvjp(_matmul_fwd, _matmul_bwd)


def matmul(
    a, b, *, bias=None, activation=None, out_dtype=None, transpose_a=False, transpose_b=False,
    config: Config | None = None,
):  # fmt: skip
    """`activation(a @ b + bias)` on data-centre Blackwell, with float32 sums, rounded once.

    Compiled for a B200 and interpreted; never run or timed on one. Differentiable in a, b and bias: gradients are
    products by the same kernel, of the gradient of o rounded to the dtype of a. Under differentiation an activation is
    applied after the kernel, to float32 sums that are kept.

    Args:
      a: (..., M, K), or (K, M) with `transpose_a`; bfloat16 or float16.
      b: (K, N), or (N, K) with `transpose_b`; of the dtype of `a`.
      bias: (N,), of a floating dtype; or None.
      activation: "relu", "gelu" (the tanh form), "silu", an element-wise function, or None.
      out_dtype: bfloat16, float16 or float32; None for the dtype of `a`.
      transpose_a, transpose_b: the operand is given transposed, and is read as it lies.
      config: tiles, stages, one or two CTAs, and schedule; None for those of the least predicted time.

    Returns:
      (..., M, N) of `out_dtype`.

    Raises:
      ValueError: a rank, shape, dtype, row length, activation or configuration is not supported; RuntimeError: no
        data-centre Blackwell GPU.
    """
    a, b = (_mgpu.as_array(OP, name, x) for name, x in (("a", a), ("b", b)))
    transpose_a, transpose_b = (
        _mgpu.option(OP, name, x, bool) for name, x in (("transpose_a", transpose_a), ("transpose_b", transpose_b))
    )
    out_dtype = jnp.dtype(out_dtype or a.dtype)
    _mgpu.require_float(OP, out_dtype)
    leading = a.shape[:-2]
    if leading and not transpose_a:
        a = a.reshape(-1, a.shape[-1])
    _, n, _ = _mgpu.matmul_sizes(OP, a, b, transpose_a, transpose_b)
    if bias is not None:
        bias = _mgpu.as_array(OP, "bias", bias)
        if bias.shape != (n,) or not jnp.issubdtype(bias.dtype, jnp.floating):
            raise ValueError(f"cookbook.{OP}: {bias.shape=}, {bias.dtype=}; must be ({n},), N, of a floating dtype")
    if callable(activation):  # Refused here, whether or not this configuration applies it in the kernel.
        _numerics.lowerable(activation, jax.ShapeDtypeStruct((8,), jnp.float32))
    activation = identity if activation is None else _numerics.activation_fn(OP, activation)
    operands = (a, b) if bias is None else (a, b, bias)
    a, b, bias = (*_mgpu.alike(*operands), None)[:3]
    out = _matmul(a, b, bias, Options(transpose_a, transpose_b, activation, out_dtype, config))
    return out.reshape(*leading, -1, n) if leading else out


matmul.Config = Config  # `cookbook.blackwell.matmul` is this function, not its module.


def flops(m: int, n: int, k: int) -> int:
    return 2 * m * n * k


def bytes_moved(m: int, n: int, k: int, itemsize: int = 2) -> int:
    """Each operand read once and the result written once, all of `itemsize` bytes."""
    return itemsize * (m * k + k * n + m * n)

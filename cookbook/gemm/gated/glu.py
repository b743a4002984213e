# SPDX-License-Identifier: Apache-2.0
"""Gated linear unit: two products and what joins them in one kernel. The first half of a transformer's MLP; the rest,
the product with the down projection, is `matmul`.

    o = activation(x @ w_gate) * (x @ w_up)

Shapes: x (..., K), w_gate and w_up (K, N), o (..., N); with `transpose_weights` both weights are (N, K), read as they
lie. All are bfloat16 or all float16; sums are float32. Rows of x and of the weights must be multiples of 16 bytes,
which TMA asks for.

Role and barrier tables: `gemm/kernel.py`; what differs: `kernel.py`, which holds the kernel. This file says which
operands and tiles it gets, and how a gradient is made of products.

Bound by: the tensor cores, like a product with 2N columns; for few rows, the memory that the weights come from. The
two products never leave the chip, which saves writing and reading 4 MN values. Under differentiation the kernel also
stores them, rounded to the dtype of x.

Not supported: biases, batches of weights (use `jax.vmap`), other dtypes. Chapter: 8, of which this is the kernel with
a second accumulator. Sources: Shazeer, "GLU variants improve transformer" (2020); tokamax's `gated_linear_unit`, for
the operation.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from ... import _host, _numerics
from .. import arguments, differentiable
from ..dense.matmul import matmul
from ..launch import fused_product
from ..plan import identity
from ..references import exact_product
from ..tiles import Config
from .kernel import kernel
from .kernel_sum import sum_of_products
from .plan import Problem, best, gated_plan


def glu_reference(x, w_gate, w_up, activation="silu"):
    fn = _numerics.activation_fn("glu_reference", activation)
    return fn(exact_product(x, w_gate)) * exact_product(x, w_up)


def default_config(m: int, n: int, k: int, transpose_weights: bool = False, num_sms: int = 132) -> Config:
    """The configuration of the least predicted time for (M, K) by two (K, N) matrices."""
    return best(Problem(m, n, k, transpose_weights, num_sms))


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of a call."""

    activation: Callable
    transpose_weights: bool
    config: Config | None


def _sizes(x, w_gate, options: Options) -> tuple[int, int, int]:
    """M, N and K."""
    (m, k), n = x.shape, w_gate.shape[0 if options.transpose_weights else 1]
    return m, n, k


def _forward(x, w_gate, w_up, options: Options, num_results: int = 1):
    """o, or a list of o, the gate before its activation, and the up product."""
    m, n, k = _sizes(x, w_gate, options)
    if 0 in (m, n, k):
        zeros = jnp.zeros((m, n), x.dtype)
        return zeros if num_results == 1 else [zeros] * num_results
    target = _host.require_tensor_cores("glu")
    config = options.config or default_config(m, n, k, options.transpose_weights, target.num_sms)
    plan = gated_plan(
        m, n, k, x.dtype, options.transpose_weights, options.activation, config, target.num_sms, target.interpreted
    )
    params = _host.compiler_params(approx_math=True)
    return fused_product(kernel, x, (w_gate, w_up), {}, plan=plan, params=params, num_results=num_results)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _glu(x, w_gate, w_up, options: Options):
    return _forward(x, w_gate, w_up, options)


def _glu_fwd(x, w_gate, w_up, options: Options):
    forward = functools.partial(_forward, options=options, num_results=3)
    o, gate, up = _host.without_derivative("glu", forward)(x, w_gate, w_up)
    return o, (x, w_gate, w_up, gate, up)


def _glu_bwd(options: Options, residuals, d_out):
    return _host.without_derivative("glu", functools.partial(_gradients, options))(*residuals, d_out)


_glu.defvjp(_glu_fwd, _glu_bwd)


def _gradients(options: Options, x, w_gate, w_up, gate, up, d_out):
    joined = lambda gate, up: options.activation(gate) * up
    pull = jax.vjp(joined, *(product.astype(jnp.float32) for product in (gate, up)))[1]
    pair, unscaled = differentiable.as_operand(pull(d_out.astype(jnp.float32)), x.dtype)
    lies, weights, n = options.transpose_weights, (w_gate, w_up), gate.shape[1]
    if short := -n % 8:  # Weights are (N, K): rows of d are not a multiple of 16 bytes, and are padded along N.
        pair = [jnp.pad(d, ((0, 0), (0, short))) for d in pair]
        weights = [jnp.pad(w, ((0, short), (0, 0))) for w in weights]
    out_dtype = x.dtype if unscaled is None else jnp.dtype(jnp.float32)

    def of_weights(d):
        product = functools.partial(matmul, transpose_a=True, out_dtype=out_dtype)
        return product(d, x)[:n] if lies else product(x, d)

    gradients = sum_of_products(tuple(pair), tuple(weights), lies, out_dtype), *map(of_weights, pair)
    return gradients if unscaled is None else tuple(map(unscaled, gradients))


def glu(
    x: jax.Array,
    w_gate: jax.Array,
    w_up: jax.Array,
    *,
    activation: _host.Activation | None = "silu",
    transpose_weights: bool = False,
    config: Config | None = None,
) -> jax.Array:
    """`activation(x @ w_gate) * (x @ w_up)` in one kernel, with float32 sums, rounded once; bitwise reproducible from
    run to run.

    Differentiable once in x, w_gate and w_up. The forward pass then also stores both products in the dtype of x (2 MN
    values, float16 ones cut off at its largest numbers), and the backward pass takes the time of 8 MNK operations.
    `jax.checkpoint(cookbook.glu)` keeps operands alone and computes the products again, 4 MNK operations more.
    Gradients of the products are rounded to the dtype of x; to float16 times a power of two, so that loss scales
    neither overflow nor vanish.

    On an automatic mesh JAX gathers sharded operands on every device and says nothing: call it inside `jax.shard_map`.

    Args:
      x: (..., K); bfloat16 or float16.
      w_gate, w_up: (K, N), or (N, K) with `transpose_weights`; of the dtype of `x`.
      activation: of the gate: "silu" (SwiGLU), "gelu" (GeGLU, the tanh form), "relu" (ReGLU), "sigmoid" (the first
        GLU), an element-wise function, or None (bilinear).
      transpose_weights: both weights are given transposed, and are read as they lie.
      config: tiles of o, stages, cluster and order of this kernel; None for the fastest predicted ones. Products of
        gradients choose their own.

    Returns:
      (..., N) of the dtype of `x`.

    Raises:
      ValueError: a rank, shape, dtype, row length, activation or option is not supported; RuntimeError: no GPU.
    """
    x, w_gate, w_up = (
        _host.as_array("glu", name, value) for name, value in (("x", x), ("w_gate", w_gate), ("w_up", w_up))
    )
    transpose_weights = _host.option("glu", "transpose_weights", transpose_weights, bool)
    _host.require_config("glu", config, Config)
    if x.ndim == 0:
        raise ValueError(f"{_host.PACKAGE}.glu: {x.shape=}; must be (..., K): pass rows")
    rows, x = x.shape[:-1], x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    for name, weights in (("w_gate", w_gate), ("w_up", w_up)):
        _, n, _ = arguments.product_sizes("glu", {"x": x, name: weights}, transpose_b=transpose_weights)
        arguments.require_halves("glu", **{"x": x, name: weights})
    if w_gate.shape != w_up.shape:
        raise ValueError(
            f"{_host.PACKAGE}.glu: {w_gate.shape=}, {w_up.shape=}; must be the same: a column of the gate for each "
            "column that it gates"
        )
    if callable(activation):  # Refused here, whether or not the kernel is to apply it.
        _numerics.lowerable(activation, jax.ShapeDtypeStruct((8,), jnp.float32))
    activation = identity if activation is None else _numerics.activation_fn("glu", activation)
    operands = _host.reverse_only("glu", x, w_gate, w_up)
    return _glu(*operands, Options(activation, transpose_weights, config)).reshape(*rows, n)


glu.Config = Config  # `cookbook.glu` is this function, not its module.


def flops(m: int, n: int, k: int) -> int:
    """Operations of both products."""
    return 4 * m * n * k


def bytes_moved(m: int, n: int, k: int, itemsize: int = 2) -> int:
    """x and both weights read once and the result written once."""
    return itemsize * (m * k + 2 * k * n + m * n)

# SPDX-License-Identifier: Apache-2.0
"""A product of two matrices as users call it: its arguments, the results that need no kernel, its gradients.

The families for Hopper and for Blackwell share this: each gives `launch`, which builds its kernel.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from .. import _host, _numerics
from . import arguments
from .plan import identity


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of a call."""

    op: str
    launch: Callable  # Takes a, b, bias, (M, N, K) and these options; runs the kernel.
    transpose_a: bool
    transpose_b: bool
    activation: Callable
    out_dtype: jnp.dtype
    config: object = None


def _forward(a, b, bias, options: Options):
    m, n, k = sizes = arguments.product_sizes(options.op, dict(a=a, b=b), options.transpose_a, options.transpose_b)
    if 0 in (m, n):
        return jnp.zeros((m, n), options.out_dtype)
    if k == 0:
        product = jnp.zeros((m, n), jnp.float32) + (0.0 if bias is None else bias.astype(jnp.float32))
        return options.activation(product).astype(options.out_dtype)
    return options.launch(a, b, bias, sizes, options)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _product(a, b, bias, options: Options):
    return _forward(a, b, bias, options)


def _product_fwd(a, b, bias, options: Options):
    forward = lambda options: _host.without_derivative(options.op, functools.partial(_forward, options=options))
    if options.activation is identity:
        return forward(options)(a, b, bias), (a, b, bias, None)
    # The backward pass needs what the activation was applied to, so that it is not fused here.
    plain = dataclasses.replace(options, activation=identity, out_dtype=jnp.dtype(jnp.float32))
    before = forward(plain)(a, b, bias)
    return options.activation(before).astype(options.out_dtype), (a, b, bias, before)


def _product_bwd(options: Options, residuals, d_out):
    return _host.without_derivative(options.op, functools.partial(_gradients, options))(*residuals, d_out)


_product.defvjp(_product_fwd, _product_bwd)


def _gradients(options: Options, a, b, bias, before, d_out):
    if before is not None:
        (d_out,) = jax.vjp(options.activation, before)[1](d_out.astype(jnp.float32))
    d_bias = None if bias is None else jnp.sum(d_out.astype(jnp.float32), axis=0).astype(bias.dtype)
    d, unscaled = as_operand(d_out, a.dtype)
    n = d.shape[1]
    if n % 8:  # b is (N, K): rows of d are not a multiple of 16 bytes, and it has to be padded along N.
        d, b_n = jnp.pad(d, ((0, 0), (0, -n % 8))), jnp.pad(b, ((0, -n % 8), (0, 0)))
    else:
        b_n = b
    ta, tb = options.transpose_a, options.transpose_b

    def times(a, b, transpose_a, transpose_b):
        out_dtype = a.dtype if unscaled is None else jnp.dtype(jnp.float32)
        out = _forward(a, b, None, Options(options.op, options.launch, transpose_a, transpose_b, identity, out_dtype))
        return out if unscaled is None else unscaled(out)

    d_a = times(b_n, d, tb, True) if ta else times(d, b_n, False, not tb)
    d_b = times(d, a, True, ta)[:n] if tb else times(a, d, not ta, False)
    return d_a, d_b, d_bias


def as_operand(d_out, dtype, is_used=lambda: True):
    """A gradient as an operand of a product, and what turns a float32 product into `dtype`: None, if nothing has to.

    float16 has few exponents. A gradient of another dtype is first multiplied by a power of two that brings its largest
    value, of those that `is_used` says, to at most 2**15; all other floats keep theirs. Several gradients, in a tuple,
    are multiplied by the same power.
    """
    each = lambda fn: jax.tree.map(fn, d_out)
    if dtype != jnp.float16 or jax.tree.leaves(d_out)[0].dtype == jnp.float16:
        return each(lambda d: d.astype(dtype)), None
    d_out = each(lambda d: d.astype(jnp.float32))
    size = lambda d: jnp.max(jnp.where(jnp.isfinite(d) & is_used(), jnp.abs(d), 0), initial=0)
    largest = functools.reduce(jnp.maximum, map(size, jax.tree.leaves(d_out)))
    exponent = jnp.clip(jnp.frexp(largest)[1] - 15, -125, 125)  # Both powers are normal numbers.
    power = lambda exponent: jnp.ldexp(jnp.float32(1), exponent)
    scaled = jax.tree.map(lambda d: (d * power(-exponent)).astype(dtype), d_out)
    return scaled, lambda product: (product * power(exponent)).astype(dtype)


def product(
    op: str, launch, config_type, a, b, *, bias, activation, out_dtype, preferred_element_type, precision, transpose_a,
    transpose_b, config,
):  # fmt: skip
    """`cookbook.matmul(a, b, ...)`, named `op`, by the kernel that `launch` builds from a `config_type`."""
    a, b = _host.as_array(op, "a", a), _host.as_array(op, "b", b)
    transpose_a = _host.option(op, "transpose_a", transpose_a, bool)
    transpose_b = _host.option(op, "transpose_b", transpose_b, bool)
    _host.require_config(op, config, config_type)
    arguments.require_precision(op, precision)
    if None not in (out_dtype, preferred_element_type):
        raise ValueError(
            f"{_host.PACKAGE}.{op}: {out_dtype=}, {preferred_element_type=}; both say the result's dtype: give one"
        )
    rows = a.shape[:-1] if a.ndim > 2 and not transpose_a else None
    if rows is not None:
        a = a.reshape(math.prod(rows), a.shape[-1])
    _, n, _ = arguments.product_sizes(op, dict(a=a, b=b), transpose_a, transpose_b)
    arguments.require_halves(op, a=a, b=b)
    name, wanted = ("preferred_element_type", preferred_element_type) if out_dtype is None else ("out_dtype", out_dtype)
    out_dtype = _host.require_float(op, a.dtype if wanted is None else wanted, name)
    bias = arguments.bias_of(op, bias, n)
    if callable(activation):  # Refused here, whether or not this configuration applies it in the kernel.
        _numerics.lowerable(activation, jax.ShapeDtypeStruct((8,), jnp.float32))
    activation = identity if activation is None else _numerics.activation_fn(op, activation)
    operands = (a, b) if bias is None else (a, b, bias)
    a, b, bias = (*_host.reverse_only(op, *operands), None)[:3]
    out = _product(a, b, bias, Options(op, launch, transpose_a, transpose_b, activation, out_dtype, config))
    return out if rows is None else out.reshape(*rows, n)

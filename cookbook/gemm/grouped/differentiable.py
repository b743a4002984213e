# SPDX-License-Identifier: Apache-2.0
"""A product of groups of rows as users call it: its arguments, the results that need no kernel, its gradients.

The families for Hopper and for Blackwell share this: each gives `launch`, which builds its kernel, and `sums`, the
gradient of the matrices.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from ... import _host, _numerics
from .. import differentiable
from ..arguments import product_sizes, require_halves, require_precision
from ..plan import identity
from . import arguments
from .swiglu import swiglu
from .tables import bounds, sizes_of


def activation_of(op: str, activation):
    """The function of the product that `activation` names."""
    return swiglu if activation == "swiglu" else _numerics.activation_fn(op, activation)


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of a call."""

    op: str
    launch: Callable  # Takes lhs, rhs, group_sizes, group_offset, (M, N, K) and these options; runs the kernel.
    sums: Callable  # `ragged_dot_transposed.sums`, or what computes the same.
    transpose_rhs: bool
    out_dtype: jnp.dtype
    config: object = None
    activation: Callable = identity

    @property
    def is_gated(self) -> bool:
        return self.activation is swiglu


def _forward(lhs, rhs, group_sizes, group_offset, options: Options):
    (m, k), num_groups = lhs.shape, rhs.shape[0]
    n = rhs.shape[1 if options.transpose_rhs else 2] // (2 if options.is_gated else 1)
    if 0 in (m, n, k, num_groups):
        activation = identity if options.is_gated else options.activation
        return activation(jnp.zeros((m, n), jnp.float32)).astype(options.out_dtype)
    return options.launch(lhs, rhs, group_sizes, group_offset, (m, n, k), options)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _product(lhs, rhs, group_sizes, group_offset, options: Options):
    return _forward(lhs, rhs, group_sizes, group_offset, options)


def _product_fwd(lhs, rhs, group_sizes, group_offset, options: Options):
    operands, activation = (lhs, rhs, group_sizes, group_offset), options.activation
    forward = lambda options: _host.without_derivative(options.op, functools.partial(_forward, options=options))
    if activation is identity:
        return forward(options)(*operands), (*operands, None)
    # The backward pass needs what the activation was applied to. To compute it again would cost a third of a step;
    # `jax.checkpoint` does so where memory is short. float16 has too few exponents for it.
    kept = jnp.dtype(jnp.float32) if lhs.dtype == jnp.float16 else lhs.dtype
    # The caller's configuration serves here too, but for results of 32 bits that would have to be transposed.
    config = None if kept.itemsize == 4 and options.config and options.config.swapped else options.config
    before = forward(dataclasses.replace(options, activation=identity, out_dtype=kept, config=config))(*operands)
    return activation(before.astype(jnp.float32)).astype(options.out_dtype), (*operands, before)


def _product_bwd(options: Options, residuals, d_out):
    gradients = _host.without_derivative(options.op, functools.partial(_gradients, options))
    return *gradients(*residuals, d_out), None, None


def _gradients(options: Options, lhs, rhs, group_sizes, group_offset, before, d_out):
    (m, _), num_groups, transpose_rhs = lhs.shape, rhs.shape[0], options.transpose_rhs
    if before is not None:
        (d_out,) = jax.vjp(options.activation, before.astype(jnp.float32))[1](d_out.astype(jnp.float32))

    def is_used():
        """Which rows have groups: others may hold anything."""
        (first, *_), (*_, last) = bounds(sizes_of(group_sizes), m, group_offset, num_groups)
        row = jnp.arange(m, dtype=jnp.int32)[:, None]
        return (row >= first) & (row < last)

    d, unscaled = differentiable.as_operand(d_out, lhs.dtype, is_used)
    out_dtype = lhs.dtype if unscaled is None else jnp.dtype(jnp.float32)
    if short := -d.shape[1] % 8:  # rhs is (G, N, K): rows of d are not a multiple of 16 bytes.
        d, rhs_n = jnp.pad(d, ((0, 0), (0, short))), jnp.pad(rhs, ((0, 0), (0, short), (0, 0)))
    else:
        rhs_n = rhs
    plain = dataclasses.replace(
        options, transpose_rhs=not transpose_rhs, out_dtype=out_dtype, config=None, activation=identity
    )
    d_lhs = _forward(d, rhs_n, group_sizes, group_offset, plain)
    pair = (d, lhs) if transpose_rhs else (lhs, d)
    d_rhs = options.sums(*pair, sizes_of(group_sizes), group_offset, num_groups, out_dtype)[:, : rhs.shape[1]]
    return (d_lhs, d_rhs) if unscaled is None else (unscaled(d_lhs), unscaled(d_rhs))


_product.defvjp(_product_fwd, _product_bwd)


def product(op: str, launch, sums, config_type, lhs, rhs, group_sizes, *, group_offset, transpose_rhs, activation,
            precision, preferred_element_type, config):  # fmt: skip
    """`cookbook.ragged_dot(lhs, rhs, group_sizes, ...)`, named `op`, by the kernel that `launch` builds from a
    `config_type`."""
    lhs, rhs = _host.as_array(op, "lhs", lhs), _host.as_array(op, "rhs", rhs)
    transpose_rhs = _host.option(op, "transpose_rhs", transpose_rhs, bool)
    _host.require_config(op, config, config_type)
    require_precision(op, precision)
    require_halves(op, lhs=lhs, rhs=rhs)
    product_sizes(op, dict(lhs=lhs, rhs=rhs), transpose_b=transpose_rhs, grouped=True)
    wanted = lhs.dtype if preferred_element_type is None else preferred_element_type
    out_dtype = _host.require_float(op, wanted, "preferred_element_type")
    if activation == "swiglu" and rhs.shape[1 if transpose_rhs else 2] % 2:
        raise ValueError(
            f"{_host.PACKAGE}.{op}: {rhs.shape=} with {activation=}: must have a column of the gate for each other"
        )
    if activation == "swiglu" and not transpose_rhs and rhs.shape[2] % 16:
        cols = rhs.shape[2] // 2
        raise ValueError(
            f"{_host.PACKAGE}.{op}: columns of the up product begin at column {cols} of {rhs.shape=}; TMA copies from "
            f"multiples of 16 bytes: pad the gate and the up product to {-(-cols // 8) * 8} columns each (jnp.pad), or "
            "give rhs as (G, 2N, K) with transpose_rhs"
        )
    if callable(activation):  # Refused here, whether or not the kernel is to apply it.
        _numerics.lowerable(activation, jax.ShapeDtypeStruct((8,), jnp.float32))
    activation = identity if activation is None else activation_of(op, activation)
    group_sizes, group_offset = arguments.check_groups(op, group_sizes, group_offset, lhs.shape[0], rhs.shape[0])
    operands, tree = jax.tree.flatten((lhs, rhs, group_sizes, group_offset))
    lhs, rhs, group_sizes, group_offset = jax.tree.unflatten(tree, _host.reverse_only(op, *operands))
    options = Options(op, launch, sums, transpose_rhs, out_dtype, config, activation)
    return _product(lhs, rhs, group_sizes, group_offset, options)

# SPDX-License-Identifier: Apache-2.0
"""The norms as functions that JAX differentiates, and what they ask of their arguments."""

import functools

import jax
import jax.numpy as jnp

from .. import _host
from . import core
from .norm import Norm, call
from .norm_backward import call_backward
from .plan import Config

EIGHT_BITS = (jnp.float8_e4m3fn, jnp.int8)


def _params(arrays, norm: Norm):
    # ex2.approx is good to 2**-22: far below the rounding of 16-bit results, not of float32.
    return _host.compiler_params(approx_math=norm.gate is not None and all(x.dtype.itemsize == 2 for x in arrays))


def _common_dtype(*arrays):
    return arrays[0].dtype if len({x.dtype for x in arrays}) == 1 else jnp.dtype(jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _norm(arrays, weights, norm: Norm, out_dtype, config: Config | None):
    return call(arrays, weights, norm, out_dtype, config, _params(arrays, norm))


def _forward(arrays, weights, norm, out_dtype, config):
    outs = _norm(arrays, weights, norm, out_dtype, config)
    # With a residual the sum is what was normalised. Empty arrays bring the dtypes of both along.
    kept = arrays if norm.gate or len(arrays) == 1 else outs[-1:]
    return outs, (kept, weights, [jnp.empty(0, x.dtype) for x in arrays])


def _backward(norm, out_dtype, config, kept, cotangents):
    arrays, weights, likes = kept
    dy, *d_sum = cotangents
    # A gradient must not be rounded to, or overflow, the dtype of another array.
    dy = dy.astype(_common_dtype(arrays[0], dy))
    dtypes = tuple(x.dtype for x in likes) if norm.gate else (_common_dtype(*likes),)
    gradient = functools.partial(
        call_backward, norm=norm, dtypes=dtypes, target=_host.require_target(norm.op), params=_params(arrays, norm)
    )
    found, d_weights = _host.without_derivative(norm.op, gradient)((*arrays, *d_sum), weights, dy)
    if not norm.gate:  # Both terms have the gradient of the sum.
        found = [found[0]] * len(likes)
    return tuple(x.astype(like.dtype) for x, like in zip(found, likes, strict=True)), tuple(d_weights)


_norm.defvjp(_forward, _backward)


@functools.partial(jax.jit, static_argnames=("norm", "out_dtype", "config", "params"))
def _on_ref(x, weights, ref, norm: Norm, out_dtype, config: Config | None, params):
    """Inside `jit` a Ref is the value that it has at the time, and XLA gives all its values one buffer: no copies."""
    *outs, total = call((x, ref[...].reshape(x.shape)), weights, norm, out_dtype, config, params, in_place=True)
    ref[...] = total.reshape(ref.shape)
    return outs


def require_eps(op: str, eps, epsilon=None) -> float:
    eps = _host.option(op, "eps", eps if epsilon is None else epsilon, float)
    if eps < 0:
        raise ValueError(
            f"{_host.PACKAGE}.{op}: {eps=}; must be 0 or more, or roots of negative numbers are NaN: pass 1e-6"
        )
    return eps


def require_out_dtype(op: str, out_dtype):
    """`out_dtype` as a dtype: of floats of 16 bits or more, or one of `EIGHT_BITS`."""
    try:
        is_8_bit = jnp.dtype(out_dtype) in EIGHT_BITS
    except TypeError:
        is_8_bit = False
    return jnp.dtype(out_dtype) if is_8_bit else _host.require_float(op, out_dtype)


def require_second(op: str, name: str, second, x):
    """`second`, a residual or a gate, or None, as a list of arrays; a residual may be a Ref, and stays one."""
    if second is None:
        return []
    if name == "residual" and isinstance(second, jax.Ref):
        _host.require_local(op, name, second)
        core.check_floats(op, name, second)
    else:
        second = core.require_floats(op, name, second)
    if second.shape != x.shape:
        raise ValueError(f"{_host.PACKAGE}.{op}: {name}.shape={second.shape}; must be {x.shape}, the shape of x")
    return [second]


def require_vector(op: str, name: str, weight, x):
    """`weight`, one value for each column of `x`, as an array; ones, if it is None."""
    weight = jnp.ones(x.shape[-1:], x.dtype) if weight is None else core.require_floats(op, name, weight)
    if weight.shape != x.shape[-1:]:
        raise ValueError(
            f"{_host.PACKAGE}.{op}: {name}.shape={weight.shape}; must be {x.shape[-1:]}, one value for each column of x"
        )
    return weight


def apply(norm: Norm, arrays, weights, out_dtype, config: Config | None):
    """The results of the norm of the last axis of arrays of one shape, y first: of their shape, scales of rows without
    its last axis. `weights` are vectors, or matrices of `norm.groups` rows. If the residual is a Ref, that holds the
    sum, which is no result."""
    shape, op = arrays[0].shape, norm.op
    config = core.require_config(op, arrays[0], config)
    if isinstance(arrays[-1], jax.Ref):
        return _apply_in_place(norm, *arrays, weights, out_dtype, config)
    if arrays[0].size == 0:
        return empty(norm, arrays, out_dtype)
    _host.require_target(op)
    if shape[-1] == 1:  # Plans begin at two columns. A column and its copy have the mean and the squares' mean of one.
        twice = lambda x: jnp.concatenate([x, x], axis=-1)
        outs = apply(norm, [*map(twice, arrays)], [*map(twice, weights)], out_dtype, config)
        return tuple(out[..., :1] if out.ndim == len(shape) else out for out in outs)
    if out_dtype.itemsize == 1:
        operands = _host.without_gradient(op, f"{op} with an out_dtype of 16 bits or more", *arrays, *weights)
    else:
        operands = _host.reverse_only(op, *arrays, *weights)
    arrays = tuple(x.reshape(-1, shape[-1]) for x in operands[: len(arrays)])
    outs = _norm(arrays, operands[len(arrays) :], norm, out_dtype, config)
    return tuple(out.reshape(shape if out.ndim == 2 else shape[:-1]) for out in outs)


def _apply_in_place(norm: Norm, x, ref, weights, out_dtype, config: Config | None):
    x, *weights = _host.without_gradient(norm.op, f"{norm.op} of an array `residual`", x, *weights)
    if x.size == 0 or x.shape[-1] == 1:
        *outs, ref[...] = apply(norm, [x, ref[...]], weights, out_dtype, config)
        return tuple(outs)
    _host.require_target(norm.op)
    rows = x.reshape(-1, x.shape[-1])
    outs = _on_ref(rows, weights, ref, norm, out_dtype, config, _params([x], norm))
    return tuple(out.reshape(x.shape if out.ndim == 2 else x.shape[:-1]) for out in outs)


def empty(norm: Norm, arrays, out_dtype):
    x, *second = arrays
    scales = [jnp.zeros(x.shape[:-1], jnp.float32)] if jnp.dtype(out_dtype).itemsize == 1 else []
    return (x.astype(out_dtype), *scales, *([] if norm.gate else second))

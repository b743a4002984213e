# SPDX-License-Identifier: Apache-2.0
"""Lets a kernel call any element-wise `jnp` function.

Mosaic GPU lowers a part of `jax.lax`, and rejects the rest: on JAX 0.11.2 even `jax.nn.relu` (a `custom_jvp`).
`lowerable(fn)` traces `fn`, opens up wrapped functions, and writes missing operations in terms of those that there are.
Its errors name operations that it cannot write or that are not element-wise.
"""

import math

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
from jax import lax

from . import _host


def gelu(x):
    """`jax.nn.gelu`, the tanh form, as 1 + tanh(u) = 2 sigmoid(2u): one exponential where tanh takes many steps."""
    return x * jax.nn.sigmoid(2.0 * math.sqrt(2.0 / math.pi) * (x + 0.044715 * x * x * x))


ACTIVATIONS = {"relu": jax.nn.relu, "gelu": gelu, "sigmoid": jax.nn.sigmoid, "silu": jax.nn.silu}


def activation_fn(op: str, activation):
    """The function named by `activation`: a key of ACTIVATIONS, a function of one array, or None for the identity."""
    if activation is None:
        return lambda x: x
    if callable(activation):
        return activation
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"{_host.PACKAGE}.{op}: {activation=} is not known; pass one of {sorted(ACTIVATIONS)}, a function, or None"
        )
    return ACTIVATIONS[activation]


def lowerable(fn, *avals):
    """`fn`, an element-wise function of 1-D arrays, as a function that Mosaic GPU can lower for values of any layout.

    Args:
      fn: a function of arrays of one shape; returns a pytree of arrays of that shape.
      *avals: `jax.ShapeDtypeStruct` of its arguments, all 1-D and of one length.

    Raises:
      ValueError: `fn` is not element-wise, holds an array or a traced number, or uses an operation that no kernel
        can do.
    """
    name = getattr(fn, "__name__", repr(fn))
    try:
        jaxpr, out_shape = jax.make_jaxpr(fn, return_shape=True)(*avals)
    except TypeError as error:  # Shapes differ: the kernel calls `fn` on tiles, whatever it holds.
        raise ValueError(f"{name} is not element-wise, or holds an array (make it an argument): {error}") from error
    for const in jaxpr.consts:
        if jnp.ndim(const) or isinstance(const, jax.core.Tracer):
            kind = "a traced value" if isinstance(const, jax.core.Tracer) else f"an array of shape {jnp.shape(const)}"
            raise ValueError(f"{name} holds {kind}: a kernel cannot; make it an argument")
    consts = [np.asarray(const)[()] for const in jaxpr.consts]  # Numbers, which the kernel has in its code.
    for out in jax.tree.leaves(out_shape):
        if out.shape != avals[0].shape:
            raise ValueError(f"{name} is not element-wise: it made {out.shape} of {avals[0].shape}")
    _require_elementwise(name, jaxpr.jaxpr, avals[0].shape)
    treedef = jax.tree.structure(out_shape)

    def lowered(*args):
        outs = _evaluate(jaxpr.jaxpr, consts, args, args[0].shape)
        return jax.tree.unflatten(treedef, [jnp.broadcast_to(out, args[0].shape) for out in outs])

    return lowered


def _inner(eqn):
    """The jaxpr that a call-like equation wraps, or None."""
    for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        if (inner := eqn.params.get(key)) is not None:
            return inner if hasattr(inner, "consts") else jax.extend.core.ClosedJaxpr(inner, ())
    return None


def _require_elementwise(name, jaxpr, shape):
    for eqn in jaxpr.eqns:
        op = eqn.primitive.name
        if op in _LOOPS:
            raise ValueError(f"{name} uses {op}, which has no element-wise form in a kernel; write it without a loop")
        if (inner := _inner(eqn)) is not None:
            _require_elementwise(name, inner.jaxpr, shape)
            continue
        shapes = {v.aval.shape for v in (*eqn.invars, *eqn.outvars)} - {(), shape}
        if shapes or op in _MIX_ELEMENTS or op.startswith(("reduce_", "arg", "cum")) and op != "reduce_precision":
            raise ValueError(f"{name} is not element-wise: {op} mixes elements; use it outside the kernel")
        if op in _NO_RULE:
            raise ValueError(f"{name} uses {op}, which Mosaic GPU cannot lower and this package has no formula for")


def _evaluate(jaxpr, consts, args, shape):
    env = dict(zip(jaxpr.constvars, consts, strict=True)) | dict(zip(jaxpr.invars, args, strict=True))
    read = lambda v: v.val if isinstance(v, jax.extend.core.Literal) else env[v]
    for eqn in jaxpr.eqns:
        values = [read(v) for v in eqn.invars]
        if (inner := _inner(eqn)) is not None:
            outs = _evaluate(inner.jaxpr, inner.consts, values, shape)
        elif (rule := _RULES.get(eqn.primitive.name)) is not None:
            outs = [rule(*(jnp.broadcast_to(value, shape) for value in values))]
        elif eqn.primitive.name == "integer_pow" and eqn.params["y"] < 0:  # Mosaic GPU has only positive powers.
            outs = [1.0 / lax.integer_pow(values[0], -eqn.params["y"])]
        elif eqn.primitive.name == "broadcast_in_dim":  # A scalar's: `_require_elementwise` rejects others.
            outs = [jnp.broadcast_to(values[0], shape)]
        else:
            # Mosaic GPU refuses a wish for accuracy, which the gradient of erf has; its only exp is the accurate one.
            params = eqn.params | ({"accuracy": None} if "accuracy" in eqn.params else {})
            outs = eqn.primitive.bind(*values, **params)
            outs = outs if eqn.primitive.multiple_results else [outs]
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(v) for v in jaxpr.outvars]


# Operations that Mosaic GPU does not lower, by those that it does. float32 in, float32 out. ---------------------------


def _floor(x):
    nearest = lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN)
    return jnp.where(nearest > x, nearest - 1.0, nearest)


def _expm1(x):
    t = jnp.tanh(0.5 * x)  # expm1(x) = 2t / (1 - t) keeps the digits that exp(x) - 1 cancels near 0.
    return jnp.where(jnp.abs(x) < 0.5, 2.0 * t / (1.0 - t), jnp.exp(x) - 1.0)


def _log1p(x):
    u = 1.0 + x  # Kahan: x / (u - 1) undoes the rounding of u.
    return jnp.where((u == 1.0) | (u == jnp.inf), x, jnp.log(u) * (x / (u - 1.0)))


def _sinh(x):
    e = _expm1(jnp.abs(x))
    return jnp.sign(x) * jnp.where(e == jnp.inf, e, 0.5 * (e + e / (e + 1.0)))


def _cosh(x):
    e = jnp.exp(jnp.abs(x))
    return 0.5 * (e + 1.0 / e)


def _cbrt(x):
    a = jnp.abs(x)
    r = jnp.exp2(jnp.log2(a) * (1.0 / 3.0))
    r = r - (r - a / (r * r)) * (1.0 / 3.0)  # One Newton step.
    return jnp.sign(x) * jnp.where((a == 0.0) | (a == jnp.inf), a, r)


def _pow(x, y):
    """Relative error about |y log2 x| times that of one rounding."""
    size = jnp.exp2(y * jnp.log2(jnp.abs(x)))
    whole, half = _floor(y), _floor(0.5 * y)
    odd = whole != 2.0 * half
    signed = jnp.where(whole != y, jnp.nan, jnp.where(odd, -size, size))
    result = jnp.where(x < 0.0, signed, size)
    return jnp.where((y == 0.0) | (x == 1.0), 1.0, result)


def _rem(x, y):
    """Sign of x, as `lax.rem`. Exact while |x / y| < 2**22."""
    q = x / y
    r = jnp.abs(x) - _floor(jnp.abs(q)) * jnp.abs(y)
    r = jnp.where(r < 0.0, r + jnp.abs(y), r)
    r = jnp.where(r >= jnp.abs(y), r - jnp.abs(y), r)
    return jnp.sign(x) * jnp.where(jnp.abs(y) == jnp.inf, jnp.abs(x), r)


# Least-squares fits in the relative error: erf(x) / x in x**2 on [0, 1], and exp(x**2) erfc(x) in 1 / (1 + x / 2) on
# [1, 10.5]; each is exact to 1e-8 before float32 rounds it.
_ERF = (1.12837917, -0.376126288, 0.112836124, -0.026854806, 0.00519004882, -0.000802431171, 7.89806641e-05)
_ERFCX = (-3.12286006e-06, 0.282175835, 0.281230433, 0.251620787, 0.162618872, 0.0956894491, 0.0374132551,
          -0.193826625, 0.0835552571)  # fmt: skip


def _polynomial(coefficients, x):
    result = coefficients[-1]
    for c in coefficients[-2::-1]:
        result = result * x + c
    return result


def _erfc_tail(a):
    return jnp.exp(-a * a) * _polynomial(_ERFCX, 1.0 / (1.0 + 0.5 * a))


def _erf(x):
    a = jnp.abs(x)
    inside = jnp.minimum(a, 1.0)
    return jnp.where(
        a < 1.0, x * _polynomial(_ERF, inside * inside), jnp.sign(x) * (1.0 - _erfc_tail(jnp.minimum(a, 9.0)))
    )


def _erfc(x):
    a = jnp.abs(x)
    tail = jnp.where(a > 10.5, 0.0, _erfc_tail(jnp.minimum(a, 10.5)))
    return jnp.where(a < 1.0, 1.0 - _erf(x), jnp.where(x < 0.0, 2.0 - tail, jnp.where(a == a, tail, a)))


_RULES = {
    "floor": _floor,
    "ceil": lambda x: -_floor(-x),
    "is_finite": lambda x: jnp.abs(x) < jnp.inf,
    "expm1": _expm1,
    "log1p": _log1p,
    "tan": lambda x: jnp.sin(x) / jnp.cos(x),
    "sinh": _sinh,
    "cosh": _cosh,
    "cbrt": _cbrt,
    "pow": _pow,
    "rem": lambda x, y: _rem(x, y) if jnp.issubdtype(x.dtype, jnp.floating) else lax.rem(x, y),
    "erf": _erf,
    "erfc": _erfc,
    "polynomial": lambda x, *coefficients: _polynomial(coefficients, x),  # JAX 0.12 has it in the gradient of erf.
    "add_any": jnp.add,
    "copy": lambda x: x,
    "stop_gradient": lambda x: x,
}
_LOOPS = {"while", "scan", "cond"}
_MIX_ELEMENTS = {
    "sort",
    "rev",
    "dot_general",
    "iota",
    "gather",
    "scatter",
    "dynamic_slice",
    "dynamic_update_slice",
    "roll",
}
_NO_RULE = {
    "acos", "acosh", "asin", "asinh", "atan", "atanh", "atan2", "bessel_i0e", "bessel_i1e", "digamma", "erf_inv",
    "igamma", "igammac", "lgamma", "nextafter", "polygamma", "random_bits", "regularized_incomplete_beta", "zeta",
    "threefry2x32", "top_k",
}  # fmt: skip

"""A walk through a traced program in its order: its scalars are computed, its tiles are not."""

import math
import operator
import types

import jax
import numpy as np
from jax.extend.core import Literal, jaxprs_in_params

MOST_VALUES = 1024  # Arrays of more whole numbers than that are not followed.


class Unsure(Exception):
    """Raised where what comes next depends on a value that is not followed."""


class Unknown:
    """A value that is not followed: a tile, or what depends on one."""


UNKNOWN = Unknown()


def walk(jaxpr, values, act, consts=()):
    """Goes through `jaxpr`, open or closed, with `values` for its arguments: a generator that returns its results.

    `act(equation, operands)` does what is neither arithmetic nor control flow, and returns the results, or None where
    it is arithmetic after all. It may be a generator: what that yields is yielded here.
    """
    program = getattr(jaxpr, "jaxpr", jaxpr)
    env = dict(zip(program.constvars, consts or map(plain, getattr(jaxpr, "consts", ())), strict=True))
    env |= zip(program.invars, values, strict=True)
    read = lambda x: plain(x.val) if isinstance(x, Literal) else env[x]
    for equation in program.eqns:
        operands = [read(x) for x in equation.invars]
        if flow := _FLOW.get(equation.primitive.name):
            outs = yield from flow(equation, operands, act)
        else:
            outs = act(equation, operands)
        if isinstance(outs, types.GeneratorType):
            outs = yield from outs
        if outs is None:
            outs = _computed(equation, operands)
        env |= zip(equation.outvars, outs, strict=True)
    return [read(x) for x in program.outvars]


def plain(x):
    """A scalar as Python's number, an array of few whole numbers as NumPy's, a Ref as it is; else UNKNOWN."""
    if isinstance(x, bool | int | float) or not hasattr(x, "dtype") or not hasattr(x, "shape"):
        return x
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended) or math.prod(x.shape) > MOST_VALUES:
        return UNKNOWN
    if np.dtype(x.dtype).kind in "iub":
        return np.asarray(x) if x.shape else np.asarray(x).item()
    return UNKNOWN if x.shape else float(x)


# Arithmetic -----------------------------------------------------------------------------------------------------------


def _rem(a, b):
    return math.fmod(a, b) if isinstance(a, float) else a - b * _div(a, b)


def _div(a, b):
    """The quotient of whole numbers, rounded towards zero."""
    return a / b if isinstance(a, float) else abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


_NUMBERS = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": _div, "rem": _rem, "neg": operator.neg,
    "max": max, "min": min, "abs": abs, "sign": lambda x: (x > 0) - (x < 0), "clamp": lambda a, x, b: min(max(x, a), b),
    "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge, "eq": operator.eq, "ne": operator.ne,
    "and": operator.and_, "or": operator.or_, "select_n": lambda which, *cases: cases[int(which)],
}  # fmt: skip


def _computed(equation, operands) -> list:
    """The results of an equation that computes: known where its operands are, and are few."""
    unknown = [UNKNOWN] * len(equation.outvars)
    if len(unknown) != 1 or any(x is UNKNOWN for x in operands) or not hasattr(equation.outvars[0].aval, "dtype"):
        return unknown
    out, name = equation.outvars[0].aval, equation.primitive.name
    if jax.dtypes.issubdtype(out.dtype, jax.dtypes.extended):
        return unknown
    if not out.shape and all(isinstance(x, bool | int | float) for x in operands):
        if name in _NUMBERS and (name not in ("div", "rem") or operands[1]):
            return [_NUMBERS[name](*operands)]
        if name == "convert_element_type":
            return [{"b": bool, "f": float}.get(np.dtype(out.dtype).kind, int)(operands[0])]
    if math.prod(out.shape) > MOST_VALUES or (out.shape and np.dtype(out.dtype).kind not in "iub") or name == "iota":
        return unknown
    try:
        avals = [x.aval for x in equation.invars]
        arrays = [jax.numpy.asarray(x, aval.dtype) for x, aval in zip(operands, avals, strict=True)]
        outs = equation.primitive.bind(*arrays, **equation.params)
        return [plain(outs[0] if equation.primitive.multiple_results else outs)]
    except Exception:  # A GPU's own operation.
        return unknown


# Control flow ---------------------------------------------------------------------------------------------------------


def _call(equation, operands, act):
    (inner,) = (
        equation.params[name] for name in ("jaxpr", "call_jaxpr", "call", "fun_jaxpr") if name in equation.params
    )
    return (yield from walk(inner, operands, act))


def _cond(equation, operands, act):
    which, *rest = operands
    branches = equation.params["branches"]
    if which is UNKNOWN:
        return _of_no_matter(equation)
    return (yield from walk(branches[min(max(int(which), 0), len(branches) - 1)], rest, act))


def _scan(equation, operands, act):
    params, (consts, carry, _) = equation.params, (len(part) for part in equation.params["ft_in"].unpack())
    fixed, carried, xs = operands[:consts], operands[consts:][:carry], operands[consts + carry :]
    for i in range(params["length"]):
        i = params["length"] - 1 - i if params["reverse"] else i
        outs = yield from walk(
            params["jaxpr"], [*fixed, *carried, *(x if x is UNKNOWN else plain(x[i]) for x in xs)], act
        )
        carried = outs[:carry]
    return [*carried, *[UNKNOWN] * (len(equation.outvars) - carry)]


def _while(equation, operands, act):
    params = equation.params
    at, end = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    going_on, consts, carry = operands[:at], operands[at:end], operands[end:]
    while True:
        (go_on,) = yield from walk(params["cond_jaxpr"], [*going_on, *carry], act)
        if go_on is UNKNOWN:
            return _of_no_matter(equation)
        if not go_on:
            return carry
        carry = yield from walk(params["body_jaxpr"], [*consts, *carry], act)


def _of_no_matter(equation) -> list:
    """The results, not followed, of a branch or loop that nobody knows to be taken. Raises Unsure if it does more."""
    if any(inner.effects for inner in jaxprs_in_params(equation.params)):
        raise Unsure
    return [UNKNOWN] * len(equation.outvars)


_FLOW = {"cond": _cond, "scan": _scan, "while": _while} | dict.fromkeys(
    ("jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "custom_vmap_call", "checkpoint"),
    _call,
)

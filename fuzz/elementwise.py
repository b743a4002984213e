"""`add` and `fuse`."""

import jax.numpy as jnp
import numpy as np

import cookbook

from .cases import F32, Draw, Op, Values

FLOATS = ("float32", "bfloat16", "float16")
KINDS = ("normal", "normal", "huge", "tiny", "zeros", "nan", "infs")
TANH = np.sqrt(2 / np.pi)


def activate(name: str | None, x):
    """The activation in NumPy, and how far a slack of x and its own roundings reach."""
    if name == "relu":
        return np.maximum(x, 0), 1.0
    if name == "sigmoid":
        return 1 / (1 + np.exp(-x)), 0.25
    if name == "silu":
        return x / (1 + np.exp(-x)), 1.1
    if name == "gelu":
        return 0.5 * x * (1 + np.tanh(TANH * (x + 0.044715 * x**3))), 1.2
    return x, 1.0


def shape(draw: Draw) -> list[int]:
    return [draw.size(most) for most in draw.choice((), (5000,), (300, 20), (7, 30, 20), (3, 2, 9, 40), (1, 700))]


def draw_add(draw: Draw) -> dict:
    kinds = FLOATS if draw.sometimes(0.7) else draw.choice(("int8", "int16", "int32"), ("uint8", "uint16", "uint32"))
    case = dict(shape=shape(draw), dtypes=[draw.choice(*kinds), draw.choice(*kinds)], values=draw.choice(*KINDS))
    if kinds is FLOATS:
        case["activation"] = draw.choice(None, "relu", "gelu", "silu")
        case["grad"] = case["values"] == "normal" and draw.sometimes(0.3)
    return case


def add_arrays(case: dict, values: Values) -> dict:
    x, y = case["dtypes"]
    return dict(x=values(case["shape"], x, case["values"]), y=values(case["shape"], y, "normal"))


def call_add(case, x, y):
    return (cookbook.add(x, y, activation=case.get("activation")),)


def add_reference(case, x, y):
    if x.dtype != np.float64:
        dtype = np.result_type(x.dtype, y.dtype)
        return [((x.astype(np.int64) + y.astype(np.int64)).astype(dtype), 0)]
    out, reach = activate(case["activation"], x + y)
    return [(out, 4 * F32 * reach * (np.abs(x) + np.abs(y)))]


# Named functions of arrays: with jnp, and with NumPy together with the size of what they add up.
FUNCTIONS = {
    "multiply-add": (
        lambda x, y, z: x * y + z,
        lambda x, y, z: [(x * y + z, np.abs(x * y) + np.abs(z))],
    ),
    "gate": (
        lambda x, y, z: (z * jnp.tanh(x), jnp.where(y > 0, y, 0.5 * y)),
        lambda x, y, z: [(z * np.tanh(x), 4 * np.abs(z)), (np.where(y > 0, y, 0.5 * y), np.abs(y))],
    ),
    "distance": (
        lambda x, y, z: jnp.sqrt(x * x + y * y + 1.0) - jnp.minimum(z, 2.0),
        lambda x, y, z: [(np.sqrt(x * x + y * y + 1) - np.minimum(z, 2), 4 * (np.abs(x) + np.abs(y) + np.abs(z) + 1))],
    ),
}  # fmt: skip


def draw_fuse(draw: Draw) -> dict:
    values = draw.choice("normal", "normal", "zeros", "nan", "infs")
    grad = values == "normal" and draw.sometimes(0.3)
    return dict(shape=shape(draw), dtype=draw.choice(*FLOATS), values=values, fn=draw.choice(*FUNCTIONS), grad=grad)


def fuse_arrays(case: dict, values: Values) -> dict:
    return {name: values(case["shape"], case["dtype"], case["values"] if name == "x" else "normal") for name in "xyz"}


def call_fuse(case, **arrays):
    out = cookbook.fuse(FUNCTIONS[case["fn"]][0])(*arrays.values())
    return out if isinstance(out, tuple) else (out,)


def fuse_reference(case, **arrays):
    return [(exact, 4 * F32 * size) for exact, size in FUNCTIONS[case["fn"]][1](*arrays.values())]


OPS = {
    "add": Op(draw_add, add_arrays, call_add, add_reference, gradients=("x", "y")),
    "fuse": Op(draw_fuse, fuse_arrays, call_fuse, fuse_reference, gradients=("x", "y", "z")),
}

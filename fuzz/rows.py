"""`softmax`, `rms_norm` and `reduce_sum`."""

import numpy as np

import cookbook

from .cases import F32, Draw, Op, Values
from .elementwise import FLOATS

LONGEST = 65536


def shape(draw: Draw) -> list[int]:
    """Rows of every kind: short ones of which a warp has several, long ones, and those beyond the registers."""
    columns, rows = draw.choice((16, 900), (40, 400), (600, 30), (3000, 8), (20000, 3))
    cols = min(draw.size(columns, draw.choice(1, 1, 4, 8), large=3), LONGEST + 1)
    return [*draw.choice((), (), (draw.size(3, large=1),)), draw.size(rows), cols]


def too_long(case) -> str | None:
    last = case.get("axis", -1) in (-1, len(case["shape"]) - 1)
    return "were tested: split the row" if last and case["shape"][-1] > LONGEST else None


def draw_softmax(draw: Draw) -> dict:
    values = draw.choice("normal", "normal", "huge", "tiny", "zeros", "nan", "inf", "-inf", "-inf rows")
    grad = values == "normal" and draw.sometimes(0.3)
    return dict(shape=shape(draw), dtype=draw.choice(*FLOATS), values=values, grad=grad)


def one_array(case: dict, values: Values) -> dict:
    return dict(x=values(case["shape"], case["dtype"], case["values"]))


def softmax_reference(case, x):
    if not x.size:
        return [(x, 0)]
    top = x.max(-1, keepdims=True)
    below = x - top
    p = np.exp(below)
    p /= p.sum(-1, keepdims=True)
    return [(p, p * (1e-5 + 4 * F32 * np.where(np.isfinite(below), -below, 0)))]


def draw_rms_norm(draw: Draw) -> dict:
    values, eps = draw.choice(("normal", 1e-6), ("normal", 1e-5), ("normal", 0.0), ("huge", 1e-6), ("tiny", 1e-5),
                              ("zeros", 1e-6), ("nan", 1e-6), ("inf", 1e-6))  # fmt: skip
    dtypes = [draw.choice(*FLOATS), draw.choice(*FLOATS)]
    return dict(
        shape=shape(draw), dtypes=dtypes, values=values, eps=eps, grad=values == "normal" and draw.sometimes(0.3),
        residual=draw.choice(None, None, *FLOATS), out_dtype=draw.choice(None, None, *FLOATS),
    )  # fmt: skip


def rms_norm_arrays(case: dict, values: Values) -> dict:
    x, scale = case["dtypes"]
    arrays = dict(x=values(case["shape"], x, case["values"]), scale=values(case["shape"][-1:], scale))
    return arrays | (dict(residual=values(case["shape"], case["residual"])) if case["residual"] else {})


def call_rms_norm(case, x, scale, residual=None):
    out = cookbook.rms_norm(x, scale, residual=residual, eps=case["eps"], out_dtype=case["out_dtype"])
    return out if residual is not None else (out,)


def rms_norm_reference(case, x, scale, residual=None):
    total = x if residual is None else x + residual
    sums = [] if residual is None else [(total, F32 * np.abs(total))]
    if not x.size:
        return [(x, 0), *sums]
    y = total / np.sqrt(np.mean(total * total, -1, keepdims=True) + case["eps"]) * scale
    return [(y, 2e-5 * np.abs(y)), *sums]


def draw_reduce_sum(draw: Draw) -> dict:
    case = dict(
        shape=shape(draw), dtype=draw.choice(*FLOATS), values=draw.choice("normal", "huge", "tiny", "nan", "infs")
    )
    if draw.sometimes(0.2):
        case["shape"] = [draw.size(5000), draw.size(40)]  # Long columns, few of them.
    case["axis"] = draw.choice(0, -1)
    case["grad"] = case["values"] == "normal" and draw.sometimes(0.2)
    return case


def reduce_sum_reference(case, x):
    return [(x.sum(case["axis"]), 4e-6 * np.abs(np.where(np.isfinite(x), x, 0)).sum(case["axis"]))]


OPS = {
    "softmax": Op(
        draw_softmax, one_array, lambda case, x: (cookbook.softmax(x),), softmax_reference, too_long, ("x",)
    ),
    "rms_norm": Op(
        draw_rms_norm, rms_norm_arrays, call_rms_norm, rms_norm_reference, too_long, ("x", "scale", "residual"),
    ),
    "reduce_sum": Op(
        draw_reduce_sum, one_array, lambda case, x: (cookbook.reduce_sum(x, case["axis"]),), reduce_sum_reference,
        too_long, ("x",),
    ),
}  # fmt: skip

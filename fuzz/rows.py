"""`softmax`, `rms_norm`, `layer_norm`, `group_norm` and `reduce_sum`."""

import numpy as np

import cookbook

from .cases import F32, Draw, Op, Values
from .elementwise import FLOATS

LONGEST = 65536
EIGHT_BITS = {"float8_e4m3fn": 448, "int8": 127}  # And the largest number of each.


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
    case = dict(
        shape=shape(draw), dtypes=dtypes, values=values, eps=eps, grad=values == "normal" and draw.sometimes(0.3),
        residual=draw.choice(None, None, *FLOATS), out_dtype=draw.choice(None, None, *FLOATS),
    )  # fmt: skip
    if eps and values not in ("nan", "inf") and draw.sometimes(0.25):
        case |= dict(out_dtype=draw.choice(*EIGHT_BITS), grad=False)
    return case


def rms_norm_arrays(case: dict, values: Values) -> dict:
    x, scale = case["dtypes"]
    arrays = dict(x=values(case["shape"], x, case["values"]), scale=values(case["shape"][-1:], scale))
    return arrays | (dict(residual=values(case["shape"], case["residual"])) if case["residual"] else {})


def call_rms_norm(case, x, scale, residual=None):
    out = cookbook.rms_norm(x, scale, residual=residual, eps=case["eps"], out_dtype=case["out_dtype"])
    if case["out_dtype"] in EIGHT_BITS:
        return out[0].astype("float32"), *out[1:]
    return out if residual is not None else (out,)


def rms_norm_reference(case, x, scale, residual=None):
    total = x if residual is None else x + residual
    sums = [] if residual is None else [(total, F32 * np.abs(total))]
    largest = EIGHT_BITS.get(case["out_dtype"])
    if not x.size:
        return [(x, 0), *([(x.sum(-1), 0)] if largest else []), *sums]
    y = total / np.sqrt(np.mean(total * total, -1, keepdims=True) + case["eps"]) * scale
    if not largest:
        return [(y, 2e-5 * np.abs(y)), *sums]
    y_scale = np.abs(y).max(-1) / largest
    ratio = y / np.where(y_scale == 0, 1, y_scale)[..., None]
    # Half of the last bit of a float's three, or of a whole number.
    rounding = np.abs(ratio) / 16 + 2**-10 if largest == 448 else 0.5
    return [(ratio, rounding + 2e-5 * np.abs(ratio)), (y_scale, 2e-5 * y_scale), *sums]


def draw_layer_norm(draw: Draw) -> dict:
    values = draw.choice("normal", "normal", "normal", "huge", "tiny", "zeros", "nan", "inf")
    return dict(
        shape=shape(draw), dtypes=[draw.choice(*FLOATS) for _ in range(3)], values=values, eps=draw.choice(1e-6, 1e-5),
        residual=draw.choice(None, None, *FLOATS), out_dtype=draw.choice(None, None, *FLOATS), bias=draw.sometimes(),
        grad=values == "normal" and draw.sometimes(0.3),
    )  # fmt: skip


def layer_norm_arrays(case: dict, values: Values) -> dict:
    x, weight, bias = case["dtypes"]
    arrays = dict(x=values(case["shape"], x, case["values"]), weight=values(case["shape"][-1:], weight))
    arrays |= dict(bias=values(case["shape"][-1:], bias)) if case["bias"] else {}
    return arrays | (dict(residual=values(case["shape"], case["residual"])) if case["residual"] else {})


def call_layer_norm(case, x, weight, bias=None, residual=None):
    out = cookbook.layer_norm(x, weight, bias, residual=residual, eps=case["eps"], out_dtype=case["out_dtype"])
    return out if residual is not None else (out,)


def normalised(t, eps, is_centered: bool):
    """`t` normalised, and how far off the rounding of its mean may put it."""
    if not is_centered:
        return t / np.sqrt(np.mean(t * t, -1, keepdims=True) + eps), 0.0
    off = t - t.mean(-1, keepdims=True)
    root = np.sqrt(np.mean(off * off, -1, keepdims=True) + eps)
    return off / root, 8 * F32 * np.abs(t).max(-1, keepdims=True) / root


def layer_norm_reference(case, x, weight, bias=0.0, residual=None):
    total = x if residual is None else x + residual
    sums = [] if residual is None else [(total, F32 * np.abs(total))]
    if not x.size:
        return [(x, 0), *sums]
    n, slack = normalised(total, case["eps"], True)
    return [(n * weight + bias, (slack + 2e-5 * np.abs(n)) * np.abs(weight) + F32 * np.abs(bias)), *sums]


def draw_group_norm(draw: Draw) -> dict:
    *lead, size = shape(draw)
    groups, values = (
        draw.choice(1, 2, 3, draw.number(1, 12)),
        draw.choice("normal", "normal", "normal", "huge", "zeros"),
    )
    if size > 600:
        groups = min(groups, 3)
    return dict(
        shape=[*lead, groups * size], group_size=size, shared=draw.sometimes(), values=values, bias=draw.sometimes(0.3),
        dtypes=[draw.choice(*FLOATS) for _ in range(3)], gate=draw.choice(None, *FLOATS), eps=draw.choice(1e-6, 1e-5),
        norm_before_gate=draw.sometimes(), is_rms_norm=draw.sometimes(0.7), out_dtype=draw.choice(None, None, *FLOATS),
        grad=values == "normal" and draw.sometimes(0.3),
    )  # fmt: skip


def group_norm_arrays(case: dict, values: Values) -> dict:
    x, weight, bias = case["dtypes"]
    columns = [case["group_size"] if case["shared"] else case["shape"][-1]]
    arrays = dict(x=values(case["shape"], x, case["values"]), weight=values(columns, weight))
    arrays |= dict(bias=values(columns, bias)) if case["bias"] else {}
    return arrays | (dict(gate=values(case["shape"], case["gate"])) if case["gate"] else {})


def call_group_norm(case, x, weight, bias=None, gate=None):
    names = ("group_size", "eps", "norm_before_gate", "is_rms_norm", "out_dtype")
    return (cookbook.group_norm(x, weight, bias, gate=gate, **{name: case[name] for name in names}),)


def group_norm_reference(case, x, weight, bias=None, gate=None):
    if not x.size:
        return [(x, 0)]
    groups = lambda v: v.reshape(*v.shape[:-1], -1, case["group_size"])
    silu = np.ones_like(x) if gate is None else gate / (1 + np.exp(-gate))
    n, slack = normalised(groups(x if case["norm_before_gate"] else x * silu), case["eps"], not case["is_rms_norm"])
    weight, bias = groups(weight), 0.0 if bias is None else groups(bias)
    y, slack = n * weight + bias, (slack + 5e-5 * np.abs(n)) * np.abs(weight) + 5e-5 * np.abs(bias)
    after = groups(silu) if case["norm_before_gate"] else 1.0
    return [((y * after).reshape(x.shape), (slack * np.abs(after)).reshape(x.shape))]


def group_too_long(case) -> str | None:
    return "were tested: split the row" if case["group_size"] > LONGEST else None


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
    "layer_norm": Op(
        draw_layer_norm, layer_norm_arrays, call_layer_norm, layer_norm_reference, too_long,
        ("x", "weight", "bias", "residual"),
    ),
    "group_norm": Op(
        draw_group_norm, group_norm_arrays, call_group_norm, group_norm_reference, group_too_long,
        ("x", "weight", "bias", "gate"),
    ),
    "reduce_sum": Op(
        draw_reduce_sum, one_array, lambda case, x: (cookbook.reduce_sum(x, case["axis"]),), reduce_sum_reference,
        too_long, ("x",),
    ),
}  # fmt: skip

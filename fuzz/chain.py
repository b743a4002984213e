"""`mlp`: which of its stages there are, sizes, rows, cuts."""

import numpy as np

import cookbook

from .cases import Draw, Op, Values
from .elementwise import FLOATS, activate
from .gemm import HALVES, slack

Config, Cut = cookbook.mlp.Config, cookbook.mlp.Cut
OTHERS = (), ("scale",), ("residual", "scale"), ("w_o", "scale", "next_scale"), (
    "residual", "scale", "w_o", "next_scale", "w_qkv",
)  # fmt: skip


def draw_mlp(draw: Draw) -> dict:
    return dict(
        m=min(draw.size(140, large=1), 140), d=draw.size(256, 128, zero=0), f=draw.size(300, 16, zero=0),
        a=draw.size(200, 8, zero=0), n=draw.size(256, 128, zero=0), others=draw.choice(*OTHERS),
        dtype=draw.choice(*HALVES), out_dtype=draw.choice(None, *FLOATS), residual=draw.choice(*FLOATS),
        values=draw.choice("normal", "normal", "nan"), parts=draw.choice(None, 1, 2, 3),
        activation=draw.choice("silu", "silu", "gelu", "relu", None),
    )  # fmt: skip


def mlp_arrays(case: dict, values: Values) -> dict:
    m, d, f, a, n = (case[name] for name in "mdfan")
    weight = lambda *shape: values(shape, case["dtype"], scale=shape[1] ** -0.5)
    others = dict(
        residual=lambda: values((m, d), case["residual"]), scale=lambda: values((d,)), w_o=lambda: weight(d, a),
        next_scale=lambda: values((d,)), w_qkv=lambda: weight(n, d),
    )  # fmt: skip
    x = values((m, a if "w_o" in case["others"] else d), case["dtype"], case["values"])
    return dict(x=x, w_gate_up=weight(2 * f, d), w_down=weight(d, f)) | {
        name: others[name]() for name in case["others"]
    }


def call_mlp(case, x, w_gate_up, w_down, **others):
    most = -(-case["f"] // 128)
    config = None if case["parts"] is None else Config(down=Cut(32, min(case["parts"], most)))
    out = cookbook.mlp(
        x, w_gate_up, w_down, **others, activation=case["activation"], out_dtype=case["out_dtype"], config=config
    )
    return out if isinstance(out, tuple) else (out,)


def normed(total, error, scale, eps=1e-6):
    """RMSNorm, and how far an `error` of its operand reaches."""
    mean = lambda x: x.mean(-1, keepdims=True)
    inverse = (mean(total**2) + eps) ** -0.5
    return total * inverse * scale, np.abs(scale) * inverse * (
        error + np.abs(total) * inverse**2 * mean(abs(total) * error)
    )


def mlp_reference(case, x, w_gate_up, w_down, residual=0.0, scale=None, w_o=None, next_scale=None, w_qkv=None):
    step = 2.0**-8 if case["dtype"] == "bfloat16" else 2.0**-10  # Rounding, and the activation's instructions.
    product = lambda x, error, w: (x @ w.T, error @ np.abs(w).T + slack(x, w.T))
    x, error = (x, 0 * x) if w_o is None else product(x, 0 * x, w_o)
    total, error = x + residual, error + 1e-6 * (np.abs(x) + np.abs(residual))
    y, of_y = (total, error) if scale is None else normed(total, error, scale)
    both, of_both = product(y, of_y + (0 if scale is None else step * np.abs(y)), w_gate_up)
    (gate, up), (of_gate, of_up) = (np.split(v, 2, axis=1) for v in (both, of_both))
    acted, reach = activate(case["activation"], gate)
    h = acted * up
    of_h = np.abs(up) * (reach * of_gate + step * np.abs(gate)) + np.abs(acted) * of_up + reach * of_gate * of_up
    out, of_out = product(h, of_h + step * np.abs(h), w_down)
    if scale is None:
        return [(out, of_out)]
    if next_scale is not None:
        total, error = total + out, error + of_out
        out, of_out = normed(total, error, next_scale)
        out, of_out = (out, of_out) if w_qkv is None else product(out, of_out + step * np.abs(out), w_qkv)
    return [(out, of_out), (total, error)]


OPS = {
    "mlp": Op(draw_mlp, mlp_arrays, call_mlp, mlp_reference, lambda case: "at most 128" if case["m"] > 128 else None)
}

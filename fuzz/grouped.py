"""Grouped products, and the layer of experts that is made of them."""

import inspect

import numpy as np

import cookbook
from cookbook.gemm.grouped import cost as group_cost
from cookbook.gemm.grouped.ragged_dot import problem

from .cases import Draw, Op, Values
from .elementwise import FLOATS, activate
from .gemm import HALVES, TMA, is_fp8, ranked, slack, slack_fp8

ragged_dot_mxfp4_weights = inspect.getmodule(cookbook.ragged_dot_mxfp4_weights)
BLOCK = 128
KINDS = ("normal", "normal", "huge", "tiny", "nan")


def draw_groups(draw: Draw, unit: int = 8) -> dict:
    """Sizes of groups, hostile ones among them: below 0, and beyond the rows."""
    groups, of = draw.number(1, 5 if not draw.large else 20), lambda most: draw.size(most, unit, large=8)
    case = dict(m=draw.size(150, large=10), n=of(120), k=of(150), groups=groups)
    kind = draw.choice("random", "random", "one", "empty", "hostile")
    count = groups + (draw.number(0, 3) if draw.sometimes(0.3) else 0)
    sizes = {
        "random": draw.rng.multinomial(int(case["m"] * draw.rng.random()), np.ones(count) / count),
        "one": np.eye(count, dtype=int)[draw.number(0, count - 1)] * case["m"],
        "empty": np.zeros(count, int),
        "hostile": draw.rng.integers(-case["m"] - 1, case["m"] + 2, count),
    }[kind]
    case |= dict(sizes=sizes.tolist(), group_offset=None)
    if count > groups or draw.sometimes(0.1):
        case["group_offset"] = draw.choice(draw.number(0, count - groups), draw.number(-1, count))
    return case


def rows_of_groups(case: dict) -> np.ndarray:
    """The matrix that each row is multiplied by; -1 for none."""
    ends = np.minimum(np.cumsum(np.maximum(case["sizes"], 0)), case["m"])
    group = np.searchsorted(ends, np.arange(case["m"]), side="right") - (case["group_offset"] or 0)
    return np.where((np.arange(case["m"]) < ends[-1]) & (group >= 0) & (group < case["groups"]), group, -1)


def grouped(case: dict, lhs, rhs, more=lambda lhs, rhs: 0.0):
    """Products of rows and their matrices (G, K, N), and how far they may be off: by `slack` and `more` of a group's.

    Rows of no group are zeros.
    """
    out = np.zeros((case["m"], rhs.shape[2]))
    error, groups = np.zeros_like(out), rows_of_groups(case)
    for group in set(groups.tolist()) - {-1}:
        mine = groups == group
        out[mine], error[mine] = lhs[mine] @ rhs[group], slack(lhs[mine], rhs[group]) + more(lhs[mine], rhs[group])
    return out, error


def placed(case: dict, **arrays) -> dict:
    given = arrays | dict(group_sizes=np.asarray(case["sizes"], np.int32))
    if case["group_offset"] is not None:
        given["group_offset"] = np.asarray(case["group_offset"], np.int32)
    return given


def draw_ragged(draw: Draw) -> dict:
    case = draw_groups(draw, 8 if draw.sometimes(0.95) else 1) | dict(
        dtype=draw.choice(*HALVES), transpose_rhs=draw.sometimes(), out_dtype=draw.choice(None, *FLOATS),
        activation=draw.choice(None, None, "swiglu", "relu", "silu"), values=draw.choice(*KINDS), rank=None,
    )  # fmt: skip
    case["grad"] = case["values"] == "normal" and not ragged_rule(case) and draw.sometimes(0.2)
    if not case["grad"] and draw.sometimes(0.3):
        case["rank"] = draw.number(0, 30)
    return case


def ragged_rule(case: dict) -> str | None:
    columns = case["n"] * (2 if case["activation"] == "swiglu" else 1)
    if case["k"] % 8 or (not case["transpose_rhs"] and columns % 8):
        return TMA
    return "TMA copies from" if not case["transpose_rhs"] and case["n"] % 8 else None


def ragged_arrays(case: dict, values: Values) -> dict:
    n = case["n"] * (2 if case["activation"] == "swiglu" else 1)
    rhs = (case["groups"], *((n, case["k"]) if case["transpose_rhs"] else (case["k"], n)))
    lhs = values((case["m"], case["k"]), case["dtype"], case["values"])
    return placed(case, lhs=lhs, rhs=values(rhs, case["dtype"]))


def call_ragged(case, lhs, rhs, group_sizes, group_offset=None):
    sizes, is_gated = [case[name] for name in ("m", "n", "k", "groups")], case["activation"] == "swiglu"
    this = problem(*sizes, lhs.dtype, case["out_dtype"], case["transpose_rhs"], is_gated)
    config = ranked(case, group_cost.ranked, this)
    return (cookbook.ragged_dot(
        lhs, rhs, group_sizes, group_offset=group_offset, transpose_rhs=case["transpose_rhs"], config=config,
        activation=case["activation"], preferred_element_type=case["out_dtype"],
    ),)  # fmt: skip


def ragged_reference(case, lhs, rhs, group_sizes, group_offset=None):
    out, error = grouped(case, lhs, rhs.swapaxes(1, 2) if case["transpose_rhs"] else rhs)
    rough = 2.0**-9 if case["out_dtype"] != "float32" else 1e-6
    if case["activation"] == "swiglu":
        (gate, up), (gate_error, up_error) = np.split(out, 2, 1), np.split(error, 2, 1)
        gate_out = activate("silu", gate)[0]
        size = np.abs(gate) * up_error + 1.1 * np.abs(up) * gate_error
        return [(gate_out * up, size + rough * np.abs(gate * up))]
    activated, reach = activate(case["activation"], out)
    rough = rough if case["activation"] == "silu" else 0
    if case["grad"]:  # The activation is applied to a product that was rounded.
        rough = 2.0**-7
    return [(activated, reach * error + rough * np.abs(out))]


# Operands of 8 bits --------------------------------------------------------------------------------------------------


def draw_fp8(draw: Draw) -> dict:
    return draw_groups(draw, 16) | dict(
        by_block=draw.sometimes(), transpose_rhs=draw.sometimes(0.7), out_dtype=draw.choice(*FLOATS)
    )


def fp8_arrays(case: dict, values: Values) -> dict:
    (m, n, k, g), flipped = (case[name] for name in ("m", "n", "k", "groups")), case["transpose_rhs"]
    across = lambda n, k: (n, k) if flipped else (k, n)
    scales = [(m,), (g, n)]
    if case["by_block"]:
        blocks = -(-n // BLOCK), -(-k // BLOCK)
        scales = [(m, blocks[1]), (g, *across(*blocks))]
    scale_lhs, scale_rhs = (np.abs(values(shape, scale=0.1)) for shape in scales)
    lhs, rhs = values((m, k), "float8_e4m3fn"), values((g, *across(n, k)), "float8_e4m3fn")
    return placed(case, lhs=lhs, rhs=rhs, scale_lhs=scale_lhs, scale_rhs=scale_rhs)


def call_fp8(case, lhs, rhs, scale_lhs, scale_rhs, group_sizes, group_offset=None):
    how = dict(transpose_rhs=case["transpose_rhs"], out_dtype=case["out_dtype"], group_offset=group_offset)
    return (cookbook.ragged_dot_fp8(lhs, rhs, scale_lhs, scale_rhs, group_sizes, **how),)


def fp8_reference(case, lhs, rhs, scale_lhs, scale_rhs, group_sizes, group_offset=None):
    if case["transpose_rhs"]:
        rhs, scale_rhs = rhs.swapaxes(1, 2), scale_rhs.swapaxes(1, 2) if case["by_block"] else scale_rhs
    if case["by_block"]:
        spread = lambda scale, axis, size: np.repeat(scale, BLOCK, axis).take(np.arange(size), axis)
        lhs = lhs * spread(scale_lhs, 1, lhs.shape[1])
        rhs = rhs * spread(spread(scale_rhs, 1, rhs.shape[1]), 2, rhs.shape[2])
    else:
        lhs, rhs = lhs * scale_lhs[:, None], rhs * scale_rhs[:, None, :]
    out, error = grouped(case, lhs, rhs)
    return [(out, 100 * error)]  # Tensor cores add such products with fewer bits.


def draw_int8(draw: Draw) -> dict:
    return draw_groups(draw, 16) | dict(
        dtype=draw.choice(*HALVES), transpose_rhs=draw.sometimes(0.7), out_dtype=draw.choice(None, *HALVES),
        values=draw.choice("normal", "nan"),
    )  # fmt: skip


def int8_arrays(case: dict, values: Values) -> dict:
    (m, n, k, g), flipped = (case[name] for name in ("m", "n", "k", "groups")), case["transpose_rhs"]
    rhs = values((g, *((n, k) if flipped else (k, n))), "int8", "huge")
    return placed(case, lhs=values((m, k), case["dtype"], case["values"]), rhs=rhs, scales=values((g, n), scale=0.01))


def call_int8(case, lhs, rhs, scales, group_sizes, group_offset=None):
    how = dict(transpose_rhs=case["transpose_rhs"], out_dtype=case["out_dtype"], group_offset=group_offset)
    return (cookbook.ragged_dot_int8_weights(lhs, rhs, scales, group_sizes, **how),)


def int8_reference(case, lhs, rhs, scales, group_sizes, group_offset=None):
    rhs = rhs.swapaxes(1, 2) if case["transpose_rhs"] else rhs
    return [grouped(case, lhs, rhs * scales[:, None, :])]


def draw_four_bits(draw: Draw) -> dict:
    return draw_groups(draw, 8) | dict(transpose_rhs=False, out_dtype=draw.choice(None, *HALVES),
                                       values=draw.choice("normal", "nan"))  # fmt: skip


def draw_int4(draw: Draw) -> dict:
    return draw_four_bits(draw) | dict(group_size=draw.choice(32, 64, 128), zeros=draw.sometimes(0.5))


def int4_arrays(case: dict, values: Values) -> dict:
    m, n, k, g = (case[name] for name in ("m", "n", "k", "groups"))
    given = dict(lhs=values((m, k), "bfloat16", case["values"]), q=values((g, k, n), "int8", "huge") >> 4)
    shape = g, -(-k // case["group_size"]), n
    given["scales"] = np.exp2(np.round(values(shape, "float32"))).astype("bfloat16")  # So that weights are exact.
    if case["zeros"]:
        given["zeros"] = (values(shape, "int8", "huge") & 15).view(np.uint8)
    return placed(case, **given)


def call_int4(case, lhs, q, scales, group_sizes, zeros=None, group_offset=None):
    how = dict(zeros=zeros, group_size=case["group_size"], out_dtype=case["out_dtype"], group_offset=group_offset)
    return (cookbook.ragged_dot_int4_weights(lhs, cookbook.pack_int4(q), scales, group_sizes, **how),)


def int4_reference(case, lhs, q, scales, group_sizes, zeros=None, group_offset=None):
    of_rows = lambda numbers: np.repeat(numbers, case["group_size"], axis=1)[:, : case["k"]]
    zeros = 0 if zeros is None else of_rows(zeros.astype(np.float64)) - 8
    return [grouped(case, lhs, (q.astype(np.float64) - zeros) * of_rows(scales))]


def mxfp4_arrays(case: dict, values: Values) -> dict:
    m, n, blocks, g = case["m"], case["n"], -(-case["k"] // 32), case["groups"]
    codes = values((g, n, blocks, 16), "int8", "huge").view(np.uint8)
    scales = (values((g, n, blocks), "int8", "huge") // 8 + 120).astype(np.uint8)
    return placed(case, lhs=values((m, 32 * blocks), "bfloat16", case["values"]), blocks=codes, scales=scales)


def call_mxfp4(case, lhs, blocks, scales, group_sizes, group_offset=None):
    how = dict(out_dtype=case["out_dtype"], group_offset=group_offset)
    return (cookbook.ragged_dot_mxfp4_weights(lhs, *cookbook.pack_mxfp4(blocks, scales), group_sizes, **how),)


def mxfp4_reference(case, lhs, blocks, scales, group_sizes, group_offset=None):
    sizes = case["m"], case["n"], lhs.shape[1], case["groups"]
    more = (slack_fp8,) if is_fp8(case, ragged_dot_mxfp4_weights.default_config, *sizes) else ()
    return [grouped(case, lhs, widened(blocks, scales), *more)]


def widened(blocks, scales):
    """The (G, K, N) weights of gpt-oss's blocks and scales."""
    blocks, scales = (np.asarray(x).astype(np.uint8) for x in (blocks, scales))
    magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = np.concatenate([magnitudes, -magnitudes])[np.stack([blocks & 15, blocks >> 4], axis=-1)]
    values = values.reshape(*scales.shape, 32) * 2.0 ** (scales.astype(np.float64)[..., None] - 127)
    return values.reshape(*scales.shape[:2], 32 * scales.shape[2]).swapaxes(1, 2)


# Sums along groups ---------------------------------------------------------------------------------------------------


def draw_transposed(draw: Draw) -> dict:
    case = draw_groups(draw, 8 if draw.sometimes(0.95) else 1)
    return case | dict(dtype=draw.choice(*HALVES), out_dtype=draw.choice(None, *FLOATS), values=draw.choice(*KINDS))


def transposed_arrays(case: dict, values: Values) -> dict:
    lhs, rhs = ((case["m"], case[name]) for name in "kn")
    return placed(case, lhs=values(lhs, case["dtype"], case["values"]), rhs=values(rhs, case["dtype"]))


def call_transposed(case, lhs, rhs, group_sizes, group_offset=None):
    return (cookbook.ragged_dot_transposed(
        lhs, rhs, group_sizes, group_offset=group_offset, preferred_element_type=case["out_dtype"],
        num_groups=None if group_offset is None else case["groups"],
    ),)  # fmt: skip


def transposed_reference(case, lhs, rhs, group_sizes, group_offset=None):
    groups = rows_of_groups(case)
    mine = [groups == group for group in range(case["groups"])]
    pairs = [(lhs[rows].T, rhs[rows]) for rows in mine]
    return [(np.stack([a @ b for a, b in pairs]), np.stack([slack(a, b) for a, b in pairs]))]


# A layer of experts --------------------------------------------------------------------------------------------------


def draw_moe(draw: Draw) -> dict:
    experts = draw.number(1, 8)
    count = experts if draw.sometimes(0.7) else draw.number(1, experts)
    case = dict(
        tokens=draw.size(40), hidden=draw.size(128, 8, large=40), inner=draw.size(64, 8), experts=experts, count=count,
        top_k=draw.number(1, experts), renormalize=draw.sometimes(), dtype=draw.choice(*HALVES),
        router=draw.choice(*FLOATS), group_offset=None if count == experts else draw.number(0, experts - count),
        values=draw.choice("normal", "equal"),
    )  # fmt: skip
    case |= dict(grad=case["values"] == "normal" and draw.sometimes(0.1), packed=draw.sometimes(0.2))
    if case["packed"]:
        case |= dict(dtype="bfloat16", grad=False)
    return case | dict(biases=draw.sometimes(0.3), swiglu_limit=draw.choice(None, None, 1.0))


def moe_arrays(case: dict, values: Values) -> dict:
    tokens, hidden, inner, count, dtype = (case[name] for name in ("tokens", "hidden", "inner", "count", "dtype"))
    logits = values((tokens, case["experts"]), case["router"])
    biases = dict(b_gate_up=values((count, 2 * inner), "float32"), b_down=values((count, hidden), "float32"))
    given = (biases if case["biases"] else {}) | dict(
        x=values((tokens, hidden), dtype), w_down=values((count, inner, hidden), dtype, scale=max(inner, 1) ** -0.5),
        router_logits=np.round(logits.astype(np.float32)).astype(logits.dtype) if case["values"] == "equal" else logits,
        w_gate_up=values((count, hidden, 2 * inner), dtype, scale=max(hidden, 1) ** -0.5),
    )  # fmt: skip
    for name, columns, k in (("gate_up", 2 * inner, hidden), ("down", hidden, inner)) if case["packed"] else ():
        shape, exponent = (count, columns, -(-k // 32)), round(np.log2(3 * max(k, 1) ** 0.5))
        given[f"w_{name}"] = values((*shape, 16), "int8", "huge").view(np.uint8)
        given[f"{name}_scales"] = (values(shape, "int8", "huge") % 3 + 126 - exponent).astype(np.uint8)
    return given


def call_moe(case, gate_up_scales=None, down_scales=None, **arrays):
    if case["packed"]:
        arrays["w_gate_up"] = cookbook.pack_mxfp4(arrays["w_gate_up"], gate_up_scales)
        arrays["w_down"] = cookbook.pack_mxfp4(arrays["w_down"], down_scales)
    how = {name: case[name] for name in ("top_k", "renormalize", "group_offset", "swiglu_limit")}
    return (cookbook.moe(**arrays, **how),)


def moe_reference(
    case, x, router_logits, w_gate_up, w_down, b_gate_up=None, b_down=None, gate_up_scales=None, down_scales=None
):
    if case["packed"]:
        w_gate_up = widened(w_gate_up, gate_up_scales)[:, : case["hidden"]]
        w_down = widened(w_down, down_scales)[:, : case["inner"]]
    out, size = np.zeros_like(x), np.zeros_like(x)
    order = np.lexsort((np.signbit(router_logits), -router_logits), 1)  # The first of equal ones; 0 before -0.
    weights = np.exp(router_logits - router_logits.max(1, keepdims=True, initial=-1e30))
    for t, first in enumerate(order[:, : case["top_k"]]):
        total = weights[t, first].sum() if case["renormalize"] else weights[t].sum()
        for expert in first:
            mine = expert - (case["group_offset"] or 0)
            if 0 <= mine < case["count"]:
                bias, b_out = (0, 0) if b_down is None else (b_gate_up[mine], b_down[mine])
                gate, up = np.split(x[t] @ w_gate_up[mine] + bias, 2)
                if (limit := case["swiglu_limit"]) is None:
                    inner = activate("silu", gate)[0] * up
                else:
                    gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
                    inner = gate / (1 + np.exp(-1.702 * gate)) * (up + 1)
                share = weights[t, expert] / total
                out[t] += share * (inner @ w_down[mine] + b_out)
                size[t] += share * (np.abs(inner) @ np.abs(w_down[mine]) + np.abs(b_out))
    return [(out, (2.0**-6 if case["dtype"] == "bfloat16" else 2.0**-9) * size)]


OPS = {
    "ragged_dot": Op(draw_ragged, ragged_arrays, call_ragged, ragged_reference, ragged_rule, ("lhs", "rhs")),
    "ragged_dot_fp8": Op(draw_fp8, fp8_arrays, call_fp8, fp8_reference),
    "ragged_dot_int4_weights": Op(
        draw_int4, int4_arrays, call_int4, int4_reference, lambda case: TMA if case["k"] % 8 else None
    ),
    "ragged_dot_mxfp4_weights": Op(draw_four_bits, mxfp4_arrays, call_mxfp4, mxfp4_reference),
    "ragged_dot_int8_weights": Op(draw_int8, int8_arrays, call_int8, int8_reference),
    "ragged_dot_transposed": Op(
        draw_transposed, transposed_arrays, call_transposed, transposed_reference,
        lambda case: TMA if case["k"] % 8 or case["n"] % 8 else None,
    ),
    "moe": Op(
        draw_moe, moe_arrays, call_moe, moe_reference, gradients=("x", "router_logits", "w_gate_up", "w_down")
    ),
}  # fmt: skip

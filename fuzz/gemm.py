"""`matmul`, the rungs that lead to it, `glu`, and the products of 8-bit operands."""

import inspect

import jax.numpy as jnp
import numpy as np

import cookbook
from cookbook.gemm import cost
from cookbook.gemm.gated import plan as gated

from .cases import Draw, Op, Values
from .elementwise import FLOATS, activate

matmul_int4_weights, matmul_int8_weights, matmul_mxfp4_weights = map(
    inspect.getmodule, (cookbook.matmul_int4_weights, cookbook.matmul_int8_weights, cookbook.matmul_mxfp4_weights)
)
HALVES = ("bfloat16", "float16")
FP8 = ("float8_e4m3fn", "float8_e5m2")
KINDS = ("normal", "normal", "huge", "tiny", "nan", "inf")
TMA = "TMA needs a multiple of 16 bytes"


def slack(a, b, reach: float = 1.0, share: float = 1e-5):
    """How far float32 sums of products may be off, and what `reach` makes of it."""
    finite = lambda x: np.abs(np.where(np.isfinite(x), x, 0.0))
    return share * reach * (finite(a) @ finite(b))


def sizes(draw: Draw, unit: int = 8) -> dict:
    """M, N and K. Rows in memory have to be of `unit` values; some are not, and are refused."""
    of = lambda most: draw.size(most, unit if draw.sometimes(0.95) else 1, large=8)
    return dict(m=of(150), n=of(150), k=of(200))


def oriented(x, transposed: bool):
    """A matrix that is stored as its transpose."""
    return np.ascontiguousarray(x.T) if transposed else x


def as_given(case: dict) -> tuple:
    """Shapes of a and b as they are given."""
    a, b = (case["m"], case["k"]), (case["k"], case["n"])
    return (a[::-1] if case.get("transpose_a") else a), (b[::-1] if case.get("transpose_b") else b)


def rows_of_bytes(case: dict) -> str | None:
    """The rule of TMA: rows of operands are multiples of 16 bytes."""
    itemsize = jnp.dtype(case["dtype"]).itemsize
    return TMA if any(cols * itemsize % 16 for _, cols in as_given(case)) else None


def operands(case: dict, values: Values) -> dict:
    shape_a, shape_b = as_given(case)
    given = dict(a=values(shape_a, case["dtype"], case["values"]), b=values(shape_b, case["dtype"]))
    if case.get("bias"):
        given["bias"] = values((case["n"],), case["bias"])
    return given


def draw_matmul(draw: Draw) -> dict:
    case = sizes(draw) | dict(
        dtype=draw.choice(*HALVES), values=draw.choice(*KINDS), out_dtype=draw.choice(None, *FLOATS),
        transpose_a=draw.sometimes(), transpose_b=draw.sometimes(),
        activation=draw.choice(None, None, "relu", "gelu", "silu"), bias=draw.choice(None, None, *FLOATS),
        rank=draw.choice(None, None, draw.number(0, 40)),
    )  # fmt: skip
    case["grad"] = case["values"] == "normal" and not rows_of_bytes(case) and draw.sometimes(0.2)
    return case


def ranked(case: dict, rank_of, *problem):
    """The configuration that is not the fastest, but the `rank`-th that `rank_of(*problem, count)` lists; or None."""
    if case.get("rank") is None or case.get("grad") or 0 in (case["m"], case["n"], case["k"]):
        return None
    configs = rank_of(*problem, case["rank"] + 1)
    return configs[min(case["rank"], len(configs) - 1)]


def call_matmul(case, a, b, bias=None):
    itemsizes = a.dtype.itemsize, a.dtype.itemsize, jnp.dtype(case["out_dtype"] or a.dtype).itemsize
    transposed = case["transpose_a"], not case["transpose_b"]
    problem = cost.Problem(case["m"], case["n"], case["k"], transposed, itemsizes, 132)
    config = ranked(case, cost.ranked, problem)
    how = {name: case[name] for name in ("out_dtype", "transpose_a", "transpose_b", "activation")}
    return (cookbook.matmul(a, b, bias=bias, config=config, **how),)


def matmul_reference(case, a, b, bias=None):
    a, b = oriented(a, case.get("transpose_a")), oriented(b, case.get("transpose_b"))
    before = a @ b if bias is None else a @ b + bias
    out, reach = activate(case.get("activation"), before)
    error = slack(a, b, reach)
    if case.get("activation") in ("silu", "gelu"):  # 16-bit results come from approximate instructions.
        error = error + (2.0**-9 if case["out_dtype"] != "float32" else 1e-6) * np.abs(before)
    return [(out, error)]


def draw_rung(draw: Draw) -> dict:
    return sizes(draw) | dict(
        dtype=draw.choice(*HALVES), values=draw.choice(*KINDS), out_dtype=draw.choice(None, *FLOATS),
        transpose_a=draw.sometimes(), transpose_b=draw.sometimes(),
    )  # fmt: skip


def draw_pipelined(draw: Draw) -> dict:
    return draw_rung(draw) | dict(activation=draw.choice(None, "relu", "gelu", "silu"))


def draw_blocked(draw: Draw) -> dict:
    return sizes(draw) | dict(dtype=draw.choice(*FLOATS), values=draw.choice(*KINDS))


def rung(op):
    names = ("out_dtype", "transpose_a", "transpose_b", "activation")
    return lambda case, a, b: (op(a, b, **{name: case[name] for name in names if name in case}),)


# A gated linear unit --------------------------------------------------------------------------------------------------


def draw_glu(draw: Draw) -> dict:
    case = sizes(draw) | dict(
        dtype=draw.choice(*HALVES), values=draw.choice(*KINDS), transpose_b=draw.sometimes(),
        activation=draw.choice("silu", "silu", "gelu", "relu", "sigmoid", None),
        rank=draw.choice(None, draw.number(0, 40)),
    )  # fmt: skip
    case["grad"] = case["values"] == "normal" and not rows_of_bytes(case) and draw.sometimes(0.3)
    return case


def glu_operands(case: dict, values: Values) -> dict:
    shape_x, shape_w = as_given(case)
    x = values(shape_x, case["dtype"], case["values"])
    return dict(x=x, w_gate=values(shape_w, case["dtype"]), w_up=values(shape_w, case["dtype"]))


def call_glu(case, x, w_gate, w_up):
    problem = gated.Problem(case["m"], case["n"], case["k"], case["transpose_b"])
    how = dict(activation=case["activation"], transpose_weights=case["transpose_b"])
    return (cookbook.glu(x, w_gate, w_up, config=ranked(case, gated.ranked, problem), **how),)


def glu_reference(case, x, w_gate, w_up):
    w_gate, w_up = (oriented(w, case["transpose_b"]) for w in (w_gate, w_up))
    gate, up = x @ w_gate, x @ w_up
    out, reach = activate(case["activation"], gate)
    error = np.abs(up) * slack(x, w_gate, reach) + np.abs(out) * slack(x, w_up)
    if case["activation"] in ("silu", "gelu", "sigmoid"):  # Results come from approximate instructions.
        error = error + 2.0**-9 * np.abs(up) * (1 if case["activation"] == "sigmoid" else np.abs(gate))
    return [(out * up, error)]


# Operands of 8 bits --------------------------------------------------------------------------------------------------


def draw_fp8(draw: Draw) -> dict:
    return sizes(draw, 16) | dict(
        dtypes=[draw.choice(*FP8), draw.choice(*FP8)], scales=[draw.choice("one", "each"), draw.choice("one", "each")],
        transpose_b=draw.sometimes(0.7), out_dtype=draw.choice(*FLOATS), rank=draw.choice(None, draw.number(0, 40)),
    )  # fmt: skip


def fp8_arrays(case: dict, values: Values) -> dict:
    shape_a, shape_b = as_given(case)
    a, b = (values(shape, dtype) for shape, dtype in zip((shape_a, shape_b), case["dtypes"], strict=True))
    counts = [n if kind == "each" else 1 for kind, n in zip(case["scales"], (case["m"], case["n"]), strict=True)]
    scale_a, scale_b = (np.abs(values((count,), scale=0.1)) for count in counts)
    return dict(a=a, b=b, scale_a=scale_a, scale_b=scale_b)


def call_fp8(case, a, b, scale_a, scale_b):
    itemsizes = 1, 1, jnp.dtype(case["out_dtype"]).itemsize
    config = ranked(case, cost.ranked, cost.Problem(case["m"], case["n"], case["k"], (False, False), itemsizes))
    how = dict(out_dtype=case["out_dtype"], transpose_b=case["transpose_b"], config=config)
    return (cookbook.matmul_fp8(a, b, scale_a=scale_a, scale_b=scale_b, **how),)


def fp8_reference(case, a, b, scale_a, scale_b):
    b = oriented(b, case["transpose_b"])
    scale = scale_a.reshape(-1, 1) * scale_b
    return [(a @ b * scale, slack(a, b, share=1e-3) * scale)]  # Tensor cores add such products with fewer bits.


def draw_int8(draw: Draw) -> dict:
    return sizes(draw, 16) | dict(
        dtype=draw.choice(*HALVES), scales=draw.choice(*FLOATS), transpose_b=draw.sometimes(0.7),
        out_dtype=draw.choice(None, *FLOATS), values=draw.choice("normal", "normal", "huge", "nan"),
        rank=draw.choice(None, draw.number(0, 30)),
    )  # fmt: skip


def int8_arrays(case: dict, values: Values) -> dict:
    shape_a, shape_b = as_given(case)
    scales = values((case["n"],), case["scales"], scale=0.01)
    return dict(a=values(shape_a, case["dtype"], case["values"]), w_q=values(shape_b, "int8", "huge"), scales=scales)


def call_int8(case, a, w_q, scales):
    config = ranked(case, matmul_int8_weights.ranked, case["m"], case["n"], case["k"])
    how = dict(out_dtype=case["out_dtype"], transpose_w=case["transpose_b"], config=config)
    return (cookbook.matmul_int8_weights(a, w_q, scales, **how),)


def int8_reference(case, a, w_q, scales):
    w = oriented(w_q, case["transpose_b"]).astype(np.float64)
    return [(a @ w * scales, slack(a, w) * np.abs(scales))]


def draw_four_bits(draw: Draw) -> dict:
    return sizes(draw) | dict(n=draw.size(150, large=8), group_size=draw.choice(32, 64, 128),
                              out_dtype=draw.choice(None, *FLOATS), values=draw.choice("normal", "normal", "nan"),
                              rank=draw.choice(None, draw.number(0, 30)))  # fmt: skip


def draw_int4(draw: Draw) -> dict:
    zeros = draw.choice(None, "uint8", "int32", "bfloat16")
    return draw_four_bits(draw) | dict(dtype=draw.choice(*HALVES), scales=draw.choice(*FLOATS), zeros=zeros)


def int4_arrays(case: dict, values: Values) -> dict:
    groups, q = -(-case["k"] // case["group_size"]), values((case["k"], case["n"]), "int8", "huge") >> 4
    given = dict(x=values((case["m"], case["k"]), case["dtype"], case["values"]), q=q)
    given["scales"] = values((groups, case["n"]), case["scales"], scale=0.01)
    if case["zeros"]:
        given["zeros"] = (values((groups, case["n"]), "int8", "huge") & 15).astype(case["zeros"])
    return given


def call_int4(case, x, q, scales, zeros=None):
    config = ranked(case, matmul_int4_weights.ranked, case["m"], case["n"], case["k"])
    how = dict(zeros=zeros, group_size=case["group_size"], out_dtype=case["out_dtype"], config=config)
    return (cookbook.matmul_int4_weights(x, cookbook.pack_int4(q), scales, **how),)


def int4_reference(case, x, q, scales, zeros=None):
    of_rows = lambda numbers: np.repeat(numbers, case["group_size"], axis=0)[: case["k"]]
    zeros = 0 if zeros is None else of_rows(zeros.astype(np.float64)) - 8
    w = (q.astype(np.float64) - zeros) * of_rows(scales)
    # A weight is rounded to 16 bits. In float16 it may be a subnormal number.
    rounding = 2.0**-8 if case["dtype"] == "bfloat16" else 2.0**-11
    return [(x @ w, slack(x, np.abs(w) * 1.02 * rounding + 2.0**-25, share=1) + slack(x, w))]


def mxfp4_arrays(case: dict, values: Values) -> dict:
    case, blocks = case | dict(k=case["k"] // 32 * 32), case["k"] // 32
    codes = values((case["n"], blocks, 16), "int8", "huge").view(np.uint8)
    scales = (values((case["n"], blocks), "int8", "huge") // 8 + 120).astype(np.uint8)
    return dict(x=values((case["m"], case["k"]), "bfloat16", case["values"]), blocks=codes, scales=scales)


def call_mxfp4(case, x, blocks, scales):
    config = ranked(case, matmul_mxfp4_weights.ranked, x.shape[0], case["n"], x.shape[1])
    how = dict(out_dtype=case["out_dtype"], config=config)
    return (cookbook.matmul_mxfp4_weights(x, *cookbook.pack_mxfp4(blocks, scales), **how),)


def mxfp4_reference(case, x, blocks, scales):
    magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = np.concatenate([magnitudes, -magnitudes])[np.stack([blocks & 15, blocks >> 4], axis=-1)]
    w = (
        (values.reshape(*scales.shape, 32) * 2.0 ** (scales.astype(np.float64)[..., None] - 127))
        .reshape(len(scales), 32 * scales.shape[1])
        .T
    )
    config = ranked(case, matmul_mxfp4_weights.ranked, *x.shape[:1], case["n"], x.shape[1])
    in_fp8 = config.fp8 if config else is_fp8(case, matmul_mxfp4_weights.default_config, len(x), case["n"], x.shape[1])
    return [(x @ w, slack(x, w) + slack_fp8(x, w) * in_fp8)]


def is_fp8(case: dict, default_config, *sizes) -> bool:
    """Whether a product without a configuration may be one in FP8: on an H200, or in the interpreter, of 4 SMs."""
    sizes = [max(1, size) for size in sizes]
    is_halved = any(default_config(*sizes, num_sms).fp8 for num_sms in (132, 4))
    return is_halved and case["out_dtype"] in (None, "bfloat16")


def slack_fp8(x, w):
    """How far a product in FP8 may be off, beside its rounding: by 2^-12 of the largest product of each 32 of K,
    because the tensor cores keep about 14 bits of their sum, and by 2^-17 of a row's largest value of x."""
    x, w = (np.abs(np.where(np.isfinite(y), y, 0.0)) for y in (x, w))
    largest = lambda y, axis: np.maximum.reduceat(y, np.arange(0, y.shape[axis], 32), axis)
    of_rows = x.max(1, initial=0.0, keepdims=True) * w.sum(0)
    return 2.0**-12 * (largest(x, 1) @ largest(w, 0)) + 2.0**-17 * of_rows if x.shape[1] else of_rows


OPS = {
    "glu": Op(draw_glu, glu_operands, call_glu, glu_reference, rows_of_bytes, ("x", "w_gate", "w_up")),
    "matmul": Op(draw_matmul, operands, call_matmul, matmul_reference, rows_of_bytes, ("a", "b", "bias")),
    "matmul_blocked": Op(draw_blocked, operands, rung(cookbook.matmul_blocked), matmul_reference, rows_of_bytes),
    "matmul_pipelined": Op(draw_pipelined, operands, rung(cookbook.matmul_pipelined), matmul_reference, rows_of_bytes),
    "matmul_wgmma": Op(draw_rung, operands, rung(cookbook.matmul_wgmma), matmul_reference, rows_of_bytes),
    "matmul_fp8": Op(
        draw_fp8, fp8_arrays, call_fp8, fp8_reference, lambda case: TMA if case["k"] % 16 else None
    ),
    "matmul_int4_weights": Op(
        draw_int4, int4_arrays, call_int4, int4_reference, lambda case: TMA if case["k"] % 8 else None
    ),
    "matmul_mxfp4_weights": Op(draw_four_bits, mxfp4_arrays, call_mxfp4, mxfp4_reference),
    "matmul_int8_weights": Op(
        draw_int8, int8_arrays, call_int8, int8_reference, lambda case: TMA if case["k"] % 16 else None
    ),
}  # fmt: skip

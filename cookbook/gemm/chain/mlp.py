# SPDX-License-Identifier: Apache-2.0
"""The MLP of a decoder's layer for few rows, in one kernel: norm, gate and up product, SwiGLU, down product; or all
that lies between two layers' attentions.

    total = residual + x                                 x is what the attention adds; with w_o, x @ w_o.T is
    h = activation(y @ gate.T) * (y @ up.T),             y = rms_norm(total) * scale, rounded to the weights' dtype
    o = h @ down.T

and, with `next_scale`, total = total + o and o = rms_norm(total) * next_scale; and with `w_qkv`, that @ w_qkv.T.

Shapes: x (..., D), with w_o (..., A); residual and total (..., D); w_gate_up (2 F, D), the gate's rows above the up
product's; w_down (D, F), w_o (D, A), w_qkv (N, D); scale and next_scale (D,). At most 128 rows. Weights, and x where it
is multiplied, are bfloat16 or float16; sums, norms and everything added are float32.

Role and barrier tables: `kernel.py`. Every SM has one block, and blocks wait for each other: the kernel must have the
GPU to itself until it ends, as it has in a stream of kernels. Two that run at the same time may wait for ever.

Bound by: the memory that the weights come from. A kernel for each product loses some microseconds at both ends, when
not all SMs load; here that happens once. Between two products blocks meet, and meanwhile load weights.

Not supported: gradients, biases, more rows, weights of 8 or 4 bits. Chapter: 22. Sources: Shazeer, "GLU variants
improve transformer" (2020); Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019).
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax

from ... import _device, _host, _numerics
from ..plan import identity
from ..references import exact_product
from .grid import num_counters
from .kernel import launch
from .plan import ROWS_MAX, STAGES_MAX, AddParts, Cut, Normalize, Plan, Product, cut_of

HIDDEN_MAX = 8192  # A warpgroup has a row in its registers.
NUM_COUNTERS = num_counters(8)  # More barriers than the longest chain has.


def mlp_reference(
    x, w_gate_up, w_down, *, residual=None, scale=None, eps=1e-6, activation="silu", w_o=None, next_scale=None,
    w_qkv=None,
):  # fmt: skip
    fn = identity if activation is None else _numerics.activation_fn("mlp_reference", activation)
    norm = lambda t, scale: t * lax.rsqrt(jnp.mean(t * t, axis=-1, keepdims=True) + eps) * scale
    x = x if w_o is None else exact_product(x, w_o.T)
    total = x if residual is None else residual + x
    gate, up = jnp.split(exact_product(total if scale is None else norm(total, scale), w_gate_up.T), 2, axis=-1)
    out = exact_product(fn(gate) * up, w_down.T)
    if scale is None:
        return out
    if next_scale is not None:
        total = total + out
        out = norm(total, next_scale)
    return (out if w_qkv is None else exact_product(out, w_qkv.T)), total


@dataclasses.dataclass(frozen=True)
class Config:
    """How the products are cut up; None for the least predicted time."""

    up: Cut | None = None
    down: Cut | None = None
    o: Cut | None = None
    qkv: Cut | None = None
    num_stages: int | None = None  # Slots of weights; None for as many as shared memory holds.
    x_stages: int | None = None  # Slots of x; None for 64 KiB of them.

    def __post_init__(self):
        if self.up is not None and self.up.parts != 1:
            raise ValueError(f"{self.up=} must have one part: the gate needs the whole sum")
        for name in ("num_stages", "x_stages"):
            value = getattr(self, name)
            if value is not None and not 2 <= value <= STAGES_MAX:
                raise ValueError(f"{name}={value} must be from 2 to {STAGES_MAX}, or None")


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of a call."""

    eps: float
    activation: object
    out_dtype: jnp.dtype
    config: Config


def new_counters() -> jax.Array:
    """Counters for calls of `mlp` that follow each other."""
    return jnp.zeros(NUM_COUNTERS, jnp.int32)


def takes(rows: int, w_gate_up, w_down, w_o=None, w_qkv=None) -> bool:
    """Whether `mlp` takes so many rows and these weights."""
    (hidden, inner), dtype = w_down.shape, w_down.dtype
    weights = [weight for weight in (w_gate_up, w_down, w_o, w_qkv) if weight is not None]
    return (
        1 <= rows <= ROWS_MAX
        and dtype in (jnp.bfloat16, jnp.float16)
        and all(weight.dtype == dtype and weight.shape[1] % 8 == 0 for weight in weights)
        and inner % 16 == 0
        and hidden % 128 == 0
        and hidden <= HIDDEN_MAX
        and (w_qkv is None or w_qkv.shape[0] % 128 == 0)
    )


def plan_of(shapes: dict, dtype, config: Config, num_sms: int = 132, interpreted: bool = False) -> Plan:
    """The plan for operands of these shapes, by name."""
    rows, (hidden, inner) = shapes["x"][0], shapes["w_down"]

    def product(name: str, x: str, n: int, k: int, is_gated: bool = False) -> Product:
        cut = getattr(config, name) or cut_of(rows, n, k, is_gated, num_sms)
        return Product(x, "w_gate_up" if is_gated else f"w_{name}", f"of_{name}", n, k, cut, num_sms, is_gated)

    stages, down = [], product("down", "of_up", hidden, inner)
    added, o = ("x",), None
    if "w_o" in shapes:
        added, o = (), product("o", "x", *shapes["w_o"])
        stages.append(o)
    if "scale" in shapes:
        added += ("residual",) * ("residual" in shapes)
        stages.append(Normalize(added, "scale", "y", "total", hidden, o))
    stages += [product("up", "y" if "scale" in shapes else "x", inner, hidden, True), down]
    if "next_scale" not in shapes:
        stages.append(AddParts(down, "out"))
    else:
        y = "next_y" if "w_qkv" in shapes else "out"
        stages.append(Normalize(("total",), "next_scale", y, "next_total", hidden, down))
    if "w_qkv" in shapes:
        qkv = product("qkv", "next_y", *shapes["w_qkv"])
        stages += [qkv, AddParts(qkv, "out")]
    return Plan(rows, dtype, tuple(stages), num_sms, config.num_stages, config.x_stages, interpreted)


def _run(operands: dict, counters, options: Options) -> tuple:
    """(o, the sum or None, counters)."""
    target, dtype = _host.require_tensor_cores("mlp"), operands["w_down"].dtype
    plan = plan_of(
        {name: x.shape for name, x in operands.items()}, dtype, options.config, target.num_sms, target.interpreted
    )
    of, square = jax.ShapeDtypeStruct, (plan.rows, operands["w_down"].shape[0])
    n = operands["w_qkv"].shape[0] if "w_qkv" in operands else square[1]
    outs = dict(out=of((plan.rows, n), options.out_dtype))
    totals = [stage.total for stage in plan.stages if isinstance(stage, Normalize)]
    outs |= {name: of(square, jnp.float32) for name in totals}
    outs |= {stage.y: of(square, dtype) for stage in plan.stages if isinstance(stage, Normalize) and stage.y != "out"}
    piece = of((_device.WARPGROUP,), jnp.float32)
    how = dict(
        activation=_numerics.lowerable(options.activation, piece), eps=options.eps,
        params=_host.compiler_params(approx_math=True),
    )  # fmt: skip
    if target.interpreted:
        found = launch(plan, operands, outs, counters, **how)
    else:
        ref = _host.ref_of("mlp", counters)
        found = launch(plan, operands, outs, ref, **how)
        counters = jax.freeze(ref)
    return found["out"], found[totals[-1]] if totals else None, counters


def mlp(
    x: jax.Array,
    w_gate_up: jax.Array,
    w_down: jax.Array,
    *,
    residual: jax.Array | None = None,
    scale: jax.Array | None = None,
    eps: float = 1e-6,
    activation: _host.Activation | None = "silu",
    w_o: jax.Array | None = None,
    next_scale: jax.Array | None = None,
    w_qkv: jax.Array | None = None,
    out_dtype: _host.DType | None = None,
    counters: jax.Array | None = None,
    config: Config | None = None,
) -> jax.Array | tuple[jax.Array, ...]:
    """WIP"""
    given = dict(
        x=x, w_gate_up=w_gate_up, w_down=w_down, residual=residual, scale=scale, w_o=w_o, next_scale=next_scale,
        w_qkv=w_qkv,
    )  # fmt: skip
    operands = {name: _host.as_array("mlp", name, value) for name, value in given.items() if value is not None}
    x = operands["x"]
    rows = x.shape[:-1]
    flat = lambda a: a.reshape(math.prod(rows), a.shape[-1])
    operands |= {name: flat(operands[name]) for name in ("x", "residual") if name in operands}
    fn = identity if activation is None else _numerics.activation_fn("mlp", activation)
    out_dtype = _host.require_float("mlp", x.dtype if out_dtype is None else out_dtype)
    options = Options(float(eps), fn, out_dtype, config or Config())
    keeps = counters is not None
    counters = counters if keeps else new_counters()
    out, total, counters = _run(operands, counters, options)
    shaped = lambda a: a.reshape(*rows, a.shape[-1])
    results = [shaped(out)] + ([] if total is None else [shaped(total)]) + ([counters] if keeps else [])
    return results[0] if len(results) == 1 else tuple(results)


mlp.Config = Config  # `cookbook.mlp` is this function, not its module.
mlp.Cut = Cut

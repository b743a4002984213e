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
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ... import _device, _host, _numerics
from .. import arguments
from ..plan import identity
from ..references import exact_product
from .grid import num_counters
from .kernel import launch
from .plan import ROWS_MAX, STAGES_MAX, TILE_K, AddParts, Cut, Normalize, Plan, Product, cut_of

HIDDEN_MAX = 8192  # A warpgroup has a row in its registers.
# Operands that need another.
NEEDED = [("residual", "scale"), ("w_o", "scale"), ("next_scale", "scale"), ("w_qkv", "next_scale")]
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
        # Slots are given back one step late, and a step has one of weights and up to two of x.
        for name, least in (("num_stages", 2), ("x_stages", 4)):
            value = getattr(self, name)
            if value is not None and not least <= value <= STAGES_MAX:
                raise ValueError(f"{name}={value} must be from {least} to {STAGES_MAX}, or None")


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of a call."""

    eps: float
    activation: Callable
    out_dtype: jnp.dtype
    total_dtype: jnp.dtype
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
        if is_gated and n % cut.tile_n:
            raise ValueError(f"{config.up=} must cut {n} columns evenly: a tile reads as many rows of the gate")
        if cut.parts > (most := pl.cdiv(k, 2 * TILE_K)):
            raise ValueError(f"{name}={cut} must have at most {most} parts, of {2 * TILE_K} values of K={k} each")
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


@functools.partial(jax.jit, static_argnums=(0, 1, 2))  # The layers of a model, all alike, are traced once.
def _run(plan: Plan, options: Options, params, operands: dict, counters) -> tuple:
    """(o, the sum or None, counters)."""
    (hidden, _), dtype = operands["w_down"].shape, operands["w_down"].dtype
    norms = [stage for stage in plan.stages if isinstance(stage, Normalize)]
    of = lambda cols, dtype: jax.ShapeDtypeStruct((plan.rows, cols), dtype)
    outs = {norm.total: of(hidden, jnp.float32) for norm in norms[:-1]}
    outs |= {norm.total: of(hidden, options.total_dtype) for norm in norms[-1:]}
    outs |= {norm.y: of(hidden, dtype) for norm in norms}
    outs["out"] = of(operands["w_qkv"].shape[0] if "w_qkv" in operands else hidden, options.out_dtype)
    activation = _numerics.lowerable(options.activation, jax.ShapeDtypeStruct((_device.WARPGROUP,), jnp.float32))
    ref = counters if plan.interpreted else _host.ref_of("mlp", counters)
    found = launch(plan, operands, outs, ref, activation=activation, eps=options.eps, params=params)
    counters = counters if plan.interpreted else jax.freeze(ref)
    return found["out"], found[norms[-1].total] if norms else None, counters


def _require(op: str, given: dict) -> dict:
    """`given` as arrays that the kernel takes, x and residual as matrices.

    Raises:
      ValueError: they are not.
    """
    operands = {name: _host.as_array(op, name, value) for name, value in given.items()}
    for name, needed in NEEDED:
        if name in operands and needed not in operands:
            raise ValueError(f"{_host.PACKAGE}.{op}: {name} is given without {needed}: pass both, or neither")
    x, w_down = operands["x"], operands["w_down"]
    if x.ndim == 0 or w_down.ndim != 2:
        raise ValueError(f"{_host.PACKAGE}.{op}: {x.shape=}, {w_down.shape=}; must be (..., D) and (D, F)")
    (hidden, inner), rows = w_down.shape, x.shape[:-1]
    if hidden % 128 or hidden > HIDDEN_MAX or inner % 16:
        raise ValueError(
            f"{_host.PACKAGE}.{op}: {w_down.shape=}; must be (D, F), D a multiple of 128, the threads of a warpgroup, "
            f"up to {HIDDEN_MAX}, and F one of 16: call {_host.PACKAGE}.glu and {_host.PACKAGE}.matmul for others"
        )
    width = operands["w_o"].shape[-1] if "w_o" in operands else hidden
    n = operands["w_qkv"].shape[0] if "w_qkv" in operands else 0
    wanted = dict(
        x=(*rows, width), residual=(*rows, hidden), w_gate_up=(2 * inner, hidden), scale=(hidden,),
        next_scale=(hidden,), w_o=(hidden, width), w_qkv=(n, hidden),
    )  # fmt: skip
    multiplied = {"x"} if "w_o" in operands or "scale" not in operands else set()
    for name, array in operands.items():
        if name in wanted and array.shape != wanted[name]:
            raise ValueError(
                f"{_host.PACKAGE}.{op}: {name}.shape={array.shape}; must be {wanted[name]}, of {w_down.shape=}"
            )
        if name.startswith("w_") or name in multiplied:
            beside = "w_gate_up" if name == "w_down" else "w_down"
            arguments.require_halves(op, **{name: array, beside: operands[beside]})
            arguments.require_rows(op, name, array)
        else:
            _host.require_float(op, array.dtype, f"{name}.dtype")
    if n % 128:
        raise ValueError(f"{_host.PACKAGE}.{op}: w_qkv has {n} rows; must be a multiple of 128: pad it with zeros")
    if math.prod(rows) > ROWS_MAX:
        raise ValueError(
            f"{_host.PACKAGE}.{op}: {x.shape=} has {math.prod(rows)} rows; must be at most {ROWS_MAX}: for more, "
            f"{_host.PACKAGE}.glu and {_host.PACKAGE}.matmul are faster"
        )
    flat = lambda array: array.reshape(math.prod(rows), array.shape[-1])
    return operands | {name: flat(operands[name]) for name in ("x", "residual") if name in operands}


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
    """A layer's MLP for at most 128 rows in one kernel, and the norms and products around it that are given; bitwise
    reproducible from run to run.

    The kernel needs every SM of the GPU: two that run at the same time, in two streams, may wait for each other for
    ever. `jax.vmap` runs one after the other.

    On an automatic mesh JAX gathers sharded operands on every device and says nothing: call it inside `jax.shard_map`.

    Args:
      x: (..., D) float32, bfloat16 or float16: what is added to the residual and normalised. Without `scale` it is
        multiplied as it is, and with `w_o` that product is added; it then has the dtype of the weights.
      w_gate_up: (2 F, D) bfloat16 or float16, as linear layers store weights: the gate's F rows, then the up product's.
      w_down: (D, F), of the same dtype as all weights. D is a multiple of 128 up to 8192, F one of 16.
      residual: (..., D) float32, bfloat16 or float16, or None for zeros.
      scale: (D,), of the RMSNorm before the MLP; None for no norm.
      eps: added to the means of squares, 0 or more.
      activation: of the gate, as `glu` takes it.
      w_o: (D, A), of the product before: x is then (..., A), the output of attention.
      next_scale: (D,), of the RMSNorm after the MLP, whose result is then added to the sum as well.
      w_qkv: (N, D), of the product after that norm; N is a multiple of 128.
      out_dtype: dtype of the result, float32, bfloat16 or float16; None for the dtype of `x`.
      counters: of `new_counters()` or of the call before; None for new ones, which cost a launch of their own. Calls
        that share them must follow each other.
      config: how the products are cut up; None for the fastest predicted ones.

    Returns:
      (..., D), or with `w_qkv` (..., N), of `out_dtype`: the MLP's result, with `next_scale` its sum's norm, with
      `w_qkv` that norm's product. With `scale` also the sum of all that is added up, (..., D) of the residual's dtype,
      or float32; and with `counters` these, for the next call. Several results are a tuple, in this order.

    Raises:
      ValueError: a rank, shape, dtype, number of rows or option is not supported; RuntimeError: no GPU.
    """
    others = dict(residual=residual, scale=scale, w_o=w_o, next_scale=next_scale, w_qkv=w_qkv)
    others = {name: array for name, array in others.items() if array is not None}
    operands, rows = _require("mlp", dict(x=x, w_gate_up=w_gate_up, w_down=w_down) | others), jnp.shape(x)[:-1]
    eps = _host.option("mlp", "eps", eps, float)
    if eps < 0:
        raise ValueError(f"{_host.PACKAGE}.mlp: {eps=}; must be 0 or more")
    fn = identity if activation is None else _numerics.activation_fn("mlp", activation)
    out_dtype = _host.require_float("mlp", operands["x"].dtype if out_dtype is None else out_dtype)
    total_dtype = operands["residual"].dtype if residual is not None else jnp.dtype(jnp.float32)
    options = Options(eps, fn, out_dtype, total_dtype, _host.require_config("mlp", config, Config) or Config())
    operands = dict(zip(operands, _host.without_gradient("mlp", "mlp_reference", *operands.values()), strict=True))
    if operands["x"].shape[0]:
        target = _host.require_tensor_cores("mlp")
        shapes = {name: array.shape for name, array in operands.items()}
        plan = plan_of(shapes, operands["w_down"].dtype, options.config, target.num_sms, target.interpreted)
        # A batch of kernels would be one of too many blocks, which cannot all wait for each other.
        run = jax.custom_batching.sequential_vmap(
            functools.partial(_run, plan, options, _host.compiler_params(approx_math=True))
        )
        out, total, left = run(operands, new_counters() if counters is None else counters)
    else:
        n = w_qkv.shape[0] if w_qkv is not None else w_down.shape[0]
        out, left = jnp.zeros((0, n), out_dtype), counters
        total = None if scale is None else jnp.zeros((0, w_down.shape[0]), total_dtype)
    results = [array.reshape(*rows, array.shape[-1]) for array in (out, total) if array is not None]
    results += [] if counters is None else [left]
    return results[0] if len(results) == 1 else tuple(results)


mlp.Config, mlp.Cut = Config, Cut  # `cookbook.mlp` is this function, not its module.


def flops(m: int, d: int, f: int, others: int = 0) -> int:
    """Operations of the three products, and of others with so many weights."""
    return 2 * m * (3 * d * f + others)


def bytes_moved(m: int, d: int, f: int, others: int = 0) -> int:
    """Weights of 16 bits, those of other products included, read once; x, the residual and both results of 32."""
    return 2 * (3 * d * f + others) + 16 * m * d

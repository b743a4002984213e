# SPDX-License-Identifier: Apache-2.0
"""The forward kernel of the norms (rms_norm, layer_norm, group_norm), and what they say of a row.

    t = x,  residual + x  or  x * silu(gate)
    y[c] = (t[c] - mean) / sqrt(mean_c((t - mean)**2) + eps) * weight[c] + bias[c],    or that times silu(gate[c])

`mean` is 0 unless the norm is centred. One warpgroup per block loads a row into registers, reduces it and stores it;
`plan.py` says which thread holds what. A row that does not fit the registers is read twice: once for its statistics,
and once to be stored. Its statistics are those of its distance from the mean of its first group of pieces, which is
near enough to the row's mean that no digits cancel.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from .. import _device, _host
from .._device import WARPGROUP
from . import core
from .plan import FEW_ROWS, Config, Plan

REGISTER_VALUES = 64  # With a second array, whose loads take registers beside those of x.
LOG2_E = math.log2(math.e)
SMALLEST = 1e-35  # A row's largest value counts as at least so much: 448 over it is finite.


@dataclasses.dataclass(frozen=True)
class Norm:
    """Which norm: statics of the kernels."""

    op: str
    eps: float
    is_centered: bool = False  # Whether the mean is subtracted.
    gate: str | None = None  # The second array is a gate: "before" or "after" the norm. Otherwise it is a residual.
    groups: int = 1  # Rows of the weight; row r of x has row r % groups. With one, the weight is a vector.

    def weights(self, plan: Plan, weights_gmem, row, g, late: bool = False):
        """The pieces of group `g` of the weight, and of the bias; `late`: each is loaded when it is asked for."""
        row = _device.rem(row, self.groups) if self.groups > 1 else row
        pieces = [plan.pieces(ref, row, g) for ref in weights_gmem]
        return pieces if late else [*map(list, pieces)]

    def inputs(self, plan: Plan, arrays, row, g):
        """The pieces of group `g` of what is normalised, and of the gate, or None."""
        first, *second = (plan.load(x, row, g) for x in arrays)
        if self.gate == "before":
            return each(lambda x, z: x * silu(z), first, *second), second[0]
        if self.gate:
            return first, second[0]
        return each(lambda *v: functools.reduce(jnp.add, v), first, *second), None

    def finish(self, sums, cols: int, shift):
        """Mean (None if it is 0) and 1 / the root of the mean of squares, of `sums` as `moments` has them."""
        squares, *firsts = sums
        variance = squares * (1.0 / cols)
        if firsts:
            off = firsts[0] * (1.0 / cols)
            shift, variance = shift + off, variance - off * off
        return shift, lax.rsqrt(variance + self.eps)


def each(fn, *lists):
    """`fn` of the first of each list, of the second and so on."""
    return [fn(*values) for values in zip(*lists, strict=True)]


def sigmoid(z):
    """By two instructions of the GPU's unit for roots and powers. A division takes many more."""
    root = lax.rsqrt(1.0 + jnp.exp2(z * -LOG2_E))
    return root * root


def silu(z):
    return z * sigmoid(z)


def total(plan: Plan, pieces, g):
    """The sum over each row of group `g`."""
    return plan.reduce(jnp.add, jnp.sum, plan.fresh(pieces, g))


def centre(norm: Norm, plan: Plan, first):
    """A number near the mean of each row: the mean of the first group's `first`, pieces; None if it is not subtracted.

    It is the mean itself where one group is the row.
    """
    if not norm.is_centered:
        return None
    columns = plan.cols if plan.num_groups == 1 else plan.group * plan.shape[-1]
    return total(plan, first, 0) * (1.0 / columns)


def moments(norm: Norm, plan: Plan, t, shift, g):
    """Sums over a group: of the squares of t - `shift`; and of this itself, where `shift` is not the mean."""
    t = t if shift is None else [v - shift for v in t]
    squares = total(plan, [v * v for v in t], g)
    return (squares, total(plan, t, g)) if norm.is_centered and plan.num_groups > 1 else (squares,)


def result(norm: Norm, t, gate, weights, mean, inverse):
    """Yields y, piece by piece, of those of what is normalised."""
    scale, *bias = weights
    y = ((v if mean is None else v - mean) * inverse * s for v, s in zip(t, scale, strict=True))
    y = map(jnp.add, y, *bias) if bias else y
    return (v * silu(z) for v, z in zip(y, gate, strict=True)) if norm.gate == "after" else y


def _largest(plan: Plan, t, scale):
    return plan.reduce(jnp.maximum, jnp.max, each(lambda v, s: jnp.abs(v * s), t, scale))


def _row(plan: Plan, *refs, norm: Norm, num_arrays: int, num_weights: int, in_place: bool = False):
    """`refs`: x, the second array, weight, bias, y, the rows' scales of an 8-bit y, the sum, unless it takes the place
    of the second array; and the row."""
    arrays, weights_gmem = refs[:num_arrays], refs[num_arrays : num_arrays + num_weights]
    y_gmem, *more_gmem, row = refs[num_arrays + num_weights :]
    is_8_bit = jnp.dtype(y_gmem.dtype).itemsize == 1
    load = lambda g: norm.inputs(plan, arrays, row, g)
    # Weights that come from the L1 cache as they are needed leave registers to more blocks, where rows are many
    # (layer_norm of 8192 x 4096: 34 us in place of 41). Where they are few, all loads are in flight at once.
    is_crowded = (norm.is_centered or num_arrays > 1) and plan.group * math.prod(plan.shape) > 16 * WARPGROUP
    late = is_crowded and plan.rows >= FEW_ROWS and not is_8_bit
    load_weights = lambda g: norm.weights(plan, weights_gmem, row, g, late)

    def store(g, t, gate, weights, mean, inverse, largest):
        if is_8_bit:
            factor = largest_of(y_gmem.dtype) / jnp.maximum(largest, SMALLEST)
            y = each(lambda v, s: _rounded(v * s * factor, y_gmem.dtype), t, weights[0])
        else:
            y = result(norm, t, gate, weights, mean, inverse)
            y = y if late else list(y)
        plan.store(y_gmem, row, g, y)
        for total_gmem in arrays[1:] if in_place else more_gmem[is_8_bit:]:
            plan.store(total_gmem, row, g, t)

    def store_scale(largest, inverse):
        if is_8_bit:
            plan.store_per_row(more_gmem[0], row, largest * inverse * (1.0 / largest_of(y_gmem.dtype)))

    if plan.num_groups == 1:
        t, gate = load(0)
        weights = load_weights(0)
        shift = centre(norm, plan, t)
        mean, inverse = norm.finish(moments(norm, plan, t, shift, 0), plan.cols, shift)
        largest = _largest(plan, t, weights[0]) if is_8_bit else None
        store(0, t, gate, weights, mean, inverse, largest)
        store_scale(largest, inverse)
        return

    shift = centre(norm, plan, load(0)[0]) if norm.is_centered else None

    def add_group(g, so_far):
        t, _ = load(g)
        sums = each(jnp.add, so_far[0], moments(norm, plan, t, shift, g))
        return sums, [jnp.maximum(m, _largest(plan, t, load_weights(g)[0])) for m in so_far[1]]

    zeros = [plan.per_row(0.0)] * (1 + norm.is_centered), [plan.per_row(0.0)] * is_8_bit
    sums, largest = lax.fori_loop(0, plan.num_groups, add_group, zeros)
    mean, inverse = norm.finish(sums, plan.cols, shift)
    largest = largest[0] if is_8_bit else None
    pl.loop(0, plan.num_groups)(lambda g: store(g, *load(g), load_weights(g), mean, inverse, largest))
    store_scale(largest, inverse)


def largest_of(dtype) -> float:
    """The largest number of an 8-bit dtype."""
    return float(jnp.finfo(dtype).max if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).max)


def _rounded(value, dtype):
    return value if jnp.issubdtype(dtype, jnp.floating) else jnp.round(value)


def named(op: str, function):
    """`function`, by the op's name in profiles."""
    of_op = functools.wraps(function)(lambda *args, **kwargs: function(*args, **kwargs))
    of_op.__module__ = f"{__package__}.{op}"
    return of_op


def weight_rows(norm: Norm, weight, block_rows: int):
    """A weight (groups, cols) as a block reads it: from any row on, `block_rows` rows."""
    if norm.groups == 1:
        return weight.reshape(-1)
    return jnp.concatenate([weight] * (1 + pl.cdiv(block_rows - 1, norm.groups)))[: norm.groups + block_rows - 1]


def _is_safe_in_place(plan: Plan) -> bool:
    """Whether all loads of a value come before its store: no two tiles or pieces have it, or the row's reduction, at
    which all threads wait for each other, is between the two."""
    if isinstance(plan, core.RaggedPlan):
        return False
    shares = plan.cols % plan.shape[-1] or plan.num_pieces % plan.num_groups
    return plan.rows % plan.config.block_rows == 0 and (not shares or (plan.spread and plan.num_groups == 1))


@functools.partial(jax.jit, static_argnames=("norm", "out_dtype", "config", "params", "in_place"))
def call(arrays, weights, norm: Norm, out_dtype, config: Config | None, params, in_place: bool = False):
    """y; of 8 bits, also the scale of each row; with a residual, also the sum, which takes its place if it is
    `in_place` and the plan allows it."""
    x, *second = arrays
    itemsize = x.dtype.itemsize
    rows = [core.as_rows(array, 0, itemsize) for array in arrays]
    shape = rows[0].shape
    plan = core.plan_rows(*shape, itemsize, config, REGISTER_VALUES if second else Config.register_values)
    if norm.groups > 1:
        plan = Plan(*shape, itemsize, plan.config)
    one_row = functools.partial(named(norm.op, _row), norm=norm, num_arrays=len(arrays), num_weights=len(weights))
    outs = [jax.ShapeDtypeStruct(shape, out_dtype)]
    if jnp.dtype(out_dtype).itemsize == 1:
        outs.append(jax.ShapeDtypeStruct(shape[:1], jnp.float32))
    weights = [weight_rows(norm, weight, plan.config.block_rows) for weight in weights]
    if in_place and shape == x.shape and _is_safe_in_place(plan):
        ref = _host.ref_of(norm.op, rows[1])
        one_row = functools.partial(one_row, in_place=True)
        outs = core.launch(one_row, plan, tuple(outs), params, [rows[0], ref], weights)
        return _host.apart((*outs, jax.freeze(ref)))
    if not norm.gate:
        outs += [jax.ShapeDtypeStruct(shape, residual.dtype) for residual in second]
    outs = core.launch(one_row, plan, tuple(outs), params, rows, weights)
    return tuple(out[: len(x)] for out in outs)

# SPDX-License-Identifier: Apache-2.0
"""The backward kernel of `causal_conv1d`: the gradients of x and of the initial states, and sums for the weights'.

With z the sum before the activation, dz = act'(z) dy, and row t of sequence s:

    dx[t] = sum over j of weight[:, W - 1 - j] dz[t + j]        dz is 0 after the last row of s
    dweight[:, j] = sum over t of dz[t] x[t - (W - 1) + j]      dbias = sum over t of dz[t]

A block walks down its rows as the forward kernel does, and computes z again. At row t it has dz of the last W rows, and
with them dx of row t - (W - 1): it goes on for W - 1 rows after its part, which another block counts in its sums. At
its first W - 1 rows it would store dx of rows before its part; where these are the initial state, it does.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ... import _host
from ..._device import div
from .plan import Part, Plan, convolve, keep_if, sigmoid


def _kernel(x_gmem, dy_gmem, weight_gmem, bias_gmem, initial_gmem, table_gmem, *outs, plan: Plan):
    dx_gmem, sums_gmem, *d_initial_gmem = outs
    part, num_before, at_once = Part.of_block(plan, table_gmem), plan.taps - 1, plan.config.rows_at_once
    weight, bias = part.weights(weight_gmem, bias_gmem)

    def step(x, dy, carry, is_real=None, is_mine=None):
        """dx of the row W - 1 rows before this one, and what is carried on."""
        xs, dzs, sums = carry
        xs = (*xs, x)
        z, dz = convolve(weight, bias, xs), dy
        if plan.has_silu:
            share = sigmoid(z)
            dz = dy * (share * (1.0 + z * (1.0 - share)))
        counted = dz
        if is_real is not None:
            dz = keep_if(is_real, dz, part.zeros())
            counted = keep_if(is_mine, dz, part.zeros())
        dzs = (*dzs, dz)
        sums = (*(s + counted * x for s, x in zip(sums[:-1], xs, strict=True)), sums[-1] + counted)
        return convolve(weight[::-1], None, dzs), (xs[1:], dzs[1:], sums)

    def load(first, count: int = at_once, is_edge: bool = False):
        at = (lambda row: jnp.minimum(row, plan.num_rows - 1)) if is_edge else (lambda row: row)
        return tuple(tuple(part.load(gmem, at(first + i)) for gmem in (x_gmem, dy_gmem)) for i in range(count))

    def use(first, loaded, carry):
        for i, (x, dy) in enumerate(loaded):
            dx, carry = step(x.astype(jnp.float32), dy.astype(jnp.float32), carry)
            store(first + i, dx)
        return carry

    def use_edge(first, count: int, carry, store):
        """Some of these rows may be of the next part, of another sequence, or none."""
        for i, (x, dy) in enumerate(load(first, count, is_edge=True)):
            row = first + i
            x = keep_if(row < part.seq_end, x.astype(jnp.float32), part.zeros())
            dx, carry = step(x, dy.astype(jnp.float32), carry, row < part.seq_end, row < part.end)
            store(row, dx)
        return carry

    def store_initial(row, dx):
        if d_initial_gmem:
            is_first = (part.first_row == part.seq_first) & (part.seq < plan.num_seqs)
            pl.when(is_first)(lambda: part.store(d_initial_gmem[0], [part.seq, row - part.first_row], dx))

    def store(row, dx):
        part.store(dx_gmem, [row - num_before], dx)

    def store_mine(row, dx):
        pl.when(row - num_before < part.end)(lambda: store(row, dx))

    zeros = lambda num: (part.zeros(),) * num
    carry = part.rows_before(x_gmem, initial_gmem), zeros(num_before), zeros(plan.taps + 1)
    carry = use_edge(part.first_row, num_before, carry, store_initial)
    first = part.first_row + num_before
    groups = div(jnp.maximum(jnp.minimum(part.end, part.seq_end) - first, 0), at_once)
    carry = part.walk(load, use, first, groups, carry)
    first += groups * at_once
    last = lambda i, carry: use_edge(first + i * at_once, at_once, carry, store_mine)
    *_, sums = lax.fori_loop(0, div(part.end + num_before - first + at_once - 1, at_once), last, carry)
    for i, value in enumerate(sums):
        part.store(sums_gmem, [lax.axis_index("part"), i], value)


def launch(plan: Plan, x, dy, weight, bias, initial, cu_seqlens, params):
    """(dx, sums (W + 1, D), gradients of the initial states or None), the operands as the forward kernel has them.

    The sums are the weights' gradients and, last, the bias's.
    """
    out_type = [jax.ShapeDtypeStruct(x.shape, x.dtype)]
    out_type.append(jax.ShapeDtypeStruct((plan.num_parts, plan.taps + 1, plan.columns), jnp.float32))
    if initial is not None:
        out_type.append(jax.ShapeDtypeStruct(initial.shape, initial.dtype))
    dx, sums, *d_initial = _host.kernel(
        functools.partial(_kernel, plan=plan), out_type=out_type, compiler_params=params, **plan.grid
    )(x, dy, weight, bias, initial, plan.table(cu_seqlens))
    return dx, sums.sum(0), d_initial[0] if d_initial else None

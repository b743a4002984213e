# SPDX-License-Identifier: Apache-2.0
"""The forward kernel of `causal_conv1d`. Roles: `causal_conv1d.py`."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ... import _host
from ..._device import div
from .plan import Part, Plan, convolve, silu


def _kernel(x_gmem, weight_gmem, bias_gmem, initial_gmem, table_gmem, y_gmem, *, plan: Plan):
    part, at_once = Part.of_block(plan, table_gmem), plan.config.rows_at_once
    weight, bias = part.weights(weight_gmem, bias_gmem)

    def load(first, count: int = at_once):
        return tuple(part.load(x_gmem, first + i) for i in range(count))

    def use(first, loaded, before):
        """Stores rows of y; the rows of x before the next one."""
        for i, x in enumerate(loaded):
            before = (*before, x.astype(jnp.float32))
            y = convolve(weight, bias, before)
            part.store(y_gmem, [first + i], silu(y) if plan.has_silu else y)
            before = before[1:]
        return before

    before = part.rows_before(x_gmem, initial_gmem)
    end = jnp.minimum(part.end, part.seq_end)
    groups = div(end - part.first_row, at_once)
    before = part.walk(load, use, part.first_row, groups, before)
    lax.fori_loop(part.first_row + groups * at_once, end, lambda row, before: use(row, load(row, 1), before), before)
    if plan.is_packed:  # Rows of no sequence.
        pl.loop(end, part.end)(lambda row: part.store(y_gmem, [row], part.zeros()))


def launch(plan: Plan, x, weight, bias, initial, cu_seqlens, params):
    """y of x (rows, D), weight (W, D), bias (D,) or None, initial states (num_seqs, W - 1, D) or None."""
    return _host.kernel(
        functools.partial(_kernel, plan=plan),
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        compiler_params=params,
        **plan.grid,
    )(x, weight, bias, initial, plan.table(cu_seqlens))

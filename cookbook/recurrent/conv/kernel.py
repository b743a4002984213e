# SPDX-License-Identifier: Apache-2.0
"""The forward kernel of `causal_conv1d`. Roles: `causal_conv1d.py`."""

import functools

import jax
from jax import lax
from jax.experimental import pallas as pl

from ... import _host
from ..._device import div
from .plan import Part, Plan, convolve, silu


def _kernel(x_gmem, weight_gmem, bias_gmem, initial_gmem, table_gmem, y_gmem, *, plan: Plan):
    part, at_once = Part.of_block(plan, table_gmem), plan.config.rows_at_once
    weight, bias = part.weights(weight_gmem, bias_gmem)

    def rows(first, count: int, before):
        """Stores `count` rows of y; the rows of x before the next one."""
        loaded = [part.load(x_gmem, first + i) for i in range(count)]
        for i, x in enumerate(loaded):
            before = (*before, x.astype("float32"))
            y = convolve(weight, bias, before)
            part.store(y_gmem, [first + i], silu(y) if plan.has_silu else y)
            before = before[1:]
        return before

    before = part.rows_before(x_gmem, initial_gmem)
    end = lax.min(part.end, part.seq_end) if plan.is_packed else part.end
    whole = div(end - part.first_row, at_once)
    before = lax.fori_loop(0, whole, lambda i, before: rows(part.first_row + i * at_once, at_once, before), before)
    lax.fori_loop(part.first_row + whole * at_once, end, lambda row, before: rows(row, 1, before), before)
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

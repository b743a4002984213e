# SPDX-License-Identifier: Apache-2.0
"""The states at the starts of the parts of sequences: two passes of the forward kernel over all parts at once.

A part of the gated delta rule multiplies the state that it starts from by a matrix, and adds to it. One pass takes all
parts from zero, which gives what they add; another runs the identity through them, which gives the matrices.
"""

import dataclasses

import jax.numpy as jnp

from ..._device import PIECE
from ..states import combine
from . import kernel
from .plan import ForwardPlan


def starts_of_parts(plan: ForwardPlan, table, seq, k, v, inverse, cum, beta, initial, params):
    """(states at the starts of all parts, states at the ends of the sequences), both in slices."""
    sequences = plan.sequences
    of_heads = lambda states: states.reshape(len(states), plan.heads, -1, states.shape[-1])
    alone = dataclasses.replace(plan, state_wgs=1, output_wgs=0)
    (local,) = kernel.launch(alone, table, None, k, v, inverse, cum, beta, None, params)
    unit = jnp.eye(plan.pieces * PIECE, dtype=jnp.float32).reshape(plan.pieces, PIECE, -1)
    unit = jnp.broadcast_to(unit, (sequences.num_parts, plan.heads, *unit.shape))
    of_keys = dataclasses.replace(alone, slices_per_head=plan.pieces, has_values=False)
    unit = unit.reshape(len(unit), of_keys.value_slices, *unit.shape[3:])
    (transition,) = kernel.launch(of_keys, table, None, k, None, inverse, cum, beta, unit, params)
    shape = local.shape[1:]
    local, transition = of_heads(local), of_heads(transition)
    zeros = jnp.zeros((sequences.num_seqs, *local.shape[1:]), jnp.float32)

    def end_of_part(start, local, transition):
        return jnp.einsum("hpn,hnm->hpm", start, transition, precision="highest") + local

    given = zeros if initial is None else of_heads(initial)
    starts, ends = combine(end_of_part, (local, transition), seq, given)
    return starts.reshape(-1, *shape), ends.reshape(-1, *shape)

# SPDX-License-Identifier: Apache-2.0
"""The highest of a row's logits with noise: a block of one warpgroup takes a part of a row, piece by piece.

Noise takes two logarithms and a series, so it is made only for pieces that may win. For each value the kernel compares
a bound, which takes one logarithm, with the best score that the block has seen; the bound is at least the score, so a
piece whose bounds all lie below has no better one. In a row whose values have no order, piece i has a better one with
probability 1 / i.

Barriers: the reductions have their own. Bound by: memory, one read, and the bits of the noise, about 30 instructions
per value.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from .. import _host
from . import threads
from .kernel import HIGHEST, LOWEST, Part, to_key
from .logits import Logits, leaves, number_of
from .plan import Plan, plan_of

BLOCKS_PER_SM = 4
SCORED = 8  # Values of a thread in a piece: noise takes registers, and fewer values are beside one that may win.
OF_MINUS_INFINITY = -(2**31) + 2**23 - 1  # Its key.


def best_plan(rows: int, cols: int, num_sms: int) -> Plan:
    plan = plan_of(rows, cols, 1, 0, num_sms, SCORED)
    of_row = pl.cdiv(cols, plan.piece)
    num_pieces = min(pl.cdiv(of_row * rows, BLOCKS_PER_SM * num_sms), of_row)
    num_pieces += num_pieces > 1 and num_pieces % 2  # An even number: see `Plan.unroll`.
    return dataclasses.replace(plan, part=num_pieces * plan.piece)


def _best(*refs, plan: Plan, of_refs, num: int, score_of, bound_of, interpreted: bool):
    *of_row, out_gmem, index_gmem = refs[num:]
    row, block = lax.axis_index("rows"), lax.axis_index("part")
    x_row, part = of_refs(refs[:num]).of_row(row), Part(plan, None, None)
    numbers = [number_of(ref, row) for ref in of_row]

    def better(state, x, p):
        score = score_of(*numbers, x, part.place(p))
        top = jnp.max(score)
        index = jnp.min(jnp.where(score == top, part.place(p), HIGHEST))
        is_better = top > state[0]  # Pieces come in order: of equal scores the first stays.
        return jnp.where(is_better, top, state[0]), jnp.where(is_better, index, state[1])

    def some(g, state):
        pieces = [g * plan.unroll + u for u in range(plan.unroll)]
        loaded = [part.logits(x_row, p, interpreted) for p in pieces]  # All in flight at once.
        for p, x in zip(pieces, loaded, strict=True):
            bound = threads.highest(bound_of(*numbers, x, part.place(p)), plan.vec, interpreted)
            may_win = jnp.max(jnp.where(bound == bound, to_key(bound), LOWEST)) >= state[0]
            state = lax.cond(may_win, lambda state, x=x, p=p: better(state, x, p), lambda state: state, state)
        return state

    nothing = jnp.int32(OF_MINUS_INFINITY), block * plan.part
    score, index = lax.fori_loop(0, plan.num_pieces // plan.unroll, some, nothing)
    out_gmem[row, block] = score
    index_gmem[row, block] = index


def _first_of_highest(this, other):
    is_this = (this[0] > other[0]) | ((this[0] == other[0]) & (this[1] <= other[1]))
    return tuple(jnp.where(is_this, a, b) for a, b in zip(this, other, strict=True))


def best(logits: Logits, score_of, bound_of, of_row, target: _host.Target, params):
    """(rows,) columns of the highest scores, of equal ones the first; column 0 where all are -inf.

    Args:
      score_of: makes keys of the row's numbers from `of_row`, (rows,) or (1,) each, of logits and of their columns.
      bound_of: the same for float32 that are at least the scores, or NaN for a logit of NaN or -inf.
    """
    plan = best_plan(*logits.shape, target.num_sms)
    arrays, of_refs = leaves(logits)
    statics = dict(plan=plan, of_refs=of_refs, num=len(arrays), score_of=score_of, bound_of=bound_of)
    shape = logits.shape[0], plan.num_parts
    score, index = _host.kernel(
        functools.partial(_best, **statics, interpreted=target.interpreted),
        out_type=(jax.ShapeDtypeStruct(shape, jnp.int32),) * 2,
        grid=shape,
        grid_names=("rows", "part"),
        compiler_params=params,
    )(*arrays, *of_row)
    return lax.reduce((score, index), (np.int32(LOWEST), np.int32(HIGHEST)), _first_of_highest, (1,))[1]

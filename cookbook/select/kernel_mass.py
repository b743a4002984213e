# SPDX-License-Identifier: Apache-2.0
"""How probable what is more probable than a candidate is, and the draw where no candidate was probable enough.

`masses`: a block of one warpgroup takes a part of a row, as in `kernel.py`: its maximum, the sum of its exponentials,
and for each candidate the sum of those above it. The parts are the same however many rows there are, and their sums are
added in one order, so a row's results do not depend on its batch.

`redraw`: a block per row, which ends at once for a row that has its token. Otherwise it draws among the tokens above
the last one refused, adds up what is above the one drawn, and so on until one is kept: the most probable one is.

Barriers: the reductions have their own. Bound by: memory, one read.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .. import _host
from . import threads
from .kernel import HIGHEST, LOWEST, Part, from_key, to_key
from .logits import Logits, leaves, logit
from .plan import Plan, plan_of

LOWEST_FLOAT = float(jnp.finfo(jnp.float32).min)


def logit_key(x, column):
    return to_key(logit(x))


def part_plan(cols: int) -> Plan:
    """The parts of a row, the same for any number of rows."""
    return plan_of(1, cols, 1, 0, num_sms=1)


def inverse(temperature):
    """The factor of the logits; 1 where the draw is the most probable token."""
    return 1.0 / jnp.where(temperature <= 0.0, 1.0, temperature)


def _share(x, top, scale):
    """exp of the logits' distances to the highest."""
    return jnp.exp((x - jnp.maximum(top, LOWEST_FLOAT)) * scale)


def _no_sum():
    return threads.number().astype(jnp.float32) * 0.0


def _masses(*refs, plan: Plan, of_refs, interpreted: bool):
    *arrays, temperature_gmem, columns_gmem, out_gmem, keys_smem = refs
    row, block = lax.axis_index("rows"), lax.axis_index("part")
    num, x_row = columns_gmem.shape[1], of_refs(arrays).of_row(row)
    candidates = [logit(x_row.at(jnp.minimum(columns_gmem[row, j], plan.cols - 1))) for j in range(num)]
    scale = inverse(temperature_gmem[row])
    part = Part(plan, None, keys_smem)
    # Beyond the row there are the lowest of all keys.
    as_logit = lambda key: jnp.where(key == LOWEST, -jnp.inf, from_key(key, jnp.float32))
    top = jnp.max(as_logit(part.load(x_row, logit_key, interpreted)))

    def add(p, sums):
        x = as_logit(part.key(p))
        share = _share(x, top, scale)
        shares = [share, *(jnp.where(x > candidate, share, 0.0) for candidate in candidates)]
        more = [threads.totals(some, plan.vec, interpreted) for some in shares]
        return [total + some for total, some in zip(sums, more, strict=True)]

    sums = part.over(add, [_no_sum()] * (1 + num))
    for j, value in enumerate([top, *map(jnp.sum, sums), *candidates]):
        out_gmem[row, block, j] = value


def tree_sum(x):
    """The sum over the last axis, always in the same order."""
    while x.shape[-1] > 1:
        half = -(-x.shape[-1] // 2)
        second = jnp.pad(x[..., half:], [(0, 0)] * (x.ndim - 1) + [(0, 2 * half - x.shape[-1])])
        x = x[..., :half] + second
    return x[..., 0]


def masses(logits: Logits, temperature, candidates, target: _host.Target, params):
    """(top, total, above, drawn): the highest logit, the sum of exp((logit - top) / temperature), that of those above
    each of `candidates`, (rows, candidates) columns, and their logits: (rows,), (rows,), (rows, candidates) twice."""
    plan, (rows, num) = part_plan(logits.shape[1]), candidates.shape
    arrays, of_refs = leaves(logits)
    out = _host.kernel(
        functools.partial(_masses, plan=plan, of_refs=of_refs, interpreted=target.interpreted),
        out_type=jax.ShapeDtypeStruct((rows, plan.num_parts, 2 + 2 * num), jnp.float32),
        grid=(rows, plan.num_parts),
        grid_names=("rows", "part"),
        scratch_types=[plgpu.SMEM((plan.part,), jnp.int32)],
        compiler_params=params,
    )(*arrays, temperature, candidates)
    top = jnp.max(out[..., 0], axis=1)
    weight = jnp.exp((out[..., 0] - jnp.maximum(top, LOWEST_FLOAT)[:, None]) * inverse(temperature)[:, None])
    sums = tree_sum(jnp.moveaxis(out[..., 1 : 2 + num] * weight[..., None], 1, -1))
    return top, sums[:, 0], sums[:, 1:], out[:, 0, 2 + num :]


def _redraw(*refs, plan: Plan, of_refs, num: int, score_of, interpreted: bool):
    found_gmem, temperature_gmem, top_gmem, limit_gmem, least_gmem, *of_row, out_gmem = refs[num:]
    row = lax.axis_index("rows")
    x_row, part, found = of_refs(refs[:num]).of_row(row), Part(plan, None, None), found_gmem[row]
    score_here = functools.partial(score_of, *(ref[row] for ref in of_row))
    scale, top, limit, least = (ref[row] for ref in (temperature_gmem, top_gmem, limit_gmem, least_gmem))
    scale = inverse(scale)

    def draw(state):
        floor = state[0]

        def better(p, best):
            x = part.logits(x_row, p, interpreted)
            score = score_here(x, part.place(p))
            score = jnp.where((logit(x) > floor) & part.is_fresh(p), score, LOWEST)
            is_better = score > best[0]
            return jnp.where(is_better, score, best[0]), jnp.where(is_better, part.place(p), best[1])

        score, index = part.over(better, (part.column() * 0 + LOWEST, part.column() * 0 + HIGHEST))
        token = jnp.min(jnp.where(score == jnp.max(score), index, HIGHEST))
        value = logit(x_row.at(token))

        def add(p, total):
            x = logit(part.logits(x_row, p, interpreted))
            share = jnp.where((x > value) & part.is_fresh(p), _share(x, top, scale), 0.0)
            return total + threads.totals(share, plan.vec, interpreted)

        above = jnp.sum(part.over(add, _no_sum()))
        kept = ((above < limit) & (value >= least)) | (value >= top)
        return value, token, kept.astype(jnp.int32)

    def more():
        state = jnp.float32(-jnp.inf), jnp.int32(0), jnp.int32(0)
        out_gmem[row] = lax.while_loop(lambda state: state[2] == 0, draw, state)[1]

    pl.when(found < 0)(more)
    pl.when(found >= 0)(lambda: _store(out_gmem, row, found))


def _store(ref, row, value):
    ref[row] = value


def redraw(logits: Logits, found, temperature, top, limit, least, score_of, of_row, target: _host.Target, params):
    """`found`, (rows,), where it is no -1; otherwise the token of the highest score among those that are kept.

    Kept is a logit of at least `least` above which the sum of exponentials is less than `limit`, and the highest.
    """
    plan = part_plan(logits.shape[1])
    arrays, of_refs = leaves(logits)
    plan = dataclasses.replace(plan, part=pl.cdiv(plan.cols, plan.piece) * plan.piece)
    return _host.kernel(
        functools.partial(
            _redraw, plan=plan, of_refs=of_refs, num=len(arrays), score_of=score_of, interpreted=target.interpreted
        ),  # fmt: skip
        out_type=jax.ShapeDtypeStruct(found.shape, jnp.int32),
        grid=(*found.shape, 1),
        grid_names=("rows", "part"),
        compiler_params=params,
    )(*arrays, found, temperature, top, limit, least, *of_row)

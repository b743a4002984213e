# SPDX-License-Identifier: Apache-2.0
"""One token per row, drawn from softmax(logits / temperature), of which a part may be kept alone.

    token[r] = argmax over the kept c of   logits[r, c] / temperature[r] + noise(seeds[r], positions[r], c)

Shapes: logits (R, V) float32, bfloat16 or float16, V up to 2**20; seeds and positions integers and temperature, top_p
and min_p numbers, (R,) each or one for all; the result is (R,) int32. The arithmetic is float32.

The noise is Gumbel's (`noise.py`), so that the maximum is a draw, and it is made of a row's seed and position and of
the column alone. What is kept is said in terms of logits alone, so neither depends on other rows or on how the work is
cut up. The three ways to the same definition:

- All are kept: the maximum is that of `kernel.py` with k = 1, whose keys are logits with their noise. One read.
- `top_k`: `kernel.py` leaves the k highest logits in order, and the rest is done on those.
- `top_p` or `min_p` without it: `kernel.py` leaves the CANDIDATES highest of logits with noise, in order;
  `kernel_mass.masses` adds up how probable what is above each of them is; the first candidate that is kept is the
  token, since what comes before it is not kept. The threshold itself is never needed. Where no candidate is kept, which
  for `top_p` of 0.9 happens once in 10**8 rows, `kernel_mass.redraw` goes on.

Bound by: memory (one read; top_p and min_p alone two) and the noise, about 40 instructions per logit.
Compiled for Hopper; not run on a GPU yet.
Not supported: gradients; log probabilities, penalties, a bias or mask (add them to the logits).
"""

import functools

import jax
import jax.numpy as jnp

from .. import _host
from .._device import WARPGROUP
from . import kernel, kernel_mass, noise
from .kernel_mass import inverse
from .top_k import COLUMNS_MAX, K_MAX

CANDIDATES = 8


def _score(seed, position, temperature, x, column):
    """A key of the logit with its noise."""
    x = x.astype(jnp.float32)
    x = jnp.where(x == x, x, -jnp.inf) * inverse(temperature)
    gumbel = noise.gumbel(noise.row_key(seed, position), column)
    return kernel.to_key(x + gumbel * jnp.where(temperature <= 0.0, 0.0, 1.0))


def _of_the_highest(values, index, limits, of_row):
    """The token among the highest logits of each row, `values` at `index` in order. `limits`: top_k, top_p, min_p."""
    seed, position, temperature = (x[:, None] for x in of_row)
    top_k, top_p, min_p = (x[:, None] for x in limits)
    score = _score(seed, position, temperature, values, index)
    x = jnp.where(values == values, values, -jnp.inf)
    x = x.astype(jnp.float32)
    place, top = jnp.arange(x.shape[1]), jnp.max(x, axis=1, keepdims=True)
    share = jnp.where(x == top, 1.0, jnp.exp((x - top) * inverse(temperature))) * (place < top_k)
    above, distance = share, 1  # Sums up to each place, always in the same order.
    while distance < x.shape[1]:
        above = above + jnp.pad(above[:, :-distance], ((0, 0), (distance, 0)))
        distance *= 2
    total, above = above[:, -1:], above - share
    first = jnp.pad(x[:, 1:] < x[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    above = jax.lax.cummax(jnp.where(first, above, -1.0), axis=1)  # Of equal logits all are kept, or none.
    kept = (above < top_p * total) & (x >= top + jnp.log(min_p) / inverse(temperature)) | (x == top)
    best = jnp.argmax(jnp.where(kept & (place < top_k), score, kernel.LOWEST), axis=1)
    return jnp.take_along_axis(index, best[:, None], axis=1)[:, 0]


def _of_candidates(logits, limits, of_row, target, params):
    _, top_p, min_p = limits
    temperature = of_row[2]
    select = functools.partial(kernel.stages, logits, target=target, params=params)
    _, index = select(min(CANDIDATES, logits.shape[1]), jnp.float32, key_of=_score, of_row=of_row)
    drawn = jnp.take_along_axis(logits, index, axis=1, mode="clip")
    top, total, above = kernel_mass.masses(logits, temperature, kernel_mass.logit_key(drawn), target, params)
    limit, least = top_p * total, top + jnp.log(min_p) / inverse(temperature)
    drawn = drawn.astype(jnp.float32)
    kept = (above < limit[:, None]) & (drawn >= least[:, None]) | (drawn >= top[:, None])
    first = jnp.argmax(kept, axis=1)[:, None]
    found = jnp.where(jnp.any(kept, axis=1), jnp.take_along_axis(index, first, axis=1)[:, 0], -1)
    return kernel_mass.redraw(logits, found, temperature, top, limit, least, _score, of_row, target, params)


@functools.partial(jax.jit, static_argnames=("k", "all_kept", "target", "params"))
def _call(logits, of_row, limits, k: int | None, all_kept: bool, target: _host.Target, params):
    if (more := WARPGROUP - logits.shape[1]) > 0:
        logits = jnp.pad(logits, ((0, 0), (0, more)), constant_values=-jnp.inf)
    if k is not None:
        values, index = kernel.stages(logits, k, logits.dtype, target, params)
        return _of_the_highest(values, index, limits, of_row)
    if all_kept:
        return kernel.stages(logits, 1, jnp.float32, target, params, _score, of_row)[1][:, 0]
    return _of_candidates(logits, limits, of_row, target, params)


def sample(logits, seeds, positions, *, temperature=1.0, top_k=None, top_p=None, min_p=None):
    rows = logits.shape[0]
    target = _host.require_target("sample")
    params = _host.compiler_params(unsafe_no_auto_barriers=True, approx_math=True)
    each = lambda x, d: jnp.broadcast_to(jnp.asarray(x, d), (rows,))
    of_row = each(seeds, jnp.int32), each(positions, jnp.int32), each(temperature, jnp.float32)
    limits = (
        each(top_k or 0, jnp.int32),
        each(1.0 if top_p is None else top_p, jnp.float32),
        each(0.0 if min_p is None else min_p, jnp.float32),
    )
    return _call(logits, of_row, limits, top_k, top_p is None and min_p is None, target, params)

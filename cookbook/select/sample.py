# SPDX-License-Identifier: Apache-2.0
"""One token per row, drawn from softmax(logits / temperature), of which a part may be kept alone.

    token[r] = argmax over the kept c of   logits[r, c] / temperature[r] + noise(seeds[r], positions[r], c)

Shapes: logits (R, V) float32, bfloat16 or float16, V up to 2**20; seeds and positions integers and temperature, top_p
and min_p numbers, (R,) each or one for all; the result is (R,) int32. The arithmetic is float32.

The noise is Gumbel's (`noise.py`), so the maximum is a draw. It is made of the row's seed, its position and the column
alone, and a rule about logits alone says which tokens are kept: neither depends on other rows, nor on how the work is
cut up. There are three ways to a token:

- All are kept: the maximum is that of `kernel.py` with k = 1, whose keys are logits with their noise. One read.
- `top_k`: `kernel.py` leaves the k highest logits in order, and the rest is done on those.
- `top_p` or `min_p` without it: `kernel.py` leaves the CANDIDATES highest of logits with noise, in order;
  `kernel_mass.masses` adds up the probabilities above each of them; the first candidate that is kept is the token,
  since those before it are not. The threshold itself is never needed. Where no candidate is kept, which for `top_p` of
  0.9 happens once in about 10**8 rows, `kernel_mass.redraw` goes on.

Bound by: memory (one read; top_p and min_p alone two) and the noise, about 40 instructions per logit.
Not supported: gradients; penalties, a bias or a mask (add them to the logits).
"""

import functools

import jax
import jax.numpy as jnp

from .. import _host
from .._device import WARPGROUP
from . import kernel, kernel_mass, noise
from .kernel_mass import inverse, logit, logit_key
from .top_k import COLUMNS_MAX, K_MAX

CANDIDATES = 8


def sample_reference(logits, seeds, positions, *, temperature=1.0, top_k=None, top_p=None, min_p=None):
    each = lambda x, default: jnp.broadcast_to(default if x is None else x, logits.shape[:1])[:, None]
    seeds, positions, temperature = (each(x, None) for x in (seeds, positions, temperature))
    order = jnp.argsort(-logit(logits), axis=1, stable=True)
    x, place = jnp.take_along_axis(logit(logits), order, axis=1), jnp.arange(logits.shape[1])
    kept = place < each(top_k, logits.shape[1])
    share = jnp.where(kept, jnp.where(x == x[:, :1], 1.0, jnp.exp((x - x[:, :1]) * inverse(temperature))), 0.0)
    is_first = jnp.pad(x[:, 1:] < x[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    above = jax.lax.cummax(jnp.where(is_first, jnp.cumsum(share, axis=1) - share, 0.0), axis=1)
    limit = each(top_p, 2.0) * jnp.sum(share, axis=1, keepdims=True)
    kept &= (above < limit) & (share >= each(min_p, 0.0)) | (x == x[:, :1])
    score = jnp.where(kept, _score(seeds, positions, temperature, x, order.astype(jnp.int32)), kernel.LOWEST)
    return jnp.take_along_axis(order, jnp.argmax(score, axis=1)[:, None], axis=1)[:, 0]


def _score(seed, position, temperature, x, column):
    """A key of the logit with its noise."""
    gumbel = noise.gumbel(noise.row_key(seed, position), column)
    return kernel.to_key(logit(x) * inverse(temperature) + gumbel * jnp.where(temperature <= 0.0, 0.0, 1.0))


def _of_the_highest(values, index, limits, of_row):
    """The token among the highest logits of each row, `values` at `index` in order. `limits`: top_k, top_p, min_p."""
    seed, position, temperature = (x[:, None] for x in of_row)
    top_k, top_p, min_p = (x[:, None] for x in limits)
    score = _score(seed, position, temperature, values, index)
    place, top = jnp.arange(values.shape[1]), values[:, :1]
    share = jnp.where(values == top, 1.0, jnp.exp((values - top) * inverse(temperature))) * (place < top_k)
    above, distance = share, 1  # Sums up to each place, always in the same order.
    while distance < values.shape[1]:
        above = above + jnp.pad(above[:, :-distance], ((0, 0), (distance, 0)))
        distance *= 2
    total, above = above[:, -1:], above - share
    first = jnp.pad(values[:, 1:] < values[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    above = jax.lax.cummax(jnp.where(first, above, -1.0), axis=1)  # Equal logits are all kept, or none is.
    kept = (above < top_p * total) & (values >= top + jnp.log(min_p) / inverse(temperature)) | (values == top)
    best = jnp.argmax(jnp.where(kept & (place < top_k), score, kernel.LOWEST), axis=1)
    return jnp.take_along_axis(index, best[:, None], axis=1)[:, 0]


def _of_candidates(logits, limits, of_row, target, params):
    _, top_p, min_p = limits
    temperature = of_row[2]
    select = functools.partial(kernel.stages, logits, target=target, params=params)
    _, index = select(min(CANDIDATES, logits.shape[1]), jnp.float32, key_of=_score, of_row=of_row)
    drawn = logit(jnp.take_along_axis(logits, index, axis=1, mode="clip"))
    top, total, above = kernel_mass.masses(logits, temperature, drawn, target, params)
    limit, least = top_p * total, top + jnp.log(min_p) / inverse(temperature)
    kept = (above < limit[:, None]) & (drawn >= least[:, None]) | (drawn >= top[:, None])
    first = jnp.argmax(kept, axis=1)[:, None]
    found = jnp.where(jnp.any(kept, axis=1), jnp.take_along_axis(index, first, axis=1)[:, 0], -1)
    return kernel_mass.redraw(logits, found, temperature, top, limit, least, _score, of_row, target, params)


def _log_probabilities(logits, tokens, num: int, target, params):
    """(of the tokens, the `num` best, their tokens), of softmax(logits)."""
    chosen = logit(jnp.take_along_axis(logits, tokens[:, None], axis=1))
    ones = jnp.ones(tokens.shape, jnp.float32)
    top, total, _ = kernel_mass.masses(logits, ones, chosen, target, params)
    log_sum = (top + jnp.log(total))[:, None]
    best, index = chosen[:, :0], jnp.zeros((len(tokens), 0), jnp.int32)
    if num:
        best, index = kernel.stages(logits, num, jnp.float32, target, params, logit_key)
    return (chosen - log_sum)[:, 0], best - log_sum, index


@functools.partial(jax.jit, static_argnames=("k", "num_logprobs", "target", "params"))
def _call(logits, of_row, limits, k: int | None, num_logprobs: int | None, target: _host.Target, params):
    if (more := WARPGROUP - logits.shape[1]) > 0:
        logits = jnp.pad(logits, ((0, 0), (0, more)), constant_values=-jnp.inf)
    if k is not None:
        values, index = kernel.stages(logits, k, jnp.float32, target, params, logit_key)
        tokens = _of_the_highest(values, index, limits, of_row)
    elif limits is None:
        tokens = kernel.stages(logits, 1, jnp.float32, target, params, _score, of_row)[1][:, 0]
    else:
        tokens = _of_candidates(logits, limits, of_row, target, params)
    if num_logprobs is None:
        return tokens
    return tokens, _log_probabilities(logits, tokens, num_logprobs, target, params)


def _each_row(name: str, x, rows: int, dtype, low=None, high=None):
    """`x`, one number for all rows or one for each, as (rows,) of `dtype`."""
    x, kind = _host.as_array("sample", name, x), jnp.integer if dtype == jnp.int32 else jnp.floating
    said = f"{_host.PACKAGE}.sample: {name}"
    if not jnp.issubdtype(x.dtype, jnp.integer) and not jnp.issubdtype(x.dtype, kind):
        raise ValueError(f"{said}.dtype is {x.dtype}; must be one of {kind.__name__}: cast it")
    if x.shape not in ((), (rows,)):
        raise ValueError(f"{said}.shape={x.shape}; must be () or ({rows},), one for all rows or for each: reshape it")
    if low is not None and not isinstance(x, jax.core.Tracer) and not bool(jnp.all((x >= low) & (x <= high))):
        raise ValueError(f"{said}={x}; must be from {low} to {high}: pass None for no limit")
    return jnp.broadcast_to(x.astype(dtype), (rows,))


def sample(
    logits: jax.Array,
    seeds: jax.Array,
    positions: jax.Array,
    *,
    temperature: jax.Array | float = 1.0,
    top_k: jax.Array | int | None = None,
    top_p: jax.Array | float | None = None,
    min_p: jax.Array | float | None = None,
    num_logprobs: int | None = None,
) -> jax.Array | tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
    """One token per row, drawn from softmax(logits / temperature), or from its most probable tokens alone.

    A row's token depends on its logits, seed, position and options alone, bit for bit, whatever rows stand beside it.
    NaN counts as -inf; a row of -inf alone gives token 0.

    On an automatic mesh JAX gathers sharded operands on every device and says nothing: call it inside `jax.shard_map`.

    Args:
      logits: (R, V) float32, bfloat16 or float16, 1 <= V <= 2**20.
      seeds: int32, (R,) or one for all rows.
      positions: int32, (R,) or one for all: where a sequence's token goes, so that each draw has noise of its own.
      temperature: at least 0; 0 takes the highest logit, of equal ones the first. This and all below: (R,) or one.
      top_k: 1 to 2048; keeps so many of the highest logits, of equal ones the first. An array costs as much as 2048.
      top_p: 0 to 1; keeps a token if all that are more probable sum up to less than this, after `top_k`. The most
        probable token, and all as probable, are kept always.
      min_p: 0 to 1; keeps a token that is at least so probable as this times the most probable one.
      num_logprobs: from 0 to V, at most 2048: how many of the best log probabilities are returned, and that of the
        token.

    Returns:
      tokens, (R,) int32; with `num_logprobs` n (tokens, (of the tokens (R,), best (R, n), their tokens (R, n))), where
      log probabilities are float32, of softmax(logits) without temperature or limits.

    Raises:
      ValueError: rank, dtype or size of an argument is not supported, or an option is out of its range;
        RuntimeError: no GPU.
    """
    logits, name = _host.as_array("sample", "logits", logits), f"{_host.PACKAGE}.sample"
    if logits.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise ValueError(f"{name}: logits.dtype is {logits.dtype}; must be float32, bfloat16 or float16: cast it")
    if logits.ndim != 2 or not 1 <= logits.shape[1] <= COLUMNS_MAX:
        raise ValueError(f"{name}: logits.shape={logits.shape}; must be (R, V) with V from 1 to {COLUMNS_MAX}: reshape")
    (rows, columns), most = logits.shape, min(K_MAX, logits.shape[1])
    of_row = (
        _each_row("seeds", seeds, rows, jnp.int32),
        _each_row("positions", positions, rows, jnp.int32),
        _each_row("temperature", temperature, rows, jnp.float32, 0, float(jnp.finfo(jnp.float32).max)),
    )
    k = limits = None
    if top_k is not None:
        each_k = _each_row("top_k", top_k, rows, jnp.int32, 1, K_MAX)
        k = min(int(top_k), columns) if isinstance(top_k, int) else most
    if any(limit is not None for limit in (top_k, top_p, min_p)):
        limits = (
            None if top_k is None else each_k,
            _each_row("top_p", 1.0 if top_p is None else top_p, rows, jnp.float32, 0, 1),
            _each_row("min_p", 0.0 if min_p is None else min_p, rows, jnp.float32, 0, 1),
        )
    if num_logprobs is not None:
        num_logprobs = _host.option("sample", "num_logprobs", num_logprobs, int)
        if not 0 <= num_logprobs <= most:
            raise ValueError(f"{name}: {num_logprobs=}; must be from 0 to {most} for {columns} columns: pass fewer")
    _host.require_indices("sample", rows=rows)
    if rows == 0:
        none = lambda *more: jnp.zeros((0, *more), jnp.float32)
        tokens = none().astype(jnp.int32)
        best = none(num_logprobs or 0)
        return tokens if num_logprobs is None else (tokens, (none(), best, best.astype(jnp.int32)))
    target = _host.require_target("sample")
    (logits,) = _host.without_gradient("sample", "sample_reference, of the same module,", logits)
    params = _host.compiler_params(unsafe_no_auto_barriers=True, approx_math=True)
    return _call(logits, of_row, limits, k, num_logprobs, target, params)


def flops(rows: int, cols: int) -> int:
    """A draw among all takes two mixings of bits, two logarithms and the steps between them for each logit."""
    return 40 * rows * cols


def bytes_moved(rows: int, cols: int, itemsize: int) -> int:
    """One read; `top_p` without `top_k` takes two."""
    return rows * (cols * itemsize + 4)

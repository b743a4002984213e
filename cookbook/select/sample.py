# SPDX-License-Identifier: Apache-2.0
"""One token per row, drawn from softmax(logits / temperature), of which a part may be kept alone.

    token[r] = argmax over the kept c of   logits[r, c] / temperature[r] + noise(seeds[r], positions[r], c)

Before all else a bias, penalties and a mask of allowed tokens change the logits: `logits.py` has the formulas.

Shapes: logits (R, V) float32, bfloat16 or float16, V up to 2**20; seeds and positions integers and temperature, top_p
and min_p numbers, (R,) each or one for all; the result is (R,) int32. The arithmetic is float32.

The noise is Gumbel's (`noise.py`), so the maximum is a draw. It is made of the row's seed, its position and the column
alone, and a rule about logits alone says which tokens are kept: neither depends on other rows, nor on how the work is
cut up. There are three ways to a token:

- All are kept: `kernel_best.py` finds the maximum. One read.
- `top_k`: `kernel.py` leaves the k highest logits in order, and its last stage draws among them (`kernel_draw.py`).
- `top_p` or `min_p` without it: `kernel_best.py` finds a few of the highest logits with noise, the candidates
  (`chain.py`), and `kernel_mass.py` adds up the probabilities above them. `kernel_choose.py` takes the first that is
  kept; the threshold itself is never needed. Where no candidate is kept, which for `top_p` of 0.9 happens once in about
  10**4 rows, it goes on among the tokens above them.

Bound by: the bits of the noise, about 25 instructions per logit, and memory (one read; top_p and min_p alone two).
Not supported: gradients.
Chapter: notebooks/24_sampling.ipynb.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from .. import _host
from . import kernel, kernel_best, kernel_choose, kernel_draw, kernel_mass, noise
from .kernel_draw import inverse
from .kernel_mass import logit_key
from .logits import FLOATS, changed_by, each_row, logit
from .part import LOWEST, to_key
from .top_k import COLUMNS_MAX, K_MAX


def sample_reference(
    logits, seeds, positions, *, temperature=1.0, top_k=None, top_p=None, min_p=None, **changes
):  # fmt: skip
    logits = changed_by(jnp.asarray(logits), **changes).everywhere()
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
    score = jnp.where(kept, _score(seeds, positions, temperature, x, order.astype(jnp.int32)), LOWEST)
    return jnp.take_along_axis(order, jnp.argmax(score, axis=1)[:, None], axis=1)[:, 0]


def _score(seed, position, temperature, x, column):
    """A key of the logit with its noise."""
    gumbel = noise.gumbel(noise.row_key(seed, position), column)
    return to_key(logit(x) * inverse(temperature) + gumbel * jnp.where(temperature <= 0.0, 0.0, 1.0))


def _bound(seed, position, temperature, x, column):
    """float32 of logits and columns, of which `_raised` makes what is at least as high as the score; NaN for NaN."""
    # Without noise a little is left of it, because infinity times 0 is no number.
    noisy = noise.gumbel_bound(noise.row_key(seed, position), column) * jnp.where(temperature <= 0.0, 1e-30, 1.0)
    return x.astype(jnp.float32) * inverse(temperature) + noisy


def _raised(seed, position, temperature, bound):
    """The bound, whatever is rounded in between: the logit is off by up to 30 from it. -inf for NaN."""
    bound += (jnp.abs(bound) + 30.0) * 2.0**-20 + jnp.where(temperature <= 0.0, 0.0, noise.BOUND)
    return jnp.where(bound == bound, bound, -jnp.inf)


def _distance(min_p, temperature):
    """How far below the highest a logit may be, at most 0."""
    if min_p is None:
        return np.full(1, -np.inf, np.float32)
    return jnp.log(min_p) / inverse(temperature)


def _of_candidates(logits, limits, of_row, target, params):
    _, top_p, min_p = limits
    limits = top_p, _distance(min_p, of_row[2])
    chains = kernel_best.chains(logits, limits, _score, (_bound, _raised), of_row, target, params)
    parts = kernel_mass.masses(logits, of_row[2], limits, chains, target, params)
    return kernel_choose.choose(logits, parts, limits, _score, (_bound, _raised), of_row, target, params)


def _log_probabilities(logits, tokens, num: int, target, params):
    """(of the tokens, the `num` best, their tokens), of softmax(logits)."""
    parts = kernel_mass.masses(logits, np.ones(1, np.float32), None, tokens, target, params)
    log_sum, chosen = kernel_mass.log_sum(parts, logits.shape[1])[:, None], parts[:, 3, :1]
    best, index = chosen[:, :0], jnp.zeros((len(tokens), 0), jnp.int32)
    if num:
        best, index = kernel.stages(logits, num, jnp.float32, target, params, logit_key)
    return (chosen - log_sum)[:, 0], best - log_sum, index


@functools.partial(jax.jit, static_argnames=("k", "num_logprobs", "target", "params"))
def _call(logits, of_row, limits, k: int | None, num_logprobs: int | None, target: _host.Target, params):
    if k is not None:
        top_k, top_p, min_p = limits
        numbers = *of_row, top_k, top_p, _distance(min_p, of_row[2])
        draw = kernel_draw.Draw(_score)
        tokens = kernel.stages(logits, k, jnp.float32, target, params, logit_key, finish=draw, numbers=numbers)
    elif limits is None:
        tokens = kernel_best.best(logits, _score, (_bound, _raised), of_row, target, params)
    else:
        tokens = _of_candidates(logits, limits, of_row, target, params)
    if num_logprobs is None:
        return tokens
    return tokens, _log_probabilities(logits, tokens, num_logprobs, target, params)


def sample(
    logits: jax.Array,
    seeds: jax.Array,
    positions: jax.Array,
    *,
    temperature: jax.Array | float = 1.0,
    top_k: jax.Array | int | None = None,
    top_p: jax.Array | float | None = None,
    min_p: jax.Array | float | None = None,
    logit_bias: jax.Array | None = None,
    allowed: jax.Array | None = None,
    counts: jax.Array | None = None,
    prompt: jax.Array | None = None,
    repetition_penalty: jax.Array | float | None = None,
    frequency_penalty: jax.Array | float | None = None,
    presence_penalty: jax.Array | float | None = None,
    num_logprobs: int | None = None,
) -> jax.Array | tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
    """One token per row, drawn from softmax(logits / temperature), or from its most probable tokens alone.

    A row's token depends on its logits, seed, position and options alone, bit for bit, whatever rows stand beside it.
    NaN counts as -inf; a row of -inf alone, which has no token that is allowed, gives token 0.

    First the logits are changed, in this order, where the kernels load them. For token c, n[c] is how often it has been
    generated, and it has occurred where n[c] > 0 or where it is in the prompt:

        x[c] += logit_bias[c]
        x[c] *= 1 / repetition_penalty if x[c] > 0 else repetition_penalty      where c has occurred
        x[c] -= frequency_penalty * n[c]
        x[c] -= presence_penalty                                                where n[c] > 0
        x[c] = -inf                                                             where c is not allowed

    Frequency and presence penalties are OpenAI's; a repetition penalty that counts the prompt, and the others that do
    not, are vLLM's. Counts are an array, not lists of tokens: an engine adds the last tokens to it with
    `counts.at[rows, tokens].add(1)`, which touches one number per row, and a kernel reads it as it reads the logits.
    Lists would have to be counted anew for each token. Counts and a bias cost their bytes, bits hardly anything.

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
      logit_bias: (R, V) float32, bfloat16 or float16, or (V,) for all rows; -inf forbids a token.
      allowed: the tokens that may be drawn: (R, V) bool, or packed as xgrammar does, (R, ceil(V / 32)) int32 or uint32
        with token c in bit c % 32 of word c // 32; or without R, for all rows. Booleans are packed first.
      counts: (R, V) int32, at least 0: how often each token has been generated. Unused without a penalty.
      prompt: the tokens of the prompt, as `allowed`; for `repetition_penalty` alone.
      repetition_penalty: 0.001 to 1000; above 1 it makes tokens that have occurred less probable.
      frequency_penalty, presence_penalty: -1000 to 1000; positive ones make tokens that have occurred less probable.
      num_logprobs: from 0 to V, at most 2048: how many of the best log probabilities are returned, and that of the
        token.

    Returns:
      tokens, (R,) int32; with `num_logprobs` n (tokens, (of the tokens (R,), best (R, n), their tokens (R, n))), where
      log probabilities are float32, of the changed logits' softmax, without temperature or limits.

    Raises:
      ValueError: rank, dtype or size of an argument is not supported, or an option is out of its range;
        RuntimeError: no GPU.
    """
    logits, name = _host.as_array("sample", "logits", logits), f"{_host.PACKAGE}.sample"
    if logits.dtype not in FLOATS:
        raise ValueError(f"{name}: logits.dtype is {logits.dtype}; must be float32, bfloat16 or float16: cast it")
    if logits.ndim != 2 or not 1 <= logits.shape[1] <= COLUMNS_MAX:
        raise ValueError(f"{name}: logits.shape={logits.shape}; must be (R, V) with V from 1 to {COLUMNS_MAX}: reshape")
    (rows, columns), most = logits.shape, min(K_MAX, logits.shape[1])
    of_row = (
        each_row("seeds", seeds, rows, jnp.int32),
        each_row("positions", positions, rows, jnp.int32),
        each_row("temperature", temperature, rows, jnp.float32, 0, float(jnp.finfo(jnp.float32).max)),
    )
    k = limits = None
    if top_k is not None:
        each_k = each_row("top_k", top_k, rows, jnp.int32, 1, K_MAX)
        k = min(int(top_k), columns) if isinstance(top_k, int | np.integer) else most
    if any(limit is not None for limit in (top_k, top_p, min_p)):
        limits = (
            None if top_k is None else each_k,
            each_row("top_p", 1.0 if top_p is None else top_p, rows, jnp.float32, 0, 1),
            None if min_p is None else each_row("min_p", min_p, rows, jnp.float32, 0, 1),
        )
    if num_logprobs is not None:
        num_logprobs = _host.option("sample", "num_logprobs", num_logprobs, int)
        if not 0 <= num_logprobs <= most:
            raise ValueError(f"{name}: {num_logprobs=}; must be from 0 to {most} for {columns} columns: pass fewer")
    changed = changed_by(
        logits, logit_bias=logit_bias, allowed=allowed, counts=counts, prompt=prompt,
        repetition_penalty=repetition_penalty, frequency_penalty=frequency_penalty, presence_penalty=presence_penalty,
    )  # fmt: skip
    _host.require_indices("sample", rows=rows)
    if rows == 0:
        none = lambda *more: jnp.zeros((0, *more), jnp.float32)
        tokens = none().astype(jnp.int32)
        best = none(num_logprobs or 0)
        return tokens if num_logprobs is None else (tokens, (none(), best, best.astype(jnp.int32)))
    target = _host.require_target("sample")
    leaves, structure = jax.tree.flatten(changed)
    leaves = _host.without_gradient("sample", "sample_reference, of the same module,", *leaves)
    logits = jax.tree.unflatten(structure, leaves)
    params = _host.compiler_params(unsafe_no_auto_barriers=True, approx_math=True)
    return _call(logits, of_row, limits, k, num_logprobs, target, params)


def flops(rows: int, cols: int) -> int:
    """A draw among all takes two mixings of bits, two logarithms and the steps between them for each logit."""
    return 40 * rows * cols


def bytes_moved(rows: int, cols: int, itemsize: int) -> int:
    """One read; `top_p` without `top_k` takes two."""
    return rows * (cols * itemsize + 4)

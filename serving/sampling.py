"""Sampling that does not depend on who is in the batch."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from serving.defaults import under_defaults
from serving.request import MAX_LOGPROBS


class Options(NamedTuple):
    """How each of R sequences is sampled; all (R,)."""

    temperatures: jax.Array  # float32, at least 0.
    seeds: jax.Array  # uint32.
    positions: jax.Array  # int32: of the sampled token in its sequence, from 0 on, prompt included.
    top_ks: jax.Array  # int32, at least 1.
    top_ps: jax.Array  # float32, above 0 and at most 1.
    min_ps: jax.Array  # float32, from 0 to 1.


class Sampled(NamedTuple):
    """The result of a step, for each of R sequences."""

    tokens: jax.Array  # (R,) int32; -1 where the logits are not finite.
    scores: jax.Array | None  # (R, V) float32, of which each token has the largest.
    logprobs: tuple | None  # (R,) of the tokens; (R, n) of the most probable tokens, and (R, n) which these are.


@under_defaults
def scores(logits, temperatures, seeds, positions):
    """Logits with noise: the token of the largest is a sample of softmax(logits / temperature).

    The noise is `temperature` times Gumbel's, from a key made of the request's seed and the position of the token that
    is sampled, and of nothing else: neither batching nor preemption changes a request's tokens. A temperature of 0
    leaves the logits as they are: greedy.

    Args:
      logits: (R, V) float32.
      temperatures: (R,) float32, at least 0.
      seeds: (R,) uint32.
      positions: (R,) int32, in the sequence, from 0 on, prompt included.

    Returns:
      (R, V) float32.
    """
    noise = lambda seed, position: jax.random.gumbel(
        jax.random.fold_in(jax.random.key(seed), position), logits.shape[1:], jnp.float32
    )  # fmt: skip
    return logits + temperatures[:, None] * jax.vmap(noise)(seeds, positions)


def keep_probable(logits, temperatures, top_ks, top_ps, min_ps):
    """`logits`, with -inf for tokens that `top_k`, `top_p` and `min_p` cut off, in this order (see `Request`).

    No sort: a token stays if its logit is at least a threshold, which is found bit by bit. Equal tokens stay together.
    A row with a temperature of 0 stays as it is, for its largest logit is not cut off anyway.
    """
    x = logits / jnp.where(temperatures > 0, temperatures, 1.0)[:, None]
    kept = x >= _least(x, jnp.ones_like(x), jnp.minimum(top_ks, x.shape[1]).astype(jnp.float32))
    p = jax.nn.softmax(jnp.where(kept, x, -jnp.inf), axis=-1)
    # A share of 1 keeps all: rounding is not to cut the last token off.
    least = jnp.where((top_ps < 1)[:, None], _least(p, p, top_ps), 0.0)
    kept &= (p >= least) & (p >= min_ps[:, None] * p.max(axis=-1, keepdims=True))
    return jnp.where(kept | (temperatures == 0)[:, None], logits, -jnp.inf)


def _least(x, weights, wanted):
    """The largest value v of each row for which the `weights` of all values from v on are at least `wanted`; (R, 1).

    -inf or 0, the least there is, if there is no such value.
    """
    # Floats as integers of the same order: the sign bit turned for positive ones, all bits for negative ones.
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    order = jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))

    def add_bit(i, least):
        more = least | jnp.uint32(1 << 31) >> jnp.uint32(i)
        enough = jnp.sum(jnp.where(order >= more[:, None], weights, 0.0), axis=-1) >= wanted
        return jnp.where(enough, more, least)

    least = jax.lax.fori_loop(0, 32, add_bit, jnp.zeros(len(x), jnp.uint32))
    return jnp.min(jnp.where(order >= least[:, None], x, jnp.inf), axis=-1, keepdims=True)


@functools.partial(jax.jit, static_argnames=("draws", "cuts", "logprobs", "scored"))
@under_defaults
def sample(logits, options: Options, *, draws: bool, cuts: bool, logprobs: bool, scored: bool = False) -> Sampled:
    """The next token of each sequence, by its logits.

    Args:
      logits: (R, V) float32.
      draws: whether there is a temperature above 0; without one no noise is drawn.
      cuts: whether there is a `top_k`, `top_p` or `min_p` that cuts tokens off.
      logprobs: whether log probabilities are wanted.
      scored: whether the scores are wanted, which are as large as the logits.
    """
    noisy = logits
    if cuts:
        noisy = keep_probable(noisy, options.temperatures, options.top_ks, options.top_ps, options.min_ps)
    if draws:
        noisy = scores(noisy, options.temperatures, options.seeds, options.positions)
    best = jnp.argmax(noisy, axis=-1).astype(jnp.int32)
    of_best = lambda x: jnp.take_along_axis(x, best[:, None], axis=1)[:, 0]
    found = None
    if logprobs:
        every = jax.nn.log_softmax(logits)
        found = of_best(every), *jax.lax.top_k(every, min(MAX_LOGPROBS, logits.shape[1]))
    is_finite = jnp.isfinite(jnp.max(logits, axis=-1))  # A NaN is the largest.
    return Sampled(jnp.where(is_finite, best, -1), noisy if scored else None, found)

"""Sampling that does not depend on who is in the batch: `cookbook.sample`, and the same as XLA's operations."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

import cookbook
from cookbook.select import noise
from cookbook.select.sample import sample_reference
from cookbook.select.top_k import K_MAX
from serving.defaults import under_defaults
from serving.request import MAX_LOGPROBS

KEEP_ALL = 2.0  # A share of the probability that the sum of no rounding reaches.


class Options(NamedTuple):
    """How each of R sequences is sampled; all (R,)."""

    temperatures: jax.Array  # float32, at least 0.
    seeds: jax.Array  # uint32.
    positions: jax.Array  # int32: of the sampled token in its sequence, from 0 on, prompt included.
    top_ks: jax.Array  # int32, at least 1; above K_MAX for all tokens.
    top_ps: jax.Array  # float32, above 0 and at most 1.
    min_ps: jax.Array  # float32, from 0 to 1.


class Sampled(NamedTuple):
    """The result of a step, for each of R sequences."""

    tokens: jax.Array  # (R,) int32; -1 where the logits are not finite.
    scores: jax.Array | None  # (R, V) float32, of which each token that is drawn from all has the largest.
    logprobs: tuple | None  # (R,) of the tokens; (R, n) of the most probable tokens, and (R, n) which these are.


@under_defaults
def scores(logits, temperatures, seeds, positions):
    """Logits with noise: the token of the largest is a sample of softmax(logits / temperature).

    The noise is `temperature` times Gumbel's, that of `cookbook.sample`: made of the request's seed, the position of
    the token that is sampled and the token, and of nothing else, so neither batching nor preemption changes a request's
    tokens. A temperature of 0 leaves the logits as they are: greedy.

    Args:
      logits: (R, V) float32.
      temperatures: (R,) float32, at least 0.
      seeds: (R,) uint32.
      positions: (R,) int32, in the sequence, from 0 on, prompt included.

    Returns:
      (R, V) float32.
    """
    seeds, positions = (jnp.asarray(x).astype(jnp.int32)[:, None] for x in (seeds, positions))
    columns = jnp.arange(logits.shape[1], dtype=jnp.int32)[None]
    return logits + temperatures[:, None] * noise.gumbel(noise.row_key(seeds, positions), columns)


@functools.partial(jax.jit, static_argnames=("backend", "draws", "cuts", "logprobs", "scored"))
@under_defaults
def sample(
    logits, options: Options, *, backend: str = "xla", draws: bool, cuts: str, logprobs: bool, scored: bool = False
) -> Sampled:
    """The next token of each sequence, by its logits.

    Args:
      logits: (R, V) float32.
      backend: "cookbook" for `cookbook.sample`, "xla" for XLA's operations, which sort rows where `cuts` is not "".
      draws: whether there is a temperature above 0; without one no noise is drawn.
      cuts: "" if all rows that draw do so from all tokens; "top_k" if all of them have a `top_k`; "share" if none has,
        but some a `top_p` or `min_p`; "both" if some have a `top_k` and some have not.
      logprobs: whether log probabilities are wanted.
      scored: whether the scores are wanted, which are as large as the logits.
    """
    if not (draws or logprobs or scored or cuts):
        return Sampled(_greedy(logits), None, None)
    draw = _by_kernels if backend == "cookbook" and (draws or logprobs) else _by_xla
    tokens, found = draw(logits, options, draws, cuts, logprobs)
    noisy = scores(logits, *options[:3]) if scored and draws else logits
    is_finite = jnp.isfinite(jnp.max(logits, axis=-1))  # A NaN is the largest.
    return Sampled(jnp.where(is_finite, tokens, -1), noisy if scored else None, found)


def _greedy(logits):
    """The token of the largest logit, -1 if that is not finite: no launch follows the reduction."""

    def larger(ours, theirs):
        (x, i), (y, j) = ours, theirs
        is_ours = (x > y) | (x != x) | ((x == y) & (i < j))  # A NaN is the largest; of equal ones the first token.
        return jnp.where(is_ours, x, y), jnp.where(is_ours, i, j)

    tokens = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    tokens = jnp.where(jnp.isfinite(logits), tokens, -1)
    return jax.lax.reduce((logits, tokens), (jnp.float32(-jnp.inf), jnp.int32(-1)), larger, (1,))[1]


def _shares(options: Options) -> dict:
    return dict(top_p=jnp.where(options.top_ps < 1, options.top_ps, KEEP_ALL), min_p=options.min_ps)


def _by_kernels(logits, options: Options, draws: bool, cuts: str, logprobs: bool):
    temperatures, seeds, positions, top_ks, *_ = options
    of_all = functools.partial(
        cookbook.sample, logits, seeds, positions, temperature=temperatures,
        num_logprobs=min(MAX_LOGPROBS, logits.shape[1]) if logprobs else None,
    )  # fmt: skip
    if cuts != "top_k":
        found = of_all(**(_shares(options) if cuts else {}))
    if cuts in ("top_k", "both"):
        of_few = of_all(top_k=jnp.minimum(top_ks, K_MAX), **_shares(options))
        if cuts == "both":
            has = (top_ks <= K_MAX)[:, None]
            choose = lambda x, y: jnp.where(has if x.ndim == 2 else has[:, 0], x, y)
            found = jax.tree.map(choose, of_few, found)
        else:
            found = of_few
    return found if logprobs else (found, None)


def _by_xla(logits, options: Options, draws: bool, cuts: str, logprobs: bool):
    temperatures, seeds, positions, top_ks, *_ = options
    if cuts:
        seeds = jnp.asarray(seeds).astype(jnp.int32)
        how = dict(temperature=temperatures, top_k=top_ks, **_shares(options))
        tokens = sample_reference(logits, seeds, positions, **how).astype(jnp.int32)
    else:
        noisy = scores(logits, temperatures, seeds, positions) if draws else logits
        tokens = jnp.argmax(noisy, axis=-1).astype(jnp.int32)
    if not logprobs:
        return tokens, None
    every = jax.nn.log_softmax(logits)
    of_tokens = jnp.take_along_axis(every, tokens[:, None], axis=1)[:, 0]
    return tokens, (of_tokens, *jax.lax.top_k(every, min(MAX_LOGPROBS, logits.shape[1])))

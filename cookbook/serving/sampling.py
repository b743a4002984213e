"""Sampling that does not depend on who is in the batch."""

import jax
import jax.numpy as jnp


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

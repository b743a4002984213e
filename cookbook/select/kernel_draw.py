# SPDX-License-Identifier: Apache-2.0
"""A draw among the highest logits of a row, which the last stage of `kernel.py` has in order, a block per row.

Slot i has the i-th highest logit. A running sum over the slots gives each logit the share of what is above it. Where
the sum exceeds `top_p`, the logits fall below a threshold; so equal logits are all kept, or none is.
"""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
from jax import lax

from .. import _device
from . import threads
from .part import HIGHEST, LOWEST, from_key

LOWEST_FLOAT = float(jnp.finfo(jnp.float32).min)


def inverse(temperature):
    """The factor of the logits; 1 where the draw is the most probable token."""
    return 1.0 / jnp.where(temperature <= 0.0, 1.0, temperature)


def share_of(x, top, scale):
    """exp of the logits' distances to the highest."""
    return jnp.exp((x - jnp.maximum(top, LOWEST_FLOAT)) * scale)


def as_logit(key):
    """The logit of a key. The lowest of all keys stands where a row has no more logits."""
    return jnp.where(key == LOWEST, -jnp.inf, from_key(key, jnp.float32))


def running_sum(x, slot, smem, interpreted: bool):
    """The sums of `x` up to each slot, always added in the same order."""

    def step(i, total):
        threads.sync(interpreted)
        _device.store(smem, lax.bitcast_convert_type(total, jnp.int32))
        threads.sync(interpreted)
        bits = threads.gather(smem, jnp.maximum(slot - (1 << i), 0), 1, interpreted)
        return total + jnp.where(slot >= (1 << i), lax.bitcast_convert_type(bits, jnp.float32), 0.0)

    return lax.fori_loop(0, (smem.shape[0] - 1).bit_length(), step, x)


@dataclasses.dataclass(frozen=True)
class Draw:
    """A block's draw among the sorted slots of its row. `score_of` makes keys of the row's numbers, of logits and
    of their columns."""

    score_of: Callable

    def __call__(self, numbers, key, index, slot, smem, interpreted: bool):
        *of_row, top_k, top_p, distance = numbers
        x = as_logit(key)
        top, scale = jnp.max(x), inverse(of_row[-1])
        kept = slot < top_k
        share = jnp.where(kept, share_of(x, top, scale), 0.0)
        up_to = running_sum(share, slot, smem, interpreted)
        threshold = jnp.min(jnp.where(kept & (up_to - share < top_p * jnp.max(up_to)), x, jnp.inf))
        kept &= ((x >= threshold) & (x >= top + distance)) | (x >= top)
        score = jnp.where(kept, self.score_of(*of_row, x, index), LOWEST)
        return jnp.min(jnp.where(kept & (score == jnp.max(score)), index, HIGHEST))

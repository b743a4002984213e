# SPDX-License-Identifier: Apache-2.0
"""Logits as a kernel reads them: with a bias, penalties for tokens that have occurred, and a mask of allowed tokens.

They are applied to the values that a thread has just loaded, so no changed logits are ever stored. For token c of a
row, x its logit in float32, n[c] how often it has been generated and `seen` where that is above 0 or the prompt has it:

    x += bias[c]
    x *= 1 / repetition if x > 0 else repetition         where c is seen
    x -= frequency * n[c]
    x -= presence                                        where n[c] > 0
    x = -inf                                             where c is not allowed

Sets of tokens are packed, 32 in a word: bit c % 32 of word c // 32 stands for token c.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

BITS = 32  # Tokens in a word.


def logit(x):
    """In float32; NaN is -inf."""
    x = x.astype(jnp.float32)
    return jnp.where(x == x, x, -jnp.inf)


def number_of(ref, row):
    """A row's number, of (R,), or of (1,) for all rows."""
    return ref[row if ref.shape[0] > 1 else 0]


class Logits(NamedTuple):
    """Logits and what changes them; None where nothing does.

    Outside a kernel arrays, inside it `Ref`s; after `of_row` those of a row, and its numbers.
    """

    x: Any  # (R, V)
    bias: Any = None  # (R or 1, V) float32
    counts: Any = None  # (R, V) int32
    prompt: Any = None  # (R or 1, words) int32
    allowed: Any = None  # (R or 1, words) int32
    repetition: Any = None  # (R or 1,) float32, as are the next.
    inverse: Any = None  # 1 / repetition.
    frequency: Any = None
    presence: Any = None

    @property
    def shape(self):
        return self.x.shape

    def of_row(self, row):
        view = lambda ref: None if ref is None else ref.at[row if ref.shape[0] > 1 else 0]
        number = lambda ref: None if ref is None else number_of(ref, row)
        return Logits(*map(view, self[:5]), *map(number, self[5:]))

    def read(self, load, bits):
        """The logits that `load(x)` gives, changed; `load` and `bits` read an array, or a set, at the same columns."""
        x = load(self.x)
        if all(each is None for each in self[1:]):
            return x
        x = logit(x)
        counts = None if self.counts is None else load(self.counts).astype(jnp.int32)
        if self.bias is not None:
            x += load(self.bias)
        if self.repetition is not None:
            some = [] if counts is None else [counts]
            some += [] if self.prompt is None else [bits(self.prompt)]
            x = jnp.where(sum(some[1:], some[0]) > 0, x * jnp.where(x > 0.0, self.inverse, self.repetition), x)
        if self.frequency is not None:
            # Chosen, so that no compiler fuses the product with the sum in one place and not in another.
            x -= jnp.where(counts > 0, self.frequency * counts.astype(jnp.float32), 0.0)
        if self.presence is not None:
            x = jnp.where(counts > 0, x - self.presence, x)
        if self.allowed is not None:
            x = jnp.where(bits(self.allowed) != 0, x, -jnp.inf)
        return logit(x)

    def at(self, column):
        """The logit of one column of a row, inside a kernel."""
        shift = column & (BITS - 1)
        return self.read(lambda ref: ref[column], lambda ref: (ref[column // BITS] >> shift) & 1)

    def everywhere(self):
        """(R, V), without a kernel."""
        columns = jnp.arange(self.x.shape[1])
        bits = lambda words: (words[:, columns // BITS] >> columns % BITS) & 1
        each = Logits(*self[:5], *(None if number is None else number[:, None] for number in self[5:]))
        return each.read(lambda array: array, bits)


def packed(is_in):
    """(R, words) int32 of (R, V) booleans."""
    more = -is_in.shape[1] % BITS
    grouped = jnp.pad(is_in, ((0, 0), (0, more))).reshape(len(is_in), -1, BITS).astype(jnp.uint32)
    words = jnp.sum(grouped << jnp.arange(BITS, dtype=jnp.uint32), axis=-1, dtype=jnp.uint32)
    return lax.bitcast_convert_type(words, jnp.int32)


def widened(logits: Logits, columns: int) -> Logits:
    """With at least so many columns; the added ones are -inf."""
    more = columns - logits.shape[1]
    if more <= 0:
        return logits
    pad = lambda x, more, value: x if x is None else jnp.pad(x, ((0, 0), (0, more)), constant_values=value)
    words = lambda x: x if x is None else pad(x, -(-columns // BITS) - x.shape[1], 0)
    x, bias, counts, prompt, allowed, *numbers = logits
    return Logits(pad(x, more, -jnp.inf), pad(bias, more, 0), pad(counts, more, 0), words(prompt), words(allowed),
                  *numbers)  # fmt: skip


def leaves(logits: Logits):
    """(arrays, of_refs): what a kernel is given, and how it makes `Logits` of its `Ref`s again."""
    arrays, structure = jax.tree.flatten(logits)
    return arrays, lambda refs: jax.tree.unflatten(structure, refs)

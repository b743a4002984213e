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

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .. import _host

FLOATS, SETS = (jnp.float32, jnp.bfloat16, jnp.float16), (jnp.bool_, jnp.int32, jnp.uint32)
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


def leaves(logits: Logits):
    """(arrays, of_refs): what a kernel is given, and how it makes `Logits` of its `Ref`s again."""
    arrays, structure = jax.tree.flatten(logits)
    return arrays, lambda refs: jax.tree.unflatten(structure, refs)


def each_row(name: str, x, rows: int, dtype, low=None, high=None, nothing="limit"):
    """`x`, one number for all rows or one for each, as (1,) or (rows,) of `dtype`: rows of equal ones take a launch."""
    given, x = x, _host.as_array("sample", name, x)
    kind = jnp.integer if dtype == jnp.int32 else jnp.floating
    said = f"{_host.PACKAGE}.sample: {name}"
    if not jnp.issubdtype(x.dtype, jnp.integer) and not jnp.issubdtype(x.dtype, kind):
        raise ValueError(f"{said}.dtype is {x.dtype}; must be one of {kind.__name__}: cast it")
    if x.shape not in ((), (rows,)):
        raise ValueError(f"{said}.shape={x.shape}; must be () or ({rows},), one for all rows or for each: reshape it")
    if not isinstance(given, jax.Array):  # A constant inside `jax.jit` as well, where `x` would take a launch.
        x = np.asarray(given)
    if low is not None and not isinstance(x, jax.core.Tracer) and not bool(((x >= low) & (x <= high)).all()):
        raise ValueError(f"{said}={x}; must be from {low} to {high}: pass None for no {nothing}")
    return x.astype(dtype).reshape(-1)


def _tokens(name: str, x, rows: int, columns: int, dtypes, packs: bool = False, each: bool = False):
    """`x` of every token, (V,) or (1, V) for all rows unless `each` has its own, or (R, V); or of sets of them, words
    that are packed already."""
    x, said = _host.as_array("sample", name, x), f"{_host.PACKAGE}.sample: {name}"
    if x.dtype not in dtypes:
        raise ValueError(f"{said}.dtype is {x.dtype}; must be {' or '.join(map(str, map(jnp.dtype, dtypes)))}: cast it")
    is_packed = packs and x.dtype != jnp.bool_
    width = -(-columns // BITS) if is_packed else columns
    if x.shape not in [(rows, width)] + [(width,), (1, width)] * (not each):
        forms = f"({rows}, {width})" if each else f"({rows}, {width}), or ({width},) for all rows"
        of_what = f", a word for {BITS} tokens" if is_packed else ""
        raise ValueError(f"{said}.shape={x.shape}; must be {forms}{of_what}: reshape it")
    x = x.reshape(-1, width)
    if not packs:
        return x
    return lax.bitcast_convert_type(x, jnp.int32) if is_packed else packed(x)


def changed_by(logits, *, logit_bias=None, allowed=None, counts=None, prompt=None, repetition_penalty=None,
             frequency_penalty=None, presence_penalty=None) -> Logits:  # fmt: skip
    """`logits` with what changes them, checked."""
    (rows, columns), changes = logits.shape, {}
    tokens = functools.partial(_tokens, rows=rows, columns=columns)
    number = functools.partial(each_row, rows=rows, dtype=jnp.float32, nothing="penalty")
    needs = f"{_host.PACKAGE}.sample: %s without %s; it is for tokens that have occurred: pass {{}}"
    if logit_bias is not None:
        changes["bias"] = tokens("logit_bias", logit_bias, dtypes=FLOATS).astype(jnp.float32)
    if allowed is not None:
        changes["allowed"] = tokens("allowed", allowed, dtypes=SETS, packs=True)
    if repetition_penalty is not None:
        if counts is None and prompt is None:
            raise ValueError((needs % ("repetition_penalty", "counts or prompt")).format("either"))
        penalty = number("repetition_penalty", repetition_penalty, low=1e-3, high=1e3)
        changes |= dict(repetition=penalty, inverse=1.0 / penalty)
        if prompt is not None:
            changes["prompt"] = tokens("prompt", prompt, dtypes=SETS, packs=True)
    penalties = dict(frequency=frequency_penalty, presence=presence_penalty)
    for name, penalty in penalties.items():
        if penalty is not None:
            if counts is None:
                raise ValueError((needs % (f"{name}_penalty", "counts")).format("how often"))
            changes[name] = number(f"{name}_penalty", penalty, low=-1e3, high=1e3)
    if counts is not None and changes.keys() & {"repetition", *penalties}:
        changes["counts"] = tokens("counts", counts, dtypes=(jnp.int32,), each=True)
    return Logits(logits, **changes)

"""`top_k` and `sample`."""

import numpy as np

import cookbook

from .cases import Draw, Op, Values
from .elementwise import FLOATS


def draw_top_k(draw: Draw) -> dict:
    columns, rows = draw.choice((16, 300), (300, 20), (3000, 4), (30000, 1))
    cols = max(1, draw.size(columns, draw.choice(1, 1, 8)))
    dtype = draw.choice(*FLOATS, "int32")
    kinds = ("normal", "huge", "zeros") if dtype == "int32" else ("normal", "zeros", "nan", "infs", "-inf rows")
    values = draw.choice(*kinds)
    return dict(shape=[draw.size(rows), cols], dtype=dtype, values=values, k=draw.number(0, min(cols, 2049)),
                grad=values == "normal" and dtype != "int32" and draw.sometimes(0.2))  # fmt: skip


def top_k_reference(case, x):
    """A stable sort. NaN without a sign comes first, and 0.0 before -0.0."""
    finite = np.where(np.isnan(x), np.inf, x).astype(np.float64)
    order = np.lexsort((np.signbit(finite), -finite, ~np.isnan(x)), axis=-1)[:, : case["k"]]
    return [(np.take_along_axis(x, order, -1), 0), (order, 0)]


def too_many(case) -> str | None:
    return "must be from 0 to" if case["k"] > 2048 else None


def draw_sample(draw: Draw) -> dict:
    columns, rows = draw.choice((16, 40), (300, 8), (3000, 2), (30000, 1))
    return dict(
        shape=[draw.size(rows), max(1, draw.size(columns, draw.choice(1, 1, 8)))], dtype=draw.choice(*FLOATS),
        values=draw.choice("normal", "normal", "nan", "-inf rows"), temperature=draw.choice(1.0, 0.7, 0.0, 3.0),
        top_k=draw.choice(None, None, 1, draw.number(1, 300)), top_p=draw.choice(None, None, 0.0, 0.1, 0.9, 1.0),
        min_p=draw.choice(None, None, 0.0, 0.2, 1.0), changes=draw.choice([], [], [
            name for name in CHANGES if draw.sometimes(0.5)]),
    )  # fmt: skip


# A bias, the allowed tokens as booleans or in words, and penalties for those that have occurred.
CHANGES = "bias", "allowed", "words", "repetition_penalty", "frequency_penalty", "presence_penalty", "prompt"


def in_words(is_in):
    """32 tokens in a word, by NumPy: the first is its lowest bit."""
    more = np.pad(is_in, ((0, 0), (0, -is_in.shape[1] % 32)))
    return np.packbits(more, axis=1, bitorder="little").view("<u4")


def changes_of(names, rng, rows: int, columns: int) -> dict:
    """Arguments of `sample` that change logits: penalties for each row or for all, sets of each kind."""
    found, chosen = {}, lambda share: rng.random((rows, columns)) < share
    if "bias" in names:
        found["logit_bias"] = rng.standard_normal(columns).astype(np.float32)
    if "allowed" in names or "words" in names:
        allowed = chosen(0.6)
        found["allowed"] = in_words(allowed) if "words" in names else allowed
    penalties = [name for name in CHANGES if name in names and name.endswith("penalty")]
    if penalties:
        found["counts"] = (rng.integers(1, 4, (rows, columns)) * chosen(0.4)).astype(np.int32)
        found["prompt"] = chosen(0.2) if "prompt" in names else in_words(chosen(0.2))
    for name in penalties:
        low = 0.5 if name.startswith("repetition") else -1.0
        found[name] = rng.uniform(low, 2.0, rows).astype(np.float32) if len(penalties) > 1 else np.float32(1.5)
    return found


def changed(x, logit_bias=0.0, allowed=None, counts=None, prompt=None, repetition_penalty=None,
            frequency_penalty=0.0, presence_penalty=0.0):  # fmt: skip
    """Logits, float64, after a bias, penalties and a mask."""
    bits = lambda words: np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")[:, : x.shape[1]] > 0
    is_in = lambda each: each if each.dtype == bool else bits(each)
    each_row = lambda number: np.float64(number).reshape(-1, 1)
    counts = np.zeros(x.shape) if counts is None else np.int64(counts)
    x = np.where(np.isnan(x), -np.inf, x) + np.float64(logit_bias)
    if repetition_penalty is not None:
        occurred = (counts > 0) | (False if prompt is None else is_in(prompt))
        penalty = each_row(repetition_penalty)
        x = np.where(occurred, np.where(x > 0, x / penalty, x * penalty), x)
    x = x - each_row(frequency_penalty) * counts - each_row(presence_penalty) * (counts > 0)
    return x if allowed is None else np.where(is_in(allowed), x, -np.inf)


def sample_arrays(case: dict, values: Values) -> dict:
    rows = case["shape"][0]
    numbers = lambda: values.rng.integers(-(2**31), 2**31, rows).astype(np.int32)
    arrays = dict(logits=values(case["shape"], case["dtype"], case["values"]), seeds=numbers(), positions=numbers())
    return arrays | changes_of(case["changes"], values.rng, *case["shape"])


OPTIONS = "temperature", "top_k", "top_p", "min_p"


def mixed(x):
    x = (x ^ (x >> 16)) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * np.uint32(0x846CA68B)
    return x ^ (x >> 16)


def gumbel(seed, position, columns: int):
    seed, position = (np.array([n]).astype(np.uint32) for n in (seed, position))
    first = mixed(mixed(seed ^ np.uint32(0x9E3779B9)) + position)
    second = mixed(mixed(position ^ np.uint32(0x85EBCA6B)) + first + seed)
    bits = mixed(mixed(np.arange(columns, dtype=np.uint32) + first) ^ second) >> 1
    uniform = np.minimum(np.float32(bits).astype(np.float64) * 2.0**-31 + 2.0**-32, 1 - 2.0**-24)
    return -np.log(-np.log1p(-uniform))


def sampled(case, logits, seeds, positions, **changes):
    """Tokens by a sort, in float64."""
    x, temperature, tokens = changed(logits, **changes), case["temperature"], []
    for row, seed, position in zip(x, seeds, positions, strict=True):
        order = np.argsort(-row, kind="stable")
        kept = order[: case["top_k"]]
        with np.errstate(invalid="ignore"):
            near = np.where(row[kept] == row.max(), 0.0, row[kept] - row.max()) / (temperature or 1.0)
        share = np.exp(near)
        above = np.array([share[near > value].sum() for value in np.unique(near)])[
            np.unique(near, return_inverse=True)[1]
        ]
        top_p, min_p = (default if case[name] is None else case[name] for name, default in (("top_p", 2), ("min_p", 0)))
        kept = kept[(above < top_p * share.sum()) & (share >= min_p) | (near == 0)]
        score = row / (temperature or 1.0) + (gumbel(seed, position, len(row)) if temperature else 0.0)
        kept = np.sort(kept)
        tokens.append(kept[np.argmax(score[kept])])
    return [(np.array(tokens, np.int64), 0)]


OPS = {
    "sample": Op(
        draw_sample, sample_arrays,
        lambda case, **arrays: (cookbook.sample(**arrays, **{name: case[name] for name in OPTIONS}),), sampled,
    ),
    "top_k": Op(
        draw_top_k,
        lambda case, values: dict(x=values(case["shape"], case["dtype"], case["values"])),
        lambda case, x: cookbook.top_k(x, case["k"]), top_k_reference, too_many, ("x",),
    ),
}  # fmt: skip

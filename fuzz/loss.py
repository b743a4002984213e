"""`cross_entropy` and `linear_cross_entropy`."""

import numpy as np

import cookbook

from .cases import F32, Draw, Op, Values

IGNORED = -100


def draw_options(draw: Draw) -> dict:
    return dict(
        reduction=draw.choice("mean", "sum", "none"), label_smoothing=draw.choice(0.0, 0.0, 0.1, 1.0),
        z_loss=draw.choice(0.0, 0.0, 1e-3), logits_soft_cap=draw.choice(None, None, 5.0),
        return_lse=draw.sometimes(0.3),
    )  # fmt: skip


OPTIONS = ("reduction", "label_smoothing", "z_loss", "logits_soft_cap", "return_lse")


def options(case: dict) -> dict:
    return {name: case[name] for name in OPTIONS}


def draw_cross_entropy(draw: Draw) -> dict:
    columns, rows = draw.choice((16, 300), (700, 20), (20000, 3))
    dtype = draw.choice("bfloat16", "float16", "float32")
    shape = [draw.size(rows), max(1, draw.size(columns, draw.choice(1, 1, 8), large=3))]
    return dict(shape=shape, dtype=dtype, values=draw.choice("normal", "normal", "zeros"), ignored=draw.sometimes(0.5),
                grad=draw.sometimes(0.3), **draw_options(draw))  # fmt: skip


def labels_of(case: dict, values: Values, rows: int, vocabulary: int):
    labels = values.rng.integers(0, vocabulary, rows).astype(np.int32)
    return np.where(values.rng.random(rows) < 0.3, IGNORED, labels).astype(np.int32) if case["ignored"] else labels


def cross_entropy_arrays(case: dict, values: Values) -> dict:
    logits = values(case["shape"], case["dtype"], case["values"])
    labels = labels_of(case, values, *case["shape"])
    if not case["grad"]:  # Whatever a row holds that is ignored.
        logits[labels == IGNORED] = np.nan
    return dict(logits=logits, labels=labels)


def losses(case: dict, logits, labels, logit_slack):
    """[(loss, slack)], and lse if it is wanted. Each logit may be off by `logit_slack`."""
    valid = labels != IGNORED
    z = np.where(valid[:, None], logits, 0.0)
    if cap := case["logits_soft_cap"]:
        z = cap * np.tanh(z / cap)
    top = z.max(-1, initial=-np.inf, keepdims=True)
    lse = (np.log(np.exp(z - top).sum(-1)) + top[:, 0]) if len(z) else np.zeros(0)
    smooth = case["label_smoothing"]
    at_label = z[np.arange(len(z)), np.where(valid, labels, 0)]
    loss = lse - (1 - smooth) * at_label - smooth * z.mean(-1) + case["z_loss"] * lse**2
    loss, lse = np.where(valid, loss, 0.0), np.where(valid, lse, 0.0)
    size = np.abs(z).max(initial=1.0) + np.abs(lse).max(initial=1.0)
    slack = 20 * F32 * size + 3e-6 + 2 * logit_slack
    total, count = loss.sum(), max(valid.sum(), 1)
    of_sum = slack * len(z) + F32 * np.abs(loss).sum() * 4
    found = dict(none=(loss, slack), sum=(total, of_sum), mean=(total / count, of_sum / count))[case["reduction"]]
    found = np.asarray(found[0]), found[1]
    return [found, (lse, slack)] if case["return_lse"] else [found]


def as_tuple(out):
    return out if isinstance(out, tuple) else (out,)


def draw_linear(draw: Draw) -> dict:
    hidden = 8 * draw.choice(1, 2, 3, 8, 9, draw.number(1, 16))
    return dict(
        rows=draw.size(40), hidden=hidden, vocabulary=max(1, draw.size(draw.choice(20, 400))),
        dtype=draw.choice("bfloat16", "bfloat16", "float16"), transpose_weight=draw.sometimes(0.4),
        memory=draw.choice(None, None, "low"), ignored=draw.sometimes(0.5), grad=draw.sometimes(0.3),
        **draw_options(draw),
    )  # fmt: skip


def linear_arrays(case: dict, values: Values) -> dict:
    rows, hidden, vocabulary = case["rows"], case["hidden"], case["vocabulary"]
    labels = labels_of(case, values, rows, vocabulary)
    shape = (hidden, vocabulary) if case["transpose_weight"] else (vocabulary, hidden)
    x = values((rows, hidden), case["dtype"])
    if not case["grad"]:
        x[labels == IGNORED] = np.nan
    return dict(hidden=x, weight=values(shape, case["dtype"], scale=hidden**-0.5), labels=labels)


def call_linear(case, hidden, weight, labels):
    how = {name: case[name] for name in ("transpose_weight", "memory")}
    return as_tuple(cookbook.linear_cross_entropy(hidden, weight, labels, **how, **options(case)))


def linear_reference(case, hidden, weight, labels):
    hidden = np.where((labels != IGNORED)[:, None], hidden, 0.0)
    logits = hidden @ (weight if case["transpose_weight"] else weight.T)
    rounding = 2.0**-8 if case["dtype"] == "bfloat16" else 2.0**-11  # Each logit is rounded.
    return losses(case, logits, labels, rounding * np.abs(logits).max(initial=0.0))


OPS = {
    "cross_entropy": Op(
        draw_cross_entropy, cross_entropy_arrays,
        lambda case, logits, labels: as_tuple(cookbook.cross_entropy(logits, labels, **options(case))),
        lambda case, logits, labels: losses(case, logits, labels, 0.0), gradients=("logits",),
    ),
    "linear_cross_entropy": Op(
        draw_linear, linear_arrays, call_linear, linear_reference, gradients=("hidden", "weight"),
    ),
}  # fmt: skip

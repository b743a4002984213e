"""Checkers of the exercises of chapter 3."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from exercises.judge import (
    NotYet,
    checker,
    drawn,
    jaxpr_of,
    normal,
    require_close,
    run_kernel,
    speed,
    values_loaded,
    wide,
)

import cookbook

LOWEST = np.finfo(np.float32).min
TIMED = jax.ShapeDtypeStruct((16384, 8192), jnp.bfloat16)


@checker
def check_log_softmax(answer) -> str:
    """`answer(x)` is a kernel, the logarithm of the softmax over the last axis of (rows, cols), and reads each row
    once."""
    x = normal(2, (3, 1024))
    softmax = np.exp(_log_softmax(x))
    likely = [(softmax, "this is softmax still; the logarithm of p / l is wanted")]
    require_close(run_kernel(answer, x), _log_softmax(x), 1e-5, "with normal logits", likely)
    out = run_kernel(answer, 100 * x)
    if np.isinf(out).any():
        raise NotYet(
            "with logits of several hundred there are infinities: an exponential was 0 before its logarithm was taken. "
            "Only l needs a logarithm, because log(exp(x - m) / l) = (x - m) - log(l)"
        )
    require_close(out, _log_softmax(100 * x), 1e-5, "with logits of several hundred")
    x = normal(3, (2, 2048), jnp.bfloat16)
    require_close(run_kernel(answer, x), _log_softmax(x), 1e-2, "with bfloat16")
    _require_one_read(answer, normal(2, (3, 1024)))
    return "no exponential stands between a logit and its result." + speed(answer, cookbook.softmax, TIMED)


@checker
def check_merge(answer) -> str:
    """Exercise 2: `answer(a, b)` is the state of a row, from the states (m, l, acc) of its two parts."""
    logits, values = np.sort(4 * np.asarray(normal(0, 24))), np.asarray(normal(1, (24, 5)))
    masked = np.full(24, -np.inf, np.float32)
    for what, row, cut in (
        ("the larger maximum in the second part", logits, 10),
        ("the larger maximum in the first part", logits[::-1], 10),
        ("logits near 10000", logits + 10000, 17),
        ("a first part of -inf alone", np.r_[masked[:9], logits[9:]], 9),
        ("a second part of -inf alone", np.r_[logits[:9], masked[9:]], 9),
        ("two parts of -inf alone", masked, 9),
    ):
        found = answer(_state(row[:cut], values[:cut]), _state(row[cut:], values[cut:]))
        if not isinstance(found, tuple) or len(found) != 3:
            raise NotYet(f"it returns {found!r}; it must return a tuple (m, l, acc)")
        if np.shape(found[2]) != (5,):
            raise NotYet(f"acc has shape {np.shape(found[2])}; it must be that of the parts' acc, (5,)")
        said = "the m, l and acc of a part are relative to the m of that part. (Infinity minus infinity is NaN.)"
        for name, got, want in zip(("m", "l", "acc"), found, _state(row, values), strict=True):
            require_close(np.asarray(got), wide(want), 1e-3, f"with {what}, {name}; {said}")
    return "acc / l is the softmax-weighted average, and you have the heart of FlashAttention."


@checker
def check_any_length(answer) -> str:
    """Exercise 3: `answer(x)` is a kernel, the softmax over the last axis of (rows, cols) for any cols from 128."""
    odd, aligned = _lengths()  # Nobody can list how many columns to skip.
    for cols, dtype in (
        (1000, jnp.float32), (1024, jnp.bfloat16), (333, jnp.float32), (odd, jnp.float32), (aligned, jnp.float32)
    ):  # fmt: skip
        x = normal(5, (2, cols), dtype)
        out, exact = run_kernel(answer, x), np.exp(_log_softmax(x))
        share = wide(out)[:, :1] / exact[:, :1] if out.shape == x.shape else np.ones((1, 1))
        said = f"each result of row 0 is {share[0, 0]:.3f} times what it must be: columns of l count twice, or never"
        tolerance = 1e-5 if dtype == jnp.float32 else 1e-2
        require_close(out, exact, tolerance, f"with rows of {cols}", [(share * exact, said)])
    return "each column is counted once, however many threads store it." + speed(answer, cookbook.softmax, TIMED)


@checker
def check_layer_norm(answer) -> str:
    """Exercise 4: `answer(x)` is a kernel, (x - mean) / sqrt(variance + 1e-6) over the last axis of (rows, cols), and
    reads each row once."""
    x = normal(4, (3, 1024))
    require_close(run_kernel(answer, 2 * x + 0.5), _layer_norm(2 * x + 0.5), 1e-5, "with values around 0.5")
    small = "with a variance as small as eps, which is added to it"
    require_close(run_kernel(answer, 1e-3 * x), _layer_norm(1e-3 * x), 1e-5, small)
    wide_rows = normal(6, (2, 2048), jnp.bfloat16)
    require_close(run_kernel(answer, wide_rows), _layer_norm(wide_rows), 1e-2, "with rows of 2048 in bfloat16")
    out = run_kernel(answer, jnp.full((2, 1024), 0.25))
    if np.isnan(out).any():
        raise NotYet("a row of one repeated value has variance 0, and gives NaN: eps belongs under the root")
    require_close(out, np.zeros((2, 1024)), 0, "with a row of one repeated value")
    out, exact = run_kernel(answer, x + 4096), _layer_norm(x + 4096)
    if not np.allclose(out, exact, rtol=5e-3, atol=5e-3):
        found = f"{np.isnan(out).sum()} of {out.size} results are NaN" if np.isnan(out).any() else "results are far off"
        raise NotYet(f"there are rows where {found}. Which rows?")
    _require_one_read(answer, x)
    rms_norm = functools.partial(cookbook.rms_norm, scale=jnp.ones(TIMED.shape[1], jnp.bfloat16))
    praise = (
        "the fix costs no instruction, because the output needs `x - mean` anyway. The price: the second sum waits for "
        "the first."
    )
    return praise + speed(answer, rms_norm, TIMED)


def _require_one_read(answer, x) -> None:
    """Raises NotYet if a block loads more values from global memory than a row has."""
    loaded = values_loaded(jaxpr_of(answer, x))
    if loaded > x.shape[1]:
        times = round(loaded / x.shape[1])
        raise NotYet(f"it is right, but reads each row {times} times: load the row once, and keep it in registers")


def _lengths() -> tuple[int, int]:
    """Two row lengths that nobody knows beforehand: an odd one, and a multiple of 8 that leaves a short last piece."""
    return drawn(lambda rng: (int(2 * rng.integers(70, 200) + 1), int(8 * rng.integers(130, 250))), 1)[0]


def _state(logits, values):
    """The state of a part of a row: its largest logit, and sums of exponentials relative to that."""
    m = max(np.max(logits), LOWEST)
    p = np.exp(logits - m)
    return m, np.sum(p), p @ values


def _log_softmax(x):
    x = wide(x)
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def _layer_norm(x):
    x = wide(x)
    return (x - x.mean(axis=-1, keepdims=True)) / np.sqrt(x.var(axis=-1, keepdims=True) + 1e-6)

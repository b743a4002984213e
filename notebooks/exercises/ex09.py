"""Chapter 9's exercises: int8 quantization of weights, the crossover of the roofline, and the choice of a format."""

import math

import jax.numpy as jnp
import numpy as np
from exercises.judge import NotYet, checker

LARGEST = 127  # The largest symmetric int8; -128 has no partner, and is not used.
CASES = (  # K, N, peak in FLOP/s, bandwidth in byte/s.
    (8192, 8192, 989e12, 4.8e12),
    (4096, 14336, 989e12, 3.35e12),
    (5120, 5120, 312e12, 2.0e12),
    (1024, 512, 2250e12, 8.0e12),
    (256, 128, 989e12, 4.8e12),  # So small that the rows themselves are the traffic: never bound by compute.
)
PAIRS = ("plain", "rows", "channels")
FORMATS = ("e4m3 per tensor", "e4m3 per row and column", "e5m2 per tensor")  # From the cheapest.
MARGIN = 1.05  # A dearer format must be better by more than this.


@checker
def check_quantise(answer) -> str:
    """Exercise 1: `answer(w)` returns the int8 values (K, N) and the scales (N,) of a float32 weight matrix (K, N)."""
    for name, w in _weights().items():
        given = answer(jnp.asarray(w))
        if given is None or (isinstance(given, tuple) and None in [x if x is None else 0 for x in given]):
            raise NotYet("quantise_columns returns nothing yet: write its body.")
        if not isinstance(given, tuple) or len(given) != 2:
            raise NotYet("quantise_columns must return a pair: the int8 values and the scales.")
        _require_quantised(name, w, *map(np.asarray, given))
    return "Every value is within half a step of its column, zero columns and extremes included."


@checker
def check_crossover(answer) -> str:
    """Exercise 2: `answer(k, n, peak, bandwidth)` is the largest M whose product with int8 weights is memory-bound."""
    given = {case: answer(*case) for case in CASES}
    for case, got in given.items():
        if got is None:
            raise NotYet("largest_m returns None: write its body.")
        if isinstance(got, bool) or not isinstance(got, int | float | np.integer | np.floating):
            raise NotYet(f"largest_m{case} is {got!r}; it must be a number.")
        want = _largest_m(*case)
        if got != want:
            raise NotYet(f"largest_m{case} is {got}, and {want} is right. {_hint(given)}")
    return "Up to there, only the bytes of the weights count."


@checker
def check_formats(answer) -> str:
    """Exercise 3: `answer` names for each pair of operands the format and scales of the least error; the cheaper one
    where the errors are within 5 %."""
    if not isinstance(answer, dict) or set(answer) != set(PAIRS):
        raise NotYet(f"answer with a dict that has a format for each of {', '.join(PAIRS)}.")
    if None in answer.values():
        raise NotYet(f"name a format for each pair; there are: {'; '.join(FORMATS)}.")
    for name, pair in operands().items():
        if answer[name] not in FORMATS:
            raise NotYet(f"{answer[name]!r} is none of: {'; '.join(FORMATS)}.")
        errors = format_errors(*pair)
        best = best_format(errors)
        if answer[name] != best:
            better = "is no worse, and cheaper" if errors[best] * MARGIN > errors[answer[name]] else "has less"
            raise NotYet(
                f'"{name}": {answer[name]} has an error of {errors[answer[name]]:.1%}, and another one {better}. What '
                "is large beside what, and which scale or exponent sees it?"
            )
    return "Scales take care of what differs from row to row, exponents of what differs inside of one."


def operands(seed: int = 9) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Exercise 3's pairs: random normal; a's rows of sizes from 2^-16 to 2^16; channels from 2^-12 to 2^12 in a, whose
    partners in b undo it."""
    rng = np.random.default_rng(seed)
    a, b = rng.standard_normal((192, 384)), rng.standard_normal((384, 160))
    of_rows, of_channels = np.exp2(rng.uniform(-16, 16, (192, 1))), np.exp2(rng.uniform(-12, 12, 384))
    return dict(zip(PAIRS, ((a, b), (a * of_rows, b), (a * of_channels, b / of_channels[:, None])), strict=True))


def format_errors(a, b) -> dict[str, float]:
    """The error of a @ b in each of FORMATS: root mean square over the rows of each row's relative error."""
    exact = a @ b
    errors = {}
    for name in FORMATS:
        dtype, per_row = jnp.float8_e4m3fn if "e4m3" in name else jnp.float8_e5m2, "row" in name
        out = _rounded(a, dtype, 1 if per_row else None) @ _rounded(b, dtype, 0 if per_row else None)
        errors[name] = float(np.sqrt(np.mean(np.sum((out - exact) ** 2, 1) / np.sum(exact**2, 1))))
    return errors


def best_format(errors: dict[str, float]) -> str:
    """The cheapest of those within MARGIN of the least error: fewer scales first, then the finer format."""
    cheapest_first = (FORMATS[0], FORMATS[2], FORMATS[1])
    return next(name for name in cheapest_first if errors[name] <= MARGIN * min(errors.values()))


def _rounded(x, dtype, axis):
    scale = np.abs(x).max(axis=axis, keepdims=True) / float(jnp.finfo(dtype).max)
    return (x / scale).astype(dtype).astype(np.float64) * scale


def _weights() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(9)
    plain = rng.standard_normal((96, 40)).astype(np.float32)
    uneven = plain * np.exp2(rng.integers(-20, 20, 40)).astype(np.float32)
    with_zeros = plain.copy()
    with_zeros[:, [3, 17]] = 0
    extremes = rng.uniform(-1, 1, (96, 40)).astype(np.float32)
    extremes[0], extremes[1] = -128, 127  # The largest of each column is negative.
    extremes[1, 20:], extremes[0, 20:] = 128, -127
    return {
        "random normal": plain,
        "columns of different size": uneven,
        "two columns of zeros": with_zeros,
        "columns that reach -128 or 128": extremes,
    }


def _require_quantised(name: str, w, w_q, scales) -> None:
    """Raises NotYet if `w_q` and `scales` are not the per-column symmetric quantization of `w`."""
    if w_q.dtype != np.int8 or w_q.shape != w.shape:
        raise NotYet(f"the values are {w_q.dtype} {w_q.shape}; they must be int8 {w.shape}.")
    if not np.issubdtype(scales.dtype, np.floating) or scales.shape != w.shape[1:]:
        raise NotYet(f"the scales are {scales.dtype} {scales.shape}; they must be float32 {w.shape[1:]}: one a column.")
    if not np.isfinite(scales).all() or (scales <= 0).any():
        at = int(np.argwhere(~(np.isfinite(scales) & (scales > 0)))[0, 0])
        raise NotYet(f"{name}: the scale of column {at} is {scales[at]}; a scale must be positive, also of zeros.")
    if (w_q == -128).any():
        raise NotYet(f"{name}: there is a -128: it has no partner 128. The largest value of a column becomes ±127.")
    values, step = w_q.astype(np.float64), scales.astype(np.float64)
    off = np.abs(w - values * step) > (0.5 + 1e-4) * step  # Division by the scale is rounded too.
    if off.any():
        i, j = (int(x) for x in np.argwhere(off)[0])
        raise NotYet(
            f"{name}: weight [{i}, {j}] is {w[i, j]:.4g} and comes back as {values[i, j] * step[j]:.4g}, more than "
            f"half of its column's step of {step[j]:.3g} away. (Rounded to the nearest? Is the sign in its place?)"
        )
    largest = np.abs(w).max(axis=0).astype(np.float64)
    too_wide = (largest > 0) & (step > largest / LARGEST * (1 + 1e-4))
    if too_wide.any():
        at = int(np.argwhere(too_wide)[0, 0])
        raise NotYet(
            f"{name}: column {at} reaches {largest[at]:.4g}, so that a step of {largest[at] / LARGEST:.3g} is enough; "
            f"yours is {step[at]:.3g}."
        )


def _largest_m(k, n, peak, bandwidth, *, weight_bytes=1, row_bytes=2, flops=2):
    """The right answer of exercise 2, and with other keywords the likely wrong ones."""
    # flops * m * k * n / peak <= (weight_bytes * k * n + row_bytes * m * (k + n)) / bandwidth
    a_row = flops * k * n * bandwidth / peak - row_bytes * (k + n)
    return math.inf if a_row <= 0 else math.floor(weight_bytes * k * n / a_row)


def _hint(given: dict) -> str:
    """Names the likely mistake that explains all answers."""
    likely = (
        (dict(weight_bytes=2), "A weight is one byte."),
        (dict(row_bytes=0), "The rows of a and of the result cross memory too, 2 bytes a value."),
        (dict(row_bytes=1), "A value of a and of the result is 2 bytes."),
        (dict(flops=1), "A multiplication and an addition for each weight and row: 2 operations."),
    )
    for keywords, text in likely:
        if all(_largest_m(*case, **keywords) == got for case, got in given.items()):
            return text
    if all(math.isinf(_largest_m(*case)) or abs(got - _largest_m(*case)) <= 1 for case, got in given.items()):
        return "Nearly: round down to a whole number of rows; where no M is bound by compute, it is math.inf."
    return "Set the time of the operations equal to the time of all bytes, and solve for M; math.inf if none is."

"""Chapter 9's exercises: the crossover, quantized weights, a format, scales along K, dequantized weights."""

import math

import jax.numpy as jnp
import numpy as np
from exercises.judge import NotYet, checker, normal, require_close, run_kernel

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
    """`answer(w)` returns the int8 values (K, N) and the scales (N,) of a float32 weight matrix (K, N)."""
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
    """`answer(k, n, peak, bandwidth)` is the largest M whose product with int8 weights is memory-bound."""
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
    """`answer` names for each pair of operands the format and scales of the least error; the cheaper one where the
    errors are within 5 %."""
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


@checker
def check_block_scales(answer) -> str:
    """`answer(a, b, scale_a, scale_b)` is a kernel: a @ b.T of fp8, with scales for every 128 values of K."""
    for steps in (1, 3):
        a, b, scale_a, scale_b = _with_block_scales(steps)
        out = run_kernel(answer, a, b, scale_a, scale_b)
        exact = _block_scaled(a, b, scale_a, scale_b)
        require_close(out, exact, 2e-2, f"K = {128 * steps}: {_likely_scales(out, a, b, scale_a, scale_b)}")
    return "Each step's sums get its scales, and the float32 total loses nothing that the tensor core cuts off."


def _with_block_scales(steps: int):
    a, b = (normal(seed, (rows, 128 * steps), jnp.float8_e4m3fn) for seed, rows in ((1, 128), (2, 64)))
    sizes = np.random.default_rng(3)
    scale_a, scale_b = (jnp.asarray(np.exp2(sizes.uniform(-4, 4, (steps, rows))), jnp.float32) for rows in (128, 64))
    return a, b, scale_a, scale_b


def _block_scaled(a, b, scale_a, scale_b):
    """The exact product in float64."""
    a, b, scale_a, scale_b = (np.asarray(x, np.float64) for x in (a, b, scale_a, scale_b))
    parts = (slice(128 * step, 128 * step + 128) for step in range(len(scale_a)))
    return sum(a[:, ks] * rows[:, None] @ (b[:, ks] * columns[:, None]).T
               for ks, rows, columns in zip(parts, scale_a, scale_b, strict=True))  # fmt: skip


def _likely_scales(out, a, b, scale_a, scale_b) -> str:
    """Names the mistake that explains a result."""
    ones_a, ones_b = jnp.ones_like(scale_a), jnp.ones_like(scale_b)
    first_a, first_b = (jnp.broadcast_to(scale[:1], scale.shape) for scale in (scale_a, scale_b))
    likely = {
        "no scale was applied": (ones_a, ones_b),
        "the scales of a alone were applied": (scale_a, ones_b),
        "the scales of b alone were applied": (ones_a, scale_b),
        "the first step's scales were applied to all steps": (first_a, first_b),
    }
    for said, scales in likely.items():
        wrong = _block_scaled(a, b, *scales)
        if np.linalg.norm(np.asarray(out, np.float64) - wrong) < 0.02 * np.linalg.norm(wrong):
            if len(scale_a) > 1 or "first" not in said:
                return said
    return "compare with the sum over steps of scaled products"


@checker
def check_dequantise(answer) -> str:
    """`answer(w_q, scales)` is a kernel: int8 (K, N) times the scales of the columns, rounded once to bfloat16."""
    for k, n in ((64, 128), (128, 384)):
        w_q = jnp.asarray(np.random.default_rng(k).integers(-127, 128, (k, n)), jnp.int8)
        scales = jnp.asarray(np.exp2(np.random.default_rng(n).uniform(-9, 1, n)), jnp.float32)
        out = run_kernel(answer, w_q, scales)
        if out.dtype != jnp.bfloat16:
            raise NotYet(f"the result is {out.dtype}; it must be bfloat16")
        exact = np.asarray(w_q, np.float64) * np.asarray(scales, np.float64)
        require_close(out, exact, 5e-2, f"int8[{k},{n}]")
        once = np.asarray(jnp.asarray(exact, jnp.float32).astype(jnp.bfloat16), np.float64)
        if (twice := np.asarray(out, np.float64) != once).any():
            raise NotYet(f"{twice.mean():.0%} of the values were rounded twice: multiply in float32, then convert")
    return "One scale a column, one rounding."


def operands(seed: int = 9) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Pairs of operands: random normal; a's rows of sizes from 2^-16 to 2^16; channels from 2^-12 to 2^12 in a, whose
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
    """The crossover, and with other keywords the likely wrong ones."""
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

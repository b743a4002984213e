"""Chapter 9's exercises: quantized weights, a format, a result in fp8, an adder of few bits, scales along K."""

import jax.numpy as jnp
import numpy as np
from exercises.judge import NotYet, checker, drawn, normal, require_close, run_kernel

LARGEST = 127  # The largest symmetric int8; -128 has no partner, and is not used.
PAIRS = ("plain", "rows", "channels")
FORMATS = ("e4m3 per tensor", "e4m3 per row and column", "e5m2 per tensor")  # From the cheapest.
E4M3, E4M3_MAX = jnp.float8_e4m3fn, 448.0
FEW = 0.005  # Where a float32 sum lies next to the middle of two values of e4m3, it may be rounded to the other.
SUMS = (  # Terms, and the bits of the adder.
    (np.array([1.0] + 15 * [2.0**-13]), 14),
    (np.array([1.0] + 15 * [2.0**-14]), 14),
    (np.array([1.5, 2.0**-7 + 2.0**-9, -(2.0**-6) - 2.0**-9, 3 * 2.0**-8]), 8),
    (np.array([-6.0, 0.3, 0.7, -0.9, 5.1]), 5),
    (np.random.default_rng(1).standard_normal(33) * np.exp2(np.random.default_rng(2).uniform(-4, 4, 33)), 10),
    (np.array([1.5] + 15 * [1.75 * 2.0**-7]), 8),
)
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
def check_fp8_result(answer) -> str:
    """`answer(a, b, scale_a, scale_b, scale_o)` is a kernel: a @ b.T of fp8, scaled and cut, in fp8."""
    for steps in (1, 3):
        args = _with_scales(steps)
        out = run_kernel(answer, *args)
        if out.shape != (64, 128) or out.dtype != E4M3:
            raise NotYet(f"the result is {out.dtype} {out.shape}; it must be float8_e4m3fn (64, 128)")
        _require_fp8(np.asarray(out, np.float64), *args)
    return "Scaled in float32, cut at the end of the format, rounded once."


def _with_scales(steps: int):
    """Operands, and a scale of the result that is too small for a few results of either sign."""
    a, b = (normal(seed, (rows, 128 * steps), E4M3) for seed, rows in ((5, 64), (6, 128)))
    sizes = np.random.default_rng(7)
    scale_a, scale_b = (jnp.asarray(np.exp2(sizes.uniform(-2, 2, rows)), jnp.float32) for rows in (64, 128))
    usual = np.quantile(np.abs(_products(a, b, scale_a, scale_b)), 0.97)
    return a, b, scale_a, scale_b, jnp.asarray([usual / E4M3_MAX], jnp.float32)


def _products(a, b, scale_a=1, scale_b=1):
    """The exact products in float64."""
    a, b, scale_a, scale_b = (np.asarray(x, np.float64) for x in (a, b, scale_a, scale_b))
    return a @ b.T * scale_a[..., None] * scale_b


def _require_fp8(out, a, b, scale_a, scale_b, scale_o) -> None:
    """Raises NotYet with the mistake that explains the result, if it is not the right one."""
    scale = float(scale_o[0])
    exact = _products(a, b, scale_a, scale_b) / scale
    if np.isnan(out).all():
        raise NotYet("every value is NaN: was the result written?")
    if (unknown := np.isnan(out)).any():
        sign = "too large" if (exact[unknown] > 0).any() else "too small: cut them at -448, too"
        raise NotYet(
            f"{unknown.sum()} values are NaN, and e4m3 has no infinity: before the conversion they were {sign}"
        )
    if _differ(out, exact) < FEW:
        return
    likely = {
        "no scale was applied": _products(a, b),
        "scale_b was not applied": _products(a, b, scale_a) / scale,
        "scale_a was not applied": _products(a, b, 1, scale_b) / scale,
        "the result was not divided by scale_o": exact * scale,
        "divide by scale_o: a stored value times the scale is the result": exact * scale * scale,
    }
    for said, values in likely.items():
        if _differ(out, values) < FEW:
            raise NotYet(said)
    if np.abs(out).max() < E4M3_MAX:
        raise NotYet(f"the largest result is {np.abs(out).max():g}; some must be cut at {E4M3_MAX:g}, where e4m3 ends")
    wrong = np.argwhere(out != _fp8(exact))[0]
    raise NotYet(f"element {tuple(map(int, wrong))} is {out[tuple(wrong)]:g}; it must be {_fp8(exact)[tuple(wrong)]:g}")


def _fp8(values):
    return np.clip(values, -E4M3_MAX, E4M3_MAX).astype(E4M3).astype(np.float64)


def _differ(out, values) -> float:
    """The share of results that are not `values`, cut and rounded. Float32 sums may round a few otherwise."""
    return float((out != _fp8(values)).mean())


@checker
def check_cut_sum(answer) -> str:
    """`answer(terms, bits)` is the sum of an adder that cuts off what does not fit into `bits` beside the largest."""
    given, sums = [], (*SUMS, *drawn(lambda rng: (rng.standard_normal(9), int(rng.integers(4, 20)))))
    for terms, bits in sums:
        got = answer(terms.copy(), bits)
        if got is None:
            raise NotYet("cut_sum returns None: write its body.")
        if np.shape(got) != () or not np.issubdtype(np.asarray(got).dtype, np.number):
            raise NotYet(f"cut_sum returns {got!r}; it must be a number.")
        given.append(float(got))
    for (terms, bits), got in zip(sums, given, strict=True):
        if got != (want := _cut_sum(terms, bits)):
            raise NotYet(
                f"the sum of {_shown(terms)} with {bits} bits is {want:.10g}; yours is {got:.10g}. {_cut(sums, given)}"
            )
    lost = {name: _lost(answer, terms) for name, terms in _many_terms().items()}
    return (
        f"Your adder, with 14 bits and 32 products at a time, loses {lost['one sign']:.1%} of a sum of 4,096 positive "
        f"products. With both signs it misses by {lost['both signs']:.1%} of the usual size of such a sum."
    )


def _shown(terms) -> str:
    text = ", ".join(f"{term:.6g}" for term in terms[:4])
    return f"[{text}{', ...' if len(terms) > 4 else ''}]"


def _cut_sum(terms, bits, *, cut=np.trunc, shift=0, size=lambda terms: np.abs(terms).max(), first=False):
    """The sum, and with other keywords the likely wrong ones."""
    top = size(terms)
    unit = 2.0 ** (np.frexp(top)[1] - bits + shift)
    return float(cut(terms.sum() / unit) * unit if first else (cut(terms / unit) * unit).sum())


def _cut(sums, given: list) -> str:
    """Names the likely mistake that explains all answers."""
    likely = (
        (dict(cut=lambda x: x), "Nothing was cut off."),
        (dict(cut=np.floor), "Cut towards zero: negative terms lose their last bits as positive ones do."),
        (dict(cut=np.rint), "The bits are cut off, not rounded."),
        (dict(first=True), "Each term is cut before the addition, not the sum after it."),
        (dict(shift=1), "One bit fewer was kept: beside 1, 14 bits reach down to 2^-13."),
        (dict(shift=-1), "One bit more was kept: beside 1, 14 bits reach down to 2^-13."),
        (dict(size=np.max), "The largest term is the one of the largest absolute value."),
    )
    for keywords, text in likely:
        if all(_cut_sum(*case, **keywords) == got for case, got in zip(sums, given, strict=True)):
            return text
    return "The exponent of the largest term gives the last bit that fits: its unit. Cut every term to units, then add."


def _many_terms() -> dict[str, np.ndarray]:
    """4,096 products of e4m3 values."""
    left, right = (np.asarray(normal(seed, 4096, E4M3), np.float64) for seed in (8, 9))
    return {"one sign": np.abs(left * right), "both signs": left * right}


def _lost(add, terms) -> float:
    total = 0.0
    for first in range(0, len(terms), 32):
        total = float(add(np.append(terms[first : first + 32], total), 14))
    exact = terms.sum()
    return abs(total - exact) / (exact if (terms >= 0).all() else np.linalg.norm(terms))


@checker
def check_block_scales(answer) -> str:
    """`answer(a, b, scale_a, scale_b)` is a kernel: a @ b.T of fp8, with scales for every 128 values of K."""
    for steps in (1, 3):
        a, b, scale_a, scale_b = _with_block_scales(steps)
        out = run_kernel(answer, a, b, scale_a, scale_b)
        exact = _block_scaled(a, b, scale_a, scale_b)
        require_close(out, exact, 4e-3, f"K = {128 * steps}: {_likely_scales(out, a, b, scale_a, scale_b)}")
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

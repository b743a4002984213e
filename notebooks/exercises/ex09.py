"""Chapter 9's exercises: quantized weights, a format, a result in fp8, an adder of few bits, scales along K."""

import jax.numpy as jnp
import numpy as np
from exercises.judge import NotYet, checker, normal, require_answers, require_close, run_kernel, wide

LARGEST = 127  # The largest symmetric int8; -128 has no partner, and is not used.
FORMATS = "e4m3 per tensor", "e4m3 per row and column", "e5m2 per tensor"
BEST = dict(zip(("plain", "rows", "channels"), FORMATS, strict=True))
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


@checker
def check_quantise(answer) -> str:
    """`answer(w)` returns the int8 values (K, N) and the scales (N,) of a float32 weight matrix (K, N)."""
    for name, w in _weights().items():
        given = answer(jnp.asarray(w))
        if not isinstance(given, tuple) or len(given) != 2 or given[0] is None:
            raise NotYet("quantise_columns must return a pair: the int8 values and the scales. Write its body.")
        _require_quantised(name, w, *map(np.asarray, given))
    return "Every value is within half a step of its column, zero columns and extremes included."


@checker
def check_formats(answer) -> str:
    """`answer` names for each pair of operands the format and scales of the least error; the cheaper one where the
    errors are within 5 %."""
    if not isinstance(answer, dict) or set(answer) != set(BEST):
        raise NotYet(f"answer with a dict that has a format for each of {', '.join(BEST)}.")
    if None in answer.values():
        raise NotYet(f"name a format for each pair; there are: {'; '.join(FORMATS)}.")
    for name, best in BEST.items():
        if answer[name] not in FORMATS:
            raise NotYet(f"{answer[name]!r} is none of: {'; '.join(FORMATS)}.")
        if answer[name] != best:
            raise NotYet(
                f'"{name}": another one than {answer[name]} has less error, or no more and is cheaper. What is large '
                "beside what, and which scale or exponent sees it?"
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
    a, b, scale_a, scale_b = wide(a, b, scale_a, scale_b)
    return a @ b.T * scale_a[..., None] * scale_b


def _require_fp8(out, a, b, scale_a, scale_b, scale_o) -> None:
    """Raises NotYet with the mistake that explains the result, if it is not the right one."""
    scale = float(scale_o[0])
    exact = _products(a, b, scale_a, scale_b) / scale
    if (unknown := np.isnan(out)).any() and not unknown.all():
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
        f"some must be cut at {E4M3_MAX:g}, where e4m3 ends": np.clip(exact, -240, 240),
    }
    for said, values in likely.items():
        if _differ(out, values) < FEW:
            raise NotYet(said)
    require_close(out, _fp8(exact), 0, "the result")


def _fp8(values):
    return np.clip(values, -E4M3_MAX, E4M3_MAX).astype(E4M3).astype(np.float64)


def _differ(out, values) -> float:
    """The share of results that are not `values`, cut and rounded. Float32 sums may round a few otherwise."""
    return float((out != _fp8(values)).mean())


@checker
def check_cut_sum(answer) -> str:
    """`answer(terms, bits)` is the sum of an adder that cuts off what does not fit into `bits` beside the largest."""
    likely = (
        (dict(cut=lambda x: x), "Nothing was cut off."),
        (dict(cut=np.floor), "Cut towards zero: negative terms lose their last bits as positive ones do."),
        (dict(cut=np.rint), "The bits are cut off, not rounded."),
        (dict(first=True), "Each term is cut before the addition, not the sum after it."),
        (dict(shift=1), "One bit fewer was kept: beside 1, 14 bits reach down to 2^-13."),
        (dict(shift=-1), "One bit more was kept: beside 1, 14 bits reach down to 2^-13."),
        (dict(size=np.max), "The largest term is the one of the largest absolute value."),
    )
    said = "The exponent of the largest term gives the last bit that fits: its unit. Cut every term to units, then add."
    draw = lambda rng: (rng.standard_normal(9), int(rng.integers(4, 20)))
    require_answers(answer, SUMS, _cut_sum, likely, said, draw=draw)
    lost = {name: _lost(answer, terms) for name, terms in _many_terms().items()}
    return (
        f"Your adder, with 14 bits and 32 products at a time, loses {lost['one sign']:.1%} of a sum of 4,096 positive "
        f"products. With both signs it misses by {lost['both signs']:.1%} of the usual size of such a sum."
    )


def _cut_sum(terms, bits, *, cut=np.trunc, shift=0, size=lambda terms: np.abs(terms).max(), first=False):
    """The sum, and with other keywords the likely wrong ones."""
    top = size(terms)
    unit = 2.0 ** (np.frexp(top)[1] - bits + shift)
    return float(cut(terms.sum() / unit) * unit if first else (cut(terms / unit) * unit).sum())


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
        ones_a, ones_b = jnp.ones_like(scale_a), jnp.ones_like(scale_b)
        first_a, first_b = (jnp.broadcast_to(scale[:1], scale.shape) for scale in (scale_a, scale_b))
        likely = (
            (_block_scaled(a, b, ones_a, ones_b), "no scale was applied"),
            (_block_scaled(a, b, scale_a, ones_b), "the scales of a alone were applied"),
            (_block_scaled(a, b, ones_a, scale_b), "the scales of b alone were applied"),
            (_block_scaled(a, b, first_a, first_b), "the first step's scales were applied to all steps"),
        )
        what = f"K = {128 * steps}: the sum over steps of scaled products, in float32"
        require_close(out, _block_scaled(a, b, scale_a, scale_b), 4e-3, what, likely)
    return "Each step's sums get its scales, and the float32 total loses nothing that the tensor core cuts off."


def _with_block_scales(steps: int):
    a, b = (normal(seed, (rows, 128 * steps), jnp.float8_e4m3fn) for seed, rows in ((1, 128), (2, 64)))
    sizes = np.random.default_rng(3)
    scale_a, scale_b = (jnp.asarray(np.exp2(sizes.uniform(-4, 4, (steps, rows))), jnp.float32) for rows in (128, 64))
    return a, b, scale_a, scale_b


def _block_scaled(a, b, scale_a, scale_b):
    """The exact product in float64."""
    a, b, scale_a, scale_b = wide(a, b, scale_a, scale_b)
    parts = (slice(128 * step, 128 * step + 128) for step in range(len(scale_a)))
    return sum(a[:, ks] * rows[:, None] @ (b[:, ks] * columns[:, None]).T
               for ks, rows, columns in zip(parts, scale_a, scale_b, strict=True))  # fmt: skip


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
    if not (np.isfinite(scales) & (scales > 0)).all():
        raise NotYet(f"{name}: the scales are {scales.min()} to {scales.max()}; all must be positive, also of zeros.")
    if (w_q == -128).any():
        raise NotYet(f"{name}: there is a -128: it has no partner 128. The largest value of a column becomes ±127.")
    values, step = wide(w_q, scales)
    off = np.abs(w - values * step) > (0.5 + 1e-4) * step  # Division by the scale is rounded too.
    if off.any():
        i, j = (int(x) for x in np.argwhere(off)[0])
        raise NotYet(
            f"{name}: weight [{i}, {j}] is {w[i, j]:.4g} and comes back as {values[i, j] * step[j]:.4g}, more than "
            f"half of its column's step of {step[j]:.3g} away. (Rounded to the nearest? Is the sign in its place?)"
        )
    largest = wide(np.abs(w).max(axis=0))
    enough = np.where(largest > 0, largest / LARGEST, np.inf)
    if (step > enough * (1 + 1e-4)).any():
        at = int(np.argmax(step / enough))
        raise NotYet(f"{name}: in column {at} a step of {enough[at]:.3g} is enough; yours is {step[at]:.3g}.")

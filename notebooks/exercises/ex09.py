"""Chapter 9's exercises: quantized rows, a result in fp8, an adder of few bits, scales along K."""

import jax.numpy as jnp
import numpy as np
from exercises.judge import NotYet, checker, normal, require_answers, require_close, run_kernel, wide

E4M3, E4M3_MAX = jnp.float8_e4m3fn, 448.0
FEW = 0.001  # Where a float32 sum lies next to the middle of two values of e4m3, it may be rounded to the other.
SUMS = (  # Terms, and the bits of the adder.
    (np.array([1.0] + 15 * [2.0**-13]), 14),
    (np.array([1.0] + 15 * [2.0**-14]), 14),
    (np.array([1.5, 2.0**-7 + 2.0**-9, -(2.0**-6) - 2.0**-9, 3 * 2.0**-8]), 8),
    (np.array([-6.0, 0.3, 0.7, -0.9, 5.1]), 5),
    (np.random.default_rng(1).standard_normal(33) * np.exp2(np.random.default_rng(2).uniform(-4, 4, 33)), 10),
    (np.array([1.5] + 15 * [1.75 * 2.0**-7]), 8),
    (np.array([0.7, 0.3, 0.11, 2.0**-9]), 6),  # All below 1.
)


@checker
def check_quantise(answer) -> str:
    """`answer(x)` returns the e4m3 values (M, K) and the float32 scales (M,) of a float32 matrix (M, K)."""
    for name, x in _matrices().items():
        given = answer(jnp.asarray(x))
        if not isinstance(given, tuple) or len(given) != 2 or given[0] is None:
            raise NotYet("quantise_rows must return a pair: the e4m3 values and the scales. Write its body.")
        _require_quantised(name, x, *map(np.asarray, given))
    return "Every value is the nearest one of its row's scale, whatever the row's size; rows of zeros included."


@checker
def check_fp8_result(answer) -> str:
    """`answer(a, b, scale_a, scale_b, scale_o)` is a kernel: a @ b.T of fp8, scaled and clipped, in fp8."""
    for steps in (1, 4, 3):
        args = _with_scales(steps)
        out = run_kernel(answer, *args)
        if out.shape != (64, 128) or out.dtype != E4M3:
            raise NotYet(f"the result is {out.dtype} {out.shape}; it must be float8_e4m3fn (64, 128)")
        _require_fp8(np.asarray(out, np.float64), *args)
    return "Scaled in float32, clipped to the format's range, rounded once."


def _with_scales(steps: int):
    """Operands, and a scale of the result that is too small for a few results of either sign."""
    a, b = (normal(seed, (rows, 128 * steps), E4M3) for seed, rows in ((5, 64), (6, 128)))
    sizes = np.random.default_rng(7 + steps)
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
        sign = "too large" if (exact[unknown] > 0).any() else "too small: clip them at -448, too"
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
        f"some must be clipped at {E4M3_MAX:g}, where e4m3 ends": np.clip(exact, -240, 240),
    }
    for said, values in likely.items():
        if _differ(out, values) < FEW:
            raise NotYet(said)
    require_close(out, _fp8(exact), 0, "the result")


def _fp8(values):
    return np.clip(values, -E4M3_MAX, E4M3_MAX).astype(E4M3).astype(np.float64)


def _differ(out, values) -> float:
    """The share of results that are not `values`, clipped and rounded. Float32 sums may round a few otherwise."""
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
    require_answers(answer, SUMS, _cut_sum, likely, said, draw=_terms)
    lost = {name: _lost(answer, terms) for name, terms in _many_terms().items()}
    return (
        f"Your adder, with 14 bits and 32 products at a time, loses {lost['one sign']:.1%} of a sum of 4,096 positive "
        f"products. With both signs it misses by {lost['both signs']:.1%} of the usual size of such a sum."
    )


def _terms(rng):
    """Terms and bits. One term is positive: without it, an answer without `abs` would be NaN, and be told no cause."""
    terms = rng.standard_normal(9) * np.exp2(rng.integers(-9, 9))
    return np.append(np.abs(terms[0]), terms[1:]), int(rng.integers(4, 20))


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
    for steps in (1, 4, 3):
        a, b, scale_a, scale_b = _with_block_scales(steps)
        out = run_kernel(answer, a, b, scale_a, scale_b)
        ones_a, ones_b = jnp.ones_like(scale_a), jnp.ones_like(scale_b)
        first_a, first_b = (jnp.broadcast_to(scale[:1], scale.shape) for scale in (scale_a, scale_b))
        likely = (
            (_scaled_again(a, b, scale_a, scale_b), "the total was scaled in each step: scale the step's sums alone"),
            (_block_scaled(a, b, ones_a, ones_b), "no scale was applied"),
            (_block_scaled(a, b, scale_a, ones_b), "the scales of a alone were applied"),
            (_block_scaled(a, b, ones_a, scale_b), "the scales of b alone were applied"),
            (_block_scaled(a, b, first_a, first_b), "the first step's scales were applied to all steps"),
        )
        what = f"K = {128 * steps}: the sum over steps of scaled products, in float32"
        require_close(out, _block_scaled(a, b, scale_a, scale_b), 4e-3, what, likely)
    return "Each step's sums get its scales, and the float32 total loses nothing that the tensor core cuts off."


def _with_block_scales(steps: int):
    a, b = (normal(seed, (rows, 128 * steps), E4M3) for seed, rows in ((1, 128), (2, 64)))
    sizes = np.random.default_rng(3 + steps)
    scale_a, scale_b = (jnp.asarray(np.exp2(sizes.uniform(-4, 4, (steps, rows))), jnp.float32) for rows in (128, 64))
    return a, b, scale_a, scale_b


def _scaled_again(a, b, scale_a, scale_b):
    """The likely mistake: each step scales the sums of all steps before it, too."""
    total = 0.0
    for step in range(len(scale_a)):
        of_step = [wide(scale[step : step + 1]) for scale in (scale_a, scale_b)]
        ks = slice(128 * step, 128 * step + 128)
        total = (total + wide(a)[:, ks] @ wide(b)[:, ks].T) * of_step[0].T * of_step[1]
    return total


def _block_scaled(a, b, scale_a, scale_b):
    """The exact product in float64."""
    a, b, scale_a, scale_b = wide(a, b, scale_a, scale_b)
    parts = (slice(128 * step, 128 * step + 128) for step in range(len(scale_a)))
    return sum(a[:, ks] * rows[:, None] @ (b[:, ks] * columns[:, None]).T
               for ks, rows, columns in zip(parts, scale_a, scale_b, strict=True))  # fmt: skip


def _matrices() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(9)
    plain = rng.standard_normal((40, 96)).astype(np.float32)
    uneven = rng.standard_normal((24, 72)).astype(np.float32) * np.exp2(rng.integers(-30, 30, (24, 1)))
    with_zeros = plain.copy()
    with_zeros[[3, 17]] = 0
    negative = rng.uniform(-1, 1, (40, 96)).astype(np.float32)
    negative[:, 5] = -3  # The largest of each row is negative.
    return {
        "random normal": plain,
        "rows of different size": uneven.astype(np.float32),
        "two rows of zeros": with_zeros,
        "rows whose largest value is negative": negative,
    }


def _require_quantised(name: str, x, values, scales) -> None:
    """Raises NotYet if `values` and `scales` are not the quantization of `x` by rows."""
    if values.dtype != E4M3 or values.shape != x.shape:
        raise NotYet(f"the values are {values.dtype} {values.shape}; they must be float8_e4m3fn {x.shape}.")
    if scales.dtype != np.float32 or scales.shape != x.shape[:1]:
        raise NotYet(f"the scales are {scales.dtype} {scales.shape}; they must be float32 {x.shape[:1]}: one per row.")
    if not (np.isfinite(scales) & (scales > 0)).all():
        raise NotYet(f"{name}: the scales are {scales.min()} to {scales.max()}; all must be positive, also of zeros.")
    values, step = wide(values), wide(scales)[:, None]
    largest = wide(np.abs(x).max(axis=1, keepdims=True))
    if (wrong := (largest > 0) & (np.abs(largest - E4M3_MAX * step) > 1e-4 * largest)).any():
        i = int(np.argmax(wrong))
        raise NotYet(
            f"{name}: the largest of row {i} is {largest[i, 0]:.4g}, and becomes {largest[i, 0] / step[i, 0]:.4g}; it "
            "must become 448 or -448, to use the whole range."
        )
    if np.isnan(values).any():
        i, j = (int(i) for i in np.argwhere(np.isnan(values))[0])
        raise NotYet(f"{name}: value [{i}, {j}] is NaN: what was converted lay beyond the end of e4m3.")
    _, exponent = np.frexp(values)
    spacing = np.exp2(np.maximum(exponent - 4.0, -9.0))  # Three bits follow the first one; 2^-9 is the least value.
    off = np.abs(x - values * step) > (0.5 + 1e-4) * spacing * step  # Division by the scale is rounded too.
    if off.any():
        i, j = (int(i) for i in np.argwhere(off)[0])
        raise NotYet(
            f"{name}: value [{i}, {j}] is {x[i, j]:.4g} and comes back as {values[i, j] * step[i, 0]:.4g}: e4m3 has a "
            "nearer value. (Is it rounded once, by the conversion? Is the sign in its place?)"
        )

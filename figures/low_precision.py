"""Figures of chapter 9: low precision."""

import jax.numpy as jnp
import numpy as np

from figures._chart import chart, label, tracks
from figures._draw import BLUE, GREEN, ORANGE, PALE, RED, SOFT, arrow, box, drawing, words
from lab import plot


def values(dtype) -> np.ndarray:
    """Every positive finite value of an 8- or 16-bit format, in order."""
    bits = jnp.dtype(dtype).itemsize * 8
    with np.errstate(invalid="ignore"):  # Some are NaN.
        every = np.arange(2**bits, dtype=f"uint{bits}").view(dtype).astype(np.float64)
    return np.unique(every[np.isfinite(every) & (every > 0)])


@chart(height=4.6, nrows=2)
def precision_formats(axes):
    """The values of the formats on number lines: scaled to the same largest value, and all of them on a log axis."""
    formats = (
        ("int8", jnp.int8, GREEN),
        ("float8_e4m3fn", jnp.float8_e4m3fn, BLUE),
        ("float8_e5m2", jnp.float8_e5m2, RED),
        ("bfloat16", jnp.bfloat16, plot.PEER),
    )
    linear, log = axes
    names = [name for name, _, _ in formats]
    for row, (_, dtype, colour) in enumerate(formats):
        line = values(dtype)
        for ax, points in ((linear, line / line[-1]), (log, line)):
            if len(points) < 1000:
                ax.plot(points, np.full(len(points), row), "|", color=colour, markersize=15, markeredgewidth=0.9)
            else:  # Too many to tell apart.
                start = 0.0 if ax is linear else points[0]
                ax.plot((start, points[-1]), (row, row), color=colour, linewidth=11, solid_capstyle="butt")
    for ax in axes:
        tracks(ax, names)
        ax.set_ylim(len(names) - 0.25, -0.6)
        ax.tick_params(axis="y", length=0)
    linear.set(xlim=(-0.01, 1.01), title="Positive values, the largest of each format scaled to 1")
    log.set(xscale="log", xlim=(1e-8, 1e6), title="The same, unscaled, on a logarithmic axis")
    text = "bfloat16 goes on to 1e-40 and 3e38, with 128 values from one power of 2 to the next"
    label(log, 2e-08, 3.52, text, 7.5, ha="left")


@drawing(7.5, 3.1)
def precision_scales(ax):
    """Where the scales of a product stand: outside of the sum over K if they belong to rows and columns."""
    _product(ax, 0.25, "one scale per operand", per_row=False)
    _product(ax, 2.85, "one per row of a, one per column of b", per_row=True)
    _along_k(ax, 5.6)


def _product(ax, x, title, per_row: bool):
    words(ax, x + 1.05, 2.9, title, weight="bold")
    colours = (BLUE, ORANGE, GREEN, RED)
    for i in range(4):
        row, column = (colours[i], colours[3 - i]) if per_row else (BLUE, ORANGE)
        y, left = 0.5 + 0.25 * i, x + 1.25 + 0.25 * i
        box(ax, x + 0.35, y, 0.75, 0.22, colour=row, fill=0.3)
        box(ax, left, 1.6, 0.22, 0.75, colour=column, fill=0.3)
        if per_row:
            box(ax, x, y, 0.22, 0.22, colour=row, fill=0.85)
            box(ax, left, 2.45, 0.22, 0.22, colour=column, fill=0.85)
        for j in range(4):
            box(ax, left, 0.5 + 0.25 * j, 0.22, 0.22, colour=SOFT, fill=0.15)
    if not per_row:
        box(ax, x, 0.875, 0.22, 0.22, colour=BLUE, fill=0.85)
        box(ax, x + 1.625, 2.45, 0.22, 0.22, colour=ORANGE, fill=0.85)
    words(ax, x + 0.72, 1.62, "a", 10)
    words(ax, x + 1.1, 2.0, "b", 10)
    text = r"$s_i \, t_j \, \sum_k a_{ik} b_{kj}$" if per_row else r"$s \, t \, \sum_k a_{ik} b_{kj}$"
    words(ax, x + 1.05, 0.22, text, 10)


def _along_k(ax, x):
    words(ax, x + 0.85, 2.9, "one per piece of K", weight="bold")
    for k in range(3):
        colour = (BLUE, ORANGE, GREEN)[k]
        box(ax, x + 0.6 * k, 1.05, 0.55, 0.8, colour=colour, fill=0.3)
        box(ax, x + 0.6 * k + 0.16, 1.95, 0.22, 0.22, colour=colour, fill=0.85)
    words(ax, x + 0.87, 0.72, "the sum must stop at each piece", 8, colour=SOFT)
    words(ax, x + 0.87, 0.22, r"$\sum_p \, s_p \, \sum_{k \in p} a_{ik} b_{kj}$", 10)
    ax.axvline(x - 0.22, 0.05, 0.95, color=PALE)


@drawing(7.5, 2.9)
def precision_step(ax):
    """A step of K is 128 bytes of each row: 64 values of bfloat16, 128 of fp8, and four instructions either way."""
    for y, name, per, instruction, count, colour in (
        (1.65, "bfloat16", 16, "HGMMA 64xNx16", "64 values", BLUE),
        (0.35, "fp8", 32, "QGMMA 64xNx32", "128 values", ORANGE),
    ):
        words(ax, 0.95, y + 0.33, name, 10, ha="right", weight="bold")
        for i in range(4):
            box(ax, 1.2 + 1.25 * i, y, 1.2, 0.65, colour=colour, fill=0.08)
            cells = per // 2
            for j in range(cells):
                width = 1.1 / cells
                box(ax, 1.25 + 1.25 * i + j * width, y + 0.12, 0.8 * width, 0.3, colour=colour, fill=0.55, linewidth=0)
            words(ax, 1.8 + 1.25 * i, y + 0.52, f"{per} values", 7.5)
        words(ax, 6.22, y + 0.42, instruction, 8.5, ha="left")
        words(ax, 6.22, y + 0.18, f"4 of them, {count}", 7.5, ha="left", colour=SOFT)
    arrow(ax, (1.2, 2.5), (6.15, 2.5), style="<|-|>", colour=SOFT)
    words(ax, 3.68, 2.68, "128 bytes of a row: one step, one width of the swizzle", 8.5)
    words(ax, 1.2, 0.12, "(a dark bar stands for two values along K)", 7, ha="left", colour=SOFT)


@drawing(7.5, 2.6)
def precision_adder(ax):
    """An adder of 14 bits: all terms are shifted to the exponent of the largest, and what reaches beyond it is cut."""
    left, pitch, kept = 1.75, 0.29, 14
    terms = (("1.25", 0, "101"), ("2⁻⁶ x 1.125", 6, "1001"), ("2⁻¹¹ x 1.625", 11, "1101"), ("2⁻¹⁴ x 1.5", 14, "11"))
    for place in range(kept + 4):
        x = left + pitch * place + pitch / 2
        words(ax, x, 2.2, f"{-place}" if place else "0", 7.5, colour=SOFT)
    words(ax, left - 0.1, 2.2, "power of 2", 7.5, ha="right", colour=SOFT)
    for row, (name, first, bits) in enumerate(terms):
        y = 1.75 - 0.38 * row
        words(ax, left - 0.1, y + 0.14, name, 9, ha="right")
        for place in range(kept + 4):
            bit = bits[place - first] if 0 <= place - first < len(bits) else ""
            colour = SOFT if place >= kept else BLUE
            fill = 0.5 if bit == "1" else 0.04
            box(ax, left + pitch * place, y, pitch - 0.03, 0.28, colour=colour, fill=fill)
            if bit:
                words(ax, left + pitch * (place + 0.45), y + 0.14, bit, 8)
    end = left + pitch * kept - 0.015
    ax.plot((end, end), (0.45, 2.35), color=RED, linewidth=1.5)
    arrow(ax, (left, 0.35), (end, 0.35), style="<|-|>", colour=BLUE)
    words(ax, (left + end) / 2, 0.17, "14 bits: added exactly", 8.5, colour=BLUE)
    words(ax, end + 2 * pitch, 0.17, "cut off", 8.5, colour=RED)

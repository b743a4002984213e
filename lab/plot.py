"""The one look of this project's figures: a light card, readable on a dark page too, safe for colour-blind readers."""

from __future__ import annotations

import contextlib
import math
import textwrap
from typing import TYPE_CHECKING

import numpy as np
from cycler import cycler

if TYPE_CHECKING:  # matplotlib takes most of a second to import: only who draws waits for it.
    from matplotlib.figure import Figure

# Okabe and Ito's palette, without its yellow, which is too faint on a light ground.
OURS, PEER, BOUND = "#0072B2", "#999999", "#D55E00"
COLOURS = (OURS, "#E69F00", "#009E73", "#CC79A7", "#56B4E9", BOUND, "#000000")
CARD, INK, FAINT = "#FCFCFA", "#222222", "#D9D9D6"

STYLE = {
    "axes.axisbelow": True,
    "axes.edgecolor": INK,
    "axes.facecolor": CARD,
    "axes.grid": True,
    "axes.labelcolor": INK,
    "axes.prop_cycle": cycler(color=COLOURS),
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "figure.dpi": 110,
    "figure.facecolor": CARD,
    "figure.figsize": (7.5, 3.6),
    "figure.constrained_layout.use": True,
    "font.family": "DejaVu Sans",  # Comes with matplotlib: every machine draws the same.
    "font.size": 9,
    "grid.color": FAINT,
    "legend.frameon": False,
    "savefig.facecolor": CARD,
    "svg.fonttype": "path",
    "svg.hashsalt": "cookbook",  # Same figure, same file.
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}


@contextlib.contextmanager
def figure(width: float = 7.5, height: float = 3.6, **subplots):
    """Yields (figure, axes) in the project's style. The figure shows in a notebook as the last value of its cell.

    `with plot.figure() as (fig, ax): ax.plot(...)`, then `fig`.
    """
    import matplotlib.pyplot as plt

    with plt.rc_context(STYLE):
        fig, axes = plt.subplots(figsize=(width, height), **subplots)
        plt.close(fig)  # Or a notebook would show it twice.
        yield fig, axes


def save(fig: Figure, path) -> None:
    """Writes an SVG that is the same file whenever the figure is the same."""
    import matplotlib.pyplot as plt

    with plt.rc_context(STYLE):
        fig.savefig(path, format="svg", metadata={"Date": None})


def ladder(
    rows, peers=(), *, unit: str = "TFLOP/s", title: str = "", bound: float | None = None, note: str = ""
) -> Figure:
    """The rungs of a kernel, one bar each in the order of climbing, and what a user would pick instead in grey.

    Args:
      rows, peers: (label, value in `unit`) pairs; a NaN value is drawn as "not measured".
      unit: of the values; more is better.
      bound: the roofline bound in `unit`, a vertical line.
      note: small print below, such as where the figures were recorded.
    """
    bars = [(label, value, OURS) for label, value in rows] + [(label, value, PEER) for label, value in peers]
    reach = max([value for _, value, _ in bars if not math.isnan(value)] + [bound or 0.0], default=1.0) or 1.0
    with figure(height=0.9 + 0.34 * len(bars)) as (fig, ax):
        for i, (_, value, colour) in enumerate(bars):
            ax.barh(i, 0 if math.isnan(value) else value, color=colour, height=0.68)
            text = "not measured" if math.isnan(value) else _figure_text(value)
            if bound and not math.isnan(value):
                share = value / bound
                text += f"  ({share:.0%})" if share >= 0.01 else f"  ({share:.1%})"
            ground = dict(facecolor=CARD, edgecolor="none", pad=1)  # Where the text lies on the bound's line.
            ax.text((0 if math.isnan(value) else value) + 0.01 * reach, i, text, va="center", bbox=ground)
        if bound:
            ax.axvline(bound, color=BOUND, linewidth=1.5)
            ax.annotate(f"bound {_figure_text(bound)}", (bound, -0.6), (-4, 0), textcoords="offset points", color=BOUND,
                        ha="right", va="bottom")  # fmt: skip
        ax.set_yticks(range(len(bars)), [label for label, _, _ in bars])
        ax.set_ylim(len(bars) - 0.5, -0.9 if bound else -0.5)
        ax.set_xlim(0, 1.16 * reach)
        ax.grid(axis="y", visible=False)
        ax.tick_params(axis="y", length=0)
        small_print = [line for part in note.splitlines() for line in textwrap.wrap(part, 74)]
        ax.set_xlabel("\n".join([unit, *small_print]), loc="left")
        ax.set_title(title)
    return fig


def error_map(out, expected, *, tile: tuple[int, int], limit: float = 0.05, title: str = "") -> Figure:
    """Where `out` differs from `expected`: on the left the worst error of each tile, on the right the elements of one.

    Errors are shares of the root mean square of `expected`; NaN in `out` alone is black. The right panel has the first
    tile that is wrong, in the order of rows: a pattern inside of it tells more than its place.

    Args:
      out, expected: matrices of one shape.
      tile: rows and columns that one block computes, or what else is taken as a unit.
      limit: an element is wrong if its error is larger.
      title: of the figure, before the count of wrong tiles.

    Raises:
      ValueError: the shapes differ or are no matrices', or `tile` is not two positive numbers.
    """
    out, expected = np.asarray(out, np.float64), np.asarray(expected, np.float64)
    if out.ndim != 2 or out.shape != expected.shape:
        raise ValueError(f"error_map: {out.shape=}, {expected.shape=}; must be two matrices of one shape: reshape them")
    if len(tile) != 2 or min(tile) < 1:
        raise ValueError(f"error_map: {tile=}; must be the rows and columns of a tile, both at least 1")
    with np.errstate(invalid="ignore"):  # Infinity less infinity.
        error = np.abs(out - expected) / (np.sqrt(np.nanmean(expected**2)) or 1.0)
    error[np.isnan(out) & np.isnan(expected) | (out == expected)] = 0.0  # Infinities too are equal to themselves.
    starts = [range(0, size, step) for size, step in zip(out.shape, tile, strict=True)]
    tiles = np.array([[error[i : i + tile[0], j : j + tile[1]].max() for j in starts[1]] for i in starts[0]])
    wrong = ~(tiles <= limit)  # True of NaN too: `max` keeps it.
    i, j = (int(at) for at in np.argwhere(wrong)[0]) if wrong.any() else (0, 0)
    rows, columns = (slice(at * step, (at + 1) * step) for at, step in ((i, tile[0]), (j, tile[1])))
    count = f"{wrong.sum()} of {wrong.size} tiles {'is' if wrong.sum() == 1 else 'are'} wrong"
    with figure(height=3.4, ncols=2) as (fig, (left, right)):
        fig.suptitle(f"{title}: {count}" if title else count, fontsize=11, fontweight="bold", x=0.01, ha="left")
        top = max(np.nanmax(error, initial=0.0), limit)
        error[error <= limit] = 0.0  # Rounding has a colour of its own, none.
        error_image(left, np.where(wrong, tiles, 0.0), top, f"worst error of each tile of {tile[0]} x {tile[1]}")
        shown = error_image(right, error[rows, columns], top, f"tile ({i}, {j}): its elements")
        if tiles.size <= 64:
            left.hlines(np.arange(len(tiles) - 1) + 0.5, -0.5, tiles.shape[1] - 0.5, color=FAINT, linewidth=0.6)
            left.vlines(np.arange(tiles.shape[1] - 1) + 0.5, -0.5, len(tiles) - 0.5, color=FAINT, linewidth=0.6)
            for (row, column), value in np.ndenumerate(tiles):
                if wrong[row, column]:
                    text, colour = (f"{value:.2g}", INK) if value < top / 2 else (f"{value:.2g}", CARD)
                    left.text(column, row, text, ha="center", va="center", fontsize=8, color=colour)
        fig.colorbar(shown, ax=right, label="share of the RMS; black: NaN", shrink=0.9)
    return fig


def error_image(ax, values, top: float, title: str):
    """Errors from 0, which looks like the card, to `top`."""
    from matplotlib.colors import LinearSegmentedColormap

    colours = LinearSegmentedColormap.from_list("errors", [CARD, COLOURS[1], BOUND, "#6B2F00"])
    colours = colours.with_extremes(bad="#000000")
    ax.set_title(title, fontsize=9, fontweight="normal")
    ax.spines[["right", "top"]].set_visible(True)
    ax.grid(visible=False)
    for axis, size in ((ax.yaxis, values.shape[0]), (ax.xaxis, values.shape[1])):
        axis.set_ticks(range(0, size, 1 << max(0, (size - 1) // 8).bit_length()))  # Powers of two, as tiles are cut.
    aspect = "equal" if max(values.shape) <= 4 * min(values.shape) else "auto"
    return ax.imshow(
        np.ma.masked_invalid(values), cmap=colours, vmin=0, vmax=top, aspect=aspect, interpolation="nearest"
    )


def _figure_text(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"

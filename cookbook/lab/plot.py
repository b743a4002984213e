"""The one look of this project's figures: a light card, readable on a dark page too, safe for colour-blind readers."""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING

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
        ax.set_xlabel(unit + (f"\n{note}" if note else ""), loc="left")
        ax.set_title(title)
    return fig


def _figure_text(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"

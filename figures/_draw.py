"""Shared parts of the drawings: a canvas measured in inches, boxes, arrows and words on it."""

import pathlib

from lab import plot

INK, SOFT, PALE = plot.INK, "#767676", "#EDEDEA"
BLUE, ORANGE, GREEN, PINK, SKY, RED = plot.COLOURS[:6]


def canvas(width: float, height: float):
    """(figure, axes), one unit an inch, the origin at the lower left, no frame."""
    with plot.figure(width, height) as (fig, ax):
        fig.set_layout_engine("none")
        ax.set_position((0, 0, 1, 1))
        ax.set(xlim=(0, width), ylim=(0, height))
        ax.axis("off")
    return fig, ax


def box(ax, x, y, width, height, text="", colour=INK, fill=0.14, size=9, **style):
    """A box with its lower left corner at (x, y) and `text` in its middle; `fill` is the opacity of its inside."""
    import matplotlib.patches as patches

    shape = "round,pad=0,rounding_size=0.05" if min(width, height) > 0.15 else "square,pad=0"
    edge = dict(edgecolor=colour, linewidth=style.pop("linewidth", 1.1), linestyle=style.pop("linestyle", "-"))
    ax.add_patch(patches.FancyBboxPatch((x, y), width, height, boxstyle=shape, facecolor="none", **edge))
    ax.add_patch(patches.FancyBboxPatch((x, y), width, height, boxstyle=shape, facecolor=colour, alpha=fill, lw=0))
    if text:
        words(ax, x + width / 2, y + height / 2, text, size=size, **style)


def words(ax, x, y, text, size=9, ha="center", va="center", colour=INK, **style):
    ax.text(x, y, text, fontsize=size, ha=ha, va=va, color=colour, linespacing=1.35, **style)


def arrow(ax, start, end, colour=INK, text="", size=8, offset=(0.0, 0.12), width=1.4, style="-|>", **more):
    """From `start` to `end`; `text` stands at its middle, moved by `offset`."""
    properties = dict(arrowstyle=style, color=colour, linewidth=width, shrinkA=0, shrinkB=0, mutation_scale=11) | more
    ax.annotate("", end, start, arrowprops=properties)
    if text:
        words(
            ax,
            (start[0] + end[0]) / 2 + offset[0],
            (start[1] + end[1]) / 2 + offset[1],
            text,
            size=size,
            colour=colour,
        )


def lanes(ax, names, title=""):
    """Names the rows of a schedule, the first on top; its time is made up and has no numbers."""
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(len(names) - 0.4, -0.6)
    ax.set_xticks([])
    ax.grid(visible=False)
    ax.set_title(title, fontsize=9)


def save(script: str, fig) -> None:
    """Writes `fig` as the SVG beside the script that drew it."""
    plot.save(fig, pathlib.Path(script).with_suffix(".svg"))

"""Shared parts of the figures that are charts: axes with scales, and the bars, tiles and labels on them."""

import functools

from figures._draw import BLUE, INK, ORANGE, RED, SKY, Picture
from lab import plot

LOAD, MULTIPLY, SOFTMAX = SKY, BLUE, ORANGE  # Bars of a schedule.


def chart(width: float = 7.5, height: float = 3.6, *, saved: bool = True, **subplots):
    """Makes a picture of a function that draws on axes with scales, or on an array of them."""

    def declare(paint):
        @functools.wraps(paint)
        def draw(*args, **kwargs):
            with plot.figure(width, height, **subplots) as (fig, axes):
                paint(axes, *args, **kwargs)
            return fig

        return Picture(draw, saved)

    return declare


def label(ax, x, y, text, size=8, ha="center", va="center", colour=INK, **style):
    """Text in a chart, its lines closer."""
    ax.text(x, y, text, fontsize=size, ha=ha, va=va, color=colour, **style)


def numbered(name: str, count: int) -> list[str]:
    """Names of rows, such as "slot 0", "slot 1" and so on."""
    return [f"{name} {i}" for i in range(count)]


def tracks(ax, names, title="", size=9, grid=True):
    """Names the rows of a schedule, the first on top, over a scale of time; `grid` shows its lines."""
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(len(names) - 0.4, -0.6)
    ax.grid(axis="y" if grid else "both", visible=False)
    ax.set_title(title, fontsize=size)


def lanes(ax, names, title=""):
    """The same for a schedule whose time is made up and has no numbers."""
    tracks(ax, names, title, grid=False)
    ax.set_xticks([])


def bar(ax, y, start, end, text, colour, height=0.74, size=8, ink=None, clip=True, **style):
    """One piece of work on row `y` of a schedule."""
    style = dict(edgecolor=plot.CARD, linewidth=1.2) | style
    ax.barh(y, end - start, left=start, height=height, color=colour, **style)
    ink = ink or (plot.CARD if colour in (BLUE, RED) else INK)
    label(ax, (start + end) / 2, y, text, size, colour=ink, clip_on=clip)


def first_free(lengths, servers: int) -> list[tuple[int, float, float, int]]:
    """(server, start, length, index) of each piece of work: it goes to the server that is free first."""
    free, placed = [0] * servers, []
    for index, length in enumerate(lengths):
        server = free.index(min(free))
        placed.append((server, free[server], length, index))
        free[server] += length
    return placed


def tile(ax, x, y, width, height, colour, text="", size=7.5, ink=INK, **look):
    """A rectangle with its first corner at (x, y), filled with `colour`, and `text` in its middle."""
    from matplotlib.patches import Rectangle

    ax.add_patch(Rectangle((x, y), width, height, facecolor=colour, **look))
    if text:
        label(ax, x + width / 2, y + height / 2, text, size, colour=ink)


def legend_of(ax, entries):
    """A legend of (colour, text) right of the axes."""
    for colour, text in entries:
        tile(ax, 0, 0, 0, 0, colour, edgecolor=INK, label=text)
    ax.legend(loc="upper left", bbox_to_anchor=(1.02, 1))


def bare(ax):
    """Takes away the grid, the marks of the ticks, and the spines."""
    ax.grid(visible=False)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)

"""Shared parts of the figures: how one is declared and saved, and the boxes, arrows and words of a drawing."""

import functools
import importlib
import io
import itertools
import pathlib
import re

from lab import plot

FOLDER = pathlib.Path(__file__).parent
INK, SOFT, PALE = plot.INK, "#767676", "#EDEDEA"
BLUE, ORANGE, GREEN, PINK, SKY, RED = plot.COLOURS[:6]


class Picture:
    """A figure of a chapter: `draw()` returns it, and `save()` writes it as figures/<chapter>/<name>.svg.

    `saved=False`: its notebook draws it, of what the chapter has computed.
    """

    def __init__(self, draw, saved: bool = True):
        self.draw, self.saved = draw, saved
        chapter, name = draw.__module__.rpartition(".")[2], draw.__name__
        self.path = FOLDER / ("" if name == chapter else chapter) / f"{name}.svg"

    def save(self) -> None:
        """Writes the file, unless the one that is there differs in the names of clip paths alone.

        Matplotlib makes these of the layout's last bits, which are not the same in each run.
        """
        drawn = self._written()
        nameless = lambda svg: re.sub(rb"(?<=[#\"])p[0-9a-f]{10}\b", b"", svg)
        if not self.path.exists() or nameless(self.path.read_bytes()) != nameless(drawn):
            self.path.write_bytes(drawn)

    def _written(self) -> bytes:
        drawn = io.BytesIO()
        plot.save(self.draw(), drawn)
        return drawn.getvalue()


def canvas(width: float, height: float):
    """(figure, axes in inches): the origin at the lower left, no frame."""
    with plot.figure(width, height) as (fig, ax):
        fig.set_layout_engine("none")
        ax.set_position((0, 0, 1, 1))
        ax.set(xlim=(0, width), ylim=(0, height))
        ax.axis("off")
    return fig, ax


def drawing(width: float, height: float):
    """Makes a picture of a function that draws on axes in inches: the origin at the lower left, no frame."""

    def declare(paint):
        @functools.wraps(paint)
        def draw(*args, **kwargs):
            fig, ax = canvas(width, height)
            paint(ax, *args, **kwargs)
            return fig

        return Picture(draw)

    return declare


def chapters() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("[a-z]*.py"))


def pictures(chapter: str) -> list[Picture]:
    """The pictures of figures/<chapter>.py that have an SVG."""
    values = vars(importlib.import_module(f"figures.{chapter}")).values()
    return [value for value in values if isinstance(value, Picture) and value.saved]


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
    """Text on a drawing."""
    ax.text(x, y, text, fontsize=size, ha=ha, va=va, color=colour, linespacing=1.35, **style)


def arrow(ax, start, end, colour=INK, text="", size=8, at=None, ha="center", offset=(0.0, 0.12), width=1.4, **look):
    """From `start` to `end`; `text` stands at `at`, or at the arrow's middle, moved by `offset`."""
    shape = dict(arrowstyle=look.pop("style", "-|>"), color=colour, linewidth=width)
    ax.annotate("", end, start, arrowprops=shape | dict(shrinkA=0, shrinkB=0, mutation_scale=11) | look)
    if text:
        x, y = at or ((a + b) / 2 + moved for a, b, moved in zip(start, end, offset, strict=True))
        words(ax, x, y, text, size, ha=ha, colour=colour)


def places(rows: int, columns: int):
    """Each (row, column), row after row."""
    return itertools.product(range(rows), range(columns))

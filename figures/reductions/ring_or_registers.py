"""The way of a row: straight to registers, or through a ring of shared memory that TMA fills."""

from figures._draw import save
from lab import plot

STAGES = 4


def draw():
    with plot.figure(7.5, 3.3, ncols=2, width_ratios=(1, 2)) as (fig, (left, right)):
        _direct(left)
        _ring(right)
    return fig


def _direct(ax):
    _box(ax, 0, 0, 1, "HBM", plot.INK)
    _box(ax, 0, 2, 1, "registers", plot.OURS)
    _arrow(ax, (0.3, 0.55), (0.3, 2), "load")
    _arrow(ax, (0.7, 2), (0.7, 0.55), "store")
    _frame(ax, 1.05, "Row in registers")


def _ring(ax):
    _box(ax, 0, 0, 3, "HBM", plot.INK)
    for slot in range(STAGES):
        _box(ax, 0.05 + slot * 0.42, 1, 0.4, f"slot {slot}", plot.COLOURS[1])
    _box(ax, 2.1, 1, 0.85, "output buffer", plot.COLOURS[1])
    _box(ax, 0, 2, 3, "registers", plot.OURS)
    _arrow(ax, (0.85, 0.55), (0.85, 1), "TMA, ahead of time")
    _arrow(ax, (0.85, 1.55), (0.85, 2), "wait, then load")
    _arrow(ax, (2.52, 2), (2.52, 1.55), "store, fence")
    _arrow(ax, (2.52, 1), (2.52, 0.55), "TMA")
    _frame(ax, 3.05, f"A ring of {STAGES} slots in shared memory")


def _box(ax, x, y, width, text, colour):
    ax.broken_barh([(x, width)], (y, 0.52), facecolor=plot.CARD, edgecolor=colour, linewidth=1.5)
    ax.text(x + width / 2, y + 0.26, text, ha="center", va="center", fontsize=8)


def _arrow(ax, start, end, text):
    ax.annotate("", end, start, arrowprops=dict(arrowstyle="->", color=plot.INK, linewidth=1.5))
    ax.text(start[0] + 0.04, (start[1] + end[1]) / 2, text, va="center", fontsize=8)


def _frame(ax, right, title):
    ax.set(xlim=(-0.05, right), ylim=(2.6, -0.1))
    ax.set_title(title)
    ax.axis("off")


if __name__ == "__main__":
    save(__file__, draw())

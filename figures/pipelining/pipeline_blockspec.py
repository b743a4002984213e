"""Two block specs: the shape of a window, and where it stands at each step of the pipeline's grid."""

from matplotlib.patches import Rectangle

from figures._draw import save
from lab import plot

STEPS, TILE = 5, 1.0
COLOURS = (plot.OURS, plot.COLOURS[4])


def draw():
    with plot.figure(height=3.3) as (fig, ax):
        _matrix(ax, 0, 0, 3, STEPS, "A (M, K)", [(1, ki) for ki in range(STEPS)])
        _matrix(ax, 6.2, 0, STEPS, 4, "B (K, N)", [(ki, 2) for ki in range(STEPS)])
        _matrix(ax, 11.5, 0, 3, 4, "C (M, N)", [(1, 2)])
        ax.text(
            0, 3.3, "BlockSpec((tile_m, tile_k),\n    lambda ki: (mi, ki))", family="monospace", va="top", fontsize=8
        )
        ax.text(11.5, 3.3, "stays in registers\nfor all steps", va="top", fontsize=8)
        text = "BlockSpec((tile_k, tile_n),\n    lambda ki: (ki, ni))"
        ax.text(6.2, STEPS + 0.3, text, family="monospace", va="top", fontsize=8)
        ax.set(xlim=(-0.2, 15.8), ylim=(STEPS + 1.6, -0.9), aspect="equal")
        ax.axis("off")
    return fig


def _matrix(ax, left, top, rows, columns, name, windows):
    """A matrix cut into tiles; `windows` are those that the pipeline visits, in order."""
    for row in range(rows):
        for column in range(columns):
            ax.add_patch(Rectangle((left + column, top + row), 1, 1, facecolor="none", edgecolor=plot.FAINT))
    for ki, (row, column) in enumerate(windows):
        colour = plot.BOUND if len(windows) == 1 else COLOURS[ki % 2]
        ax.add_patch(Rectangle((left + column, top + row), 1, 1, facecolor=colour, edgecolor=plot.CARD))
        text = "tile" if len(windows) == 1 else f"ki={ki}"
        ink = plot.INK if colour == COLOURS[1] else plot.CARD
        ax.text(left + column + 0.5, top + row + 0.5, text, color=ink, ha="center", va="center", fontsize=7.5)
    ax.text(left, top - 0.25, name, fontweight="bold")


if __name__ == "__main__":
    save(__file__, draw())

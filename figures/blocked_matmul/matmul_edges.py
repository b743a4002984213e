"""Tiles of the result to scale: a step of K reads the two edges of a tile, and multiplies and adds on its area."""

from matplotlib.patches import Rectangle

from figures._draw import BLUE, GREEN, ORANGE, canvas, save, words
from lab import plot

TILES = ((1, 128), (16, 32), (64, 64), (128, 128))
SCALE, EDGE = 0.0125, 0.09  # Inches a value of o; thickness of a drawn edge.


def draw():
    fig, ax = canvas(7.6, 3.3)
    x, top = 0.35, 2.6
    for tile_m, tile_n in TILES:
        width, height = tile_n * SCALE, max(tile_m * SCALE, 0.03)
        for corner, size, colour in (
            ((x, top - height), (width, height), BLUE),
            ((x - EDGE - 0.04, top - height), (EDGE, height), ORANGE),
            ((x, top + 0.04), (width, EDGE), GREEN),
        ):
            ax.add_patch(Rectangle(corner, *size, facecolor=colour, edgecolor="none", alpha=0.75))
        products, values = tile_m * tile_n, tile_m + tile_n
        words(ax, x, 2.97, f"{tile_m} x {tile_n}", size=9.5, ha="left", weight="bold")
        text = f"reads {values} values,\nmultiplies {products:,} times:\n{products / values:.3g} for each value"
        words(ax, x, min(top - height - 0.3, 2.3), text, size=8, ha="left")
        x += max(width, 1.45) + 0.35
    for left, colour, text in (
        (0.3, ORANGE, "a column of a's tile"),
        (2.2, GREEN, "a row of b's tile"),
        (3.9, BLUE, "sums of o, each with one multiply-add"),
    ):
        ax.add_patch(Rectangle((left, 0.06), 0.14, 0.14, facecolor=colour, alpha=0.75))
        words(ax, left + 0.22, 0.13, text, size=8, ha="left", colour=plot.INK)
    return fig


if __name__ == "__main__":
    save(__file__, draw())

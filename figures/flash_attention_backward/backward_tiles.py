"""Two ways through the matrix of weights: along the rows for dq, along the columns for dk and dv."""

import matplotlib.patches as patches

from figures._draw import BLUE, GREEN, ORANGE, PALE, SOFT, arrow, canvas, save, words

SIDE, NUM = 0.31, 8  # Inches of a block of 64; blocks each way.


def panel(ax, left, bottom, chosen, title, legend):
    """`chosen(row, column)`: whether the tile that is shown goes through this block."""
    top = bottom + NUM * SIDE
    for row in range(NUM):
        for column in range(NUM):
            seen, cut = column <= row, column == row
            here = chosen(row, column)
            face = (ORANGE if cut else BLUE) if here and seen else PALE if seen else "white"
            place = (left + column * SIDE, top - (row + 1) * SIDE)
            ax.add_patch(patches.Rectangle(place, SIDE, SIDE, facecolor=face, edgecolor=SOFT, linewidth=0.6))
    words(ax, left + NUM * SIDE / 2, top + 0.42, title, size=9.5, weight="bold")
    words(ax, left + NUM * SIDE / 2, top + 0.14, "keys", size=8, colour=SOFT)
    words(ax, left - 0.16, bottom + NUM * SIDE / 2, "queries", size=8, rotation=90, colour=SOFT)
    words(ax, left + NUM * SIDE / 2, bottom - 0.6, legend, size=8)
    return top


def draw():
    fig, ax = canvas(7.8, 4.25)
    bottom, row, column = 1.0, 5, 2
    left = 0.55
    top = panel(
        ax, left, bottom, lambda r, c: r == row, "kernel 1: dq", "a tile keeps 64 queries and do,\ngoes through k and v"
    )
    y = top - (row + 0.5) * SIDE
    arrow(ax, (left + 0.05, y), (left + (row + 1) * SIDE - 0.03, y), "white", width=1.8)
    arrow(ax, (left + NUM * SIDE + 0.02, y), (left + NUM * SIDE + 0.3, y), GREEN)
    words(ax, left + NUM * SIDE + 0.33, y, "dq of\n64 queries", size=8, ha="left", colour=GREEN)
    left = 4.45
    top = panel(
        ax, left, bottom, lambda r, c: c == column, "kernel 2: dk and dv",
        "a tile keeps 64 keys and values,\ngoes through q and do",
    )  # fmt: skip
    x = left + (column + 0.5) * SIDE
    arrow(ax, (x, top - column * SIDE - 0.05), (x, bottom + 0.03), "white", width=1.8)
    arrow(ax, (x, bottom - 0.03), (x, bottom - 0.3), GREEN)
    words(ax, x + 0.12, bottom - 0.17, "dk, dv of 64 keys", size=8, ha="left", colour=GREEN)
    for i, (colour, text) in enumerate(((BLUE, "whole"), (ORANGE, "cut: masked"), (PALE, "other tiles'"))):
        ax.add_patch(patches.Rectangle((3.36, 2.98 - 0.24 * i), 0.14, 0.14, facecolor=colour, edgecolor=SOFT, lw=0.6))
        words(ax, 3.56, 3.05 - 0.24 * i, text, size=7, ha="left")
    return fig


if __name__ == "__main__":
    save(__file__, draw())

"""Numbers for each query that a thread needs: queries along the rows of a tile, and along its columns."""

import matplotlib.patches as patches

from figures._draw import BLUE, ORANGE, PALE, SOFT, box, canvas, save, words

SIDE = 0.17  # Inches, of a cell.
ROWS, COLUMNS = 16, 16  # Rows and columns that are shown, of 64 each.
LANE = 6  # The lane whose elements are shown.


def has(row: int, column: int) -> bool:
    """Whether lane 6 of warp 0 holds an element."""
    return row % 8 * 4 + column % 8 // 2 == LANE


def panel(ax, left, title, rows, columns, per_row):
    top = 3.35
    for row in range(ROWS):
        for column in range(COLUMNS):
            place = (left + column * SIDE, top - (row + 1) * SIDE)
            face = BLUE if has(row, column) else PALE
            ax.add_patch(patches.Rectangle(place, SIDE, SIDE, facecolor=face, edgecolor="white", linewidth=0.6))
    for n in range(16):
        needed = any(has(n, c) if per_row else has(c, n) for c in range(16))
        place = (left - 0.42, top - (n + 1) * SIDE) if per_row else (left + n * SIDE, top + 0.22)
        face = ORANGE if needed else "white"
        ax.add_patch(patches.Rectangle(place, SIDE, SIDE, facecolor=face, edgecolor=SOFT, linewidth=0.6))
    words(ax, left + 8 * SIDE, 4.12, title, size=9.5, weight="bold")
    words(ax, left + 8 * SIDE, top - 16 * SIDE - 0.15, columns + " ...", size=8, colour=SOFT)
    words(ax, left - (0.58 if per_row else 0.18), top - 8 * SIDE, rows + " ...", size=8, rotation=90, colour=SOFT)
    if per_row:
        words(ax, left - 0.34, top + 0.13, "lse", size=8, colour=ORANGE)
    else:
        words(ax, left - 0.08, top + 0.3, "lse", size=8, ha="right", colour=ORANGE)


def draw():
    fig, ax = canvas(7.8, 4.3)
    panel(ax, 0.95, "kernel 1: a number a row", "queries", "keys", per_row=True)
    panel(ax, 4.7, "kernel 2: a number a column", "keys", "queries", per_row=False)
    box(ax, 3.72, 2.05, 0.13, 0.13, "", BLUE, fill=0.9)
    words(ax, 3.93, 2.13, "of thread 6", size=7, ha="left")
    box(ax, 3.72, 1.75, 0.13, 0.13, "", ORANGE, fill=0.9)
    words(ax, 3.93, 1.83, "it needs", size=7, ha="left")
    words(ax, 0.4, 0.1, "Layout.WGMMA.reduce(1): 2 numbers a thread, the same in all steps", size=7.5, ha="left")
    words(ax, 4.2, 0.1, "Layout.WGMMA.reduce(0): 16 of 64, others in each step", size=7.5, ha="left")
    return fig


if __name__ == "__main__":
    save(__file__, draw())

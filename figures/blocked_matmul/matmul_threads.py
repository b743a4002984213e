"""Which thread holds which sums of a 128 x 128 tile, and what it reads for one step of K."""

from matplotlib.patches import Rectangle

from figures._draw import BLUE, GREEN, INK, ORANGE, PALE, SOFT, arrow, canvas, save, words
from lab import plot

SIDE = 2.9  # Inches, of the tile of 128 x 128.
ROWS, COLS, VEC = 16, 32, 4  # Sizes of the pattern that repeats; values side by side that one thread holds.
MINE = 10  # The thread that is picked out.


def draw():
    fig, ax = canvas(7.8, 4.05)
    words(ax, 0.3, 3.86, "the pattern: 16 rows x 32 columns", ha="left", weight="bold")
    _pattern(ax, 0.55, 0.42, 2.75, 3.05)
    words(ax, 4.35, 3.86, f"thread {MINE} in the tile of 128 x 128", ha="left", weight="bold")
    _tile(ax, 4.75, 0.42, SIDE / 128)
    return fig


def _pattern(ax, x, y, width, height):
    """Threads by number: four warps of four rows each, eight threads side by side."""
    cell_width, cell_height = width / (COLS // VEC), height / ROWS
    for row in range(ROWS):
        for i in range(COLS // VEC):
            thread = row * (COLS // VEC) + i
            corner = (x + i * cell_width, y + height - (row + 1) * cell_height)
            colour = BLUE if thread == MINE else plot.COLOURS[1 + row // 4]
            _cell(ax, corner, cell_width, cell_height, colour, 0.9 if thread == MINE else 0.3)
            ink = plot.CARD if thread == MINE else INK
            words(ax, corner[0] + cell_width / 2, corner[1] + cell_height / 2, str(thread), size=6.5, colour=ink)
    for warp in range(4):
        words(
            ax, x - 0.1, y + height - (warp + 0.5) * 4 * cell_height, f"warp {warp}", size=7.5, ha="right", rotation=90
        )
    words(ax, x + width / 2, y - 0.17, "each cell: 1 row, 4 columns, of the thread named", size=8, colour=SOFT)


def _tile(ax, x, y, scale):
    row, col = MINE // (COLS // VEC), MINE % (COLS // VEC) * VEC
    ax.add_patch(Rectangle((x, y), SIDE, SIDE, facecolor=PALE, edgecolor=INK, linewidth=0.8))
    for i in range(128 // ROWS):
        for j in range(128 // COLS):
            bottom = y + SIDE - (i * ROWS + row + 1) * scale
            _cell(ax, (x + (j * COLS + col) * scale, bottom), VEC * scale, scale, BLUE, 1.0, 0.0)
            if i == 0:
                _cell(ax, (x + (j * COLS + col) * scale, y + SIDE + 0.1), VEC * scale, 0.14, GREEN, 0.9)
        _cell(ax, (x - 0.24, bottom), 0.14, scale, ORANGE, 1.0, 0.0)
    ax.add_patch(Rectangle((x - 0.24, y), 0.14, SIDE, facecolor=ORANGE, alpha=0.15))
    ax.add_patch(Rectangle((x, y + SIDE + 0.1), SIDE, 0.14, facecolor=GREEN, alpha=0.15))
    ax.add_patch(
        Rectangle((x, y + SIDE - ROWS * scale), COLS * scale, ROWS * scale, fill=False, edgecolor=INK, linewidth=1)
    )
    words(ax, x - 0.32, y + SIDE / 2, "8 of a's column", size=8, rotation=90, ha="right")
    words(ax, x + SIDE / 2, y + SIDE + 0.36, "4 x 4 of b's row", size=8)
    words(ax, x + SIDE / 2, y - 0.17, "8 x 16 sums: 128 multiply-adds for 24 values read", size=8, colour=SOFT)
    arrow(ax, (3.4, y + SIDE + 0.02), (x - 0.34, y + SIDE - 0.05), SOFT, width=1)


def _cell(ax, corner, width, height, colour, alpha, line=0.5):
    ax.add_patch(Rectangle(corner, width, height, facecolor=colour, alpha=alpha, edgecolor=plot.CARD, linewidth=line))


if __name__ == "__main__":
    save(__file__, draw())

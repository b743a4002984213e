"""Which parts of a and b one block of a blocked matrix product reads: a row of tiles and a column of tiles."""

from figures._draw import BLUE, GREEN, INK, ORANGE, SOFT, arrow, box, canvas, save, words
from lab import plot

TILE, STEP = 0.42, 0.28  # Edges of a tile of o, and of one step along K, in inches.
TILES_M, TILES_N, STEPS = 4, 6, 6
MINE, NOW = (1, 3), 2  # The tile of o that is drawn, and the step of K.


def draw():
    fig, ax = canvas(7.6, 4.4)
    left, base = 0.75, 0.5
    right, top = left + STEPS * STEP + 0.3, base + TILES_M * TILE + 0.3
    row, col = base + (TILES_M - 1 - MINE[0]) * TILE, right + MINE[1] * TILE
    for x, y, width, height in (
        (left, base, STEPS * STEP, TILES_M * TILE),
        (right, top, TILES_N * TILE, STEPS * STEP),
        (right, base, TILES_N * TILE, TILES_M * TILE),
    ):
        box(ax, x, y, width, height, colour=INK, fill=0.03, linewidth=0.8)
    for i in range(STEPS):
        now = i == NOW
        box(ax, left + i * STEP, row, STEP, TILE, colour=ORANGE, fill=0.75 if now else 0.2, linewidth=0.8)
        box(ax, col, top + (STEPS - 1 - i) * STEP, TILE, STEP, colour=GREEN, fill=0.75 if now else 0.2, linewidth=0.8)
    for i in range(TILES_M):
        for j in range(TILES_N):
            if (i, j) != MINE:
                box(
                    ax,
                    right + j * TILE,
                    base + (TILES_M - 1 - i) * TILE,
                    TILE,
                    TILE,
                    colour=SOFT,
                    fill=0.06,
                    linewidth=0.6,
                )
    box(ax, col, row, TILE, TILE, colour=BLUE, fill=0.85, linewidth=0.8)
    arrow(ax, (left + (NOW + 1) * STEP + 0.03, row + TILE / 2), (col - 0.03, row + TILE / 2), ORANGE)
    arrow(ax, (col + TILE / 2, top + (STEPS - 1 - NOW) * STEP - 0.03), (col + TILE / 2, row + TILE + 0.03), GREEN)
    words(ax, left - 0.12, base + TILES_M * TILE / 2, "a\nM x K", ha="right", weight="bold")
    words(ax, right - 0.12, top + STEPS * STEP / 2, "b\nK x N", ha="right", weight="bold")
    words(ax, right + TILES_N * TILE / 2, base - 0.2, "o   M x N", weight="bold")
    words(ax, left + STEPS * STEP / 2, base - 0.2, "step k:  0  1  2 ...", size=8)
    x = right + TILES_N * TILE + 0.25
    for y, colour, text in (
        (3.3, ORANGE, "a's tile of this step:\ntile_m x tile_k"),
        (2.55, GREEN, "b's tile of this step:\ntile_k x tile_n"),
        (1.8, BLUE, "the block's tile of o:\ntile_m x tile_n sums,\nkept in registers"),
    ):
        box(ax, x, y - 0.08, 0.16, 0.16, colour=colour, fill=0.8, linewidth=0.5)
        words(ax, x + 0.26, y, text, size=8.5, ha="left")
    words(ax, x, 0.95, "light: read by the other steps\nof this block", size=8.5, ha="left", colour=plot.INK)
    return fig


if __name__ == "__main__":
    save(__file__, draw())

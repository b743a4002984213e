"""Which thread of a warp holds which element of the accumulator: the first 16 rows and columns of a tile."""

from figures._draw import BLUE, GREEN, ORANGE, PINK, SOFT, box, canvas, save, words

SIDE = 0.235  # Inches, of a cell.
SHOWN = {0: BLUE, 6: ORANGE, 13: GREEN, 31: PINK}  # Lanes in colour.


def place(row: int, column: int) -> tuple[int, int]:
    """(lane, register) of an element in the rows of warp 0."""
    lane = row % 8 * 4 + column % 8 // 2
    return lane, 4 * (column // 8) + 2 * (row // 8) + column % 2


def draw():
    fig, ax = canvas(7.8, 4.55)
    left, top = 0.75, 4.12
    for row in range(16):
        words(ax, left - 0.12, top - SIDE * (row + 0.5), str(row), size=7, ha="right", colour=SOFT)
        words(ax, left + SIDE * (row + 0.5), top + 0.1, str(row), size=7, colour=SOFT)
        for column in range(16):
            lane, _ = place(row, column)
            x, y = left + SIDE * column, top - SIDE * (row + 1)
            shown = lane in SHOWN
            style = dict(size=6.5, linewidth=0.5, weight="bold" if shown else "normal")
            box(ax, x, y, SIDE - 0.02, SIDE - 0.02, str(lane), SHOWN.get(lane, SOFT), 0.5 if shown else 0.06, **style)
    words(ax, left + 8 * SIDE, 4.42, "column of the tile", size=8)
    words(ax, 0.22, top - 8 * SIDE, "row of the tile", size=8, rotation=90)
    x = left + 16 * SIDE + 0.35
    words(ax, x, 3.75, "In each cell: its thread", size=9, ha="left", weight="bold")
    text = "A thread holds two neighbours of a row, and\nthe same two 8 rows below; then again every\n8 columns."
    words(ax, x, 3.28, text, size=8.5, ha="left")
    words(ax, x, 2.55, "Thread 6's first registers:", size=8.5, ha="left", weight="bold", colour=ORANGE)
    for register in range(8):
        row, column = next((r, c) for r in range(16) for c in range(16) if place(r, c) == (6, register))
        text = f"register {register}: row {row:>2}, column {column:>2}"
        words(ax, x + 0.08, 2.28 - 0.2 * register, text, size=8, ha="left", family="DejaVu Sans Mono")
    words(ax, left, 0.1, "Pallas calls this layout Layout.WGMMA.", size=8, ha="left", colour=SOFT)
    return fig


if __name__ == "__main__":
    save(__file__, draw())

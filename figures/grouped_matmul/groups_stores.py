"""The last piece of a group on its way out: 63 of 64 rows leave as rungs of 32, 16, 8, 4, 2 and 1 rows."""

from figures._draw import BLUE, GREEN, ORANGE, PINK, RED, SKY, SOFT, arrow, box, canvas, save, words

ROWS, LEFT = 64, 63
COLOURS = {32: BLUE, 16: GREEN, 8: ORANGE, 4: SKY, 2: PINK, 1: RED}


def rungs(left: int) -> list[tuple[int, int]]:
    """(first row, rows) of each copy of a piece of which `left` rows are stored."""
    found, first, size = [], 0, ROWS // 2
    while size:
        if left & size:
            found.append((first, size))
            first += size
        size //= 2
    return found


def draw():
    fig, ax = canvas(7.8, 4.2)
    high, bottom = 0.05, 0.45
    y_of = lambda row: bottom + high * (ROWS - row)

    words(ax, 1.3, 4.0, "a whole piece: one copy", weight="bold")
    box(ax, 0.25, y_of(ROWS), 0.85, high * ROWS, "64 rows", BLUE, 0.25, size=8)
    box(ax, 1.6, y_of(ROWS), 0.85, high * ROWS, "64 rows", BLUE, 0.25, size=8)
    arrow(ax, (1.13, y_of(32)), (1.57, y_of(32)), BLUE)
    words(ax, 0.67, 0.24, "shared\nmemory", size=7.5)
    words(ax, 2.02, 0.28, "out", size=7.5)

    words(ax, 5.25, 4.0, f"the last one of a group: {LEFT} = {' + '.join(str(size) for _, size in rungs(LEFT))}",
          weight="bold")  # fmt: skip
    x = 3.25
    box(ax, x, y_of(ROWS), 0.85, high * ROWS, colour=SOFT, fill=0.05)
    box(ax, x + 2.5, y_of(ROWS), 0.85, high * ROWS, colour=SOFT, fill=0.05)
    for first, size in rungs(LEFT):
        middle, colour = y_of(first + size / 2), COLOURS[size]
        for at in (x, x + 2.5):
            tall = max(high * size - 0.012, 0.03)
            box(ax, at + 0.02, y_of(first + size) + 0.006, 0.81, tall, colour=colour, fill=0.4, linewidth=0.8)
        arrow(ax, (x + 0.88, middle), (x + 2.47, middle), colour, width=1.1)
        if size >= 4:
            words(ax, x + 0.42, middle, f"{size} rows" if size > 4 else "4", size=7.5)
            words(ax, x + 1.65, middle + 0.1, f"left & {size}", size=7.5, colour=colour)
    words(ax, x + 3.45, y_of(29), "rows of this\ngroup", size=8, ha="left")
    words(ax, x + 3.45, y_of(63.5), "row 63: the next\ngroup's first,\nnot touched", size=8, ha="left", colour=RED)
    words(ax, x + 0.42, 0.24, "shared\nmemory", size=7.5)
    words(ax, x + 2.92, 0.28, "out", size=7.5)
    words(ax, x + 1.65, 0.24, "each copy has a size that\nwas known to the compiler", size=7.5, colour=SOFT)
    return fig


if __name__ == "__main__":
    save(__file__, draw())

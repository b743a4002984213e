"""The part of a (64, 64) tile of 16-bit values that a WGMMA reads, and where swizzling by 128 bytes puts it."""

from figures._draw import BLUE, GREEN, ORANGE, PINK, SOFT, arrow, box, canvas, save, words

SIDE = 0.27
COLOURS = (BLUE, ORANGE, GREEN, PINK)  # One for each of the four instructions of a tile: two chunks of 16 bytes each.


def atom(ax, left, top, place, title):
    """8 rows of 128 bytes. `place(row, position)` is the chunk that lies there."""
    for row in range(8):
        for position in range(8):
            chunk = place(row, position)
            first = chunk in (0, 1)
            style = dict(size=7.5, linewidth=0.6, weight="bold" if first else "normal")
            x, y = left + SIDE * position, top - SIDE * (row + 1)
            box(ax, x, y, SIDE - 0.02, SIDE - 0.02, str(chunk), COLOURS[chunk // 2], 0.55 if first else 0.12, **style)
    words(ax, left + 4 * SIDE, top + 0.28, title, size=8.5, weight="bold")
    words(ax, left + 4 * SIDE, top + 0.1, "banks 0 ... 31", size=7, colour=SOFT)


def draw():
    fig, ax = canvas(7.8, 3.2)
    for i in range(8):
        shade = 0.35 if i == 0 else 0.08
        box(ax, 0.25, 2.45 - 0.25 * i, 1.25, 0.23, f"rows {8 * i}-{8 * i + 7}", BLUE, shade, size=7, linewidth=0.7)
    words(ax, 0.875, 2.96, "a tile of (64, 64)", size=8.5, weight="bold")
    words(ax, 0.875, 0.5, "8 swizzle tiles of (8, 64),\n1024 bytes each", size=7.5, colour=SOFT)
    arrow(ax, (1.53, 2.56), (1.97, 2.3), SOFT)
    atom(ax, 2.05, 2.56, lambda row, position: position, "row-major: no layout of WGMMA")
    atom(ax, 4.75, 2.56, lambda row, position: position ^ row, "swizzled, as TMA writes it")
    words(ax, 2.05 + 4 * SIDE, 0.17, "chunk 0 of the 8 rows: 8 times the same\n4 banks, so 8 accesses", size=7.5)
    words(ax, 4.75 + 4 * SIDE, 0.17, "chunk 0 of the 8 rows: all 32 banks,\nso one access", size=7.5)
    arrow(ax, (2.05 + 8 * SIDE + 0.08, 1.5), (4.67, 1.5), SOFT, text="c ^ r", size=8)
    for i, colour in enumerate(COLOURS):
        y = 2.3 - 0.3 * i
        box(ax, 7.02, y, 0.14, 0.14, "", colour, 0.5, linewidth=0.6)
        words(ax, 7.22, y + 0.07, f"WGMMA {i}", size=7.5, ha="left")
    words(ax, 7.02, 0.93, "each takes\n16 of the 64\ncolumns", size=7.5, ha="left", colour=SOFT)
    return fig


if __name__ == "__main__":
    save(__file__, draw())

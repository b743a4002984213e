"""Figures of chapter 17b: delta rule."""

from figures._draw import BLUE, ORANGE, PALE, SOFT, box, drawing, words

SIZE, CELL = 8, 0.225


@drawing(7.8, 3.1)
def delta_doubling(ax):
    """The inverse of a unit triangle by doubling: small blocks on the diagonal first, then blocks twice as large."""
    for step, block in enumerate((1, 2, 4, 8)):
        left, bottom = 0.25 + 1.85 * step, 0.7
        for t in range(SIZE):
            for s in range(t + 1):
                is_done = t // block == s // block
                is_next = t // block == s // block + 1 and t // (2 * block) == s // (2 * block)
                colour, fill = (BLUE, 0.4) if is_done else (ORANGE, 0.4) if is_next else (PALE, 0.5)
                x, y = left + s * CELL, bottom + (SIZE - 1 - t) * CELL
                box(ax, x, y, CELL - 0.02, CELL - 0.02, colour=colour, fill=fill, linewidth=0.5)
        middle = CELL * block / 2
        for i in range(0, SIZE, block):
            x, y = left + i * CELL - 0.01, bottom + (SIZE - i - block) * CELL - 0.01
            box(ax, x, y, block * CELL, block * CELL, colour=BLUE, fill=0.0, linewidth=1.3)
            words(ax, x + middle, y + middle, "d" if block < SIZE else "", 8.5, weight="bold")
            if i % (2 * block):
                words(ax, x - middle, y + middle, "e", 8.5, weight="bold")
        words(ax, left + SIZE * CELL / 2, 2.8, f"blocks of {block}", weight="bold")
        words(ax, left + SIZE * CELL / 2, 0.5, "all of it" if block == SIZE else "d - d e d", 8.5)
    box(ax, 0.25, 0.12, 0.18, 0.16, colour=BLUE, fill=0.4)
    words(ax, 0.52, 0.2, "d: inverted so far", 8, ha="left", colour=SOFT)
    box(ax, 2.2, 0.12, 0.18, 0.16, colour=ORANGE, fill=0.4)
    text = "e: the part of the triangle between two neighbours, in this step"
    words(ax, 2.47, 0.2, text, 8, ha="left", colour=SOFT)

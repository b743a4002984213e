"""Figures of chapter 17b: delta rule."""

from figures._draw import BLUE, ORANGE, PALE, SOFT, box, drawing, words


@drawing(7.8, 3.1)
def delta_doubling(ax):
    """The inverse of a unit triangle by doubling: small blocks on the diagonal first, then blocks twice as large."""
    size, cell = 8, 0.225
    for step, block in enumerate((1, 2, 4, 8)):
        left, bottom = 0.25 + 1.85 * step, 0.7
        for t in range(size):
            for s in range(t + 1):
                is_done = t // block == s // block
                is_next = t // block == s // block + 1 and t // (2 * block) == s // (2 * block)
                colour, fill = (BLUE, 0.4) if is_done else (ORANGE, 0.4) if is_next else (PALE, 0.5)
                x, y = left + s * cell, bottom + (size - 1 - t) * cell
                box(ax, x, y, cell - 0.02, cell - 0.02, colour=colour, fill=fill, linewidth=0.5)
        middle = cell * block / 2
        for i in range(0, size, block):
            x, y = left + i * cell - 0.01, bottom + (size - i - block) * cell - 0.01
            box(ax, x, y, block * cell, block * cell, colour=BLUE, fill=0.0, linewidth=1.3)
            words(ax, x + middle, y + middle, "d" if block < size else "", 8.5, weight="bold")
            if i % (2 * block):
                words(ax, x - middle, y + middle, "e", 8.5, weight="bold")
        words(ax, left + size * cell / 2, 2.8, f"blocks of {block}", weight="bold")
        words(ax, left + size * cell / 2, 0.5, "all of it" if block == size else "d - d e d", 8.5)
    box(ax, 0.25, 0.12, 0.18, 0.16, colour=BLUE, fill=0.4)
    words(ax, 0.52, 0.2, "d: inverted so far", 8, ha="left", colour=SOFT)
    box(ax, 2.2, 0.12, 0.18, 0.16, colour=ORANGE, fill=0.4)
    text = "e: the part of the triangle between two neighbours, in this step"
    words(ax, 2.47, 0.2, text, 8, ha="left", colour=SOFT)

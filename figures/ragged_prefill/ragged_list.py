"""From lengths to a list of tiles: cumsum says where each sequence's tiles end, searchsorted inverts that."""

import itertools

from figures._draw import BLUE, GREEN, ORANGE, PINK, RED, SOFT, arrow, box, canvas, save, words

LENGTHS, QUERIES = (150, 1, 0, 70), 64
COLOURS = BLUE, GREEN, ORANGE, PINK


def tiles():
    return [(seq, first) for seq, length in enumerate(LENGTHS) for first in range(0, length, QUERIES)]


def cells(ax, x, y, name, values, colours, width=0.55):
    words(ax, x - 0.12, y + 0.15, name, size=8.5, ha="right")
    for i, (value, colour) in enumerate(zip(values, colours, strict=True)):
        box(ax, x + width * i, y, width - 0.06, 0.3, str(value), colour, fill=0.18, size=8.5)


def draw():
    fig, ax = canvas(7.8, 4.15)
    scale, left = 0.0255, 1.0
    starts = [0, *itertools.accumulate(LENGTHS)]
    for number, (seq, first) in enumerate(tiles()):
        row, size = starts[seq] + first, min(QUERIES, LENGTHS[seq] - first)
        wide = max(scale * size - 0.02, 0.05)
        box(ax, left + scale * row, 3.3, wide, 0.36, f"tile {number}" if size > 10 else "", COLOURS[seq], 0.3, size=8)
        if size <= 10:
            words(ax, left + scale * (row + size / 2), 3.78, f"tile {number}", size=8, colour=COLOURS[seq])
    words(ax, left - 0.12, 3.48, "rows of q", size=8.5, ha="right")
    words(ax, left + 1.9, 3.98, "sequence 0: 150 queries", size=8, colour=BLUE)
    words(ax, left + scale * 151 + 0.95, 3.98, "3: 70", size=8, colour=PINK)
    words(ax, left + scale * 225 + 0.1, 3.48, "64 queries a tile", size=7.5, ha="left", colour=SOFT)

    num = [-(-length // QUERIES) for length in LENGTHS]
    ends = list(itertools.accumulate(num))
    x = 1.95
    words(ax, x + 1.07, 2.93, "one number for each sequence", size=7.5, colour=SOFT)
    cells(ax, x, 2.45, "queries", LENGTHS, COLOURS)
    cells(ax, x, 2.05, "tiles, each rounded up", num, COLOURS)
    cells(ax, x, 1.65, "ends = cumsum", ends, COLOURS)
    words(ax, 4.75, 2.3, "tile n is of the first\nsequence whose end\nis greater than n", size=8, ha="left", colour=RED)
    arrow(ax, (x + 1.1, 1.62), (x + 1.1, 1.25), RED)
    words(ax, x + 1.25, 1.43, "searchsorted", size=8, ha="left", colour=RED)
    words(ax, 5.0, 1.43, "one number for each tile", size=7.5, ha="left", colour=SOFT)
    of_tiles = [COLOURS[seq] for seq, _ in tiles()]
    more = len(LENGTHS) + sum(LENGTHS) // QUERIES - len(of_tiles)
    cells(ax, x, 0.9, "number", range(len(of_tiles) + more), [*of_tiles, *[SOFT] * more])
    cells(ax, x, 0.5, "sequence", [*(seq for seq, _ in tiles()), *["-"] * more], [*of_tiles, *[SOFT] * more])
    cells(ax, x, 0.1, "first query in it", [*(f for _, f in tiles()), *["-"] * more], [*of_tiles, *[SOFT] * more])
    words(ax, x + 0.55 * (len(of_tiles) + more) + 0.08, 0.65, "grey: no tile, the list\nhas room for the worst", size=7,
          ha="left", colour=SOFT)  # fmt: skip
    return fig


if __name__ == "__main__":
    save(__file__, draw())

"""The blocks of keys of one sequence among its neighbours: where they begin, and which of their rows are foreign."""

from figures._draw import BLUE, GREEN, ORANGE, PINK, RED, SOFT, box, canvas, save, words

FIRST, END, UNIT, BLOCK = 13, 45, 8, 16  # Rows of the sequence; what TMA finds; keys of a block, few for the drawing.
ROWS = 60


def draw():
    fig, ax = canvas(7.8, 3.1)
    wide, left = 0.113, 0.75
    at = lambda row: left + wide * row
    for start, end, colour, name in (
        (0, FIRST, ORANGE, "sequence 3"),
        (FIRST, END, BLUE, "sequence 4"),
        (END, ROWS, PINK, "sequence 5"),
    ):
        words(ax, (at(start) + at(end)) / 2, 2.85, name, size=8.5, colour=colour)
        for row in range(start, end):
            box(ax, at(row), 2.35, wide * 0.86, 0.32, colour=colour, fill=0.4, linewidth=0.5)
    words(ax, left - 0.1, 2.51, "k, v", size=9, ha="right")
    for row in range(0, ROWS + 1, UNIT):
        ax.plot((at(row) - 0.01, at(row) - 0.01), (2.12, 2.3), color=SOFT, linewidth=0.9)
        words(ax, at(row), 2.02, str(row), size=7, colour=SOFT)
    source = FIRST - FIRST % UNIT
    for i, row in enumerate(range(source, END, BLOCK)):
        y = 1.3
        box(ax, at(row), y, wide * BLOCK - 0.02, 0.34, colour=GREEN, fill=0.0)
        words(ax, at(row) + wide * BLOCK / 2, y + 0.5, f"block {i}", size=8, colour=GREEN)
        for j in range(row, row + BLOCK):
            mine = FIRST <= j < END
            colour = BLUE if mine else RED
            box(ax, at(j) + 0.01, y + 0.06, wide * 0.72, 0.22, colour=colour, fill=0.4 if mine else 0.85, linewidth=0.3)
    words(ax, left - 0.1, 1.47, "loaded", size=9, ha="right")
    words(ax, at(source), 0.98, "masked: rows of the neighbour before", size=8, ha="left", colour=RED)
    words(ax, at(END) + 0.05, 0.98, "and after", size=8, ha="left", colour=RED)
    words(ax, left, 0.62, f"source = {source}: the multiple of 8 before the first key; block 0 begins there", size=8.5,
          ha="left")  # fmt: skip
    words(ax, left, 0.36, f"first_kv = {FIRST - source}, num_kv = {END - source}: between which of a block's rows the "
          "keys of the sequence lie,", size=8.5, ha="left")  # fmt: skip
    words(ax, left, 0.13, "counted from source", size=8.5, ha="left")
    return fig


if __name__ == "__main__":
    save(__file__, draw())

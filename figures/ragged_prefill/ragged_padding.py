"""Sequences of a batch: each padded to the longest, and packed one after the other."""

import itertools

from figures._draw import BLUE, GREEN, ORANGE, PINK, RED, SKY, SOFT, box, canvas, save, words

LENGTHS = 9, 3, 6, 1, 4
COLOURS = BLUE, GREEN, PINK, ORANGE, SKY


def draw():
    fig, ax = canvas(7.8, 3.7)
    unit, left, row = 0.27, 1.35, 0.3
    words(ax, 0.1, 3.5, "padded to the longest", ha="left", weight="bold")
    for i, (length, colour) in enumerate(zip(LENGTHS, COLOURS, strict=True)):
        y = 2.95 - row * i
        words(ax, left - 0.12, y + 0.11, f"sequence {i}", size=8, ha="right")
        for j in range(max(LENGTHS)):
            mine = j < length
            look = dict(fill=0.35) if mine else dict(fill=0.04, linestyle=":")
            box(ax, left + unit * j, y, unit * 0.86, 0.23, colour=colour if mine else SOFT, **look)
    total, padded = sum(LENGTHS), len(LENGTHS) * max(LENGTHS)
    x = left + unit * max(LENGTHS) + 0.35
    words(ax, x, 2.75, f"{padded} rows are computed and kept,", ha="left", size=8.5)
    words(ax, x, 2.5, f"of which {total} are wanted", ha="left", size=8.5)
    words(ax, x, 2.0, "dotted: padding", ha="left", size=8, colour=SOFT)

    words(ax, 0.1, 1.3, "packed", ha="left", weight="bold")
    starts = [0, *itertools.accumulate(LENGTHS)]
    for start, length, colour in zip(starts, LENGTHS, COLOURS, strict=False):
        for j in range(length):
            box(ax, left + unit * (start + j) * 0.93, 0.82, unit * 0.8, 0.26, colour=colour, fill=0.35)
    for i, start in enumerate(starts):
        at = left + unit * start * 0.93 - 0.017
        ax.plot((at, at), (0.62, 1.15), color=RED, linewidth=1.1)
        words(ax, at, 0.5, str(start), size=8, colour=RED)
        words(ax, at, 0.28, f"[{i}]", size=6.5, colour=SOFT)
    words(ax, left - 0.12, 0.5, "cu_seqlens", size=8.5, ha="right", colour=RED)
    return fig


if __name__ == "__main__":
    save(__file__, draw())

"""The table of tiles: rows of lhs in groups, the tiles that cover them, and the integers that say where each one is."""

import itertools

from figures._draw import RED, SOFT, arrow, box, canvas, save, words
from figures.grouped_matmul.groups_waste import COLOURS, SIZES, TILE

ROWS = 280  # Rows of lhs; those after the last group belong to none.


def entries():
    """(group, first row, end of the group) of each tile; the last two groups are of rows without one."""
    sizes = (*SIZES, 0, ROWS - sum(SIZES))  # None before all groups, and some after.
    starts = [0, *itertools.accumulate(sizes)]
    return [
        (group, first, starts[group + 1])
        for group in range(len(sizes))
        for first in range(starts[group], starts[group + 1], TILE)
    ]


def draw():
    fig, ax = canvas(7.8, 4.3)
    scale, left = 0.0232, 1.05
    colours = (*COLOURS, SOFT, SOFT)
    sizes = (*SIZES, 0, ROWS - sum(SIZES))  # None before all groups, and some after.
    starts = [0, *itertools.accumulate(sizes)]
    words(ax, left - 0.12, 3.74, "rows of lhs", size=8.5, ha="right")
    words(ax, left - 0.12, 2.85, "tiles", size=8.5, ha="right")
    for group, size in enumerate(sizes):
        x = left + scale * starts[group]
        if group == len(SIZES):
            continue
        if not size:
            words(ax, x, 4.1, f"group {group}: 0", size=7.5, colour=colours[group])
            arrow(ax, (x, 4.03), (x, 3.93), colours[group], width=0.9)
            continue
        box(ax, x, 3.56, max(scale * size - 0.02, 0.03), 0.36, colour=colours[group], fill=0.35, linewidth=0.8)
        at = x + scale * size / 2
        name = f"group {group}: {size} rows" if size > 70 else f"group {group}: {size}"
        text = name if group < len(SIZES) else f"of none: {size}"
        high = size > 60
        words(ax, at, 3.74 if high else 4.1, text, size=7.5, colour="#222222" if high else colours[group])
        if not high:
            arrow(ax, (at, 4.03), (at, 3.93), colours[group], width=0.9)
    for number, (group, first, end) in enumerate(entries()):
        x, mine = left + scale * first, min(TILE, end - first)
        y = 3.06 - 0.36 * (number % 3)
        reach = min(TILE, ROWS - first)
        box(ax, x, y, scale * reach - 0.02, 0.3, colour=colours[group], fill=0.0, linestyle=":", linewidth=0.8)
        box(ax, x, y, max(scale * mine - 0.02, 0.03), 0.3, colour=colours[group], fill=0.35, linewidth=0.8)
        words(ax, x + (scale * mine / 2 if mine > 10 else scale * mine + 0.1), y + 0.15, str(number), size=8)
    words(ax, left, 2.12, "dotted: rows that a tile computes too, and does not store: rows of later groups",
          size=7.5, ha="left", colour=SOFT)  # fmt: skip

    x, width = left + 0.1, 0.62
    rows = list(zip(*entries(), strict=True))
    for y, name, values in zip((1.38, 1.06, 0.68, 0.3), ("entry", "group", "start", "end"),
                               (range(len(entries())), *rows), strict=True):  # fmt: skip
        words(ax, x - 0.12, y + 0.15, name, size=8.5, ha="right")
        for i, value in enumerate(values):
            colour = colours[rows[0][i]]
            if name == "entry":
                words(ax, x + width * i + 0.28, y + 0.15, str(value), size=8, colour=SOFT)
            else:
                box(ax, x + width * i, y, width - 0.06, 0.3, str(value), colour, fill=0.2, size=8.5)
    arrow(ax, (x + 2.5, 1.98), (x + 2.5, 1.72), RED)
    words(ax, x + 2.65, 1.86, "made in XLA of the sizes, on the device", size=8, ha="left", colour=RED)
    words(ax, x, 0.1, f"count: {sum(g < len(SIZES) for g in rows[0])} entries of groups, {len(rows[0])} with those of "
          "rows without a group, which become zeros", size=8, ha="left")  # fmt: skip
    return fig


if __name__ == "__main__":
    save(__file__, draw())

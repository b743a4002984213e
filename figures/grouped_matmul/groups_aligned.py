"""Where tiles begin: at multiples of their rows, so that groups share tiles, or at the first row of each group."""

import itertools

from figures._draw import BLUE, ORANGE, PINK, RED, SKY, SOFT, box, canvas, save, words

SIZES, TILE = (100, 60, 130, 30), 64
COLOURS = BLUE, ORANGE, PINK, SKY


def bounds():
    ends = list(itertools.accumulate(SIZES))
    return list(zip([0, *ends[:-1]], ends, strict=True))


def on_the_grid():
    """(group, first row, end) of each tile that is computed: a tile counts once for each group that it has rows of."""
    return [
        (group, first, first + TILE)
        for group, (start, end) in enumerate(bounds())
        for first in range(start // TILE * TILE, end, TILE)
    ]


def from_the_group():
    return [
        (group, first, first + TILE) for group, (start, end) in enumerate(bounds()) for first in range(start, end, TILE)
    ]


def draw():
    fig, ax = canvas(7.8, 3.6)
    left, scale = 0.3, 0.0158
    total = sum(SIZES)

    def groups(y):
        for group, (start, end) in enumerate(bounds()):
            box(ax, left + scale * start, y, scale * (end - start) - 0.02, 0.28, f"group {group}: {end - start}"
                if end - start > 30 else f"{group}: {end - start}", COLOURS[group], 0.35, size=7.5)  # fmt: skip

    for y, title, tiles in (
        (2.85, "on the array's grid", on_the_grid()),
        (1.1, "from the first row of each group", from_the_group()),
    ):
        words(ax, left, y + 0.5, f"{title}: {len(tiles)} tiles of {TILE} rows", ha="left", weight="bold")
        if "grid" in title:
            for row in range(0, total + TILE, TILE):
                x = left + scale * row
                ax.plot([x, x], [y - 0.9, y - 0.02], color=SOFT, linewidth=0.8, linestyle="--", zorder=0)
        groups(y)
        for number, (group, first, end) in enumerate(tiles):
            lane = number % 2 if "grid" not in title else group % 2
            at = y - 0.38 - 0.42 * lane
            start, stop = bounds()[group]
            mine = max(first, start), min(end, stop)
            box(ax, left + scale * first, at, scale * TILE - 0.02, 0.3, colour=COLOURS[group], fill=0.03,
                linestyle=":", linewidth=0.8)  # fmt: skip
            box(ax, left + scale * mine[0], at, max(scale * (mine[1] - mine[0]) - 0.02, 0.04), 0.3,
                colour=COLOURS[group], fill=0.35, linewidth=0.8)  # fmt: skip
            middle = sum(mine) / 2 if mine[1] - mine[0] > 10 else mine[1] + 8
            words(ax, left + scale * middle, at + 0.15, str(number), size=8)
    words(ax, 7.05, 2.5, "a tile with rows of\ntwo groups is\ncomputed twice", size=8, colour=RED)
    words(ax, 7.05, 0.75, "only the last tile\nof a group\nis not full", size=8, colour=RED)
    return fig


if __name__ == "__main__":
    save(__file__, draw())

"""Parts of a step's slot that two compute warpgroups read, if they share the tile by rows or by columns."""

from figures._draw import BLUE, GREEN, PINK, SOFT, box, canvas, save, words

UNIT = 0.0068  # Inches a row or column.
M, N, K = 128, 256, 64


def draw():
    fig, ax = canvas(7.6, 2.6)
    _panel(ax, 0.2, "split_dim=0: by rows", 0)
    _panel(ax, 4.05, "split_dim=1: by columns", 1)
    return fig


def _panel(ax, x, title, split_dim):
    m, n, k = (UNIT * side for side in (M, N, K))
    left, bottom = x + k + 0.28, 0.62
    top = bottom + m + 0.2
    words(ax, x, 2.42, title, ha="left", weight="bold", size=9)
    words(ax, x + k / 2, bottom + m + 0.12, "A", size=9)
    words(ax, left - 0.12, top + k / 2, "B", size=9)
    both = dict(colour=PINK, fill=0.45)
    halves = (dict(colour=BLUE, fill=0.35), dict(colour=GREEN, fill=0.35))
    if split_dim == 0:
        for i, style in enumerate(halves):
            y = bottom + m / 2 * (1 - i)
            box(ax, x, y, k, m / 2, size=7.5, **style)
            box(ax, left, y, n, m / 2, f"warpgroup {i}: 64x256", size=8, **style)
        box(ax, left, top, n, k, "read by both", size=8, **both)
        text = "one instruction of 64x256 for each 16 of K"
    else:
        box(ax, x, bottom, k, m, "read\nby\nboth", size=7.5, **both)
        for i, style in enumerate(halves):
            box(ax, left + n / 2 * i, bottom, n / 2, m, f"warpgroup {i}\n128x128", size=8, **style)
            box(ax, left + n / 2 * i, top, n / 2, k, size=7.5, **style)
        text = "two of 64x128 for each 16 of K: each reads its B again"
    words(ax, x, 0.3, text, ha="left", size=8, colour=SOFT)


if __name__ == "__main__":
    save(__file__, draw())

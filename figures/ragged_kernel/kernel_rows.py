"""The 64 rows of a tile: queries of one head, or fewer queries with all heads that read the same keys."""

from figures._draw import BLUE, GREEN, ORANGE, PINK, SOFT, box, canvas, save, words

COLOURS = BLUE, ORANGE, PINK, GREEN
ROWS = 16  # Rows that are drawn, in place of 64.


def tile(ax, x, y, used, width=0.42):
    """Rows of a tile; `used` are their colours, the others are empty."""
    high = 0.105
    for row in range(ROWS):
        mine = row < len(used)
        colour = used[row] if mine else SOFT
        box(ax, x, y - high * (row + 1), width, high * 0.85, colour=colour, fill=0.55 if mine else 0.05, linewidth=0.4)


def keys(ax, x, y, width=0.42):
    box(ax, x, y, width, 0.3, "keys", SOFT, fill=0.15, size=7)


def draw():
    fig, ax = canvas(7.8, 3.75)
    words(ax, 0.2, 3.55, "one head a tile", ha="left", weight="bold")
    words(ax, 0.2, 3.3, "a prompt: 16 queries", size=8, ha="left")
    words(ax, 0.2, 1.13, "4 tiles, 4 times the keys", size=8, ha="left", colour=SOFT)
    for i, colour in enumerate(COLOURS):
        tile(ax, 0.2 + 0.47 * i, 3.15, [colour] * 16, 0.38)
        keys(ax, 0.2 + 0.47 * i, 0.72, 0.38)
    words(ax, 2.3, 3.3, "an answer: 1 query", size=8, ha="left")
    words(ax, 2.3, 1.13, "4 tiles, 4 times the keys", size=8, ha="left", colour=SOFT)
    for i, colour in enumerate(COLOURS):
        tile(ax, 2.3 + 0.47 * i, 3.15, [colour], 0.38)
        keys(ax, 2.3 + 0.47 * i, 0.72, 0.38)
    ax.plot((4.3, 4.3), (0.6, 3.6), color=SOFT, linewidth=0.8)
    words(ax, 4.5, 3.55, "all heads of a group in a tile", ha="left", weight="bold")
    words(ax, 4.5, 3.3, "a prompt: 16 queries", size=8, ha="left")
    words(ax, 4.5, 1.13, "4 tiles, 4 times the keys", size=8, ha="left", colour=SOFT)
    for i in range(4):
        tile(ax, 4.5 + 0.47 * i, 3.15, list(COLOURS) * 4, 0.38)
        keys(ax, 4.5 + 0.47 * i, 0.72, 0.38)
    words(ax, 6.55, 3.3, "an answer: 1 query", size=8, ha="left")
    words(ax, 6.55, 1.13, "1 tile", size=8, ha="left", colour=SOFT)
    tile(ax, 6.55, 3.15, list(COLOURS), 0.38)
    keys(ax, 6.55, 0.72, 0.38)
    words(ax, 0.2, 0.3, "Colours are query heads, four of which read one KV head. A row is one query of one head; "
          "a tile has 64, drawn are 16.", size=8, ha="left")  # fmt: skip
    return fig


if __name__ == "__main__":
    save(__file__, draw())

"""Which thread loads which element of a tile, for loads of 1, 2, 4 and 8 bf16 elements a thread."""

from figures._draw import SOFT, box, canvas, save, words
from lab import plot

ELEMENTS = 32  # The first of the tile; a cell is one element of 2 bytes.


def draw():
    fig, ax = canvas(7.8, 2.75)
    words(
        ax,
        1.55,
        2.55,
        f"the first {ELEMENTS} elements of a tile, and the thread that loads each",
        size=9,
        ha="left",
        weight="bold",
    )
    for row, vec in enumerate((1, 2, 4, 8)):
        y = 1.95 - 0.5 * row
        words(ax, 1.45, y + 0.17, f"{vec} element{'s' * (vec > 1)}\n{2 * vec} bytes a load", size=8, ha="right")
        for i in range(0, ELEMENTS, vec):
            thread = i // vec
            colour = plot.COLOURS[thread % 5]
            box(ax, 1.55 + 0.19 * i, y, 0.19 * vec - 0.02, 0.34, str(thread), colour, fill=0.25, size=7, linewidth=0.7)
    words(
        ax,
        1.55,
        0.18,
        "one load of a warp, 32 threads side by side, fetches 64, 128, 256 or 512 bytes in a row",
        size=8,
        ha="left",
        colour=SOFT,
    )
    return fig


if __name__ == "__main__":
    save(__file__, draw())

"""A length that is no multiple of the tile: whole tiles, then pieces of 128 elements, the last shifted back."""

from figures._draw import BLUE, GREEN, ORANGE, RED, SOFT, arrow, box, canvas, save, words

LENGTH, TILE, PIECE = 2348, 1024, 128
SCALE = 6.4 / 2348  # Inches an element.


def draw():
    fig, ax = canvas(7.8, 2.6)
    whole = LENGTH // TILE * TILE
    words(ax, 0.25, 2.42, f"{LENGTH} elements, tiles of {TILE}", size=10, ha="left", weight="bold")
    box(ax, 0.25, 1.75, LENGTH * SCALE, 0.3, "", SOFT, fill=0.12)
    words(ax, 0.25 + LENGTH * SCALE + 0.08, 1.9, "the array\nends here", size=8, ha="left", colour=RED)
    ax.plot([0.25 + LENGTH * SCALE] * 2, [0.5, 2.15], color=RED, linewidth=1.2)
    for i in range(whole // TILE):
        box(
            ax,
            0.25 + i * TILE * SCALE,
            1.3,
            TILE * SCALE - 0.02,
            0.32,
            f"block {i}: its tile, 16-byte loads",
            BLUE,
            size=8,
        )
    starts = list(range(whole, LENGTH, PIECE))
    for start in starts:
        last = start + PIECE > LENGTH
        start = min(start, LENGTH - PIECE)
        box(
            ax,
            0.25 + start * SCALE,
            0.98 - 0.36 * last,
            PIECE * SCALE - 0.01,
            0.28,
            "",
            ORANGE if last else GREEN,
            fill=0.35,
        )
    words(
        ax, 0.15 + whole * SCALE, 1.12, f"block {whole // TILE - 1} also does the pieces of {PIECE}", size=8, ha="right"
    )
    words(
        ax, 0.15 + whole * SCALE, 0.76, f"the last is shifted back, to start at {LENGTH} − {PIECE}", size=8, ha="right"
    )
    overlap = (starts[-2] + PIECE - (LENGTH - PIECE)) * SCALE
    x = 0.25 + (LENGTH - PIECE) * SCALE
    arrow(ax, (x + overlap / 2, 0.34), (x + overlap / 2, 0.62), ORANGE)
    words(ax, x + overlap / 2, 0.22, "computed twice, stored twice: the same value", size=8, ha="right")
    return fig


if __name__ == "__main__":
    save(__file__, draw())

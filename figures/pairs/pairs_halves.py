"""A pair of blocks: each holds its rows of A and half of B's columns, and one thread multiplies for both."""

from figures._draw import BLUE, GREEN, INK, ORANGE, PINK, SOFT, arrow, box, canvas, save, words


def draw():
    fig, ax = canvas(7.8, 4.3)
    for block, left in enumerate((0.25, 4.1)):
        box(ax, left, 0.3, 3.45, 3.45, colour=SOFT, fill=0.04)
        words(
            ax, left + 0.05, 3.95, f"block {block} of the pair, on an SM of its own", size=8.5, weight="bold", ha="left"
        )
        words(ax, left + 0.15, 3.57, "shared memory", size=7.5, colour=SOFT, ha="left")
        box(ax, left + 0.2, 2.65, 1.4, 0.75, f"A: rows of block {block}\n128 x 64", colour=BLUE, size=7.5)
        half = (ORANGE, GREEN)[block]
        box(ax, left + 1.85, 2.65, 1.4, 0.75, f"B: half {block}\n64 x 128", colour=half, size=7.5)
        box(ax, left + 0.2, 1.6, 3.05, 0.45, "tensor cores", colour=INK, size=8.5)
        box(ax, left + 0.2, 0.6, 1.52, 0.5, "columns of half 0", colour=ORANGE, fill=0.22, size=7.5)
        box(ax, left + 1.72, 0.6, 1.53, 0.5, "columns of half 1", colour=GREEN, fill=0.22, size=7.5)
        arrow(ax, (left + 0.55, 2.65), (left + 0.55, 2.05), BLUE)
        arrow(ax, (left + 1.72, 1.6), (left + 1.72, 1.1), PINK, style="<|-|>")
        words(ax, left + 0.2, 0.44, f"tensor memory: sums of block {block}'s rows", size=7.5, colour=SOFT, ha="left")
    arrow(ax, (2.65, 2.65), (2.65, 2.05), ORANGE)
    arrow(ax, (3.3, 2.65), (5.2, 2.05), ORANGE)
    arrow(ax, (6.95, 2.65), (6.95, 2.05), GREEN)
    arrow(ax, (6.1, 2.65), (3.2, 2.05), GREEN)
    text = "one thread of block 0 starts a product of 256 x 256; each half of B lies in one shared memory only"
    words(ax, 3.9, 0.12, text, size=7.8, colour=INK)
    return fig


if __name__ == "__main__":
    save(__file__, draw())

"""Reach of each memory of a GPU: two blocks of two warpgroups each, and the three memories that a kernel names."""

from figures._draw import BLUE, GREEN, INK, ORANGE, RED, SOFT, arrow, box, canvas, save, words


def draw():
    fig, ax = canvas(7.8, 4.4)
    for i, x in enumerate((0.2, 3.0)):
        _block(ax, x)
        words(ax, x + 0.1, 4.22, f"block {i}, on one SM", size=9.5, ha="left", weight="bold")
    words(ax, 1.45, 2.85, "load, store", size=7.5, colour=GREEN)
    words(ax, 2.1, 1.16, "TMA copies", size=7.5, colour=RED, ha="left")
    words(ax, 0.48, 1.16, "load, store", size=7.5, colour=RED, ha="left")
    box(ax, 0.2, 0.25, 5.45, 0.6, "GMEM: the arrays of JAX, in HBM, cached by L2", RED)
    for y, name, colour, rest in (
        (3.5, "registers", GREEN, "private to one thread"),
        (2.25, "SMEM", ORANGE, "shared by all warpgroups of\na block and its TMA unit;\nfreed when the block ends"),
        (0.55, "GMEM", RED, "shared by all blocks;\noutlives the kernel"),
    ):
        words(ax, 5.85, y + 0.05, name, size=9.5, ha="left", va="bottom", weight="bold", colour=colour)
        words(ax, 5.85, y, rest, size=8, ha="left", va="top")
    return fig


def _block(ax, x):
    box(ax, x, 1.4, 2.65, 2.7, colour=BLUE, fill=0.05)
    for wg in range(2):
        left = x + 0.12 + 1.23 * wg
        box(ax, left, 3.15, 1.18, 0.83, colour=SOFT, fill=0.08)
        words(ax, left + 0.59, 3.83, f"warpgroup {wg}", size=8)
        box(ax, left + 0.07, 3.22, 1.04, 0.45, "registers", GREEN, size=8)
        arrow(ax, (left + 0.59, 2.55), (left + 0.59, 3.22), GREEN, style="<|-|>")
    box(ax, x + 0.42, 2.13, 2.1, 0.42, "SMEM", ORANGE)
    box(ax, x + 1.4, 1.5, 0.8, 0.36, "TMA", INK, size=8.5)
    arrow(ax, (x + 1.8, 1.86), (x + 1.8, 2.13), ORANGE, style="<|-|>")
    arrow(ax, (x + 1.8, 0.85), (x + 1.8, 1.5), RED, style="<|-|>")
    arrow(ax, (x + 0.24, 0.85), (x + 0.24, 3.22), RED, style="<|-|>")


if __name__ == "__main__":
    save(__file__, draw())

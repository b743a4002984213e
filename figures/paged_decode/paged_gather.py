"""Attention over a gathered copy of the pages, and over the pages themselves: what crosses HBM."""

from figures._draw import BLUE, GREEN, ORANGE, SOFT, arrow, box, canvas, save, words


def draw():
    fig, ax = canvas(7.8, 3.0)
    for x, title in ((0.15, "XLA: gather, then attend"), (4.95, "a kernel that follows the table")):
        words(ax, x, 2.82, title, size=9, ha="left", weight="bold")
    for x, width in ((0.15, 4.5), (4.95, 2.7)):
        box(ax, x, 1.55, width, 1.05, colour=SOFT, fill=0.05)
        box(ax, x, 0.45, width, 0.62, colour=SOFT, fill=0.05)
        words(ax, x + width - 0.06, 1.65, "HBM", size=7.5, ha="right", colour=SOFT)
        words(ax, x + width - 0.06, 0.55, "SMs", size=7.5, ha="right", colour=SOFT)
    _pages(ax, 0.35)
    _pages(ax, 5.6)
    box(ax, 2.65, 1.9, 1.55, 0.35, "a copy, in order", GREEN, fill=0.3, size=8)
    box(ax, 1.0, 0.6, 1.3, 0.36, "gather kernel", ORANGE, size=8)
    box(ax, 2.9, 0.6, 1.1, 0.36, "attention", BLUE, size=8)
    box(ax, 5.75, 0.6, 1.1, 0.36, "attention", BLUE, size=8)
    arrow(ax, (1.2, 1.78), (1.45, 0.98), ORANGE, "1. read", offset=(-0.4, 0.0))
    arrow(ax, (1.95, 0.98), (2.75, 1.88), ORANGE, "2. write", offset=(0.38, -0.12))
    arrow(ax, (3.5, 1.88), (3.45, 0.98), BLUE, "3. read", offset=(0.36, 0.0))
    arrow(ax, (6.3, 1.78), (6.3, 0.98), BLUE, "1. read", offset=(0.36, 0.0))
    words(ax, 0.15, 0.2, "three times the bytes, and room for the copy", size=8.5, ha="left")
    words(ax, 4.95, 0.2, "each key and value once", size=8.5, ha="left")
    return fig


def _pages(ax, x):
    for page in range(12):
        colour = GREEN if page in (1, 4, 7, 8, 10) else SOFT
        box(
            ax, x + 0.3 * (page % 6), 2.2 - 0.33 * (page // 6), 0.25, 0.26, colour=colour,
            fill=0.35 if colour == GREEN else 0.03, linewidth=0.7,
        )  # fmt: skip


if __name__ == "__main__":
    save(__file__, draw())

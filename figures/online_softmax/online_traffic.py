"""Attention with its matrix of weights in memory, and without."""

from figures._draw import BLUE, GREEN, ORANGE, RED, SOFT, arrow, box, canvas, save, words


def draw():
    fig, ax = canvas(7.8, 3.3)
    words(ax, 0.15, 3.1, "three kernels: the matrix crosses memory four times", ha="left", weight="bold")
    box(ax, 0.15, 0.35, 4.75, 0.62, colour=SOFT)
    words(ax, 0.3, 0.17, "HBM", ha="left", size=8, colour=SOFT)
    for x, name, colour in ((0.75, "$q\\,k^T$", BLUE), (2.15, "softmax", ORANGE), (3.55, "$p\\,v$", BLUE)):
        box(ax, x, 2.1, 1.1, 0.6, name, colour)
    for x, name, colour in (
        (0.2, "q, k", BLUE),
        (1.65, "s", RED),
        (3.05, "p", RED),
        (3.72, "v", BLUE),
        (4.35, "out", BLUE),
    ):
        box(ax, x, 0.45, 0.5, 0.42, name, colour, fill=0.3)
    arrow(ax, (0.5, 0.9), (0.95, 2.08), BLUE)
    arrow(ax, (1.55, 2.08), (1.8, 0.9), RED, "T x S", offset=(-0.22, 0.0))
    arrow(ax, (1.98, 0.9), (2.4, 2.08), RED)
    arrow(ax, (2.95, 2.08), (3.2, 0.9), RED, "T x S", offset=(-0.22, 0.0))
    arrow(ax, (3.38, 0.9), (3.8, 2.08), RED)
    arrow(ax, (3.97, 0.9), (4.1, 2.08), BLUE)
    arrow(ax, (4.4, 2.08), (4.6, 0.9), BLUE)
    words(ax, 5.35, 3.1, "one kernel", ha="left", weight="bold")
    box(ax, 5.35, 0.35, 2.3, 0.62, colour=SOFT)
    box(ax, 5.35, 2.1, 2.3, 0.6, colour=GREEN)
    words(ax, 6.5, 2.52, "$q\\,k^T$, softmax, $p\\,v$", size=8.5)
    words(ax, 6.5, 2.27, "s and p: a block at a time, registers", size=6.8, colour=RED)
    box(ax, 5.45, 0.45, 0.8, 0.42, "q, k, v", BLUE, fill=0.3)
    box(ax, 7.0, 0.45, 0.55, 0.42, "out", BLUE, fill=0.3)
    arrow(ax, (5.85, 0.9), (5.85, 2.08), BLUE)
    arrow(ax, (7.28, 2.08), (7.28, 0.9), BLUE)
    return fig


if __name__ == "__main__":
    save(__file__, draw())

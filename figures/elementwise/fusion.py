"""Two kernels move five arrays through HBM; one fused kernel moves three."""

from figures._draw import BLUE, GREEN, INK, RED, SOFT, arrow, box, canvas, save, words


def draw():
    fig, ax = canvas(7.8, 2.75)
    words(ax, 0.25, 2.55, "two kernels: 5 arrays cross", size=10, ha="left", weight="bold")
    words(ax, 4.75, 2.55, "one kernel: 3 arrays cross", size=10, ha="left", weight="bold")
    for x, width in ((0.25, 3.9), (4.75, 2.8)):
        box(ax, x, 0.25, width, 0.42, "HBM", RED)
    for x, text in ((0.45, "x + y"), (2.55, "gelu(s)"), (5.0, "gelu(x + y)")):
        box(ax, x, 1.75, 1.4, 0.5, text, INK, fill=0.08, size=10)
    _traffic(ax, ((0.6, "x", 1), (1.1, "y", 1), (1.6, "s", 0), (2.75, "s", 1), (3.65, "out", 0)))
    _traffic(ax, ((5.15, "x", 1), (5.65, "y", 1), (6.15, "out", 0)))
    words(ax, 7.5, 2.0, "s stays in\nregisters", size=8, ha="right", colour=SOFT)
    return fig


def _traffic(ax, arrays):
    for x, name, read in arrays:
        low, high = (x, 0.67), (x, 1.75)
        arrow(ax, low if read else high, high if read else low, BLUE if read else GREEN)
        words(ax, x + 0.07, 1.2, name, size=9, ha="left", colour=BLUE if read else GREEN)


if __name__ == "__main__":
    save(__file__, draw())

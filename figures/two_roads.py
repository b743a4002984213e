"""Two roads from global memory to the registers: straight, or by TMA through shared memory."""

from figures._draw import BLUE, GREEN, INK, ORANGE, RED, SOFT, arrow, box, canvas, save, words


def draw():
    fig, ax = canvas(7.8, 2.9)
    words(ax, 0.25, 2.7, "straight: two moves", size=10, ha="left", weight="bold")
    _memory(ax, 1.75)
    _threads(ax, 1.75)
    arrow(ax, (1.55, 2.2), (5.2, 2.2), BLUE, "load x, y (16 bytes a thread)")
    arrow(ax, (5.2, 1.95), (1.55, 1.95), GREEN, "store x + y", offset=(0, -0.13))
    words(ax, 0.25, 1.3, "through shared memory: four moves and two waits", size=10, ha="left", weight="bold")
    _memory(ax, 0.35)
    box(ax, 2.9, 0.35, 1.1, 0.65, "shared\nmemory", ORANGE)
    _threads(ax, 0.35)
    arrow(ax, (1.55, 0.82), (2.9, 0.82), BLUE, "TMA copies in")
    arrow(ax, (4.0, 0.82), (5.2, 0.82), BLUE, "wait, load")
    arrow(ax, (5.2, 0.52), (4.0, 0.52), GREEN, "store", offset=(0, -0.12))
    arrow(ax, (2.9, 0.52), (1.55, 0.52), GREEN, "TMA copies out, wait", offset=(0, -0.12))
    words(ax, 6.72, 2.07, "HBM moves\nthe same bytes", size=8.5, ha="left", colour=SOFT)
    words(ax, 6.72, 0.67, "HBM moves\nthe same bytes", size=8.5, ha="left", colour=SOFT)
    return fig


def _memory(ax, y):
    box(ax, 0.25, y, 1.3, 0.65, "global memory\n(HBM)", RED)


def _threads(ax, y):
    box(ax, 5.2, y, 1.3, 0.65, "registers of\n128 threads", INK, fill=0.08)


if __name__ == "__main__":
    save(__file__, draw())

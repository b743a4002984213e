"""One store to a peer's memory and one signal: through which memories they go, and in which order."""

from figures._draw import BLUE, GREEN, INK, ORANGE, PALE, SOFT, arrow, box, canvas, save, words


def draw():
    fig, ax = canvas(7.8, 3.9)
    for x, name in ((0.2, "GPU 0"), (4.7, "GPU 1")):
        box(ax, x, 0.55, 2.9, 3.1, colour=SOFT, fill=0.04)
        words(ax, x + 0.12, 3.47, name, size=10, ha="left", weight="bold")
    box(ax, 0.4, 2.1, 1.25, 1.15, colour=BLUE, fill=0.08)
    words(ax, 1.02, 3.1, "an SM", size=8, colour=BLUE)
    box(ax, 0.5, 2.2, 1.05, 0.42, "shared memory", BLUE, size=7.5)
    box(ax, 0.5, 2.68, 1.05, 0.28, "warpgroup", INK, fill=0.06, size=7.5)
    box(ax, 0.4, 0.75, 2.5, 0.62, colour=ORANGE, fill=0.08)
    words(ax, 2.8, 1.22, "HBM and L2", size=7.5, ha="right", colour=ORANGE)
    box(ax, 0.5, 0.82, 0.62, 0.26, "x", ORANGE, size=8)

    box(ax, 6.15, 2.1, 1.25, 1.15, colour=BLUE, fill=0.08)
    words(ax, 6.77, 3.1, "an SM", size=8, colour=BLUE)
    box(ax, 6.25, 2.54, 1.05, 0.42, "shared memory", BLUE, size=7.5)
    box(ax, 6.25, 2.2, 1.05, 0.28, "warpgroup", INK, fill=0.06, size=7.5)
    box(ax, 4.9, 0.75, 2.5, 0.62, colour=ORANGE, fill=0.08)
    words(ax, 7.3, 1.22, "HBM and L2", size=7.5, ha="right", colour=ORANGE)
    box(ax, 5.0, 0.82, 0.62, 0.26, "o", ORANGE, size=8)
    box(ax, 5.75, 0.82, 0.72, 0.26, "arrived", GREEN, size=7.5)

    box(ax, 3.25, 0.55, 1.3, 3.1, colour=PALE, fill=0.9, linewidth=0)
    words(ax, 3.9, 3.47, "NVLink", size=9, colour=SOFT)
    arrow(ax, (0.75, 1.1), (0.75, 2.18), ORANGE)
    words(ax, 0.7, 1.68, "1 TMA\nloads", size=7.5, ha="right", colour=ORANGE)
    arrow(ax, (1.57, 2.35), (5.2, 1.1), BLUE, width=1.8, shrinkA=2)
    words(ax, 3.9, 1.98, "2 store: TMA", size=8, colour=BLUE)
    arrow(ax, (1.57, 2.76), (5.95, 1.1), GREEN, width=1.4, connectionstyle="arc3,rad=-0.28")
    words(ax, 3.9, 2.95, "4 signal: + 1", size=8, colour=GREEN)
    arrow(ax, (4.88, 0.9), (1.3, 2.18), SOFT, width=1.0, linestyle=":", connectionstyle="arc3,rad=-0.25")
    words(ax, 3.9, 0.72, "3 “it is written”", size=8, colour=SOFT)
    arrow(ax, (6.3, 1.1), (6.75, 2.18), GREEN, width=1.2, linestyle="--")
    words(ax, 6.68, 1.62, "5 wait", size=8, ha="left", colour=GREEN)
    words(ax, 0.2, 0.27, "Dotted: what the flush waits for. Without it 4 may reach GPU 1 before 2 does.", size=8,
          ha="left")  # fmt: skip
    return fig


if __name__ == "__main__":
    save(__file__, draw())

"""A read that does not wait for the copy into its place, and one that does."""

from figures._draw import BLUE, GREEN, INK, ORANGE, RED, SOFT, arrow, box, canvas, save, words


def draw():
    fig, ax = canvas(7.8, 2.75)
    words(ax, 0.25, 2.57, "hasty: nothing orders the read after the copy", size=10, ha="left", weight="bold")
    _lanes(ax, 1.6, copy=(2.1, 2.4))
    box(ax, 2.3, 1.6, 1.3, 0.3, "reads x_smem", RED, fill=0.35, size=8)
    box(ax, 3.68, 1.6, 1.9, 0.3, "writes the result", GREEN, size=8)
    box(ax, 5.66, 1.6, 0.6, 0.3, "waits", SOFT, size=8)
    words(ax, 6.4, 1.75, "too late", size=8, ha="left")
    words(ax, 0.25, 1.17, "patient: the barrier puts the read after the copy", size=10, ha="left", weight="bold")
    _lanes(ax, 0.2, copy=(2.1, 2.4))
    box(ax, 2.3, 0.2, 2.2, 0.3, "waits", SOFT, size=8)
    box(ax, 4.58, 0.2, 1.3, 0.3, "reads x_smem", BLUE, fill=0.35, size=8)
    box(ax, 5.96, 0.2, 1.5, 0.3, "writes the result", GREEN, size=8)
    arrow(ax, (4.5, 0.6), (4.56, 0.5), INK)
    words(ax, 4.68, 0.74, "arrived", size=8, ha="left", colour=INK)
    return fig


def _lanes(ax, y, copy):
    words(ax, 1.45, y + 0.55, "TMA (copies)", size=8, ha="right")
    words(ax, 1.45, y + 0.15, "warpgroup", size=8, ha="right")
    box(ax, 1.55, y, 0.67, 0.3, "starts it", INK, fill=0.08, size=8)
    box(ax, copy[0], y + 0.4, copy[1], 0.3, "x_gmem to x_smem", ORANGE, fill=0.35, size=8)
    arrow(ax, (1.95, y + 0.3), (copy[0], y + 0.5), INK)


if __name__ == "__main__":
    save(__file__, draw())

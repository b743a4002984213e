"""A deadlock as a circle: two warpgroups, each at a barrier at which the other should arrive."""

from figures._draw import BLUE, INK, ORANGE, RED, SOFT, arrow, box, canvas, save, words


def draw():
    fig, ax = canvas(7.8, 2.9)
    box(ax, 0.25, 1.15, 1.75, 0.75, "warpgroup 1\nloads", ORANGE, fill=0.3)
    box(ax, 5.8, 1.15, 1.75, 0.75, "warpgroup 0\nmultiplies", BLUE, fill=0.3)
    box(ax, 3.0, 2.1, 1.8, 0.55, "barrier freed[1]\n0 of 1 arrivals", INK, fill=0.06, size=8.5)
    box(ax, 3.0, 0.4, 1.8, 0.55, "barrier filled[1]\n0 of 2 arrivals", INK, fill=0.06, size=8.5)
    arrow(ax, (1.15, 1.92), (2.98, 2.4), ORANGE, "waits", offset=(-0.15, 0.14))
    arrow(ax, (6.65, 1.13), (4.82, 0.62), BLUE, "waits", offset=(0.2, -0.14))
    arrow(ax, (6.65, 1.92), (4.82, 2.4), RED, linestyle="--")
    words(ax, 6.42, 2.5, "should arrive, and has\npassed the line without", size=8, colour=RED)
    arrow(ax, (1.15, 1.13), (2.98, 0.62), SOFT, linestyle="--")
    words(ax, 1.35, 0.55, "would start the copies\nthat arrive, once it is free", size=8, colour=SOFT)
    words(ax, 3.9, 1.52, "begin at any wait, follow the arrows:\nthe red one is the mistake", size=8.5)
    return fig


if __name__ == "__main__":
    save(__file__, draw())

"""Keys split between two kernels, and their results merged by the log-sum-exp."""

from figures._draw import BLUE, GREEN, ORANGE, PINK, SOFT, arrow, box, canvas, save, words


def draw():
    fig, ax = canvas(7.8, 2.5)
    box(ax, 0.2, 0.95, 0.8, 0.6, "queries", BLUE)
    for y, name, colour, keys in ((1.6, "a", GREEN, "keys 0 to 127"), (0.3, "b", PINK, "keys 128 to 255")):
        box(ax, 1.75, y, 1.55, 0.6, f"attention\nto {keys}", colour, size=8)
        box(ax, 4.0, y, 1.25, 0.6, f"$out_{name}$, $lse_{name}$", colour, fill=0.3)
        arrow(ax, (1.02, 1.25), (1.73, y + 0.3), BLUE)
        arrow(ax, (3.32, y + 0.3), (3.98, y + 0.3), colour)
        arrow(ax, (5.27, y + 0.3), (5.9, 1.25 + (0.1 if name == "a" else -0.1)), colour)
    words(ax, 2.52, 1.25, "two blocks, or two GPUs, at the same time", size=7.5, colour=SOFT)
    box(ax, 5.92, 0.85, 0.75, 0.8, "merge", ORANGE)
    arrow(ax, (6.69, 1.25), (7.02, 1.25), ORANGE)
    words(ax, 7.38, 1.25, "out, lse", size=9)
    words(ax, 6.3, 0.45, "weights $e^{lse}$, as shares", size=7.5, colour=ORANGE)
    return fig


if __name__ == "__main__":
    save(__file__, draw())

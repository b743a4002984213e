"""One WGMMA: which part of each matrix it takes, and in which memory it finds it."""

from figures._draw import BLUE, GREEN, ORANGE, SOFT, arrow, box, canvas, save, words

LEFT, BOTTOM, WIDTH, HEIGHT = 1.75, 0.62, 2.9, 1.6  # Place and size of the accumulator.


def draw():
    fig, ax = canvas(7.8, 3.15)
    for warp in range(4):
        y = BOTTOM + HEIGHT * (3 - warp) / 4
        text = f"warp {warp}: rows {16 * warp} to {16 * warp + 15}"
        box(ax, LEFT, y, WIDTH, HEIGHT / 4 - 0.04, text, BLUE, size=8.5, linewidth=0.8)
    box(ax, LEFT - 0.62, BOTTOM, 0.5, HEIGHT - 0.04, "A", ORANGE, fill=0.3, size=11)
    box(ax, LEFT, BOTTOM + HEIGHT + 0.1, WIDTH, 0.42, "B", GREEN, fill=0.3, size=11)
    words(ax, LEFT - 0.72, BOTTOM + HEIGHT / 2, "64", size=9, ha="right")
    words(ax, LEFT - 0.37, BOTTOM - 0.16, "16", size=9)
    words(ax, LEFT + WIDTH / 2, BOTTOM + HEIGHT + 0.68, "N = 8, 16, 24, ... 256", size=9)
    words(ax, LEFT + WIDTH / 2, BOTTOM - 0.18, "accumulator += A @ B", size=10, weight="bold")
    words(ax, LEFT + WIDTH / 2, BOTTOM - 0.42, "64 x 16 x N multiply-adds, one instruction", size=8.5, colour=SOFT)
    x = LEFT + WIDTH + 0.55
    words(ax, x, 2.62, "A and B: tiles in shared memory", size=9, ha="left", weight="bold")
    words(ax, x, 2.33, "The instruction gets two *descriptors*:\nan address and a layout each.".replace("*", ""),
          size=8.5, ha="left")  # fmt: skip
    words(ax, x, 1.62, "accumulator: float32, in registers", size=9, ha="left", weight="bold", colour=BLUE)
    words(
        ax,
        x,
        1.33,
        "spread over the 128 threads of a warp-\ngroup, 16 rows for each of its 4 warps.",
        size=8.5,
        ha="left",
    )
    arrow(ax, (x - 0.08, 2.62), (LEFT + WIDTH + 0.04, 2.46), GREEN)
    arrow(ax, (x - 0.08, 1.62), (LEFT + WIDTH + 0.04, 1.5), BLUE)
    return fig


if __name__ == "__main__":
    save(__file__, draw())

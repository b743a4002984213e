"""Where the sums of a tile lie: in the registers of the warpgroups that multiply, or in tensor memory."""

from figures._draw import BLUE, GREEN, INK, ORANGE, PINK, SOFT, arrow, box, canvas, save, words


def draw():
    fig, ax = canvas(7.8, 4.15)
    for left, name, title in (
        (0.2, "Hopper", "sums in registers, beside everything else"),
        (4.05, "Blackwell", "sums in tensor memory, which holds two tiles"),
    ):
        box(ax, left, 0.2, 3.55, 3.5, colour=SOFT, fill=0.04)
        words(ax, left + 0.05, 3.93, name, size=10, weight="bold", ha="left")
        words(ax, left + 1.02, 3.92, title, size=8, ha="left", colour=SOFT)
        box(ax, left + 0.25, 2.95, 3.05, 0.5, "shared memory: slots of A and B", colour=BLUE, size=8.5)

    box(ax, 0.45, 2.0, 3.05, 0.45, "tensor cores", colour=ORANGE, size=8.5)
    arrow(ax, (1.98, 2.95), (1.98, 2.45), BLUE)
    for wg in range(2):
        x = 0.45 + 1.6 * wg
        arrow(ax, (x + 0.72, 2.0), (x + 0.72, 1.55), ORANGE, style="<|-|>")
        box(ax, x, 0.75, 1.45, 0.8, colour=GREEN, fill=0.04)
        box(ax, x, 0.75, 0.85, 0.8, "sums\n64 x 256", colour=GREEN, fill=0.3, size=8)
        words(ax, x + 1.15, 1.15, "the\nrest", size=7.5, colour=INK)
        words(ax, x + 0.72, 0.57, f"registers, warpgroup {wg}", size=7.5, colour=GREEN)
    words(ax, 1.98, 0.34, "128 of each thread's 255 registers hold sums", size=7.5, colour=SOFT)

    box(ax, 4.3, 2.0, 3.05, 0.45, "tensor cores", colour=ORANGE, size=8.5)
    arrow(ax, (5.0, 2.95), (5.0, 2.45), BLUE)
    arrow(ax, (5.0, 2.0), (5.0, 1.72), ORANGE, style="<|-|>")
    box(ax, 4.3, 1.0, 1.5, 0.72, "tile i + 1\n128 x 256", colour=PINK, fill=0.3, size=8)
    box(ax, 5.85, 1.0, 1.5, 0.72, "tile i\n128 x 256", colour=PINK, fill=0.12, size=8)
    words(ax, 4.3, 0.83, "tensor memory: 512 columns", size=7.5, colour=PINK, ha="left")
    box(ax, 6.05, 0.3, 1.3, 0.38, "store's registers", colour=GREEN, size=7.5)
    arrow(ax, (6.95, 1.0), (6.95, 0.68), PINK)
    words(ax, 4.3, 0.49, "128 lanes: the rows of a tile", size=7.5, colour=SOFT, ha="left")
    return fig


if __name__ == "__main__":
    save(__file__, draw())

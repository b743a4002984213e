"""One block of the kernel: a memory warpgroup, two rings, two compute warpgroups with 64 queries each."""

from figures._draw import BLUE, GREEN, INK, ORANGE, SKY, SOFT, arrow, box, canvas, save, words


def draw():
    fig, ax = canvas(7.6, 3.6)
    box(ax, 0.15, 1.35, 1.5, 1.1, colour=ORANGE)
    words(ax, 0.9, 2.05, "memory\nwarpgroup", weight="bold")
    words(ax, 0.9, 1.58, "starts copies", size=8, colour=SOFT)
    for y, name, full in ((2.25, "k", (0.6, 0.25)), (0.95, "v", (0.6, 0.6))):
        for slot, fill in enumerate(full):
            box(ax, 2.6 + 0.95 * slot, y, 0.85, 0.6, f"{name}, slot {slot}", colour=SKY, fill=fill, size=8)
        middle = y + 0.3
        arrow(ax, (1.65, 2.1 if name == "k" else 1.7), (2.55, middle), ORANGE, width=2)
        for wg_y in (2.55, 1.25):
            arrow(ax, (4.45, middle), (5.4, wg_y), BLUE, width=1.4)
    for wg, y in ((0, 2.1), (1, 0.8)):
        box(ax, 5.45, y, 2.0, 0.9, colour=BLUE)
        words(ax, 6.45, y + 0.64, f"compute warpgroup {wg}", weight="bold", size=8.5)
        words(ax, 6.45, y + 0.3, f"q, acc: queries {64 * wg} to {64 * wg + 63}", size=8, colour=SOFT)
    arrow(ax, (6.2, 2.06), (6.2, 1.74), INK)
    arrow(ax, (6.7, 1.74), (6.7, 2.06), INK)
    words(ax, 7.1, 1.9, "turn[wg]", size=8)
    arrow(ax, (1.0, 2.49), (6.3, 3.04), GREEN, connectionstyle="arc3,rad=-0.14")
    words(
        ax,
        3.7,
        3.45,
        "k_filled[slot], v_filled[slot]: a copy arrives, both compute warpgroups wait",
        size=8.5,
        colour=GREEN,
    )
    arrow(ax, (6.3, 0.76), (1.0, 1.31), INK, connectionstyle="arc3,rad=-0.14")
    words(
        ax,
        3.7,
        0.2,
        "k_freed[slot], v_freed[slot]: both arrive, the memory warpgroup waits before it refills",
        size=8.5,
    )
    return fig


if __name__ == "__main__":
    save(__file__, draw())

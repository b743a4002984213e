"""Two roles in one block: full slots go one way, empty slots the other, and each way has its barriers."""

from figures._draw import BLUE, GREEN, INK, ORANGE, SKY, SOFT, arrow, box, canvas, save, words

STAGES = 4


def draw():
    fig, ax = canvas(7.6, 3.1)
    box(ax, 0.15, 1.1, 1.55, 1.1, colour=ORANGE)
    words(ax, 0.92, 1.85, "memory\nwarpgroup", weight="bold")
    words(ax, 0.92, 1.36, "starts TMA copies", size=7.5, colour=SOFT)
    box(ax, 5.9, 1.1, 1.55, 1.1, colour=BLUE)
    words(ax, 6.67, 1.85, "compute\nwarpgroup", weight="bold")
    words(ax, 6.67, 1.36, "WGMMA, store", size=7.5, colour=SOFT)

    states = (("step 4\narrives", SKY, 0.25), ("step 1\nis read", BLUE, 0.35), ("step 2\nis full", SKY, 0.6))
    states += (("step 3\nis full", SKY, 0.6),)
    for slot, (text, colour, fill) in enumerate(states):
        box(ax, 2.42 + 0.72 * slot, 1.25, 0.64, 0.8, text, colour=colour, fill=fill, size=7.5)
        words(ax, 2.74 + 0.72 * slot, 1.1, f"slot {slot}", size=7, colour=SOFT)
    arrow(ax, (1.7, 1.65), (2.38, 1.65), ORANGE, width=2)
    arrow(ax, (5.3, 1.65), (5.88, 1.65), BLUE, width=2)

    arrow(ax, (2.74, 2.2), (6.6, 2.24), GREEN, connectionstyle="arc3,rad=-0.22")
    words(ax, 4.0, 2.93, "filled[slot]: the two copies arrive, the reader waits", size=8.5, colour=GREEN)
    arrow(ax, (6.6, 1.06), (1.0, 1.06), INK, connectionstyle="arc3,rad=-0.2")
    words(ax, 3.8, 0.18, "freed[slot]: the reader arrives, the memory warpgroup waits before it refills", size=8.5)
    return fig


if __name__ == "__main__":
    save(__file__, draw())

"""One slot in time: its owner, and the completion of a barrier that hands it over."""

from figures._draw import BLUE, GREEN, INK, ORANGE, SKY, SOFT, arrow, box, canvas, save, words

STAGES = 4
LEFT, WIDTH, GAP = 1.35, 0.92, 0.1


def draw():
    fig, ax = canvas(7.6, 2.3)
    upper, lower, height = 1.35, 0.45, 0.48
    for y, text, colour in ((upper, "memory and\nTMA", ORANGE), (lower, "compute", BLUE)):
        words(ax, LEFT - 0.12, y + height / 2, text, size=8.5, ha="right", colour=colour, weight="bold")
    for i in range(3):
        x = LEFT + 2 * i * (WIDTH + GAP)
        box(ax, x, upper, WIDTH, height, f"fills it with\nstep {STAGES * i}", colour=SKY, fill=0.4, size=7.5)
        read = x + WIDTH + GAP
        box(ax, read, lower, WIDTH, height, f"reads\nstep {STAGES * i}", colour=BLUE, fill=0.3, size=7.5)
        arrow(ax, (x + WIDTH, upper), (read, lower + height), GREEN)
        words(ax, x + WIDTH - 0.02, 1.14, f"filled: {i}", size=7.5, colour=GREEN, ha="right")
        if i < 2:
            arrow(ax, (read + WIDTH, lower + height), (read + WIDTH + GAP, upper), INK)
            words(ax, read + WIDTH - 0.02, 1.14, f"freed: {i}", size=7.5, ha="right")
    words(ax, LEFT, 2.1, f"slot 0 of {STAGES}, 12 steps: time goes to the right", ha="left", size=8.5, colour=SOFT)
    words(ax, LEFT, 0.18, "three fillings, three readings, two of which are told: nobody fills it again", ha="left",
          size=8, colour=SOFT)  # fmt: skip
    return fig


if __name__ == "__main__":
    save(__file__, draw())

"""Scales of blocks: one for each row and 128 values of K of lhs, one for each square of 128 of a matrix; their sums."""

from figures._draw import BLUE, GREEN, ORANGE, PINK, RED, SKY, SOFT, arrow, box, canvas, save, words

COLOURS = BLUE, ORANGE, GREEN, PINK


def draw():
    fig, ax = canvas(7.8, 3.9)
    words(ax, 1.35, 3.7, "lhs: 1 x 128", weight="bold")
    words(ax, 1.35, 3.47, "a scale for each row and step of K", size=8, colour=SOFT)
    for step, colour in enumerate(COLOURS):
        for row in range(6):
            fill = (0.5, 0.2, 0.35, 0.12, 0.42, 0.27)[(row + 2 * step) % 6]
            box(ax, 0.25 + 0.56 * step, 2.95 - 0.25 * row, 0.52, 0.21, colour=colour, fill=fill, linewidth=0.7)
        words(ax, 0.51 + 0.56 * step, 3.27, f"step {step}", size=7, colour=colour)
    words(ax, 1.35, 1.5, "K", size=8, colour=SOFT)
    arrow(ax, (1.5, 1.5), (2.3, 1.5), SOFT, width=0.8)

    words(ax, 4.05, 3.7, "a matrix: 128 x 128", weight="bold")
    words(ax, 4.05, 3.47, "a scale for each square", size=8, colour=SOFT)
    for step, colour in enumerate(COLOURS):
        for square in range(2):
            fill = (0.45, 0.2)[(square + step) % 2]
            box(ax, 3.2 + 0.86 * square, 2.72 - 0.44 * step, 0.82, 0.4, colour=colour, fill=fill, linewidth=0.7)
        words(ax, 3.1, 2.92 - 0.44 * step, f"step {step}", size=7, ha="right", colour=colour)
    words(ax, 4.05, 1.2, "columns", size=8, colour=SOFT)

    words(ax, 6.4, 3.7, "sums of a tile", weight="bold")
    words(ax, 6.4, 3.47, "in the registers of a warpgroup", size=8, colour=SOFT)
    box(ax, 5.45, 2.5, 0.85, 0.62, "products\nof step 1", ORANGE, 0.25, size=8)
    box(ax, 6.65, 2.5, 0.95, 0.62, "float32\nsums", SKY, 0.25, size=8)
    arrow(ax, (6.32, 2.81), (6.63, 2.81), RED)
    words(ax, 6.4, 2.22, "times both scales, then added:\nby the CUDA cores", size=8, colour=RED)
    words(ax, 6.4, 1.72, "each step begins\nwith an empty accumulator", size=8, colour=SOFT)

    wide, add, left = 0.68, 0.26, 1.3
    for wg, y in enumerate((0.75, 0.38)):
        words(ax, left - 0.1, y + 0.14, f"warpgroup {wg}", size=8, ha="right")
        for step, colour in enumerate(COLOURS):
            x = left + (2 * step + wg) * wide
            box(ax, x, y, wide - 0.03, 0.28, f"step {step}", colour, 0.3, size=7.5)
            box(ax, x + wide, y, add - 0.03, 0.28, "+", RED, 0.15, size=8)
    text = "one warpgroup adds while the other's products keep the tensor cores busy"
    words(ax, left + 1.3, 0.18, text, size=7.5, ha="left", colour=SOFT)
    words(ax, left, 0.18, "time", size=7.5, ha="left", colour=SOFT)
    arrow(ax, (left + 0.3, 0.18), (left + 1.1, 0.18), SOFT, width=0.8)
    return fig


if __name__ == "__main__":
    save(__file__, draw())

"""MXFP8: 32 values of a row share a power of two; and the way of values and scales to the tensor cores."""

from figures._draw import BLUE, GREEN, INK, ORANGE, PINK, SOFT, arrow, box, canvas, save, words


def draw():
    fig, ax = canvas(7.8, 3.5)
    words(ax, 0.25, 3.28, "a row of an operand", size=8.5, weight="bold", ha="left")
    for block in range(4):
        left = 0.25 + 1.85 * block
        for i in range(8):
            box(ax, left + 0.2 * i, 2.62, 0.2, 0.3, colour=BLUE, fill=0.22, linewidth=0.7)
        words(ax, left + 0.8, 3.05, "32 values, e4m3", size=7.5, colour=BLUE)
        box(ax, left + 0.5, 2.14, 0.6, 0.28, "scale", colour=ORANGE, fill=0.25, size=7.5)
        arrow(ax, (left + 0.8, 2.42), (left + 0.8, 2.62), ORANGE, width=1.0)
    words(ax, 3.85, 1.93, "a scale is 8 bits, e8m0: a power of two and nothing else; a step of K has 128 values and "
          "4 scales a row", size=7.8, colour=SOFT)  # fmt: skip
    for x, name in ((0.25, "global memory"), (2.25, "shared memory"), (4.2, "tensor memory"), (6.2, "tensor cores")):
        words(ax, x + 0.65, 1.55, name, size=8, weight="bold")
    for x in (0.25, 2.25):
        box(ax, x, 0.95, 1.3, 0.4, "values", colour=BLUE, size=8)
        box(ax, x, 0.35, 1.3, 0.4, "scales", colour=ORANGE, size=8)
    box(ax, 4.2, 0.35, 1.3, 0.4, "scales", colour=ORANGE, size=8)
    box(ax, 6.2, 0.35, 1.35, 1.0, "value x value\nx scale x scale\nadded in f32", colour=INK, size=7.8)
    arrow(ax, (1.55, 1.15), (2.25, 1.15), BLUE, "TMA", size=7.5)
    arrow(ax, (1.55, 0.55), (2.25, 0.55), ORANGE, "TMA", size=7.5)
    arrow(ax, (3.55, 1.15), (6.2, 1.15), BLUE)
    arrow(ax, (3.55, 0.55), (4.2, 0.55), ORANGE, "copy", size=7.5)
    arrow(ax, (5.5, 0.55), (6.2, 0.55), PINK)
    words(ax, 3.87, 0.12, "tcgen05.cp, in the order of the products", size=7.5, colour=SOFT)
    words(ax, 6.87, 0.12, "sums go to tensor memory", size=7.5, colour=GREEN)
    return fig


if __name__ == "__main__":
    save(__file__, draw())

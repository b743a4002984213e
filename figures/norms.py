"""Figures of chapter 23b: norms, gates and a short convolution."""

from figures._draw import BLUE, GREEN, INK, ORANGE, PINK, RED, SKY, SOFT, arrow, box, drawing, words


@drawing(7.8, 3.05)
def arrays_moved(ax):
    """The arrays that cross HBM for a residual and a norm: in two kernels, with the row in registers, in one kernel."""
    reads, writes = dict(colour=SKY, fill=0.35, size=8.5), dict(colour=ORANGE, fill=0.35, size=8.5)

    def kernel(x, y, name, sources, results):
        """A kernel between the arrays that it reads, left, and those that it writes."""
        for i, (texts, style, left) in enumerate(((sources, reads, x), (results, writes, x + 1.95))):
            for j, text in enumerate(texts):
                at = y + 0.62 - 0.34 * j
                box(ax, left, at, 0.78, 0.29, text, **style)
                start, end = ((left + 0.8, at + 0.145), (x + 1.0, y + 0.6)) if i == 0 else (
                    (x + 1.76, y + 0.6), (left - 0.02, at + 0.145))  # fmt: skip
                arrow(ax, start, end, SOFT, width=0.9)
        box(ax, x + 1.02, y + 0.38, 0.72, 0.44, name, INK, fill=0.08, size=9)

    for y, title in ((1.62, "two kernels"), (0.12, "one kernel")):
        words(ax, 0.1, y + 1.2, title, 9.5, ha="left", weight="bold")
    kernel(0.1, 1.62, "add", ["x", "residual"], ["total"])
    kernel(3.2, 1.62, "norm", ["total", "and again"], ["y"])
    words(ax, 6.25, 2.28, "rung 1: 6 arrays\nrung 2: 5, the norm reads\nits row once", 8.5, ha="left")
    kernel(0.1, 0.12, "both", ["x", "residual"], ["total", "y"])
    words(ax, 6.25, 0.72, "rung 3: 4 arrays,\nand fewer is impossible", 8.5, ha="left")
    words(ax, 3.2, 0.72, "the sum stays in registers\nfrom its first use to its last", 8.5, ha="left", colour=SOFT)


@drawing(7.8, 2.75)
def walk(ax):
    """A block walks down its part of the rows; the three rows before the one that it loads are still in registers."""
    left, width, height, top = 1.5, 2.3, 0.23, 2.3
    for i in range(9):
        y = top - i * height
        colour, fill, text = SOFT, 0.03, ""
        if i < 3:
            colour, fill, text = GREEN, 0.25, "halo"
        elif 4 <= i < 7:
            colour, fill, text = BLUE, 0.25, "in registers"
        elif i == 7:
            colour, fill, text = ORANGE, 0.45, "loaded now"
        box(ax, left, y, width, height, text, colour, fill=fill, size=8, linewidth=0.7)
    words(ax, left - 0.1, top - height, "rows before the part:\nread once more", 8, ha="right", colour=GREEN)
    words(ax, left - 0.1, top - 5.5 * height, "rows of the part:\nread once", 8, ha="right", colour=SOFT)
    words(ax, left + width / 2, 2.65, "x, columns of one block", 9)
    box(ax, 5.2, top - 7 * height, width, height, "stored now", PINK, fill=0.35, size=8, linewidth=0.7)
    words(ax, 5.2 + width / 2, 2.65, "y", 9)
    for i in range(9):
        if i != 7 and i >= 3:
            box(ax, 5.2, top - i * height, width, height, colour=SOFT, fill=0.03, linewidth=0.7)
    for i, name in enumerate(("$w_0$", "$w_1$", "$w_2$", "$w_3$")):
        y = top - (4 + i) * height + height / 2
        arrow(ax, (left + width + 0.04, y), (5.14, top - 6.5 * height), SOFT, width=0.9)
        words(ax, left + width + 0.25, y + 0.07, name, 8)
    words(ax, left, 0.2, "a thread has the same columns in every row, so no thread needs another's values", 8.5,
          ha="left", colour=SOFT)  # fmt: skip


@drawing(7.8, 2.2)
def two_accumulators(ax):
    """A step of a gated product: one tile of x, a tile of each weight, and two accumulators of the same threads."""
    box(ax, 0.15, 0.85, 0.9, 0.62, "tile of x", GREEN, fill=0.3, size=8.5)
    for y, name, acc, colour in ((1.4, "w_gate", "gate", BLUE), (0.35, "w_up", "up", SKY)):
        box(ax, 1.75, y, 1.15, 0.62, f"tile of\n{name}", colour, fill=0.25, size=8.5)
        arrow(ax, (1.07, 1.16), (1.72, y + 0.31), SOFT, width=1)
        arrow(ax, (2.93, y + 0.31), (3.5, y + 0.31), SOFT, width=1)
        box(ax, 3.53, y, 1.4, 0.62, f"accumulator:\n{acc}", colour, fill=0.5, size=8.5)
        arrow(ax, (4.96, y + 0.31), (5.5, 1.2 if y > 1 else 1.12), SOFT, width=1)
    box(ax, 5.53, 0.85, 1.25, 0.62, "silu(gate) · up\nin registers", ORANGE, fill=0.3, size=8.5)
    arrow(ax, (6.81, 1.16), (7.1, 1.16), RED, width=1.2)
    box(ax, 7.13, 0.85, 0.52, 0.62, "o", RED, fill=0.2, size=9)
    words(ax, 3.53, 0.13, "both lie in the registers of the same threads", 8, ha="left", colour=SOFT)

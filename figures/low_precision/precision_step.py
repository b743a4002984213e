"""A step of K is 128 bytes of each row: 64 values of bfloat16, 128 of fp8, and four instructions either way."""

from figures._draw import BLUE, INK, ORANGE, SOFT, arrow, box, canvas, save, words


def draw():
    fig, ax = canvas(7.5, 2.9)
    for y, name, per, instruction, count, colour in (
        (1.65, "bfloat16", 16, "HGMMA 64xNx16", "64 values", BLUE),
        (0.35, "fp8", 32, "QGMMA 64xNx32", "128 values", ORANGE),
    ):
        words(ax, 0.95, y + 0.33, name, size=10, ha="right", weight="bold")
        for i in range(4):
            box(ax, 1.2 + 1.25 * i, y, 1.2, 0.65, colour=colour, fill=0.08)
            cells = per // 2
            for j in range(cells):
                width = 1.1 / cells
                box(ax, 1.25 + 1.25 * i + j * width, y + 0.12, 0.8 * width, 0.3, colour=colour, fill=0.55, linewidth=0)
            words(ax, 1.8 + 1.25 * i, y + 0.52, f"{per} values", size=7.5, colour=INK)
        words(ax, 6.22, y + 0.42, instruction, size=8.5, ha="left")
        words(ax, 6.22, y + 0.18, f"4 of them, {count}", size=7.5, ha="left", colour=SOFT)
    arrow(ax, (1.2, 2.5), (6.15, 2.5), style="<|-|>", colour=SOFT)
    words(ax, 3.68, 2.68, "128 bytes of a row: one step, one width of the swizzle", size=8.5)
    words(ax, 1.2, 0.12, "(a dark bar stands for two values along K)", size=7, ha="left", colour=SOFT)
    return fig


if __name__ == "__main__":
    save(__file__, draw())

"""Sums along the rows of a group: steps of 64 rows from a multiple of 8 on, of which the first and last are masked."""

from figures._draw import BLUE, GREEN, ORANGE, RED, SOFT, arrow, box, canvas, save, words

START, END, STEP = 70, 330, 64  # The rows of the group in the middle.
SHOWN = 0, 420


def draw():
    fig, ax = canvas(7.8, 3.7)
    left, scale = 0.95, 0.0158
    x_of = lambda row: left + scale * row
    for y, name in ((2.75, "rows of lhs"), (2.2, "rows of rhs")):
        words(ax, left - 0.1, y + 0.17, name, size=8.5, ha="right")
        for start, end, colour, text in (
            (SHOWN[0], START, GREEN, "the group before"),
            (START, END, BLUE, f"this group: rows {START} to {END}"),
            (END, SHOWN[1], ORANGE, "the next group"),
        ):
            box(ax, x_of(start), y, scale * (end - start) - 0.02, 0.36, text, colour, 0.25, size=8)
    first = START & ~7
    words(ax, left - 0.1, 1.52, "steps", size=8.5, ha="right")
    number, row = 0, first
    while row < END:
        masked = row < START or row + STEP > END
        colour = RED if masked else SOFT
        box(ax, x_of(row), 1.36, scale * STEP - 0.02, 0.34, f"step {number}", colour, 0.12, size=8)
        for a, b in ((row, min(START, row + STEP)), (max(END, row), row + STEP)):
            if b > a:
                box(ax, x_of(a), 1.36, scale * (b - a) - 0.01, 0.34, colour=RED, fill=0.55, linewidth=0.5)
        number, row = number + 1, row + STEP
    for at, text in ((START, f"{START}"), (END, f"{END}")):
        ax.plot([x_of(at)] * 2, [1.3, 3.2], color=BLUE, linewidth=0.9, linestyle=":")
        words(ax, x_of(at), 3.28, text, size=8, colour=BLUE)
    arrow(ax, (x_of(first), 0.95), (x_of(first), 1.33), RED, width=1.1)
    words(ax, x_of(first), 0.78, f"row {first}, the multiple of 8 before {START}:\nTMA finds tiles of 8 rows there",
          size=8, colour=RED)  # fmt: skip
    words(ax, x_of(END) + 0.1, 0.78, "red rows are overwritten with zeros in shared\nmemory, in lhs and in rhs, "
          "before they are multiplied", size=8, colour=RED)  # fmt: skip
    words(
        ax, 4.1, 0.25, "o[group] += lhs[step].T @ rhs[step]: in all steps between, every row is this group's", size=8.5
    )
    return fig


if __name__ == "__main__":
    save(__file__, draw())

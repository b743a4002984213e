"""Where the scales of a product stand: outside of the sum over K if they belong to rows and columns."""

from figures._draw import BLUE, GREEN, INK, ORANGE, PALE, RED, SOFT, box, canvas, save, words


def draw():
    fig, ax = canvas(7.5, 3.1)
    _product(ax, 0.25, "one scale an operand", per_row=False)
    _product(ax, 2.85, "one a row of a, one a column of b", per_row=True)
    _along_k(ax, 5.6)
    return fig


def _product(ax, x, title, per_row: bool):
    words(ax, x + 1.05, 2.9, title, size=9, weight="bold")
    rows = range(4)
    for i in rows:
        colour = (BLUE, ORANGE, GREEN, RED)[i] if per_row else BLUE
        box(ax, x + 0.35, 0.5 + 0.25 * i, 0.75, 0.22, colour=colour, fill=0.3)
        column = (BLUE, ORANGE, GREEN, RED)[3 - i] if per_row else ORANGE
        box(ax, x + 1.25 + 0.25 * i, 1.6, 0.22, 0.75, colour=column, fill=0.3)
        if per_row:
            box(ax, x, 0.5 + 0.25 * i, 0.22, 0.22, colour=colour, fill=0.85)
            box(ax, x + 1.25 + 0.25 * i, 2.45, 0.22, 0.22, colour=column, fill=0.85)
        for j in rows:
            box(ax, x + 1.25 + 0.25 * i, 0.5 + 0.25 * j, 0.22, 0.22, colour=SOFT, fill=0.15)
    if not per_row:
        box(ax, x, 0.875, 0.22, 0.22, colour=BLUE, fill=0.85)
        box(ax, x + 1.625, 2.45, 0.22, 0.22, colour=ORANGE, fill=0.85)
    words(ax, x + 0.72, 1.62, "a", size=10)
    words(ax, x + 1.1, 2.0, "b", size=10)
    text = r"$s_i \, t_j \, \sum_k a_{ik} b_{kj}$" if per_row else r"$s \, t \, \sum_k a_{ik} b_{kj}$"
    words(ax, x + 1.05, 0.22, text, size=10)


def _along_k(ax, x):
    words(ax, x + 0.85, 2.9, "one a piece of K", size=9, weight="bold", colour=INK)
    for k in range(3):
        colour = (BLUE, ORANGE, GREEN)[k]
        box(ax, x + 0.6 * k, 1.05, 0.55, 0.8, colour=colour, fill=0.3)
        box(ax, x + 0.6 * k + 0.16, 1.95, 0.22, 0.22, colour=colour, fill=0.85)
    words(ax, x + 0.87, 0.72, "the sum must stop at each piece", size=8, colour=SOFT)
    words(ax, x + 0.87, 0.22, r"$\sum_p \, s_p \, \sum_{k \in p} a_{ik} b_{kj}$", size=10)
    ax.axvline(x - 0.22, 0.05, 0.95, color=PALE)


if __name__ == "__main__":
    save(__file__, draw())

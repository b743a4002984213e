"""Causal attention twice: as a matrix of all pairs of tokens, and as a state that goes from token to token."""

from figures._draw import BLUE, GREEN, ORANGE, SOFT, arrow, box, canvas, save, words

TOKENS, CELL = 10, 0.27


def draw():
    fig, ax = canvas(7.8, 4.1)
    left, bottom = 0.75, 0.55
    words(ax, left + TOKENS * CELL / 2, 3.85, "a matrix: T x T numbers", size=9.5, weight="bold")
    for t in range(TOKENS):
        y = bottom + (TOKENS - 1 - t) * CELL
        for s in range(t + 1):
            box(ax, left + s * CELL, y, CELL - 0.03, CELL - 0.03, colour=BLUE, fill=0.3, linewidth=0.6)
    words(ax, left + TOKENS * CELL / 2, 3.45, "keys s", size=8.5)
    words(ax, left - 0.15, bottom + TOKENS * CELL / 2, "queries t", size=8.5, rotation=90)
    words(ax, left + TOKENS * CELL / 2, 0.25, "token t meets t keys: work grows with T²", size=8, colour=SOFT)

    x, middle = 4.35, 2.15
    words(ax, 6.0, 3.85, "a state: N x P numbers", size=9.5, weight="bold")
    for i, name in enumerate(("S", "S", "S")):
        at = x + 1.15 * i
        box(ax, at, middle - 0.35, 0.55, 0.7, name, ORANGE, fill=0.35, size=11, weight="bold")
        words(ax, at + 0.275, middle + 0.52, ("before t", "after t", "after t + 1")[i], size=8)
        if i < 2:
            arrow(ax, (at + 0.57, middle), (at + 1.13, middle), ORANGE, text="+ v kᵀ", offset=(0.0, 0.14))
            arrow(ax, (at + 0.86, 3.15), (at + 0.86, middle + 0.3), BLUE)
            words(ax, at + 0.86, 3.29, ("k[t], v[t]", "k[t+1], v[t+1]")[i], size=8)
        if i:
            arrow(ax, (at + 0.275, middle - 0.37), (at + 0.275, 1.12), GREEN)
            words(ax, at + 0.275, 0.97, ("y[t] = S q[t]", "y[t+1]")[i - 1], size=8)
    words(ax, 6.0, 0.25, "every token meets one state: work grows with T", size=8, colour=SOFT)
    return fig


if __name__ == "__main__":
    save(__file__, draw())

"""A layer of experts: tokens are routed, rows are sorted by expert, multiplied in groups, and summed back."""

from figures._draw import BLUE, GREEN, ORANGE, PINK, SOFT, arrow, box, canvas, save, words

EXPERTS, CHOSEN = 4, ((2, 0), (1, 2), (2, 3), (0, 2))  # The two experts of each of four tokens.
COLOURS = BLUE, GREEN, ORANGE, PINK


def draw():
    fig, ax = canvas(7.8, 4.0)
    high = 0.3
    names = ("tokens", "route", "permute", "gate and up,\nSwiGLU", "down", "combine")
    xs = (0.15, 1.2, 2.55, 3.95, 5.35, 6.75)
    for x, name in zip(xs, names, strict=True):
        words(ax, x + 0.42, 3.72, name, size=8.5, weight="bold")
    pairs = sorted((expert, token, slot) for token, chosen in enumerate(CHOSEN) for slot, expert in enumerate(chosen))
    token_y = lambda token: 2.6 - 0.55 * token
    pair_y = lambda place: 3.1 - 0.36 * place
    for token, chosen in enumerate(CHOSEN):
        box(ax, xs[0], token_y(token), 0.8, high, f"token {token}", SOFT, 0.12, size=7.5)
        for slot, expert in enumerate(chosen):
            box(ax, xs[1] + 0.42 * slot, token_y(token), 0.38, high, str(expert), COLOURS[expert], 0.35, size=8)
        box(ax, xs[5] + 0.05, token_y(token), 0.85, high, f"token {token}", SOFT, 0.12, size=7.5)
        arrow(ax, (xs[0] + 0.82, token_y(token) + high / 2), (xs[1] - 0.02, token_y(token) + high / 2), SOFT, width=0.9)
    for place, (expert, token, slot) in enumerate(pairs):
        y = pair_y(place)
        for x, text in zip(xs[2:5], (f"of token {token}", "", ""), strict=True):
            box(ax, x, y, 0.9, high, text, COLOURS[expert], 0.35, size=7)
        start = xs[1] + 0.82, token_y(token) + high * (0.7 - 0.4 * slot)
        arrow(ax, start, (xs[2] - 0.02, y + high / 2), COLOURS[expert], width=0.8)
        for a, b in ((xs[2], xs[3]), (xs[3], xs[4])):
            arrow(ax, (a + 0.92, y + high / 2), (b - 0.02, y + high / 2), COLOURS[expert], width=0.8)
        arrow(ax, (xs[4] + 0.92, y + high / 2), (xs[5] + 0.03, token_y(token) + high / 2), COLOURS[expert], width=0.8)
    words(ax, xs[1] + 0.4, 0.6, "the experts of\neach token", size=7.5, colour=SOFT)
    words(ax, xs[2] + 0.45, 0.2, "rows sorted by expert:\ngroups", size=7.5, colour=SOFT)
    words(ax, xs[3] + 1.15, 0.2, "two grouped products,\na matrix for each colour", size=7.5, colour=SOFT)
    words(ax, xs[5] + 0.42, 0.45, "each token's rows,\nweighted and\nsummed", size=7.5, colour=SOFT)
    return fig


if __name__ == "__main__":
    save(__file__, draw())

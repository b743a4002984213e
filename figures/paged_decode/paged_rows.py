"""The query heads that share keys are rows of one WGMMA: 4 of its 64 rows are useful."""

from figures._draw import BLUE, GREEN, ORANGE, SOFT, arrow, box, canvas, save, words

GROUP, SHOWN = 4, 16  # Query heads that share keys; rows drawn.


def draw():
    fig, ax = canvas(7.8, 3.2)
    _queries(ax)
    _tile(ax, 2.75, "q of the group\n64 x head_dim", BLUE, 1.0)
    words(ax, 3.95, 1.55, "x", size=12)
    box(ax, 4.15, 1.05, 1.35, 1.0, "keys of\n64 tokens,\ntransposed", GREEN, fill=0.3, size=8.5)
    words(ax, 4.82, 0.86, "head_dim x 64", size=8, colour=SOFT)
    words(ax, 5.7, 1.55, "=", size=12)
    _tile(ax, 5.95, "logits\n64 x 64", ORANGE, 1.35)
    words(ax, 2.75, 0.2, f"{GROUP} rows are query heads; {64 - GROUP} are discarded", size=8.5, ha="left")
    return fig


def _queries(ax):
    words(ax, 0.2, 2.98, "one token's query heads", size=9, ha="left", weight="bold")
    for head in range(12):
        y, colour = 2.65 - 0.19 * head, BLUE if head < GROUP else SOFT
        box(ax, 0.2, y, 0.85, 0.14, colour=colour, fill=0.45 if head < GROUP else 0.1, linewidth=0.6)
        words(ax, 1.12, y + 0.07, f"head {head}", size=7, ha="left", colour=colour)
    words(ax, 0.62, 0.42, "...", size=9, colour=SOFT)
    arrow(ax, (1.62, 2.38), (2.72, 2.6), BLUE)
    words(ax, 2.05, 1.75, "heads 0 to 3\nread the same\nkeys: a group", size=7.5, colour=BLUE)


def _tile(ax, x, text, colour, width):
    words(ax, x + width / 2, 2.98, text.split("\n")[0], size=8.5, weight="bold")
    for row in range(SHOWN):
        y = 2.72 - 0.14 * row
        if row == SHOWN - 3:
            words(ax, x + width / 2, y + 0.05, "...", size=9, colour=SOFT)
            continue
        used = row < GROUP
        box(
            ax, x, y, width, 0.1, colour=colour if used else SOFT, fill=0.5 if used else 0.04,
            linewidth=0.5 if used else 0.3,
        )  # fmt: skip
    words(ax, x + width / 2, 0.48, text.split("\n")[1], size=8, colour=SOFT)


if __name__ == "__main__":
    save(__file__, draw())

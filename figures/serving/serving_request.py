"""One request, step by step: the prompt at once, then one token a step; below a position, what the cache holds."""

from figures._draw import BLUE, GREEN, INK, ORANGE, SOFT, box, canvas, save, words

PROMPT, NEW = 6, 4
SIDE = 0.44


def draw():
    fig, ax = canvas(7.8, 3.1)
    left, top = 1.35, 2.2
    for position in range(PROMPT + NEW - 1):
        words(ax, left + SIDE * (position + 0.5), top + 0.6, f"{position}", size=7.5, colour=SOFT)
    words(ax, left - 0.15, top + 0.6, "position", size=8, ha="right", colour=SOFT)
    for step in range(NEW):
        y = top - 0.52 * step
        start, end = (0, PROMPT) if step == 0 else (PROMPT + step - 1, PROMPT + step)
        words(ax, left - 0.15, y + SIDE / 2, f"step {step + 1}", size=9, ha="right")
        for position in range(end):
            colour = GREEN if position < start else ORANGE if step == 0 else BLUE
            fill = 0.12 if position < start else 0.45
            box(ax, left + SIDE * position, y, SIDE - 0.05, SIDE - 0.05, "", colour, fill=fill)
        at = left + SIDE * end
        ax.annotate(
            "", (at + 0.42, y + 0.2), (at, y + 0.2),
            arrowprops=dict(arrowstyle="-|>", color=INK, linewidth=1.1, shrinkA=0, shrinkB=0, mutation_scale=10),
        )  # fmt: skip
        words(ax, at + 0.5, y + 0.2, f"new token {step + 1}", size=8, ha="left")
    for x, colour, fill, text in (
        (0.6, ORANGE, 0.45, "computed: the prompt"),
        (2.75, BLUE, 0.45, "computed: the token sampled last"),
        (5.45, GREEN, 0.12, "in the cache, read"),
    ):
        box(ax, x, 0.16, 0.2, 0.2, "", colour, fill=fill)
        words(ax, x + 0.28, 0.26, text, size=8, ha="left")
    return fig


if __name__ == "__main__":
    save(__file__, draw())

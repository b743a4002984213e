"""The five steps of every rung of a chapter's ladder."""

from figures._draw import BLUE, GREEN, ORANGE, PINK, RED, SOFT, arrow, box, canvas, save, words

MOVES = (
    ("see", "a picture or a trace:\nwhere does time go?", ORANGE),
    ("predict", "how much will\none change give?", RED),
    ("change", "one knob,\na few lines", BLUE),
    ("check", "right? races?\nregisters?", GREEN),
    ("measure", "was the\nprediction right?", PINK),
)


def draw():
    fig, ax = canvas(7.8, 1.75)
    for i, (name, text, colour) in enumerate(MOVES):
        x = 0.25 + 1.5 * i
        box(ax, x, 0.6, 1.28, 0.95, colour=colour)
        words(ax, x + 0.64, 1.32, name, size=10.5, weight="bold", colour=colour)
        words(ax, x + 0.64, 0.92, text, size=8)
        if i:
            arrow(ax, (x - 0.22, 1.07), (x, 1.07), SOFT)
    ax.plot((6.89, 6.89, 0.89, 0.89), (0.6, 0.3, 0.3, 0.5), color=SOFT, linewidth=1.4)
    arrow(ax, (0.89, 0.45), (0.89, 0.6), SOFT)
    words(ax, 3.9, 0.15, "the gap between predicted and measured is the problem of the next rung", size=8, colour=SOFT)
    return fig


if __name__ == "__main__":
    save(__file__, draw())

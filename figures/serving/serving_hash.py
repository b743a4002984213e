"""The name of a page: of its tokens alone, two different pages have one name; chained, they do not."""

from figures._draw import BLUE, GREEN, INK, ORANGE, RED, SOFT, arrow, box, canvas, save, words

TEXTS = (("We sell fishing gear.", BLUE, "3f"), ("We sell curtains.", ORANGE, "b1"))
SAME = "What is a hook?"


def draw():
    fig, ax = canvas(7.8, 3.5)
    for i, (text, colour, name) in enumerate(TEXTS):
        y = 2.45 - 1.5 * i
        words(ax, 0.62, y + 0.27, f"prompt\n{'AB'[i]}", size=9, colour=colour)
        box(ax, 1.15, y, 1.75, 0.54, text, colour, size=8.5)
        box(ax, 3.95, y, 1.75, 0.54, SAME, GREEN, fill=0.2, size=8.5)
        first, second = f"name {name}", f"name {'c8' if i == 0 else '5d'}"
        box(ax, 1.6, y - 0.68, 0.85, 0.36, first, INK, fill=0.05, size=8)
        box(ax, 4.4, y - 0.68, 0.85, 0.36, second, INK, fill=0.05, size=8)
        arrow(ax, (2.02, y - 0.01), (2.02, y - 0.31), colour, width=1.1)
        arrow(ax, (4.82, y - 0.01), (4.82, y - 0.31), GREEN, width=1.1)
        arrow(ax, (2.46, y - 0.5), (4.38, y - 0.5), INK, "goes into the next name", size=7.5, offset=(0.0, 0.1))
        words(ax, 5.95, y + 0.27, "tokens alone: name e4", size=8, ha="left", colour=RED)
        words(ax, 5.95, y - 0.5, "with what is before:\n" + second, size=8, ha="left", colour=INK)
    words(ax, 2.02, 3.25, "page 0 of the prompt", size=8, colour=SOFT)
    words(ax, 4.82, 3.25, "page 1 of the prompt", size=8, colour=SOFT)
    return fig


if __name__ == "__main__":
    save(__file__, draw())

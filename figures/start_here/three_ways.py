"""One kernel, three ways to run it, and what each of them shows."""

from figures._draw import BLUE, GREEN, INK, ORANGE, SOFT, arrow, box, canvas, save, words

WAYS = (
    (BLUE, "on the GPU", "lab.run, lab.measure", "Hopper or newer", "the result, and its true speed", "races"),
    (
        GREEN,
        "interpreted",
        "lab.run, lab.interpret",
        "any CPU",
        "the result, and races",
        "speed; what the\ncompiler rejects",
    ),
    (
        ORANGE,
        "compiled only",
        'lab.compile_for("h200", …)',
        "any CPU",
        "PTX, SASS, registers, spills",
        "results; speed",
    ),
)


def draw():
    fig, ax = canvas(7.8, 3.1)
    box(ax, 0.25, 1.2, 1.45, 0.95, "your kernel\n(one Python\nfunction)", INK, fill=0.08, size=9.5)
    for text, x in (("where", 4.2), ("shows you", 5.5), ("does not show", 6.98)):
        words(ax, x, 2.93, text, size=8, colour=SOFT)
    for i, (colour, name, call, where, shows, hides) in enumerate(WAYS):
        y = 2.0 - 0.92 * i
        arrow(ax, (1.7, 1.68), (2.05, y + 0.38), colour)
        box(ax, 2.05, y, 5.5, 0.78, colour=colour, fill=0.1)
        words(ax, 2.18, y + 0.52, name, size=10, ha="left", weight="bold", colour=colour)
        words(ax, 2.18, y + 0.22, call, size=7.2, ha="left", family="DejaVu Sans Mono")
        words(ax, 4.2, y + 0.4, where.replace(" or ", " or\n"), size=8.2)
        words(ax, 5.5, y + 0.4, shows.replace(", and ", "\nand ").replace("SASS, ", "SASS,\n"), size=8.2)
        words(ax, 6.98, y + 0.4, hides, size=8.2, colour=SOFT)
    return fig


if __name__ == "__main__":
    save(__file__, draw())

"""The registers of an SM, shared out among three warpgroups: evenly at the start, by need afterwards."""

from figures._draw import BLUE, ORANGE, SOFT, box, canvas, save, words

FILE, LEFT, WIDTH = 512, 1.75, 5.6  # Registers a thread, if one warpgroup had the whole file of 65,536.
ROWS = (
    ("at the start", (168, 168, 168)),
    ("after set_max_registers", (40, 232, 232)),
)


def draw():
    fig, ax = canvas(7.6, 2.35)
    for i, (label, counts) in enumerate(ROWS):
        y = 1.45 - 0.75 * i
        words(ax, LEFT - 0.1, y + 0.24, label.replace(" ", "\n", 1), ha="right", size=8.5)
        x = LEFT
        for role, count in zip(("memory", "compute 0", "compute 1"), counts, strict=True):
            width = WIDTH * count / FILE
            colour = ORANGE if role == "memory" else BLUE
            box(ax, x, y, width - 0.03, 0.48, colour=colour, fill=0.25)
            words(ax, x + width / 2, y + 0.24, f"{count}" if width < 0.6 else f"{role}: {count}", size=8)
            if role != "memory":
                box(ax, x + 0.03, y + 0.03, WIDTH * 128 / FILE, 0.07, colour=BLUE, fill=0.8, linewidth=0)
            x += width
        box(ax, x, y, LEFT + WIDTH - x, 0.48, colour=SOFT, fill=0.1, linewidth=0.5)
    words(ax, LEFT, 2.15, "registers a thread; 512 of them would be the whole file", ha="left", size=8.5, colour=SOFT)
    words(
        ax, LEFT, 0.33,
        "dark: the accumulator of half a 128x256 tile, 128 registers. Right end: 8 a thread that\n"
        "nobody got, because counts go by eights; they stay unused.",
        ha="left", size=8, colour=SOFT,
    )  # fmt: skip
    return fig


if __name__ == "__main__":
    save(__file__, draw())

"""One block waits for memory nearly all the time; many blocks wait together, and keep the memory busy."""

from figures._draw import BLUE, GREEN, INK, ORANGE, PALE, RED, SOFT, arrow, box, canvas, save, words

TRIP, ISSUE, WORK = 1.5, 0.1, 0.16  # Lengths on the drawing of one trip of one block: request, wait, add and store.


def draw():
    fig, ax = canvas(7.8, 4.2)
    words(ax, 0.25, 4.02, "One block: one trip after the other", size=10, ha="left", weight="bold")
    _lane(ax, 3.45, 0.0, 4, "block 0")
    _memory(ax, 3.1, [TRIP * i + 0.75 for i in range(4)])
    arrow(ax, (1.25, 3.74), (1.25 + TRIP, 3.74), SOFT, style="<|-|>", width=1)
    words(ax, 1.35 + TRIP, 3.74, "one trip to HBM and back", size=8, ha="left", colour=SOFT)
    words(ax, 0.25, 2.72, "Many blocks: their trips overlap", size=10, ha="left", weight="bold")
    for i in range(6):
        _lane(ax, 2.3 - 0.27 * i, 0.23 * i, 4, f"block {i}")
    _memory(ax, 0.6, [TRIP * i + 0.23 * j + 0.75 for i in range(4) for j in range(6)])
    for x, colour, text in ((1.3, BLUE, "requests two tiles"), (2.85, PALE, "waits"), (3.65, GREEN, "adds and stores")):
        box(
            ax,
            x,
            0.2,
            0.18,
            0.15,
            colour=SOFT if colour == PALE else colour,
            fill=0.1 if colour == PALE else 0.8,
            linewidth=0.5,
        )
        words(ax, x + 0.26, 0.275, text, size=8, ha="left")
    box(ax, 5.1, 0.2, 0.18, 0.15, colour=ORANGE, fill=0.8, linewidth=0.5)
    words(ax, 5.36, 0.275, "memory delivers them", size=8, ha="left")
    return fig


def _lane(ax, y, first, trips, name):
    words(ax, 1.15, y + 0.1, name, size=8, ha="right", colour=INK)
    for i in range(trips):
        x = 1.25 + first + TRIP * i
        if x + TRIP > 7.6:
            break
        box(ax, x, y, TRIP, 0.2, colour=SOFT, fill=0.1, linewidth=0.5)
        box(ax, x, y, ISSUE, 0.2, colour=BLUE, fill=0.8, linewidth=0)
        box(ax, x + TRIP - WORK, y, WORK, 0.2, colour=GREEN, fill=0.8, linewidth=0)


def _memory(ax, y, deliveries):
    words(ax, 1.15, y + 0.1, "HBM", size=8, ha="right", colour=RED, weight="bold")
    box(ax, 1.25, y, 6.3, 0.2, colour=ORANGE, fill=0.05, linewidth=0.5)
    for x in deliveries:
        if x < 6.05:
            box(ax, 1.25 + x, y, 0.2, 0.2, colour=ORANGE, fill=0.8, linewidth=0)


if __name__ == "__main__":
    save(__file__, draw())

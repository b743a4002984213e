"""Where blocks run: one block lights one SM; a grid of many fills all of them."""

from figures._draw import BLUE, SOFT, box, canvas, save, words

NUM_SMS = 132


def draw():
    fig, ax = canvas(7.8, 1.75)
    _chip(ax, 0.25, "grid = 1 block", lit=1)
    _chip(ax, 2.85, "grid = 132 blocks: one an SM", lit=NUM_SMS)
    _chip(ax, 5.45, "a large grid: up to 16 an SM", lit=NUM_SMS, fill=0.85)
    return fig


def _chip(ax, x, title, lit, fill=0.3):
    words(ax, x, 1.58, title, size=8.5, ha="left", weight="bold")
    for i in range(NUM_SMS):
        on = i < lit
        box(
            ax, x + 0.096 * (i % 22), 1.25 - 0.2 * (i // 22), 0.078, 0.15,
            colour=BLUE if on else SOFT, fill=fill if on else 0.0, linewidth=0.5,
        )  # fmt: skip
    words(ax, x, 0.1, f"{lit} of {NUM_SMS} SMs at work", size=8, ha="left", colour=SOFT)


if __name__ == "__main__":
    save(__file__, draw())

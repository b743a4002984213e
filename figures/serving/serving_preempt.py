"""A request that is preempted: its tokens by position and step, and what is computed a second time."""

from figures._draw import BLUE, GREEN, ORANGE, RED, SOFT, box, canvas, save, words

PAGE_SIZE, PROMPT = 4, 7
STEPS = (  # (from, to) of the tokens computed, and how many are in the cache before; None: it waits.
    (0, 7, 0),
    (7, 8, 7),
    (8, 9, 8),
    (9, 10, 9),
    None,
    None,
    (4, 11, 4),
    (11, 12, 11),
)
SIDE = 0.36


def draw():
    fig, ax = canvas(7.8, 4.1)
    left, top = 1.25, 3.2
    for page in range(3):
        x = left + SIDE * PAGE_SIZE * page
        words(ax, x + SIDE * PAGE_SIZE / 2, top + 0.62, f"its page {page}", size=8, colour=SOFT)
        if page:
            ax.plot([x - 0.025] * 2, [0.62, top + 0.75], color=SOFT, linewidth=0.7, linestyle=":")
    for i, step in enumerate(STEPS):
        y = top - SIDE * i
        words(ax, left - 0.15, y + SIDE / 2, f"step {i + 1}", size=8.5, ha="right")
        if step is None:
            words(
                ax,
                left + SIDE * 12 + 0.12,
                y + SIDE / 2,
                "waits: its pages serve others",
                size=8,
                ha="left",
                colour=SOFT,
            )
            continue
        start, end, there = step
        for position in range(end):
            again = i > 5 and start <= position < 10
            colour = GREEN if position < there else RED if again else ORANGE if position < PROMPT else BLUE
            box(ax, left + SIDE * position, y + 0.03, SIDE - 0.05, SIDE - 0.06, "", colour,
                fill=0.12 if position < there else 0.45)  # fmt: skip
    notes = (
        (0, "its prompt"),
        (3, "the pool is empty: it arrived last and gives way"),
        (6, "page 0 was still there, the rest was not"),
        (7, "on it goes"),
    )
    for i, text in notes:
        end = max(STEPS[i][1], 8)  # Clear of the line between two pages.
        words(ax, left + SIDE * end + 0.12, top - SIDE * i + SIDE / 2, text, size=8, ha="left")
    for x, colour, fill, text in (
        (0.35, ORANGE, 0.45, "prompt"),
        (1.55, BLUE, 0.45, "decoded"),
        (2.85, RED, 0.45, "computed again"),
        (4.6, GREEN, 0.12, "in the cache, read"),
    ):
        box(ax, x, 0.2, 0.2, 0.2, "", colour, fill=fill)
        words(ax, x + 0.28, 0.3, text, size=8, ha="left")
    return fig


if __name__ == "__main__":
    save(__file__, draw())

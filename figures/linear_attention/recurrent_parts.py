"""One sequence in three parts: states from zero, their sums, and the outputs, each part with a block of its own."""

from figures._draw import BLUE, GREEN, ORANGE, SOFT, arrow, box, canvas, save, words

PARTS, CHUNKS = 3, 4


def draw():
    fig, ax = canvas(7.8, 4.3)
    wide, gap, left = 0.44, 0.22, 1.75
    at = lambda part: left + part * (CHUNKS * wide + gap)
    for y, name, what in (
        (3.3, "pass 1", "reads k, v"),
        (2.1, "combine", "XLA, in float32"),
        (0.75, "pass 2", "reads q, k, v"),
    ):
        words(ax, 0.15, y + 0.1, name, size=9, ha="left", weight="bold")
        words(ax, 0.15, y - 0.13, what, size=8, ha="left", colour=SOFT)
    for part in range(PARTS):
        x = at(part)
        words(ax, x + CHUNKS * wide / 2, 4.05, f"part {part}: a block", size=8.5, weight="bold")
        for i in range(CHUNKS):
            box(ax, x + i * wide, 3.1, wide - 0.04, 0.42, "+ vᵀk", BLUE, fill=0.25, size=7)
            box(ax, x + i * wide, 0.5, wide - 0.04, 0.42, "y", GREEN, fill=0.3, size=8)
        words(ax, x - 0.03, 3.68, "from 0", size=7.5, ha="left", colour=SOFT)
        end = x + CHUNKS * wide - 0.2
        box(
            ax, end - 0.3, 1.85, 0.6, 0.5, f"L{part}" if part == 0 else f"d{part} S + L{part}", ORANGE, fill=0.3, size=7
        )
        arrow(ax, (end, 3.08), (end, 2.37), BLUE, text=f"L{part}", offset=(0.17, 0.0))
        if part + 1 < PARTS:
            arrow(ax, (end + 0.32, 2.1), (at(part + 1) + CHUNKS * wide - 0.52, 2.1), ORANGE, text="S", offset=(0, 0.13))
            arrow(ax, (end + 0.1, 1.83), (at(part + 1) + 0.12, 0.95), ORANGE)
    words(ax, at(1) + 0.02, 1.28, "the state before part 1", size=7.5, ha="left", colour=SOFT)
    words(ax, left, 0.18, "d: the decay of a whole part. L: its state, had it begun from zero.", size=8, ha="left",
          colour=SOFT)  # fmt: skip
    return fig


if __name__ == "__main__":
    save(__file__, draw())

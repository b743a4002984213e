"""The ragged all-to-all of experts' tokens: rows of each device in parts of any size, and where they land."""

import itertools

from figures._draw import BLUE, GREEN, ORANGE, SOFT, arrow, box, canvas, save, words

SIZES = ((3, 1, 2), (0, 4, 2), (2, 2, 2))  # Rows that each device (line) sends to each (column).
COLOURS = (BLUE, ORANGE, GREEN)
ROW = 0.33


def draw():
    fig, ax = canvas(7.8, 3.7)
    received = [sum(sizes[p] for sizes in SIZES) for p in range(len(SIZES))]
    top = {d: 0.7 + 2.55 * d for d in range(len(SIZES))}
    for d, sizes in enumerate(SIZES):
        words(ax, top[d] + 3 * ROW, 3.5, f"GPU {d}: x, sorted by target", size=8.5, weight="bold")
        words(ax, top[d] + 3 * ROW, 0.32, f"GPU {d}: result", size=8.5, weight="bold")
        starts = [0, *itertools.accumulate(sizes)]
        for p, size in enumerate(sizes):
            for i in range(size):
                box(ax, top[d] + ROW * (starts[p] + i), 2.85, ROW - 0.03, 0.34, f"{p}", COLOURS[d], fill=0.35, size=8)
        at = 0
        for q in range(len(SIZES)):
            for _ in range(SIZES[q][d]):
                box(ax, top[d] + ROW * at, 0.62, ROW - 0.03, 0.34, colour=COLOURS[q], fill=0.35)
                at += 1
    for q, sizes in enumerate(SIZES):
        for p, size in enumerate(sizes):
            if size:
                start = top[q] + ROW * (sum(sizes[:p]) + size / 2)
                end = top[p] + ROW * (sum(SIZES[r][p] for r in range(q)) + size / 2)
                arrow(ax, (start, 2.83), (end, 0.99), COLOURS[q], width=0.6 + 0.5 * size, alpha=0.75)
                t = 0.3 if q != p else 0.5
                words(ax, start + t * (end - start), 2.83 - t * 1.84, str(size), size=7.5, weight="bold")
    words(ax, 0.1, 3.02, "rows", size=8, ha="left", colour=SOFT)
    words(ax, 0.1, 0.06, f"Rows received: {', '.join(map(str, received))}. Rows of a lower GPU come first, so"
          " where mine begin depends on everybody's sizes.", size=7.8, ha="left")  # fmt: skip
    return fig


if __name__ == "__main__":
    save(__file__, draw())

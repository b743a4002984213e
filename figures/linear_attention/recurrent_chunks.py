"""The matrix of pairs in chunks: pairs are multiplied on the diagonal alone; all that lies before is a state."""

from figures._draw import BLUE, INK, ORANGE, PALE, SOFT, arrow, box, canvas, save, words

CHUNKS, SIDE = 4, 0.78


def draw():
    fig, ax = canvas(7.8, 4.35)
    left, bottom = 0.85, 0.75
    for i in range(CHUNKS):
        y = bottom + (CHUNKS - 1 - i) * SIDE
        if i:
            box(ax, left, y, i * SIDE - 0.03, SIDE - 0.03, "S", ORANGE, fill=0.22, size=11)
        x = left + i * SIDE
        ax.fill([x, x, x + SIDE - 0.03], [y + SIDE - 0.03, y, y], color=BLUE, alpha=0.35, linewidth=0)
        box(ax, x, y, SIDE - 0.03, SIDE - 0.03, colour=BLUE, fill=0.0)
        for j in range(i + 1, CHUNKS):
            box(ax, left + j * SIDE, y, SIDE - 0.03, SIDE - 0.03, colour=SOFT, fill=0.0, linewidth=0.3)
        words(ax, left - 0.12, y + SIDE / 2, f"chunk {i}", size=8, ha="right")
    words(ax, left + CHUNKS * SIDE / 2, 4.1, "keys s", size=8.5)
    words(ax, 0.1, 4.1, "queries t", size=8.5, ha="left")
    words(ax, left + CHUNKS * SIDE / 2, 0.42, "a chunk: C tokens", size=8, colour=SOFT)
    arrow(ax, (left + 2 * SIDE, 0.6), (left + 3 * SIDE - 0.03, 0.6), SOFT, width=1.0, style="<|-|>")

    x = 4.55
    words(ax, x, 3.95, "for each chunk", size=9.5, ha="left", weight="bold")
    rows = (
        (
            BLUE,
            "inside:",
            "pairs of its own tokens",
            "weights = mask(q kᵀ)      C x C\ny = weights v                   C x P",
        ),
        (ORANGE, "from before:", "one product with the state", "y = y + q Sᵀ                    C x P"),
        (INK, "for those after:", "the chunk is added to the state", "S = S + vᵀ k                    P x N"),
    )
    y = 3.55
    for colour, name, text, formula in rows:
        height = 0.3 + 0.2 * formula.count("\n")
        box(ax, x, y - 0.14, 0.22, 0.24, colour=colour, fill=0.3)
        words(ax, x + 0.33, y, f"{name} {text}", size=8.5, ha="left")
        box(ax, x + 0.33, y - 0.3 - height, 2.75, height, colour=PALE, fill=0.8)
        words(ax, x + 0.45, y - 0.3 - height / 2, formula, size=8.2, ha="left")
        y -= 0.75 + height
    words(ax, x, 0.35, "orange rows reach back to the first token, at no more\nthan the cost of one product", size=8,
          ha="left", colour=SOFT)  # fmt: skip
    return fig


if __name__ == "__main__":
    save(__file__, draw())

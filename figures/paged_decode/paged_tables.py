"""How a token is found: a row of the block table, a page of the cache, a place in the page."""

from figures._draw import BLUE, GREEN, ORANGE, SOFT, arrow, box, canvas, save, words

PAGE, PAGES = 16, 10
ROW = (7, 2, 5)  # A row of the block table.
TOKEN = 37


def draw():
    fig, ax = canvas(7.8, 3.3)
    colours = (BLUE, GREEN, ORANGE)
    words(ax, 0.2, 3.1, "the sequence: 41 tokens, as it sees them", size=8.5, ha="left", weight="bold")
    for j, colour in enumerate(colours):
        first, count = PAGE * j, min(PAGE, 41 - PAGE * j)
        box(ax, 1.6 + 1.75 * j, 2.6, 1.65, 0.3, colour=SOFT, fill=0.03, linewidth=0.8)
        box(ax, 1.6 + 1.75 * j, 2.6, 1.65 * count / PAGE, 0.3, colour=colour, fill=0.3, linewidth=0.8)
        words(ax, 1.66 + 1.75 * j, 2.75, f"{first} to {first + count - 1}", size=8, ha="left")
    words(ax, 0.2, 2.0, "its row of the\nblock table", size=8.5, ha="left", weight="bold")
    for j, (page, colour) in enumerate(zip(ROW, colours, strict=True)):
        x = 1.6 + 1.75 * j
        box(ax, x, 1.8, 1.65, 0.36, f"column {j}: page {page}", colour, size=8.5)
        arrow(ax, (x + 0.82, 2.58), (x + 0.82, 2.18), colour)
    words(ax, 0.2, 0.9, "the cache", size=8.5, ha="left", weight="bold")
    for page in range(PAGES):
        x = 1.2 + 0.63 * page
        inside = ROW.index(page) if page in ROW else None
        colour = SOFT if inside is None else colours[inside]
        box(ax, x, 0.7, 0.55, 0.4, colour=colour, fill=0.02 if inside is None else 0.3, linewidth=0.8)
        words(ax, x + 0.27, 0.58, f"page {page}", size=7, colour=SOFT)
        if inside is not None:
            arrow(ax, (1.6 + 1.75 * inside + 0.82, 1.78), (x + 0.27, 1.12), colour)
    at = 1.2 + 0.63 * ROW[2] + 0.55 * (TOKEN % PAGE + 0.5) / PAGE
    ax.plot([at, at], [0.7, 1.1], color="black", linewidth=1.6)
    text = (
        f"token {TOKEN}: column {TOKEN} // {PAGE} = {TOKEN // PAGE}, so page {ROW[2]}; offset {TOKEN} % {PAGE} = "
        f"{TOKEN % PAGE}; slot {ROW[2]} * {PAGE} + {TOKEN % PAGE} = {ROW[2] * PAGE + TOKEN % PAGE}"
    )
    words(ax, 0.2, 0.22, text, size=8.5, ha="left")
    return fig


if __name__ == "__main__":
    save(__file__, draw())

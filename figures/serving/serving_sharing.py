"""Two requests that begin alike: block tables, the pages that both hold, and how many hold each."""

from figures._draw import BLUE, GREEN, INK, ORANGE, SOFT, arrow, box, canvas, save, words

A_PAGES, B_PAGES = (4, 1, 6), (4, 1, 2, 7)
PAGES = (4, 1, 6, 2, 7)  # As drawn, from left to right.
WHAT = {4: "text, part 1", 1: "text, part 2", 6: "A's question", 2: "B's question", 7: "B's answer"}


def draw():
    fig, ax = canvas(7.8, 3.3)
    at = {page: 1.2 + 1.32 * i for i, page in enumerate(PAGES)}
    for page, x in at.items():
        shared = page in A_PAGES and page in B_PAGES
        colour = GREEN if shared else BLUE if page in A_PAGES else ORANGE
        box(ax, x, 1.35, 1.16, 0.62, f"page {page}\n{WHAT[page]}", colour, fill=0.3 if shared else 0.16, size=8)
        words(ax, x + 1.05, 1.2, f"held by {1 + shared}", size=7.5, colour=INK, ha="right")
    words(ax, 0.98, 1.66, "cache", size=9, ha="right", colour=SOFT)
    for name, pages, colour, y in (("A", A_PAGES, BLUE, 2.72), ("B", B_PAGES, ORANGE, 0.26)):
        words(ax, 0.98, y + 0.17, f"{name}'s\nblock table", size=8.5, ha="right", colour=colour)
        for i, page in enumerate(pages):
            x = at[page] + 0.38
            box(ax, x, y, 0.4, 0.34, f"{page}", colour, fill=0.12)
            if i:
                before = at[pages[i - 1]] + 0.78
                ax.plot([before, x], [y + 0.17] * 2, color=colour, linewidth=0.8, linestyle=":")
            ends = ((x + 0.2, y), (x + 0.2, 1.99)) if y > 1 else ((x + 0.2, y + 0.34), (x + 0.2, 1.07))
            arrow(ax, *ends, colour=colour, width=1.1)
    return fig


if __name__ == "__main__":
    save(__file__, draw())

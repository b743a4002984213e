"""A cache with room for the longest sequence in each row, and the same tokens in pages."""

from figures._draw import BLUE, GREEN, INK, ORANGE, PINK, SOFT, box, canvas, save, words

LENGTHS, MOST, PAGE = (13, 30, 5, 18), 32, 4  # Tokens.
COLOURS = (BLUE, ORANGE, GREEN, PINK)
PAGES, COLUMNS = 24, 12
ORDER = (5, 17, 2, 11, 20, 0, 8, 14, 3, 22, 9, 6, 16, 1, 12, 19, 7, 23, 10)  # Which page is handed out next.


def draw():
    fig, ax = canvas(7.8, 3.55)
    _reserved(ax)
    _pages(ax)
    return fig


def _reserved(ax):
    words(ax, 0.2, 3.35, "room for the longest sequence, for each one", size=9, ha="left", weight="bold")
    for seq, (length, colour) in enumerate(zip(LENGTHS, COLOURS, strict=True)):
        y, width = 2.9 - 0.28 * seq, 0.15
        words(ax, 0.2, y + 0.1, f"sequence {seq}", size=8, ha="left", colour=colour)
        box(ax, 1.15, y, MOST * width, 0.2, colour=SOFT, fill=0.05, linewidth=0.8)
        box(ax, 1.15, y, length * width, 0.2, colour=colour, fill=0.45, linewidth=0.8)
    used = sum(LENGTHS)
    words(ax, 6.1, 2.65, f"{used} tokens\nin {len(LENGTHS)} x {MOST} = {len(LENGTHS) * MOST}", ha="left", size=8.5)
    words(ax, 6.1, 2.2, f"{used / len(LENGTHS) / MOST:.0%} used", ha="left", size=8.5, colour=INK, weight="bold")


def _pages(ax):
    words(ax, 0.2, 1.75, f"pages of {PAGE} tokens, handed out as sequences grow", size=9, ha="left", weight="bold")
    cell, gap = 0.088, 0.04
    owner = {}
    order = iter(ORDER)
    for seq, length in enumerate(LENGTHS):
        for first in range(0, length, PAGE):
            owner[next(order)] = seq, min(PAGE, length - first)
    for page in range(PAGES):
        x = 1.15 + (page % COLUMNS) * (PAGE * cell + gap)
        y = 1.2 - (page // COLUMNS) * 0.5
        seq, tokens = owner.get(page, (None, 0))
        box(ax, x, y, PAGE * cell, 0.3, colour=SOFT, fill=0.02 if seq is None else 0.05, linewidth=0.8)
        if seq is not None:
            box(ax, x, y, tokens * cell, 0.3, colour=COLOURS[seq], fill=0.45, linewidth=0.8)
        words(ax, x + PAGE * cell / 2, y - 0.09, str(page), size=6.5, colour=SOFT)
    used, held = sum(LENGTHS), len(owner) * PAGE
    words(ax, 6.35, 1.32, f"{used} tokens in\n{len(owner)} pages = {held}", ha="left", size=8.5)
    words(ax, 6.35, 0.9, f"{used / held:.0%} used", ha="left", size=8.5, weight="bold")
    words(ax, 6.35, 0.65, f"{PAGES - len(owner)} pages are free", ha="left", size=8.5, colour=SOFT)
    words(ax, 1.15, 0.28, "only the last page of a sequence has unused room", size=8, ha="left", colour=SOFT)


if __name__ == "__main__":
    save(__file__, draw())

"""How the last tile of a sequence is stored: all of its rows at once, or as boxes of powers of two."""

from figures._draw import BLUE, GREEN, ORANGE, PINK, RED, SKY, arrow, box, canvas, save, words

NUM, QUERIES = 23, 64
COLOURS = {16: GREEN, 4: ORANGE, 2: SKY, 1: PINK}


def boxes(num: int) -> list[tuple[int, int]]:
    """(first, size) of each."""
    found, first = [], 0
    for size in (32, 16, 8, 4, 2, 1):
        if num & size:
            found.append((first, size))
            first += size
    return found


def draw():
    fig, ax = canvas(7.8, 3.75)
    high, bottom = 0.044, 0.35
    y_of = lambda row: bottom + high * (QUERIES - row)
    for x, title in ((0.2, "all 64 rows"), (4.15, f"{NUM} = 16 + 4 + 2 + 1")):
        words(ax, x + 1.75, 3.55, title, weight="bold")
        words(ax, x + 0.6, 0.17, "the tile", size=8)
        words(ax, x + 2.75, 0.17, "out", size=8)
        plain = x < 1
        parts = [(0, QUERIES)] if plain else boxes(NUM)
        box(ax, x, y_of(QUERIES), 1.2, high * QUERIES, colour=BLUE, fill=0.04)
        box(ax, x, y_of(NUM), 1.2, high * NUM, f"{NUM} queries" if plain else "", BLUE, fill=0.3, size=8)
        box(ax, x + 2.1, y_of(NUM), 1.3, high * NUM, "" if plain else "", BLUE, fill=0.12, size=8)
        box(ax, x + 2.1, y_of(QUERIES), 1.3, high * (QUERIES - NUM) - 0.03, colour=RED if plain else PINK, fill=0.2)
        said = "rows of the next\nsequence, now\noverwritten" if plain else "rows of the next\nsequence"
        words(ax, x + 2.75, y_of(44), said, size=8)
        if plain:
            words(ax, x + 0.6, y_of(44), "unused", size=8)
        for first, size in parts:
            middle = y_of(first + size / 2)
            colour = RED if plain else COLOURS[size]
            if not plain:
                box(ax, x + 0.03, y_of(first + size) + 0.006, 1.14, high * size - 0.012, colour=colour, fill=0.35)
                box(ax, x + 2.13, y_of(first + size) + 0.006, 1.24, high * size - 0.012, colour=colour, fill=0.35)
                if size >= 4:
                    words(ax, x + 0.6, middle, str(size), size=8)
                    words(ax, x + 2.75, middle, str(size), size=8)
            arrow(ax, (x + 1.23, middle), (x + 2.07, middle), colour)
    return fig


if __name__ == "__main__":
    save(__file__, draw())

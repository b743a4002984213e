"""Figures of chapter 14b: ragged kernel."""

import itertools

from figures._chart import chart, label, numbered, tracks
from figures._draw import BLUE, GREEN, ORANGE, PINK, RED, SKY, SOFT, arrow, box, drawing, words
from lab import plot

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


@drawing(7.8, 3.75)
def kernel_boxes(ax):
    """How the last tile of a sequence is stored: all of its rows at once, or as boxes of powers of two."""
    high, bottom = 0.044, 0.35
    y_of = lambda row: bottom + high * (QUERIES - row)
    for x, title in ((0.2, "all 64 rows"), (4.15, f"{NUM} = 16 + 4 + 2 + 1")):
        words(ax, x + 1.75, 3.55, title, weight="bold")
        words(ax, x + 0.6, 0.17, "the tile", 8)
        words(ax, x + 2.75, 0.17, "out", 8)
        plain = x < 1
        parts = [(0, QUERIES)] if plain else boxes(NUM)
        box(ax, x, y_of(QUERIES), 1.2, high * QUERIES, colour=BLUE, fill=0.04)
        box(ax, x, y_of(NUM), 1.2, high * NUM, f"{NUM} queries" if plain else "", BLUE, fill=0.3, size=8)
        box(ax, x + 2.1, y_of(NUM), 1.3, high * NUM, "" if plain else "", BLUE, fill=0.12, size=8)
        box(ax, x + 2.1, y_of(QUERIES), 1.3, high * (QUERIES - NUM) - 0.03, colour=RED if plain else PINK, fill=0.2)
        said = "rows of the next\nsequence, now\noverwritten" if plain else "rows of the next\nsequence"
        words(ax, x + 2.75, y_of(44), said, 8)
        if plain:
            words(ax, x + 0.6, y_of(44), "unused", 8)
        for first, size in parts:
            middle = y_of(first + size / 2)
            colour = RED if plain else COLOURS[size]
            if not plain:
                box(ax, x + 0.03, y_of(first + size) + 0.006, 1.14, high * size - 0.012, colour=colour, fill=0.35)
                box(ax, x + 2.13, y_of(first + size) + 0.006, 1.24, high * size - 0.012, colour=colour, fill=0.35)
                if size >= 4:
                    words(ax, x + 0.6, middle, str(size), 8)
                    words(ax, x + 2.75, middle, str(size), 8)
            arrow(ax, (x + 1.23, middle), (x + 2.07, middle), colour)


ROWS_COLOURS = BLUE, ORANGE, PINK, GREEN
ROWS = 16  # Rows that are drawn, in place of 64.


def tile(ax, x, y, used, width=0.42):
    """Rows of a tile; `used` are their colours, the others are empty."""
    high = 0.105
    for row in range(ROWS):
        mine = row < len(used)
        colour = used[row] if mine else SOFT
        box(ax, x, y - high * (row + 1), width, high * 0.85, colour=colour, fill=0.55 if mine else 0.05, linewidth=0.4)


def keys(ax, x, y, width=0.42):
    box(ax, x, y, width, 0.3, "keys", SOFT, fill=0.15, size=7)


@drawing(7.8, 3.75)
def kernel_rows(ax):
    """The 64 rows of a tile: queries of one head, or fewer queries with all heads that read the same keys."""
    words(ax, 0.2, 3.55, "one head a tile", ha="left", weight="bold")
    words(ax, 0.2, 3.3, "a prompt: 16 queries", 8, ha="left")
    words(ax, 0.2, 1.13, "4 tiles, 4 times the keys", 8, ha="left", colour=SOFT)
    for i, colour in enumerate(ROWS_COLOURS):
        tile(ax, 0.2 + 0.47 * i, 3.15, [colour] * 16, 0.38)
        keys(ax, 0.2 + 0.47 * i, 0.72, 0.38)
    words(ax, 2.3, 3.3, "an answer: 1 query", 8, ha="left")
    words(ax, 2.3, 1.13, "4 tiles, 4 times the keys", 8, ha="left", colour=SOFT)
    for i, colour in enumerate(ROWS_COLOURS):
        tile(ax, 2.3 + 0.47 * i, 3.15, [colour], 0.38)
        keys(ax, 2.3 + 0.47 * i, 0.72, 0.38)
    ax.plot((4.3, 4.3), (0.6, 3.6), color=SOFT, linewidth=0.8)
    words(ax, 4.5, 3.55, "all heads of a group in a tile", ha="left", weight="bold")
    words(ax, 4.5, 3.3, "a prompt: 16 queries", 8, ha="left")
    words(ax, 4.5, 1.13, "4 tiles, 4 times the keys", 8, ha="left", colour=SOFT)
    for i in range(4):
        tile(ax, 4.5 + 0.47 * i, 3.15, list(ROWS_COLOURS) * 4, 0.38)
        keys(ax, 4.5 + 0.47 * i, 0.72, 0.38)
    words(ax, 6.55, 3.3, "an answer: 1 query", 8, ha="left")
    words(ax, 6.55, 1.13, "1 tile", 8, ha="left", colour=SOFT)
    tile(ax, 6.55, 3.15, list(ROWS_COLOURS), 0.38)
    keys(ax, 6.55, 0.72, 0.38)
    words(ax, 0.2, 0.3, "Colours are query heads, four of which read one KV head. A row is one query of one head; "
          "a tile has 64, drawn are 16.", size=8, ha="left")  # fmt: skip


# Tiles of two prompts, steps 1 to 9 and 1 to 5, and of single tokens with keys of any length.
STEPS = [*range(1, 10), *range(1, 6), 7, 2, 8, 3, 1, 6]
BLOCKS = 5


def dealt(steps, to_and_fro: bool):
    """[(block, start, steps), ...]: tiles go to the blocks in turn, wave after wave."""
    done, bars = [0] * BLOCKS, []
    for wave, tiles in enumerate(itertools.batched(steps, BLOCKS)):
        blocks = reversed(range(BLOCKS)) if to_and_fro and wave % 2 else range(BLOCKS)
        for block, tile in zip(blocks, tiles, strict=False):
            bars.append((block, done[block], tile, wave))
            done[block] += tile
    return bars, max(done)


@chart(7.5, 4.9, nrows=3, sharex=True)
def kernel_order(axes):
    """Tiles of a few sequences on persistent blocks, dealt out in three ways."""
    longest = sorted(STEPS, reverse=True)
    ways = (
        ("in the order of the list", STEPS, False),
        ("the longest first, in one direction", longest, False),
        ("the longest first, to and fro", longest, True),
    )
    for ax, (name, steps, to_and_fro) in zip(axes, ways, strict=True):
        bars, end = dealt(steps, to_and_fro)
        for block, start, length, wave in bars:
            colour = plot.COLOURS[(4, 1, 2, 3)[wave % 4]]
            ax.barh(block, length, left=start, height=0.8, color=colour, edgecolor=plot.CARD, linewidth=1.2)
            label(ax, start + length / 2, block, str(length), 8)
        ax.axvline(end, color=plot.BOUND, linewidth=1.2)
        tracks(ax, numbered("block", BLOCKS), f"{name}: done after {end} steps; at best {-(-sum(STEPS) // BLOCKS)}")
    axes[-1].set_xticks(range(0, 22, 3))
    axes[-1].set_xlabel("time, in steps; numbers: steps of a tile; colours: first, second, third, fourth wave")

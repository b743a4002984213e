"""Figures of chapter 14b: ragged kernel."""

import itertools

from figures._chart import bar, chart, numbered, tracks
from figures._draw import BLUE, GREEN, ORANGE, PINK, RED, SKY, SOFT, arrow, box, drawing, words
from figures.grouped_matmul import rungs


@drawing(7.8, 3.75)
def kernel_boxes(ax):
    """How the last tile of a sequence is stored: all of its rows at once, or as boxes of powers of two."""
    num, queries = 23, 64
    colours = {16: GREEN, 4: ORANGE, 2: SKY, 1: PINK}
    high, bottom = 0.044, 0.35
    y_of = lambda row: bottom + high * (queries - row)
    for x, title in ((0.2, "all 64 rows"), (4.15, f"{num} = 16 + 4 + 2 + 1")):
        words(ax, x + 1.75, 3.55, title, weight="bold")
        words(ax, x + 0.6, 0.17, "the tile", 8)
        words(ax, x + 2.75, 0.17, "out", 8)
        plain = x < 1
        box(ax, x, bottom, 1.2, high * queries, colour=BLUE, fill=0.04)
        box(ax, x, y_of(num), 1.2, high * num, f"{num} queries" if plain else "", BLUE, fill=0.3, size=8)
        box(ax, x + 2.1, y_of(num), 1.3, high * num, "", BLUE, fill=0.12, size=8)
        box(ax, x + 2.1, bottom, 1.3, high * (queries - num) - 0.03, colour=RED if plain else SOFT, fill=0.2)
        words(ax, x + 2.75, y_of(44), "rows of the next\nsequence" + ", now\noverwritten" * plain, 8)
        if plain:
            words(ax, x + 0.6, y_of(44), "unused", 8)
            arrow(ax, (x + 1.23, y_of(queries / 2)), (x + 2.07, y_of(queries / 2)), RED)
            continue
        for first, size in rungs(num):
            middle, colour, y = y_of(first + size / 2), colours[size], y_of(first + size) + 0.006
            for left, width in ((x + 0.03, 1.14), (x + 2.13, 1.24)):
                box(ax, left, y, width, high * size - 0.012, colour=colour, fill=0.35)
            if size >= 4:
                words(ax, x + 0.6, middle, str(size), 8)
                words(ax, x + 2.75, middle, str(size), 8)
            arrow(ax, (x + 1.23, middle), (x + 2.07, middle), colour)


def head_tile(ax, x, used):
    """A tile's rows and its keys; `used` are the colours of its rows, those after them are empty."""
    rows = 16  # Rows that are drawn, in place of 64.
    high, top, width = 0.105, 3.15, 0.38
    for row in range(rows):
        mine = row < len(used)
        colour, fill = (used[row], 0.55) if mine else (SOFT, 0.05)
        box(ax, x, top - high * (row + 1), width, high * 0.85, colour=colour, fill=fill, linewidth=0.4)
    box(ax, x, 0.72, width, 0.3, "keys", SOFT, fill=0.15, size=7)


@drawing(7.8, 3.75)
def kernel_rows(ax):
    """The 64 rows of a tile: queries of one head, or fewer queries with all heads that read the same keys."""
    heads = BLUE, ORANGE, PINK, GREEN
    words(ax, 0.2, 3.55, "one head per tile", ha="left", weight="bold")
    _tiles(ax, 0.2, "a prompt: 16 queries", "4 tiles, 4 times the keys", [[head] * 16 for head in heads])
    _tiles(ax, 2.3, "a decode token: 1 query", "4 tiles, 4 times the keys", [[head] for head in heads])
    ax.plot((4.3, 4.3), (0.6, 3.6), color=SOFT, linewidth=0.8)
    words(ax, 4.5, 3.55, "all heads of a group in a tile", ha="left", weight="bold")
    _tiles(ax, 4.5, "a prompt: 16 queries", "4 tiles, 4 times the keys", [heads * 4] * 4)
    _tiles(ax, 6.55, "a decode token", "1 tile", [heads])
    text = "Colours are query heads, four of which read one KV head. A row is one query of one head"
    words(ax, 0.2, 0.3, f"{text}; a tile has 64, of which 16 are drawn.", 8, ha="left")


# Tiles of two prompts, steps 1 to 9 and 1 to 5, and of single tokens with keys of any length.
STEPS = [*range(1, 10), *range(1, 6), 7, 2, 8, 3, 1, 6]
BLOCKS = 5


def dealt(steps, turns: bool):
    """[(block, start, steps), ...]: tiles go to the blocks in turn, wave after wave."""
    done, bars = [0] * BLOCKS, []
    for wave, tiles in enumerate(itertools.batched(steps, BLOCKS)):
        blocks = reversed(range(BLOCKS)) if turns and wave % 2 else range(BLOCKS)
        for block, tile in zip(blocks, tiles, strict=False):
            bars.append((block, done[block], tile, wave))
            done[block] += tile
    return bars, max(done)


def _tiles(ax, x, title, cost, tiles):
    words(ax, x, 3.3, title, 8, ha="left")
    words(ax, x, 1.13, cost, 8, ha="left", colour=SOFT)
    for i, used in enumerate(tiles):
        head_tile(ax, x + 0.47 * i, used)


@chart(7.5, 4.9, nrows=3, sharex=True)
def kernel_order(axes):
    """Tiles of a few sequences on persistent blocks, dealt out in three ways."""
    longest = sorted(STEPS, reverse=True)
    ways = (
        ("in the order of the list", STEPS, False),
        ("the longest first, in one direction", longest, False),
        ("the longest first, back and forth", longest, True),
    )
    for ax, (name, steps, turns) in zip(axes, ways, strict=True):
        bars, end = dealt(steps, turns)
        for block, start, length, wave in bars:
            colour = (SKY, ORANGE, GREEN, PINK)[wave % 4]
            bar(ax, block, start, start + length, str(length), colour, 0.8, clip=False)
        ax.axvline(end, color=RED, linewidth=1.2)
        best = -(-sum(STEPS) // BLOCKS)
        tracks(ax, numbered("block", BLOCKS), f"{name}: done after {end} steps; at best {best}")
    axes[-1].set_xticks(range(0, 22, 3))
    axes[-1].set_xlabel("time, in steps; numbers: steps of a tile; colours: first, second, third, fourth wave")


# Steps of the tiles of three sequences; so many KV heads, and so many tiles that run side by side.
SEQUENCES, KV_HEADS, BESIDE = {"A": (1, 2, 3, 4), "B": (1, 2, 3), "C": (1, 2)}, 4, 8


@drawing(7.8, 3.0)
def kernel_beside(ax):
    """Which tiles run side by side, and how many heads of sequences' keys they read, in three orders."""
    listed = [(name, steps) for name, tiles in SEQUENCES.items() for steps in tiles]
    longest = sorted(listed, key=lambda tile: -tile[1])
    heads = range(KV_HEADS)
    ways = (
        ("rung 2: in the order of the list, all KV heads of a tile", itertools.product(listed, heads)),
        ("rung 3: the longest first, all KV heads of a tile", itertools.product(longest, heads)),
        ("rung 4: the longest first, one KV head after the other", ((tile, i) for i in heads for tile in longest)),
    )
    for way, (title, order) in enumerate(ways):
        _order(ax, 2.3 - 0.95 * way, title, list(order))
    text = "Letter: sequence; number: steps of the tile; shade: KV head. A frame: tiles that run side by side."
    words(ax, 0.2, 0.12, f"{text} A set: a sequence's keys of a KV head.", 8, ha="left", colour=SOFT)


def _order(ax, y, title, order):
    wide, colours = 0.202, dict(zip(SEQUENCES, (BLUE, ORANGE, GREEN), strict=True))
    words(ax, 0.2, y + 0.48, title, 8.5, ha="left", weight="bold")
    for first in range(0, len(order), BESIDE):
        some, x = order[first : first + BESIDE], 0.2 + wide * first
        box(ax, x + 0.01, y, wide * len(some) - 0.02, 0.32, colour=SOFT, fill=0.0, linewidth=0.9)
        for i, ((name, steps), head) in enumerate(some):
            look = dict(colour=colours[name], fill=0.12 + 0.2 * head, size=7, linewidth=0.3)
            box(ax, x + wide * i + 0.02, y + 0.03, wide - 0.04, 0.26, f"{name}{steps}", **look)
        keys = len({(name, head) for (name, _), head in some})
        words(ax, x + wide * len(some) / 2, y - 0.1, f"{keys} sets of keys", 7.5, colour=SOFT)

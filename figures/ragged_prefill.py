"""Figures of chapter 14: ragged prefill."""

import itertools

from figures._chart import bare, chart, label, tile
from figures._draw import BLUE, GREEN, INK, ORANGE, PINK, RED, SKY, SOFT, arrow, box, drawing, words
from lab import plot


@drawing(7.8, 3.7)
def ragged_padding(ax):
    """Sequences of a batch: each padded to the longest, and packed one after the other."""
    lengths = 9, 3, 6, 1, 4
    unit, left = 0.27, 1.35
    colours, most = (BLUE, GREEN, PINK, ORANGE, SKY), max(lengths)
    words(ax, 0.1, 3.5, "padded to the longest", ha="left", weight="bold")
    for i, (length, colour) in enumerate(zip(lengths, colours, strict=True)):
        y = 2.95 - 0.3 * i
        words(ax, left - 0.12, y + 0.11, f"sequence {i}", 8, ha="right")
        for j in range(most):
            look = dict(colour=colour, fill=0.35) if j < length else dict(colour=SOFT, fill=0.04, linestyle=":")
            box(ax, left + unit * j, y, unit * 0.86, 0.23, **look)
    x = left + unit * most + 0.35
    words(ax, x, 2.75, f"{len(lengths) * most} rows are computed and kept,", 8.5, ha="left")
    words(ax, x, 2.5, f"of which {sum(lengths)} are wanted", 8.5, ha="left")
    words(ax, x, 2.0, "dotted: padding", 8, ha="left", colour=SOFT)
    words(ax, 0.1, 1.3, "packed", ha="left", weight="bold")
    starts = [0, *itertools.accumulate(lengths)]
    for start, length, colour in zip(starts, lengths, colours, strict=False):
        for j in range(start, start + length):
            box(ax, left + unit * j * 0.93, 0.82, unit * 0.8, 0.26, colour=colour, fill=0.35)
    for i, start in enumerate(starts):
        at = left + unit * start * 0.93 - 0.017
        ax.plot((at, at), (0.62, 1.15), color=RED, linewidth=1.1)
        words(ax, at, 0.5, str(start), 8, colour=RED)
        words(ax, at, 0.28, f"[{i}]", 6.5, colour=SOFT)
    words(ax, left - 0.12, 0.5, "cu_seqlens", 8.5, ha="right", colour=RED)


CASES = (
    ("T = S = 6\na whole prompt", 6, 6),
    ("T = 3, S = 6\nthe last chunk of a prompt", 3, 6),
    ("T = 1, S = 6\na token of an answer", 1, 6),
    ("T = 6, S = 4\nmore queries than keys", 6, 4),
)


@chart(7.8, 2.75, ncols=len(CASES))
def ragged_masks(axes):
    """A causal mask aligned at the ends: as many queries as keys, fewer, and more."""
    for ax, (title, num_q, num_kv) in zip(axes, CASES, strict=True):
        for i in range(num_q):
            seen = max(num_kv - num_q + i + 1, 0)
            for j in range(num_kv):
                tile(ax, j, i, 1, 1, SKY if j < seen else plot.CARD, edgecolor=INK, linewidth=0.8)
            if not seen:
                label(ax, num_kv + 0.25, i + 0.5, "nothing", 7, ha="left", colour=RED)
        ax.set(xlim=(-0.1, 6.6), ylim=(6.1, -0.1), aspect="equal", xlabel="keys")
        ax.set_xticks([j + 0.5 for j in range(num_kv)], range(num_kv), fontsize=7)
        ax.set_yticks([i + 0.5 for i in range(num_q)], range(num_q), fontsize=7)
        bare(ax)
        ax.set_title(title, fontsize=8, fontweight="normal")
    axes[0].set_ylabel("queries")


def _numbers(ax, x, y, name, values, colours, width=0.55):
    words(ax, x - 0.12, y + 0.15, name, 8.5, ha="right")
    for i, (value, colour) in enumerate(zip(values, colours, strict=True)):
        box(ax, x + width * i, y, width - 0.06, 0.3, str(value), colour, fill=0.18, size=8.5)


@drawing(7.8, 4.15)
def ragged_list(ax):
    """From lengths to a list of tiles: cumsum says where each sequence's tiles end, searchsorted inverts that."""
    query_counts, queries = (150, 1, 0, 70), 64
    list_colours = BLUE, GREEN, ORANGE, PINK
    scale, left, x = 0.0255, 1.0, 1.95
    starts = [0, *itertools.accumulate(query_counts)]
    tiles = [(seq, first) for seq, length in enumerate(query_counts) for first in range(0, length, queries)]
    for number, (seq, first) in enumerate(tiles):
        row, size = starts[seq] + first, min(queries, query_counts[seq] - first)
        colour, inside = list_colours[seq], f"tile {number}" if size > 10 else ""
        box(ax, left + scale * row, 3.3, max(scale * size - 0.02, 0.05), 0.36, inside, colour, 0.3, size=8)
        if not inside:
            words(ax, left + scale * (row + size / 2), 3.78, f"tile {number}", 8, colour=colour)
    words(ax, left - 0.12, 3.48, "rows of q", 8.5, ha="right")
    words(ax, left + 1.9, 3.98, "sequence 0: 150 queries", 8, colour=BLUE)
    words(ax, left + scale * 151 + 0.95, 3.98, "3: 70", 8, colour=PINK)
    words(ax, left + scale * 225 + 0.1, 3.48, "64 queries per tile", 7.5, ha="left", colour=SOFT)
    num = [-(-length // queries) for length in query_counts]
    words(ax, x + 1.07, 2.93, "one number for each sequence", 7.5, colour=SOFT)
    _numbers(ax, x, 2.45, "queries", query_counts, list_colours)
    _numbers(ax, x, 2.05, "tiles, each rounded up", num, list_colours)
    _numbers(ax, x, 1.65, "ends = cumsum", itertools.accumulate(num), list_colours)
    words(ax, 4.75, 2.3, "tile n belongs to the\nfirst sequence whose\nend is greater than n", 8, ha="left", colour=RED)
    arrow(ax, (x + 1.1, 1.62), (x + 1.1, 1.25), RED, "searchsorted", at=(x + 1.25, 1.43), ha="left")
    words(ax, 5.0, 1.43, "one number for each tile", 7.5, ha="left", colour=SOFT)
    more = len(query_counts) + sum(query_counts) // queries - len(tiles)
    colours, nothing = [*(list_colours[seq] for seq, _ in tiles), *[SOFT] * more], ["-"] * more
    _numbers(ax, x, 0.9, "number", range(len(colours)), colours)
    _numbers(ax, x, 0.5, "sequence", [*(seq for seq, _ in tiles), *nothing], colours)
    _numbers(ax, x, 0.1, "first query in it", [*(first for _, first in tiles), *nothing], colours)
    text = "grey: no tile, the list\nhas room for the worst"
    words(ax, x + 0.55 * len(colours) + 0.08, 0.65, text, 7, ha="left", colour=SOFT)


FIRST, END, UNIT, BLOCK = 13, 45, 8, 16  # Rows of the sequence, of a tile, and of a block, few for the drawing.


@drawing(7.8, 3.1)
def ragged_keys(ax):
    """The blocks of keys of one sequence among its neighbours: where they begin, which of their rows are others'."""
    rows = 60
    wide, left = 0.113, 0.75
    at = lambda row: left + wide * row
    for start, end, colour, name in (
        (0, FIRST, ORANGE, "sequence 3"),
        (FIRST, END, BLUE, "sequence 4"),
        (END, rows, PINK, "sequence 5"),
    ):
        words(ax, (at(start) + at(end)) / 2, 2.85, name, 8.5, colour=colour)
        for row in range(start, end):
            box(ax, at(row), 2.35, wide * 0.86, 0.32, colour=colour, fill=0.4, linewidth=0.5)
    words(ax, left - 0.1, 2.51, "k, v", ha="right")
    for row in range(0, rows + 1, UNIT):
        ax.plot((at(row) - 0.01, at(row) - 0.01), (2.12, 2.3), color=SOFT, linewidth=0.9)
        words(ax, at(row), 2.02, str(row), 7, colour=SOFT)
    source = FIRST - FIRST % UNIT
    for i, row in enumerate(range(source, END, BLOCK)):
        box(ax, at(row), 1.3, wide * BLOCK - 0.02, 0.34, colour=GREEN, fill=0.0)
        words(ax, at(row) + wide * BLOCK / 2, 1.8, f"block {i}", 8, colour=GREEN)
        for j in range(row, row + BLOCK):
            colour, fill = (BLUE, 0.4) if FIRST <= j < END else (RED, 0.85)
            box(ax, at(j) + 0.01, 1.36, wide * 0.72, 0.22, colour=colour, fill=fill, linewidth=0.3)
    words(ax, left - 0.1, 1.47, "loaded", ha="right")
    words(ax, at(source), 0.98, "masked: rows of the neighbour before", 8, ha="left", colour=RED)
    words(ax, at(END) + 0.05, 0.98, "and after", 8, ha="left", colour=RED)
    text = f"source = {source}: the multiple of 8 before the first key; block 0 begins there"
    words(ax, left, 0.62, text, 8.5, ha="left")
    text = f"first_kv = {FIRST - source}, num_kv = {END - source}: where the keys of the sequence begin and end, "
    words(ax, left, 0.36, text + "counted from source", 8.5, ha="left")

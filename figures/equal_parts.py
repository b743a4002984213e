"""Figures of chapter 13b: equal parts."""

from figures._chart import chart, first_free, label, numbered, tile, tracks
from figures._draw import BLUE, GREEN, INK, ORANGE, PINK, RED, SOFT, arrow, box, drawing, words
from lab import plot


def equal_parts(units, num_parts):
    """(part, first block in it, blocks, unit) of each piece, where all blocks in a row are cut into equal parts."""
    cuts = [part * sum(units) // num_parts for part in range(num_parts + 1)]
    placed, first = [], 0
    for unit, blocks in enumerate(units):
        for part in range(num_parts):
            begin, end = max(first, cuts[part]), min(first + blocks, cuts[part + 1])
            if end > begin:
                placed.append((part, begin - cuts[part], end - begin, unit))
        first += blocks
    return placed


@chart(7.8, 5.2, nrows=3, sharex=True)
def parts_waves(axes):
    """Units of unequal lengths on eight SMs: too few, many of mixed lengths, and equal parts of all blocks."""
    sms = 8
    few, mixed = (10, 10, 10), (2, 1, 4, 1, 2, 3, 1, 1, 2, 1, 12, 1, 5, 2, 1, 1)  # Blocks of each unit.
    cases = (
        (f"{len(few)} long units: {sms - len(few)} SMs have nothing to do", first_free(few, sms)),
        (f"{len(mixed)} units of mixed lengths: all wait for the longest", first_free(mixed, sms)),
        ("the same units, all blocks cut into 8 equal parts", equal_parts(mixed, sms)),
    )
    end = max(start + blocks for _, placed in cases for _, start, blocks, _ in placed)
    for ax, (title, placed) in zip(axes, cases, strict=True):
        for sm, start, blocks, unit in placed:
            colour = plot.COLOURS[unit % 6]
            tile(ax, start, sm - 0.4, blocks, 0.8, colour, str(unit), 7, alpha=0.6, edgecolor=plot.CARD)
        last = max(start + blocks for _, start, blocks, _ in placed)
        ax.axvline(last, color=RED, linewidth=1.5)
        busy = sum(blocks for _, _, blocks, _ in placed) / last / sms
        label(ax, last + 0.1, 3.5, f"{busy:.0%}\nbusy", ha="left", colour=RED)
        tracks(ax, numbered("SM", sms), title, grid=False)
        ax.set(yticks=ax.get_yticks()[::2], xlim=(0, end + 1))
    axes[-1].set_xlabel("time, in steps of a block of keys; the numbers are units")


@drawing(7.8, 3.75)
def parts_pieces(ax):
    """All blocks of all units in a row, cut into equal parts; the pieces, their results, and the merge."""
    units, parts = (5, 1, 7, 3), 4  # Blocks of each unit.
    colours = (BLUE, ORANGE, GREEN, PINK)
    wide, share = 0.39, sum(units) // parts
    at = lambda block: 1.25 + wide * block + 0.06 * (block // share)
    words(ax, 0.15, 3.1, "all blocks\nin a row", 8.5, ha="left", weight="bold")
    first = 0
    for unit, blocks in enumerate(units):
        for block in range(first, first + blocks):
            box(ax, at(block), 2.9, wide - 0.03, 0.4, str(block - first), colours[unit], fill=0.35, size=8)
        first += blocks
    for part in range(parts):
        x = at(part * share)
        words(ax, x + share * wide / 2, 3.5, f"part {part}", 8.5, weight="bold")
        if part:
            ax.plot([x - 0.045] * 2, [2.82, 3.62], color=INK, linewidth=1.4)
    words(ax, 0.15, 2.0, "out, lse\nof each piece", 8.5, ha="left", weight="bold")
    pieces = equal_parts(units, parts)
    for index, (part, begin, blocks, unit) in enumerate(pieces):
        x, begin = 1.25 + 0.92 * index, begin + part * share
        box(ax, x, 1.75, 0.86, 0.5, f"{unit} + {part} = {unit + part}", colours[unit], fill=0.2, size=8)
        arrow(ax, ((at(begin) + at(begin + blocks - 1) + wide) / 2, 2.88), (x + 0.43, 2.27), colours[unit], width=1.0)
    words(ax, 0.15, 0.75, "merged", 8.5, ha="left", weight="bold")
    for unit in range(len(units)):
        mine = [i for i, piece in enumerate(pieces) if piece[3] == unit]
        x = 1.25 + 0.92 * (mine[0] + mine[-1]) / 2
        box(ax, x, 0.55, 0.86, 0.4, f"unit {unit}", colours[unit], fill=0.35, size=8)
        for index in mine:
            arrow(ax, (1.25 + 0.92 * index + 0.43, 1.73), (x + 0.43, 0.97), colours[unit], width=1.0)
    text = "a unit: a sequence and a KV head, with the query heads that read it"
    words(ax, 1.25, 0.22, text, 8, ha="left", colour=SOFT)


@drawing(7.8, 3.2)
def parts_end(ax):
    """The last block of a sequence: unseen logits, weights of zero, and values that are not numbers."""
    wide, seen, shown = 0.3, 6, 16  # Inches; tokens that count, of those of the block that are drawn; pages of 4.
    rows = (
        (2.5, "keys", lambda counts: ("k", GREEN) if counts else ("?", SOFT)),
        (1.8, "logits, masked", lambda counts: ("s", ORANGE) if counts else ("-inf", SOFT)),
        (1.1, "weights", lambda counts: ("p", BLUE) if counts else ("0", SOFT)),
        (0.4, "values", lambda counts: ("v", PINK) if counts else ("NaN", RED)),
    )
    for y, name, look in rows:
        words(ax, 1.4, y + 0.15, name, 8.5, ha="right", weight="bold")
        for token in range(shown):
            text, colour = look(token < seen)
            x = 1.5 + wide * token + 0.05 * (token // 4)
            box(ax, x, y, wide - 0.03, 0.3, text, colour, fill=0.3 if token < seen else 0.08, size=7, linewidth=0.7)
    for y in (2.48, 1.78):
        arrow(ax, (1.5 + wide * shown / 2, y), (1.5 + wide * shown / 2, y - 0.36), SOFT, width=1.0)
    edge = 1.5 + wide * seen + 0.05 * (seen // 4) - 0.015
    ax.plot([edge, edge], [0.3, 2.95], color=RED, linewidth=1.3, linestyle="--")
    words(ax, edge, 3.05, "kv_len", 8.5, colour=RED)
    words(ax, 6.7, 0.93, "0 x NaN\n= NaN", 9.5, ha="left", colour=RED, weight="bold")
    words(ax, 6.7, 0.42, "so zeros\nreplace them", 8, ha="left")
    words(ax, 6.7, 2.3, "whatever a key\nholds, its logit\nis replaced", 8, ha="left")
    text = "pages of 4 tokens: the second is half full, the others are free or belong to other sequences"
    words(ax, 1.5, 0.16, text, 7.5, ha="left", colour=SOFT)

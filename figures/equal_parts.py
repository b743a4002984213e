"""Figures of chapter 13b: equal parts."""

from figures._chart import bar, chart, first_free, label, lanes, numbered, tile, tracks
from figures._draw import BLUE, GREEN, INK, ORANGE, PINK, RED, SKY, SOFT, arrow, box, drawing, words
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
    words(ax, 6.7, 2.3, "whatever a key\nholds, its logit\nis replaced", 8, ha="left")
    text = "pages of 4 tokens: the second is half full, the others are free or belong to other sequences"
    words(ax, 1.5, 0.16, text, 7.5, ha="left", colour=SOFT)


HEADS, BLOCKS, SMS, CELL = 4, 12, 10, 0.27  # KV heads of a sequence, its blocks of keys, SMs; inches.


@drawing(7.8, 2.55)
def parts_heads(ax):
    """The blocks of a sequence and of its KV heads: which of them ten SMs read first, in rung 3 and in rung 4."""
    starts = lambda num, total: [part * total // num for part in range(num)]
    in_row = {divmod(at, BLOCKS): sm for sm, at in enumerate(starts(SMS, HEADS * BLOCKS))}
    places = enumerate(starts(SMS // HEADS, BLOCKS))
    together = {(head, at): HEADS * part + head for part, at in places for head in range(HEADS)}
    _first_reads(ax, 0.75, "rung 3: parts of all units in a row", in_row)
    _first_reads(ax, 4.45, "rung 4: parts of the sequence", together)
    text = (
        "a column: the same tokens, whose heads lie side by side in memory; numbers: the SM that reads this block first"
    )
    words(ax, 0.75, 0.3, text, 8, ha="left", colour=SOFT)


def _first_reads(ax, left, title, reads):
    words(ax, left, 2.35, title, 9, ha="left", weight="bold")
    columns = len({block for _, block in reads})
    words(ax, left, 2.05, f"{len(reads)} SMs begin in {columns} places", 8, ha="left")
    for head, block in ((head, block) for head in range(HEADS) for block in range(BLOCKS)):
        x, y, sm = left + CELL * block, 1.6 - CELL * head, reads.get((head, block))
        text, fill = ("", 0.06) if sm is None else (str(sm), 0.45)
        box(ax, x, y, CELL - 0.03, CELL - 0.03, text, BLUE, fill=fill, size=7.5, linewidth=0.6)
        if block == 0:
            words(ax, x - 0.08, y + CELL / 2, f"head {head}", 7.5, ha="right", colour=SOFT)
    arrow(
        ax,
        (left, 0.68),
        (left + CELL * BLOCKS, 0.68),
        SOFT,
        "tokens of the sequence",
        7.5,
        offset=(0, -0.13),
        width=1.0,
    )


@chart(7.8, 3.6, nrows=2, sharex=True)
def parts_queries(axes):
    """The end of a piece and the beginning of the next: queries copied before its first blocks, and after them."""
    look_up, trip, steps = 0.8, 1.3, 4  # In steps of computing; steps of the last piece that are shown.
    titles = "rung 4: queries, then blocks", "rung 5: blocks, then queries"
    for ax, title, later in zip(axes, titles, (False, True), strict=True):
        found = [i + 1 if later else steps + look_up * i for i in range(3)]  # In rung 5 each step frees a stage.
        for i, at in enumerate(found):
            y = 0.62 - 0.28 * i
            tile(ax, at, y, look_up, 0.24, plot.CARD, "look up", 7, edgecolor=SOFT, linewidth=0.6)
            tile(ax, at + look_up, y, trip, 0.24, SKY, f"block {i}", 7)
        tile(ax, steps, -0.3, trip, 0.24, ORANGE, "queries", 7)
        start = max(steps, found[0] + look_up) + trip
        for i in range(steps):
            bar(ax, 1.4, i, i + 1, "last piece", BLUE, height=0.5)
        for i in range(3):
            bar(ax, 1.4, start + i, start + i + 1, f"block {i}", BLUE, height=0.5)
        ax.axvline(steps, color=RED, linewidth=1.2)
        label(ax, steps + 0.06, 1.4, "q_free", 8, ha="left", colour=RED)
        lanes(ax, ["", ""], title)
        ax.set_yticks([0.3, 1.4], ["memory", "compute"])
        ax.set(ylim=(1.75, -0.5), xlim=(0, steps + look_up + trip + 3.2))

"""All blocks of all units in a row, cut into equal parts; the pieces, their results, and the merge."""

from figures._draw import BLUE, GREEN, INK, ORANGE, PINK, SOFT, arrow, box, canvas, save, words

UNITS, PARTS = (5, 1, 7, 3), 4  # Blocks of each unit.
COLOURS = (BLUE, ORANGE, GREEN, PINK)


def pieces():
    """(unit, part, first block in the row, blocks)."""
    share, first, found = sum(UNITS) // PARTS, 0, []
    for unit, blocks in enumerate(UNITS):
        for part in range(PARTS):
            begin, end = max(first, part * share), min(first + blocks, (part + 1) * share)
            if end > begin:
                found.append((unit, part, begin, end - begin))
        first += blocks
    return found


def draw():
    fig, ax = canvas(7.8, 3.75)
    wide, share = 0.39, sum(UNITS) // PARTS
    at = lambda block: 1.25 + wide * block + 0.06 * (block // share)
    words(ax, 0.15, 3.1, "all blocks\nin a row", size=8.5, ha="left", weight="bold")
    first = 0
    for unit, blocks in enumerate(UNITS):
        for block in range(first, first + blocks):
            box(ax, at(block), 2.9, wide - 0.03, 0.4, str(block - first), COLOURS[unit], fill=0.35, size=8)
        first += blocks
    for part in range(PARTS):
        x = at(part * share)
        words(ax, x + share * wide / 2, 3.5, f"part {part}", size=8.5, weight="bold")
        if part:
            ax.plot([x - 0.045] * 2, [2.82, 3.62], color=INK, linewidth=1.4)
    words(ax, 0.15, 2.0, "out, lse\nof each piece", size=8.5, ha="left", weight="bold")
    for index, (unit, part, begin, blocks) in enumerate(pieces()):
        x = 1.25 + 0.92 * index
        box(ax, x, 1.75, 0.86, 0.5, f"{unit} + {part} = {unit + part}", COLOURS[unit], fill=0.2, size=8)
        arrow(ax, ((at(begin) + at(begin + blocks - 1) + wide) / 2, 2.88), (x + 0.43, 2.27), COLOURS[unit], width=1.0)
    words(ax, 0.15, 0.75, "merged", size=8.5, ha="left", weight="bold")
    where = {unit: [i for i, piece in enumerate(pieces()) if piece[0] == unit] for unit in range(len(UNITS))}
    for unit, mine in where.items():
        x = 1.25 + 0.92 * (mine[0] + mine[-1]) / 2
        box(ax, x, 0.55, 0.86, 0.4, f"unit {unit}", COLOURS[unit], fill=0.35, size=8)
        for index in mine:
            arrow(ax, (1.25 + 0.92 * index + 0.43, 1.73), (x + 0.43, 0.97), COLOURS[unit], width=1.0)
    words(ax, 1.25, 0.22, "a unit: a sequence and a KV head, with the query heads that read it", size=8, ha="left",
          colour=SOFT)  # fmt: skip
    return fig


if __name__ == "__main__":
    save(__file__, draw())

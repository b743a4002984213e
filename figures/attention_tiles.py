"""Figures of chapter 11b: tiles and masks."""

from figures._chart import bar, chart, first_free, numbered, tile, tracks
from figures._draw import BLUE, GREEN, INK, ORANGE, RED, SKY, SOFT, places, words
from figures._stepper import stepper
from lab import plot

TILES, HEADS, SMS = 8, 3, 6


@chart(height=3.9, nrows=2, sharex=True)
def tiles_dealt(axes):
    """Causal tiles on SMs: in the order of the grid, and the longest first."""
    tiles = [(steps, head) for head in range(HEADS) for steps in range(1, TILES + 1)]
    longest_first = sorted(tiles, key=lambda tile: -tile[0])
    best = -(-sum(steps for steps, _ in tiles) // SMS)
    orders = ("in the order of the queries", tiles), ("the longest tiles first", longest_first)
    for ax, (order, tiles) in zip(axes, orders, strict=True):
        placed = first_free([steps for steps, _ in tiles], SMS)
        for block, start, steps, i in placed:
            colour = (SKY, ORANGE, GREEN)[tiles[i][1]]
            bar(ax, block, start, start + steps, str(steps), colour, 0.8, clip=False)
        end = max(start + steps for _, start, steps, _ in placed)
        tracks(ax, numbered("block", SMS), f"{order}: done after {end} steps; at best {best}")
    axes[-1].set_xlabel("time, in steps; numbers: steps of a tile; colours: heads")


KINDS = {  # Colour; text of the legend; what a warpgroup does.
    "by": (plot.FAINT, "passed by", "passes it by"),
    "cut": (ORANGE, "masked", "masks it"),
    "whole": (SKY, "computed whole", "computes it whole"),
    "skipped": (plot.CARD, "not even loaded", ""),
}
PHASES = (  # The tile; its step, or None for all; the caption.
    (
        1,
        None,
        "Tile 1 has 64 queries for each warpgroup. It needs blocks 3 to 0, and blocks 4 and 5 are not loaded.",
    ),
    (1, 0, "Step 0 is block 3. No query of warpgroup 0 sees its keys, but it waits for the block and releases it."),
    (
        1,
        1,
        "In step 1 the diagonal cuts the block for warpgroup 0. Warpgroup 1 needs no mask from here on.",
    ),
    (1, 2, "From step 2 on, all queries of the tile see all keys, so neither warpgroup masks."),
    (
        1,
        3,
        "Block 0 is the last step. Both warpgroups went through all four steps: every barrier has its arrivals.",
    ),
    (2, None, "Tile 2 has six steps. Only its first two differ from the rest, as in every tile."),
)


def kind_of(row: int, block: int) -> str:
    """A key of `KINDS`: what 64 queries under a causal mask do with 64 keys; a tile has two such rows."""
    if block >= 2 * (row // 2) + 2:
        return "skipped"
    return "whole" if block < row else "cut" if block == row else "by"


@stepper(7.8, 3.45)
def tiles_phases(ax):
    """Blocks of keys that the tiles of a causal mask need, and what each of two warpgroups does with them in turn."""
    left, top, side, size = 1.75, 3.0, 0.45, 6
    at = lambda row, block: (left + side * block, top - side * (row + 1))
    for row, block in places(size, size):
        kind = kind_of(row, block)
        text = "" if kind == "skipped" else f"{2 * (row // 2) + 1 - block}"
        tile(ax, *at(row, block), side, side, KINDS[kind][0], text, 8.5, edgecolor=SOFT, linewidth=0.6)
    for row in range(size):
        text = f"tile {row // 2}, warpgroup {row % 2}"
        words(ax, left - 0.1, at(row, 0)[1] + side / 2, text, 8.5, ha="right")
        words(ax, left + side * (row + 0.5), top + 0.12, f"{row}", 8.5)
    ax.plot((left, left + size * side), (top, top - size * side), color=RED, linewidth=1.6)
    words(ax, left + size * side / 2, 3.34, "blocks of 64 keys", 8.5)
    words(ax, left + size * side / 2, 0.12, "numbers: the step of the tile", 8, colour=SOFT)
    for i, (colour, text, _) in enumerate(KINDS.values()):
        tile(ax, 4.85, 1.3 - 0.28 * i, 0.2, 0.18, colour, edgecolor=SOFT, linewidth=0.6)
        words(ax, 5.15, 1.39 - 0.28 * i, text, 8.5, ha="left")
    yield
    for number, step, caption in PHASES:
        end = 2 * number + 2
        tile(ax, *at(end - 1, 0), side * end, 2 * side, "none", edgecolor=INK, linewidth=2.4, zorder=3)
        words(ax, 4.85, 2.85, f"tile {number}: {end} steps", 10, ha="left", weight="bold")
        if step is not None:
            block = end - 1 - step
            tile(ax, *at(end - 1, block), side, 2 * side, "none", edgecolor=BLUE, linewidth=3.6, zorder=4)
            words(ax, 4.85, 2.55, f"step {step}, block {block}", 9, ha="left", colour=BLUE, weight="bold")
            for wg in range(2):
                what = KINDS[kind_of(2 * number + wg, block)][2]
                words(ax, 4.85, 2.25 - 0.25 * wg, f"warpgroup {wg} {what}", 8.5, ha="left")
        yield caption

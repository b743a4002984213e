"""Figures of chapter 11b: attention tiles."""

from figures._chart import bar, chart, first_free, legend_of, numbered, tile, tracks
from figures._draw import BLUE, GREEN, INK, ORANGE, RED, SKY, SOFT, arrow, box, drawing, places, words
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


@chart(7.6, 3.6)
def tiles_phases(ax):
    """Phases of two compute warpgroups on the blocks of their tile under a causal mask: three each."""
    side, phases_tiles = 64, 3  # Queries of a warpgroup and keys of a block; tiles.
    kinds = {
        "by": (plot.FAINT, "passed by: waited for, given back"),
        "cut": (ORANGE, "masked: the first step that counts"),
        "whole": (SKY, "computed whole"),
        "skipped": (plot.CARD, "not even loaded"),
    }
    size = 2 * phases_tiles
    for row, block in places(size, size):
        tile_end = 2 * (row // 2) + 2
        kind = "whole" if block < row else "cut" if block == row else "by" if block < tile_end else "skipped"
        text = "" if kind == "skipped" else f"{tile_end - 1 - block}"
        tile(ax, block * side, row * side, side, side, kinds[kind][0], text, 8, edgecolor=INK, linewidth=0.8)
    for pair in range(phases_tiles):
        tile(ax, 0, 2 * side * pair, size * side, 2 * side, "none", edgecolor=INK, linewidth=2.2)
    ax.plot((0, size * side), (0, size * side), color=RED, linewidth=2)
    legend_of(ax, kinds.values())
    ax.set(xlim=(-4, size * side + 4), ylim=(size * side + 4, -4), aspect="equal")
    ax.set_xlabel("keys, 64 a block; numbers: the step")
    names = [f"tile {row // 2}, warpgroup {row % 2}" for row in range(size)]
    ax.set_yticks([(row + 0.5) * side for row in range(size)], names)
    ax.set_xticks(range(0, size * side + 1, side))
    ax.grid(visible=False)


@drawing(7.6, 2.2)
def tiles_heads(ax):
    """The KV head that each query head reads: as many, fewer, one."""
    cases = ((8, "MHA: 8 and 8"), (2, "GQA: 8 and 2"), (1, "MQA: 8 and 1"))
    for case, (kv_heads, name) in enumerate(cases):
        left = 0.2 + 2.55 * case
        words(ax, left + 1.1, 2.02, name, weight="bold")
        group, width = 8 // kv_heads, 2.2 / kv_heads
        for kv_head in range(kv_heads):
            x = left + kv_head * width
            box(ax, x + 0.02, 0.25, width - 0.05, 0.35, str(kv_head), colour=ORANGE, size=8, fill=0.3)
        for head in range(8):
            x = left + 0.275 * head
            box(ax, x + 0.02, 1.35, 0.225, 0.35, str(head), colour=BLUE, size=8, fill=0.25)
            arrow(ax, (x + 0.13, 1.33), (left + (head // group + 0.5) * width, 0.63), SOFT, width=0.9)
    words(ax, 3.8, 0.08, "above: query heads; below: KV heads", 8, colour=SOFT)

"""Causal tiles on SMs: in the order of the grid, and the longest first."""

import heapq

from figures._draw import save
from lab import plot

TILES, HEADS, SMS = 8, 3, 6


def dealt(longest_first: bool):
    """[(block, start, steps, head), ...]: each tile goes to the block that is done first."""
    tiles = [(head, i + 1) for head in range(HEADS) for i in range(TILES)]
    tiles = sorted(tiles, key=lambda tile: -tile[1]) if longest_first else tiles
    done, bars = [(0, block) for block in range(SMS)], []
    for head, steps in tiles:
        time, block = heapq.heappop(done)
        bars.append((block, time, steps, head))
        heapq.heappush(done, (time + steps, block))
    return bars


def draw():
    colours = plot.COLOURS[4], plot.COLOURS[1], plot.COLOURS[2]
    with plot.figure(height=3.9, nrows=2, sharex=True) as (fig, axes):
        for ax, longest_first in zip(axes, (False, True), strict=True):
            bars = dealt(longest_first)
            for block, start, steps, head in bars:
                ax.barh(block, steps, left=start, height=0.8, color=colours[head], edgecolor=plot.CARD, linewidth=1.2)
                ax.text(start + steps / 2, block, str(steps), ha="center", va="center", fontsize=8)
            end = max(start + steps for _, start, steps, _ in bars)
            order = "the longest tiles first" if longest_first else "in the order of the queries"
            ax.set_title(
                f"{order}: done after {end} steps; at best {-(-HEADS * TILES * (TILES + 1) // 2 // SMS)}", fontsize=9
            )
            ax.set_yticks(range(SMS), [f"block {block}" for block in range(SMS)])
            ax.set_ylim(SMS - 0.4, -0.6)
            ax.grid(axis="y", visible=False)
        axes[-1].set_xlabel("time, in steps; numbers: steps of a tile; colours: heads")
    return fig


if __name__ == "__main__":
    save(__file__, draw())

"""Phases of two compute warpgroups on the blocks of their tile under a causal mask: three each."""

import matplotlib.patches as patches

from figures._draw import save
from lab import plot

ROWS, BLOCK_KV, TILES = 64, 64, 3


def draw():
    colours = {"by": plot.FAINT, "cut": plot.COLOURS[1], "whole": plot.COLOURS[4], "skipped": plot.CARD}
    names = {
        "by": "passed by: waited for, given back",
        "cut": "masked: the first step that counts",
        "whole": "computed whole",
        "skipped": "not even loaded",
    }
    with plot.figure(7.6, 3.6) as (fig, ax):
        size = 2 * TILES
        for row in range(size):
            tile_end = 2 * (row // 2) + 2
            for block in range(size):
                kind = "whole" if block < row else "cut" if block == row else "by" if block < tile_end else "skipped"
                look = dict(facecolor=colours[kind], edgecolor=plot.INK, linewidth=0.8)
                ax.add_patch(patches.Rectangle((block * BLOCK_KV, row * ROWS), BLOCK_KV, ROWS, **look))
                if kind != "skipped":
                    middle = (block + 0.5) * BLOCK_KV, (row + 0.5) * ROWS
                    ax.text(*middle, f"{tile_end - 1 - block}", ha="center", va="center", fontsize=8)
        for tile in range(TILES):
            place = (0, 2 * ROWS * tile)
            ax.add_patch(
                patches.Rectangle(place, size * BLOCK_KV, 2 * ROWS, fill=False, edgecolor=plot.INK, linewidth=2.2)
            )
        ax.plot((0, size * BLOCK_KV), (0, size * ROWS), color=plot.BOUND, linewidth=2)
        for kind, text in names.items():
            ax.add_patch(patches.Rectangle((0, 0), 0, 0, facecolor=colours[kind], edgecolor=plot.INK, label=text))
        ax.set(xlim=(-4, size * BLOCK_KV + 4), ylim=(size * ROWS + 4, -4), aspect="equal")
        ax.set_xlabel("keys, 64 a block; numbers: the step")
        ax.set_yticks(
            [(row + 0.5) * ROWS for row in range(size)], [f"tile {r // 2}, warpgroup {r % 2}" for r in range(size)]
        )
        ax.set_xticks(range(0, size * BLOCK_KV + 1, BLOCK_KV))
        ax.grid(visible=False)
        ax.legend(loc="upper left", bbox_to_anchor=(1.02, 1))
    return fig


if __name__ == "__main__":
    save(__file__, draw())

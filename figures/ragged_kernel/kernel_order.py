"""Tiles of a few sequences on persistent blocks, dealt out in three ways."""

import itertools

from figures._draw import save
from lab import plot

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


def draw():
    longest = sorted(STEPS, reverse=True)
    ways = (
        ("in the order of the list", STEPS, False),
        ("the longest first, in one direction", longest, False),
        ("the longest first, to and fro", longest, True),
    )
    with plot.figure(7.5, 4.9, nrows=3, sharex=True) as (fig, axes):
        for ax, (name, steps, to_and_fro) in zip(axes, ways, strict=True):
            bars, end = dealt(steps, to_and_fro)
            for block, start, length, wave in bars:
                colour = plot.COLOURS[(4, 1, 2, 3)[wave % 4]]
                ax.barh(block, length, left=start, height=0.8, color=colour, edgecolor=plot.CARD, linewidth=1.2)
                ax.text(start + length / 2, block, str(length), ha="center", va="center", fontsize=8)
            ax.axvline(end, color=plot.BOUND, linewidth=1.2)
            ax.set_title(f"{name}: done after {end} steps; at best {-(-sum(STEPS) // BLOCKS)}", fontsize=9)
            ax.set_yticks(range(BLOCKS), [f"block {block}" for block in range(BLOCKS)])
            ax.set_ylim(BLOCKS - 0.4, -0.6)
            ax.grid(axis="y", visible=False)
        axes[-1].set_xticks(range(0, 22, 3))
        axes[-1].set_xlabel("time, in steps; numbers: steps of a tile; colours: first, second, third, fourth wave")
    return fig


if __name__ == "__main__":
    save(__file__, draw())

"""Blocks that wait: products and sums of equal, uneven and one-sided groups on six blocks, dealt out in two ways."""

from matplotlib.patches import Rectangle

from figures._draw import save
from lab import plot

BLOCKS, TILE, COLUMNS = 6, 64, 2  # Rows of a tile, and of a step of a sum; tiles side by side, in both.
SIZES = {  # Rows of nine groups, 1728 together.
    "equal": (192,) * 9,
    "uneven": (60, 400, 120, 50, 380, 250, 130, 250, 88),
    "one has all": (0, 1728, 0, 0, 0, 0, 0, 0, 0),
}


def products(sizes):
    """(block, start, length, its useful part, group) of each tile: all take as long as another."""
    tiles = [
        (group, min(TILE, size - first) / TILE)
        for group, size in enumerate(sizes)
        for first in range(0, size, TILE)
        for _ in range(COLUMNS)
    ]
    return [(i % BLOCKS, i // BLOCKS, 1, useful, group) for i, (group, useful) in enumerate(tiles)]


def sums(sizes, largest_first: bool):
    """The same of tiles that take a step for each 64 rows of their group, in turn or to and fro."""
    order = range(len(sizes))
    if largest_first:
        order = sorted(order, key=lambda group: -sizes[group])
    done, placed = [0] * BLOCKS, []
    for i, group in enumerate(group for group in order for _ in range(COLUMNS)):
        turn, block = divmod(i, BLOCKS)
        block = BLOCKS - 1 - block if largest_first and turn % 2 else block
        placed.append((block, done[block], -(-sizes[group] // TILE), sizes[group] / TILE, group))
        done[block] += placed[-1][2]
    return placed


def draw():
    rows = (
        ("product; time in tiles", products),
        ("sums, in the order of the groups; time in steps of 64 rows", lambda sizes: sums(sizes, False)),
        ("sums, the largest first, to and fro; time in steps of 64 rows", lambda sizes: sums(sizes, True)),
    )
    with plot.figure(7.8, 5.6, nrows=3, ncols=3, sharey=True) as (fig, axes):
        for row, (name, place) in zip(axes, rows, strict=True):
            placed_of = {kind: place(sizes) for kind, sizes in SIZES.items()}
            ends = {kind: max(start + length for _, start, length, *_ in placed) for kind, placed in placed_of.items()}
            for ax, (kind, placed) in zip(row, placed_of.items(), strict=True):
                for block, start, length, useful, group in placed:
                    colour, at = plot.COLOURS[group % 6], (start, block - 0.42)
                    ax.add_patch(Rectangle(at, length, 0.84, facecolor=colour, alpha=0.2))
                    ax.add_patch(Rectangle(at, useful, 0.84, facecolor=colour, alpha=0.6))
                    ax.add_patch(Rectangle(at, length, 0.84, facecolor="none", edgecolor=plot.CARD, linewidth=0.8))
                    if length:
                        ax.text(start + length / 2, block, str(group), ha="center", va="center", fontsize=6.5)
                share = sum(useful for *_, useful, _ in placed) / ends[kind] / BLOCKS
                ax.axvline(ends[kind], color=plot.BOUND, linewidth=1.3)
                ax.set_title(f"{kind}: {share:.0%} useful", fontsize=8)
                ax.set(xlim=(0, 1.03 * max(ends.values())), ylim=(BLOCKS - 0.4, -0.6))
                ax.set_yticks(range(BLOCKS), [f"block {block}" for block in range(BLOCKS)], fontsize=7)
                ax.tick_params(axis="x", labelsize=7)
                ax.grid(visible=False)
            row[1].set_xlabel(name, fontsize=8)
    return fig


if __name__ == "__main__":
    save(__file__, draw())

"""Tiles of one SM whose sums take turns in one accumulator, or in two: when the tensor cores wait for the store."""

from figures._draw import lanes, save
from figures.pipelining.pipeline_schedule import MULTIPLY, bar
from lab import plot

TILES, MULTIPLIES, STORES = 4, 3.0, 1.0  # Tiles, and the times of a tile's products and of its store; schematic.


def schedule(accumulators: int, tiles: int = TILES, multiply: float = MULTIPLIES, store: float = STORES):
    """(start of the products, their end, end of the store) of each tile."""
    run = []
    for tile in range(tiles):
        start = run[-1][1] if run else 0.0
        if tile >= accumulators:
            start = max(start, run[tile - accumulators][2])  # That tile has left the accumulator.
        summed = start + multiply
        run.append((start, summed, max(summed, run[-1][2] if run else 0.0) + store))
    return run


def draw():
    with plot.figure(height=3.4, nrows=2, sharex=True) as (fig, axes):
        for ax, accumulators in zip(axes, (1, 2), strict=True):
            for tile, (start, summed, stored) in enumerate(run := schedule(accumulators)):
                shade = dict(alpha=0.65) if tile % accumulators else {}
                bar(ax, 0, start, summed, f"tile {tile}, sums {tile % accumulators}", MULTIPLY, **shade)
                bar(ax, 1, stored - STORES, stored, f"tile {tile}", plot.COLOURS[1])
            ax.axvline(run[-1][2], color=plot.BOUND, linewidth=1.2)
            plural = "s: the store of a tile runs under the products of the next" if accumulators > 1 else ""
            lanes(ax, ("tensor cores", "store"), f"{accumulators} accumulator{plural}")
        axes[-1].set_xlim(0, 16.6)
        axes[-1].set_xlabel("time (schematic)")
    return fig


if __name__ == "__main__":
    save(__file__, draw())

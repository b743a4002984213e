"""Tiles shared out from the start, or handed out by hardware to whichever block is free; one SM is slower."""

from figures._draw import lanes, save
from figures.pipelining.pipeline_schedule import LOAD, MULTIPLY, bar
from lab import plot

SMS, TILES = 4, 16
TIMES = (1.0, 1.0, 1.6, 1.0)  # Time of a tile on each SM: the third one is slower.


def schedule(dynamic: bool, tiles: int = TILES, times=TIMES):
    """(tile, SM, start, end) of each tile. Blocks that are free at the same time take tiles in the order of SMs."""
    free, run = [0.0] * len(times), []
    for tile in range(tiles):
        sm = min(range(len(times)), key=lambda sm: (free[sm], sm)) if dynamic else tile % len(times)
        run.append((tile, sm, free[sm], free[sm] + times[sm]))
        free[sm] += times[sm]
    return run


def draw():
    cases = (
        (False, "from the start: block b has the tiles b, b + 4, b + 8 ...; the slow SM decides"),
        (True, "launch control: a block that has done a tile cancels the launch of the next one, and does its tile"),
    )
    with plot.figure(height=4.3, nrows=2, sharex=True) as (fig, axes):
        for ax, (dynamic, title) in zip(axes, cases, strict=True):
            run = schedule(dynamic)
            for tile, sm, start, end in run:
                bar(ax, sm, start, end, f"{tile}", LOAD if tile < SMS else MULTIPLY)
            ax.axvline(max(end for *_, end in run), color=plot.BOUND, linewidth=1.2)
            lanes(ax, [f"SM {sm}" for sm in range(SMS)], title)
        axes[-1].set_xlim(0, 6.7)
        axes[-1].set_xlabel("time (schematic); pale: tiles of blocks that were really launched")
    return fig


if __name__ == "__main__":
    save(__file__, draw())

"""One SM and three tiles: a block a tile, one block that loops, and one that stores while it multiplies."""

from matplotlib.patches import Patch

from figures._draw import lanes, save
from figures.pipelining.pipeline_schedule import LOAD, MULTIPLY, bar
from lab import plot

TILES, MULTIPLIES = 3, 3.0  # Tiles, and the time of one tile's products.
START, FIRST_LOAD, ROUND, WRITE, AHEAD = 0.5, 0.7, 0.35, 1.1, 0.75
STORE, BEGIN = plot.COLOURS[1], plot.FAINT


def schedule(persistent: bool, overlap: bool) -> list[tuple[str, float, float]]:
    """(lane and text, start, end) of each event. The times are invented: they show the order, not a measurement."""
    events, time = [], 0.0
    loaded = None  # When the next tile's first step is there, if its load began early.
    for tile in range(TILES):
        if not persistent or tile == 0:
            events.append(("memory|start", time, time + START))
            time += START
        begin = time if loaded is None else loaded[0]
        first = max(time, begin + FIRST_LOAD)
        end = first + MULTIPLIES
        events.append((f"memory|load {tile}", begin, end - AHEAD))
        events.append((f"compute|multiply {tile}", first, end))
        events.append(("compute|round", end, end + ROUND))
        events.append((f"TMA store|write {tile}", end + 0.15, end + ROUND + WRITE))
        loaded = (end - AHEAD,) if persistent else None
        time = end + ROUND + (0 if overlap else WRITE)
    return events


def draw():
    cases = (
        (False, False, "one block a tile: each starts, and loads its first steps, while nothing multiplies"),
        (True, False, "persistent: the next tile's first steps are loaded during the store; the store is waited for"),
        (True, True, "persistent, the store overlapped: the write to o goes on during the next tile's products"),
    )
    names = ("memory", "compute", "TMA store")
    colours = {"load": LOAD, "multiply": MULTIPLY, "round": STORE, "write": STORE, "start": BEGIN}
    with plot.figure(height=5.7, nrows=3, sharex=True) as (fig, axes):
        for ax, (persistent, overlap, title) in zip(axes, cases, strict=True):
            run = schedule(persistent, overlap)
            for name, start, end in run:
                lane, text = name.split("|")
                shown = "" if text in ("round", "start") else text
                bar(ax, names.index(lane), start, end, shown, colours[text.split()[0]])
            last = ax.axvline(max(end for _, _, end in run), color=plot.BOUND, linewidth=1.2, label="all is written")
            lanes(ax, names, title)
        axes[-1].set_xlim(0, 17.2)
        axes[-1].set_xlabel("time (schematic)")
        parts = (BEGIN, "a block starts"), (STORE, "compute rounds into shared memory, TMA writes to o")
        known = [*(Patch(color=colour, label=text) for colour, text in parts), last]
        fig.legend(handles=known, fontsize=8, loc="outside lower center", ncols=3)
    return fig


if __name__ == "__main__":
    save(__file__, draw())

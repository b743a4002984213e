"""The slots of a ring over time, with one slot and with three: a simulation in units of one load's time."""

from figures._draw import save
from lab import plot

LOAD, NEGATE, DRAIN = 1.0, 0.22, 0.3  # A tile's load, its time in registers, and the TMA's reading of it.
LOAD_COLOUR, NEGATE_COLOUR, DRAIN_COLOUR = plot.COLOURS[4], plot.OURS, plot.COLOURS[1]


def schedule(stages: int, tiles: int) -> list[tuple[float, float, float]]:
    """For each tile: when its load starts, when the work on it starts, and when its slot is free again.

    The refill of a slot is issued one tile late (at once if there is one slot only), as in the chapter's kernel.
    """
    lag = min(1, stages - 1)
    start, work, free, now = {i: 0.0 for i in range(stages)}, {}, {}, 0.0
    for i in range(tiles):
        work[i] = max(now, start[i] + LOAD)
        now = work[i] + NEGATE
        free[i] = now + DRAIN
        if i >= lag:
            now = max(now, free[i - lag])
            start[i - lag + stages] = now
    return [(start[i], work[i], free[i]) for i in range(tiles)]


def draw():
    until = schedule(1, 4)[-1][2]
    with plot.figure(height=4.1, nrows=2, sharex=True, height_ratios=(1.35, 3)) as (fig, axes):
        for ax, stages in zip(axes, (1, 3), strict=True):
            shown = schedule(stages, 11 if stages == 3 else 4)
            for i, (start, work, free) in enumerate(shown):
                for left, right, colour, text in (
                    (start, start + LOAD, LOAD_COLOUR, f"load {i}"),
                    (work, work + NEGATE, NEGATE_COLOUR, f"{i}"),
                    (work + NEGATE, free, DRAIN_COLOUR, f"{i}"),
                ):
                    ax.barh(i % stages, right - left, left=left, height=0.74, color=colour, edgecolor=plot.CARD)
                    ink = plot.CARD if colour == NEGATE_COLOUR else plot.INK
                    if right <= until + 1e-6:
                        ax.text((left + right) / 2, i % stages, text, ha="center", va="center", fontsize=8, color=ink)
            ax.set_yticks(range(stages), [f"slot {slot}" for slot in range(stages)])
            ax.set_ylim(stages - 0.45, -0.55)
            ax.grid(axis="y", visible=False)
        axes[0].set_title("one slot: one load in flight, and none while the tile is worked on")
        axes[1].set_title("three slots: while a tile is worked on, the others load")
        for colour, name in (
            (LOAD_COLOUR, "TMA loads"),
            (NEGATE_COLOUR, "the warpgroup works"),
            (DRAIN_COLOUR, "TMA reads, for the store"),
        ):
            axes[0].plot([], [], "s", color=colour, label=name)
        fig.legend(*axes[0].get_legend_handles_labels(), loc="outside lower right", ncols=3, handletextpad=0.2)
        axes[1].set_xlim(0, until)
        axes[1].set_xlabel("time, in units of one load")
    return fig


if __name__ == "__main__":
    save(__file__, draw())

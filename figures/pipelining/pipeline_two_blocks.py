"""Two blocks on one SM take turns at the tensor core: one loads while the other multiplies."""

from figures._draw import save
from figures.pipelining.pipeline_schedule import LOAD, bar
from lab import plot

LOAD_TIME, STEPS = 1.3, 4
COLOURS = (plot.OURS, plot.COLOURS[2])


def run(blocks: int) -> list[tuple[int, int, float, float, float]]:
    """(block, step, load start, product start, product end) of blocks that have one slot each."""
    free, waiting = 0.0, [(0.0, block, 0) for block in range(blocks)]
    done = []
    while waiting:
        waiting.sort(key=lambda one: (one[0] + LOAD_TIME, one[1]))
        load_start, block, step = waiting.pop(0)
        start = max(free, load_start + LOAD_TIME)
        free = start + 1
        done.append((block, step, load_start, start, free))
        if step + 1 < STEPS:
            waiting.append((free, block, step + 1))
    return done


def draw():
    with plot.figure(height=3.6, nrows=2, sharex=True, height_ratios=(2, 3)) as (fig, axes):
        for ax, blocks in zip(axes, (1, 2), strict=True):
            for block, step, load_start, start, end in run(blocks):
                bar(ax, block, load_start, load_start + LOAD_TIME, f"load {step}", LOAD)
                bar(ax, block, start, end, f"{step}", COLOURS[block])
                bar(ax, blocks, start, end, f"{step}", COLOURS[block])
            ax.set_yticks(range(blocks + 1), [*(f"block {block}" for block in range(blocks)), "tensor core"])
            ax.set_ylim(blocks + 0.6, -0.6)
            ax.grid(axis="y", visible=False)
            ax.set_title(f"{blocks} block{'s' * (blocks > 1)} on the SM, one slot each")
        axes[1].set_xlabel("time, in units of one step's product")
    return fig


if __name__ == "__main__":
    save(__file__, draw())

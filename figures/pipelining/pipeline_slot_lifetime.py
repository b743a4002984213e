"""Owners of a ring slot in time: three ways to release it, one of them a race that nothing reports."""

from figures._draw import save
from figures.pipelining.pipeline_schedule import LOAD, MULTIPLY, bar, schedule
from lab import plot

STAGES, STEPS, LOAD_TIME, GAP = 3, 9, 1.5, 0.3
CASES = (
    (0, 0, "delay_release=0, wgmma_wait(0): right, but the tensor core idles between two steps"),
    (1, 1, "delay_release=1, wgmma_wait(1): right; product i + 1 is queued before product i ends"),
    (0, 1, "delay_release=0, wgmma_wait(1): WRONG; TMA writes where the tensor core still reads"),
)


def draw():
    with plot.figure(height=6.6, nrows=3, sharex=True) as (fig, axes):
        for ax, (delay_release, wait, title) in zip(axes, CASES, strict=True):
            _lanes(ax, schedule(STEPS, STAGES, delay_release=delay_release, wait=wait, load=LOAD_TIME, gap=GAP))
            ax.set_title(title, fontsize=9)
        axes[-1].set_xlim(0, 8.8)
        axes[-1].set_xlabel("time, in units of one step's product")
    return fig


def _lanes(ax, run):
    """Light: a copy is in flight. Dark: the tensor core reads. Orange: both."""
    for i, step in enumerate(run):
        slot = i % STAGES
        reader_end = run[i - STAGES].mma_end if i >= STAGES else 0.0
        clash = step.load_start < reader_end
        if clash:
            bar(ax, slot, step.load_start, reader_end, f"{i - STAGES} and {i}", plot.BOUND)
        bar(ax, slot, max(step.load_start, reader_end), step.load_end, "" if clash else f"load {i}", LOAD)
        if i + STAGES >= len(run) or run[i + STAGES].load_start >= step.mma_end:
            bar(ax, slot, step.mma_start, step.mma_end, f"{i}", MULTIPLY)
        bar(ax, STAGES, step.mma_start, step.mma_end, f"{i}", MULTIPLY)
    ax.set_yticks(range(STAGES + 1), [*(f"slot {slot}" for slot in range(STAGES)), "tensor core"])
    ax.set_ylim(STAGES + 0.6, -0.6)
    ax.grid(axis="y", visible=False)


if __name__ == "__main__":
    save(__file__, draw())
